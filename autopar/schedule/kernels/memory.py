# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The cost of each call by the parts that share it, and the peak memory of a list."""

from __future__ import annotations

from autopar.schedule.kernels.views import ArraySchedule, CallCosts, Lives, Order


def price_call(arrays: ArraySchedule, order: Order, costs: CallCosts, head: int) -> None:
    """Prices a call anew: its seconds, copies and buffers follow from the parts that share it."""
    beyond, sent, came, target, unpacks = 0.0, 0, 0, 0, 0
    shared = order.after[head] >= 0
    slot = head
    while slot >= 0:
        beyond += arrays.calls.beyond[slot]
        sent += arrays.calls.sent[slot]
        came += arrays.calls.came[slot]
        target += arrays.calls.target[slot]
        unpacks = max(unpacks, arrays.calls.unpacks[slot])
        slot = order.after[slot]
    packs = 1 if shared else arrays.calls.packs[head]
    if shared and arrays.calls.gathers[head] > 0:
        unpacks = 1
    copied = (sent if packs else 0) + (came if unpacks else 0)
    copies = arrays.calls.slope[head] * copied
    copies = max(copies, arrays.calls.launch[head]) if arrays.clock.overlaps else copies + arrays.calls.launch[head]
    costs.seconds[head] = arrays.calls.latency[head] + beyond
    costs.copies[head] = copies if copied else 0.0
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
    count, slots = order.length[0], len(order.head)
    for storage in range(len(lives.begins)):
        lives.begins[storage] = -1 if arrays.storages.entered[storage] else -2
        lives.ends[storage] = -1
        lives.size[storage] = arrays.storages.bytes[storage]
    for storage in range(len(lives.begins)):
        home = home_of(costs, storage)
        lives.lies[storage] = home
        if arrays.storages.stays[storage]:
            lives.ends[home] = count
    for at in range(count + 2):
        lives.levels[at] = 0
    for at in range(count):
        item = order.items[at]
        part, called = item, item < 2 * slots
        slot = item >> 1
        lives.over[at] = -1
        while True:
            for place in range(arrays.items.needs.begins[part], arrays.items.needs.begins[part + 1]):
                needed = lives.lies[arrays.items.needs.entries[place]]
                lives.ends[needed] = max(lives.ends[needed], at)
            if not called or costs.unpacks[slot] == (item & 1):
                for place in range(arrays.items.makes.begins[part], arrays.items.makes.begins[part + 1]):
                    made = lives.lies[arrays.items.makes.entries[place]]
                    if lives.begins[made] == -2:
                        lives.begins[made] = at
            if not called or order.after[part >> 1] < 0:
                break
            part = 2 * order.after[part >> 1] + (item & 1)
        if not called:
            if arrays.items.workspace[item] > 0:
                lives.levels[at] += arrays.items.workspace[item]
                lives.levels[at + 1] -= arrays.items.workspace[item]
        elif item & 1:
            lives.levels[lives.started[slot]] += costs.staging[slot]
            lives.levels[at + 1] -= costs.staging[slot]
            if not costs.packs[slot]:
                source = lives.lies[arrays.calls.source[slot]]
                lives.ends[source] = max(lives.ends[source], at)
        else:
            lives.started[slot] = at
            if not costs.unpacks[slot] and lives.lies[arrays.calls.storage[slot]] == arrays.calls.storage[slot]:
                lives.size[arrays.calls.storage[slot]] = costs.target[slot]
    for at in range(count):
        item = order.items[at]
        for place in range(arrays.items.takes.begins[item], arrays.items.takes.begins[item + 1]):
            storage = lives.lies[arrays.items.takes.entries[place]]
            if lives.ends[storage] == at:
                result = arrays.items.makes.entries[arrays.items.makes.begins[item]]
                lives.lies[result], lives.ends[storage] = storage, lives.ends[result]
                lives.over[at] = arrays.items.takes.entries[place]
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
