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
from autopar.schedule.tuning import ScheduledPlan
from autopar.search.baselines.checkpointing import full_policy, recompute
from autopar.search.driver.state import SearchState
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model, Weights
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.ilp.rematerialization import without_kept_memory
from autopar.search.memory.min_memory import infeasible, readable, smallest
from autopar.search.settings import (
    CROSSOVER_GAP,
    CROSSOVER_PASSES,
    FITTING_SOLVES,
    FLIPS,
    LIGHT_ANSWERS,
    LIGHT_GAP,
    LIMIT_SHARES,
    SOLVE_SHARE,
)
from autopar.search.solving import solve
from solvers import Status


def fitting(trials: SearchState, weights: Weights, gap: float) -> ScheduledPlan | None:
    """Solves until a solution fits as a schedule. The last schedule found; None without a solution."""
    found, gained = None, False
    for _ in range(FITTING_SOLVES):
        answer = trials.solve(weights, gap)
        gained |= trials.gained
        found = answer or found
        if answer is None:
            if not trials.reserves.ease():
                break
        elif trials.keeping or trials.folded or answer.memory.peak <= trials.limit or not _learn(trials, answer):
            break
        if trials.left <= 0:
            break
    trials.gained = gained
    return found


def _learn(trials: SearchState, answer: ScheduledPlan) -> bool:
    """Adds to the cover rows what a schedule holds beyond the limit. Whether they ask for more than before."""
    assert trials.start is not None
    return trials.reserves.learn(trials.problem, trials.start, answer.samples)


def solve_restricted_plans(trials: SearchState, prices: LearnedOverlap, budget: Budget) -> None:
    """Crossover of the answers so far with the baselines, repeated while it gains.

    Each further round adds an answer under the prices that the round before has learnt. Its problem does not count tensors that may be
    recomputed.
    """
    model = trials.model
    written = [rival.assignment for rival in trials.rivals if not rival.assignment.again and model.space.offers(rival.assignment)]
    light = without_kept_memory(model) if trials.apart else model
    shares: tuple[float, ...] = LIMIT_SHARES
    if trials.large and trials.apart:
        prices = _without_kept(trials, light, prices, budget)
        if trials.draft and trials.best is not None and trials.best.memory.peak <= trials.limit:
            return
    estimate: ScheduledPlan | None = None
    for _ in range(CROSSOVER_PASSES):
        trials.gained = False
        found, prices = trials.kept((*trials.answers, *written), prices, budget, shares, estimate)
        if found is None or not trials.gained or trials.draft or budget.over:
            break
        shares, estimate = LIMIT_SHARES[:1], found if found.estimated else None
        answer = _answer(trials, light, prices, int(LIMIT_SHARES[0] * trials.limit), CROSSOVER_GAP, budget)
        if answer is None:
            break
        trials.answers.append(answer)


def _answer(trials: SearchState, light: Model, prices: Weights, limit: int, gap: float, budget: Budget) -> Assignment | None:
    """The solution of a problem within ``limit`` bytes per rank; None without one."""
    problem, _ = light.problem(limit, prices)
    turn = budget.at_most(SOLVE_SHARE * trials.effort).at_least(1.0)
    choices = solve(problem, turn, gap=gap, seed=trials.seed, patient=False).choices
    return None if choices is None else decode_assignment(light, light.expand(choices))


def _without_kept(trials: SearchState, light: Model, prices: LearnedOverlap, budget: Budget) -> LearnedOverlap:
    """Answers that fit if everything that may be recomputed is, each under the prices learnt from the one before. Returns the last prices.

    Where kept tensors alone do not fit, answers without a limit say little of how parameters are to be split.
    """
    graph, machine, limit = light.space.graph, light.space.machine, int(LIMIT_SHARES[0] * trials.limit)
    for _ in range(LIGHT_ANSWERS):
        answer = _answer(trials, light, prices, limit, LIGHT_GAP, budget)
        if answer is None or answer in trials.answers or budget.over:
            break
        trials.answers.append(answer)
        leaner = recompute(graph, answer, full_policy(graph), machine)
        found = trials.schedule(leaner, None, tries=trials.tries)
        prices = prices.learn(found.schedule, found.slots)
        if found.memory.peak > trials.limit:
            limit -= found.memory.peak - trials.limit
        elif not trials.offer(found, "auto"):
            break
    return prices


def flip_recomputation(trials: SearchState, budget: Budget) -> None:
    """Hill climbing over the set of recomputed operators, in the best plan without a limit.

    A move adds or removes one or two operators. It begins with the set of the incumbent, with none and with all. The problem counts other
    bytes than a schedule holds, so a set between two solutions may fit.
    """
    space, plain = trials.model.space, trials.plain
    assert plain is not None
    names = [op.name for op in space.graph.ops if op.phase == "forward" and not why_once(op)]
    changes = [frozenset(some) for count in (1, 2) for some in combinations(names, count)][:FLIPS]
    seen: set[frozenset[str]] = set()
    known = trials.best.assignment.again if trials.best is not None else frozenset()
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
                found = trials.schedule(recompute(space.graph, plain.assignment, some, space.machine), None, tries=0)
                trials.offer(found, "auto")
                if trials.best is found:
                    chosen = some
                    break


def minimise_or_raise(trials: SearchState) -> None:
    """Offers the plan of least memory, in case it fits.

    Raises:
        InfeasibleError: no plan was found that fits.
        TimeLimitError: the budget ended before there was any plan.
    """
    last = trials.last
    if trials.best is None and last is not None and last.status is Status.UNKNOWN and last.smallest_limit is None:
        raise out_of_budget(trials)
    known = (*trials.rivals, *([] if trials.best is None else [trials.best]))
    found, bound = smallest(trials.model, trials.problem, trials.limit, trials.seed, known, trials.proved, trials.budget)
    trials.offer(found, "least memory")
    assert trials.best is not None
    if trials.best.memory.peak > trials.limit:
        raise infeasible(trials.best.memory, trials.limit, bound)


def out_of_budget(trials: SearchState) -> TimeLimitError:
    """The error of a search whose budget ended without a plan that fits."""
    what, hint = trials.budget.meter.used_up()
    if trials.best is not None:
        fits = f"no plan that fits in {readable(trials.limit)} per rank, where the least found takes {readable(trials.best.memory.peak)},"
        what = what.replace("no plan", fits, 1)
    return TimeLimitError(what, f"{hint}, or more memory")
