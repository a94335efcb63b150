"""How the sizes among an operator's arguments follow its shapes, and which of its whole dims keep one ratio.

A sharding rule names the dims of an operator by factors, and ``Row.local`` says which arguments are shapes and extents. What a rule calls
``_`` is never split, so that a rule says nothing of it: here stands what shrinks all the same. A dim that neither knows keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.graph import Argument, Op, Tensor
from autopar.rules.lookup import find_row
from autopar.rules.signature import REQUIRED, OperatorCall, Row, call_of, signature

Place = tuple[int, int]
"""An operand, numbered over inputs, then outputs, and one of its dims."""
Shapes = tuple[tuple[int, ...], ...]
"""Of all operands: inputs, then outputs."""


@dataclass(frozen=True)
class Relation:
    """The whole dims of an operator that shrink, and the arguments that go with them.

    Args:
        tied: groups of dims that are divided by one number.
        lengths: numbers that it must divide, by the group they belong to: where a slice begins, how long a part is.
        free: dims that may be divided by any number.
    """

    tied: tuple[tuple[Place, ...], ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    free: tuple[Place, ...] = ()


Relate = Callable[[OperatorCall], Relation]
Rewrite = Callable[[OperatorCall, Shapes, Shapes], Mapping[str, Argument]]
"""From a call, the shapes of its operands and their reduced shapes to the arguments that change."""


def call_with_shapes(op: Op, tensors: Mapping[str, Tensor]) -> tuple[Row, OperatorCall] | None:
    """The operator's row and its arguments by name; None for an operator without a row."""
    row = find_row(op.target)
    if row is None:
        return None
    return row, call_of(op, row, tuple(tensors[name] for name in op.inputs), tuple(tensors[name] for name in op.outputs))


def relation_of(row: Row, call: OperatorCall) -> Relation:
    """What is known of the operator's whole dims."""
    relate = _RELATIONS.get(row.name) or _RELATIONS.get(row.name.rpartition(".")[0]) or _FAMILIES.get(row.family)
    return relate(call) if relate is not None else Relation()


def rewritten(op: Op, row: Row, call: OperatorCall, before: Shapes, after: Shapes) -> Op:
    """The operator with the arguments that ``Rewrite`` functions change."""
    rewrite = _REWRITES.get(row.name) or _REWRITES.get(row.name.rpartition(".")[0]) or _REWRITES.get(op.target)
    return op if rewrite is None else with_arguments(op, row, rewrite(call, before, after))


def with_arguments(op: Op, row: Row, changed: Mapping[str, Argument]) -> Op:
    """The operator with arguments replaced, by the names of its row's signature."""
    parameters = signature(row.operator)
    places = {parameter.name: index for index, parameter in enumerate(parameters)}
    args, kwargs = list(op.args), dict(op.kwargs)
    for name, value in changed.items():
        index = places.get(name)
        if index is not None and index < len(args):
            args[index] = value
        elif name in kwargs or (index is not None and parameters[index].default is not REQUIRED and parameters[index].default != value):
            kwargs[name] = value
    return Op(op.name, op.target, op.inputs, op.outputs, tuple(args), tuple(kwargs.items()), op.module, op.phase, op.location)


# --- dims that keep one ratio -------------------------------------------------------------------------------------------


def _dim(call: OperatorCall, rank: int, name: str = "dim") -> int:
    return int(call.arguments[name]) % max(rank, 1)


def _sliced(call: OperatorCall) -> Relation:
    """The dim and the slice of it, where the slice begins and ends at a multiple."""
    size, dim = (call.shape(0), _dim(call, len(call.shape(0))))
    return _slice_of(call, size[dim], ((0, dim), (1, dim)))


def _sliced_backward(call: OperatorCall) -> Relation:
    size, dim = (call.result(), _dim(call, len(call.result())))
    return _slice_of(call, size[dim], ((0, dim), (1, dim)))


def _slice_scattered(call: OperatorCall) -> Relation:
    size, dim = (call.shape(0), _dim(call, len(call.shape(0))))
    return _slice_of(call, size[dim], ((0, dim), (1, dim), (2, dim)))


def _slice_of(call: OperatorCall, size: int, tied: tuple[Place, ...]) -> Relation:
    start, end = call.arguments["start"] or 0, call.arguments["end"]
    step = call.arguments["step"]
    ends = [] if end is None or end >= size else [end]
    begins = [start] if start >= step or (start and step == 1) else []
    return Relation((tied,), tuple((0, number) for number in (*begins, *ends) if number))


def _split(call: OperatorCall) -> Relation:
    """The dim and its parts, where their lengths have the divisor."""
    dim, size = _dim(call, len(call.shape(0))), call.arguments["size"]
    lengths = size if isinstance(size, tuple) else (size,) if call.target.startswith("aten.split") else ()
    places = ((0, dim), *((1 + number, dim) for number in range(len(call.outputs))))
    return Relation((places,), tuple((0, length) for length in lengths))


def _joined(call: OperatorCall) -> Relation:
    dim = _dim(call, len(call.result()))
    whole = [number for number, tensor in enumerate(call.inputs) if len(tensor.shape) == len(call.result())]
    return Relation((((len(call.inputs), dim), *((number, dim) for number in whole)),))


def _padded(call: OperatorCall) -> Relation:
    rank, amounts = len(call.shape(0)), call.arguments["pad"]
    tied, lengths = list[tuple[Place, ...]](), list[tuple[int, int]]()
    for index in range(len(amounts) // 2):
        dim = rank - 1 - index
        lengths += [(len(tied), abs(amount)) for amount in amounts[2 * index : 2 * index + 2] if amount]
        tied.append(((0, dim), (1, dim)))
    return Relation(tuple(tied), tuple(lengths))


def _kept(call: OperatorCall) -> Relation:
    """The same dim of input and output."""
    return Relation(tuple(((0, dim), (1, dim)) for dim in range(len(call.shape(0)))))


def _along(call: OperatorCall) -> Relation:
    dim = _dim(call, len(call.shape(0)))
    return Relation((tuple((number, dim) for number in range(len(call.inputs) + len(call.outputs))),))


def _selected(call: OperatorCall) -> Relation:
    """The dim may have any size where the first or the last entry is selected."""
    size = call.shape(0) if call.target.startswith("aten.select.") else call.result()
    dim = _dim(call, len(size))
    index = call.arguments["index"] % size[dim]
    place = (0 if call.target.startswith("aten.select.") else 1, dim)
    return Relation(free=(place,)) if index in (0, size[dim] - 1) else Relation()


def _made(call: OperatorCall) -> Relation:
    return Relation(free=tuple((len(call.inputs), dim) for dim in range(len(call.result()))))


def _spatial(call: OperatorCall) -> Relation:
    """The dims behind batch and channels, alike in all operands but the weight: kernels keep their size."""
    operands = (*call.inputs, *call.outputs)
    weights = {
        "autopar.convolution.default": (1,), "autopar.convolution_input_gradient.default": (1,),
        "autopar.convolution_weight_gradient.default": (2,), "aten.convolution.default": (1,), "aten.convolution_backward.default": (2, 4),
    }.get(call.target, ())  # fmt: skip
    rank = max(len(tensor.shape) for tensor in operands)
    full = [number for number, tensor in enumerate(operands) if len(tensor.shape) == rank and number not in weights]
    return Relation(tuple(tuple((number, dim) for number in full) for dim in range(2, rank)))


_RELATIONS: Mapping[str, Relate] = {
    "aten.slice": _sliced, "aten.slice_backward": _sliced_backward, "aten.slice_scatter": _slice_scattered,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes"), _split),
    "aten.cat": _joined, "aten.constant_pad_nd": _padded, "aten.roll": _kept, "aten.glu": _along, "aten.glu_backward": _along,
    "aten.select": _selected, "aten.select_backward": _selected, "aten.arange": _made, "aten.linspace": _made,
}  # fmt: skip
"""By operator."""
_FAMILIES: Mapping[str, Relate] = {"convolution": _spatial, "pooling": _spatial, "normalisation": _spatial}
"""By family of operators."""


# --- arguments that follow the shapes -----------------------------------------------------------------------------------


def _slice_ends(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    backward = call.target.startswith("aten.slice_backward")
    whole = 1 if backward else 0
    part = 0 if backward else 1
    dim = _dim(call, len(before[whole]))
    size, new, length = before[whole][dim], after[whole][dim], after[part][dim]
    start, step = call.arguments["start"] or 0, call.arguments["step"]
    begin = start if start < step else start * new // size
    end = call.arguments["end"]
    ending = end if end is None or end >= size else begin + (length - 1) * step + 1 if step > 1 else begin + length
    return {"start": begin if call.arguments["start"] is not None else None, "end": ending}


def _lengths(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    dim, size = _dim(call, len(before[0])), call.arguments["size"]
    new = tuple(shape[dim] for shape in after[1:])
    return {"size": new if isinstance(size, tuple) else size * after[0][dim] // before[0][dim]}


def _amounts(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    rank, pad = len(before[0]), call.arguments["pad"]
    ratio = [(after[0][rank - 1 - index // 2], before[0][rank - 1 - index // 2]) for index in range(len(pad))]
    return {"pad": tuple(amount * new // max(old, 1) for amount, (new, old) in zip(pad, ratio, strict=True))}


def _index(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    whole = 0 if call.target.startswith("aten.select.") else 1
    dim = _dim(call, len(before[whole]))
    index = call.arguments["index"] % before[whole][dim]
    return {"index": after[whole][dim] - 1 if index == before[whole][dim] - 1 else index}


def _normalized(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    shape = after[1] if call.target.endswith("_backward.default") else after[0]
    return {"normalized_shape": shape[len(shape) - len(call.arguments["normalized_shape"]) :]}


def _spatial_size(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    return {"HxW": math.prod(after[0][2:])}


def _padding_row(call: OperatorCall, before: Shapes, after: Shapes) -> dict[str, Argument]:
    rows, padding = after[-1][0], call.arguments["padding_idx"]
    return {"padding_idx": min(padding, rows - 1)}


_REWRITES: Mapping[str, Rewrite] = {
    "aten.slice": _slice_ends, "aten.slice_backward": _slice_ends, "aten.slice_scatter": _slice_ends,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes"), _lengths),
    "aten.constant_pad_nd": _amounts, "aten.select": _index, "aten.select_backward": _index,
    **dict.fromkeys(
        (
            "aten.native_layer_norm", "aten.native_layer_norm_backward", "aten._fused_rms_norm", "aten._fused_rms_norm_backward",
            "autopar.rms_norm", "autopar.rms_norm_backward",
        ),
        _normalized,
    ),
    "aten.native_group_norm": _spatial_size, "aten.native_group_norm_backward": _spatial_size,
    "autopar.embedding_backward": _padding_row,
}  # fmt: skip
"""By operator."""


def counted(op: Op, length: int) -> Op:
    """A range of ``length`` numbers, with the first and the distance that it has."""
    args = list(op.args)
    match op.target.split(".")[1:]:
        case ["arange", "default"]:
            args[0] = length
        case ["arange", "start"]:
            args[1] = args[0] + length
        case ["arange", "start_step"]:
            args[1] = args[0] + length * (args[2] if len(args) > 2 else 1)
        case ["linspace", _]:
            args[2] = length
    return Op(op.name, op.target, op.inputs, op.outputs, tuple(args), op.kwargs, op.module, op.phase, op.location)


def places(relation: Relation) -> Iterator[Place]:
    """The dims that a relation speaks of."""
    yield from relation.free
    for group in relation.tied:
        yield from group
