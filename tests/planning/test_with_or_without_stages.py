"""The better of a plan with stages and one without, on a number of devices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar import zoo
from autopar.cost_models import Hardware, Machine, Mesh
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.graph import Graph
from autopar.options import PlanOptions, resolve_hardware
from autopar.pipeline import planning
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.planning import pipelines
from autopar.planning.cautions import MicrobatchWarning, StageWarning
from autopar.planning.pipelines import meshes_with_stages, plan_stages, plan_with_or_without_stages
from autopar.planning.session import PlanSession, open_session
from autopar.target import Target

MLP = {"layers": 6, "batch": 4096, "inputs": 2048, "width": 2048, "outputs": 2048}


def hardware(bandwidth: float) -> Hardware:
    """Servers of one rank each. ``bandwidth``: of the network, in bytes per second."""
    made = resolve_hardware("cpu-cluster")
    return replace(made, devices_per_node=1, network=replace(made.network, bandwidth=bandwidth))


def options(bandwidth: float, **keys: object) -> PlanOptions:
    asked = PlanOptions(hardware=hardware(bandwidth), devices=2, microbatches=8, effort="low", time_limit=900.0)
    return replace(asked, **keys)  # type: ignore[arg-type]


def model() -> Target:
    return zoo.build("mlp", **MLP)


def test_stages_win_where_the_network_is_slow() -> None:
    asked = options(2e7)
    found = plan_with_or_without_stages(model(), asked, 1 << 40)
    assert isinstance(found, PipelinePlan) and found.mesh == {"pp": 2, "dp": 1}
    alone = plan_stages(model(), replace(asked, devices=None, mesh=Mesh.parse("pp=2,dp=1")), 1 << 40)
    assert found.objective.seconds == alone.objective.seconds


def test_a_plan_without_stages_wins_where_the_network_is_fast() -> None:
    found = plan_with_or_without_stages(model(), options(1e11), 1 << 40)
    assert isinstance(found, Plan)


def test_what_fits_neither_with_stages_nor_without_is_refused() -> None:
    with pytest.raises(InfeasibleError):
        plan_with_or_without_stages(model(), options(1e9), 1 << 20)


def test_a_model_that_cannot_be_cut_is_planned_without_and_said() -> None:
    target = zoo.build("gpt2", layers=2, batch=8)
    target = replace(target, loss=lambda output, *rest: output.pow(2).mean().sqrt())  # rows of the batch meet under the root
    with pytest.warns(MicrobatchWarning), pytest.warns(StageWarning, match="no pipelines are tried"):
        found = plan_with_or_without_stages(target, options(2e7), 1 << 40)
    assert isinstance(found, Plan)


def test_one_microbatch_is_refused() -> None:
    with pytest.raises(UsageError, match="one microbatch keeps one stage busy"):
        plan_with_or_without_stages(model(), replace(options(1e9), microbatches=1), 1 << 40)


def test_pipelines_that_time_did_not_suffice_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*asked: object) -> None:
        raise TimeLimitError("no plan was found in 5 s", "allow more time")

    monkeypatch.setattr(planning, "draft_pipeline", late)
    with pytest.warns(StageWarning, match="2 stages are not planned: no plan was found in 5 s"):
        assert isinstance(plan_with_or_without_stages(model(), options(2e7), 1 << 40), Plan)


@pytest.mark.parametrize(
    ("mesh", "most", "found"),
    [
        ("dp=4,tp=2", 8, ["pp=2,dp=2,tp=2", "pp=4,tp=2", "pp=8,dp=1"]),
        ("dp=4,tp=2", 4, ["pp=2,dp=2,tp=2", "pp=4,tp=2"]),
        ("dp=3,tp=4", 8, ["pp=2,dp=3,tp=2", "pp=4,dp=3"]),
        ("dp=3", 8, []),
    ],
)
def test_stages_take_ranks_from_the_outer_axes(mesh: str, most: int, found: list[str]) -> None:
    made = list(meshes_with_stages(Mesh.parse(mesh), most))
    assert [",".join(f"{name}={size}" for name, size in each.axes) for each in made] == found
    assert all(each.ranks == Mesh.parse(mesh).ranks for each in made)


def test_pipelines_that_can_save_next_to_nothing_are_not_planned_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.planning.pipelines.WORTH_STAGES", 1.0)
    monkeypatch.setattr(planning, "draft_pipeline", lambda *given: pytest.fail("a pipeline is planned"))
    with pytest.warns(StageWarning, match=r"pipelines of 2 stages are not planned: they would save [0-9.]+% at most"):
        assert isinstance(plan_with_or_without_stages(model(), options(2e7), 1 << 40), Plan)


def test_a_model_whose_operators_cannot_be_placed_is_planned_without_stages_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_floor(*given: object) -> float:
        raise UsageError("it cannot be cut", "plan without pp")

    monkeypatch.setattr(planning, "find_floor", find_floor)
    with pytest.warns(StageWarning, match="no pipelines are tried: it cannot be cut"):
        assert isinstance(plan_with_or_without_stages(model(), options(2e7), 1 << 40), Plan)


def test_no_pipeline_is_faster_than_its_operators_alone() -> None:
    mesh = Mesh.parse("pp=2,dp=1")
    found = plan_stages(model(), replace(options(2e7), devices=None, mesh=mesh), 1 << 40)
    graph = autopar.capture(model().model, model().args, loss_args=model().loss_args, loss=model().loss, microbatches=8)
    least = planning.find_floor(graph, Machine(mesh, hardware(2e7)), "adamw")
    assert 0.5 * found.objective.bound_seconds < least <= found.objective.bound_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ({2: 5.0, 4: 4.0, 8: 3.0, 16: 2.0, 32: 2.5}, [8, 16, 32]),
        ({2: 5.0, 4: 2.0, 8: 3.0, 16: 4.0, 32: 5.0}, [8, 16, 4, 2]),
        ({8: 3.0, 16: 3.0}, [8, 16, 4]),
        ({16: 3.0, 32: 2.0}, [8, 16, 32]),
        ({2: 1.0}, [8, 16, 32]),
    ],
    ids=["more gain", "fewer gain", "fewer do not fit", "four a stage do not fit", "none of four a stage and more fits"],
)
def test_four_microbatches_a_stage_come_first(monkeypatch: pytest.MonkeyPatch, steps: dict[int, float], wanted: list[int]) -> None:
    asked = list[int]()

    def draft(graph: Graph, request: object, least: float) -> object:
        asked.append(graph.microbatches)
        return SimpleNamespace(bound_seconds=1.0, step=steps.get(graph.microbatches, math.inf), interrupted=False)

    monkeypatch.setattr(planning, "draft_pipeline", draft)
    made = drafts(Mesh.parse("pp=2,dp=1"))
    made.draft_meshes([Mesh.parse("pp=2,dp=1")])
    assert asked == wanted
    fitting = set(asked) & steps.keys()
    assert made.step_on(Mesh.parse("pp=2,dp=1")) == min((steps[number] for number in fitting), default=math.inf)
    assert set(made.bounds.get(Mesh.parse("pp=2,dp=1"), ())) == fitting


def drafts(mesh: Mesh, least: float = math.inf) -> pipelines._Drafts:
    """Of a model whose batch has 32 rows."""
    target = zoo.build("mlp", **MLP | {"batch": 32})
    session = open_session(target, replace(options(2e7), microbatches="auto", devices=None, mesh=mesh))
    return pipelines._Drafts(session, 1 << 40, None, least)


@pytest.mark.parametrize(
    ("steps", "least", "wanted", "finished"),
    [
        ({2: 3.0, 4: 2.0, 8: 2.5}, math.inf, [(2, 8), (4, 16), (8, 32), (4, 32), (4, 8)], 4),
        ({2: 2.0, 4: 2.1, 8: 1.0}, math.inf, [(2, 8), (4, 16), (2, 16), (2, 4)], 2),
        ({2: 2.0, 4: 2.1}, 1.5, [(2, 8), (4, 16), (2, 16), (2, 4)], None),
        ({2: math.inf, 4: math.inf}, math.inf, [(2, 8), (2, 16), (2, 32), (4, 16), (4, 32)], 2),
    ],
    ids=["more stages gain", "more stages lose", "all are far behind the plan without stages", "no draft fits"],
)
def test_the_best_draft_alone_is_finished(
    monkeypatch: pytest.MonkeyPatch, steps: dict[int, float], least: float, wanted: list[tuple[int, int]], finished: int | None
) -> None:
    asked, done = list[tuple[int, int]](), list[int]()

    def draft(graph: Graph, request: planning.PipelineRequest, least: float) -> object:
        asked.append((request.positions, graph.microbatches))
        step = steps[request.positions] * (1 + 0.1 * abs(math.log2(graph.microbatches / request.positions / 4)))
        return SimpleNamespace(bound_seconds=1.0, step=step, interrupted=False, finish=lambda: done.append(request.positions))

    monkeypatch.setattr(planning, "draft_pipeline", draft)
    monkeypatch.setattr(pipelines._Drafts, "_record", lambda self, draft, found, seconds: draft)
    meshes = [Mesh.parse(f"pp={count},dp={8 // count}") for count in steps]
    made = drafts(meshes[0], least).plan(meshes)
    assert asked == wanted and done == ([] if finished is None else [finished])
    assert (made is None) is (finished is None)


@dataclass(frozen=True)
class Finished:
    """A finished pipeline, as far as its bound goes."""

    bound_seconds: float
    split: bool


@pytest.mark.parametrize("split", [False, True])
def test_the_bound_over_all_numbers_is_for_the_way_of_the_pipeline(monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    def draft(graph: Graph, request: object, least: float) -> object:
        step = {8: 2.0, 16: 2.1, 4: 2.2}[graph.microbatches]
        return SimpleNamespace(
            bound_seconds=1.7, step=step, interrupted=False, bound=lambda split: 1.0 if split else 1.5,
            finish=lambda: Finished(1.6, split),
        )  # fmt: skip

    recorded = list[tuple[float, object]]()

    def record(graph: Graph, asked: object, found: Finished, **keys: object) -> object:
        recorded.append((found.bound_seconds, keys["tried"]))
        return SimpleNamespace(remember_loss=lambda loss: None)

    monkeypatch.setattr(planning, "draft_pipeline", draft)
    monkeypatch.setattr("autopar.recording.pipelines.record_pipeline", record)
    drafts(Mesh.parse("pp=2,dp=1")).plan([Mesh.parse("pp=2,dp=1")])
    assert recorded == [(1.0 if split else 1.5, (4, 8, 16))]


def test_a_draft_that_does_not_fit_is_finished_after_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[int]()

    def draft(graph: Graph, request: object, least: float) -> object:
        number = graph.microbatches

        def finish() -> None:
            done.append(number)
            if number > 8:
                raise InfeasibleError("it does not fit", "allow more")

        return SimpleNamespace(bound_seconds=1.0, step=math.inf, interrupted=False, finish=finish)

    monkeypatch.setattr(planning, "draft_pipeline", draft)
    monkeypatch.setattr(pipelines._Drafts, "_record", lambda self, draft, found, seconds: draft)
    made = drafts(Mesh.parse("pp=2,dp=1")).plan([Mesh.parse("pp=2,dp=1")])
    assert made is not None and done == [32, 16, 8], "of more microbatches each holds less"


def test_the_plan_without_stages_stands_where_no_draft_fits_and_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish() -> None:
        raise TimeLimitError("no plan was found in 5 s", "allow more time")

    drafted = SimpleNamespace(bound_seconds=0.0, step=math.inf, interrupted=False, finish=finish)
    monkeypatch.setattr(planning, "draft_pipeline", lambda *given: drafted)
    with pytest.warns(StageWarning, match="no pipelines are tried: no plan was found in 5 s"):
        assert isinstance(plan_with_or_without_stages(model(), options(2e7), 1 << 40), Plan)


def test_drafts_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(graph: Graph, request: object, least: float) -> object:
        made.ends = 0.0
        return SimpleNamespace(bound_seconds=1.0, step=2.0, interrupted=False, finish=lambda: None)

    monkeypatch.setattr(planning, "draft_pipeline", draft)
    made = drafts(Mesh.parse("pp=2,dp=2"))
    with pytest.warns(StageWarning, match="pipelines of 4 stages are not planned: the time for drafts was used up"):
        made.draft_meshes([Mesh.parse("pp=2,dp=2"), Mesh.parse("pp=4,dp=1")])
    assert len(made.made) == 1


@pytest.mark.parametrize("at_once", [False, True], ids=["it kept its draft", "it had none"])
def test_ctrl_c_ends_drafts_with_the_best_of_them(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def draft(graph: Graph, request: planning.PipelineRequest, least: float) -> object:
        asked.append(request.positions)
        if at_once and len(asked) == 2:
            raise KeyboardInterrupt
        stop = partial(SimpleNamespace, positions=request.positions)
        return SimpleNamespace(bound_seconds=1.0, step=1.0 + len(asked), interrupted=len(asked) == 2, stop=stop)

    monkeypatch.setattr(planning, "draft_pipeline", draft)
    monkeypatch.setattr(pipelines._Drafts, "_record", lambda self, draft, found, seconds: found)
    meshes = [Mesh.parse("pp=2,dp=4"), Mesh.parse("pp=4,dp=2"), Mesh.parse("pp=8,dp=1")]
    made: Any = drafts(meshes[0]).plan(meshes)
    assert made.positions == 2 and asked == [2, 4]


def test_after_ctrl_c_the_plan_without_stages_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "draft_pipeline", interrupted)
    assert isinstance(plan_with_or_without_stages(model(), options(2e7), 1 << 40), Plan)
    with pytest.raises(KeyboardInterrupt):
        drafts(Mesh.parse("pp=2,dp=1")).plan([Mesh.parse("pp=2,dp=1")])


def test_after_ctrl_c_without_stages_none_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PlanSession.plan
    monkeypatch.setattr(PlanSession, "plan", lambda *given: replace(plan(*given), interrupted=True))
    monkeypatch.setattr(planning, "draft_pipeline", lambda *given: pytest.fail("a pipeline is planned"))
    assert isinstance(plan_with_or_without_stages(model(), options(2e7), 1 << 40), Plan)
