"""A kind of collective is one record: the backends run it as the record says, reshards use it, and its name stands in few files."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.cost_models.collectives import KINDS, STEP_KINDS, Group, KindName, received_bytes, seconds
from autopar.reshard import find_reshard
from autopar.runtime.ranks import backends
from autopar.runtime.ranks.backends import Exchange, LockstepRanks
from autopar.sharding import ShardingSpec
from tests.test_layout import ROOT, sources

RANKS, FULL = 4, 32

MAY_NAME = {
    "autopar/cost_models/collectives.py": "the records",
    "autopar/runtime/ranks/backends.py": "how each backend runs a kind",
    "autopar/reshard/moves.py": "which moves there are",
    "autopar/reshard/trees.py": "moves to and from the class of a permute",
    "autopar/reshard/ways.py": "the same",
    "autopar/reshard/search.py": "the same",
    "autopar/reshard/letters.py": "what a permute costs",
    "autopar/rules/expansion.py": "statistics inside an operator are all-reduced",
    "autopar/rules/inner_exchange.py": "parts travel by permutes",
    "autopar/rules/table.py": "aten.permute",
    "autopar/pipeline/crossing.py": "a value crosses as in a permute",
    "autopar/cost_models/machine.py": "matrices travel to the ranks that make them orthogonal",
    "autopar/importer/collectives/calls.py": "functions of torch.distributed",
    "autopar/measurement/links.py": "what is measured beside operators",
    "autopar/measurement/hardware.py": "the link's own figures",
    "autopar/torch_compat/process_groups.py": "functions of torch.distributed",
    "autopar/torch_compat/placements.py": "torch's own names in redistributions",
    "autopar/check/legs.py": "check keeps its own",
    "autopar/check/host.py": "check keeps its own",
    "autopar/check/calls.py": "check keeps its own",
    "autopar/check/overwriting.py": "check keeps its own",
}
"""Files with a kind's name in code, and what for. What a kind does is asked of its record."""


def test_names_in_plans_are_those_of_the_records() -> None:
    assert get_args(KindName) == tuple(KINDS) and all(kind.name == name for name, kind in STEP_KINDS.items())


@pytest.mark.parametrize("name", KINDS)
def test_backend_takes_and_leaves_what_the_record_says(name: str) -> None:
    kind, mesh = KINDS[name], Mesh.parse(f"x={RANKS}")
    taken, left = (FULL if full else FULL // RANKS for full in (kind.takes_full, kind.leaves_full))
    buffers = [torch.arange(taken) + 100.0 * rank for rank in range(RANKS)]
    given = [buffer.clone() for buffer in buffers]
    exchange = Exchange(name, (mesh.whole(0),), sources=(1, 2, 3, 0) if kind.pairs else ())
    assert exchange.full_bytes(taken * 4) == FULL * 4
    found = LockstepRanks(mesh).start(exchange, buffers)()
    assert [len(result) for result in found] == [left] * RANKS
    for rank, result in enumerate(found):
        blocks = [buffer.view(RANKS, -1)[rank] for buffer in given] if kind.cuts else given
        if kind.pairs:
            blocks = [given[(rank + 1) % RANKS]]
        assert torch.equal(result, sum(blocks) if kind.reduces else torch.cat(blocks))  # type: ignore[call-overload]


@pytest.mark.parametrize("name", KINDS)
def test_every_backend_runs_it(name: str) -> None:
    assert name in backends._OVER_GROUP
    assert name in backends._FUNCTIONAL or KINDS[name].pairs


def test_reshards_use_every_kind() -> None:
    machine = Machine(Mesh.parse("x=2,y=2"), load_hardware("cpu-cluster"))
    words = ["R R", "S0 R", "R S0", "S01 R", "S10 R", "S0 S1", "S1 S0", "R S01", "R R +P0", "S1 R +P0", "R R +P0 +P1"]
    specs = [ShardingSpec.parse(word) for word in words]
    found = {
        step.kind for source, target in itertools.permutations(specs, 2) if not target.partial
        for step in getattr(find_reshard((8, 8), 4, source, target, machine), "steps", ())
    }  # fmt: skip
    assert found == {*STEP_KINDS} - {"mask"}


@pytest.mark.parametrize("name", STEP_KINDS)
def test_price_is_a_latency_and_what_is_received(name: str) -> None:
    group = Group(size=8, latency=3.0, bandwidth=2.0)
    received = received_bytes(name, 1024.0, 8)
    assert seconds(name, 1024.0, group) == (3.0 + received / 2.0 if name in KINDS else 0.0)
    assert 0 <= received <= 2 * 1024 and math.isclose(received_bytes(name, 512.0, 8), received / 2)


def test_kinds_are_named_in_few_files() -> None:
    named = {
        path.relative_to(ROOT).as_posix() for path in sources()
        if any(isinstance(node, ast.Constant) and node.value in KINDS for node in ast.walk(ast.parse(Path(path).read_text())))
    }  # fmt: skip
    assert named == set(MAY_NAME), "ask the kind's record (cost_models.collectives.KINDS) what it does"
