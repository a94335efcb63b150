"""How much of the hardware's peak the planned step uses: MFU, the model's operations over what the ranks could do in the step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost_models import CostModelError, Hardware
from autopar.errors import AutoparError
from autopar.graph import Op, Tensor, from_json
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.rows import OpPlan
from autopar.rules import flops

MODEL_SHARE = {"attention_backward": 4 / 5, "recurrence_backward": 2 / 3}
"""Share of a kernel's operations that are the model's: these two make a product of forward again, which MFU leaves out."""


@dataclass(frozen=True)
class Utilisation:
    """Of one step.

    Args:
        flops: floating point operations of the model, recomputation left out.
        dtype: the type in which most of them are done.
        peak: operations a second of one device in that type, by the hardware file.
        share: MFU, from 0 to 1.
    """

    flops: float
    dtype: str
    peak: float
    share: float


def utilisation(plan: Plan) -> Utilisation | None:
    """MFU of the step. None where nothing is computed, where computation is not priced, or where operators cannot be counted."""
    if plan.created_by.cost_model == "communication" or plan.predicted.step_seconds <= 0:
        return None
    try:
        peaks = Hardware.from_dict(plan.hardware, "the plan's hardware")
        by_dtype = _operations(plan)
    except (AutoparError, CostModelError, LookupError, TypeError, ValueError):
        return None
    total = sum(by_dtype.values())
    if total <= 0:
        return None
    dtype = max(by_dtype, key=by_dtype.__getitem__)
    peak = peaks.peak(dtype)
    return Utilisation(total, dtype, peak, total / (plan.predicted.step_seconds * math.prod(plan.sizes) * peak))


def pipeline_utilisation(plan: PipelinePlan) -> Utilisation | None:
    """MFU of a pipeline's step, over all stages and their idle time. None where a stage has none."""
    stages = [utilisation(stage.plan) for stage in plan.stages]
    found = [stage for stage in stages if stage is not None]
    if len(found) < len(stages) or plan.objective.seconds <= 0:
        return None
    total, most = sum(stage.flops for stage in found), max(found, key=lambda stage: stage.flops)
    return Utilisation(total, most.dtype, most.peak, total / (plan.objective.seconds * math.prod(plan.mesh.values()) * most.peak))


def utilisation_tile(found: Utilisation | None) -> Iterator[tuple[str, str]]:
    """The share as a figure with its words; nothing where there is none."""
    if found is not None:
        peak = f"{found.peak / 1e12:.4g} TFLOP/s in {found.dtype}"
        yield f"{100 * found.share:.3g} % MFU", f"of {peak} a device; recomputation left out"


def _operations(plan: Plan) -> dict[str, float]:
    """Floating point operations of the whole model in a step, by the type of what is computed with."""
    tensors = {entry.tensor: Tensor(entry.tensor, entry.shape, entry.dtype) for row in plan.ops for entry in (*row.inputs, *row.outputs)}
    found: dict[str, float] = {}
    for row in plan.captured:
        dtype = (*row.inputs, *row.outputs)[0].dtype
        share = MODEL_SHARE.get(row.op.split(".")[1], 1.0)
        found[dtype] = found.get(dtype, 0.0) + share * flops(_as_op(row), tensors) * row.times
    return found


def _as_op(row: OpPlan) -> Op:
    arguments = row.attributes
    return Op(
        row.name, row.op, tuple(entry.tensor for entry in row.inputs), tuple(entry.tensor for entry in row.outputs),
        from_json(arguments["args"]), tuple((key, from_json(value)) for key, value in arguments["kwargs"].items()),
    )  # fmt: skip
