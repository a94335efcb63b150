"""Pair memory: bytes that only a pair of choices holds, such as a reshard's source beside its result.

Where a schedule showed that they matter, a node is added between the two nodes of the pair. Its choices are the bytes that the pair holds
while one operator runs, beyond what ``memory_items`` counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar import pricing
from autopar.cost_models import Machine
from autopar.cost_models.collectives import STEP_KINDS
from autopar.graph import DTYPE_BYTES, Tensor
from autopar.reshard import cuts_inside, find_reshard, joins_inside
from autopar.rules import repeats
from autopar.search.ilp.memory_items import is_written_over
from autopar.search.ilp.model import Edge, Model
from autopar.sharding import ShardingSpec
from autopar.solvers import INFINITE


@dataclass(frozen=True)
class PairCost:
    """A node between the nodes ``source`` and ``target`` of the problem.

    Args:
        time: the time at which the bytes are held.
        levels: bytes of each choice.
        from_source, to_target: 0 where choices go together, else forbidden; shapes [source, levels] and [levels, target].
    """

    source: int
    target: int
    time: int
    levels: tuple[int, ...]
    from_source: np.ndarray
    to_target: np.ndarray

    def least_choice(self, choices: np.ndarray) -> int:
        """The choice of least bytes that goes with ``choices``."""
        fits = (self.from_source[choices[self.source]] == 0) & (self.to_target[:, choices[self.target]] == 0)
        return int(min(np.flatnonzero(fits), key=lambda number: self.levels[number]))


def find_pairs(model: Model, choices: np.ndarray, time: int, times: Mapping[str, int]) -> list[PairCost]:
    """A node for each reshard that may run just before the operator at ``time`` and may hold more than is counted.

    Args:
        choices: one per node. The operator's results are taken to be as large as in these.
    """
    space = model.space
    op = next(op for op in space.graph.ops if times[op.name] == time)
    number = model.node_number["op", op.name]
    strategy = space.op_choices(op).strategies[choices[number]]
    results = [(name, spec) for name, spec in zip(op.outputs, strategy.outputs, strict=True) if not is_written_over(model, name, times)]
    made = sum(pricing.local_bytes(space.graph.tensors[name], spec, space.machine) for name, spec in results)
    found = []
    for edge in _edges_before(model, number, time):
        extra = _extra_bytes(model, edge, made, _outlives(model, edge, time))
        if extra.any():
            found.append(_make_pair(edge, extra, time))
    return found


def _edges_before(model: Model, number: int, time: int) -> list[Edge]:
    """Edges whose reshards run just before an operator: those of its own reads, and of layouts that it reads first."""
    found: dict[int, Edge] = {}
    for index in model.incoming[number]:
        edge = model.edges[index]
        found[index] = edge
        source = model.nodes[edge.source]
        if source.kind == "layout":
            early, late = model.sites[source.name].phases(model.space.graph)
            readers = early if source.phase == "forward" else late
            if min(reader.time for reader in readers) == time:
                found.update((other, model.edges[other]) for other in model.incoming[edge.source])
    return [edge for edge in found.values() if edge.tensor is not None]


def _outlives(model: Model, edge: Edge, time: int) -> bool:
    """Whether the reshard's source lives on after the operator at ``time``."""
    source = model.nodes[edge.source]
    if source.kind == "input":
        return True
    if source.kind != "layout" or model.nodes[edge.target].kind == "layout":
        return False
    early, late = model.sites[source.name].phases(model.space.graph)
    return any(reader.time > time for reader in (early if source.phase == "forward" else late))


def _extra_bytes(model: Model, edge: Edge, made: int, stays: bool) -> np.ndarray:
    """Bytes beyond those of the target and ``made``, for each pair of choices; shape [sources, targets]."""
    assert edge.tensor is not None
    known: dict[tuple[ShardingSpec, ShardingSpec], int] = {}
    sources, targets = tuple(dict.fromkeys(edge.sources)), tuple(dict.fromkeys(edge.targets))
    dims, machine = model.repeated(edge.source, edge.tensor), model.space.machine
    for source, whole in zip(sources, model.space.stored_bytes(edge.tensor.name, sources), strict=True):
        beside, again = whole if stays else 0, repeats(source.local_shape(edge.tensor.shape, model.space.sizes), dims)
        for target, stored in zip(targets, model.space.stored_bytes(edge.tensor.name, targets), strict=True):
            if source != target:
                most = _peak_bytes(edge.tensor, source, target, machine, whole if again else None)
                known[source, target] = beside + max(most - stored - made - beside, 0)
    return np.array([[known.get((source, target), 0) for target in edge.targets] for source in edge.sources], dtype=np.int64)


def _peak_bytes(tensor: Tensor, source: ShardingSpec, target: ShardingSpec, machine: Machine, stored: int | None) -> int:
    """The most bytes held at once while a reshard runs, its source included. An all-reduce writes over its source.

    Args:
        stored: bytes of the source where it is a view that repeats, which is copied to travel.
    """
    size = DTYPE_BYTES[tensor.dtype]
    found = find_reshard(tensor.shape, size, source, target, machine)
    most = 0
    for step, shapes in zip(found.steps, found.shapes, strict=True) if found is not None else ():
        before, sent, came, after = (math.prod(shape) * size for shape in (shapes.source, shapes.sent, shapes.came, shapes.target))
        filled, reduces = step.is_collective and shapes.filled, STEP_KINDS[step.kind].in_place
        packs = filled or cuts_inside(step, shapes.sent) or (step.is_collective and stored is not None and not reduces)
        staging = (sent if packs else 0) + (came if filled or joins_inside(step, shapes.came) else 0)
        before = 0 if reduces and not filled and stored is None else before if stored is None else stored
        most, stored = max(most, before + after + staging), None
    return most


def _make_pair(edge: Edge, extra: np.ndarray, time: int) -> PairCost:
    """The node of one edge. Targets with equal bytes from every source share choices, one for each number of bytes."""
    looks: dict[bytes, int] = {}
    look = np.array([looks.setdefault(column.tobytes(), len(looks)) for column in np.ascontiguousarray(extra.T)])
    columns = [extra[:, np.flatnonzero(look == number)[0]] for number in range(len(looks))]
    chosen = [(number, int(level)) for number, column in enumerate(columns) for level in np.unique(column)]
    from_source = np.stack([np.where(columns[number] <= level, 0, INFINITE) for number, level in chosen], axis=1)
    to_target = np.stack([np.where(look == number, 0, INFINITE) for number, _ in chosen])
    levels = tuple(level for _, level in chosen)
    return PairCost(edge.source, edge.target, time, levels, from_source.astype(np.int64), to_target.astype(np.int64))
