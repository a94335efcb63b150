"""A plan improved by one change after another, each judged by its own schedule: what prices can only guess (what a gather waits for beside
others, what is held while it is under way), the schedule says.

What takes less time and fits is kept at once: after it was reordered, since what makes place for another order shows only there. Changes
that add nothing to what is to be done come first (``promise``); where none of them helps any more, the others do. Where nothing fits yet,
bytes over the limit count as time (``OVER``). For the changes themselves see ``changes``.

A plan that is fast and holds too much becomes one that fits by way of plans between (``lighten``): what is held at the peak is changed, as
long as what that takes is worth the bytes, which become dearer and dearer. So the cheapest ways to hold less come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from time import perf_counter

import numpy as np

from autopar.schedule import Assignment, Limits
from autopar.schedule.liveness import STAGING, held
from autopar.search.changes import Change, moves, splits, towards
from autopar.search.promise import Work
from autopar.search.space import Space
from autopar.search.tuning import EQUAL, Timed, schedule_below

OVER = 2.0
"""Relative seconds that a relative byte over the limit counts."""

DEARER = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The same, one after another, for a plan on its way to fit."""
NEAR = 1.1
"""What trails by more than this as limits alone let calls stand is not reordered."""
SHARE = 8
"""Such a part of the limit may be gathered ahead on that way."""

Tune = Callable[[Assignment], Timed]
"""The schedule of an assignment with limits of its own."""


LESS = (True, False)
"""Whether changes are tried that add nothing to what is to be done, or the others, where those do not help."""


def improve(
    space: Space, begin: Timed, limit: int, tune: Tune, until: float, guide: Assignment | None = None, stages: Sequence[bool] = LESS
) -> Timed:  # fmt: skip
    """The best plan that changes lead to from ``begin``, which fits if that does. Each change is scheduled under the limits of the plan
    that is changed; what they all come to is tuned anew.

    On the way plans may need a little more than the limit; where they end so, the way through plans that fit is taken.

    Args:
        tune: see ``Tune``.
        until: the ``perf_counter`` at which it ends.
        guide: a plan; only changes to what it has are tried.
        stages: of ``LESS``.
    """
    work = Work(space)
    for over in (OVER, math.inf):
        found = _improved(space, begin, limit, tune, until, guide, over, work, stages)
        if found.memory.peak <= limit or begin.memory.peak > limit:
            return found
    return begin


def _improved(
    space: Space, begin: Timed, limit: int, tune: Tune, until: float, guide: Assignment | None, over: float, work: Work,
    stages: Sequence[bool] = LESS,
) -> Timed:  # fmt: skip
    best = begin
    while perf_counter() < until:
        before = best
        for less in stages:
            if best is before:
                changes = chain(moves(space, best), splits(space, best)) if guide is None else towards(space, guide)
                hurries = NEAR * best.placed_seconds / best.seconds if best.memory.peak <= limit else 1.0
                best = _swept(space, best, _promising(changes, work, best, limit, less), limit, until, over, work, hurries)
        if best is before:
            break
        best = min(best, tune(best.assignment), key=lambda one: _cost(one, limit, over))
        if _cost(best, limit, over) >= _cost(before, limit, over):
            return before
    return best


def _promising(changes: Iterable[Change], work: Work, begin: Timed, limit: int, less: bool) -> Iterator[Change]:
    """Of the changes of a plan that fits those that add nothing to what is to be done, or (not ``less``) the others; of one that does not
    fit all of them are the first."""
    if begin.memory.peak > limit:
        yield from changes if less else ()
        return
    known = begin.assignment, work.seconds(begin.assignment)

    def tried(change: Change, plan: Assignment) -> Assignment | None:
        nonlocal known
        made = change(plan)
        if known[0] is not plan:
            known = plan, work.seconds(plan)
        return made if made is not None and (work.seconds(made) <= known[1] * (1 + EQUAL)) is less else None

    for change in changes:
        yield lambda plan, change=change: tried(change, plan)  # type: ignore[misc]


def lighten(space: Space, begin: Timed, limit: int, until: float) -> Timed:
    """A plan that holds too much, with what it holds at the peak changed until it fits, or until nothing helps: what costs little for its
    bytes comes first.

    Args:
        until: the ``perf_counter`` at which it ends.
    """
    first = Limits(bucket_bytes=0, ahead_bytes=limit // SHARE, aside_bytes=0)
    work = Work(space)
    best = _scheduled(space, begin.assignment, limit, first, work)
    assert best is not None, "every plan takes less than forever"
    for over in DEARER:
        before = None
        while best is not before and best.memory.peak > limit and perf_counter() < until:
            before, full = best, _held_at_peak(best)
            for changes in (moves(space, best, full), splits(space, best, full)):
                best = _swept(space, best, changes, limit, until, over, work) if best is before else best
    return best


def _held_at_peak(found: Timed) -> frozenset[str]:
    """The tensors that the biggest of what is held at the peak are versions of."""
    schedule, tensors = found.schedule, set[str]()
    for name, _ in found.memory.biggest:
        name = name.removeprefix(STAGING)
        if name in schedule.values:
            tensors.add(schedule.values[name].tensor)
        elif name in schedule.collectives:
            tensors.update(part.layout.tensor for part in schedule.collectives[name].parts)
    return frozenset(tensors)


def _swept(
    space: Space, best: Timed, changes: Iterable[Change], limit: int, until: float, over: float, work: Work, hurries: float = 1.0
) -> Timed:  # fmt: skip
    """With those of the changes, each tried once upon the others, that cost less. Of those that take the same, one is scheduled.

    Args:
        hurries: see ``schedule_below``.
    """
    most = _cost(best, limit, over)
    work.is_new(best.assignment, (best.limits, hurries, over))
    if hurries == 1.0:
        placed = _scheduled(space, best.assignment, limit, best.limits, work)
        assert placed is not None, "every plan takes less than forever"
        most = max(most, _cost(placed, limit, over))
    for change in changes:
        if perf_counter() >= until:
            break
        made = change(best.assignment)
        if made is not None and work.is_new(made, (best.limits, hurries, over)):
            found = _scheduled(space, made, limit, best.limits, work, most * (1 + EQUAL), hurries)
            if found is None:
                continue
            cost = _cost(found, limit, over)
            if cost < most * (1 - EQUAL) or (cost < most * (1 + EQUAL) and found.memory.peak < best.memory.peak):
                best, most = found, min(cost, most)
    return best


def _scheduled(
    space: Space, plan: Assignment, limit: int, limits: Limits, work: Work, below: float = math.inf, hurries: float = 1.0
) -> Timed | None:  # fmt: skip
    """See ``schedule_below``."""
    return schedule_below(space.graph, plan, space.machine, space.optimizer, limit, limits, below, hurries, work.prices)


def _cost(found: Timed, limit: int, over: float) -> float:
    """Seconds, and ``over`` times as many for each byte beyond the limit, relatively: those at the peak, and of all other moments their
    mean, since of several peaks one goes after the other."""
    beyond = found.memory.peak / limit - 1
    if beyond <= 0.0:
        return found.seconds
    levels = np.array(held(found.schedule, "none"), dtype=np.float64) + found.memory.optimizer
    return found.seconds * (1 + over * (beyond + float(np.maximum(levels / limit - 1, 0.0).mean())))
