"""The rank's program as graphs: the same instructions traced once into two ``torch.fx.GraphModule``s, forward and backward.

Collectives are functional collectives in the graph and the dialect's operators are taken apart into torch's own, so that
``torch.compile(fullgraph=True)`` works on it and fuses what lies between collectives. Dropout and what draws
random numbers stay whole: they depend on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autopar.dialect.library import BODIES
from autopar.program import Program
from autopar.runtime.execution import Executable, Locals, Observed
from autopar.torch_compat import fake_mode, trace_operators

WHOLE = ("dropout", "uniform", "normal")
"""Operators of the dialect that stay as they are."""


@dataclass(frozen=True)
class Graphs:
    """What ``Executable`` does, by graphs; it stands in for one in a ``Step``.

    Args:
        program: the program.
        kept: the values that go from forward to backward.
        forward_graph: the graph inputs' local parts, in order and without tangents -> the values that leave in forward, then ``kept``.
        backward_graph: ``kept``, then tangents -> the gradients; None in inference.
        collectives: those of each, as they were traced.
        run_forward, run_backward: what is called: the graphs, or what ``torch.compile`` made of them.
    """

    program: Program
    kept: tuple[str, ...]
    forward_graph: torch.fx.GraphModule
    backward_graph: torch.fx.GraphModule | None
    collectives: tuple[tuple[Observed, ...], tuple[Observed, ...]]
    run_forward: Callable[..., Any] = field(repr=False)
    run_backward: Callable[..., Any] | None = field(repr=False)

    @cached_property
    def entering(self) -> tuple[str, ...]:
        """Graph inputs but tangents."""
        return tuple(item.tensor for item in self.program.graph.inputs if item.kind != "tangent")

    def forward(self, values: dict[str, Locals], observed: list[Observed] | None = None) -> None:
        """As ``Executable.forward``."""
        with torch.no_grad():
            found = self.run_forward(*(values[name][0] for name in self.entering))
        values.clear()
        values.update({name: [tensor] for name, tensor in zip((*leaving(self.program), *self.kept), found, strict=True)})
        if observed is not None:
            observed += self.collectives[0]

    def backward(self, values: dict[str, Locals], observed: list[Observed] | None = None) -> None:
        """As ``Executable.backward``."""
        if self.run_backward is None:
            return
        names = (*self.kept, *(item.tensor for item in self.program.graph.of_kind("tangent")))
        tensors = [values[name][0] for name in names]
        values.clear()
        with torch.no_grad():
            found = self.run_backward(*tensors)
        values.update({name: [tensor] for name, tensor in zip(gradients(self.program), found, strict=True)})
        if observed is not None:
            observed += self.collectives[1]

    def compiled(self, **options: Any) -> Graphs:
        """The same, run by ``torch.compile(fullgraph=True)``, which takes ``options``."""
        made = [
            None if graph is None else torch.compile(graph, fullgraph=True, **options)
            for graph in (self.forward_graph, self.backward_graph)
        ]
        return Graphs(self.program, self.kept, self.forward_graph, self.backward_graph, self.collectives, made[0], made[1])


def leaving(program: Program) -> tuple[str, ...]:
    """The values that leave in the forward: outputs and new buffers."""
    return tuple(dict.fromkeys(value for output, value in program.outputs if output.kind != "gradient"))


def gradients(program: Program) -> tuple[str, ...]:
    """The values that leave in the backward."""
    return tuple(dict.fromkeys(value for output, value in program.outputs if output.kind == "gradient"))


def emit(executable: Executable, device: torch.device) -> Graphs:
    """Traces the program of one rank. Nothing is computed and nothing is sent."""
    program, mode = executable.program, fake_mode()
    bodies = {getattr(torch.ops.autopar, name).default: body for name, body in BODIES.items() if name not in WHOLE}
    entering = [item.tensor for item in program.graph.inputs if item.kind != "tangent"]
    tangents = [item.tensor for item in program.graph.of_kind("tangent")]
    seen: tuple[list[Observed], list[Observed]] = ([], [])

    def forward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: dict[str, Locals] = {name: [tensor] for name, tensor in zip(entering, tensors, strict=True)}
        executable.forward(values, seen[0])
        return [values[name][0] for name in (*leaving(program), *executable.kept)]

    def backward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: dict[str, Locals] = {name: [tensor] for name, tensor in zip((*executable.kept, *tangents), tensors, strict=True)}
        executable.backward(values, seen[1])
        return [values[name][0] for name in gradients(program)]

    with mode:
        first = trace_operators(forward, _stand_ins(program, entering, device), bodies)
        second = None
        if program.graph.mode == "train":
            # What forward keeps lies in memory as it left it, and views of it are traced for just that.
            kept = [_like(node.meta["val"]) for node in first.graph.output_node().args[0][len(leaving(program)) :]]
            second = trace_operators(backward, [*kept, *_stand_ins(program, tangents, device)], bodies)
    return Graphs(program, executable.kept, first, second, (tuple(seen[0]), tuple(seen[1])), first, second)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _stand_ins(program: Program, values: Sequence[str], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the values' local shapes, made within a fake mode."""
    sizes, found = program.machine.mesh.sizes, []
    for value in values:
        tensor = program.graph.tensors[program.tensor_of[value]]
        shape = program.specs[value].local_shape(tensor.shape, sizes)
        found.append(torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=device))
    return found
