"""Graph x rules x cost model -> the best schedule within the memory limit, with a proved bound.

The integer problem leaves out what lives only inside a phase beside the values it counts, so its bound is true; the
schedule's own peak decides. When that peak is over the limit, the problem's limit is lowered by the excess and it is solved again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule import Memory, Schedule, make_schedule, step_seconds
from autopar.schedule import memory as peak_memory
from autopar.search.baselines import find_baselines
from autopar.search.extract import extract
from autopar.search.model import Model, build_model
from autopar.search.pins import resolve_pins
from autopar.search.space import Space
from cost_models import Machine
from solvers import INFINITE, Problem, Solution, Status, solve

PROOF = 1e-6
"""A plan is called optimal when its gap is at most this."""
CLOSE = 2e-3
"""The gap at which a large problem stops: the last tenths of a percent would cost more time than all before."""
LARGE = 1_000_000
"""Edge entries from which a problem is large."""
TIGHTENINGS = 8
HALVINGS = 5
HALVING_SECONDS = 3.0
"""Tries, and seconds for each, of the search for the least memory that would do."""

Progress = Callable[[float, float, float, float], None]
"""Called with incumbent seconds (infinite before there is one), bound seconds, gap, elapsed seconds."""


@dataclass(frozen=True)
class Baseline:
    """A plan a person would write, in the same terms: its schedule and what it costs.

    ``seconds`` is the objective: the step, or the sum of its collectives under the communication model.
    """

    schedule: Schedule
    seconds: float
    memory: Memory
    feasible: bool


@dataclass(frozen=True)
class Found:
    """What the search found.

    Args:
        schedule: what every rank runs.
        seconds: the objective: the simulated step of the schedule with the optimizer's, or under the communication model the sum of its
            collectives.
        bound_seconds: no plan for this mesh costs less.
        gap: (seconds - bound) / seconds.
        status: ``optimal`` or ``feasible``.
        solver: method that gave the choices.
        unknown: operators without a rule, with a line where each stands; they run replicated.
        sizes: nodes, choices, edges and edge entries of the problem.
        stages: CPU seconds of enumerate, price, model, baselines, solve.
        contradicted: baselines that are not offered because a pin rules them out, with the reason in words.
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
    unknown: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    contradicted: Mapping[str, str] = field(default_factory=dict)


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
) -> Found:
    """The cheapest schedule of ``graph`` on ``machine`` within ``memory_bytes`` a rank (default: the hardware's memory).

    Args:
        gap: proved gap at which the solver stops before ``time_limit`` seconds; when not given ``PROOF``, or ``CLOSE`` for a large problem.

    Raises:
        UsageError: a pin that names nothing or is illegal.
        InfeasibleError: nothing fits; says the least memory known to do, and the biggest items.
        TimeLimitError: the time limit passed without an answer.
    """
    limit = int(machine.hardware.memory_bytes if memory_bytes is None else memory_bytes)
    clock = _Clock()
    space = Space(graph, machine, optimizer if graph.mode == "train" else "none", resolve_pins(graph, machine.mesh, constraints or {}))
    for op in graph.ops:
        space.op_choices(op)
    clock.lap("enumerate")
    model = build_model(space)
    clock.lap("price")
    problem, unit = model.problem(limit)
    clock.lap("model")
    if gap is None:
        gap = CLOSE if len(problem.edge_costs) > LARGE else PROOF
    rivals = {
        name: _price(make_schedule(graph, chosen, machine), space.optimizer, limit) for name, chosen in find_baselines(space).items()
    } if baselines else {}
    clock.lap("baselines")
    rival = min((rival for rival in rivals.values() if rival.feasible), key=lambda rival: rival.seconds, default=None)
    solution, schedule, memory = _solve_within(model, problem, unit, limit, time_limit, gap, seed, progress, rival)
    clock.lap("solve")
    seconds = objective_seconds(schedule, space.optimizer)
    bound = min(solution.bound * unit, seconds)
    if rival is not None and rival.seconds < seconds:
        schedule, memory, seconds = rival.schedule, rival.memory, rival.seconds
    achieved = (seconds - bound) / seconds if seconds > 0 else 0.0
    return Found(
        schedule, seconds, bound, achieved, "optimal" if achieved <= PROOF else "feasible", solution.solve_seconds, solution.method,
        space.optimizer, memory, rivals, dict(space.unknown),
        {"nodes": len(model.nodes), "choices": len(problem.costs), "edges": len(problem.edges), "edge_entries": len(problem.edge_costs)},
        clock.laps,
    )  # fmt: skip


class _Clock:
    """CPU seconds (this process and its finished children) of each stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = sum(os.times()[:4])

    def lap(self, stage: str) -> None:
        now = sum(os.times()[:4])
        self.laps[stage], self._last = now - self._last, now


def objective_seconds(schedule: Schedule, optimizer: str) -> float:
    """The objective: the step; under the communication model, whose collectives do not overlap, their sum."""
    if schedule.machine.cost_model == "communication":
        return schedule.communication_seconds()
    return step_seconds(schedule, optimizer)


def _price(schedule: Schedule, optimizer: str, limit: int) -> Baseline:
    memory = peak_memory(schedule, optimizer)
    return Baseline(schedule, objective_seconds(schedule, optimizer), memory, memory.peak <= limit)


def _solve_within(
    model: Model,
    problem: Problem,
    unit: float,
    limit: int,
    time_limit: float,
    gap: float,
    seed: int,
    progress: Progress | None,
    rival: Baseline | None,
) -> tuple[Solution, Schedule, Memory]:
    """Solves, and solves again under a lower limit while the schedule's own peak is over ``limit``; the first bound holds for all.
    When that gives nothing, the best feasible baseline is the answer, if there is one.
    """

    def report(incumbent: float | None, bound: float, reached: float, seconds: float) -> None:
        if progress is not None:
            progress(math.inf if incumbent is None else incumbent * unit, bound * unit, reached, seconds)

    started = perf_counter()
    first: Solution | None = None
    current = problem
    for _ in range(TIGHTENINGS):
        left = max(time_limit - (perf_counter() - started), 1.0)
        solution = solve(current, time_limit=left, gap=gap, seed=seed, progress=report)
        if solution.choices is None:
            break
        first = first or solution
        schedule = make_schedule(model.space.graph, extract(model, solution.choices), model.space.machine)
        memory = peak_memory(schedule, model.space.optimizer)
        if memory.peak <= limit:
            return replace(solution, bound=first.bound, solve_seconds=perf_counter() - started), schedule, memory
        assert current.limit is not None
        current = replace(problem, limit=max(int(current.limit - (memory.peak - limit) - limit // 2000), 0))
    answer = replace(first or solution, solve_seconds=perf_counter() - started)
    if rival is not None:
        return replace(answer, method="baseline"), rival.schedule, rival.memory
    schedule, memory = _smallest(model, problem, limit, seed)
    if memory.peak <= limit:
        return replace(answer, method="least memory"), schedule, memory
    if first is None and solution.status is Status.UNKNOWN and solution.smallest_limit is None:
        raise TimeLimitError(f"no plan was found in {time_limit:g} s", "allow more time (--time-limit), or fewer choices by pins")
    raise _infeasible(memory, limit, first is None and solution.status is Status.INFEASIBLE)


def _infeasible(least: Memory, limit: int, proved: bool) -> InfeasibleError:
    """Says the least memory that a plan is known to need, and what is biggest in it."""
    items = ", ".join(f"{name} {_readable(size)}" for name, size in least.biggest[:5])
    held = ("parameters", "gradients", "optimizer", "activations")
    parts = ", ".join(f"{name} {_readable(getattr(least, name))}" for name in held)
    return InfeasibleError(
        f"no plan {'fits' if proved else 'was found that fits'} in {_readable(limit)} a rank; the least known to do is "
        f"{_readable(least.peak)} ({parts}); biggest at its peak (at {least.at}): {items}",
        f"allow at least {least.peak} bytes (--memory), use a larger mesh, a smaller batch, or another optimizer",
    )


def _smallest(model: Model, problem: Problem, limit: int, seed: int) -> tuple[Schedule, Memory]:
    """The plan of least peak memory found: first the least bytes times life, then lower and lower limits, halfway to ``limit``."""

    def measure(choices: np.ndarray) -> tuple[Schedule, Memory]:
        schedule = make_schedule(model.space.graph, extract(model, choices), model.space.machine)
        return schedule, peak_memory(schedule, model.space.optimizer)

    best = measure(_least_held(model, problem, seed))
    low = limit
    for _ in range(HALVINGS):
        if best[1].peak <= limit:
            break
        middle = (low + best[1].peak) // 2
        found = solve(replace(problem, limit=middle), time_limit=HALVING_SECONDS, gap=0.5, seed=seed).choices
        tried = None if found is None else measure(found)
        if tried is None or tried[1].peak >= best[1].peak:
            low = middle
        else:
            best = tried
    return best


def _least_held(model: Model, problem: Problem, seed: int) -> np.ndarray:
    """Choices of the least sum, over all memory items, of bytes times life."""
    weight = np.zeros(len(problem.costs))
    lives = (problem.item_end - problem.item_begin) * problem.item_usage.astype(np.float64)
    np.add.at(weight, np.repeat(np.arange(len(problem.costs)), np.diff(problem.item_ptr)), lives)
    scale = 2.0**50 / max(weight.max(), 1.0) / len(model.nodes)
    costs = [
        np.where(old >= INFINITE, INFINITE, np.rint(part * scale).astype(np.int64))
        for old, part in zip(np.split(problem.costs, problem.node_ptr[1:-1]), np.split(weight, problem.node_ptr[1:-1]), strict=True)
    ]
    edges = [(edge.source, edge.target, np.where(np.isfinite(edge.seconds), 0, INFINITE)) for edge in model.edges]
    found = solve(Problem.build(costs, edges, name="memory"), time_limit=HALVING_SECONDS, gap=1e-3, seed=seed).choices
    assert found is not None, "without a limit every graph has a plan"
    return found


def _readable(size: int) -> str:
    """Bytes with a binary unit."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
