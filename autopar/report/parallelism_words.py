"""How a plan splits its layers, in the words of those who split them by hand: column and row parallel, FSDP, sequence, context, expert.

A word follows from specs alone. ``WORDS`` is the table: for an axis of the mesh and a weight, the first row that holds names how the weight
lies, and the first that holds how what it is applied to lies. Where no row holds the axis has no word, or is said to split and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.compare.words import pattern
from autopar.cost_models.collectives import KINDS
from autopar.graph import CONVERSION
from autopar.plan import Plan
from autopar.rows import OpPlan, ParameterSpec, TensorSpec
from autopar.sharding import ShardingSpec

WHOLE = "whole on every rank"
SPLIT = "split"
"""The word for an axis that splits a weight in a way that has no name."""
_LOSSES = ("nll_loss", "cross_entropy_loss")
"""Operators whose first input has the classes as its last dim."""


@dataclass(frozen=True)
class Use:
    """What one axis of the mesh does around one weight, where the first operator of forward computes with it. Dims are None where the axis
    splits none.

    Args:
        operator: its name without namespace and overload: ``contract``, ``embedding``.
        kept, read: the dim of the weight that the axis splits between steps, and as the operator reads it.
        applied, made: the dim of what the weight is applied to, and of what is made.
        summed: what is made is a partial sum over the axis.
        rank: dims of the weight; ``applied_rank``: of what it is applied to.
        into_loss: what is made has its last dim read as the classes of a loss.
        gathered_again: backward gathers the weight too.
    """

    operator: str
    kept: int | None
    read: int | None
    applied: int | None
    made: int | None
    summed: bool
    rank: int
    applied_rank: int
    made_rank: int
    into_loss: bool
    gathered_again: bool


@dataclass(frozen=True)
class Word:
    """A row of the table: the word, what it means to a reader, and when it holds."""

    word: str
    meaning: str
    holds: Callable[[Use], bool]


def _last(dim: int | None, rank: int) -> bool:
    return dim is not None and dim == rank - 1


WEIGHT_WORDS = (
    Word(
        "vocabulary parallel", "each rank has some rows of the vocabulary; look-ups and the loss are summed over ranks",
        lambda use: (use.operator == "embedding" and use.read == 0 and use.summed)
        or (use.read is not None and use.into_loss and _last(use.made, use.made_rank)),
    ),
    Word(
        "expert parallel", "each rank has some experts",
        lambda use: use.read == 0 and use.rank > 2 and use.applied is not None and use.made is not None and not use.summed,
    ),
    Word(
        "row parallel", "Megatron's: each rank has some input features, and results are summed over ranks",
        lambda use: use.read is not None and use.summed and use.operator != "embedding",
    ),
    Word(
        "column parallel", "Megatron's: each rank has some output features",
        lambda use: use.read is not None and use.made is not None and not use.summed,
    ),
    Word(SPLIT, "each rank reads a part of the weight", lambda use: use.read is not None),
    Word(
        "FSDP (ZeRO-3 gathers)", "kept split, gathered before forward and again before backward, by ranks with other data",
        lambda use: use.kept is not None and use.applied is not None and use.gathered_again,
    ),
    Word(
        "FSDP (one gather)", "kept split, gathered once a step and held until its last reader, by ranks with other data",
        lambda use: use.kept is not None and use.applied is not None,
    ),
    Word("gathered", "kept split and gathered before it is read, by ranks with the same data", lambda use: use.kept is not None),
)  # fmt: skip
"""How a weight lies along an axis."""

DATA_WORDS = (
    Word(
        "sequence parallel", "each rank has some positions of every sequence",
        lambda use: use.read is None and use.applied == 1 and use.applied_rank == 3,
    ),
    Word(
        "spatial parallel", "each rank has a part of every image",
        lambda use: use.read is None and use.operator == "convolution" and use.applied is not None and use.applied > 1,
    ),
    Word(
        "data parallel", "each rank has some samples",
        lambda use: use.read is None and use.applied == 0 and use.kept is None,
    ),
    Word(
        "data split", "each rank has a part of what the weight is applied to",
        lambda use: use.read is None and use.applied is not None and use.applied > 0,
    ),
)  # fmt: skip
"""How what the weight is applied to lies along an axis that does not split the weight as it is read. FSDP implies data parallel."""

_ATTENTION = {0: "data parallel", 1: "head parallel", 2: "context parallel"}
"""Names of a split dim of attention's batch x heads x sequence x width."""
_ATTENTION_WORDS = {
    "ring attention": "each rank has some positions; keys and values travel around the ranks",
    "context parallel": "each rank has some positions of the queries",
    "head parallel": "each rank has some heads",
}
MEANINGS = {row.word: row.meaning for row in WEIGHT_WORDS} | _ATTENTION_WORDS | {row.word: row.meaning for row in DATA_WORDS}
"""What each word means; the words of a weight stand in this order."""
_ORDER = {word: place for place, word in enumerate(MEANINGS)}


@dataclass(frozen=True)
class Way:
    """How the weights, or attentions, of one name in equal layers lie.

    Args:
        name: with ``*`` for the number of the layer.
        words: what an engineer calls it.
        layers: the full names.
        is_weight: of weights; else of attentions.
    """

    name: str
    shape: tuple[int, ...]
    spec: str
    words: str
    layers: tuple[str, ...]
    is_weight: bool = True

    @property
    def title(self) -> str:
        """The name, with its number where it is one layer alone."""
        return self.layers[0] if len(self.layers) == 1 else self.name


def ways(plan: Plan) -> tuple[Way, ...]:
    """Parameters and attentions by name; layers that lie in other ways have rows of their own."""
    readers, about = _readers(plan), Context.of(plan)
    found: dict[tuple[str, tuple[int, ...], str, str, bool], list[str]] = {}
    for name, row in plan.parameters.items():
        words = of_parameter(plan, row, readers.get(row.tensor, ()), about)
        found.setdefault((pattern(name), row.shape, row.spec, words, True), []).append(name)
    for op in plan.captured:
        if op.op == "autopar.attention.default" and op.phase == "forward":
            words = of_attention(plan, op)
            key = pattern(op.module or op.name), op.outputs[0].shape, op.outputs[0].spec, words, False
            found.setdefault(key, []).append(op.module or op.name)
    order: dict[str, int] = {}
    for name, *_ in found:
        order.setdefault(name, len(order))
    rows = sorted(found.items(), key=lambda item: order[item[0][0]])
    return tuple(Way(name, shape, spec, words, tuple(layers), weight) for (name, shape, spec, words, weight), layers in rows)


def of_parameter(plan: Plan, row: ParameterSpec, readers: Sequence[tuple[OpPlan, int]], about: Context) -> str:
    """The words for one parameter, from the first operator of forward that computes with it."""
    names = list(plan.mesh)
    if not readers:
        return _listed([(SPLIT, names[axis]) for axis in ShardingSpec.parse(row.spec).split_axes])
    blocks = f" in each of {row.blocks[1]} blocks" if row.blocks is not None else ""
    words = []
    for axis, name in enumerate(names):
        use = _use(row, *readers[0], axis, about)
        for table in (WEIGHT_WORDS, DATA_WORDS):
            word = next((one.word for one in table if one.holds(use)), None)
            if word is not None:
                words.append((word + (blocks if word == "column parallel" else ""), name))
    return _listed(words)


def _use(row: ParameterSpec, op: OpPlan, position: int, axis: int, about: Context) -> Use:
    read, made = op.inputs[position], op.outputs[0]
    data = next((entry for place, entry in enumerate(op.inputs) if place != position and len(entry.shape) > 0), None)
    return Use(
        operator=op.op.split(".")[1], kept=_split(row).get(axis), read=_split(read).get(axis),
        applied=_split(data).get(axis) if data is not None else None, made=_split(made).get(axis),
        summed=axis in ShardingSpec.parse(made.spec).partial_axes, rank=len(row.shape),
        applied_rank=len(data.shape) if data is not None else 0, made_rank=len(made.shape), into_loss=made.tensor in about.classes,
        gathered_again=row.tensor in about.gathered_again,
    )  # fmt: skip


@dataclass(frozen=True)
class Context:
    """What the words for a weight need of the whole plan.

    Args:
        classes: tensors whose last dim a loss reads as its classes.
        gathered_again: parameters that backward gathers, as they are or in another dtype.
    """

    classes: frozenset[str]
    gathered_again: frozenset[str]

    @staticmethod
    def of(plan: Plan) -> Context:
        classes: set[str] = set()
        for op in reversed(plan.captured):
            through = len(op.inputs) == 1 and any(entry.tensor in classes for entry in op.outputs)
            if op.phase == "forward" and op.inputs and (through or op.op.split(".")[1] in _LOSSES):
                classes.add(op.inputs[0].tensor)
        calls = (row for row in plan.collectives if KINDS[row.kind].role == "gather" and row.phase != "forward")
        of = {row.tensor: row.tensor for row in plan.parameters.values()}
        converted = (op for op in plan.captured if op.op == CONVERSION and op.inputs[0].tensor in of)
        of |= {op.outputs[0].tensor: op.inputs[0].tensor for op in converted}
        return Context(frozenset(classes), frozenset(of[part.tensor] for row in calls for part in row.members if part.tensor in of))


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
    order = sorted(axes, key=lambda word: _ORDER.get(word.partition(" in each")[0], 0))
    return ", ".join(f"{word} over {' and '.join(axes[word])}" for word in order) or WHOLE


def meanings(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each word of the table that stands in one of the texts, with its meaning."""
    texts = list(words)
    yield from ((word, meaning) for word, meaning in MEANINGS.items() if any(f"{word} " in text for text in texts))


def _numbers(way: Way) -> str:
    """The layers' names, the first few."""
    shown = ", ".join(way.layers[:4])
    return shown if len(way.layers) <= 4 else f"{shown} and {len(way.layers) - 4} more:"
