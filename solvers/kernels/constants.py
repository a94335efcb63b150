"""Numbers that kernels and their callers share."""

from __future__ import annotations

NEVER = 2**62
"""Cost of a forbidden choice or pair among integers; the sum of finite costs stays below it."""
FAR = 1e25
"""Cost of a forbidden choice or pair among floats: above every sum of costs, and adding costs to it changes nothing that matters."""

# Places in Network.scalars.
CONSTANT, POOL, LOG, LOG_DATA, EDGE_HEAD, EDGE_TAIL, NODE_HEAD, NODE_TAIL, INFEASIBLE, UPPER, NEED, VISITED, SCALARS = range(13)
# Kinds of entries in the log.
FIXED, FOLLOWS, BY_PAIR = range(3)
# What ``tables.tighten`` finds, added together; the last three are told only where no choice was lost.
LOST_FIRST, LOST_SECOND, MOVED_FIRST, MOVED_SECOND, IS_ZERO, FIRST_FOLLOWS, SECOND_FOLLOWS = 1, 2, 4, 8, 16, 32, 64
# States of a node during an elimination sweep.
ACTIVE, GONE, HELD = range(3)

MEMBERS, FACTORS = 64, 4096
"""Nodes of a table's scope, and tables that are summed for one node, at most: widths of the workspace's arrays."""
NO_STEP = 1e300
"""The step of a pipeline's orders that wait for one another for ever, or hold more than a device may."""
