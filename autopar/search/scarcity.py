"""Where memory is short: answers made to fit as schedules, with less kept, with other second runs, or under lower limits.

The integer problem leaves out some of what a schedule holds in memory, so its bound is true and the schedule's own peak decides: where
that is over the limit, it is solved again with that much left free at those times (``fitting``), or with operators that run a second
time (``again``, ``keeping``).
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.errors import TimeLimitError
from autopar.schedule import Assignment
from autopar.search.again import without_kept
from autopar.search.building import build_model
from autopar.search.effort import Budget
from autopar.search.exposure import Alone, Exposure
from autopar.search.extract import extract
from autopar.search.keeping import KEEPING_GAP, SHARES, Wanted, fit
from autopar.search.lean import infeasible, readable, smallest
from autopar.search.model import Model, Weights
from autopar.search.moving import LESS, improve, lighten
from autopar.search.parting import parted
from autopar.search.pins import Pins
from autopar.search.recompute import full, recompute, with_policies
from autopar.search.regions import around, region
from autopar.search.solving import solve
from autopar.search.trials import CLOSE, TURN, Trials
from autopar.search.tuning import Timed
from solvers import Status

FITTINGS = 6
"""Solves under the same prices until an answer fits as a schedule, at most."""
PASSES = 4
"""Times that what plans keep is chosen, at most."""
LIGHTER, ROUGH = 2, 1e-2
"""Answers of a large problem in which nothing counts that may be made again, before any is made to fit, at most; and the gap at which one
solve stops: exact answers under a memory limit cost much, and what they keep is chosen later."""
UNUSED = 0.005
"""Where the best of equal layers leaves less of the limit, there is nothing that some of them could keep beside."""
TIGHTER = 0.95
"""Where the limit binds and a gap is left, this share of it is tried: what is found for less memory fits as well."""
HALVINGS = 6
"""So many limits are tried then."""
TIGHT = 0.02
"""The gap above which they are."""
CHANGED = 3
"""So many plans are changed one thing at a time."""
TOGETHER = 600_000
"""Edge entries up to which answers with recomputation as choices are asked for in less memory (``in_less``)."""
SHARE, STEP = 0.8, 0.1
"""The first share of the limit that they may hold, and how much less the next one may."""
BESIDE = (0.1, 0.3, 0.5)
"""Shares waited for of what may run beside operators, under which they are asked for."""
REGIONS, IDLE_REGIONS = (4, 8, 16), 150
"""So many operators are chosen anew together, drawn; and so many times without a gain are enough."""
ALONE, ROOM = (0.3, 0.6, 1.0), (0.8, 0.85, 0.9, 0.95, 1.0)
"""Shares of the time beside operators that collectives have for themselves then, and of the limit that answers may hold, drawn as well."""
BESIDE_BEST = 1.03
"""Plans that take so many times as long as the best, at most, are changed before others are."""


def fitting(trials: Trials, weights: Weights, gap: float) -> Timed | None:
    """Solves until an answer fits as a schedule; the last one found, None without choices."""
    found, gained = None, False
    for _ in range(FITTINGS):
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


def _learn(trials: Trials, answer: Timed) -> bool:
    """Asks for more where an answer's schedule does not fit; whether that is more than before."""
    assert trials.start is not None
    return trials.reserves.learn(trials.problem, trials.start, answer.samples)


def in_less(trials: Trials, budget: Budget) -> None:
    """Answers in which second runs are chosen together with everything else, each for less memory than the one before, until one fits as a
    schedule and the next does no better: what an answer leaves free, its schedule has to gather ahead. Not in large problems."""
    model = build_model(trials.model.space, again=1)
    if sum(edge.seconds.size for edge in model.edges) > TOGETHER:
        return
    for waited in BESIDE:
        prices, share, fits = Exposure.of_streams(waited, trials.slowdown), SHARE, False
        while share > 0.0 and not budget.over and not trials.spent():
            answer = _answer(trials, model, prices, int(share * trials.limit), ROUGH, budget)
            if answer is None:
                break
            found = trials.schedule(answer, None, trials.tries)
            gained = trials.offer(found, "auto")
            if found.memory.peak <= trials.limit:
                trials.parted.append(found)
                if fits and not gained:
                    break
                fits = True
            share -= STEP


def keep_less(trials: Trials, prices: Exposure, budget: Budget) -> None:
    """What the answers so far and the plans written by hand are split like, with less kept; and then, as long as that helps, with answers
    beside them under the prices that this taught, of a problem in which nothing counts that may be made again."""
    model = trials.model
    written = [rival.assignment for rival in trials.rivals if not rival.assignment.again and model.space.offers(rival.assignment)]
    light = without_kept(model) if trials.apart else model
    shares: tuple[float, ...] = SHARES
    if trials.large and trials.apart:
        prices = _without_kept(trials, light, prices, budget)
        if trials.draft and trials.best is not None and trials.best.memory.peak <= trials.limit:
            return
    estimate: Timed | None = None
    for _ in range(PASSES):
        trials.gained = False
        found, prices = trials.kept((*trials.answers, *written), prices, budget, shares, estimate)
        if found is None or not trials.gained or trials.draft or budget.over:
            break
        shares, estimate = SHARES[:1], found if found.estimated else None
        answer = _answer(trials, light, prices, int(SHARES[0] * trials.limit), KEEPING_GAP, budget)
        if answer is None:
            break
        trials.answers.append(answer)


def keep_apart(trials: Trials, prices: Exposure, budget: Budget) -> None:
    """Of the best plan of equal layers, what each of them keeps: some may make more again than others, where all alike leave memory
    unused. Not where outputs or tensors are pinned, which a folded graph does not name, or the graph is too deep to be scheduled whole."""
    model, best = trials.model, trials.best
    if best is None or best.memory.peak > trials.limit or trials.draft or not trials.apart:
        return
    if best.memory.peak > (1 - UNUSED) * trials.limit or model.short(best.assignment):
        return
    pins, whole = model.space.pins, model.whole(best.assignment)
    if pins.outputs or pins.tensors or trials.budget.over:
        return
    space = replace(model.space, graph=model.whole_graph, pins=Pins())
    wanted = Wanted(trials.limit, 1, trials.tries, trials.seed, budget, SHARES[1::-1])
    found, _ = fit(space, (whole,), prices.learn(best.schedule, best.slots), wanted, best=replace(best, assignment=whole))
    if found is not None:
        trials.offer(found, "auto")


def _answer(trials: Trials, light: Model, prices: Weights, limit: int, gap: float, budget: Budget) -> Assignment | None:
    """The answer of a problem within so many bytes; None where there is none."""
    problem, _ = light.problem(limit, prices)
    turn = budget.at_most(TURN * trials.effort).at_least(1.0)
    choices = solve(problem, turn, gap=gap, seed=trials.seed, patient=False).choices
    return None if choices is None else extract(light, light.expand(choices))


def _without_kept(trials: Trials, light: Model, prices: Exposure, budget: Budget) -> Exposure:
    """Answers that fit when all is made again that may be, each under the prices of the one before; the last prices.

    Where what is kept is all that does not fit, answers without a limit say little of how parameters are to be split."""
    graph, machine, limit = light.space.graph, light.space.machine, int(SHARES[0] * trials.limit)
    for _ in range(LIGHTER):
        answer = _answer(trials, light, prices, limit, ROUGH, budget)
        if answer is None or answer in trials.answers or budget.over:
            break
        trials.answers.append(answer)
        leaner = recompute(graph, answer, full(graph), machine)
        found = trials.schedule(leaner, None, tries=trials.tries)
        prices = prices.learn(found.schedule, found.slots)
        if found.memory.peak > trials.limit:
            limit -= found.memory.peak - trials.limit
        elif not trials.offer(found, "auto"):
            break
    return prices


def binds(trials: Trials) -> bool:
    """Whether the limit keeps anything out."""
    return trials.reserves.learnt or trials.best is None or trials.best.memory.peak > TIGHTER * trials.limit


def tighten(trials: Trials, weights: Weights) -> None:
    """Plans for less memory, which fit as well: lower and lower limits, halfway to the least that has any, until one fits, then higher
    again."""
    low, high, target = 0, trials.limit, int(TIGHTER * trials.limit)
    for _ in range(HALVINGS):
        if trials.spent() or trials.reached <= TIGHT:
            return
        found = trials.solve(weights, CLOSE, limit=target)
        if found is not None and found.memory.peak > trials.limit:
            high = target
        else:
            low = target
        target = (low + high) // 2 if low else int(TIGHTER * target)


def part(trials: Trials, budget: Budget) -> None:
    """Of the best plan without a limit a part of each tensor on a rank, as far as it takes to fit; where that does not do, layers are made
    again as well."""
    assert trials.plain is not None
    plan, space = trials.plain.assignment, trials.model.space
    for some in (plan, *(leaner for _, leaner in with_policies(space.graph, plan, space.machine))):
        if not trials.spent() and not trials.parted:
            trials.parted = list(parted(space, some, trials.limit, lambda one: trials.schedule(one, None, trials.tries), budget))
    for found in trials.parted:
        trials.offer(found, "auto")


def lighter(trials: Trials, budget: Budget) -> None:
    """The best plan without a limit changed until it fits. Where that ends before, ``keep_less`` may take its strategies."""
    space = trials.model.space
    if trials.plain is None or trials.spent() or not space.offers(trials.plain.assignment):
        return
    found = lighten(space, trials.plain, trials.limit, budget)
    if found.memory.peak <= trials.limit:
        found = min(found, trials.schedule(found.assignment, found.limits, trials.tries), key=lambda one: one.seconds)
        trials.parted.append(found)
        trials.offer(found, "auto")
    else:
        trials.answers.append(found.assignment)


def change_one(trials: Trials, budget: Budget) -> None:
    """One change after another: of the best plans that fit towards the best without a limit, and of the best of these to anything."""
    model = trials.model

    def tune(plan: Assignment) -> Timed:
        return trials.schedule(plan, None, trials.tries)

    plain = trials.plain.assignment if trials.plain is not None else None

    def change(begin: Timed, guide: Assignment | None, stages: tuple[bool, ...]) -> None:
        asked = begin.assignment, guide is not None, stages
        if trials.spent() or asked in trials.changed or not model.space.offers(begin.assignment) or budget.over:
            return
        trials.offer(improve(model.space, begin, trials.limit, tune, budget, guide, stages), "auto")
        if not budget.over:
            trials.changed.append(asked)

    for begin in trials.fitted[:CHANGED] if plain is not None else ():
        change(begin, plain, LESS)
    while not budget.over and TIGHT < trials.reached < math.inf:
        before, best = len(trials.changed), trials.best
        near = [one for one in trials.fitted if one.seconds <= BESIDE_BEST * trials.fitted[0].seconds]
        for begins in (near, trials.fitted):
            for less in LESS:
                for begin in begins if trials.best is best else ():
                    change(begin, None, (less,))
        if len(trials.changed) == before:
            break


def change_some(trials: Trials, budget: Budget) -> None:
    """Of the best plan that fits one region after another chosen anew (``regions``), under prices and in shares of the limit that are
    drawn: each says something else about what schedules show only afterwards. It ends where many regions gave nothing.
    """
    space, idle = trials.model.space, 0
    while idle < IDLE_REGIONS and not budget.over and trials.fits and trials.reached > TIGHT and not trials.spent():
        best, draws = trials.best, trials.draws
        assert best is not None
        if not space.offers(best.assignment):
            return
        learnt = Exposure.first(trials.slowdown).learn(best.schedule, best.slots)
        streams = (Exposure.of_streams(waited, trials.slowdown) for waited in BESIDE)
        alone = (Alone(waited, trials.slowdown) for waited in ALONE)
        offered: list[Weights] = [learnt, *streams, *alone]
        model = build_model(around(space, best.assignment, region(space.graph, draws.choice(REGIONS), draws)), again=1)
        answer = _answer(trials, model, draws.choice(offered), int(draws.choice(ROOM) * trials.limit), ROUGH, budget)
        idle += 1
        if answer is not None and answer != best.assignment:
            trials.offer(trials.schedule(answer, best.limits, trials.tries, best.placed_seconds), "auto")
            idle = idle if trials.best is best else 0


def without_answer(trials: Trials) -> None:
    """The plan of least memory, if that fits after all.

    Raises:
        InfeasibleError, TimeLimitError.
    """
    last = trials.last
    if trials.best is None and last is not None and last.status is Status.UNKNOWN and last.smallest_limit is None:
        raise too_late(trials)
    known = (*trials.rivals, *([] if trials.best is None else [trials.best]))
    found, bound = smallest(trials.model, trials.problem, trials.limit, trials.seed, known, trials.proved, trials.budget)
    trials.offer(found, "least memory")
    assert trials.best is not None
    if trials.best.memory.peak > trials.limit:
        raise infeasible(trials.best.memory, trials.limit, bound)


def too_late(trials: Trials) -> TimeLimitError:
    what = "no plan"
    if trials.best is not None:
        what += f" that fits in {readable(trials.limit)} a rank, where the least found takes {readable(trials.best.memory.peak)},"
    hint = "allow more time (--time-limit), more memory, or fewer choices by pins"
    return TimeLimitError(f"{what} was found in {trials.budget.meter.time_limit:.3g} s", hint)
