"""The rounds of a search: solve, schedule, simulate, learn what was waited for, solve again; and beside it the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from autopar.search.again import MOMENTS, without_kept
from autopar.search.bounds import Answer, Cuts, Mixture, blend, floor
from autopar.search.building import build_model
from autopar.search.calls import Charges
from autopar.search.counting import Counting
from autopar.search.excluding import within
from autopar.search.exposure import Alone, Exposure
from autopar.search.fitting import Reserves, choices_of
from autopar.search.folded import FoldedModel, folded
from autopar.search.model import TIES, InSequence, Model, Weights
from autopar.search.renting import dearest
from autopar.search.scarcity import (
    TIGHT,
    binds,
    change_again,
    change_one,
    change_some,
    fitting,
    in_less,
    keep_apart,
    keep_less,
    lighter,
    part,
    tighten,
    too_late,
    without_answer,
)
from autopar.search.solving import solve
from autopar.search.space import Late
from autopar.search.trials import CLOSE, GAIN, SMALL, TURN, UNLIMITED, Trials
from solvers import INTERRUPTED, Status

EXPOSURES = 8
"""Rounds of prices by exposure, at most."""
BOUNDS = 30
"""Rounds of weights for the bound, at most."""
EVEN = (1.0, 0.3, 0.03)
"""Shares waited for under which a small problem is solved as well, alike for all collectives: what one plan shows of itself
says little about plans that are quite different."""
ALONE = (1.0, 0.6)
"""Shares of the time beside operators that each collective has for itself, where memory is short: of a free plan the prices it shows say
more."""
CHANGING, HALF_CHANGING, MOST_CHANGING = 0.2, 0.5, 0.9
"""Shares of the time left in which plans are changed: at first, before others are made to fit; by turns one thing at a time and some of it
chosen anew; and after all else."""
ROUGH = 0.01
"""The gap at which solves under these prices stop."""
JOINT, MOST_JOINT = 100_000, 60_000
"""Edge entries of a problem up to which second runs are chosen in it, together with everything else; and of the larger problem that it
becomes then, up to which all times of theirs are told apart."""
PATIENT = 6
"""The like for weights where memory is short: the first say nothing about plans of little memory."""
HUGE, LITTLE = 10_000_000, 0.015
"""Edge entries from which a solve takes seconds, and the relative gain of a bound for which no other is asked there."""
FINER, ROUGHER = 0.25, 0.02
"""Solves for a bound stop at this share of the gap that is open, and at the latter at most: what is chosen then suggests other weights as
well as the best would, which take many times as long."""
HALFWAY = 0.5
"""And of how much more any weights may come to: else the bound stays as much below what they do come to."""
PROVING = 0.1
"""Share of the time limit that is left for bounds where memory is short and plans could be changed for ever."""
BEYOND, SETTLING = (0.1, 0.5), 2
"""Share of the time limit, and seconds, by which a last proof may pass it, and how many times as long as a solve it may take."""
ENOUGH = 0.01
"""Share of the gap that is open for which no other price of memory is tried."""
MUCH = 0.01
"""Share of a step from which what calls take at least is much of it."""
CALLING, NEARLY, SOLVING = 0.2, 1e-3, 0.015
"""Share of the time limit for the bound that counts calls, and for that of paths where memory is short; the gap at which the solves of the
former stop where memory is paid for, and at which no other time is asked for (``EXCLUDING``); the share of the time limit for one."""
EXCLUDING = 8
"""Times for which it is asked what plans of less do without (``excluding``), halfway between the bound and the best plan."""
LOOSE = 0.1
"""The gap from which others are asked for of a large problem too, each a solve of seconds."""
RENTING, BRIEF = 0.35, 0.1
"""Share of the time limit for a bound for which memory is paid; less than ``BRIEF`` is too little, and as much is left for the proofs that
follow."""
SLIGHT = 1e-5
"""Relative gain for which a bound is proved, but of a long graph, where that takes a second."""
SETTLED = 2
"""So many of the best bounds that hold for tied layers are proved for free ones."""
CALLED = 3
"""So many of the weights that bounds came from are asked for one that counts latencies too."""
SHARE = 0.3
"""Share of the weights that the cuts ask for in what is asked next; the rest is the best so far."""


def close_enough(left_open: float, bound: float, most: float) -> float:
    """The gap at which a solve for a bound stops.

    Args:
        left_open: the gap of the best plan.
        bound, most: seconds of the best bound so far, and those that any weights may come to by the answers so far.
    """
    return max(min(FINER * left_open, ROUGHER, HALFWAY * (1 - bound / most)), CLOSE)


class Search(Trials):
    """The rounds that improve the best schedule and the best bound."""

    def run(self, begin: Callable[[], None] = lambda: None) -> bool:
        """All rounds, and an error when nothing fits. Ctrl-C, and choices that are not priced in time, end them with the best so far, if
        there is one; what is known of the least memory is said where it does not fit.

        Args:
            begin: offers the plans to begin from.

        Returns False where a folded model is left for the whole one, because memory is short and a gap is left."""
        solving = perf_counter()
        try:
            begin()
            solving = perf_counter()
            if self.left <= 0:
                pass  # with the best baseline
            elif self.model.space.machine.cost_model == "communication":
                self._in_sequence()
            else:
                self._by_step()
            self._settle()
            self.settle_best()
        except (KeyboardInterrupt, Late) as reason:
            self.interrupted = isinstance(reason, KeyboardInterrupt)
            if self.best is None or (self.interrupted and not self.fits):
                raise
            self.settle_best()
        self.seconds = perf_counter() - solving
        short = self.best is None or self.best.memory.peak > self.limit
        wanting = short or (self.short and not self.large and not self.long and self.reached > self.gap)
        if self.folded and wanting and self.left > 0 and not self.interrupted:
            return False
        if short and self.folded:
            raise too_late(self)
        if short:
            without_answer(self)
        return True

    def _in_sequence(self) -> None:
        gap = CLOSE if self.large else self.gap
        exact = all(edge.readers <= 2 for edge in self.model.edges)
        found = self.solve(InSequence(), gap, proves=exact)
        if found is not None and not exact:
            self.solve(InSequence(shared=True), gap, proves=True)
        if found is not None and found.memory.peak > self.limit:
            fitting(self, InSequence(), gap)
            if self.reached > TIGHT:
                tighten(self, InSequence())

    def _allow_again(self, exposure: Exposure) -> None:
        """Second runs come in where the best plan without a limit does not fit. In a problem that stays small, or where nothing else
        fits, they are chosen together with everything else, all their times told apart or none; otherwise plans that fit are changed and
        answers of a problem in which nothing of what backward keeps counts are made to fit, one after another."""
        free = self.solve(exposure, CLOSE, limit=UNLIMITED)
        if free is None or free.memory.peak <= self.limit:
            return
        self.plain = free
        for share in () if self.large else EVEN:
            before = self.start
            self.solve(Exposure.even(share, self.slowdown), CLOSE, limit=UNLIMITED)
            if before is not None and self.start is not None and np.array_equal(before, self.start):
                break  # other prices would find the same
        space, entries = self.model.space, len(self.problem.edge_costs)
        joint = entries <= JOINT
        if not self.large:
            self.held_back = (PROVING if joint else CALLING) * self.time_limit
            part(self)
            if joint or not self.fits:
                lighter(self)
            if not joint:
                in_less(self)
                change_one(self, CHANGING)
        if not joint:
            if self.large or not self.fits:
                keep_less(self, exposure)
            if self.fits and not self.large:
                self._change_more(exposure)
        exact = build_model(space, again=MOMENTS) if entries <= SMALL else None
        if exact is not None and sum(edge.seconds.size for edge in exact.edges) <= MOST_JOINT:
            self.model, self.start = exact, None
        elif joint or not (self.fits or self.large):
            self.model, self.start = build_model(space, again=1), None
        else:
            self.keeping, self.model = True, without_kept(self.model)
        self.problem, self.unit = self.model.problem(self.limit)
        self.reserves = Reserves(self.model, self.limit, pairs=not self.large)
        self.again = self.proved = False

    def _change_more(self, exposure: Exposure) -> None:
        """Answers under prices by exposure, and again, since the first teach what lists hold beyond what the problem counts; the best that
        fits with some of it chosen anew, and changed one thing at a time, by turns."""
        for _ in range(2):
            self._rounds(exposure)
        for share in (HALF_CHANGING, MOST_CHANGING):
            change_some(self, HALF_CHANGING)
            change_one(self, share)
        self._polish()

    def _rounds(self, exposure: Exposure) -> Exposure:
        """Solves under prices by exposure, each learnt from the last answer, and in a small problem under even prices; the last prices.
        Where second runs are chosen together with everything else, under those of collectives alone first."""
        idle = 0
        known = self.best is not None and self.best.memory.peak <= self.limit and not self.keeping and not self.folded
        if self.best is not None and known and len(self.problem.edge_costs) > SMALL:
            self.start = choices_of(self.model, self.problem, self.best.assignment, self.seed)
        seen: list[np.ndarray] = []
        alone = ALONE if self.plain is not None and not self.again and not self.keeping else ()
        for share in alone:
            if not self.spent():
                fitting(self, Alone(share, self.slowdown), ROUGH)
        for _ in range(EXPOSURES):
            found = fitting(self, exposure, CLOSE)
            if found is None or found.memory.peak > self.limit:
                break
            idle = 0 if self.gained else idle + 1
            assert self.start is not None
            if idle >= (1 if alone else self.idle) or self.spent() or any(np.array_equal(self.start, other) for other in seen):
                break
            seen.append(self.start)
            before, exposure = exposure, exposure.learn(found.schedule, found.slots)
            if exposure == before:
                break  # an answer without collectives teaches nothing
        if self.proved:
            return exposure
        for share in EVEN if self.small else ():
            if not self.spent():
                fitting(self, Exposure.even(share, self.slowdown), CLOSE)
        return exposure

    def _by_step(self) -> None:
        exposure = Exposure.first(self.slowdown)
        if self.best is not None:
            exposure = exposure.learn(self.best.schedule, self.best.slots)
        if self.again:
            self.held_back = PROVING * self.time_limit
            self._allow_again(exposure)
        exposure = self._rounds(exposure)
        self.held_back = 0.0
        if self.proved:
            return
        short = self.plain is not None and not self.large and not self.folded
        called = self.keeping and short and self.reached > TIGHT and self._call_paid()
        if self.keeping and not called and self.reached > TIGHT:
            self._rent()
        if self.proves and not called and (self.left > 0 or self.best is None):
            self._prove()
        called = called or (short and self.reached > TIGHT and self._call_paid())
        if self.folded and self.short:
            self._rent()  # what is paid for memory is in no claim: few of them are more, and need a proof
        self._settle()
        if self.proves and not called:
            self._call()
        if self.folded and self.short and self.left > 0:
            keep_less(self, exposure)
            self._polish()
            keep_apart(self, exposure)
        if short:
            change_one(self, HALF_CHANGING)
            self._polish()
            change_some(self, HALF_CHANGING)
            change_one(self, HALF_CHANGING)
        if binds(self) and self.reached > TIGHT and not self.keeping and not self.folded:
            tighten(self, exposure)
        if self.plain is not None and self.small and self.reached > self.gap:
            change_again(self, self.plain)
        if short:
            change_some(self, HALF_CHANGING)
            change_one(self, MOST_CHANGING)
        self._polish()

    def _prove(self) -> None:
        """Bounds under the weights of operators alone, where a solve does not take long, and then under those that answers suggest. What
        they give are plans to try as well: those of operators alone, whatever waits for what, are like no others. The others have gained
        nothing where a schedule takes long, and are left there."""
        cuts = Cuts(self.model, self.slowdown)
        huge = len(self.problem.edge_costs) > HUGE
        center, idle, little, most = cuts.first(), 0, LITTLE if huge else GAIN, math.inf
        until = math.inf if self.plain is None else perf_counter() + CALLING * self.time_limit
        mixture = center
        self.mixtures.append((floor(self.model), center))
        for model, choices in self.chosen:
            if model is self.model:
                cuts.add(Answer(model, choices))
        if cuts.answers and huge:
            mixture = blend(cuts.best()[0], center, SHARE)
        for number in range(BOUNDS):
            before, ask = self.aim, self.solve if number == 0 or not (self.large or self.long) else self.choose
            left_open = 1 - self.aim / self.best.seconds if self.best is not None and self.fits else 1.0
            found = ask(mixture, close_enough(left_open, self.aim, most), proves=True, limit=UNLIMITED if self.again else None)
            if self.last is not None and self.last.message == INTERRUPTED:
                raise KeyboardInterrupt
            if found is None or self.start is None or self.left <= 0 or (self.spent() and not self.short) or perf_counter() >= until:
                return
            cuts.add(Answer(self.model, self.start))
            gained = self.aim > before * (1 + GAIN)
            if self.aim > before:
                center = mixture
            idle = 0 if gained or self.gained else idle + 1
            wanted, most, _ = cuts.best()
            patience = PATIENT if self.plain is not None and not self.large else self.idle
            settled = self.large and not self.folded and self.reached <= LOOSE
            if settled or idle >= patience or most <= self.aim * (1 + little):
                return
            mixture = blend(wanted, center, SHARE)

    @property
    def _until_beyond(self) -> float:
        """Seconds left for a last proof."""
        return self.left + BEYOND[0] * self.time_limit + BEYOND[1]

    def _call(self) -> None:
        """A bound that counts calls, of the weights that promise most of it. Not of a large problem: its tables are many times as large."""
        limit = UNLIMITED if self.again or self.folded else self.limit
        if self.reached <= self.gap or self.large:
            return
        offered = [(bound, Charges(weights, self.model, float(self.limit))) for bound, weights in self.mixtures]
        promised = [(bound + charges.most, bound, charges) for bound, charges in offered]
        for most, bound, charges in sorted(promised, key=lambda one: one[0], reverse=True)[:CALLED]:
            if most > self.bound * (1 + GAIN) and self._until_beyond > 0:
                counting = Counting(charges, partial(self._least, self.model, limit, CLOSE, TURN * self.time_limit), bound)
                seconds = min(self._until_beyond, CALLING * self.time_limit)
                self.bound = max(self.bound, counting.best(GAIN * self.bound, perf_counter() + seconds))

    def _call_paid(self) -> bool:
        """The same where memory is paid for, since no problem has both limit and second runs, and without what no plan of less time has;
        whether calls are much of a step."""
        if not self.proves or self.left <= 0 or not self.model.space.links:
            return False
        weights = self.weights if isinstance(self.weights, Mixture) else Cuts(self.model, self.slowdown).first()
        weights, until = weights.without_paths(), perf_counter() + min(self.left, CALLING * self.time_limit)
        if Charges(weights, self.model, float(self.limit)).most < MUCH * self.bound:
            return False
        whole = build_model(self.model.space, again=1, share=0.0)

        def best(model: Model, least: float) -> float:
            charges = Charges(weights, model, float(self.limit))
            ask = partial(self._least, model, UNLIMITED, NEARLY, SOLVING * self.time_limit)
            return Counting(charges, ask, least, float(self.limit), sorted(set(model.times.values()))).best(GAIN * self.bound, until)

        self.bound = max(self.bound, best(whole, self.bound))
        most = self.best.seconds if self.best is not None and self.fits else 0.0
        for _ in range(EXCLUDING):
            middle = (self.bound + most) / 2
            if most <= self.bound * (1 + NEARLY) or perf_counter() >= until:
                break
            known = min(best(within(whole, middle), self.bound), middle)
            self.bound = max(self.bound, known)
            most = most if known == middle else middle
        return True

    def _least(self, model: Model, limit: int | None, gap: float, seconds: float, weights: Weights) -> tuple[float, np.ndarray | None]:
        """The bound of a problem under some weights, infinite where it has no answer and 0 where none is known; and the answer's."""
        seconds = min(self._until_beyond, seconds)
        if seconds <= 0:
            return 0.0, None
        problem, unit = model.problem(limit, weights)
        found = solve(problem, time_limit=seconds, gap=gap, seed=self.seed)
        bound = found.bound * unit / (1 + TIES)
        if found.choices is None or found.objective is None:  # of tied layers that says nothing of others
            return (0.0 if self.folded else math.inf if found.status is Status.INFEASIBLE else bound), None
        choices = model.expand(found.choices)
        return model.proved(weights, bound, found.objective * unit, seconds, choices), choices

    def _rent(self) -> None:
        """A bound for which memory is paid, where no problem has both the limit and second runs."""
        spare = 0.0 if self.keeping else BRIEF * self.time_limit
        seconds = min(self.left - spare, RENTING * self.time_limit)
        if not self.proves or seconds < BRIEF * self.time_limit:
            return
        weights = self.weights if isinstance(self.weights, Mixture) else Cuts(self.model, self.slowdown).first()
        until, model = perf_counter() + seconds, self.model
        if self.apart:
            model = build_model(model.space, again=1, share=0.0)
            if isinstance(self.model, FoldedModel):
                tied = folded(model, self.model.fold)
                assert tied is not None, "operators that are alike run again alike"
                model = tied
        times = [time for time in sorted(set(model.times.values())) if model.rests(time)]
        enough = ENOUGH * self.reached if self.fits else 0.0
        self.bound = max(self.bound, dearest(model, weights.without_paths(), float(self.limit), times, until, enough))

    def _polish(self) -> None:
        """More limits for the best schedule, of a deep graph as shorter ones tell it and then at full depth: they are not so precise."""
        best = self.best
        if best is not None and best is not self.polished and best.memory.peak <= self.limit and not self.draft and self.left > 0:
            deep = bool(self.model.short(best.assignment))
            if deep:
                self.offer(self._schedule(best.assignment, False, best.limits, tries=4 * self.tries), self.method)
                self.settle_best()
                best = self.best or best
            self.offer(self._schedule(best.assignment, deep, best.limits, tries=(2 if deep else 4) * self.tries), self.method)
            self.polished = self.best

    def _settle(self) -> None:
        """Proves for layers left free the best of the bounds that so far hold for tied ones, if that is not far beyond the time limit."""
        if self._until_beyond < SETTLING * self.proving:
            self.claims.clear()
        least = GAIN if self.long else SLIGHT
        for bound, optimum, weights, choices in sorted(self.claims, key=lambda claim: claim[0], reverse=True)[:SETTLED]:
            if bound > self.bound * (1 + least):
                seconds = max(min(self.left, TURN * self.time_limit), 1.0)
                proved = self.model.proved(weights, bound, optimum, seconds, choices)
                self.bound = max(self.bound, proved)
                if isinstance(weights, Mixture):
                    self.mixtures.append((proved, weights))
        self.claims.clear()
