"""Long work that makes many values: the garbage collector walks the young ones only.

Torch alone is half a million objects; planning makes millions that come and go, hardly any of them in cycles, and every so often Python
would walk all of them for it, for a tenth of the time that planning takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

RARE = 1_000_000
"""Collections of the middle generation between two of the old one."""

_lock = Lock()
_inside: list[tuple[int, int, int]] = []
"""The thresholds that each thread that is inside has found."""


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Meanwhile what has lived for long is not looked at. The last thread that leaves restores what the first one found."""
    with _lock:
        _inside.append(gc.get_threshold() if not _inside else _inside[0])
        gc.set_threshold(*_inside[0][:2], RARE)
    try:
        yield
    finally:
        with _lock:
            found = _inside.pop()
            if not _inside:
                gc.set_threshold(*found)
