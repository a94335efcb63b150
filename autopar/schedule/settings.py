"""The numbers that steer the passes of ``schedule``: unit, meaning, and the case they were set on."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 2**20
BUCKET_BYTES = 25 * MIB
"""Bytes of a bucket unless limits say otherwise: that of DistributedDataParallel."""
PREFETCH_BYTES = 400 * MIB
"""Bytes of calls in flight ahead of their readers unless limits say otherwise: one layer of Llama-3-8B in bfloat16."""
LEAD = 4.0
"""A gather may start this many times its own length before it must be under way. Set on Llama-3-8B, four layers, 8x8."""

SHORT_CHAIN = 0.25
"""An operator may be deferred when the longest chain of operators after it is less than this share of the seconds left in its segment."""
GAP_OVERSHOOT = 2.0
"""A deferred operator fills a gap when it is at most this many times as long."""
PULL_WINDOW = 64
"""Of this many next operators one is looked for to be pulled into a gap."""

DEFERRED_LEAST_BYTES, DEFERRED_SHARE, DEFERRED_MOST_BYTES = 2**10, 0.01, 2**16
"""A deferred loss may keep the first, or this share of what came in, but no more bytes than the last: so it never decides what fits."""

MOVE_WEIGHTS: Mapping[str, int] = {
    "shift": 12,           # an instruction goes earlier or later
    "shift_at_stall": 9,   # the same of one near a place where operators stand still
    "pull_to_stall": 3,    # one that stands behind such a place goes there
    "unbucket": 4,         # a part of a call becomes a call of its own
    "merge": 4,            # two calls become one
}  # fmt: skip
"""How often each kind of move of the local search is drawn. ``benchmarks/schedule_passes.py`` says what each buys."""
MOVES, MOVES_EACH, MOVES_WORK = 7_000, 40, 35_000_000
"""Moves that are judged at most: of a list, for each of its instructions, and times instructions in all. Set on the zoo on 2x4 and
Llama-3-8B on 8x8, whose 5,800 instructions take 0.5 CPU s a search so."""
TRIES = 3
"""Times as many moves are drawn as are judged, at most: of short lists most moves are none."""
PLAIN = 100
"""Without compiled loops one move in so many is judged: a move takes milliseconds then."""
NEAR_PLACES, NEAR_SHIFTS = 8, 0.75
"""Places by which an instruction is moved at most in this share of moves; in the others as many as it can."""
STALL_REACH, STALLS_AFTER = 16, 200
"""Places before and after a stall that are near it, and judged moves after which stalls are looked for anew."""
NEAR_BUCKETS = 8
"""Calls apart that two may be to become one, in half of the moves."""
FIXED_ORDER, MEMORY_LAST = 4, 4
"""Parts of the moves, as divisors: the first leave operators in their order, the last may not raise the peak."""
ROUNDING, GAIN_OF_SPLIT = 1 + 1e-12, 1 - 1e-9
"""Factors of seconds: what takes as much but for rounding, and what one call more has to come to."""
SHORT_SAVING = 1e-3
"""Share of a list's seconds below which a call less is not hoped for."""

DRAW_BITS = 31
"""Bits of a random number of the local search."""
ALONE = -1
"""The bucket class of a slot that never shares a call."""
LARGE_COPY = 2**40
"""Bytes whose copy takes so long that its launch does not count: it tells the seconds of a byte."""
NAMED_ITEMS = 10
"""The largest items at the peak of memory that are named."""

LIMIT_LADDERS: Mapping[str, tuple[int, ...]] = {
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
"""A plan that trails the incumbent by more than this factor gets no local search, unless fewer calls could save as much."""
PLACING_WORK = 16e-6
"""Work seconds for each instruction that is placed and simulated."""
MEMORY_WORK = 16e-6
"""Work seconds for each instruction whose memory is measured."""
MOVE_WORK = 6e-9
"""Work seconds for each instruction of a list that a move is judged by."""
EQUAL_SECONDS = 1e-9
"""Relative difference up to which seconds are the same."""
