"""The order of each stage's actions: written down, or searched by the pipeline's solver."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.clock import StageCosts
from autopar.pipeline.cutting import Stages
from autopar.pipeline.orders import write_lines
from autopar.pipeline.solving import solve
from autopar.pipeline.timetable import PARTS, Action, merge_queues, read_order
from autopar.pipeline_plan import OrderName
from autopar.solvers.pipeline import Mode, PipelineProblem, numbered

ORDER_WORK = 0.5
"""Work of the pipeline's solver for the orders of a cut, in units of about one CPU second. Llama-3-70B on 8 stages of 16 microbatches takes
0.02 % less with 1 and with 3, where gradients of weights are apart; whole backwards need 0.2."""


def choose_order(
    name: OrderName, stages: Stages, costs: Sequence[StageCosts], microbatches: int, transfer: float, limit: int
) -> tuple[Action, ...] | None:  # fmt: skip
    """The timetable; None where no order found fits in memory.

    Args:
        name: the order. ``gpipe`` and ``1f1b`` are written down, whatever they hold. Backward is whole but in ``zero-bubble``.
        stages: for where they run; their graphs may be missing.
        transfer: seconds of what crosses.
        limit: bytes of a rank.
    """
    if name in ("gpipe", "1f1b"):
        return read_order(write_lines(name, len(costs), microbatches))
    positions, split = stages.positions, name == "zero-bubble"
    modes = tuple((Mode(one.forward, one.backward, one.weights, float(one.most_held), rest),)
                  for one, rest in zip(costs, _rest_of(costs, positions), strict=True))  # fmt: skip
    problem = PipelineProblem(
        modes, positions, microbatches, len(costs) // positions, transfer=transfer, split=split, limit=float(limit)
    )  # fmt: skip
    solution = solve(problem, ORDER_WORK)
    if solution.plan is None:
        return None
    return merge_queues([
        [Action(one.chunk, PARTS[one.kind], one.microbatch) for one in numbered(line)] for line in solution.plan.orders
    ])  # fmt: skip


def _rest_of(costs: Sequence[StageCosts], positions: int) -> list[float]:
    """Bytes that the solver takes as resting. Each position's first stage has with them what the largest action there holds for a while."""
    found = [float(cost.rest) for cost in costs]
    for position in range(positions):
        found[position] += max(max(cost.peak - cost.rest - cost.most_held, 0) for cost in costs[position::positions])
    return found
