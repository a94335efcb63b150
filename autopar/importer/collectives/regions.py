"""Regions of a model that run on each rank's part: the functions that it gives to ``local_map``.

Outside of a region tensors are whole. Inside, the parts of all ranks along an axis are one tensor, whose first dim is the ranks. The
function runs under one level of ``vmap`` for each axis, and sees one rank's part. What comes out is plain operators on whole tensors: the
planner splits them as it does others, and gradients are those of the whole. A value that is equal on all ranks of an axis has no dim of
ranks for it, so that it is known which values are.

Where parts come in and go out ``autopar.on_axes`` has the dims of the ranks lie over their axes and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.collectives.axis_groups import IN_REGION, names_of, sizes_of
from autopar.sharding import AxisLayout

_REDUCED: Mapping[str, Callable[..., Tensor]] = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}
"""By the reduction of a ``Partial`` what makes the whole of all ranks' values."""


def kind_of(placement: Any) -> str:
    """``Shard``, ``Replicate`` or ``Partial``; empty for what is none of these, such as shards that are strided."""
    from torch.distributed.tensor import placement_types  # for start-up time: whoever has a placement has imported it

    kinds = placement_types.Shard, placement_types.Replicate, placement_types.Partial
    return next((kind.__name__ for kind in kinds if type(placement) is kind), "")


@dataclass(frozen=True)
class Region:
    """A function that runs on each rank's part.

    Args:
        mesh: the model's own.
        names, sizes, levels: of its axes, in order.
    """

    mesh: Any
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    levels: tuple[int, ...]

    def across(self, tensor: Tensor, axes: Sequence[int] = ()) -> tuple[Tensor, tuple[int, ...]]:
        """All ranks' values of a tensor.

        Args:
            axes: those along which it has a dim in any case; along others where ranks differ.

        Returns:
            the tensor ``[ranks of an axis ..., its own shape]``; the axes of its first dims, ascending.
        """
        whole, levels = torch_compat.without_levels(tensor, self.levels)
        varying = [self.levels.index(level) for level in levels]
        added = [axis for axis in axes if axis not in varying]
        whole = whole.expand(*[self.sizes[axis] for axis in added], *whole.shape)
        order = [*added, *varying]
        there = tuple(sorted(order))
        return whole.permute(*map(order.index, there), *range(len(there), whole.dim())), there

    def within(self, whole: Tensor, axes: Sequence[int]) -> Tensor:
        """One rank's view of a tensor whose first dims are the ranks of these axes, ascending."""
        for axis in axes:
            whole = torch_compat.with_level(whole, self.levels[axis])
        return whole

    def count(self, axes: Sequence[int]) -> int:
        """The number of ranks along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def layout(self, dims: Mapping[int, int | None]) -> str:
        """The ``AxisLayout`` by axis."""
        return str(AxisLayout(tuple((self.names[axis], dim) for axis, dim in dims.items())))

    def laid(self, whole: Tensor, dims: Mapping[int, int | None]) -> Tensor:
        """The tensor, which the plan has lie over these axes so."""
        return torch.ops.autopar.on_axes.default(whole, self.layout(dims))

    def part(self, whole: Tensor, placements: Sequence[Any] | None) -> Tensor:
        """A rank's part of a tensor.

        Args:
            placements: one for each axis; None: the whole.

        Raises:
            CaptureError: a placement that gives ranks no equal parts.
        """
        chosen = [None] * len(self.names) if placements is None else self._one_an_axis(placements, "in_placements")
        split: dict[int, list[int]] = {}
        for axis, placement in enumerate(chosen):
            if kind_of(placement) == "Shard":
                split.setdefault(placement.dim % max(1, whole.dim()), []).append(axis)
            elif placement is not None and kind_of(placement) != "Replicate":
                hint = "give Shard or Replicate: what comes into a region is a whole tensor"
                raise CaptureError(f"local_map with the in_placements {placement}", hint)
        shape, place = list[int](), dict[int, int]()
        for dim, extent in enumerate(whole.shape):
            axes = split.get(dim, [])
            count = math.prod(self.sizes[axis] for axis in axes)
            if extent % count:
                raise CaptureError(
                    f"dim {dim} of a tensor {list(whole.shape)} goes into a region in {count} parts, which are not equal",
                    "pad it to a multiple, so that every rank runs the region on a part of one shape",
                )
            place.update({axis: len(shape) + number for number, axis in enumerate(axes)})
            shape += [*[self.sizes[axis] for axis in axes], extent // count]
        axes = sorted(place)
        whole = whole.reshape(shape).permute(*[place[axis] for axis in axes], *[d for d in range(len(shape)) if d not in place.values()])
        uses = {axis: axes.index(axis) if axis in place else None for axis in range(len(self.names))}
        return self.within(self.laid(whole, uses), axes)

    def joined(self, part: Tensor, placements: Sequence[Any], number: int) -> Tensor:
        """The whole tensor of parts that the ranks made.

        Args:
            number: of the result, for messages.

        Raises:
            CaptureError: ranks have made different values of what is said to be equal.
        """
        chosen = self._one_an_axis(placements, "out_placements")
        kept = [axis for axis, placement in enumerate(chosen) if kind_of(placement) != "Replicate"]
        whole, axes = self.across(part, kept)
        differing = [axis for axis in axes if axis not in kept]
        if differing:
            raise CaptureError(
                f"result {number} of a region differs by rank along {self.names[differing[0]]!r}, its out_placements say Replicate()",
                "reduce or gather it over that axis (all_reduce, all_gather) before it is returned, or say Shard or Partial",
            )
        whole = self.laid(whole, {axis: axes.index(axis) if axis in axes else None for axis in range(len(self.names))})
        split: dict[int, list[int]] = {}
        for place, axis in reversed(list(enumerate(axes))):
            placement = chosen[axis]
            if kind_of(placement) == "Partial":
                if placement.reduce_op not in _REDUCED:
                    raise CaptureError(f"local_map with the out_placements {placement}", f"reduce by {', '.join(_REDUCED)}")
                whole = _REDUCED[placement.reduce_op](whole, place)
            elif kind_of(placement) == "Shard":
                split.setdefault(placement.dim % max(1, part.dim()), []).insert(0, axis)
            else:
                raise CaptureError(f"local_map with the out_placements {placement}", "give Shard, Replicate or Partial")
        left = sorted(axis for axes in split.values() for axis in axes)
        order = [d for dim in range(part.dim()) for d in (*map(left.index, split.get(dim, [])), len(left) + dim)]
        counts = [math.prod(self.sizes[axis] for axis in split.get(dim, [])) for dim in range(part.dim())]
        return whole.permute(order).reshape([extent * count for extent, count in zip(part.shape, counts, strict=True)])

    def _one_an_axis(self, placements: Any, what: str) -> Sequence[Any]:
        if not isinstance(placements, (list, tuple)) or len(placements) != len(self.names):
            shown = f"for each of the axes {', '.join(self.names)}"
            raise CaptureError(f"local_map with the {what} {placements}: one {shown} is wanted", f"give a list with a placement {shown}")
        return placements


_RUNNING: ContextVar[Region | None] = ContextVar("autopar_region", default=None)


def running_region() -> Region | None:
    """The region in which the code that asks runs."""
    return _RUNNING.get()


@contextmanager
def _region(mesh: Any) -> Iterator[Region]:
    names, sizes = names_of(mesh), sizes_of(mesh)
    with ExitStack() as stack:
        levels = tuple([stack.enter_context(torch_compat.rank_level(size)) for size in sizes])
        for variable, value in ((IN_REGION, True), (_RUNNING, region := Region(mesh, names, sizes, levels))):
            stack.callback(partial(variable.reset, variable.set(value)))  # type: ignore[arg-type]
        yield region


def run_region(
    body: Callable[[Region, list[Any]], Any], mesh: Any, args: Sequence[Any], placements: Sequence[Any], out_placements: Any
) -> Any:  # fmt: skip
    """What a function makes of whole tensors, each rank of its part.

    Args:
        body: function of a region and of arguments, whose tensors are parts. Gives the results.
        mesh: a ``DeviceMesh`` or an ``AxisMesh``.
        args: of the function, tensors whole.
        placements: of each of them, one for each axis; None for what is no tensor, and for tensors that all ranks have whole.
        out_placements: the same for each flat result; of a single one also without a tuple around.

    Raises:
        CaptureError: placements that parts cannot have.
    """
    with _region(mesh) as region:
        parts = [region.part(arg, placed) if isinstance(arg, Tensor) else arg for arg, placed in zip(args, placements, strict=True)]
        leaves, structure = torch_compat.flatten_with_paths(body(region, parts))
        wanted = out_placements if isinstance(out_placements, tuple) and not _is_placements(out_placements) else (out_placements,)
        if len(wanted) != len(leaves):
            message = f"local_map with {len(wanted)} out_placements for {len(leaves)} results"
            raise CaptureError(message, "give a tuple with the placements of each result, None for one that is no tensor")
        whole = [
            region.joined(leaf, placed, number) if isinstance(leaf, Tensor) else leaf
            for number, ((_, leaf), placed) in enumerate(zip(leaves, wanted, strict=True))
        ]
    return torch_compat.unflatten(whole, structure)


def _is_placements(given: tuple[Any, ...]) -> bool:
    """Whether it is the placements of one result, not a tuple of those of several."""
    return bool(given) and all(map(kind_of, given))
