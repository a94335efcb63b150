"""From specs to a search question, and from its moves back to steps that ranks can run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from autopar.cost_models import Machine, SubAxis
from autopar.cost_models.collectives import KINDS, STEP_KINDS
from autopar.reshard import search, trees
from autopar.reshard.cuts import MOST_PRIMES, cuts, joined, prime_cut
from autopar.reshard.moves import Move, Question, Way
from autopar.reshard.permutation import Placed, moving_parts, permute_sources
from autopar.reshard.steps import Reshard, Step, filled_up, halfway
from autopar.sharding import ShardingSpec

Moves = tuple[tuple[Move, ...], tuple[SubAxis, ...], tuple[int, ...]]
FINE_AXES = 2
"""Axes of more than one rank up to which reshards may move parts of axes."""
FINE_PARTS = 2
"""Parts that links cut the axes in up to which they may."""


@lru_cache(maxsize=1 << 20)
def find_reshard(
    shape: tuple[int, ...], itemsize: int, source: ShardingSpec, target: ShardingSpec, machine: Machine, fine: bool | None = None
) -> Reshard | None:
    """The cheapest way to turn ``source`` into ``target``; None when there is none.

    Args:
        shape: of the whole tensor.
        itemsize: bytes of an element.
        source, target: legal specs of the tensor on the machine's mesh, without axes of size 1.
        machine: whose links the seconds are for.
        fine: also move parts of axes; by default where ``is_fine`` says so. Elsewhere it takes tens of times longer for one or two
            percent.

    A value that is whole over an axis becomes a partial sum over it for nothing (one rank keeps it, the others hold zeros).
    There is none when the target is partial by another reduction than a sum over an axis that the source is not, or when axes with
    different reductions are pending and one of them has to be done (their order would change the value). A dim that is whole ``halfway`` is
    gathered, and cut then.
    """
    middle = halfway(shape, source, target, machine.mesh.sizes)
    if middle is not None:
        return _by_way_of(middle, shape, itemsize, source, target, machine, fine)
    if fine is None:
        fine = is_fine(machine)
    names = None if fine else renaming(source, target, machine)
    asked = (source, target) if names is None else (source.renamed(names), target.renamed(names))
    plan = find_moves(shape, itemsize, *asked, machine, fine)
    if plan is None:
        return None
    moves, parts, order = plan
    if names is not None:
        back = {new: old for old, new in enumerate(names)}
        parts = tuple([SubAxis(back[part.axis], part.outer, part.size) for part in parts])
    full = math.prod(filled_up(shape, source, target, machine.mesh.sizes)) * itemsize
    reduction = next((reduction for axis, reduction in source.partial if axis not in target.partial_axes), "")
    steps = tuple([_step(move, parts, order, full, reduction, machine) for move in moves])
    masked = tuple([axis for axis, reduction in target.partial if axis not in source.partial_axes])
    if masked:
        steps += (Step("mask", tuple(machine.mesh.whole(axis) for axis in masked), (), "sum"),)
    return Reshard(
        shape,
        itemsize,
        source,
        target,
        steps,
        sum([step.seconds for step in steps]),
        sum([step.received_bytes_per_rank for step in steps]),
        machine.mesh,
    )


def _by_way_of(
    middle: ShardingSpec, shape: tuple[int, ...], itemsize: int, source: ShardingSpec, target: ShardingSpec, machine: Machine,
    fine: bool | None,
) -> Reshard | None:  # fmt: skip
    """Two reshards as one."""
    first = find_reshard(shape, itemsize, source, middle, machine, fine)
    second = find_reshard(shape, itemsize, middle, target, machine, fine)
    if first is None or second is None:
        return None
    return Reshard(
        shape, itemsize, source, target, first.steps + second.steps, first.seconds + second.seconds,
        first.received_bytes_per_rank + second.received_bytes_per_rank, machine.mesh, (first, second),
    )  # fmt: skip


def has_way(source: ShardingSpec, target: ShardingSpec) -> bool:
    """Whether something turns ``source`` into ``target``: ``find_reshard`` says when nothing does.

    >>> whole, summed, largest = (ShardingSpec.parse(text) for text in ("R", "R +P0", "R +P0max"))
    >>> has_way(summed, whole), has_way(whole, summed), has_way(whole, largest)
    (True, True, False)
    """
    pending = dict(source.partial)
    if any(pending.get(axis, "sum") != reduction for axis, reduction in target.partial):
        return False
    return pending.keys() <= set(target.partial_axes) or len(set(pending.values())) == 1


@lru_cache(maxsize=256)
def is_fine(machine: Machine) -> bool:
    """Whether reshards move parts of axes where nobody says so: where links cut the axes in few parts, or all primes are few."""
    axes = sum(size > 1 for size in machine.mesh.sizes)
    return axes <= FINE_AXES and (len(cuts(machine, fine=False)[0].parts) <= FINE_PARTS or len(prime_cut(machine).parts) <= MOST_PRIMES)


def renaming(source: ShardingSpec, target: ShardingSpec, machine: Machine) -> tuple[int, ...] | None:
    """For each axis the one that stands for it: axes alike (in size and links) are named in the order in which the two specs use them,
    so that pairs of specs that differ in such names alone are planned, and priced, once. None where every axis stands for itself."""
    groups = alike(machine)
    if not groups:
        return None
    names = list(range(len(machine.mesh.sizes)))
    used = dict.fromkeys((*source.split_axes, *source.partial_axes, *target.split_axes, *target.partial_axes))
    same = True
    for group in groups:
        order = [axis for axis in used if axis in group]
        if len(order) < len(group):
            order += [axis for axis in group if axis not in used]
        for axis, name in zip(order, group, strict=True):
            names[axis] = name
            same &= axis == name
    return None if same else tuple(names)


@lru_cache(maxsize=256)
def alike(machine: Machine) -> tuple[tuple[int, ...], ...]:
    """Axes of more than one rank that no price tells apart, in groups of two or more."""
    groups: dict[object, list[int]] = {}
    for axis, size in enumerate(machine.mesh.sizes):
        parts = machine.mesh.whole(axis).primes
        if parts:
            links = tuple((machine.link_name(part), machine.link(part)) for part in parts)
            groups.setdefault((size, links), []).append(axis)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


@lru_cache(maxsize=1 << 20)
def find_moves(
    shape: tuple[int, ...], itemsize: int, source: ShardingSpec, target: ShardingSpec, machine: Machine, fine: bool
) -> Moves | None:
    """The moves, the parts of axes that their letters stand for, and the tensor's dims in their order; None where there is no way.

    Unequal parts travel filled up to equal ones: the moves are those of a tensor that is as long. No dim is whole ``halfway``.
    """
    filled = filled_up(shape, source, target, machine.mesh.sizes)
    if filled != shape:
        return find_moves(filled, itemsize, source, target, machine, fine)
    if not has_way(source, target):
        return None
    kept = [axis for axis in target.partial_axes if axis in source.partial_axes]
    reduced = [axis for axis in source.partial_axes if axis not in kept]
    whole = math.prod(size for axis, size in enumerate(machine.mesh.sizes) if axis not in kept)
    full = math.prod(shape) * itemsize
    order = sorted(range(len(shape)), key=lambda dim: (source.dims[dim], target.dims[dim], math.gcd(shape[dim], whole)))
    capacities = tuple([math.gcd(shape[dim], whole) for dim in order])
    best, parts = Way((), math.inf), tuple[SubAxis, ...]()
    for cut in cuts(machine, tuple(kept), fine):
        before, after = (tuple([cut.spell(spec.dims[dim]) for dim in order]) for spec in (source, target))
        question = Question(cut.alphabet, capacities, before, after, cut.spell(reduced), float(full), best.seconds)
        way = trees.solve(question) if trees.listed(cut.alphabet, capacities) else search.solve(question)
        if way is not None and way.seconds < best.seconds * (1 - 1e-9):
            best, parts = way, cut.parts
        if not best.seconds:
            break
    assert not math.isinf(best.seconds), "gathering everything and slicing is always possible"
    return tuple(_merged(best.moves)), parts, tuple(order)


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


def collective(move: Move, parts: tuple[SubAxis, ...], full: float, machine: Machine) -> tuple[tuple[SubAxis, ...], float, float]:
    """The parts of axes that a move runs over, joined, the bytes of the tensor on its group, and its seconds.

    Args:
        parts: what the letters of the move stand for.
        full: bytes of the whole tensor.
    """
    moved = [parts[letter] for letter in move.letters]
    kind = STEP_KINDS[move.kind]
    if kind.pairs:
        moved = list(moving_parts(*_placed(move, parts)))
    elif not kind.ordered:
        moved.sort(key=lambda part: (part.axis, part.outer))
    axes = joined(moved)
    scale = math.prod(part.size for part in axes) if move.kind in KINDS and not kind.takes_full else 1
    on_group = full / math.prod(parts[letter].size for letters in move.before for letter in letters) * scale
    return axes, on_group, machine.collective_seconds(move.kind, on_group, axes)


def _placed(move: Move, parts: tuple[SubAxis, ...]) -> tuple[Placed, Placed]:
    before, after = (tuple(tuple(parts[letter] for letter in letters) for letters in layout) for layout in (move.before, move.after))
    return before, after


def _step(move: Move, parts: tuple[SubAxis, ...], order: Sequence[int], full: int, reduction: str, machine: Machine) -> Step:
    axes, on_group, seconds = collective(move, parts, full, machine)
    return Step(
        move.kind,
        axes,
        tuple(order[dim] for dim in move.dims),
        reduction if STEP_KINDS[move.kind].reduces else "",
        permute_sources(machine.mesh, *_placed(move, parts)) if STEP_KINDS[move.kind].pairs else (),
        on_group,
        machine.received_bytes(move.kind, on_group, math.prod(part.size for part in axes)),
        seconds,
    )
