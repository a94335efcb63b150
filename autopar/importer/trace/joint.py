"""The exported model in the dialect, traced to one functional graph: forward, or forward and backward.

The exported graph is walked node by node under AOTAutograd's tracing; operators with a dialect replacement run that
instead. Each walked node's name marks what is traced from it, so that backward operators know their forward origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from autopar import torch_compat
from autopar.effort import check_deadline
from autopar.errors import CaptureError
from autopar.importer.blocks.in_blocks import InBlocks
from autopar.importer.diagnosis.errors import at_line, refuse_collective
from autopar.importer.diagnosis.fixed_sizes import hint_of
from autopar.importer.diagnosis.provenance import user_frame
from autopar.importer.export.exported import Exported
from autopar.importer.export.precision import autocast_of
from autopar.importer.rewrite import Replacement, replacements, seeded
from autopar.importer.rewrite.patterns import recognised
from autopar.importer.stand_ins.autograd_calls import OPERATOR, REFUSING, Users, with_hooks
from autopar.importer.trace.in_place import InPlace

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
"""Namespaces of torch's collectives."""

_PLAINLY = {
    "cond": ": compute both branches and choose by torch.where, or decide in Python by what is known before the run",
    "while_loop": ": a Python loop of a known number of turns, whose results torch.where keeps once it is over",
    **dict.fromkeys(("scan", "associative_scan", "map_impl"), ": a Python loop over the parts, or torch.vmap"),
}
"""By operator that runs a graph, advice to do the same without it."""


class DialectProgram(nn.Module):
    """Runs the exported graph on flat tensors, with replacements. Every result is a fresh value (``clone``), so that
    AOTAutograd has no aliased outputs to treat apart; lowering removes the clones again."""

    def __init__(self, exported: Exported, blocks: InBlocks) -> None:
        super().__init__()
        self.exported = exported
        self.blocks = blocks
        self.in_place = InPlace(exported.graph_module)
        self.running: torch.fx.Node | None = None
        self.origins: dict[str, torch.fx.Node] = {}
        self.seeds = count(1)
        self.leaves: dict[torch.fx.Node, Tensor] = {}
        """What tensors were before the model changed whether they require grad."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.seeds = count(1)  # a program is run more than once in a trace
        table = replacements(self.next_seed)
        self.leaves.clear()
        with torch_compat.recorded_origins() as origin, autocast_of(self.exported.arguments.get("compute_dtype")):
            given = {
                (value.kind, value.name): with_hooks(tensor, value.hooks, _users(table, lambda: nullcontext()))
                for value, tensor in zip(self.exported.tensors, tensors, strict=True)
            }
            values = [value.value if value.kind == "plain" else given[value.kind, value.name] for value in self.exported.values]
            results = self._walk(self.exported.graph_module, values, table, origin)
        loss = self.exported.loss
        outputs = [result for result in results if isinstance(result, Tensor)]
        if loss is not None:
            outputs = [result if index == loss else result.detach() for index, result in enumerate(outputs)]
        return tuple(torch.ops.aten.clone.default(result) for result in outputs)

    def next_seed(self) -> int:
        """Numbers the random draws of the graph."""
        return next(self.seeds)

    def place(self) -> tuple[str, int] | None:
        """The user's line that was being traced."""
        return None if self.running is None else user_frame(self.running)

    def _walk(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: list[Any],
        table: Mapping[Any, Replacement],
        origin: Callable[[str], Any],
        prefix: str = "",
    ) -> list[Any]:
        values: dict[torch.fx.Node, Any] = {}
        written: dict[torch.fx.Node, Any] = {}
        given = iter(inputs)
        for node in graph_module.graph.nodes:
            check_deadline()
            if node.op == "placeholder":
                values[node] = self.blocks.enter(node, next(given))
                if _replaced_last(node):
                    written[node] = values[node]
                    values[node] = torch.ops.aten.clone.default(values[node])
            elif node.op == "get_attr":
                values[node] = _attribute(graph_module, node.target)
            elif node.op == "output":
                return [values[item] if isinstance(item, torch.fx.Node) else item for item in node.args[0]]
            else:
                self.running = node
                self._check_collectives(node)
                if node.target is torch.ops.aten.copy_.default and node.args[0] in written:
                    values[node.args[0]] = written[node.args[0]]
                target, args, kwargs = recognised(node, partial(self.in_place.stays, reader=node))
                args = torch.fx.node.map_arg(args, values.__getitem__)
                kwargs = torch.fx.node.map_arg(kwargs, values.__getitem__)
                if node.target is OPERATOR:
                    values[node] = self._deferred(node, args, values, table, origin)
                    continue
                if torch_compat.runs_a_graph(node.target):
                    values[node] = self._region(node, args, table, origin)
                    continue
                mark = f"{prefix}{node.name}"
                self.origins[mark] = node
                replacement = table.get(target, target)
                run = partial(self.blocks.run, node, values, table) if self.blocks.concerns(node) else partial(replacement, *args, **kwargs)
                with origin(mark):
                    values[node] = self.in_place.run(node, run, replacement, values) if self.in_place.concerns(node) else run()
        raise AssertionError("an exported graph ends in an output node")

    def _deferred(
        self,
        node: torch.fx.Node,
        args: Any,
        values: dict[torch.fx.Node, Any],
        table: Mapping[Any, Replacement],
        origin: Callable[[str], Any],
    ) -> list[Tensor]:
        """A call to autograd, made on the tensors of this trace."""
        tensors, number = args
        call = self.exported.calls[number]
        self.origins[node.name] = node
        with origin(node.name):
            results = call.run(list(tensors), _users(table, lambda: origin(node.name)))
        if call.requires_grad is not None:
            (source,) = node.args[0]
            first = self.leaves.setdefault(source, values[source])
            kept = call.requires_grad and first.requires_grad
            values[source] = first if kept else first.detach().requires_grad_(call.requires_grad)
        return results

    def _check_collectives(self, node: torch.fx.Node) -> None:
        if torch_compat.is_operator(node.target) and torch_compat.schema_of(node.target).name.partition("::")[0] in _COLLECTIVES:
            name = torch_compat.schema_of(node.target).name.partition("::")[2].strip("_")
            refuse_collective(name, self.place())

    def _region(self, node: torch.fx.Node, args: Any, table: Mapping[Any, Replacement], origin: Callable[[str], Any]) -> Any:
        """A stretch of the model under ``torch.no_grad()`` or ``torch.autocast``, which export keeps as a sub-graph."""
        name = node.target.name()
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = args
            with torch.set_grad_enabled(enabled):
                return self._walk(body, inputs, table, origin, f"{node.name}.")
        if name == "wrap_with_autocast":
            _device, dtype, enabled, cache, body, *inputs = args
            with torch.autocast("cpu", dtype, enabled, cache):  # the stand-ins lie on the cpu, whatever device the model names
                return self._walk(body, inputs, table, origin, f"{node.name}.")
        message = f"the operator {name} runs a graph of its own, which is not supported"
        raise CaptureError(at_line(message, self.place()), f"write this part with plain tensor operators{_PLAINLY.get(name, '')}")


def _replaced_last(node: torch.fx.Node) -> bool:
    """Whether all that is done with an input is to read it, then to write another value over it: backward may still want the first."""
    users = list(node.users)
    changing = [user for user in users if torch_compat.is_operator(user.target) and torch_compat.schema_of(user.target).is_mutable]
    last = max(users, default=None)
    return len(users) > 1 and changing == [last] and last.target is torch.ops.aten.copy_.default and last.args[0] is node  # type: ignore[union-attr]


def check_sizes(graph_module: torch.fx.GraphModule) -> None:
    """Raises CaptureError: a size in the exported graph is not known, or a tensor not dense; names the operator and the user's line."""
    graphs = [part.graph for part in graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes if node.op == "call_function"):
        for value in torch_compat.leaves_of(node.meta.get("val")):
            if isinstance(value, Tensor) and value.layout != torch.strided:
                kind = str(value.layout).removeprefix("torch.")
                message, hint = f"{node.target} gives a {kind} tensor; plans are made of dense ones", "compute with the dense tensor"
                raise CaptureError(at_line(message, user_frame(node)), hint)
            sizes = value.shape if isinstance(value, Tensor) else [value]
            if not all(size is None or isinstance(size, (bool, int, float, str)) for size in sizes):
                message, place = f"the size of the result of {node.target} depends on the values of a tensor", user_frame(node)
                raise CaptureError(at_line(message, place), hint_of(torch_compat.schema_of(node.target).name.partition("::")[2], place))


def _users(table: Mapping[Any, Replacement], marked: Callable[[], Any]) -> Users:
    """Runs functions of the user's under a mark, with the dialect's operators in place of torch's."""

    def users(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with marked(), torch_compat.replaced_operators(table), REFUSING:
                return function(*args, **kwargs)

        return called

    return users


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def trace(program: DialectProgram, *, recording: bool) -> torch.fx.GraphModule:
    """The functional graph, with autograd listening or not; nodes carry ``meta["val"]``, descriptors and origins (see ``torch_compat``)."""
    tensors = tuple(value.value for value in program.exported.tensors)
    with torch.set_grad_enabled(recording):
        return torch_compat.trace_joint(program, tensors, seeded(program.next_seed))
