# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The clock of a list: see ``simulation``."""

from __future__ import annotations

from autopar.schedule.kernels.views import ArraySchedule, CallCosts, ClockTable, Order, Timeline
from solvers.arrays import Floats


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
