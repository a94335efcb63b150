"""When the command began: a time limit is that of the whole call, what it imports and reads included."""

from __future__ import annotations

import os
import time
from pathlib import Path

_began = time.perf_counter()


def start_clock(*, with_process: bool) -> None:
    """A command begins.

    Args:
        with_process: it began when its process did, and not just now.
    """
    global _began
    _began = time.perf_counter() - (_process_seconds() if with_process else 0.0)


def command_began() -> float:
    """When the command began, of ``perf_counter``."""
    return _began


def command_seconds() -> float:
    """Seconds since the command began."""
    return time.perf_counter() - _began


def _process_seconds() -> float:
    """Seconds since this process started; where the system does not say, the CPU time it has used."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, AttributeError, IndexError):
        return time.process_time()
