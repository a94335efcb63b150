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
