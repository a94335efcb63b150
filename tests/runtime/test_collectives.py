"""What a bucket's buffer holds is the same however its sources lie in memory."""

from __future__ import annotations

import math

import torch

from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.ranks.collectives import Call
from autopar.schedule import Schedule
from autopar.schedule.collectives import Collective
from tests.graphs import machine, random_schedule
from tests.runtime.models import sixes


def buckets() -> list[tuple[Schedule, Collective]]:
    """Buckets of each kind, among them some that cut their sources inside."""
    found: dict[tuple[str, bool], tuple[Schedule, Collective]] = {}
    graph = sixes().captured.graph
    for seed in range(40):
        schedule = random_schedule(graph, machine("2x2"), seed)
        for call in schedule.calls:
            if len(call.parts) > 1:
                found.setdefault((call.kind, any(part.cuts_inside for part in call.parts)), (schedule, call))
    return list(found.values())


def by_hand(call: Collective, sources: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """Row i holds block i of each source, in order."""
    blocks = ranks if call.kind == "reduce_scatter" else 1
    cut = [source.chunk(blocks, part.step.dims[-1] if blocks > 1 else 0) for part, source in zip(call.parts, sources, strict=True)]
    return torch.cat([piece.reshape(-1) for row in range(blocks) for piece in (each[row] for each in cut)])


def test_a_bucket_is_packed_alike_however_its_sources_lie() -> None:
    made = buckets()
    assert {call.kind for _, call in made} >= {"all_reduce", "all_gather", "reduce_scatter"}
    for schedule, call in made:
        mesh = schedule.machine.mesh
        pack = Call(call, LockstepRanks(mesh)).packs[0]
        dtype = getattr(torch, call.dtype)
        sources = [torch.randint(-8, 8, part.shapes.source).to(dtype) for part in call.parts]
        apart = [torch.stack([source, source], -1)[..., 0] for source in sources]
        assert any(not source.is_contiguous() for source in apart)
        wanted = by_hand(call, sources, math.prod(axis.size for axis in call.axes))
        for given in (sources, apart, [*apart[:1], *sources[1:]]):
            assert pack(given).equal(wanted), f"{call.kind} {call.id}"
