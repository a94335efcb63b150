"""Graphs of exported programs that this process traced before: equal ones are not traced again.

A model is exported anew in each capture, which sees every change to it. The joint trace and its lowering depend on the exported program
alone. They take two thirds of a capture. A script that plans and compiles captures its model twice; ranks that are forked
from the planner, or a module called in evaluation, capture it again.

Kept is the graph as bytes, so that each capture has one of its own. What a description cannot hold is traced each time: functions of the
user's that autograd calls, operators that are neither torch's nor autopar's, sizes that are not known.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar import torch_compat
from autopar.graph import Graph
from autopar.importer.blocks.in_blocks import InBlocks
from autopar.importer.diagnosis.provenance import module_path, source_line
from autopar.importer.export.exported import Exported

KEPT_BYTES = 2**24
"""Bytes of graphs that are kept, those used last: an operator takes 200 to 300, so that they hold some sixty thousand."""
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Classes of arguments whose ``repr`` says all."""
NAMESPACES = ("aten", "autopar")
"""Operators that nobody defines anew."""


class _NotDescribedError(Exception):
    """Something in the program that its description would not tell apart from another."""


class KnownGraphs:
    """Graphs by the description of what was traced, at most ``most_bytes`` of them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()

    def find(self, key: str | None) -> Graph | None:
        """The graph of an equal program, where there was one."""
        with self._lock:
            if key is None or key not in self._kept:
                return None
            self._kept.move_to_end(key)
            found = self._kept[key]
        graph: Graph = pickle.loads(found)
        return graph

    def keep(self, key: str | None, graph: Graph) -> None:
        """Keeps a graph in place of those that were not asked for the longest."""
        if key is None:
            return
        written = pickle.dumps(graph, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._kept[key] = written
            while sum(map(len, self._kept.values())) > self.most_bytes:
                self._kept.popitem(last=False)


KNOWN = KnownGraphs(KEPT_BYTES)
"""Of this process; forked ones begin with those of their parent."""


def describe(exported: Exported, blocks: InBlocks, *settings: object) -> str | None:
    """A hash of all that the trace of an exported program and its lowering read; None where it cannot be told.

    Args:
        blocks: what of the program is held in blocks.
        settings: what else decides the graph, of plain values.
    """
    if exported.calls or any(value.hooks for value in exported.values):
        return None
    state = (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"), exported.outputs, exported.loss, exported.once, settings,
    )  # fmt: skip
    try:
        lines = [_argument(state), _argument(exported.arguments)]
        for value in exported.values:
            lines.append(f"{value.kind} {value.name} {value.aliases} {_value(value.value)}")
        lines += _lines(exported.graph_module, blocks)
    except _NotDescribedError:
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _lines(module: GraphModule, blocks: InBlocks) -> Iterator[str]:
    """A line for each node, those of stretches with a graph of their own after the node that names them."""
    for node in module.graph.nodes:
        origin = torch_compat.origin_of(node), module_path(node), source_line(node)
        results = [_value(value) for value in torch_compat.leaves_of(node.meta.get("val"))]
        held = blocks.nodes.get(node)
        yield f"{node.op} {node.name} {_target(node)} {_argument(node.args)} {_argument(node.kwargs)} {origin} {results} {held}"
        if node.op == "get_attr":
            part = getattr(module, str(node.target), None)
            if not isinstance(part, GraphModule):
                raise _NotDescribedError
            yield from _lines(part, blocks)
            yield "end"


def _target(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, str) or target is operator.getitem or torch_compat.runs_a_graph(target):
        return str(target)
    if torch_compat.is_operator(target) and torch_compat.schema_of(target).name.partition("::")[0] in NAMESPACES:
        return str(target)
    raise _NotDescribedError


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step))}"
    if isinstance(value, tuple | list | frozenset):
        items = [*map(_argument, value)]
        return f"{type(value).__name__}({', '.join(sorted(items) if isinstance(value, frozenset) else items)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_argument(key)}: {_argument(item)}' for key, item in value.items())}}}"
    raise _NotDescribedError


def _value(value: Any) -> str:
    """A tensor without its values, or a plain value."""
    if not isinstance(value, Tensor):
        return _argument(value)
    lies = tuple(value.shape), value.stride(), value.storage_offset(), value.is_conj(), value.is_neg(), value.requires_grad
    return f"{type(value).__name__} {value.dtype} {value.device} {_argument(lies)}"
