"""The searches for plans of stages: each with its microbatches in flight, and as few as do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from time import perf_counter

from autopar.cost_models import Machine
from autopar.effort import Effort, unlimited
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.pipeline.equal_stages import schedule_for, structure_of
from autopar.schedule import Assignment, memory
from autopar.schedule.legality import check_legal
from autopar.schedule.limit_search import improve_plan
from autopar.schedule.passes import ENDING, run_passes
from autopar.schedule.storages import held_between_halves
from autopar.search import Progress, SearchResult, Shared, find_plan
from autopar.sharding import ShardingSpec

WORTH_SEARCHING = 0.04
"""Share of a stage's seconds that a plan for fewer microbatches in flight must save, for one to be searched for more of them.

Llama-3-70B on 8 stages in 40 GiB takes 4.28 s a step with it and with 0.01. The search takes 68 and 92 CPU seconds.
16 stages of a small layer each take 21.0 and 20.9 ms in 40 MiB. The search takes 115 and 182 CPU seconds.
"""
STAGE_EFFORT = 0.2
"""Share of a search's work for one plan of a stage. A stage of 70B in 40 GiB takes 2.16 s with it, 2.12 with 0.25, 2.14 with all."""
LEAST_SECONDS = 5.0
"""Seconds that a search has where the deadline has passed and no plan is known yet."""


_Found = dict[tuple[int, int], SearchResult | None]


@dataclass
class _Structure:
    """What is known of the stages of one structure.

    Args:
        graph, pins: those that are searched, in their own names.
        shared: by microbatches in flight.
        found: plans by microbatches in flight and limit in bytes. None: nothing was found, since nothing fits or time or work ended.
        drafts: the same of searches among the whole plan's strategies alone.
    """

    graph: Graph
    pins: Mapping[str, str]
    shared: dict[int, Shared]
    found: _Found = field(default_factory=dict)
    drafts: _Found = field(default_factory=dict)


@dataclass(frozen=True)
class StageSearches:
    """Searches of the stages of one pipeline, on one stage mesh. Stages of equal structure share theirs, all share prices of reshards.

    Args:
        recompute, optimizer, effort, seed, progress: see ``find_plan``.
        deadline: when the searches end, of ``perf_counter``.
        has_plan: whether another plan is known, so that nothing is searched after the deadline.
        whole: the plan of the graph that was cut. Searches begin with its strategies. On 70B a stage of nine layers takes 5 % less so.
        drafts: whether only its strategies are searched.
        skip: names of phases that are left out, see ``find_plan``.
    """

    machine: Machine
    optimizer: str
    recompute: bool
    effort: Effort
    seed: int
    deadline: float
    progress: Progress | None
    has_plan: bool = False
    whole: SearchResult | None = None
    drafts: bool = False
    skip: Set[str] = frozenset()
    _structures: dict[str, _Structure] = field(default_factory=dict)

    def plan(self, graph: Graph, pins: Mapping[str, str], in_flight: int, room: int) -> SearchResult:
        """The fastest plan found of a stage that fits with its microbatches in flight; where none does, with fewer of them.

        The plan for one microbatch comes first. It serves where it fits, and tells what one for more of them can be worth.

        Args:
            room: bytes of a rank for the stage.

        Raises:
            InfeasibleError: one microbatch does not fit; of drafts, with the whole plan's strategies.
            TimeLimitError: the deadline passed. KeyboardInterrupt: Ctrl-C ended a search.
        """
        key = structure_of(graph, pins)
        if key not in self._structures:
            self._structures[key] = _Structure(graph, pins, {1: Shared()})
        known = self._structures[key]
        self._search(known, 1, room)
        count = self._most_in_flight(known, in_flight, room)
        self._serve(known, count, room)
        return self._in_names(min(self._fitting(known, count, room), key=lambda one: one.seconds), graph)

    def _most_in_flight(self, known: _Structure, in_flight: int, room: int) -> int:
        """The most microbatches, up to these, for which a plan was found that fits: by bisection; after the deadline among known plans.

        A count for which nothing was found is not searched again in as little room or less, and no larger one is.
        """
        fits = max(count for count in range(1, in_flight + 1) if self._fitting(known, count, room))
        missed = min((count for (count, more), one in self._found(known).items() if one is None and more >= room), default=in_flight + 1)
        count = min(in_flight, missed - 1)
        while count > fits:
            self._serve(known, count, room)
            fits, missed = (count, missed) if self._fitting(known, count, room) else (fits, count)
            count = fits if self.is_late else (fits + missed) // 2
        return fits

    def _fitting(self, known: _Structure, in_flight: int, room: int) -> list[SearchResult]:
        return [one for one in self._found(known).values() if one is not None and self.peak(one, in_flight) <= room]

    def _found(self, known: _Structure) -> _Found:
        return known.drafts if self.drafts else known.found

    def _serve(self, known: _Structure, in_flight: int, room: int) -> None:
        """Searches until a plan fits that is nearly as fast as the fastest for fewer microbatches in flight, or was searched for this many.

        Where plans for more of them fit, counts are bisected: those between two with plans that are equally fast need no search. After the
        deadline what fits will do.
        """
        plans = self._found(known)
        while not self._is_searched(known, in_flight, room):
            fewer = {count for count, _ in plans if count < in_flight and self._is_searched(known, count, room)}
            fastest = {count: self._seconds(known, count, room) for count in fewer}
            seconds = self._seconds(known, in_flight, room)
            if seconds <= (1 + WORTH_SEARCHING) * max(fastest.values()) or (seconds < math.inf and self.is_late):
                return
            count = in_flight if seconds == math.inf else (max(fastest) + in_flight + 1) // 2
            moved = self._reorder(known, count, room)
            if moved is not None and moved.seconds <= (1 + WORTH_SEARCHING) * max(fastest.values()):
                plans[count, room] = moved
            else:
                self._search(known, count, room)

    def _is_searched(self, known: _Structure, in_flight: int, room: int) -> bool:
        """Whether a search for as many microbatches in flight, within this room or more, has found what there is for it."""
        plans = self._found(known)
        return (in_flight, room) in plans or bool(self._wider(known, in_flight, room))

    def _wider(self, known: _Structure, in_flight: int, room: int) -> list[SearchResult]:
        """Plans for as many microbatches in flight that were found within more room, and fit. Within less none is faster."""
        plans = [one for (count, more), one in self._found(known).items() if one is not None and count == in_flight and more > room]
        return [one for one in plans if self.peak(one, in_flight) <= room]

    def _seconds(self, known: _Structure, in_flight: int, room: int) -> float:
        """Seconds of the fastest plan that fits; infinite without one."""
        return min((one.seconds for one in self._fitting(known, in_flight, room)), default=math.inf)

    def _reorder(self, known: _Structure, in_flight: int, room: int) -> SearchResult | None:
        """The fastest plan, in an order from local search within what microbatches in flight leave; None where it does not fit."""
        some = [one for (count, limit), one in self._found(known).items() if one is not None and count <= in_flight and limit >= room]
        found = min(some, key=lambda one: one.seconds)
        plan, plain = found.scheduled_plan, found.schedule.graph
        if plan is None or plan.estimated:
            return None
        schedule = replace(plan.schedule, graph=plain.accumulated(replace(plain.accumulation, in_flight=in_flight)))
        samples = ((plan.samples[0][0], schedule),)
        moved = replace(plan, schedule=schedule, samples=samples, memory=memory(schedule, self.optimizer))
        moved = improve_plan(moved, self.optimizer, room, unlimited())
        if moved.memory.peak > room:
            return None
        listed = replace(check_legal(run_passes(moved.schedule, ENDING), "local search"), graph=plain)
        seconds = plain.microbatches * moved.seconds
        return replace(found, schedule=listed, memory=memory(listed, self.optimizer), seconds=seconds, scheduled_plan=None)

    def least_seconds(self, graph: Graph, pins: Mapping[str, str]) -> Mapping[str, float]:
        """Seconds that each operator of a graph that was planned takes at least, in any strategy."""
        space = next(iter(self._structures[structure_of(graph, pins)].shared[1].spaces.values()))
        return {op.name: space.least_seconds(op, graph) for op in graph.ops}

    @staticmethod
    def peak(found: SearchResult, in_flight: int) -> int:
        """Bytes of a rank at the peak of a plan with microbatches in flight."""
        return found.memory.peak + (in_flight - 1) * found.schedule.once(held_between_halves)

    def _search(self, known: _Structure, in_flight: int, limit: int) -> SearchResult | None:
        """The plan with microbatches in flight within a limit, in bytes, or one found within more that fits; None where none was found.

        Raises:
            InfeasibleError: one microbatch does not fit. TimeLimitError: the deadline passed. KeyboardInterrupt: Ctrl-C ended the search.
        """
        plans = self._found(known)
        if wider := self._wider(known, in_flight, limit):
            return min(wider, key=lambda one: one.seconds)
        if (in_flight, limit) not in plans:
            left = self._time_left()
            if in_flight not in known.shared:
                known.shared[in_flight] = known.shared[1].with_in_flight(in_flight)
            graph = known.graph.accumulated(replace(known.graph.accumulation, in_flight=in_flight))
            is_drafted = not self.drafts and known.drafts.get((in_flight, limit)) is not None  # then its plan is among those shared
            begun = None if is_drafted else self._begun(graph)
            try:
                found = find_plan(
                    graph, self.machine, memory_bytes=limit, optimizer=self.optimizer, constraints=known.pins, recompute=self.recompute,
                    baselines=False, time_limit=left, effort=self.effort, effort_share=STAGE_EFFORT, seed=self.seed,
                    progress=self.progress, shared=known.shared[in_flight], relaxed=begun, skip=self.skip,
                    only_relaxed=self.drafts and begun is not None,
                )  # fmt: skip
            except (InfeasibleError, TimeLimitError):
                if in_flight == 1:
                    raise
                plans[in_flight, limit] = None
            else:
                if found.interrupted:
                    raise KeyboardInterrupt
                schedule = replace(found.schedule, graph=known.graph)
                plans[in_flight, limit] = replace(found, schedule=schedule, memory=memory(schedule, found.optimizer))
        return plans[in_flight, limit]

    @property
    def is_late(self) -> bool:
        """Whether the deadline passed."""
        return perf_counter() > self.deadline

    def _time_left(self) -> float:
        """Wall-clock seconds of a search. Raises TimeLimitError: the deadline passed, and another plan is known."""
        left = self.deadline - perf_counter()
        if self.has_plan and left <= 0:
            raise TimeLimitError("the time for stages was used up", "allow more time (--time-limit)")
        return left if self.has_plan else max(left, LEAST_SECONDS)

    def _begun(self, graph: Graph) -> SearchResult | None:
        """The strategies of the whole graph's plan, as the result of a search without a bound. None where they do not cover the graph."""
        plan = self.whole.scheduled_plan if self.whole is not None else None
        if self.whole is None or plan is None:
            return None
        inputs, strategies = dict(plan.assignment.inputs), plan.assignment.strategies
        received = [item.tensor for item in graph.inputs if item.is_received]
        inputs = {name: ShardingSpec.replicated(len(graph.tensors[name].shape)) for name in received} | inputs  # these are pinned
        if not strategies.keys() >= {op.name for op in graph.ops} or not inputs.keys() >= {item.tensor for item in graph.inputs}:
            return None
        mine = {item.tensor: inputs[item.tensor] for item in graph.inputs}
        begun = Assignment(mine, {op.name: strategies[op.name] for op in graph.ops})
        return replace(self.whole, seconds=0.0, own_seconds=0.0, scheduled_plan=replace(plan, assignment=begun))

    def _in_names(self, found: SearchResult, graph: Graph) -> SearchResult:
        """The result in the names of a graph of equal structure."""
        if found.schedule.graph.sha256 == graph.sha256:
            return found
        schedule = schedule_for(graph, found.schedule)
        return replace(found, schedule=schedule, memory=memory(schedule, found.optimizer), scheduled_plan=None, searched_assignment=None)
