"""Device and host seconds of calls on a GPU, told apart: on a device that is only thought of, whose seconds are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from autopar.measurement import gpu_clock
from autopar.measurement.gpu_clock import CallTime, CudaQueue, time_call
from autopar.measurement.hardware import ENOUGH
from autopar.measurement.operators import LARGE, SMALL, _times_in_a_row, samples
from autopar.measurement.rearrangements import NAME


class ImaginedQueue:
    """A host and a device whose times are simulated; marks are the times at which the device comes to them."""

    def __init__(self) -> None:
        self.host = 0.0
        self.device = 0.0
        self.delays = list[float]()

    def issue(self, host: float, device: float) -> None:
        """One kernel: it begins when it is issued and the device is free."""
        self.host += host
        self.device = max(self.host, self.device) + device

    def now(self) -> float:
        return self.host

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def mark(self) -> float:
        return max(self.host, self.device)

    def is_reached(self, mark: float) -> bool:
        return mark <= self.host

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin

    def delay(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.issue(1e-6, seconds)


@pytest.mark.parametrize("device", [2e-6, 4e-5, 3e-3])
@pytest.mark.parametrize("host", [5e-6, 4e-5])
def test_device_and_host_seconds_are_told_apart(host: float, device: float) -> None:
    queue = ImaginedQueue()
    found = time_call(lambda: queue.issue(host, device), queue, 0.008)
    assert (found.device, found.host) == pytest.approx((device, host))


def test_a_host_that_was_late_gets_more_time() -> None:
    """Once it has been measured, the host becomes ten times slower."""
    queue, calls = ImaginedQueue(), iter(range(10**6))

    def call() -> None:
        queue.issue(4e-4 if next(calls) > 160 else 4e-5, 2e-6)

    assert time_call(call, queue, 0.008).device == pytest.approx(2e-6)
    assert max(queue.delays) > 3 * min(queue.delays)


def test_a_call_that_waits_for_the_device_ends_with_at_most_both_seconds() -> None:
    queue = ImaginedQueue()

    def call() -> None:
        queue.issue(4e-5, 1e-4)
        queue.wait()

    found = time_call(call, queue, 0.008)
    assert 1e-4 <= found.device <= 1.4e-4 * 1.01


def test_the_queue_of_a_gpu_uses_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public API alone: events of the current stream, in milliseconds. Their times are a simulated device's of 1 ms a product."""
    imagined = ImaginedQueue()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = imagined.mark()

        def query(self) -> bool:
            return imagined.is_reached(self.at)

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    multiply: Callable[..., torch.Tensor] = torch.mm

    def mm(*args: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        imagined.issue(1e-5, 1e-3)
        return multiply(*args, out=out)

    monkeypatch.setattr(gpu_clock, "DELAY_SIZE", 8)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: imagined.wait())
    queue = CudaQueue(torch.device("cpu"))
    assert queue.delay_seconds == pytest.approx(1e-3, rel=0.01)
    before = imagined.mark()
    queue.delay(0.0025)
    assert imagined.mark() - before == pytest.approx(3e-3, rel=0.01)


def test_what_moves_data_is_measured_in_enough_sizes_for_figures_of_its_own() -> None:
    """Batch norm, sorts and copies that change the layout. On the GPU's way a view, which does no work, is left out."""
    assert all(sum(name == NAME for name, _ in models) >= ENOUGH for models in (SMALL, LARGE))
    given = samples([(name, keys) for name, keys in SMALL if name == NAME])
    clock = SimpleNamespace(device=torch.device("cpu"), now=lambda: 0.0, measure=lambda call: (call(), CallTime(1e-6, 2e-5))[1])
    found = [timed for sample in given for _, timed in _times_in_a_row(sample.graph, clock)]  # type: ignore[arg-type]
    counts = Counter(timed.name for timed in found)
    moving = ("autopar.batch_norm.default", "autopar.batch_norm_backward.default", "aten.clone.default", "aten.sort.default")
    assert all(counts[name] >= ENOUGH for name in moving), counts
    assert "aten.view.default" not in counts and all(timed.flops or timed.bytes_moved for timed in found)
    assert {timed.host_seconds for timed in found} == {2e-5}
