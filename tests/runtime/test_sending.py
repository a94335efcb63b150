"""What lies in another order than it is sent in: copied into its place in what is gathered, and gone once nobody else reads it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from autopar.graph import Graph
from autopar.importer import capture
from autopar.runtime.execution.binding import bind
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.steps.accumulation import run_step
from autopar.runtime.steps.simulation import entering, scatter_all
from autopar.schedule import memory
from autopar.verify.live_memory import LiveMemory
from tests.graphs import machine, random_schedule


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part(x).view(4, 16, 4, 8).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(4, 16, 32)).square().mean()


@lru_cache
def graph(mode: Any, dtype: str | None) -> Graph:
    return capture(Attention(), (torch.randn(4, 16, 32),), mode=mode, compute_dtype=dtype).graph


@pytest.mark.parametrize(
    ("mode", "dtype", "mesh", "seed"),
    [
        ("inference", None, "2", 24), ("inference", "bfloat16", "2x2", 15), ("train", None, "2", 14), ("train", None, "4", 9),
        ("train", "bfloat16", "2", 10), ("train", "bfloat16", "4", 10), ("train", "bfloat16", "2x2", 2),
    ],
)  # fmt: skip
def test_heads_are_sent_in_the_memory_that_was_predicted(mode: Any, dtype: str | None, mesh: str, seed: int) -> None:
    made = graph(mode, dtype)
    schedule = random_schedule(made, machine(mesh), seed, None, 0.2 if mode == "train" else 0.0)
    ranks = schedule.machine.mesh.ranks
    executable = bind(schedule, LockstepRanks(schedule.machine.mesh), torch.device("cpu"))
    scattered = {item.tensor: scatter_all(schedule, item.tensor, torch.ones(made.tensors[item.tensor].shape)) for item in made.inputs}
    with LiveMemory(part for parts in scattered.values() for one in parts for part in one) as live:
        run_step(executable, range(ranks), lambda number: entering(scattered, number, ranks), draw=0)
    assert live.peak // ranks <= memory(schedule, "none").peak
