"""Long work runs with seldom garbage collections, of young objects only.

Importing torch makes half a million objects, and collections take a fifth of that time. Planning makes millions of short-lived objects,
hardly any in cycles; full collections would take a tenth of its time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SELDOM = (50_000, 200, 1_000_000)
"""Thresholds of the three generations. Measured: after 20 collections only 1 object in 400 of generation 1 was garbage, since graphs,
schedules and prices stay."""

_lock = Lock()
_inside: list[tuple[int, int, int]] = []
"""The thresholds that each thread inside found when it entered."""


@contextmanager
def young_garbage_only() -> Iterator[None]:
    """Within it old objects are not collected. The last thread that leaves restores the thresholds that the first one found."""
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
