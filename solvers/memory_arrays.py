"""The memory of a core's choices as arrays, as local search and the dual read it."""

from __future__ import annotations

from typing import NamedTuple

from solvers.arrays import VIEWS, Ints
from solvers.kernels import views


class Items(NamedTuple):
    """Memory items of choices and the room at each time; see reduction.Core."""

    ptr: Ints
    begin: Ints
    end: Ints
    usage: Ints
    capacity: Ints


VIEWS[Items] = views.Items
