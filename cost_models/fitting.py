"""From measured times to the figures of a hardware file: latency and bandwidth of collectives, efficiency of operators.

Every model here is a sum, or a maximum, of terms with coefficients that are not negative. Errors are relative: a microsecond counts in a
small call as a millisecond does in a large one. Outliers count less: Huber's weights in a sum, absolute errors of at most 1 in a maximum.
Exact data give exact figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .collectives import KINDS, received_bytes
from .efficiency import NOTHING, Efficiency, Residual
from .links import STEPS, Figures, Growth

Array = NDArray[np.float64]

ROUNDS = 20
"""Rounds of reweighting."""
WHOLE = 0.9
"""A call's latency is at most this share of those of two calls that do the same: the ranks meet once, not twice."""
CLEARLY = 0.9
"""A growth with more steps is taken when its error is less than this share of the simpler one's."""
BETTER = 0.95
"""A term of a maximum is kept when the error with it is less than this share of the error without it. One more term for the noise of 30
points gains about a thirtieth."""
SWEEPS = 50
"""Sweeps of a coordinate descent, at most. It ends when a sweep gains nothing: after 2 to 4 on 400 synthetic points."""
EXACT = 1e-9
"""Mean relative error that counts as zero."""
LEAST = 1e-18
"""Seconds per byte or operation, at least: a smaller fitted value is replaced by this."""


@dataclass(frozen=True)
class CollectiveTime:
    """A measured collective: ``seconds`` over ``size`` ranks, the gathered or reduced tensor having ``full_bytes``."""

    kind: str
    size: int
    full_bytes: float
    seconds: float


@dataclass(frozen=True)
class OperatorTime:
    """A measured operator: its class and name, what it does, and the seconds of one call.

    ``host_seconds``: of issuing it, where the host issues and a device works behind it (a GPU); else 0.
    """

    family: str
    name: str
    dtype: str
    flops: float
    bytes_moved: float
    seconds: float
    host_seconds: float = 0.0


def relative_least_squares(terms: Array, seconds: Array, counts: Array | None = None) -> Array:
    """Coefficients x >= 0 that make ``terms @ x`` close to ``seconds`` in relative error.

    Args:
        terms: [points, coefficients], not negative.
        seconds: [points], positive.
        counts: [points], how much a point's relative error counts; all the same if not given.
    """
    rows = terms / seconds[:, None]
    given = np.ones(len(seconds)) if counts is None else counts
    weights = given
    found = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        found, last = _not_negative(rows * weights[:, None], weights), found
        errors = np.abs(rows @ found - 1)
        scale = 1.5 * float(np.median(errors))
        if scale < 1e-12 or np.allclose(found, last, rtol=1e-9, atol=0):
            break
        weights = given * np.sqrt(np.minimum(1.0, scale / np.maximum(errors, scale)))
    return found


def _not_negative(rows: Array, target: Array) -> Array:
    """Least squares over the coefficients that are not negative: the best of the free solutions on every subset of terms."""
    count = rows.shape[1]
    scale = np.where(rows.any(axis=0), np.abs(rows).max(axis=0), 1.0)  # seconds and seconds a byte differ by many orders
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for some in itertools.combinations(range(count), size):
            chosen = list(some)
            free = np.linalg.lstsq(rows[:, chosen] / scale[chosen], target, rcond=None)[0]
            error = float(np.sum((rows[:, chosen] @ (free / scale[chosen]) - target) ** 2))
            if (free >= 0).all() and least - error > 1e-20 * float(target @ target):  # by more than rounding
                best, least = np.zeros(count), error
                best[chosen] = free / scale[chosen]
    return best


def fit_maximum(terms: Array, seconds: Array) -> Array:
    """Coefficients x >= 0 that make ``(terms * x).max(axis=1)`` close to ``seconds``: least mean relative error, of a point at most 1.

    Coordinate descent. While the other coefficients are fixed, the best value of one is 0 or meets some point exactly. All these values are
    tried. A descent ends in a local minimum, so there is one for each order of the terms.

    Args:
        terms: [points, coefficients], not negative.
        seconds: [points], positive.
    """
    rows = terms / seconds[:, None]
    descents = [_descend(rows, order) for order in itertools.permutations(range(terms.shape[1]))]
    return min(descents, key=lambda found: _clipped_error((rows * found).max(axis=1)))


def _descend(rows: Array, order: Sequence[int]) -> Array:
    """Coordinate descent from 0; ``rows`` [points, coefficients] are the terms over each point's seconds."""
    found, error = np.zeros(rows.shape[1]), np.inf
    for _ in range(SWEEPS):
        for term in order:
            found[term] = 0.0
            row, others = rows[:, term], (rows * found).max(axis=1)
            candidates = np.unique(np.append(0.0, 1 / row[row > 0]))
            errors = _clipped_error(np.maximum(candidates[:, None] * row, others))
            best = int(errors.argmin())
            found[term] = candidates[best] if errors[best] < errors[0] * BETTER - EXACT else 0.0
        last, error = error, float(_clipped_error((rows * found).max(axis=1)))
        if error >= last - EXACT:
            break
    return found


def _clipped_error(predicted: Array) -> Array:
    """Mean over the last dim of the relative errors, each at most 1; ``predicted`` is over the measured seconds."""
    error: Array = np.minimum(np.abs(predicted - 1), 1.0).mean(axis=-1)
    return error


def residual(predicted: Array, seconds: Array) -> Residual:
    """How far predictions lie from what was measured."""
    errors = np.abs(predicted / seconds - 1)
    return Residual(len(seconds), float(np.median(errors)), float(errors.max()), float(np.quantile(errors, 0.9)))


def fit_collective(kind: str, points: Sequence[CollectiveTime], *, whole: bool = False) -> tuple[Figures, Residual]:
    """Latency, its growth with the group, and bandwidth of one kind of collective.

    Args:
        kind: of all ``points``; several sizes of tensors, and of groups where the growth is to be told.
        whole: no latency may be larger than ``WHOLE`` times those of two calls, over a and over b ranks, that do the same as one over a b
            ranks: what a first call of few saves in waiting for the others, the second one waits. Where the times say otherwise, the
            latency of the largest group holds and those of smaller ones are raised. Without it a planner takes every call in two.
    """
    seconds = np.array([point.seconds for point in points])
    received = np.array([received_bytes(kind, point.full_bytes, point.size) for point in points])
    passes, sizes = KINDS[kind].passes, {point.size for point in points}
    growths: tuple[Growth, ...] = ("constant",) if KINDS[kind].pairs or len(sizes) == 1 else ("constant", "tree", "ring")
    best: tuple[float, Growth, Array, Array] | None = None
    for growth in growths:
        further = np.array([STEPS[growth](point.size, passes) - 1.0 for point in points])
        found = relative_least_squares(np.stack([np.ones(len(points)), further, received], axis=1), seconds)
        error = float(np.mean(np.abs((found[0] + found[1] * further + found[2] * received) / seconds - 1)))
        if best is None or error < best[0] * CLEARLY - EXACT:
            best = (error, growth, further, found)
    assert best is not None
    _, growth, further, (latency, step, inverse) = best
    ratio = _least_ratio(sizes, growth, passes) if whole else 0.0
    if latency < ratio * step:
        step = (latency + further.max() * step) / (ratio + further.max())
        latency = ratio * step
    figures = Figures(float(latency), 1 / max(float(inverse), LEAST), growth, None if growth == "constant" else float(step))
    return figures, residual(latency + step * further + inverse * received, seconds)


def _least_ratio(sizes: set[int], growth: Growth, passes: int) -> float:
    """By how much the first step's time must exceed a further one's, so that no group's latency is larger than ``WHOLE`` times those of
    two that make it up: L(n) = first + further(n) step, and L(a b) <= WHOLE (L(a) + L(b))."""

    def further(size: int) -> float:
        return STEPS[growth](size, passes) - 1.0

    pairs = [(a, b) for a in sizes for b in sizes if a * b in sizes]
    return max([(further(a * b) - WHOLE * (further(a) + further(b))) / (2 * WHOLE - 1) for a, b in pairs], default=0.0)


def fit_efficiency(
    points: Sequence[OperatorTime], peaks: Sequence[float], bandwidth: float, *, overlaps: bool
) -> tuple[Efficiency, Residual]:  # fmt: skip
    """Launch time and shares of the peaks that explain some operators' times (``Efficiency.seconds``).

    Where the three add up, a point counts as its seconds do, since a step is a sum of operators. Where they overlap all points count the
    same: GPU times span six orders of magnitude, and one slow outlier would decide. Where nothing was seen of arithmetic or of memory
    traffic, its share is 1 if the two overlap, and ``NOTHING`` if they add up.

    Args:
        points: of one class, or of one operator.
        peaks: operations a second that each point's dtype could reach.
        bandwidth: bytes a second that the memory could reach.
        overlaps: whether launch, arithmetic and memory traffic overlap.
    """
    seconds = np.array([point.seconds for point in points])
    arithmetic = np.array([point.flops / peak for point, peak in zip(points, peaks, strict=True)])
    memory = np.array([point.bytes_moved / bandwidth for point in points])
    terms = np.stack([np.ones(len(points)), arithmetic, memory], axis=1)
    if overlaps:
        found = fit_maximum(terms, seconds)
        predicted = (terms * found).max(axis=1)
    else:
        found = relative_least_squares(terms, seconds, np.sqrt(seconds / np.median(seconds)))
        predicted = terms @ found
    launch, *inverses = (float(item) for item in found)
    unseen = 1.0 if overlaps else NOTHING
    shares = [1 / item if item > 1 / NOTHING else unseen for item in inverses]
    return Efficiency(shares[0], shares[1], launch), residual(predicted, seconds)
