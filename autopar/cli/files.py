"""Files that commands read and write: plans of every schema; whole or not at all, ``-`` for the standard streams."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.terminal import note, out_document
from autopar.errors import FileError, UsageError
from autopar.files import STANDARD, begins_with, check_writable, read_text, write_whole
from autopar.unread import collector_paused

if TYPE_CHECKING:
    from autopar.pareto import Ladder
    from autopar.pipeline_plan import PipelinePlan
    from autopar.plan import Plan

__all__ = ["check_apart", "check_writable", "read_ladder", "read_pipeline", "read_plan", "write_result", "write_text"]


def read_plan(path: Path, *, in_part: bool = False) -> Plan:
    """The plan in a file, ``in_part`` as for ``load``; what was made anew of an older one is said on stderr. Raises FileError."""
    from autopar.recording import OldPlanWarning, load

    with warnings.catch_warnings(record=True) as said, collector_paused():
        warnings.simplefilter("always", OldPlanWarning)
        plan = load(path, in_part=in_part)
        gc.freeze()  # for a command's short life: rows have no cycles, and need not be looked through again
    for warning in said:
        if issubclass(warning.category, OldPlanWarning):
            note(f"note: {warning.message}")
    return plan


def read_pipeline(path: Path) -> PipelinePlan | None:
    """The pipeline's plan in a file; None where the file is of another kind, or is not there."""
    from autopar.pipeline_plan import PIPELINE_SCHEMA, PipelinePlan

    if not begins_with(path, PIPELINE_SCHEMA):
        return None
    return PipelinePlan.from_json(read_text(path, "the plan", "give the path of a file written by autopar plan -o"), str(path))


def read_ladder(path: Path) -> Ladder | None:
    """The ladder of memory limits in a file; None where the file is of another kind, or is not there."""
    from autopar.pareto import PARETO_SCHEMA, Ladder

    if not begins_with(path, PARETO_SCHEMA):
        return None
    return Ladder.from_json(read_text(path, "the ladder", "give the path of a file written by autopar plan --pareto -o"), str(path))


def check_apart(one: Path | None, other: Path | None) -> None:
    """Raises UsageError: two results would be written to the same place, the second over the first."""
    if one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other):
        raise UsageError(f"two results would be written to {one}", "name a file for each")


def write_text(path: Path, text: str) -> None:
    """Writes ``text``, to the standard output for ``-``, and otherwise says so on stderr. Raises FileError."""
    if path == STANDARD:
        out_document(text)
        return
    write_whole(path, text)
    note(f"wrote {path}")


def write_result(path: Path, text: str) -> None:
    """As ``write_text``, for results that took long to make. Where ``path`` has no room, the text goes to the system's temporary folder, or
    is printed. Raises FileError, which says where it is."""
    try:
        write_text(path, text)
    except FileError as error:
        raise FileError(f"{error.message}; {_kept(path, text)}", error.hint) from error


def _kept(path: Path, text: str) -> str:
    try:
        other = Path(tempfile.gettempdir()) / f"{path.stem}-{os.getpid()}{path.suffix}"
        write_whole(other, text)
    except (FileError, OSError):
        out_document(text)
        return "the result is printed"
    return f"the result is kept in {other}"
