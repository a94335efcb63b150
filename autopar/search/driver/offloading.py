"""``find_plan_with_host``: plans that keep values of forward and optimizer states on the host where the device's memory is short.

Without its copies, such a plan is one that holds these values and states on the device.

- It takes no longer. Copies of values only occupy streams and the host. The step without copies steps the same parameters one after
  another, and waits for nothing.
- It holds at most as many more bytes as were on the host at one time, values and states together. States are on the host throughout.
  Those that pass through the device in the optimizer's step were counted there already.

So plans under a larger limit are searched as ever, and values and states of theirs are moved to the host until they fit under the limit
itself (``fit_on_host``). The first larger limit is all that the host has room for, then what copies can hide beside forward.

The bound of a search under a limit that is larger by R bytes bounds all plans that have at most R bytes on the host at one time. R is what
the host has room for, and less where the incumbent takes T seconds. Take a plan that takes no longer. It has M microbatches, A bytes of
values and S bytes of states on the host. Each microbatch copies A bytes there, and the optimizer's step S. The link's way there carries B
bytes a second, so M A + S <= B T. A rank has no more states than the whole model has, so S <= W. Hence A + S <= B T / M + S (1 - 1 / M),
where S is at most the smaller of W and B T. With one microbatch that is B T.

So the bound is over the plans of the search's own space, each with any of the values that backward reads, and any states, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from autopar.cost_models import Machine
from autopar.effort import WORK_SECONDS, Budget, Effort, Meter
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import DTYPE_BYTES, Graph
from autopar.pricing import state_bytes
from autopar.schedule.assignment import Assignment
from autopar.schedule.freeing import free
from autopar.schedule.legality import check_legal
from autopar.schedule.limit_search import LimitSearch, expand_plan, improve_plan
from autopar.schedule.liveness import held, held_in_step, host_peak
from autopar.schedule.offloading import choose_for_host, find_hostable_states, find_offloadable, offload
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.schedule.settings import EQUAL_SECONDS
from autopar.search.driver.find_plan import find_plan
from autopar.search.driver.result import Baseline, SearchResult, Shared
from autopar.search.settings import (
    FINAL_MOVES,
    HOST_HIDDEN_SHARE,
    HOST_SHARES,
    LONG_TRIES,
    NEAR,
    PROOF,
    ROUNDS,
    WHOLE_GAP,
)
from autopar.search.telemetry import PhaseRecord, Telemetry
from autopar.sharding import ALL_ORDERS


def find_plan_with_host(
    graph: Graph, machine: Machine, *, memory_bytes: int, optimizer: str, time_limit: float, effort: Effort, effort_share: float = 1.0,
    shared: Shared | None = None, find: Callable[..., SearchResult] = find_plan, **asked: Any,
) -> SearchResult:  # fmt: skip
    """The fastest schedule within ``memory_bytes`` per rank, with values on the host where that helps.

    Args:
        find: the search under one limit: ``find_plan``, or ``find_pinned_plan`` with its pins.
        asked: further arguments of ``find``, which the others are of too. The effort and the time are shared among its searches.

    Raises:
        As ``find_plan``.
    """
    asked |= {"optimizer": optimizer, "effort": effort, "shared": shared or Shared()}
    return _HostSearch(graph, machine, memory_bytes, time_limit, effort_share, find, asked).run()


class _HostSearch:
    """The searches under the limit and under larger ones.

    Args:
        limit: bytes of a rank's device.
        time_limit: seconds for all of them.
        effort_share: of the effort, for all of them.
        find, asked: the search under each, and arguments for it.
    """

    def __init__(
        self, graph: Graph, machine: Machine, limit: int, time_limit: float, effort_share: float,
        find: Callable[..., SearchResult], asked: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.graph, self.machine, self.limit, self.effort_share = graph, machine, limit, effort_share
        self.find, self.asked = find, asked
        self.optimizer = asked["optimizer"] if graph.mode == "train" else "none"
        self.deadline = perf_counter() + time_limit
        self.host_bytes = machine.hardware.offloadable_bytes
        sizes = ((name, math.prod(graph.tensors[name].shape) * DTYPE_BYTES[graph.tensors[name].dtype]) for name in graph.stepped)
        self.states_bytes = sum(state_bytes(graph, name, size, self.optimizer) for name, size in sizes)
        """Of the whole model: no rank has more."""
        self.best: SearchResult | None = None
        """The best result that fits under the limit."""
        self.bounds: dict[int, float] = {}
        """Seconds that bound every plan, by the limit that it keeps to without copies."""
        self.floor = 0.0
        """Seconds that bound every plan, whatever it holds: its cheapest operators."""
        self.trace: list[PhaseRecord] = []
        self.solve_seconds = 0.0
        self.interrupted = self.cut = False

    def run(self) -> SearchResult:
        failure: InfeasibleError | TimeLimitError | None = None
        try:
            self._offer(self._search(self.limit, HOST_SHARES["limit"]))
        except (InfeasibleError, TimeLimitError) as error:
            failure = error
        if self.graph.mode == "train" and not self.interrupted:
            try:
                self._climb()
            except KeyboardInterrupt:
                if self.best is None:
                    raise
                self.interrupted = True
        if self.best is None:
            assert failure is not None
            raise failure
        return self._result(self.best)

    def _climb(self) -> None:
        """Searches under larger limits: first under all that the host has room for, then under what copies can hide."""
        limit = self.limit + self.host_bytes
        for share in ("larger", "hidden"):
            if self.interrupted or perf_counter() >= self.deadline:
                return
            try:
                found = self._search(limit, HOST_SHARES[share])
            except (InfeasibleError, TimeLimitError):
                return
            if found.memory.peak - self.limit <= self._most_on_host(found.seconds):
                self._move_to_host(found)
            if self._is_enough():
                return
            hidden = int(HOST_HIDDEN_SHARE * self._carried(found.seconds / self.graph.microbatches))
            limit = self.limit + min(max(found.memory.peak - self.limit, 0), hidden)

    def _is_enough(self) -> bool:
        return self.best is not None and self.best.seconds * (1 - WHOLE_GAP) <= self._bound(self.best.seconds)

    def _search(self, limit: int, share: float) -> SearchResult:
        """The result under a limit; its bound is kept."""
        seconds = max(self.deadline - perf_counter(), 0.0)
        try:
            found = self.find(
                self.graph, self.machine, memory_bytes=limit, time_limit=seconds, effort_share=share * self.effort_share, **self.asked
            )  # fmt: skip
        except TimeLimitError:
            self.cut = True
            raise
        self.solve_seconds += found.solve_seconds
        self.trace += found.trace
        self.interrupted |= found.interrupted
        self.cut |= found.cut
        if sum(size > 1 for size in self.machine.mesh.sizes) <= ALL_ORDERS:  # else the search may be of a part of all choices
            self.floor = found.floor_seconds
        if limit > self.limit:
            self.bounds[limit] = found.bound_seconds
        return found

    def _move_to_host(self, found: SearchResult) -> None:
        """Moves values and states of a plan to the host until it fits, and offers it."""
        plan, meter = found.scheduled_plan, Meter(max(self.deadline - perf_counter(), 0.0))
        if plan is None or found.memory.peak <= self.limit:
            self._offer(found)
            return
        work = WORK_SECONDS[self.asked["effort"]] * self.effort_share * HOST_SHARES["fit"]
        telemetry, fitted = Telemetry(meter), list[ScheduledPlan]()
        before = self.best.seconds / self.graph.microbatches if self.best is not None else math.inf

        def standing() -> tuple[float, float]:
            bound = max(self.bounds.values(), default=0.0) / self.graph.microbatches
            return min([before, *(one.seconds for one in fitted)]), bound

        with telemetry.phase("offload", standing):
            made = fit_on_host(self.graph, plan, self.optimizer, self.limit, self.host_bytes, Budget(meter, work))
            fitted += [made] if made is not None else []
        self.trace += telemetry.records
        if made is None:
            return
        schedule = check_legal(free(made.schedule), "offloading")
        seconds = self.graph.microbatches * made.seconds
        self._offer(replace(
            found, schedule=schedule, seconds=seconds, memory=made.memory, scheduled_plan=made, solver="offload", tied_seconds=0.0,
            candidates=(),
        ))  # fmt: skip

    def _offer(self, found: SearchResult) -> None:
        if found.memory.peak <= self.limit and (self.best is None or found.seconds < self.best.seconds):
            self.best = found

    def _bound(self, seconds: float) -> float:
        """Seconds that bound every plan that takes up to ``seconds``, and so every plan where they are no more."""
        most = min(self.host_bytes, self._most_on_host(seconds))
        found = (bound for limit, bound in self.bounds.items() if limit >= self.limit + most)
        return min(max(found, default=self.floor), seconds)

    def _most_on_host(self, seconds: float) -> int:
        """Most bytes of a rank on its host at one time, in a step of ``seconds``: see the module."""
        times, carried = self.graph.microbatches, self._carried(seconds)
        states = min(self.states_bytes, carried)
        return states + math.ceil((carried - states) / times)

    def _carried(self, seconds: float) -> int:
        """Most bytes that a device copies to its host in ``seconds``."""
        host = self.machine.hardware.host
        assert host is not None
        return math.ceil(host.bandwidth * seconds)

    def _result(self, best: SearchResult) -> SearchResult:
        bound = self._bound(best.seconds) if self.graph.mode == "train" else best.bound_seconds
        gap = (best.seconds - bound) / best.seconds if best.seconds > 0 else 0.0
        baselines = {name: self._judged(row) for name, row in best.baselines.items()}
        return replace(
            best, bound_seconds=bound, gap=gap, status="optimal" if gap <= PROOF else "feasible", baselines=baselines,
            trace=tuple(self.trace), solve_seconds=self.solve_seconds, interrupted=self.interrupted, cut=self.cut,
        )  # fmt: skip

    def _judged(self, baseline: Baseline) -> Baseline:
        return replace(baseline, feasible=baseline.memory.peak <= self.limit)


def fit_on_host(
    graph: Graph, plan: ScheduledPlan, optimizer: str, limit: int, host_bytes: int, budget: Budget
) -> ScheduledPlan | None:  # fmt: skip
    """A plan with values and states moved to the host so that it fits; None where that was not reached.

    Copies of values may hide beside operators, those of states do not. So values go first. Where their copies take time, states first are
    tried too.

    Args:
        plan: at full depth.
        limit: bytes of a rank's device.
        host_bytes: of its host.
    """
    fitting = _Fitting(graph, plan, optimizer, limit, host_bytes, budget)
    found = fitting.run(states_first=False)
    if fitting.states and (found is None or found.seconds > plan.seconds * (1 + EQUAL_SECONDS)):
        other = fitting.run(states_first=True)
        found = other if other is not None and other.better(found, limit) else found
    if found is None:
        return None
    return expand_plan(improve_plan(found, optimizer, limit, budget, FINAL_MOVES, keep_program_order=False), optimizer)


class _Fitting:
    """Sets of values and states on the host for one plan, each scheduled, until one fits. See ``fit_on_host``."""

    def __init__(
        self, graph: Graph, plan: ScheduledPlan, optimizer: str, limit: int, host_bytes: int, budget: Budget
    ) -> None:  # fmt: skip
        self.graph, self.plan, self.optimizer = graph, plan, optimizer
        self.limit, self.host_bytes, self.budget = limit, host_bytes, budget
        self.lean = self._schedule(plan.assignment, 0).schedule
        self.candidates = find_offloadable(self.lean, plan.schedule)
        self.states = find_hostable_states(self.lean, optimizer)
        self.levels = [*held(self.lean, optimizer), held_in_step(self.lean, optimizer)]

    def _schedule(self, assignment: Assignment, tries: int) -> ScheduledPlan:
        sample, machine = Sample(1.0, self.graph, assignment), self.plan.schedule.machine
        search = LimitSearch(assignment, (sample,), machine, self.optimizer, self.limit, budget=self.budget)
        return search.run(self.plan.limits, tries, improve=False)

    def run(self, *, states_first: bool) -> ScheduledPlan | None:
        """The first set that fits, before local search."""
        target, known = self.limit, set[object]()
        for _ in range(ROUNDS):
            chosen = choose_for_host(self.candidates, self.levels, self.states, target, self.host_bytes, states_first=states_first)
            if chosen is None or chosen in known or self.budget.over:
                return None
            known.add(chosen)
            values, states = chosen
            assignment = replace(offload(self.graph, self.plan.assignment, self.lean, values), states_on_host=frozenset(states))
            found = self._schedule(assignment, LONG_TRIES)
            if found.memory.peak <= self.limit and host_peak(found.schedule, self.optimizer) <= self.host_bytes:
                return found
            target -= max(found.memory.peak - self.limit, round(NEAR * self.limit))
        return None
