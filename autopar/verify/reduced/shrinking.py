"""A schedule with every factor shrunk: the same instructions, specs, strategies, steps and buckets, on smaller tensors.

What is known of operators' arguments is checked: each reduced operator is run on tensors without memory, and must give the reduced shapes.
Where one does not, its dims keep their sizes and the rest is solved again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from autopar import pricing
from autopar.errors import UsageError
from autopar.graph import Argument, Graph, Op, Tensor
from autopar.reshard import Shapes
from autopar.rules import find_rule
from autopar.runtime.instructions.operators import find_operator, named_results, takes_device, with_tensors, with_torch_values
from autopar.schedule import Schedule
from autopar.schedule.collectives import Part
from autopar.sharding import runs
from autopar.verify.reduced.extents import Extents, Kept
from autopar.verify.reduced.relations import call_with_shapes, counted, rewritten, with_arguments

SMALL = 64
"""Entries of a dim up to which it does not matter that it keeps them."""


@dataclass(frozen=True)
class Shrunk:
    """A schedule on smaller tensors.

    Args:
        schedule: the same but for sizes.
        kept: the dims that keep their sizes, the largest first.
    """

    schedule: Schedule
    kept: tuple[Kept, ...]


def shrink(schedule: Schedule, held: Mapping[str, str] | None = None, least: int = 2, apart: bool = True) -> Shrunk:
    """The schedule with every factor as small as its specs allow.

    Args:
        held: operators whose whole dims keep their sizes, with the reason.
        least, apart: see ``Extents``.

    Raises:
        UsageError: an operator that holds with no size but its own, though its rule says otherwise.
    """
    fast = dict(held or {})
    while True:
        extents = Extents(schedule, fast, least, apart)
        graph = _graph(schedule.graph, extents)
        wrong = _first_wrong(graph, schedule.graph, fast)
        if wrong is None:
            return Shrunk(_schedule(schedule, graph), tuple(extents.kept(SMALL)))
        op, reason = wrong
        if op.name in fast:
            where = op.location or op.module or op.name
            message = f"{where}: {op.target} cannot be reduced: sizes are baked into its arguments ({reason})"
            raise UsageError(message, "take sizes from shapes there, or verify on ranks that have the memory")
        fast[op.name] = f"{op.target.removesuffix('.default')} at {op.location or op.name}"


def _graph(graph: Graph, extents: Extents) -> Graph:
    tensors = {name: Tensor(name, extents.shape(name), tensor.dtype) for name, tensor in graph.tensors.items()}
    return replace(graph, tensors=tensors, ops=tuple(_reduced(op, graph, tensors, extents) for op in graph.ops))


def _reduced(op: Op, graph: Graph, tensors: Mapping[str, Tensor], extents: Extents) -> Op:
    """The operator with the arguments of its reduced shapes."""
    found = call_with_shapes(op, graph.tensors)
    names = (*op.inputs, *op.outputs)
    before, after = (tuple(kind[name].shape for name in names) for kind in (graph.tensors, tensors))
    if found is None or before == after:
        return op
    row, call = found
    if op.target.split(".")[1] in ("arange", "linspace"):
        return counted(op, after[-1][0])
    extent, changed = find_rule(op, graph.tensors).extent, dict[str, Argument]()

    def left(factor: str) -> int:
        return extents.size((f"op:{op.name}", factor), extent.get(factor, 1))

    for name, formula in row.local:
        word, *rest = formula.split()
        argument = call.arguments.get(name)
        match word:
            case "shape":
                changed[name] = after[int(rest[1]) + (len(op.inputs) if rest[0] == "output" else 0)]
            case "extent" if argument is not None:
                length = math.prod(map(left, rest))
                changed[name] = (length,) if isinstance(argument, tuple) else length
            case "start" if argument is not None:
                changed[name] = argument // extents.divisor((f"op:{op.name}", rest[0]))
            case "ratio" if argument is not None:
                padded = (1,) * (len(after[1]) - len(after[0])) + after[0]
                changed[name] = tuple(given and big // max(small, 1) for given, big, small in zip(argument, after[1], padded, strict=True))
    return rewritten(with_arguments(op, row, changed), row, call, before, after)


def _first_wrong(graph: Graph, whole: Graph, held: Mapping[str, str]) -> tuple[Op, str] | None:
    """The first operator that does not give the shapes that it should, and what it gives."""
    seen: dict[int, None] = {}
    for op in graph.ops:
        kind = graph.kinds[op.name]
        if kind in seen:
            continue
        seen[kind] = None
        reason = _wrong(op, graph)
        if reason:
            return op, reason
    return None


def _wrong(op: Op, graph: Graph) -> str:
    made = [_empty(graph.tensors[name]) for name in op.inputs]
    args, kwargs = with_tensors(with_torch_values(op.args), made), with_tensors(with_torch_values(dict(op.kwargs)), made)
    if takes_device(op):
        kwargs["device"] = torch.device("meta")
    wanted = [graph.tensors[name].shape for name in op.outputs]
    try:
        found = [tuple(result.shape) for result in named_results(op, find_operator(op.target)(*args, **kwargs))]
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return "" if found == wanted else f"it gives {found}, not {wanted}"


def _empty(tensor: Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")


def _schedule(whole: Schedule, graph: Graph) -> Schedule:
    """The instructions on the reduced graph."""
    machine = whole.machine

    def part(old: Part) -> Part:
        return old._replace(shapes=_shapes(old.shapes, graph.tensors[old.layout.tensor].shape, machine.mesh.sizes))

    collectives = {name: replace(call, parts=tuple(map(part, call.parts))) for name, call in whole.collectives.items()}
    cuts = {name: cut._replace(part=None if cut.part is None else part(cut.part)) for name, cut in whole.cuts.items()}
    steps = [step for call in collectives.values() for step in call.parts] + [cut.part for cut in cuts.values() if cut.part is not None]
    between = {step.target: step.target_bytes for step in steps}
    values = {
        name: value._replace(
            bytes=between[name] if value.spec is None else pricing.local_bytes(graph.tensors[value.tensor], value.spec, machine)
        )
        for name, value in whole.values.items()
    }
    operations = {name: item._replace(op=graph.op[item.op.name]) for name, item in whole.operations.items()}
    return replace(whole, graph=graph, operations=operations, collectives=collectives, cuts=cuts, values=values)


def _shapes(shapes: Shapes, whole: tuple[int, ...], sizes: tuple[int, ...]) -> Shapes:
    """A rank's shapes, each dim divided as the tensor's is."""
    divisors = [old // new if new else 1 for old, new in zip(shapes.whole, whole, strict=True)]

    def less(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([extent // divisor for extent, divisor in zip(shape, divisors, strict=True)])

    places: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    if shapes.runs:
        cuts = [tuple([sizes[axis] for axis in one or other]) for one, other in zip(*(end.dims for end in shapes.ends), strict=True)]
        places = tuple([runs(extent, cut) for extent, cut in zip(whole, cuts, strict=True)])
    return replace(
        shapes, source=less(shapes.source), sent=less(shapes.sent), came=less(shapes.came), target=less(shapes.target), whole=whole,
        runs=places,
    )  # fmt: skip
