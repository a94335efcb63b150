"""Bounds that hold for every order, of one cut and over all cuts.

H of a chunk: the seconds before its first F can begin, those of one microbatch through the chunks before it. R: the seconds that must
follow a B of it, back to the first chunk. p devices, m microbatches, v chunks a device, hops of ``transfer`` seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from ..linear_program import Range, minimise
from ..settings import SETTINGS as SOLVERS
from .chain import fits, rooms
from .problem import Mode, PipelineProblem


def bound_cut(problem: PipelineProblem, costs: Sequence[Mode]) -> float:
    """The largest of the three bounds of one cut, in seconds; infinite where nothing fits.

    Args:
        costs: seconds and bytes of each chunk, shape [n].
    """
    if not fits(problem, costs):
        return math.inf
    return max(bound_sections(problem, costs), bound_trips(problem, costs), bound_memory(problem, costs))


def _heads_and_tails(problem: PipelineProblem, costs: Sequence[Mode]) -> tuple[list[float], list[float]]:
    """H and R of each chunk."""
    heads, tails = [0.0], [0.0]
    for cost, hop in zip(costs, problem.hops, strict=False):
        heads.append(heads[-1] + cost.forward + hop)
        tails.append(tails[-1] + cost.backward + hop if problem.training else 0.0)
    return heads, tails


def bound_sections(problem: PipelineProblem, costs: Sequence[Mode]) -> float:
    """For each device: H of its first chunk, its work on m microbatches, and R of that chunk behind its last B.

    The work does not begin before H, and the last operation of a device is a B, after which R follows. With W split, the last operation may
    be a W; the last B still has R and a W of chunk 0 behind it.
    """
    heads, tails = _heads_and_tails(problem, costs)
    bound, m = 0.0, problem.microbatches
    work, crossing = [0.0] * problem.devices, [0.0] * problem.devices
    for cost, place in zip(costs, problem.places, strict=True):
        work[place] += m * cost.seconds
        crossing[place] += m * (cost.forward + cost.backward)
    for device in range(problem.devices):
        first = problem.places.index(device)
        if not problem.training:
            after = sum(cost.forward for cost in costs[max(c for c, d in enumerate(problem.places) if d == device) + 1 :])
            after += sum(problem.hops[max(c for c, d in enumerate(problem.places) if d == device) :])
            bound = max(bound, heads[first] + work[device] + after)
            continue
        bound = max(bound, heads[first] + work[device] + (0.0 if problem.split else tails[first]))
        bound = max(bound, heads[first] + crossing[device] + tails[first] + (costs[0].weights if problem.split else 0.0))
    return bound


def bound_trips(problem: PipelineProblem, costs: Sequence[Mode]) -> float:
    """One microbatch through all chunks and back, with m - 1 more F, or B, of the slowest.

    The F of a chunk that begins last begins after m - 1 others; mirrored in time, the first B has m - 1 others behind it.
    """
    trip = sum(cost.forward + cost.backward for cost in costs) + (2 if problem.training else 1) * sum(problem.hops)
    slowest = max(max(cost.forward, cost.backward) for cost in costs)
    return trip + (problem.microbatches - 1) * slowest + (costs[0].weights if problem.split else 0.0)


def bound_memory(problem: PipelineProblem, costs: Sequence[Mode]) -> float:
    """With room for k microbatches in flight of a chunk: H, ceil(m / k) round trips behind it, and R.

    m intervals of at least a round trip, at most k of them over any moment, can be coloured with k colours; some colour has ceil(m / k)
    intervals, which follow one another. With W split an interval lasts to the end of W.
    """
    if problem.limit is None or not problem.training:
        return 0.0
    heads, tails = _heads_and_tails(problem, costs)
    room, bound, trip = rooms(problem, costs), 0.0, 0.0
    for chunk in range(problem.total_chunks - 1, -1, -1):
        cost = costs[chunk]
        trip += cost.forward + cost.backward + (2 * problem.hops[chunk] if chunk < problem.total_chunks - 1 else 0.0)
        trips = -(-problem.microbatches // in_flight(room[problem.places[chunk]], cost.held, problem.microbatches))
        last = costs[0].weights if problem.split else 0.0
        bound = max(bound, heads[chunk] + trips * trip + (trips - 1) * cost.weights + tails[chunk] + last)
    return bound


def in_flight(room: float, held: float, microbatches: int) -> int:
    """Microbatches of a chunk that room is for, from 1 to all."""
    return microbatches if held * microbatches <= room else max(1, int(room / held))


def bound_total(work: float, devices: int, microbatches: int) -> float:
    """The least step of any cut of a chain with ``work`` seconds a microbatch, one chunk a device: work / (1 - (1 - 1 / m)^p).

    Let P(i) be the work before stage i. m (P(i + 1) - P(i)) <= T - P(i), so T - P(i + 1) >= (T - P(i)) (1 - 1 / m), and P(p) = work.

    >>> round(bound_total(24.0, 2, 4), 2)
    54.86
    """
    return work / (1.0 - (1.0 - 1.0 / microbatches) ** devices)


def bound_total_chunks(work: float, devices: int, microbatches: int, chunks: int) -> float:
    """The least step of any cut of a chain with ``work`` seconds a microbatch, v chunks a device, chunk c on device c mod p.

    Of the chunks of a device take those from c on. Nothing of them begins before one microbatch has passed the chunks before c, nor ends
    later than that microbatch's way back takes. So T >= P(c) + m x their work, where P(c) is the work before c. The most work that these
    rows allow is a linear program. Its multipliers, made feasible, prove the bound.

    >>> round(bound_total_chunks(24.0, 2, 4, 1), 2), round(bound_total_chunks(1.0, 8, 16, 2), 4)
    (54.86, 2.0933)
    """
    count = devices * chunks
    rows = np.tri(count, k=-1)
    for chunk in range(count):
        rows[chunk, chunk::devices] += microbatches
    none, endless = np.zeros(count), np.full(count, np.inf)
    _, duals = minimise(np.full(count, -1.0), Range(none, endless), rows, Range(-endless, np.ones(count)))
    multipliers = np.abs(duals)
    return work * float((multipliers @ rows).min() / multipliers.sum())


class AllCuts:
    """The bound over all cuts, mixes of modes and orders. Of each layer every number is taken at its least over the modes."""

    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        costs, layers = problem.costs, len(problem.layers)
        self.forward = _prefix([min(mode.forward for mode in modes) for modes in costs])
        self.backward = _prefix([min(mode.backward for mode in modes) for modes in costs])
        self.crossing = _prefix([min(mode.forward + mode.backward for mode in modes) for modes in costs])
        self.work = _prefix([min(mode.seconds for mode in modes) for modes in costs])
        self.held = _prefix([min(mode.held for mode in modes) for modes in costs])
        self.rest = _prefix([min(mode.rest for mode in modes) for modes in costs])
        self.last_weights = min(mode.weights for mode in costs[0])
        self.least_weights = min(mode.weights for modes in costs for mode in modes)
        ways = 2 if problem.training else 1
        self.trip = self.crossing[layers] + ways * sum(problem.hops) + self.last_weights

    def bound(self) -> float:
        """Seconds that any answer takes at least; infinite where none fits. Every step is a whole multiple of ``step_unit``."""
        return round_up(self.least(), step_unit(self.problem))

    def least(self) -> float:
        """The bound before it is rounded up: it also holds where layers take more seconds than the problem says."""
        return self._chunks_bound() if self.problem.chunks > 1 else self._greedy_bound()

    def _chunks_bound(self) -> float:
        """The mean over the devices of ``bound_sections``, the d-th having d layers or more before its first chunk; and one trip.

        With room for less than one microbatch of all layers on all devices nothing fits.
        """
        p, m, hops = self.problem.devices, self.problem.microbatches, self.problem.transfer if self.problem.devices > 1 else 0.0
        if self.rest[-1] + self.held[-1] > p * self.problem.most_bytes:
            return math.inf
        ways = self.forward if self.problem.split or not self.problem.training else self.crossing
        count = 2 if ways is self.crossing else 1
        mean = (m * self.work[-1] + sum(ways[device] + count * device * hops for device in range(p))) / p
        slowest = max(
            max(min(mode.forward for mode in modes), min(mode.backward for mode in modes)) for modes in self.problem.costs
        )
        return max(mean, self.trip + (m - 1) * slowest)

    def _greedy_bound(self) -> float:
        """The least T with which the stages can be laid one by one, each taking as many layers as the bounds of one cut allow: bisection.

        Where a stage may end rises with its begin, so taking more earlier never hurts. That needs stages without layers: with little
        memory the next stage may be the first that can take a layer. They only lower the bound.
        """
        low, high = self.trip, 2.0 * self.trip + self.problem.microbatches * self.work[-1]
        if self.lay(low) is not None:
            return low
        high *= self.problem.microbatches
        if self.lay(high) is None:
            return math.inf
        while high - low > 1e-13 * high:
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            low, high = (low, middle) if self.lay(middle) is not None else (middle, high)
        return low

    def lay(self, step: float) -> list[int] | None:
        """Where the stages end that take as many layers as ``step`` seconds allow; None where layers are left. One chunk a device."""
        problem, begin, ends = self.problem, 0, list[int]()
        for stage in range(problem.devices):
            most = len(problem.layers) - (problem.devices - 1 - stage)
            begin = max(begin, min(most, self._farthest(stage, begin, step)))
            ends.append(begin)
        return ends if begin == len(problem.layers) else None

    def _farthest(self, stage: int, begin: int, step: float) -> int:
        problem, m = self.problem, self.problem.microbatches
        hops, wide = stage * problem.transfer, step * (1.0 + 1e-14)
        spare = (step - self.trip) / (m - 1) if m > 1 else math.inf
        end = _reach(self.forward, begin, spare)
        if not problem.training:
            return end
        left = wide - self.crossing[begin] - 2 * hops
        end = min(end, _reach(self.backward, begin, spare))
        if problem.split:
            end = min(end, _reach(self.work, begin, (wide - self.forward[begin] - hops) / m))
        end = min(end, _reach(self.crossing, begin, (left - self.last_weights) / m))
        if problem.limit is None:
            return end
        trip = self.crossing[-1] - self.crossing[begin] + 2 * problem.transfer * (problem.devices - 1 - stage)
        between = self.least_weights if problem.split else 0.0
        trips = (left - self.last_weights + between) / (trip + between) if trip + between > 0 else math.inf
        if trips < 1:
            return begin
        flying = -(-m // min(m, int(trips * (1.0 + 1e-12)))) if math.isfinite(trips) else 1
        while end > begin and self.rest[end] - self.rest[begin] + flying * (self.held[end] - self.held[begin]) > problem.most_bytes:
            end -= 1
        return end


def _prefix(values: list[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


def _reach(prefix: list[float], begin: int, spare: float) -> int:
    """The last end with ``prefix[end] - prefix[begin] <= spare``, rounding allowed for."""
    if math.isinf(spare):
        return len(prefix) - 1
    return bisect_right(prefix, prefix[begin] + spare + 1e-13 * prefix[-1]) - 1


def step_unit(problem: PipelineProblem) -> float:
    """Seconds of which every step is a whole multiple: the greatest common divisor of all seconds, 0 where six digits do not write them.

    >>> step_unit(PipelineProblem(((Mode(3, 6),), (Mode(1.5),)), 1, 1))
    1.5
    """
    seconds: set[float] = {problem.transfer}
    for mode in (mode for modes in problem.costs for mode in modes):
        seconds.update((mode.forward, mode.backward, mode.weights))
    for digits in range(7):
        scaled = [value * 10**digits for value in seconds]
        if max(scaled) < 1e12 and all(abs(value - round(value)) <= SOLVERS.tight * value for value in scaled):
            return float(math.gcd(*(round(value) for value in scaled)) / 10**digits)
    return 0.0


def round_up(bound: float, unit: float) -> float:
    """The least multiple of ``unit`` that is not below a bound, its rounding allowed for."""
    if unit <= 0 or not math.isfinite(bound):
        return bound
    return float(math.ceil(bound / unit * (1.0 - SOLVERS.tight))) * unit
