"""Every collective means the same in lockstep and on process groups, over whole axes, parts of axes and several axes in any order."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.graph import Graph, GraphInput, GraphOutput, Tensor
from autopar.program import OUTPUT, Assignment, Layout, Program, build_program
from autopar.reshard import find_reshard
from autopar.runtime.backends import Exchange, LockstepRanks, ProcessRanks
from autopar.runtime.execution import bind, groups_needed, simulate
from autopar.runtime.groups import group_of, groups
from autopar.runtime.placement import local_part
from autopar.sharding import ShardingSpec
from autopar.verify.launch import run_ranks
from cost_models import Mesh, SubAxis
from tests.runtime.plans import machine
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
        found += [(Exchange("all_gather", axes, (dim,)), dtype) for dim in (0, 1)]
        found += [(Exchange("all_to_all", axes, dims), dtype) for dims in ((0, 1), (1, 0))]
        reduced = REDUCED[number % len(REDUCED)]
        found += [(Exchange("reduce_scatter", axes, (dim,), reduction), reduced) for dim in (0, 1) for reduction in ("sum", "max", "min")]
        found += [(Exchange("all_reduce", axes, (), reduction), reduced) for reduction in ("sum", "max", "min")]
    both = WHOLE
    found += [(Exchange("permute", both, sources=(0, 4, 1, 5, 2, 6, 3, 7)), dtype) for dtype in DTYPES]
    found += [(Exchange("permute", both, sources=sources), torch.float32) for sources in (tuple(range(8)), (0, 0, 0, 0, 7, 7, 7, 7))]
    return found


def locals_of(dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-8, 8, (16, 8), generator=generator).to(dtype) for _ in range(ranks)]


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
    a, b = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])
    assert ranks.collective(Exchange("all_gather", axes, (1,)), [a, b])[1].tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]
    assert [part.tolist() for part in ranks.collective(Exchange("reduce_scatter", axes, (0,)), [a, b])] == [[[6, 8]], [[10, 12]]]
    exchanged = ranks.collective(Exchange("all_to_all", axes, (0, 1)), [a, b])
    assert [part.tolist() for part in exchanged] == [[[1], [3], [5], [7]], [[2], [4], [6], [8]]]
    assert ranks.collective(Exchange("all_reduce", axes, (), "max"), [a, b])[0].tolist() == [[5, 6], [7, 8]]
    assert [part.tolist() for part in ranks.collective(Exchange("permute", axes, sources=(1, 0)), [a, b])] == [b.tolist(), a.tolist()]


def test_process_groups_do_what_lockstep_does() -> None:
    mesh = Mesh.parse("2x4")
    cases = exchanges()

    def rank_main(rank: int) -> list[str]:
        backend = ProcessRanks(mesh, [exchange.axes for exchange, _ in cases])
        wrong = []
        for exchange, dtype in cases:
            tensors = locals_of(dtype, mesh.ranks)
            wanted = LockstepRanks(mesh).collective(exchange, tensors)[rank]
            (found,) = backend.collective(exchange, [tensors[rank]])
            if found.dtype != dtype or not found.equal(wanted):
                wrong.append(f"{exchange} {dtype}")
        return wrong

    assert run_ranks(rank_main, mesh.ranks) == [[]] * mesh.ranks


def reshard_program(mesh: str, source: ShardingSpec, target: ShardingSpec) -> Program | None:
    """A program that does nothing but bring its input from one spec to another; None when there is no way."""
    where, shape = machine(mesh), (24, 12)
    if find_reshard(shape, 8, source, target, where) is None:
        return None
    tensors, entry, exit_ = {"x": Tensor("x", shape, "float64")}, GraphInput("x", "input", "x"), GraphOutput("x", "output", "0")
    graph = Graph("inference", tensors, (entry,), (), (exit_,))
    layout = Layout("x@0", "x", "x", target, "forward", f"{OUTPUT}0")
    return build_program(graph, Assignment({"x": source}, {}, (layout,), {(f"{OUTPUT}0", 0): "x@0"}), where)


def every_reshard(mesh: str) -> list[Program]:
    specs = [spec for spec in every_spec(Mesh.parse(mesh)) if len({word for _, word in spec.partial}) <= 1]
    found = [reshard_program(mesh, one, other) for one, other in itertools.permutations(specs, 2)]
    return [program for program in found if program is not None]


@pytest.mark.parametrize("mesh", ["4", "6", "2x2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("2x4", "3x4"))])
def test_every_reshard_is_right_in_value(mesh: str) -> None:
    whole = torch.randn(24, 12, dtype=torch.float64)
    for program in every_reshard(mesh):
        assert simulate(program, {"x": whole}).outputs[0].equal(whole), program.instructions[0]


@pytest.mark.parametrize("mesh", ["2x2", pytest.param("4", marks=pytest.mark.slow), pytest.param("2x4", marks=pytest.mark.slow)])
def test_every_reshard_is_right_on_real_ranks(mesh: str) -> None:
    programs = every_reshard(mesh)
    whole = torch.randn(24, 12, dtype=torch.float64)
    shape = Mesh.parse(mesh)

    def rank_main(rank: int) -> list[str]:
        backend = ProcessRanks(shape, [axes for program in programs for axes in groups_needed(program)])
        wrong = []
        for program in programs:
            values = {"x": [local_part(whole, program.specs["x"], shape, rank).contiguous()]}
            bind(program, backend, torch.device("cpu")).forward(values)
            spec = program.specs["x@0"]
            if not spec.partial and not values["x@0"][0].equal(local_part(whole, spec, shape, rank)):
                wrong.append(f"{program.specs['x']} -> {spec}")
        return wrong

    assert run_ranks(rank_main, shape.ranks) == [[]] * shape.ranks
