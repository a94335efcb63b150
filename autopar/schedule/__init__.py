"""Assignment -> Schedule: the only place that derives order, overlap and lifetimes. No torch.

assignment     what a search decides
collectives    Collective: one call, and what it holds
instructions   Instruction, Segment: the values
schedule       Schedule: the list with what its names stand for
text           the list as text, which parses back
ordering       order: the list in program order, second runs in their place
deferred_loss  what is waited for when the loss is read
sharing        share: equal reshards once
gap_filling    fill_gaps: what little depends on waits for gaps
windows        where collectives may stand
bucketing      bucket: small collectives in one call
prefetching    prefetch: starts early, waits late
accumulating   accumulate: gradients of microbatches summed, reduced once or in each
local_search   improve_order: moves of what the passes made, judged by the list itself
limit_search   best_schedule: the limits of the passes are tried, then local search
limit_ladders  the values that are tried for each limit
scheduled_plan an assignment's schedule with its seconds and memory
array_schedule a list as arrays
kernels        the loops over them: clock, memory, moves, and their views
settings       the numbers of all passes
headroom       how much may be in flight where memory is short
storages       the memory that values lie in
in_place       assign_in_place: results over what nobody needs any more
freeing        free: when values go
legality       what must hold after each pass
simulation     how long it takes
liveness       how much memory
"""

from autopar.schedule.assignment import AGAIN, OUTPUT, Assignment, Layout
from autopar.schedule.collectives import Collective
from autopar.schedule.instructions import Instruction, Limits, Segment
from autopar.schedule.liveness import Memory, between, memory
from autopar.schedule.passes import make_schedule, ordered, run_passes
from autopar.schedule.schedule import Schedule
from autopar.schedule.simulation import Slot, makespan, simulate, simulated, step_seconds
from autopar.schedule.text import parse

__all__ = [
    "AGAIN", "OUTPUT", "Assignment", "Collective", "Instruction", "Layout", "Limits", "Memory", "Schedule", "Segment", "Slot", "between",
    "make_schedule", "makespan", "memory", "ordered", "parse", "run_passes", "simulate", "simulated", "step_seconds",
]  # fmt: skip
