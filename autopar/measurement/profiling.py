"""The profile from start to end: start ranks, measure on each, fit."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autopar.measurement.clock import Clock, mean_over_ranks
from autopar.measurement.device import Peaks, describe, memory_bytes, peaks, reserved_bytes, time_copies, time_optimizer
from autopar.measurement.hardware import Measured, Times, fit
from autopar.measurement.links import Ranks, time_links, time_overlap
from autopar.measurement.operators import LARGE, SMALL, Sample, samples, time_operators
from autopar.measurement.parameters import LAYERS, prepared, time_parameters
from autopar.verify.launch import run_ranks


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        window: seconds of one figure, measured three times.
        models: how many of the built-in models' operators are timed; None for all.
        most_bytes: of the tensors that collectives are timed on; on CPUs never more than ``MOST_BYTES_ON_CPU``.
    """

    window: float = 0.008
    models: int | None = None
    most_bytes: float = math.inf


MOST_BYTES_ON_CPU = 2**24
"""Bytes of a buffer on a CPU, at most. Above 32 MiB the C library asks the system for memory at each call, which distorts prices."""
QUICK = Effort(0.002, 2, 2**21)
"""A rough file in seconds."""


def measure(ranks: int | None = None, effort: Effort | None = None, *, quiet: bool = False) -> Measured | None:
    """Measures this machine.

    Started by torchrun, the ranks there are measure, on the GPUs if each has one. Otherwise ``ranks`` processes are started here.

    Args:
        ranks: by default one for each GPU, or without GPUs one for each core, at most four. One rank measures no link.
        effort: by default everything, in a minute or two.
        quiet: no words on stderr about what is being measured.

    Returns:
        what rank 0 knows; None on the other ranks under torchrun.
    """
    effort = effort or Effort()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _under_torchrun(effort, quiet)
    count = ranks or torch.cuda.device_count() or min(4, os.cpu_count() or 1)
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= count
    given = _samples(on_gpus, effort, quiet)
    if count == 1:
        return _measure_here(_ranks(0, 1, 1, on_gpus), given, effort, quiet)
    found: list[Measured | None] = run_ranks(lambda rank: _measure_here(_ranks(rank, count, count, on_gpus), given, effort, quiet), count)
    return found[0]


def _under_torchrun(effort: Effort, quiet: bool) -> Measured | None:
    local, count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank = dist.get_rank()
    try:
        given = _samples(on_gpus, effort, quiet or rank > 0)
        return _measure_here(_ranks(rank, count, local, on_gpus), given, effort, quiet)
    finally:
        if started:
            dist.destroy_process_group()


def _ranks(rank: int, count: int, per_node: int, on_gpus: bool) -> Ranks:
    if not on_gpus:
        return Ranks(rank, count, per_node, torch.device("cpu"), "gloo")
    device = torch.device("cuda", rank % per_node)
    torch.cuda.set_device(device)
    return Ranks(rank, count, per_node, device, "nccl")


def _samples(on_gpus: bool, effort: Effort, quiet: bool) -> list[Sample]:
    models = LARGE if on_gpus else SMALL
    _words(0, quiet)(f"capturing {len(models[: effort.models])} models")
    for layers in LAYERS:
        prepared(layers)
    return samples(models[: effort.models])


def _words(rank: int, quiet: bool) -> Callable[[str], None]:
    def say(text: str) -> None:
        if rank == 0 and not quiet:
            print(f"profile: {text}", file=sys.stderr, flush=True)

    return say


def _measure_here(ranks: Ranks, given: list[Sample], effort: Effort, quiet: bool) -> Measured | None:
    """On one of the ranks: everything, in the same order on all; the fit on rank 0."""
    say = _words(ranks.rank, quiet)
    say(f"{ranks.count} ranks, {ranks.per_node} to a node, on {describe(ranks.device)}")
    clock = Clock(ranks.device, effort.window)
    most = peaks(clock)
    rates = mean_over_ranks([*most.flops.values(), most.bandwidth])
    seen, stretch = time_operators(given, clock, say)
    once = time_parameters(clock)  # of a step, beside the optimizer's own launch: they come together, and are one figure
    seen += [*time_copies(clock), *(replace(time, seconds=time.seconds + once) for time in time_optimizer(clock))]
    seconds, hosts = mean_over_ranks([time.seconds for time in seen]), mean_over_ranks([time.host_seconds for time in seen])
    operators = [
        replace(time, seconds=mean * stretch, host_seconds=host) for time, mean, host in zip(seen, seconds, hosts, strict=True)
    ]
    most_bytes = effort.most_bytes if ranks.device.type == "cuda" else min(effort.most_bytes, MOST_BYTES_ON_CPU)
    links = time_links(ranks, clock, stretch, most_bytes, say) if ranks.count > 1 else []
    means = mean_over_ranks([time.seconds for _, time in links])
    collectives = [(link, replace(time, seconds=mean)) for (link, time), mean in zip(links, means, strict=True)]
    slowdown = mean_over_ranks([time_overlap(ranks, clock, stretch, most_bytes)])[0] if ranks.count > 1 else 0.0
    if ranks.rank:
        return None
    overlaps = ranks.device.type == "cuda"
    *flops, bandwidth = (rate / stretch for rate in rates)
    reached = Peaks(dict(zip(most.flops, flops, strict=True)), bandwidth)
    times = Times(reached, tuple(operators), tuple(collectives), slowdown, overlaps)
    hardware = fit(times, f"measured-{platform.node() or 'machine'}", float(memory_bytes(ranks.device, ranks.per_node)), ranks.per_node)
    return Measured(replace(hardware, reserved_bytes=reserved_bytes(ranks.device)), tuple(_notes(ranks, stretch)))


def _notes(ranks: Ranks, stretch: float) -> list[str]:
    notes = [f"measured by {ranks.count} ranks, {ranks.per_node} to a node, on {describe(ranks.device)}; for as many ranks a node"]
    if ranks.device.type == "cuda":
        notes.append("operators by the device's clock; host.issue_seconds: the median of what one takes the host to issue")
    if stretch > 1.1:
        notes.append(f"the ranks share cores: while all compute, a second of work takes {stretch:.2f} s")
    if ranks.count == 1:
        notes.append("the links were not measured, for want of a second rank: the device's own memory stands for them")
    elif ranks.count == ranks.per_node:
        notes.append("links.network cannot be measured on one node and repeats links.node: replace it for several nodes")
    return notes
