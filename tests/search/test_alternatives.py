"""What explain says of other choices is what a plan with that choice pinned costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autopar as planner
from autopar.plan import Plan
from autopar.recording import graph_of, machine_of, replay
from autopar.recording.replaying import assignment_of
from autopar.schedule import make_schedule, step_seconds
from autopar.search import find_plan
from autopar.search.choices.pins import Pins
from autopar.search.fixing.alternatives import find_alternatives
from benchmarks.models import stressed
from tests.cli.running import autopar, refused
from tests.graphs import two_layer_plan


def test_an_alternative_costs_what_a_plan_pinned_so_costs() -> None:
    plan: Plan = two_layer_plan()
    graph, machine = graph_of(plan), machine_of(plan)
    tensor = plan.parameters["layers.0.weight"].tensor
    found = find_alternatives(
        replay(plan, graph), assignment_of(plan, graph), tensor, optimizer="adamw", limit=2**34, pins=Pins({}, {}, {}), seconds=600
    )  # fmt: skip
    assert len(found) > 1 and [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert f"'{plan.parameters['layers.0.weight'].spec}'" not in [one.words for one in found]
    for one in found:
        pinned = find_plan(graph, machine, constraints={"layers.0.weight": one.words.strip("'")}, baselines=False)
        assert one.seconds == pytest.approx(pinned.seconds, rel=2e-3) and one.seconds >= plan.objective.bound_seconds


@pytest.mark.usefixtures("short_search")
def test_alternatives_of_microbatches_are_of_the_whole_step_as_the_plan_is() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    plan = planner.plan(
        model, (torch.randn(32, 8),), loss=lambda y: (y**2).mean(), mesh="dp=2", hardware=stressed(), memory="1GiB", microbatches=4
    )  # fmt: skip
    assert any(row.kind == "add" for row in plan.schedule)
    graph, given = graph_of(plan), assignment_of(plan, graph_of(plan))
    made = make_schedule(graph, given, machine_of(plan), replay(plan, graph).limits)
    assert step_seconds(made, "adamw") == pytest.approx(plan.objective.seconds, rel=0.3)
    found = find_alternatives(
        replay(plan, graph), given, plan.inputs["input"].tensor, optimizer="adamw", limit=2**30, pins=Pins({}, {}, {}), seconds=600
    )  # fmt: skip
    assert found and all(one.seconds >= plan.objective.bound_seconds for one in found)


def test_explain_tells_the_next_best(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = autopar(capsys, "explain", plan_file, "layers.0.weight", "--next", 2).out.splitlines()
    (start,) = [number for number, line in enumerate(out) if line.startswith("next best, all else solved again once")]
    assert len(out) == start + 3 and all("per rank at the peak" in line for line in out[start + 1 :])
    assert any(line.startswith("  'S") or "->" in line for line in autopar(capsys, "explain", plan_file, "h", "--next", 1).out.splitlines())
    refused(autopar(capsys, "explain", plan_file, "output:loss", "--next", 1), 2, "is no parameter, buffer, input or operator")
    for limit in ("0", "nan", "inf"):
        refused(autopar(capsys, "explain", plan_file, "h", "--next", 1, "--time-limit", limit), 2, "the time limit is")
