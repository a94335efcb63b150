"""Step and Reshard: what turns one sharding spec into another, and its price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost_models import Mesh, SubAxis
from autopar.cost_models.collectives import CALLS, STEP_KINDS
from autopar.sharding import Run, ShardingSpec, runs


@dataclass(frozen=True)
class Step:
    """One collective, a copy to the host or back, or a local step that moves nothing (slice, mask).

    A rank's group is the ranks that differ from it along ``axes`` alone, in row-major order over ``axes`` (the first is major); n is its
    size and ``index`` a rank's position in it.

    Args:
        kind: ``slice`` (narrow a dim to part ``index`` of n), ``all_gather`` (concatenate the group's tensors along a dim),
            ``reduce_scatter`` (reduce over the group, keep part ``index`` of a dim), ``all_reduce``, ``all_to_all`` (split
            the second dim in n, exchange, concatenate along the first), ``permute`` (receive another rank's block) or ``mask``
            (a replicated value becomes a partial sum: ``index`` 0 keeps it, the others hold zeros). ``to_host`` and ``from_host`` copy
            a rank's own part; a schedule alone has them.
        axes: the parts of mesh axes that it runs over.
        dims: the tensor dim it works on; (from, to) of an all-to-all; none for all_reduce and permute.
        reduction: one of ``autopar.sharding.REDUCTIONS``; empty when nothing is reduced.
        sources: of a permute, for each rank the rank whose block it receives (itself: no transfer).
        full_bytes: the gathered, reduced or exchanged tensor on its group.
        received_bytes_per_rank: at most, over the ranks.
        seconds: by the machine's links.
    """

    kind: str
    axes: tuple[SubAxis, ...]
    dims: tuple[int, ...]
    reduction: str = ""
    sources: tuple[int, ...] = ()
    full_bytes: float = 0.0
    received_bytes_per_rank: float = 0.0
    seconds: float = 0.0

    @property
    def is_collective(self) -> bool:
        """Whether it is started and waited for; else each rank does it alone, at no cost."""
        return self.kind in CALLS


def filled_up(shape: Sequence[int], source: ShardingSpec, target: ShardingSpec, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape with every dim as long as parts of the size of the largest are together, of both specs or, where these differ, of the
    source.

    >>> filled_up((6, 4), ShardingSpec.parse("S0 R"), ShardingSpec.parse("R S0"), (4,))
    (8, 4)
    """
    found = []
    for dim, extent in enumerate(shape):
        count = source.parts(dim, sizes)
        count = target.parts(dim, sizes) if count == 1 else count
        found.append(-(-extent // count) * count)
    return tuple(found)


def halfway(shape: Sequence[int], source: ShardingSpec, target: ShardingSpec, sizes: Sequence[int]) -> ShardingSpec | None:
    """The target with the dims whole that source and target cut in parts of which equal ones of the size of the largest would be of
    different lengths together, or begin elsewhere: no exchange turns one into the other. None where there are no such dims.

    >>> str(halfway((7, 4), ShardingSpec.parse("S0 R"), ShardingSpec.parse("S1 S0"), (2, 3)))
    'R S0'
    """
    apart = {dim for dim, extent in enumerate(shape) if _apart(extent, source.dims[dim], target.dims[dim], sizes)}
    return ShardingSpec(tuple(() if dim in apart else axes for dim, axes in enumerate(target.dims)), target.partial) if apart else None


def _apart(extent: int, one: tuple[int, ...], other: tuple[int, ...], sizes: Sequence[int]) -> bool:
    """See ``halfway``."""
    if not one or not other or one == other:
        return False
    cuts = [[sizes[axis] for axis in axes] for axes in (one, other)]
    counts = [math.prod(cut) for cut in cuts]
    lengths = [-(-extent // count) * count for count in counts]
    return lengths[0] != lengths[1] or (cuts[0] != cuts[1] and lengths[0] != extent)


def shape_after(shape: tuple[int, ...], step: Step) -> tuple[int, ...]:
    """A rank's shape after one step, where all ranks' are equal."""
    parts = math.prod([axis.size for axis in step.axes])
    changed = list(shape)
    if STEP_KINDS[step.kind].cuts:
        changed[step.dims[-1]] //= parts
    if STEP_KINDS[step.kind].joins:
        changed[step.dims[0]] *= parts
    return tuple(changed)


@dataclass(frozen=True)
class Shapes:
    """What one step makes of what on a rank; on the largest, where parts are unequal.

    Args:
        source, target: of the values before and after it.
        sent, came: the same as they travel.
        filled: unequal parts are filled up to equal ones to travel, and cut after the last step.
        whole: of the tensor.
        ends: the specs that this step, with those around it, turns one into the other.
        last: of these steps.
        runs: for each dim where the elements lie in one that is filled up; of none where no dim is.
    """

    source: tuple[int, ...]
    sent: tuple[int, ...]
    came: tuple[int, ...]
    target: tuple[int, ...]
    filled: bool
    whole: tuple[int, ...]
    ends: tuple[ShardingSpec, ShardingSpec]
    last: bool
    runs: tuple[tuple[Run, ...], ...] = ()

    def on(self, sizes: Sequence[int], coordinates: Sequence[int]) -> Shapes:
        """The same on the rank at ``coordinates``: what travels filled up is as large on all ranks, and cut in the end; a dim that is not
        moved has the rank's own length."""
        source, target = self.ends
        if source.is_even(self.whole, sizes) and target.is_even(self.whole, sizes):
            return self
        if self.filled:
            return replace(self, target=target.own_shape(self.whole, sizes, coordinates)) if self.last else self
        own = source.own_shape(self.whole, sizes, coordinates)
        unmoved = {dim for dim, extent in enumerate(self.whole) if extent % source.parts(dim, sizes)}

        def as_held(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([own[dim] if dim in unmoved else extent for dim, extent in enumerate(shape)])

        return replace(
            self, source=as_held(self.source), sent=as_held(self.sent), came=as_held(self.came), target=as_held(self.target)
        )  # fmt: skip


def cuts_inside(step: Step, source: tuple[int, ...]) -> bool:
    """Whether a collective cuts a dim of the rank's ``source`` shape that is not the first: its blocks are not runs of memory."""
    return step.is_collective and CALLS[step.kind].cuts and math.prod(source[: step.dims[-1]]) > 1


def joins_inside(step: Step, target: tuple[int, ...]) -> bool:
    """Whether a collective joins a dim of the rank's ``target`` shape that is not the first."""
    return step.is_collective and CALLS[step.kind].joins and math.prod(target[: step.dims[0]]) > 1


def copied_alone(step: Step, shapes: Shapes) -> int:
    """Elements that a call of its own copies on the rank: since it cuts or joins inside, or to fill up unequal parts and cut what came.
    An all-reduce copies none where nobody else reads its source, as is nearly always so."""
    copied = math.prod(shapes.sent) if shapes.filled or cuts_inside(step, shapes.sent) else 0
    return copied + (math.prod(shapes.came) if shapes.filled or joins_inside(step, shapes.came) else 0)


@dataclass(frozen=True)
class Reshard:
    """The cheapest known way from ``source`` to ``target``.

    Where a step cuts, joins or trades unequal parts, what travels is filled up to equal ones, and cut in the end: between its ends the
    reshard is that of a tensor of the shape ``padded``, whose parts begin where those of the real one do.

    Args:
        shape: of the whole tensor.
        itemsize: bytes of an element.
        source, target: the specs.
        steps: in order; empty when nothing is to be done.
        seconds: of all steps.
        received_bytes_per_rank: of all steps.
        mesh: the mesh it is for.
        legs: reshards one after another, of whose steps this one consists, if it is not of one piece.
    """

    shape: tuple[int, ...]
    itemsize: int
    source: ShardingSpec
    target: ShardingSpec
    steps: tuple[Step, ...]
    seconds: float
    received_bytes_per_rank: float
    mesh: Mesh
    legs: tuple[Reshard, ...] = ()

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """``shape`` with the dims filled up that steps cut, join or trade in unequal parts."""
        filled = filled_up(self.shape, self.source, self.target, self.mesh.sizes)
        moved = {dim for step in self.steps for dim in (range(len(self.shape)) if STEP_KINDS[step.kind].pairs else step.dims)}
        return tuple([after if dim in moved else before for dim, (before, after) in enumerate(zip(self.shape, filled, strict=True))])

    @cached_property
    def shapes(self) -> tuple[Shapes, ...]:
        """For each step, the shapes on a rank."""
        if self.legs:
            return tuple([shapes for leg in self.legs for shapes in leg.shapes])
        sizes, ends, found = self.mesh.sizes, (self.source, self.target), []
        before, sent = (self.source.local_shape(shape, sizes) for shape in (self.shape, self.padded))
        filled = self.padded != self.shape
        cuts = [tuple([sizes[axis] for axis in one or other]) for one, other in zip(self.source.dims, self.target.dims, strict=True)]
        places = tuple([runs(extent, cut) for extent, cut in zip(self.shape, cuts, strict=True)]) if filled else ()
        for number, step in enumerate(self.steps, 1):
            last, came = number == len(self.steps), shape_after(sent, step)
            after = self.target.local_shape(self.shape, sizes) if last else came
            found.append(Shapes(before, sent, came, after, filled, self.shape, ends, last, places))
            before = sent = came
        return tuple(found)

    @cached_property
    def temporary_bytes(self) -> int:
        """Most bytes that a rank holds beside source and target while the steps run: values between steps, and copies.

        Blocks are exchanged as runs of memory, so a dim with others before it is cut, or joined, by a copy.
        """
        final = math.prod(self.target.local_shape(self.shape, self.mesh.sizes)) * self.itemsize
        most = 0
        for number, (step, shapes) in enumerate(zip(self.steps, self.shapes, strict=True)):
            before, sent, came, after = (
                math.prod(shape) * self.itemsize for shape in (shapes.source, shapes.sent, shapes.came, shapes.target)
            )
            copies, filled = 0, step.is_collective and shapes.filled
            if filled or cuts_inside(step, shapes.sent):
                copies += sent
            if filled or joins_inside(step, shapes.came):
                copies += came
            between = after - final if number < len(self.steps) - 1 else 0
            most = max(most, (before if number else 0) + copies + between)
        return most

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        specs = " -> ".join(str(spec) or "replicated" for spec in (self.source, self.target))
        lines = [f"{specs}  ({shape}, {self.itemsize} bytes each, mesh {self.mesh})"]
        rows = [("step", "kind", "axes", "dims", "received", "seconds")]
        for number, step in enumerate(self.steps, 1):
            kind = f"{step.kind} ({step.reduction})" if step.reduction else step.kind
            axes = ", ".join(self.mesh.sub_axis_name(part) for part in step.axes)
            dims = " -> ".join(map(str, step.dims))
            rows.append((str(number), kind, axes, dims, f"{step.received_bytes_per_rank:,.0f} B", f"{step.seconds:.3g} s"))
        rows.append(("", "total", "", "", f"{self.received_bytes_per_rank:,.0f} B", f"{self.seconds:.3g} s"))
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        for row in rows:
            left = "  ".join(text.ljust(width) for text, width in zip(row[:4], widths[:4], strict=True))
            right = "  ".join(text.rjust(width) for text, width in zip(row[4:], widths[4:], strict=True))
            lines.append(f"  {left}  {right}".rstrip())
        return "\n".join(lines)
