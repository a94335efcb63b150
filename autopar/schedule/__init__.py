"""Assignment -> Schedule: the only place that derives order, overlap and lifetimes. No torch.

The values:
assignment     Assignment: the decisions of a search
collectives    Collective: one call, and the memory that it holds
instructions   Instruction, Segment, Limits
schedule       Schedule: the list with the values behind its names
text           the list as text, which parses back

The passes, in their order (``passes``), by their limits:
sharing        share: equal reshards once
early_reduction
               reduce_early: a gradient's reduction as two reshards, between which microbatches may be summed
ordering       order: the list in program order, second runs in their place
deferred_loss  calls that are waited for when the loss is read
gap_filling    fill_gaps: a list scheduler for operators on no long chain
bucketing      bucket: small collectives in one call
prefetching    prefetch: early starts, late waits (``windows``, ``headroom``)
accumulating   accumulate: gradients of microbatches summed, reduced once or in each
in_place       assign_in_place: results over tensors that nobody needs any more
freeing        free: the end of each value
legality       the predicates that hold after each pass
splitting      split_backward: of a pipeline's stage, what is sent first, gradients of weights behind it

Seconds and bytes of a list:
simulation     the clock: seconds of a step
liveness       peak memory
storages       the memory that values lie in
memory_orders  how values lie in memory, and what operators copy of those that do not lie in order
array_schedule the list as arrays (``tables``)
kernels        the loops over them: clock, memory, moves

The search for the best list of an assignment:
limit_search   best_schedule: coordinate search over the limits, then local search
limit_ladders  the values that are tried for each limit
offloading     values on the host between forward and backward
expanding      expand_as_read: slices of expansions left out
local_search   improve_order: moves, judged by simulating the list
scheduled_plan the plan with its seconds and memory
settings       the numbers of all of these
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
