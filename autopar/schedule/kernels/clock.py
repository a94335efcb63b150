# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The clock of a list: see ``simulation``."""

from __future__ import annotations

from autopar.schedule.kernels.views import ArraySchedule, CallCosts, ClockTable, Order, Timeline


def run_clock(
    clock: ClockTable, order: Order, costs: CallCosts, last: int, number: int, first: int, behind: int, known: Timeline, timeline: Timeline
) -> float:  # fmt: skip
    """Seconds of one microbatch, in which everything runs that does up to microbatch ``last``: see ``simulation``. Before all of them, -1,
    runs what does so once.

    A list that was timed before is timed again from its first change on. The clock stops where the rest takes its former course: operators
    come to an unchanged place when they did, and each call that ends at another time has ended.

    Args:
        costs: those of each call, at its head.
        number: of the round, whose part of the timelines is meant.
        first, behind: the place of the first change, and the one behind the last. For a list that is not known 0, and any beyond it.
        known: timeline of the former list.
        timeline: written to, from the first change on. Arrivals in it are those of ``known`` before.
    """
    slots, base = len(order.head), number * (len(order.items) + 1)
    heads, begun = number * slots, base + first
    now, busy, until, unsettled, rate = known.since[begun], known.busy[begun], known.until[begun], 0.0, 1.0 - clock.slowdown
    issued, waited = known.issued[begun], known.waited[begun]
    links_at = begun * clock.link_count
    for link in range(clock.link_count):
        timeline.free[link] = known.free_at[links_at + link]
    for place in range(first, order.length[0] + 1):
        at = base + place
        timeline.since[at], timeline.busy[at], timeline.until[at] = now, busy, until
        settled = unsettled <= now
        if clock.issue > 0.0:
            settled = settled and issued == known.issued[at] and waited == known.waited[at]
            timeline.issued[at], timeline.waited[at] = issued, waited
        links_at = at * clock.link_count
        for link in range(clock.link_count):
            timeline.free_at[links_at + link] = timeline.free[link]
        if place >= behind and now == known.since[at] and settled:
            timeline.length[number] = place
            return known.until[base + known.length[number]]
        if place == order.length[0]:
            break
        item = order.items[place]
        timeline.begins[at], timeline.ends[at], timeline.stalls[at] = now, now, 0.0
        if clock.first[item] > last or (clock.first[item] < 0 and last >= 0):
            continue
        links, slot, seconds, launches, host, all_issued = clock.links[item], item >> 1, 0.0, 0, 0.0, 0.0
        if clock.issue > 0.0:
            launches = clock.launches[item]
            if item < 2 * slots:
                launches = costs.issued_out[slot] if item & 1 else costs.issued_in[slot]
            if clock.reads_back[item]:
                waited = max(waited, now - clock.issue * issued)
            if launches > 0:
                host, all_issued = waited + clock.issue * (issued + 1), waited + clock.issue * (issued + launches)
            issued += launches
        if item >= 2 * slots:
            if not clock.works[item]:
                continue
            seconds, now = clock.seconds[item], max(now, host)
            timeline.begins[at] = now
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
                busy, until = max(busy, now) if links & clock.slowing else busy, max(until, now)
                continue
        elif item & 1:
            if not clock.late[slot] and timeline.arrives[heads + slot] > now:
                timeline.stalls[at] = timeline.arrives[heads + slot] - now
                now = timeline.arrives[heads + slot]
            seconds, now = costs.copies[slot], max(now, host)
        else:
            begin, part = max(now, all_issued), slot
            while part >= 0:
                for source in range(clock.flying.begins[part], clock.flying.begins[part + 1]):
                    begin = max(begin, timeline.arrives[heads + order.head[clock.flying.entries[source]]])
                part = order.after[part]
            if not clock.overlaps:
                timeline.stalls[at] = begin - now
                now = begin
            for link in range(clock.link_count):
                if (links >> link) & 1:
                    begin = max(begin, timeline.free[link])
            end = begin + costs.seconds[slot]
            for link in range(clock.link_count):
                if (links >> link) & 1:
                    timeline.free[link] = end
            if known.arrives[heads + slot] != end:
                unsettled = max(unsettled, known.arrives[heads + slot], end)
            timeline.arrives[heads + slot] = end
            timeline.begins[at], timeline.ends[at] = begin, end
            busy, until = max(busy, end) if links & clock.slowing else busy, max(until, end)
            continue
        if busy <= now or clock.slowdown == 0.0 or seconds == 0.0:
            now = now + seconds
        elif seconds <= rate * (busy - now):
            now = now + seconds / rate
        else:
            now = busy + seconds - rate * (busy - now)
        if launches > 1:
            now = max(now, all_issued + seconds / launches)
        timeline.ends[at] = now
        until = max(until, now)
    timeline.length[number] = order.length[0]
    return until


def step_of(arrays: ArraySchedule, order: Order, costs: CallCosts, first: int, behind: int, known: Timeline, timeline: Timeline) -> float:
    """Seconds of a step without the optimizer's: all microbatches, each begun when the one before has ended.

    Args:
        first, behind, known, timeline: see ``run_clock``.
    """
    total = 0.0
    for number in range(len(arrays.rounds) // 2):
        seconds = run_clock(arrays.clock, order, costs, arrays.rounds[2 * number], number, first, behind, known, timeline)
        total += arrays.rounds[2 * number + 1] * seconds
    return total


def adopt_timeline(timeline: Timeline, known: Timeline, first: int, length: int, room: int) -> None:
    """Makes a list the known one.

    Args:
        timeline: timeline of the list from its first change on.
        first, length: place of that change, and length of the list.
        room: places of a round in the timelines, one behind the last instruction included.
    """
    for number in range(len(known.length)):
        base, ended = number * room, number * room + timeline.length[number]
        for at in range(base + first, ended):
            known.begins[at], known.ends[at], known.stalls[at] = timeline.begins[at], timeline.ends[at], timeline.stalls[at]
        for at in range(base + first, ended + 1):
            known.since[at], known.busy[at], known.until[at] = timeline.since[at], timeline.busy[at], timeline.until[at]
            known.issued[at], known.waited[at] = timeline.issued[at], timeline.waited[at]
        for at in range((base + first) * len(known.free), (ended + 1) * len(known.free)):
            known.free_at[at] = timeline.free_at[at]
        known.length[number] = length
    copy_arrivals(timeline, known)


def copy_arrivals(timeline: Timeline, to: Timeline) -> None:
    """Writes the arrivals of one timeline over those of another."""
    for slot in range(len(to.arrives)):
        to.arrives[slot] = timeline.arrives[slot]
