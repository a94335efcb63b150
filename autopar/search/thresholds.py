"""Thresholds: sizes and gaps at which a search changes its method. Tests lower them so that small cases take the roads of large ones."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.search.settings import (
    DEEP_LAYERS,
    ENTRIES_PER_WORK,
    JOINT_ENTRIES,
    LARGE_ENTRIES,
    LONG_GRAPH,
    LOOSE_GAP,
    ROOMY,
    SHORT_DEPTHS,
    SMALL_ENTRIES,
    WHOLE_GAP,
)


@dataclass(frozen=True)
class Thresholds:
    """The numbers of ``settings`` that depend on the size of a case; that module gives meaning and measurement of each.

    Args:
        small_entries, large_entries, joint_entries: edge entries of a problem.
        exact_entries: edge entries up to which a problem tells all times of recomputations apart.
        coarse_entries, entries_per_work: edge entries of the problem over all choices, and those for each work second left.
        long_graph: operators.
        deep_layers, short_depths: equal layers of a folded graph, and of the graphs from which it is extrapolated.
        roomy: share of the memory limit.
        whole_gap, loose_gap: proved gaps.
    """

    small_entries: int = SMALL_ENTRIES
    exact_entries: int = SMALL_ENTRIES
    large_entries: int = LARGE_ENTRIES
    joint_entries: int = JOINT_ENTRIES
    coarse_entries: int = LARGE_ENTRIES
    entries_per_work: float = ENTRIES_PER_WORK
    long_graph: int = LONG_GRAPH
    deep_layers: int = DEEP_LAYERS
    short_depths: tuple[int, int] = SHORT_DEPTHS
    roomy: float = ROOMY
    whole_gap: float = WHOLE_GAP
    loose_gap: float = LOOSE_GAP


USUAL_THRESHOLDS = Thresholds()
"""The thresholds of all searches outside of tests."""
