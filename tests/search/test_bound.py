"""The bound and the answer of the search against the shortest step there is, found by trying everything (``brute_force``)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from autopar.cost_models import UNLIMITED, Machine
from autopar.cost_models.links import Link
from autopar.effort import unlimited
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.schedule import step_seconds
from autopar.search import PROOF, SearchResult, Thresholds, find_plan
from autopar.search.bounds.surrogate import Evaluation, Master, Term
from autopar.search.choices.pins import Pins, resolve_pins
from autopar.search.choices.space import Space
from autopar.search.driver.phase_table import Search
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model
from autopar.search.memory.memory_repair import solve_fixed
from tests.graphs import random_schedule
from tests.search.brute_force import (
    PHASES,
    BruteForce,
    Copying,
    Rules,
    Task,
    Timing,
    assignment_of,
    operator_ends,
    schedule_seconds,
    shortest,
)
from tests.search.requests import asked
from tests.search.small_graphs import small_graph, small_machine, small_pins

EXACT = 1e-9


@dataclass(frozen=True)
class Case:
    """One drawn graph on one drawn machine."""

    seed: int
    mesh: str
    most: int

    def __str__(self) -> str:
        return f"{self.mesh}-{self.seed}"


ONE_AXIS = [Case(seed, "x=2", 5) for seed in range(190)]
TWO_AXES = [Case(seed, "x=2,y=2", 2) for seed in range(30)]
PARTS = 10
"""Tests among which the cases are divided, so that they can run beside each other."""
QUICK = [*ONE_AXIS[:18], *TWO_AXES[:4]]


@dataclass(frozen=True)
class Outcome:
    """What the search said, and what is true."""

    case: Case
    seconds: float
    bound: float
    optimum: float

    @property
    def excess(self) -> float:
        return self.seconds / self.optimum - 1

    @property
    def slack(self) -> float:
        return self.bound / self.optimum - 1


def drawn(case: Case) -> tuple[Graph, Machine, dict[str, str], str]:
    graph, machine = small_graph(case.seed, case.most), small_machine(case.seed, case.mesh)
    return graph, machine, small_pins(graph, machine, case.seed), "adamw" if graph.mode == "train" else "none"


def model_of(case: Case) -> Model:
    graph, machine, pins, optimizer = drawn(case)
    return build_model(Space(graph, machine, optimizer, resolve_pins(graph, machine.mesh, pins)))


def search(graph: Graph, machine: Machine, optimizer: str, pins: Mapping[str, str]) -> tuple[SearchResult, float]:
    """What is found, and the bound over the mesh's own choices before it is cut to the seconds of what is found, which would hide one that
    is too high."""
    found = find_plan(graph, machine, optimizer=optimizer, constraints=pins, baselines=False, time_limit=3600.0)
    return found, found.own_seconds


@cache
def outcome(case: Case) -> Outcome:
    """Searches and tries everything; what must hold of each graph is asserted here."""
    graph, machine, pins, optimizer = drawn(case)
    found, bound = search(graph, machine, optimizer, pins)
    step = found.schedule.optimizer_seconds(optimizer)
    assert schedule_seconds(found.schedule) + step == pytest.approx(found.seconds, rel=EXACT), f"{case}: the list takes another time"
    reordered = Timing(graph, machine).seconds(assignment_of(found.schedule), step)
    assert reordered <= found.seconds * (1 + EXACT), f"{case}: the plan found is not among those tried"
    optimum = BruteForce(model_of(case), reordered).run()
    assert bound <= optimum * (1 + EXACT), f"{case}: the bound {bound} is above the optimum {optimum}"
    assert found.bound_seconds == min(bound, found.seconds)
    assert found.seconds >= optimum * (1 - EXACT)
    assert found.gap == pytest.approx((found.seconds - found.bound_seconds) / found.seconds, abs=1e-12)
    assert (found.status == "optimal") == (found.gap <= PROOF)
    if found.status == "optimal":
        assert found.seconds <= optimum * (1 + 2 * PROOF), f"{case}: called optimal at {found.seconds}, the optimum is {optimum}"
    return Outcome(case, found.seconds, found.bound_seconds, optimum)


def distribution(outcomes: list[Outcome]) -> str:
    """In words, with the worst cases to run again."""
    excess = sorted(outcomes, key=lambda item: item.excess)
    slack = sorted(outcomes, key=lambda item: item.slack)
    tenth = len(outcomes) // 10
    return (
        f"{len(outcomes)} graphs; above the optimum: median {excess[len(excess) // 2].excess:.2%}, mean "
        f"{statistics.mean(item.excess for item in outcomes):.2%}, a tenth more than {excess[-tenth - 1].excess:.2%}, worst "
        f"{excess[-1].excess:.2%} ({excess[-1].case}), exact {sum(item.excess <= EXACT for item in outcomes)}; bound below it: median "
        f"{-slack[len(slack) // 2].slack:.2%}, a tenth more than {-slack[tenth].slack:.2%}, worst {-slack[0].slack:.2%} ({slack[0].case})"
    )


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_bound_is_below_every_plan_and_order(case: Case) -> None:
    outcome(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_bound_and_answer_over_many_graphs(part: int, record_property: pytest.RecordProperty) -> None:
    outcomes = [outcome(case) for case in (*ONE_AXIS, *TWO_AXES)[part::PARTS]]
    words = distribution(outcomes)
    record_property("distribution", words)
    print(words)
    assert statistics.median(item.excess for item in outcomes) <= 0.02, words


def in_sequence(case: Case) -> tuple[SearchResult, float, float]:
    """What the search finds under the communication model with its bound, and the least sum there is, equal reshards made once."""
    graph, machine, pins, optimizer = drawn(case)
    machine = replace(machine, cost_model="communication")
    found, bound = search(graph, machine, optimizer, pins)
    model = build_model(Space(graph, machine, optimizer, resolve_pins(graph, machine.mesh, pins)))
    return found, bound, BruteForce(model, math.inf).least_in_sequence()


@pytest.mark.parametrize("case", [*ONE_AXIS[:60], *TWO_AXES[:12]], ids=str)
def test_under_the_communication_model_the_answer_is_the_optimum(case: Case) -> None:
    found, bound, optimum = in_sequence(case)
    assert bound <= optimum * (1 + EXACT)
    assert found.status == "optimal"
    assert found.seconds == pytest.approx(optimum, rel=2 * PROOF)


def test_readers_that_share_a_reshard_do_not_lift_the_bound_over_the_optimum() -> None:
    """Of three readers two take one spec and the third the producer's: that reshard is made once."""
    found, bound, optimum = in_sequence(Case(104, "x=2", 5))
    assert bound <= optimum * (1 + EXACT)
    assert found.seconds == pytest.approx(optimum, rel=2 * PROOF)
    assert found.status == "optimal"


# the proof's own tools --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(6, "x=2", 2), Case(24, "x=2", 2)], ids=str)
def test_trying_everything_leaves_nothing_out(case: Case) -> None:
    """The same as timing every single combination of finite choices, one by one."""
    model = model_of(case)
    timing = Timing(model.space.graph, model.space.machine)
    best = math.inf
    for choices in itertools.product(*(range(len(node.seconds)) for node in model.nodes)):
        if all(np.isfinite(edge.seconds[choices[edge.source], choices[edge.target]]) for edge in model.edges):
            step = sum(node.seconds[choice] for node, choice in zip(model.nodes, choices, strict=True) if node.kind == "input")
            best = min(best, timing.seconds(decode_assignment(model, np.array(choices)), step))
    assert BruteForce(model, math.inf).run() == pytest.approx(best, rel=EXACT)


def every_list(tasks: tuple[Task, ...], rules: Rules) -> float:
    """The shortest by plain recursion over what comes next, alone or in a call with others; nothing is remembered, nothing left out."""
    links = sorted({link for task in tasks for link in task.links})

    def behind(number: int, through: str) -> set[int]:
        """What must be there: through slices; of a start, collectives it reads itself may be on their way."""
        found = set()
        for other in tasks[number].reads:
            if tasks[other].kind == "cut":
                found |= behind(other, "cut")
            elif not (through == "call" and tasks[other].kind == "call"):
                found.add(other)
        return found

    def flying(number: int) -> set[int]:
        return {other for other in tasks[number].reads if tasks[number].kind == "call" and tasks[other].kind == "call"}

    def go(run: frozenset[int], ends: dict[int, float], waited: frozenset[int], calls: tuple[tuple[int, ...], ...], now: float,
           free: dict[str, float]) -> float:  # fmt: skip
        busy = max(free.values(), default=0.0)
        best = math.inf
        for call in calls:
            begin = max(now, ends[call[0]])
            end = operator_ends(begin, rules.copies([tasks[n] for n in call]), busy, rules.slowdown)
            best = min(best, go(run, ends, waited | set(call), tuple(other for other in calls if other != call), end, free))
        there = run | waited
        ready = [
            n for n, task in enumerate(tasks)
            if task.kind != "cut" and n not in run and n not in ends and behind(n, task.kind) <= there and flying(n) <= set(ends)
        ]  # fmt: skip
        if not ready and not calls:
            return now
        starts = [n for n in ready if tasks[n].kind == "call"]
        groups = [(n,) for n in ready] + [
            group
            for size in range(2, len(starts) + 1)
            for group in itertools.combinations(starts, size)
            if len({tasks[n].call for n in group}) == 1
        ]
        for group in groups:
            first = tasks[group[0]]
            if first.kind == "run":
                if first.links:
                    end = max([now, *(free[link] for link in first.links)]) + first.seconds
                else:
                    end = operator_ends(now, first.seconds, busy, rules.slowdown)
                best = min(best, go(run | {group[0]}, ends, waited, calls, end, {**free, **dict.fromkeys(first.links, end)}))
            else:
                arrived = max([now, *(ends[other] for n in group for other in flying(n))])
                end = max([arrived, *(free[link] for link in first.links)])
                end += first.latency + sum(tasks[n].seconds - first.latency for n in group)
                after = {**free, **dict.fromkeys(first.links, end)}
                clock = now if rules.overlaps else arrived
                best = min(best, go(run, {**ends, **dict.fromkeys(group, end)}, waited, (*calls, group), clock, after))
        return best

    return go(frozenset(), {}, frozenset(), (), 0.0, dict.fromkeys(links, 0.0))


def test_large_problem_raises_its_bound_while_the_gap_is_wide() -> None:
    graph, machine = small_graph(8), small_machine(8, "2x2")
    found, first = (
        find_plan(graph, machine, memory_bytes=UNLIMITED, baselines=False, thresholds=thresholds)
        for thresholds in (Thresholds(large_entries=0), Thresholds(large_entries=0, loose_gap=math.inf))
    )
    assert first.gap > 0.2
    assert found.gap < 0.1
    assert found.bound_seconds <= found.seconds


class CountingSearch(Search):
    """Counts the solves for a bound, and those of them that are scheduled."""

    solved = scheduled = 0

    def solve(self, *given: Any, **options: Any) -> Any:
        self.scheduled += "proves" in options
        return super().solve(*given, **options)

    def solve_choices(self, *given: Any, **options: Any) -> Any:
        self.solved += options.get("proves", False)
        return super().solve_choices(*given, **options)


@pytest.mark.parametrize("long_graph", [0, math.inf])
def test_bound_of_a_long_graph_schedules_its_first_solution_alone(long_graph: float) -> None:
    model = build_model(Space(small_graph(9), small_machine(9, "2x2"), "adamw", Pins()))
    search = CountingSearch(model, asked(UNLIMITED, thresholds=Thresholds(long_graph=long_graph)), may_recompute=False)
    search.run()
    assert search.solved > 2
    assert search.scheduled == (1 if long_graph == 0 else search.solved)


@pytest.mark.parametrize("seed", range(80))
def test_shortest_order_is_the_shortest_list(seed: int) -> None:
    """Remembering, and leaving out what is later in everything, changes nothing: drawn tasks of operators, calls and slices."""
    rng = np.random.default_rng(seed)
    tasks: list[Task] = []
    for number in range(5):
        reads = tuple(other for other in range(number) if rng.random() < 0.35)
        kind = str(rng.choice(["run", "call", "call", "cut"] if number else ["run", "call"]))
        seconds = float(rng.integers(1, 6))
        if kind == "cut":
            tasks.append(Task("cut", reads=reads[:1] or (number - 1,)))
        elif kind == "run":
            tasks.append(Task("run", seconds, reads, ("b",) if rng.random() < 0.2 else ()))
        else:
            link = str(rng.choice(["a", "b"]))
            copying = Copying(float(rng.integers(1, 4)), float(rng.integers(1, 4)), *(bool(rng.random() < 0.4) for _ in range(3)))
            tasks.append(Task("call", seconds + 1.0, reads, (link,), 1.0, link, copying))
    rules = Rules(float(rng.choice([0.0, 0.3, 0.6])), bool(rng.random() < 0.7), lambda copied, _: 0.5 * copied)
    least = every_list(tuple(tasks), rules)
    assert shortest(tuple(tasks), rules, math.inf) == pytest.approx(least, rel=EXACT)
    assert shortest(tuple(tasks), rules, least * (1 + EXACT)) == pytest.approx(least, rel=EXACT), "what cannot be over in time is left out"
    assert shortest(tuple(tasks), rules, least * (1 - EXACT)) == math.inf


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_of_the_passes_is_shorter(seed: int) -> None:
    case = Case(seed, "x=2,y=2", 5)
    graph, machine, _, optimizer = drawn(case)
    schedule = random_schedule(graph, machine, seed)
    assert {item.phase for item in schedule.instructions} <= set(PHASES)
    least = Timing(graph, machine).seconds(assignment_of(schedule), schedule.optimizer_seconds(optimizer))
    assert least <= step_seconds(schedule, optimizer) * (1 + EXACT)


def test_copies_that_share_a_launch_do_not_lift_the_bound_over_the_optimum() -> None:
    """Two products whose partial sums leave split along the second dim: one call, one copy, whose launch is as long as everything else."""
    shapes = {"a": (8, 8), "b": (8, 8), "v": (8, 8), "w": (8, 8), "av": (8, 8), "bw": (8, 8)}
    graph = Graph(
        "inference",
        {name: Tensor(name, shape, "float32") for name, shape in shapes.items()},
        tuple(GraphInput(name, "input" if name in "ab" else "parameter", name) for name in "abvw"),
        tuple(
            Op(name, "autopar.contract.default", tuple(name), (name,), (Ref(0), Ref(1), "m k, k n -> m n")) for name in ("av", "bw")
        ),
        (GraphOutput("av", "output", "0"), GraphOutput("bw", "output", "1")),
    )  # fmt: skip
    base = small_machine(0, "x=2")
    link = Link(1e-9, 1e12)
    hardware = replace(base.hardware, kernel_launch_seconds=1e-5, node=link, network=link, launch_overlaps=True, overlap_slowdown=0.0)
    machine = replace(base, hardware=hardware)
    pins = {"input:a": "R S0", "input:b": "R S0", "output:0": "R S0", "output:1": "R S0", "v": "S0 R", "w": "S0 R"}
    found, bound = search(graph, machine, "none", pins)
    model = build_model(Space(graph, machine, "none", resolve_pins(graph, machine.mesh, pins)))
    optimum = BruteForce(model, math.inf).run()
    assert optimum == pytest.approx(3e-5, rel=1e-2), "two products and one copy"
    assert bound <= optimum * (1 + EXACT)
    assert found.seconds == pytest.approx(optimum, rel=1e-2)


def test_operators_with_collectives_inside_are_not_slowed_beside_another_link() -> None:
    """A softmax split along its dim holds the network while a gather holds the node's link: what the gather slows is the product alone."""
    shapes = {"s": (16, 4096), "softmax": (16, 4096), "a": (16, 16), "w": (16, 16), "product": (16, 16)}
    graph = Graph(
        "inference",
        {name: Tensor(name, shape, "float32") for name, shape in shapes.items()},
        (GraphInput("s", "input", "s"), GraphInput("a", "input", "a"), GraphInput("w", "parameter", "w")),
        (
            Op("softmax", "aten._softmax.default", ("s",), ("softmax",), (Ref(0), 1, False)),
            Op("product", "autopar.contract.default", ("a", "w"), ("product",), (Ref(0), Ref(1), "m k, k n -> m n")),
        ),
        (GraphOutput("softmax", "output", "0"), GraphOutput("product", "output", "1")),
    )
    base = small_machine(0, "x=2,y=2")
    network, node = Link(4e-6, 1e10), Link(0.0, 1e7)
    hardware = replace(
        base.hardware, memory_bandwidth=1e12, kernel_launch_seconds=0.0, devices_per_node=2, node=node, network=network,
        launch_overlaps=True, overlap_slowdown=0.9,
    )  # fmt: skip
    machine = replace(base, hardware=hardware)
    pins = {"input:s": "R S0", "output:0": "R S0", "input:a": "S1 R", "w": "S1 R", "output:1": "S1 R"}
    found, bound = search(graph, machine, "none", pins)
    model = build_model(Space(graph, machine, "none", resolve_pins(graph, machine.mesh, pins)))
    optimum = BruteForce(model, math.inf).run()
    assert found.searched_assignment is not None
    answer = Evaluation(model, solve_fixed(model, model.problem(None)[0], found.searched_assignment, 0, unlimited()))
    path = Master(model, 0.9).longest_path("forward", *answer.counted_once)
    assert answer.between["forward", "node"] > 0.0 and path.nodes
    assert answer.sum_of(Term("forward", "node", path=path), 0.9) <= optimum * (1 + EXACT)
    held = {item.stream for item in found.schedule.instructions}
    assert {"compute+network", "node"} <= held
    assert found.seconds == pytest.approx(optimum, rel=EXACT), "the gather is hidden behind the softmax, which it does not slow"
    assert bound <= optimum * (1 + EXACT)
