"""A pipeline's plan from a target and options: capture, then ``plan_pipeline``; and the better of a plan with stages and one without."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from autopar.cost_models import Machine, Mesh
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.graph import Graph, layer_of
from autopar.options import AUTO, PlanOptions, user_errors
from autopar.pipeline import STAGE_AXIS, find_units
from autopar.pipeline.orders import parse_order
from autopar.planning.cautions import StageWarning
from autopar.planning.session import PlanSession, open_session
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.pipeline.planning import PipelineRequest, PipelineResult
    from autopar.pipeline_plan import PipelinePlan
    from autopar.plan import Plan


MICROBATCHES_A_STAGE = 4
"""Microbatches for each stage that are tried first: ranks without work in 1F1B then lose a fifth of the step at most."""
WORTH_STAGES = 0.03
"""Share of the step that pipelines must be able to save to be planned. Predicted steps are off by a few percent."""


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
    mesh = options.mesh
    if mesh is None or mesh.names[0] != STAGE_AXIS:
        raise UsageError(f"the mesh axis {STAGE_AXIS} must be the outermost", f"write {STAGE_AXIS} first, as in {STAGE_AXIS}=2,dp=4")
    found = _plan_on(mesh, _open(target, options), memory_limit, stages, math.inf)
    assert found is not None
    return found


def plan_with_or_without_stages(target: Target, options: PlanOptions, memory_limit: int) -> Plan | PipelinePlan:
    """The best plan without stages on the options' devices, or a pipeline where one that was found is faster.

    Pipelines of 2, 4, 8 ... stages are tried as long as each is faster than the one before it. A stage's mesh is that of the plan without
    stages, with fewer ranks on its outer axes. Half of the time is for the plan without stages. Pipelines whose operators alone take nearly
    as long are not planned, which is said.

    Args:
        memory_limit: bytes per rank.

    Raises:
        UsageError: options that pipelines do not take. Others as for ``autopar.plan``.
    """
    if options.microbatches == 1:
        hint = "give microbatches=auto, or a number; four for each stage keep all busy"
        raise UsageError("one microbatch keeps one stage busy at a time", hint)
    session = _open(target, options)
    best: Plan | PipelinePlan | None = None
    misfit: InfeasibleError | None = None
    try:
        best = session.plan(memory_limit, (perf_counter() + session.deadline) / 2).plan
    except InfeasibleError as error:
        misfit = error
    base = Mesh(tuple(best.mesh.items())) if best is not None else session.machines[0].mesh
    before, units = math.inf, len(find_units(session.captures.of(session.numbers[0])))
    for mesh in meshes_with_stages(base, units):
        try:
            if best is not None and (gain := _most_gain(mesh, session, best)) < WORTH_STAGES:
                said = f"pipelines of {mesh.sizes[0]} stages are not planned: they would save {max(gain, 0.0):.1%} at most"
                warnings.warn(said, StageWarning, stacklevel=3)
                continue
            found = _plan_on(mesh, session, memory_limit, None, math.inf if best is None else best.objective.seconds)
        except InfeasibleError:
            continue
        except TimeLimitError as error:
            if best is None:
                raise
            warnings.warn(f"pipelines of {mesh.sizes[0]} stages are not planned: {error.message}", StageWarning, stacklevel=3)
            break
        except UsageError as error:
            if best is None:
                raise
            warnings.warn(f"no pipelines are tried: {error.message}", StageWarning, stacklevel=3)
            break
        if found is not None and (best is None or found.objective.seconds < best.objective.seconds):
            best = found
        seconds = math.inf if found is None else found.objective.seconds
        if before < seconds:
            break
        before = seconds
    if best is None:
        assert misfit is not None
        raise misfit
    return best


def _most_gain(mesh: Mesh, session: PlanSession, best: Plan | PipelinePlan) -> float:
    """The share of the best step that a pipeline on a mesh may save at most.

    Operators are priced with the fewest microbatches. With more of them they take as long or longer.
    """
    from autopar.pipeline.planning import find_floor  # for start-up time: imports the solvers

    options = session.options
    graph = session.captures.of(_numbers(session, mesh.sizes[0])[0])
    machine = Machine(mesh, options.hardware, options.cost_model, options.execute)
    with user_errors():
        return 1.0 - find_floor(graph, machine, options.optimizer) / best.objective.seconds


def meshes_with_stages(mesh: Mesh, most: int) -> Iterator[Mesh]:
    """Meshes of as many ranks with 2, 4, 8 ... stages, ``most`` at most, whose ranks are taken from the outermost axes.

    >>> [found.axes for found in meshes_with_stages(Mesh((("dp", 4), ("tp", 2))), 8)]
    [(('pp', 2), ('dp', 2), ('tp', 2)), (('pp', 4), ('tp', 2)), (('pp', 8), ('dp', 1))]
    """
    count = 2
    while mesh.ranks % count == 0 and count <= most:
        axes, left = list[tuple[str, int]](), count
        for name, size in mesh.axes:
            taken = math.gcd(size, left)
            left //= taken
            if size > taken:
                axes.append((name, size // taken))
        yield Mesh(((STAGE_AXIS, count), *(axes or [("dp", 1)])))
        count *= 2


def _open(target: Target, options: PlanOptions) -> PlanSession:
    """The captured model. Raises UsageError: options that pipelines do not take."""
    _check(options)
    if isinstance(target.model, Graph):
        options = replace(options, microbatches=target.model.microbatches)
    session = open_session(target, options)
    for name in session.pins:
        if name.startswith("output:"):
            raise UsageError(f"the pin {name}: the loss is all that a pipeline hands out, and lies whole on each rank", "drop the pin")
    return session


def _plan_on(
    mesh: Mesh, session: PlanSession, memory_limit: int, stages: str | Sequence[str] | None, least: float
) -> PipelinePlan | None:  # fmt: skip
    """The best pipeline on a mesh, over numbers of microbatches; None where none takes less than ``least`` seconds.

    Numbers that do not fit are left out where others do.
    """
    from autopar.recording.pipelines import record_pipeline  # for start-up time: imports the solvers

    options, began, tried = session.options, perf_counter(), _Tried(mesh, session, memory_limit, stages, least)
    try:
        tried.plan_from(_numbers(session, mesh.sizes[0]), mesh.sizes[0])
    except TimeLimitError:
        if tried.best is None:
            raise
    if tried.best is None:
        if tried.misfit is not None and not tried.bounds:
            raise tried.misfit
        return None
    graph, asked, found = tried.best
    found = replace(found, bound_seconds=min(tried.bounds.values()))
    made = record_pipeline(
        graph, asked, found, target=session.name, pins=session.pins, solve_seconds=perf_counter() - began,
        tried=tuple(sorted(tried.bounds)) if options.microbatches == AUTO else None,
    )  # fmt: skip
    made.remember_loss(session.loss)
    return made


@dataclass
class _Tried:
    """Pipelines on one mesh with several numbers of microbatches.

    Args:
        stages: see ``plan_stages``.
        least: seconds of the best plan known.
        best: the fastest that takes less, with its graph and request.
        bounds, steps: seconds by number. One without a step was not planned, since its bound is too high.
        misfit: the error of the last number that does not fit.
    """

    mesh: Mesh
    session: PlanSession
    memory_limit: int
    stages: str | Sequence[str] | None
    least: float
    best: tuple[Graph, PipelineRequest, PipelineResult] | None = None
    bounds: dict[int, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    misfit: InfeasibleError | None = None

    def plan_from(self, numbers: Sequence[int], stages: int) -> None:
        """Plans with four microbatches for each stage, then with more as long as they gain; where they do not, with fewer.

        Raises:
            Those of ``plan_while_gaining``.
        """
        first = next((place for place, number in enumerate(numbers) if number >= MICROBATCHES_A_STAGE * stages), len(numbers) - 1)
        self.plan_while_gaining(numbers[first:])
        if min(self.steps, key=self.steps.__getitem__, default=None) == numbers[first]:
            self.plan_while_gaining(numbers[:first][::-1])

    def plan_while_gaining(self, numbers: Sequence[int]) -> None:
        """Plans with one number after another, until one gains nothing over those before.

        Raises:
            UsageError: the batch cannot be cut into microbatches. TimeLimitError: the time limit passed.
        """
        from autopar.pipeline.planning import plan_faster_pipeline  # for start-up time: imports the solvers

        before = min(self.steps.values(), default=math.inf)
        for number in numbers:
            graph = self.session.captures.of(number)
            if number != 1 and not graph.accumulation.whole:
                if self.bounds or self.misfit:
                    return
                message = f"{number} microbatches do not add up to the batch: {graph.accumulation.reason}"
                raise UsageError(message, "let the loss be a sum or a mean over rows, or plan without a pipeline")
            asked = self._request(graph)
            try:
                with user_errors():
                    found = plan_faster_pipeline(graph, asked, self.least)
            except InfeasibleError as error:
                self.misfit = error
                if self.steps:
                    return
                continue
            self.bounds[number] = self.least if found is None else found.bound_seconds
            if found is None:
                continue
            self.steps[number] = found.times.step
            if found.times.step >= before:
                return
            before = found.times.step
            if before < self.least:
                self.best, self.least = (graph, asked, found), before

    def _request(self, graph: Graph) -> PipelineRequest:
        from autopar.pipeline.planning import PipelineRequest  # for start-up time: imports the solvers

        options, order = self.session.options, parse_order(self.session.options.order)
        return PipelineRequest(
            Machine(self.mesh, options.hardware, options.cost_model, options.execute), self.memory_limit, options.optimizer,
            _cut(graph, self.stages, self.mesh.sizes[0] * order.chunks), dict(self.session.pins), recompute=options.recompute == "auto",
            order=order.name, chunks=order.chunks, effort=options.effort, seed=options.seed, deadline=self.session.deadline,
            progress=options.progress,
        )  # fmt: skip


def _numbers(session: PlanSession, stages: int) -> tuple[int, ...]:
    """The numbers of microbatches to try: fewer than stages leave some without work."""
    if session.options.microbatches != AUTO:
        return session.numbers
    return tuple(number for number in session.numbers if number >= stages) or session.numbers[-1:]


def _check(options: PlanOptions) -> None:
    if options.inputs != "global":
        raise UsageError("a pipeline takes the whole batch on every rank so far", "leave inputs out, or plan without a pipeline")
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
        layers = [unit for unit in find_units(graph) if layer_of(unit) == unit]
        counts = [int(name) for name in names]
        if sum(counts) != len(layers) or len(counts) != count or min(counts) < 1:
            message = f"the stages {','.join(names)} are {len(counts)} with {sum(counts)} layers"
            raise UsageError(message, f"give {count} counts of the model's {len(layers)} layers, {len(layers)} together")
        return tuple(layers[sum(counts[:stage])] for stage in range(1, count))
    if len(names) == count:
        names = names[1:]
    if len(names) != count - 1:
        message = f"{len(names)} stages are named, the pipeline has {count}"
        raise UsageError(message, "name the first module of each stage but the first")
    return tuple(names)


