"""The state that reduction works on, and its elementary steps: one namedtuple of arrays, changed in place by compiled kernels.

Choices keep their original numbers and tables their original strides, so that undoing needs no renumbering; ``live`` lists the
choices that are left. The ends of edges are linked lists: end ``2 e`` hangs on ``eu[e]``, end ``2 e + 1`` on ``ev[e]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Ints
from solvers.compiled import kernel

NEVER = 2**62
"""Cost of what is forbidden; finite costs stay below it in sum."""

# Places in Network.scalars.
CONSTANT, POOL, LOG, LOG_DATA, EDGE_HEAD, EDGE_TAIL, NODE_HEAD, NODE_TAIL, INFEASIBLE, UPPER, NEED, ERASED = range(12)
# Kinds of entries in the log.
FIXED, FOLLOWS, BY_PAIR = range(3)


class Network(NamedTuple):
    """Arrays of a problem under reduction; see the module's docstring."""

    ptr: Ints  # [N + 1] choices of node i: ptr[i] : ptr[i + 1]
    live: Ints  # [C] the first live_count[i] of node i's places hold its remaining choices
    live_count: Ints  # [N]
    cost: Ints  # [C]
    present: NDArray[np.uint8]  # [N] 0: fixed, merged or eliminated
    heavy: NDArray[np.uint8]  # [N] 1: has memory items
    changed: NDArray[np.uint8]  # [N] 1: an edge of it has changed since dominance looked at it
    degree: Ints  # [N]
    head: Ints  # [N] first edge end
    following: Ints  # [2 E] next edge end of the same node, -1 at the end
    eu: Ints  # [E]
    ev: Ints  # [E]
    at: Ints  # [E] where the edge's table begins in pool
    edge_live: NDArray[np.uint8]  # [E]
    pool: Ints
    edge_queue: Ints  # [E + 1] ring
    edge_waits: NDArray[np.uint8]  # [E]
    node_queue: Ints  # [N + 1] ring
    node_waits: NDArray[np.uint8]  # [N]
    log: Ints  # [N, 5] kind, node, first, second, where its data begins
    log_data: Ints
    mark: Ints  # [N] scratch, -1
    scalars: Ints  # by the names above


def grown(net: Network) -> Network:
    """The same network with more room for tables and for the log."""
    need = int(net.scalars[NEED])
    return net._replace(pool=_longer(net.pool, net.scalars[POOL], need), log_data=_longer(net.log_data, net.scalars[LOG_DATA], need))


def _longer(array: Ints, used: int, need: int) -> Ints:
    """More than twice as long; what is not used yet takes no memory."""
    longer = np.zeros(2 * len(array) + need, dtype=np.int64)
    longer[:used] = array[:used]
    return longer


def undo(net: Network, choices: Ints) -> Ints:
    """Choices of all nodes from those of the nodes still present (shape [N], original numbers)."""
    full = choices.copy()
    replay(net.ptr, net.log[: net.scalars[LOG]], net.log_data, full)
    return full


@kernel
def replay(ptr: Ints, log: Ints, data: Ints, choices: Ints) -> None:
    """Follow the log backwards."""
    for entry in range(len(log) - 1, -1, -1):
        kind, node, first, second, at = log[entry]
        if kind == FOLLOWS:
            at += choices[first]
        elif kind == BY_PAIR:
            at += choices[first] * (ptr[second + 1] - ptr[second]) + choices[second]
        choices[node] = data[at]


@kernel
def hang(net: Network, end: int, node: int) -> None:
    net.following[end] = net.head[node]
    net.head[node] = end


@kernel
def far(net: Network, end: int) -> int:
    """The node at the other end."""
    return int(net.eu[end >> 1] if end & 1 else net.ev[end >> 1])


@kernel
def kill(net: Network, e: int) -> None:
    net.edge_live[e] = 0
    net.changed[net.eu[e]] = net.changed[net.ev[e]] = 1
    net.degree[net.eu[e]] -= 1
    net.degree[net.ev[e]] -= 1
    wake_node(net, net.eu[e])
    wake_node(net, net.ev[e])


@kernel
def joining(net: Network, v: int, w: int) -> int:
    """The edge between v and w, or -1. Takes dead edges that it passes out of a list; nobody else may be on the way through it."""
    near, other = (v, w) if net.degree[v] <= net.degree[w] else (w, v)
    before, end = -1, net.head[near]
    while end >= 0:
        after = net.following[end]
        if net.edge_live[end >> 1]:
            if net.eu[end >> 1] == other or net.ev[end >> 1] == other:
                return int(end >> 1)
            before = end
        elif before < 0:
            net.head[near] = after
        else:
            net.following[before] = after
        end = after
    return -1


@kernel
def unmark(net: Network, node: int) -> None:
    end = net.head[node]
    while end >= 0:
        net.mark[far(net, end)] = -1
        end = net.following[end]


@kernel
def wake_edge(net: Network, e: int) -> None:
    net.changed[net.eu[e]] = net.changed[net.ev[e]] = 1
    if net.edge_waits[e] == 0:
        net.edge_waits[e] = 1
        net.edge_queue[net.scalars[EDGE_TAIL]] = e
        net.scalars[EDGE_TAIL] = (net.scalars[EDGE_TAIL] + 1) % len(net.edge_queue)


@kernel
def wake_node(net: Network, node: int) -> None:
    if net.node_waits[node] == 0 and net.present[node]:
        net.node_waits[node] = 1
        net.node_queue[net.scalars[NODE_TAIL]] = node
        net.scalars[NODE_TAIL] = (net.scalars[NODE_TAIL] + 1) % len(net.node_queue)


@kernel
def wake_around(net: Network, node: int) -> None:
    """Queue the node, its edges and its neighbours: it has lost choices, and a table may have become small enough."""
    wake_node(net, node)
    end = net.head[node]
    while end >= 0:
        if net.edge_live[end >> 1]:
            wake_edge(net, end >> 1)
            wake_node(net, far(net, end))
        end = net.following[end]
