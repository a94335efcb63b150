"""The listed collectives against those that follow from the specs: every step of every reshard in one call, every operator's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest

from autopar.check.differences import Difference, count, seconds
from autopar.check.legs import Call, Leg
from autopar.check.walk import Walk
from autopar.graph import Op
from autopar.reshard import Step
from autopar.rows import CollectivePlan, PartPlan, TransferPlan
from autopar.sharding import InnerCollective

IN_BUCKETS = ("all_reduce", "all_gather", "reduce_scatter")
"""The kinds of which one call may move several values."""


def calls(walk: Walk, found: dict[str, Call]) -> Iterator[Difference]:
    """Takes the calls between operators into ``found``, by id; says what is wrong with any row."""
    legs = {(leg.row.value, leg.number): leg for made in walk.legs.values() for leg in made if leg.is_collective}
    moved: dict[tuple[str, int], str] = {}
    inside: dict[str, list[tuple[str, CollectivePlan]]] = {}
    times = {row.of: row.times(walk.plan.microbatches) for row in walk.plan.schedule if row.kind == "start"}
    in_place = {row.of for row in walk.plan.schedule if row.kind == "start" and row.over is not None}
    for index, row in enumerate(walk.plan.collectives):
        where = f"collectives[{index}]"
        yield from count(f"{where}.times", row.times, times.get(row.id or "", walk.plan.microbatches))
        if row.id is None:
            inside.setdefault(row.before or "", []).append((where, row))
            continue
        if row.id in found:
            yield Difference(where, f"a second collective with the id {row.id}")
        chosen = []
        for part in row.members:
            leg = legs.get((part.value, part.step))
            if leg is None:
                yield Difference(where, f"step {part.step} of the reshard {part.value} is no collective of this plan")
                continue
            if (part.value, part.step) in moved:
                yield Difference(where, f"step {part.step} of the reshard {part.value} is in {moved[part.value, part.step]} already")
            moved[part.value, part.step] = where
            yield from _same_part(where, part, leg, row.parts is not None)
            chosen.append(leg)
        if len(chosen) == len(row.members):
            call = Call(row, tuple(chosen), tuple(leg.step for leg in chosen if leg.step is not None), row.id in in_place)
            found[row.id] = call
            yield from _same_call(walk, where, row, call)
    for index, copy in enumerate(walk.plan.copies):
        yield from _copied(walk, f"transfers[{index}]", copy, legs.get((copy.value, 0)), found, moved)
    for (value, number), leg in legs.items():
        if leg.is_transfer and (value, number) not in moved:
            yield Difference("transfers", f"missing: the copy that makes {value}")
        elif (value, number) not in moved and leg.step is not None:
            yield Difference("collectives", f"missing: step {number} of the reshard {value}, {_step(walk, leg.step)}")
    for op in walk.ops:
        yield from _inside(walk, op, inside.pop(op.name, []))
    for rows in inside.values():
        yield Difference(rows[0][0], f"it is inside the operator {rows[0][1].before}, which the plan does not have")


def _copied(
    walk: Walk, where: str, row: TransferPlan, leg: Leg | None, found: dict[str, Call], moved: dict[tuple[str, int], str]
) -> Iterator[Difference]:  # fmt: skip
    """Takes a copy to the host or back into ``found``; says what is wrong with its row."""
    if leg is None or leg.step is None or not leg.is_transfer:
        yield Difference(where, f"no reshard of this plan copies {row.value} to the host or back")
        return
    if row.id in found or (row.value, 0) in moved:
        yield Difference(where, f"{row.value} is copied twice, or by the name of another call, {row.id}")
    moved[row.value, 0] = where
    found[row.id] = Call(row, (leg,), (leg.step,))
    for key, given, right in (
        ("kind", row.kind, leg.step.kind), ("tensor", row.tensor, leg.row.tensor), ("before", row.before, leg.row.before),
        ("phase", row.phase, leg.row.phase),
    ):  # fmt: skip
        if given != right:
            yield Difference(f"{where}.{key}", f"{given!r} in the plan, {right!r} recomputed")
    yield from count(f"{where}.times", row.times, walk.plan.microbatches)
    yield from count(f"{where}.bytes", row.bytes, round(leg.step.full_bytes))
    yield from seconds(f"{where}.seconds", row.seconds, leg.step.seconds)


def in_order(walk: Walk, found: dict[str, Call]) -> Iterator[Difference]:
    """The rows stand in the order of the schedule."""
    wanted: list[str] = []
    for item in walk.plan.schedule:
        if item.kind == "start" and item.of in found and not found[item.of].is_transfer:
            wanted.append(item.of)
        elif item.kind == "run" and item.of in walk.strategies:
            wanted += [f"inside {item.of}"] * len(walk.strategies[item.of].inner)
    listed = [row.id if row.id is not None else f"inside {row.before}" for row in walk.plan.collectives]
    for index, (name, right) in enumerate(zip(listed, wanted, strict=False)):
        if name != right:
            yield Difference(f"collectives[{index}]", f"it is {name}; by the schedule {right} comes here", runs=True)
            break
    copies = [item.of for item in walk.plan.schedule if item.kind == "start" and item.of in found and found[item.of].is_transfer]
    for index, (row, right) in enumerate(zip(walk.plan.copies, copies, strict=False)):
        if row.id != right:
            yield Difference(f"transfers[{index}]", f"it is {row.id}; by the schedule {right} comes here", runs=True)
            break


def _same_part(where: str, part: PartPlan, leg: Leg, several: bool) -> Iterator[Difference]:
    """What a row says of one value; the bytes of one alone are those of the call."""
    row = leg.row
    assert leg.step is not None
    for key, given, right in (
        ("tensor", part.tensor, row.tensor), ("from", part.from_spec, row.from_spec), ("to", part.to_spec, row.to_spec),
        ("before", part.before, row.before), ("bytes", part.bytes, round(leg.step.full_bytes)),
    ):  # fmt: skip
        if given != right and (several or key != "bytes"):
            yield Difference(f"{where}.{key}", f"{given!r} for {part.value} in the plan, {right!r} recomputed", runs=key == "bytes")


def _same_call(walk: Walk, where: str, row: CollectivePlan, call: Call) -> Iterator[Difference]:
    first = call.first
    for leg, step in zip(call.legs, call.steps, strict=True):
        if (step.kind, _axes(walk, step)) != (row.kind, row.axes):
            yield Difference(where, f"{row.kind} over {','.join(row.axes)} in the plan; {leg.row.value} needs {_step(walk, step)}")
        elif (step.axes, step.reduction, leg.dtype) != (first.axes, first.reduction, call.legs[0].dtype):
            yield Difference(where, f"{leg.row.value}, {leg.dtype} {step.reduction}".rstrip() + ", cannot share a call with the others")
    phases = {leg.row.phase for leg in call.legs}
    if phases != {row.phase} and not (row.phase == "backward" and phases == {"backward", "recompute"}):
        yield Difference(f"{where}.phase", f"{row.phase!r} in the plan, its reshards are of {', '.join(sorted(phases))}")
    if len(call.legs) > 1 and row.kind not in IN_BUCKETS:
        yield Difference(where, f"{row.kind} cannot be a bucket")
    limit, size = walk.plan.limits.bucket_bytes, sum(max(leg.given, leg.taken) for leg in call.legs)
    if len(call.legs) > 1 and size > limit:
        yield Difference(where, f"its bucket of {size} bytes is over limits.bucket_bytes, {limit}")
    received = sum(round(step.received_bytes_per_rank) for step in call.steps)
    yield from count(f"{where}.bytes", row.bytes, sum(round(step.full_bytes) for step in call.steps))
    yield from count(f"{where}.received_bytes_per_rank", row.received_bytes_per_rank, received)
    yield from seconds(f"{where}.seconds", row.seconds, call.seconds(walk.machine))


def _inside(walk: Walk, op: Op, rows: list[tuple[str, CollectivePlan]]) -> Iterator[Difference]:
    """The collectives inside an operator, in its order."""
    strategy = walk.strategies[op.name]
    for listed, inner in zip_longest(rows, strategy.inner):
        if listed is None:
            yield Difference("collectives", f"missing: {inner.kind} of {inner.bytes} bytes inside {op.name}")
            continue
        where, row = listed
        if inner is None:
            yield Difference(where, f"one too many inside {op.name}")
            continue
        yield from _same_inner(walk, where, row, inner, op)


def _same_inner(walk: Walk, where: str, row: CollectivePlan, inner: InnerCollective, op: Op) -> Iterator[Difference]:
    strategy, machine = walk.strategies[op.name], walk.machine
    axes = tuple(map(machine.mesh.whole, inner.axes))
    for key, given, right in (
        ("kind", row.kind, inner.kind), ("axes", row.axes, tuple(map(machine.mesh.sub_axis_name, axes))),
        ("phase", row.phase, walk.rows[op.name].phase), ("tensor", row.tensor, op.inputs[0]),
        ("from", row.from_spec, str(strategy.inputs[0])),
        ("to", row.to_spec, str(strategy.outputs[0])),
    ):  # fmt: skip
        if given != right:
            yield Difference(f"{where}.{key}", f"{given!r} in the plan, {right!r} inside {op.name}")
    received = int(machine.received_bytes(inner.kind, inner.bytes, math.prod(axis.size for axis in axes)))
    yield from count(f"{where}.bytes", row.bytes, inner.bytes)
    yield from count(f"{where}.received_bytes_per_rank", row.received_bytes_per_rank, received)
    yield from seconds(f"{where}.seconds", row.seconds, machine.collective_seconds(inner.kind, inner.bytes, axes))


def _axes(walk: Walk, step: Step) -> tuple[str, ...]:
    return tuple(map(walk.machine.mesh.sub_axis_name, step.axes))


def _step(walk: Walk, step: Step) -> str:
    return f"{step.kind} over {','.join(_axes(walk, step))} of {round(step.full_bytes)} bytes"
