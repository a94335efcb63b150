"""Searches that are ended before they are done, by Ctrl-C or by their time limit: the best so far, or the reason why there is none."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import solvers
from autopar import effort
from autopar.effort import Budget
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule.tuning import LimitSearch
from autopar.search import SearchResult, find_plan
from autopar.search.bounds.surrogate import Master, Multipliers
from autopar.search.choices.space import BudgetExhausted, Space
from autopar.search.driver import find_plan as finding
from autopar.search.driver import phase_table as rounds
from autopar.search.driver import state as trials
from autopar.search.folding.fold import Folding
from autopar.search.settings import BOUND_ROUNDS
from cost_models import Machine
from solvers import Problem, Solution
from tests.search import test_folding
from tests.search.small_graphs import small_graph, small_machine

UNLIMITED = 2**62
ENDS = 6
"""So many moments, evenly over a search, at which it is ended."""


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
        for place, name in ((Space, "_check_budget"), (LimitSearch, "look"), (solvers, "solve")):
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
        patch.setattr(finding, "COARSE_ENTRIES", 0)
        moments = Moments(patch, last, end)
        try:
            return find_plan(graph, machine, memory_bytes=UNLIMITED, time_limit=900.0), moments
        except (KeyboardInterrupt, TimeLimitError):
            return None, moments


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("case", SEARCHES)
@pytest.mark.parametrize("way", ["interrupted", "late"])
def test_a_search_that_is_ended_gives_the_best_so_far(case: Callable[[], tuple[Graph, Machine]], way: str) -> None:
    """From the first schedule on there is a plan."""
    _, whole = ended(case, math.inf, interrupt)
    given = 0
    for number in range(1, ENDS + 1):
        last = whole.count * number // ENDS
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


@pytest.mark.parametrize("roomy", [False, True])
def test_ctrl_c_in_a_solve_without_an_answer_ends_the_search(monkeypatch: pytest.MonkeyPatch, roomy: bool) -> None:
    """The solver gives what it has, which may be nothing, or an answer without the limit that does not keep to it: nothing follows."""
    solve, asked = trials.solve_interruptibly, list[Problem]()

    def interrupted(problem: Problem, budget: Budget, **options: Any) -> Solution:
        asked.append(problem)
        found = solve(problem, budget, **options)
        return replace(found, choices=found.choices if roomy else None, peak_usage=None, message=solvers.INTERRUPTED)

    monkeypatch.setattr(trials, "solve_interruptibly", interrupted)
    limit = UNLIMITED if roomy else find_plan(small_graph(1), small_machine(1, "2x2"), memory_bytes=UNLIMITED).memory.peak
    asked.clear()
    found = find_plan(small_graph(1), small_machine(1, "2x2"), memory_bytes=limit)
    assert found.interrupted and len(asked) == 1


def test_ctrl_c_in_a_solve_of_which_no_schedule_is_made_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large problem the answers of the later bounds are not scheduled."""
    choose, chosen = trials.SearchState.solve_choices, list[bool]()

    def interrupted(self: trials.SearchState, *more: Any, **options: Any) -> Solution | None:
        scheduled = sys._getframe(1).f_code.co_name == "solve"
        chosen.append(scheduled)
        self.idle = BOUND_ROUNDS
        found = choose(self, *more, **options)
        if not scheduled and found is not None:
            self.last_solution = found = replace(found, message=solvers.INTERRUPTED)
        return found

    def hopeful(self: Master) -> tuple[Multipliers, float, Any]:
        wanted, _, more = best(self)
        return wanted, math.inf, more

    best = Master.best_weights
    monkeypatch.setattr(Master, "best_weights", hopeful)
    monkeypatch.setattr(trials, "LARGE_ENTRIES", 0)
    monkeypatch.setattr(trials.SearchState, "solve_choices", interrupted)
    graph, machine = two_axes_folded()
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, time_limit=900.0)
    assert found.interrupted and chosen.count(False) == 1 and not chosen[-1]
    assert found.bound_seconds <= found.seconds


@pytest.mark.slow
def test_layers_on_their_own_begin_from_whole_plans_of_merged_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folded layers have no plan; those of merged axes may be found folded."""
    look = finding.search_part

    def none_folded(part: Space, within: Space, folding: Folding | None, *more: Any) -> SearchResult | None:
        return look(part, within, folding, *more) if folding is None else None

    graph, machine = many_axes_folded()
    monkeypatch.setattr(finding, "COARSE_ENTRIES", 0)
    monkeypatch.setattr(finding, "search_part", none_folded)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, time_limit=900.0, baselines=False)
    assert found.searched_assignment is not None and len(found.searched_assignment.strategies) == len(graph.ops)


def test_where_time_is_up_before_anything_fits_the_least_memory_found_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine = small_graph(1), small_machine(1, "2x2")
    free = find_plan(graph, machine, memory_bytes=UNLIMITED)

    def late(*given: Any) -> None:
        raise BudgetExhausted

    monkeypatch.setattr(rounds, "run_phases", late)
    with pytest.raises((InfeasibleError, TimeLimitError), match=r"in 4 B a rank.*least (found|known)"):
        find_plan(graph, machine, memory_bytes=4, baselines=True)
    assert find_plan(graph, machine, memory_bytes=UNLIMITED).seconds >= free.seconds
