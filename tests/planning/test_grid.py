"""Plans over a grid, with plans that somebody else finds, and a small one in earnest."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.errors import CaptureError, InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning.grid import Grid, plan_grid
from autopar.planning.session import Planned
from autopar.sweeping import Point, Sweep


@pytest.fixture(scope="module")
def plan() -> Plan:
    target = zoo.build("mlp", device="meta")
    return autopar.plan(target.model, target.args, mesh="dp=2", hardware="h100-sxm", time_limit=20)


def walked(
    plan: Plan, ends: dict[int, BaseException | bool], done: Any = lambda point: None
) -> tuple[list[tuple[int, int]], tuple[Point, ...]]:
    """What was planned for, devices and limit, and the points; by number of the plan how it ends."""
    asked: list[tuple[int, int]] = []

    def planner(graph: Graph, count: int) -> Any:
        def within(limit: int, until: float) -> Planned:
            outcome = ends.get(len(asked), False)
            asked.append((count, limit))
            if isinstance(outcome, BaseException):
                raise outcome
            return Planned(plan, outcome)

        return within

    def graph_of(settings: Any) -> Any:
        if settings["batch"] == 0:
            raise CaptureError("no batch", "give one")

    grid = Grid(({"batch": 8}, {"batch": 0}), (4, 2), (70, 30))
    return asked, plan_grid(grid, graph_of, planner, float("inf"), done)


def test_every_point_in_its_order_the_least_memory_first(plan: Plan) -> None:
    said: list[Point] = []
    asked, points = walked(plan, {1: InfeasibleError("large", "allow more")}, said.append)
    assert asked == [(4, 30), (4, 70), (2, 30), (2, 70)]
    assert [(point.settings["batch"], point.devices, point.memory_limit) for point in points] == [
        (batch, count, limit) for batch in (8, 0) for count in (4, 2) for limit in (70, 30)
    ]
    assert [point.plan is not None for point in points] == [False, True, True, True, False, False, False, False]
    assert points[0].fits is False and points[1].fits and points[-1].fits is None and "no batch" in str(points[-1].row()["message"])
    assert sorted(map(id, said)) == sorted(map(id, points))


def test_ctrl_c_ends_it_with_what_is_there(plan: Plan) -> None:
    assert [point.memory_limit for point in walked(plan, {1: True})[1]] == [70, 30], "the plan so far is the last"
    assert [point.memory_limit for point in walked(plan, {1: KeyboardInterrupt()})[1]] == [30]
    with pytest.raises(KeyboardInterrupt):
        walked(plan, {0: KeyboardInterrupt()})


def test_a_wrong_use_ends_it_as_long_as_there_is_no_plan(plan: Plan) -> None:
    """What is wrong with one combination of settings, or number of devices, takes nothing of what was found before."""
    with pytest.raises(UsageError, match="no such pin"):
        walked(plan, {0: UsageError("no such pin", "name one")})
    points = walked(plan, {3: UsageError("no such pin", "name one")})[1]
    assert [point.plan is not None for point in points] == [True, True, False, True, False, False, False, False]
    assert points[2].fits is None and points[2].row()["message"] == "no such pin"


def test_the_points_share_the_time(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one leaves is for the others."""
    now, given = [0.0], list[float]()
    monkeypatch.setattr("autopar.planning.grid.perf_counter", lambda: now[0])

    def within(limit: int, until: float) -> Planned:
        given.append(until - now[0])
        now[0] += 0.5 * given[-1]
        return Planned(plan)

    graph: Any = None
    plan_grid(Grid(({},), (2, 4), (30, 70)), lambda settings: graph, lambda graph, count: within, 80.0, lambda point: None)
    assert given == pytest.approx([20.0, 70 / 3, 175 / 6, 43.75])


@pytest.mark.parametrize("more", [{}, {"compute_dtype": "bfloat16", "microbatches": 4}, {"microbatches": "auto"}], ids=str)
def test_a_sweep_is_what_plan_finds(more: dict[str, Any]) -> None:
    def make(batch: int) -> Any:
        return zoo.build("mlp", device="meta", batch=batch, layers=2)

    options: dict[str, Any] = {"hardware": "h100-sxm", "time_limit": 600.0, **more}
    found = autopar.sweep(make, devices=[2], settings={"batch": [64, 128]}, memory=["1GiB", "20MB"], name="mlp", **options)
    assert isinstance(found, Sweep) and len(found.points) == 4
    for point in found.points:
        target = make(point.settings["batch"])
        alone = autopar.plan(target.model, target.args, devices=2, memory=point.memory_limit, **options)
        assert point.plan is not None and point.plan.objective.seconds == pytest.approx(alone.objective.seconds, rel=1e-9)
        assert point.plan.microbatches == alone.microbatches and point.plan.model.arguments == alone.model.arguments
    for more, less in pairwise(found.points):
        assert more.settings != less.settings or more.plan.objective.seconds <= less.plan.objective.seconds  # type: ignore[union-attr]
    assert str(found).splitlines()[0].split()[:3] == ["batch", "limit", "devices"]


def test_what_cannot_be_asked() -> None:
    target = zoo.build("mlp", device="meta", layers=1)
    graph = autopar.capture(target.model, target.args)
    for wrong in ({"devices": []}, {"devices": [0]}, {"devices": [2], "memory": []}, {"devices": [2], "settings": {"batch": [8]}}):
        with pytest.raises(UsageError, match="hint: "):
            autopar.sweep(graph, **wrong)  # type: ignore[arg-type]
    assert autopar.sweep(graph, devices=[2, 2], hardware="h100-sxm").points[0].plan is not None


class Fused(nn.Module):
    """Queries, keys and values of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*self.qkv(x).view(4, 8, 3, 4, 4).permute(2, 0, 3, 1, 4)).mean()


def test_a_fused_weight_may_be_pinned_whole() -> None:
    """The graph is captured with the pins, as ``plan`` does: not in blocks that they cut across."""
    pins = {"qkv.weight": "S0 R"}
    found = autopar.sweep(lambda: (Fused(), (torch.ones(4, 8, 16),)), devices=2, constraints=pins, hardware="h100-sxm", time_limit=20)
    assert found.points[0].plan is not None and found.points[0].plan.parameters["qkv.weight"].spec == "S0 R"


def made_of(width: int = 64) -> Any:
    """A model of a width, which is not to be 0."""
    if width == 0:
        raise ValueError("no width")
    target = zoo.build("mlp", device="meta", layers=1, width=width)
    return target.model, target.args


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (3, {}, "int cannot be called with no arguments: 3 is not a callable object"),
        (lambda: None, {}, "the target is a NoneType"),
        (made_of, {"settings": {"depth": [1]}}, "made_of cannot be called with depth: got an unexpected keyword argument 'depth'"),
        (made_of, {"settings": {"width": 64}}, "the setting width has 64 in place of its values"),
        (made_of, {"settings": {"width": "64"}}, "the setting width has '64' in place of its values"),
        (made_of, {"microbatches": 0}, "the number of microbatches is 0"),
        (made_of, {"microbatches": 5}, "cannot be cut into 5 equal microbatches"),
        (made_of, {"compute_dtype": "int8"}, "unknown compute dtype 'int8'"),
    ],
)
def test_wrong_targets_and_settings_are_refused(target: Any, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match="hint: ") as error:
        autopar.sweep(target, devices=2, hardware="h100-sxm", **options)
    assert said in str(error.value)


def test_a_model_that_cannot_be_made_is_a_point() -> None:
    found = autopar.sweep(partial(made_of), devices=1, settings={"width": [0, 64]}, hardware="h100-sxm", time_limit=20)
    without, one = found.points
    assert without.plan is None and str(without.error).startswith("partial(width=0) raised ValueError: no width\nhint: ")
    assert one.plan is not None and found.target == "partial"


def test_a_setting_that_is_called_as_a_column_has_one_of_its_own(plan: Plan) -> None:
    points = tuple(Point({"mesh": mesh, "batch": 8}, 2, 70, plan) for mesh in ("fine", "coarse"))
    header, *rows = [line.split(",") for line in Sweep("net", "train", points).to_csv().splitlines()]
    assert header[:5] == ["settings.mesh", "batch", "devices", "feasible", "mesh"] and header.count("mesh") == 1
    assert [row[:5] for row in rows] == [["fine", "8", "2", "True", "dp=2"], ["coarse", "8", "2", "True", "dp=2"]]
