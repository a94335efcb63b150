"""Memory that the model writes in place is shared in the trace as in torch's own run.

Whether ``reshape`` is a view depends on the memory order of its argument, and operators of the dialect have orders of their own. That
matters only for memory that is written through one name and read through another. The exported graph knows both names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.diagnosis.errors import at_line
from autopar.importer.diagnosis.provenance import user_frame

aten = torch.ops.aten
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.as_strided.default})
"""Operators with a replacement that may be views, and that is remembered for what it is of: on memory that is written they run without
it."""
_HIDDEN = frozenset({aten.lift_fresh_copy.default, aten.dropout.default})
"""Operators of which the exported graph does not show whether they share memory: constants are made anew in each call, and what drops
nothing gives its argument itself, here as there."""
_STILL = frozenset({aten.detach_.default})
"""Operators that change a tensor but not its values."""


class InPlace:
    """The nodes of an exported graph, and of the regions in it, whose memory some operator writes."""

    def __init__(self, exported: GraphModule) -> None:
        self.writes: dict[Node, frozenset[int]] = {}
        self.storages = self._find_writes(exported)

    def _find_writes(self, module: GraphModule) -> frozenset[int]:
        """Notes which storages each node writes, of a region those that are written in it. Gives all of them."""
        written = frozenset[int]()
        for node in module.graph.nodes:
            regions = [attrgetter(str(item.target))(module) for item in node.all_input_nodes if item.op == "get_attr"]
            own = frozenset(torch_compat.storage_key(value) for value in _tensors(_changed(node)))
            own = own.union(*(self._find_writes(region) for region in regions if isinstance(region, GraphModule)))
            if own:
                self.writes[node] = own
                written |= own
        return written

    def concerns(self, node: Node) -> bool:
        """Whether the memory of a node's value is written; or that of a node's argument, where the replacement would read it later."""
        nodes = [node, *node.all_input_nodes] if node.target in _VIEWS else [node]
        return bool(self.storages) and any(torch_compat.storage_key(value) in self.storages for value in _tensors(nodes))

    def stays(self, value: Node, since: Node, reader: Node) -> bool:
        """Whether the value of a node is at ``reader`` what it was at ``since``, both later in the same graph."""
        own = {torch_compat.storage_key(tensor) for tensor in _tensors([value])} & self.storages
        between = (keys for node, keys in self.writes.items() if node.graph is reader.graph and since < node < reader) if own else ()
        return all(own.isdisjoint(keys) for keys in between)

    def run(self, node: Node, run: Callable[[], Any], replacement: Callable[..., Any], values: Mapping[Node, Any]) -> Any:
        """The value of a node that is concerned: of ``run``, which calls the ``replacement``, in memory as in torch's own run.

        Raises:
            CaptureError: the value is part of what another is, as the model runs, and a copy of it here.
        """
        if node.target in _VIEWS and replacement is not node.target:
            return node.target(*torch.fx.node.map_arg(node.args, values.__getitem__), **node.kwargs)
        value = run()
        if not isinstance(value, Tensor) or _changed(node) or node.target in _HIDDEN:
            return value
        there, here = node.meta["val"], [item for source in node.all_input_nodes for item in _leaves(values[source])]
        shared = any(torch_compat.storage_key(there) == torch_compat.storage_key(item) for item in _tensors(node.all_input_nodes))
        found = any(torch_compat.shares_memory(value, item) for item in here)
        if shared and not found:
            raise _lost(node)
        return value if shared else _laid(value.clone() if found else value, there)


def _laid(value: Tensor, like: Tensor) -> Tensor:
    """The value in the order in memory that ``like`` has, where that is another. What is held in blocks has another shape."""
    if value.shape != like.shape or _strides(value) == _strides(like):
        return value
    order = sorted(range(like.dim()), key=lambda dim: (like.stride(dim), like.shape[dim]), reverse=True)
    back = sorted(range(like.dim()), key=order.__getitem__)
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _strides(value: Tensor) -> list[int]:
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]


def _changed(node: Node) -> list[Node]:
    """The arguments that an operator writes."""
    if not torch_compat.is_operator(node.target) or node.target in _STILL or not torch_compat.schema_of(node.target).is_mutable:
        return []
    found: list[Node] = []
    for index, argument in enumerate(torch_compat.schema_of(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += [item for item in _leaves(given) if isinstance(item, Node)]
    return found


def _leaves(item: Any) -> list[Any]:
    return [part for part in torch_compat.leaves_of(item) if isinstance(part, (Tensor, Node))]


def _tensors(nodes: list[Node]) -> list[Tensor]:
    return [value for node in nodes for value in torch_compat.leaves_of(node.meta.get("val")) if isinstance(value, Tensor)]


def _lost(node: Node) -> CaptureError:
    message = f"the result of {node.target} shares memory with its argument, and one of the two is written in place"
    hint = "write into a copy, .clone(), or compute the new value without writing in place"
    return CaptureError(at_line(message, user_frame(node)), hint)
