"""``kernel``: compiles a loop over arrays with numba, keeps the machine code on disk, and does without where that fails.

Kernels hold no interpreter lock, so that two threads use two cores on the same arrays. Where nothing is compiled (no numba, or
``NUMBA_DISABLE_JIT=1``, which switches it off everywhere) a kernel runs as plain Python; the few that are run millions of times are
given a second form in NumPy for that case, and tests hold the two forms against each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in {"", "0"}
"""Whether kernels run as machine code."""


def kernel(function: Function) -> Function:
    """The function, compiled at its first call if it can be. Arguments must be numbers and arrays of one type at every call."""
    if not COMPILED:
        return function
    import numba

    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder can be written for the machine code: compile anew in each process
        return cast(Function, numba.njit(nogil=True)(function))


def kernel_or(plain: Function) -> Callable[[Function], Function]:
    """A ``kernel`` that is ``plain``, of the same arguments and results, where nothing is compiled."""
    return kernel if COMPILED else lambda function: plain


def is_first_use() -> bool:
    """Whether the kernels are still to be compiled on this machine (some 40 s, once); False where that cannot be told."""
    here = Path(__file__).parent
    if not COMPILED or os.environ.get("NUMBA_CACHE_DIR") or not os.access(here, os.W_OK):
        return False
    return not any((here / "__pycache__").glob("elimination.*.nbi"))
