"""The numbers that steer the passes of ``schedule``: unit, meaning, and the case they were set on."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 2**20
BUCKET_BYTES = 25 * MIB
"""Bytes of a bucket unless limits say otherwise: that of DistributedDataParallel."""
PREFETCH_BYTES = 400 * MIB
"""Bytes of calls in flight ahead of their readers unless limits say otherwise: one layer of Llama-3-8B in bfloat16."""
ASIDE_BYTES = 50 * MIB
"""Bytes that deferred operators keep unless limits say otherwise."""

SHORT_CHAIN = 0.25
"""Share of seconds: an operator may be deferred when the longest chain after it takes less than this of the seconds left in its segment."""
GAP_OVERSHOOT = 2.0
"""A deferred operator fills a gap when it is at most this many times as long."""
PULL_WINDOW = 64
"""The next operators among which one is sought that fills a gap."""

DEFERRED_BYTES = 2**10
"""Bytes that a deferred loss may keep: so few never decide what fits. Set on the zoo and Llama-3-8B, where 64 KiB defer no
more."""

MOVE_WEIGHTS: Mapping[str, int] = {
    "shift": 24,     # an instruction goes earlier or later
    "unbucket": 4,   # a part of a call becomes a call of its own
    "merge": 4,      # two calls become one
}  # fmt: skip
"""How often each kind of move of the local search is drawn; ``benchmarks/schedule_passes.py`` tells what each buys."""
MOVES, MOVES_EACH, MOVES_WORK = 7_000, 40, 35_000_000
"""The most moves that are judged: of a list, for each of its instructions, and moves times instructions. Set on the zoo on 2x4 and on
Llama-3-8B on 8x8, whose 5,800 instructions then take 0.5 CPU s."""
TRIES = 3
"""At most this many times as many moves are drawn as are judged: in short lists most moves change nothing."""
PLAIN = 100
"""Without compiled loops one move in this number is judged: it takes milliseconds then."""
NEAR_BY, NEAR_SHIFTS = 8, 0.75
"""The most places by which an instruction moves, in this share of moves; in the others it moves as far as it can. Also the most calls
between two that become one, in half of these moves."""
FIXED_ORDER, MEMORY_LAST = 4, 4
"""One in the first number of all moves comes first and leaves operators in their order. One in the second comes last and may not raise the
peak."""
ROUNDING = 1 + 1e-12
"""Factor of seconds up to which a list takes as long as before a move."""
SHORT_SAVING = 1e-3
"""Share of a list's seconds below which a call less is not hoped for."""

MULTIPLIER, INCREMENT, DRAW_BITS = 1103515245, 12345, 31
"""The linear congruential generator of the C standard's example, and the bits of its numbers. The high bits are used."""
ALONE = -1
"""The bucket class of a slot that never shares a call."""
LARGE_COPY = 2**40
"""Bytes whose copy takes so long that its launch does not count: it tells the seconds of a byte."""
NAMED = 10
"""The largest items at the peak of memory that are named."""

LADDERS: Mapping[str, tuple[int, ...]] = {
    "ahead_bytes": (0, 1, *(size * MIB for size in (25, 100, 400, 1600, 6400))),
    "aside_bytes": tuple(size * MIB for size in (0, 50, 200, 800)),
    "bucket_bytes": tuple(size * MIB for size in (0, 1, 6, 25, 100)),
}
"""Bytes that are tried for each limit: from nothing, and one call at a time, to more than a large layer."""
HALVINGS = 7
"""Where the largest rung is more than the memory there is, each rung is half of the one above it, from all of the memory down."""
LITTLE = 100 * MIB
"""Bytes of a segment's calls up to which rungs are shares of them instead: else all values of a small model would be one call."""
HOPELESS = 1.5
"""Trying other limits gains less than this factor: a plan that trails by more is left."""
NEAR = 1.02
"""A plan that trails the best by more than this factor is left once ``BESIDE`` rungs gained less. Beyond a rung that trails the best by as
much no other is tried."""
BESIDE = 2
"""Rungs tried before a plan that trails is left."""
REORDERED = 1.1
"""A plan that trails the best by more than this factor gets no local search, unless fewer calls could save as much."""
PLACED, MOVED = 16e-6, 6e-9
"""Work seconds for each instruction that is placed and simulated, or whose memory is counted; and that a judged move simulates."""
EQUAL = 1e-9
"""Relative difference up to which steps are the same."""
