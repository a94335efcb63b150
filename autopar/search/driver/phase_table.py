"""The phases of a search on one model, and their table: solve, schedule, simulate, learn what is exposed, solve again; and the bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.effort import Budget
from autopar.search.bounds.memory_dual import lagrangian_bound
from autopar.search.bounds.surrogate import Evaluation, Master, Multipliers, blend
from autopar.search.choices.space import BudgetExhausted
from autopar.search.driver.state import UNLIMITED, SearchRequest, SearchState
from autopar.search.folding.tied_model import TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence, Model
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.ilp.rematerialization import without_kept_memory
from autopar.search.ilp.shared_reshards import SharingProblem
from autopar.search.memory.memory_repair import CoverRows, solve_fixed
from autopar.search.memory.reduced_limit import fitting, flip_recomputation, minimise_or_raise, out_of_budget, solve_restricted_plans
from autopar.search.phases import Phase, run_phases
from autopar.search.settings import (
    BOUND_ROUNDS,
    BOUND_SOLVE_GAP,
    BOUND_SOLVE_GAP_SHARE,
    BOUND_SOLVE_RISE_SHARE,
    CLOSE_GAP,
    CUT_STEP,
    DUAL_ENOUGH,
    DUAL_LEAST_SHARE,
    EXACT_MOMENTS,
    GAIN,
    HUGE_ENTRIES,
    HUGE_GAIN,
    JOINT_ENTRIES,
    JOINT_EXACT_ENTRIES,
    LAST_PROOF_SHARE,
    LAST_PROOF_SOLVES,
    LAST_PROOF_WORK,
    LAST_TRIES,
    LAST_TRIES_DEEP,
    LOOSE_GAP,
    PATIENT_ROUNDS,
    PRICE_ROUNDS,
    PROVED_CLAIMS,
    SLIGHT_GAIN,
    SMALL_ENTRIES,
    SOLVE_SHARE,
    TIES,
    TIGHT_GAP,
)
from autopar.search.solving import solve
from solvers import INTERRUPTED


def close_enough(left_open: float, bound: float, most: float) -> float:
    """The gap at which a solve for a bound stops.

    Args:
        left_open: the gap of the incumbent.
        bound, most: seconds of the best bound, and of the bound that any weights can reach by the solutions so far.
    """
    return max(min(BOUND_SOLVE_GAP_SHARE * left_open, BOUND_SOLVE_GAP, BOUND_SOLVE_RISE_SHARE * (1 - bound / most)), CLOSE_GAP)


class Search(SearchState):
    """The phases as methods: each improves the incumbent or the bound."""

    def __init__(self, model: Model, asked: SearchRequest, again: bool) -> None:
        super().__init__(model, asked, again)
        self.prices = LearnedOverlap.first(self.slowdown)
        """Prices learnt from simulation so far."""

    def run(self, begin: Callable[[], None] = lambda: None) -> bool:
        """Runs all phases. False where a folded model is left for the whole one, because memory is short and a gap is left.

        Ctrl-C and an exhausted pricing budget end the phases with the best plan so far, if there is one.

        Args:
            begin: offers the warm starts.

        Raises:
            InfeasibleError: nothing fits.
            TimeLimitError: the budget ended without a plan that fits.
        """
        solving = self.budget.meter.seconds
        try:
            begin()
            solving = self.budget.meter.seconds
            if self.left > 0:  # otherwise the best baseline is the answer
                run_phases(BY_STEP if self.model.space.machine.overlaps else IN_SEQUENCE, self)
            self.settle_best()
        except (KeyboardInterrupt, BudgetExhausted) as reason:
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
            raise out_of_budget(self)
        if short:
            minimise_or_raise(self)
        return True

    def solve_in_sequence(self, budget: Budget) -> None:
        """Solves the exact problem of a model without overlap. Its bound is the plan's."""
        gap = CLOSE_GAP if self.large else self.gap
        exact = all(edge.readers <= 2 for edge in self.model.edges)
        found = self.solve(InSequence(), gap, proves=exact)
        if found is not None and found.memory.peak > self.limit:
            fitting(self, InSequence(), gap)

    def share_reshards(self, budget: Budget) -> None:
        """Prices shared reshards exactly, by lazy constraints (``shared_reshards``). The last bound is the plan's."""
        sharing = SharingProblem(self.model, self.limit)
        nodes = len(self.model.nodes)
        while not budget.over and self.reached > self.gap:
            start = None if self.start is None else sharing.completed(self.start)
            solution = solve(sharing.problem(), budget, gap=self.gap, seed=self.seed, start=start)
            self.bound = max(self.bound, solution.bound * sharing.unit / (1 + TIES))
            if solution.choices is None:
                return
            choices = solution.choices[:nodes]
            if self.offer(self.schedule(decode_assignment(self.model, choices), None, self.tries), solution.method):
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
        return len(self.problem.edge_costs) <= JOINT_ENTRIES

    def solve_free(self, budget: Budget) -> None:
        """Finds the best plan without a memory limit, if recomputation may be used."""
        if self.best is not None:
            self.prices = self.prices.learn(self.best.schedule, self.best.slots)
        free = self.solve(self.prices, CLOSE_GAP, limit=UNLIMITED)
        if free is not None and free.memory.peak > self.limit:
            self.plain = free

    def allow_recomputation(self, budget: Budget) -> None:
        """Brings recomputation into the model.

        A small problem tells all its times apart, a larger one has one time. A large problem has none: crossover makes its solutions fit.
        """
        space, entries = self.model.space, len(self.problem.edge_costs)
        exact = build_model(space, recompute_times=EXACT_MOMENTS) if entries <= SMALL_ENTRIES else None
        if exact is not None and sum(edge.seconds.size for edge in exact.edges) <= JOINT_EXACT_ENTRIES:
            self.model, self.start = exact, None
        elif self.joint or not (self.fits or self.large):
            self.model, self.start = build_model(space, recompute_times=1), None
        else:
            self.keeping, self.model = True, without_kept_memory(self.model)
        self.problem, self.unit = self.model.problem(self.limit)
        self.reserves = CoverRows(self.model, self.limit, pairs=not self.large)
        self.again = self.proved = False

    def cross_over(self, budget: Budget) -> None:
        """Recombines strategies of the solutions so far and of baselines, with less kept."""
        solve_restricted_plans(self, self.prices, budget)

    def learn_prices(self, budget: Budget) -> None:
        """Solves under prices learnt from simulation, each solve from the last solution, until solutions repeat or gain nothing."""
        prices = self.prices
        if self.best is not None and self.plain is None:
            prices = LearnedOverlap.first(self.slowdown).learn(self.best.schedule, self.best.slots)
        begins = self.fits and not self.keeping and not self.folded and len(self.problem.edge_costs) > SMALL_ENTRIES
        if begins and self.best is not None:
            self.start = solve_fixed(self.model, self.problem, self.best.assignment, self.seed, self.budget)
        idle, seen = 0, list[np.ndarray]()
        for _ in range(PRICE_ROUNDS):
            found = fitting(self, prices, CLOSE_GAP)
            if found is None or found.memory.peak > self.limit:
                break
            idle = 0 if self.gained else idle + 1
            assert self.start is not None
            if idle >= self.idle or self.spent() or any(np.array_equal(self.start, other) for other in seen):
                break
            seen.append(self.start)
            before, prices = prices, prices.learn(found.schedule, found.slots)
            if prices == before:
                break  # a schedule without collectives teaches nothing
        self.prices = prices

    def prove(self, budget: Budget) -> None:
        """Raises the surrogate bound: first under the weights of operators alone, then under those of the cutting planes.

        A huge problem skips the first, whose solve takes long. Solutions are plans to try as well. In a large problem or a long graph only
        the first is tried: later ones have gained nothing there, and a schedule takes long.
        """
        cuts = Master(self.model, self.slowdown)
        huge = len(self.problem.edge_costs) > HUGE_ENTRIES
        center, idle, little, most = cuts.first_weights(), 0, HUGE_GAIN if huge else GAIN, math.inf
        mixture = center
        for model, choices in self.chosen:
            if model is self.model:
                cuts.add(Evaluation(model, choices))
        if cuts.evaluations and huge:
            mixture = blend(cuts.best_weights()[0], center, CUT_STEP)
        for number in range(BOUND_ROUNDS):
            before, ask = self.aim, self.solve if number == 0 or not (self.large or self.long) else self.choose
            left_open = 1 - self.aim / self.best.seconds if self.best is not None and self.fits else 1.0
            found = ask(mixture, close_enough(left_open, self.aim, most), proves=True, limit=UNLIMITED if self.again else None)
            if self.last is not None and self.last.message == INTERRUPTED:
                raise KeyboardInterrupt
            if found is None or self.start is None or self.left <= 0 or (self.spent() and not self.short) or budget.over:
                return
            cuts.add(Evaluation(self.model, self.start))
            gained = self.aim > before * (1 + GAIN)
            if self.aim > before:
                center = mixture
            idle = 0 if gained or self.gained else idle + 1
            wanted, most, _ = cuts.best_weights()
            patience = PATIENT_ROUNDS if self.plain is not None and not self.large else self.idle
            settled = self.large and not self.folded and self.reached <= LOOSE_GAP
            if settled or idle >= patience or most <= self.aim * (1 + little):
                return
            mixture = blend(wanted, center, CUT_STEP)

    @property
    def _last_proofs(self) -> Budget:
        """Budget of the last proofs: the work left, and a little beyond."""
        return Budget(self.budget.meter, self.budget.ends + LAST_PROOF_SHARE * self.effort + LAST_PROOF_WORK)

    def rent(self, budget: Budget) -> None:
        """Raises the Lagrangian bound for memory, where no problem has both the limit and recomputation."""
        if budget.left < DUAL_LEAST_SHARE * self.effort:
            return
        weights = self.weights if isinstance(self.weights, Multipliers) else Master(self.model, self.slowdown).first_weights()
        model = self.model
        if self.apart:
            model = build_model(model.space, recompute_times=1, small_share=0.0)
            if isinstance(self.model, TiedModel):
                tied = tie_model(model, self.model.fold)
                assert tied is not None, "operators that are alike run again alike"
                model = tied
        times = [time for time in sorted(set(model.op_times.values())) if model.is_idle(time)]
        enough = DUAL_ENOUGH * self.reached if self.fits else 0.0
        self.bound = max(self.bound, lagrangian_bound(model, weights.without_paths(), float(self.limit), times, budget, enough))

    def polish(self, budget: Budget) -> None:
        """Tries more limits for the incumbent's schedule; of a deep graph first by extrapolation, then at full depth."""
        best = self.best
        if best is not None and best is not self.polished and best.memory.peak <= self.limit and not self.draft and self.left > 0:
            deep = bool(self.model.short_samples(best.assignment))
            if deep:
                self.offer(self._schedule(best.assignment, False, best.limits, tries=LAST_TRIES * self.tries), self.method)
                self.settle_best()
                best = self.best or best
            more = LAST_TRIES_DEEP if deep else LAST_TRIES
            self.offer(self._schedule(best.assignment, deep, best.limits, tries=more * self.tries), self.method)
            self.polished = self.best

    def settle_claims(self, budget: Budget) -> None:
        """Proves for free layers the best bounds of tied ones, if that does not go far beyond the effort."""
        if self._last_proofs.left < LAST_PROOF_SOLVES * self.proving:
            self.claims.clear()
        least = GAIN if self.long else SLIGHT_GAIN
        for bound, optimum, weights, choices in sorted(self.claims, key=lambda claim: claim[0], reverse=True)[:PROVED_CLAIMS]:
            if bound > self.bound * (1 + least):
                turn = self.budget.at_most(min(self.left, SOLVE_SHARE * self.effort)).at_least(1.0)
                self.bound = max(self.bound, self.model.prove_bound(weights, bound, optimum, turn, choices))
        self.claims.clear()


IN_SEQUENCE: tuple[Phase[Search], ...] = (
    Phase("exact solve", 1.0, lambda s: True, Search.solve_in_sequence),
    Phase("shared reshards", 1.0, lambda s: s.reached > s.gap, Search.share_reshards),
)
"""Phases under the communication model, where nothing overlaps."""

BY_STEP: tuple[Phase[Search], ...] = (
    Phase("free plan", 1.0, lambda s: s.again, Search.solve_free),
    Phase("crossover", 0.4, lambda s: s.opening and not s.joint and (s.large or not s.fits), Search.cross_over),
    Phase("recomputation", 1.0, lambda s: s.opening, Search.allow_recomputation),
    Phase("learned prices", 1.0, lambda s: True, Search.learn_prices),
    Phase("memory dual", 0.35, lambda s: s.proves and s.keeping and s.reached > TIGHT_GAP, Search.rent),
    Phase("surrogate bound", 0.5, lambda s: s.proves and (s.left > 0 or s.best is None), Search.prove),
    Phase("memory dual", 0.35, lambda s: s.proves and s.folded and s.short, Search.rent),
    Phase("decomposition", 1.0, lambda s: bool(s.claims), Search.settle_claims),
    Phase("crossover", 0.65, lambda s: s.folded and s.short, Search.cross_over),
    Phase("recomputation flips", 0.5, lambda s: s.plain is not None and s.small and s.reached > s.gap, flip_recomputation),
    Phase("limit search", 1.0, lambda s: True, Search.polish),
)
"""Phases under a model of time, in order."""
