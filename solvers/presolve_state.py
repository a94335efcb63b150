"""The state that presolve works on: one NamedTuple of arrays, changed in place by kernels.

Choices keep their original numbers and tables their original strides, so that undoing needs no renumbering; ``live`` lists the
choices that are left. The ends of edges are linked lists: end ``2 e`` hangs on ``eu[e]``, end ``2 e + 1`` on ``ev[e]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import VIEWS, Bytes, Ints
from .kernels import replay, views
from .kernels.constants import LOG_DATA, NEED, POOL


class Network(NamedTuple):
    """Arrays of a problem under reduction; see the module's docstring."""

    ptr: Ints  # [N + 1] choices of node i: ptr[i] : ptr[i + 1]
    live: Ints  # [C] the first live_count[i] of node i's places hold its remaining choices
    live_count: Ints  # [N]
    cost: Ints  # [C]
    present: Bytes  # [N] 0: fixed, merged or eliminated
    heavy: Bytes  # [N] 1: has memory items
    degree: Ints  # [N]
    head: Ints  # [N] first edge end
    following: Ints  # [2 E] next edge end of the same node, -1 at the end
    eu: Ints  # [E]
    ev: Ints  # [E]
    at: Ints  # [E] where the edge's table begins in pool
    edge_live: Bytes  # [E]
    pool: Ints
    edge_queue: Ints  # [E + 1] ring
    edge_waits: Bytes  # [E]
    node_queue: Ints  # [N + 1] ring
    node_waits: Bytes  # [N]
    touched: Bytes  # [N] 1: costs, tables or neighbours have changed since the choices were last compared
    log: Ints  # [N, 5] kind, node, first, second, where its data begins
    log_data: Ints
    mark: Ints  # [N] scratch, -1
    scalars: Ints  # by the names in kernels.constants


VIEWS[Network] = views.Network


def grown(net: Network) -> Network:
    """Make room for tables and for the log."""
    need = int(net.scalars[NEED])
    return net._replace(pool=_longer(net.pool, net.scalars[POOL], need), log_data=_longer(net.log_data, net.scalars[LOG_DATA], need))


def _longer(array: Ints, used: int, need: int) -> Ints:
    """Copy to an array more than twice as long; what is not used yet takes no memory."""
    longer = np.zeros(2 * len(array) + need, dtype=np.int64)
    longer[:used] = array[:used]
    return longer


def undo(net: Network, choices: Ints) -> Ints:
    """Find the choices of all nodes from those of the nodes still present (shape [N], original numbers)."""
    full = choices.copy()
    replay(net, full)
    return full
