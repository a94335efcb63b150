"""The numbers that steer the passes of ``schedule``: unit, meaning, and the case they were set on."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.cost_models import UNLIMITED

MIB = 2**20
BUCKET_BYTES = 25 * MIB
"""Default limit of a bucket: that of DistributedDataParallel."""
PREFETCH_BYTES = 400 * MIB
"""Default limit of bytes in flight ahead of their readers: one layer of Llama-3-8B in bfloat16."""
ASIDE_BYTES = 50 * MIB
"""Default limit of bytes that deferred operators keep."""
LEAD = 4.0
"""Lengths of a gather by which it may start before it must be under way. With 1 Llama-3-8B in 7 GiB takes 1.6 % longer;
another seed of the local search alone changes it by 1.4 %."""

SHORT_CHAIN = 0.25
"""Share of the seconds left in a segment. An operator may be deferred when the longest chain after it takes less."""
GAP_OVERSHOOT = 2.0
"""Factor of a gap's seconds up to which a deferred operator fills it."""
PULL_WINDOW = 64
"""Next operators among which one is sought that fills a gap."""

DEFERRED_LEAST_BYTES = 2**10
"""Bytes that a deferred loss may always keep: they never decide what fits."""
DEFERRED_SHARE = 0.01
"""Share of the inputs' bytes that a deferred loss may keep."""
DEFERRED_MOST_BYTES = 2**16
"""Bytes that a deferred loss may keep at most. With 1 KiB for all three Llama-3-8B in 7 GiB takes 0.3 % longer."""

MOVE_WEIGHTS: Mapping[str, int] = {
    "shift": 12,           # an instruction goes earlier or later
    "shift_at_stall": 9,   # the same near a stall of operators
    "pull_to_stall": 3,    # an instruction from behind a stall goes there
    "unbucket": 4,         # a part of a call becomes a call of its own
    "merge": 4,            # two calls become one
}  # fmt: skip
"""Frequency of each kind of move. Without those at stalls Llama-3-70B takes 0.7 % longer, and Llama-3-8B in 7 GiB 0.5 %."""
MOVES = 7_000
"""Moves judged of a list, at most."""
MOVES_EACH = 40
"""Moves judged for each instruction of a list, at most."""
MOVES_WORK = 35_000_000
"""Moves times instructions, at most. The 5,500 instructions of Llama-3-8B on 8x8 take 0.12 CPU s a search so."""
TRIES = 3
"""Moves drawn for each that is judged, at most: in short lists most moves change nothing."""
PLAIN = 100
"""Divisor of the moves judged without compiled loops: a move takes milliseconds then."""
NEAR_PLACES = 8
"""Places by which an instruction moves at most, in ``NEAR_SHIFTS`` of moves; calls between two that merge, in half of the merges."""
NEAR_SHIFTS = 0.75
"""Share of moves over ``NEAR_PLACES`` at most. In the others an instruction moves as far as it can."""
STALL_REACH = 16
"""Places before and after a stall that are near it."""
STALLS_AFTER = 200
"""Judged moves after which stalls are looked for anew."""
PARTS_OF_MOVES = 4
"""Equal parts of the moves. The first leaves operators in their order; the last may not raise the peak."""
ROUNDING = 1 + 1e-12
"""Factor of seconds up to which a list takes as long as before a move."""

MULTIPLIER, INCREMENT = 1103515245, 12345
"""The linear congruential generator of the C standard's example."""
DRAW_BITS = 31
"""Bits of its numbers. The high bits are used."""
ALONE = -1
"""The bucket class of a slot that never shares a call."""
LARGE_COPY = 2**40
"""Bytes whose copy takes so long that its launch does not count: it gives the seconds of a byte."""
NAMED_ITEMS = 10
"""Largest items at the peak of memory that are named."""

HALFWAY_CALLS = 2
"""Calls in flight that make values in which microbatches are summed: one holds the link, the other is next."""
NOTHING_OR_ALL = (0, UNLIMITED)
"""Bytes of a limit that is tried at its ends alone."""
LIMIT_LADDERS: Mapping[str, tuple[int, ...]] = {
    "summed_bytes": NOTHING_OR_ALL,
    "ahead_bytes": (0, 1, *(size * MIB for size in (25, 100, 400, 1600, 6400))),
    "aside_bytes": tuple(size * MIB for size in (0, 50, 200, 800)),
    "bucket_bytes": tuple(size * MIB for size in (0, 1, 6, 25, 100)),
}
"""Bytes that are tried for each limit: from nothing, and one call at a time, to more than a large layer."""
LADDER_HALVINGS = 7
"""Rungs below the highest where that exceeds the memory limit, or the bytes that count. Each is half of the one above it."""
SMALL_MODEL_BYTES = 100 * MIB
"""Bytes of a segment's calls up to which rungs are shares of them. Else all values of a small model would be one call."""
HOPELESS_FACTOR = 1.5
"""A plan that trails the incumbent by more than this factor has no other limits tried: they gain less."""
TRAILING_FACTOR = 1.02
"""A plan that trails the incumbent by more than this factor, and than it has gained, is left. Rungs beyond one that trails the best by as
much are not tried."""
NEAREST_RUNGS = 2
"""Rungs tried before a plan that trails is left."""
LOCAL_SEARCH_FACTOR = 1.1
"""A plan that trails the incumbent by more than this factor gets no local search."""
LIST_WORK = 16e-6
"""Work seconds for each instruction that is placed and simulated, or whose memory is measured."""
MOVE_WORK = 3.5e-9
"""Work seconds for each instruction of a list that a move is judged by."""
SMALL_OFFLOADED_SHARE = 1e-4
"""Share of the bytes that backward reads of forward. A value below that is not offloaded: its copies take little but latency."""
PACE_SHARE = 0.02
"""Share of the seconds of a list that a copy to the host may wait for those before it and still be on pace."""
EQUAL_SECONDS = 1e-9
"""Relative difference up to which seconds are the same. A split of a call must gain more."""
