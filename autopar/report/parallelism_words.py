"""How a plan splits its layers, in the words of those who split them by hand: column and row parallel, FSDP, sequence, context, expert.

A word follows from specs alone. Of an axis of the mesh and a weight:

======================  ===================================================================================================
column parallel         the axis splits the weight where it is read, and what is made of it; of a weight in blocks, in each of them
row parallel            the axis splits the weight where it is read, and what is made is a partial sum over it
vocabulary parallel     the axis splits the rows of a table that is looked up
expert parallel         the axis splits the first dim of a batch of weights, what they are multiplied by, and what is made
FSDP                    the axis splits the weight as it is kept, and it is gathered before it is read, by ranks that read other data
gathered                the same, by ranks that read the same data
data parallel           the axis splits the first dim of what the weight is applied to, not the weight
sequence parallel       the axis splits a later dim of that; of attention's sequence: context parallel, or ring attention where keys and
                        values travel around the axis; of its heads: head parallel
======================  ===================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.compare.words import pattern
from autopar.plan import Plan
from autopar.rows import OpPlan, ParameterSpec, TensorSpec
from autopar.sharding import ShardingSpec

WHOLE = "whole on every rank"
_ATTENTION = {0: "data parallel", 1: "head parallel", 2: "context parallel"}
"""Names of a split dim of attention's batch x heads x sequence x width."""


@dataclass(frozen=True)
class Way:
    """How the weights, or attentions, of one name in equal layers lie.

    Args:
        name: with ``*`` for the number of the layer.
        words: what an engineer calls it.
        layers: the full names.
    """

    name: str
    shape: tuple[int, ...]
    spec: str
    words: str
    layers: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name, with its number where it is one layer alone."""
        return self.layers[0] if len(self.layers) == 1 else self.name


def ways(plan: Plan) -> tuple[Way, ...]:
    """Parameters and attentions by name; layers that lie in other ways have rows of their own."""
    readers = _readers(plan)
    found: dict[tuple[str, tuple[int, ...], str, str], list[str]] = {}
    for name, row in plan.parameters.items():
        words = of_parameter(plan, row, readers.get(row.tensor, ()))
        found.setdefault((pattern(name), row.shape, row.spec, words), []).append(name)
    for op in plan.captured:
        if op.op == "autopar.attention.default" and op.phase == "forward":
            words = of_attention(plan, op)
            found.setdefault((pattern(op.module or op.name), op.outputs[0].shape, op.outputs[0].spec, words), []).append(op.module)
    order: dict[str, int] = {}
    for name, *_ in found:
        order.setdefault(name, len(order))
    rows = sorted(found.items(), key=lambda item: order[item[0][0]])
    return tuple(Way(name, shape, spec, words, tuple(layers)) for (name, shape, spec, words), layers in rows)


def of_parameter(plan: Plan, row: ParameterSpec, readers: Sequence[tuple[OpPlan, int]]) -> str:
    """The words for one parameter, from the first operator of forward that computes with it."""
    kept = ShardingSpec.parse(row.spec).split_axes
    names = list(plan.mesh)
    if not readers:
        return _listed([("split", names[axis]) for axis in kept])
    op, position = readers[0]
    read = _split(op.inputs[position])
    made, partial = _split(op.outputs[0]), ShardingSpec.parse(op.outputs[0].spec).partial_axes
    data = next((entry for place, entry in enumerate(op.inputs) if place != position and len(entry.shape) > 0), None)
    others = _split(data) if data is not None else {}
    words = []
    for axis in range(len(names)):
        if axis in read and axis in partial and op.op.startswith("aten.embedding"):
            words.append(("vocabulary parallel", names[axis]))
        elif axis in read and axis in others and axis in made and read[axis] == 0 and len(row.shape) > 2:
            words.append(("expert parallel", names[axis]))
        elif axis in read and axis in partial:
            words.append(("row parallel", names[axis]))
        elif axis in read:
            words.append(("column parallel" + (f" in each of {row.blocks[1]} blocks" if row.blocks is not None else ""), names[axis]))
        else:
            if axis in kept:
                words.append(("FSDP" if others.get(axis) == 0 else "gathered", names[axis]))
            elif axis in others:
                words.append(("data parallel" if others[axis] == 0 else "sequence parallel", names[axis]))
    return _listed(words)


def of_attention(plan: Plan, op: OpPlan) -> str:
    """The words for attention, from how its result of batch x heads x sequence x width lies."""
    split, names = _split(op.outputs[0]), list(plan.mesh)
    around = (op.factors or {}).get("s ring", ())
    of_dim = {axis: _ATTENTION.get(dim, "split") for axis, dim in sorted(split.items())}
    return _listed([("ring attention" if names[axis] in around else word, names[axis]) for axis, word in of_dim.items()])


def differing(plan: Plan) -> Iterator[str]:
    """Sentences on equal layers that lie in different ways: which, how, and what comes to them in another way."""
    readers = _readers(plan)
    rows: dict[str, list[Way]] = {}
    for way in ways(plan):
        rows.setdefault(way.name, []).append(way)
    for name, several in rows.items():
        if len({way.shape for way in several}) < len(several):
            usual, *others = sorted(several, key=lambda way: -len(way.layers))
            for way in others:
                why = _why(plan, way.layers[0], usual.layers[0], readers)
                yield f"{name}: {_numbers(way)} {way.words}, the other {len(usual.layers)} {usual.words}{why}"


def _why(plan: Plan, one: str, other: str, readers: dict[str, list[tuple[OpPlan, int]]]) -> str:
    """What the two read that lies in different ways."""
    found = []
    for name in (one, other):
        row = plan.parameters.get(name)
        at = readers.get(row.tensor, []) if row is not None else []
        if not at:
            return ""
        op, position = at[0]
        found.append(next((entry for place, entry in enumerate(op.inputs) if place != position), None))
    here, there = found
    if here is None or there is None or here.spec == there.spec:
        return "; what they are applied to lies alike: it is the reshards around them that differ"
    return f"; they are applied to what lies as '{here.spec}', the others to '{there.spec}'"


def _readers(plan: Plan) -> dict[str, list[tuple[OpPlan, int]]]:
    """Who computes with each parameter in forward: through casts, transposes and other operators on it alone."""
    tensors = {row.tensor for row in plan.parameters.values()}
    origin = {tensor: tensor for tensor in tensors}
    found: dict[str, list[tuple[OpPlan, int]]] = {}
    for op in plan.captured:
        if op.phase != "forward":
            break
        known = [(place, origin[entry.tensor]) for place, entry in enumerate(op.inputs) if entry.tensor in origin]
        if len(op.inputs) == 1 and known:
            origin.update((entry.tensor, known[0][1]) for entry in op.outputs)
            continue
        for place, tensor in known:
            found.setdefault(tensor, []).append((op, place))
    return found


def _split(row: TensorSpec) -> dict[int, int]:
    """The dim that each axis splits."""
    return {axis: dim for dim, axes in enumerate(ShardingSpec.parse(row.spec).dims) for axis in axes}


def _listed(words: Sequence[tuple[str, str]]) -> str:
    """``column parallel over tp, FSDP over dp``; axes of one word together."""
    axes: dict[str, list[str]] = {}
    for word, axis in words:
        axes.setdefault(word, []).append(axis)
    order = sorted(axes, key=lambda word: word.startswith(("data", "FSDP", "gathered")))
    return ", ".join(f"{word} over {' and '.join(axes[word])}" for word in order) or WHOLE


def _numbers(way: Way) -> str:
    """The layers' names, the first few."""
    shown = ", ".join(way.layers[:4])
    return shown if len(way.layers) <= 4 else f"{shown} and {len(way.layers) - 4} more:"
