"""The rounds of a search: solve, schedule, simulate, learn what was waited for, solve again; and beside it the bound.

The integer problem leaves out some of what a schedule holds in memory, so its bound is true and the schedule's own peak decides: where
that is over the limit, it is solved again with that much left free at those times (``fitting``), or with operators that run a second
time (``again``, ``keeping``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from time import perf_counter

import numpy as np

from autopar.errors import TimeLimitError
from autopar.rules import why_once
from autopar.schedule import Assignment, Limits
from autopar.search.again import MOMENTS, without_kept
from autopar.search.bounds import Answer, Cuts, blend, floor
from autopar.search.building import build_model
from autopar.search.exposure import Exposure
from autopar.search.extract import extract
from autopar.search.fitting import Reserves, choices_of
from autopar.search.folded import FoldedModel
from autopar.search.keeping import MOMENTS as APART
from autopar.search.keeping import Wanted, fit
from autopar.search.lean import infeasible, smallest
from autopar.search.model import TIES, InSequence, Model, Weights
from autopar.search.recompute import recompute
from autopar.search.tuning import Sample, Timed, best_schedule
from solvers import INTERRUPTED, Solution, Status, solve

PROOF = 1e-6
"""A plan is called optimal when its gap is at most this."""
CLOSE = 2e-3
"""The gap at which one solve of a large problem stops: the last tenths of a percent would cost more time than all before."""
SMALL, LARGE = 30_000, 1_000_000
"""Edge entries up to which a problem is small, and from which it is large."""
FITTINGS = 6
"""Solves under the same prices until an answer fits as a schedule, at most."""
TIGHTER = 0.95
"""Where the limit binds and a gap is left, this share of it is tried: what is found for less memory fits as well."""
HALVINGS = 6
"""So many limits are tried then."""
TIGHT = 0.02
"""The gap above which they are."""
EXPOSURES = 6
"""Rounds of prices by exposure, at most."""
BOUNDS = 12
"""Rounds of weights for the bound, at most."""
EVEN = (1.0, 0.3, 0.03)
"""Shares waited for under which a small problem is solved as well, alike for all collectives: what one plan shows of itself
says little about plans that are quite different."""
IDLE = 2
"""Rounds without a gain after which prices, or weights, are left alone; of a large problem one."""
GAIN = 1e-3
"""Relative change that counts as a gain."""
TUNED = 2
"""Of a large problem so many of the best baselines have limits of their own tried."""
JOINT, MOST_JOINT = 400_000, 60_000
"""Edge entries of a problem up to which second runs are chosen in it, together with everything else; and of the larger problem that it
becomes then, up to which all times of theirs are told apart."""
CHANGES = 200
"""Sets of second runs looked at, at most, when those of a small problem are changed one or two at a time."""
UNLIMITED = 2**62
"""Bytes that no plan needs."""
TURN = 1 / 6
"""Share of the time limit that one solve may take, so that there are several; the first may take half."""
SETTLED = 2
"""So many of the best bounds that hold for tied layers are proved for free ones."""
NEAR, HOPE = 0.2, 5e-3
"""Where an estimate of memory is so near the limit, or one of seconds so near the best, the whole schedule is made."""
SHARE = 0.3
"""Share of the weights that the cuts ask for in what is asked next; the rest is the best so far."""

Progress = Callable[[float, float, float, float], None]
"""Called with incumbent seconds (infinite before there is one), bound seconds, gap, elapsed seconds."""


@dataclass(frozen=True)
class Asked:
    """What ``find_plan`` is asked, beside graph, machine and pins."""

    limit: int
    optimizer: str
    time_limit: float
    began: float
    gap: float
    seed: int
    progress: Progress | None
    baselines: bool
    recompute: bool
    bounds: list[float] = field(default_factory=list)
    """Proved on the way, for all plans whatever memory they need."""
    proves: bool = True
    """Whether the choices are all there are, so that what bounds them bounds every plan."""


class Search:
    """The best schedule and the best bound so far, and the rounds that improve them."""

    def __init__(self, model: Model, asked: Asked, again: bool) -> None:
        self.model, self.limit, self.gap, self.seed, self.progress = model, asked.limit, asked.gap, asked.seed, asked.progress
        self.time_limit, self.began, self.interrupted = asked.time_limit, asked.began, False
        self.apart = APART if again else 0
        """Times told apart of second runs, in problems that have them from the start."""
        self.problem, self.unit = model.problem(asked.limit)
        self.sizes = {
            "nodes": len(model.nodes), "choices": len(self.problem.costs), "edges": len(self.problem.edges),
            "edge_entries": len(self.problem.edge_costs),
        }  # fmt: skip
        self.slowdown = model.space.machine.hardware.overlap_slowdown
        self.folded = isinstance(model, FoldedModel)
        self.again = again and not self.folded
        """That second runs may come in."""
        self.answers: list[Assignment] = []
        self.short = False
        """That an answer of a folded problem does not fit: it prices memory roughly, and is left for the whole one."""
        self.small = len(self.problem.edge_costs) <= SMALL
        self.large = len(self.problem.edge_costs) * len(model.whole_graph.ops) / max(len(model.space.graph.ops), 1) > LARGE
        self.keeping = False
        """That answers are made to fit by ``fit``: the problem does not count what backward keeps."""
        self.tries, self.idle = (3, 1) if self.large else (24, IDLE)
        self.reserves = Reserves(model, asked.limit, pairs=not self.large)
        self.best: Timed | None = None
        self.proves = asked.proves
        self.bound, self.method, self.seconds = max([floor(model) if asked.proves else 0.0, *asked.bounds]), "", 0.0
        self.aim, self.claims = self.bound, list[tuple[float, float, Weights]]()
        self.rivals: tuple[Timed, ...] = ()
        self.plain: Timed | None = None
        """The best plan without a limit and without second runs, where that does not fit."""
        self.start: np.ndarray | None = None
        self.last: Solution | None = None
        self.gained = False
        """Whether the last solve was a gain."""
        self.proved = False
        """Whether no choices respect the limit."""

    @property
    def left(self) -> float:
        """Seconds left of the whole search, pricing and baselines included."""
        return self.time_limit - (perf_counter() - self.began)

    @property
    def reached(self) -> float:
        """The gap so far; infinite without an answer that fits."""
        if self.best is None or self.best.memory.peak > self.limit:
            return math.inf
        return (self.best.seconds - self.bound) / self.best.seconds if self.best.seconds > 0 else 0.0

    def offer(self, found: Timed, method: str) -> bool:
        """Takes a schedule in; whether it is a gain."""
        found = self.sure(found)
        if not found.better(self.best, self.limit):
            return False
        gain = self.best is None or found.seconds < self.best.seconds * (1 - GAIN) or self.best.memory.peak > self.limit
        self.best, self.method = found, method
        return gain

    def run(self) -> bool:
        """All rounds, and an error when nothing fits. Ctrl-C ends them with the best so far, if there is one.

        Returns False where a folded model is left for the whole one, because memory is short."""
        solving = perf_counter()
        try:
            if self.left <= 0:
                pass  # with the best baseline
            elif self.model.space.machine.cost_model == "communication":
                self._in_sequence()
            else:
                self._by_step()
            self._settle()
        except KeyboardInterrupt:
            self.interrupted = True
            if self.best is None or self.best.memory.peak > self.limit:
                raise
        self.seconds = perf_counter() - solving
        short = self.best is None or self.best.memory.peak > self.limit
        if self.folded and (short or (self.short and not self.large)) and self.left > 0 and not self.interrupted:
            return False
        if short and self.folded:
            raise self._too_late()
        if short:
            self._without_answer()
        return True

    def _too_late(self) -> TimeLimitError:
        return TimeLimitError(f"no plan was found in {self.time_limit:g} s", "allow more time (--time-limit), or fewer choices by pins")

    def _in_sequence(self) -> None:
        gap = CLOSE if self.large else self.gap
        exact = all(edge.readers <= 2 for edge in self.model.edges)
        found = self._solve(InSequence(), gap, proves=exact)
        if found is not None and not exact:
            self._solve(InSequence(shared=True), gap, proves=True)
        if found is not None and found.memory.peak > self.limit:
            self._fitting(InSequence(), gap)
            if self.reached > TIGHT:
                self._tighten(InSequence())

    def _allow_again(self, exposure: Exposure) -> None:
        """Second runs come in where the best plan without a limit does not fit. In a problem that stays small they are chosen together
        with everything else; otherwise answers of a coarser problem are made to fit one after another: of one that does not tell times
        of second runs apart, or in which nothing of what backward keeps counts."""
        free = self._solve(exposure, CLOSE, limit=UNLIMITED)
        if free is None or free.memory.peak <= self.limit:
            return
        self.plain = free
        if not self.large:
            self._rounds(exposure)
        space = self.model.space
        entries = len(self.problem.edge_costs)
        exact = build_model(space, again=MOMENTS) if entries <= SMALL else None
        if exact is not None and sum(edge.seconds.size for edge in exact.edges) <= MOST_JOINT:
            self.model, self.start = exact, None
        elif entries <= JOINT:
            self.keeping, self.model, self.start = True, build_model(space, again=1), None
        else:
            self.keeping, self.model = True, without_kept(self.model)
        self.problem, self.unit = self.model.problem(self.limit)
        self.reserves = Reserves(self.model, self.limit, pairs=not self.large)
        self.again = self.proved = False
        if self.keeping:
            self._fit(free, exposure)
            for rival in sorted(self.rivals, key=lambda rival: rival.seconds)[:TUNED]:
                if self.best is None or self.best.memory.peak > self.limit or rival.seconds < self.best.seconds:
                    self._fit(rival, exposure)

    def _fit(self, plan: Timed, prices: Exposure) -> Timed | None:
        """A plan's strategies with less kept, if that fits."""
        return self._kept((plan.assignment,), prices, min(self.left, self.time_limit * TURN))

    def _kept(self, plans: Sequence[Assignment], prices: Exposure, seconds: float) -> Timed | None:
        """The strategies of plans with less kept, if that fits."""
        model = self.model
        wanted = Wanted(self.limit, self.apart, self.tries, self.seed, perf_counter() + max(seconds, 1.0))
        found = fit(model.space, plans, prices, wanted, model.folding if isinstance(model, FoldedModel) else None)
        if found is None or found.memory.peak > self.limit:
            return None
        self.gained |= self.offer(found, "auto")
        return found

    def _keep_less(self, prices: Exposure) -> None:
        """What the answers so far and the plans written by hand are split like, with less kept: of a folded problem."""
        ops = len(self.model.space.graph.ops)
        written = [rival.assignment for rival in self.rivals if len(rival.assignment.strategies) == ops and not rival.assignment.again]
        self._kept((*self.answers, *written), prices, self.left)

    def _rounds(self, exposure: Exposure) -> Exposure:
        """Solves under prices by exposure, each learnt from the last answer, and in a small problem under even prices; the last prices."""
        idle = 0
        known = self.best is not None and self.best.memory.peak <= self.limit and not self.keeping and not self.folded
        if self.best is not None and known and len(self.problem.edge_costs) > SMALL:
            self.start = choices_of(self.model, self.problem, self.best.assignment, self.seed)
        seen: list[np.ndarray] = []
        for _ in range(EXPOSURES):
            found = self._fitting(exposure, CLOSE)
            if found is None or found.memory.peak > self.limit:
                break
            idle = 0 if self.gained else idle + 1
            assert self.start is not None
            if idle >= self.idle or self._spent() or any(np.array_equal(self.start, other) for other in seen):
                break
            seen.append(self.start)
            exposure = exposure.learn(found.schedule, found.slots)
        if self.proved:
            return exposure
        for share in EVEN if self.small else ():
            if not self._spent():
                self._fitting(Exposure.even(share, self.slowdown), CLOSE)
        return exposure

    def _by_step(self) -> None:
        exposure = Exposure.first(self.slowdown)
        if self.best is not None:
            exposure = exposure.learn(self.best.schedule, self.best.slots)
        if self.again:
            self._allow_again(exposure)
        exposure = self._rounds(exposure)
        if self.proved:
            return
        if self.proves and (self.left > 0 or self.best is None):
            self._prove()
        self._settle()
        if self.folded and self.short and self.left > 0:
            self._keep_less(exposure)
        if self._binds() and self.reached > TIGHT and not self.keeping and not self.folded:
            self._tighten(exposure)
        if self.plain is not None and self.small and self.reached > self.gap:
            self._change_again(self.plain)
        if self.best is not None and not self.best.memory.peak > self.limit:
            self._polish()

    def _change_again(self, plain: Timed) -> None:
        """Second runs of the best plan without a limit, one or two more or fewer at a time, from those of the best that fits, none and all:
        what an answer counts and what its schedule holds differ, and between two answers of the problem there may be one that fits."""
        space = self.model.space
        names = [op.name for op in space.graph.ops if op.phase == "forward" and not why_once(op)]
        changes = [frozenset(some) for count in (1, 2) for some in combinations(names, count)][:CHANGES]
        seen: set[frozenset[str]] = set()
        known = self.best.assignment.again if self.best is not None else frozenset()
        for start in dict.fromkeys((known, frozenset[str](), frozenset(names))):
            chosen: frozenset[str] | None = start
            while chosen is not None:
                around, chosen = [chosen, *(chosen ^ change for change in changes)], None
                for some in around:
                    if some in seen:
                        continue
                    if len(seen) >= CHANGES or self.left <= 0:
                        return
                    seen.add(some)
                    found = self.schedule(recompute(space.graph, plain.assignment, some, space.machine), None, tries=0)
                    self.offer(found, "auto")
                    if self.best is found:
                        chosen = some
                        break

    def _fitting(self, weights: Weights, gap: float) -> Timed | None:
        """Solves until an answer fits as a schedule; the last one found, None without choices."""
        found, gained = None, False
        for _ in range(FITTINGS):
            answer = self._solve(weights, gap)
            gained |= self.gained
            found = answer or found
            if answer is None:
                if not self.reserves.ease():
                    break
            elif self.keeping or self.folded or answer.memory.peak <= self.limit or not self._learn(answer):
                break
            if self.left <= 0:
                break
        self.gained = gained
        return found

    def _learn(self, answer: Timed) -> bool:
        """Asks for more where an answer's schedule does not fit; whether that is more than before."""
        assert self.start is not None
        return self.reserves.learn(self.problem, self.start, answer.schedule)

    def _binds(self) -> bool:
        """Whether the limit keeps anything out."""
        return self.reserves.learnt or self.best is None or self.best.memory.peak > TIGHTER * self.limit

    def _tighten(self, weights: Weights) -> None:
        """Plans for less memory, which fit as well: lower and lower limits, halfway to the least that has any, until one fits, then higher
        again."""
        low, high, target = 0, self.limit, int(TIGHTER * self.limit)
        for _ in range(HALVINGS):
            if self._spent() or self.reached <= TIGHT:
                return
            found = self._solve(weights, CLOSE, limit=target)
            if found is not None and found.memory.peak > self.limit:
                high = target
            else:
                low = target
            target = (low + high) // 2 if low else int(TIGHTER * target)

    def _prove(self) -> None:
        """Bounds under weights that the answers so far suggest; their answers are plans to try as well."""
        cuts = Cuts(self.model, self.slowdown)
        center, idle = cuts.first(), 0
        mixture = center
        for _ in range(BOUNDS):
            before = self.aim
            found = self._solve(mixture, CLOSE, proves=True, limit=UNLIMITED if self.again else None)
            if found is None or self.start is None or self.left <= 0 or (self._spent() and not self.short):
                return
            cuts.add(Answer(self.model, self.start))
            gained = self.aim > before * (1 + GAIN)
            if gained:
                center = mixture
            idle = 0 if gained or self.gained else idle + 1
            wanted, most = cuts.best()
            if (self.large and not self.folded) or idle >= self.idle or most <= self.aim * (1 + GAIN):
                return
            mixture = blend(wanted, center, SHARE)

    def _polish(self) -> None:
        """More limits for the best schedule."""
        best = self.best
        assert best is not None
        if self.left > 0:
            self.offer(self.schedule(best.assignment, best.schedule.limits, tries=4 * self.tries), self.method)

    def schedule(self, assignment: Assignment, start: Limits | None, tries: int, beside: float = math.inf) -> Timed:
        """The best schedule of an assignment in a few tries; of a deep graph as shorter ones tell it, unless memory is near the limit."""
        found = self._schedule(assignment, self.model.short(assignment), start, tries, beside)
        near = abs(found.memory.peak - self.limit) < NEAR * self.limit
        return self._exact(found) if found.estimated and near else found

    def sure(self, found: Timed) -> Timed:
        """The same at full depth, where it may be the best."""
        hopeful = replace(found, seconds=found.seconds * (1 - HOPE))
        return self._exact(found) if found.estimated and hopeful.better(self.best, self.limit) else found

    def _exact(self, found: Timed) -> Timed:
        return self._schedule(found.assignment, (), found.schedule.limits, tries=0)

    def _schedule(
        self, assignment: Assignment, short: Sequence[Sample], start: Limits | None, tries: int, beside: float = math.inf
    ) -> Timed:  # fmt: skip
        space, graph = self.model.space, self.model.whole_graph
        samples = short or (Sample(1.0, graph, self.model.whole(assignment)),)
        return best_schedule(
            graph, assignment, space.machine, space.optimizer, self.limit, start=start, tries=tries,
            until=self.began + self.time_limit, beside=beside, samples=samples,
        )  # fmt: skip

    def _settle(self) -> None:
        """Proves for layers left free the best of the bounds that so far hold for tied ones."""
        for bound, optimum, weights in sorted(self.claims, key=lambda claim: claim[0], reverse=True)[:SETTLED]:
            if bound > self.bound * (1 + GAIN):
                seconds = max(min(self.left, TURN * self.time_limit), 1.0)
                self.bound = max(self.bound, self.model.proved(weights, bound, optimum, seconds))
        self.claims.clear()

    def _spent(self) -> bool:
        return self.left <= 0 or self.short or self.reached <= self.gap

    def _solve(self, weights: Weights, gap: float, *, proves: bool = False, limit: int | None = None) -> Timed | None:
        """One solve, its schedule taken in; None without choices.

        Args:
            proves: the optimum under these weights bounds every step; nothing is reserved.
            limit: where it is to keep to less than it must; then nothing is reserved either.
        """
        self.gained = False
        space = self.model.space
        bytes_allowed = UNLIMITED if self.folded else self.limit if limit is None else limit
        problem, unit = self.model.problem(bytes_allowed, weights)
        asked, start = problem, self.start
        if not proves and limit is None and not self.folded:
            asked = self.reserves.applied(problem)
            start = self.reserves.completed(start) if start is not None else None

        def report(incumbent: float | None, bound: float, reached: float, seconds: float) -> None:
            if self.progress is not None:
                known = max(self.bound, bound * unit / (1 + TIES)) if proves and not self.folded else self.bound
                best = self.best.seconds if self.best is not None else math.inf
                self.progress(best, known, 1 - known / best if 0 < best < math.inf else 1.0, perf_counter() - self.began)

        most = self.time_limit
        if space.machine.cost_model != "communication":
            most *= TURN if self.start is not None else 0.5
        if self.folded and start is not None:
            start = self.model.restrict(start)
        solution = solve(asked, time_limit=max(min(self.left, most), 1.0), gap=gap, seed=self.seed, start=start, progress=report)
        self.last = solution
        if proves:
            bound = solution.bound * unit / (1 + TIES)
            self.aim = max(self.aim, bound)
            if self.folded and solution.objective is not None:
                self.claims.append((bound, solution.objective * unit, weights))
            elif not self.folded:
                self.bound = self.aim
        if asked is problem and limit is None:
            self.proved = self.proved or solution.status is Status.INFEASIBLE
        if solution.choices is None:
            return None
        self.start = self.model.expand(solution.choices) if self.folded else solution.choices[: len(self.model.nodes)]
        limits: Limits | None = self.best.schedule.limits if self.best is not None else None
        beside = self.best.seconds if self.best is not None and self.best.memory.peak <= self.limit else math.inf
        tries = 0 if proves and self.folded and self.large else self.tries  # rounds are cheap where schedules are not
        assignment = extract(self.model, self.start)
        self.answers.append(assignment)
        found = self.schedule(assignment, limits, tries, beside)
        self.short |= self.folded and found.memory.peak > self.limit
        self.gained = self.offer(found, solution.method)
        if solution.message == INTERRUPTED:
            raise KeyboardInterrupt
        if self.keeping and found.memory.peak > self.limit:
            return self._fit(found, weights if isinstance(weights, Exposure) else Exposure.first(self.slowdown)) or found
        return found

    def _without_answer(self) -> None:
        """The plan of least memory, if that fits after all.

        Raises:
            InfeasibleError, TimeLimitError.
        """
        last = self.last
        if self.best is None and last is not None and last.status is Status.UNKNOWN and last.smallest_limit is None:
            raise self._too_late()
        found, bound = smallest(self.model, self.problem, self.limit, self.seed, self.rivals, self.proved)
        self.offer(found, "least memory")
        assert self.best is not None
        if self.best.memory.peak > self.limit:
            raise infeasible(self.best.memory, self.limit, bound)
