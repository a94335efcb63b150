"""Ranges for torch.profiler: layers, and the collectives that they start and wait for.

A segment has a second text with them (``code``), which runs while a profiler records and never else.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from autopar.schedule import Instruction, Schedule
from autopar.schedule.collectives import Collective


class Ranges:
    """The ranges that are open in one run of a segment: that of a layer, within it that of a collective."""

    def __init__(self) -> None:
        self._layer, self._call = "", None
        self._open: list[Any] = []

    def layer(self, name: str) -> None:
        """What follows is of this layer."""
        if name != self._layer:
            self.close()
            self._layer = name
            self._begin(name)

    def begin_call(self, name: str) -> None:
        """A collective's start or wait begins."""
        self._begin(name)

    def end_call(self) -> None:
        """It ends."""
        self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Ends what is open."""
        self._layer = ""
        while self._open:
            self.end_call()

    def _begin(self, name: str) -> None:
        made = record_function(name)
        made.__enter__()
        self._open.append(made)


def layer_of(schedule: Schedule, item: Instruction) -> str:
    """The range of a run: its phase, and the module it is of, as far as the first number in its path; a module's own code has no name."""
    parts = schedule.operations[item.of].op.module.split(".")
    end = next((place + 1 for place, part in enumerate(parts) if part.isdecimal()), 1)
    return f"autopar {item.phase} {'.'.join(parts[:end]) or 'model'}"


def call_of(schedule: Schedule, item: Instruction) -> str:
    """The range of a start or a wait: the collective, its axes, and the tensors that it is for."""
    call: Collective = schedule.collectives[item.of]
    names, more = schedule.machine.mesh.names, len(call.parts) - 1
    axes = ",".join(dict.fromkeys(names[sub.axis] for sub in call.axes))
    tensor = schedule.values[call.parts[0].target].tensor
    return f"autopar {item.kind} {call.kind}{f' over {axes}' if axes else ''}: {tensor}{f' and {more} more' if more else ''}"
