"""Search result -> plan file, and plan file -> schedule.

writing        result of a search -> Plan
search_record  the phases of the search, for the plan
replaying      Plan and the model's graph -> Schedule, as the file says it
loading        a file -> Plan
older          a file of the older schema -> Plan, scheduled on load

Names resolve on first use: what shows a plan needs no passes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.recording.loading import OldPlanWarning, load
    from autopar.recording.replaying import first_difference, graph_of, machine_of, replay
    from autopar.recording.writing import record, torch_version

__all__ = ["OldPlanWarning", "first_difference", "graph_of", "load", "machine_of", "record", "replay", "torch_version"]

_HOME = {
    "OldPlanWarning": "loading", "load": "loading", "first_difference": "replaying", "graph_of": "replaying", "machine_of": "replaying",
    "replay": "replaying", "record": "writing", "torch_version": "writing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autopar.recording' has no attribute {name!r}")
    value = getattr(import_module(f"autopar.recording.{_HOME[name]}"), name)
    globals()[name] = value
    return value
