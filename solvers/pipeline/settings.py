"""Every number that steers the search for pipelines, with its unit and reason.

A *unit of work* is about one CPU second of compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSettings:
    """The numbers; each is followed by its meaning with unit."""

    # Problems.
    largest_timetable: int = 1_000_000
    """Operations of a timetable, and layers of a chain, at most: 8 MB an array."""
    largest_number: float = 1e18
    """Seconds and bytes of a layer, at most, so that sums keep nine digits and never overflow."""
    byte_tolerance: float = 5e-10
    """Bytes by which sums of fractions may exceed a limit through rounding; beside ``Settings.safety`` of it, no whole byte below 1e12."""

    # Work.
    most_work: float = 12.0
    """Units that a solve takes at most where none are given."""
    operation_work: float = 1.2e-8
    """Units for an operation of a timetable that is simulated. Measured."""
    scan_work: float = 3.5e-9
    """Units for an operation that list scheduling looks at, once for each place of the order. Measured."""
    candidate_work: float = 8e-5
    """Units for a cut that is looked at, beside its simulation: its sums in Python. Measured."""
    node_work: float = 7e-9
    """Units for an operation of a node in branch and bound. Measured."""
    listing_work: float = 1e-5
    """Units for a partial cut that is listed. Measured."""

    # Modes.
    most_options: int = 48
    """Mixes of modes kept for the layers of a chunk. Nine equal layers with two modes have ten."""

    # Search over cuts and warm-ups.
    cut_share: float = 0.4
    """Share of the work that a search over cuts and warm-ups may take."""
    tree_share: float = 0.5
    """Share of the work that branch and bound may take."""
    patience: int = 20
    """Moves without progress, for each chunk, after which a start is left."""
    shift_share: float = 0.6
    """Share of moves that shift a layer, to any chunk; the others change a warm-up.

    Shifts to neighbours alone leave 405B on 16 devices in the memory of 1F1B 1.1 % longer.
    """
    first_starts: int = 6
    """Starts from the incumbent, disturbed, before branch and bound."""
    starts: int = 60
    """Starts from the incumbent, disturbed, after it. With 12, 70B on 8 devices in the memory of 1F1B takes 721.9 s instead of 704.3."""
    disturbance: int = 3
    """Random moves that disturb the incumbent for a new start."""

    # Branch and bound.
    most_operations: int = 400
    """Operations of a timetable whose orders are searched by branch and bound; with more, proofs are out of reach."""
    largest_tree: int = 4_000
    """Operations of a timetable for which the bound of each cut is made: its sorting takes their square."""
    most_cuts: int = 100_000
    """Cuts looked at, partial ones included, for a complete list of those that may be better than the incumbent."""
    nodes_at_once: int = 4_000
    """Nodes between two looks at the clock: about 0.01 s."""
    first_nodes: int = 2_000
    """Nodes for each cut in the first round; each round has ``more_nodes`` times as many."""
    more_nodes: int = 8
    """Factor of the nodes from round to round."""
    remembered: int = 2**22
    """Numbers that remembered nodes may take: 32 MB."""
    buckets: int = 65_537
    """Lists of remembered nodes: a prime."""
    compared: int = 24
    """Remembered nodes with equal counts that a node is compared with."""

    # Local search over orders.
    order_patience: int = 20
    """Rounds of moves without progress after which local search ends. Without it 70B on 8 devices, m 32, is 0.4 % longer."""
    operations_at_once: int = 2_000_000
    """Operations simulated between two looks at the clock, in one round of moves: about 0.03 s."""
    farthest: int = 6
    """Places that a move goes, at most."""


SETTINGS = PipelineSettings()
