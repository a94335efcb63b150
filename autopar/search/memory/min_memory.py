"""Least memory, for when nothing fits: the least that a plan is known to need, and the least that is not ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.effort import Budget
from autopar.errors import InfeasibleError
from autopar.schedule import Assignment, Memory
from autopar.schedule.instructions import LEAN_LIMITS
from autopar.schedule.limit_search import best_schedule
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model
from autopar.search.memory.memory_repair import CoverRows
from autopar.search.settings import (
    LEAST_MEMORY_FIRST_WORK,
    LEAST_MEMORY_LAST_WORK,
    LEAST_MEMORY_SOLVES,
    NEAR,
    ROUNDS,
    SOLVE_WORK,
)
from autopar.search.solving import solve
from autopar.solvers import INFINITE, Problem, Status


def minimise_peak(
    model: Model, problem: Problem, limit: int, seed: int, rivals: Sequence[ScheduledPlan], proved: bool, budget: Budget
) -> tuple[ScheduledPlan, int]:  # fmt: skip
    """The plan of least peak memory found, and bytes below which there is no plan.

    First come the solution of least bytes times life and the baselines. Bisection follows, between what is ruled out and the best peak,
    beginning at ``limit``. It ends where something fits.

    Args:
        proved: no plan fits in ``limit``.
        budget: work of all solves and schedules.

    Raises:
        InfeasibleError: the choices do not go together, in any memory: those of another plan need not go with all pins.
    """
    light = _byte_time_problem(model, problem)
    plans = [rival.assignment for rival in rivals]
    held = solve(light, _solve_budget(budget, LEAST_MEMORY_FIRST_WORK), gap=NEAR, seed=seed).choices
    if held is not None:
        plans.append(decode_assignment(model, held))
    if not plans:
        raise InfeasibleError("no plan keeps all pins, whatever its memory", "leave out a pin (--pin), or one of the model's own")
    best = min((_schedule_lean(model, plan, limit, budget) for plan in plans), key=lambda timed: timed.memory.peak)
    ruled_out = low = limit if proved else 0
    target = limit
    for _ in range(ROUNDS):
        if best.memory.peak <= limit or budget.over or best.memory.peak - low <= NEAR * best.memory.peak:
            break
        if low or proved:
            target = (max(low, limit) + best.memory.peak) // 2
        found, out = _minimise_under(model, light, target, limit, seed, budget)
        if out:
            ruled_out = max(ruled_out, target)
        if found is None or found.memory.peak >= best.memory.peak:
            low = max(low, target)
        if found is not None and found.memory.peak < best.memory.peak:
            best = found
    return best, ruled_out


def _minimise_under(model: Model, light: Problem, target: int, limit: int, seed: int, budget: Budget) -> tuple[ScheduledPlan | None, bool]:
    """The smallest plan found under the limit ``target``, and whether the problem has no solution there."""
    reserves, best = CoverRows(model, target), None
    problem = replace(light, limit=target)
    for _ in range(LEAST_MEMORY_SOLVES):
        asked = reserves.apply(problem)
        solution = solve(asked, _solve_budget(budget, SOLVE_WORK), gap=0.05, seed=seed)
        if solution.choices is None:
            if asked is problem:
                return best, solution.status is Status.INFEASIBLE
            if not reserves.ease():
                break
            continue
        choices = solution.choices[: len(model.nodes)]
        found = _schedule_lean(model, decode_assignment(model, choices), limit, budget)
        if best is None or found.memory.peak < best.memory.peak:
            best = found
        if found.memory.peak <= target or not reserves.learn(problem, choices, found.samples):
            break
    return best, False


def _solve_budget(budget: Budget, most: float) -> Budget:
    return budget.at_most(most).at_least(LEAST_MEMORY_LAST_WORK)


def _schedule_lean(model: Model, assignment: Assignment, limit: int, budget: Budget) -> ScheduledPlan:
    space = model.space
    return best_schedule(space.graph, assignment, space.machine, space.optimizer, limit, start=LEAN_LIMITS, tries=0, budget=budget)


def _byte_time_problem(model: Model, problem: Problem) -> Problem:
    """The problem whose cost is bytes times life, summed over all memory items, without a limit."""
    weight = np.concatenate(model.extra_byte_times)
    scale = 2.0**50 / max(float(weight.max()), 1.0) / len(model.nodes)
    costs = np.where(problem.costs >= INFINITE, INFINITE, np.rint(weight * scale).astype(np.int64))
    return replace(problem, costs=costs, edge_costs=np.where(problem.edge_costs >= INFINITE, INFINITE, 0), limit=None)


def infeasible_error(least: Memory, limit: int, ruled_out: int) -> InfeasibleError:
    """The error that names the least memory known to do, the least not ruled out, and the biggest tensors at the peak.

    Args:
        ruled_out: bytes in which no plan fits.
    """
    items = ", ".join(f"{name} {readable_bytes(size)}" for name, size in least.biggest[:5])
    held = ("parameters", "gradients", "optimizer", "activations")
    parts = ", ".join(f"{name} {readable_bytes(getattr(least, name))}" for name in held)
    proved = f"; none fits in {readable_bytes(ruled_out)}" if ruled_out > limit else ""
    refused = f"no plan {'fits' if ruled_out >= limit else 'was found that fits'} in {readable_bytes(limit)} a rank"
    error = InfeasibleError(
        f"{refused}{proved}; the least known to do is {readable_bytes(least.peak)} ({parts}); biggest at its peak (at {least.at}): {items}",
        f"allow at least {least.peak} bytes (--memory), use a larger mesh, a smaller batch, or another optimizer",
    )
    error.least = least.peak
    return error


def readable_bytes(size: int) -> str:
    """Bytes with a binary unit.

    >>> readable_bytes(512), readable_bytes(1010 * 2**20)
    ('512 B', '0.986 GiB')
    """
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
