"""Stages of equal structure share a search: the schedule of one, in the names of another, is a legal plan of that."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.check.pipelines import check_pipeline
from autopar.errors import AutoparError, InfeasibleError, TimeLimitError
from autopar.graph import Accumulation, Graph
from autopar.pipeline import cut_graph, stage_searches
from autopar.pipeline.clock import measure_stage
from autopar.pipeline.equal_stages import schedule_for, structure_of
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.stage_searches import StageSearches
from autopar.recording.pipelines import record_pipeline
from autopar.schedule import memory
from autopar.search import find_plan
from tests.pipeline.models import capture, machine
from tests.work import part_of_work

CUT = ("layers.1", "layers.2", "layers.3")
NOTHING, TOO_LITTLE_WORK = InfeasibleError("nothing fits", ""), TimeLimitError("no plan was found with this effort", "")


@lru_cache
def graph_of(model: str) -> Graph:
    _, _, graph = capture(model, 4)
    return graph


def searches(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are searched from now on."""
    found: list[Graph] = []
    search = stage_searches.find_plan

    def noting(graph: Graph, *rest: Any, **options: Any) -> Any:
        found.append(graph)
        return search(graph, *rest, **options)

    monkeypatch.setattr(stage_searches, "find_plan", noting)
    return found


@pytest.mark.parametrize("model", ["llama", "moe"])
@part_of_work(0.5)
def test_inner_stages_share_one_search_and_their_plans_hold(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(model)
    searched = searches(monkeypatch)
    pins = {"module:layers.*": "S1 S0 R"}  # else layers may be left in other layouts, and stages then differ
    asked = PipelineRequest(machine("pp=4,dp=2,tp=2", stress=True), 1 << 40, cut=CUT, effort="low", pins=pins)
    found = plan_pipeline(graph, asked)
    plan = record_pipeline(graph, asked, found, target="shared", pins={}, solve_seconds=0.0)
    distinct = [found.stages.graphs[stage].sha256 for stage in (0, 1, 3)]
    assert [one.sha256 for one in searched[1:]] == [*distinct, *distinct], "a draft of each, then its search"
    assert any(call.kind != "all_reduce" for call in found.schedules[2].calls), "nothing is resharded: the renaming is not tried"
    assert not check_pipeline(plan, graph)


def test_a_schedule_taken_over_is_the_one_that_a_search_finds() -> None:
    graph = graph_of("llama")
    first, second = cut_graph(graph, CUT).graphs[1:3]
    whole, limit = machine("dp=2,tp=2", stress=True), 1 << 40
    one, other = (find_plan(each, whole, memory_bytes=limit, baselines=False, effort="low").schedule for each in (first, second))
    assert str(schedule_for(second, one)) == str(other) and first.sha256 != second.sha256


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("an operator", lambda graph: replace(graph, ops=(*graph.ops[:-1], replace(graph.ops[-1], target="aten.sub.Tensor")))),
        ("a module", lambda graph: replace(graph, ops=(*graph.ops[:-1], replace(graph.ops[-1], module="elsewhere")))),
        ("the repeats", lambda graph: replace(graph, groups=())),
        ("the microbatches", lambda graph: graph.accumulated(replace(graph.accumulation, microbatches=8))),
        ("an output", lambda graph: replace(graph, outputs=graph.outputs[:-1])),
        ("what trains", lambda graph: replace(graph, inputs=(replace(graph.inputs[0], trained=False), *graph.inputs[1:]))),
    ],
)  # fmt: skip
def test_stages_that_differ_have_different_structures(what: str, change: Any) -> None:
    graph = graph_of("llama")
    one = cut_graph(graph, ("layers.1", "layers.3")).graphs[1]
    assert structure_of(change(one), {}) != structure_of(one, {}), what


def test_pins_are_part_of_the_structure() -> None:
    graph = graph_of("llama")
    first, second = cut_graph(graph, CUT).graphs[1:3]
    one, other = first.inputs[0].name, second.inputs[0].name
    assert structure_of(first, {one: "R"}) == structure_of(second, {other: "R"}) != structure_of(first, {one: "S0"})


def figures(seconds: float, peak: int, held: int) -> Any:
    """A plan, and what it holds, in the place of its schedule."""
    schedule = SimpleNamespace(once=lambda question: held)
    return SimpleNamespace(seconds=seconds, schedule=schedule, memory=SimpleNamespace(peak=peak), optimizer="adamw", interrupted=False)


def finds(plans: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Searches find these figures, by microbatches in flight, or raise the error. The counts searched are added to the list."""
    tried = list[int]()

    def search(graph: Graph, *rest: Any, **options: Any) -> Any:
        tried.append(graph.accumulation.in_flight)
        found = plans[tried[-1]]
        if isinstance(found, AutoparError):
            raise found
        return figures(*found)

    monkeypatch.setattr(stage_searches, "find_plan", search)
    monkeypatch.setattr(stage_searches, "replace", lambda value, **to: replace(value, **to) if isinstance(value, Accumulation) else value)
    monkeypatch.setattr(stage_searches, "memory", lambda schedule, optimizer: None)
    monkeypatch.setattr(StageSearches, "_in_names", lambda self, found, graph: found)
    monkeypatch.setattr(StageSearches, "_reorder", lambda self, known, in_flight, room: None)
    return tried


def test_stages_between_two_whose_plans_are_equally_fast_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 stages that hold 64 microbatches, 63, ... in 70 bytes: those that hold up to 20 take 1.0 s, the others 2.0."""
    plans = {count: (1.0, 31, 2) if count <= 20 else (2.0, 6, 1) for count in range(2, 65)} | {1: (0.5, 30, 41)}
    tried = finds(plans, monkeypatch)
    known, graph = StageSearches(machine("dp=2"), "adamw", True, "low", 0, math.inf, None), graph_of("llama")
    assert [known.plan(graph, {}, count, 70).seconds for count in range(64, 1, -1)] == [2.0] * 44 + [1.0] * 19
    assert tried[:4] == [1, 64, 32, 16] and len(tried) <= 14


def test_a_plan_within_more_room_serves_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = finds({1: (1.0, 30, 21), 5: (1.2, 30, 5)}, monkeypatch)
    known, graph = StageSearches(machine("dp=2"), "adamw", True, "low", 0, math.inf, None), graph_of("llama")
    assert [known.plan(graph, {}, 5, room).seconds for room in (70, 60, 50)] == [1.2] * 3 and tried == [1, 5]


def test_a_plan_within_more_room_says_nothing_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = finds({1: (1.0, 60, 30), 3: (1.2, 80, 10), 4: (1.4, 40, 10)}, monkeypatch)
    known, graph = StageSearches(machine("dp=2"), "adamw", True, "low", 0, math.inf, None), graph_of("llama")
    assert known.plan(graph, {}, 3, 100).seconds == 1.2 and known.plan(graph, {}, 4, 70).seconds == 1.4
    assert tried == [1, 3, 4]


def test_after_the_deadline_a_plan_for_more_microbatches_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless none fits: then one is searched once more, and the most that fit by then are taken."""
    tried = finds({1: (1.0, 30, 21), 5: (1.2, 30, 6), 9: (1.4, 30, 4), 20: NOTHING}, monkeypatch)
    known, graph = StageSearches(machine("dp=2"), "adamw", True, "low", 0, 0.0, None), graph_of("llama")
    assert known.plan(graph, {}, 5, 70).seconds == known.plan(graph, {}, 4, 70).seconds == 1.2 and tried == [1, 5]
    assert known.plan(graph, {}, 9, 70).seconds == 1.4 and tried == [1, 5, 9]
    assert known.plan(graph, {}, 20, 70).seconds == 1.4 and tried == [1, 5, 9, 20]


@pytest.mark.parametrize(
    ("plans", "searched", "fastest"),
    [
        ({1: (1.0, 30, 5)}, [1], 1.0),
        ({1: (1.0, 30, 11), 5: (1.2, 30, 5)}, [1, 5], 1.2),
        ({1: (1.0, 30, 50), 5: NOTHING, 3: (1.3, 30, 19), 4: (1.4, 30, 10)}, [1, 5, 3, 4], 1.4),
        ({1: (1.0, 30, 50), 5: TOO_LITTLE_WORK, 3: NOTHING, 2: (1.3, 30, 10)}, [1, 5, 3, 2], 1.3),
        ({1: (1.0, 70, 60), 5: NOTHING, 3: NOTHING, 2: NOTHING}, [1, 5, 3, 2], 1.0),
    ],
    ids=("it fits", "for five", "for four", "for two", "for one"),
)  # fmt: skip
def test_a_stage_is_searched_for_as_many_microbatches_as_fit(
    plans: dict[int, Any], searched: list[int], fastest: float, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Five of them in 70 bytes, else as many as bisection finds. With 40 bytes nothing is searched again that fits."""
    tried = finds(plans, monkeypatch)
    known = StageSearches(machine("dp=2"), "adamw", True, "low", 0, math.inf, None)
    assert known.plan(graph_of("llama"), {}, 5, 70).seconds == fastest and tried == searched
    assert known.plan(graph_of("llama"), {}, 1, 70).seconds == 1.0 and tried == searched, "known by now"
    if plans[1][1] <= 40:
        assert known.plan(graph_of("llama"), {}, 1, 40).seconds == 1.0 and tried == searched, "found within more memory"


def test_a_stage_is_planned_for_the_memory_of_its_microbatches_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """In three quarters of what the fastest plan holds with four microbatches, another fits. Its bytes are those of the schedule alone."""
    graph, tried = graph_of("gpt untied"), searches(monkeypatch)
    known = StageSearches(machine("dp=2,tp=2", stress=True), "adamw", True, "low", 0, math.inf, None)
    free = known.plan(graph, {}, 4, 1 << 40)
    assert [one.accumulation.in_flight for one in tried] == [1] and free.memory.peak == memory(free.schedule, "adamw").peak
    room = int(0.75 * StageSearches.peak(free, 4))
    found = known.plan(graph, {}, 4, room)
    assert measure_stage(found.schedule, "adamw").peak_with(4) == StageSearches.peak(found, 4) <= room
    assert found.schedule.graph.accumulation == graph.accumulation and found.seconds >= free.seconds
    assert 4 in [one.accumulation.in_flight for one in tried]
