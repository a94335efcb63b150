"""Random small pipelines, and the exact optimum over all cuts, mixes of modes and orders by dynamic programming."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from operator import le

from autopar.solvers.pipeline.problem import Mode, PipelineProblem

Counts = tuple[int, ...]
Times = tuple[float, ...]


def random_pipeline(seed: int, layers: int = 8, devices: int = 4, microbatches: int = 5) -> PipelineProblem:
    """A chain with whatever is awkward: chunks, both placements, W split, transfers, limits, modes, inference, layers of no seconds."""
    chance = random.Random(seed)
    chunks = chance.choice((1, 1, 1, 2))
    p = chance.randint(1, min(devices, 4 if chunks == 1 else 2))
    m = chance.randint(1, microbatches if p * chunks < 4 else min(microbatches, 4))
    split, training = chance.random() < 0.3, chance.random() < 0.9
    if split and p * chunks > 3:
        m = min(m, 3)
    count = chance.randint(p * chunks, max(layers, p * chunks))
    scale = chance.choice((1, 1, 0.5, 0.37))
    with_modes, with_limit = chance.random() < 0.2, chance.random() < 0.4
    rows = tuple(_modes(chance, scale, 2 if with_modes and chance.random() < 0.5 else 1) for _ in range(count))
    limit = _limit(chance, rows, p) if with_limit else None
    transfer = chance.choice((0, 0, 1, 2)) * scale
    placement = chance.choice(("loop", "v")) if chunks == 2 else "loop"
    return PipelineProblem(rows, p, m, chunks, placement, transfer, training, split, limit, f"random-{seed}")


def _modes(chance: random.Random, scale: float, count: int) -> tuple[Mode, ...]:
    forward, backward, weights = (chance.randint(0, 4) * scale for _ in range(3))
    held, rest = chance.randint(0, 3), chance.choice((0, 0, 1, 2))
    again = Mode(forward, backward + forward, weights, min(held, 1), rest)
    return (Mode(forward, backward, weights, held, rest), again)[:count]


def _limit(chance: random.Random, rows: tuple[tuple[Mode, ...], ...], devices: int) -> float:
    """Mostly enough for something, seldom for everything."""
    each = sum(modes[0].held * chance.choice((1.0, 1.5, 2.5)) + modes[0].rest for modes in rows) / devices
    return float(math.ceil(each * chance.choice((0.7, 1.0, 1.3))))


def all_cuts(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """Every cut, as layers of each chunk."""
    for inner in itertools.combinations(range(1, layers), chunks - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *inner, layers)))


def shortest_step(problem: PipelineProblem, below: float = math.inf) -> float:
    """The shortest step of all answers that take less than ``below`` seconds; ``below`` if there is none.

    Args:
        below: seconds, such as an answer's: partial timetables that cannot end sooner are left out, which makes the proof fast.
    """
    for cut in all_cuts(len(problem.layers), problem.total_chunks):
        for costs in _cost_choices(problem, cut):
            below = min(below, shortest_order(problem, costs, below))
    return below


def _cost_choices(problem: PipelineProblem, cut: tuple[int, ...]) -> Iterator[tuple[tuple[float, ...], ...]]:
    """Of each chunk all sums of modes, each once: F, B, W, held, rest."""
    begin, choices = 0, []
    for layers in cut:
        rows = []
        for modes in problem.layers[begin : begin + layers]:
            rows.append([(x.forward, x.backward, x.weights, x.held, x.rest) for x in modes])
        choices.append(sorted({tuple(map(sum, zip(*chosen, strict=True))) for chosen in itertools.product(*rows)}))
        begin += layers
    yield from itertools.product(*choices)


def shortest_order(problem: PipelineProblem, costs: tuple[tuple[float, ...], ...], below: float) -> float:
    """The shortest step of one cut over all orders, by sets of operations placed and the times that matter to what follows.

    Operations are numbered chunk by chunk, F, B, W. Two timetables with the same operations placed are compared by when devices are free
    and when data arrives that is still to be read; those that are nowhere earlier than another are left out.
    """
    n, p, m = problem.total_chunks, problem.devices, problem.microbatches
    kinds = len(problem.kinds)
    seconds = [costs[c][kind] + (costs[c][2] if kind == 1 and not problem.split else 0.0) for c in range(n) for kind in range(kinds)]
    places = [c % p if problem.placement == "loop" or c < p else 2 * p - 1 - c for c in range(n)]
    held = [cost[3] if problem.training else 0.0 for cost in costs]
    room = [
        math.inf if problem.limit is None else problem.limit + 1e-9 - sum(costs[c][4] for c in range(n) if places[c] == d) for d in range(p)
    ]
    if min(room) < 0:
        return below
    reads = _reads(problem, places, kinds)
    read_by = [[(op, hop) for op, needed in enumerate(reads) for other, hop in needed if other == source] for source in range(n * kinds)]
    follow = _chains_left(n, kinds, seconds, reads)
    states: dict[Counts, list[tuple[Times, Times]]] = {(0,) * (n * kinds): [((0.0,) * p, (0.0,) * (n * kinds * m))]}
    for _ in range(n * kinds * m):
        after: dict[Counts, list[tuple[Times, Times]]] = {}
        for counts, fronts in states.items():
            for op in range(n * kinds):
                c, kind, i = op // kinds, op % kinds, counts[op]
                d = places[c]
                if i == m or any(counts[other] <= i for other, _ in reads[op]):
                    continue
                flying = sum(held[x] * (counts[x * kinds] - counts[x * kinds + kinds - 1]) for x in range(n) if places[x] == d)
                if kind == 0 and kinds > 1 and flying + held[c] > room[d]:
                    continue
                longer = (*counts[:op], i + 1, *counts[op + 1 :])
                left = [sum((m - longer[x]) * seconds[x] for x in range(n * kinds) if places[x // kinds] == e) for e in range(p)]
                for ready, due in fronts:
                    end = max(ready[d], due[op * m + i]) + seconds[op]
                    now = (*ready[:d], end, *ready[d + 1 :])
                    if end + follow[op] >= below - 1e-9 or max(a + b for a, b in zip(now, left, strict=True)) >= below - 1e-9:
                        continue
                    times = list(due)
                    for reader, hop in read_by[op]:
                        times[reader * m + i] = max(times[reader * m + i], end + hop)
                    for x in range(n * kinds):  # what is placed, or there before its device is free, matters no more
                        for j in range(m) if places[x // kinds] == d else ():
                            if j < longer[x] or times[x * m + j] <= end:
                                times[x * m + j] = 0.0
                    _keep(after.setdefault(longer, []), now, tuple(times))
        states = after
    return min((max(ready) for fronts in states.values() for ready, _ in fronts), default=below)


def _reads(problem: PipelineProblem, places: list[int], kinds: int) -> list[list[tuple[int, float]]]:
    """Of each operation those that it reads, with the seconds of the transfer."""
    n, reads = len(places), list[list[tuple[int, float]]]()
    for c in range(n):
        before = 0.0 if c == 0 or places[c] == places[c - 1] else problem.transfer
        behind = 0.0 if c == n - 1 or places[c] == places[c + 1] else problem.transfer
        reads.append([((c - 1) * kinds, before)] if c > 0 else [])
        if kinds > 1:
            reads.append([(c * kinds, 0.0), *([((c + 1) * kinds + 1, behind)] if c < n - 1 else [])])
        if kinds > 2:
            reads.append([(c * kinds + 1, 0.0)])
    return reads


def _chains_left(n: int, kinds: int, seconds: list[float], reads: list[list[tuple[int, float]]]) -> list[float]:
    """Least seconds from the end of an operation to the last of its microbatch."""
    left = [0.0] * (n * kinds)
    for _ in range(2 * n + 1):
        for op, needed in enumerate(reads):
            for other, hop in needed:
                left[other] = max(left[other], hop + seconds[op] + left[op])
    return left


def _keep(front: list[tuple[Times, Times]], ready: Times, due: Times) -> None:
    """Add a timetable to those of its counts unless one is nowhere later; drop those that it is nowhere later than."""
    mine = (*ready, *due)
    if any(all(map(le, (*other, *others), mine)) for other, others in front):
        return
    front[:] = [(other, others) for other, others in front if not all(map(le, mine, (*other, *others)))]
    front.append((ready, due))
