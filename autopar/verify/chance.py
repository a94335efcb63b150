"""Random operators as constants on one device, the same as on the ranks (``autopar.dialect.library.STILL``).

Dropout keeps every element and scales it by ``1 / (1 - p)``. The captured backward has that scale built in, so that the plan's graph and
its hash stay the same. Every other draw is a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from autopar.dialect.noise import STILL_SOURCE, draws
from autopar.torch_compat import autocast_on_cpu, replaced_on_cpu, replaced_operators

COMPOSITE = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
"""torch's random operators that are composed of others: below autograd only the others would be seen."""


@contextmanager
def without_chance() -> Iterator[None]:
    """Within it, torch's random operators draw on the CPU the constants that the ranks draw, and autocast is the CPU's."""
    still = draws(STILL_SOURCE)
    with ExitStack() as stack:
        for name in (*COMPOSITE, *(f"{name}_" for name in COMPOSITE)):
            stack.enter_context(replaced_on_cpu(name, still[getattr(torch.ops.aten, name).default]))
        stack.enter_context(replaced_operators(still))
        stack.enter_context(autocast_on_cpu())
        yield
