"""Small graphs written by hand, for tests that need no torch."""

from __future__ import annotations

from autopar.graph import Dtype, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.plan import Plan
from autopar.recording import record
from autopar.schedule import Limits, Schedule, make_schedule, memory, step_seconds
from autopar.search import Found, find_plan
from cost_models import Machine, Mesh, load_hardware
from tests.assignments import random_assignment


def _contract(name: str, equation: str, a: str, b: str, phase: str = "forward", module: str = "") -> Op:
    return Op(
        name, "autopar.contract.default", (a, b), (name,), (Ref(0), Ref(1), equation), module=module, phase=phase, location="model.py:7"
    )


def two_layers(batch: int = 16, width: int = 8, hidden: int = 32) -> Graph:
    """loss = sum(x w0' w1') with both weight gradients: forward and backward of two linear layers."""
    shapes = {
        "x": (batch, width), "w0": (hidden, width), "w1": (width, hidden), "h": (batch, hidden), "y": (batch, width), "loss": (),
        "gy": (batch, width), "gw1": (width, hidden), "gh": (batch, hidden), "gw0": (hidden, width),
    }  # fmt: skip
    ops = (
        _contract("h", "b k, n k -> b n", "x", "w0", module="layers.0"),
        _contract("y", "b k, n k -> b n", "h", "w1", module="layers.1"),
        Op("loss", "aten.sum.default", ("y",), ("loss",), (Ref(0),)),
        Op("gy", "aten.full.default", (), ("gy",), ((batch, width), 1.0), (("dtype", Dtype("float32")),), phase="backward"),
        _contract("gw1", "b n, b k -> n k", "gy", "h", "backward", "layers.1"),
        _contract("gh", "b n, n k -> b k", "gy", "w1", "backward", "layers.1"),
        _contract("gw0", "b n, b k -> n k", "gh", "x", "backward", "layers.0"),
    )
    return Graph(
        mode="train",
        tensors={name: Tensor(name, shape, "float32") for name, shape in shapes.items()},
        inputs=(
            GraphInput("w0", "parameter", "layers.0.weight", trained=True),
            GraphInput("w1", "parameter", "layers.1.weight", trained=True),
            GraphInput("x", "input", "x"),
        ),
        ops=ops,
        outputs=(
            GraphOutput("loss", "output", "loss"),
            GraphOutput("gw0", "gradient", "layers.0.weight"),
            GraphOutput("gw1", "gradient", "layers.1.weight"),
        ),
        arguments={"args": ({"tensor": "x"},), "kwargs": {}, "loss_args": (), "outputs": {"tensor": "loss"}},
    )


def machine(mesh: str, cost_model: str = "roofline") -> Machine:
    """A mesh of a small cluster."""
    return Machine(Mesh.parse(mesh), load_hardware("cpu-cluster"), cost_model)


def two_layer_plan(mesh: str = "dp=2,tp=2", cost_model: str = "communication") -> Plan:
    """What the search finds for two layers; under the communication model operators must be split, so there are collectives."""
    found = find_plan(two_layers(), machine(mesh, cost_model), time_limit=20.0)
    return record(found, target="two_layers", memory_bytes=10**9)


def random_schedule(graph: Graph, where: Machine, seed: int, limits: Limits | None = None) -> Schedule:
    """The schedule of strategies, specs and layouts drawn at random."""
    return make_schedule(graph, random_assignment(graph, where, seed), where, limits)


def plan_of(schedule: Schedule, optimizer: str = "adamw") -> Plan:
    """A schedule as if a search had found it."""
    seconds = step_seconds(schedule, optimizer) if schedule.machine.cost_model != "communication" else schedule.communication_seconds()
    found = Found(schedule, seconds, seconds, 0.0, "optimal", 0.0, "random", optimizer, memory(schedule, optimizer), {})
    return record(found, target="two_layers", memory_bytes=10**9)


def random_plan(mesh: str, seed: int, cost_model: str = "roofline", limits: Limits | None = None) -> Plan:
    """A legal plan for two layers, drawn at random."""
    return plan_of(random_schedule(two_layers(), machine(mesh, cost_model), seed, limits))
