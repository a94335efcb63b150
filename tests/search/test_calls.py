"""The bound that counts a latency where something has to be sent, against plans that do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.schedule import make_schedule
from autopar.search.bounds import PHASES, Cuts, Mixture, Path, Term
from autopar.search.building import build_model
from autopar.search.calls import Silent, with_calls
from autopar.search.extract import extract
from autopar.search.model import TIES, InSequence, Model, Weights
from autopar.search.pins import Pins, resolve_pins
from autopar.search.space import Space
from autopar.search.tuning import LEAN, best_schedule
from cost_models import Machine, Mesh, load_hardware
from solvers import Status, solve

WIDTH = 64
SIZE = 4 * WIDTH * WIDTH
LATENCY = 6e-6
"""Of a permute in a node, the quickest call on this hardware."""


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


def solved(model: Model, limit: int, weights: Weights) -> tuple[float, np.ndarray | None]:
    problem, unit = model.problem(limit, weights)
    found = solve(problem, time_limit=600.0, gap=1e-9)
    return (math.inf if found.status is Status.INFEASIBLE else found.bound * unit / (1 + TIES)), found.choices


def test_what_fits_costs_as_much() -> None:
    """The output is to be whole, and the parameter with its states does not fit so: something is sent in forward."""
    graph, on = step(), machine()
    pins = resolve_pins(graph, on.mesh, {"output:0": "R R", "input:x": "R R"})
    model = build_model(Space(graph, on, "adamw", pins))
    mixture = Cuts(model, 0.15).first()
    raised = 0
    for limit in range(4 * SIZE, 12 * SIZE, SIZE // 2):
        bound, choices = solved(model, limit, mixture)
        found = with_calls(mixture, model, bound, lambda weights, limit=limit: solved(model, limit, weights)[0], 0.0)  # type: ignore[misc]
        if choices is None:
            assert found == math.inf
            continue
        raised += found > bound * (1 + 1e-6)
        for weights in (mixture, InSequence(), *(Silent(mixture, frozenset([phase])) for phase in PHASES)):
            _, some = solved(model, limit, weights)
            best = best_schedule(graph, extract(model, some), on, "adamw", limit, tries=4) if some is not None else None
            assert best is None or best.memory.peak > limit or found <= best.seconds * (1 + 1e-9)
    assert raised, "where memory is short"


def test_without_calls_nothing_is_sent() -> None:
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    mixture = Cuts(model, 0.15).first()
    for phases in (["forward"], ["backward"], ["forward", "backward"]):
        _, choices = solved(model, 2**40, Silent(mixture, frozenset(phases)))  # type: ignore[arg-type]
        assert choices is not None
        schedule = make_schedule(step(), extract(model, choices), machine(), LEAN)
        assert not {call.phase for call in schedule.collectives.values()} & set(phases)


@pytest.mark.parametrize(("infeasible", "paid"), [((), 0), ((2,), 1), ((2, "forward"), 1), ((2, "forward", "backward"), 2)])
def test_what_has_to_be_sent_is_paid_for(infeasible: tuple[object, ...], paid: int) -> None:
    """Of a mixture of compute alone, each phase that has calls in any case pays its slowdown beside one."""
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    mixture = Mixture({Term(phase, "node", compute=True): 1.0 for phase in ("forward", "backward")}, 0.15)  # type: ignore[arg-type]

    def least(weights: Weights) -> float:
        assert isinstance(weights, Silent)
        out = 2 in infeasible if len(weights.phases) == 2 else next(iter(weights.phases)) in infeasible
        return math.inf if out else 1.0

    assert with_calls(mixture, model, 1.0, least, 0.0) == pytest.approx(1.0 + paid * 0.15 * LATENCY, abs=1e-15)


@pytest.mark.parametrize(("link", "paid"), [("", 0.0), ("node", 2 * 0.15 * LATENCY)])
def test_paths_pay_their_latencies_themselves(link: str, paid: float) -> None:
    """And where they are slowed beside a link, that share of those of the others."""
    model = build_model(Space(step(), machine(), "adamw", Pins()))
    mixture = Mixture({Term(phase, link, path=Path((0,), ())): 1.0 for phase in ("forward", "backward")}, 0.15)  # type: ignore[arg-type]
    assert with_calls(mixture, model, 1.0, lambda weights: math.inf, 0.0) == pytest.approx(1.0 + paid, abs=1e-15)
