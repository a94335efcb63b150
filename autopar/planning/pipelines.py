"""A pipeline's plan from a target and options: capture, then ``plan_pipeline``; and the better of a plan with stages and one without."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from autopar.cost_models import UNLIMITED, Machine, Mesh
from autopar.ending import put_together
from autopar.errors import InfeasibleError, NumberError, TimeLimitError, UsageError
from autopar.graph import Graph, layer_of
from autopar.options import AUTO, PlanOptions, user_errors
from autopar.pipeline import STAGE_AXIS, find_units, stage_mesh
from autopar.pipeline.orders import parse_order
from autopar.planning.cautions import StageWarning
from autopar.planning.screening import HOPELESS
from autopar.planning.session import PlanSession, open_session
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.pipeline.planning import DraftedPipeline
    from autopar.pipeline.request import PipelineRequest
    from autopar.pipeline.result import PipelineResult
    from autopar.pipeline_plan import PipelinePlan
    from autopar.plan import Plan


MICROBATCHES_A_STAGE = 4
"""Microbatches for each stage that are tried first: ranks without work in 1F1B then lose a fifth of the step at most."""
WITHOUT_STAGES_SHARE = 2 / 3
"""Share of the time for the plan without stages. Llama-3-70B on 256 devices, 120 s: 1.68 s a step, and 1.75 s with a half."""
WORTH_STAGES = 0.03
"""Share of the step that pipelines must be able to save to be planned. Predicted steps are off by a few percent."""
DRAFT_GAIN = 0.1
"""Share of a draft's step that planning its stages among all strategies may save. It saves 0 to 1.7 % in six cases of Llama-3-8B."""
DRAFTS_SHARE = 0.6
"""Share of the time for drafts. The rest is for finishing the best, which takes as long as one: 8 s each of Llama-3-8B on 4 stages."""


def is_pipeline(mesh: Mesh | None) -> bool:
    """Whether a mesh has an axis for stages."""
    return mesh is not None and STAGE_AXIS in mesh.names


def refuse_stages(mesh: Mesh | None, instead: str) -> None:
    """Raises UsageError: the mesh has an axis for stages, where a plan without a pipeline is asked for."""
    if is_pipeline(mesh):
        raise UsageError(f"{STAGE_AXIS} is the axis of a pipeline's stages", instead)


def plan_stages(target: Target, options: PlanOptions, memory_limit: int, stages: str | Sequence[str | int] | None = None) -> PipelinePlan:
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
    found = _Drafts(_open(target, options), memory_limit, stages).plan((mesh,))
    assert found is not None
    return found


def plan_with_or_without_stages(target: Target, options: PlanOptions, memory_limit: int) -> Plan | PipelinePlan:
    """The best plan without stages on the options' devices, or a pipeline where one that was found is faster.

    Pipelines of 2, 4, 8 ... stages are ranked by plans by hand, and drafted as long as each is faster than the one before it. The best
    draft is finished. A stage's mesh is that of the plan without stages, with fewer ranks on its outer axes. Most of the time is for the
    plan without stages. Pipelines whose operators alone take nearly as long are not planned, which is said.

    Args:
        memory_limit: bytes per rank.

    Raises:
        UsageError: options that pipelines do not take. Others as for ``autopar.plan``.
    """
    if options.microbatches == 1:
        hint = "give microbatches=auto, or a number; four for each stage keep all busy"
        raise UsageError("one microbatch keeps one stage busy at a time", hint)
    session = _open(target, options)
    best: Plan | None = None
    misfit: InfeasibleError | None = None
    try:
        planned = session.plan(memory_limit, perf_counter() + WITHOUT_STAGES_SHARE * (session.deadline - perf_counter()))
        best = planned.plan
        if planned.interrupted:
            return best
    except InfeasibleError as error:
        misfit = error
    base = Mesh(tuple(best.mesh.items())) if best is not None else session.machines[0].mesh
    least = math.inf if best is None else best.objective.seconds
    try:
        meshes = meshes_with_stages(base, len(find_units(session.captures.of(session.numbers[0]))))
        found = _Drafts(session, memory_limit, None, least).plan(_rank_hopeful(session, meshes, least))
    except InfeasibleError:
        found = None
    except (TimeLimitError, UsageError) as error:
        if best is None:
            raise
        warnings.warn(f"no pipelines are tried: {error.message}", StageWarning, stacklevel=3)
        found = None
    except KeyboardInterrupt:
        if best is None:
            raise
        return best
    if found is not None and found.objective.seconds < least:
        return found
    if best is None:
        assert misfit is not None
        raise misfit
    return best


def _rank_hopeful(session: PlanSession, meshes: Iterable[Mesh], least: float) -> list[Mesh]:
    """The meshes on which a pipeline may be faster than a plan of ``least`` seconds, the most promising first.

    Where operators alone take nearly as long, that is said. The others are ranked by the best plan by hand on a stage's mesh.
    """
    from autopar.pipeline.planning import find_floor  # for start-up time: imports the solvers

    options, graph, estimates = session.options, session.captures.of(session.numbers[0]), dict[Mesh, float]()
    for mesh in meshes:
        machine = Machine(mesh, options.hardware, options.cost_model, options.execute)
        with user_errors():
            gain = 1.0 - find_floor(graph, machine, options.optimizer) / least
        if gain < WORTH_STAGES:
            said = f"pipelines of {mesh.sizes[0]} stages are not planned: they would save {max(gain, 0.0):.1%} at most"
            warnings.warn(said, StageWarning, stacklevel=4)
        else:
            estimates[mesh] = _estimate(session, machine)
    hopeful = [mesh for mesh, seconds in estimates.items() if seconds < HOPELESS * least or seconds == math.inf]
    return sorted(hopeful, key=estimates.__getitem__)


def _estimate(session: PlanSession, machine: Machine) -> float:
    """Seconds of a pipeline by hand, in as much memory as it takes: its stage mesh's plan of the whole batch, and ranks that idle.

    Infinite where no plan by hand is known.
    """
    stages, numbers = machine.mesh.sizes[0], _numbers(session, machine.mesh)
    number = numbers[_first_place(numbers, machine.mesh)]
    found = session.screen(UNLIMITED, session.numbers[0], replace(machine, mesh=stage_mesh(machine.mesh)))
    return math.inf if found is None else found.seconds / stages * (number + stages - 1) / number


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
    session = open_session(target, options, staged=True)
    for name in session.pins:
        if name.startswith("output:"):
            raise UsageError(f"the pin {name}: the loss is all that a pipeline hands out, and lies whole on each rank", "drop the pin")
    return session


@dataclass(frozen=True)
class _Draft:
    """A drafted pipeline, the graph of its microbatch, and what was asked."""

    graph: Graph
    request: PipelineRequest
    drafted: DraftedPipeline

    @property
    def step(self) -> float:
        """Seconds; infinite where no draft fits."""
        return self.drafted.step

    @property
    def mesh(self) -> Mesh:
        """Of all ranks."""
        return self.request.machine.mesh


@dataclass
class _Drafts:
    """Drafts of pipelines, by mesh and number of microbatches. The best of them is finished.

    Args:
        stages: see ``plan_stages``.
        least: seconds of the best plan without stages.
        bounds: seconds, for each mesh by number of microbatches. Of what is not drafted, since its bound is too high, ``least``.
        ends: when drafts end, of ``perf_counter``. The first has all of the time, where there is no other plan.
        longest: seconds that one draft took, at most.
        refused: numbers of microbatches that the step cannot be made of, and why.
    """

    session: PlanSession
    memory_limit: int
    stages: str | Sequence[str | int] | None
    least: float = math.inf
    made: list[_Draft] = field(default_factory=list)
    bounds: dict[Mesh, dict[int, float]] = field(default_factory=dict)
    ends: float = math.inf
    longest: float = 0.0
    refused: dict[int, NumberError] = field(default_factory=dict)

    def plan(self, meshes: Iterable[Mesh]) -> PipelinePlan | None:
        """The best pipeline; None where none found takes less than ``least`` seconds.

        Raises:
            InfeasibleError, TimeLimitError, UsageError: no pipeline fits, was found in time, or is possible.
            KeyboardInterrupt: Ctrl-C before there was a pipeline. Later the best so far is given.
        """
        began, misfit, interrupted = perf_counter(), None, False
        self.ends = began + DRAFTS_SHARE * (self.session.deadline - began)
        try:
            self.draft_meshes(meshes)
        except KeyboardInterrupt:
            interrupted = True
            if all(one.step == math.inf for one in self.made):
                raise
        for draft in sorted(self.made, key=lambda one: (one.step, -one.graph.microbatches)):
            is_late = draft.step == math.inf and perf_counter() > self.session.deadline
            if self.least < math.inf and (is_late or self.least <= (1 - DRAFT_GAIN) * draft.step < math.inf):
                return None
            try:
                with user_errors():
                    found = draft.drafted.stop() if interrupted else draft.drafted.finish()
            except InfeasibleError as error:
                misfit = error
                continue
            return put_together(partial(self._record, draft, found, perf_counter() - began))[0]
        if misfit is not None:
            raise misfit
        return None

    def draft_meshes(self, meshes: Iterable[Mesh]) -> None:
        """Drafts on one mesh after another, until one is slower than the one before; then with more numbers of microbatches on the best.

        Raises:
            UsageError: the batch cannot be cut into microbatches. TimeLimitError: there was no time for any plan.
            KeyboardInterrupt: Ctrl-C, also where the draft that it ended is kept.
        """
        before, best = math.inf, None
        for mesh in meshes:
            step = math.inf
            try:
                numbers, first = self._numbers(mesh)
                for number in numbers[first:]:
                    step = self.draft(mesh, number)
                    if number in self.bounds.get(mesh, ()):
                        break  # it fits, or is too slow: with more microbatches ranks idle less, and operators take as long or longer
            except TimeLimitError as error:
                if not self.made and self.least == math.inf:
                    raise
                warnings.warn(f"pipelines of {mesh.sizes[0]} stages are not planned: {error.message}", StageWarning, stacklevel=5)
                break
            if before < step:
                break
            before, best = step, mesh
        if best is not None and before < math.inf:
            self.draft_numbers(best)

    def draft_numbers(self, mesh: Mesh) -> None:
        """Drafts with more microbatches than the first number as long as they gain; where they do not, with fewer."""
        numbers, first = self._numbers(mesh)
        if not self._draft_while_gaining(mesh, numbers[first + 1 :]):
            self._draft_while_gaining(mesh, numbers[:first][::-1])

    def _numbers(self, mesh: Mesh) -> tuple[tuple[int, ...], int]:
        """The numbers of microbatches to try, and the place of the first that the step can be made of.

        Raises:
            UsageError: it can be made of none.
        """
        while True:
            numbers = _numbers(self.session, mesh, self.refused)
            if not numbers:
                raise self._refusal()
            first = _first_place(numbers, mesh)
            if self._usable(numbers[first]) is not None:
                return numbers, first

    def _usable(self, number: int) -> Graph | None:
        """The graph of one microbatch; None where the step cannot be made of this number, and the user asked for none."""
        if number in self.refused:
            return None
        try:
            return self.session.usable(number)
        except NumberError as error:
            if self.session.options.microbatches != AUTO:
                raise
            self.refused[number] = error
            return None

    def _refusal(self) -> UsageError:
        """Why no number can be used: the reason of the largest with several rows in each microbatch, else of the largest."""
        *fewer, most = sorted(self.refused)
        told = max(self.refused, key=lambda number: (self.refused[number].rows != 1, number))
        tried = f"none of {', '.join(map(str, fewer))} and {most} can" if fewer else f"{most} cannot"
        message = f"a pipeline runs in microbatches, and {tried} be used: {self.refused[told].message}"
        return NumberError(message, self.refused[min(self.refused)].hint)

    def _draft_while_gaining(self, mesh: Mesh, numbers: Sequence[int]) -> bool:
        """Drafts with one number after another until one gains nothing, or time is up. Whether any gained."""
        before, gained = self.step_on(mesh), False
        for number in numbers:
            if number in self.bounds.get(mesh, ()):
                continue  # the first that fits
            try:
                step = self.draft(mesh, number)
            except TimeLimitError:
                break
            if step >= before:
                break
            before, gained = step, True
        return gained

    def step_on(self, mesh: Mesh) -> float:
        """Seconds of the best draft on a mesh."""
        return min((one.step for one in self.made if one.mesh == mesh), default=math.inf)

    def draft(self, mesh: Mesh, number: int) -> float:
        """Seconds of a draft; infinite where none fits, or the bound is above a step that is known.

        Raises:
            UsageError: the batch cannot be cut into microbatches. TimeLimitError: the time limit passed.
        """
        from autopar.pipeline.planning import draft_pipeline  # for start-up time: imports the solvers

        began = perf_counter()
        if (self.made or self.least < math.inf) and began + self.longest > self.ends:
            raise TimeLimitError("the time for drafts was used up", "allow more time (--time-limit)")
        graph = self._usable(number)
        if graph is None:
            return math.inf
        least = min([self.least, *(one.step for one in self.made)])
        request = self._request(mesh, graph)
        with user_errors():
            drafted = draft_pipeline(graph, request, least)
        self.longest = max(self.longest, perf_counter() - began)
        if drafted is None:
            self.bounds.setdefault(mesh, {})[number] = least
            return math.inf
        self.made.append(_Draft(graph, request, drafted))
        if drafted.step < math.inf:
            self.bounds.setdefault(mesh, {})[number] = drafted.bound_seconds
        if drafted.interrupted:
            raise KeyboardInterrupt
        return drafted.step

    def _request(self, mesh: Mesh, graph: Graph) -> PipelineRequest:
        from autopar.pipeline.request import PipelineRequest  # for start-up time: imports the solvers

        options, order = self.session.options, parse_order(self.session.options.order)
        return PipelineRequest(
            Machine(mesh, options.hardware, options.cost_model, options.execute), self.memory_limit, options.optimizer,
            _cut(graph, self.stages, mesh.sizes[0] * order.chunks), dict(self.session.pins), recompute=options.recompute == "auto",
            order=order.name, chunks=order.chunks, effort=options.effort, seed=options.seed, deadline=self.session.deadline,
            progress=options.progress,
        )  # fmt: skip

    def _record(self, draft: _Draft, found: PipelineResult, seconds: float) -> PipelinePlan:
        """The pipeline with its bound over all numbers of microbatches that were tried on its mesh.

        Drafts may have gradients of weights apart where the pipeline has not, and the other way round. The bound is for its own way.
        """
        from autopar.recording.pipelines import record_pipeline  # for start-up time: imports the solvers

        session, bounds = self.session, dict(self.bounds.get(draft.mesh, {}))
        for one in self.made:
            if one.mesh == draft.mesh and one.step < math.inf:
                bounds[one.graph.microbatches] = one.drafted.bound(split=found.split)
        bounds[draft.graph.microbatches] = found.bound_seconds
        found = replace(found, bound_seconds=min(bounds.values()))
        made = record_pipeline(
            draft.graph, draft.request, found, target=session.name, pins=session.pins, solve_seconds=seconds,
            tried=tuple(sorted(bounds)) if session.options.microbatches == AUTO else None,
        )  # fmt: skip
        made.remember_loss(session.loss)
        return made


def _numbers(session: PlanSession, mesh: Mesh, refused: Collection[int] = ()) -> tuple[int, ...]:
    """The numbers of microbatches to try: fewer than stages leave some without work, and more than ``refused`` are refused too."""
    if session.options.microbatches != AUTO:
        return session.numbers
    found = session.numbers if not refused else tuple(number for number in session.numbers if 1 < number < min(refused))
    return tuple(number for number in found if number >= mesh.sizes[0]) or found[-1:]


def _first_place(numbers: Sequence[int], mesh: Mesh) -> int:
    """Where the number stands that is tried first: four microbatches for each stage, or the largest."""
    least = MICROBATCHES_A_STAGE * mesh.sizes[0]
    return next((place for place, number in enumerate(numbers) if number >= least), len(numbers) - 1)


def _check(options: PlanOptions) -> None:
    if options.inputs != "global":
        raise UsageError("a pipeline takes the whole batch on every rank so far", "leave inputs out, or plan without a pipeline")
    if options.mode != "train":
        raise UsageError(f"{STAGE_AXIS} is for training: a forward alone is not pipelined so far", "plan it without a pipeline")
    if options.cost_model == "communication":
        raise UsageError("the communication model gives stages no time, so nothing can be cut by it", "use the roofline model")
    if options.execute not in (None, "eager"):
        raise UsageError(f"stages run operator by operator so far, not as {options.execute}", "leave execute out, or give eager")


def _cut(graph: Graph, stages: str | Sequence[str | int] | None, count: int) -> tuple[str, ...] | None:
    """The first module of each stage but the first."""
    if stages is None or stages == "auto":
        return None
    names = [name.strip() for name in stages.split(",")] if isinstance(stages, str) else [str(name) for name in stages]
    if all(name.isdecimal() for name in names):
        layers = [unit for unit in find_units(graph) if layer_of(unit) == unit]
        counts = [int(name) for name in names]
        if sum(counts) != len(layers) or len(counts) != count or min(counts) < 1:
            message = f"the stages {','.join(names)} are {len(counts)} with {sum(counts)} layers"
            raise UsageError(message, f"give {count} counts of the model's {len(layers)} layers, {len(layers)} together")
        return tuple(layers[sum(counts[:stage])] for stage in range(1, count))
    if len(names) != count - 1:
        message = f"the first modules of {len(names)} stages are named, the pipeline has {count} stages"
        raise UsageError(message, f"name the first module of each stage but the first: {count - 1}")
    return tuple(names)


