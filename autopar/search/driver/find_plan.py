"""``find_plan``: solve, schedule, simulate, learn what is exposed, solve again; and beside that the bound.

Under a model of time the objective is the step of the schedule. Each round prices the integer problem by the exposure in the best schedule
so far (``overlap``), or by weights whose optimum bounds every step (``surrogate``). Every solution is scheduled and simulated, and the best
is kept. Baselines go through the same passes first. Under the communication model nothing overlaps: the problem in sequence is solved once,
and its bound is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from autopar.cost_models import Machine
from autopar.effort import DEFAULT_EFFORT, WORK_SECONDS, Budget, Effort, Meter, check_effort
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.garbage import young_garbage_only
from autopar.graph import Graph
from autopar.schedule import Assignment
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.baselines.scheduled import ScheduledBaselines
from autopar.search.bounds.aggregated_memory import aggregated_memory_bound
from autopar.search.bounds.surrogate import floor_of_space
from autopar.search.choices.pins import Pins, resolve_pins
from autopar.search.choices.space import BudgetExhausted, Space
from autopar.search.coarsening.merged_axes import AxisMerge, axis_merges
from autopar.search.coarsening.one_axis import one_axis_neighbourhood, table_entries
from autopar.search.driver.result import SearchResult, Shared, StageClock
from autopar.search.driver.search_model import price_model, restrict_to_plan, search_model, search_part
from autopar.search.driver.state import Progress, SearchRequest
from autopar.search.folding.fold import Folding, fold_layers
from autopar.search.folding.tied_model import tie_model
from autopar.search.settings import (
    GAIN,
    PARTS_AFTER_DRAFTS,
    PROOF,
    SOLVE_SHARE,
    USED_UP_SHARE,
    WHOLE_ENTRIES,
    WRITING_SECONDS,
)
from autopar.search.telemetry import Telemetry
from autopar.search.thresholds import USUAL_THRESHOLDS, Thresholds
from autopar.sharding import ALL_ORDERS
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
    asked = SearchRequest(
        limit, steps, budget, PROOF if gap is None else gap, seed, progress, baselines, recompute, telemetry, thresholds=thresholds,
        candidates=candidates, bounds=[] if relaxed is None else [relaxed.own_seconds / graph.microbatches],
    )
    pins = resolve_pins(graph, machine.mesh, constraints or {})
    clock = StageClock()
    shared = shared or Shared()
    known = list(shared.known)
    try:
        if only_relaxed:
            assert relaxed is not None and relaxed.scheduled_plan is not None
            found = _search_relaxed(graph, machine, pins, asked, clock, shared, known, relaxed.scheduled_plan.assignment)
        else:
            found = _search_mesh(graph, machine, pins, asked, clock, shared, known, relaxed)
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


def _search_mesh(
    graph: Graph, machine: Machine, pins: Pins, asked: SearchRequest, clock: StageClock, shared: Shared, known: list[ScheduledPlan],
    relaxed: SearchResult | None = None,
) -> SearchResult:  # fmt: skip
    """The search on one mesh: folded if layers fold, from plans of merged axes if there are too many choices.

    Raises:
        BudgetExhausted: choices were not enumerated or priced in time.
    """
    folding = fold_layers(graph) if machine.overlaps and "folding" not in asked.telemetry.skip else None
    kept = folding.pins(pins) if folding is not None else None
    found: SearchResult | None = None
    written = ScheduledBaselines()
    if relaxed is not None and relaxed.scheduled_plan is not None:
        whole = shared.space("whole", lambda: Space(graph, machine, asked.optimizer, pins, resharding=shared.resharding))
        if folding is not None and kept is None:
            found = _search_spread_pins(whole, folding, pins, relaxed.scheduled_plan.assignment, asked, clock, known, written)
            as_good = found is not None and found.seconds <= relaxed.seconds * (1 + GAIN)
            if found is not None and (as_good or found.interrupted or asked.budget.over):
                return found
        else:
            begun = _pin_plans(whole, [relaxed.scheduled_plan.assignment], pins, asked, clock, known)
            if begun is not None and begun.interrupted:
                return begun
    if folding is not None and kept is not None:
        space = shared.space("folded", lambda: Space(folding.graph, machine, asked.optimizer, kept, resharding=shared.resharding))
        enumerated = _enumerate_choices(space, asked, clock)
        if not enumerated or _has_too_many_choices(space, asked):
            found = _search_from_merged_axes(space, folding, pins, asked, clock, known, enumerated)
        else:
            model = tie_model(shared.model("folded", lambda: price_model(space, clock)), folding, asked.thresholds)
            inside = replace(asked, telemetry=asked.telemetry.within("folded"))
            found = search_model(model, space, pins, inside, clock, known, written) if model is not None else None
        if found is not None and found.ended:
            return found
    try:
        return _search_whole(graph, machine, pins, asked, clock, shared, known, written)
    except (KeyboardInterrupt, BudgetExhausted, TimeLimitError) as reason:
        if found is None:
            raise
        return replace(found, interrupted=isinstance(reason, KeyboardInterrupt))


def _search_relaxed(
    graph: Graph, machine: Machine, pins: Pins, asked: SearchRequest, clock: StageClock, shared: Shared, known: list[ScheduledPlan],
    relaxed: Assignment,
) -> SearchResult:  # fmt: skip
    """The best plan with the strategies of one that need not keep the pins.

    Raises:
        InfeasibleError: none fits. TimeLimitError: none was found in time.
    """
    whole = shared.space("whole", lambda: Space(graph, machine, asked.optimizer, pins, resharding=shared.resharding))
    found = _pin_plans(whole, [relaxed], pins, asked, clock, known)
    if found is None and asked.budget.over:
        raise TimeLimitError(*asked.budget.meter.used_up())
    if found is None:
        raise InfeasibleError(f"no plan with the given strategies fits in {asked.limit} bytes a rank", "search among all strategies")
    return found


def _pin_plans(
    whole: Space, plans: Sequence[Assignment], pins: Pins, asked: SearchRequest, clock: StageClock, known: list[ScheduledPlan],
    written: ScheduledBaselines | None = None,
) -> SearchResult | None:  # fmt: skip
    """The best plan with the strategies of plans that need not keep the pins, added to ``known``; None where none fits."""
    inside = replace(
        asked, budget=asked.budget.share(SOLVE_SHARE), telemetry=asked.telemetry.within("pinned"), proves=False, bounds=[*asked.bounds],
        baselines=written is not None,
    )  # fmt: skip
    part = whole.restricted_to_plans(plans)
    try:
        found = search_part(part, whole, None, pins, inside, clock, known, written or ScheduledBaselines(), (), None)
    except (InfeasibleError, TimeLimitError, BudgetExhausted):
        return None
    if found is not None and found.scheduled_plan is not None:
        known.append(found.scheduled_plan)
    return found


def _search_spread_pins(
    whole: Space, folding: Folding, pins: Pins, relaxed: Assignment, asked: SearchRequest, clock: StageClock, known: list[ScheduledPlan],
    written: ScheduledBaselines,
) -> SearchResult | None:  # fmt: skip
    """The search where pins tell equal layers apart.

    The pins of one layer are those of all in a folded search, which has half of the work. Its strategies and those of the plan without
    pins are combined, each layer on its own. The bound is that without the pins.
    """
    plans, spread = [relaxed], folding.spread_pins(pins)
    if spread is not None:
        space = Space(folding.graph, whole.machine, whole.optimizer, spread)
        if _enumerate_choices(space, asked, clock) and not _has_too_many_choices(space, asked):
            model = tie_model(price_model(space, clock), folding, asked.thresholds)
            inside = replace(asked, budget=asked.budget.share(0.5), telemetry=asked.telemetry.within("alike"), proves=False, candidates=1)
            try:
                found = search_model(model, space, pins, inside, clock, known, written) if model is not None else None
            except (InfeasibleError, TimeLimitError):
                found = None
            if found is not None and found.interrupted:
                return found
            if found is not None and found.scheduled_plan is not None:
                plans.append(found.scheduled_plan.assignment)
                known.append(found.scheduled_plan)
            if model is not None:
                written.unfold(model)
    return _pin_plans(whole, plans, pins, asked, clock, known, written)


def _search_whole(
    graph: Graph, machine: Machine, pins: Pins, asked: SearchRequest, clock: StageClock, shared: Shared, known: list[ScheduledPlan],
    written: ScheduledBaselines,
) -> SearchResult:  # fmt: skip
    """The search with each layer on its own."""
    space = shared.space("whole", lambda: Space(graph, machine, asked.optimizer, pins, resharding=shared.resharding))
    enumerated = _enumerate_choices(space, asked, clock)
    if not enumerated or _has_too_many_choices(space, asked):
        found = _search_from_merged_axes(space, None, pins, asked, clock, known, enumerated)
        if found is not None:
            return found
        if asked.budget.over:
            what, hint = asked.budget.meter.used_up()
            raise TimeLimitError(f"{what} among plans of merged axes and those near them", hint)
        _enumerate_choices(space, asked, clock, 1.0)
    found = search_model(shared.model("whole", lambda: price_model(space, clock)), space, pins, asked, clock, known, written)
    assert found is not None
    return found


def _has_many_axes(machine: Machine) -> bool:
    return sum(size > 1 for size in machine.mesh.sizes) > ALL_ORDERS and machine.overlaps


def _has_too_many_choices(space: Space, asked: SearchRequest) -> bool:
    """Whether the problem over all choices is too large to be solved at once."""
    return _has_many_axes(space.machine) and table_entries(space) > asked.thresholds.coarse_entries


def _enumerate_choices(space: Space, asked: SearchRequest, clock: StageClock, share: float = 1 / 2) -> bool:
    """Enumerates all strategies. False where the budget did not suffice and plans of merged axes can stand in."""
    many = _has_many_axes(space.machine) and share < 1.0
    meter = asked.budget.meter
    last = Budget(meter, math.inf)
    space.budget = asked.budget.share(share) if many else last
    try:
        for op in space.graph.ops:
            space.op_choices(op)
    except BudgetExhausted:
        if not many:
            raise
        return False
    finally:
        clock.lap("enumerate")
        space.budget = last
    return True


def _search_from_merged_axes(
    space: Space, folding: Folding | None, pins: Pins, asked: SearchRequest, clock: StageClock, known: list[ScheduledPlan], enumerated: bool
) -> SearchResult | None:  # fmt: skip
    """The best plan that a search from meshes with merged axes leads to; None where none fits in memory.

    All choices are searched from there, if a gap is open and there is work for it. Else the strategies of the best draft are searched
    alone. Pins may leave no draft: then the neighbourhood of the baselines is searched. The cheapest-choice floor and the
    aggregated-memory bound bound every plan.

    Args:
        enumerated: whether all choices are. Else there is no bound.

    Raises:
        KeyboardInterrupt: Ctrl-C came before there was a plan.
    """
    graph = space.graph if folding is None else folding.whole
    bound = max([floor_of_space(space, folding) if enumerated else 0.0, *asked.bounds])
    if enumerated and asked.recompute and graph.mode == "train" and "aggregated memory" not in asked.telemetry.skip:
        with asked.telemetry.phase("aggregated memory", lambda: (math.inf, bound)):
            bound = max(bound, aggregated_memory_bound(space, folding, asked.limit, asked.budget.share(SOLVE_SHARE)))
    least = min((plan.seconds for plan in known), default=math.inf)
    less = replace(asked, baselines=not enumerated, telemetry=asked.telemetry.within("merged axes"))
    merges = list(axis_merges(space.machine, ALL_ORDERS))
    plans, found, interrupted = _draft_merged_plans(graph, merges, pins, less, bound, least, folding is not None)
    draft = found.scheduled_plan if found is not None else None
    is_best = draft is not None and draft.seconds < least
    before = [plan.assignment for plan in known]
    plans = [*plans, *before] if is_best else [*before, *plans]
    written = ScheduledBaselines()
    parts = [space] if enumerated and not interrupted and _should_search_all(space, draft, bound, asked) else []
    if plans:
        parts.append(restrict_to_plan(space, plans[0]))
    elif enumerated:
        plans = written.assignments(space, folding)
        parts += [one_axis_neighbourhood(space, plans)] if plans else []
    clock.lap("merged")
    for part in parts:
        over = interrupted or asked.budget.over
        inside = replace(
            asked, budget=asked.budget.at_most(0.0) if interrupted else asked.budget, telemetry=asked.telemetry.within("near"),
            proves=part is space, bounds=[bound], baselines=asked.baselines and enumerated and not over,
        )  # fmt: skip
        start = draft.limits if draft is not None and is_best else None
        try:
            result = search_part(part, space, folding, pins, inside, clock, known, written.unscheduled(), plans, start)
        except InfeasibleError:
            break
        except (KeyboardInterrupt, BudgetExhausted, TimeLimitError) as reason:
            interrupted |= isinstance(reason, KeyboardInterrupt)
            continue
        if result is not None and result.scheduled_plan is not None:
            return replace(result, interrupted=interrupted or result.interrupted)
    if interrupted:
        raise KeyboardInterrupt
    return None


def _should_search_all(space: Space, merged: ScheduledPlan | None, bound: float, asked: SearchRequest) -> bool:
    """Whether the search over all choices promises a gain, and has the work for it."""
    limits = asked.thresholds
    if merged is None or merged.memory.peak > limits.roomy * asked.limit or merged.seconds * (1 - limits.whole_gap) <= bound:
        return False
    return table_entries(space) <= min(WHOLE_ENTRIES, limits.entries_per_work * asked.budget.left)


def _draft_merged_plans(
    graph: Graph, ways: Sequence[AxisMerge], pins: Pins, asked: SearchRequest, bound: float, least: float, folded: bool
) -> tuple[list[Assignment], SearchResult | None, bool]:  # fmt: skip
    """Draft plans of meshes with axes merged, the best first; the result of the best; and whether Ctrl-C ended that.

    Args:
        ways: the merges to search, in order.
        bound: seconds that bound all plans.
        least: seconds of the best plan known.
        folded: whether plans are of the folded graph, where they were searched so.
    """
    plans, interrupted = list[Assignment](), False
    best: SearchResult | None = None
    reached = math.inf
    for number, merging in enumerate(ways):
        left = asked.budget.left
        merged = merging.pins(pins)
        if merged is None:
            continue
        if left <= 0 or reached * (1 - asked.gap) <= bound:
            continue
        budget = asked.budget.share(1 / (len(ways) - number + PARTS_AFTER_DRAFTS))
        less = replace(asked, budget=budget, proves=False, bounds=[], progress=None, draft=True, candidates=1)
        try:
            found = _search_mesh(graph, merging.machine, merged, less, StageClock(), Shared(), [])
        except InfeasibleError:
            continue
        except (TimeLimitError, BudgetExhausted):
            if not plans and bound > 0.0:
                break  # other merges would take as long; baselines are faster
            continue
        except KeyboardInterrupt:
            if not plans and least == math.inf:
                raise
            return plans, best, True
        if found.scheduled_plan is not None and found.searched_assignment is not None:
            plan = found.searched_assignment if folded else found.scheduled_plan.assignment
            better = found.scheduled_plan.seconds < reached
            plans.insert(0 if better else len(plans), merging.assignment(plan))
            best, reached = (found, found.scheduled_plan.seconds) if better else (best, reached)
        if interrupted := found.interrupted:
            break
    return plans, best, interrupted
