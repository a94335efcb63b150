"""The search: solve, schedule, simulate, learn what was waited for, solve again; and beside it the bound.

Under a model of time the objective is the step of the schedule. Each round prices the integer problem by what the best schedule so far
showed (``exposure``) or by weights whose optimum bounds every step (``bounds``); every answer is scheduled and simulated, and the best is
kept. Plans written by hand go through the same passes first. Under the communication model nothing overlaps: the problem in sequence is
solved once and its bound is the bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.garbage import young_garbage_only
from autopar.graph import Graph
from autopar.schedule import Assignment, Memory, Schedule
from autopar.schedule.legality import check_legal
from autopar.search.alike import tied
from autopar.search.baselines import find_baselines
from autopar.search.bounds import floor_of
from autopar.search.building import build_model
from autopar.search.folded import folded
from autopar.search.folding import Folding, fold
from autopar.search.merging import mergings
from autopar.search.model import Model
from autopar.search.near import entries, near
from autopar.search.pins import Pins, resolve_pins
from autopar.search.pooled import pooled
from autopar.search.rounds import Search
from autopar.search.space import Space
from autopar.search.trials import GAIN, PROOF, TURN, Asked, Progress
from autopar.search.tuning import Timed
from autopar.search.written import Written
from autopar.sharding import ALL_ORDERS
from cost_models import Machine

MANY = 1_000_000
"""Edge entries of a problem over all choices of three and more axes from which the search goes from plan to plan (``near``)."""
LOOKS = 3
"""So many times it looks around the best plan, at most."""


@dataclass(frozen=True)
class Baseline:
    """A plan a person would write, in the same terms: its schedule and what it costs.

    Args:
        schedule: of the graph that was planned, or where that is deep and the plan no candidate of one with fewer of its equal layers,
            from which the figures follow.
        seconds: the objective: the step, or the sum of its collectives under the communication model.
        step_seconds: the step.
    """

    schedule: Schedule
    seconds: float
    step_seconds: float
    memory: Memory
    feasible: bool


@dataclass(frozen=True)
class Found:
    """What the search found.

    Args:
        schedule: what every rank runs.
        seconds: the objective: the simulated step of the schedule with the optimizer's, or under the communication model the sum of its
            collectives.
        bound_seconds: no plan for this mesh, in any order, costs less; of several microbatches none that runs them one after another and
            gathers weights in each; where memory is short none in captured order: others may hold a little less at the peak.
        gap: (seconds - bound) / seconds.
        status: ``optimal`` or ``feasible``.
        solver: method that gave the choices.
        contradicted: baselines that are not there because they contradict a pin, with the reason.
        unknown: operators without a rule, with a line where each stands; they run replicated.
        sizes: nodes, choices, edges and edge entries of the problem.
        stages: CPU seconds of enumerate, price, model, baselines, solve.
        interrupted: whether Ctrl-C ended the search.
        timed: the schedule with its assignment, for searches that follow.
        plan: the same assignment as it was searched: of the folded graph where equal layers are folded.
        tied_seconds: what the objective is longer than the best found, for equal layers to lie alike.
    """

    schedule: Schedule
    seconds: float
    bound_seconds: float
    gap: float
    status: str
    solve_seconds: float
    solver: str
    optimizer: str
    memory: Memory
    baselines: Mapping[str, Baseline]
    contradicted: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    interrupted: bool = False
    tied_seconds: float = 0.0
    timed: Timed | None = None
    plan: Assignment | None = None


@dataclass
class Shared:
    """What searches of one graph, machine, optimizer and pins have in common, whatever memory they allow.

    Args:
        spaces, models: enumerated, and priced, by kind.
        known: the plans found.
    """

    spaces: dict[str, Space] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    known: list[Timed] = field(default_factory=list)

    def space(self, kind: str, make: Callable[[], Space]) -> Space:
        """The space of a kind, made once."""
        if kind not in self.spaces:
            self.spaces[kind] = make()
        return self.spaces[kind]

    def model(self, kind: str, make: Callable[[], Model]) -> Model:
        """The model of a kind, made once."""
        if kind not in self.models:
            self.models[kind] = make()
        return self.models[kind]

    def took(self, found: Found) -> Found:
        """Keeps what was found for searches that follow."""
        if found.timed is not None:
            self.known.append(found.timed)
        return found


@young_garbage_only()
def find_plan(
    graph: Graph,
    machine: Machine,
    *,
    memory_bytes: int | None = None,
    optimizer: str = "adamw",
    constraints: Mapping[str, str] | None = None,
    time_limit: float = 60.0,
    gap: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    baselines: bool = True,
    recompute: bool = False,
    shared: Shared | None = None,
) -> Found:
    """The cheapest schedule of ``graph`` on ``machine`` within ``memory_bytes`` a rank (default: the hardware's memory).

    Args:
        shared: what an earlier search for the same under another limit has made; what this one makes is added.
        gap: proved gap at which the search stops before ``time_limit`` seconds; ``PROOF`` when not given.
        recompute: what backward needs of forward may be made again there; else all of it is kept. Nothing of it where only collectives
            count, since operators would run again for nothing.

    Raises:
        UsageError: a pin that names nothing or is illegal.
        InfeasibleError: nothing fits; says the least memory known to do, and the biggest items.
        TimeLimitError: the time limit passed without an answer.
    """
    limit = int(machine.hardware.memory_bytes if memory_bytes is None else memory_bytes)
    steps = optimizer if graph.mode == "train" else "none"
    asked = Asked(limit, steps, time_limit, perf_counter(), PROOF if gap is None else gap, seed, progress, baselines, recompute)
    pins = resolve_pins(graph, machine.mesh, constraints or {})
    clock = _Clock()
    shared = shared or Shared()
    known = list(shared.known)
    try:
        return shared.took(_find(graph, machine, pins, asked, clock, shared, known))
    except InfeasibleError:
        shared.known += known[len(shared.known) :]
        raise


def _find(graph: Graph, machine: Machine, pins: Pins, asked: Asked, clock: _Clock, shared: Shared, known: list[Timed]) -> Found:
    """See ``find_plan``. Of equal layers folded where that can be; from plans of merged axes on where all choices would be too many."""
    folding = fold(graph) if machine.cost_model != "communication" else None
    kept = folding.pins(pins) if folding is not None else None
    found: Found | None
    written = Written()
    if folding is not None and kept is not None:
        space = shared.space("folded", lambda: _enumerated(Space(folding.graph, machine, asked.optimizer, kept), clock))
        if _too_many(space):
            found = _nearby(space, folding, pins, asked, clock, known)
        else:
            model = folded(shared.model("folded", lambda: _model(space, clock)), folding)
            found = _search(model, space, pins, asked, clock, known, written) if model is not None else None
        if found is not None:
            return found
    every = shared.space("whole", lambda: _enumerated(Space(graph, machine, asked.optimizer, pins), clock))
    found = _nearby(every, None, pins, asked, clock, known) if _too_many(every) else None
    if found is None and perf_counter() > asked.began + asked.time_limit and _too_many(every):
        hint = "allow more time (--time-limit), or name fewer axes"
        raise TimeLimitError(f"no plan was found in {asked.time_limit:g} s among plans of merged axes and those near them", hint)
    found = found or _search(shared.model("whole", lambda: _model(every, clock)), every, pins, asked, clock, known, written)
    assert found is not None
    return found


def _too_many(space: Space) -> bool:
    """Whether a problem over all choices would be too large."""
    axes = sum(size > 1 for size in space.sizes)
    return axes > ALL_ORDERS and space.machine.cost_model != "communication" and entries(space) > MANY


def _nearby(space: Space, folding: Folding | None, pins: Pins, asked: Asked, clock: _Clock, known: list[Timed]) -> Found | None:
    """The best plan near those of meshes with axes merged, and near the better ones found so; None where none fits in memory. What bounds
    it are all choices in their cheapest form (``bounds.floor``, ``pooled``)."""
    graph = space.graph if folding is None else folding.whole
    plans, least = [timed.assignment for timed in known], min((timed.seconds for timed in known), default=math.inf)
    bound = floor_of(space, folding)
    if asked.recompute and graph.mode == "train":
        bound = max(bound, pooled(space, folding, asked.limit, perf_counter() + TURN * asked.time_limit))
    ways, reached = list(mergings(space.machine, ALL_ORDERS)), math.inf
    for number, merging in enumerate(ways):
        left = asked.began + asked.time_limit - perf_counter()
        merged = merging.pins(pins)
        if merged is None or left <= 0 or reached * (1 - asked.gap) <= bound:
            continue
        share = left / (len(ways) - number + LOOKS)
        now = perf_counter()
        less = replace(asked, time_limit=share, began=now, baselines=False, proves=False, bounds=[], progress=None, draft=True)
        try:
            found = _find(graph, merging.machine, merged, less, _Clock(), Shared(), [])
        except (InfeasibleError, TimeLimitError):
            continue
        if found.timed is not None and found.plan is not None:
            plans.insert(0 if found.timed.seconds < least else len(plans), merging.assignment(found.plan))
            least, reached = min(least, found.timed.seconds), min(reached, found.timed.seconds)
    clock.lap("merged")
    if not plans:
        written = find_baselines(space)[0].values()
        plans = [plan for plan in written if folding is None or folding.agrees(plan)]
    best: Found | None = None
    for _ in range(LOOKS):
        if not plans:
            return None
        model = _model(near(space, plans), clock)
        tied = folded(model, folding) if folding is not None else model
        if tied is None:
            return best
        around = replace(asked, proves=False, bounds=[bound], baselines=asked.baselines and best is None)
        try:
            looked = _search(tied, space, pins, around, clock, known, Written(), plans)
        except InfeasibleError:
            return best
        if looked is None or looked.timed is None or looked.plan is None:
            return best
        gained = looked.timed.seconds < least * (1 - GAIN)
        if best is None or looked.seconds < best.seconds:
            best = looked if best is None else replace(looked, baselines=best.baselines, contradicted=best.contradicted)
        if not gained or looked.interrupted or looked.gap <= asked.gap or perf_counter() > asked.began + asked.time_limit:
            break
        plans, least = [looked.plan, *plans], looked.timed.seconds
    return best


def _enumerated(space: Space, clock: _Clock) -> Space:
    for op in space.graph.ops:
        space.op_choices(op)
    clock.lap("enumerate")
    return space


def _model(space: Space, clock: _Clock) -> Model:
    model = build_model(space)
    clock.lap("price")
    return model


def _search(
    model: Model, space: Space, pins: Pins, asked: Asked, clock: _Clock, known: list[Timed], written: Written,
    plans: Sequence[Assignment] = (),
) -> Found | None:  # fmt: skip
    """The search on one model; None where the memory limit decides and the model is folded, which prices memory roughly.

    Args:
        space: all choices, where those of the model are a part of them.
        known: schedules found before; that of a search left for another model is added.
        written: the plans written by hand, as far as a search left for another model has scheduled them.
        plans: assignments to begin from.
    """
    limit = asked.limit
    counts = model.space.machine.cost_model != "communication" and model.whole_graph.mode == "train"
    again = asked.recompute and counts
    search = Search(model, asked, again)
    clock.lap("model")
    priced = perf_counter() - asked.began
    for schedule in known:
        search.offer(schedule, "known")
    begun = [search.schedule(plan, None, tries=search.tries) for plan in plans]
    for timed in sorted(begun, key=lambda timed: (timed.memory.peak > limit, timed.seconds)):
        search.offer(timed, "merged axes")
    if asked.baselines:
        written.schedule(search, space, pins, again)
    search.rivals = tuple(written.rivals.values())
    clock.lap("baselines")
    if search.left <= 0 and (search.best is None or search.best.memory.peak > limit):
        raise TimeLimitError(
            f"no plan was found in {asked.time_limit:.3g} s: enumerating and pricing choices took {priced:.1f} s before the search",
            "allow more time (--time-limit), or fewer choices by pins",
        )
    try:
        ended = search.run()
    except InfeasibleError:  # what needs the least is an answer where that is allowed
        known += [replace(search.best, assignment=model.whole(search.best.assignment))] if search.best is not None else []
        raise
    if not ended:
        known += [replace(search.best, assignment=model.whole(search.best.assignment))] if search.best is not None else []
        asked.bounds.append(search.bound)
        written.unfold(model)
        return None
    clock.lap("solve")
    best, free = search.best, search.best
    assert best is not None and free is not None
    best = tied(search) or best
    check_legal(best.schedule, "the search")
    bound, times = min(search.bound, best.seconds), model.whole_graph.microbatches
    achieved = (best.seconds - bound) / best.seconds if best.seconds > 0 else 0.0
    return Found(
        best.schedule, times * best.seconds, times * bound, achieved, "optimal" if achieved <= PROOF else "feasible",
        search.seconds, search.method, space.optimizer, best.memory,
        {name: _baseline(rival, limit, times) for name, rival in written.rivals.items()},
        written.contradicted, dict(space.unknown), search.sizes, clock.laps, search.interrupted,
        times * max(best.seconds - free.seconds, 0.0), replace(best, assignment=model.whole(best.assignment)), best.assignment,
    )  # fmt: skip


def _baseline(rival: Timed, limit: int, times: int) -> Baseline:
    return Baseline(rival.schedule, times * rival.seconds, rival.step_seconds, rival.memory, rival.memory.peak <= limit)


class _Clock:
    """CPU seconds (this process and its finished children) of each stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = sum(os.times()[:4])

    def lap(self, stage: str) -> None:
        now = sum(os.times()[:4])
        self.laps[stage], self._last = self.laps.get(stage, 0.0) + now - self._last, now
