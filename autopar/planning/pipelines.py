"""A pipeline's plan from a target and options: capture, then ``plan_pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from autopar.cost_models import Machine, Mesh
from autopar.errors import UsageError
from autopar.graph import layer_of
from autopar.options import AUTO, PlanOptions, user_errors
from autopar.pipeline import STAGE_AXIS
from autopar.planning.session import open_session
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.graph import Graph
    from autopar.pipeline_plan import PipelinePlan

def is_pipeline(mesh: Mesh | None) -> bool:
    """Whether a mesh has an axis for stages."""
    return mesh is not None and STAGE_AXIS in mesh.names


def refuse_stages(mesh: Mesh | None, instead: str) -> None:
    """Raises UsageError: the mesh has an axis for stages, where a plan without a pipeline is asked for."""
    if is_pipeline(mesh):
        raise UsageError(f"{STAGE_AXIS} is the axis of a pipeline's stages", instead)


def plan_stages(target: Target, options: PlanOptions, memory_limit: int, stages: str | Sequence[str] | None = None) -> PipelinePlan:
    """The best pipeline found on the options' mesh.

    Args:
        memory_limit: bytes per rank.
        stages: the first module of each stage but the first; counts of equal layers as text (``"8,9,8,7"``); None to choose.

    Raises:
        UsageError: options that pipelines do not take, or a cut that the model does not allow. Others as for ``autopar.plan``.
    """
    _check(options)
    began = perf_counter()
    session = open_session(target, options)
    if session.pins:
        some = ", ".join(list(session.pins)[:3])
        raise UsageError(f"pins ({some}) are not taken with {STAGE_AXIS} so far", "drop them, or plan without a pipeline")
    graph = session.captures.of(session.numbers[0])
    if options.microbatches != 1 and not graph.accumulation.whole:
        message = f"{options.microbatches} microbatches do not add up to the batch: {graph.accumulation.reason}"
        raise UsageError(message, "let the loss be a sum or a mean over rows, or plan without a pipeline")
    from autopar.pipeline.planning import PipelineRequest, plan_pipeline  # for start-up time: imports the solvers
    from autopar.recording.pipelines import record_pipeline

    assert options.mesh is not None
    asked = PipelineRequest(
        Machine(options.mesh, options.hardware, options.cost_model, options.execute), memory_limit, options.optimizer,
        _cut(graph, stages, options.mesh.sizes[0]), recompute=options.recompute == "auto", effort=options.effort, seed=options.seed,
        deadline=session.deadline, progress=options.progress,
    )  # fmt: skip
    with user_errors():
        found = plan_pipeline(graph, asked)
    seconds = perf_counter() - began
    made = record_pipeline(graph, asked, found, target=session.name, pins={}, solve_seconds=seconds)
    made.remember_loss(target.loss)
    return made


def _check(options: PlanOptions) -> None:
    mesh = options.mesh
    if mesh is None or mesh.names[0] != STAGE_AXIS:
        raise UsageError(f"the mesh axis {STAGE_AXIS} must be the outermost", f"write {STAGE_AXIS} first, as in {STAGE_AXIS}=2,dp=4")
    if options.mode != "train":
        raise UsageError(f"{STAGE_AXIS} is for training: a forward alone is not pipelined so far", "plan it without a pipeline")
    if options.microbatches == AUTO:
        raise UsageError(f"a pipeline takes one number of microbatches, not {AUTO}", "give a number: four for each stage keep stages busy")
    if options.cost_model == "communication":
        raise UsageError("the communication model gives stages no time, so nothing can be cut by it", "use the roofline model")
    if options.execute not in (None, "eager"):
        raise UsageError(f"stages run operator by operator so far, not as {options.execute}", "leave execute out, or give eager")


def _cut(graph: Graph, stages: str | Sequence[str] | None, count: int) -> tuple[str, ...] | None:
    """The first module of each stage but the first."""
    if stages is None or stages == "auto":
        return None
    names = [name.strip() for name in stages.split(",")] if isinstance(stages, str) else list(stages)
    if all(name.isdecimal() for name in names):
        from autopar.pipeline import find_units

        layers = [unit for unit in find_units(graph) if layer_of(unit) == unit]
        counts = [int(name) for name in names]
        if sum(counts) != len(layers) or len(counts) != count or min(counts) < 1:
            message = f"the stages {','.join(names)} are {len(counts)} with {sum(counts)} layers"
            raise UsageError(message, f"give {count} counts of the model's {len(layers)} layers, {len(layers)} together")
        return tuple(layers[sum(counts[:stage])] for stage in range(1, count))
    if len(names) == count:
        names = names[1:]
    if len(names) != count - 1:
        raise UsageError(f"{len(names)} stages are named, {STAGE_AXIS} is {count}", "name the first module of each stage but the first")
    return tuple(names)


