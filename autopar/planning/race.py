"""Candidates that share effort and time: meshes and numbers of microbatches, each searched in turn, the best plan kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from autopar.errors import AutoparError, InfeasibleError, TimeLimitError, UsageError

if TYPE_CHECKING:
    from autopar.search import SearchResult

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Allowance:
    """What a search may spend.

    Args:
        effort_share: part of the effort's work.
        seconds: time after which it is cut off.
    """

    effort_share: float
    seconds: float


Find = Callable[[Candidate, Allowance], "SearchResult"]
"""The search of a candidate."""


def _is_always_hopeful(candidate: object, best: SearchResult) -> bool:
    return True


def race(
    candidates: Sequence[Candidate],
    find: Find[Candidate],
    allowance: Allowance,
    *,
    leaders: int = 0,
    is_hopeful: Callable[[Candidate, SearchResult], bool] = _is_always_hopeful,
    spare: int = 0,
) -> SearchResult:
    """The cheapest plan of all candidates, searched one after another. Ctrl-C ends the race with the best so far.

    Each candidate has an equal share of the effort, and of the time left. One that fails, cannot take the pins or runs out of time is
    skipped; plans of others stand. Before the first plan, a candidate whose share was too small has twice as much. Where the best was cut
    off, or used up its share, it is searched again with the whole effort, in the time that is left.

    Args:
        leaders: number of candidates at the beginning that each have the whole effort, and all of the time left. The others share as much
            effort, in the time that these leave.
        is_hopeful: whether a candidate is worth a search beside the best plan so far.
        spare: number of candidates at the end that get only the time that the others leave.

    Returns:
        The best, ``cut`` if the time limit cut any search or left one out.

    Raises:
        InfeasibleError, TimeLimitError, UsageError: no candidate has a plan; the error of the first, that of a time limit before others.
        KeyboardInterrupt: before there was a plan.
    """
    deadline = perf_counter() + allowance.seconds
    sharers = len(candidates) - leaders
    found: list[tuple[SearchResult, Candidate, float]] = []
    failed: list[AutoparError] = []
    interrupted = cut = False
    for number, candidate in enumerate(candidates):
        left = deadline - perf_counter()
        if left <= 0 and (found or failed):
            cut = True
            break
        if found and not is_hopeful(candidate, min(found, key=lambda one: one[0].seconds)[0]):
            continue
        alone = number < leaders
        parts = 1 if alone else len(candidates) - number - (spare if number < len(candidates) - spare else 0)
        share = Allowance(allowance.effort_share / (1 if alone else sharers), max(left / parts, 0.0))
        try:
            result = _find_in_time(find, candidate, share, allowance, 0.0 if found else deadline)
            found.append((result, candidate, share.effort_share))
        except (InfeasibleError, TimeLimitError) as error:
            failed.append(error)
        except UsageError as error:  # a pin that a mesh of fewer axes, or of other sizes, cannot take
            if len(candidates) == 1:
                raise
            failed.append(error)
        except KeyboardInterrupt:
            if not found:
                raise
            interrupted = True
            break
        if found and found[-1][0].interrupted:
            break
    if not found:
        raise next((error for error in failed if isinstance(error, TimeLimitError)), failed[0])
    cut = cut or any(isinstance(error, TimeLimitError) for error in failed)
    best, candidate, share_of_best = min(found, key=lambda one: one[0].seconds)
    interrupted = interrupted or found[-1][0].interrupted
    cut = cut or any(other.cut for other, *_ in found if other is not best)
    seconds = deadline - perf_counter()
    is_stopped = (best.cut or best.used_up) and share_of_best < allowance.effort_share
    if is_stopped and seconds > 0 and not interrupted:
        try:
            again = find(candidate, Allowance(allowance.effort_share, seconds))
            best = replace(min(best, again, key=lambda one: one.seconds), cut=again.cut, used_up=again.used_up)
            interrupted = again.interrupted
        except AutoparError:
            pass  # the plan is there
        except KeyboardInterrupt:
            interrupted = True
    return replace(best, interrupted=interrupted, cut=cut or best.cut)


def _find_in_time(find: Find[Candidate], candidate: Candidate, allowance: Allowance, whole: Allowance, deadline: float) -> SearchResult:
    """The plan found within the allowance. Without one, twice the effort and time are tried, and so on until the deadline.

    Raises:
        TimeLimitError: there was no plan in all of the time, or with the whole effort.
    """
    last = False
    while True:
        began = perf_counter()
        try:
            return find(candidate, allowance)
        except TimeLimitError:
            left = deadline - perf_counter()
            in_time = perf_counter() - began < allowance.seconds
            if left <= 0 or (allowance.effort_share >= whole.effort_share if in_time else last):
                raise
            last, seconds = 2 * allowance.seconds >= left, min(2 * allowance.seconds, left)
            allowance = Allowance(min(2 * allowance.effort_share, whole.effort_share), seconds)
