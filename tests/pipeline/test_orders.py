"""Orders that are asked for: written down, and with gradients of weights apart."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.check.pipelines import check_pipeline
from autopar.errors import MismatchError, UsageError
from autopar.pipeline import Boundary, Stages, cut_graph, planning
from autopar.pipeline.clock import StageCosts, find_stage_needs, time_pipeline
from autopar.pipeline.order_search import choose_order
from autopar.pipeline.orders import ORDERS, parse_order, write_lines
from autopar.pipeline.planning import plan_pipeline
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.result import PipelineResult
from autopar.pipeline.timetable import problems_of, read_order, write_order
from autopar.pipeline_plan import OrderName, PipelinePlan, StagePlan
from autopar.recording.pipelines import record_pipeline, replay_pipeline
from autopar.report.pipeline import pipeline_summary
from autopar.report.pipeline_timetable import pipeline_svg, stage_bars
from autopar.runtime.pipelines.step import simulate_pipeline
from tests.pipeline.models import capture, machine, run_on_one, values_of
from tests.pipeline.test_steps import random_order

TIMETABLES = int(os.environ.get("AUTOPAR_TIMETABLES", "25"))
"""Timetables that are mutated."""
MESHES = {"gpt tied": "pp=2", "encoder-decoder": "pp=2,dp=2,tp=2", "masked": "pp=4", "llama": "pp=4,dp=2,tp=2"}


@cache
def planned(name: str, mesh: str, order: OrderName) -> tuple[PipelineRequest, PipelineResult]:
    """With prices at which every split pays."""
    asked = PipelineRequest(machine(mesh, stress=True), 1 << 40, effort="low", order=order)
    return asked, plan_pipeline(capture(name, 4)[2], asked)


def file_of(name: str, mesh: str, order: OrderName) -> PipelinePlan:
    asked, found = planned(name, mesh, order)
    plan = record_pipeline(capture(name, 4)[2], asked, found, target="orders", pins={}, solve_seconds=0.0)
    return PipelinePlan.from_json(plan.to_json())


@pytest.mark.parametrize(("name", "mesh"), MESHES.items())
def test_gradients_of_weights_apart_are_those_of_one_device(name: str, mesh: str) -> None:
    """In the order that was found, and in one drawn at random."""
    model, args, graph = capture(name, 4)
    values, (_, made) = values_of(graph, model, args), planned(name, mesh, "zero-bubble")
    assert not list(problems_of(made.order, made.stages, 4)) and "W0" in write_order(made.order, 0)
    assert 0 < made.bound_seconds <= made.times.step
    for order in (made.order, random_order(made.stages, 4, 3, split=True)):
        found = simulate_pipeline(made.stages, made.schedules, order, values).outputs
        for key, wanted in run_on_one(graph, values).items():
            if key[1] != "microbatch.divisor":
                torch.testing.assert_close(found[key], wanted, rtol=1e-9, atol=1e-11)


def test_one_rank_a_stage_is_the_plan_without_it_bit_by_bit() -> None:
    model, args, graph = capture("masked", 4)
    values, (_, made) = values_of(graph, model, args), planned("masked", "pp=4", "zero-bubble")
    found = simulate_pipeline(made.stages, made.schedules, made.order, values).outputs
    for key, wanted in run_on_one(graph, values).items():
        assert key[1] == "microbatch.divisor" or torch.equal(found[key], wanted), key


def test_gradients_of_weights_fill_the_time_in_which_stages_wait() -> None:
    steps = {order: planned("masked", "pp=4", order)[1].times for order in ORDERS}
    assert steps["zero-bubble"].step < 0.97 * steps["whole"].step
    assert steps["whole"].step <= (1 + 1e-9) * min(steps["1f1b"].step, steps["gpipe"].step)
    assert steps["auto"] == steps["zero-bubble"]
    assert steps["1f1b"].in_flight == (4, 3, 2, 1) and steps["gpipe"].in_flight == (4, 4, 4, 4)
    assert all(one < other for one, other in zip(steps["1f1b"].peaks[1:], steps["gpipe"].peaks[1:], strict=True))


@pytest.mark.parametrize("order", ORDERS)
def test_the_file_holds_and_runs_what_was_planned(order: OrderName) -> None:
    plan, (_, found) = file_of("masked", "pp=4", order), planned("masked", "pp=4", order)
    assert not check_pipeline(plan, capture("masked", 4)[2])
    replayed = replay_pipeline(plan, capture("masked", 4)[2])
    assert [write_order(replayed.order, stage) for stage in range(4)] == [write_order(found.order, stage) for stage in range(4)]
    assert [str(one) for one in replayed.schedules] == [str(one) for one in found.schedules]
    bars = stage_bars(plan)
    assert max(bar.end for bar in bars) == pytest.approx(plan.objective.seconds)
    split = order in ("auto", "zero-bubble")
    assert {bar.kind for bar in bars} == {"forward", "backward", "optimizer", *(["weights"] if split else [])}
    assert ("weight gradients" in pipeline_svg(plan)) is split
    words = pipeline_summary(plan)
    assert ("gradients of weights apart" in words, "backward whole" in words) == (split, not split)
    assert ("zero-bubble" in words) is split
    keys = ('"weights_seconds"', '"last_weights_seconds"', '"held_for_weights_bytes_per_rank"')
    assert [key in plan.to_json() for key in keys] == [split] * 3
    assert ('\n "order"' in plan.to_json()) is (order != "auto")


@pytest.mark.parametrize("order", ["whole", "zero-bubble"])
def test_no_stage_is_said_to_need_more_than_the_step(order: OrderName) -> None:
    weights = 1.0 if order == "zero-bubble" else 0.0
    costs = [StageCosts(1.0, 2.0 - weights, 2.0 - weights, 0.0, 1, 1, 2.0 - weights, weights, weights) for _ in range(3)]
    stages = Stages((), tuple(Boundary(f"{a}{b}", a, b) for a, b in ((0, 1), (1, 2), (2, 1), (1, 0))), 3)
    found = choose_order(order, stages, costs, 3, 0.1, 100)
    assert found is not None
    step = time_pipeline(stages, costs, found, 0.1).step
    least = [need.least for need in find_stage_needs(costs, 3, 0.1, 3)]
    assert max(least) <= step * (1 + 1e-9) and max(least) > 0.9 * step


def test_an_older_file_has_whole_backwards() -> None:
    plan = file_of("masked", "pp=4", "whole")
    text = plan.to_json()
    assert not any(f'"{key}"' in text for key in StagePlan.model_fields if "weights" in key)
    older = PipelinePlan.from_json(text.replace(' "order": "whole",\n', ""))
    assert older.order == "auto" and not older.split
    assert not check_pipeline(older)


def test_whole_backwards_are_taken_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned("masked", "pp=4", "auto")[1]
    assert found.split
    choose = planning.choose_order

    def without(name: OrderName, *rest: Any) -> Any:
        return None if name == "zero-bubble" else choose(name, *rest)

    monkeypatch.setattr(planning, "choose_order", without)
    whole = plan_pipeline(capture("masked", 4)[2], PipelineRequest(machine("pp=4", stress=True), 1 << 40, effort="low"))
    assert not whole.split and whole.times.step > found.times.step
    assert found.bound_seconds < whole.bound_seconds, "orders of whole backwards are some of those with gradients of weights apart"


def _changed(plan: PipelinePlan, stage: int, /, **fields: object) -> PipelinePlan:
    rows = [row.model_copy(update=fields) if number == stage else row for number, row in enumerate(plan.stages)]
    return plan.model_copy(update={"stages": tuple(rows)})


def _interleaved(plan: PipelinePlan) -> PipelinePlan:
    """The last stage makes a gradient of a weight before what it sends."""
    stage = plan.stages[3]
    rows = list(stage.plan.schedule)
    sent = next(row.value or row.tensor for name, row in stage.plan.outputs.items() if name.startswith("send."))
    sending = next(place for place, row in enumerate(rows) if sent in row.writes)
    adding = next(place for place, row in enumerate(rows) if row.kind == "add")
    assert sending < adding
    rows.insert(adding, rows.pop(sending))
    return _changed(plan, 3, plan=stage.plan.model_copy(update={"schedule": tuple(rows)}))


MUTATIONS: dict[str, Callable[[PipelinePlan], PipelinePlan]] = {
    "weights dropped": lambda plan: _changed(plan, 1, order=plan.stages[1].order.replace(" W2", "")),
    "weights before backward": lambda plan: _changed(plan, 1, order="W0 " + plan.stages[1].order.replace(" W0", "", 1)),
    "weights swapped": lambda plan: _changed(plan, 1, order=plan.stages[1].order.translate(str.maketrans("12", "21"))),
    "weights' seconds": lambda plan: _changed(plan, 1, weights_seconds=plan.stages[1].backward_seconds / 3),
    "last weights' seconds": lambda plan: _changed(plan, 1, last_weights_seconds=None),
    "held for weights": lambda plan: _changed(plan, 3, held_for_weights_bytes_per_rank=1 << 20),
    "backward whole": lambda plan: plan.model_copy(update={"order": "whole"}),
    "sent late": _interleaved,
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_check_finds_what_is_changed(name: str) -> None:
    assert check_pipeline(MUTATIONS[name](file_of("masked", "pp=4", "zero-bubble")))


@pytest.mark.parametrize("name", ["weights dropped", "weights before backward", "weights swapped", "sent late"])
def test_what_cannot_be_run_is_refused_before_it_is(name: str) -> None:
    with pytest.raises(MismatchError, match=r"cannot be run|waits for ever"):
        replay_pipeline(MUTATIONS[name](file_of("masked", "pp=4", "zero-bubble")), capture("masked", 4)[2])


def _mutated(lines: list[str], random_: random.Random) -> list[str]:
    """An action is dropped, stands twice, or goes elsewhere in its stage."""
    found, stage = list(lines), random_.randrange(len(lines))
    words = found[stage].split()
    word = words.pop(random_.randrange(len(words)))
    change = random_.choice(("dropped", "twice", "moved", "moved"))
    for _ in range({"dropped": 0, "twice": 2, "moved": 1}[change]):
        words.insert(random_.randrange(len(words) + 1), word)
    found[stage] = " ".join(words)
    return found


def test_legality_and_check_refuse_the_same_timetables() -> None:
    plan, graph = file_of("masked", "pp=4", "zero-bubble"), capture("masked", 4)[2]
    stages, random_, refused = cut_graph(graph, plan.cut), random.Random(0), 0
    for seed in range(TIMETABLES):
        order = random_order(stages, 4, seed, split=True)
        lines = _mutated([write_order(order, stage) for stage in range(4)], random_)
        try:
            illegal = bool(list(problems_of(read_order(lines), stages, 4)))
        except MismatchError:
            illegal = True
        rows = [row.model_copy(update={"order": line}) for row, line in zip(plan.stages, lines, strict=True)]
        found = check_pipeline(plan.model_copy(update={"stages": tuple(rows)}))
        assert any(one.where.endswith(".order") for one in found) is illegal, lines
        refused += illegal
    assert refused > TIMETABLES / 2


def test_usual_orders_are_those_of_the_books() -> None:
    assert write_lines("gpipe", 2, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1"]
    assert write_lines("1f1b", 3, 4) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert write_lines("1f1b", 4, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_an_order_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"unknown order 'dualpipe'"):
        parse_order("dualpipe")
    for text in ("interleaved:1", "interleaved:", "interleaved:65", "interleaved:two"):
        with pytest.raises(UsageError, match=r"has no number of stages a rank from 2 to 64"):
            parse_order(text)
    with pytest.raises(UsageError, match=r"unknown order '1f1b:2'"):
        autopar.plan_pipeline(nn.Linear(2, 2), (torch.randn(2, 2),), mesh="pp=2", order="1f1b:2")
    assert parse_order("interleaved") == ("interleaved", 2) and parse_order("interleaved:3") == ("interleaved", 3)
