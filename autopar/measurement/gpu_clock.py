"""Device time and host time of a call on a GPU, apart.

The host issues kernels and the device runs them later, in order. A small kernel takes the host longer than the device. Events around such
kernels would measure the host, since the device waits between them. So the device first gets other work, which lasts until the host has
issued all calls: then it runs them without a gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Protocol

import torch

WINDOWS = 3
"""How often a figure is measured; the median counts."""
MOST_QUEUED = 50
"""Calls issued ahead, at most. A CUDA stream holds about 1000 kernels before the host must wait, and a call has up to 20."""
LEADS = (1.5, 6.0, 24.0)
"""How long the device is kept busy, in host seconds of the calls. Each is tried when the host was late with the one before."""
DELAY_SIZE = 2048
"""Rows and columns of a float32 product that keeps the device busy. Its 17 GFLOP take 0.26 ms at an H100's peak, and 0.04 ms to issue."""
DELAY_CALLS = 8
"""Products whose mean time is that of one."""


@dataclass(frozen=True)
class CallTime:
    """Seconds of one call.

    Args:
        device: that the device is busy with it.
        host: that the host takes to issue it; 0 where the host is the device.
    """

    device: float
    host: float = 0.0


class Queue(Protocol):
    """A device that works through what its host issues, in order."""

    def now(self) -> float:
        """Seconds on the host's clock."""

    def wait(self) -> None:
        """Until the device has nothing left to do."""

    def mark(self) -> Any:
        """A place in the queue."""

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has come to the mark."""

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Of the device, from one mark to a later one, both reached."""

    def delay(self, seconds: float) -> None:
        """Queues work for the device that lasts this many seconds at least."""


def time_call(call: Callable[[], Any], queue: Queue, window: float) -> CallTime:
    """The medians over some windows, once warm.

    Args:
        call: issues its work to ``queue``. The host seconds of one that reads a value back include the device's.
        window: seconds of calls that are measured together.
    """
    call()
    queue.wait()
    begin = queue.now()
    call()
    queue.wait()
    count = max(1, min(MOST_QUEUED, int(window / max(queue.now() - begin, 1e-9))))
    host = median(_measure_host(call, queue, count) for _ in range(WINDOWS))
    return CallTime(median(_measure_device(call, queue, count, host) for _ in range(WINDOWS)), host)


def _measure_host(call: Callable[[], Any], queue: Queue, count: int) -> float:
    """Mean host seconds of a call, from an empty queue on."""
    begin = queue.now()
    for _ in range(count):
        call()
    seconds = queue.now() - begin
    queue.wait()
    return seconds / count


def _measure_device(call: Callable[[], Any], queue: Queue, count: int, host: float) -> float:
    """Mean device seconds of a call, all issued before the device begins the first."""
    seconds = 0.0
    for lead in LEADS:
        queue.delay(lead * count * host)
        begin = queue.mark()
        for _ in range(count):
            call()
        end = queue.mark()
        in_time = not queue.is_reached(begin)
        queue.wait()
        seconds = queue.seconds_between(begin, end) / count
        if in_time:
            break
    return seconds


class CudaQueue:
    """The current stream of a CUDA device, which must be the current device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.factor = torch.ones(DELAY_SIZE, DELAY_SIZE, device=device)
        self.product = self.factor @ self.factor
        begin = self.mark()
        self._multiply(DELAY_CALLS)
        end = self.mark()
        self.wait()
        self.delay_seconds = self.seconds_between(begin, end) / DELAY_CALLS

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.factor, self.factor, out=self.product)

    def now(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: Any) -> bool:
        return mark.query()

    def seconds_between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) * 1e-3  # torch counts milliseconds

    def delay(self, seconds: float) -> None:
        self._multiply(math.ceil(seconds / self.delay_seconds))


@cache
def cuda_queue(device: torch.device) -> CudaQueue:
    """The queue of a device, whose delay is measured once."""
    return CudaQueue(device)
