"""Searches that are ended before they are done, by Ctrl-C or by their time limit: the best so far, or the reason why there is none."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar import effort, solvers
from autopar.cost_models import Machine
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule.limit_search import LimitSearch
from autopar.search import SearchResult, Thresholds, find_plan
from autopar.search.choices.space import Space
from autopar.search.driver import mesh_search
from autopar.search.driver.phase_table import BY_STEP
from autopar.search.folding.fold import Folding
from autopar.solvers import Problem, Solution
from tests.search import test_folding
from tests.search.small_graphs import small_graph, small_machine

UNLIMITED = 2**62
ENDS = 6
"""So many moments, evenly over a search, at which it is ended."""


FROM_MERGED_AXES = Thresholds(coarse_entries=0)
"""Thresholds under which three axes are searched from plans of merged axes."""


def many_axes() -> tuple[Graph, Machine]:
    """What is searched from plans of merged axes on."""
    return small_graph(1), small_machine(1, "2x2x2")


def many_axes_folded() -> tuple[Graph, Machine]:
    return test_folding.graph(), test_folding.machine("2x2x2")


def two_axes_folded() -> tuple[Graph, Machine]:
    return test_folding.graph(), test_folding.machine("2x2")


SEARCHES = [many_axes, *(pytest.param(case, marks=pytest.mark.slow) for case in (many_axes_folded, two_axes_folded))]


class Moments:
    """Counts what a search does in places it comes to again and again, and ends it there.

    Args:
        last: the moment at which it is ended.
    """

    def __init__(self, patch: pytest.MonkeyPatch, last: float, end: Callable[[], None]) -> None:
        self.count, self.last, self.end, self.scheduled = 0, last, end, 0
        for place, name in ((Space, "_check_budget"), (LimitSearch, "try_limits"), (solvers, "solve")):
            patch.setattr(place, name, self._counted(getattr(place, name)))
        run = LimitSearch.run

        def noted(tuning: LimitSearch, *more: Any, **options: Any) -> Any:
            found = run(tuning, *more, **options)
            self.scheduled += self.count < self.last
            return found

        patch.setattr(LimitSearch, "run", noted)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*more: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.last:
                self.end()
            return real(*more, **options)

        return counted


def ended(case: Callable[[], tuple[Graph, Machine]], last: float, end: Callable[[], None]) -> tuple[SearchResult | None, Moments]:
    """What a search gives that is ended at a moment; None where that is an error."""
    graph, machine = case()
    with pytest.MonkeyPatch.context() as patch:
        moments = Moments(patch, last, end)
        try:
            return find_plan(graph, machine, memory_bytes=UNLIMITED, time_limit=900.0, thresholds=FROM_MERGED_AXES), moments
        except (KeyboardInterrupt, TimeLimitError):
            return None, moments


@cache
def all_moments(case: Callable[[], tuple[Graph, Machine]]) -> int:
    """How many there are in a search that nobody ends."""
    return ended(case, math.inf, interrupt)[1].count


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("case", SEARCHES)
@pytest.mark.parametrize("way", ["interrupted", "late"])
def test_ended_search_gives_the_best_plan_so_far(case: Callable[[], tuple[Graph, Machine]], way: str) -> None:
    """From the first schedule on there is a plan."""
    whole, given = all_moments(case), 0
    for number in range(1, ENDS + 1):
        last = whole * number // ENDS
        with pytest.MonkeyPatch.context() as patch:
            if way == "interrupted":
                found, moments = ended(case, last, interrupt)
            else:
                found, moments = ended(case, last, lambda: patch.setattr(effort, "perf_counter", lambda: 1e300))
        assert moments.count >= last
        if found is None:
            assert not moments.scheduled
        else:
            given += 1
            assert found.memory.peak <= UNLIMITED and found.bound_seconds <= found.seconds
            assert found.interrupted == (way == "interrupted") and found.cut == (way == "late")
    assert given


def interrupted_at(monkeypatch: pytest.MonkeyPatch, last: int, keeps: bool, **options: Any) -> tuple[SearchResult, int]:
    """The result of a search that Ctrl-C ends in its solve number ``last``, and the number of its solves.

    Args:
        keeps: whether the solver returns the solution that it has so far.
    """
    solve, count = solvers.solve, 0

    def interrupted(problem: Problem, **how: Any) -> Solution:
        nonlocal count
        count += 1
        found = solve(problem, **how)
        if count < last:
            return found
        return replace(found, choices=found.choices if keeps else None, peak_usage=None, message=solvers.INTERRUPTED)

    with monkeypatch.context() as patch:
        patch.setattr(solvers, "solve", interrupted)
        found = find_plan(small_graph(8), small_machine(8, "2x2"), **options)
    return found, count


@pytest.mark.parametrize("thresholds", [Thresholds(), Thresholds(large_entries=0, loose_gap=0.0)], ids=["small", "large"])
@pytest.mark.parametrize("keeps", [False, True])
def test_ctrl_c_in_any_solve_ends_the_search_with_a_plan(monkeypatch: pytest.MonkeyPatch, keeps: bool, thresholds: Thresholds) -> None:
    """In a large problem solutions for later bounds have no schedule, but the search notices Ctrl-C in their solves as well."""
    options = {"memory_bytes": UNLIMITED, "gap": 0.0, "thresholds": thresholds}
    _, solves = interrupted_at(monkeypatch, sys.maxsize, True, **options)
    assert solves > 2
    for last in range(1, solves + 1):
        found, count = interrupted_at(monkeypatch, last, keeps, **options)
        assert found.interrupted and count == last
        assert found.bound_seconds <= found.seconds


def test_ctrl_c_in_a_solve_without_the_limit_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solution may not respect the limit, so no second solve puts it in."""
    limit = find_plan(small_graph(8), small_machine(8, "2x2"), memory_bytes=UNLIMITED).memory.peak
    found, count = interrupted_at(monkeypatch, 1, True, memory_bytes=limit, thresholds=Thresholds(roomy=1.0))
    assert found.interrupted and count == 1 and found.memory.peak <= limit


@pytest.mark.slow
def test_layers_on_their_own_begin_from_whole_plans_of_merged_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folded layers have no plan; those of merged axes may be found folded."""
    look = mesh_search.search_part

    def none_folded(part: Space, within: Space, folding: Folding | None, *more: Any) -> SearchResult | None:
        return look(part, within, folding, *more) if folding is None else None

    graph, machine = many_axes_folded()
    monkeypatch.setattr(mesh_search, "search_part", none_folded)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, time_limit=900.0, baselines=False, thresholds=FROM_MERGED_AXES)
    assert found.searched_assignment is not None and len(found.searched_assignment.strategies) == len(graph.ops)


def test_search_that_solves_nothing_names_the_least_memory_known() -> None:
    phases = frozenset(phase.name for phase in BY_STEP)
    with pytest.raises(InfeasibleError, match=r"in 4 B a rank.*least known"):
        find_plan(small_graph(1), small_machine(1, "2x2"), memory_bytes=4, skip=phases)


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_graph_without_operators_has_a_plan_of_no_time(mode: Any) -> None:
    plan = autopar.plan(torch.nn.Identity(), (torch.ones(8, 4),), mesh="dp=2", hardware="h100-sxm", memory="1GiB", mode=mode)
    assert plan.objective.seconds == 0.0 and plan.objective.status == "optimal"
