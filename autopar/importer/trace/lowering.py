"""The traced functional graph as the values that the planner reads: Op, Tensor and names, without torch types.

Device, layout and memory format leave the arguments; what only moved between formats or named a value twice leaves the
graph; what nobody needs is dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch.fx import Node

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.graph import Argument, Dtype, Graph, GraphInput, GraphOutput, Op, Phase, Ref, Tensor
from autopar.importer.diagnosis.errors import at_line
from autopar.importer.diagnosis.provenance import module_path, source_line, user_frame
from autopar.importer.export.exported import Exported, Value
from autopar.importer.naming import fresh
from autopar.importer.trace.roles import roles
from autopar.importer.trace.same import same_value
from autopar.sharding import Blocks

aten = torch.ops.aten
FORMAT_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad", "copy"})
"""Arguments about where and how a tensor lies; the runtime binds the device itself."""


_RENAMED = {
    aten._unsafe_view.default: aten.view.default, aten.reshape.default: aten.view.default,
    aten.empty_strided.default: aten.empty.memory_format, aten.new_empty_strided.default: aten.new_empty.default,
}  # fmt: skip
_OF_NOTHING = {
    aten.new_zeros.default: aten.zeros.default, aten.new_ones.default: aten.ones.default, aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}  # fmt: skip
"""What is made like a tensor, of whose values nothing is read, is made of nothing: how that tensor lies is then nobody's concern."""
_SIZED = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default})
"""Operators whose second argument is the result's shape, where -1 may stand for a size; graphs name every size."""


class Lowering:
    """Builds the graph; one instance for one capture."""

    def __init__(
        self, exported: Exported, graph: torch.fx.Graph, origins: Mapping[str, Node], blocks: Mapping[str, Blocks], *, train: bool
    ) -> None:
        self.exported = exported
        self.blocks = blocks
        self.graph = graph
        self.origins = origins
        self.train = train
        self.roles = roles(graph, exported)
        self.same: dict[Node, Node] = {}
        self.needed: set[Node] = set()
        self.names: dict[tuple[Node, int], str] = {}
        self.taken: set[str] = set()
        self.counters: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self.squeezed: dict[Node, TorchTensor] = {}
        self.provenance: dict[Node, tuple[str, str]] = {}

    def run(self) -> Graph:
        nodes = self._needed()
        inputs = self._inputs()
        ones = self._loss_tangent()
        backward = self._backward(nodes)
        ordered = [node for node in nodes if node not in backward] + [node for node in nodes if node in backward]
        ops: list[Op] = []
        for node in ordered:
            phase: Phase = "backward" if node in backward else "forward"
            if ones is not None and phase == "backward":
                ops.append(ones)
                ones = None
            ops.append(self._op(node, phase))
        return Graph(
            mode="train" if self.train else "inference",
            tensors=self.tensors,
            inputs=inputs,
            ops=tuple(ops),
            outputs=self._outputs(),
            arguments=self.exported.arguments,
        )

    # - nodes -

    def _root(self, node: Node) -> Node:
        """The node whose value this is, through no-ops."""
        while node in self.same:
            node = self.same[node]
        return node

    def _needed(self) -> list[Node]:
        """Call nodes that some result needs, in order, without no-ops and tuple accesses."""
        for node in self.graph.nodes:
            if node.target in _OF_NOTHING:
                node.target, node.args = _OF_NOTHING[node.target], node.args[1:]
                node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                source = same_value(node) or self._squeezed_sum(node)
                if source is not None:
                    self.same[node] = source
        self._hold_in_blocks()
        results = [node for _, node in (*self.roles.outputs, *self.roles.gradients, *self.roles.buffers)]
        pending = [self._root(node) for node in results]
        needed: set[Node] = set()
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += [self._root(source) for source in node.all_input_nodes if not _is_number(source)]
        self.needed = needed
        return [n for n in self.graph.nodes if n in needed and n.op == "call_function" and n.target is not operator.getitem]

    def _hold_in_blocks(self) -> None:
        """A parameter in blocks comes as two dims, and its gradient leaves so: the views to and from them are the values themselves."""
        for node, value in self.roles.inputs.items():
            blocks = self._blocks(value)
            if blocks is not None:
                shape = blocks.shape(node.meta["val"].shape)
                views = [user for user in node.users if user.op != "output"]
                assert all(_views_as(user, shape) for user in views), f"{value.name} is read otherwise than in blocks"
                self.same.update(dict.fromkeys(views, node))
        for value, node in self.roles.gradients:
            blocks, made = self._blocks(value), self._root(node)
            if blocks is not None:
                source = made.args[0]
                shape = blocks.shape(made.meta["val"].shape)
                assert made.target in _SIZED and isinstance(source, Node), f"the gradient of {value.name} is not one in blocks"
                assert tuple(source.meta["val"].shape) == shape, f"the gradient of {value.name} is {list(source.meta['val'].shape)}"
                self.same[made] = source

    def _blocks(self, value: Value) -> Blocks | None:
        return self.blocks.get(value.name) if value.kind == "parameter" else None

    def _squeezed_sum(self, node: Node) -> Node | None:
        """The sum whose kept dims of size 1 a view drops (the gradient of a broadcast): one operator that does not keep them."""
        if node.target is not aten.view.default:
            return None
        source = self._root(node.args[0])
        if source.target is not aten.sum.dim_IntList or len(source.users) != 1 or tuple(source.args[2:]) != (True,):
            return None
        before, after = source.meta["val"], node.meta["val"]
        dims = {dim % before.dim() for dim in source.args[1]}
        if not dims or [size for dim, size in enumerate(before.shape) if dim not in dims] != list(after.shape):
            return None
        self.squeezed[source] = after
        return source

    def _backward(self, nodes: Sequence[Node]) -> set[Node]:
        """Nodes that depend on a tangent, or that autograd ran and no result of the forward needs."""
        later: set[Node] = set(self.roles.tangents)
        for node in self.graph.nodes:
            if any(self._root(source) in later for source in node.all_input_nodes):
                later.add(node)
        wanted: set[Node] = set()
        pending = [self._root(node) for _, node in (*self.roles.outputs, *self.roles.buffers)]
        while pending:
            node = pending.pop()
            if node not in wanted:
                wanted.add(node)
                pending += [self._root(source) for source in node.all_input_nodes]
        return {n for n in nodes if n in later or (n not in wanted and torch_compat.traced_in_backward(n))}

    # - names -

    def _fresh(self, base: str) -> str:
        return fresh(base, self.counters, self.taken)

    def _declare(self, name: str, value: TorchTensor, blocks: Blocks | None = None, place: tuple[str, int] | None = None) -> Tensor:
        try:
            shape = tuple(int(size) for size in value.shape)
        except RuntimeError:  # a symbol: what operators are made of in the trace may have such a size where they themselves have none
            message = f"the size of {name} depends on the values of a tensor"
            hint = "use operators whose result sizes are known before the run, such as topk, where or a mask"
            raise CaptureError(at_line(message, place), hint) from None
        tensor = Tensor(name, shape if blocks is None else blocks.shape(shape), dtype_name(value.dtype))
        self.tensors[name] = tensor
        return tensor

    def _inputs(self) -> tuple[GraphInput, ...]:
        found: list[GraphInput] = []
        public = [value.name for value in self.roles.inputs.values()]
        for node, value in self.roles.inputs.items():
            if value.kind == "constant" and node not in self.needed:
                continue
            name = value.name
            if value.kind in ("input", "constant") and (public.count(name) > 1 or name in self.taken):
                name = f"{value.kind}:{name}"
            found.append(self._input(node, value.kind, name, value.name, value.aliases, value))
        for node, index in self.roles.tangents.items():
            if index != self.exported.loss:
                output = self.exported.outputs[index]
                found.append(self._input(node, "tangent", f"tangent:{output}", output, (), None))
        return tuple(found)

    def _input(self, node: Node, kind: Any, tensor: str, name: str, aliases: tuple[str, ...], value: Value | None) -> GraphInput:
        assert tensor not in self.taken, f"two inputs named {tensor}"
        self.taken.add(tensor)
        self.names[node, 0] = tensor
        blocks = None if value is None else self._blocks(value)
        self._declare(tensor, node.meta["val"], blocks)
        trained = self.train and kind == "parameter" and value is not None and value.value.requires_grad
        return GraphInput(tensor, kind, name, aliases, trained, blocks)

    def _loss_tangent(self) -> Op | None:
        """The gradient of the loss by itself: an operator that makes a one."""
        for node, index in self.roles.tangents.items():
            if index == self.exported.loss:
                name = self._fresh("full")
                self.names[node, 0] = name
                tensor = self._declare(name, node.meta["val"])
                return Op(name, "aten.full.default", (), (name,), ((), 1.0), (("dtype", Dtype(tensor.dtype)),), phase="backward")
        return None

    # - operators -

    def _op(self, node: Node, phase: Phase) -> Op:
        target = node.target
        if not torch_compat.is_operator(target):
            changed = next((one for one in node.args if torch_compat.is_operator(one)), None)  # an operator of one's own, made functional
            what, hint = f"{target}, which is not a torch operator", "use plain tensor operators"
            if changed is not None:
                what, hint = f"{changed}, which changes an input in place", "let the operator return the new value: mutates_args=()"
            raise CaptureError(at_line(f"the traced graph calls {what}", self._place(node)), hint)
        if torch_compat.draws(target) and not _still(node):
            raise CaptureError(
                at_line(f"{target} draws random numbers from no seed of the graph: ranks would draw different ones", self._place(node)),
                "draw with torch.rand, randn, randint, bernoulli, multinomial or dropout, and compute the rest from that",
            )
        target = _RENAMED.get(target, target)
        name = self._fresh(torch_compat.schema_of(target).name.split("::")[1].lstrip("_"))
        outputs = self._results(node, name)
        inputs: list[str] = []
        args, kwargs = self._arguments(node, inputs)
        module, location = self._provenance(node)
        return Op(name, f"{target.namespace}.{target}".replace(f"{target.namespace}.{target.namespace}.", f"{target.namespace}."),
                  tuple(inputs), outputs, args, kwargs, module, phase, location)  # fmt: skip

    def _place(self, node: Node) -> tuple[str, int] | None:
        """The user's line."""
        origin = self.origins.get(torch_compat.origin_of(node))
        return None if origin is None else user_frame(origin)

    def _results(self, node: Node, name: str) -> tuple[str, ...]:
        """Names of the results; those that the operator was told not to compute (``output_mask``) have none."""
        results = node.meta["val"]
        listed = list(results) if isinstance(results, (tuple, list)) else [results]
        outputs: list[str] = []
        for index, value in enumerate(listed):
            if isinstance(value, TorchTensor):
                output = f"{name}:{len(outputs)}" if outputs else name
                outputs.append(output)
                self.names[node, index] = output
                self._declare(output, self.squeezed.get(node, value), place=self._place(node))
        return tuple(outputs)

    def _arguments(self, node: Node, inputs: list[str]) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        schema = torch_compat.schema_of(node.target)
        args = list(node.args)
        kwargs = {key: value for key, value in node.kwargs.items() if key not in FORMAT_ARGUMENTS}
        for index, argument in enumerate(schema.arguments[: len(args)]):
            if argument.name in FORMAT_ARGUMENTS:
                args[index] = None if argument.name != "non_blocking" else False
        result = node.meta["val"]
        if node.target is aten.slice.Tensor:
            args = _spelled_out(node)
        if node in self.squeezed:
            args[2] = False
        if node.target in (aten.empty_strided.default, aten.new_empty_strided.default):
            args.pop()
        if node.target in _SIZED:
            args[1] = tuple(result.shape)
        if isinstance(result, TorchTensor) and not node.all_input_nodes and any(a.name == "dtype" for a in schema.arguments):
            kwargs["dtype"] = result.dtype
        return (
            tuple(self._argument(item, inputs) for item in args),
            tuple((key, self._argument(kwargs[key], inputs)) for key in sorted(kwargs)),
        )

    def _argument(self, item: Any, inputs: list[str]) -> Argument:
        match item:
            case Node() if _is_number(item):
                return _number(item)
            case Node():
                inputs.append(self._tensor(item))
                return Ref(len(inputs) - 1)
            case list() | tuple():
                return tuple(self._argument(part, inputs) for part in item)
            case torch.dtype():
                return Dtype(dtype_name(item))
            case None | bool() | int() | float() | complex() | str():
                return item
            case torch.SymInt():
                return int(item)
            case _:
                raise CaptureError(f"an operator has an argument {item!r} that a plan cannot hold", "use plain numbers and tensors")

    def _tensor(self, node: Node) -> str:
        node = self._root(node)
        if node.target is operator.getitem:
            source, index = node.args
            return self.names[self._root(source), index]
        return self.names[node, 0]

    def _provenance(self, node: Node) -> tuple[str, str]:
        """Module path and source line; a node without a mark (a sum of gradients) takes those of its latest argument."""
        origin = self.origins.get(torch_compat.origin_of(node))
        if origin is not None:
            found = module_path(origin), source_line(origin)
        else:
            sources = [self._root(source) for source in node.all_input_nodes]
            sources = [source.args[0] if source.target is operator.getitem else source for source in sources]
            known = [self.provenance[source] for source in sources if source in self.provenance]
            found = known[-1] if known else ("", "")
        self.provenance[node] = found
        return found

    # - results -

    def _outputs(self) -> tuple[GraphOutput, ...]:
        found = [GraphOutput(self._tensor(node), "output", name) for name, node in self.roles.outputs]
        found += [GraphOutput(self._tensor(node), "buffer", value.name) for value, node in self.roles.buffers]
        held = {value.name for value in self.roles.inputs.values() if value.kind in ("parameter", "buffer")}
        for value, node in self.roles.gradients:
            name = f"input:{value.name}" if value.kind == "input" and value.name in held else value.name
            found.append(GraphOutput(self._tensor(node), "gradient", name))
        return tuple(found)


def _views_as(node: Node, shape: tuple[int, ...]) -> bool:
    return node.target in _SIZED and tuple(node.meta["val"].shape) == shape


def _is_number(node: Node) -> bool:
    """Whether a node is a size, known here, that the trace asked a tensor for, or what it computed of one (how an image is scaled)."""
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def _number(node: Node) -> float:
    value = node.meta["val"]
    return float(value) if isinstance(value, float | torch.SymFloat) else int(value)


def _still(node: Node) -> bool:
    """Whether an operator that may drop elements is told to drop none."""
    names = [argument.name for argument in torch_compat.schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return "dropout_p" in names and given.get("dropout_p", 0.0) == 0.0


def _spelled_out(node: Node) -> list[Any]:
    """A slice's arguments with its dim, start and end as they are for this size: not negative, not beyond, not left out."""
    given: list[Any] = [_number(item) if isinstance(item, Node) and _is_number(item) else item for item in node.args]
    source, dim, start, end, step = given + [0, None, None, 1][len(given) - 1 :]
    assert not node.kwargs, "export passes a slice's arguments by position"
    shape = source.meta["val"].shape
    dim = dim % len(shape)
    first, last, _ = slice(start, end).indices(shape[dim])
    return [source, dim, first, max(first, last), step]


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
