"""``find_plan``: solve, schedule, simulate, learn what is exposed, solve again; and beside that the bound.

Under a model of time the objective is the step of the schedule. Each round prices the integer problem by the exposure in the best schedule
so far (``overlap``), or by weights whose optimum bounds every step (``surrogate``). Every solution is scheduled and simulated, and the best
is kept. Baselines go through the same passes first. Under the communication model nothing overlaps: the problem in sequence is solved once,
and its bound is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace

from autopar.cost_models import Machine
from autopar.effort import DEFAULT_EFFORT, WORK_SECONDS, Budget, Effort, Meter, check_effort
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.garbage import young_garbage_only
from autopar.graph import Graph
from autopar.schedule import Assignment
from autopar.search.baselines.scheduled import ScheduledBaselines
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import BudgetExhausted
from autopar.search.driver.candidates import merge_candidates
from autopar.search.driver.mesh_search import MeshSearch
from autopar.search.driver.result import SearchResult, Shared
from autopar.search.driver.state import Progress, SearchRequest
from autopar.search.settings import PROOF, USED_UP_SHARE, WRITING_SECONDS
from autopar.search.telemetry import Telemetry
from autopar.search.thresholds import USUAL_THRESHOLDS, Thresholds
from autopar.solvers import TooLargeError


@young_garbage_only()
def find_plan(
    graph: Graph,
    machine: Machine,
    *,
    memory_bytes: int | None = None,
    optimizer: str = "adamw",
    constraints: Mapping[str, str] | None = None,
    time_limit: float = 60.0,
    gap: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    baselines: bool = True,
    recompute: bool = False,
    effort: Effort = DEFAULT_EFFORT,
    effort_share: float = 1.0,
    shared: Shared | None = None,
    relaxed: SearchResult | None = None,
    only_relaxed: bool = False,
    candidates: int = 1,
    skip: Set[str] = frozenset(),
    thresholds: Thresholds = USUAL_THRESHOLDS,
) -> SearchResult:
    """The fastest schedule of ``graph`` on ``machine`` within ``memory_bytes`` per rank (default: what the hardware leaves to plans).

    Args:
        constraints: pins (``resolve_pins``).
        time_limit: seconds after which the search is cut off.
        gap: proved gap at which the search stops; ``PROOF`` when not given.
        progress: called with incumbent, bound, gap and elapsed seconds.
        baselines: whether plans written by hand are scheduled.
        recompute: backward may recompute tensors of forward instead of reading kept ones. Without effect where only collectives have a
            price, since recomputation would be free.
        effort_share: part of the effort's work for this search, where several searches make one plan.
        shared: spaces, models and plans of earlier searches under other limits; this search adds its own.
        relaxed: the result of the same search without some of the pins.
        only_relaxed: whether only its strategies are searched, without a bound: a draft, in 40 % of the CPU seconds.
        candidates: number of distinct plans in the result, plans by hand among them.
        skip: names of phases that are left out.
        thresholds: sizes at which the search changes its method; others than the usual ones are for tests.

    Raises:
        UsageError: a pin names nothing or is illegal, or tensors are too large to be counted.
        InfeasibleError: nothing fits; says the least memory known to do, and the biggest tensors.
        TimeLimitError: the time limit passed, or the work was used up, without a plan.
    """
    limit = int(machine.hardware.usable_bytes if memory_bytes is None else memory_bytes)
    steps = optimizer if graph.mode == "train" else "none"
    meter = Meter(time_limit, WRITING_SECONDS * len(graph.ops))
    telemetry = Telemetry(meter, frozenset(skip))
    budget = Budget(meter, WORK_SECONDS[check_effort(effort)] * effort_share)
    first = budget.at_most(WORK_SECONDS[DEFAULT_EFFORT] * effort_share)
    asked = SearchRequest(
        limit, steps, first, PROOF if gap is None else gap, seed, progress, baselines, recompute, telemetry, thresholds=thresholds,
        candidates=candidates, bounds=[] if relaxed is None else [relaxed.own_seconds / graph.microbatches],
    )
    pins = resolve_pins(graph, machine.mesh, constraints or {})
    shared = shared or Shared()
    known = list(shared.known)
    search = MeshSearch(graph, machine, pins, asked, shared, known)
    plan = relaxed.scheduled_plan.assignment if relaxed is not None and relaxed.scheduled_plan is not None else None
    try:
        if only_relaxed:
            assert plan is not None
            found = _search_relaxed(search, plan)
        else:
            found = search.run(plan, math.inf if relaxed is None else relaxed.seconds)
            if budget.ends > first.ends and found.gap > asked.gap and not found.interrupted:
                found = _search_on(search, found, budget)
        used_up = meter.spent >= USED_UP_SHARE * budget.ends
        return shared.remember(replace(found, trace=tuple(telemetry.records), effort=effort, cut=meter.cut, used_up=used_up))
    except InfeasibleError:
        shared.known += known[len(shared.known) :]
        raise
    except BudgetExhausted:
        what, hint = meter.used_up()
        raise TimeLimitError(f"{what}: enumerating and pricing choices took longer", hint) from None
    except TooLargeError as error:
        largest = max(graph.tensors.values(), key=lambda tensor: tensor.bytes)
        message = f"memory is counted up to 2^62 bytes, and {largest.name} alone, {largest.dtype}{list(largest.shape)}, has {largest.bytes}"
        raise UsageError(message, "check the sizes of the model and of the example inputs") from error


def _search_on(search: MeshSearch, found: SearchResult, budget: Budget) -> SearchResult:
    """A plan at least as good as that of an ended search: a second search begins with it and has the rest of the work.

    One long search spends more on each phase and ends at another local optimum. Llama-3-8B in 7 GiB took 1 % longer so, an eight-layer
    DeepSeek-V3 4 %. Ctrl-C leaves the plan of the first search.
    """
    bounds = [*search.asked.bounds, found.bound_seconds / search.graph.microbatches]
    telemetry = search.asked.telemetry.within("again")
    asked = replace(search.asked, budget=budget, bounds=bounds, telemetry=telemetry, baselines=False)
    known = [*search.known, *([] if found.scheduled_plan is None else [found.scheduled_plan])]
    try:
        other = replace(search, asked=asked, known=known, written=ScheduledBaselines()).run()
    except (InfeasibleError, TimeLimitError, BudgetExhausted):
        return found
    except KeyboardInterrupt:
        return replace(found, interrupted=True)
    solver = found.solver if other.solver == "known" else other.solver
    candidates = merge_candidates([*found.candidates, *other.candidates], asked.candidates) if found.candidates else ()
    return replace(other, baselines=found.baselines, solver=solver, candidates=candidates)


def _search_relaxed(search: MeshSearch, relaxed: Assignment) -> SearchResult:
    """The best plan with the strategies of one that need not keep the pins.

    Raises:
        InfeasibleError: none fits. TimeLimitError: none was found in time.
    """
    found = search.search_pinned([relaxed])
    if found is None and search.asked.budget.over:
        raise TimeLimitError(*search.asked.budget.meter.used_up())
    if found is None:
        raise InfeasibleError(f"no plan with the given strategies fits in {search.asked.limit} bytes a rank", "search among all strategies")
    return found
