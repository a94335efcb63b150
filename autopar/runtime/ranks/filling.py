"""Padding of unequal parts to equal ones for a collective, and the cut back after it.

A dim that one side of a reshard holds whole is padded inside: each part begins where equal parts would (``sharding.runs``), with zeros
in between. The one part that a rank holds of a split dim is padded at its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from autopar.reshard import Shapes
from autopar.schedule.collectives import Part
from autopar.sharding import Run


def lay_out(source: Tensor, room: Tensor, part: Part) -> Tensor:
    """``room``, ``[blocks, ...]``, with a source in it, zeros where it is filled up; without another copy in between."""
    if tuple(source.shape) != part.shapes.sent:
        room.zero_()
    places = [_along(part.shapes, dim, *ends) for dim, ends in enumerate(zip(source.shape, part.shapes.sent, strict=True))]
    dim = part.step.dims[-1] if part.step.dims else 0
    for number, block in enumerate(room):
        for runs in _in_block(places, dim, number, block):
            _some(block, runs, 0).copy_(_some(source, runs, 1))
    return room


def put_together(blocks: Tensor, part: Part) -> Tensor:
    """The target of which ``blocks``, ``[blocks, ...]`` along the dim that is joined, came filled up."""
    whole = blocks.new_empty(part.shapes.target)
    places = [_along(part.shapes, dim, *ends) for dim, ends in enumerate(zip(whole.shape, part.shapes.came, strict=True))]
    dim = part.step.dims[0] if part.step.dims else 0
    for number, block in enumerate(blocks):
        for runs in _in_block(places, dim, number, block):
            _some(whole, runs, 1).copy_(_some(block, runs, 0))
    return whole


def fitted(tensor: Tensor, shape: Sequence[int], shapes: Shapes) -> Tensor:
    """A tensor of a rank with its dims filled up with zeros, or cut, to this shape; itself where it has it."""
    for dim, (have, extent) in enumerate(zip(tensor.shape, shape, strict=True)):
        places = _along(shapes, dim, min(have, extent), max(have, extent))
        if have < extent:
            tensor = _spread(tensor, dim, places, extent)
        elif have > extent:
            pieces = [tensor.narrow(dim, there, length) for there, _, length in places]
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return tensor


def sliced(tensor: Tensor, shapes: Shapes, dim: int, index: int) -> Tensor:
    """Part ``index`` along a dim that is cut in parts, as its target."""
    each = shapes.came[dim]
    places = _within(_along(shapes, dim, tensor.shape[dim], shapes.sent[dim]), index * each, each) or [(0, 0, 0)]
    there, here, length = places[0]
    part = tensor.narrow(dim, here, length) if len(places) == 1 and not there else _spread(tensor, dim, places, each)
    return fitted(part, shapes.target, shapes)


def _along(shapes: Shapes, dim: int, real: int, filled: int) -> Sequence[Run]:
    """Where the elements of a dim lie in one that is filled up, if it is longer."""
    return shapes.runs[dim] if shapes.runs and real == shapes.whole[dim] < filled else ((0, 0, real),)


def _within(places: Sequence[Run], begin: int, length: int) -> list[Run]:
    """Those from ``begin`` on, where it is filled up, counted from there."""
    found = []
    for there, here, count in places:
        first, last = max(there, begin), min(there + count, begin + length)
        if first < last:
            found.append((first - begin, here + first - there, last - first))
    return found


def _in_block(places: Sequence[Sequence[Run]], dim: int, number: int, block: Tensor) -> Iterator[tuple[Run, ...]]:
    """What of a tensor is in one of its blocks along ``dim``: a run of each dim together."""
    width = block.shape[dim] if block.dim() else 0
    return itertools.product(*(_within(runs, number * width, width) if at == dim else runs for at, runs in enumerate(places)))


def _some(tensor: Tensor, runs: Sequence[Run], side: int) -> Tensor:
    """A run of each dim of a tensor that is filled up (``side`` 0), or of one that is not."""
    shape = tensor.shape
    for dim, run in enumerate(runs):
        if run[2] != shape[dim]:  # most dims are whole, and a view takes longer than the question
            tensor = tensor.narrow(dim, run[side], run[2])
    return tensor


def _spread(tensor: Tensor, dim: int, places: Sequence[Run], extent: int) -> Tensor:
    """The runs of a dim at their places in one of ``extent``, zeros between and after them."""
    if len(places) == 1:
        ((there, here, length),) = places
        return pad(tensor.narrow(dim, here, length), [0, 0] * (tensor.dim() - 1 - dim) + [there, extent - there - length])
    pieces, end = list[Tensor](), 0
    for there, here, length in places:
        pieces += [_zeros(tensor, dim, there - end)] if there > end else []
        pieces.append(tensor.narrow(dim, here, length))
        end = there + length
    return torch.cat([*pieces, _zeros(tensor, dim, extent - end)] if extent > end else pieces, dim)


def _zeros(tensor: Tensor, dim: int, extent: int) -> Tensor:
    return tensor.new_zeros((*tensor.shape[:dim], extent, *tensor.shape[dim + 1 :]))
