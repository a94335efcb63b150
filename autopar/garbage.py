"""Long work that makes many values: the garbage collector walks the young ones only, and seldom.

Torch alone is half a million objects, a fifth of the time that its import takes; planning makes millions that come and go, hardly any of
them in cycles, and every so often Python would walk all of them for it, for a tenth of the time that planning takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SELDOM = (50_000, 200, 1_000_000)
"""Objects made between two collections of the young ones, these between two of the middle generation, these between two of the old. What
has outlived one is mostly there to stay, graphs, schedules and prices: after 20 the middle generation had 1 in 400 to give back."""

_lock = Lock()
_inside: list[tuple[int, int, int]] = []
"""The thresholds that each thread that is inside has found."""


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Meanwhile what has lived for long is not looked at. The last thread that leaves restores what the first one found."""
    with _lock:
        _inside.append(gc.get_threshold() if not _inside else _inside[0])
        gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        with _lock:
            found = _inside.pop()
            if not _inside:
                gc.set_threshold(*found)
