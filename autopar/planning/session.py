"""PlanSession: one captured model on its machines, planned within one memory limit after another.

Straight down: ``open_session`` captures the model and collects its pins; ``PlanSession.plan`` ranks meshes and numbers of microbatches, and
races them; each of these is one search; the best of all becomes a Plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autopar.cost_models import Machine
from autopar.effort import check_deadline, within
from autopar.ending import put_together
from autopar.errors import AutoparError, NumberError, TimeLimitError, UsageError
from autopar.garbage import young_garbage_only
from autopar.graph import Graph
from autopar.options import AUTO, PlanOptions, check_number, user_errors
from autopar.pipeline import stage_mesh
from autopar.placements import placed_pins, written_pins
from autopar.plan import Plan
from autopar.planning.capturing import CapturedGraph, Graphs, captures_of
from autopar.planning.cautions import MicrobatchWarning, warn_hardware, warn_microbatches, warn_unknown_operators
from autopar.planning.feeding import check_rows, joined, lying_inputs, row_pins
from autopar.planning.race import Allowance, race
from autopar.planning.screening import AMPLE, SCREENING_SHARE, Ranked, count_leaders, rank
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.importer import Captures
    from autopar.search import Candidate, Screened, SearchResult, Shared


@dataclass(frozen=True)
class Planned:
    """A plan, and whether Ctrl-C ended its search."""

    plan: Plan
    interrupted: bool = False


PlanWithin = Callable[[int, float], Planned]
"""Plans within a memory limit, in bytes per rank, until a deadline of ``perf_counter``."""


@dataclass(frozen=True)
class MeshCandidate:
    """What one search plans for.

    Args:
        rows: pins, by name, that split the batch, where each rank passes its own rows.
    """

    machine: Machine
    rows: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PlanSession:
    """One model, captured, on the machines to plan for.

    Args:
        captures: the model's graphs by number of microbatches.
        numbers: of microbatches, to be tried in this order.
        machines: to be tried in this order; the last ``options.spare_meshes`` of them only in time that others leave.
        pins: name to spec: the user's, and those that stand in the model.
        name: what the plans call the model.
        loss: the model's; plans remember it for ``compile``.
        capture_seconds: until the capture ended, where it counts towards the time limit.
        deadline: when the time limit passes that the session was opened with, of ``perf_counter``.
        shared: what searches of one candidate with as many microbatches have in common, whatever the memory limit.
        results: of all searches, where candidates are asked for.
    """

    captures: Graphs
    numbers: tuple[int, ...]
    machines: tuple[Machine, ...]
    options: PlanOptions
    pins: Mapping[str, str]
    name: str
    loss: Callable[..., Any] | None = None
    capture_seconds: float = 0.0
    deadline: float = 0.0
    shared: dict[tuple[int, MeshCandidate], Shared] = field(default_factory=dict)
    results: list[SearchResult] = field(default_factory=list)

    @young_garbage_only()
    def plan(self, memory_limit: int, deadline: float) -> Planned:
        """The best plan within a memory limit.

        Args:
            memory_limit: bytes per rank.
            deadline: when the searches end, of ``perf_counter``.

        Raises:
            InfeasibleError: nothing fits. TimeLimitError: no answer in time. KeyboardInterrupt: Ctrl-C before there was a plan.
        """
        found, tried = self._find(memory_limit, deadline)
        return self._record(found, memory_limit, tried)

    @young_garbage_only()
    def plan_candidates(self, memory_limit: int, deadline: float) -> tuple[list[tuple[str, Plan]], bool]:
        """The ``options.candidates`` best distinct plans with their names, the fastest first, and whether Ctrl-C ended a search.

        A plan by hand has the name of its baseline. Arguments and errors are those of ``plan``.
        """
        from autopar.search import SEARCHED, merge_candidates  # for start-up time: imports the solvers

        self.results.clear()
        found, tried = self._find(memory_limit, deadline)
        pools = [candidate for result in self.results for candidate in result.candidates]
        plans, interrupted = list[tuple[str, Plan]](), found.interrupted
        for candidate in merge_candidates(pools, self.options.candidates):
            solver = found.solver if candidate.name == SEARCHED else "baseline"
            one = replace(found, schedule=candidate.schedule, seconds=candidate.seconds, memory=candidate.memory, solver=solver)
            planned = self._record(one, memory_limit, tried)
            plans.append((self._name(candidate, plans), planned.plan))
            interrupted |= planned.interrupted
        return plans, interrupted

    def _name(self, candidate: Candidate, plans: Sequence[tuple[str, Plan]]) -> str:
        """The candidate's name beside those of ``plans``, with its mesh where several are tried."""
        name = candidate.name if len(self.options.meshes) == 1 else f"{candidate.name} on {candidate.schedule.machine.mesh}"
        namesakes = sum(other == name or other.startswith(f"{name} (") for other, _ in plans)
        return f"{name} ({namesakes + 1})" if namesakes else name

    def _find(self, memory_limit: int, deadline: float) -> tuple[SearchResult, tuple[int, ...]]:
        """The best result, its bound over all numbers of microbatches, and these numbers."""
        tried: dict[int, SearchResult] = {}
        try:
            found = self._race(memory_limit, tried, deadline)
        except TimeLimitError as error:
            if not self.capture_seconds:
                raise
            capture = f"{self.capture_seconds:.1f} s of it until the model was captured"
            said = f"the time limit of {self.options.time_limit:g} s passed, {capture}"
            raise TimeLimitError(f"{said}: {error.message}", error.hint) from None
        if len(tried) > 1:
            found = _with_bound(found, min(item.bound_seconds for item in tried.values()))
        warn_unknown_operators(found)
        warn_microbatches(found)
        return found, tuple(sorted(tried))

    def _race(self, memory_limit: int, tried: dict[int, SearchResult], deadline: float) -> SearchResult:
        """The best plan of all meshes and numbers of microbatches; of each number searched, the best is kept in ``tried``."""
        first, count = self.captures.of(self.numbers[0]), len(self.options.meshes)
        meshes, spare = (self._that_deal_rows(first, some) for some in (self.machines[:count], self.machines[count:]))
        if len(meshes) * len(self.numbers) > 1:
            began = perf_counter()
            ends = began + SCREENING_SHARE * (deadline - began)
            screen = partial(self.screen, memory_limit)
            ranked, in_time = rank(self._usable_numbers(ends), meshes, screen, memory_limit, lambda: perf_counter() < ends)
        else:
            ranked, in_time = [Ranked(self.numbers[0], meshes[0])], True
        leaders = count_leaders(ranked, memory_limit)
        ranked += [Ranked(self.numbers[0], machine) for machine in spare]
        found = race(
            ranked, partial(self._plan_on, memory_limit, tried), Allowance(1.0, deadline - perf_counter()), leaders=leaders,
            is_hopeful=lambda item, best: _may_gain(item, best, memory_limit), spare=len(spare),
        )  # fmt: skip
        return found if in_time else replace(found, cut=True)

    def _that_deal_rows(self, graph: Graph, machines: Sequence[Machine]) -> list[Machine]:
        """The machines on which rows can be dealt out, where each rank passes its own; else all."""
        return [machine for machine in machines if any(self._candidates(graph, (machine,)))]

    def _usable_numbers(self, ends: float) -> Iterator[int]:
        """The numbers of microbatches that the step can be made of.

        Raises:
            TimeLimitError: one was not captured until ``ends``, of ``perf_counter``.
        """
        for number in self.numbers:
            if number != self.numbers[0]:
                try:
                    with within(ends, _passed_in_capture(self.options)):
                        self.usable(number)
                except UsageError as error:
                    said = f"{number} microbatches and more are not tried: {error.message}"
                    warnings.warn(said, MicrobatchWarning, stacklevel=5)
                    return
            yield number

    def usable(self, number: int) -> Graph:
        """The graph of one microbatch, where the batch is cut into this number.

        Raises:
            UsageError: no number can be run. NumberError: this one cannot, or does not add up to the batch.
        """
        graph = self.captures.of(number)
        if number != 1 and not graph.accumulation.whole:
            message = f"the microbatches do not add up to the batch: {graph.accumulation.reason}"
            refusal = NumberError(message, "let the loss be a sum or a mean over rows, or plan without a pipeline")
            refusal.rows = min((graph.tensors[name].shape[0] for name in graph.accumulation.cut), default=0)
            raise refusal
        return graph

    def screen(self, memory_limit: int, number: int, machine: Machine) -> Screened | None:
        """The best plan by hand on a machine with a number of microbatches, estimated; None where none applies."""
        from autopar.search import Shared, screen_baselines  # for start-up time: imports the solvers

        graph = self.captures.of(number)
        found: list[Screened] = []
        for candidate in self._candidates(graph, (machine,)):
            pins = {**dict(candidate.rows), **self.pins}
            shared = self.shared.setdefault((number, candidate), Shared()) if not self.pins else Shared()
            recompute = self.options.recompute == "auto"
            try:
                with user_errors():
                    one = screen_baselines(graph, machine, memory_limit, self.options.optimizer, pins, recompute=recompute, shared=shared)
            except UsageError:  # a pin that the mesh cannot take: the search says so
                continue
            found += [one] if one is not None else []
        return min(found, key=lambda one: one.worth(memory_limit), default=None)

    def _plan_on(self, memory_limit: int, tried: dict[int, SearchResult], ranked: Ranked, allowance: Allowance) -> SearchResult:
        """The best plan on a machine with a number of microbatches, over the ways to deal out rows. ``tried`` keeps the number's best."""
        number, began = ranked.number, perf_counter()
        with within(began + allowance.seconds, _passed_in_capture(self.options)):
            graph = self.captures.of(number)
        if self.options.inputs == "local":
            check_rows(graph, (ranked.machine.mesh,))
        candidates = tuple(self._candidates(graph, (ranked.machine,)))
        bounds = dict.fromkeys(candidates, 0.0)
        search = partial(self._search, graph, number, memory_limit, bounds)
        left = replace(allowance, seconds=allowance.seconds - (perf_counter() - began))
        found = race(candidates, search, left)
        if self.options.inputs == "local":  # the bound is over all splits of the batch on that mesh
            found = _with_bound(found, min(bounds.values()))
        tried[number] = min(tried.get(number, found), found, key=lambda item: item.seconds)
        return found

    def _candidates(self, graph: Graph, machines: Sequence[Machine]) -> Iterator[MeshCandidate]:
        for machine in machines:
            if self.options.inputs == "global":
                yield MeshCandidate(machine)
            else:
                yield from (MeshCandidate(machine, tuple(rows.items())) for rows in row_pins(graph, machine.mesh))

    def _search(
        self,
        graph: Graph,
        number: int,
        memory_limit: int,
        bounds: dict[MeshCandidate, float],
        candidate: MeshCandidate,
        allowance: Allowance,
    ) -> SearchResult:
        """The best plan of a candidate; its bound is kept in ``bounds``, and infinity where it has no plan at all."""
        try:
            found = self._found(graph, number, memory_limit, candidate, allowance)
        except AutoparError as error:
            bounds[candidate] = 0.0 if isinstance(error, TimeLimitError) else inf
            raise
        bounds[candidate] = max(bounds[candidate], found.bound_seconds)
        return found

    def _found(self, graph: Graph, number: int, memory_limit: int, candidate: MeshCandidate, allowance: Allowance) -> SearchResult:
        from autopar.search import Shared, find_pinned_plan, find_plan, find_plan_with_host  # for start-up time: imports the solvers

        options, rows = self.options, dict(candidate.rows)
        joined(rows, self.pins, candidate.machine.mesh)
        find: Callable[..., SearchResult] = partial(find_pinned_plan, pins=self.pins) if self.pins else find_plan
        if options.offload != "off":
            find = partial(find_plan_with_host, find=find)
        with user_errors():
            found = find(
                graph,
                candidate.machine,
                memory_bytes=memory_limit,
                optimizer=options.optimizer,
                constraints=rows,
                time_limit=allowance.seconds,
                seed=options.seed,
                progress=options.progress,
                recompute=options.recompute == "auto",
                effort=options.effort,
                effort_share=allowance.effort_share,
                shared=self.shared.setdefault((number, candidate), Shared()),
                candidates=options.candidates,
            )
        if options.candidates > 1:
            self.results.append(found)
        return found

    def _record(self, found: SearchResult, memory_limit: int, tried: tuple[int, ...]) -> Planned:
        from autopar.recording import record  # for start-up time: imports the passes

        numbers = tried if self.options.microbatches == AUTO else None
        inputs = self.options.inputs
        pins = {**(lying_inputs(found.schedule) if inputs == "local" else {}), **self.pins}
        make = partial(record, found, target=self.name, memory_limit=memory_limit, pins=pins, tried=numbers, inputs=inputs)
        plan, interrupted = put_together(make)
        plan.remember_loss(self.loss)
        return Planned(plan, found.interrupted or interrupted)


def open_session(target: Target, options: PlanOptions, captures: Captures | None = None, *, staged: bool = False) -> PlanSession:
    """Captures the model, and collects the pins that stand in it.

    Args:
        target: its model may be a captured Graph.
        captures: the model's graphs, where several sessions share them; they were captured with the same pins.
        staged: a pipeline is planned, and hints name what helps there.

    Raises:
        CaptureError: the model cannot be captured. UsageError: a pin that fits no mesh, or a number of microbatches that the step cannot be
            made of. TimeLimitError: the time limit passed meanwhile.
    """
    given = target.model
    if isinstance(given, Graph):
        if options.microbatches not in (1, given.microbatches):
            message = f"the graph is one of {given.microbatches} microbatches, asked are {options.microbatches}"
            raise UsageError(message, "capture the model with microbatches=")
        _check_captured(given, target, options)
        graphs: Graphs = CapturedGraph(given)
        numbers: tuple[int, ...] = (given.microbatches,)
    else:
        made = captures or captures_of(
            target, mode=options.mode, compute_dtype=options.compute_dtype, pins=options.pins, staged=staged
        )  # fmt: skip
        graphs, numbers = made, made.numbers() if options.microbatches == AUTO else (check_number(options.microbatches),)
    here = not isinstance(given, Graph) and captures is None
    with within(options.deadline, _passed_in_capture(options)) if here else nullcontext():
        check_deadline()
        graph = graphs.of(numbers[0])
        check_deadline()
    spent = perf_counter() - options.began if here else 0.0
    meshes = (*options.meshes, *options.spare_meshes)
    pinned = tuple(map(stage_mesh, meshes))
    pins = {**written_pins(graph, pinned), **options.pins}
    if not isinstance(given, Graph):
        pins = {**placed_pins(given, target.args, dict(target.kwargs), target.loss_args, graph, pinned), **pins}
    if options.inputs == "local":
        check_rows(graph, meshes)
    warn_hardware(options.hardware, meshes, options.cost_model)
    name = options.name or ("graph" if isinstance(given, Graph) else type(given).__name__)
    machines = tuple(Machine(mesh, options.hardware, options.cost_model, options.execute) for mesh in meshes)
    return PlanSession(graphs, numbers, machines, options, pins, name, target.loss, spent, options.deadline)


def _check_captured(graph: Graph, target: Target, options: PlanOptions) -> None:
    """Raises UsageError: a graph that was captured otherwise than asked."""
    if options.mode != graph.mode == "train":
        raise UsageError("the graph is one of training, asked is inference", "capture the model with mode='inference'")
    has = graph.arguments.get("compute_dtype")
    if options.compute_dtype not in (None, has):
        message = f"the graph computes in {has or 'its own dtype'}, asked is {options.compute_dtype}"
        raise UsageError(message, "capture the model with compute_dtype=")
    if target.loss is not None and graph.of_kind("tangent"):
        raise UsageError("the graph was captured without a loss", "capture the model with loss= and loss_args=")


def _passed_in_capture(options: PlanOptions) -> TimeLimitError:
    message = f"the time limit of {options.time_limit:g} s passed before the model was captured"
    return TimeLimitError(message, "allow more time (--time-limit), or capture once and plan the graph")


def _may_gain(item: Ranked, best: SearchResult, memory_limit: int) -> bool:
    """Whether a search may find a better plan: it is not hopeless, and has no more microbatches than a plan with memory to spare."""
    recomputes = any(instruction.phase == "recompute" for instruction in best.schedule.instructions)
    is_ample = best.memory.peak <= AMPLE * memory_limit and not recomputes
    return item.is_hopeful(best) and not (is_ample and item.number > best.schedule.graph.microbatches)


def _with_bound(found: SearchResult, bound_seconds: float) -> SearchResult:
    """With a bound over all numbers of microbatches that were tried."""
    gap = (found.seconds - bound_seconds) / found.seconds if found.seconds > 0 else 0.0
    return replace(found, bound_seconds=bound_seconds, gap=gap)
