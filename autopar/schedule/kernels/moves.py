# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The local search over a list: moves of instructions, and of the parts that share a call."""

from __future__ import annotations

from autopar.schedule.kernels.clock import adopt_timeline, copy_arrivals, step_of
from autopar.schedule.kernels.memory import peak_bytes, peak_level, price_call, recount_memory
from autopar.schedule.kernels.views import ArraySchedule, CallCosts, Lives, Order, Rows, Timeline
from autopar.schedule.settings import (
    ALONE,
    DRAW_BITS,
    EQUAL_SECONDS,
    INCREMENT,
    MULTIPLIER,
    NEAR_PLACES,
    NEAR_SHIFTS,
    PARTS_OF_MOVES,
    ROUNDING,
    STALL_REACH,
    STALLS_AFTER,
    TRIES,
)  # fmt: skip
from autopar.solvers.arrays import Ints

MASK = (1 << DRAW_BITS) - 1
SHIFT, SHIFT_AT_STALL, PULL_TO_STALL, UNBUCKET, MERGE = range(5)
"""The kinds of moves, as ``settings.MOVE_WEIGHTS`` lists them."""
NOT_TRIED, TOO_LONG, TOO_LARGE = -1.0, -2.0, -3.0
"""Verdicts on a list, in the place of its seconds."""
NEAR_MOVES = round(64 * NEAR_SHIFTS)
"""Moves of 64 over ``NEAR_PLACES`` at most."""


def number_of_call(order: Order, slots: int, item: int) -> int:
    """The number of a call's start or wait, for that of one of its slots. Any other number is itself."""
    return item if item >= 2 * slots else 2 * order.head[item >> 1] + (item & 1)


def draw(random: Ints, count: int) -> int:
    """A number below a count."""
    random[0] = (random[0] * MULTIPLIER + INCREMENT) & MASK
    return (random[0] * count) >> DRAW_BITS


def draw_kind(random: Ints, weights: Ints) -> int:
    """The kind of a move."""
    drawn, kind = draw(random, weights[len(weights) - 1]), 0
    while drawn >= weights[kind]:
        kind += 1
    return kind


def descend(
    arrays: ArraySchedule, order: Order, before: Order, costs: CallCosts, known: Timeline, timeline: Timeline, lives: Lives, stamps: Ints,
    places: Ints, stalls: Ints, random: Ints, weights: Ints, moves: int, limit: int, captured: int,
) -> tuple[float, int]:  # fmt: skip
    """Local search over a list; its seconds, and the number of moves judged.

    A move is kept while the list takes no more seconds and holds no more bytes than it may. Moves that gain nothing are kept too, because
    later ones may gain after them; a split must gain. A list that holds too much is changed while it holds less, or as much in no more
    seconds. The last moves may not raise the peak.

    The bounds of the search on memory hold for operators in captured order. So operators change their order only where a rank holds no
    less than in captured order.

    Args:
        order: written to.
        before: room for a copy of the order.
        known, timeline: room for the clock of the list, and of a list that is judged.
        stamps, places: scratch, a number for each instruction.
        stalls: scratch, two numbers for each place where operators may stand still.
        random: the state of the generator of moves.
        weights: running sums of ``settings.MOVE_WEIGHTS``.
        moves: judged at most.
        limit: bytes on a rank, without resting ones.
        captured: 1 where operators are in captured order; otherwise no less is held than now.
    """
    slots, room = len(order.head), len(order.items)
    least, held = step_of(arrays, order, costs, 0, room + 1, known, known), peak_bytes(arrays, order, costs, lives)
    copy_arrivals(known, timeline)
    for item in range(room):
        stamps[item] = -1
    cap, lighter = limit, moves - moves // PARTS_OF_MOVES
    fixed, lightest, floor = captured, held, 0 if captured > 0 else held
    judged, tried, found, looked = 0, 0, 0, 0
    while judged < moves and tried < TRIES * moves:
        tried += 1
        if fixed > 0 and judged >= moves // PARTS_OF_MOVES and held <= limit:
            held = peak_level(lives, order.length[0])
            lightest = min(lightest, held)
            fixed, floor = 0, lightest
        if judged >= lighter and cap == limit:
            held = peak_level(lives, order.length[0])
            cap = min(held, limit)
        if judged >= looked:
            found, looked = find_stalls(order, known, places, stalls), judged + STALLS_AFTER
        kind, seconds = SHIFT if slots == 0 else draw_kind(random, weights), NOT_TRIED
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
                first, behind = min(begin, end), max(begin, end) + 1
                seconds = accept(arrays, order, costs, first, behind, known, timeline, lives, least, held, floor, cap)
                if seconds < 0.0:
                    slide(order, end, begin)
                if seconds == TOO_LARGE:
                    recount_memory(arrays, order, costs, lives, first, behind)
        else:
            seconds = regrouped(arrays, order, before, costs, known, timeline, lives, places, random, kind, least, held, floor, cap)
        judged += 1 if seconds != NOT_TRIED else 0
        if seconds >= 0.0:
            least = min(least, seconds) if held <= limit else seconds
            if held > limit or judged >= lighter:
                held = peak_level(lives, order.length[0])
                cap = min(held, limit) if judged >= lighter else limit
    return least, judged


def accept(
    arrays: ArraySchedule, order: Order, costs: CallCosts, first: int, behind: int, known: Timeline, timeline: Timeline, lives: Lives,
    most: float, held: int, least: int, limit: int,
) -> float:  # fmt: skip
    """Judges a list: its seconds, ``TOO_LONG``, or ``TOO_LARGE`` where it holds too much or too little. A list that is kept is known then.

    Args:
        first, behind, known, timeline: see ``clock.run_clock``. Calls are others where ``behind`` is beyond the list.
        lives: written to, unless the list takes too long.
        most: seconds that it may take.
        held: bytes that it held before. Where they exceed the limit, holding less is worth any time.
        least, limit: bytes that it may hold.
    """
    seconds, verdict = step_of(arrays, order, costs, first, behind, known, timeline), TOO_LONG
    if held > limit or seconds <= most * ROUNDING:
        regrouped = behind > order.length[0]
        now = peak_bytes(arrays, order, costs, lives) if regrouped else recount_memory(arrays, order, costs, lives, first, behind)
        kept = now >= least and now <= limit
        if held > limit:
            kept = now < held or (now == held and seconds <= most * ROUNDING)
        verdict = seconds if kept else TOO_LARGE
    if verdict < 0.0:
        copy_arrivals(known, timeline)
    else:
        adopt_timeline(timeline, known, first, order.length[0], len(order.items) + 1)
    return verdict


def find_stalls(order: Order, known: Timeline, places: Ints, stalls: Ints) -> int:
    """Finds the stalls of a list in its last round: places of waits that stall, of their starts, and of starts that stall; their number.

    Args:
        places: written to: the place of each instruction.
        stalls: written to: the places of stalls.
    """
    slots, found, last = len(order.head), 0, (len(known.length) - 1) * (len(order.items) + 1)
    for at in range(order.length[0]):
        item = order.items[at]
        places[item] = at
        if item < 2 * slots and known.stalls[last + at] > 0.0:
            stalls[found] = at
            found += 1
            if item & 1:
                stalls[found] = places[item - 1]
                found += 1
    return found


def stamp_rows(rows: Rows, order: Order, stamps: Ints, stamp: int, part: int) -> None:
    """Stamps the instructions in a row: those that one must follow, or precede."""
    for place in range(rows.begins[part], rows.begins[part + 1]):
        stamps[number_of_call(order, len(order.head), rows.entries[place])] = stamp


def shifted(arrays: ArraySchedule, order: Order, stamps: Ints, stamp: int, begin: int, reach: int, earlier: int, fixed: int) -> int:
    """Moves an instruction by ``reach`` places, or as far as its neighbours allow; its new place.

    Args:
        fixed: 1 where operators stay in their order.
    """
    slots, item, end = len(order.head), order.items[begin], begin
    part = item
    while part >= 0:
        if earlier:
            stamp_rows(arrays.items.before, order, stamps, stamp, part)
        else:
            stamp_rows(arrays.items.after, order, stamps, stamp, part)
        part = 2 * order.after[part >> 1] + (item & 1) if item < 2 * slots and order.after[part >> 1] >= 0 else -1
    segment, step, last = arrays.items.segment[item], -1 if earlier else 1, 0 if earlier else order.length[0] - 1
    while end != last and (end - begin) * step < reach:
        other = order.items[end + step]
        kept = fixed * arrays.clock.works[item] * arrays.clock.works[other] > 0
        if stamps[other] == stamp or arrays.items.segment[other] != segment or kept:
            break
        end += step
    slide(order, begin, end)
    return end


def slide(order: Order, begin: int, end: int) -> None:
    """Moves the instruction at one place to another; those between move by one."""
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
    arrays: ArraySchedule, order: Order, before: Order, costs: CallCosts, known: Timeline, timeline: Timeline, lives: Lives, places: Ints,
    random: Ints, kind: int, most: float, held: int, least: int, limit: int,
) -> float:  # fmt: skip
    """Splits a part off a call, or merges two calls; seconds of the list, or why it is as before: see ``accept``, and ``NOT_TRIED``.

    All-reduces are not split: only the passes tell whether one alone may be made in place.

    Args:
        before, places: written to: the order before, and the place of each instruction in it.
        kind: of the move.
        most, held, least, limit: see ``accept``.
    """
    slot = draw(random, len(order.head))
    mine = order.head[slot]
    other = slot if kind == UNBUCKET else draw_partner(arrays, order, mine, random)
    if other < 0 or (kind == UNBUCKET and (order.after[mine] < 0 or arrays.calls.reduces[slot] > 0)):
        return NOT_TRIED
    copy(order, before)
    for at in range(order.length[0]):
        places[order.items[at]] = at
    rest = -1
    if kind == UNBUCKET:
        rest = before.after[mine] if slot == mine else mine
        leave(order, slot, rest)
    else:
        append(order, other, mine)
    seconds = NOT_TRIED
    if place_call(arrays, order, before, places, mine, rest, other, random):
        if rest >= 0:
            price_call(arrays, order, costs, rest)
        price_call(arrays, order, costs, other)
        most = most * (1 - EQUAL_SECONDS) if kind == UNBUCKET else most
        first = places[2 * mine] if kind == UNBUCKET else min(places[2 * mine], places[2 * other])
        while first > 0 and order.items[first - 1] != before.items[first - 1]:
            first -= 1
        never = order.length[0] + 1
        seconds = accept(arrays, order, costs, first, never, known, timeline, lives, most, held, least, limit)
    if seconds < 0.0:
        copy(before, order)
        price_call(arrays, order, costs, mine)
        if order.head[other] != mine:
            price_call(arrays, order, costs, other)
        if seconds == TOO_LARGE:
            peak_bytes(arrays, order, costs, lives)
    return seconds


def draw_partner(arrays: ArraySchedule, order: Order, mine: int, random: Ints) -> int:
    """Another call that may share a buffer with one, mostly a near one; -1 where there is none."""
    slots = len(order.head)
    if arrays.calls.classes[mine] == ALONE:
        return -1
    at = mine + draw(random, min(NEAR_PLACES, slots) if draw(random, 2) > 0 else slots)
    for _ in range(slots):
        at = at + 1 if at + 1 < slots else at + 1 - slots
        if order.head[at] == at and at != mine and arrays.calls.classes[at] == arrays.calls.classes[mine]:
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


def furthest_place(rows: Rows, order: Order, before: Order, places: Ints, part: int, call: int, place: int, sign: int) -> int:
    """The last place, or the first, of the instructions in a row that are not of a call.

    Args:
        before, places: the order before, and the place of each instruction in it.
        place: of others.
        sign: 1 for the last place, -1 for the first.
    """
    slots = len(order.head)
    for at in range(rows.begins[part], rows.begins[part + 1]):
        other = rows.entries[at]
        if other >= 2 * slots or order.head[other >> 1] != call:
            stands = places[number_of_call(before, slots, other)]
            place = stands if sign * stands > sign * place else place
    return place


def place_call(
    arrays: ArraySchedule, order: Order, before: Order, places: Ints, mine: int, rest: int, call: int, random: Ints
) -> bool:  # fmt: skip
    """Places a call whose slots have changed; whether there is a place.

    Args:
        before, places: the order before, and the place of each instruction in it.
        mine: the head of the call that was left.
        rest: its head now; -1 where nothing is left of it.
    """
    slots, count = len(order.head), before.length[0]
    segment, first, behind = arrays.items.segment[2 * call], 0, count
    while arrays.items.segment[before.items[first]] != segment:
        first += 1
    while arrays.items.segment[before.items[behind - 1]] != segment:
        behind -= 1
    after_start, until_start = first - 1, behind
    after_wait, until_wait = after_start, until_start
    slot = call
    while slot >= 0:
        after_start = furthest_place(arrays.items.before, order, before, places, 2 * slot, call, after_start, 1)
        after_wait = furthest_place(arrays.items.before, order, before, places, 2 * slot + 1, call, after_wait, 1)
        until_start = furthest_place(arrays.items.after, order, before, places, 2 * slot, call, until_start, -1)
        until_wait = furthest_place(arrays.items.after, order, before, places, 2 * slot + 1, call, until_wait, -1)
        slot = order.after[slot]
    until_start = min(until_start, until_wait)
    if after_start >= until_start or after_wait >= until_wait:
        return False
    here = call if before.head[call] == call else mine
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
