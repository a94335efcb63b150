"""Small graphs written by hand, for tests that need no torch."""

from __future__ import annotations

import random
from functools import cache

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import Dtype, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.plan import Plan
from autopar.recording import record
from autopar.rules import find_rule, strategies
from autopar.schedule import Assignment, Layout, Limits, Schedule, make_schedule, memory, step_seconds
from autopar.search import SearchResult, find_plan
from autopar.sharding import ShardingSpec, Strategy
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


KINDS = ("contract", "contract", "add", "softmax", "alias", "dropout")


def random_graph(seed: int, layers: int = 5, kinds: tuple[str, ...] = KINDS, batch: int = 16, width: int = 8) -> Graph:
    """Layers drawn at random, forward and backward: products, sums, views, softmax (collectives inside), dropout (two results)."""
    chance = random.Random(seed)
    tensors = {"x": Tensor("x", (batch, width), "float32"), "mean": Tensor("mean", (width,), "float32")}
    inputs = [GraphInput("x", "input", "x"), GraphInput("mean", "buffer", "mean")]
    ops: list[Op] = []
    outputs: list[GraphOutput] = []

    def add(op: Op, shape: tuple[int, ...] = (batch, width)) -> str:
        ops.append(op)
        tensors[op.name] = Tensor(op.name, shape, "float32")
        return op.name

    made, undo = ["x"], []
    for index in range(layers):
        name, kind, last = f"f{index}", chance.choice(kinds), made[-1]
        if kind == "contract":
            weight = f"w{index}"
            tensors[weight] = Tensor(weight, (width, width), "float32")
            inputs.append(GraphInput(weight, "parameter", f"layers.{index}.weight", trained=True))
            undo.append((kind, last, weight))
            made.append(add(_contract(name, "b k, n k -> b n", last, weight)))
        elif kind == "add":
            undo.append((kind, chance.choice(made), ""))
            made.append(add(Op(name, "aten.add.Tensor", (last, undo[-1][1]), (name,), (Ref(0), Ref(1)))))
        elif kind == "softmax":
            undo.append((kind, name, ""))
            made.append(add(Op(name, "aten._softmax.default", (last,), (name,), (Ref(0), -1, False))))
        elif kind == "alias":
            undo.append((kind, "", ""))
            made.append(add(Op(name, "aten.alias.default", (last,), (name,), (Ref(0),))))
        else:
            mask = f"{name}:1"
            tensors[mask] = Tensor(mask, (batch, width), "bool")
            undo.append((kind, mask, ""))
            made.append(add(Op(name, "aten.native_dropout.default", (last,), (name, mask), (Ref(0), 0.5, True))))
    add(Op("loss", "aten.sum.default", (made[-1],), ("loss",), (Ref(0),)), ())
    add(Op("mean2", "aten.mul.Tensor", ("mean",), ("mean2",), (Ref(0), 0.9)), (width,))
    outputs += [GraphOutput("loss", "output", "loss"), GraphOutput("mean2", "buffer", "mean")]
    if chance.random() < 0.5:
        outputs.append(GraphOutput(chance.choice(made[1:]), "output", "hidden"))
    size = ((batch, width), 1.0)
    grad = add(Op("g", "aten.full.default", (), ("g",), size, (("dtype", Dtype("float32")),), phase="backward"))
    for index, (kind, first, weight) in reversed(list(enumerate(undo))):
        name = f"b{index}"
        if kind == "contract":
            add(_contract(f"gw{index}", "b n, b k -> n k", grad, first, "backward"), (width, width))
            outputs.append(GraphOutput(f"gw{index}", "gradient", f"layers.{index}.weight"))
            grad = add(_contract(name, "b n, n k -> b k", grad, weight, "backward"))
        elif kind == "add":
            grad = add(Op(name, "aten.add.Tensor", (grad, first), (name,), (Ref(0), Ref(1)), phase="backward"))
        elif kind == "softmax":
            arguments = (Ref(0), Ref(1), -1, Dtype("float32"))
            grad = add(Op(name, "aten._softmax_backward_data.default", (grad, first), (name,), arguments, phase="backward"))
        elif kind == "alias":
            grad = add(Op(name, "aten.alias.default", (grad,), (name,), (Ref(0),), phase="backward"))
        else:
            grad = add(Op(name, "aten.mul.Tensor", (grad, first), (name,), (Ref(0), Ref(1)), phase="backward"))
    return Graph("train", tensors, tuple(inputs), tuple(ops), tuple(outputs))


@cache
def machine(mesh: str, cost_model: str = "roofline") -> Machine:
    """A mesh of a small cluster."""
    return Machine(Mesh.parse(mesh), load_hardware("cpu-cluster"), cost_model)


def two_layer_plan(mesh: str = "dp=2,tp=2", cost_model: str = "communication") -> Plan:
    """What the search finds for two layers; under the communication model operators must be split, so there are collectives."""
    found = find_plan(two_layers(), machine(mesh, cost_model), time_limit=600.0)
    return record(found, target="two_layers", memory_limit=10**9)


def random_schedule(
    graph: Graph, where: Machine, seed: int, limits: Limits | None = None, again: float = 0.0, once: float = 0.0
) -> Schedule:  # fmt: skip
    """The schedule of strategies, specs and layouts drawn at random, and of operators that run again, a share of ``again``, and of layouts
    that are made once a step, a share of ``once``."""
    return make_schedule(graph, random_assignment(graph, where, seed, again, once), where, limits)


def plan_of(schedule: Schedule, optimizer: str = "adamw") -> Plan:
    """A schedule as if a search had found it."""
    seconds = step_seconds(schedule, optimizer) if schedule.machine.cost_model != "communication" else schedule.communication_seconds()
    found = SearchResult(schedule, seconds, seconds, 0.0, "optimal", 0.0, "random", optimizer, memory(schedule, optimizer), {})
    return record(found, target="two_layers", memory_limit=10**9)


def bucket_graph() -> Graph:
    """Six products one after another."""
    return random_graph(0, 6, ("contract",))


def bucket_plan(limits: Limits | None = None) -> Plan:
    """The products on dp=4 as ZeRO-2 splits them: weights are gathered and kept, and gradients scattered, in buckets."""
    graph, where = bucket_graph(), machine("dp=4")
    split, whole, partial = (ShardingSpec.parse(text) for text in ("S0 R", "R R", "R R +P0"))
    layouts = [Layout("loss@whole", "loss", "loss", ShardingSpec(()), "forward", "output:0")]
    layouts.append(Layout("g@split", "g", "g", split, "backward", "gw5"))
    reads: dict[tuple[str, int], str] = {("output:0", 0): "loss@whole"}
    lies = {"x": split, "mean": ShardingSpec.parse("R"), "g": whole, "mean2": ShardingSpec.parse("R"), "loss": ShardingSpec.parse("+P0")}
    for op in graph.ops:
        lies.setdefault(op.name, partial if op.name.startswith("gw") else split)
        for position, tensor in enumerate(op.inputs):
            if tensor == "g":
                reads[op.name, position] = "g@split"
            elif tensor.startswith("w"):
                lies[tensor] = split
                reads[op.name, position] = f"{tensor}@whole"
                if op.phase == "forward":
                    layouts.append(Layout(f"{tensor}@whole", tensor, tensor, whole, "forward", op.name))
    for index, output in enumerate(graph.outputs):
        if output.kind == "gradient":
            layouts.append(Layout(f"{output.tensor}@split", output.tensor, output.tensor, split, "backward", f"output:{index}"))
            reads[f"output:{index}", 0] = f"{output.tensor}@split"
    made = {layout.value: layout.spec for layout in layouts} | lies

    def strategy(op: Op) -> Strategy:
        operands = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        inputs = tuple(made[reads.get((op.name, position), tensor)] for position, tensor in enumerate(op.inputs))
        outputs = tuple(lies[tensor] for tensor in op.outputs)
        offered = strategies(find_rule(op, graph.tensors), operands, where.mesh.sizes)
        return next(item for item in offered if (item.inputs, item.outputs) == (inputs, outputs))

    inputs = {item.tensor: lies[item.tensor] for item in graph.inputs}
    assignment = Assignment(inputs, {op.name: strategy(op) for op in graph.ops}, tuple(layouts), reads)
    return plan_of(make_schedule(graph, assignment, where, limits))


def random_plan(mesh: str, seed: int, cost_model: str = "roofline", limits: Limits | None = None) -> Plan:
    """A legal plan for two layers, drawn at random."""
    return plan_of(random_schedule(two_layers(), machine(mesh, cost_model), seed, limits))
