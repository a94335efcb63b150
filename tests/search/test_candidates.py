"""Candidates of a search: distinct plans that fit, plans by hand among them, each at full depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.schedule.legality import check_legal
from autopar.search import SEARCHED, SearchResult, find_plan, merge_candidates
from autopar.search.driver.candidates import Candidate, CandidatePool, are_alike
from tests.graphs import machine as small_machine
from tests.graphs import two_layers
from tests.search.test_folding import EXTRAPOLATED, machine
from tests.search.test_folding import graph as deep_graph


def searched(count: int, **more: Any) -> SearchResult:
    return find_plan(two_layers(), small_machine("dp=4"), candidates=count, **more)


@pytest.fixture(scope="module")
def five() -> SearchResult:
    return searched(5)


def test_candidates_are_distinct_and_the_fastest_comes_first(five: SearchResult) -> None:
    found = five.candidates
    assert 2 <= len(found) <= 5
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert not any(are_alike(one.schedule, other.schedule) for one in found for other in found if one is not other)
    assert found[0].seconds == pytest.approx(five.seconds) and found[0].schedule.instructions == five.schedule.instructions


def test_plans_by_hand_are_among_them_under_their_names(five: SearchResult) -> None:
    by_hand = [one for one in five.candidates if one.name != SEARCHED]
    assert by_hand and all(one.name in five.baselines for one in by_hand)


def test_candidates_are_legal_schedules_of_the_whole_graph() -> None:
    """Of a deep graph, searched plans are extrapolated from fewer layers; candidates are not."""
    found = find_plan(deep_graph(), machine("dp=4"), candidates=4, thresholds=EXTRAPOLATED, effort="low").candidates
    assert len(found) > 1
    for one in found:
        assert len(one.schedule.graph.ops) == len(deep_graph().ops)
        check_legal(one.schedule, "the test")


def test_candidates_fit() -> None:
    roomy = searched(8)
    limit = max(one.memory.peak for one in roomy.candidates) - 1
    short = searched(8, memory_bytes=limit)
    assert all(one.memory.peak <= limit for one in short.candidates)
    assert 1 < len(short.candidates) <= len(roomy.candidates)


def test_a_plan_alone_keeps_no_others(five: SearchResult) -> None:
    """And asking for candidates changes nothing of the best plan."""
    alone = searched(1)
    assert alone.candidates == ()
    assert alone.seconds == five.seconds and alone.schedule.instructions == five.schedule.instructions


def test_a_pool_keeps_the_faster_of_plans_that_are_alike(five: SearchResult) -> None:
    plan = five.scheduled_plan
    assert plan is not None
    pool = CandidatePool(2)
    for seconds in (2.0, 1.0, 3.0):
        pool.add(replace(plan, seconds=seconds), plan.memory.peak)
    pool.add(plan, plan.memory.peak - 1)  # does not fit
    assert [one.seconds for one in pool.plans] == [1.0]


def test_candidates_of_several_searches_take_turns(five: SearchResult) -> None:
    """Plans by hand are not crowded out by faster plans of the searches, nor measured twice."""
    again = tuple(Candidate(one.name, one.schedule, 2 * one.seconds, one.memory) for one in five.candidates)
    merged = merge_candidates((*five.candidates, *again), len(five.candidates))
    assert [one.seconds for one in merged] == [one.seconds for one in five.candidates]
    two = merge_candidates(five.candidates, 2)
    assert sorted(one.name == SEARCHED for one in two) == [False, True]
