"""Where memory is short: answers made to fit as schedules, with less kept, with other second runs, or under lower limits.

The integer problem leaves out some of what a schedule holds in memory, so its bound is true and the schedule's own peak decides: where
that is over the limit, it is solved again with that much left free at those times (``fitting``), or with operators that run a second
time (``rematerialization``, ``crossover``).
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
    """Solves until an answer fits as a schedule; the last one found, None without choices."""
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
    """Asks for more where an answer's schedule does not fit; whether that is more than before."""
    assert trials.start is not None
    return trials.reserves.learn(trials.problem, trials.start, answer.samples)


def solve_restricted_plans(trials: SearchState, prices: LearnedOverlap, budget: Budget) -> None:
    """What the answers so far and the plans written by hand are split like, with less kept; and then, as long as that helps, with answers
    beside them under the prices that this taught, of a problem in which nothing counts that may be made again."""
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
    """The answer of a problem within so many bytes; None where there is none."""
    problem, _ = light.problem(limit, prices)
    turn = budget.at_most(SOLVE_SHARE * trials.effort).at_least(1.0)
    choices = solve(problem, turn, gap=gap, seed=trials.seed, patient=False).choices
    return None if choices is None else decode_assignment(light, light.expand(choices))


def _without_kept(trials: SearchState, light: Model, prices: LearnedOverlap, budget: Budget) -> LearnedOverlap:
    """Answers that fit when all is made again that may be, each under the prices of the one before; the last prices.

    Where what is kept is all that does not fit, answers without a limit say little of how parameters are to be split."""
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
    """Hill climbing over what the best plan without a limit recomputes: one or two operators more or fewer at a time, from the set of the
    best plan that fits, from none and from all. What an answer counts and what its schedule holds differ: between two answers of the
    problem there may be one that fits."""
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
    """The plan of least memory, if that fits after all.

    Raises:
        InfeasibleError, TimeLimitError.
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
    """The error of a search that ends without a plan that fits."""
    what, hint = trials.budget.meter.used_up()
    if trials.best is not None:
        fits = f"no plan that fits in {readable(trials.limit)} per rank, where the least found takes {readable(trials.best.memory.peak)},"
        what = what.replace("no plan", fits, 1)
    return TimeLimitError(what, f"{hint}, or more memory")
