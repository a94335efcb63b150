"""Which meshes and numbers of microbatches to search first: those on which the best plan by hand is the fastest.

All meshes are screened with the first number. The best of them are screened with more microbatches, as long as these gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import TimeLimitError

if TYPE_CHECKING:
    from autopar.cost_models import Machine
    from autopar.search import SearchResult
    from autopar.search.baselines.screening import Screened

AMPLE = 0.8
"""Share of the memory limit. A plan that peaks below it gains nothing from more microbatches, which only launch and gather more often."""
PATIENCE = 2
"""Numbers of microbatches in a row without a gain, after which no further one is tried."""
MESHES_WITH_MORE = 2
"""Meshes that are screened with more microbatches than the first number."""
MORE_GAIN = 0.2
"""Share by which plans by hand must be faster with more microbatches for these to be searched first. A search may recompute instead.

Llama-3-70B, dp=32,tp=8, 70 GiB: by hand 2.57 s with one and 2.34 s with two; searched 1.65 s with one.
"""
HOPELESS = 2.0
"""Factor on the best step, from which a plan by hand on another mesh is not worth a search.

Llama-3-70B on 256 devices: searched steps are 0.64 to 0.88 of the best plan by hand on dp=128,tp=2, dp=64,tp=4 and dp=32,tp=8. On dp=256
they are 0.38 of it, and still 2.8 times the best.
"""
MOST_LEADERS, NEAR_LEADER = 3, 1.3
"""Candidates that are searched with the whole effort: their number at most, and the factor within which their plans by hand are.

Llama-3-70B on 256 devices, 70 GiB: by hand 2.00, 2.06 and 2.57 s on dp=128,tp=2, dp=64,tp=4 and dp=32,tp=8; searched 1.75, 1.76 and 1.65 s.
"""
SCREENING_SHARE = 0.3
"""Share of the time that screening may take. What is not screened until then is searched last."""


@dataclass(frozen=True)
class Ranked:
    """A candidate with its place.

    Args:
        number: of microbatches.
        machine: with the mesh.
        screened: the best plan by hand; None where there is none, or it was not looked for.
    """

    number: int
    machine: Machine
    screened: Screened | None = None

    def worth(self, limit: int) -> tuple[int, float]:
        """Sorts candidates under a limit of bytes a rank, the most promising first."""
        if self.screened is None:
            return 2, 0.0
        kind, amount = self.screened.worth(limit)
        return kind, amount * (1 + MORE_GAIN * (self.number > 1))

    def fits(self, limit: int) -> bool:
        """Whether the plan by hand fits in a limit of bytes a rank."""
        return self.screened is not None and self.screened.peak <= limit

    def is_hopeful(self, best: SearchResult) -> bool:
        """Whether a search of the candidate may find a better plan."""
        return self.screened is None or self.screened.seconds < HOPELESS * best.seconds


Screen = Callable[[int, "Machine"], "Screened | None"]
"""The best plan by hand with a number of microbatches on a machine."""


def rank(
    numbers: Iterator[int], machines: Sequence[Machine], screen: Screen, limit: int, has_time: Callable[[], bool]
) -> tuple[list[Ranked], bool]:  # fmt: skip
    """All that is worth a search, the most promising first; and whether there was time to screen it all.

    Args:
        numbers: of microbatches. The first is captured already; asking for another captures it, or ends them.
        limit: bytes of a rank.
        has_time: whether there is time for another.
    """
    found, best, chosen = list[Ranked](), list[tuple[int, float]](), machines
    try:
        for number in numbers:
            some = list[Ranked]()
            for machine in chosen:
                if not has_time() and (found or some):
                    rest = [] if found else [Ranked(number, other) for other in chosen[len(some) :]]
                    return [*_sorted([*found, *some], limit), *rest], False
                some.append(Ranked(number, machine, screen(number, machine)))
            some = _sorted(some, limit)
            found += some
            best.append(some[0].worth(limit))
            if _is_enough(some[0], best, limit):
                break
            chosen = [item.machine for item in some[:MESHES_WITH_MORE]]
    except TimeLimitError:
        return _sorted(found, limit), False
    return _sorted(found, limit), True


def count_leaders(ranked: Sequence[Ranked], limit: int) -> int:
    """Number of candidates, from the first on, that are searched with the whole effort; 0 where no plan by hand fits."""
    nearest = NEAR_LEADER * ranked[0].worth(limit)[1]
    return sum(item.fits(limit) and item.worth(limit)[1] <= nearest for item in ranked[:MOST_LEADERS])


def _sorted(items: Sequence[Ranked], limit: int) -> list[Ranked]:
    return sorted(items, key=lambda item: item.worth(limit))


def _is_enough(last: Ranked, best: Sequence[tuple[int, float]], limit: int) -> bool:
    """Whether more microbatches can be expected to gain nothing.

    Args:
        last: the best with the last number.
        best: what is best with each number, by ``worth``.
    """
    plan = last.screened
    if plan is not None and not plan.recomputes and plan.peak <= AMPLE * limit:
        return True
    return len(best) > PATIENCE and min(best[-PATIENCE:]) >= min(best[:-PATIENCE])
