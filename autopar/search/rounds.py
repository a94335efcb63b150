"""The rounds of a search: solve, schedule, simulate, learn what was waited for, solve again; and beside it the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from autopar.search.again import MOMENTS, without_kept
from autopar.search.bounds import Answer, Cuts, Mixture, blend, floor
from autopar.search.building import build_model
from autopar.search.calls import Charges
from autopar.search.counting import Counting
from autopar.search.effort import Budget
from autopar.search.excluding import within
from autopar.search.exposure import Alone, Exposure
from autopar.search.extract import extract
from autopar.search.fitting import Reserves, choices_of
from autopar.search.folded import FoldedModel, folded
from autopar.search.model import TIES, InSequence, Model, Weights
from autopar.search.phases import Phase, run_phases
from autopar.search.renting import dearest
from autopar.search.scarcity import (
    TIGHT,
    binds,
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
from autopar.search.shared_reshards import SharingProblem
from autopar.search.solving import solve
from autopar.search.space import Late
from autopar.search.trials import CLOSE, GAIN, SMALL, TURN, UNLIMITED, Asked, Trials
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
BRIEF = 0.1
"""Share of the effort that a bound for which memory is paid needs at least."""
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
    """What phases do: they improve the best schedule and the best bound."""

    def __init__(self, model: Model, asked: Asked, again: bool) -> None:
        super().__init__(model, asked, again)
        self.prices = Exposure.first(self.slowdown)
        """Prices learnt from simulation so far."""
        self.called = False
        """Whether a bound that counts calls was found with memory paid for."""

    def run(self, begin: Callable[[], None] = lambda: None) -> bool:
        """All phases, and an error when nothing fits. Ctrl-C, and choices that are not priced in time, end them with the best so far, if
        there is one; what is known of the least memory is said where it does not fit.

        Args:
            begin: offers the plans to begin from.

        Returns False where a folded model is left for the whole one, because memory is short and a gap is left."""
        solving = self.budget.meter.seconds
        try:
            begin()
            solving = self.budget.meter.seconds
            if self.left > 0:  # else with the best baseline
                run_phases(IN_SEQUENCE if self.model.space.machine.cost_model == "communication" else BY_STEP, self)
            self.settle_best()
        except (KeyboardInterrupt, Late) as reason:
            self.interrupted = isinstance(reason, KeyboardInterrupt)
            if self.best is None or (self.interrupted and not self.fits):
                raise
            self.settle_best()
        self.seconds = self.budget.meter.seconds - solving
        short = self.best is None or self.best.memory.peak > self.limit
        wanting = short or (self.short and not self.large and not self.long and self.reached > self.gap)
        if self.folded and wanting and self.left > 0 and not self.interrupted:
            return False
        if short and self.folded:
            raise too_late(self)
        if short:
            without_answer(self)
        return True

    def solve_in_sequence(self, budget: Budget) -> None:
        """The exact problem of a model without overlap: its bound is the plan's."""
        gap = CLOSE if self.large else self.gap
        exact = all(edge.readers <= 2 for edge in self.model.edges)
        found = self.solve(InSequence(), gap, proves=exact)
        if found is not None and found.memory.peak > self.limit:
            fitting(self, InSequence(), gap)
            if self.reached > TIGHT:
                tighten(self, InSequence())

    def share_reshards(self, budget: Budget) -> None:
        """Shared reshards are priced exactly, those alone for which answers pay too little: the bound is the plan's in the end."""
        sharing = SharingProblem(self.model, self.limit)
        nodes = len(self.model.nodes)
        while not budget.over and self.reached > self.gap:
            start = None if self.start is None else sharing.completed(self.start)
            solution = solve(sharing.problem(), budget, gap=self.gap, seed=self.seed, start=start)
            self.bound = max(self.bound, solution.bound * sharing.unit / (1 + TIES))
            if solution.choices is None:
                return
            choices = solution.choices[:nodes]
            if self.offer(self.schedule(extract(self.model, choices), None, self.tries), solution.method):
                self.start = choices
            underpaid = sharing.underpaid(choices)
            if not underpaid:
                return
            sharing.exact += underpaid

    @property
    def opening(self) -> bool:
        """Whether the best plan without a limit does not fit, and recomputation is not in the model yet."""
        return self.again and self.plain is not None

    @property
    def joint(self) -> bool:
        """Whether the problem stays small with recomputation in it."""
        return len(self.problem.edge_costs) <= JOINT

    @property
    def scarce(self) -> bool:
        """Whether plans that fit are changed, since the best without a limit does not fit."""
        return self.plain is not None and not self.large and not self.folded

    def solve_free(self, budget: Budget) -> None:
        """The best plan without a memory limit, where recomputation may come in."""
        if self.best is not None:
            self.prices = self.prices.learn(self.best.schedule, self.best.slots)
        self.held_back = PROVING * self.effort
        free = self.solve(self.prices, CLOSE, limit=UNLIMITED)
        if free is not None and free.memory.peak > self.limit:
            self.plain = free
            self.held_back = 0.0 if self.large else (PROVING if self.joint else CALLING) * self.effort

    def solve_uniform(self, budget: Budget) -> None:
        """Plans without a memory limit under uniform prices, until they are the same."""
        for share in EVEN:
            before = self.start
            self.solve(Exposure.even(share, self.slowdown), CLOSE, limit=UNLIMITED)
            if before is not None and self.start is not None and np.array_equal(before, self.start):
                break  # other prices would find the same

    def allow_recomputation(self, budget: Budget) -> None:
        """Recomputation comes into the model: its times told apart, or one, or none in a large problem, whose answers are made to fit."""
        space, entries = self.model.space, len(self.problem.edge_costs)
        exact = build_model(space, again=MOMENTS) if entries <= SMALL else None
        if exact is not None and sum(edge.seconds.size for edge in exact.edges) <= MOST_JOINT:
            self.model, self.start = exact, None
        elif self.joint or not (self.fits or self.large):
            self.model, self.start = build_model(space, again=1), None
        else:
            self.keeping, self.model = True, without_kept(self.model)
        self.problem, self.unit = self.model.problem(self.limit)
        self.reserves = Reserves(self.model, self.limit, pairs=not self.large)
        self.again = self.proved = False

    @property
    def opening_wide(self) -> bool:
        """The same for a problem that does not stay small, but is not large."""
        return self.opening and not self.joint and not self.large

    def cross_over(self, budget: Budget) -> None:
        """Strategies of the answers so far and of baselines, with less kept."""
        keep_less(self, self.prices, budget)

    def free_layers(self, budget: Budget) -> None:
        """What each layer keeps, chosen on its own."""
        keep_apart(self, self.prices, budget)

    def tighten_limit(self, budget: Budget) -> None:
        """Plans under smaller memory limits, which fit as well."""
        tighten(self, self.prices)

    def learn_prices(self, budget: Budget) -> None:
        """Solves under prices learnt from simulation. While recomputation is not in the model yet, twice: the first teach what lists hold
        beyond what the problem counts."""
        if self.opening:
            for _ in range(2):
                self._rounds(self.prices)
            return
        if self.best is not None and self.plain is None:
            self.prices = Exposure.first(self.slowdown).learn(self.best.schedule, self.best.slots)
        self.prices = self._rounds(self.prices)
        self.held_back = 0.0

    def _rounds(self, exposure: Exposure) -> Exposure:
        """Solves under prices by exposure, each learnt from the last answer, and in a small problem under even prices; the last prices.
        Where second runs are chosen together with everything else, under those of collectives alone first."""
        idle = 0
        known = self.best is not None and self.best.memory.peak <= self.limit and not self.keeping and not self.folded
        if self.best is not None and known and len(self.problem.edge_costs) > SMALL:
            self.start = choices_of(self.model, self.problem, self.best.assignment, self.seed, self.budget)
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

    def prove(self, budget: Budget) -> None:
        """Bounds under the weights of operators alone, where a solve does not take long, and then under those that answers suggest. What
        they give are plans to try as well: those of operators alone, whatever waits for what, are like no others. The others have gained
        nothing where a schedule takes long, and are left there."""
        cuts = Cuts(self.model, self.slowdown)
        huge = len(self.problem.edge_costs) > HUGE
        center, idle, little, most = cuts.first(), 0, LITTLE if huge else GAIN, math.inf
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
            if found is None or self.start is None or self.left <= 0 or (self.spent() and not self.short) or budget.over:
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
    def _last_proofs(self) -> Budget:
        """Work for last proofs: what is left, and a little beyond."""
        return self.budget.at_least(self.left + BEYOND[0] * self.effort + BEYOND[1])

    def bound_latencies(self, budget: Budget) -> None:
        """A bound that counts calls, of the weights that promise most of it. Not of a large problem: its tables are many times as large."""
        limit = UNLIMITED if self.again or self.folded else self.limit
        offered = [(bound, Charges(weights, self.model, float(self.limit))) for bound, weights in self.mixtures]
        promised = [(bound + charges.most, bound, charges) for bound, charges in offered]
        for most, bound, charges in sorted(promised, key=lambda one: one[0], reverse=True)[:CALLED]:
            if most > self.bound * (1 + GAIN) and not budget.over:
                counting = Counting(charges, partial(self._least, self.model, limit, CLOSE, TURN * self.effort), bound)
                self.bound = max(self.bound, counting.best(GAIN * self.bound, budget))

    def _bound_latencies_paid(self, budget: Budget) -> bool:
        """The same where memory is paid for, since no problem has both limit and second runs, and without what no plan of less time has;
        whether calls are much of a step."""
        if not self.model.space.links:
            return False
        weights = self.weights if isinstance(self.weights, Mixture) else Cuts(self.model, self.slowdown).first()
        weights = weights.without_paths()
        if Charges(weights, self.model, float(self.limit)).most < MUCH * self.bound:
            return False
        whole = build_model(self.model.space, again=1, share=0.0)

        def best(model: Model, least: float) -> float:
            charges = Charges(weights, model, float(self.limit))
            ask = partial(self._least, model, UNLIMITED, NEARLY, SOLVING * self.effort)
            return Counting(charges, ask, least, float(self.limit), sorted(set(model.times.values()))).best(GAIN * self.bound, budget)

        self.bound = max(self.bound, best(whole, self.bound))
        most = self.best.seconds if self.best is not None and self.fits else 0.0
        for _ in range(EXCLUDING):
            middle = (self.bound + most) / 2
            if most <= self.bound * (1 + NEARLY) or budget.over:
                break
            known = min(best(within(whole, middle), self.bound), middle)
            self.bound = max(self.bound, known)
            most = most if known == middle else middle
        return True

    def _least(self, model: Model, limit: int | None, gap: float, seconds: float, weights: Weights) -> tuple[float, np.ndarray | None]:
        """The bound of a problem under some weights, infinite where it has no answer and 0 where none is known; and the answer's."""
        budget = self._last_proofs.at_most(seconds)
        if budget.over:
            return 0.0, None
        problem, unit = model.problem(limit, weights)
        found = solve(problem, budget, gap=gap, seed=self.seed)
        bound = found.bound * unit / (1 + TIES)
        if found.choices is None or found.objective is None:  # of tied layers that says nothing of others
            return (0.0 if self.folded else math.inf if found.status is Status.INFEASIBLE else bound), None
        choices = model.expand(found.choices)
        return model.proved(weights, bound, found.objective * unit, budget, choices), choices

    def bound_latencies_paid(self, budget: Budget) -> None:
        """The bound that counts calls and pays for memory; ``called`` says whether calls are much of a step."""
        self.called = self.called or self._bound_latencies_paid(budget)

    def rent(self, budget: Budget) -> None:
        """A bound for which memory is paid, where no problem has both the limit and second runs."""
        if budget.left < BRIEF * self.effort:
            return
        weights = self.weights if isinstance(self.weights, Mixture) else Cuts(self.model, self.slowdown).first()
        model = self.model
        if self.apart:
            model = build_model(model.space, again=1, share=0.0)
            if isinstance(self.model, FoldedModel):
                tied = folded(model, self.model.fold)
                assert tied is not None, "operators that are alike run again alike"
                model = tied
        times = [time for time in sorted(set(model.times.values())) if model.rests(time)]
        enough = ENOUGH * self.reached if self.fits else 0.0
        self.bound = max(self.bound, dearest(model, weights.without_paths(), float(self.limit), times, budget, enough))

    def polish(self, budget: Budget) -> None:
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

    def settle_claims(self, budget: Budget) -> None:
        """Proves for layers left free the best of the bounds that so far hold for tied ones, if that is not far beyond the time limit."""
        if self._last_proofs.left < SETTLING * self.proving:
            self.claims.clear()
        least = GAIN if self.long else SLIGHT
        for bound, optimum, weights, choices in sorted(self.claims, key=lambda claim: claim[0], reverse=True)[:SETTLED]:
            if bound > self.bound * (1 + least):
                turn = self.budget.at_most(min(self.left, TURN * self.effort)).at_least(1.0)
                proved = self.model.proved(weights, bound, optimum, turn, choices)
                self.bound = max(self.bound, proved)
                if isinstance(weights, Mixture):
                    self.mixtures.append((proved, weights))
        self.claims.clear()


IN_SEQUENCE: tuple[Phase[Search], ...] = (
    Phase("exact solve", 1.0, lambda s: True, Search.solve_in_sequence),
    Phase("shared reshards", 1.0, lambda s: s.reached > s.gap, Search.share_reshards),
)
"""Under the communication model nothing overlaps."""

BY_STEP: tuple[Phase[Search], ...] = (
    # Memory is short: plans that fit, found without recomputation in the model.
    Phase("free plan", 1.0, lambda s: s.again, Search.solve_free),
    Phase("uniform prices", 1.0, lambda s: s.opening and not s.large, Search.solve_uniform),
    Phase("zero sharding", 1.0, lambda s: s.opening and not s.large, part),
    Phase("penalty repair", 0.3, lambda s: s.opening and not s.large and (s.joint or not s.fits), lighter),
    Phase("reduced limits", 0.4, lambda s: s.opening_wide, in_less),
    Phase("hill climbing", 0.2, lambda s: s.opening_wide, change_one),
    Phase("crossover", 0.4, lambda s: s.opening and not s.joint and (s.large or not s.fits), Search.cross_over),
    Phase("learned prices", 1.0, lambda s: s.opening_wide and s.fits, Search.learn_prices),
    Phase("regions", 0.5, lambda s: s.opening_wide and s.fits, change_some),
    Phase("hill climbing", 0.5, lambda s: s.opening_wide and s.fits, change_one),
    Phase("regions", 0.5, lambda s: s.opening_wide and s.fits, change_some),
    Phase("hill climbing", 0.9, lambda s: s.opening_wide and s.fits, change_one),
    Phase("limit search", 1.0, lambda s: s.opening_wide and s.fits, Search.polish),
    Phase("recomputation", 1.0, lambda s: s.opening, Search.allow_recomputation),
    # Plans of the model, and bounds.
    Phase("learned prices", 1.0, lambda s: True, Search.learn_prices),
    Phase("latency bound, paid", 0.2, lambda s: s.proves and s.keeping and s.scarce and s.reached > TIGHT, Search.bound_latencies_paid),
    Phase("memory dual", 0.35, lambda s: s.proves and s.keeping and not s.called and s.reached > TIGHT, Search.rent),
    Phase("surrogate bound", 0.5, lambda s: s.proves and not s.called and (s.left > 0 or s.best is None), Search.prove),
    Phase("latency bound, paid", 0.2, lambda s: s.proves and not s.called and s.scarce and s.reached > TIGHT, Search.bound_latencies_paid),
    Phase("memory dual", 0.35, lambda s: s.proves and s.folded and s.short, Search.rent),
    Phase("decomposition", 1.0, lambda s: bool(s.claims), Search.settle_claims),
    Phase("latency bound", 0.2, lambda s: s.proves and not s.called and not s.large and s.reached > s.gap, Search.bound_latencies),
    # Equal layers are folded and memory is short.
    Phase("crossover", 0.65, lambda s: s.folded and s.short, Search.cross_over),
    Phase("limit search", 1.0, lambda s: s.folded and s.short, Search.polish),
    Phase("layers apart", 0.8, lambda s: s.folded and s.short, Search.free_layers),
    # Plans that fit, changed.
    Phase("hill climbing", 0.5, lambda s: s.scarce, change_one),
    Phase("limit search", 1.0, lambda s: s.scarce, Search.polish),
    Phase("regions", 0.5, lambda s: s.scarce, change_some),
    Phase("hill climbing", 0.5, lambda s: s.scarce, change_one),
    Phase("tighter limits", 1.0, lambda s: binds(s) and s.reached > TIGHT and not s.keeping and not s.folded, Search.tighten_limit),
    Phase("regions", 0.5, lambda s: s.scarce, change_some),
    Phase("hill climbing", 0.9, lambda s: s.scarce, change_one),
    Phase("limit search", 1.0, lambda s: True, Search.polish),
)
"""Under a model of time, in order."""
