"""Candidates that share the time: meshes, or numbers of microbatches, each searched in turn, the best plan kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from autopar.errors import AutoparError, InfeasibleError, TimeLimitError, UsageError

if TYPE_CHECKING:
    from autopar.search import Found

Candidate = TypeVar("Candidate")


class StopRace(Exception):
    """A search raises it to end the race: neither this candidate nor a later one is to be tried."""


def race(
    candidates: Sequence[Candidate],
    find: Callable[[Candidate, float], Found],
    deadline: float,
    *,
    enough: Callable[[], bool] = lambda: False,
    spare: int = 0,
) -> Found:
    """The cheapest plan of all candidates, searched one after another. Ctrl-C ends the race with the best so far.

    Each candidate has an equal share of the time left. One that fails, cannot take the pins or runs out of time is skipped; plans of others
    stand. Before the first plan, a candidate whose share was too short has twice as much. The best, if it took its whole share, is searched
    again in the time that others leave.

    Args:
        find: searches a candidate for that many seconds.
        deadline: when the race ends, of ``perf_counter``.
        enough: asked after each plan, whether to try no further candidate.
        spare: number of candidates at the end that get only the time that the others leave.

    Raises:
        InfeasibleError, TimeLimitError, UsageError: no candidate has a plan; the error of the first, that of a time limit before others.
        KeyboardInterrupt: before there was a plan.
    """
    found: list[tuple[Found, Candidate, bool]] = []
    failed: list[AutoparError] = []
    interrupted = False
    for number, candidate in enumerate(candidates):
        left = deadline - perf_counter()
        if left <= 0 and (found or failed):
            break
        try:
            share = max(left / (len(candidates) - number - (spare if number < len(candidates) - spare else 0)), 0.0)
            one = _find_in_time(find, candidate, share, 0.0 if found else deadline)
            found.append((one, candidate, left - (deadline - perf_counter()) >= share))
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
        except StopRace:
            break
        if found and (found[-1][0].interrupted or (number + 1 < len(candidates) and enough())):
            break
    if not found:
        raise next((error for error in failed if isinstance(error, TimeLimitError)), failed[0])
    best, candidate, short = min(found, key=lambda one: one[0].seconds)
    interrupted, left = interrupted or found[-1][0].interrupted, deadline - perf_counter()
    if short and left > 0 and not interrupted:
        try:
            again = find(candidate, left)
            best, interrupted = min(best, again, key=lambda one: one.seconds), again.interrupted
        except AutoparError:
            pass  # the plan is there
        except KeyboardInterrupt:
            interrupted = True
    return replace(best, interrupted=interrupted)


def _find_in_time(find: Callable[[Candidate, float], Found], candidate: Candidate, seconds: float, deadline: float) -> Found:
    """The plan found in that many seconds. Without one, twice the time is tried, and so on until the deadline. Raises TimeLimitError."""
    last = False
    while True:
        try:
            return find(candidate, seconds)
        except TimeLimitError:
            left = deadline - perf_counter()
            if last or left <= 0:
                raise
            last, seconds = 2 * seconds >= left, min(2 * seconds, left)
