"""Memory of a rank over the step: bytes that each instruction of the file allocates and frees, added up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.compare.words import pattern
from autopar.cost_models.collectives import KINDS
from autopar.graph import DTYPE_BYTES
from autopar.plan import Plan
from autopar.rows import CollectivePlan, InstructionPlan, TensorSpec
from autopar.sharding import ShardingSpec

BUFFERS = "buffers of collectives"


@dataclass(frozen=True)
class Held:
    """Bytes on a rank.

    Args:
        levels: while each instruction of the schedule runs, all that rests counted.
        peak: the place of the highest level.
        parts: what is held there, by name, the largest first; equal layers as one.
    """

    levels: tuple[int, ...]
    peak: int
    parts: tuple[tuple[str, int], ...]


def held(plan: Plan) -> Held:
    """Follows the storages through the schedule; views share them, as the targets of one call share its buffer."""
    resting = _resting(plan)
    walk = _Walk(plan, sum(resting.values()))
    levels = tuple(map(walk.pass_by, plan.schedule))
    peak = levels.index(max(levels, default=0)) if levels else 0
    again = _Walk(plan, 0)
    for row in plan.schedule[:peak]:
        again.pass_by(row)
    for row in plan.schedule[peak : peak + 1]:
        again.take(row)
    parts = dict(resting)
    for storage, size in [*again.live.items(), *((BUFFERS, size) for size in again.staged.values())]:
        name = again.label.get(storage, storage)
        parts[name] = parts.get(name, 0) + size
    return Held(levels, peak, tuple(sorted(((name, size) for name, size in parts.items() if size), key=lambda item: -item[1])))


def _resting(plan: Plan) -> dict[str, int]:
    """Bytes that stay for the whole step."""
    tables: tuple[tuple[str, Mapping[str, TensorSpec]], ...] = (
        ("parameters", plan.parameters), ("buffers", {**plan.buffers, **plan.constants}), ("inputs", {**plan.inputs, **plan.tangents}),
    )  # fmt: skip
    found = {name: sum(_bytes(row, plan) for row in table.values()) for name, table in tables}
    found["inputs"] = sum(plan.parts(row.tensor) * _bytes(row, plan) for row in (*plan.inputs.values(), *plan.tangents.values()))
    found["sums over microbatches"] = sum(_sums(plan).values())
    return {name: size for name, size in {**found, "optimizer": plan.predicted.memory.optimizer}.items() if size}


def _sums(plan: Plan) -> dict[str, int]:
    """Bytes of what gradients of microbatches are summed in, there from the beginning of the last on."""
    added = {row.reads[0]: row.writes[0] for row in plan.schedule if row.kind == "add"}
    made: dict[str, TensorSpec] = {  # another stage may have made a gradient
        entry.tensor: entry for entry in (*plan.inputs.values(), *plan.tangents.values())
    }
    made |= {entry.value or entry.tensor: entry for row in plan.ops for entry in row.outputs}
    specs = {row.value: made[row.tensor].model_copy(update={"spec": row.to_spec}) for row in plan.reshards if row.tensor in made}
    return {total: _bytes((made | specs)[value], plan) for value, total in added.items()}


def _bytes(row: TensorSpec, plan: Plan) -> int:
    size = DTYPE_BYTES.get(row.dtype, 0)
    for extent in ShardingSpec.parse(row.spec).local_shape(row.shape, plan.sizes):
        size *= extent
    return size


def _result(row: CollectivePlan, plan: Plan) -> int:
    """Bytes of what a call leaves on a rank: of the full tensor, or of the group's part of it. A sub-axis ends in its size: ``tp:(2)4``."""
    if KINDS[row.kind].leaves_full:
        return row.bytes
    return row.bytes // math.prod(plan.mesh[axis] if axis in plan.mesh else int(axis.rpartition(")")[2]) for axis in row.axes)


class _Walk:
    """The schedule row by row. A free says what it gives back where it ends a storage; the buffers of a call end with its wait."""

    def __init__(self, plan: Plan, resting: int) -> None:
        self.level = resting
        self.live: dict[str, int] = {}
        self.label: dict[str, str] = {}
        self.staged: dict[str, int] = {}
        self.owner: dict[str, str] = {}
        self.names = {row.name: f"{pattern(row.module)}: {row.op.split('.')[1]}".removeprefix(": ") for row in plan.ops}
        self.gradients = {row.value or row.tensor for row in plan.gradients}
        copied = {row.of for row in plan.schedule if row.kind == "wait" and row.bytes}
        self.kept = {row.id: 0 if row.id in copied else _result(row, plan) for row in plan.collectives if row.id is not None}
        self.kept |= {row.id: row.bytes if row.kind == "from_host" else 0 for row in plan.copies}

    def pass_by(self, row: InstructionPlan) -> int:
        """One row; the level while it runs."""
        self.take(row)
        level = self.level
        if row.kind == "free":
            self.level -= row.bytes
            for value in row.reads:
                self._give(self.owner.get(value, value), row.bytes)
        elif row.kind == "wait":
            self.level -= self.staged.pop(row.of, 0)
        return level

    def take(self, row: InstructionPlan) -> None:
        """Bytes that a row allocates, before it frees any."""
        if row.kind in ("free", "add") or not row.writes:
            return
        if not row.bytes:
            source = self.owner.get(row.reads[0], row.reads[0]) if row.reads else row.writes[0]
            for value in row.writes:
                self.owner.setdefault(value, source)
            return
        self.level += row.bytes
        kept = min(self.kept[row.of], row.bytes) if row.kind == "start" else row.bytes
        if kept < row.bytes:
            self.staged[row.of] = row.bytes - kept
        if kept:
            storage = row.writes[0]
            self.live[storage], self.label[storage] = kept, self._name(row, storage)
            self.owner.update(dict.fromkeys(row.writes, storage))

    def _give(self, storage: str, size: int) -> None:
        left = self.live.get(storage, 0) - size
        if left > 0:
            self.live[storage] = left
        else:
            self.live.pop(storage, None)

    def _name(self, row: InstructionPlan, storage: str) -> str:
        """The name of a storage: of a result its module and operator, of a moved tensor the tensor."""
        if storage in self.gradients:
            return "gradients"
        if row.kind == "run":
            return self.names.get(row.of, row.of)
        tensor = storage.partition("@")[0]
        return f"{self.names.get(tensor, pattern(tensor))}, moved"
