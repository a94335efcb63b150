"""``plan_pipeline``: a cut, a plan of each stage, and a timetable, on one stage mesh; with a bound over all cuts and orders.

1. The whole microbatch graph is planned on one stage mesh. Its layouts are those in which values cross. Its bound bounds every pipeline.
2. The chain of units, with their seconds and bytes in that plan, is cut by ``autopar.solvers.pipeline`` within the memory limit.
3. Each stage is planned as a graph of its own, with its microbatches in flight: first among the whole plan's strategies alone (a draft).
4. With the stages' own figures the timetable is solved once more. Stages of other cuts are estimated by them, and the next cut is planned
   (``next_cut``). The best is kept.
5. Steps 3 and 4 are done again among all strategies. Of several meshes or numbers of microbatches, only for the best draft.
6. Pipelines by hand are priced beside it. One that fits and is faster is taken instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

from autopar.cost_models import UNLIMITED, Machine
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.graph import Graph
from autopar.pipeline.baselines import PipelineBaseline, PipelineBaselines
from autopar.pipeline.clock import StageCosts, measure_stage, time_pipeline
from autopar.pipeline.crossing import crossing_specs, join_pins, transfer_seconds
from autopar.pipeline.cutting import STAGE_AXIS, Stages, cut_graph, find_units, stage_mesh
from autopar.pipeline.layer_tables import LayerTables, least_modes, measure_layers
from autopar.pipeline.next_cut import StageEstimates, find_kinds
from autopar.pipeline.order_search import choose_order
from autopar.pipeline.orders import in_flight_of
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.result import PipelineResult
from autopar.pipeline.solving import solve
from autopar.pipeline.stage_searches import StageSearches
from autopar.pipeline_plan import OrderName
from autopar.schedule import Schedule, memory
from autopar.schedule.splitting import defer_once, split_backward
from autopar.search import SearchResult
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.sharding import ShardingSpec
from autopar.solvers.pipeline import Mode, PipelineProblem
from autopar.solvers.pipeline.bounds import AllCuts, bound_total, bound_total_chunks

MANY = 1 << 16
"""Microbatches of the problem whose bound is that of one: what a step does once then counts for 1/65536 of a microbatch."""
ROUNDS = 4
"""Cuts whose stages are planned, at most. Random chains of 2 to 4 stages in short memory are 14 % behind their best cut after one, 0.3 %
after two, 0.03 % after three and 0.01 % after four. Llama-3-8B on 4 stages in 8 GiB has its best with the third."""
UNNEEDED_PHASES = frozenset({"limit search", "final local search"})
"""Phases that a plan of the whole graph does without, since it is not run: drafts are the same, in a fifth of the CPU seconds less."""
SHORTEST_SECONDS = 1e-12
"""Seconds that a stage is taken to be expected to take, at least: some have nothing but views."""
CUT_WORK = 3.0
"""Work of the pipeline's solver for one cut, in units of about one CPU second."""
APART_GAIN = 0.05
"""Share by which gradients of weights apart must make a step shorter to be taken unasked: microbatches hold more then, and predicted steps
are off by a few percent. Llama-3-8B on 4 stages gains 0.1 %, 70B on 8 stages 3 %, a small GPT-2 on 4 stages 17 %."""


def plan_pipeline(graph: Graph, asked: PipelineRequest) -> PipelineResult:
    """The fastest pipeline found.

    Args:
        graph: of one microbatch.

    Raises:
        UsageError: a mesh without ``pp`` outermost, more stages than units, or a cut that the graph does not allow.
        InfeasibleError: no pipeline found fits in memory. TimeLimitError: none was found in time.
        KeyboardInterrupt: Ctrl-C before there was a pipeline. Later it ends all searches with the best so far.
    """
    drafted = draft_pipeline(graph, asked, math.inf)
    assert drafted is not None
    return drafted.finish()


def draft_pipeline(graph: Graph, asked: PipelineRequest, least: float) -> DraftedPipeline | None:
    """The fastest pipeline with the whole graph's strategies; None where the bound proves that none takes less than ``least`` seconds.

    Arguments and errors are those of ``plan_pipeline``. Where no draft fits in memory, other strategies may.
    """
    if asked.machine.mesh.names[0] != STAGE_AXIS:
        raise UsageError(f"the mesh axis {STAGE_AXIS} must be the outermost", f"write {STAGE_AXIS} first, as in {STAGE_AXIS}=2,dp=4")
    return _Planner(graph, asked).draft(least)


def find_floor(graph: Graph, machine: Machine, optimizer: str) -> float:
    """Seconds that no pipeline takes less than, whatever its cut, plans and order: its operators alone, spread evenly over the stages.

    Args:
        graph: of one microbatch.
        machine: all ranks; the outermost axis is ``pp``.
    """
    stage = replace(machine, mesh=stage_mesh(machine.mesh))
    space = Space(graph, stage, optimizer, Pins())
    for op in graph.ops:
        space.op_choices(op)
    least = least_modes(graph, {op.name: space.least_seconds(op, graph) for op in graph.ops})
    return graph.microbatches * sum(mode.forward + mode.backward for mode in least) / machine.mesh.sizes[0]


@dataclass(frozen=True)
class DraftedPipeline:
    """A pipeline with the whole graph's strategies, and what is needed to search among all of them.

    Args:
        best: None where no draft fits in memory, or none was found in time.
        whole: the plan of the whole graph.
        tables: the chain of units.
        bound_seconds: see ``PipelineResult``.
    """

    planner: _Planner
    best: PipelineResult | None
    whole: SearchResult
    tables: LayerTables
    bound_seconds: float

    @property
    def step(self) -> float:
        """Seconds of the draft; infinite without one."""
        return math.inf if self.best is None else self.best.times.step

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the searches."""
        return self.best is not None and self.best.interrupted

    def bound(self, *, split: bool) -> float:
        """Seconds that no pipeline takes less than, with gradients of weights apart (``split``) or not; 0 without a draft."""
        if self.best is None or self.best.split == split:
            return self.bound_seconds
        return self.planner.bound(self.whole, self.step, split=split)

    def finish(self) -> PipelineResult:
        """The fastest pipeline found with any strategies, or by hand; the draft where Ctrl-C ended it. Errors as of ``plan_pipeline``."""
        return self.stop() if self.interrupted else self.planner.finish(self)

    def stop(self) -> PipelineResult:
        """The draft as the result, after Ctrl-C."""
        assert self.best is not None
        return replace(self.best, bound_seconds=self.bound_seconds, interrupted=True)


class _Planner:
    def __init__(self, graph: Graph, asked: PipelineRequest) -> None:
        self.graph, self.asked, self.machine = graph, asked, asked.stage_machine
        self.microbatches = graph.microbatches
        deadline = (perf_counter() + asked.deadline) / 2
        self.searches = StageSearches(self.machine, asked.optimizer, asked.recompute, asked.effort, asked.seed, deadline, asked.progress)
        """Those of the whole graph have half of the time, those of stages all that is left."""

    def draft(self, least: float) -> DraftedPipeline | None:
        """The fastest pipeline with the whole graph's strategies; None where none at all takes less than ``least`` seconds."""
        self._check_cut()
        self.searches = replace(self.searches, has_plan=least < math.inf)
        many = self.graph.accumulated(replace(self.graph.accumulation, microbatches=MANY, cut=()))
        whole = replace(self.searches, recompute=False, skip=UNNEEDED_PHASES).plan(many, self.asked.pins, 1, UNLIMITED)
        self.searches = replace(self.searches, whole=whole, deadline=self.asked.deadline)
        tables = measure_layers(whole.schedule, self.asked.optimizer)
        if not self.asked.recompute:
            tables = LayerTables(tables.units, tuple(modes[:1] for modes in tables.modes))
        if least < math.inf and self.bound(whole, least, split=self.asked.order in ("auto", "zero-bubble")) >= least:
            return None
        best = self._cut_and_plan(replace(self.searches, drafts=True), tables, whole.schedule)
        bound = 0.0 if best is None else self.bound(whole, best.times.step, split=best.split)
        return DraftedPipeline(self, best, whole, tables, bound)

    def _check_cut(self) -> None:
        """Raises UsageError: more stages than units, or a cut that the graph does not allow."""
        units = list(find_units(self.graph))
        if len(units) < self.asked.count:
            some = ", ".join(units[:5])
            message = f"{self.asked.count} stages are asked for, and the model can be cut into {len(units)} units: {some}"
            raise UsageError(message, f"take fewer stages ({STAGE_AXIS}{', or fewer a rank in --order' * (self.asked.chunks > 1)})")
        cut_graph(self.graph, self.asked.cut or ())

    def finish(self, drafted: DraftedPipeline) -> PipelineResult:
        """The fastest pipeline with any strategies, or by hand."""
        searches = replace(self.searches, has_plan=self.searches.has_plan or drafted.best is not None)
        best = self._cut_and_plan(searches, drafted.tables, drafted.whole.schedule, drafted.best)
        written = dict[str, PipelineBaseline]()
        try:
            if best is None or not best.interrupted:
                written = PipelineBaselines(self.graph, self.asked).find()
        except KeyboardInterrupt:
            if best is None:
                raise
            best = replace(best, interrupted=True)
        for one in written.values():
            is_order = self.asked.order in ("auto", "whole", "1f1b", "interleaved")
            is_allowed = (self.asked.cut is None or one.cut == self.asked.cut) and is_order
            if one.fits and is_allowed and (best is None or one.times.step < best.times.step):
                best = self._adopt(one)
        if best is None:
            raise InfeasibleError(f"no pipeline found fits in {self.asked.memory_limit} bytes a rank", "allow more memory, or more stages")
        bound = self.bound(drafted.whole, best.times.step, split=best.split)
        return replace(best, bound_seconds=bound, baselines=written)

    def _cut_and_plan(
        self, searches: StageSearches, tables: LayerTables, whole: Schedule, best: PipelineResult | None = None
    ) -> PipelineResult | None:  # fmt: skip
        """The fastest pipeline of ``ROUNDS`` cuts: the first that of the best so far, or as the tables call for; see ``improve_cut``.

        Args:
            best: the fastest so far.

        Raises:
            TimeLimitError: there was no time for one, and a draft is not asked for. KeyboardInterrupt: before there was one.
        """
        plain = [modes[0].seconds for modes in tables.modes]
        estimates = StageEstimates(
            tables.units, find_kinds(self.graph), plain, self.in_flight, self.asked.positions, self.microbatches
        )
        tried = set[tuple[str, ...]]()
        cut = best.cut if best is not None else None
        while len(tried) < ROUNDS and not (best is not None and searches.is_late):
            try:
                cut = self._choose_cut(tables) if cut is None else cut
                made = self._plan_cut(searches, cut, whole)
            except TimeLimitError:
                if best is None and not searches.drafts:
                    raise
                break
            except KeyboardInterrupt:
                if best is None:
                    raise
                best = replace(best, interrupted=True)
                break
            tried.add(cut)
            if made is not None:
                searches = replace(searches, has_plan=True)
                best = made if best is None or made.times.step <= best.times.step else best
            if self.asked.cut is not None or best is None:
                break
            if made is not None:
                estimates.learn(made.cut, made.costs, made.transfer_seconds)
            cut = estimates.improve_cut(best.cut, tried) if estimates.planned else None
            if cut is None:
                break
        return best

    def _adopt(self, made: PipelineBaseline) -> PipelineResult:
        """A pipeline by hand as a result."""
        found = tuple(
            SearchResult(
                schedule, plan.step_seconds, 0.0, 1.0, "feasible", 0.0, "baseline", self.asked.optimizer,
                memory(schedule, self.asked.optimizer), {},
            )
            for schedule, plan in zip(made.schedules, made.plans, strict=True)
        )
        return PipelineResult(made.stages, made.cut, found, made.costs, made.order, made.times, made.transfer_seconds, 0.0)

    def bound(self, whole: SearchResult, step: float, *, split: bool) -> float:
        """Seconds that no pipeline of at most ``step`` seconds takes less than: see ``solvers.pipeline.bounds``.

        Plans of the stages, one after another, are a plan of the whole graph on one stage mesh. Its bound holds for MANY times their
        seconds and what they do once a step. What a stage does once takes less than the step. Beside that stands the bound of a chain of
        units that take what their operators do at least. Gradients of weights that may be apart (``split``) are as long as backward.
        """
        positions, chunks, m = self.asked.positions, self.asked.chunks, self.microbatches
        one = max(whole.bound_seconds - positions * step, 0.0) / MANY
        least = least_modes(whole.schedule.graph, self.searches.least_seconds(whole.schedule.graph, self.asked.pins))
        modes = [Mode(mode.forward, 0.0, mode.backward) if split else mode for mode in least]
        chain = AllCuts(PipelineProblem(tuple((mode,) for mode in modes), positions, m, chunks, split=split)).least()
        if split:
            return max(chain, one * m / positions)
        return max(chain, bound_total(one, positions, m) if chunks == 1 else bound_total_chunks(one, positions, m, chunks))

    def _choose_cut(self, tables: LayerTables) -> tuple[str, ...]:
        """The first module of each stage but the first."""
        if self.asked.cut is not None:
            return self.asked.cut
        limit = float(self.asked.memory_limit)
        problem = PipelineProblem(tables.modes, self.asked.positions, self.microbatches, self.asked.chunks, limit=limit)
        solution = solve(problem, CUT_WORK)
        if solution.plan is None:
            problem = replace(problem, limit=None)
            solution = solve(problem, CUT_WORK)
        assert solution.plan is not None
        ends, cut = 0, list[str]()
        for layers in solution.plan.cut[:-1]:
            ends += layers
            cut.append(tables.units[ends])
        return tuple(cut)

    def _plan_cut(self, searches: StageSearches, cut: tuple[str, ...], whole: Schedule) -> PipelineResult | None:
        """The pipeline of a cut; None where it does not fit in memory.

        Each stage is planned for as many microbatches in flight as 1F1B holds, one more than the stages behind it. The timetable then has
        more where they fit, which need no room made for them: seconds of recomputation cost more than what they gain. The stages of a rank
        share its memory: where they do not fit together, they are planned once more, each within a share.
        """
        stages = cut_graph(self.graph, cut, self.asked.positions)
        specs = crossing_specs(stages, self.graph, self.machine.mesh.sizes, {name: one.strategy for name, one in whole.operations.items()})
        limits = [self.asked.memory_limit] * len(stages.graphs)
        for is_last in (self.asked.chunks == 1, True):
            try:
                found = self._plan_stages(searches, stages, specs, limits)
            except InfeasibleError:
                return None
            shares = limits if is_last else self._share_memory(stages, found)
            if shares == limits:
                break
            limits = shares
        planned = _PlannedCut(stages, cut, found, transfer_seconds(self.asked.machine, stages, self.graph, specs))
        if self.asked.order != "auto":
            return self._order_stages(self.asked.order, planned)
        made = self._order_stages("whole", planned)
        apart = self._order_stages("zero-bubble", planned) if made is not None else None
        return made if apart is None or made is None or apart.times.step > (1 - APART_GAIN) * made.times.step else apart

    def _plan_stages(
        self, searches: StageSearches, stages: Stages, specs: Mapping[str, ShardingSpec], limits: Sequence[int]
    ) -> list[SearchResult]:  # fmt: skip
        """The plan of each stage. Raises InfeasibleError: one does not fit in its limit, in bytes."""
        found = list[SearchResult]()
        for stage, (graph, limit) in enumerate(zip(stages.graphs, limits, strict=True)):
            before = [one.schedule.specs for one in found]
            pins = join_pins(graph, self.graph, self.machine.mesh, self.asked.pins, specs, stages, before)
            found.append(searches.plan(graph, pins, self.in_flight[stage], limit))
        return found

    @cached_property
    def in_flight(self) -> list[int]:
        """The microbatches in flight that each stage is planned for."""
        return [in_flight_of(self.asked.order, stage, self.asked.count, self.microbatches) for stage in range(self.asked.count)]

    def _share_memory(self, stages: Stages, found: Sequence[SearchResult]) -> list[int]:
        """A limit for each stage, in bytes: the whole where a rank's stages fit together, else a share of what does not rest, by need."""
        limit, shares = self.asked.memory_limit, [self.asked.memory_limit] * len(found)
        costs = [measure_stage(one.schedule, self.asked.optimizer) for one in found]
        needs = [cost.peak_with(self.in_flight[stage]) for stage, cost in enumerate(costs)]
        for position in range(self.asked.positions):
            mine = stages.at(position)
            need, rest = sum(needs[stage] for stage in mine), sum(costs[stage].rest for stage in mine)
            for stage in mine if need > limit else ():
                own = costs[stage].rest
                more = (limit - rest) * (needs[stage] - own) // max(need - rest, 1)
                shares[stage] = own + more if rest < limit else limit * own // rest
        return shares

    def _order_stages(self, way: OrderName, planned: _PlannedCut) -> PipelineResult | None:
        """The pipeline of planned stages in an order; None where none found fits in memory."""
        split, found, costs = way == "zero-bubble", list[SearchResult](), list[StageCosts]()
        stages, cut, _, transfer = planned
        for result in planned.found:
            schedule = split_backward(result.schedule) if split else defer_once(result.schedule)
            found.append(replace(result, schedule=schedule, memory=memory(schedule, result.optimizer)))
            costs.append(measure_stage(schedule, self.asked.optimizer, split=split))
        order = choose_order(way, stages, costs, self.microbatches, transfer, self.asked.memory_limit)
        if order is None:
            return None
        times = time_pipeline(stages, costs, order, transfer)
        if max(times.peaks) > self.asked.memory_limit:
            return None
        return PipelineResult(stages, cut, tuple(found), tuple(costs), order, times, transfer, 0.0)


class _PlannedCut(NamedTuple):
    """The plans of a cut's stages, before they have an order.

    Args:
        transfer: seconds of the largest value that crosses.
    """

    stages: Stages
    cut: tuple[str, ...]
    found: Sequence[SearchResult]
    transfer: float
