"""The bound that counts calls, against plans, and the search for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.search.baselines import find_baselines
from autopar.search.bounds import Cuts
from autopar.search.building import build_model
from autopar.search.calls import ALONE, GROUPS, ONCE, Charges
from autopar.search.counting import Counting, Kind
from autopar.search.extract import extract
from autopar.search.model import TIES, InSequence, Model, Weights
from autopar.search.pins import Pins, resolve_pins
from autopar.search.recompute import POLICIES, recompute
from autopar.search.space import Space
from autopar.search.tuning import best_schedule
from cost_models import Machine, Mesh, load_hardware
from solvers import Status, solve
from tests.graphs import random_graph

WIDTH = 64
SIZE = 4 * WIDTH * WIDTH
SLOWDOWN = 0.15


def step() -> Graph:
    """x w, and the gradient of w."""
    tensors = {name: Tensor(name, (WIDTH, WIDTH), "float32") for name in ("x", "w", "y", "g", "d")}
    ops = (
        Op("y", "aten.mm.default", ("x", "w"), ("y",), (Ref(0), Ref(1))),
        Op("e", "aten.t.default", ("x",), ("e",), (Ref(0),), phase="backward"),
        Op("d", "aten.mm.default", ("e", "g"), ("d",), (Ref(0), Ref(1)), phase="backward"),
    )
    inputs = (GraphInput("x", "input", "x"), GraphInput("w", "parameter", "w", trained=True), GraphInput("g", "tangent", "0"))
    outputs = (GraphOutput("y", "output", "0"), GraphOutput("d", "gradient", "w"))
    return Graph("train", tensors | {"e": Tensor("e", (WIDTH, WIDTH), "float32")}, inputs, ops, outputs)


def machine(mesh: str = "x=2") -> Machine:
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")


def solved(model: Model, limit: int | None, gap: float, weights: Weights) -> tuple[float, np.ndarray | None]:
    problem, unit = model.problem(limit, weights)
    found = solve(problem, time_limit=600.0, gap=gap)
    return (math.inf if found.status is Status.INFEASIBLE else found.bound * unit / (1 + TIES)), found.choices


def test_what_fits_costs_as_much() -> None:
    """The output is to be whole, and the parameter with its states does not fit so: something is sent in forward."""
    graph, on = step(), machine()
    pins = resolve_pins(graph, on.mesh, {"output:0": "R R", "input:x": "R R"})
    model = build_model(Space(graph, on, "adamw", pins))
    mixture = Cuts(model, SLOWDOWN).first()
    raised = 0
    for limit in range(4 * SIZE, 12 * SIZE, SIZE // 2):
        bound, choices = solved(model, limit, 1e-9, mixture)
        found = Counting(Charges(mixture, model, limit), partial(solved, model, limit, 1e-9), min(bound, 1.0)).best(0.0, math.inf)
        if choices is None:
            assert found == math.inf
            continue
        raised += found > bound * (1 + 1e-6)
        for weights in (mixture, InSequence()):
            _, some = solved(model, limit, 1e-9, weights)
            best = best_schedule(graph, extract(model, some), on, "adamw", limit, tries=4) if some is not None else None
            assert best is None or best.memory.peak > limit or found <= best.seconds * (1 + 1e-9)
    assert raised, "where memory is short"


def test_no_plan_by_hand_is_below_it_where_memory_is_paid_for() -> None:
    """With all layers made again too, in the memory that each of them needs; and it is above what operators alone take."""
    raised = 0
    for seed in range(4):
        graph, on = random_graph(seed, layers=3, batch=16, width=16), machine("x=2,y=2")
        space = Space(graph, on, "adamw", Pins())
        model = build_model(space, again=1, share=0.0)
        mixture = Cuts(model, SLOWDOWN).first()
        plain = solved(model, None, 1e-4, mixture)[0]
        written = list(find_baselines(space)[0].values())
        plans = [*written, *(recompute(graph, plan, POLICIES["full"](graph) or [graph.ops[0].name], on) for plan in written)]
        best = [best_schedule(graph, plan, on, "adamw", 2**62, tries=4) for plan in plans]
        for limit in sorted({one.memory.peak for one in best})[:2]:
            ask, times = partial(solved, model, None, 1e-4), sorted(set(model.times.values()))
            found = Counting(Charges(mixture, model, limit), ask, plain, float(limit), times).best(1e-9, math.inf)
            assert found <= min(one.seconds for one in best if one.memory.peak <= limit) * (1 + 1e-9)
            raised += found > plain * 1.001
    assert raised >= 2


def kinds() -> list[Kind]:
    return [frozenset(some) for count in range(len(GROUPS) + 1) for some in itertools.combinations(GROUPS, count)]


def searched(least: Callable[[Kind], float], bound: float = 1.0) -> tuple[float, list[Kind]]:
    """The bound found where a problem of a kind has what ``least`` says beside what is constant, and of which kinds was asked."""
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    charges, asked = Charges(Cuts(model, SLOWDOWN).first(), model, 2**40), list[Kind]()

    def ask(weights: Weights) -> tuple[float, np.ndarray | None]:
        ways = weights.ways  # type: ignore[attr-defined]
        assert all(np.array_equal(ways[group], ALONE) or np.array_equal(ways[group], ONCE) for group in GROUPS)
        kind = frozenset(group for group in GROUPS if np.array_equal(ways[group], ALONE))
        asked.append(kind)
        return least(kind), None

    return Counting(charges, ask, bound).best(0.0, math.inf), asked


def constant(kind: Kind) -> float:
    """What the groups count once of which some values share a call."""
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    found = Charges(Cuts(model, SLOWDOWN).first(), model, 2**40).constant
    return sum(float(found[group][0]) for group in GROUPS if group not in kind)


@pytest.mark.parametrize("seed", range(20))
def test_the_kind_that_costs_least_is_the_bound(seed: int) -> None:
    """Whatever the kinds cost: more, the more groups have no shared calls. Not all are asked about."""
    draw = np.random.default_rng(seed)
    more = {group: draw.choice([0.0, 1e-6, 5e-6, 1e-4, math.inf]) for group in GROUPS}

    def least(kind: Kind) -> float:
        return 1.0 + sum(more[group] for group in kind)

    found, asked = searched(least)
    assert found == pytest.approx(min(least(kind) + constant(kind) for kind in kinds()), rel=1e-12)
    assert len(asked) == len(set(asked)) <= len(kinds())


def test_what_no_plan_of_any_kind_costs_is_infinite() -> None:
    assert searched(lambda kind: math.inf)[0] == math.inf


def test_a_bound_is_never_lowered() -> None:
    """Where time or answers are wanting."""
    assert searched(lambda kind: 0.0, bound=2.0)[0] == 2.0
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    charges = Charges(Cuts(model, SLOWDOWN).first(), model, 2**40)
    assert Counting(charges, partial(solved, model, None, 1e-9), 3.0).best(0.0, 0.0) == 3.0
    assert Counting(charges, partial(solved, model, None, 1e-9), 0.0).best(1.0, math.inf) == 0.0


def test_kinds_of_which_as_much_is_known_come_to_an_end() -> None:
    """Also where each answer says the same of all."""
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    charges = Charges(Cuts(model, SLOWDOWN).first(), model, 2**40)
    choices = solved(model, None, 1e-9, InSequence())[1]
    assert choices is not None
    seconds = charges.of(charges.mixture.price(model), choices)[0]
    for group in GROUPS[1:]:
        charges.constant[group][:] = 0.0
    counting = Counting(charges, lambda weights: (0.9 * seconds, choices), 0.8 * seconds)
    assert counting.best(0.0, math.inf) == pytest.approx(0.9 * seconds)
