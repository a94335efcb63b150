"""Small graphs and machines drawn from a seed, on which computing and communicating take about as long: for proofs by trying everything."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import count

from autopar.cost_models import Hardware, Machine, Mesh
from autopar.graph import Dtype, Graph, GraphInput, GraphOutput, Op, Phase, Ref, Tensor
from autopar.sharding import splits

MOST_OPERATORS = 5
TYPICAL_SECONDS = 8e-6
"""Of a contraction of three extents of 16 at ``PEAK_FLOPS``; what is moved meanwhile is its result of 1 KiB."""
TYPICAL_BYTES = 1024.0
PEAK_FLOPS = 1e9


def small_graph(seed: int, most: int = MOST_OPERATORS, forward: int = 2) -> Graph:
    """A graph of 2 to ``most`` operators: forward, or forward and backward with the gradients of its parameters, with or without a loss.

    Args:
        forward: so many operators of forward, at most, where there is a backward.
    """
    chance = random.Random(seed)
    while True:
        made = _Drawing(chance, most, forward).run()
        if made is not None:
            return made


def small_pins(graph: Graph, machine: Machine, seed: int) -> dict[str, str]:
    """Pins on some inputs and outputs: without any, a small graph splits its first dim and communicates little."""
    chance = random.Random(seed + 2_000_003)
    share = 0.2 if graph.mode == "train" else 0.5
    named = [(f"input:{item.name}" if item.kind == "input" else item.name, item.tensor) for item in graph.inputs if item.kind != "tangent"]
    named += [(f"output:{output.name}", output.tensor) for output in graph.outputs if output.kind == "output"]
    return {
        name: str(chance.choice(list(splits(graph.tensors[tensor].shape, machine.mesh.sizes))))
        for name, tensor in named
        if chance.random() < share
    }


def small_machine(seed: int, mesh: str) -> Machine:
    """Latency, bandwidths, launch time and slowdown drawn so that neither side is much slower than the other."""
    chance = random.Random(seed + 1_000_003)

    def around(middle: float, factor: float) -> float:
        return middle * math.exp(chance.uniform(-1.0, 1.0) * math.log(factor))

    def link() -> dict[str, float]:
        latency = chance.choice((0.0, around(0.15 * TYPICAL_SECONDS, 6.0)))
        return {"latency_seconds": latency, "bandwidth": around(TYPICAL_BYTES / TYPICAL_SECONDS, 5.0)}

    hardware = Hardware.from_dict(
        {
            "name": f"drawn-{seed}",
            "memory_bytes": 1e12,
            "memory_bandwidth": around(3 * TYPICAL_BYTES / TYPICAL_SECONDS, 4.0),
            "kernel_launch_seconds": chance.choice((0.0, around(0.05 * TYPICAL_SECONDS, 4.0))),
            "peak_flops": {"float32": PEAK_FLOPS},
            "devices_per_node": chance.choice((2, 8)),
            "links": {"node": link(), "network": link()},
            "overlap_slowdown": chance.choice((0.0, chance.uniform(0.05, 0.7))),
            "launch_overlaps": chance.random() < 0.8,
        }
    )
    return Machine(Mesh.parse(mesh), hardware, "roofline")


@dataclass
class _Drawing:
    """One graph in the making."""

    chance: random.Random
    most: int
    forward: int = 2
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: list[GraphInput] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    number: count[int] = field(default_factory=count)
    learns: set[str] = field(default_factory=set)

    def run(self) -> Graph | None:
        """None when it has come out too large, or as nothing."""
        chance = self.chance
        train = chance.random() < 0.6
        self.extents = [chance.choice((4, 8, 16, 16, 32, 6)) for _ in range(3)]
        made = [self._input("input", "x")]
        for _ in range(chance.randint(1, self.forward if train else self.most)):
            made.append(self._forward(made))
        leaves = [name for name in made if not any(name in op.inputs for op in self.ops) and name != "x"]
        if train:
            if len(leaves) != 1 or not self.learns:
                return None
            outputs = self._with_gradients(leaves[0])
        else:
            outputs = [GraphOutput(name, "output", str(index)) for index, name in enumerate(leaves)]
        if not 2 <= len(self.ops) <= self.most or outputs is None:
            return None
        tensors = {name: Tensor(name, shape, "float32") for name, shape in self.shapes.items()}
        return Graph("train" if train else "inference", tensors, tuple(self.inputs), tuple(self.ops), tuple(outputs))

    def _input(self, kind: str, name: str, shape: tuple[int, ...] | None = None, trained: bool = False) -> str:
        tensor = name.replace("grad of ", "g_")
        self.shapes[tensor] = shape or (self.chance.choice(self.extents), self.chance.choice(self.extents))
        self.inputs.append(GraphInput(tensor, kind, name, trained=trained))  # type: ignore[arg-type]
        return tensor

    def _parameter(self, shape: tuple[int, ...]) -> str:
        known = [item.tensor for item in self.inputs if item.kind == "parameter" and self.shapes[item.tensor] == shape]
        if known and self.chance.random() < 0.5:
            return self.chance.choice(known)
        name = self._input("parameter", f"w{next(self.number)}", shape, trained=True)
        self.learns.add(name)
        return name

    def _add(
        self, target: str, inputs: tuple[str, ...], shape: tuple[int, ...], args: tuple[object, ...], phase: Phase = "forward",
        kwargs: tuple[tuple[str, object], ...] = (),
    ) -> str:  # fmt: skip
        name = f"{'g' if phase == 'backward' else 't'}{next(self.number)}"
        self.shapes[name] = shape
        self.ops.append(Op(name, target, inputs, (name,), args, kwargs, phase=phase))
        if phase == "forward" and not self.learns.isdisjoint(inputs):
            self.learns.add(name)
        return name

    def _contract(self, equation: str, one: str, other: str, phase: Phase = "forward") -> str:
        terms, result = equation.split(" -> ")
        first, second = (term.split() for term in terms.split(", "))
        extent = dict(zip((*first, *second), (*self.shapes[one], *self.shapes[other]), strict=True))
        shape = tuple(extent[letter] for letter in result.split())
        return self._add("autopar.contract.default", (one, other), shape, (Ref(0), Ref(1), equation), phase)

    def _forward(self, made: list[str]) -> str:
        chance = self.chance
        one = made[-1] if chance.random() < 0.7 else chance.choice(made)
        shape = self.shapes[one]
        kind = chance.choices(("weight", "product", "relu", "softmax", "add", "mul", "bias"), (8, 1, 2, 1, 2, 1, 1))[0]
        others = [name for name in made if self.shapes[name] == shape]
        if kind == "weight":
            return self._contract("a b, b c -> a c", one, self._parameter((shape[1], chance.choice(self.extents))))
        if kind == "product":
            fitting = [name for name in made if self.shapes[name][1] == shape[1]]
            return self._contract("a b, c b -> a c", one, chance.choice(fitting))
        if kind == "relu":
            return self._add("aten.relu.default", (one,), shape, (Ref(0),))
        if kind == "softmax":
            return self._add("aten._softmax.default", (one,), shape, (Ref(0), 1, False))
        other = self._parameter(shape) if kind == "bias" else chance.choice(others)
        return self._add("aten.mul.Tensor" if kind == "mul" else "aten.add.Tensor", (one, other), shape, (Ref(0), Ref(1)))

    def _with_gradients(self, leaf: str) -> list[GraphOutput] | None:
        """The backward operators; None when no parameter leads to ``leaf``."""
        if leaf not in self.learns:
            return None
        forward = list(self.ops)
        if self.chance.random() < 0.5:
            loss = self._add("aten.sum.default", (leaf,), (), (Ref(0),))
            outputs = [GraphOutput(loss, "output", "loss")]
            shape = self.shapes[leaf]
            first = self._add("aten.full.default", (), shape, (shape, 1.0), "backward", (("dtype", Dtype("float32")),))
        else:
            outputs = [GraphOutput(leaf, "output", "y")]
            first = "tangent"
            self.shapes[first] = self.shapes[leaf]
            self.inputs.append(GraphInput(first, "tangent", "y"))
        gradient = {leaf: first}

        def give(tensor: str, value: str) -> None:
            if tensor in gradient:
                pair = (gradient[tensor], value)
                value = self._add("aten.add.Tensor", pair, self.shapes[value], (Ref(0), Ref(1)), "backward")
            gradient[tensor] = value

        for op in reversed(forward):
            if op.name in gradient:
                for position, tensor in enumerate(op.inputs):
                    if tensor in self.learns:
                        give(tensor, self._gradient(op, position, gradient[op.name]))
        trained = [item.tensor for item in self.inputs if item.trained]
        if not all(name in gradient for name in trained):
            return None
        return outputs + [GraphOutput(gradient[name], "gradient", name) for name in trained]

    def _gradient(self, op: Op, position: int, given: str) -> str:
        """What leaves an operator towards its input at ``position``, when ``given`` comes to its result."""
        other = op.inputs[1 - position] if len(op.inputs) == 2 else ""
        shape = self.shapes[op.inputs[position]]
        match op.target:
            case "autopar.contract.default":
                towards = {
                    ("a b, b c -> a c", 0): "a c, b c -> a b", ("a b, b c -> a c", 1): "a c, a b -> b c",
                    ("a b, c b -> a c", 0): "a c, c b -> a b", ("a b, c b -> a c", 1): "a c, a b -> c b",
                }  # fmt: skip
                return self._contract(towards[str(op.args[2]), position], given, other, "backward")
            case "aten.relu.default":
                return self._add("aten.threshold_backward.default", (given, op.name), shape, (Ref(0), Ref(1), 0), "backward")
            case "aten._softmax.default":
                args = (Ref(0), Ref(1), 1, Dtype("float32"))
                return self._add("aten._softmax_backward_data.default", (given, op.name), shape, args, "backward")
            case "aten.mul.Tensor":
                return self._add("aten.mul.Tensor", (given, other), shape, (Ref(0), Ref(1)), "backward")
        return given
