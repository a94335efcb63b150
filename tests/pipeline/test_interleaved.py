"""Several stages a rank: the orders that interleave them, their memory, the file, and steps on simulated and gloo ranks."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.check.pipelines import check_pipeline
from autopar.compare.pipeline_changes import pipeline_changes
from autopar.errors import InfeasibleError, MismatchError, UsageError
from autopar.pipeline import Action, Boundary, Stages, planning
from autopar.pipeline.clock import (
    StageCosts,
    find_stage_needs,
    measure_stage,
    recorded_costs,
    recorded_order,
    recorded_stages,
    rest_bytes,
    time_pipeline,
)
from autopar.pipeline.explanation import explain_pipeline
from autopar.pipeline.order_search import choose_order
from autopar.pipeline.orders import interleave
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.result import PipelineResult
from autopar.pipeline.timetable import merge_queues, problems_of, read_order, write_order, write_turns
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.pipelines import record_pipeline, replay_pipeline
from autopar.report.pipeline import pipeline_summary
from autopar.report.pipeline_page import pipeline_html
from autopar.report.pipeline_timetable import pipeline_svg, pipeline_trace, stage_bars
from autopar.runtime.pipelines.step import simulate_pipeline
from autopar.schedule import memory
from benchmarks.models import stressed
from tests.pipeline.models import MODELS, build, capture, machine, run_on_one, values_of
from tests.pipeline.test_evaluation import _evaluated
from tests.pipeline.test_steps import random_order
from tests.pipeline.test_training import plan_of, train
from tests.runtime.test_training import on_ranks

CASES = [("gpt tied", "pp=2", 2), ("encoder-decoder", "pp=2,dp=2,tp=2", 2), ("masked", "pp=2,dp=2", 2), ("llama", "pp=2,dp=2,tp=2", 3),
         ("drawn", "pp=2,dp=2", 2), ("relative bias", "pp=2", 2)]  # fmt: skip


class Shared(nn.Module):
    """Two layers that two stages of one rank run have one weight, and read one buffer. One stage of the other rank trains nothing."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) * self.scale).tanh()
        return ((x - y) ** 2).mean()


@cache
def planned(name: str, mesh: str, chunks: int) -> tuple[PipelineRequest, PipelineResult]:
    """With prices at which every split pays."""
    asked = PipelineRequest(machine(mesh, stress=True), 1 << 40, effort="low", order="interleaved", chunks=chunks)
    return asked, plan_pipeline(capture(name, 4)[2], asked)


def file_of(name: str, mesh: str, chunks: int) -> PipelinePlan:
    asked, found = planned(name, mesh, chunks)
    plan = record_pipeline(capture(name, 4)[2], asked, found, target="chunks", pins={}, solve_seconds=0.0)
    return PipelinePlan.from_json(plan.to_json())


def chain(count: int, positions: int) -> Stages:
    """Stages that each send to the next, and back."""
    pairs = [pair for stage in range(count - 1) for pair in ((stage, stage + 1), (stage + 1, stage))]
    return Stages((), tuple(Boundary(f"{a}-{b}", a, b) for a, b in pairs), positions)


@pytest.mark.parametrize(("name", "mesh", "chunks"), CASES)
def test_steps_are_those_of_one_device(name: str, mesh: str, chunks: int) -> None:
    """In the order that was found, and in one drawn at random."""
    model, args, graph = capture(name, 4)
    values, (_, made) = values_of(graph, model, args), planned(name, mesh, chunks)
    assert len(made.schedules) == 2 * chunks and 0 < made.bound_seconds <= made.times.step
    assert not list(problems_of(made.order, made.stages, 4))
    for order in (made.order, random_order(made.stages, 4, 3)):
        found = simulate_pipeline(made.stages, made.schedules, order, values).outputs
        for key, wanted in run_on_one(graph, values).items():
            if key[1] != "microbatch.divisor":
                torch.testing.assert_close(found[key], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("name", "mesh", "chunks"), CASES)
def test_the_file_holds_and_runs_what_was_planned(name: str, mesh: str, chunks: int) -> None:
    plan, (_, found) = file_of(name, mesh, chunks), planned(name, mesh, chunks)
    assert plan.order_asked == f"interleaved:{chunks}" and plan.chunks == chunks and plan.positions == 2
    assert not check_pipeline(plan, capture(name, 4)[2])
    replayed = replay_pipeline(plan, capture(name, 4)[2])
    for stage in range(2 * chunks):
        assert write_order(replayed.order, stage) == write_order(found.order, stage)
    assert write_turns(replayed.order, 2) == plan.turns == write_turns(found.order, 2)
    assert max(bar.end for bar in stage_bars(plan)) == pytest.approx(plan.objective.seconds)
    assert pipeline_svg(plan).count(">pp ") == pipeline_trace(plan).count('"thread_name"') == 2
    assert "Timetable" in pipeline_html(plan)
    words = pipeline_summary(plan)
    assert f"interleaved:{chunks}" in words and f"{chunks} stages a rank" in words


def test_a_rank_runs_one_action_at_a_time_and_hands_over_at_once() -> None:
    """By hand: two ranks, four stages of F 1 and B 2, a hop of half a second, one microbatch."""
    costs = [StageCosts(1.0, 2.0, 2.0, 0.0, 0, 0, 2.0)] * 4
    order = merge_queues(interleave(2, 2, 1))
    assert [str(action) for action in order] == ["F0"] * 4 + ["B0"] * 4
    times = time_pipeline(chain(4, 2), costs, order, 0.5)
    assert times.begins == (0.0, 1.5, 3.0, 4.5, 5.5, 8.0, 10.5, 13.0) and times.step == 15.0
    skip = Stages((), (Boundary("a", 0, 2), Boundary("b", 2, 0)), 2)
    times = time_pipeline(skip, costs[:3], read_order(["F0 B0", "F0 B0", "F0 B0"], ["0 2 2 0", "1 1"]), 0.5)
    assert times.step == 6.0, "nothing crosses between ranks"


def test_memory_of_a_rank_is_that_of_all_its_stages() -> None:
    """By hand: stages 0 and 2 of one rank rest with 10 and 20 bytes, hold 3 and 5 for a microbatch, and need 2 and 7 more at work."""
    costs = [
        StageCosts(1.0, 1.0, 1.0, 0.0, 3, 15, 1.0, rest=10), StageCosts(1.0, 1.0, 1.0, 0.0, 1, 1, 1.0),
        StageCosts(1.0, 1.0, 1.0, 0.0, 5, 32, 1.0, rest=20), StageCosts(1.0, 1.0, 1.0, 0.0, 1, 1, 1.0),
    ]  # fmt: skip
    order = read_order(["F0 F1 B0 B1"] * 4, ["0 0 2 2 2 2 0 0", "1 1 3 3 3 3 1 1"])
    times = time_pipeline(chain(4, 2), costs, order, 0.0)
    assert times.in_flight == (2, 2, 2, 2)
    assert times.peaks == (32 + 10 + 2 * 3 + 5, 1 + 3, 32 + 10 + 2 * 3 + 5, 1 + 3)


@pytest.mark.parametrize("seed", range(20))
def test_interleaved_orders_are_legal(seed: int) -> None:
    random_ = random.Random(seed)
    positions, chunks, microbatches = random_.randint(1, 5), random_.randint(1, 4), random_.randint(1, 9)
    lines = interleave(positions, chunks, microbatches)
    order, stages = merge_queues(lines), chain(positions * chunks, positions)
    assert Counter(order) == Counter(action for line in lines for action in line)
    assert len(order) == 2 * positions * chunks * microbatches
    own = [write_order(order, stage) for stage in range(positions * chunks)]
    assert read_order(own, write_turns(order, positions)) == order
    costs = [StageCosts(1.0, 2.0, 2.0, 0.0, 1, 1, 2.0)] * (positions * chunks)
    assert time_pipeline(stages, costs, order, 0.0).step >= 3.0 * chunks * microbatches


def test_interleaving_halves_the_idle_time_of_equal_stages() -> None:
    """4 ranks, 8 microbatches, work 24: 1F1B is idle for 3 x 3, two stages a rank for half of it, as in facts of the field."""
    whole = [StageCosts(1.0, 2.0, 2.0, 0.0, 0, 0, 2.0)] * 4
    half = [StageCosts(0.5, 1.0, 1.0, 0.0, 0, 0, 1.0)] * 8
    one = choose_order("whole", chain(4, 4), whole, 8, 0.0, 10)
    two = choose_order("interleaved", chain(8, 4), half, 8, 0.0, 10)
    assert one is not None and two is not None
    assert time_pipeline(chain(4, 4), whole, one, 0.0).step == pytest.approx(33.0)
    assert time_pipeline(chain(8, 4), half, two, 0.0).step == pytest.approx(28.5)


@pytest.mark.parametrize("seed", range(8))
def test_orders_found_fit_and_are_at_most_as_long_as_the_interleaved_one(seed: int) -> None:
    random_ = random.Random(seed)
    backward = [random_.uniform(1.0, 3.0) for _ in range(6)]
    costs = [StageCosts(random_.uniform(0.5, 1.5), seconds, seconds, 0.0, 2, 9, seconds, rest=5) for seconds in backward]
    stages, usual = chain(6, 3), merge_queues(interleave(3, 2, 6))
    times = time_pipeline(stages, costs, usual, 0.1)
    found = choose_order("interleaved", stages, costs, 6, 0.1, max(times.peaks))
    assert found is not None
    better = time_pipeline(stages, costs, found, 0.1)
    assert better.step <= times.step and max(better.peaks) <= max(times.peaks)
    needs = find_stage_needs(costs, 6, 0.1, 3)
    assert max(need.least for need in needs) <= better.step * (1 + 1e-9)
    tight = choose_order("interleaved", stages, costs, 6, 0.1, 16)
    assert tight is None or max(time_pipeline(stages, costs, tight, 0.1).peaks) <= 16


@pytest.mark.parametrize(("name", "mesh", "chunks"), CASES[:3])
def test_what_rests_is_part_of_the_peak(name: str, mesh: str, chunks: int) -> None:
    _, made = planned(name, mesh, chunks)
    for schedule in made.schedules:
        rest, cost = rest_bytes(schedule, "adamw"), measure_stage(schedule, "adamw")
        sums = sum(schedule.local_bytes(value) for value in schedule.sums)
        assert memory(schedule, "adamw").resting + sums < rest <= cost.peak - cost.held


def test_little_memory_is_shared_by_the_stages_of_a_rank() -> None:
    """As each stage is planned alone, no fast order of them fits: they are planned once more, and hold less."""
    _, roomy = planned("llama", "pp=2,dp=2", 2)
    limit = int(0.6 * max(roomy.peaks))
    asked = PipelineRequest(machine("pp=2,dp=2", stress=True), limit, effort="low", order="interleaved", chunks=2)
    found = plan_pipeline(capture("llama", 4)[2], asked)
    assert max(found.peaks) <= limit and found.times.step < 1.2 * roomy.times.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning._Planner, "_share_memory", lambda self, stages, found: [limit] * len(found))
        try:
            alone = plan_pipeline(capture("llama", 4)[2], asked).times.step
        except InfeasibleError:
            alone = math.inf
    assert alone > 1.2 * found.times.step


def test_pipelines_by_hand_are_interleaved_too() -> None:
    """Layers alike: three parts of two stages each are those of Megatron-LM, which is never faster than what is taken."""
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(x: Tensor, y: Tensor) -> Tensor:
        for layer in model.layers:
            x = x + layer(x).relu()
        return ((x - y) ** 2).mean()

    model.forward = forward  # type: ignore[method-assign]
    args = torch.randn(16, 8), torch.randn(16, 8)
    made = autopar.plan_pipeline(model, args, mesh="pp=2,dp=2", microbatches=4, hardware=stressed(), effort="low", order="interleaved")
    assert {"ddp", "fsdp"} <= set(made.baselines) and not check_pipeline(made)
    assert all(made.objective.seconds <= row.step_seconds * (1 + 1e-9) for row in made.baselines.values() if row.feasible)
    assert any("at least" in line for line in explain_pipeline(made, "cut"))


def _with(plan: PipelinePlan, **fields: object) -> PipelinePlan:
    return plan.model_copy(update=fields)


def _turns(plan: PipelinePlan, change: Callable[[list[str]], list[str]]) -> PipelinePlan:
    assert plan.turns is not None
    return _with(plan, turns=(" ".join(change(plan.turns[0].split())), *plan.turns[1:]))


def _stage(plan: PipelinePlan, **fields: object) -> PipelinePlan:
    return _with(plan, stages=(plan.stages[0].model_copy(update=fields), *plan.stages[1:]))


MUTATIONS: dict[str, tuple[Callable[[PipelinePlan], PipelinePlan], str]] = {
    "no turns": (lambda plan: _with(plan, turns=None), "turns"),
    "a turn too few": (lambda plan: _turns(plan, lambda line: line[:-1]), "turns[0]"),
    "a turn of another rank": (lambda plan: _turns(plan, lambda line: ["1", *line[1:]]), "turns[0]"),
    "turns that wait for ever": (lambda plan: _turns(plan, lambda line: sorted(line, reverse=True)), "stages[2].order"),
    "a line of turns too few": (lambda plan: _with(plan, turns=plan.turns[:1] if plan.turns else None), "turns"),
    "a stage too few": (lambda plan: _with(plan, stages=plan.stages[:-1]), "stages"),
    "memory of one stage": (lambda plan: _stage(plan, peak_memory_bytes_per_rank=plan.stages[0].plan.predicted.peak_memory_bytes_per_rank),
                            "stages[0].peak_memory_bytes_per_rank"),
    "what rests is not said": (lambda plan: _stage(plan, rest_bytes_per_rank=None), "stages"),
    "nothing rests": (lambda plan: _stage(plan, rest_bytes_per_rank=0), "stages[0].rest_bytes_per_rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_edited_file_is_found(name: str) -> None:
    change, where = MUTATIONS[name]
    edited = change(file_of("masked", "pp=2,dp=2", 2))
    if name == "a stage too few":
        edited = _with(edited, boundaries=tuple(row for row in edited.boundaries if 3 not in (row.from_stage, row.to_stage)))
    assert where in [found.where for found in check_pipeline(edited)]
    if where.startswith(("turns", "stages[2]")) or name == "a stage too few":
        with pytest.raises(MismatchError):
            replay_pipeline(edited, capture("masked", 4)[2])


def test_check_knows_that_a_rank_hands_over_at_once() -> None:
    """Only what crosses between stages of one rank, and transfers that would be seen."""
    plan = file_of("encoder-decoder", "pp=2,dp=2,tp=2", 2)
    near = tuple(row for row in plan.boundaries if (row.from_stage - row.to_stage) % 2 == 0)
    assert near
    edited = _with(plan, boundaries=near, transfer_seconds=1.0)
    times = time_pipeline(recorded_stages(edited), recorded_costs(edited), recorded_order(edited), 1.0)
    edited = _with(edited, objective=plan.objective.model_copy(update={"seconds": times.step, "bound_seconds": 0.0}))
    assert times.step < 1.0 and "objective.seconds" not in [found.where for found in check_pipeline(edited)]


def test_other_turns_are_found_by_their_figures() -> None:
    """A legal order that is not the one that was priced."""
    plan = file_of("masked", "pp=2,dp=2", 2)
    assert plan.turns is not None
    order = merge_queues([[Action(stage, part, number) for stage, part in ((a, "forward"), (b, "forward"), (b, "backward"), (a, "backward"))
                           for number in range(4)] for a, b in ((0, 2), (1, 3))])  # fmt: skip
    rows = tuple(row.model_copy(update={"order": write_order(order, stage)}) for stage, row in enumerate(plan.stages))
    edited = _with(plan, turns=write_turns(order, 2), stages=rows)
    replay_pipeline(edited, capture("masked", 4)[2])
    assert f"turns at pp 0: {plan.turns[0]} -> {edited.turns[0]}" in list(pipeline_changes(plan, edited))
    found = [one.where for one in check_pipeline(edited)]
    assert "stages[1].in_flight" in found and not any("order" in where or "turns" in where for where in found)


def test_more_stages_than_the_model_has_units_are_refused() -> None:
    model, args = build("masked")
    with pytest.raises(UsageError, match=r"8 stages are asked for, and the model can be cut into \d units") as caught:
        autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), order="interleaved:4")
    assert "or fewer a rank in --order" in str(caught.value.hint)


@pytest.mark.parametrize(("stages", "order"), [("layers.1", "interleaved"), ("layers.1,layers.2", "auto"), (["head", "layers.2"], "auto")])
def test_as_many_modules_are_named_as_stages_begin_behind_the_first(stages: Any, order: str) -> None:
    """Of as many as stages the first was dropped without a word."""
    model, args = build("masked")
    count = 4 if order == "interleaved" else 2
    named = len(stages.split(",")) if isinstance(stages, str) else len(stages)
    with pytest.raises(UsageError, match=f"the first modules of {named} stages are named, the pipeline has {count} stages"):
        autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), order=order, stages=stages)


def test_layers_may_be_counted_by_numbers() -> None:
    model, args = build("masked")
    plan = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages=[1, 3])
    assert plan.cut == ("layers.1",)


@pytest.mark.parametrize(("name", "mesh"), [("gpt tied", "pp=2,dp=2"), ("encoder-decoder", "pp=2,dp=1,tp=2"), ("shared", "pp=2,dp=2")])
def test_training_is_that_of_one_device(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch, short_search: None) -> None:
    """Clipped by the norm over all ranks, tied weights of one rank and of two counted once; evaluation, and a shorter batch."""
    monkeypatch.setitem(MODELS, "shared", lambda: (Shared().double(), (torch.randn(8, 8).double(), torch.randn(8, 8).double())))
    stages = {"stages": "layers.1,layers.2,layers.3"} if name == "shared" else {}
    plan, (model, args) = plan_of(name, mesh, order="interleaved:2", **stages), build(name)
    alone, few = copy.deepcopy(model), tuple(tensor[:4] for tensor in args)
    wanted = [alone(*args).item(), *train(alone, args), train(alone, few)]

    def run(rank: int) -> Any:
        module = autopar.compile_pipeline(model, plan)
        found = [_evaluated(module, args), *train(module, args), train(module, few)]
        held = {name: parameter.full_tensor() for name, parameter in module.named_parameters()}
        return found, held, module.extra_repr()

    everyones = on_ranks(run, 4)
    weights = dict(alone.named_parameters())
    for found, held, words in everyones:
        assert found[0] == pytest.approx(wanted[0], rel=1e-9) and found[1] == pytest.approx(wanted[1], rel=1e-9)
        assert found[2] == pytest.approx(wanted[2], rel=1e-9)
        assert found[3][0] == pytest.approx(wanted[3][0], rel=1e-9) and found[3][1] == pytest.approx(wanted[3][1], rel=1e-9)
        assert "stage=0 and 2 of 4" in words or "stage=1 and 3 of 4" in words
        for key, value in held.items():
            torch.testing.assert_close(value, weights[key].detach(), rtol=1e-7, atol=1e-9)
    assert set(weights) == {key for _, held, _ in everyones for key in held}
