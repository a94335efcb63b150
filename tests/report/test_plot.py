"""Drawings of sweeps and ladders: what is drawn stands to scale, names its units, and what it is compared with is there."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from autopar.pareto import BaselineFigures, Ladder, Pareto, Rung
from autopar.report import units
from autopar.report.frontier import BEYOND, frontier_html, frontier_svg
from autopar.report.plot import FOOT, LEFT, RIGHT, TOP, Axis, Plot, svg
from autopar.rows import BaselinePlan
from autopar.sweeping import Point, Sweep
from tests.graphs import bucket_plan
from tests.report.pages import read_page

SVG = "{http://www.w3.org/2000/svg}"
GIB = 2**30


def words(text: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(text).iter(f"{SVG}text")]


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("values", [(1.0, 2.0, 10.0), (0.003, 0.004), (5.0,), (1e-9, 1e6)])
def test_an_axis_holds_its_values_in_order_and_names_some(values: tuple[float, ...], powers: bool) -> None:
    axis = Axis.over("step", units.seconds, values, powers=powers)
    shares = [axis.share(value) for value in values]
    assert all(0 <= share <= 1 for share in shares) and shares == sorted(shares)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7 and all(0 <= axis.share(tick) <= 1 for tick in ticks)


def test_bytes_are_named_at_round_binary_sizes() -> None:
    even = Axis.over("memory", units.size, (2 * GIB, 5 * GIB), unit=units.binary_unit(5 * GIB)).ticks()
    assert all(tick % (GIB / 4) == 0 for tick in even)
    assert set(Axis.over("memory", units.size, (GIB, 40 * GIB), powers=True, unit=2.0).ticks()) <= {GIB * 2.0**power for power in range(6)}


def test_names_of_marks_cover_no_other_and_stay_inside() -> None:
    across, up = Axis.over("x", str, (0, 10)), Axis.over("y", str, (0, 10))
    plot = Plot("many", across, up, 600, 300)
    for number in range(40):
        plot.mark(5 + number % 5 * 0.1, 5 + number // 5 * 0.1, f"baseline {number}")
    assert 2 <= len(plot.named) < 40, "where there is no room the name stands in the mark's title"
    for place, one in enumerate(plot.named):
        assert one[0] > LEFT and one[2] < 600 - RIGHT and one[1] > TOP and one[3] < 300 - FOOT
        assert all(one[2] < two[0] or two[2] < one[0] or one[3] < two[1] or two[3] < one[1] for two in plot.named[place + 1 :])
    assert svg("many", [plot]).count("<title>baseline") == 40


def ladder(**more: object) -> Ladder:
    rows = [
        Rung(
            memory_limit_bytes_per_rank=limit * GIB, objective_seconds=step, bound_seconds=step / 2, gap=0.5, status="feasible",
            peak_memory_bytes_per_rank=limit * GIB, microbatches=1, recomputed_operators=0, mesh={"dp": 2, "tp": 4},
        )
        for limit, step in ((2, 0.04), (3, 0.03), (4, 0.02))
    ]  # fmt: skip
    return Ladder(target="zoo:a<b", rows=tuple(rows), **more)  # type: ignore[arg-type]


def test_a_ladder_has_its_title_units_bound_and_the_baselines_that_are_near() -> None:
    far = BaselineFigures(objective_seconds=0.04 * BEYOND * 1.01, peak_memory_bytes_per_rank=GIB)
    near = BaselineFigures(objective_seconds=0.05, peak_memory_bytes_per_rank=3 * GIB)
    found = ladder(mode="train", hardware="h100-sxm", baselines={"ddp": far, "fsdp": near})
    text = frontier_svg(found)
    said = words(text)
    assert said[0] == "zoo:a<b, dp=2 x tp=4, h100-sxm, train"
    assert {"step", "no plan within the limit takes less", "the best plan within the limit", "fsdp"} <= set(said) and "ddp" not in said
    assert any(word.endswith(" GiB") for word in said) and any(word.endswith(" ms") for word in said)
    dots = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in ElementTree.fromstring(text).iter(f"{SVG}circle")]
    assert dots == sorted(dots) and dots[0][1] < dots[1][1] < dots[2][1], "more memory to the right, longer steps above"
    assert dots[1][1] - dots[0][1] == pytest.approx(dots[2][1] - dots[1][1], abs=0.2), "even differences are equally long"
    page = read_page(frontier_html(found))
    assert {"Step over memory", "Limits", "Plans written by hand"} == set(page.texts["h2"])
    assert "ddp" in page.texts["td"], "what is not drawn stands in the table"
    assert "Plans written by hand" not in read_page(frontier_html(ladder())).texts["h2"], "no empty section"


def test_the_file_of_a_ladder_holds_what_its_plans_say() -> None:
    plan = bucket_plan()
    found = Pareto((plan, plan)).ladder
    assert Ladder.from_json(found.to_json()) == found and len(found.rows) == 2
    assert found.rows[0].objective_seconds == plan.objective.seconds and found.hardware == plan.hardware["name"]
    assert set(found.baselines) == {name for name, row in plan.baselines.items() if row.objective_seconds is not None}


def sweep(steps: dict[int, float]) -> Sweep:
    plan = bucket_plan()
    points = []
    for devices, step in steps.items():
        predicted = plan.predicted.model_copy(update={"step_seconds": step, "peak_memory_bytes_per_rank": GIB // devices})
        objective = plan.objective.model_copy(update={"seconds": step, "bound_seconds": step / 2})
        row = {"ddp": BaselinePlan(step_seconds=2 * step, feasible=True), "fsdp": BaselinePlan(step_seconds=step / 4, feasible=False)}
        made = plan.model_copy(update={"predicted": predicted, "objective": objective, "baselines": row})
        points.append(Point({}, devices, GIB, made))
    return Sweep("zoo:gpt2", "train", tuple(points))


def test_a_sweep_has_the_ideal_the_bound_and_the_best_by_hand() -> None:
    text = sweep({2: 0.4, 4: 0.25, 8: 0.2}).to_svg()
    said = words(text)
    assert said[0] == f"zoo:gpt2, {bucket_plan().hardware['name']}, train"
    for name in ("devices", "step", "peak memory per rank", "ideal: twice the devices, half the step", "no plan takes less", "ddp"):
        assert name in said
    assert said.count("the best plan by hand that fits") == 1
    ideal, bound = (
        [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", one.get("d", ""))]
        for one in ElementTree.fromstring(text).iter(f"{SVG}path")
        if one.get("class") == "quiet" and one.get("d", "") != "M0 5H22"
    )
    slopes = [(ideal[place + 1][1] - ideal[place][1]) / (ideal[place + 1][0] - ideal[place][0]) for place in range(2)]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.01), "a straight line where both axes go in powers"
    dots = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in ElementTree.fromstring(text).iter(f"{SVG}circle")][:3]
    assert ideal[2][1] - ideal[0][1] == pytest.approx(2 * (dots[2][1] - dots[0][1]), abs=0.4), "a quarter of the step, where it took half"
    assert ideal[0] == pytest.approx(dots[0], abs=0.2) and all(low[1] > dot[1] for low, dot in zip(bound, dots, strict=True))


def test_a_sweep_of_one_point_or_none_is_drawn() -> None:
    assert len(words(sweep({2: 0.4}).to_svg())) > 4
    assert "zoo:gpt2, train" in words(Sweep("zoo:gpt2", "train", ()).to_svg())
