"""The tables that ``kernels`` reads: a list's instructions, calls and storages, as arrays. Slots and heads: see ``kernels``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.schedule.kernels import clock, memory, moves, views
from autopar.solvers.arrays import VIEWS, Floats, Ints, on_arrays


class Rows(NamedTuple):
    """Lists of numbers: the list of ``one`` is ``entries[begins[one] : begins[one + 1]]``."""

    begins: Ints
    entries: Ints


class ClockTable(NamedTuple):
    """Columns of instructions for the clock, by number.

    Args:
        first: the microbatch from which each runs.
        works: 1 for runs and sums.
        seconds: of runs and sums.
        links: that each holds, as bits.
        late: 1 for slots whose wait does not hold up operators.
        launches: kernels that the host issues for each run and sum.
        reads_back: 1 for runs before which the host waits for the device.
        flying: of each slot the slots whose targets its start may read in flight.
        link_count: how many links there are.
        slowing: the links, as bits, that slow operators while they are busy: all but those of transfers to the host and back.
        slowdown, overlaps: the hardware's ``overlap_slowdown`` and ``launch_overlaps``.
        issue: the machine's ``issue_seconds``.
    """

    first: Ints
    works: Ints
    seconds: Floats
    links: Ints
    late: Ints
    launches: Ints
    reads_back: Ints
    flying: Rows
    link_count: int
    slowing: int
    slowdown: float
    overlaps: bool
    issue: float


class Timeline(NamedTuple):
    """The output of the clock, in seconds, by place in the list; and its state at each place, from which it can go on.

    Of several rounds each has its own part, one behind the other: a place more than there are instructions, and all slots.

    Args:
        begins, ends: of an instruction, or of a start's call.
        stalls: how long operators stand still for it.
        since: when operators come to it.
        busy, until: when links are idle, and when everything before it has ended.
        issued: what the host has issued.
        waited: seconds that the host has waited for the device.
        free_at: when each link is free: the links at the first place, then at the second.
        free: scratch, by link.
        arrives: by slot, when its call has ended.
        length: of each round the place that the clock came to.
    """

    begins: Floats
    ends: Floats
    stalls: Floats
    since: Floats
    busy: Floats
    until: Floats
    issued: Ints
    waited: Floats
    free_at: Floats
    free: Floats
    arrives: Floats
    length: Ints


class CallTable(NamedTuple):
    """Columns of slots.

    Args:
        classes: slots of one class may share a call; ``ALONE``.
        latency, beyond: seconds of a call of it alone: latency, and the rest.
        launch, slope: seconds of copies in or out of a buffer: the least, and for each byte.
        sent, came, target: bytes as it travels, as it arrives, and of its target.
        packs, unpacks: 1 where a call of it alone copies its sources into a buffer, and its targets out of one.
        gathers, reduces: 1 for an all-gather, and for an all-reduce.
        storage, source: of its target where that does not lie in a buffer with others, and of its source.
        in_place: 1 where a call of it alone reduces its source where it lies.
        laid: kernels that lay it out in a buffer, 0 where one kernel lays out all such slots.
        put: kernels that copy its target out of a buffer.
    """

    classes: Ints
    latency: Floats
    beyond: Floats
    launch: Floats
    slope: Floats
    sent: Ints
    came: Ints
    target: Ints
    packs: Ints
    unpacks: Ints
    gathers: Ints
    reduces: Ints
    storage: Ints
    source: Ints
    in_place: Ints
    laid: Ints
    put: Ints


class InstructionTable(NamedTuple):
    """Columns of instructions for memory and moves, by number.

    Args:
        segment: the segment of each, numbered in order.
        before, after: the instructions that each must follow and precede.
        needs: the storages that are needed until then.
        makes: the storages that begin to be there; of calls their targets'.
        takes: the storages that its result may lie over, in the order in which they are asked.
        workspace: bytes while it runs.
    """

    segment: Ints
    before: Rows
    after: Rows
    needs: Rows
    makes: Rows
    takes: Rows
    workspace: Ints


class StorageTable(NamedTuple):
    """The memory that values lie in, as long as nothing is written over.

    Args:
        bytes: of each.
        entered: 1 for storages that are there from the beginning.
        stays: 1 for storages that are never given back.
    """

    bytes: Ints
    entered: Ints
    stays: Ints


class ArraySchedule(NamedTuple):
    """The tables of a list. No order and no choice of buckets changes them.

    Args:
        rounds: pairs of a microbatch, and the number of microbatches that run the same instructions as it.
    """

    clock: ClockTable
    items: InstructionTable
    calls: CallTable
    storages: StorageTable
    rounds: Ints


class Order(NamedTuple):
    """The order of a list and the slots of each call. Moves change it.

    Args:
        items: numbers of instructions, the first ``length[0]`` of them.
        head: of each slot the head of its bucket.
        after: of each slot the next in its bucket, -1 behind the last.
    """

    items: Ints
    length: Ints
    head: Ints
    after: Ints


class CallCosts(NamedTuple):
    """The costs of each call, at its head. They follow from the slots that share it.

    Args:
        seconds, copies: of its start and of its wait.
        staging: bytes of its buffers beside targets.
        target: bytes of its targets.
        packs, unpacks: 1 where sources are copied into a buffer, targets out of one.
        issued_in, issued_out: what the host issues for its start and for its wait.
        home: of each storage the one that it is a part of.
    """

    seconds: Floats
    copies: Floats
    staging: Ints
    target: Ints
    packs: Ints
    unpacks: Ints
    issued_in: Ints
    issued_out: Ints
    home: Ints


class Lives(NamedTuple):
    """When memory is taken and given back.

    Args:
        begins, ends: of each storage that lies in itself, the places of the first and last instruction during which it is there: -1 where
            it is there before all of them, the list's length where it stays; -2 where it never is.
        lies: the storage that each lies in.
        size: bytes of each.
        stamps: of each storage the instruction that counted its end.
        over: of each place the storage that its result is written over, -1 where there is none.
        taken: bytes of storages and of calls' buffers at each place. A storage that is written over and the result both count.
        freed: bytes of these that end there.
        levels: bytes at each place, and behind the last, without what rests.
        entered: one number, the bytes that are there before all instructions.
        stamp: one number, of the last instruction that was counted.
    """

    begins: Ints
    ends: Ints
    lies: Ints
    size: Ints
    stamps: Ints
    over: Ints
    taken: Ints
    freed: Ints
    levels: Ints
    entered: Ints
    stamp: Ints


_TABLES = (
    Rows, ClockTable, Timeline, CallTable, InstructionTable, StorageTable, ArraySchedule, Order, CallCosts, Lives,
)  # fmt: skip
VIEWS.update((table, getattr(views, table.__name__)) for table in _TABLES)

COMPILED = not any(str(module.__file__).endswith(".py") for module in (clock, memory, moves, views))
"""Whether the loops run as machine code."""

_descend = on_arrays(moves.descend)
number_of_call = on_arrays(moves.number_of_call)
peak_bytes = on_arrays(memory.peak_bytes)
price_calls = on_arrays(memory.price_calls)
recount_memory = on_arrays(memory.recount_memory)
run_clock = on_arrays(clock.run_clock)
step_of = on_arrays(clock.step_of)


def descend(
    arrays: ArraySchedule, order: Order, costs: CallCosts, lives: Lives, random: Ints, weights: Ints, count: int, limit: int, captured: int
) -> tuple[float, int]:  # fmt: skip
    """See ``kernels.moves.descend``, which is given its scratch here."""
    before = Order(*(array.copy() for array in order))
    rounds = len(arrays.rounds) // 2
    known, timeline = (timeline_for(len(order.items), len(order.head), arrays.clock.link_count, rounds) for _ in range(2))
    scratch = [np.empty(size, dtype=np.int64) for size in (len(order.items), len(order.items), 3 * len(order.head) + 2)]
    return _descend(arrays, order, before, costs, known, timeline, lives, *scratch, random, weights, count, limit, captured)


def timeline_for(length: int, slots: int, links: int, rounds: int = 1) -> Timeline:
    """Room for the clock of a list."""
    places = rounds * (length + 1)
    columns, issued, waited = np.zeros((6, places)), np.zeros(places, dtype=np.int64), np.zeros(places)
    reached = np.zeros(rounds, dtype=np.int64)
    return Timeline._make([*columns, issued, waited, np.zeros(places * links), np.zeros(links), np.zeros(rounds * slots), reached])
