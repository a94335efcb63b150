"""The rank's schedule as graphs: the same instructions traced once into two ``torch.fx.GraphModule``s, forward and backward.

Collectives are functional collectives in the graph and the dialect's operators are taken apart into torch's own, so that
``torch.compile(fullgraph=True)`` works on it and fuses what lies between collectives. Dropout and what draws
random numbers stay whole: they depend on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autopar.dialect.library import BODIES, STILL
from autopar.runtime.collectives import Observed, Values
from autopar.runtime.execution import Executable, given_loss_gradient, loss_gradient, own_shape
from autopar.runtime.index_check import raise_index_errors
from autopar.schedule import Schedule
from autopar.torch_compat import fake_mode, trace_operators


@dataclass(frozen=True)
class Graphs:
    """What ``Executable`` does, by graphs; it stands in for one in a ``Step``.

    Args:
        schedule: the schedule.
        kept: the values that go from forward to backward.
        forward_graph: the graph inputs' local parts, in order and without tangents -> the values that leave in forward, then ``kept``.
        backward_graph: ``kept``, then tangents, then sums over microbatches -> the gradients; None in inference.
        collectives: those of each, as they were traced.
        run_forward, run_backward: what is called: the graphs, or what ``torch.compile`` made of them.
        repeated_graph, run_repeated, repeated_collectives: of backward of microbatches before the last, which gives the sums.
    """

    schedule: Schedule
    kept: tuple[str, ...]
    forward_graph: torch.fx.GraphModule
    backward_graph: torch.fx.GraphModule | None
    collectives: tuple[tuple[Observed, ...], tuple[Observed, ...]]
    run_forward: Callable[..., Any] = field(repr=False)
    run_backward: Callable[..., Any] | None = field(repr=False)
    repeated_graph: torch.fx.GraphModule | None = None
    run_repeated: Callable[..., Any] | None = field(default=None, repr=False)
    repeated_collectives: tuple[Observed, ...] = ()

    @cached_property
    def entering(self) -> tuple[str, ...]:
        """Graph inputs but tangents."""
        return tuple(item.tensor for item in self.schedule.graph.inputs if item.kind != "tangent")

    @property
    def weighted(self) -> bool:
        """Whether backward takes the loss's gradient, last."""
        return _weighted(self.schedule)

    def forward(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """As ``Executable.forward``."""
        (values,) = ranks
        with torch.no_grad(), raise_index_errors():
            found = self.run_forward(*(values[name] for name in self.entering))
        values.clear()
        values.update(zip((*leaving(self.schedule), *self.kept), found, strict=True))
        if observed is not None:
            observed += self.collectives[0]

    def backward(self, ranks: Sequence[Values], observed: list[Observed] | None = None, *, last: bool = True) -> None:
        """As ``Executable.backward``."""
        run = self.run_backward if last else self.run_repeated
        if run is None:
            return
        names = (*self.kept, *(item.tensor for item in self.schedule.graph.of_kind("tangent")), *self.schedule.sums)
        (values,) = ranks
        tensors = [values[name] for name in names]
        if self.weighted:
            tensors.append(given_loss_gradient())
        values.clear()
        with torch.no_grad():
            found = run(*tensors)
        values.update(zip(gradients(self.schedule) if last else self.schedule.sums, found, strict=True))
        if observed is not None:
            observed += self.collectives[1] if last else self.repeated_collectives

    def compiled(self, **options: Any) -> Graphs:
        """The same, run by ``torch.compile(fullgraph=True)``, which takes ``options``."""
        forward = torch.compile(self.forward_graph, fullgraph=True, **options)
        others = (self.backward_graph, self.repeated_graph)
        backward, repeated = (None if graph is None else torch.compile(graph, fullgraph=True, **options) for graph in others)
        return replace(self, run_forward=forward, run_backward=backward, run_repeated=repeated)


def leaving(schedule: Schedule) -> tuple[str, ...]:
    """The values that leave in the forward: outputs and new buffers."""
    return tuple(dict.fromkeys(value for output, value in schedule.outputs if output.kind != "gradient"))


def gradients(schedule: Schedule) -> tuple[str, ...]:
    """The values that leave in the backward."""
    return tuple(dict.fromkeys(value for output, value in schedule.outputs if output.kind == "gradient"))


def emit(executable: Executable, device: torch.device) -> Graphs:
    """Traces the schedule of one rank. Nothing is computed and nothing is sent."""
    schedule, mode, (rank,) = executable.schedule, fake_mode(), executable.backend.ranks
    bodies = {getattr(torch.ops.autopar, name).default: body for name, body in BODIES.items() if f"autopar.{name}.default" not in STILL}
    entering = [item.tensor for item in schedule.graph.inputs if item.kind != "tangent"]
    tangents = [item.tensor for item in schedule.graph.of_kind("tangent")]
    seen: tuple[list[Observed], list[Observed], list[Observed]] = ([], [], [])
    weighted = _weighted(schedule)

    def forward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: Values = dict(zip(entering, tensors, strict=True))
        executable.forward([values], seen[0])
        return [values[name] for name in (*leaving(schedule), *executable.kept)]

    def backward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: Values = dict(zip((*executable.kept, *tangents, *schedule.sums), tensors, strict=not weighted))
        with loss_gradient(tensors[-1] if weighted else None):
            executable.backward([values], seen[1])
        return [values[name] for name in gradients(schedule)]

    def repeated(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: Values = dict(zip((*executable.kept, *tangents, *schedule.sums), tensors, strict=not weighted))
        with loss_gradient(tensors[-1] if weighted else None):
            executable.backward([values], seen[2], last=False)
        return [values[name] for name in schedule.sums]

    with mode:
        first = trace_operators(forward, _stand_ins(schedule, rank, entering, device), bodies)
        second = third = None
        if schedule.graph.mode == "train":
            # What forward keeps lies in memory as it left it, and views of it are traced for just that.
            kept = [_like(node.meta["val"]) for node in first.graph.output_node().args[0][len(leaving(schedule)) :]]
            given = [*kept, *_stand_ins(schedule, rank, [*tangents, *schedule.sums], device)]
            given += [given_loss_gradient()] if weighted else []
            second = trace_operators(backward, given, bodies)
            third = trace_operators(repeated, given, bodies) if schedule.sums else None
    observed = tuple(seen[0]), tuple(seen[1])
    return Graphs(schedule, executable.kept, first, second, observed, first, second, third, third, tuple(seen[2]))


def _weighted(schedule: Schedule) -> bool:
    """Whether what a microbatch weighs is known when it runs."""
    return schedule.graph.accumulation.divisor != ""


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _stand_ins(schedule: Schedule, rank: int, values: Sequence[str], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the values' shapes on a rank, made within a fake mode."""
    dtypes = [schedule.graph.tensors[schedule.values[value].tensor].dtype for value in values]
    shapes = [own_shape(schedule, value, rank) for value in values]
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
