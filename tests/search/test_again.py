"""Keeping and making again as the search chooses them, against every set of second runs there is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.rules import why_once
from autopar.schedule import Assignment, Schedule, make_schedule, memory
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.search import SearchResult, Thresholds, find_plan
from autopar.search.baselines.checkpointing import recompute
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model
from autopar.solvers import evaluate, solve
from tests.search.small_graphs import small_graph, small_machine

EXACT = 2e-7
"""Relative difference: what the problem adds so that ties go to less memory."""
MOMENTS = 32
"""More times than any operator here may run again at: the problem is exact."""
MOST_RUNS = 6
"""Operators that may run again, in graphs for which all sets of them are tried."""
SEEDS = range(210)
QUICK = range(12)


def chain(length: int, width: int = 64) -> Graph:
    """``length`` times tanh, whose gradient needs its result."""
    tensors = {name: Tensor(name, (width, width), "float32") for name in ("x", "g")}
    ops: list[Op] = []
    last, given = "x", "g"
    for number in range(length):
        name = f"f{number}"
        tensors[name] = Tensor(name, (width, width), "float32")
        ops.append(Op(name, "aten.tanh.default", (last,), (name,), (Ref(0),)))
        last = name
    for number in reversed(range(length)):
        name = f"b{number}"
        tensors[name] = Tensor(name, (width, width), "float32")
        ops.append(Op(name, "aten.tanh_backward.default", (given, f"f{number}"), (name,), (Ref(0), Ref(1)), phase="backward"))
        given = name
    inputs = (GraphInput("x", "input", "x"), GraphInput("g", "tangent", "0"))
    return Graph("train", tensors, inputs, tuple(ops), (GraphOutput(last, "output", "0"), GraphOutput(given, "gradient", "x")))


def one_rank() -> Machine:
    return Machine(Mesh.parse("x=1"), load_hardware("h100-sxm"), "roofline")


def model_of(graph: Graph, machine: Machine, *, again: int = MOMENTS) -> Model:
    return build_model(Space(graph, machine, "sgd", Pins()), recompute_times=again)


def in_sequence(schedule: Schedule, optimizer: str = "sgd") -> float:
    return sum(item.seconds for item in schedule.instructions) + schedule.optimizer_seconds(optimizer)


def every_set(graph: Graph, base: Assignment, machine: Machine) -> Iterator[tuple[float, int]]:
    """Seconds in sequence and the peak of every set of second runs."""
    names = [op.name for op in graph.ops if op.phase == "forward" and not why_once(op)]
    for count in range(len(names) + 1):
        for some in combinations(names, count):
            schedule = make_schedule(graph, recompute(graph, base, some, machine), machine, LEAN_LIMITS)
            yield in_sequence(schedule), memory(schedule, "sgd").peak


def drawn(seed: int) -> Graph:
    """A training graph of few operators that may run again, of which backward needs at least three results."""
    number = seed * 1000
    while True:
        graph = small_graph(number, most=16, forward=MOST_RUNS)
        made = {op.name for op in graph.ops if op.phase == "forward"}
        needed = {tensor for op in graph.ops if op.phase == "backward" for tensor in op.inputs if tensor in made}
        if graph.mode == "train" and len(made) <= MOST_RUNS and len(needed) >= 3:
            return graph
        number += 1


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in SEEDS])
def test_all_sets_of_second_runs(seed: int) -> None:
    """Under each memory that some set of second runs needs, the problem's optimum is no more than the cheapest set's, its answer costs as
    a schedule what it says and holds no less than it counts; and where it fits it is the cheapest."""
    every_set_is_known(drawn(seed), small_machine(seed, "x=1"))


def test_what_is_made_again_is_written_over_in_forward() -> None:
    """At the peak a sum takes the memory of what backward needs and will make again."""
    names = {"x": 64, "z": 64, "a": 64, "b": 64, "s": 1, "r": 1, "o": 1, "g": 64, "h": 64, "d": 1, "w": 1}
    tensors = {name: Tensor(name, (size, size) if size > 1 else (), "float32") for name, size in names.items()}
    ops = (
        Op("z", "aten.tanh.default", ("x",), ("z",), (Ref(0),)), Op("a", "aten.mul.Tensor", ("x", "x"), ("a",), (Ref(0), Ref(1))),
        Op("b", "aten.add.Tensor", ("a", "x"), ("b",), (Ref(0), Ref(1))), Op("s", "aten.sum.default", ("b",), ("s",), (Ref(0),)),
        Op("r", "aten.sum.default", ("z",), ("r",), (Ref(0),)), Op("o", "aten.add.Tensor", ("s", "r"), ("o",), (Ref(0), Ref(1))),
        Op("g", "aten.full.default", (), ("g",), ((64, 64), 1.0), phase="backward"),
        Op("h", "aten.mul.Tensor", ("g", "a"), ("h",), (Ref(0), Ref(1)), phase="backward"),
        Op("d", "aten.sum.default", ("h",), ("d",), (Ref(0),), phase="backward"),
    )  # fmt: skip
    outputs = (GraphOutput("o", "output", "0"), GraphOutput("d", "gradient", "w"))
    inputs = (GraphInput("x", "input", "x"), GraphInput("w", "input", "w"))
    graph = Graph("train", tensors, inputs, ops, outputs)
    every_set_is_known(graph, one_rank())


def every_set_is_known(graph: Graph, machine: Machine) -> None:
    plain = model_of(graph, machine, again=0)
    base = decode_assignment(plain, _solved(plain, None)[0])
    known = list(every_set(graph, base, machine))
    model = model_of(graph, machine)
    for limit in sorted({peak for _, peak in known}):
        cheapest = min(seconds for seconds, peak in known if peak <= limit)
        choices, least, _ = _solved(model, limit)
        schedule = make_schedule(graph, decode_assignment(model, choices), machine, LEAN_LIMITS)
        held = memory(schedule, "sgd").peak
        assert least <= cheapest * (1 + EXACT)
        assert in_sequence(schedule) == pytest.approx(least, rel=1e-6)
        if held <= limit:
            assert in_sequence(schedule) >= cheapest * (1 - EXACT)
        found = find_plan(graph, machine, memory_bytes=limit, optimizer="sgd", recompute=True, time_limit=600.0)
        assert found.memory.peak <= limit
        assert found.bound_seconds <= cheapest * (1 + EXACT)
        assert found.seconds <= cheapest * (1 + 1e-6)


def _solved(model: Model, limit: int | None) -> tuple[np.ndarray, float, int]:
    """Choices, seconds and the peak that the problem counts."""
    problem, unit = model.problem(limit)
    solution = solve(problem, gap=1e-9, time_limit=600.0)
    assert solution.choices is not None
    cost, peak, _ = evaluate(problem, solution.choices)
    return solution.choices, cost * unit, peak


@pytest.mark.parametrize("length", [8])
def test_a_chain_of_equal_layers_against_every_set(length: int) -> None:
    graph, machine = chain(length), one_rank()
    best: dict[int, float] = {}
    plain = model_of(graph, machine, again=0)
    for seconds, peak in every_set(graph, decode_assignment(plain, _solved(plain, None)[0]), machine):
        best[peak] = min(seconds, best.get(peak, seconds))
    model = model_of(graph, machine)
    for limit in best:
        choices, least, counted = _solved(model, limit)
        schedule = make_schedule(graph, decode_assignment(model, choices), machine, LEAN_LIMITS)
        assert memory(schedule, "sgd").peak == counted <= limit
        assert least == pytest.approx(min(seconds for peak, seconds in best.items() if peak <= limit), rel=1e-6)


@pytest.mark.parametrize("every", [2, 4, 5])
def test_a_chain_is_no_worse_than_keeping_every_kth(every: int) -> None:
    graph, machine = chain(20), one_rank()
    plain = model_of(graph, machine, again=0)
    base = decode_assignment(plain, _solved(plain, None)[0])
    names = [f"f{number}" for number in range(19) if (number + 1) % every]
    by_hand = make_schedule(graph, recompute(graph, base, names, machine), machine, LEAN_LIMITS)
    limit = memory(by_hand, "sgd").peak
    choices, _, _ = _solved(model_of(graph, machine), limit)
    schedule = make_schedule(graph, decode_assignment(model_of(graph, machine), choices), machine, LEAN_LIMITS)
    assert memory(schedule, "sgd").peak <= limit
    assert in_sequence(schedule) <= in_sequence(by_hand) * (1 + EXACT)


COARSE = Thresholds(exact_entries=0, joint_entries=0)
"""Thresholds under which recomputation is in no problem from the start."""


def within(graph: Graph, machine: Machine, limit: int, thresholds: Thresholds, **options: Any) -> SearchResult:
    """The search with recomputation in ``limit`` bytes."""
    return find_plan(
        graph, machine, memory_bytes=limit, optimizer="sgd", recompute=True, time_limit=600.0, thresholds=thresholds, **options
    )


@pytest.mark.parametrize("joint", [0, 400_000])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.slow) for seed in range(24)])
def test_crossover_plans_are_no_worse_than_every_set_of_recomputations(seed: int, joint: int) -> None:
    """Answers of a coarser problem, made to fit one after another: true bounds, and on one rank, where strategies are one, no loss."""
    graph, machine = drawn(seed), small_machine(seed, "x=1")
    plain = model_of(graph, machine, again=0)
    known = list(every_set(graph, decode_assignment(plain, _solved(plain, None)[0]), machine))
    peaks = sorted({peak for _, peak in known})
    for limit in (peaks[0], peaks[len(peaks) // 2]):
        cheapest = min(seconds for seconds, peak in known if peak <= limit)
        found = within(graph, machine, limit, Thresholds(exact_entries=0, joint_entries=joint))
        assert found.memory.peak <= limit
        assert found.bound_seconds <= cheapest * (1 + EXACT)
        assert found.seconds <= cheapest * (1 + 1e-6)


def test_bound_without_kept_memory_counts_necessary_recomputation() -> None:
    """That problem leaves out what backward keeps: its memory is paid for in another."""
    graph, machine = chain(6), one_rank()
    plain = model_of(graph, machine, again=0)
    known = list(every_set(graph, decode_assignment(plain, _solved(plain, None)[0]), machine))
    limit = min(peak for _, peak in known)
    cheapest = min(seconds for seconds, peak in known if peak == limit)
    found = within(graph, machine, limit, COARSE)
    assert 1.2 * min(seconds for seconds, _ in known) < found.bound_seconds <= cheapest * (1 + EXACT)


def test_search_without_crossover_chooses_recomputation_in_the_problem() -> None:
    """Also in a problem beyond ``joint_entries``, since nothing else makes a plan fit."""
    graph, machine = drawn(0), small_machine(0, "x=1")
    plain = model_of(graph, machine, again=0)
    known = list(every_set(graph, decode_assignment(plain, _solved(plain, None)[0]), machine))
    limit = min(peak for _, peak in known)
    found = within(graph, machine, limit, COARSE, skip={"crossover"})
    assert found.memory.peak <= limit and found.solver != "least memory"
