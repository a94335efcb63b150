"""Step and Reshard: what turns one sharding spec into another, and its price."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autopar.sharding import ShardingSpec
from cost_models import Mesh, SubAxis


@dataclass(frozen=True)
class Step:
    """One collective, or a local step that moves nothing (slice, mask). A rank's group is the ranks that differ from it along ``axes``
    alone, in row-major order over ``axes`` (the first is major); n is its size and ``index`` a rank's position in it.

    Args:
        kind: ``slice`` (narrow a dim to part ``index`` of n), ``all_gather`` (concatenate the group's tensors along a dim),
            ``reduce_scatter`` (reduce over the group, keep part ``index`` of a dim), ``all_reduce``, ``all_to_all`` (split
            the second dim in n, exchange, concatenate along the first), ``permute`` (receive another rank's block) or ``mask``
            (a replicated value becomes a partial sum: ``index`` 0 keeps it, the others hold zeros).
        axes: the parts of mesh axes that it runs over.
        dims: the tensor dim it works on; (from, to) of an all-to-all; none for all_reduce and permute.
        reduction: ``sum``, ``max`` or ``min``; empty when nothing is reduced.
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
        """False for what each rank does alone, at no cost."""
        return self.kind not in ("slice", "mask")


@dataclass(frozen=True)
class Reshard:
    """The cheapest known way from ``source`` to ``target``.

    Args:
        shape: of the whole tensor.
        itemsize: bytes of an element.
        source, target: the specs.
        steps: in order; empty when nothing is to be done.
        seconds: of all steps.
        received_bytes_per_rank: of all steps.
        mesh: the mesh it is for.
    """

    shape: tuple[int, ...]
    itemsize: int
    source: ShardingSpec
    target: ShardingSpec
    steps: tuple[Step, ...]
    seconds: float
    received_bytes_per_rank: float
    mesh: Mesh

    @cached_property
    def temporary_bytes(self) -> int:
        """Most bytes that a rank holds beside source and target while the steps run: values between steps, and copies.

        Blocks are exchanged as runs of memory, so a dim with others before it is cut, or joined, by a copy.
        """
        shape = list(self.source.local_shape(self.shape, self.mesh.sizes))
        final = math.prod(self.target.local_shape(self.shape, self.mesh.sizes)) * self.itemsize
        most = 0
        for number, step in enumerate(self.steps):
            parts, before = math.prod(part.size for part in step.axes), math.prod(shape) * self.itemsize
            copies = 0
            if step.kind in ("reduce_scatter", "all_to_all") and math.prod(shape[: step.dims[-1]]) > 1:
                copies += before
            if step.kind in ("slice", "reduce_scatter", "all_to_all"):
                shape[step.dims[-1]] //= parts
            if step.kind in ("all_gather", "all_to_all"):
                shape[step.dims[0]] *= parts
            after = math.prod(shape) * self.itemsize
            if step.kind in ("all_gather", "all_to_all") and math.prod(shape[: step.dims[0]]) > 1:
                copies += after
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
