"""How long the instructions of a list take in some order, and what they hold at most: the same as ``simulation`` says, and ``liveness`` of
the list after ``reuse``, as loops that run as machine code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.schedule.flat.arrays import Flat, Order
from solvers.arrays import Floats, Ints


class Calls(NamedTuple):
    """What follows for each call from who shares it, at its leader.

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


def represents(order: Order, slots: int, item: int) -> int:
    """The instruction that is the call's, of one of a slot; any other is itself."""
    return item if item >= 2 * slots else 2 * order.leader[item >> 1] + (item & 1)


def join_up(flat: Flat, order: Order, calls: Calls, leader: int) -> None:
    """Says anew what follows from who shares a call."""
    slots = flat.slots
    beyond, sent, came, target, unpacks = 0.0, 0, 0, 0, 0
    shared = order.following[leader] >= 0
    slot = leader
    while slot >= 0:
        beyond += slots.beyond[slot]
        sent += slots.sent[slot]
        came += slots.came[slot]
        target += slots.target[slot]
        unpacks = max(unpacks, slots.unpacks[slot])
        slot = order.following[slot]
    packs = 1 if shared else slots.packs[leader]
    if shared and slots.gathers[leader] > 0:
        unpacks = 1
    copied = (sent if packs else 0) + (came if unpacks else 0)
    copies = slots.slope[leader] * copied
    copies = max(copies, slots.launch[leader]) if flat.overlaps else copies + slots.launch[leader]
    calls.seconds[leader] = slots.latency[leader] + beyond
    calls.copies[leader] = copies if copied else 0.0
    calls.staging[leader] = (sent if packs > slots.reduces[leader] else 0) + (came if unpacks else 0)
    calls.target[leader], calls.packs[leader], calls.unpacks[leader] = target, packs, unpacks
    slot = leader
    while slot >= 0:
        own = slots.storage[slot]
        calls.home[own] = own if unpacks else slots.storage[leader]
        slot = order.following[slot]
    if slots.in_place[leader] > 0 and not shared:
        calls.home[slots.storage[leader]] = slots.source[leader]


def taken(flat: Flat, order: Order, calls: Calls) -> float:
    """Seconds of a step without the optimizer's: all microbatches, each begun when the one before has ended."""
    total, free, ends = 0.0, np.empty(flat.link_count + 1), np.empty(len(order.leader) + 1)
    for number in range(0, len(flat.rounds), 2):
        total += flat.rounds[number + 1] * one_round(flat, order, calls, flat.rounds[number], free, ends)
    return total


def one_round(flat: Flat, order: Order, calls: Calls, last: int, free: Floats, ends: Floats) -> float:
    """Seconds of one microbatch, in which everything runs that does up to some."""
    items, slots = flat.items, len(order.leader)
    now, busy, until, rate = 0.0, 0.0, 0.0, 1.0 - flat.slowdown
    for link in range(flat.link_count):
        free[link] = 0.0
    for slot in range(slots):
        ends[slot] = 0.0
    for at in range(order.length[0]):
        item = order.items[at]
        if items.first[item] > last:
            continue
        links, slot, seconds = items.links[item], item >> 1, 0.0
        if item >= 2 * slots:
            if not items.works[item]:
                continue
            seconds = items.seconds[item]
            if links:
                for link in range(flat.link_count):
                    if (links >> link) & 1:
                        now = max(now, free[link])
                now = now + seconds
                for link in range(flat.link_count):
                    if (links >> link) & 1:
                        free[link] = now
                busy, until = max(busy, now), max(until, now)
                continue
        elif item & 1:
            if not flat.slots.late[slot]:
                now = max(now, ends[slot])
            seconds = calls.copies[slot]
        else:
            begin, part = now, slot
            while part >= 0:
                for place in range(flat.flying.begins[part], flat.flying.begins[part + 1]):
                    begin = max(begin, ends[order.leader[flat.flying.entries[place]]])
                part = order.following[part]
            if not flat.overlaps:
                now = begin
            for link in range(flat.link_count):
                if (links >> link) & 1:
                    begin = max(begin, free[link])
            end = begin + calls.seconds[slot]
            for link in range(flat.link_count):
                if (links >> link) & 1:
                    free[link] = end
            ends[slot] = end
            busy, until = max(busy, end) if links else busy, max(until, end)
            continue
        if busy <= now or flat.slowdown == 0.0 or seconds == 0.0:
            now = now + seconds
        elif seconds <= rate * (busy - now):
            now = now + seconds / rate
        else:
            now = busy + seconds - rate * (busy - now)
        until = max(until, now)
    return until


def home_of(calls: Calls, storage: int) -> int:
    """The storage that one is a part of in the end."""
    while calls.home[storage] != storage:
        storage = calls.home[storage]
    return storage


def most_held(flat: Flat, order: Order, calls: Calls) -> int:
    """Bytes of a rank at the peak, once what may be written over is (``reuse``)."""
    items, slots, storages, count = flat.items, len(order.leader), flat.storages, order.length[0]
    began, last = np.empty(len(storages.bytes), dtype=np.int64), np.empty(len(storages.bytes), dtype=np.int64)
    lies, size = np.empty(len(storages.bytes), dtype=np.int64), np.empty(len(storages.bytes), dtype=np.int64)
    started, change = np.empty(slots + 1, dtype=np.int64), np.empty(count + 2, dtype=np.int64)
    for storage in range(len(began)):
        began[storage] = 0 if storages.entered[storage] else -1
        last[storage] = -1
        size[storage] = storages.bytes[storage]
    for storage in range(len(began)):
        home = home_of(calls, storage)
        lies[storage] = home
        if storages.stays[storage]:
            last[home] = count
    for at in range(count + 2):
        change[at] = 0
    for at in range(count):
        item = order.items[at]
        part, called = item, item < 2 * slots
        slot = item >> 1
        while True:
            for place in range(items.needs.begins[part], items.needs.begins[part + 1]):
                needed = lies[items.needs.entries[place]]
                last[needed] = max(last[needed], at)
            if not called or calls.unpacks[slot] == (item & 1):
                for place in range(items.makes.begins[part], items.makes.begins[part + 1]):
                    made = lies[items.makes.entries[place]]
                    if began[made] < 0:
                        began[made] = at
            if not called or order.following[part >> 1] < 0:
                break
            part = 2 * order.following[part >> 1] + (item & 1)
        if not called:
            if items.workspace[item] > 0:
                change[at] += items.workspace[item]
                change[at + 1] -= items.workspace[item]
        elif item & 1:
            change[started[slot]] += calls.staging[slot]
            change[at + 1] -= calls.staging[slot]
            if not calls.packs[slot]:
                source = lies[flat.slots.source[slot]]
                last[source] = max(last[source], at)
        else:
            started[slot] = at
            if not calls.unpacks[slot] and lies[flat.slots.storage[slot]] == flat.slots.storage[slot]:
                size[flat.slots.storage[slot]] = calls.target[slot]
    for at in range(count):
        item = order.items[at]
        for place in range(items.takes.begins[item], items.takes.begins[item + 1]):
            storage = lies[items.takes.entries[place]]
            if last[storage] == at:
                result = items.makes.entries[items.makes.begins[item]]
                lies[result], last[storage] = storage, last[result]
                break
    for storage in range(len(began)):
        if began[storage] >= 0 and lies[storage] == storage:
            change[began[storage]] += size[storage]
            change[(last[storage] if last[storage] >= 0 else count) + 1] -= size[storage]
    held, most = 0, 0
    for at in range(count + 1):
        held += change[at]
        most = max(most, held)
    return most + storages.resting
