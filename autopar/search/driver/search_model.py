"""One search on one model, from its warm starts to its result. ``find_plan`` chooses the model: folded, whole, or a neighbourhood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.effort import Budget
from autopar.ending import put_together
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.schedule import Assignment, Limits
from autopar.schedule.freeing import free
from autopar.schedule.legality import check_legal
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.baselines.scheduled import ScheduledBaselines
from autopar.search.bounds.surrogate import floor_of_model
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import BudgetExhausted, Space
from autopar.search.driver.candidates import choose_candidates
from autopar.search.driver.phase_table import Search
from autopar.search.driver.result import Baseline, SearchResult
from autopar.search.driver.state import SearchRequest
from autopar.search.fixing.tie_layers import tie_equal_layers
from autopar.search.folding.fold import Folding
from autopar.search.folding.tied_model import tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model
from autopar.search.phases import Phase, run_phases
from autopar.search.settings import PROOF


def search_model(
    model: Model, space: Space, pins: Pins, asked: SearchRequest, known: list[ScheduledPlan],
    written: ScheduledBaselines, plans: Sequence[Assignment] = (), start: Limits | None = None,
) -> SearchResult | None:  # fmt: skip
    """The result of the search on one model.

    A folded model prices memory roughly. If the memory limit decides, its result is not ``ended``, or None if nothing fits.

    Args:
        space: all choices. The model may have only a part.
        known: schedules found before. The best of a search that is left for another model is added.
        written: the baselines, with the schedules of a search that was left for this one.
        plans: assignments to begin with.
        start: the limits of the schedule passes under which the first of them was scheduled.
    """
    counts = model.space.machine.overlaps and model.planned_graph.mode == "train"
    may_recompute = asked.recompute and counts
    search = Search(model, asked, may_recompute)
    meter = asked.budget.meter
    priced = meter.seconds

    def offer_known(search: Search, budget: Budget) -> None:
        for schedule in known:
            search.offer(schedule, "known")

    def schedule_given(search: Search, budget: Budget) -> None:
        for number, plan in enumerate(plans):
            if search.work_left > 0 or not search.has_fitting_plan:
                search.offer(search.schedule(plan, None if number else start, tries=search.size.tries), "merged axes")

    beginning = (
        Phase[Search]("known plans", lambda s: bool(known), offer_known),
        Phase[Search]("plans of merged axes", lambda s: bool(plans), schedule_given),
        Phase[Search]("baselines", lambda s: asked.baselines, lambda s, budget: written.schedule(s, space, pins, may_recompute)),
    )

    def begin() -> None:
        run_phases(beginning, search)
        search.baselines = tuple(written.rivals.values())
        if search.work_left <= 0 and not search.has_fitting_plan:
            words = f"enumerating and pricing choices took {priced:.1f} s before the search"
            what, hint = meter.used_up()
            raise TimeLimitError(f"{what}: {words}", hint)

    try:
        ended = search.run(begin)
    except InfeasibleError:  # the plan of least memory serves under a larger limit
        known += [replace(search.best, assignment=model.unfold(search.best.assignment))] if search.best is not None else []
        raise
    if not ended:
        known += [replace(search.best, assignment=model.unfold(search.best.assignment))] if search.best is not None else []
        asked.bounds.append(search.bound)
        found: SearchResult | None = None
        if search.best is not None and search.has_fitting_plan:
            found = replace(_make_result(search, search.best, written), ended=False)
        written.unfold(model)
        return found
    ending = (
        Phase[Search]("baselines", lambda s: not s.interrupted, lambda s, budget: written.schedule_at_full_depth(s)),
        Phase[Search]("tied layers", lambda s: True, _tie_layers),
        Phase[Search]("final local search", lambda s: True, lambda s, budget: s.finish()),
    )
    run_phases(ending, search)
    assert search.best is not None
    best = search.best
    made, interrupted = put_together(lambda: _make_result(search, best, written))
    return replace(made, interrupted=made.interrupted or interrupted)


def search_part(
    part: Space, space: Space, folding: Folding | None, pins: Pins, asked: SearchRequest, known: list[ScheduledPlan],
    written: ScheduledBaselines, plans: Sequence[Assignment], start: Limits | None,
) -> SearchResult | None:  # fmt: skip
    """The result of the search in a part of a space; None where it did not end."""
    free = build_model(part)
    model = tie_model(free, folding, asked.thresholds) if folding is not None else free
    found = search_model(model, space, pins, asked, known, written, plans, start) if model is not None else None
    return found if found is not None and found.ended else None


def restrict_to_plan(space: Space, plan: Assignment) -> Space:
    """The space of one plan's choices, which takes no time to price."""
    return replace(space.restricted_to_plans([plan]), budget=None)


def _tie_layers(search: Search, budget: Budget) -> None:
    """Ties equal layers of the incumbent, if that costs next to nothing."""
    best = search.best
    assert best is not None
    try:
        tied = tie_equal_layers(search)
    except (KeyboardInterrupt, BudgetExhausted) as reason:
        search.interrupted |= isinstance(reason, KeyboardInterrupt)
        return
    if tied is not None:
        search.incumbent.plan, search.tied_seconds = tied, max(tied.seconds - best.seconds, 0.0)


def _make_result(search: Search, best: ScheduledPlan, written: ScheduledBaselines) -> SearchResult:
    """The result of a search whose plan is ``best``."""
    model = search.model
    schedule = check_legal(free(best.schedule), "the search")
    times, least = model.planned_graph.microbatches, floor_of_model(model)
    bound = bound_to_report(best.seconds, search.bound, least)
    achieved = (best.seconds - bound) / best.seconds if best.seconds > 0 else 0.0
    return SearchResult(
        schedule, times * best.seconds, times * bound, achieved, "optimal" if achieved <= PROOF else "feasible",
        search.seconds, search.incumbent.method, model.space.optimizer, best.memory,
        {name: _make_baseline(rival, search.limit, times) for name, rival in written.rivals.items()},
        dict(model.space.unknown), search.sizes, search.interrupted, True,
        times * search.tied_seconds, times * search.bound, times * least,
        scheduled_plan=replace(best, assignment=model.unfold(best.assignment)), searched_assignment=best.assignment,
        candidates=choose_candidates(search.pool, best, written.rivals, search.limit, search.schedule_at_full_depth),
    )  # fmt: skip


def bound_to_report(seconds: float, own: float, floor: float) -> float:
    """The bound, in seconds, that is reported with a plan of ``seconds``.

    It is the bound over the mesh's own choices. A plan from elsewhere may beat that (merged axes have other orders:
    ``sharding.ALL_ORDERS``); then it is the floor, which holds for all plans.
    """
    return min(own if own <= seconds * (1 + PROOF) else floor, seconds)


def _make_baseline(rival: ScheduledPlan, limit: int, times: int) -> Baseline:
    """A baseline for comparison. It is not run, so its schedule frees nothing."""
    return Baseline(rival.schedule, times * rival.seconds, rival.step_seconds, rival.memory, rival.memory.peak <= limit)
