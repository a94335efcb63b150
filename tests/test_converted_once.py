"""Weights that are converted once a step and gathered once behind that, with mixed precision and several microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.check import check
from autopar.check.pipelines import check_pipeline
from autopar.cli.target import capture_target
from autopar.compare import explain
from autopar.effort import Budget, Meter
from autopar.errors import ScheduleError
from autopar.graph import Graph
from autopar.pipeline.layer_tables import measure_layers
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.recording import replay
from autopar.recording.replaying import assignment_of
from autopar.schedule import Schedule, make_schedule
from autopar.schedule.instructions import BEFORE_ALL
from autopar.schedule.legality import check_legal
from autopar.schedule.liveness import memory
from autopar.schedule.simulation import step_seconds
from autopar.schedule.storages import resting_bytes
from autopar.schedule.text import format_instructions, parse
from autopar.search.baselines.checkpointing import apply_policies
from autopar.search.baselines.propagate import SpecPropagation
from autopar.search.baselines.recipes import find_baselines, recipes
from autopar.search.baselines.stored import store_split
from autopar.search.bounds.surrogate import PHASES, Evaluation, Multipliers, Term, bytes_by_time
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.driver.phase_table import Search
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.memory.memory_repair import solve_fixed
from autopar.verify import verify, verify_pipeline
from autopar.verify.launch import run_ranks
from tests.graphs import machine, random_schedule
from tests.graphs import plan_of as recorded
from tests.test_gathered_once import assert_seen

PINS = {"up.weight": "S0 R", "down.weight": "S0 R", "up.bias": "R", "down.bias": "R", "input:x": "S0 R"}
"""Rows and weights split alike, as FSDP has them: each weight is gathered."""
COUNT = 4
"""Microbatches."""
WEIGHTS = {"up.weight": 64 * 512, "down.weight": 64 * 512}
"""Entries."""


class Wide(nn.Module):
    """Two weights that are small beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).float().square().mean()


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Wide(), (torch.randn(2048 * COUNT, 64),)


@lru_cache
def graph_of(microbatches: int = COUNT, dtype: str = "bfloat16") -> Graph:
    model, args = example()
    return autopar.capture(model, args, microbatches=microbatches, compute_dtype=dtype)


@lru_cache
def plan_of(memory: int = 0, dtype: str = "bfloat16") -> Plan:
    asked: dict[str, Any] = {"memory": memory} if memory else {}
    return autopar.plan(graph_of(COUNT, dtype), mesh="dp=4", hardware="cpu-cluster", constraints=PINS, **asked)


@lru_cache
def by_hand(once: bool) -> Plan:
    """ZeRO-2, and the same with every conversion and gather in each microbatch."""
    graph, where = graph_of(), machine("dp=4")
    given = find_baselines(Space(graph, where, "adamw", Pins()))["zero2"]
    layouts = tuple(replace(layout, once=layout.once and once) for layout in given.layouts)
    return recorded(make_schedule(graph, replace(given, layouts=layouts, once=given.once if once else frozenset()), where))


def run_once(plan: Plan) -> list[str]:
    """The parameters that are converted before the first microbatch."""
    read = {row.name: row.inputs[0].tensor for row in plan.ops if row.inputs}
    return sorted(read[row.of] for row in rows_of(plan))


def gathers_in_a_step(plan: Plan) -> dict[str, tuple[int, int]]:
    """How often each weight, by what it is converted to, is gathered in a step, and the bytes of it."""
    read, found = {row.outputs[0].tensor: row.inputs[0].tensor for row in plan.ops if row.inputs}, dict[str, tuple[int, int]]()
    for row in plan.collectives:
        for part in row.members:
            if row.kind == "all_gather":
                name = read.get(part.tensor, part.tensor)
                found[name] = found.get(name, (0, 0))[0] + row.times, part.bytes
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast-bfloat16"])
def test_weights_are_converted_and_gathered_once_where_there_is_room(dtype: str) -> None:
    plan = plan_of(dtype=dtype)
    assert {"down.weight", "up.weight"} <= set(run_once(plan))
    assert gathers_in_a_step(plan) == {name: (1, 2 * entries) for name, entries in WEIGHTS.items()}
    assert all(row.times == (1 if row.inputs[0].tensor in run_once(plan) else COUNT) for row in plan.ops if row.phase == "forward")
    assert check(plan) == () and Plan.from_json(plan.to_json()) == plan


def test_a_search_sees_how_gathers_would_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each gather hides behind what runs in its microbatch. Where all stand before the first, no schedule shows that."""
    graph = capture_target("zoo:llama3-8b,layers=1,batch=64,seq=4096,vocab=4096,dtype=float32", "train", "bfloat16", COUNT)
    found = autopar.plan(graph, mesh="dp=64", hardware="h100-sxm").objective.seconds
    monkeypatch.setattr(Search, "_learn_in_each_microbatch", lambda self: None)
    assert found < 0.9 * autopar.plan(graph, mesh="dp=64", hardware="h100-sxm").objective.seconds


def test_without_microbatches_nothing_is_made_once() -> None:
    graph = graph_of(1)
    assert graph.conversions and not Space(graph, machine("dp=4"), "adamw", Pins()).made_once


def test_a_pinned_conversion_runs_in_each_microbatch() -> None:
    plan = autopar.plan(graph_of(), mesh="dp=4", hardware="cpu-cluster", constraints={**PINS, "op:to_copy": "R R"})
    assert plan.ops[0].name == "to_copy" and plan.ops[0].times == COUNT and check(plan) == ()


def test_where_memory_is_short_they_are_gathered_in_each_microbatch() -> None:
    ample = plan_of()
    short = plan_of(ample.predicted.peak_memory_bytes_per_rank - 200_000)
    assert {times for times, _ in gathers_in_a_step(short).values()} == {COUNT}
    assert short.predicted.peak_memory_bytes_per_rank <= short.memory_limit_bytes_per_rank
    assert short.objective.seconds > ample.objective.seconds and check(short) == ()


def rows_of(plan: Plan) -> list[Any]:
    """The operators that run before the first microbatch."""
    return [row for row in plan.schedule if row.kind == "run" and row.microbatch < 0]


def test_it_is_faster_than_in_each_microbatch() -> None:
    assert assignment_of(plan_of(), graph_of()).once == {row.of for row in rows_of(plan_of())}
    assert plan_of().objective.seconds <= by_hand(True).objective.seconds < by_hand(False).objective.seconds
    assert WEIGHTS.keys() <= set(run_once(by_hand(True))) and not run_once(by_hand(False))


@pytest.mark.parametrize("recompute_times", [0, 2])
def test_the_problem_counts_what_is_kept_throughout_and_no_more_than_the_list(recompute_times: int) -> None:
    graph, where = graph_of(), machine("dp=4")
    given = find_baselines(Space(graph, where, "adamw", Pins()))["zero2"]
    model = build_model(Space(graph, where, "adamw", Pins()).restricted_to_plans([given]), recompute_times=recompute_times)
    problem, _ = model.problem(None)
    choices = solve_fixed(model, problem, given, 0, Budget(Meter(30.0), 30.0))
    assert choices is not None
    found = decode_assignment(model, choices)
    assert set(run_once(by_hand(True))) <= {graph.op[name].inputs[0] for name in found.once} and not found.again
    schedule = make_schedule(graph, found, where)
    copies = sum(schedule.local_bytes(value) for value in schedule.kept_values)
    held = bytes_by_time(model, choices)
    priced = Multipliers({Term(phase, link): 1.0 for phase in PHASES for link in model.space.links}, 0.0)
    counted = [(node.once, table, choice) for node, table, choice in zip(model.nodes, priced.price(model).nodes, choices, strict=True)]
    whole = [(float(once[choice]), float(table[choice])) for once, table, choice in counted if once is not None]
    assert all(once == price for once, price in whole) and 0 < sum(once for once, _ in whole) < Evaluation(model, choices).optimizer
    assert copies >= 2 * sum(WEIGHTS.values()) and held.min() >= resting_bytes(schedule, "adamw") + copies
    assert held.max() <= memory(schedule, "adamw").peak
    names = [name for name in graph.conversions if name in found.once]
    for node, choice in zip(model.nodes, choices, strict=True):
        if recompute_times and node.kind == "saved" and node.name in names:
            assert not node.items[choice]  # what all microbatches read is there anyway


def test_the_text_of_the_list_parses_back() -> None:
    schedule = replay(plan_of(), graph_of())
    text = format_instructions(schedule.instructions)
    assert text.startswith("forward, once before all\n") and parse(text) == schedule.instructions


def test_explain_says_so() -> None:
    name = next(row.name for row in plan_of().ops if row.inputs and row.inputs[0].tensor == "down.weight")
    found = "\n".join(explain(plan_of(), name))
    assert "kept over all microbatches as 'R R', 65536 bytes on each rank" in found and "runs once a step, before its microbatches" in found
    found = "\n".join(explain(plan_of(), f"{name}@once"))
    gather = f"all_gather over dp of {2 * WEIGHTS['down.weight']} bytes"
    assert f"from 'S0 R' to 'R R' once a step, kept over its microbatches: {gather}" in found


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
def test_the_step_and_its_memory_are_those_predicted(backend: Any) -> None:
    found = verify(plan_of(), example(), backend=backend, steps=2)
    assert found.passed, found.problems


def gradients(plan: Plan, execute: str) -> dict[str, Tensor]:
    """Of the second of two steps, on the first rank: what is kept of one step is not of the next."""

    def rank_main(rank: int) -> dict[str, Tensor]:
        model, args = example()
        module = autopar.compile(model, plan, execute=execute)
        for _ in range(2):
            module.zero_grad()
            loss = module(*args)
            loss.backward()
            with torch.no_grad():
                module.up.weight.mul_(0.5)
        return {"loss": loss.detach(), **{name: item.grad.full_tensor() for name, item in module.named_parameters()}}

    found: dict[str, Tensor] = run_ranks(rank_main, 4)[0]
    return found


@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_gradients_are_those_of_the_plan_that_gathers_always(execute: str) -> None:
    once, each = gradients(by_hand(True), execute), gradients(by_hand(False), "eager")
    assert once.keys() == each.keys() and all(torch.equal(once[name], each[name]) for name in each)


def test_the_bound_is_below_plans_that_convert_once() -> None:
    graph = graph_of()
    plan = autopar.plan(graph, mesh="2x2", hardware="cpu-cluster")
    where, least = replay(plan, graph).machine, math.inf
    for seed in range(40):
        schedule = random_schedule(graph, where, seed, once=0.7)
        least = min(least, step_seconds(schedule, "adamw"))
    assert any(item.microbatch == BEFORE_ALL and item.kind == "run" for item in schedule.instructions)
    assert plan.objective.bound_seconds <= min(least, plan.objective.seconds)


@pytest.mark.parametrize(("name", "up", "down"), [("zero1", 1, 1), ("zero2", 1, 1), ("fsdp", COUNT, 2 * COUNT)])
def test_how_often_plans_by_hand_gather(name: str, up: int, down: int) -> None:
    """ZeRO-1 and ZeRO-2 hold whole parameters while microbatches run, in the dtype that these read."""
    graph, where = graph_of(), machine("dp=4")
    schedule = make_schedule(graph, find_baselines(Space(graph, where, "adamw", Pins()))[name], where)
    assert gathered(schedule, *WEIGHTS) == {"up.weight": (up, 2 * WEIGHTS["up.weight"]), "down.weight": (down, 2 * WEIGHTS["down.weight"])}


def gathered(schedule: Schedule, *names: str) -> dict[str, tuple[int, int]]:
    """How often each weight is gathered in a step, and its bytes."""
    graph, counts = schedule.graph, dict[str, tuple[int, int]]()
    for item in schedule.instructions:
        if item.kind == "start" and schedule.collectives[item.of].kind == "all_gather":
            for part in schedule.collectives[item.of].parts:
                maker = graph.producer.get(part.layout.tensor)
                name = part.layout.tensor if maker is None else maker.inputs[0]
                if name in names:
                    counts[name] = counts.get(name, (0, 0))[0] + schedule.times(item), round(part.step.full_bytes)
    return counts


@pytest.mark.parametrize("once", [True, False])
def test_parameters_split_further_are_gathered_as_they_are_read(once: bool) -> None:
    model = Deep(2, lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    graph, where = autopar.capture(model, deep()[1], microbatches=COUNT, compute_dtype="bfloat16"), machine("dp=4")
    space = Space(graph, where, "adamw", Pins())
    whole = SpecPropagation(space, recipes(space)["ddp"]).run()
    made = store_split(graph, whole, space, (0,), once=once)
    first, last = "0.0.weight", "1.2.weight"
    counts = gathered(make_schedule(graph, made, where), first, last)
    assert counts == {first: (1 if once else COUNT, 2 * 64 * 64), last: (1 if once else 2 * COUNT, 2 * 64 * 64)}
    (again,) = dict(apply_policies(graph, made, where)).values()
    counts = gathered(make_schedule(graph, again, where), first, last)
    assert again.again and counts == dict.fromkeys((first, last), (1 if once else 2 * COUNT, 2 * 64 * 64))


def test_a_draw_is_not_made_once_for_all() -> None:
    """An operator that draws makes something else in each microbatch, also of weights alone."""

    class Noisy(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ nn.functional.dropout(self.up.weight, 0.5).T).square().mean()

    model, (x,) = Noisy(), example()[1]
    graph = autopar.capture(model, (x,), microbatches=COUNT)
    schedule = random_schedule(graph, machine("dp=2"), 0)
    drawn = next(op.name for op in graph.ops if "dropout" in op.target and op.phase == "forward")
    moved = [item._replace(microbatch=BEFORE_ALL) for item in schedule.instructions if item.of == drawn]
    rest = [item for item in schedule.instructions if item.of != drawn]
    assert moved and not graph.conversions
    with pytest.raises(ScheduleError, match="which it may not: it draws other numbers in each microbatch"):
        check_legal(replace(schedule, instructions=(*moved, *rest)), "the test")


def rows_before(data: Any, kind: str) -> list[Any]:
    found = [row for row in data["schedule"] if row.get("microbatch", 0) < 0 and row["kind"] == kind]
    assert found
    return found


def later(data: Any) -> None:
    """The first operator that reads the input runs before all too."""
    place = next(place for place, row in enumerate(data["schedule"]) if "x" in row.get("reads", ()) and row["kind"] == "run")
    row = data["schedule"].pop(place)
    data["schedule"].insert(0, {**row, "microbatch": -1})


EDITS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda data: rows_before(data, "run")[0].update(microbatch=0), "instructions are what runs before all"),
    (lambda data: [row.pop("once") for row in data["reshards"] if row.get("once")], "is no reshard made once"),
    (lambda data: data["schedule"].append(data["schedule"].pop(0)), "instructions are what runs before all"),
    (later, "runs before the first microbatch for all of them, which it may not: it reads x of one"),
    (lambda data: data["ops"][0].update(times=COUNT), f"times: {COUNT} in the plan, 1 recomputed"),
    (lambda data: data["predicted"].update(compute_seconds=data["predicted"]["compute_seconds"] * 1.01), "predicted.compute_seconds"),
    (lambda data: data["predicted"].update(step_seconds=data["predicted"]["step_seconds"] * 0.99), "predicted.step_seconds"),
    (lambda data: data["predicted"]["memory"].update(activations=data["predicted"]["memory"]["activations"] - 8), "memory.activations"),
]


@pytest.mark.parametrize(("edit", "said"), EDITS, ids=[said for _, said in EDITS])
def test_check_sees_an_edit(edit: Callable[[Any], Any], said: str) -> None:
    assert_seen(plan_of(), edit, said)


class Deep(nn.Sequential):
    """Layers in a row."""

    def __init__(self, layers: int = 4, make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())) -> None:
        super().__init__(*(make() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


def deep() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Deep(), (torch.randn(512, 64),)


def test_equal_layers_that_are_decided_once_all_convert_once() -> None:
    graph = autopar.capture(Deep(8), (torch.randn(4096, 64),), microbatches=COUNT, compute_dtype="bfloat16")
    plan = autopar.plan(graph, mesh="dp=4", hardware="cpu-cluster", constraints={"*.weight": "S0 R"})
    assert {f"{layer}.0.weight" for layer in range(8)} <= set(run_once(plan)) and check(plan) == ()


@lru_cache
def pipeline() -> PipelinePlan:
    pins = {f"{layer}.0.weight": "S0 R" for layer in range(4)}
    model, args = deep()
    return autopar.plan_pipeline(
        model, args, mesh="pp=2,dp=2", microbatches=COUNT, hardware="cpu-cluster", constraints=pins, compute_dtype="bfloat16",
    )  # fmt: skip


def test_stages_of_a_pipeline_convert_before_their_first_microbatch() -> None:
    plan = pipeline()
    assert check_pipeline(plan) == () and PipelinePlan.from_json(plan.to_json()) == plan
    for stage in plan.stages:
        assert any(name.endswith("weight") for name in run_once(stage.plan))
    found = verify_pipeline(plan, deep())
    assert found.passed, found.problems


def test_a_layer_holds_what_is_converted_at_rest_and_not_for_each_microbatch() -> None:
    """Beside the same list that converts and gathers in every microbatch."""
    schedule = replay(plan_of(), graph_of())
    items = tuple(item._replace(microbatch=max(item.microbatch, 0)) for item in schedule.instructions)
    once, each = (measure_layers(made, "adamw") for made in (schedule, replace(schedule, instructions=items)))
    copies = sum(schedule.local_bytes(value) for value in schedule.kept_values)
    assert sum(modes[0].rest for modes in once.modes) - sum(modes[0].rest for modes in each.modes) == copies > 0
    assert sum(modes[0].held for modes in once.modes) < sum(modes[0].held for modes in each.modes)
