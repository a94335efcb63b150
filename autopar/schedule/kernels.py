"""The loops over a list as arrays: its clock, its memory, and the moves of the local search. All hot code of ``schedule`` is here.

Each part of a collective has a *slot*, whether it is a call of its own or shares a bucket. The start of slot n has number 2n, its wait
2n + 1; all other instructions have the numbers behind those. The first slot of a bucket is its *head*: its start and wait are the call's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.schedule.settings import (
    FIXED_ORDER,
    GAIN_OF_SPLIT,
    MEMORY_LAST,
    NEAR_BUCKETS,
    NEAR_PLACES,
    NEAR_SHIFTS,
    ROUNDING,
    STALL_REACH,
    STALLS_AFTER,
    TRIES,
)  # fmt: skip
from solvers.arrays import Floats, Ints
from solvers.compiled import loop

ALONE = -1
"""The bucket class of a slot that never shares a call."""
DRAW_BITS = 31
MULTIPLIER, INCREMENT, MASK = 1103515245, 12345, 2**DRAW_BITS - 1
"""Linear congruential generator of the C standard's example: the high bits of its 31 are used."""
SHIFT, SHIFT_AT_STALL, PULL_TO_STALL, UNBUCKET, MERGE = range(5)
"""The kinds of moves, as ``settings.MOVE_WEIGHTS`` lists them."""
NEAR_MOVES = round(64 * NEAR_SHIFTS)
"""Of 64."""


class Rows(NamedTuple):
    """Numbers of each of a count: those of ``one`` are ``entries[begins[one] : begins[one + 1]]``."""

    begins: Ints
    entries: Ints


class ClockTable(NamedTuple):
    """What the clock reads of instructions, by number.

    Args:
        first: the microbatch from which each runs.
        works: 1 for runs and sums.
        seconds: of those.
        links: that each holds, as bits.
        late: 1 for slots whose wait does not hold up operators.
        flying: of each slot the slots whose targets its start may read in flight.
        link_count: how many links there are.
        slowdown, overlaps: the hardware's ``overlap_slowdown`` and ``launch_overlaps``.
    """

    first: Ints
    works: Ints
    seconds: Floats
    links: Ints
    late: Ints
    flying: Rows
    link_count: int
    slowdown: float
    overlaps: bool


class Timeline(NamedTuple):
    """What the clock writes.

    Args:
        since: seconds, by place in the list: when operators come to it.
        begins, ends: of it, or of a start's call.
        stalls: how long operators stand still for it.
        free: by link, when it is free.
        arrives: by slot, when its call has ended.
    """

    since: Floats
    begins: Floats
    ends: Floats
    stalls: Floats
    free: Floats
    arrives: Floats


class CallTable(NamedTuple):
    """What is known of each slot.

    Args:
        classes: slots of one class may share a call; ``ALONE``.
        latency, beyond: seconds of a call of it alone: latency, and the rest.
        launch, slope: seconds of copies in or out of a buffer: the least, and for each byte.
        sent, came, target: bytes as it travels, as it arrives, and of its target.
        packs, unpacks: 1 where a call of it alone copies its sources into a buffer, and its targets out of one.
        gathers, reduces: 1 for an all-gather, and for an all-reduce.
        storage, source: of its target where that does not lie in a buffer with others, and of its source.
        in_place: 1 where a call of it alone reduces its source where it lies.
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


class InstructionTable(NamedTuple):
    """What memory and moves read of instructions, by number.

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
        entered, stays: 1 for those that are there from the beginning, and for those that are never given back.
    """

    bytes: Ints
    entered: Ints
    stays: Ints


class ArraySchedule(NamedTuple):
    """What stays as it is whatever the order of the list and whichever calls share a bucket.

    Args:
        rounds: pairs of a microbatch, and how often what runs up to it is run.
    """

    clock: ClockTable
    items: InstructionTable
    calls: CallTable
    storages: StorageTable
    rounds: Ints


class Order(NamedTuple):
    """The order of a list and who shares a call: what moves change.

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
    """What follows for each call from who shares it, at its head.

    Args:
        seconds, copies: of its start and of its wait.
        staging: bytes of its buffers beside targets.
        target: bytes of its targets.
        packs, unpacks: 1 where sources are copied into a buffer, targets out of one.
        home: of each storage the one that it is a part of.
    """

    seconds: Floats
    copies: Floats
    staging: Ints
    target: Ints
    packs: Ints
    unpacks: Ints
    home: Ints


class Lives(NamedTuple):
    """When memory is taken and given back.

    Args:
        begins, ends: of each storage the places of the first and last instruction during which it is there: -1 where it is there before
            all of them, the list's length where it stays; -2 where it never is.
        lies: the storage that each lies in.
        size: bytes of each.
        started: the place of each call's start, at its head.
        over: of each place the storage that its result is written over, -1 where there is none.
        levels: bytes at each place, and behind the last, without what rests.
    """

    begins: Ints
    ends: Ints
    lies: Ints
    size: Ints
    started: Ints
    over: Ints
    levels: Ints


def number_of_call(order: Order, slots: int, item: int) -> int:
    """The number of the call's own start or wait, of one of a slot; any other is itself."""
    return item if item >= 2 * slots else 2 * order.head[item >> 1] + (item & 1)


# ------------------------------------------------------------------------------------------------------------------------- the clock


@loop
def run_clock(clock: ClockTable, order: Order, starts: Floats, copies: Floats, last: int, timeline: Timeline) -> float:
    """Seconds of one microbatch, in which everything runs that does up to microbatch ``last``: see ``simulation``.

    Args:
        starts, copies: seconds of each call and of its copies, at its head.
        timeline: written to.
    """
    slots = len(order.head)
    now, busy, until, rate = 0.0, 0.0, 0.0, 1.0 - clock.slowdown
    for link in range(clock.link_count):
        timeline.free[link] = 0.0
    for slot in range(slots):
        timeline.arrives[slot] = 0.0
    for at in range(order.length[0]):
        item = order.items[at]
        timeline.since[at], timeline.begins[at], timeline.ends[at], timeline.stalls[at] = now, now, now, 0.0
        if clock.first[item] > last:
            continue
        links, slot, seconds = clock.links[item], item >> 1, 0.0
        if item >= 2 * slots:
            if not clock.works[item]:
                continue
            seconds = clock.seconds[item]
            if links:
                for link in range(clock.link_count):
                    if (links >> link) & 1:
                        now = max(now, timeline.free[link])
                timeline.begins[at] = now
                now = now + seconds
                for link in range(clock.link_count):
                    if (links >> link) & 1:
                        timeline.free[link] = now
                timeline.ends[at] = now
                busy, until = max(busy, now), max(until, now)
                continue
        elif item & 1:
            if not clock.late[slot] and timeline.arrives[slot] > now:
                timeline.stalls[at] = timeline.arrives[slot] - now
                now = timeline.arrives[slot]
            seconds = copies[slot]
        else:
            begin, part = now, slot
            while part >= 0:
                for place in range(clock.flying.begins[part], clock.flying.begins[part + 1]):
                    begin = max(begin, timeline.arrives[order.head[clock.flying.entries[place]]])
                part = order.after[part]
            if not clock.overlaps:
                timeline.stalls[at] = begin - now
                now = begin
            for link in range(clock.link_count):
                if (links >> link) & 1:
                    begin = max(begin, timeline.free[link])
            end = begin + starts[slot]
            for link in range(clock.link_count):
                if (links >> link) & 1:
                    timeline.free[link] = end
            timeline.arrives[slot] = end
            timeline.begins[at], timeline.ends[at] = begin, end
            busy, until = max(busy, end) if links else busy, max(until, end)
            continue
        if busy <= now or clock.slowdown == 0.0 or seconds == 0.0:
            now = now + seconds
        elif seconds <= rate * (busy - now):
            now = now + seconds / rate
        else:
            now = busy + seconds - rate * (busy - now)
        timeline.ends[at] = now
        until = max(until, now)
    return until


def step_of(arrays: ArraySchedule, order: Order, costs: CallCosts, timeline: Timeline) -> float:
    """Seconds of a step without the optimizer's: all microbatches, each begun when the one before has ended."""
    total = 0.0
    for number in range(0, len(arrays.rounds), 2):
        seconds = run_clock(arrays.clock, order, costs.seconds, costs.copies, arrays.rounds[number], timeline)
        total += arrays.rounds[number + 1] * seconds
    return total


# ------------------------------------------------------------------------------------------------------------------------- its memory


def price_call(arrays: ArraySchedule, order: Order, costs: CallCosts, head: int) -> None:
    """Says anew what follows from who shares a call."""
    calls = arrays.calls
    beyond, sent, came, target, unpacks = 0.0, 0, 0, 0, 0
    shared = order.after[head] >= 0
    slot = head
    while slot >= 0:
        beyond += calls.beyond[slot]
        sent += calls.sent[slot]
        came += calls.came[slot]
        target += calls.target[slot]
        unpacks = max(unpacks, calls.unpacks[slot])
        slot = order.after[slot]
    packs = 1 if shared else calls.packs[head]
    if shared and calls.gathers[head] > 0:
        unpacks = 1
    copied = (sent if packs else 0) + (came if unpacks else 0)
    copies = calls.slope[head] * copied
    copies = max(copies, calls.launch[head]) if arrays.clock.overlaps else copies + calls.launch[head]
    costs.seconds[head] = calls.latency[head] + beyond
    costs.copies[head] = copies if copied else 0.0
    costs.staging[head] = (sent if packs > calls.reduces[head] else 0) + (came if unpacks else 0)
    costs.target[head], costs.packs[head], costs.unpacks[head] = target, packs, unpacks
    slot = head
    while slot >= 0:
        own = calls.storage[slot]
        costs.home[own] = own if unpacks else calls.storage[head]
        slot = order.after[slot]
    if calls.in_place[head] > 0 and not shared:
        costs.home[calls.storage[head]] = calls.source[head]


def home_of(costs: CallCosts, storage: int) -> int:
    """The storage that one is a part of in the end."""
    while costs.home[storage] != storage:
        storage = costs.home[storage]
    return storage


@loop
def peak_bytes(arrays: ArraySchedule, order: Order, costs: CallCosts, lives: Lives) -> int:
    """Bytes of a rank at the peak without what rests, once memory is taken over where it may be (``InstructionTable.takes``).

    Args:
        lives: written to.
    """
    items, calls, storages, count = arrays.items, arrays.calls, arrays.storages, order.length[0]
    slots = len(order.head)
    for storage in range(len(lives.begins)):
        lives.begins[storage] = -1 if storages.entered[storage] else -2
        lives.ends[storage] = -1
        lives.size[storage] = storages.bytes[storage]
    for storage in range(len(lives.begins)):
        home = home_of(costs, storage)
        lives.lies[storage] = home
        if storages.stays[storage]:
            lives.ends[home] = count
    for at in range(count + 2):
        lives.levels[at] = 0
    for at in range(count):
        item = order.items[at]
        part, called = item, item < 2 * slots
        slot = item >> 1
        lives.over[at] = -1
        while True:
            for place in range(items.needs.begins[part], items.needs.begins[part + 1]):
                needed = lives.lies[items.needs.entries[place]]
                lives.ends[needed] = max(lives.ends[needed], at)
            if not called or costs.unpacks[slot] == (item & 1):
                for place in range(items.makes.begins[part], items.makes.begins[part + 1]):
                    made = lives.lies[items.makes.entries[place]]
                    if lives.begins[made] == -2:
                        lives.begins[made] = at
            if not called or order.after[part >> 1] < 0:
                break
            part = 2 * order.after[part >> 1] + (item & 1)
        if not called:
            if items.workspace[item] > 0:
                lives.levels[at] += items.workspace[item]
                lives.levels[at + 1] -= items.workspace[item]
        elif item & 1:
            lives.levels[lives.started[slot]] += costs.staging[slot]
            lives.levels[at + 1] -= costs.staging[slot]
            if not costs.packs[slot]:
                source = lives.lies[calls.source[slot]]
                lives.ends[source] = max(lives.ends[source], at)
        else:
            lives.started[slot] = at
            if not costs.unpacks[slot] and lives.lies[calls.storage[slot]] == calls.storage[slot]:
                lives.size[calls.storage[slot]] = costs.target[slot]
    for at in range(count):
        item = order.items[at]
        for place in range(items.takes.begins[item], items.takes.begins[item + 1]):
            storage = lives.lies[items.takes.entries[place]]
            if lives.ends[storage] == at:
                result = items.makes.entries[items.makes.begins[item]]
                lives.lies[result], lives.ends[storage] = storage, lives.ends[result]
                lives.over[at] = items.takes.entries[place]
                break
    for storage in range(len(lives.begins)):
        if lives.begins[storage] >= -1 and lives.lies[storage] == storage:
            if lives.ends[storage] < 0:
                lives.ends[storage] = count
            lives.levels[max(lives.begins[storage], 0)] += lives.size[storage]
            lives.levels[lives.ends[storage] + 1] -= lives.size[storage]
    held, most = 0, 0
    for at in range(count + 1):
        held += lives.levels[at]
        lives.levels[at] = held
        most = max(most, held)
    return most


# -------------------------------------------------------------------------------------------------------------------------- its moves


def draw(random: Ints, count: int) -> int:
    """A number below a count."""
    random[0] = (random[0] * MULTIPLIER + INCREMENT) & MASK
    return int(random[0] * count) >> DRAW_BITS


def draw_kind(random: Ints, weights: Ints) -> int:
    """The kind of a move."""
    drawn, kind = draw(random, weights[len(weights) - 1]), 0
    while drawn >= weights[kind]:
        kind += 1
    return kind


@loop
def descend(
    arrays: ArraySchedule, order: Order, before: Order, costs: CallCosts, timeline: Timeline, lives: Lives, random: Ints, weights: Ints,
    moves: int, limit: int, captured: int,
) -> tuple[float, int]:  # fmt: skip
    """Makes moves as long as the list takes no more seconds and holds no more bytes than it may; the seconds, and the moves judged.

    Moves that gain nothing are made too, but for more calls: others may come to something after them. A list that holds more than it may
    is changed as long as it holds no more than before, and takes no more where it holds as much. The last moves may not raise the peak.

    What the search proves of memory, it proves of operators as they were captured. So operators change their order only where a rank
    holds no less then than with them as captured.

    Args:
        order: written to.
        before: room for a copy of the order.
        random: the state of the generator of moves.
        weights: how often each kind of move is drawn, that of those before it added.
        moves: judged at most.
        limit: bytes on a rank, without what rests.
        captured: 1 where operators are in captured order; otherwise no less is held than now.
    """
    slots, room = len(order.head), len(order.items)
    stamps, places, stalls = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(3 * slots + 2, dtype=np.int64)
    least, held = step_of(arrays, order, costs, timeline), peak_bytes(arrays, order, costs, lives)
    for item in range(room):
        stamps[item] = -1
    cap, lighter = limit, moves - moves // MEMORY_LAST
    fixed, lightest, floor = captured, held, 0 if captured > 0 else held
    judged, tried, found, looked = 0, 0, 0, 0
    while judged < moves and tried < TRIES * moves:
        tried += 1
        if fixed > 0 and judged >= moves // FIXED_ORDER and held <= limit:
            held = peak_bytes(arrays, order, costs, lives)
            lightest = min(lightest, held)
            fixed, floor = 0, lightest
        if judged >= lighter and cap == limit:
            held = peak_bytes(arrays, order, costs, lives)
            cap = min(held, limit)
        if judged >= looked:
            found, looked = find_stalls(arrays, order, costs, timeline, places, stalls), judged + STALLS_AFTER
        kind, seconds = SHIFT if slots == 0 else draw_kind(random, weights), -2.0
        if kind <= PULL_TO_STALL:
            begin, earlier = draw(random, order.length[0]), draw(random, 2)
            reach = 1 + draw(random, NEAR_PLACES if draw(random, 64) < NEAR_MOVES else order.length[0])
            if found > 0 and kind > SHIFT:
                at = min(stalls[draw(random, found)], order.length[0] - 1)  # calls may have gone since they were looked for
                begin = at + (draw(random, 2 * STALL_REACH) - STALL_REACH if draw(random, 2) > 0 else 0)
                if kind == PULL_TO_STALL:
                    begin, earlier = at + draw(random, order.length[0] - at), 1
                    reach = max(begin - at, 1)
                begin = min(max(begin, 0), order.length[0] - 1)
            end = shifted(arrays, order, stamps, tried, begin, reach, earlier, fixed)
            if end != begin:
                seconds = accept(arrays, order, costs, timeline, lives, least, held, floor, cap)
                if seconds < 0.0:
                    slide(order, end, begin)
        else:
            seconds = regrouped(arrays, order, before, costs, timeline, lives, places, random, kind, least, held, floor, cap)
        judged += 1 if seconds > -2.0 else 0
        if seconds >= 0.0:
            least = min(least, seconds)
            if held > limit or judged >= lighter:
                held = peak_bytes(arrays, order, costs, lives)
                cap = min(held, limit) if judged >= lighter else limit
    return least, judged


def accept(
    arrays: ArraySchedule, order: Order, costs: CallCosts, timeline: Timeline, lives: Lives, most: float, held: int, least: int, limit: int
) -> float:  # fmt: skip
    """Seconds that a list takes; -1 where that is more than it may be, or it holds more, or less.

    Args:
        most: seconds that it may take.
        held: bytes that it held before.
        least, limit: bytes that it may hold: where it held more, less is worth any time.
    """
    seconds = step_of(arrays, order, costs, timeline)
    if held <= limit and seconds > most * ROUNDING:
        return -1.0
    now = peak_bytes(arrays, order, costs, lives)
    if held <= limit:
        return seconds if now >= least and now <= limit else -1.0
    return seconds if now < held or (now == held and seconds <= most * ROUNDING) else -1.0


def find_stalls(arrays: ArraySchedule, order: Order, costs: CallCosts, timeline: Timeline, places: Ints, stalls: Ints) -> int:
    """Where operators stand still: the places of waits and of the starts of their calls, and of starts that wait for what they read; how
    many places.

    Args:
        places, stalls: written to: where each instruction is, and what is found.
    """
    slots, found = len(order.head), 0
    step_of(arrays, order, costs, timeline)
    for at in range(order.length[0]):
        item = order.items[at]
        places[item] = at
        if item < 2 * slots and timeline.stalls[at] > 0.0:
            stalls[found] = at
            found += 1
            if item & 1:
                stalls[found] = places[item - 1]
                found += 1
    return found


def shifted(arrays: ArraySchedule, order: Order, stamps: Ints, stamp: int, begin: int, reach: int, earlier: int, fixed: int) -> int:
    """Moves an instruction so many places, or as many as what it must follow or precede allows; the place where it then is.

    Args:
        fixed: 1 where operators stay in their order.
    """
    slots, items, works = len(order.head), order.items, arrays.clock.works
    item, end = items[begin], begin
    rows = arrays.items.before if earlier else arrays.items.after
    part = item
    while part >= 0:
        for place in range(rows.begins[part], rows.begins[part + 1]):
            stamps[number_of_call(order, slots, rows.entries[place])] = stamp
        part = 2 * order.after[part >> 1] + (item & 1) if item < 2 * slots and order.after[part >> 1] >= 0 else -1
    segment, step, last = arrays.items.segment[item], -1 if earlier else 1, 0 if earlier else order.length[0] - 1
    while end != last and (end - begin) * step < reach:
        other = items[end + step]
        if stamps[other] == stamp or arrays.items.segment[other] != segment or fixed * works[item] * works[other] > 0:
            break
        end += step
    slide(order, begin, end)
    return end


def slide(order: Order, begin: int, end: int) -> None:
    """Moves the instruction at one place to another, those between by one."""
    item = order.items[begin]
    at = begin
    while at < end:
        order.items[at] = order.items[at + 1]
        at += 1
    while at > end:
        order.items[at] = order.items[at - 1]
        at -= 1
    order.items[end] = item


def copy(order: Order, to: Order) -> None:
    """Writes an order over another."""
    to.length[0] = order.length[0]
    for at in range(order.length[0]):
        to.items[at] = order.items[at]
    for slot in range(len(order.head)):
        to.head[slot] = order.head[slot]
        to.after[slot] = order.after[slot]


def regrouped(
    arrays: ArraySchedule, order: Order, before: Order, costs: CallCosts, timeline: Timeline, lives: Lives, places: Ints, random: Ints,
    kind: int, most: float, held: int, least: int, limit: int,
) -> float:  # fmt: skip
    """A part of a call becomes a call of its own, or two calls become one; what the list takes then, -1 where that was undone, -2 where
    nothing was tried. All-reduces do not part: alone each may be made where its source lies, which only the passes tell.

    Args:
        before, places: written to: the order before, and where everything was in it.
        kind: of the move.
        most, held, least, limit: see ``accept``.
    """
    slot = draw(random, len(order.head))
    mine = order.head[slot]
    other = slot if kind == UNBUCKET else draw_partner(arrays, order, mine, random)
    if other < 0 or (kind == UNBUCKET and (order.after[mine] < 0 or arrays.calls.reduces[slot] > 0)):
        return -2.0
    copy(order, before)
    for at in range(order.length[0]):
        places[order.items[at]] = at
    rest = -1
    if kind == UNBUCKET:
        rest = before.after[mine] if slot == mine else mine
        leave(order, slot, rest)
    else:
        append(order, other, mine)
    seconds = -2.0
    if place_call(arrays, order, before, places, mine, rest, other, random):
        if rest >= 0:
            price_call(arrays, order, costs, rest)
        price_call(arrays, order, costs, other)
        most = most * GAIN_OF_SPLIT if kind == UNBUCKET else most
        seconds = accept(arrays, order, costs, timeline, lives, most, held, least, limit)
    if seconds < 0.0:
        copy(before, order)
        price_call(arrays, order, costs, mine)
        if order.head[other] != mine:
            price_call(arrays, order, costs, other)
    return seconds


def draw_partner(arrays: ArraySchedule, order: Order, mine: int, random: Ints) -> int:
    """Another call that this one may share a buffer with, mostly one near it; -1 where there is none."""
    slots, classes = len(order.head), arrays.calls.classes
    if classes[mine] == ALONE:
        return -1
    at = mine + draw(random, min(NEAR_BUCKETS, slots) if draw(random, 2) > 0 else slots)
    for _ in range(slots):
        at = at + 1 if at + 1 < slots else at + 1 - slots
        if order.head[at] == at and at != mine and classes[at] == classes[mine]:
            return at
    return -1


def leave(order: Order, slot: int, rest: int) -> None:
    """Makes a slot a call of its own.

    Args:
        rest: the head of the call that it leaves, once it is gone.
    """
    if slot == order.head[slot]:
        one = rest
        while one >= 0:
            order.head[one] = rest
            one = order.after[one]
    else:
        one = rest
        while order.after[one] != slot:
            one = order.after[one]
        order.after[one] = order.after[slot]
    order.head[slot], order.after[slot] = slot, -1


def append(order: Order, first: int, second: int) -> None:
    """Makes one call of two, by their heads."""
    last = first
    while order.after[last] >= 0:
        last = order.after[last]
    order.after[last] = second
    one = second
    while one >= 0:
        order.head[one] = first
        one = order.after[one]


def place_call(
    arrays: ArraySchedule, order: Order, before: Order, places: Ints, mine: int, rest: int, call: int, random: Ints
) -> bool:  # fmt: skip
    """Gives a call its place after who shares it has changed; whether there is one.

    Args:
        before, places: the order before, and where everything was in it.
        mine, rest: the head of the call that was left then, and now; -1 where nothing is left of it.
    """
    slots, items, count, head = len(order.head), arrays.items, before.length[0], before.head
    segment, first, behind = items.segment[2 * call], 0, count
    while items.segment[before.items[first]] != segment:
        first += 1
    while items.segment[before.items[behind - 1]] != segment:
        behind -= 1
    after_start, until_start = first - 1, behind
    after_wait, until_wait = after_start, until_start
    slot = call
    while slot >= 0:
        for wait in range(2):
            one = 2 * slot + wait
            for place in range(items.before.begins[one], items.before.begins[one + 1]):
                other = items.before.entries[place]
                if other >= 2 * slots or order.head[other >> 1] != call:
                    stands = places[number_of_call(before, slots, other)]
                    after_start = after_start if wait else max(after_start, stands)
                    after_wait = max(after_wait, stands) if wait else after_wait
            for place in range(items.after.begins[one], items.after.begins[one + 1]):
                other = items.after.entries[place]
                if other >= 2 * slots or order.head[other >> 1] != call:
                    stands = places[number_of_call(before, slots, other)]
                    until_start = until_start if wait else min(until_start, stands)
                    until_wait = min(until_wait, stands) if wait else until_wait
        slot = order.after[slot]
    until_start = min(until_start, until_wait)
    if after_start >= until_start or after_wait >= until_wait:
        return False
    here = call if head[call] == call else mine
    start = places[2 * (here if draw(random, 2) > 0 else mine)]
    wait = places[2 * (here if draw(random, 2) > 0 else mine) + 1]
    if draw(random, 2) > 0:
        start = after_start + draw(random, until_start - after_start)
    start = min(max(start, after_start), until_start - 1)
    if draw(random, 2) > 0:
        wait = until_wait - draw(random, until_wait - after_wait)
    wait = min(max(wait, max(after_wait, start) + 1), until_wait)
    if wait <= start:
        return False
    made = 0
    if start < 0:
        order.items[0] = 2 * call
        made = 1
    for at in range(count + 1):
        if at == wait:
            order.items[made] = 2 * call + 1
            made += 1
        if at < count:
            item = before.items[at]
            led = item >> 1 if item < 2 * slots else -1
            if led < 0 or (led != mine and led != call):
                order.items[made] = item
                made += 1
            elif led == mine and rest >= 0:
                order.items[made] = 2 * rest + (item & 1)
                made += 1
        if at == start:
            order.items[made] = 2 * call
            made += 1
    order.length[0] = made
    return True
