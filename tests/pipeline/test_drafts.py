"""Drafts of pipelines: stages planned among the whole graph's strategies, before the best is planned among all."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar import zoo
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.graph import GraphOutput
from autopar.pipeline import planning, solving, stage_searches
from autopar.pipeline.next_cut import StageEstimates
from autopar.pipeline.planning import DraftedPipeline, draft_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.stage_searches import StageSearches
from autopar.search import SearchResult
from autopar.solvers import INTERRUPTED
from tests.pipeline.models import capture, machine
from tests.work import part_of_work


def request(limit: int = 1 << 40) -> PipelineRequest:
    return PipelineRequest(machine("pp=2,dp=2", stress=True), limit, effort="low")


@cache
@part_of_work(1.0)
def draft(name: str = "llama") -> DraftedPipeline:
    """In all the memory there is."""
    found = draft_pipeline(capture(name, 4)[2], request(), math.inf)
    assert found is not None and found.best is not None
    return found


def test_a_draft_has_the_strategies_of_the_whole_graph() -> None:
    drafted = draft()
    assert drafted.best is not None
    whole = {name: operation.strategy for name, operation in drafted.whole.schedule.operations.items() if "contract" in name}
    mine = {name: operation.strategy for schedule in drafted.best.schedules for name, operation in schedule.operations.items()}
    assert len(whole) > 20 and {name: mine[name] for name in whole} == whole


@pytest.mark.parametrize("name", ["llama", "gpt tied"])
def test_finishing_makes_no_pipeline_slower_and_keeps_its_bound(name: str) -> None:
    drafted = draft(name)
    found = drafted.finish()
    assert 0 < found.bound_seconds <= found.times.step <= drafted.step < math.inf
    assert drafted.bound(split=True) <= drafted.bound(split=False) <= drafted.step


@pytest.mark.slow
def test_eight_stages_are_drafted_in_little_memory() -> None:
    """Each has a fraction of a search's work. Each holds fewer microbatches than the one before, and keeps other activations."""
    given = zoo.build("llama3", layers=8, batch=16, seq=512, width=256, heads=8, kv_heads=4, hidden=688, vocab=1024)
    graph = autopar.capture(given.model, given.args, microbatches=16)
    asked = PipelineRequest(machine("pp=8,dp=1,tp=2"), 1 << 40, effort="low")
    roomy, tight = (draft_pipeline(graph, replace(asked, memory_limit=limit), math.inf) for limit in (1 << 40, 24 << 20))
    assert roomy is not None and roomy.best is not None and max(roomy.best.times.peaks) > 2 * (24 << 20)
    assert tight is not None and tight.best is not None and max(tight.best.times.peaks) <= 24 << 20
    assert tight.step < 1.5 * roomy.step


def test_a_pipeline_that_the_bound_rules_out_is_not_drafted() -> None:
    graph = capture("llama", 4)[2]
    assert draft_pipeline(graph, request(), 0.5 * draft().bound_seconds) is None


def test_the_draft_stands_where_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*given: object) -> None:
        raise TimeLimitError("no plan was found in 5 s", "allow more time")

    drafted = draft()
    monkeypatch.setattr(planning._Planner, "_plan_cut", late)
    assert drafted.finish().times.step <= drafted.step
    early = draft_pipeline(capture("llama", 4)[2], request(), math.inf)
    assert early is not None and early.best is None and early.step == math.inf
    with pytest.raises(TimeLimitError):
        early.finish()


def test_nothing_is_searched_after_the_deadline_where_a_plan_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = draft()
    planner = copy(drafted.planner)
    planner.searches = replace(planner.searches, deadline=0.0)
    monkeypatch.setattr(stage_searches, "find_plan", lambda *_, **__: pytest.fail("a search began"))
    monkeypatch.setattr(planning._Planner, "_choose_cut", lambda *_: pytest.fail("the chain was cut"))
    assert planner.finish(drafted).times.step <= drafted.step
    with pytest.raises(TimeLimitError, match="time for stages"):
        draft_pipeline(capture("llama", 4)[2], replace(request(), deadline=0.0), 2 * drafted.step)


def test_what_no_draft_fits_in_is_planned_among_all_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = StageSearches.plan

    def only_in_full(self: StageSearches, *given: Any) -> SearchResult:
        if self.drafts:
            raise InfeasibleError("it does not fit", "allow more")
        return plan(self, *given)

    monkeypatch.setattr(StageSearches, "plan", only_in_full)
    drafted = draft_pipeline(capture("llama", 4)[2], request(), math.inf)
    assert drafted is not None and drafted.best is None
    assert drafted.finish().times.step < 1.05 * draft().step


def interrupt(monkeypatch: pytest.MonkeyPatch, where: str, last: int) -> list[str]:
    """Ctrl-C ends this one of the searches, or of the cut's solves, which hands out what it has. The list has all that began."""
    began, find, solve = list[str](), stage_searches.find_plan, solving.solve_pipeline

    def comes(what: str) -> bool:
        began.append(what)
        return what == where and began.count(what) == last

    def search(*given: Any, **options: Any) -> SearchResult:
        return replace(find(*given, **options), interrupted=comes("search"))

    def cut(*given: Any, **options: Any) -> Any:
        found = solve(*given, **options)
        return replace(found, message=INTERRUPTED) if comes("solve") else found

    monkeypatch.setattr(stage_searches, "find_plan", search)
    monkeypatch.setattr(solving, "solve_pipeline", cut)
    return began


@pytest.mark.parametrize(("where", "last"), [("search", 1), ("search", 2), ("solve", 1)])
def test_ctrl_c_before_there_is_a_pipeline_ends_all_searches(where: str, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    began = interrupt(monkeypatch, where, last)
    with pytest.raises(KeyboardInterrupt):
        draft_pipeline(capture("llama", 4)[2], request(), math.inf)
    assert began.count(where) == last and began[-1] == where


@pytest.mark.parametrize("where", ["search", "solve"])
def test_after_ctrl_c_the_draft_is_given(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = draft()
    assert drafted.best is not None and not drafted.interrupted
    began = interrupt(monkeypatch, where, 1)
    found = drafted.finish()
    assert began[-1] == where and began.count(where) == 1
    assert found.interrupted and found.times == drafted.best.times and found.bound_seconds == drafted.bound_seconds and not found.baselines


def test_an_interrupted_draft_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first cut was planned: the second and third solves are for its orders, the fourth for those of another cut."""
    began = interrupt(monkeypatch, "solve", 4)
    monkeypatch.setattr(StageEstimates, "improve_cut", lambda _, cut, tried: ("layers.1",) if cut != ("layers.1",) else ("layers.2",))
    drafted = draft_pipeline(capture("llama", 4)[2], request(), math.inf)
    assert drafted is not None and drafted.interrupted
    found, count = drafted.finish(), len(began)
    assert found.interrupted and found.bound_seconds == drafted.bound_seconds > 0 and len(began) == count


@pytest.mark.parametrize(
    ("mesh", "cut", "said"),
    [
        ("pp=8", None, "8 stages are asked for, and the model can be cut into 7 units: tokens"),
        ("pp=2", ("layers.7",), "cannot begin with layers.7"),
        ("pp=3", ("layers.2", "layers.1"), "does not run after layers.2"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_searched(
    mesh: str, cut: tuple[str, ...] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_searches, "find_plan", lambda *_, **__: pytest.fail("a search began"))
    with pytest.raises(UsageError, match=said):
        draft_pipeline(capture("llama", 4)[2], PipelineRequest(machine(mesh), 1 << 40, cut=cut), math.inf)


def test_a_model_that_returns_more_than_the_loss_is_refused_before_anything_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_searches, "find_plan", lambda *_, **__: pytest.fail("a search began"))
    graph = capture("llama", 4)[2]
    more = replace(graph, outputs=(*graph.outputs, GraphOutput(graph.ops[3].outputs[0], "output", "logits")))
    with pytest.raises(UsageError, match="the output logits stands beside the loss"):
        draft_pipeline(more, request(), math.inf)
