"""Reshards that several readers share, priced once, against every assignment of small graphs under the communication model."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autopar.cli.target import capture_target
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.schedule.limit_search import best_schedule
from autopar.search import PROOF, find_plan
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence, Model
from autopar.search.ilp.shared_reshards import FEW, SharedReshard, SharingProblem
from autopar.search.settings import TIES
from autopar.solvers import INFINITE, Problem, evaluate, solve
from tests.search.brute_force import BruteForce
from tests.search.small_graphs import small_graph, small_machine, small_pins

EXACT = 1e-9
UNLIMITED = 2**62
CASES = [(seed, "x=2", 5) for seed in range(120)] + [(seed, "x=2,y=2", 3) for seed in range(40)]
DRAWS = 6


@cache
def model_of(seed: int, mesh: str, most: int) -> Model:
    graph, machine = small_graph(seed, most), replace(small_machine(seed, mesh), cost_model="communication")
    pins = resolve_pins(graph, machine.mesh, small_pins(graph, machine, seed))
    return build_model(Space(graph, machine, "adamw" if graph.mode == "train" else "none", pins))


def is_shared(model: Model) -> bool:
    """Whether three readers and more take one tensor, and some of them may pay for it."""
    return any(
        edge.tensor is not None and edge.readers > FEW and (np.isfinite(edge.seconds) & (edge.seconds > 0)).any() for edge in model.edges
    )


SHARED = [case for case in CASES if is_shared(model_of(*case))]


def solved(problem: Problem) -> tuple[np.ndarray, float, float]:
    """The choices of the optimum, and its cost and bound in integers."""
    found = solve(problem, time_limit=600.0, gap=1e-9)
    assert found.choices is not None and found.objective is not None
    return found.choices, found.objective, found.bound


def all_exact(model: Model) -> SharingProblem:
    """With a node for every reshard that readers may share."""
    made = SharingProblem(model, UNLIMITED)
    made.exact = [
        SharedReshard(group, spec)
        for group in made.groups
        for spec in dict.fromkeys(spec for number in group for spec in model.edges[number].targets)
    ]
    return made


def drawn(model: Model, seed: int) -> np.ndarray:
    """Any choices that go together."""
    rng = np.random.default_rng(seed)
    costs = [np.where(np.isfinite(node.seconds), rng.integers(0, 2**40, len(node.seconds)), INFINITE) for node in model.nodes]
    edges = [
        (edge.source, edge.target, np.where(np.isfinite(edge.seconds), rng.integers(0, 2**36, edge.seconds.shape), INFINITE))
        for edge in model.edges
    ]
    return solved(Problem.build(costs, edges))[0]


def test_there_are_cases() -> None:
    assert len(SHARED) >= 8 and {mesh for _, mesh, _ in SHARED} == {"x=2", "x=2,y=2"}


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_the_optimum_is_the_least_of_all_assignments(case: tuple[int, str, int]) -> None:
    """With a node for every shared reshard from the start, and with one for those alone for which answers pay too little, each of which is
    a bound until then."""
    model = model_of(*case)
    optimum = BruteForce(model, math.inf).least_in_sequence()
    whole = all_exact(model)
    assert solved(whole.problem())[1] * whole.unit == pytest.approx(optimum, rel=10 * TIES, abs=1e-15)
    lazy, rounds = SharingProblem(model, UNLIMITED), 0
    while True:
        choices, cost, bound = solved(lazy.problem())
        assert bound * lazy.unit / (1 + TIES) <= optimum * (1 + EXACT) + 1e-15
        underpaid = lazy.underpaid(choices[: len(model.nodes)])
        if not underpaid:
            break
        assert not set(underpaid) & set(lazy.exact), "a reshard has one node"
        lazy.exact += underpaid
        rounds += 1
    assert cost * lazy.unit == pytest.approx(optimum, rel=10 * TIES, abs=1e-15)
    assert len(lazy.exact) <= len(whole.exact)


def price(model: Model, choices: np.ndarray) -> float:
    """Seconds of choices where three readers and more of one tensor pay once for equal reshards."""
    seconds = sum(float(node.seconds[choice]) for node, choice in zip(model.nodes, choices, strict=True))
    shared = dict[Hashable, float]()
    for number, edge in enumerate(model.edges):
        paid = float(edge.seconds[choices[edge.source], choices[edge.target]])
        many = edge.tensor is not None and edge.readers > FEW
        key = (edge.source, edge.phase, edge.share, edge.targets[choices[edge.target]]) if many else number
        shared[key] = max(paid, shared.get(key, 0.0))
    return seconds + sum(shared.values())


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_choices_are_completed_at_their_price(case: tuple[int, str, int]) -> None:
    """Whichever they are: what they pay for is no less than what their schedule does, and as much where they are the best."""
    model = model_of(*case)
    space, whole = model.space, all_exact(model)
    problem, (priced, unit) = whole.problem(), model.problem(UNLIMITED, InSequence())
    best = solved(problem)[0][: len(model.nodes)]
    for choices in (best, *(drawn(model, seed) for seed in range(DRAWS))):
        cost, _, _ = evaluate(problem, whole.completed(choices))
        assert cost < INFINITE
        assert cost * whole.unit == pytest.approx(price(model, choices), rel=10 * TIES, abs=1e-15)
        assert cost * whole.unit <= evaluate(priced, choices)[0] * unit * (1 + EXACT)
        found = best_schedule(space.graph, decode_assignment(model, choices), space.machine, space.optimizer, UNLIMITED, tries=0)
        assert cost * whole.unit >= found.seconds * (1 - EXACT)
        if choices is best:
            assert cost * whole.unit == pytest.approx(found.seconds, rel=10 * TIES, abs=1e-15)


def test_some_reshards_are_shared() -> None:
    """So that the cases tell prices paid once from prices paid by each."""
    told = 0
    for case in SHARED:
        model = model_of(*case)
        whole, (priced, _) = all_exact(model), model.problem(UNLIMITED, InSequence())
        every = [drawn(model, seed) for seed in range(DRAWS)]
        told += any(evaluate(whole.problem(), whole.completed(one))[0] < 0.999 * evaluate(priced, one)[0] for one in every)
    assert told >= 3


def test_a_transformer_is_proved_optimal_by_shared_reshards_alone() -> None:
    graph = capture_target("zoo:gpt2,layers=2,width=64,heads=4,batch=8,seq=32,vocab=128", "train")
    machine = Machine(Mesh.parse("4"), load_hardware("h100-sxm"), "communication")
    found, without = (find_plan(graph, machine, time_limit=math.inf, skip=skip) for skip in (frozenset(), frozenset({"shared reshards"})))
    assert found.status == "optimal" and found.gap <= PROOF
    assert without.status == "feasible" and without.seconds >= found.seconds * (1 - PROOF)
    assert without.bound_seconds < found.bound_seconds
