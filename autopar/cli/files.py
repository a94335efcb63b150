"""Files that commands read and write: plans of every schema; whole or not at all, ``-`` for the standard streams."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.terminal import note, out
from autopar.files import STANDARD, check_writable, write_whole

if TYPE_CHECKING:
    from autopar.plan import Plan

__all__ = ["check_writable", "read_plan", "write_text"]


def read_plan(path: Path) -> Plan:
    """The plan in a file; what was made anew of an older one is said on stderr. Raises FileError."""
    from autopar.recording import OldPlanWarning, load

    gc.disable()  # rows have no cycles: the collector would go through all of a large plan again and again
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", OldPlanWarning)
        plan = load(path)
    gc.freeze()
    gc.enable()
    for warning in said:
        if issubclass(warning.category, OldPlanWarning):
            note(f"note: {warning.message}")
    return plan


def write_text(path: Path, text: str) -> None:
    """Writes ``text``, to the standard output for ``-``, and otherwise says so on stderr. Raises FileError."""
    if path == STANDARD:
        out(text, end="")
        return
    write_whole(path, text)
    note(f"wrote {path}")
