"""Memory: what the problem counts against what schedules hold, answers under limits, and the least that does."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import autopar
from autopar import pricing, zoo
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.effort import unlimited
from autopar.errors import InfeasibleError
from autopar.graph import Accumulation, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.pipeline.clock import measure_stage
from autopar.schedule import Limits, make_schedule, memory, step_seconds
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.schedule.local_search import improve_order
from autopar.schedule.passes import ENDING, PLACING, ordered, run_passes
from autopar.search import SearchResult, Thresholds, find_plan
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model
from autopar.search.ilp.pair_memory import find_pairs
from autopar.search.memory.memory_repair import CoverRows, count_bytes, measure_held_bytes, solve_fixed
from autopar.sharding import ShardingSpec
from autopar.solvers import INFINITE, Problem, evaluate, solve
from tests.graphs import random_graph, random_schedule
from tests.work import part_of_work

MESHES = ("x=4", "x=2,y=2")
SEEDS = range(6)


def machine(mesh: str) -> Machine:
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")


def model_of(graph: Graph, mesh: str) -> Model:
    return build_model(Space(graph, machine(mesh), "adamw", Pins()))


def drawn(model: Model, seed: int) -> np.ndarray:
    """Any choices that go together."""
    rng = np.random.default_rng(seed)
    costs = [np.where(np.isfinite(node.seconds), rng.integers(0, 2**40, len(node.seconds)), INFINITE) for node in model.nodes]
    edges = [
        (edge.source, edge.target, np.where(np.isfinite(edge.seconds), rng.integers(0, 2**36, edge.seconds.shape), INFINITE))
        for edge in model.edges
    ]
    choices = solve(Problem.build(costs, edges), gap=0.9).choices
    assert choices is not None
    return choices


@pytest.mark.parametrize(("microbatches", "in_flight"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("mesh", MESHES)
def test_no_plan_holds_less_than_the_problem_says_and_few_hold_much_more(mesh: str, microbatches: int, in_flight: int) -> None:
    """Of several microbatches some plans drawn keep copies of parameters that are gathered once."""
    ratios, kept = [], 0
    for seed in SEEDS:
        graph = random_graph(seed, layers=4)
        made = Accumulation(microbatches, tuple(item.tensor for item in graph.of_kind("input")), in_flight=in_flight)
        graph = graph.accumulated(made)
        model = model_of(graph, mesh)
        problem, _ = model.problem(None)
        for number in range(2):
            choices = drawn(model, 10 * seed + number)
            asked = evaluate(problem, choices)[1]
            plan = decode_assignment(model, choices)
            schedule = make_schedule(model.space.graph, plan, model.space.machine, LEAN_LIMITS)
            held, kept = memory(schedule, "adamw").peak, kept + len(schedule.kept_values)
            alone = replace(schedule, graph=graph.accumulated(replace(made, in_flight=1)))
            assert asked <= held == measure_stage(alone, "adamw").peak_with(in_flight)
            ratios.append(asked / held)
    assert statistics.median(ratios) > 0.8, "of plans drawn at random, which reshard everywhere"
    assert (kept > 0) is (microbatches > 1)


def test_no_list_holds_less_than_the_problem_says_whatever_is_moved() -> None:
    """Operators in another order could: a gradient of weights before that of what is before them frees an activation at the peak."""
    target = zoo.build("mlp")
    model = model_of(autopar.capture(target.model, target.args), "dp=2,tp=2")
    problem, _ = model.problem(None)
    choices = solve(problem, gap=0.01).choices
    assert choices is not None
    first = replace(ordered(model.space.graph, decode_assignment(model, choices), model.space.machine), limits=LEAN_LIMITS)
    found = improve_order(run_passes(first, PLACING), "adamw", 1).schedule
    assert evaluate(problem, choices)[1] <= memory(run_passes(found, ENDING), "adamw").peak


def test_pairs_say_what_reshards_hold_beside_their_results() -> None:
    """With them, what is counted at the peak is nearer to what is held there; choices that go together still do."""
    nearer = 0
    for seed in SEEDS:
        model = model_of(random_graph(seed, layers=4), "x=2,y=2")
        graph, problem = model.space.graph, model.problem(None)[0]
        choices = drawn(model, seed)
        schedule = make_schedule(graph, decode_assignment(model, choices), model.space.machine, LEAN_LIMITS)
        reserves = CoverRows(model, limit=1)
        held = measure_held_bytes(((1.0, schedule),), "adamw", reserves.op_times)
        assert held.max() == memory(schedule, "adamw").peak
        before = count_bytes(problem, choices, len(held))
        time = int(np.argmax((held - before)[: len(reserves.op_times)]))
        reserves.pairs[time] = find_pairs(model, choices, time, reserves.op_times)
        asked = reserves.apply(problem)
        full = reserves.complete(choices)
        assert evaluate(asked, full)[0] == evaluate(problem, choices)[0]
        after = count_bytes(asked, full, len(held))
        assert (np.delete(after, time) == np.delete(before, time)).all()
        nearer += abs(int(held[time] - after[time])) < held[time] - before[time]
    assert nearer >= len(SEEDS) - 1


def test_what_is_left_free_is_what_a_schedule_held_beyond() -> None:
    model = model_of(random_graph(1, layers=4), "x=2,y=2")
    problem, _ = model.problem(None)
    choices = drawn(model, 1)
    schedule = make_schedule(model.space.graph, decode_assignment(model, choices), model.space.machine, LEAN_LIMITS)
    limit = memory(schedule, "adamw").peak - 1
    reserves = CoverRows(model, limit, pairs=False)
    assert reserves.learn(problem, choices, ((1.0, schedule),))
    _, peak, _ = evaluate(reserves.apply(problem), reserves.complete(choices))
    assert limit < peak <= limit * 1.01, "the same choices do not fit any more"


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_go_ahead_only_where_there_is_room(seed: int) -> None:
    graph, where = random_graph(seed, layers=6), machine("x=2,y=2")
    least = memory(random_schedule(graph, where, seed, LEAN_LIMITS), "none").peak
    steps = []
    for more in (0, 200, 800, 2**30):
        within = random_schedule(graph, where, seed, Limits(0, 2**40, 0, held_bytes=least + more))
        assert memory(within, "none").peak <= least + more
        steps.append(step_seconds(within, "none"))
    lean = step_seconds(random_schedule(graph, where, seed, LEAN_LIMITS), "none")
    assert steps[-1] < lean


def ladder(graph: Graph, mesh: str, rungs: int) -> list[float]:
    """Steps of plans from little memory to the free peak, None where nothing was found."""
    free = find_plan(graph, machine(mesh))
    with pytest.raises(InfeasibleError) as told:
        find_plan(graph, machine(mesh), memory_bytes=1)
    least = int(re.findall(r"allow at least (\d+) bytes", str(told.value))[0])
    found = []
    for rung in range(rungs):
        limit = least + (free.memory.peak - least) * rung // (rungs - 1)
        tight = find_plan(graph, machine(mesh), memory_bytes=limit)
        assert tight.memory.peak <= limit
        assert free.bound_seconds <= tight.seconds * (1 + 1e-9)
        for rival in tight.baselines.values():
            assert not rival.feasible or rival.seconds >= tight.seconds * (1 - 1e-9)
            assert rival.memory.peak >= least, "what is named the least counts every baseline"
        found.append(tight.seconds)
    return found


@pytest.mark.parametrize("seed", [0, 3])
def test_more_memory_never_costs_more_and_the_least_named_does(seed: int) -> None:
    found = ladder(random_graph(seed, layers=2, batch=64, width=32), "x=4", 3)
    for less, more in pairwise(found):
        assert more <= less * (1 + 0.02)


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("seed", range(4))
def test_plan_is_the_same_whether_the_limit_is_in_the_problem_from_the_start(seed: int) -> None:
    """A limit is left out of the problem while solutions respect it, and put in after the first that does not."""
    graph, on = random_graph(seed, layers=4), machine("x=2,y=2")

    def within(limit: int, roomy: float) -> SearchResult:
        return find_plan(graph, on, memory_bytes=limit, time_limit=600.0, thresholds=Thresholds(roomy=roomy))

    free = within(2**60, 1.0)
    assert within(2**60, 0.0).seconds == pytest.approx(free.seconds, rel=1e-12)
    tight = int(0.97 * free.memory.peak)
    left_out, from_the_start = within(tight, 1.0), within(tight, 0.0)
    assert left_out.memory.peak <= tight and from_the_start.memory.peak <= tight
    assert left_out.seconds == pytest.approx(from_the_start.seconds, rel=1e-12)


def images(batch: int = 64) -> Graph:
    """Two readers of a large input that is not trained, each of which splits it for nothing."""
    shapes = {"x": (batch, 64), "w": (16, 64), "h": (batch, 16), "loss": (), "g": (batch, 16), "gw": (16, 64)}
    ops = (
        Op("h", "autopar.contract.default", ("x", "w"), ("h",), (Ref(0), Ref(1), "b k, n k -> b n")),
        Op("loss", "aten.sum.default", ("h",), ("loss",), (Ref(0),)),
        Op("g", "aten.relu.default", ("h",), ("g",), (Ref(0),), phase="backward"),
        Op("gw", "autopar.contract.default", ("g", "x"), ("gw",), (Ref(0), Ref(1), "b n, b k -> n k"), phase="backward"),
    )
    inputs = (GraphInput("x", "input", "x"), GraphInput("w", "parameter", "w", trained=True))
    outputs = (GraphOutput("loss", "output", "loss"), GraphOutput("gw", "gradient", "w"))
    return Graph("train", {name: Tensor(name, shape, "float32") for name, shape in shapes.items()}, inputs, ops, outputs)


@part_of_work(0.1)
def test_crossover_follows_where_memory_is_short_and_the_gap_is_wide() -> None:
    """A baseline fits, and the solves of the whole problem find nothing faster."""
    made = zoo.build("resnet", mode="train", blocks="1-1", width=8, image=16, batch=8, classes=4, device="meta")
    graph = autopar.capture(made.model, made.args, made.kwargs, mode="train", loss=made.loss, loss_args=made.loss_args)
    on = machine("x=2,y=4")
    limit = int(0.6 * find_plan(graph, on, recompute=True).memory.peak)
    found = find_plan(graph, on, memory_bytes=limit, recompute=True)
    without = find_plan(graph, on, memory_bytes=limit, recompute=True, skip={"crossover"})
    assert found.memory.peak <= limit and found.seconds < 0.8 * without.seconds


def test_crossover_follows_where_the_gap_is_wide_in_plenty_of_memory() -> None:
    """DeepSeek-V3's layers take 4 % less by it."""
    graph, on = random_graph(2, layers=3), machine("x=2,y=2")
    phases = [
        {phase.name for phase in find_plan(graph, on, gap=0.0, recompute=True, thresholds=Thresholds(loose_gap=wide)).trace}
        for wide in (-1.0, 1.0)
    ]
    assert phases[0] - phases[1] == {"crossover"}


def test_ties_go_to_less_memory() -> None:
    """At equal cost an input that every reader splits is not kept whole."""
    found = find_plan(images(2**20), machine("x=4"), optimizer="sgd")
    assert str(found.schedule.specs["x"]) == "S0 R"


def test_choices_stand_for_an_assignment() -> None:
    model = model_of(random_graph(2, layers=3), "x=2,y=2")
    problem, _ = model.problem(None)
    assignment = decode_assignment(model, drawn(model, 2))
    choices = solve_fixed(model, problem, assignment, 0, unlimited())
    assert choices is not None
    again = decode_assignment(model, choices)
    assert (again.inputs, again.strategies) == (assignment.inputs, assignment.strategies)
    nowhere = ShardingSpec(((), ()), ((0, "sum"),))
    assert solve_fixed(model, problem, replace(assignment, inputs=dict.fromkeys(assignment.inputs, nowhere)), 0, unlimited()) is None


def test_a_copy_that_is_gathered_once_counts_beside_what_rests() -> None:
    """At the optimizer's step, when nothing is read: the part at rest, its gradient and states, and the copy."""
    target = zoo.build("mlp")
    graph = autopar.capture(target.model, target.args, loss=target.loss, loss_args=target.loss_args, microbatches=4)
    model, copies = model_of(graph, "x=2,y=2"), 0
    space, end = model.space, len(graph.ops)
    for name in graph.stepped:
        node = model.nodes[model.node_number["input", name]]
        sizes = zip(space.stored_bytes(name, node.resting), space.stored_bytes(name, node.specs), strict=True)
        for items, rest, read, (local, kept) in zip(node.items, node.resting, node.specs, sizes, strict=True):
            held = sum(size for begin, behind, size in items if begin <= end < behind)
            assert held == 2 * local + pricing.state_bytes(graph, name, local, "adamw") + (kept if read != rest else 0)
            copies += read != rest
    assert copies > 0
