"""The mesh on the page: every rank once, whole nodes, and the part that each rank holds."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from autopar.report import html
from autopar.report.mesh_picture import ACROSS, DOWN, RANKS, lay_out, mesh_words, place_of
from autopar.sharding import ShardingSpec
from tests.graphs import two_layer_plan

MESHES = [(1,), (4,), (64,), (8, 8), (512, 8), (8, 512), (7, 3), (3, 5, 7), (2, 2, 2, 2), (997,), (997, 2), (2**20, 8)]
SPECS = [
    ((16, 12), "S01 R", (2, 4)), ((16, 12), "S1 S0", (2, 4)), ((16, 12), "S10 R", (2, 4)), ((10, 6), "S0 R", (4, 2)), ((8,), "R", (2,)),
]  # fmt: skip
NODE = shutil.which("node")


@pytest.mark.parametrize("sizes", MESHES)
def test_every_rank_has_one_place(sizes: tuple[int, ...]) -> None:
    grid = lay_out(sizes, 8)
    assert grid.ranks == min(math.prod(sizes), RANKS)
    assert grid.across <= ACROSS and grid.down * grid.blocks * grid.across >= grid.ranks
    assert grid.down <= DOWN and (grid.blocks - 1) * grid.down * grid.across < grid.ranks, "no block is empty"
    assert len(sizes) == 1 or sizes[-1] > ACROSS or grid.across == min(sizes[-1], grid.ranks), "the last axis is a row"


def test_thousands_of_ranks_are_no_elements_of_the_page() -> None:
    plan = two_layer_plan().model_copy(update={"mesh": {"dp": 512, "tp": 8}})
    assert mesh_words(plan).startswith("4096 ranks in 1024 nodes of up to 4: tp across, dp down, in 8 blocks")
    page = html(two_layer_plan().model_copy(update={"mesh": {"dp": 2, "tp": 2}}))
    assert page.count("<canvas class=mesh") == 1
    assert "the first 16384 are drawn" in mesh_words(plan.model_copy(update={"mesh": {"dp": 4096, "tp": 8}}))


@pytest.mark.parametrize(("shape", "text", "sizes"), SPECS)
def test_parts_are_those_of_the_spec(shape: tuple[int, ...], text: str, sizes: tuple[int, ...]) -> None:
    spec = ShardingSpec.parse(text)
    place = place_of(shape, spec, sizes)
    assert len(place) == sum(bool(axes) for axes in spec.dims)
    for at in itertools.product(*map(range, sizes)):
        for row in place:
            dim, parts, extent = int(str(row["dim"])), int(str(row["parts"])), int(str(row["extent"]))
            number = sum(stride * index for stride, index in zip(row["strides"], at, strict=True))  # type: ignore[call-overload]
            chunk = -(-extent // parts)
            begin = min(extent, number * chunk)
            assert (begin, min(extent, begin + chunk) - begin) == spec.span(dim, extent, sizes, at)


@pytest.mark.skipif(NODE is None, reason="no JavaScript here to run the page's arithmetic")
@pytest.mark.parametrize(("shape", "text", "sizes"), SPECS)
def test_the_page_counts_parts_in_the_same_way(shape: tuple[int, ...], text: str, sizes: tuple[int, ...]) -> None:
    script = (files("autopar.report") / "mesh.js").read_text()
    functions = re.search(r"( *function coordinates.*?)\n *function draw_mesh", script, re.DOTALL)
    assert functions is not None
    place = place_of(shape, ShardingSpec.parse(text), sizes)
    axes = json.dumps([[f"a{index}", size] for index, size in enumerate(sizes)])
    ask = f"[...Array({math.prod(sizes)}).keys()].map(rank => parts({json.dumps(place)}, coordinates(rank, {axes})))"
    code = f"{functions[1]}\nconsole.log(JSON.stringify({ask}));"
    found = json.loads(subprocess.run([str(NODE), "-e", code], capture_output=True, text=True, check=True, timeout=60).stdout)
    strides = [row["strides"] for row in place]
    expected = [
        [sum(stride * index for stride, index in zip(row, at, strict=True)) for row in strides]  # type: ignore[call-overload]
        for at in itertools.product(*map(range, sizes))
    ]
    assert found == expected
