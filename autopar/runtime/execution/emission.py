"""The rank's schedule as graphs: the same instructions traced once into two ``torch.fx.GraphModule``s, forward and backward. What runs
before the first of several microbatches is a third.

Collectives are functional collectives in the graph and the dialect's operators are taken apart into torch's own, so that
``torch.compile(fullgraph=True)`` works on it and fuses what lies between collectives. Dropout and what draws
random numbers stay whole: they depend on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import getitem
from typing import Any

import torch

from autopar.dialect.experts import KeptPlaces
from autopar.dialect.library import BODIES, LOOKING, STILL
from autopar.graph import Ref
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.loss_gradient import given_loss_gradient, is_narrow, loss_gradient
from autopar.runtime.instructions.code import Code
from autopar.runtime.instructions.index_check import find_checked, raise_index_errors
from autopar.runtime.instructions.kernels import write_call
from autopar.runtime.instructions.operators import find_function
from autopar.runtime.instructions.whole_operands import FIRST_EXPERT
from autopar.runtime.ranks.collectives import Observed, Values
from autopar.runtime.ranks.placement import own_shape
from autopar.schedule import Schedule
from autopar.torch_compat import draws, fake_mode, is_assertion, is_operator, trace_operators

STORED = ("parameter", "buffer", "constant")
"""The kinds of graph inputs that all microbatches have alike."""


@dataclass(frozen=True)
class Graphs:
    """What ``Executable`` does, by graphs; it stands in for one in a ``Step``.

    Args:
        schedule: the schedule.
        kept: the values that go from forward to backward.
        forward_graph: the graph inputs' local parts, in order and without tangents, then the schedule's ``kept_values`` -> the values that
            leave in forward, then ``kept``.
        backward_graph: ``kept``, then tangents, then sums over microbatches -> the gradients; None in inference.
        collectives: those of each, as they were traced.
        run_forward, run_backward: what is called: the graphs, or what ``torch.compile`` made of them.
        repeated_graph, run_repeated, repeated_collectives: of backward of microbatches before the last, which gives the sums.
        first_graph, run_first, first_collectives: of what runs before the first microbatch: the parameters, buffers and constants -> the
            ``kept_values``.
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
    first_graph: torch.fx.GraphModule | None = None
    run_first: Callable[..., Any] | None = field(default=None, repr=False)
    first_collectives: tuple[Observed, ...] = ()

    @cached_property
    def entering(self) -> tuple[str, ...]:
        """What forward takes: graph inputs but tangents, and what is made before the first microbatch."""
        return (*(item.tensor for item in self.schedule.graph.inputs if item.kind != "tangent"), *self.schedule.kept_values)

    @cached_property
    def left(self) -> tuple[str, ...]:
        """What forward gives."""
        return *leaving(self.schedule), *self.kept

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """What backward takes."""
        return *self.kept, *(item.tensor for item in self.schedule.graph.of_kind("tangent")), *self.schedule.sums

    @cached_property
    def made(self) -> tuple[str, ...]:
        """What backward of the last microbatch gives."""
        return gradients(self.schedule)

    @cached_property
    def weighted(self) -> bool:
        """Whether backward takes the loss's gradient, last."""
        return _weighted(self.schedule)

    def begin(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """As ``Executable.begin``."""
        if self.run_first is None:
            return
        (values,) = ranks
        found = run_plain(self.run_first, [values[item.tensor] for item in self.schedule.graph.inputs if item.kind in STORED])
        values.update(zip(self.schedule.kept_values, found, strict=True))
        if observed is not None:
            observed += self.first_collectives

    def forward(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """As ``Executable.forward``."""
        (values,) = ranks
        with raise_index_errors():
            found = run_plain(self.run_forward, [values[name] for name in self.entering])
        values.clear()
        values.update(zip(self.left, found, strict=True))
        if observed is not None:
            observed += self.collectives[0]

    def backward(self, ranks: Sequence[Values], observed: list[Observed] | None = None, *, last: bool = True) -> None:
        """As ``Executable.backward``."""
        run = self.run_backward if last else self.run_repeated
        if run is None:
            return
        (values,) = ranks
        tensors = [values[name] for name in self.taken]
        if self.weighted:
            tensors.append(given_loss_gradient())
        values.clear()
        found = run_plain(run, tensors)
        values.update(zip(self.made if last else self.schedule.sums, found, strict=True))
        if observed is not None:
            observed += self.collectives[1] if last else self.repeated_collectives

    def compiled(self, **options: Any) -> Graphs:
        """The same, run by ``torch.compile(fullgraph=True)``, which takes ``options``."""
        forward = torch.compile(self.forward_graph, fullgraph=True, **options)
        others = (self.backward_graph, self.repeated_graph, self.first_graph)
        backward, repeated, first = (None if graph is None else torch.compile(graph, fullgraph=True, **options) for graph in others)
        return replace(self, run_forward=forward, run_backward=backward, run_repeated=repeated, run_first=first)


def run_plain(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Runs a graph outside autograd, which is off already within an ``autograd.Function``."""
    if not torch.is_grad_enabled():
        return run(*tensors)
    with torch.no_grad():
        return run(*tensors)


def leaving(schedule: Schedule) -> tuple[str, ...]:
    """The values that leave in the forward: outputs and new buffers."""
    return tuple(dict.fromkeys(value for output, value in schedule.outputs if output.kind != "gradient"))


def gradients(schedule: Schedule) -> tuple[str, ...]:
    """The values that leave in the backward."""
    return tuple(dict.fromkeys(value for output, value in schedule.outputs if output.kind == "gradient"))


def emit(executable: Executable, device: torch.device) -> Graphs:
    """Traces the schedule of one rank. Nothing is computed and nothing is sent."""
    schedule, mode, (rank,) = executable.schedule, fake_mode(), executable.backend.ranks
    whole = _kept_whole(schedule, device)
    bodies, places = {}, KeptPlaces()
    for name, body in BODIES.items():
        if (target := f"autopar.{name}.default") not in whole:
            found = partial(body, places=places) if target in FIRST_EXPERT else body
            bodies[getattr(torch.ops.autopar, name).default] = found
    entering = [item.tensor for item in schedule.graph.inputs if item.kind != "tangent"]
    tangents = [item.tensor for item in schedule.graph.of_kind("tangent")]
    stored = [item.tensor for item in schedule.graph.inputs if item.kind in STORED]
    seen: tuple[list[Observed], ...] = ([], [], [], [])
    weighted = _weighted(schedule)

    def begin(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: Values = dict(zip(stored, tensors, strict=True))
        executable.begin([values], seen[3])
        return [values[name] for name in schedule.kept_values]

    def forward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values: Values = dict(zip((*entering, *schedule.kept_values), tensors, strict=True))
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

    def trace(function: Callable[..., list[torch.Tensor]], given: list[torch.Tensor]) -> torch.fx.GraphModule:
        places.let_go()  # those of one graph are not there in another
        return trace_operators(function, given, bodies)

    with mode:
        given = _stand_ins(schedule, rank, entering, device)
        zeroth = trace(begin, _stand_ins(schedule, rank, stored, device)) if schedule.kept_values else None
        if zeroth is not None:
            given += [_like(node.meta["val"]) for node in zeroth.graph.output_node().args[0]]
        first = trace(forward, given)
        second = third = None
        if schedule.graph.mode == "train":
            # What forward keeps lies in memory as it left it, and views of it are traced for just that.
            kept = [_like(node.meta["val"]) for node in first.graph.output_node().args[0][len(leaving(schedule)) :]]
            given = [*kept, *_stand_ins(schedule, rank, [*tangents, *schedule.sums], device)]
            given += [given_loss_gradient()] if weighted else []
            second = trace(backward, given)
            third = trace(repeated, given) if schedule.sums else None
    observed = tuple(seen[0]), tuple(seen[1])
    runs = [None if graph is None else issue(graph) for graph in (second, third, zeroth)]
    run = issue(first, find_checked(schedule, rank))
    return Graphs(
        schedule, executable.kept, first, second, observed, run, runs[0], third, runs[1], tuple(seen[2]),
        zeroth, runs[2], tuple(seen[3]),
    )  # fmt: skip


def _kept_whole(schedule: Schedule, device: torch.device) -> Set[str]:
    """The targets that are not taken apart: they draw, or look at values."""
    looking = {
        op.target for op in schedule.graph.ops
        if op.target.split(".")[1] in LOOKING and (device.type == "cpu" or schedule.graph.tensors[op.inputs[0]].dtype != "bfloat16")
    }  # fmt: skip
    return {*STILL, *looking}


def issue(graph: torch.fx.GraphModule, checked: Set[str] = frozenset()) -> Callable[..., Any]:
    """What a graph computes, as straight-line code that calls the functions which issue operators soonest.

    ``torch.fx`` writes such code too, of calls by way of ``torch.ops``, which take the host twice as long.

    Args:
        checked: what assertions say that run when a kernel fails alone: the kernel checks the same.
    """
    nodes = list(graph.graph.nodes)
    late = {node for node in nodes if is_assertion(node.target) and node.args[1] in checked}
    tests = set(late)
    for node in reversed(nodes):
        if not tests.isdisjoint(node.users):
            tests.add(node)
    if not late or not all(map(_may_repeat, tests)):
        return _write(graph, nodes)
    dropped = set(late)
    for node in reversed(nodes):
        if node.op == "call_function" and node.users and dropped.issuperset(node.users):
            dropped.add(node)
    run = _write(graph, [node for node in nodes if node not in dropped])
    test = _write(graph, [node for node in nodes if node in tests or node.op == "placeholder"])

    def run_checked(*tensors: torch.Tensor) -> list[torch.Tensor]:
        try:
            return run(*tensors)
        except (IndexError, RuntimeError):
            test(*tensors)
            raise

    return run_checked


def _may_repeat(node: torch.fx.Node) -> bool:
    """Whether a node gives the same a second time, and asks no other rank."""
    if node.op != "call_function" or not is_operator(node.target):
        return node.op != "call_function" or node.target is getitem
    return str(node.target).startswith("aten.") and not draws(node.target)


def _write(graph: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node]) -> Callable[..., list[torch.Tensor]]:
    """What these nodes of a graph compute, with all that they read."""
    code = Code(1)
    given = [node.name for node in nodes if node.op == "placeholder"]
    last = {used.name: node for node in nodes for used in node.all_input_nodes}
    ends: dict[str, list[str]] = {}
    for name, node in last.items():
        ends.setdefault(node.name, []).append(name)
    left: list[Any] = []
    places, targets = KeptPlaces(), {str(node.target) for node in nodes}
    for node in nodes:
        reads = [code.read(used.name) for used in node.all_input_nodes]
        numbers = {used: Ref(number) for number, used in enumerate(node.all_input_nodes)}
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)
        if node.op == "get_attr":
            code.add(f"{code.write(node.name)} = {code.object(getattr(graph, node.target))}")
        elif node.op == "call_function":
            function = find_function(str(node.target)) if is_operator(node.target) else node.target
            function = partial(function, places=places) if str(node.target) in FIRST_EXPERT else function
            code.add(f"{code.write(node.name)} = {write_call(code, function, args, kwargs, reads)}")
            code.free([] if node.name in last else [node.name])
        elif node.op == "output":
            left = list(node.args[0])
            break
        code.free(ends.get(node.name, ()))
    if not targets.isdisjoint(FIRST_EXPERT):
        code.add(f"{code.object(places.let_go)}()")
    segment = code.segment("graph")

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(given, tensors, strict=True))
        segment([values], {}, None)
        return [values[node.name] for node in left]

    return run


def _weighted(schedule: Schedule) -> bool:
    """Whether backward takes what it begins with: what a microbatch weighs, or the scale of a loss, without which float16 vanishes."""
    graph = schedule.graph
    return graph.loss_gradient is not None and (is_narrow(graph) or graph.accumulation.divisor != "")


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _stand_ins(schedule: Schedule, rank: int, values: Sequence[str], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the values' shapes on a rank, made within a fake mode."""
    dtypes = [schedule.graph.tensors[schedule.values[value].tensor].dtype for value in values]
    shapes = [own_shape(schedule, value, rank) for value in values]
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
