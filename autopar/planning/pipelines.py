"""A pipeline's plan from a target and options: capture, then ``plan_pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from autopar.cost_models import Machine, Mesh
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.graph import Graph, layer_of
from autopar.options import AUTO, PlanOptions, user_errors
from autopar.pipeline import STAGE_AXIS
from autopar.planning.session import PlanSession, open_session
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.pipeline.planning import PipelineRequest, PipelineResult
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
    if isinstance(target.model, Graph):
        options = replace(options, microbatches=target.model.microbatches)
    session = open_session(target, options)
    if session.pins:
        some = ", ".join(list(session.pins)[:3])
        raise UsageError(f"pins ({some}) are not taken with {STAGE_AXIS} so far", "drop them, or plan without a pipeline")
    assert options.mesh is not None
    stage_count = options.mesh.sizes[0]
    numbers = session.numbers
    if options.microbatches == AUTO:  # fewer than stages leave some without work
        numbers = tuple(number for number in numbers if number >= stage_count) or numbers[-1:]
    from autopar.recording.pipelines import record_pipeline  # for start-up time: imports the solvers

    with user_errors():
        graph, asked, found, tried = _best_of(numbers, session, memory_limit, stages)
    seconds = perf_counter() - began
    made = record_pipeline(
        graph, asked, found, target=session.name, pins={}, solve_seconds=seconds, tried=tried if options.microbatches == AUTO else None
    )
    made.remember_loss(target.loss)
    return made


def _best_of(
    numbers: Sequence[int], session: PlanSession, memory_limit: int, stages: str | Sequence[str] | None
) -> tuple[Graph, PipelineRequest, PipelineResult, tuple[int, ...]]:  # fmt: skip
    """The best pipeline over numbers of microbatches, with its graph and request, its bound over all numbers tried, and these.

    More are tried as long as they gain. One that does not fit is left out where another does.
    """
    from autopar.pipeline.planning import PipelineRequest, plan_pipeline  # for start-up time: imports the solvers

    options, best, bounds = session.options, None, dict[int, float]()
    assert options.mesh is not None
    misfit: InfeasibleError | None = None
    for number in numbers:
        graph = session.captures.of(number)
        if number != 1 and not graph.accumulation.whole:
            if bounds or misfit:
                break
            message = f"{number} microbatches do not add up to the batch: {graph.accumulation.reason}"
            raise UsageError(message, "let the loss be a sum or a mean over rows, or plan without a pipeline")
        asked = PipelineRequest(
            Machine(options.mesh, options.hardware, options.cost_model, options.execute), memory_limit, options.optimizer,
            _cut(graph, stages, options.mesh.sizes[0]), recompute=options.recompute == "auto", effort=options.effort, seed=options.seed,
            deadline=session.deadline, progress=options.progress,
        )  # fmt: skip
        try:
            found = plan_pipeline(graph, asked)
        except InfeasibleError as error:
            misfit = error
            continue
        except TimeLimitError:
            if best is None:
                raise
            break
        bounds[number] = found.bound_seconds
        if best is not None and found.times.step >= best[2].times.step:
            break
        best = graph, asked, found
    if best is None:
        assert misfit is not None
        raise misfit
    graph, asked, found = best
    return graph, asked, replace(found, bound_seconds=min(bounds.values())), tuple(bounds)


def _check(options: PlanOptions) -> None:
    mesh = options.mesh
    if mesh is None or mesh.names[0] != STAGE_AXIS:
        raise UsageError(f"the mesh axis {STAGE_AXIS} must be the outermost", f"write {STAGE_AXIS} first, as in {STAGE_AXIS}=2,dp=4")
    if options.mode != "train":
        raise UsageError(f"{STAGE_AXIS} is for training: a forward alone is not pipelined so far", "plan it without a pipeline")
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


