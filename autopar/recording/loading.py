"""A file -> Plan: the one way in for Python, the command line and compile.

A file of schema ``autopar.plan/1`` has no schedule, and its objective is a sum in sequence. It is scheduled by the same passes as a new
plan; its objective becomes the step of that schedule. Its bound was one on the sum, which says nothing about a step, so none is left.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from autopar.errors import FileError
from autopar.files import loads, name_of, read_text
from autopar.plan import Plan

OLD_SCHEMA = "autopar.plan/1"


class OldPlanWarning(UserWarning):
    """A plan file of an older schema was scheduled on load; its bound on the sum is dropped."""


def load(path: str | os.PathLike[str], *, in_part: bool = False) -> Plan:
    """Reads a plan file, of this schema or the one before.

    Args:
        in_part: the long tables only when they are asked for, which raises FileError then.

    Raises:
        FileError: naming the place that is truncated, of another schema, of the wrong type, or (of an old file) cannot be scheduled.
    """
    text, name = read_text(path, "the plan", _hint(path)), name_of(path)
    try:
        return Plan.from_json_in_part(text, name) if in_part else Plan.from_json(text, name)
    except FileError:
        old = _old(text)
        if old is None:
            raise
    from autopar.recording.older import schedule  # for start-up time

    plan, words = schedule(old, name)
    warnings.warn(words, OldPlanWarning, stacklevel=2)
    return plan


def _hint(path: object) -> str:
    """What to give in place of what cannot be read: the plan in a program's folder, or that of a model that is named in its place."""
    if isinstance(path, str | os.PathLike):
        inside, text = os.path.join(path, "plan.json"), str(path)
        if os.path.isfile(inside):
            return f"give the plan in this folder: {inside}"
        if text.startswith(("zoo:", "hf:")) or ".py:" in text:
            return f"make its plan first: autopar plan {text} --mesh dp=2,tp=4 -o plan.json"
    return "give the path of a file written by autopar plan -o"


def _old(text: str) -> dict[str, Any] | None:
    """The data of a file of the old schema."""
    try:
        data = loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("schema") == OLD_SCHEMA else None
