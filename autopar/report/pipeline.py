"""A pipeline's plan as text: the step and its bound, a row a stage, and pipelines by hand beside it."""

from __future__ import annotations

from autopar.pipeline_plan import PipelinePlan
from autopar.report import units
from autopar.report.tables import Table, compare_baselines


def pipeline_summary(plan: PipelinePlan, columns: int | None = None) -> str:
    """What ``print(plan)`` and ``autopar show`` print; ``columns`` is the width of the terminal."""
    return "\n\n".join("\n".join(table.lines(columns)) for table in (overview(plan), stages(plan), *baselines(plan)))


def overview(plan: PipelinePlan) -> Table:
    """The pipeline in a few rows: mesh, step, bound, memory, what crosses."""
    step, bound = plan.objective.seconds, plan.objective.bound_seconds
    mesh = ",".join(f"{name}={size}" for name, size in plan.mesh.items())
    crossing = max((row.bytes_per_rank for row in plan.boundaries), default=0)
    limit, backward = units.size(plan.memory_limit_bytes_per_rank), "gradients of weights apart" if plan.split else "backward whole"
    backward += f", {plan.chunks} stages a rank" if plan.chunks > 1 else ""
    proved = f"{units.seconds(bound)}, gap {100 * plan.objective.gap:.1f} %"
    rows = [
        ("model", f"{plan.model.target}, {plan.model.mode}, {plan.model.optimizer}, {plan.microbatches} microbatches"),
        ("mesh", f"{mesh} of {plan.hardware.get('name')}"),
        ("step", units.seconds(step)),
        ("bound", f"{proved}, over all cuts, stage plans and orders on this mesh, {backward}"),
        ("memory", f"{units.size(plan.peak_memory_bytes_per_rank)} in the fullest stage, of {limit} per rank"),
        ("crossing", f"{units.size(crossing)} per rank and microbatch, {units.seconds(plan.transfer_seconds)}"),
    ]
    if plan.microbatches_tried:
        numbers = ", ".join(map(str, plan.microbatches_tried))
        rows.insert(1, ("tried", f"{numbers} microbatches, the bound over these"))
    if plan.order != "auto" or plan.split:
        rows.append(("order", "zero-bubble" if plan.split else plan.order_asked))
    if plan.tied:
        rows.append(("tied", "; ".join(f"{name} in stages {', '.join(map(str, at))}" for name, at in plan.tied.items())))
    return Table(("", "pipeline"), tuple(rows))


def stages(plan: PipelinePlan) -> Table:
    """A row a stage."""
    step = plan.objective.seconds
    rows, busy = [], [sum(stage.busy_seconds for stage in plan.stages[number :: plan.positions]) for number in range(plan.positions)]
    for number, stage in enumerate(plan.stages):
        parameters = sum(_elements(row.shape) for row in stage.plan.parameters.values())
        rows.append(
            (
                str(number), *([str(number % plan.positions)] * (plan.chunks > 1)), stage.first_module or "the beginning",
                f"{parameters:,}", units.seconds(stage.forward_seconds),
                units.seconds(stage.backward_seconds), *([units.seconds(stage.weights_seconds or 0.0)] * plan.split),
                str(stage.in_flight), units.size(stage.peak_memory_bytes_per_rank),
                f"{100 * (1 - busy[number % plan.positions] / step):.0f} %" if step else "",
            )
        )  # fmt: skip
    weights = ("weights",) if plan.split else ()
    where = ("pp",) if plan.chunks > 1 else ()
    header = ("stage", *where, "begins with", "parameters", "forward", "backward", *weights, "in flight", "memory", "idle")
    return Table(header, tuple(rows), frozenset(header) - {"begins with"})


def baselines(plan: PipelinePlan) -> tuple[Table, ...]:
    """The plan beside pipelines by hand; none in a file that has none."""
    found = plan.baselines
    return (compare_baselines(plan.objective.seconds, plan.peak_memory_bytes_per_rank, found, "step"),) if found else ()


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for length in shape:
        found *= length
    return found
