"""Clock: seconds of a call, on a rank whose fellows compute as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.measurement.gpu_clock import WINDOWS, CallTime, cuda_queue, time_call

SPIN_SECONDS = 0.1
"""How long all ranks compute at once for their stretch to be seen: many times a scheduler's slice."""
SPIN = 256
"""Rows and columns of the product that they compute meanwhile."""


@dataclass(frozen=True)
class Clock:
    """How calls are timed.

    On a CPU with one thread a rank, a call takes its processor time, to be multiplied by the ranks' ``stretch``: that is what a step sees,
    and other programs on the machine disturb it little. With more threads it is timed by the clock on the wall. On a GPU the device's own
    clock counts (``gpu_clock``).

    Args:
        device: where calls run.
        window: seconds that one figure is measured, ``WINDOWS`` times.
    """

    device: torch.device
    window: float

    @property
    def by_processor_time(self) -> bool:
        """Whether calls are timed by processor time."""
        return self.device.type == "cpu" and torch.get_num_threads() == 1

    def now(self) -> float:
        """Seconds that have passed on a CPU."""
        return time.thread_time() if self.by_processor_time else time.perf_counter()

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of one ``call`` of many in a row, once warm; on a GPU the device's."""
        return self.measure(call).device

    def measure(self, call: Callable[[], Any]) -> CallTime:
        """Device and host seconds of one ``call`` of many in a row, once warm."""
        if self.device.type == "cuda":
            return time_call(call, cuda_queue(self.device), self.window)
        call()
        return CallTime(median(self._window(call) for _ in range(WINDOWS)))

    def _window(self, call: Callable[[], Any]) -> float:
        """Mean seconds of the calls that fit in a window of a CPU."""
        count, begin, end = 0, self.now(), time.perf_counter() + self.window
        while True:
            call()
            count += 1
            if time.perf_counter() >= end:
                return (self.now() - begin) / count

    def stretch(self) -> float:
        """Seconds on the wall for a second of processor time while every rank computes: 2 where there are twice as many ranks as cores.
        1 where calls are timed on the wall. Collective."""
        if not self.by_processor_time:
            return 1.0
        a = torch.ones(SPIN, SPIN)
        meet()
        wall, processor = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < SPIN_SECONDS:
            a @ a
        return (time.perf_counter() - wall) / (time.thread_time() - processor)


def meet() -> None:
    """Waits for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def mean_over_ranks(values: list[float]) -> list[float]:
    """Each value's mean over all ranks. Collective."""
    return [sum(each) / len(each) for each in zip(*_everywhere(values), strict=True)]


def most_over_ranks(value: float) -> float:
    """The largest of the ranks' values. Collective."""
    return max(_everywhere(value))


def _everywhere(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
