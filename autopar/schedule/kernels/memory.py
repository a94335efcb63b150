# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The cost of each call by the parts that share it, and the peak memory of a list."""

from __future__ import annotations

from autopar.schedule.kernels.views import ArraySchedule, CallCosts, Lives, Order


def price_call(arrays: ArraySchedule, order: Order, costs: CallCosts, head: int) -> None:
    """Prices a call anew: its seconds, copies and buffers follow from the parts that share it."""
    beyond, sent, came, target, unpacks, joined, laid, put = 0.0, 0, 0, 0, 0, 0, 0, 0
    shared = order.after[head] >= 0
    slot = head
    while slot >= 0:
        beyond += arrays.calls.beyond[slot]
        sent += arrays.calls.sent[slot]
        came += arrays.calls.came[slot]
        target += arrays.calls.target[slot]
        unpacks = max(unpacks, arrays.calls.unpacks[slot])
        laid += arrays.calls.laid[slot]
        put += arrays.calls.put[slot]
        if arrays.calls.laid[slot] == 0:
            joined = 1
        slot = order.after[slot]
    packs = 1 if shared else arrays.calls.packs[head]
    if shared and arrays.calls.gathers[head] > 0:
        unpacks = 1
    copied = (sent if packs else 0) + (came if unpacks else 0)
    copies = arrays.calls.slope[head] * copied
    copies = max(copies, arrays.calls.launch[head]) if arrays.clock.overlaps else copies + arrays.calls.launch[head]
    costs.seconds[head] = arrays.calls.latency[head] + beyond
    costs.copies[head] = copies if copied else 0.0
    costs.issued_in[head], costs.issued_out[head] = 1 + (joined + laid if packs else 0), 1 + (put if unpacks else 0)
    costs.staging[head] = (sent if packs > arrays.calls.reduces[head] else 0) + (came if unpacks else 0)
    costs.target[head], costs.packs[head], costs.unpacks[head] = target, packs, unpacks
    slot = head
    while slot >= 0:
        own = arrays.calls.storage[slot]
        costs.home[own] = own if unpacks else arrays.calls.storage[head]
        slot = order.after[slot]
    if arrays.calls.in_place[head] > 0 and not shared:
        costs.home[arrays.calls.storage[head]] = arrays.calls.source[head]


def price_calls(arrays: ArraySchedule, order: Order, costs: CallCosts) -> None:
    """Prices all calls."""
    for slot in range(len(order.head)):
        if order.head[slot] == slot:
            price_call(arrays, order, costs, slot)


def home_of(costs: CallCosts, storage: int) -> int:
    """The storage that contains another: the last of a chain of homes."""
    while costs.home[storage] != storage:
        storage = costs.home[storage]
    return storage


def peak_bytes(arrays: ArraySchedule, order: Order, costs: CallCosts, lives: Lives) -> int:
    """Bytes of a rank at the peak, without resting ones, with results written over where they may be (``InstructionTable.takes``).

    Args:
        lives: written to.
    """
    count = order.length[0]
    lives.entered[0], lives.stamp[0] = 0, 0
    for storage in range(len(lives.begins)):
        home = home_of(costs, storage)
        lives.lies[storage], lives.size[storage], lives.stamps[storage] = home, arrays.storages.bytes[storage], 0
        lives.begins[storage], lives.ends[storage] = -2, -1
    for storage in range(len(lives.begins)):
        home = lives.lies[storage]
        if arrays.storages.entered[storage] and lives.begins[home] < -1:
            lives.begins[home] = -1
            lives.entered[0] += lives.size[home]
        if arrays.storages.stays[storage]:
            lives.ends[home] = count
    return recount_memory(arrays, order, costs, lives, 0, count)


def recount_memory(arrays: ArraySchedule, order: Order, costs: CallCosts, lives: Lives, first: int, behind: int) -> int:
    """The peak after the instructions from one place to another have changed their order.

    A storage that began or ended among them still does. A result is written over the first of its sources, of those that may be taken,
    that nobody needs any more: at its place both are there, and count once.

    Args:
        lives: lifetimes under the former order; written to.
        first, behind: the first place, and the one behind the last.
    """
    count, slots = order.length[0], len(order.head)
    for at in range(first, behind):
        part, called = order.items[at], order.items[at] < 2 * slots
        while part >= 0:
            for place in range(arrays.items.needs.begins[part], arrays.items.needs.begins[part + 1]):
                extend_life(lives, arrays.items.needs.entries[place], at, first, behind)
            for place in range(arrays.items.makes.begins[part], arrays.items.makes.begins[part + 1]):
                made = lives.lies[arrays.items.makes.entries[place]]
                if first <= lives.begins[made] < behind:
                    lives.begins[made] = -2
            if called and part & 1 and not costs.packs[order.items[at] >> 1]:
                extend_life(lives, arrays.calls.source[part >> 1], at, first, behind)
            part = next_part(order, part, called)
    held = lives.taken[first - 1] - lives.freed[first - 1] if first > 0 else lives.entered[0]
    for at in range(first, behind):
        item = order.items[at]
        part, called, freed, beside = item, item < 2 * slots, 0, 0
        lives.over[at] = -1
        lives.stamp[0] += 1
        if not called:
            beside = arrays.items.workspace[item]
        elif item & 1:
            freed = costs.staging[item >> 1]
        else:
            held += costs.staging[item >> 1]
            target = arrays.calls.storage[item >> 1]
            if not costs.unpacks[item >> 1] and lives.lies[target] == target:
                lives.size[target] = costs.target[item >> 1]
        while part >= 0:
            if not called or costs.unpacks[item >> 1] == (item & 1):
                for place in range(arrays.items.makes.begins[part], arrays.items.makes.begins[part + 1]):
                    made = lives.lies[arrays.items.makes.entries[place]]
                    if lives.begins[made] == -2:
                        lives.begins[made] = at
                        held += lives.size[made]
            for place in range(arrays.items.needs.begins[part], arrays.items.needs.begins[part + 1]):
                freed += freed_bytes(lives, arrays.items.needs.entries[place], at)
            if called and part & 1 and not costs.packs[order.items[at] >> 1]:
                freed += freed_bytes(lives, arrays.calls.source[part >> 1], at)
            part = next_part(order, part, called)
        for place in range(arrays.items.takes.begins[item], arrays.items.takes.begins[item + 1]):
            storage = arrays.items.takes.entries[place]
            if lives.ends[lives.lies[storage]] == at:
                lives.over[at] = storage
                beside -= lives.size[lives.lies[storage]]
                break
        lives.taken[at], lives.freed[at], lives.levels[at] = held, freed, held + beside
        held -= freed
    if behind == count:
        lives.levels[count] = held
    return peak_level(lives, count)


def peak_level(lives: Lives, count: int) -> int:
    """Bytes at the peak of a list of ``count`` instructions."""
    most = 0
    for at in range(count + 1):
        most = max(most, lives.levels[at])
    return most


def next_part(order: Order, part: int, called: bool) -> int:
    """The start or wait of the next slot in a call; -1 behind the last, and behind other instructions."""
    slot = order.after[part >> 1] if called else -1
    return 2 * slot + (part & 1) if slot >= 0 else -1


def extend_life(lives: Lives, storage: int, at: int, first: int, behind: int) -> None:
    """Notes that a storage is needed at a place, where its end is looked for."""
    home = lives.lies[storage]
    if lives.ends[home] < behind and (lives.ends[home] >= first or first == 0):
        lives.ends[home] = at


def freed_bytes(lives: Lives, storage: int, at: int) -> int:
    """Bytes of a storage that ends at a place; 0 once they were counted."""
    home = lives.lies[storage]
    if lives.ends[home] != at or lives.stamps[home] == lives.stamp[0]:
        return 0
    lives.stamps[home] = lives.stamp[0]
    return lives.size[home]
