"""Measures this machine: arithmetic, memory bandwidth, launch time, and the link between local ranks -> Hardware.

A hardware file holds peaks, of which the cost model expects its efficiencies to be reached; so what is measured is divided by them, and
a plan made for the file predicts what was measured.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from cost_models import Hardware, Link
from cost_models.efficiency import Efficiency

ARITHMETIC_EFFICIENCY, MEMORY_EFFICIENCY = Efficiency().arithmetic, Efficiency().memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SMALL_BYTES, LARGE_BYTES = 4096, 2**24
"""The two sizes between which the link's latency and bandwidth are told apart."""


@dataclass(frozen=True)
class Measured:
    """What was measured, and what was not: ``notes`` are sentences for the file's comments."""

    hardware: Hardware
    notes: tuple[str, ...]


def measure(ranks: int = 2, seconds: float = 0.5) -> Measured:
    """Measures the device that torch would use here, and the link between ``ranks`` local ranks.

    Args:
        ranks: processes for the link; fewer than 2, or fewer GPUs, and the link is not measured.
        seconds: about how long each figure is measured.
    """
    linked = _link(ranks) if ranks >= 2 else None  # first, since processes that have used CUDA cannot be forked
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    notes = [f"measured on {_device_name(device)} with torch {torch.__version__}, {torch.get_num_threads()} threads a rank"]
    peaks = {name: _flops(dtype, device, seconds) / ARITHMETIC_EFFICIENCY for name, dtype in DTYPES.items()}
    bandwidth = _memory_bandwidth(device, seconds)
    if linked is not None:
        link, backend = linked
        notes.append(f"the link is an all-gather among {ranks} local ranks over {backend}")
    else:
        link = Link(0.0, bandwidth)
        notes.append("the link was not measured, for want of a second device: the device's own memory stands for it")
    notes.append("links.network cannot be measured on one machine and repeats links.node: replace it for several nodes")
    hardware = Hardware(
        name=f"measured-{platform.node() or 'machine'}",
        memory_bytes=float(_memory_bytes(device)),
        memory_bandwidth=bandwidth / MEMORY_EFFICIENCY,
        kernel_launch_seconds=_launch_seconds(device, seconds),
        peak_flops=tuple(peaks.items()),
        devices_per_node=torch.cuda.device_count() if device.type == "cuda" else max(ranks, os.cpu_count() or 1),
        node=link,
        network=link,
    )
    return Measured(hardware, tuple(notes))


def to_toml(measured: Measured) -> str:
    """The hardware file's text, which ``load_hardware`` reads back."""
    data = measured.hardware.to_dict()
    lines = [f"# {note}" for note in measured.notes]
    lines += [f"# Arithmetic and memory are divided by the cost model's efficiencies ({ARITHMETIC_EFFICIENCY}, {MEMORY_EFFICIENCY})."]
    lines += [f"{key} = {_value(value)}" for key, value in data.items() if key != "links"]
    for name, link in data["links"].items():
        lines += [f"[links.{name}]", *(f"{key} = {_value(value)}" for key, value in link.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{value:.4g}" if isinstance(value, float) and value else repr(value)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"a {platform.machine()} CPU"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _flops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Operations a second of a square matrix product, large enough to be bound by arithmetic."""
    size = 8192 if device.type == "cuda" else 768
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _time(lambda: a @ b, device, seconds)


def _memory_bandwidth(device: torch.device, seconds: float) -> float:
    """Bytes read and written a second by a copy that no cache holds."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time(lambda: target.copy_(source), device, seconds)


def _launch_seconds(device: torch.device, seconds: float) -> float:
    """Seconds of an operator that does next to nothing, launched one after another."""
    value = torch.ones(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            value.add_(1.0)

    return _time(hundred, device, seconds) / 100


def _time(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The median time of ``work`` once warm, repeated for about ``seconds``."""

    def once() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    times, end = [once()], time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(once())
    return median(times)


def _link(ranks: int) -> tuple[Link, str] | None:
    """Latency and bandwidth from all-gathers of two sizes, t = latency + (n - 1) / n * bytes / bandwidth, and the backend.

    None on a machine with some GPUs but fewer than ``ranks``.
    """
    from autopar.verify.launch import run_ranks

    found = run_ranks(_gathers, ranks)[0]
    if found is None:
        return None
    small, large, backend = found
    share = (ranks - 1) / ranks
    bandwidth = share * (LARGE_BYTES - SMALL_BYTES) / max(large - small, 1e-9)
    return Link(max(small - share * SMALL_BYTES / bandwidth, 0.0), bandwidth), backend


def _gathers(rank: int) -> tuple[float, float, str] | None:
    """On a rank: seconds of a small and of a large all-gather, and the backend used."""
    if not torch.cuda.is_available():
        device, group, backend = torch.device("cpu"), dist.group.WORLD, "gloo"
    elif torch.cuda.device_count() < dist.get_world_size():
        return None
    else:
        torch.cuda.set_device(rank)
        device, group, backend = torch.device("cuda", rank), dist.new_group(backend="nccl"), "nccl"
    return _gather_seconds(SMALL_BYTES, device, group), _gather_seconds(LARGE_BYTES, device, group), backend


def _gather_seconds(full_bytes: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """The median of 10 all-gathers of ``full_bytes`` in all, on this rank."""
    ranks = dist.get_world_size()
    part = torch.ones(full_bytes // ranks, dtype=torch.uint8, device=device)
    whole = torch.empty(full_bytes // ranks * ranks, dtype=torch.uint8, device=device)
    times = []
    for _ in range(13):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_gather_single(whole, part, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[3:])
