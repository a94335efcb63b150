# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The loops of sparse elimination: rows of two tables paired, the least row of each group, and its cost added to rows that agree."""

from __future__ import annotations

from ..arrays import Floats, Ints
from .constants import FAR


def join_rows(group: Ints, cost: Floats, ptr: Ints, other: Floats, room: float, left: Ints, right: Ints) -> int:
    """Pair rows that together cost less than ``room``; returns how many pairs there are, or -1 where they are more than fit.

    Args:
        group: of each row of one table, the group of the other's rows that agree with it; -1 for none.
        cost: of each row of the one table.
        ptr: where the groups of the other table begin; shape [groups + 1].
        other: of each row of the other table, ascending within a group.
        left, right: written to: the pairs, as numbers of rows of the one table and of the other.
    """
    count, most = 0, len(left)
    for row in range(len(group)):
        g = group[row]
        if g < 0:
            continue
        spare = room - cost[row]
        for place in range(ptr[g], ptr[g + 1]):
            if other[place] >= spare:
                break
            if count == most:
                return -1
            left[count], right[count] = row, place
            count += 1
    return count


def slot_of(value: int, key: Ints, slots: Ints, kept: Ints, mask: int) -> int:
    """The slot that holds a key, or the free one where it would be."""
    at = (value ^ (value >> 13) ^ (value >> 29)) & mask
    while slots[at] >= 0 and key[kept[slots[at]]] != value:
        at = (at + 1) & mask
    return at


def least_rows(key: Ints, cost: Floats, slots: Ints, kept: Ints) -> int:
    """Find the cheapest row of each key, the first of equals; returns the number of keys.

    Args:
        slots: working space, a power of two long and longer than the number of keys.
        kept: written to: the cheapest rows, in the order in which their keys appear.
    """
    count, mask = 0, len(slots) - 1
    for at in range(len(slots)):
        slots[at] = -1
    for row in range(len(key)):
        at = slot_of(key[row], key, slots, kept, mask)
        if slots[at] < 0:
            slots[at], kept[count] = count, row
            count += 1
        elif cost[row] < cost[kept[slots[at]]]:
            kept[slots[at]] = row
    return count


def add_least(total: Floats, key: Ints, others: Ints, cost: Floats, slots: Ints, kept: Ints) -> None:
    """Add the least cost of another table's rows that agree to the total of each row; ``FAR`` where none agrees.

    Args:
        total: written to.
        key: of each row, the choices that it has in common with the other table.
        others: the same of the other table's rows.
        cost: of each of the other table's rows.
        slots, kept: working space, as that of ``least_rows``.
    """
    least_rows(others, cost, slots, kept)
    mask = len(slots) - 1
    for row in range(len(key)):
        slot = slots[slot_of(key[row], others, slots, kept, mask)]
        total[row] += cost[kept[slot]] if slot >= 0 else FAR
