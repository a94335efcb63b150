"""From specs to a search question, and from its moves back to steps that ranks can run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from autopar.reshard.search import Letter, Letters, Move, Question, solve
from autopar.reshard.steps import Reshard, Step
from autopar.sharding import ShardingSpec
from cost_models import Machine, Mesh, SubAxis


@lru_cache(maxsize=1 << 18)
def find_reshard(shape: tuple[int, ...], itemsize: int, source: ShardingSpec, target: ShardingSpec, machine: Machine) -> Reshard | None:
    """The cheapest way to turn ``source`` into ``target``; None when there is none.

    Args:
        shape: of the whole tensor.
        itemsize: bytes of an element.
        source, target: legal specs of the tensor on the machine's mesh, without axes of size 1.
        machine: whose links the seconds are for.

    There is none when the target is partial over an axis that the source is not, or when axes with different
    reductions are pending and one of them has to be done (their order would change the value).
    """
    pending = dict(source.partial)
    kept = dict(target.partial)
    if any(pending.get(axis) != reduction for axis, reduction in kept.items()):
        return None
    reduced = {axis: reduction for axis, reduction in pending.items() if axis not in kept}
    if reduced and len(set(pending.values())) > 1:
        return None
    parts = tuple(part for axis, part_list in enumerate(_alphabet(machine.mesh)) for part in part_list if axis not in kept)
    number = {part: index for index, part in enumerate(parts)}
    groups = [machine.group((part,)) for part in parts]
    per_axis = [tuple(number[part] for part in part_list if part in number) for part_list in _alphabet(machine.mesh)]

    def spelled(axes: Iterable[int]) -> Letters:
        return tuple(itertools.chain.from_iterable(per_axis[axis] for axis in axes))

    letters = tuple(Letter(group.size, group.latency, 1 / group.bandwidth) for group in groups)
    whole = math.prod(group.size for group in groups)
    order = sorted(range(len(shape)), key=lambda dim: (source.dims[dim], target.dims[dim], math.gcd(shape[dim], whole)))
    moves = solve(
        Question(
            letters,
            tuple(math.gcd(shape[dim], whole) for dim in order),
            tuple(spelled(source.dims[dim]) for dim in order),
            tuple(spelled(target.dims[dim]) for dim in order),
            spelled(reduced),
            float(math.prod(shape) * itemsize),
        )
    )
    reduction = next(iter(reduced.values()), "")
    full = math.prod(shape) * itemsize
    steps = tuple(_step(move, parts, order, full, reduction, machine) for move in _merged(moves))
    return Reshard(
        shape,
        itemsize,
        source,
        target,
        steps,
        sum(step.seconds for step in steps),
        sum(step.received_bytes_per_rank for step in steps),
        machine.mesh,
    )


@lru_cache
def _alphabet(mesh: Mesh) -> tuple[tuple[SubAxis, ...], ...]:
    """For each axis its prime sub-axes, major to minor."""
    found = []
    for axis, size in enumerate(mesh.sizes):
        parts, outer, prime = [], 1, 2
        while outer < size:
            if size // outer % prime == 0:
                parts.append(SubAxis(axis, outer, prime))
                outer *= prime
            else:
                prime += 1
        found.append(tuple(parts))
    return tuple(found)


def _merged(moves: Sequence[Move]) -> list[Move]:
    """Runs of slices as one slice for each dim."""
    merged: list[Move] = []
    for is_slice, run in itertools.groupby(moves, key=lambda move: move.kind == "slice"):
        if not is_slice:
            merged += run
            continue
        listed = list(run)
        layout = listed[0].before
        for dim in sorted({move.dims[0] for move in listed}):
            letters = tuple(letter for move in listed if move.dims[0] == dim for letter in move.letters)
            after = layout[:dim] + (layout[dim] + letters,) + layout[dim + 1 :]
            merged.append(Move("slice", letters, (dim,), layout, after))
            layout = after
    return merged


def _joined(parts: Sequence[SubAxis]) -> tuple[SubAxis, ...]:
    """Neighbouring parts of one axis as one part."""
    joined: list[SubAxis] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.axis == part.axis and last.outer * last.size == part.outer:
            joined[-1] = SubAxis(last.axis, last.outer, last.size * part.size)
        else:
            joined.append(part)
    return tuple(joined)


def _step(move: Move, parts: tuple[SubAxis, ...], order: Sequence[int], full: int, reduction: str, machine: Machine) -> Step:
    block = full / math.prod(parts[letter].size for letters in move.before for letter in letters)
    sources: tuple[int, ...] = ()
    moved = [parts[letter] for letter in move.letters]
    if move.kind == "permute":
        before, after = (tuple(tuple(parts[letter] for letter in letters) for letters in layout) for layout in (move.before, move.after))
        sources = permute_sources(machine.mesh, before, after)
        changed = {part for part, _, _ in _places(before) ^ _places(after)}
        moved = [part for part in parts if part in changed]
    axes = _joined(moved)
    size = math.prod(part.size for part in axes)
    scale = size if move.kind in ("all_gather", "all_to_all", "permute") else 1
    reduces = move.kind in ("reduce_scatter", "all_reduce")
    return Step(
        move.kind,
        axes,
        tuple(order[dim] for dim in move.dims),
        reduction if reduces else "",
        sources,
        block * scale,
        machine.received_bytes(move.kind, block * scale, size),
        machine.collective_seconds(move.kind, block * scale, axes),
    )


@lru_cache(maxsize=4096)
def permute_sources(mesh: Mesh, before: tuple[tuple[SubAxis, ...], ...], after: tuple[tuple[SubAxis, ...], ...]) -> tuple[int, ...]:
    """For each rank, the rank whose block under ``before`` is its own under ``after``.

    A bijection. A rank that already holds its block keeps it; the others are matched within the ranks that agree on
    every sub-axis that keeps its place, so that no block leaves the group that the permute is priced for.
    """
    touched = _places(before) ^ _places(after)
    changed = {part for part, _, _ in touched}
    keeping = [part for parts in _alphabet(mesh) for part in parts if part not in changed]
    holders: dict[tuple[int, ...], list[int]] = {}
    needs: list[tuple[int, ...]] = []
    for rank in range(mesh.ranks):
        group = mesh.index(rank, keeping)
        holders.setdefault((group, *(mesh.index(rank, parts) for parts in before)), []).append(rank)
        needs.append((group, *(mesh.index(rank, parts) for parts in after)))
    sources = [rank if rank in holders[need] else -1 for rank, need in enumerate(needs)]
    for rank, source in enumerate(sources):
        if source == rank:
            holders[needs[rank]].remove(rank)
    for rank, source in enumerate(sources):
        if source < 0:
            sources[rank] = holders[needs[rank]].pop(0)
    return tuple(sources)


def _places(layout: Sequence[Sequence[SubAxis]]) -> set[tuple[SubAxis, int, int]]:
    """Each sub-axis with its place: the dim it splits and the product of what is outside it there."""
    found = set()
    for dim, parts in enumerate(layout):
        outer = 1
        for part in parts:
            found.add((part, dim, outer))
            outer *= part.size
    return found
