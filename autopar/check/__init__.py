"""Recomputes a plan's legality, step, cost and peak memory from the file alone, and says where it differs.

Shares no code with the search, the solvers, the schedule or the recording of plans: what is wrong there must not be wrong here as well.
It stands on the rules, the reshard planner and the cost model, which are tested against the real operators and real collectives.

walk        what the rows decide: specs, strategies, the steps of reshards
parts       what ranks hold of a dim that is cut
blocks      parameters in blocks as operators read them
legs        what a step and a call do to memory and time
calls       the collectives listed against those that follow
order       whether the schedule can be run
overwriting whether what is written over is needed no more
clock       how long it takes
lifetimes   how much memory it holds
stepping    the optimizer's step, with states on the host
totals      every figure
pipelines   a pipeline: its stages, what crosses, the timetable
"""

from __future__ import annotations

from autopar.check.calls import calls as listed_calls
from autopar.check.calls import in_order
from autopar.check.differences import Difference, compare_with_target
from autopar.check.legs import Call
from autopar.check.order import Order
from autopar.check.overwriting import overwriting
from autopar.check.stepping import unhostable
from autopar.check.totals import totals
from autopar.check.walk import Walk
from autopar.cost_models import CostModelError, Hardware, Machine, Mesh, find_optimizer
from autopar.errors import FileError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan

__all__ = ["Difference", "check", "illegal", "illegal_rows"]


def check(plan: Plan, graph: Graph | None = None) -> tuple[Difference, ...]:
    """Every difference between what ``plan`` says and what follows from it, what cannot be run first; empty when it holds.

    Args:
        plan: as read from the file.
        graph: the model captured again, of one microbatch, to compare it with the plan's.

    Raises:
        FileError: a plan whose hardware cannot be read. UsageError: no plan at all.
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"a {type(plan).__name__} is not a plan", "check what autopar.plan or autopar.load returns")
    found = list(compare_with_target(plan, graph)) if graph is not None else []
    try:
        find_optimizer(plan.model.optimizer)
    except CostModelError as error:
        found.append(Difference("model.optimizer", error.message))
        return tuple(found)
    order, wrong = _rows(plan)
    found += wrong
    if not any(not item.runs for item in wrong):
        found += totals(order)
    return tuple(sorted(found, key=lambda item: item.runs))


def illegal(plan: Plan) -> tuple[Difference, ...]:
    """What keeps ``plan`` from being run as it says: specs, strategies, reads, reshards, collectives, schedule; not its prices.

    Raises:
        FileError: a plan whose hardware cannot be read.
    """
    return tuple(item for item in _rows(plan)[1] if not item.runs)


def illegal_rows(plan: Plan) -> tuple[Difference, ...]:
    """What keeps a schedule of ``plan`` from being made: of specs, strategies, reads and reshards.

    Raises:
        FileError: a plan whose hardware cannot be read.
    """
    return tuple(item for item in Walk(plan, _machine(plan)).run() if not item.runs)


def _rows(plan: Plan) -> tuple[Order, list[Difference]]:
    """What is wrong with any row; the later ones are looked at only as far as the earlier ones can be followed."""
    walk, calls = Walk(plan, _machine(plan)), dict[str, Call]()
    found = [*walk.run(), *unhostable(plan, walk.machine, walk.ops)]
    order = Order(walk, calls)
    if not walk.broken:
        found += listed_calls(walk, calls)
        found += in_order(walk, calls)
        found += order.run()
        if all(item.runs for item in found):
            found += overwriting(order)
    return order, found


def _machine(plan: Plan) -> Machine:
    try:
        hardware = Hardware.from_dict(plan.hardware, "the plan's hardware")
        return Machine(Mesh(tuple(plan.mesh.items())), hardware, plan.created_by.cost_model, plan.created_by.execution)
    except CostModelError as error:
        raise FileError(error.message, error.hint) from error
