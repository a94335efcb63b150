"""The picture: every second of the step is drawn once, to scale, and names are those of the plan."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.cli.main import main
from autopar.plan import Plan
from autopar.report import picture, svg
from autopar.report.timeline import Bar, bars, streams
from autopar.schedule.instructions import COMPUTE
from tests.graphs import bucket_plan, random_plan, two_layer_plan

PLANS = [two_layer_plan, bucket_plan, *(lambda seed=seed: random_plan("dp=2,tp=2", seed) for seed in range(4))]
SVG = "{http://www.w3.org/2000/svg}"
DRAWN = picture.WIDTH - picture.LEFT - picture.RIGHT


@pytest.mark.parametrize("make", PLANS)
def test_bars_have_the_seconds_of_the_step(make: object) -> None:
    plan: Plan = make()  # type: ignore[operator]
    found = bars(plan)
    drawn = [one for one in ElementTree.fromstring(svg(plan)).iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    rows = sorted({float(one.get("y", "")) for one in drawn})
    assert len(rows) == len(streams(found)), "one row a stream"
    end = max(bar.end for bar in found)
    busy = sum(bar.end - bar.begin for bar in found if bar.stream == COMPUTE)
    operators = [one for one in drawn if float(one.get("y", "")) == rows[0]]
    width = sum(float(one.get("width", "")) for one in operators)
    assert width == pytest.approx(DRAWN * busy / end, abs=picture.SHORTEST * len(operators) + 0.01 * len(found))
    assert all(float(one.get("x", "")) + float(one.get("width", "")) <= picture.WIDTH - picture.RIGHT + picture.SHORTEST for one in drawn)


def test_short_neighbours_of_one_kind_are_one_bar() -> None:
    kinds = ("forward", "forward", "forward", "stalled", "forward")
    found = [Bar(COMPUTE, f"op{place}", kind, place, place + 1) for place, kind in enumerate(kinds)]
    assert list(picture._joined(found, 2.5)) == [("forward", 0, 3, "op0"), ("stalled", 3, 4, "op3"), ("forward", 4, 5, "op4")]
    assert list(picture._joined(found[:3], 1.5)) == [("forward", 0, 2, "op0"), ("forward", 2, 3, "op2")], "a bar grows until it is long"


def test_layers_and_figures_are_those_of_the_plan() -> None:
    plan = two_layer_plan()
    words = " ".join(one.text or "" for one in ElementTree.fromstring(svg(plan)).iter(f"{SVG}text"))
    assert plan.model.target in words and ("no plan takes less than" in words or "optimal" in words)
    for name, row in plan.parameters.items():
        if len(row.shape) > 1:
            assert name in words or name.replace("0", "*") in words


def test_a_step_without_time_has_its_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "bars", lambda plan: ())
    assert "operators" not in svg(two_layer_plan())


def test_names_of_the_user_are_escaped() -> None:
    plan = two_layer_plan()
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"target": "a<b&c"})})
    assert any("a<b&c" in (one.text or "") for one in ElementTree.fromstring(svg(plan)).iter(f"{SVG}text"))


def test_show_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    two_layer_plan().save(plan)
    assert main(["show", str(plan), "--svg", str(tmp_path / "step.svg")]) == 0
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag == f"{SVG}svg"
    assert main(["show", str(plan), "--svg", str(tmp_path / "a"), "--html", str(tmp_path / "a")]) == 2
    assert "name a file for each" in capsys.readouterr().err
