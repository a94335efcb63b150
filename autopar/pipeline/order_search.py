"""The order of each stage's actions: written down, or searched by the pipeline's solver."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.clock import StageCosts
from autopar.pipeline.orders import write_lines
from autopar.pipeline_plan import OrderName
from autopar.solvers.pipeline import Mode, PipelineProblem, numbered, solve_pipeline

ORDER_WORK = 0.5
"""Work of the pipeline's solver for the orders of a cut, in units of about one CPU second. Llama-3-70B on 8 stages of 16 microbatches takes
0.02 % less with 1 and with 3, where gradients of weights are apart; whole backwards need 0.2."""


def choose_order(
    name: OrderName, costs: Sequence[StageCosts], microbatches: int, transfer: float, limit: int
) -> Sequence[str] | None:  # fmt: skip
    """Each stage's actions as ``timetable.read_order`` takes them; None where no order found fits in memory.

    Args:
        name: the order. ``gpipe`` and ``1f1b`` are written down, whatever they hold. Backward is whole but in ``zero-bubble``.
        transfer: seconds of what crosses.
        limit: bytes of a rank.
    """
    if name in ("gpipe", "1f1b"):
        return write_lines(name, len(costs), microbatches)
    modes = tuple(
        (Mode(one.forward, one.backward, one.weights, float(one.most_held), float(max(one.peak - one.most_held, 0))),) for one in costs
    )
    problem = PipelineProblem(modes, len(modes), microbatches, transfer=transfer, split=name == "zero-bubble", limit=float(limit))
    solution = solve_pipeline(problem, work=ORDER_WORK)
    if solution.plan is None:
        return None
    return [" ".join(f"{one.kind}{one.microbatch}" for one in numbered(line)) for line in solution.plan.orders]
