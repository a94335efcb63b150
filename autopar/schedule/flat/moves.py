"""Moves of a list, one after another, as a loop that runs as machine code: an instruction goes to another place, two calls become one, a
part of a call goes to another call or becomes a call of its own."""

from __future__ import annotations

import numpy as np

from autopar.schedule.flat.arrays import ALONE, Flat, Order
from autopar.schedule.flat.costs import Calls, join_up, most_held, represents, taken
from solvers.arrays import Ints
from solvers.compiled import loop

DRAWS, BITS = 6, 31
"""Numbers below 2**BITS that are drawn for a move."""
NEAR = 8
"""Places by which most instructions are moved, and calls apart that mostly become one, at most."""
LOOKED, AROUND = 200, 16
"""Moves after which it is looked anew where operators stand still, and how many places before that and after it are near."""
SHIFTS, SPLITS, PASSES = 12, 13, 14
"""Of 16 moves the numbers below the first are those of instructions, then those to calls of their own, then those from one call to
another; in the others two calls become one."""
FIXED, LIGHTER = 4, 4
"""Such a part of the moves, the first, leaves operators in their order, and such a part, the last, may not raise what is held."""
SAME, LESS = 1 + 1e-12, 1 - 1e-9
"""What takes as much, but for rounding, and what more calls have to come to."""


def descended(flat: Flat, order: Order, draws: Ints, limit: int, *, captured: bool) -> float:
    """Makes moves of a list, as long as it takes no more and holds no more than it may; what it takes in the end. Those that gain nothing
    are made too, but for more calls: others may come to something after them. Where it holds more than it may, moves are made as long as
    it holds no more than before, and takes no more where it holds as much; and so are the last of them, for less memory where it takes the
    same.

    What the search proves of memory, it proves of operators as they were captured (``search.lives``). So they change their order only
    where a rank holds no less then than with them as captured.

    Args:
        order: written to.
        draws: ``DRAWS`` for each move that is tried.
        limit: bytes on a rank.
        captured: operators are in that order now; otherwise no less is held than now.
    """
    before = Order(*(array.copy() for array in order))
    return descend(flat, order, before, calls_of(flat, order), draws, limit, int(captured))


def calls_of(flat: Flat, order: Order) -> Calls:
    """What follows from who shares a call."""
    slots, storages = len(order.leader), len(flat.storages.bytes)
    floats, ints = np.zeros((2, slots)), np.zeros((4, slots), dtype=np.int64)
    calls = Calls._make([*floats, *ints, np.arange(storages)])
    for slot in np.flatnonzero(order.leader == np.arange(slots)):
        join_up(flat, order, calls, int(slot))
    return calls


@loop
def descend(flat: Flat, order: Order, before: Order, calls: Calls, draws: Ints, limit: int, captured: int) -> float:
    """See ``descended``.

    Args:
        before: a copy of the order, to be written to.
    """
    slots, room = len(order.leader), len(order.items)
    stamps, places, where = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(3 * slots + 2, dtype=np.int64)
    least, held, found, looked = taken(flat, order, calls), most_held(flat, order, calls), 0, 0
    for item in range(room):
        stamps[item] = -1
    cap, lighter = limit, len(draws) - len(draws) // LIGHTER
    fixed, lightest, floor = captured, held, 0 if captured > 0 else held
    for move in range(0, len(draws), DRAWS):
        if fixed > 0 and move >= len(draws) // FIXED:
            held = most_held(flat, order, calls)
            fixed, lightest = 1 if held > limit else 0, min(lightest, held)
            floor = 0 if fixed > 0 else lightest
        if move >= lighter and cap == limit:
            held = most_held(flat, order, calls)
            cap = min(held, limit)
        draw = draws[move : move + DRAWS]
        if move >= looked:
            found, looked = stalls(flat, order, calls, places, where), move + DRAWS * LOOKED
        if draw[0] & 15 < SHIFTS or slots == 0:
            begin, earlier = below(draw[1], order.length[0]), draw[0] & 64
            reach = 1 + below(draw[2], NEAR if draw[0] & 48 else order.length[0])
            if found > 0 and draw[0] & 512 > 0:
                at = min(where[below(draw[3], found)], order.length[0] - 1)  # calls may have gone since it was looked
                begin = at + (below(draw[4], 2 * AROUND) - AROUND if draw[0] & 1024 else 0)
                if draw[0] & 6144 == 4096:  # what comes later, to where operators stand still
                    begin, earlier = at + below(draw[4], order.length[0] - at), 1
                    reach = max(begin - at, 1)
                begin = min(max(begin, 0), order.length[0] - 1)
            end = shifted(flat, order, stamps, move, begin, reach, earlier, fixed)
            seconds = fitting(flat, order, calls, least, held, floor, cap) if end != begin else -1.0
            if seconds < 0.0:
                slide(order, end, begin)
        else:
            seconds = regrouped(flat, order, before, calls, places, draw, least, held, floor, cap)
        if seconds >= 0.0:
            least = min(least, seconds)
            if held > limit or move >= lighter:
                held = most_held(flat, order, calls)
                cap = min(held, limit) if move >= lighter else limit
    return least


def copy(order: Order, to: Order) -> None:
    """Writes an order over another."""
    to.length[0] = order.length[0]
    for at in range(order.length[0]):
        to.items[at] = order.items[at]
    for slot in range(len(order.leader)):
        to.leader[slot] = order.leader[slot]
        to.following[slot] = order.following[slot]


def regrouped(
    flat: Flat, order: Order, before: Order, calls: Calls, places: Ints, draw: Ints, most: float, held: int, least: int, limit: int
) -> float:  # fmt: skip
    """A part of a call becomes a call of its own or goes to another, or two calls become one; what the list takes then, -1 where nothing
    was changed. All-reduces do not part: alone each may be made where its source lies, which only the passes tell.

    Args:
        before, places: written to: the order before, and where everything was in it.
        draw: the move's.
        most, held, least, limit: see ``fitting``.
    """
    kind, slot = draw[0] & 15, below(draw[1], len(order.leader))
    mine = order.leader[slot]
    alone, other = order.following[mine] < 0 or flat.slots.reduces[slot] > 0, slot
    if kind >= SPLITS:
        other = partner(flat, order, mine, draw[2])
    if other < 0 or (kind < SPLITS and alone):
        return -1.0
    copy(order, before)
    for at in range(order.length[0]):
        places[order.items[at]] = at
    rest = -1
    if kind < PASSES and not alone:
        rest = before.following[mine] if slot == mine else mine
        leave(order, slot, rest)
        if kind >= SPLITS:
            append(order, other, slot)
    else:
        append(order, other, mine)
    seconds = -1.0
    if put(flat, order, before, places, mine, rest, other, draw):
        if rest >= 0:
            join_up(flat, order, calls, rest)
        join_up(flat, order, calls, other)
        seconds = fitting(flat, order, calls, most * LESS if kind < SPLITS else most, held, least, limit)
    if seconds < 0.0:
        copy(before, order)
        join_up(flat, order, calls, mine)
        if order.leader[other] != mine:
            join_up(flat, order, calls, other)
    return seconds


def stalls(flat: Flat, order: Order, calls: Calls, places: Ints, where: Ints) -> int:
    """Where operators stand still: the places of waits, and of the starts of their calls; and of starts that wait for what they read; how
    many places.

    Args:
        places, where: written to: where each instruction is, and what is found.
    """
    slots, found, now, ends = len(order.leader), 0, 0.0, np.empty(len(order.leader) + 1)
    free = np.empty(flat.link_count + 1)
    for slot in range(slots):
        ends[slot] = 0.0
    for link in range(flat.link_count):
        free[link] = 0.0
    for at in range(order.length[0]):
        item = order.items[at]
        places[item] = at
        if item >= 2 * slots:
            now += flat.items.seconds[item]
        elif item & 1:
            if ends[item >> 1] > now and not flat.slots.late[item >> 1]:
                now = ends[item >> 1]
                where[found], where[found + 1] = at, places[item - 1]
                found += 2
            now += calls.copies[item >> 1]
        else:
            begin, part = now, item >> 1
            while part >= 0:
                for place in range(flat.flying.begins[part], flat.flying.begins[part + 1]):
                    begin = max(begin, ends[order.leader[flat.flying.entries[place]]])
                part = order.following[part]
            if begin > now and not flat.overlaps:
                now = begin
                where[found] = at
                found += 1
            for link in range(flat.link_count):
                if (flat.items.links[item] >> link) & 1:
                    begin = max(begin, free[link])
            ends[item >> 1] = begin + calls.seconds[item >> 1]
            for link in range(flat.link_count):
                if (flat.items.links[item] >> link) & 1:
                    free[link] = ends[item >> 1]
    return found


def below(draw: int, count: int) -> int:
    """A number below a count."""
    return (draw * count) >> BITS


def fitting(flat: Flat, order: Order, calls: Calls, most: float, held: int, least: int, limit: int) -> float:
    """Seconds that a list takes; -1 where that is more than it may be, or it holds more, or less.

    Args:
        most: seconds that it may take.
        held: bytes that it held before.
        least, limit: those that it may hold: where it held more, less is worth any time.
    """
    seconds = taken(flat, order, calls)
    if held <= limit and seconds > most * SAME:
        return -1.0
    now = most_held(flat, order, calls)
    if held <= limit:
        return seconds if now >= least and now <= limit else -1.0
    return seconds if now < held or (now == held and seconds <= most * SAME) else -1.0


def shifted(flat: Flat, order: Order, stamps: Ints, stamp: int, begin: int, reach: int, earlier: int, fixed: int) -> int:
    """Moves an instruction so many places, or as many as what it must follow or precede allows; the place where it then is.

    Args:
        fixed: 1 where operators stay in their order.
    """
    slots, items = len(order.leader), order.items
    item, end = items[begin], begin
    rows = flat.items.before if earlier else flat.items.after
    part = item
    while part >= 0:
        for place in range(rows.begins[part], rows.begins[part + 1]):
            stamps[represents(order, slots, rows.entries[place])] = stamp
        part = 2 * order.following[part >> 1] + (item & 1) if item < 2 * slots and order.following[part >> 1] >= 0 else -1
    half, step, last = flat.items.half[item], -1 if earlier else 1, 0 if earlier else order.length[0] - 1
    while end != last and (end - begin) * step < reach:
        other = items[end + step]
        if stamps[other] == stamp or flat.items.half[other] != half or fixed * flat.items.works[item] * flat.items.works[other] > 0:
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


def partner(flat: Flat, order: Order, mine: int, draw: int) -> int:
    """Another call that this one may share a buffer with, mostly one near it; -1 where there is none."""
    slots = len(order.leader)
    if flat.slots.classes[mine] == ALONE:
        return -1
    at = mine + below(draw, min(NEAR, slots) if draw & 1 else slots)
    for _ in range(slots):
        at = at + 1 if at + 1 < slots else at + 1 - slots
        if order.leader[at] == at and at != mine and flat.slots.classes[at] == flat.slots.classes[mine]:
            return at
    return -1


def leave(order: Order, slot: int, rest: int) -> None:
    """Makes a slot a call of its own.

    Args:
        rest: the leader of the call that it leaves, once it is gone.
    """
    if slot == order.leader[slot]:
        one = rest
        while one >= 0:
            order.leader[one] = rest
            one = order.following[one]
    else:
        one = rest
        while order.following[one] != slot:
            one = order.following[one]
        order.following[one] = order.following[slot]
    order.leader[slot], order.following[slot] = slot, -1


def append(order: Order, first: int, second: int) -> None:
    """Makes one call of two, by their leaders."""
    last = first
    while order.following[last] >= 0:
        last = order.following[last]
    order.following[last] = second
    one = second
    while one >= 0:
        order.leader[one] = first
        one = order.following[one]


def put(flat: Flat, order: Order, before: Order, places: Ints, mine: int, rest: int, call: int, draw: Ints) -> bool:
    """Gives a call its place after who shares it has changed; whether there is one.

    Args:
        before, places: the order before, and where everything was in it.
        mine, rest: the leader of the call that was left then, and now; -1 where nothing is left of it.
        draw: the move's.
    """
    slots, items, count, leader = len(order.leader), flat.items, before.length[0], before.leader
    half, middle = items.half[2 * call], 0
    while middle < count and not items.half[before.items[middle]]:
        middle += 1
    after_start, until_start = middle - 1 if half else -1, count if half else middle
    after_wait, until_wait = after_start, until_start
    slot = call
    while slot >= 0:
        for wait in range(2):
            one = 2 * slot + wait
            for place in range(items.before.begins[one], items.before.begins[one + 1]):
                other = items.before.entries[place]
                if other >= 2 * slots or order.leader[other >> 1] != call:
                    stands = places[other if other >= 2 * slots else 2 * leader[other >> 1] + (other & 1)]
                    after_start = after_start if wait else max(after_start, stands)
                    after_wait = max(after_wait, stands) if wait else after_wait
            for place in range(items.after.begins[one], items.after.begins[one + 1]):
                other = items.after.entries[place]
                if other >= 2 * slots or order.leader[other >> 1] != call:
                    stands = places[other if other >= 2 * slots else 2 * leader[other >> 1] + (other & 1)]
                    until_start = until_start if wait else min(until_start, stands)
                    until_wait = min(until_wait, stands) if wait else until_wait
        slot = order.following[slot]
    until_start = min(until_start, until_wait)
    if after_start >= until_start or after_wait >= until_wait:
        return False
    here = call if leader[call] == call else mine
    start, wait = places[2 * (here if draw[5] & 1 else mine)], places[2 * (here if draw[5] & 2 else mine) + 1]
    if draw[5] & 4:
        start = after_start + below(draw[3], until_start - after_start)
    start = min(max(start, after_start), until_start - 1)
    if draw[5] & 8:
        wait = until_wait - below(draw[4], until_wait - after_wait)
    wait = min(max(wait, max(after_wait, start) + 1), until_wait)
    if wait <= start:
        return False
    made = 0
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
    if start < 0:
        return from_front(order, made, call)
    order.length[0] = made
    return True


def from_front(order: Order, made: int, call: int) -> bool:
    """Puts a call's start before everything else."""
    at = made
    while at > 0:
        order.items[at] = order.items[at - 1]
        at -= 1
    order.items[0] = 2 * call
    order.length[0] = made + 1
    return True
