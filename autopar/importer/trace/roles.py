"""What the inputs and outputs of the traced graph are to the model: parameters, tangents, outputs, gradients, new values of buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.diagnosis.errors import at_line
from autopar.importer.diagnosis.provenance import user_frame
from autopar.importer.export.exported import Exported, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Roles:
    """The traced graph's inputs and outputs, told apart.

    Args:
        inputs: placeholder to the exported value it is, and likewise what the graph holds itself; tangents: placeholder to the output
            whose gradient it is.
        outputs: name and node; gradients and buffers: the exported value and the node.
    """

    inputs: Mapping[Node, Value]
    tangents: Mapping[Node, int]
    outputs: Sequence[tuple[str, Node]]
    gradients: Sequence[tuple[Value, Node]]
    buffers: Sequence[tuple[Value, Node]]


def roles(graph: torch.fx.Graph, exported: Exported) -> Roles:
    """Read the descriptors of the traced graph. A frozen parameter that the forward of a model that trains changes is as a buffer: of a
    momentum encoder, say."""
    tensors = exported.tensors
    inputs: dict[Node, Value] = {}
    tangents: dict[Node, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        kind, index = torch_compat.role(node.meta["desc"])
        if kind == "input":
            inputs[node] = tensors[index]
        elif kind == "tangent":
            tangents[node] = index
        elif kind == "mutation gradient" and tensors[index].kind == "buffer":
            raise CaptureError(
                f"the new value of the buffer {tensors[index].name} depends on parameters, so that the next step would go back through it",
                "assign a detached value: self.buffer.copy_(value.detach())",
            )
        elif kind == "mutation gradient":
            raise _changed_in_place(exported, tensors[index])
        else:
            raise CaptureError(f"the traced graph has an input of an unknown kind: {node.meta['desc']}", "report this model")
    for node in graph.find_nodes(op="get_attr"):  # a function of the user's wrote it down, torch.tensor(0.5), while it was traced
        inputs[node] = Value("constant", str(node.target), getattr(graph.owning_module, str(node.target)))
    trains = any(value.kind == "parameter" and value.value.requires_grad for value in tensors)
    averages = {index for index, value in enumerate(tensors) if trains and value.kind == "parameter" and not value.value.requires_grad}
    outputs: list[tuple[str, Node]] = []
    gradients: list[tuple[Value, Node]] = []
    buffers: list[tuple[Value, Node]] = []
    output = graph.output_node()
    for result, descriptor in zip(output.args[0], output.meta["desc"], strict=True):
        kind, index = torch_compat.role(descriptor)
        if not isinstance(result, Node):
            continue
        if kind == "output":
            outputs.append((exported.outputs[index], result))
        elif kind == "gradient":
            gradients.append((tensors[index], result))
        elif kind == "mutation" and (tensors[index].kind == "buffer" or index in averages):
            buffers.append((replace(tensors[index], kind="buffer"), result))
        elif kind == "mutation" and exported.once and tensors[index].kind == "parameter":
            continue  # every call of the graph starts from the parameters as they are, as the model's first call did
        elif kind == "mutation":
            raise _changed_in_place(exported, tensors[index])
        else:
            raise CaptureError(f"the traced graph has an output of an unknown kind: {descriptor}", "report this model")
    names = {value.name for value, _ in buffers}
    changed = {
        node: replace(value, kind="buffer") if value.kind == "parameter" and value.name in names else value
        for node, value in inputs.items()
    }  # fmt: skip
    return Roles(changed, tangents, outputs, gradients, buffers)


def _changed_in_place(exported: Exported, value: Value) -> CaptureError:
    return CaptureError(
        at_line(f"the forward changes its {value.kind} {value.name} in place", _mutation_place(exported, value)),
        "work on a clone(), or register the tensor as a buffer if its new value is to be kept",
    )


def _mutation_place(exported: Exported, value: Value) -> tuple[str, int] | None:
    """The line of the exported operator that writes to an input."""
    nodes = exported.graph_module.graph.find_nodes(op="placeholder")
    return _writer(exported.graph_module, [node for node, other in zip(nodes, exported.values, strict=True) if other.name == value.name])


def _writer(module: Any, written: list[Node]) -> tuple[str, int] | None:
    """The line of the first operator that writes to one of these nodes, here or in a stretch of its own, as under ``no_grad``."""
    for node in module.graph.nodes:
        if torch_compat.is_operator(node.target) and node.args and node.args[0] in written:
            if torch_compat.schema_of(node.target).is_mutable:
                return user_frame(node)
            written = written + [node] * (node.target is aten.detach.default)
        elif node.op == "call_function" and torch_compat.runs_a_graph(node.target):
            at, body = next((at, item) for at, item in enumerate(node.args) if isinstance(item, Node) and item.op == "get_attr")
            inside = getattr(module, body.target)
            inputs = zip(inside.graph.find_nodes(op="placeholder"), node.args[at + 1 :], strict=True)
            found = _writer(inside, [there for there, here in inputs if here in written])
            if found is not None:
                return found
    return None


def attached(exported: Exported) -> set[str]:
    """The parameters that the outputs depend on otherwise than through ``detach``, ``no_grad`` and values without a gradient."""
    graph = exported.graph_module.graph
    seen: set[Node] = set()
    pending = list(graph.output_node().all_input_nodes)
    while pending:
        node = pending.pop()
        made = [value for value in torch_compat.leaves_of(node.meta.get("val")) if isinstance(value, torch.Tensor)]
        whole = not made or any(value.is_floating_point() or value.is_complex() for value in made)
        if node in seen or not whole or node.target is aten.detach.default or _without_gradients(node):
            continue
        seen.add(node)
        pending += [*node.all_input_nodes, *(user for user in node.users if _writes_to(user, node))]
    placeholders = zip(graph.find_nodes(op="placeholder"), exported.values, strict=True)
    return {value.name for node, value in placeholders if node in seen and value.kind == "parameter"}


def _without_gradients(node: Node) -> bool:
    runs = node.op == "call_function" and torch_compat.runs_a_graph(node.target)
    return runs and node.target.name() == "wrap_with_set_grad_enabled" and node.args[0] is False


def _writes_to(user: Node, node: Node) -> bool:
    return torch_compat.is_operator(user.target) and torch_compat.schema_of(user.target).is_mutable and node in user.args[:1]
