"""The phases of a search on one model, and their table: solve, schedule, simulate, learn what is exposed, solve again; and the bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.cost_models import UNLIMITED
from autopar.effort import Budget
from autopar.search.bounds.memory_dual import lagrangian_bound
from autopar.search.bounds.surrogate import Evaluation, Master, Multipliers, blend
from autopar.search.choices.space import BudgetExhausted
from autopar.search.driver.state import SearchRequest, SearchState
from autopar.search.folding.tied_model import TiedModel, tie_model
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import InSequence, Model
from autopar.search.ilp.overlap import LearnedOverlap
from autopar.search.ilp.rematerialization import without_kept_memory
from autopar.search.ilp.shared_reshards import SharingProblem
from autopar.search.memory.memory_repair import CoverRows, solve_fixed
from autopar.search.memory.reduced_limit import (
    cross_over_plans,
    flip_recomputation,
    minimise_or_raise,
    out_of_budget_error,
    solve_until_fits,
)
from autopar.search.phases import Phase, run_phases
from autopar.search.settings import (
    BOUND_SOLVE_SHARE,
    CLOSE_GAP,
    CUT_STEP,
    DUAL_LEAST_SHARE,
    EXACT_MOMENTS,
    GAIN,
    IDLE_ROUNDS,
    JOINT_EXACT_ENTRIES,
    LAST_PROOF_SHARE,
    LEAST_SOLVE_WORK,
    MORE_TRIES,
    ROUNDS,
    SOLVE_SHARE,
    TIES,
)
from autopar.search.solving import solve
from autopar.solvers import INTERRUPTED


def bound_solve_gap(open_gap: float, bound: float, reachable: float, idle: int = 0) -> float:
    """The gap at which a solve for a bound stops.

    Args:
        open_gap: the gap of the incumbent.
        bound, reachable: seconds of the best bound, and of the bound that any weights can reach by the solutions so far.
        idle: rounds since the last gain. Each asks for a smaller gap: a bound that is far below its optimum hides better weights.
    """
    return max(BOUND_SOLVE_SHARE ** (idle + 1) * min(open_gap, 1 - bound / reachable), CLOSE_GAP)


class Search(SearchState):
    """The phases as methods: each improves the incumbent or the bound."""

    def __init__(self, model: Model, asked: SearchRequest, may_recompute: bool) -> None:
        super().__init__(model, asked, may_recompute)
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
            if self.work_left > 0:  # otherwise the best baseline is the answer
                run_phases(BY_STEP if self.model.space.machine.overlaps else IN_SEQUENCE, self)
            self.settle_best()
        except (KeyboardInterrupt, BudgetExhausted) as reason:
            self.interrupted = isinstance(reason, KeyboardInterrupt)
            if self.best is None or (self.interrupted and not self.has_fitting_plan):
                raise
            self.settle_best()
        self.seconds = self.budget.meter.seconds - solving
        is_short = self.best is None or self.best.memory.peak > self.limit
        is_costly = self.size.is_large or self.size.is_long
        wanting = is_short or (self.memory.is_short and not is_costly and self.open_gap > self.request.gap)
        if self.is_folded and wanting and self.work_left > 0 and not self.interrupted:
            return False
        if is_short and self.is_folded:
            raise out_of_budget_error(self)
        if is_short:
            minimise_or_raise(self)
        return True

    def solve_in_sequence(self, budget: Budget) -> None:
        """Solves the exact problem of a model without overlap. Its bound is the plan's."""
        gap = CLOSE_GAP if self.size.is_large else self.request.gap
        exact = all(edge.readers <= 2 for edge in self.model.edges)
        found = self.solve(InSequence(), gap, proves=exact)
        if found is not None and found.memory.peak > self.limit:
            solve_until_fits(self, InSequence(), gap)

    def share_reshards(self, budget: Budget) -> None:
        """Prices shared reshards exactly, by lazy constraints (``shared_reshards``). The last bound is the plan's."""
        sharing = SharingProblem(self.model, self.limit)
        nodes = len(self.model.nodes)
        while not budget.over and self.open_gap > self.request.gap:
            start = None if self.warm_start is None else sharing.completed(self.warm_start)
            solution = solve(sharing.problem(), budget, gap=self.request.gap, seed=self.request.seed, start=start)
            self.bound = max(self.bound, solution.bound * sharing.unit / (1 + TIES))
            if solution.choices is None:
                return
            choices = solution.choices[:nodes]
            if self.offer(self.schedule(decode_assignment(self.model, choices), None, self.size.tries), solution.method):
                self.warm_start = choices
            underpaid = sharing.underpaid(choices)
            if not underpaid:
                return
            sharing.exact += underpaid

    @property
    def needs_recomputation(self) -> bool:
        """Whether the best plan without a limit does not fit, and recomputation is not in the model yet."""
        return self.memory.may_recompute and self.memory.free_plan is not None

    @property
    def is_small_with_recomputation(self) -> bool:
        """Whether the problem stays small with recomputation in it."""
        return len(self.problem.edge_costs) <= self.request.thresholds.joint_entries

    @property
    def needs_crossover(self) -> bool:
        """Whether recomputation is needed in a problem that is too large for it, or for which there is no plan yet."""
        return self.needs_recomputation and not self.is_small_with_recomputation and (self.size.is_large or not self.has_fitting_plan)

    @property
    def may_gain_by_crossover(self) -> bool:
        """Whether a folded solution did not fit, or a whole problem has a wide gap left. A search without a bound knows no gap."""
        if self.is_folded:
            return self.memory.is_short
        knows_why = self.request.proves or self.memory.free_plan is not None
        return knows_why and self.open_gap > self.request.thresholds.loose_gap

    @property
    def leaves_recomputation_out(self) -> bool:
        """Whether the problem has no recomputation, and so no bound for short memory, and the gap is worth one."""
        return self.memory.repairs_by_crossover and self.open_gap > self.request.gap

    @property
    def needs_flips(self) -> bool:
        """Whether a small problem with recomputation is still open."""
        return self.memory.free_plan is not None and self.size.is_small and self.open_gap > self.request.gap

    def solve_free(self, budget: Budget) -> None:
        """Finds the best plan without a memory limit, if recomputation may be used."""
        if self.best is not None:
            self.prices = self.prices.learn(self.best.schedule, self.best.slots)
        free = self.solve(self.prices, CLOSE_GAP, limit=UNLIMITED)
        if free is not None and free.memory.peak > self.limit:
            self.memory.free_plan = free

    def allow_recomputation(self, budget: Budget) -> None:
        """Brings recomputation into the model.

        A small problem tells all its times apart, a larger one has one time. A large problem has none: crossover makes its solutions fit.
        """
        space, entries = self.model.space, len(self.problem.edge_costs)
        exact = build_model(space, recompute_times=EXACT_MOMENTS) if entries <= self.request.thresholds.exact_entries else None
        if exact is not None and sum(edge.seconds.size for edge in exact.edges) <= JOINT_EXACT_ENTRIES:
            self.model, self.warm_start = exact, None
        elif self.is_small_with_recomputation or not (self.has_fitting_plan or self.size.is_large):
            self.model, self.warm_start = build_model(space, recompute_times=1), None
        else:
            self.memory.repairs_by_crossover, self.model = True, without_kept_memory(self.model)
        self.problem, self.unit = self.model.problem(self.limit)
        self.memory.cover_rows = CoverRows(self.model, self.limit, pairs=not self.size.is_large)
        self.memory.may_recompute = self.memory.is_infeasible = False

    def cross_over(self, budget: Budget) -> None:
        """Recombines strategies of the solutions so far and of baselines, with less kept."""
        cross_over_plans(self, self.prices, budget)

    def learn_prices(self, budget: Budget) -> None:
        """Solves under prices learnt from simulation until solutions repeat or gain nothing; then once more from prices of full overlap.

        Learned prices have local optima: a collective that was waited for stays dear, and its strategy is not chosen again.
        """
        prices = self.prices
        if self.best is not None and self.memory.free_plan is None:
            prices = LearnedOverlap.first(self.slowdown).learn(self.best.schedule, self.best.slots)
        is_tiny = len(self.problem.edge_costs) <= self.request.thresholds.exact_entries
        begins = self.has_fitting_plan and not self.memory.repairs_by_crossover and not self.is_folded and not is_tiny
        if begins and self.best is not None:
            self.warm_start = solve_fixed(self.model, self.problem, self.best.assignment, self.request.seed, self.budget)
        self._learn_from(prices)
        if self.best is not None and self.has_fitting_plan and not self.is_done():
            self._learn_from(LearnedOverlap.optimistic(self.slowdown).learn(self.best.schedule, self.best.slots))
        self._learn_in_each_microbatch()

    def _learn_in_each_microbatch(self) -> None:
        """Schedules the incumbent with what it does once a step in each microbatch, and learns prices from that.

        Nothing hides what runs before all microbatches. Where all gathers do, no schedule shows how well they would be hidden.
        """
        if self.best is None or not self.has_fitting_plan or self.is_done() or self.model.planned_graph.microbatches == 1:
            return
        other = self.best.assignment.in_each_microbatch()
        if other is not self.best.assignment:
            found = self.schedule(other, self.best.limits, self.size.tries)
            self.has_gained = self.offer(found, "auto")
            self._learn_from(LearnedOverlap.first(self.slowdown).learn(found.schedule, found.slots))

    def _learn_from(self, prices: LearnedOverlap) -> None:
        """Solves one after another, each under prices learnt from the schedule of the last solution."""
        idle, seen = 0, list[np.ndarray]()
        for _ in range(ROUNDS):
            found = solve_until_fits(self, prices, CLOSE_GAP)
            if found is None or found.memory.peak > self.limit:
                break
            idle = 0 if self.has_gained else idle + 1
            assert self.warm_start is not None
            if idle >= self.size.patience or self.is_done() or any(np.array_equal(self.warm_start, other) for other in seen):
                break
            seen.append(self.warm_start)
            before, prices = prices, prices.learn(found.schedule, found.slots)
            if prices == before:
                break  # a schedule without collectives teaches nothing
        self.prices = prices

    def raise_bound(self, budget: Budget) -> None:
        """Raises the surrogate bound: first under the weights of operators alone, then under those of the cutting planes.

        Solutions are plans to try as well. In a large problem or a long graph only the first is tried: later ones have gained nothing
        there, and a schedule takes long.
        """
        cuts = Master(self.model, self.slowdown)
        center, idle, reachable = cuts.first_weights(), 0, math.inf
        patience = self.size.patience if self.memory.is_short else IDLE_ROUNDS  # short memory is priced in the phases to come
        mixture = center
        for model, choices in self.solutions:
            if model is self.model:
                cuts.add(Evaluation(model, choices))
        for number in range(ROUNDS):
            before = self.claims.bound
            ask = self.solve if number == 0 or not (self.size.is_large or self.size.is_long) else self.solve_choices
            open_gap = min(self.open_gap_of(before), 1.0)
            limit = UNLIMITED if self.memory.may_recompute else None
            found = ask(mixture, bound_solve_gap(open_gap, before, reachable, idle), proves=True, limit=limit)
            if self.last_solution is not None and self.last_solution.message == INTERRUPTED:
                raise KeyboardInterrupt
            if (
                found is None
                or self.warm_start is None
                or self.work_left <= 0
                or (self.is_done() and not self.memory.is_short)
                or budget.over
            ):
                return
            cuts.add(Evaluation(self.model, self.warm_start))
            gained = self.claims.bound > before * (1 + GAIN)
            if self.claims.bound > before:
                center = mixture
            idle = 0 if gained or self.has_gained else idle + 1
            wanted, reachable, _ = cuts.best_weights()
            settled = self.size.is_large and not self.is_folded and self.open_gap <= self.request.thresholds.loose_gap
            if settled or idle >= patience or reachable <= self.claims.bound * (1 + GAIN):
                return
            mixture = blend(wanted, center, CUT_STEP)

    def price_memory(self, budget: Budget) -> None:
        """Raises the Lagrangian bound for memory, where no problem has both the limit and recomputation."""
        if budget.left < DUAL_LEAST_SHARE * self.total_work:
            return
        weights = self.claims.weights if isinstance(self.claims.weights, Multipliers) else Master(self.model, self.slowdown).first_weights()
        model = self.model
        if self.memory.recompute_times:
            model = build_model(model.space, recompute_times=1, small_share=0.0)
            if isinstance(self.model, TiedModel):
                tied = tie_model(model, self.model.fold, self.request.thresholds)
                assert tied is not None, "operators that are alike run again alike"
                model = tied
        times = [time for time in sorted(set(model.op_times.values())) if model.is_idle(time)]
        self.bound = max(self.bound, lagrangian_bound(model, weights.without_paths(), float(self.limit), times, budget))

    def search_limits(self, budget: Budget) -> None:
        """Tries more limits for the incumbent's schedule; of a deep graph first by extrapolation, then at full depth."""
        best = self.best
        if best is None or best is self.incumbent.polished or best.memory.peak > self.limit:
            return
        if not self.request.draft and self.work_left > 0:
            deep = bool(self.model.short_samples(best.assignment))
            if deep:
                self.offer(self._schedule(best.assignment, False, best.limits, tries=MORE_TRIES * self.size.tries), self.incumbent.method)
                self.settle_best()
                best = self.best or best
            self.offer(self._schedule(best.assignment, deep, best.limits, tries=MORE_TRIES * self.size.tries), self.incumbent.method)
            self.incumbent.polished = self.best

    def prove_claims(self, budget: Budget) -> None:
        """Proves for free layers the best bounds of tied ones, if that does not go far beyond the effort."""
        beyond = Budget(self.budget.meter, self.budget.ends + LAST_PROOF_SHARE * self.total_work)
        if beyond.left < self.claims.longest_solve:
            self.claims.pending.clear()
        for bound, optimum, weights, choices in sorted(self.claims.pending, key=lambda claim: claim[0], reverse=True):
            if bound > self.bound * (1 + GAIN):
                turn = self.budget.at_most(min(self.work_left, SOLVE_SHARE * self.total_work)).at_least(LEAST_SOLVE_WORK)
                self.bound = max(self.bound, self.model.prove_bound(weights, bound, optimum, turn, choices))
        self.claims.pending.clear()


IN_SEQUENCE: tuple[Phase[Search], ...] = (
    Phase("exact solve", lambda s: True, Search.solve_in_sequence),
    Phase("shared reshards", lambda s: s.open_gap > s.request.gap, Search.share_reshards),
)
"""Phases under the communication model, where nothing overlaps."""

BY_STEP: tuple[Phase[Search], ...] = (
    Phase("free plan", lambda s: s.memory.may_recompute, Search.solve_free),
    Phase("crossover", lambda s: s.needs_crossover, Search.cross_over, 0.4),
    Phase("recomputation", lambda s: s.needs_recomputation, Search.allow_recomputation),
    Phase("learned prices", lambda s: True, Search.learn_prices),
    Phase("memory dual", lambda s: s.request.proves and s.leaves_recomputation_out, Search.price_memory, 0.35),
    Phase("surrogate bound", lambda s: s.request.proves and (s.work_left > 0 or s.best is None), Search.raise_bound, 0.5),
    Phase("memory dual", lambda s: s.request.proves and s.is_folded and s.memory.is_short, Search.price_memory, 0.35),
    Phase("decomposition", lambda s: bool(s.claims.pending), Search.prove_claims),
    Phase("crossover", lambda s: s.may_gain_by_crossover, Search.cross_over, 0.65),
    Phase("recomputation flips", lambda s: s.needs_flips, flip_recomputation, 0.5),
    Phase("limit search", lambda s: True, Search.search_limits),
)
"""Phases under a model of time, in order."""
