"""The search: solve, schedule, simulate, learn what was waited for, solve again; and beside it the bound.

Under a model of time the objective is the step of the schedule. Each round prices the integer problem by what the best schedule so far
showed (``exposure``) or by weights whose optimum bounds every step (``bounds``); every answer is scheduled and simulated, and the best is
kept. Plans written by hand go through the same passes first. Under the communication model nothing overlaps: the problem in sequence is
solved once and its bound is the bound.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule import Assignment, Memory, Schedule
from autopar.schedule.legality import check_legal
from autopar.search.alike import tied
from autopar.search.baselines import find_baselines
from autopar.search.building import build_model
from autopar.search.folded import FoldedModel, folded
from autopar.search.folding import fold
from autopar.search.model import Model
from autopar.search.pins import Pins, resolve_pins
from autopar.search.recompute import with_policies
from autopar.search.rounds import TUNED, Search
from autopar.search.space import Space
from autopar.search.trials import PROOF, Asked, Progress, Trials
from autopar.search.tuning import Timed
from cost_models import Machine


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
        bound_seconds: no plan for this mesh, in any order, costs less; of several microbatches no plan that runs them one after another and
            gathers weights in each. Where the memory limit binds: no plan whose operators run as
            captured, since others may hold a little less at the peak than the problem counts.
        gap: (seconds - bound) / seconds.
        status: ``optimal`` or ``feasible``.
        solver: method that gave the choices.
        contradicted: baselines that are not there because they contradict a pin, with the reason.
        unknown: operators without a rule, with a line where each stands; they run replicated.
        sizes: nodes, choices, edges and edge entries of the problem.
        stages: CPU seconds of enumerate, price, model, baselines, solve.
        interrupted: whether Ctrl-C ended the search.
        timed: the schedule with its assignment, for searches that follow.
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


@dataclass
class Shared:
    """What searches of one graph, machine, optimizer and pins have in common, whatever memory they allow.

    Args:
        models: enumerated and priced, by kind.
        known: the plans found.
    """

    models: dict[str, Model] = field(default_factory=dict)
    known: list[Timed] = field(default_factory=list)

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
    folding = fold(graph) if machine.cost_model != "communication" else None
    kept = folding.pins(pins) if folding is not None else None
    shared = shared or Shared()
    known = list(shared.known)
    try:
        if folding is not None and kept is not None:
            graph_of, pinned = folding.graph, kept
            model = folded(shared.model("folded", lambda: _model(Space(graph_of, machine, asked.optimizer, pinned), clock)), folding)
            found = _search(model, pins, asked, clock, known) if model is not None else None
            if found is not None:
                return shared.took(found)
        whole = _search(
            shared.model("whole", lambda: _model(Space(graph, machine, asked.optimizer, pins), clock)), pins, asked, clock, known
        )
    except InfeasibleError:
        shared.known += known[len(shared.known) :]
        raise
    assert whole is not None
    return shared.took(whole)


def _model(space: Space, clock: _Clock) -> Model:
    for op in space.graph.ops:
        space.op_choices(op)
    clock.lap("enumerate")
    model = build_model(space)
    clock.lap("price")
    return model


def _search(model: Model, pins: Pins, asked: Asked, clock: _Clock, known: list[Timed]) -> Found | None:
    """The search on one model; None where the memory limit decides and the model is folded, which prices memory roughly.

    Args:
        known: schedules found before; that of a search left for another model is added.
    """
    space, limit = model.space, asked.limit
    counts = model.space.machine.cost_model != "communication" and model.whole_graph.mode == "train"
    again = asked.recompute and counts
    search = Search(model, asked, again)
    clock.lap("model")
    priced = perf_counter() - asked.began
    for schedule in known:
        search.offer(schedule, "known")
    rivals: dict[str, Timed] = {}
    contradicted: dict[str, str] = {}
    if asked.baselines:
        assignments, contradicted = _rivals(model, pins)
        for name, assignment in assignments.items():
            if rivals and search.left <= 0:
                break
            rivals[name] = search.schedule(assignment, None, tries=0 if search.large else search.tries)
        if again:
            rivals.update(_leaner(rivals, search))
        by_worth = sorted(rivals, key=lambda name: (rivals[name].memory.peak > limit, rivals[name].seconds))
        for name in by_worth[: TUNED if search.large else 0]:
            rivals[name] = search.schedule(rivals[name].assignment, None, tries=search.tries)
        for name in by_worth:
            rivals[name] = search.sure(rivals[name])
            search.offer(rivals[name], "baseline")
        search.rivals = tuple(rivals.values())
    clock.lap("baselines")
    if search.left <= 0 and (search.best is None or search.best.memory.peak > limit):
        raise TimeLimitError(
            f"the time limit of {asked.time_limit:.3g} s passed before the search: enumerating and pricing choices took {priced:.1f} s",
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
        {name: _baseline(rival, limit, times) for name, rival in rivals.items()},
        contradicted, dict(space.unknown), search.sizes, clock.laps, search.interrupted,
        times * max(best.seconds - free.seconds, 0.0), replace(best, assignment=model.whole(best.assignment)),
    )  # fmt: skip


def _rivals(model: Model, pins: Pins) -> tuple[dict[str, Assignment], dict[str, str]]:
    """The baselines, of the folded graph where their layers are alike, and the reasons why others are none."""
    found, contradicted = find_baselines(model.space)
    if isinstance(model, FoldedModel) and not all(map(model.fold.agrees, found.values())):  # it walks the whole graph
        return find_baselines(replace(model.space, graph=model.whole_graph, pins=pins))
    return found, contradicted


def _baseline(rival: Timed, limit: int, times: int) -> Baseline:
    return Baseline(rival.schedule, times * rival.seconds, rival.step_seconds, rival.memory, rival.memory.peak <= limit)


def _leaner(rivals: Mapping[str, Timed], search: Trials) -> dict[str, Timed]:
    """Of baselines that do not fit the first that does under one policy of recomputation after another (``NAME+POLICY``), as long as the
    baseline itself is faster than all that fit."""
    model, limit = search.model, search.limit
    found: dict[str, Timed] = {}
    best = min((rival.seconds for rival in rivals.values() if rival.memory.peak <= limit), default=math.inf)
    for name in sorted(rivals, key=lambda name: rivals[name].seconds):
        if rivals[name].memory.peak <= limit or rivals[name].seconds >= best:
            continue
        for policy, leaner in with_policies(model.whole_graph, model.whole(rivals[name].assignment), model.space.machine):
            if search.left <= 0:
                return found
            tried = search.schedule(leaner, None, tries=0 if search.large else search.tries)
            found[f"{name}+{policy}"] = tried
            if tried.memory.peak <= limit:
                best = min(best, tried.seconds)
                break
    return found


class _Clock:
    """CPU seconds (this process and its finished children) of each stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = sum(os.times()[:4])

    def lap(self, stage: str) -> None:
        now = sum(os.times()[:4])
        self.laps[stage], self._last = self.laps.get(stage, 0.0) + now - self._last, now
