"""How to plan, as users of other libraries' trainers say it: arguments of ``autopar.plan`` that the trainer does not know itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from typing import Any

from autopar.api import plan
from autopar.errors import UsageError

OF_TRAINERS = frozenset({"model", "args", "kwargs", "mode", "loss", "loss_args", "inputs"})
"""Arguments of ``autopar.plan`` that follow from a trainer's model and data."""


def check_planning(options: Mapping[str, Any], own: Set[str] = frozenset()) -> dict[str, Any]:
    """The arguments of ``autopar.plan`` that a user gave.

    Args:
        own: further ones that follow from the trainer's settings.

    Raises:
        UsageError: none of those that a user may give.
    """
    known = [name for name in inspect.signature(plan).parameters if name not in OF_TRAINERS | own]
    for name in options:
        if name not in known:
            raise UsageError(f"planning has no option {name!r}", f"use some of {', '.join(known)}")
    return dict(options)
