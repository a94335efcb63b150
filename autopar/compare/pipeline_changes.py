"""The changes from one pipeline's plan to another, or between a pipeline and a plan without stages."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.compare.changes import changes
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan


def pipeline_changes(first: PipelinePlan | Plan, second: PipelinePlan | Plan) -> Iterator[str]:
    """Lines that say what changed. Stages that begin alike are compared as plans, those that do not by their figures alone."""
    yield from _facts(first, second)
    if not isinstance(first, PipelinePlan) or not isinstance(second, PipelinePlan):
        return
    if first.cut != second.cut:
        yield f"cut: stages begin with {', '.join(first.cut) or 'nothing'} -> {', '.join(second.cut) or 'nothing'}"
    alike = first.cut == second.cut and first.mesh == second.mesh and first.microbatches == second.microbatches
    for position, turns in enumerate(zip(first.turns or (), second.turns or (), strict=False)):
        if alike and turns[0] != turns[1]:
            yield f"turns at pp {position}: {turns[0]} -> {turns[1]}"
    for number, (old, new) in enumerate(zip(first.stages, second.stages, strict=False)):
        for what, before, after in (
            ("forward_seconds", old.forward_seconds, new.forward_seconds), ("backward_seconds", old.backward_seconds, new.backward_seconds),
            ("weights_seconds", old.weights_seconds or 0.0, new.weights_seconds or 0.0),
            ("peak_memory_bytes_per_rank", old.peak_memory_bytes_per_rank, new.peak_memory_bytes_per_rank),
            ("in_flight", old.in_flight, new.in_flight),
        ):  # fmt: skip
            if before != after:
                yield f"stage {number}: {_change(what, before, after)}"
        if alike and old.order != new.order:
            yield f"stage {number}: order: {old.order} -> {new.order}"
        if alike:
            yield from (f"stage {number}: {line}" for line in changes(old.plan, new.plan))


def _facts(first: PipelinePlan | Plan, second: PipelinePlan | Plan) -> Iterator[str]:
    for what, old, new in (
        ("stages", _stages(first), _stages(second)), ("model", first.model.target, second.model.target),
        ("graph", first.model.graph_sha256[:12], second.model.graph_sha256[:12]), ("mesh", _mesh(first), _mesh(second)),
        ("hardware", first.hardware.get("name"), second.hardware.get("name")),
        ("optimizer", first.model.optimizer, second.model.optimizer), ("microbatches", first.microbatches, second.microbatches),
    ):  # fmt: skip
        if old != new:
            yield f"{what}: {old} -> {new}"
    for what, before, after in (
        ("objective.seconds", first.objective.seconds, second.objective.seconds),
        ("objective.bound_seconds", first.objective.bound_seconds, second.objective.bound_seconds),
        ("peak_memory_bytes_per_rank", _peak(first), _peak(second)),
    ):
        if before != after:
            yield _change(what, before, after)


def _stages(plan: PipelinePlan | Plan) -> str:
    return str(len(plan.stages)) if isinstance(plan, PipelinePlan) else "none"


def _mesh(plan: PipelinePlan | Plan) -> str:
    return ",".join(f"{name}={size}" for name, size in plan.mesh.items())


def _peak(plan: PipelinePlan | Plan) -> int:
    return plan.peak_memory_bytes_per_rank if isinstance(plan, PipelinePlan) else plan.predicted.peak_memory_bytes_per_rank


def _change(what: str, old: float, new: float) -> str:
    share = f" ({100 * (new - old) / old:+.1f} %)" if old else ""
    return f"{what}: {old:.6g} -> {new:.6g}{share}"
