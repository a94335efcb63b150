"""Graph, Op, Tensor: what the importer yields. Frozen values, no torch.

A graph is a list of operators in execution order over named tensors. Tensor arguments are ``Ref`` placeholders
in ``Op.args`` and ``Op.kwargs``; everything else in them is plain JSON data, so that a plan can hold it and a rank can run it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from autopar.errors import SpecError
from autopar.sharding import Blocks, ShardingSpec

if TYPE_CHECKING:
    import networkx

Phase = Literal["forward", "backward"]
Argument = Any
"""None, bool, int, float, str, Dtype, Ref, or a tuple of these."""

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

CONVERSION = "aten._to_copy.default"
"""The operator that gives a tensor another dtype."""
SEND, RECEIVE = "send.", "receive."
"""Prefixes of the public names of what leaves a pipeline's stage for another, and of what enters it, before the tensor's name."""
NAMED_TUPLE = "(named tuple)"
"""The one key of an object that stands for a named tuple in the tree of a result: its fields are in the object below."""


@dataclass(frozen=True)
class Ref:
    """The place of the operator's ``index``-th tensor input among its arguments."""

    index: int


@dataclass(frozen=True)
class Dtype:
    """A dtype among an operator's arguments, by its torch name (``float32``)."""

    name: str


@dataclass(frozen=True)
class Tensor:
    """A named value: global shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")


def layer_of(module: str) -> str:
    """The layer that a module is of: its path up to the first number; empty where it has none.

    >>> layer_of("model.layers.3.mlp.0"), layer_of("model.head")
    ('model.layers.3', '')
    """
    found = _LAYER.match(module)
    return found.group() if found else ""


@dataclass(frozen=True)
class Op:
    """One operator.

    Args:
        name: stable name; its first output has the same name, further ones ``name:1`` ...
        target: ``aten.add.Tensor``, ``autopar.contract.default``.
        inputs: tensor names, one for each ``Ref`` in order of first appearance (a tensor used twice appears twice).
        outputs: tensor names; an output nobody uses still has one.
        args, kwargs: arguments with ``Ref(i)`` for tensors. No device, layout or memory format among them.
        module: path of the module it comes from (``layers.0.attn``), empty for the top.
        phase: forward or backward.
        location: the user's line, ``model.py:12``, empty when unknown.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    module: str = ""
    phase: Phase = "forward"
    location: str = ""


@dataclass(frozen=True)
class GraphInput:
    """A value that comes from outside.

    Args:
        tensor: its tensor name in the graph.
        kind: ``input``, ``parameter``, ``buffer``, ``constant`` (a tensor baked into the model) or ``tangent``
            (an output's gradient, in training graphs without a scalar loss).
        name: the public name: forward argument (``tokens``, ``batch.x``), parameter path, or the output's name for a tangent.
        aliases: further module names of the same tied parameter.
        trained: a parameter that requires grad.
        blocks: a parameter's dim that is two dims of the tensor.
    """

    tensor: str
    kind: Literal["input", "parameter", "buffer", "constant", "tangent"]
    name: str
    aliases: tuple[str, ...] = ()
    trained: bool = False
    blocks: Blocks | None = None

    @property
    def is_received(self) -> bool:
        """Whether it comes from another stage of a pipeline."""
        return self.name.startswith(RECEIVE)

    def own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape as the parameter has it."""
        return shape if self.blocks is None else self.blocks.own_shape(shape)

    def own_spec(self, spec: ShardingSpec, sizes: Sequence[int]) -> ShardingSpec:
        """The tensor's spec as the parameter has it.

        Raises:
            SpecError: none says so.
        """
        found = spec if self.blocks is None else self.blocks.own_spec(spec, sizes)
        if found is None:
            raise SpecError(f"{self.name} cannot lie as {spec!s}: blocks are split among ranks, and each block too", "split one of them")
        return found


@dataclass(frozen=True)
class GraphOutput:
    """A value that leaves.

    Args:
        tensor: its tensor name (several outputs may share one; an output may be a graph input).
        kind: ``output``, ``gradient`` (of the parameter or input ``name``) or ``buffer`` (new value of a mutated buffer).
        name: path of the output (``loss``, ``0``, ``logits``), or of the parameter, buffer or input (``input:NAME`` where a parameter or
            buffer has the input's name).
    """

    tensor: str
    kind: Literal["output", "gradient", "buffer"]
    name: str

    @property
    def is_sent(self) -> bool:
        """Whether it goes to another stage of a pipeline."""
        return self.name.startswith(SEND)


LOOKUPS = ("aten.embedding.", "autopar.embedding.", "aten._embedding_bag", "aten.index_select.", "aten.index.Tensor")
"""What the names of operators begin with that take rows of their first input by an index."""


def looked_up(ops: Sequence[Op]) -> set[str]:
    """Tables: tensors whose rows operators take by an index, in their own dtype or another."""
    found: set[str] = set()
    for op in reversed(ops):
        if op.target.startswith(LOOKUPS) or (op.target == CONVERSION and op.outputs[0] in found):
            found.add(op.inputs[0])
    return found


EXPERT_CONTRACT = "autopar.expert_contract.default"
DISPATCHES, COMBINE = ("autopar.dispatch.default", "autopar.dispatch_ids.default"), "autopar.combine.default"
"""Operators that send rows to their experts, and the one that brings them back."""


def is_matrix(shape: Sequence[int], dtype: str) -> bool:
    """Whether a parameter is what matrix optimizers take: of two dims, and real."""
    return len(shape) == 2 and not dtype.startswith("complex")


DIVISOR = "microbatch.divisor"
"""The output, none of the model's, that says what a mean divides by in a microbatch."""


@dataclass(frozen=True)
class Accumulation:
    """How a step is made of microbatches: forward and backward run for one after another, and their gradients are summed.

    Args:
        microbatches: how many of equal size; the graph is that of one.
        cut: the graph inputs (tensor names) of which each microbatch has a part, cut along dim 0; it has the others whole.
        weight: of each microbatch's loss, and of its gradients, in the step's.
        whole: that the sum so weighted is the whole batch's loss is proved; else ``reason`` says where rows of the batch meet. Of what is
            proved it says when that holds, if not always.
        divisor: what a mean divides by that each microbatch counts for itself, by its tensor name: its share of the sum over all
            microbatches is then the weight, times ``weight`` and the number of microbatches. It leaves as the output ``DIVISOR``.
        in_flight: microbatches that are begun and not ended at one time, at most. One runs, the others are between forward and backward.
            Only a stage of a pipeline that is being planned has several.
    """

    microbatches: int = 1
    cut: tuple[str, ...] = ()
    weight: float = 1.0
    whole: bool = True
    reason: str = ""
    divisor: str = ""
    in_flight: int = 1


@dataclass(frozen=True, repr=False)
class Graph:
    """A captured model.

    Args:
        mode: ``train`` (forward and backward) or ``inference``.
        tensors: every tensor by name.
        inputs, ops, outputs: in order.
        groups: equal layers: each group is a tuple of repeats, each repeat a tuple of op names, position by position the same.
        arguments: JSON tree of the call, ``{"args": [...], "kwargs": {...}, "loss_args": [...]}`` with
            ``{"tensor": NAME}`` leaves, and of the result, ``{"outputs": ...}``, where named tuples are told (``NAMED_TUPLE``).
        accumulation: of how many such graphs a step consists. It is no part of the hash.
    """

    mode: Literal["train", "inference"]
    tensors: Mapping[str, Tensor]
    inputs: tuple[GraphInput, ...]
    ops: tuple[Op, ...]
    outputs: tuple[GraphOutput, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    accumulation: Accumulation = Accumulation()

    def accumulated(self, made: Accumulation) -> Graph:
        """The graph as one of the microbatches of a step."""
        divisor = GraphOutput(made.divisor, "output", DIVISOR)
        outputs = self.outputs if not made.divisor or divisor in self.outputs else (*self.outputs, divisor)
        return replace(self, outputs=outputs, accumulation=made)

    @property
    def microbatches(self) -> int:
        """How often forward and backward run in a step."""
        return self.accumulation.microbatches

    def parts(self, tensor: str) -> int:
        """How many parts of a graph input are there at once: of a cut one, those of all microbatches."""
        return self.microbatches if tensor in self.accumulation.cut else 1

    def __repr__(self) -> str:
        """On one line: a graph has thousands of operators."""
        layers = " and ".join(f"{len(repeats)} equal layers of {len(repeats[0])}" for repeats in self.groups)
        weights = sum(self.tensors[item.tensor].elements for item in self.of_kind("parameter"))
        return f"<Graph for {self.mode}: {len(self.ops)} operators{f', {layers}' if layers else ''}, {weights} parameters>"

    @cached_property
    def op(self) -> Mapping[str, Op]:
        """Operators by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """A number for each operator by name, the same for operators that do the same to tensors of the same shapes and dtypes."""
        known: dict[object, int] = {}
        shown = {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}
        return {
            op.name: known.setdefault((op.target, op.args, op.kwargs, *[shown[name] for name in (*op.inputs, *op.outputs)]), len(known))
            for op in self.ops
        }

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """The operator that makes each tensor (graph inputs have none)."""
        return {tensor: op for op in self.ops for tensor in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """For each tensor, the (op index, input position) pairs that read it, in order."""
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.tensors}
        for index, op in enumerate(self.ops):
            for position, tensor in enumerate(op.inputs):
                found[tensor].append((index, position))
        return {name: tuple(places) for name, places in found.items()}

    @cached_property
    def prepared(self) -> frozenset[str]:
        """The operators that lead forward and read parameters alone: what they make is as good as there from the start."""
        parameters = {item.tensor for item in self.of_kind("parameter")}
        leading = takewhile(lambda op: op.inputs and op.phase == "forward" and parameters.issuperset(op.inputs), self.ops)
        return frozenset(op.name for op in leading)

    @cached_property
    def conversions(self) -> Mapping[str, str]:
        """The operators that give parameters another dtype in forward, and nothing that leaves, with these (their tensors)."""
        parameters, leaving = {item.tensor for item in self.of_kind("parameter")}, {output.tensor for output in self.outputs}
        made = (op for op in self.ops if op.target == CONVERSION and op.phase == "forward" and leaving.isdisjoint(op.outputs))
        return {op.name: op.inputs[0] for op in made if op.inputs[0] in parameters}

    def of_kind(self, kind: str) -> Iterator[GraphInput]:
        """The graph inputs of one kind, in order."""
        return (item for item in self.inputs if item.kind == kind)

    @cached_property
    def owners(self) -> Mapping[GraphOutput, str]:
        """The graph input (its tensor) of which an output is the gradient or the new value."""
        named = {(item.kind, item.name): item.tensor for item in self.inputs}

        def owner(output: GraphOutput) -> str:
            kinds = ("buffer",) if output.kind == "buffer" else ("parameter", "buffer", "input")
            found = [*((kind, output.name) for kind in kinds), ("input", output.name.removeprefix("input:"))]
            return next(named[key] for key in found if key in named)

        return {output: owner(output) for output in self.outputs if output.kind != "output"}

    @cached_property
    def gradients(self) -> Mapping[str, str]:
        """The gradient's name by the graph input (its tensor) that has one."""
        return {tensor: output.name for output, tensor in self.owners.items() if output.kind == "gradient"}

    @cached_property
    def stepped(self) -> frozenset[str]:
        """The parameters, as tensors, that the optimizer's step changes; it passes over those without a gradient, and has no states of
        them."""
        return frozenset(item.tensor for item in self.inputs if item.trained and item.tensor in self.gradients)

    @cached_property
    def matrices(self) -> Mapping[str, tuple[int, ...]]:
        """Of ``stepped`` the real matrices of layers, with the shapes that the model has them in: what matrix optimizers step. A matrix of
        whose rows some are looked up, an embedding, is none."""
        shapes = {item.tensor: item.own_shape(self.tensors[item.tensor].shape) for item in self.inputs if item.tensor in self.stepped}
        rows = looked_up(self.ops)
        return {name: shape for name, shape in shapes.items() if is_matrix(shape, self.tensors[name].dtype) and name not in rows}

    @cached_property
    def loss(self) -> int | None:
        """Which of the outputs is the loss of a training step."""
        found = (index for index, output in enumerate(self.outputs) if output.kind == "output" and output.name == "loss")
        return next(found, None) if self.mode == "train" else None

    @cached_property
    def tail(self) -> tuple[Op, ...]:
        """The operators of forward whose results lead to the loss and to nothing else, the last first."""
        leaving = {output.tensor for index, output in enumerate(self.outputs) if index != self.loss}
        found: dict[str, Op] = {}
        for op in reversed(self.ops) if self.loss is not None else ():
            if op.phase == "forward" and leaving.isdisjoint(op.outputs) and self.readers(op) <= found.keys():
                found[op.name] = op
        return tuple(found.values())

    def readers(self, op: Op) -> set[str]:
        """The operators, by name, that read what one makes."""
        return {self.ops[index].name for tensor in op.outputs for index, _ in self.consumers[tensor]}

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """The dataflow: a node for each operator, input and output, an edge for each read of a tensor.

        Names of nodes: the operator's, the input's tensor, and ``KIND:NAME`` of an output (``output:loss``).
        Attributes of nodes: ``kind`` (``op``, or the input's or output's) and ``name``; of operators also ``op``, ``module``, ``phase``.
        Attributes of edges: ``tensor``, ``shape``, ``dtype``, ``bytes``. An edge's key is the place among the reader's inputs.

        >>> tensors = {name: Tensor(name, (4, 8), "float32") for name in ("x", "y")}
        >>> op = Op("y", "aten.relu.default", ("x",), ("y",), (Ref(0),))
        >>> graph = Graph("inference", tensors, (GraphInput("x", "input", "x"),), (op,), (GraphOutput("y", "output", "0"),))
        >>> [(source, reader, data["bytes"]) for source, reader, data in graph.to_networkx().edges(data=True)]
        [('x', 'y', 128), ('y', 'output:0', 128)]
        """
        import networkx  # it takes 0.15 s to import: only callers pay for it

        made = networkx.MultiDiGraph()
        made.add_nodes_from((item.tensor, {"kind": item.kind, "name": item.name}) for item in self.inputs)
        for op in self.ops:
            made.add_node(op.name, kind="op", name=op.name, op=op.target, module=op.module, phase=op.phase)
        leaving = {f"{item.kind}:{item.name}": item for item in self.outputs}
        made.add_nodes_from((node, {"kind": item.kind, "name": item.name}) for node, item in leaving.items())
        maker = {tensor: op.name for tensor, op in self.producer.items()}
        reading = [(op.name, op.inputs) for op in self.ops] + [(node, (item.tensor,)) for node, item in leaving.items()]
        for reader, inputs in reading:
            for place, name in enumerate(inputs):
                tensor = self.tensors[name]
                facts = {"tensor": name, "shape": tensor.shape, "dtype": tensor.dtype, "bytes": tensor.bytes}
                made.add_edge(maker.get(name, name), reader, place, **facts)
        return made

    @cached_property
    def loss_gradient(self) -> str | None:
        """The operator that begins the backward of a scalar loss: it makes the one that is the loss's gradient."""
        first = next((op for op in self.ops if op.phase == "backward"), None)
        made = first is not None and first.target == "aten.full.default" and first.args == ((), 1.0)
        return first.name if first is not None and made and not any(self.of_kind("tangent")) else None

    @cached_property
    def sha256(self) -> str:
        """Hash of what is computed: operators, arguments, shapes, dtypes, wiring; not locations, devices or kernels."""
        number = {item.tensor: index for index, item in enumerate(self.inputs)}
        rows: list[Any] = [self.mode]
        rows += [[i.kind, i.name, *self._signature(i.tensor)] for i in self.inputs]
        for op in self.ops:
            rows.append([op.target, [number[t] for t in op.inputs], to_json(op.args), to_json(dict(op.kwargs)), op.phase])
            for tensor in op.outputs:
                number[tensor] = len(number)
                rows.append(self._signature(tensor))
        rows += [[o.kind, o.name, number[o.tensor]] for o in self.outputs]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def _signature(self, name: str) -> list[Any]:
        tensor = self.tensors[name]
        return [list(tensor.shape), tensor.dtype]


def to_json(argument: Argument) -> Any:
    """Operator arguments as JSON data: ``Ref(2)`` is ``{"ref": 2}``, ``Dtype("float32")`` is ``{"dtype": "float32"}``,
    infinite and not-a-number floats are ``{"float": "inf"}``, complex numbers ``{"complex": [re, im]}``."""
    match argument:
        case complex():
            return {"complex": [to_json(argument.real), to_json(argument.imag)]}
        case Ref(index):
            return {"ref": index}
        case Dtype(name):
            return {"dtype": name}
        case float() if not math.isfinite(argument):
            return {"float": str(argument)}
        case tuple() | list():
            return [to_json(item) for item in argument]
        case dict():
            return {key: to_json(item) for key, item in argument.items()}
        case _:
            return argument


def from_json(data: Any) -> Argument:
    """The inverse of ``to_json`` (lists become tuples)."""
    match data:
        case {"ref": int(index)}:
            return Ref(index)
        case {"dtype": str(name)}:
            return Dtype(name)
        case {"float": str(text)}:
            return float(text)
        case {"complex": [real, imaginary]}:
            return complex(from_json(real), from_json(imaginary))
        case list():
            return tuple(from_json(item) for item in data)
        case dict():
            return {key: from_json(item) for key, item in data.items()}
        case _:
            return data
