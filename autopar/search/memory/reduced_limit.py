"""Solves for short memory: repaired until the schedule fits, recombined with rematerialization, or under reduced limits.

The integer problem leaves out a part of a schedule's memory, so its bound is true and the schedule's own peak decides. Where that is over
the limit, the problem is solved again with bytes reserved (``memory_repair``), or with recomputation (``crossover``).
"""

from __future__ import annotations

from itertools import combinations

from autopar.effort import Budget
from autopar.errors import TimeLimitError
from autopar.rules import why_once
from autopar.schedule import Assignment
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.baselines.checkpointing import full_policy, recompute
from autopar.search.driver.state import SearchState
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model, Weights
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.ilp.rematerialization import without_kept_memory
from autopar.search.memory.min_memory import infeasible_error, minimise_peak, readable_bytes
from autopar.search.settings import (
    CROSSOVER_IDLE,
    FLIPS,
    LEAST_SOLVE_WORK,
    LIGHT_ANSWERS,
    LIMIT_SHARES,
    NEAR,
    ROUNDS,
    SOLVE_SHARE,
)
from autopar.search.solving import solve
from autopar.solvers import Status


def solve_until_fits(search: SearchState, weights: Weights, gap: float) -> ScheduledPlan | None:
    """Solves until a solution fits as a schedule. The last schedule found; None without a solution."""
    found, gained = None, False
    for _ in range(ROUNDS):
        answer = search.solve(weights, gap)
        gained |= search.has_gained
        found = answer or found
        if answer is None:
            if not search.memory.cover_rows.ease():
                break
        elif (
            search.memory.repairs_by_crossover
            or search.is_folded
            or answer.memory.peak <= search.limit
            or not _reserve_excess(search, answer)
        ):
            break
        if search.work_left <= 0:
            break
    search.has_gained = gained
    return found


def _reserve_excess(search: SearchState, answer: ScheduledPlan) -> bool:
    """Adds to the cover rows what a schedule holds beyond the limit. Whether they ask for more than before."""
    assert search.warm_start is not None
    return search.memory.cover_rows.learn(search.problem, search.warm_start, answer.samples)


def cross_over_plans(search: SearchState, prices: LearnedOverlap, budget: Budget) -> None:
    """Crossover of the answers so far with the baselines, repeated while it gains.

    Each further round adds an answer under the prices that the round before has learnt. Its problem does not count tensors that may be
    recomputed.
    """
    model = search.model
    written = [rival.assignment for rival in search.baselines if not rival.assignment.again and model.space.offers(rival.assignment)]
    light = without_kept_memory(model) if search.memory.recompute_times else model
    shares: tuple[float, ...] = LIMIT_SHARES
    if search.size.is_large and search.memory.recompute_times:
        prices = _add_light_answers(search, light, prices, budget)
        if search.request.draft and search.best is not None and search.best.memory.peak <= search.limit:
            return
    estimate: ScheduledPlan | None = None
    idle = 0
    for _ in range(ROUNDS):
        search.has_gained, plans = False, (*search.answers, *written)
        if not plans:
            break
        found, prices = search.recombine(plans, prices, budget, shares, estimate)
        idle = 0 if search.has_gained else idle + 1
        if found is None or idle > CROSSOVER_IDLE or search.request.draft or budget.over:
            break
        shares, estimate = LIMIT_SHARES[:1], found if found.estimated else None
        answer = _solve_within(search, light, prices, int(LIMIT_SHARES[0] * search.limit), NEAR, budget)
        if answer is None:
            break
        search.answers.append(answer)


def _solve_within(search: SearchState, light: Model, prices: Weights, limit: int, gap: float, budget: Budget) -> Assignment | None:
    """The solution of a problem within ``limit`` bytes per rank; None without one."""
    problem, _ = light.problem(limit, prices)
    turn = budget.at_most(SOLVE_SHARE * search.total_work).at_least(LEAST_SOLVE_WORK)
    choices = solve(problem, turn, gap=gap, seed=search.request.seed, patient=False).choices
    return None if choices is None else decode_assignment(light, light.expand(choices))


def _add_light_answers(search: SearchState, light: Model, prices: LearnedOverlap, budget: Budget) -> LearnedOverlap:
    """Answers that fit if everything that may be recomputed is, each under the prices learnt from the one before. Returns the last prices.

    Where kept tensors alone do not fit, answers without a limit say little of how parameters are to be split.
    """
    graph, machine, limit = light.space.graph, light.space.machine, int(LIMIT_SHARES[0] * search.limit)
    for _ in range(LIGHT_ANSWERS):
        answer = _solve_within(search, light, prices, limit, NEAR, budget)
        if answer is None or answer in search.answers or budget.over:
            break
        search.answers.append(answer)
        leaner = recompute(graph, answer, full_policy(graph), machine)
        found = search.schedule(leaner, None, tries=search.size.tries)
        prices = prices.learn(found.schedule, found.slots)
        if found.memory.peak > search.limit:
            limit -= found.memory.peak - search.limit
        elif not search.offer(found, "auto"):
            break
    return prices


def flip_recomputation(search: SearchState, budget: Budget) -> None:
    """Hill climbing over the set of recomputed operators, in the best plan without a limit.

    A move adds or removes one or two operators. It begins with the set of the incumbent, with none and with all. The problem counts other
    bytes than a schedule holds, so a set between two solutions may fit.
    """
    space, plain = search.model.space, search.memory.free_plan
    assert plain is not None
    names = [op.name for op in space.graph.ops if op.phase == "forward" and not why_once(op)]
    changes = [frozenset(some) for count in (1, 2) for some in combinations(names, count)][:FLIPS]
    seen: set[frozenset[str]] = set()
    known = search.best.assignment.again if search.best is not None else frozenset()
    for start in dict.fromkeys((known, frozenset[str](), frozenset(names))):
        chosen: frozenset[str] | None = start
        while chosen is not None:
            around, chosen = [chosen, *(chosen ^ change for change in changes)], None
            for some in around:
                if some in seen:
                    continue
                if len(seen) >= FLIPS or budget.over:
                    return
                seen.add(some)
                found = search.schedule(recompute(space.graph, plain.assignment, some, space.machine), None, tries=0)
                search.offer(found, "auto")
                if search.best is found:
                    chosen = some
                    break


def minimise_or_raise(search: SearchState) -> None:
    """Offers the plan of least memory, in case it fits.

    Raises:
        InfeasibleError: no plan was found that fits.
        TimeLimitError: the budget ended before there was any plan.
    """
    last = search.last_solution
    if search.best is None and last is not None and last.status is Status.UNKNOWN and last.smallest_limit is None:
        raise out_of_budget_error(search)
    known = (*search.baselines, *([] if search.best is None else [search.best]))
    found, bound = minimise_peak(
        search.model, search.problem, search.limit, search.request.seed, known, search.memory.is_infeasible, search.budget
    )
    search.offer(found, "least memory")
    assert search.best is not None
    if search.best.memory.peak > search.limit:
        raise infeasible_error(search.best.memory, search.limit, bound)


def out_of_budget_error(search: SearchState) -> TimeLimitError:
    """The error of a search whose budget ended without a plan that fits."""
    what, hint = search.budget.meter.used_up()
    if search.best is not None:
        least = readable_bytes(search.best.memory.peak)
        fits = f"no plan that fits in {readable_bytes(search.limit)} per rank, where the least found takes {least},"
        what = what.replace("no plan", fits, 1)
    return TimeLimitError(what, f"{hint}, or more memory")
