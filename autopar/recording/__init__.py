"""The two ways across the border between values in memory and the plan file.

writing     what a search found -> Plan
replaying   Plan and the model's graph -> Schedule, as the file says it
loading     a file -> Plan; files of the schema before are scheduled on the way
"""

from __future__ import annotations

from autopar.recording.loading import OldPlanWarning, load
from autopar.recording.replaying import first_difference, graph_of, machine_of, replay
from autopar.recording.writing import record, torch_version

__all__ = ["OldPlanWarning", "first_difference", "graph_of", "load", "machine_of", "record", "replay", "torch_version"]
