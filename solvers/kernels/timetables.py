# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The clock of a pipeline's timetable, orders made by rules, and the local search over orders.

An operation of chunk c has the code 3 c + kind, with the kinds F 0, B 1 and W 2. Each device runs a line of codes, all of one length; the
n-th of a code is microbatch n.
"""

from __future__ import annotations

from ..arrays import Ints
from .constants import NO_STEP
from .views import Chain, Clock


def run_orders(chain: Chain, orders: Ints, clock: Clock) -> float:
    """Seconds of the step: every operation begins once its device is free and what it reads has arrived. ``NO_STEP`` if there is none.

    Args:
        orders: the lines of all devices, one behind the other.
        clock: written to: the end of each operation, bytes held at last.
    """
    chunks, devices, microbatches = chain.sizes[0], chain.sizes[1], chain.sizes[2]
    length, last, done, step = len(orders) // devices, chain.sizes[3] - 1, 0, 0.0
    for code in range(3 * chunks):
        clock.count[code] = 0
    for d in range(devices):
        clock.ready[d], clock.usage[d], clock.at[d], clock.queue[d], clock.waits[d] = 0.0, 0.0, 0, devices - 1 - d, 1
    waiting = devices
    while waiting:
        waiting -= 1
        d = clock.queue[waiting]
        clock.waits[d] = 0
        while clock.at[d] < length:
            code = orders[d * length + clock.at[d]]
            c, kind, n = code // 3, code % 3, clock.count[code]
            begin = clock.ready[d]
            if kind == 0:
                if c > 0:
                    if clock.count[code - 3] <= n:
                        break
                    begin = max(begin, clock.ends[(code - 3) * microbatches + n] + chain.hop[c - 1])
            elif clock.count[code - 1] <= n:
                break
            elif kind == 1 and c < chunks - 1:
                if clock.count[code + 3] <= n:
                    break
                begin = max(begin, clock.ends[(code + 3) * microbatches + n] + chain.hop[c])
            end = begin + chain.seconds[code]
            clock.ends[code * microbatches + n], clock.ready[d] = end, end
            clock.count[code] += 1
            clock.at[d] += 1
            done += 1
            step = max(step, end)
            other = d
            if kind == 0:
                clock.usage[d] += chain.held[c]
                if clock.usage[d] > chain.room[d]:
                    return NO_STEP
                if c < chunks - 1:
                    other = chain.place[c + 1]
            elif kind == 1 and c > 0:
                other = chain.place[c - 1]
            if kind == last:
                clock.usage[d] -= chain.held[c]
            if other != d and not clock.waits[other]:
                clock.queue[waiting], clock.waits[other] = other, 1
                waiting += 1
    return step if done == devices * length else NO_STEP


def write_warm_ups(chain: Chain, warm_ups: Ints, orders: Ints) -> None:
    """Orders of chunks placed in a loop: F of the warm-up, then B (and W) and F in turn, then the remaining B.

    F go chunk by chunk in rounds of as many microbatches as devices, B in rounds from the last chunk on.

    Args:
        orders: written to.
    """
    chunks, devices, microbatches, kinds = chain.sizes[0], chain.sizes[1], chain.sizes[2], chain.sizes[3]
    at, each = 0, chunks // devices
    total = each * microbatches
    for d in range(devices):
        warm = min(max(1, warm_ups[d]), total)
        for n in range(warm):
            orders[at] = 3 * (d + devices * _turn(n, devices, each, microbatches))
            at += 1
        for n in range(total):
            for kind in range(1, kinds):
                orders[at] = 3 * (d + devices * (each - 1 - _turn(n, devices, each, microbatches))) + kind
                at += 1
            if n < total - warm:
                orders[at] = 3 * (d + devices * _turn(n + warm, devices, each, microbatches))
                at += 1


def _turn(n: int, devices: int, each: int, microbatches: int) -> int:
    """Which of a device's ``each`` chunks its n-th F is of. The last round has the microbatches that are left."""
    begin = n // (devices * each) * devices
    return (n - begin * each) // min(devices, microbatches - begin)


def run_warm_ups(chain: Chain, warm_ups: Ints, orders: Ints, clock: Clock) -> float:
    """The step of ``write_warm_ups``."""
    write_warm_ups(chain, warm_ups, orders)
    return run_orders(chain, orders, clock)


def schedule_by_list(chain: Chain, warm_ups: Ints, orders: Ints, clock: Clock) -> float:
    """List scheduling: of the operations that could begin next, the first to begin runs. Returns the step, ``NO_STEP`` if there is none.

    Of several that could begin at once on a device, B goes first, of the earliest chunk; then F, of the latest; then W. Until as many F
    as its warm-up have run, F goes first. No more microbatch chunks than that are in flight. An F leaves room for one microbatch of each
    later chunk of the device, so that each microbatch begun can end.

    Args:
        warm_ups: of each device, in F of any of its chunks.
        orders: written to.
    """
    chunks, devices, microbatches, last = chain.sizes[0], chain.sizes[1], chain.sizes[2], chain.sizes[3] - 1
    length, done, step = len(orders) // devices, 0, 0.0
    for code in range(3 * chunks):
        clock.count[code] = 0
    for d in range(devices):
        clock.ready[d], clock.usage[d], clock.at[d], clock.queue[d], clock.waits[d] = 0.0, 0.0, 0, 0, 0
    while done < devices * length:
        chosen, soonest, rank = -1, NO_STEP, 0
        for code in range(3 * chunks):
            c, kind, n = code // 3, code % 3, clock.count[code]
            d = chain.place[c]
            if kind > last or n >= microbatches:
                continue
            begin = clock.ready[d]
            if kind == 0:
                if c > 0:
                    if clock.count[code - 3] <= n:
                        continue
                    begin = max(begin, clock.ends[(code - 3) * microbatches + n] + chain.hop[c - 1])
                if last > 0:
                    wanted, flying = clock.usage[d] + chain.held[c], clock.queue[d] + 1
                    for later in range(c + 1, chunks):
                        if chain.place[later] == d and clock.count[3 * later] == clock.count[3 * later + last]:
                            wanted += chain.held[later]
                            flying += 1
                    if wanted > chain.room[d] or flying > warm_ups[d]:
                        continue
            elif clock.count[code - 1] <= n:
                continue
            elif kind == 1 and c < chunks - 1:
                if clock.count[code + 3] <= n:
                    continue
                begin = max(begin, clock.ends[(code + 3) * microbatches + n] + chain.hop[c])
            standing = 2 * chunks + c if kind == 0 and clock.waits[d] >= warm_ups[d] else 4 * chunks + c
            if kind == 1:
                standing = 4 * chunks - c - 1
            elif kind == 2:
                standing = chunks - c
            if begin < soonest or (begin == soonest and standing > rank):
                chosen, soonest, rank = code, begin, standing
        if chosen < 0:
            return NO_STEP
        c, kind, n = chosen // 3, chosen % 3, clock.count[chosen]
        d = chain.place[c]
        end = soonest + chain.seconds[chosen]
        clock.ends[chosen * microbatches + n], clock.ready[d] = end, end
        clock.count[chosen] += 1
        orders[d * length + clock.at[d]] = chosen
        clock.at[d] += 1
        done += 1
        step = max(step, end)
        if kind == 0:
            clock.usage[d] += chain.held[c]
            clock.queue[d] += 1
            clock.waits[d] += 1
        if kind == last:
            clock.usage[d] -= chain.held[c]
            clock.queue[d] -= 1
    return step


def improve_orders(chain: Chain, orders: Ints, clock: Clock, draws: Ints, step: float) -> float:
    """Local search: moves one operation of a device, keeps what is not longer. Returns the step; ``orders`` change in place.

    Args:
        draws: three numbers a move: the device, the place, and how far; drawn from the ranges of each.
        step: of ``orders``.
    """
    devices = chain.sizes[1]
    length = len(orders) // devices
    for number in range(0, len(draws) - 2, 3):
        begin = draws[number] * length
        source, far = draws[number + 1], draws[number + 2]
        target = min(max(0, source + far), length - 1)
        if source == target or not _shift(orders, begin + source, begin + target):
            continue
        found = run_orders(chain, orders, clock)
        if found > step:
            _shift(orders, begin + target, begin + source)
        else:
            step = found
    return step


def _shift(orders: Ints, source: int, target: int) -> bool:
    """Moves one code; False, with nothing done, where all between are of the same code."""
    code, changed = orders[source], False
    way = 1 if target > source else -1
    at = source
    while at != target:
        changed = changed or orders[at + way] != code
        orders[at] = orders[at + way]
        at += way
    orders[target] = code
    return changed
