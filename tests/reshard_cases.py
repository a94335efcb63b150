"""Reshard pairs with what is known of them, shared by the tests and by ``benchmarks/reshard.py``."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from autopar.cost_models import Hardware, Link, Machine, Mesh
from autopar.reshard import Reshard
from autopar.sharding import ShardingSpec, splits


@dataclass(frozen=True)
class Case:
    """Bytes each rank receives, as fractions of the tensor: ``best`` known, and ``bound``, the target block minus what is held."""

    mesh: str
    source: str
    target: str
    best: float
    bound: float


CASES = (
    Case("2x2", "S0 S1", "S1 S0", 0.25, 0.25),
    Case("4x2", "S0 S1", "S1 S0", 0.1875, 0.125),
    Case("2x8", "S0 S1", "S1 S0", 0.1094, 0.0625),
    Case("16x8", "S0 S1", "S1 S0", 0.0117, 0.0078),
    Case("4x4", "R S01 R", "S01 R R", 0.0586, 0.0586),
    Case("2x2", "R S01", "S01 R", 0.1875, 0.1875),
    Case("2x4", "S01 R", "R S01", 0.1094, 0.1094),
    Case("2x4", "S01 R", "S0 S1", 0.0938, 0.0938),
    Case("2x4", "S0 R", "S1 R", 0.25, 0.25),
    Case("2x4", "S1 R", "S0 R", 0.5, 0.5),
    Case("2x2", "S0 R", "R S1", 0.25, 0.25),
    Case("2x4", "S1 R", "S01 R", 0.125, 0.125),
    Case("2x4", "S01 R", "S1 R", 0.25, 0.25),
    Case("2x4", "S01 R", "S10 R", 0.125, 0.125),
    Case("2x2x2", "S1 S0 R", "R R S01", 0.25, 0.1875),
    Case("2x2x2", "S01 R", "S2 R", 0.5, 0.5),
    Case("4x2x4", "R S10 R", "S0 R S1", 0.1387, 0.1094),
    Case("2x4", "S0 R", "S01 R", 0.0, 0.0),
)
"""Published comparisons of reshard planners; ``best`` is a search by bytes alone over the moves of ``autopar.reshard.search``."""


def machine(mesh: str, latency: float = 0.0, bandwidth: float = 1.0, **axes: Link) -> Machine:
    """A machine whose links are all alike, except for the named axes."""
    link = Link(latency, bandwidth)
    hardware = Hardware("plain", 1e9, 1e12, 0.0, (("float32", 1e12),), 1 << 20, link, link, tuple(axes.items()))
    return Machine(Mesh.parse(mesh), hardware, "communication")


def all_specs(shape: tuple[int, ...], sizes: tuple[int, ...], reduction: str = "sum", *, uneven: bool = False) -> list[ShardingSpec]:
    """Every legal spec, in unequal parts too if asked, with every choice of the free axes partial."""
    found = []
    for spec in splits(shape, sizes, frozenset(range(len(shape))) if uneven else frozenset()):
        free = [axis for axis, size in enumerate(sizes) if size > 1 and axis not in spec.split_axes]
        for count in range(len(free) + 1):
            found += [ShardingSpec(spec.dims, tuple((axis, reduction) for axis in some)) for some in itertools.combinations(free, count)]
    return found


def box(spec: ShardingSpec, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The part of the tensor that ``rank`` holds."""
    spans = (spec.span(dim, extent, mesh.sizes, mesh.coordinates(rank)) for dim, extent in enumerate(shape))
    return tuple(slice(start, start + length) for start, length in spans)


def scatter(value: np.ndarray, spec: ShardingSpec, mesh: Mesh) -> list[np.ndarray]:
    """The blocks of all ranks. Of a partial value, rank r of n holds summands that add up to the value (or have it as their max or min)."""
    blocks = []
    for rank in range(mesh.ranks):
        block, at = value[box(spec, value.shape, mesh, rank)].copy(), mesh.coordinates(rank)
        for axis, reduction in spec.partial:
            others = range(mesh.sizes[axis] - 1)
            last = at[axis] == len(others)
            if reduction == "sum":
                block = block * (1 - sum(axis + 2 + other for other in others) if last else axis + 2 + at[axis])
            elif not last:
                block = block + (-1 - at[axis] if reduction == "max" else 1 + at[axis])
        blocks.append(block)
    return blocks


REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def simulate(plan: Reshard, mesh: Mesh, blocks: list[np.ndarray]) -> list[np.ndarray]:
    """Runs the steps on the blocks of all ranks, by their definitions."""
    for step in plan.steps:
        if step.kind == "permute":
            assert sorted(step.sources) == list(range(mesh.ranks))
            blocks = [blocks[source] for source in step.sources]
            continue
        parts = math.prod(part.size for part in step.axes)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.ranks):
            at = list(mesh.coordinates(rank))
            for part in step.axes:
                size = mesh.sizes[part.axis]
                at[part.axis] -= part.coordinate(mesh.coordinates(rank)[part.axis], size) * (size // (part.outer * part.size))
            groups.setdefault(tuple(at), []).append(rank)
        after = list(blocks)
        for members in groups.values():
            ranks = sorted(members, key=lambda rank: mesh.index(rank, step.axes))
            assert len(ranks) == parts
            have = [blocks[rank] for rank in ranks]
            for index, rank in enumerate(ranks):
                after[rank] = _one(step.kind, step.dims, step.reduction, have, index)
        blocks = after
    return blocks


def _one(kind: str, dims: tuple[int, ...], reduction: str, have: list[np.ndarray], index: int) -> np.ndarray:
    parts = len(have)
    if kind == "mask":
        return have[index] if index == 0 else np.zeros_like(have[index])
    if kind == "slice":
        return np.split(have[index], parts, dims[0])[index]
    if kind == "all_gather":
        return np.concatenate(have, dims[0])
    if kind == "all_to_all":
        return np.concatenate([np.split(block, parts, dims[1])[index] for block in have], dims[0])
    total = have[0]
    for block in have[1:]:
        total = REDUCE[reduction](total, block)
    return total if kind == "all_reduce" else np.split(total, parts, dims[0])[index]


def gather_then_slice(shape: tuple[int, ...], itemsize: int, source: ShardingSpec, target: ShardingSpec, on: Machine) -> float:
    """Seconds of reducing every pending axis, gathering every dim, and slicing."""
    sizes = on.mesh.sizes
    block = math.prod(source.local_shape(shape, sizes)) * itemsize
    seconds = 0.0
    kept = set(target.partial_axes) & set(source.partial_axes)
    pending = [on.mesh.whole(axis) for axis, _ in source.partial if axis not in kept]
    if pending:
        seconds += on.collective_seconds("all_reduce", block, pending)
    for axes in source.dims:
        if axes:
            parts = [on.mesh.whole(axis) for axis in axes]
            block *= math.prod(part.size for part in parts)
            seconds += on.collective_seconds("all_gather", block, parts)
    return seconds


def exhaustive(shape: tuple[int, ...], itemsize: int, source: ShardingSpec, target: ShardingSpec, on: Machine) -> float:
    """Seconds of the cheapest way, by Dijkstra over prime sub-axes without any bound or short cut. Slow; for small meshes.

    Independent of the planner but for the machine's prices.
    """
    sizes = on.mesh.sizes
    primes = {axis: _prime_parts(axis, size) for axis, size in enumerate(sizes)}
    kept = set(target.partial_axes) & set(source.partial_axes)
    spell = lambda axes: tuple(part for axis in axes for part in primes[axis])  # noqa: E731
    every = [part for axis in primes if axis not in kept for part in primes[axis]]
    start = (tuple(spell(axes) for axes in source.dims), frozenset(spell([a for a, _ in source.partial if a not in kept])))
    goal = (tuple(spell(axes) for axes in target.dims), frozenset())
    count = lambda parts: math.prod(part.size for part in parts)  # noqa: E731
    full, order = math.prod(shape) * itemsize, itertools.count()
    queue, done = [(0.0, next(order), start)], set()
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state == goal:
            return seconds
        dims, partial = state
        block = full / math.prod(count(parts) for parts in dims)
        used = {part for parts in dims for part in parts} | partial
        put = lambda at, parts, dims=dims: tuple(parts if d == at else old for d, old in enumerate(dims))  # noqa: E731
        price = lambda kind, axes, scale=1, block=block: on.collective_seconds(kind, block * scale, axes)  # noqa: E731
        found = [(0.0, (put(d, dims[d] + (part,)), partial)) for d in range(len(dims)) for part in every if part not in used]
        for d, parts in enumerate(dims):
            for cut in range(len(parts)):
                moved, n = parts[cut:], count(parts[cut:])
                rest = put(d, parts[:cut])
                found.append((price("all_gather", moved, n), (rest, partial)))
                for to in range(len(dims)):
                    if to != d:
                        new = tuple(old + moved if e == to else old for e, old in enumerate(rest))
                        found.append((price("all_to_all", moved, n), (new, partial)))
        for size in range(1, len(partial) + 1):
            for moved in itertools.permutations(sorted(partial, key=str), size):
                found.append((price("all_reduce", moved), (dims, partial - set(moved))))
                found += [(price("reduce_scatter", moved), (put(d, dims[d] + moved), partial - set(moved))) for d in range(len(dims))]
        for new in _rearranged([count(parts) for parts in dims], [part for part in every if part not in partial]):
            changed = _placed(dims) ^ _placed(new)
            if changed:
                moved = {part for part, _, _ in changed}
                found.append((price("permute", sorted(moved, key=str), count(moved)), (new, partial)))
        for cost, (new, left) in found:
            if (new, left) not in done and all(extent % count(parts) == 0 for extent, parts in zip(shape, new, strict=True)):
                heapq.heappush(queue, (seconds + cost, next(order), (new, left)))
    raise AssertionError("unreachable")


def _prime_parts(axis: int, size: int) -> list:
    from autopar.cost_models import SubAxis

    parts, outer = [], 1
    for prime in (2, 3, 5, 7):
        while size // outer % prime == 0 and outer < size:
            parts.append(SubAxis(axis, outer, prime))
            outer *= prime
    return parts


def _placed(dims: tuple) -> set:
    return {(part, d, math.prod(p.size for p in parts[:i])) for d, parts in enumerate(dims) for i, part in enumerate(parts)}


def _rearranged(counts: list[int], parts: list) -> list:
    if not counts:
        return [()]
    found = []
    for size in range(len(parts) + 1):
        for first in itertools.permutations(parts, size):
            if math.prod(part.size for part in first) == counts[0]:
                found += [(first, *rest) for rest in _rearranged(counts[1:], [part for part in parts if part not in first])]
    return found
