"""When each instruction of a plan happens: its own schedule simulated, in the order and with the seconds of the file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.cost_models import CostModelError, Hardware
from autopar.errors import FileError
from autopar.plan import Plan
from autopar.rows import InstructionPlan
from autopar.schedule import Instruction, Slot, simulate


@dataclass(frozen=True)
class Flight:
    """One collective call between its start and its wait.

    Args:
        start, wait: the two instructions.
        after, before: the operators that run just before the start and just after the wait, empty when there is none.
        begin, end: when the link is busy with it, in seconds.
        stalled: seconds for which the operators stand still at its wait.
    """

    start: InstructionPlan
    wait: InstructionPlan
    after: str
    before: str
    begin: float
    end: float
    stalled: float


@dataclass(frozen=True)
class SimulatedStep:
    """The simulated step of a plan. Raises FileError: a schedule that waits for what was not started, or hardware that cannot be read."""

    plan: Plan

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """When each run, start and wait happens; of several microbatches in the last."""
        return self.of(self.plan.microbatches - 1)

    def of(self, microbatch: int) -> tuple[Slot, ...]:
        """The slots of one microbatch, from its own beginning."""
        try:
            hardware = Hardware.from_dict(self.plan.hardware, "the plan's hardware")
        except CostModelError as error:
            raise FileError(error.message, error.hint) from error
        try:
            rows = (Instruction.of_row(row) for row in self.plan.schedule if row.microbatch <= microbatch)
            issue = hardware.seconds_to_issue(self.plan.created_by.execution)
            return simulate(rows, hardware.overlap_slowdown, overlaps=hardware.launch_overlaps, issue=issue)
        except KeyError as missing:
            hint = "autopar check lists all that is wrong with the plan; undo the edit, or plan again"
            raise FileError(f"the plan's schedule waits for {missing}, which it has not started before", hint) from missing

    @cached_property
    def flights(self) -> dict[str, Flight]:
        """The calls that are started and waited for, by id."""
        rows = self.plan.schedule
        slots = {(slot.instruction.kind, slot.instruction.of): slot for slot in self.slots}
        starts = {row.of: place for place, row in enumerate(rows) if row.kind == "start"}
        following, after, before = "", "", {}
        for place in reversed(range(len(rows))):
            if rows[place].kind == "run":
                following = rows[place].of
            elif rows[place].kind == "wait":
                before[rows[place].of] = place, following
        found: dict[str, Flight] = {}
        for row in rows:
            if row.kind == "run":
                after = row.of
            elif row.kind == "start" and row.of in before:
                place, reader = before[row.of]
                moving = slots["start", row.of]
                stalled = slots["wait", row.of].stalled
                found[row.of] = Flight(rows[starts[row.of]], rows[place], after, reader, moving.begin, moving.end, stalled)
        return found
