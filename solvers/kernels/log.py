# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Reading the log of presolve: choices of nodes that are gone, and the times at which memory can bind."""

from __future__ import annotations

from ..arrays import Bytes, Ints
from .constants import BY_PAIR, FIXED, FOLLOWS, LOG
from .views import Network


def replay(net: Network, choices: Ints) -> None:
    """Fill in the choices of all nodes from those of the nodes still present, by the log read backwards."""
    for entry in range(net.scalars[LOG] - 1, -1, -1):
        at = net.log[entry, 4]
        if net.log[entry, 0] == FOLLOWS:
            at += choices[net.log[entry, 2]]
        elif net.log[entry, 0] == BY_PAIR:
            at += choices[net.log[entry, 2]] * (net.ptr[net.log[entry, 3] + 1] - net.ptr[net.log[entry, 3]]) + choices[net.log[entry, 3]]
        choices[net.log[entry, 1]] = net.log_data[at]


def trace(net: Network, first_log: int, root: Ints, map_at: Ints, maps: Ints) -> None:
    """Find for each node the present node that decides its choice.

    Args:
        root: written to: the present node; -1 where the choice is fixed, and untouched where the node was eliminated.
        map_at: written to: where in ``maps`` the choices for the root's live choices begin; the choice itself where it is fixed.
        maps: written to, with room for all.
    """
    used = 0
    for i in range(len(root)):
        if net.present[i]:
            root[i], map_at[i] = i, used
            for place in range(net.live_count[i]):
                maps[used + place] = net.live[net.ptr[i] + place]
            used += net.live_count[i]
    for entry in range(net.scalars[LOG] - 1, first_log - 1, -1):
        node, first, data = net.log[entry, 1], net.log[entry, 2], net.log[entry, 4]
        if net.log[entry, 0] == FIXED:
            root[node], map_at[node] = -1, net.log_data[data]
        elif net.log[entry, 0] == FOLLOWS:
            root[node] = root[first]
            if root[first] == -1:
                map_at[node] = net.log_data[data + map_at[first]]
            elif root[first] >= 0:
                map_at[node] = used
                for place in range(net.live_count[root[first]]):
                    maps[used + place] = net.log_data[data + maps[map_at[first] + place]]
                used += net.live_count[root[first]]


def maximal_times(binding: Bytes, capacity: Ints, begins: Ints, ends: Ints, kept: Bytes) -> None:
    """Mark the binding times that no neighbour implies, which would have at least the same items and at most the same room.

    Args:
        begins, ends: how many items begin and end at each time.
        kept: written to.
    """
    last, begun, ended = -1, 0, 0
    for t in range(len(capacity)):
        begun += begins[t]
        ended += ends[t]
        if binding[t] and not (last >= 0 and begun == 0 and capacity[last] <= capacity[t]):
            if last >= 0 and ended == 0 and capacity[t] <= capacity[last]:
                kept[last] = 0
            kept[t] = 1
            last, begun, ended = t, 0, 0
