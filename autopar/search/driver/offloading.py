"""``find_plan_with_host``: plans that keep values of forward on the host where the device's memory is short.

Without its copies, a plan with offloaded values is a plan that holds these values on the device. It takes no longer, since copies only
occupy streams and the host, and it holds at most as many more bytes as were on the host at one time. So:

- Plans under a larger limit are searched as ever, and values of theirs are moved to the host until they fit under the limit itself
  (``fit_on_host``). The first larger limit is all that the host has room for, then what copies can
  hide beside forward.
- The bound of a search under a limit that is larger by R bytes bounds all plans that have at most R bytes on the host at one time. R is
  what the host has room for. A plan that takes no longer than the incumbent has no more on it than its link carries in that time.

So the bound is over the plans of the search's own space, each with any of the values that backward reads on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from autopar.cost_models import Machine
from autopar.effort import WORK_SECONDS, Budget, Effort, Meter
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule.assignment import Assignment
from autopar.schedule.freeing import free
from autopar.schedule.legality import check_legal
from autopar.schedule.limit_search import LimitSearch, expand_plan, improve_plan
from autopar.schedule.liveness import held, host_peak
from autopar.schedule.offloading import choose_offloaded, find_offloadable, offload
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.search.driver.find_plan import find_plan
from autopar.search.driver.result import Baseline, SearchResult, Shared
from autopar.search.settings import (
    FINAL_MOVES,
    HOST_ATTEMPTS,
    HOST_ENOUGH_GAP,
    HOST_HIDDEN_SHARE,
    HOST_SHARES,
    HOST_TRIES,
    PROOF,
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
            self._climb()
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
            if found.memory.peak - self.limit <= self._carried(found.seconds):
                self._move_to_host(found)
            if self._is_enough():
                return
            hidden = int(HOST_HIDDEN_SHARE * self._carried(found.seconds))
            limit = self.limit + min(max(found.memory.peak - self.limit, 0), hidden)

    def _is_enough(self) -> bool:
        return self.best is not None and self.best.seconds * (1 - HOST_ENOUGH_GAP) <= self._bound(self.best.seconds)

    def _search(self, limit: int, share: float) -> SearchResult:
        """The result under a limit; its bound is kept."""
        seconds = max(self.deadline - perf_counter(), 0.0)
        found = self.find(
            self.graph, self.machine, memory_bytes=limit, time_limit=seconds, effort_share=share * self.effort_share, **self.asked
        )  # fmt: skip
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
        """Moves values of a plan to the host until it fits, and offers it."""
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
        most = min(self.host_bytes, self._carried(seconds))
        found = (bound for limit, bound in self.bounds.items() if limit >= self.limit + most)
        return min(max(found, default=self.floor), seconds)

    def _carried(self, seconds: float) -> int:
        """Bytes that a device copies to its host in a microbatch, where the step takes so many seconds, at most."""
        host = self.machine.hardware.host
        assert host is not None
        return math.ceil(host.bandwidth * seconds / self.graph.microbatches)

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
    """A plan with values moved to the host so that it fits; None where that was not reached.

    Args:
        plan: at full depth.
        limit: bytes of a rank's device.
        host_bytes: of its host.
    """
    machine = plan.schedule.machine

    def schedule(assignment: Assignment, tries: int) -> ScheduledPlan:
        sample = Sample(1.0, graph, assignment)
        return LimitSearch(assignment, (sample,), machine, optimizer, limit, budget=budget).run(plan.limits, tries, improve=False)

    lean = schedule(plan.assignment, 0).schedule
    candidates, levels = find_offloadable(lean, plan.schedule), held(lean, optimizer)
    target, best, known = limit, None, set[Sequence[str]]()
    for _ in range(HOST_ATTEMPTS):
        values = choose_offloaded(candidates, levels, target, host_bytes)
        if values is None or values in known or budget.over:
            break
        known.add(values)
        found = schedule(offload(graph, plan.assignment, lean, values), HOST_TRIES)
        if found.memory.peak <= limit and host_peak(found.schedule) <= host_bytes:
            best = found
            break
        target -= max(found.memory.peak - limit, limit // 200)
    if best is None:
        return None
    return expand_plan(improve_plan(best, optimizer, limit, budget, FINAL_MOVES, keep_program_order=False), optimizer)
