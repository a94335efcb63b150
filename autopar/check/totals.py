"""Cost and peak memory as they follow from a walk over the plan."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.check.differences import TOLERANCE, Difference, close
from autopar.check.walk import Walk, local_bytes
from autopar.plan import ParameterSpec, TensorSpec
from autopar.sharding import ShardingSpec
from autopar.timeline import makespan, plan_tasks
from cost_models import optimizer_bytes


def totals(walk: Walk) -> Iterator[Difference]:
    plan, machine = walk.plan, walk.machine
    communication = sum(row.seconds for row in walk.collectives)
    trained = [spec for _, _, spec in plan.entering if isinstance(spec, ParameterSpec) and spec.trained]
    optimizer = sum(machine.optimizer_seconds(plan.model.optimizer, local_elements(spec, plan.sizes), spec.dtype) for spec in trained)
    seconds = walk.compute + communication + optimizer
    memory = _memory(walk, sum(optimizer_bytes(plan.model.optimizer, local_elements(spec, plan.sizes), spec.dtype) for spec in trained))
    objective, predicted = plan.objective, plan.predicted
    gap = (objective.seconds - objective.bound_seconds) / objective.seconds if objective.seconds > 0 else 0.0
    floats = {
        "predicted.compute_seconds": (predicted.compute_seconds, walk.compute),
        "predicted.communication_seconds": (predicted.communication_seconds, communication),
        "predicted.optimizer_seconds": (predicted.optimizer_seconds, optimizer),
        "predicted.step_seconds": (predicted.step_seconds, makespan(plan_tasks(plan)) + optimizer),
        "objective.seconds": (objective.seconds, seconds),
    }
    for where, (given, right) in floats.items():
        if not close(given, right):
            yield Difference(where, f"{given:.6g} in the plan, {right:.6g} recomputed")
    if abs(objective.gap - gap) > TOLERANCE:
        yield Difference("objective.gap", f"{objective.gap:.6g} in the plan, {gap:.6g} from seconds and bound_seconds")
    if objective.status == "optimal" and gap > TOLERANCE:
        yield Difference("objective.status", f"'optimal' with a gap of {gap:.3g}")
    counts = {
        "predicted.received_bytes_per_rank": (
            predicted.received_bytes_per_rank,
            sum(row.received_bytes_per_rank for row in walk.collectives),
        ),
        "predicted.peak_memory_bytes_per_rank": (predicted.peak_memory_bytes_per_rank, sum(memory.values())),
        **{f"predicted.memory.{part}": (getattr(predicted.memory, part), size) for part, size in memory.items()},
    }
    for where, (count, expected) in counts.items():
        if count != expected:
            yield Difference(where, f"{count} in the plan, {expected} recomputed")
    if sum(memory.values()) > plan.memory_limit_bytes_per_rank:
        yield Difference(
            "predicted.peak_memory_bytes_per_rank", f"{sum(memory.values())} is over the limit of {plan.memory_limit_bytes_per_rank}"
        )


def _memory(walk: Walk, states: int) -> dict[str, int]:
    """Bytes live at the peak, from the interval in which each storage lives: the instruction that makes it through the last that needs it.

    What came in and what leaves lives to the end; parameters, buffers and constants are counted apart. At equal peaks the first counts.
    """
    plan = walk.plan
    resting = {spec.tensor for kind, _, spec in plan.entering if kind in ("parameter", "buffer", "constant")}
    kept = {walk.storage[row.value or row.tensor] for _, _, row in plan.leaving} | {spec.tensor for _, _, spec in plan.entering}
    gradients = {walk.storage[row.value or row.tensor] for kind, _, row in plan.leaving if kind == "gradient"} - resting
    size = {value: local_bytes(walk.tensors[walk.tensor_of[value]], walk.specs[value], plan.sizes) for value in walk.made}
    end = walk.steps
    change, gradient_change = [0] * (end + 2), [0] * (end + 2)
    for value, begin in walk.made.items():
        if value in resting:
            continue
        last = end if value in kept else walk.used[value]
        for table in (change, gradient_change) if value in gradients else (change,):
            table[max(begin, 0)] += size[value]
            table[last + 1] -= size[value]
    best, live, live_gradients = (-1, 0, 0, 0), 0, 0
    for index in range(end + 1):
        live += change[index]
        live_gradients += gradient_change[index]
        extra = walk.extra.get(index, 0)
        if live + extra > best[0]:
            best = (live + extra, live, live_gradients, extra)
    _, at_peak, grads, extra = best
    return {
        "parameters": sum(size[value] for value in resting),
        "gradients": grads,
        "optimizer": states,
        "activations": at_peak - grads,
        "temporaries": extra,
    }


def local_elements(row: TensorSpec, sizes: tuple[int, ...]) -> int:
    return math.prod(ShardingSpec.parse(row.spec).local_shape(row.shape, sizes))
