"""Every collective means the same in lockstep and on process groups, over whole axes, parts of axes and several axes in any order."""

from __future__ import annotations

import itertools
import os
import signal
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.cost_models import Mesh, SubAxis
from autopar.errors import VerificationError
from autopar.graph import Graph, GraphInput, GraphOutput, Tensor
from autopar.reshard import find_reshard
from autopar.runtime.execution.binding import bind
from autopar.runtime.ranks.backends import Exchange, LockstepRanks, ProcessRanks, TracedRanks
from autopar.runtime.ranks.collectives import Call
from autopar.runtime.ranks.groups import group_of, groups, groups_needed
from autopar.runtime.ranks.placement import local_part
from autopar.runtime.steps.simulation import simulate
from autopar.schedule import OUTPUT, Assignment, Layout, Schedule, make_schedule
from autopar.schedule.legality import check_legal
from autopar.sharding import REDUCTIONS, ShardingSpec
from autopar.verify.launch import run_ranks
from tests.graphs import machine
from tests.runtime.test_placement import every_spec

WHOLE = (SubAxis(0, 1, 2), SubAxis(1, 1, 4))
GROUPS = [
    WHOLE, WHOLE[::-1], WHOLE[:1], WHOLE[1:], (SubAxis(1, 1, 2),), (SubAxis(1, 2, 2),),
    (SubAxis(1, 2, 2), SubAxis(0, 1, 2)), (SubAxis(1, 2, 2), SubAxis(1, 1, 2)),
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64]
REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def exchanges() -> list[tuple[Exchange, torch.dtype]]:
    """Each kind over each group, with each dtype once or more."""
    found = []
    for number, axes in enumerate(GROUPS):
        dtype = DTYPES[number % len(DTYPES)]
        found += [(Exchange(kind, axes), dtype) for kind in ("all_gather", "all_to_all")]
        reduced = REDUCED[number % len(REDUCED)]
        found += [(Exchange(kind, axes, word), reduced) for kind in ("reduce_scatter", "all_reduce") for word in REDUCTIONS]
    both = WHOLE
    found += [(Exchange("permute", both, sources=(0, 4, 1, 5, 2, 6, 3, 7)), dtype) for dtype in DTYPES]
    found += [(Exchange("permute", both, sources=sources), torch.float32) for sources in (tuple(range(8)), (0, 0, 0, 0, 7, 7, 7, 7))]
    return found


def locals_of(dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-8, 8, (16,), generator=generator).to(dtype) for _ in range(ranks)]


def test_groups_are_row_major_over_their_sub_axes() -> None:
    mesh = Mesh.parse("2x4")
    assert groups(mesh, WHOLE) == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert groups(mesh, WHOLE[::-1]) == ((0, 4, 1, 5, 2, 6, 3, 7),)
    assert groups(mesh, (SubAxis(1, 1, 2),)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert groups(mesh, (SubAxis(1, 2, 2),)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert group_of(mesh, (SubAxis(1, 2, 2),), 6) == (6, 7)
    for axes in GROUPS:
        for rank in range(mesh.ranks):
            assert group_of(mesh, axes, rank)[mesh.index(rank, axes)] == rank


def test_lockstep_by_hand() -> None:
    ranks = LockstepRanks(Mesh.parse("2"))
    axes = (SubAxis(0, 1, 2),)

    def moved(kind: str, **more: Any) -> list[list[int]]:
        return [part.tolist() for part in ranks.start(Exchange(kind, axes, **more), [torch.tensor([1, 2]), torch.tensor([5, 0])])()]

    assert moved("all_gather") == [[1, 2, 5, 0]] * 2
    assert moved("reduce_scatter") == [[6], [2]]
    assert moved("all_to_all") == [[1, 5], [2, 0]]
    assert moved("all_reduce", reduction="max") == [[5, 2]] * 2
    assert moved("permute", sources=(1, 0)) == [[5, 0], [1, 2]]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute"])
def test_in_lockstep_what_was_sent_stays_until_it_was_waited_for(kind: str) -> None:
    """As a rank's own does, so that simulated ranks take as much memory."""
    sent = [torch.ones(2), torch.zeros(2)]
    there = [weakref.ref(part) for part in sent]
    wait = LockstepRanks(Mesh.parse("2")).start(Exchange(kind, (SubAxis(0, 1, 2),), sources=(1, 0)), sent)
    del sent
    assert all(part() is not None for part in there)
    wait()
    del wait
    assert all(part() is None for part in there)


def test_process_groups_do_what_lockstep_does() -> None:
    mesh = Mesh.parse("2x4")
    cases = exchanges()

    def rank_main(rank: int) -> list[str]:
        made = [exchange.axes for exchange, _ in cases]
        wrong = []
        for backend in (ProcessRanks(mesh, made), TracedRanks(mesh, made)):
            for exchange, dtype in cases:
                wanted = LockstepRanks(mesh).start(exchange, locals_of(dtype, mesh.ranks))()[rank]
                (found,) = backend.start(exchange, [locals_of(dtype, mesh.ranks)[rank]])()
                if found.dtype != dtype or not found.equal(wanted):
                    wrong.append(f"{exchange} {dtype} {backend.traced}")
        return wrong

    assert run_ranks(rank_main, mesh.ranks) == [[]] * mesh.ranks


def test_many_may_be_under_way() -> None:
    mesh, axes = Mesh.parse("4"), (SubAxis(0, 1, 4),)

    def rank_main(rank: int) -> list[float]:
        backend = ProcessRanks(mesh, [axes])
        waits = [backend.start(Exchange("all_reduce", axes), [torch.full((1000,), float(number))]) for number in range(8)]
        return [wait()[0][0].item() for wait in reversed(waits)]

    assert run_ranks(rank_main, 4) == [[4.0 * number for number in reversed(range(8))]] * 4


@pytest.mark.parametrize("ends", ["killed", "late"])
def test_a_rank_that_is_gone_between_start_and_wait(ends: str) -> None:
    """The others do not wait for ever: each stops, and says in which collective and with whom."""
    schedule, timeout = reshard_schedule("3", ShardingSpec.parse("R R +P0"), ShardingSpec.parse("R R")), 5.0
    assert schedule is not None
    (call,) = schedule.calls

    def rank_main(rank: int) -> str:
        backend, flights = ProcessRanks(schedule.machine.mesh, [call.axes]), {}
        bound = Call(call, backend)
        dist.barrier()
        if rank != 1:
            bound.start([{"x": torch.ones(24, 12, dtype=torch.float64)}], flights, None)
        elif ends == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            signal.pause()
        bound.finish([{}], flights, None)
        return "done"

    begin = time.monotonic()
    died = (
        "rank 1 of 3 died: it was killed by SIGKILL"
        if ends == "killed"
        else "rank 0 of 3 died: RuntimeError: all_reduce x@0 over x was not"
    )
    with pytest.raises(VerificationError, match=died):
        run_ranks(rank_main, 3, timeout=timeout)
    assert time.monotonic() - begin < 4 * timeout


def reshard_schedule(mesh: str, source: ShardingSpec, target: ShardingSpec) -> Schedule | None:
    """A schedule that does nothing but bring its input from one spec to another; None when there is no way."""
    where, shape = machine(mesh), (24, 12)
    if find_reshard(shape, 8, source, target, where) is None:
        return None
    tensors, entry, exit_ = {"x": Tensor("x", shape, "float64")}, GraphInput("x", "input", "x"), GraphOutput("x", "output", "0")
    graph = Graph("inference", tensors, (entry,), (), (exit_,))
    layout = Layout("x@0", "x", "x", target, "forward", f"{OUTPUT}0")
    return make_schedule(graph, Assignment({"x": source}, {}, (layout,), {(f"{OUTPUT}0", 0): "x@0"}), where)


def every_reshard(mesh: str) -> list[Schedule]:
    specs = [spec for spec in every_spec(Mesh.parse(mesh)) if len({word for _, word in spec.partial}) <= 1]
    found = [reshard_schedule(mesh, one, other) for one, other in itertools.permutations(specs, 2)]
    return [schedule for schedule in found if schedule is not None]


def in_flight(schedules: list[Schedule]) -> list[Schedule]:
    """Those of several collectives, with all of them started before any is waited for."""
    found = []
    for schedule in schedules:
        kinds = [item.kind for item in schedule.instructions]
        if kinds.count("start") > 1 and "slice" not in kinds:
            items = sorted(schedule.instructions, key=lambda item: ("start", "wait", "free").index(item.kind))
            found.append(check_legal(replace(schedule, instructions=tuple(items)), "the test"))
    return found


def test_a_call_may_read_what_is_still_in_flight() -> None:
    whole, schedules = torch.randn(24, 12, dtype=torch.float64), in_flight(every_reshard("2x2"))
    assert len(schedules) > 50
    for schedule in schedules:
        assert simulate(schedule, {"x": whole}).outputs[0].equal(whole), schedule.instructions[0]


@pytest.mark.parametrize("mesh", ["4", "6", "2x2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("2x4", "3x4"))])
def test_every_reshard_is_right_in_value(mesh: str) -> None:
    whole = torch.randn(24, 12, dtype=torch.float64)
    for schedule in every_reshard(mesh):
        assert simulate(schedule, {"x": whole}).outputs[0].equal(whole), schedule.instructions[0]


@pytest.mark.parametrize("mesh", ["2x2", pytest.param("4", marks=pytest.mark.slow), pytest.param("2x4", marks=pytest.mark.slow)])
def test_every_reshard_is_right_on_real_ranks(mesh: str) -> None:
    schedules = every_reshard(mesh)
    schedules += in_flight(schedules)
    whole = torch.randn(24, 12, dtype=torch.float64)
    shape = Mesh.parse(mesh)

    def rank_main(rank: int) -> list[str]:
        backend = ProcessRanks(shape, [axes for schedule in schedules for axes in groups_needed(schedule)])
        wrong = []
        for schedule in schedules:
            values = {"x": local_part(whole, schedule.specs["x"], shape, rank).contiguous()}
            bind(schedule, backend, torch.device("cpu")).forward([values])
            spec = schedule.specs["x@0"]
            if not spec.partial and not values["x@0"].equal(local_part(whole, spec, shape, rank)):
                wrong.append(f"{schedule.specs['x']} -> {spec}")
        return wrong

    assert run_ranks(rank_main, shape.ranks) == [[]] * shape.ranks
