"""A small network, and hardware with a host, for tests of values and optimizer states that lie on the host."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import autopar
from autopar.cost_models import Hardware, Machine, Mesh
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search import find_plan
from tests.work import part_of_work

LIMITS = {1: 480_000, 2: 330_000}
"""Bytes of a rank by number of microbatches: fewer than ``free_plan`` holds."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make() -> tuple[Net, tuple[torch.Tensor]]:
    """The network and its inputs: also a target of the command line."""
    torch.manual_seed(0)
    return Net(), (torch.randn(256, 32),)


def make_short() -> tuple[Net, tuple[torch.Tensor]]:
    """The network with few rows: what rests is more than what forward makes. Also a target of the command line."""
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 32),)


def hardware(bandwidth: float = 1e9, host_memory: float = 1e9) -> Hardware:
    """Slow devices whose copies to the host hide well.

    Args:
        bandwidth: bytes/s to the host, each way.
        host_memory: bytes of a node's host.
    """
    link = {"latency_seconds": 1e-6, "bandwidth": 1e10}
    return Hardware.from_dict({
        "name": "small", "memory_bytes": 1e9, "memory_bandwidth": 1e10, "kernel_launch_seconds": 1e-6, "peak_flops": {"float32": 1e10},
        "devices_per_node": 4, "links": {"node": link, "network": link, "host": {"latency_seconds": 1e-7, "bandwidth": bandwidth}},
        "host": {"memory_bytes": host_memory},
    })  # fmt: skip


@cache
def graph(microbatches: int = 1) -> Graph:
    model, args = make()
    return autopar.capture(model, args, microbatches=microbatches)


@cache
@part_of_work(1.0)
def free_plan(microbatches: int = 1) -> ScheduledPlan:
    """A plan on two by two ranks with memory to spare."""
    machine = Machine(Mesh.parse("dp=2,tp=2"), hardware())
    found = find_plan(graph(microbatches), machine, time_limit=60, effort="low", baselines=False).scheduled_plan
    assert found is not None
    return found


@cache
@part_of_work(1.0)
def offloaded(microbatches: int = 1) -> Plan:
    """A plan within its limit that keeps values on the host."""
    return autopar.plan(
        graph(microbatches), mesh="dp=2,tp=2", hardware=hardware(), memory=LIMITS[microbatches], recompute="off", offload="auto",
        microbatches=microbatches, effort="low", time_limit=300,
    )  # fmt: skip


STATES_LIMIT = 120_000
"""Bytes of a rank: fewer than the parameters, gradients and AdamW's states of ``make_short``."""


@cache
def short_graph() -> Graph:
    model, args = make_short()
    return autopar.capture(model, args)


@cache
@part_of_work(1.0)
def hosted(optimizer: str = "adamw", memory: int = STATES_LIMIT) -> Plan:
    """A plan within its limit that keeps optimizer states on the host."""
    return autopar.plan(
        short_graph(), mesh="dp=2,tp=2", hardware=hardware(), memory=memory, offload="auto", optimizer=optimizer, effort="low",
        time_limit=300,
    )  # fmt: skip
