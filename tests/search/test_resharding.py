"""Prices of all pairs of specs at once against the reshard of each pair."""

import math
import random

import numpy as np
import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import DTYPE_BYTES, Tensor
from autopar.reshard import copied_alone, find_reshard
from autopar.search import find_plan
from autopar.search.choices.reshard_tables import LARGE_BYTES, ReshardPricing
from autopar.sharding import ShardingSpec
from tests.graphs import two_layers
from tests.reshard_cases import all_specs

LINKS = ("network", "node")
PAIRS = 24
ROUNDING = 1e-20
"""Seconds: what is left of some 1e-5 s less their latency is as exact as these are."""


def price(tensor: Tensor, source: ShardingSpec, target: ShardingSpec, on: Machine) -> tuple[float, ...]:
    """As ``Resharding.tables`` says, from the steps of one reshard."""
    found = find_reshard(tensor.shape, DTYPE_BYTES[tensor.dtype], source, target, on)
    if found is None:
        return math.inf, 0.0, 0.0, 0.0, 0.0
    held, copies, least = dict.fromkeys(LINKS, 0.0), 0.0, 0.0
    for step, shapes in zip(found.steps, found.shapes, strict=True):
        if step.is_collective:
            copied = copied_alone(step, shapes) * DTYPE_BYTES[tensor.dtype]
            copies += on.copy_seconds(copied, tensor.dtype)
            least += copied * on.copy_seconds(LARGE_BYTES, tensor.dtype) / LARGE_BYTES
            for link in on.links(step.axes):
                held[link] += max(step.seconds - on.latency_seconds(step.kind, step.axes), 0.0)
    return found.seconds + copies, *held.values(), copies, least


@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize(
    ("mesh", "shape"),
    [("2x4", (8, 16, 3)), ("8x8", (64, 128)), ("2x2x2", (8, 1, 16, 6)), ("4x4x4", (64, 16, 32)), ("2x2x2x2", (16, 4, 8)), ("2x2x2", ()),
     ("2x1x2x2", (8, 8)), ("4", (7, 6, 5)), ("2x3", (7, 9)), ("2x2", (7, 9)), ("2x2x2", (7, 9, 4)), ("4x8", (32, 64, 6)),
     ("2x2x2x2", (4, 2, 4, 2, 4, 2, 6)), ("2x2x2", (1, 8, 8, 1)),
     ("2x24", (48, 24)), ("8x10", (80, 40)), ("4x20", (16, 80, 4)), ("3x40", (120, 240))],
)  # fmt: skip
def test_a_table_holds_the_price_of_every_reshard(mesh: str, shape: tuple[int, ...], reduction: str) -> None:
    on = Machine(Mesh.parse(mesh), load_hardware("h100-sxm"))
    tensor, draw = Tensor("t", shape, "bfloat16"), random.Random(len(mesh))
    specs = all_specs(shape, on.mesh.sizes, reduction, uneven=True)
    sources, targets = (draw.sample(specs, min(PAIRS, len(specs))) for _ in range(2))
    tables = ReshardPricing(on, LINKS).tables(tensor, sources, targets)
    for source, row in zip(sources, tables, strict=True):
        for target, found in zip(targets, row, strict=True):
            here = price(tensor, source, target, on)
            np.testing.assert_allclose(found, here, rtol=1e-12, atol=ROUNDING, err_msg=f"{source} -> {target}")


def test_a_mesh_whose_axis_is_cut_across_nodes_is_planned() -> None:
    on = Machine(Mesh.parse("2x24"), load_hardware("h100-sxm"))
    assert find_plan(two_layers(48, 48, 48), on, effort="low").schedule.machine == on


def test_tables_of_one_machine_share_what_they_know() -> None:
    on = Machine(Mesh.parse("2x2x2"), load_hardware("h100-sxm"))
    specs = all_specs((8, 8), on.mesh.sizes)
    alone = [ReshardPricing(on, LINKS).tables(Tensor("t", (8, 8), dtype), specs, specs) for dtype in ("float32", "bfloat16", "float32")]
    shared = ReshardPricing(on, LINKS)
    for dtype, table in zip(("float32", "bfloat16", "float32"), alone, strict=True):
        halves = [shared.tables(Tensor("t", (8, 8), dtype), some, specs) for some in (specs[: len(specs) // 2], specs[len(specs) // 2 :])]
        np.testing.assert_array_equal(np.concatenate(halves), table)
