"""Prices, step, peak memory and the arithmetic of the bound, as they follow from the rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.check.baselines import compare_with_baselines
from autopar.check.clock import COMPUTE, slowed, step
from autopar.check.differences import TOLERANCE, Difference, count, seconds
from autopar.check.host import issued
from autopar.check.legs import Call
from autopar.check.lifetimes import Lifetimes
from autopar.check.order import Order
from autopar.check.stepping import stepping
from autopar.check.walk import Walk
from autopar.cost_models import Machine


def totals(order: Order) -> Iterator[Difference]:
    """What is wrong with any figure of a plan whose schedule is legal."""
    lifetimes = Lifetimes(order)
    yield from _instructions(order, lifetimes)
    yield from issued(order)
    yield from _predicted(order, lifetimes)
    yield from _objective(order.walk)
    plan = order.walk.plan
    yield from compare_with_baselines(plan.baselines, plan.memory_limit_bytes_per_rank, plan.objective.bound_seconds)


def _instructions(order: Order, lifetimes: Lifetimes) -> Iterator[Difference]:
    walk, machine = order.walk, order.walk.machine
    for place, row in enumerate(order.rows):
        price, stream = 0.0, ""
        if row.kind == "run":
            axes = [tuple(map(machine.mesh.whole, inner.axes)) for inner in walk.strategies[row.of].inner]
            price = _running(walk, row.of)
            stream = "+".join([COMPUTE, *sorted({link for group in axes for link in machine.links(group)})])
        elif row.kind == "start":
            call = order.calls[row.of]
            price, stream = call.seconds(machine), "+".join(machine.call_streams(call.first.kind, call.first.axes))
        elif row.kind == "wait":
            call = order.calls[row.of]
            price = _copies(call, machine)
            stream = COMPUTE if price else ""
        elif row.kind == "add":
            price = _adding(walk, row.reads[0])
            stream = COMPUTE if price else ""
        where = f"schedule[{place}]"
        yield from seconds(f"{where}.seconds", row.seconds, price)
        yield from count(f"{where}.bytes", row.bytes, lifetimes.taken.get(place, 0))
        if row.stream != stream:
            yield Difference(f"{where}.stream", f"{row.stream!r} in the plan, {stream!r} recomputed", runs=True)


def _copies(call: Call, machine: Machine) -> float:
    """Seconds of a call's copies on the rank."""
    return machine.copy_seconds(call.copied, call.legs[0].dtype)


def _adding(walk: Walk, value: str) -> float:
    """Seconds of adding a value to its sum."""
    return walk.machine.sum_seconds(walk.local_bytes(value), walk.tensors[walk.tensor_of[value]].dtype)


def _inside(walk: Walk, name: str) -> float:
    """Seconds of the collectives inside an operator."""
    machine = walk.machine
    return math.fsum(
        machine.collective_seconds(inner.kind, inner.bytes, tuple(map(machine.mesh.whole, inner.axes)))
        for inner in walk.strategies[name].inner
    )


def _running(walk: Walk, name: str) -> float:
    """Seconds of an operator with its collectives: each turn of its work ends when the work and what travels beside it have."""
    strategy, machine = walk.strategies[name], walk.machine
    travelling = [0.0] * strategy.turns
    for inner in strategy.inner:
        if inner.beside is not None:
            axes = tuple(map(machine.mesh.whole, inner.axes))
            travelling[inner.beside] += machine.collective_seconds(inner.kind, inner.bytes, axes)
    each, end = walk.seconds[name] / strategy.turns, 0.0
    for busy in travelling:
        end = max(end + busy, slowed(end, each, [(end, end + busy)], machine.hardware.overlap_slowdown))
    return end + _inside(walk, name) - math.fsum(travelling)


def _predicted(order: Order, lifetimes: Lifetimes) -> Iterator[Difference]:
    walk, plan, machine = order.walk, order.walk.plan, order.walk.machine
    predicted, of_states = plan.predicted, stepping(plan, machine, walk.ops)
    times = plan.microbatches
    compute = math.fsum(walk.times.get(name, times) * each for name, each in walk.seconds.items())
    compute += times * math.fsum(_adding(walk, value) for value in walk.sums.values())
    communication = math.fsum(
        order.rows[order.starts[name]].times(times) * (call.seconds(machine) + _copies(call, machine))
        for name, call in order.calls.items() if not call.is_transfer
    )
    communication += math.fsum(walk.times.get(op.name, times) * _inside(walk, op.name) for op in walk.ops)
    optimizer = of_states.seconds
    hardware = machine.hardware
    whole = step(order.rows, times, hardware.overlap_slowdown, hardware.launch_overlaps, machine.issue_seconds) + optimizer
    where = "predicted"
    yield from seconds(f"{where}.compute_seconds", predicted.compute_seconds, compute)
    yield from seconds(f"{where}.communication_seconds", predicted.communication_seconds, communication)
    yield from seconds(f"{where}.optimizer_seconds", predicted.optimizer_seconds, optimizer)
    yield from seconds(f"{where}.step_seconds", predicted.step_seconds, whole)
    yield from seconds(f"{where}.sequential_seconds", predicted.sequential_seconds, compute + communication + optimizer)
    summed = plan.created_by.cost_model == "communication"
    yield from seconds("objective.seconds", plan.objective.seconds, communication if summed else whole)
    received = sum(row.received_bytes_per_rank * row.times for row in plan.collectives)
    yield from count(f"{where}.received_bytes_per_rank", predicted.received_bytes_per_rank, received)
    memory = {**lifetimes.peak(of_states.passing), "optimizer": of_states.resident}
    for part, size in memory.items():
        yield from count(f"{where}.memory.{part}", getattr(predicted.memory, part), size)
    yield from count(f"{where}.memory.optimizer_on_host", predicted.memory.optimizer_on_host or 0, of_states.hosted)
    where, peak = f"{where}.peak_memory_bytes_per_rank", sum(memory.values())
    yield from count(where, predicted.peak_memory_bytes_per_rank, peak)
    hosted, room = lifetimes.host_peak() + of_states.hosted, machine.hardware.offloadable_bytes
    yield from count("predicted.peak_host_bytes_per_rank", predicted.peak_host_bytes_per_rank or 0, hosted)
    if hosted > room:
        yield Difference("predicted.peak_host_bytes_per_rank", f"{hosted} is over a rank's part of host.memory_bytes, {room}", runs=True)
    if peak > plan.memory_limit_bytes_per_rank:
        yield Difference(where, f"{peak} is over the limit of {plan.memory_limit_bytes_per_rank}", runs=True)


def _objective(walk: Walk) -> Iterator[Difference]:
    """The arithmetic of bound, gap and status. Whether the bound was proved cannot be seen from the file."""
    objective = walk.plan.objective
    gap = (objective.seconds - objective.bound_seconds) / objective.seconds if objective.seconds > 0 else 0.0
    if gap < -TOLERANCE:
        what = f"{objective.bound_seconds:.10g} is more than the plan's own {objective.seconds:.10g}"
        yield Difference("objective.bound_seconds", what, runs=True)
    if abs(objective.gap - gap) > TOLERANCE:
        yield Difference("objective.gap", f"{objective.gap:.10g} in the plan, {gap:.10g} from seconds and bound_seconds", runs=True)
    if objective.status == "optimal" and gap > PROOF:
        yield Difference("objective.status", f"'optimal' with a gap of {gap:.3g}", runs=True)


PROOF = 1e-6
"""The gap up to which a plan may be called optimal."""
