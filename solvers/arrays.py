"""A problem's numbers as flat int64 arrays.

Flat arrays because every solver loops over them, in compiled code where there is some (``on_arrays``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Arrays:
    """The fields of ``Problem``, which says what they mean, unchecked: what a file holds."""

    name: str
    node_ptr: Ints
    costs: Ints
    edges: Ints
    edge_ptr: Ints
    edge_costs: Ints
    item_ptr: Ints
    item_begin: Ints
    item_end: Ints
    item_usage: Ints
    limit: int | None = None


def offsets(counts: Sequence[int] | Ints) -> Ints:
    """[a, b, c] -> [0, a, a + b, a + b + c]."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def ranges(counts: Ints) -> tuple[Ints, Ints]:
    """[2, 0, 3] -> [0, 0, 2, 2, 2], [0, 1, 0, 1, 2]: which, and its place."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - offsets(counts)[:-1][which]


VIEWS: dict[type, Callable[..., Any]] = {}
"""For each NamedTuple of arrays the class that kernels read in its place, made of the same fields."""


def on_arrays(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """A kernel to be called with NumPy's arrays and NamedTuples of them.

    It gets a memoryview of each array, and of a NamedTuple its view (``VIEWS``). Compiled, those become typed buffers; plain, they give
    Python's numbers, several times faster than arrays do.
    """

    @wraps(kernel)
    def call(*arguments: Any) -> Result:
        return kernel(*map(viewed, arguments))

    return call


def viewed(value: Any) -> Any:
    """What a kernel gets for an argument."""
    if isinstance(value, np.ndarray):
        return value.data
    view = VIEWS.get(type(value))
    return value if view is None else view(*map(viewed, value))
