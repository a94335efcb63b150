"""The memory of a core's choices as arrays, as local search and prices read it."""

from __future__ import annotations

from typing import NamedTuple

from solvers.arrays import Ints


class Items(NamedTuple):
    """Memory items of choices and the room at each time; see reduction.Core."""

    ptr: Ints
    begin: Ints
    end: Ints
    usage: Ints
    capacity: Ints
