"""Files that commands read and write: plans of every schema; whole or not at all."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import FileError

if TYPE_CHECKING:
    from autopar.plan import Plan


def read_plan(path: Path) -> Plan:
    """The plan in a file; what was made anew of an older one is said on stderr. Raises FileError."""
    from autopar.recording import OldPlanWarning, load

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", OldPlanWarning)
        plan = load(path)
    for warning in said:
        if issubclass(warning.category, OldPlanWarning):
            print(f"note: {warning.message}", file=sys.stderr)
    return plan


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` and says so on stderr. Raises FileError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}", "choose a path in a folder that exists and can be written") from error
    print(f"wrote {path}", file=sys.stderr)
