"""Local search over cuts, modes and warm-ups, by exact simulation.

A state says where each chunk ends and the warm-up of each device. The modes follow: the fastest mix that leaves room for as many
microbatches in flight as the warm-up. So do the orders. Where chunks lie in a loop, without a split, F and B take turns after the warm-up.
List scheduling is tried beside that with several chunks a device, and alone for other problems. A move shifts a layer from one chunk to
another, or changes warm-ups by one. States as good as the present one are accepted: plateaus are wide, as most chunks do not bind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..kernels import run_warm_ups, schedule_by_list
from ..settings import SETTINGS as SOLVERS
from .bounds import AllCuts, bound_sections
from .chain import line_length, make_chain
from .incumbent import PipelineIncumbent
from .intervals import Intervals, Mix
from .problem import Mode, PipelineProblem
from .settings import SETTINGS


class State(NamedTuple):
    """Where each chunk ends, in layers [n], and the warm-up of each device, in F of its chunks [p]."""

    ends: tuple[int, ...]
    warm_ups: tuple[int, ...]


class CutSearch:
    """The search of one solve."""

    def __init__(self, incumbent: PipelineIncumbent, intervals: Intervals, seed: int) -> None:
        self.incumbent, self.problem, self.intervals = incumbent, incumbent.problem, intervals
        self.random = np.random.default_rng(seed)
        self.chunks_of = [[c for c, place in enumerate(self.problem.places) if place == d] for d in range(self.problem.devices)]
        self.operations = self.problem.devices * line_length(self.problem)
        self.orders = np.zeros(self.operations, dtype=np.int64)
        takes_turns, lists = self.problem.placement == "loop" and not self.problem.split, self.problem.chunks > 1 or self.problem.split
        self.rules = [(run_warm_ups, 0.0)] if takes_turns else []
        """Each with the operations that it looks at beside one that it places."""
        self.rules += [(schedule_by_list, 3.0 * self.problem.total_chunks)] if lists else []
        self.best: State | None = None
        self.left = [] if incumbent.done else starts(self.problem)
        self.seen: set[State] = set()
        self.chosen: dict[tuple[int, tuple[tuple[int, int], ...]], list[Mix] | None] = {}
        """The mixes of a device, by its warm-up and the layers of its chunks."""

    def run(self, allowed: float, disturbed: int) -> None:
        """Descend from each start that was not tried before, then from the best, disturbed.

        Args:
            allowed: work, in units.
            disturbed: starts from the best.
        """
        stop = self.incumbent.spent + allowed
        for state in [*self.left, *[None] * disturbed]:
            begin = self._disturbed() if state is None else state
            if begin is not None:
                self._descend(begin, stop)
            if self.incumbent.over or self.incumbent.spent >= stop:
                break
        self.left = []

    def _disturbed(self) -> State | None:
        state = self.best
        for _ in range(SETTINGS.disturbance):
            state = None if state is None else self._moved(state) or state
        return state

    def _descend(self, state: State, stop: float) -> None:
        step, idle = self._step(state, math.inf), 0
        while idle < SETTINGS.patience * self.problem.total_chunks and not self.incumbent.over and self.incumbent.spent < stop:
            idle += 1
            other = self._moved(state)
            if other is None or other in self.seen:
                continue
            self.seen.add(other)
            found = self._step(other, step)
            if found <= step:
                idle = idle if found >= step * (1.0 - SOLVERS.tight) else 0
                state, step = other, found

    def _step(self, state: State, best: float) -> float:
        """Seconds of a state, infinite where nothing fits or the bound says that it is longer than ``best``."""
        self.incumbent.spend(SETTINGS.candidate_work)
        mixes = self.mixes(state)
        if mixes is None:
            return math.inf
        costs = [mix.cost for mix in mixes]
        if bound_sections(self.problem, costs) > best:
            return math.inf
        warm_ups, chain, step = np.array(state.warm_ups, dtype=np.int64), make_chain(self.problem, costs), math.inf
        for rule, scanned in self.rules:
            found = float(rule(chain, warm_ups, self.orders, self.incumbent.clock))
            self.incumbent.spend(self.operations * (SETTINGS.operation_work + scanned * SETTINGS.scan_work))
            step = min(step, found)
            if found < self.incumbent.step and self.incumbent.offer(state.ends, mixes, self.orders):
                self.best = state
        return step

    def mixes(self, state: State) -> list[Mix] | None:
        """The mix of each chunk; None where none fits."""
        spans, found = list(zip((0, *state.ends), state.ends, strict=False)), dict[int, Mix]()
        for device, chunks in enumerate(self.chunks_of):
            key = state.warm_ups[device], tuple(spans[chunk] for chunk in chunks)
            if key not in self.chosen:
                self.chosen[key] = self._choose(*key)
            chosen = self.chosen[key]
            if chosen is None:
                return None
            found.update(zip(chunks, chosen, strict=True))
        return [found[chunk] for chunk in range(len(spans))]

    def _choose(self, warm_up: int, spans: tuple[tuple[int, int], ...]) -> list[Mix] | None:
        """The mixes of a device's chunks: fastest first, slower ones with fewer bytes while it has too many; None where none fits."""
        offered = [self.intervals.mixes(begin, end) for begin, end in spans]
        chosen = [0] * len(offered)
        if self.problem.limit is not None:
            flying = min(warm_up, self.problem.microbatches * len(spans)) / len(spans)
            while self._bytes([options[at].cost for options, at in zip(offered, chosen, strict=True)], flying) > self.problem.most_bytes:
                lighter = [(c, at) for c, options in enumerate(offered) for at in self._lighter(options, chosen[c], flying)]
                if not lighter:
                    return None
                chunk, at = min(lighter, key=lambda pair: self._price(offered[pair[0]], chosen[pair[0]], pair[1], flying))
                chosen[chunk] = at
        return [options[at] for options, at in zip(offered, chosen, strict=True)]

    def _bytes(self, costs: Sequence[Mode], flying: float) -> float:
        """Bytes of a device's chunks with so many microbatches of each in flight."""
        return sum(cost.rest + max(1.0, flying) * cost.held for cost in costs)

    def _lighter(self, options: list[Mix], at: int, flying: float) -> Iterator[int]:
        """The next mix with fewer bytes."""
        now = self._bytes([options[at].cost], flying)
        yield from [other for other in range(at + 1, len(options)) if self._bytes([options[other].cost], flying) < now][:1]

    def _price(self, options: list[Mix], at: int, other: int, flying: float) -> float:
        """Seconds that a lighter mix takes more, for each byte that it saves."""
        saved = self._bytes([options[at].cost], flying) - self._bytes([options[other].cost], flying)
        return (options[other].cost.seconds - options[at].cost.seconds) / saved

    def _moved(self, state: State) -> State | None:
        """A neighbour drawn at random; None where the draw leads nowhere."""
        n, p, most = self.problem.total_chunks, self.problem.devices, self.problem.microbatches * self.problem.chunks
        if n > 1 and self.random.random() < SETTINGS.shift_share:
            source, target = int(self.random.integers(n)), int(self.random.integers(n))
            ends, sign = list(state.ends), -1 if target > source else 1
            for boundary in range(min(source, target), max(source, target)):
                ends[boundary] += sign
            if any(b <= a for a, b in zip((0, *ends), ends, strict=False)):
                return None
            return State(tuple(ends), state.warm_ups)
        warm_ups, device = list(state.warm_ups), int(self.random.integers(p))
        warm_ups[device] = min(max(self.problem.chunks, warm_ups[device] + int(self.random.choice((-1, 1)))), most)
        return State(state.ends, tuple(warm_ups))


def starts(problem: PipelineProblem) -> list[State]:
    """Where the search begins: cuts that even out work, layers and bytes, with the warm-ups of 1F1B, eager 1F1B and GPipe."""
    costs = problem.costs
    work = [min(mode.seconds for mode in modes) for modes in costs]
    cuts = [even_cut(work, problem.total_chunks), even_cut([1.0] * len(work), problem.total_chunks)]
    if problem.chunks == 1:
        bound = AllCuts(problem)
        low = bound.bound()
        laid = bound.lay(low * (1.0 + SOLVERS.tight)) if math.isfinite(low) else None
        cuts = [tuple(laid), *cuts] if laid is not None and len({0, *laid}) > problem.devices else cuts
    if problem.limit is not None:
        cuts.append(lean_cut(problem))
    p, v, most = problem.devices, problem.chunks, problem.microbatches * problem.chunks
    usual = [(p - d if v == 1 else 2 * (p - d - 1) + (v - 1) * p + 1) for d in range(p)]
    warm_ups = [usual, [2 * warm - 1 for warm in usual], [most] * p, *([[v] * p] if problem.limit is not None else [])]
    states = [State(cut, tuple(min(max(warm, v), most) for warm in line)) for line in warm_ups for cut in cuts]
    return list(dict.fromkeys(states))


def lean_cut(problem: PipelineProblem) -> tuple[int, ...]:
    """The cut whose heaviest chunk has the fewest bytes with one microbatch in flight."""
    return even_cut([min(mode.rest + mode.held for mode in modes) for modes in problem.costs], problem.total_chunks)


def even_cut(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Where the parts of a chain end whose heaviest weighs least: bisection over that weight.

    >>> even_cut([1, 1, 1, 3], 2)
    (3, 4)
    """
    prefix = list(accumulate(weights, initial=0.0))

    def laid(most: float) -> tuple[int, ...] | None:
        ends, begin = list[int](), 0
        for part in range(parts):
            end = begin + 1
            while end < len(weights) - (parts - part - 1) and prefix[end + 1] - prefix[begin] <= most:
                end += 1
            ends.append(end)
            begin = end
        return tuple(ends) if begin == len(weights) else None

    low, high = max(weights), prefix[-1]
    best = laid(high * 2 + 1)
    assert best is not None
    while low < (middle := 0.5 * (low + high)) < high:
        found = laid(middle)
        low, high, best = (low, middle, found) if found is not None else (middle, high, best)
    return best
