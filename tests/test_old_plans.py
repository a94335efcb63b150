"""Files of schema autopar.plan/1, which had no schedule: made here from new plans, loaded, scheduled, and said so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.check import check
from autopar.errors import FileError
from autopar.plan import Plan
from autopar.recording import OldPlanWarning, load, replay
from autopar.schedule import Limits
from tests.cli.running import autopar as command
from tests.cli.running import refused
from tests.graphs import bucket_graph, bucket_plan, two_layer_plan, two_layers


def old(plan: Plan) -> dict[str, Any]:
    """The plan as the schema before had it: the objective is the sum, one row a step of a reshard, no schedule."""
    data = json.loads(plan.to_json())
    data["schema"] = "autopar.plan/1"
    del data["schedule"], data["limits"]
    seconds = data["predicted"].pop("sequential_seconds")
    data["objective"].update(seconds=seconds, bound_seconds=seconds, gap=0.0, status="optimal")
    rows = []
    for row in data["collectives"]:
        shared = {key: row[key] for key in ("kind", "axes", "phase", "stage", "times", "received_bytes_per_rank", "seconds")}
        parts = row.get("parts") or [{**row, "step": 0}]
        rows += [{**shared, **{key: part[key] for key in ("tensor", "value", "from", "to", "before", "bytes")}} for part in parts]
    data["collectives"] = rows
    data["baselines"] = {
        "ddp": {"objective_seconds": 2 * seconds, "step_seconds": seconds, "peak_memory_bytes_per_rank": 5, "feasible": True}
    }
    return data


def write(data: Any, folder: Path) -> Path:
    path = folder / "old.json"
    path.write_text(json.dumps(data))
    return path


def test_is_scheduled_on_load(tmp_path: Path) -> None:
    plan = bucket_plan()
    data = old(plan)
    with pytest.warns(
        OldPlanWarning, match=r"scheduled on load, and its objective is now the step, .* s \(the sum was .* without the old bound"
    ):
        found = load(write(data, tmp_path))
    assert found.schedule == plan.schedule and found.collectives == plan.collectives and found.limits == plan.limits
    assert found.objective.seconds == plan.objective.seconds < data["objective"]["seconds"]
    assert (found.objective.bound_seconds, found.objective.gap, found.objective.status) == (0.0, 1.0, "feasible")
    assert check(found) == ()
    assert replay(found, bucket_graph()) == replay(plan, bucket_graph())


def test_its_baselines_have_no_step(tmp_path: Path) -> None:
    with pytest.warns(OldPlanWarning):
        found = autopar.load(write(old(bucket_plan()), tmp_path))
    row = found.baselines["ddp"]
    assert (row.objective_seconds, row.step_seconds, row.feasible) == (None, None, True)
    assert row.reason == "priced under autopar.plan/1, by the sum in sequence"


def test_the_sum_of_collectives_keeps_its_bound(tmp_path: Path) -> None:
    plan = two_layer_plan("dp=2,tp=2", "communication")
    with pytest.warns(OldPlanWarning, match="its objective stays the sum of its collectives"):
        found = load(write(old(plan), tmp_path))
    assert found.objective.seconds == found.objective.bound_seconds == plan.objective.seconds > 0
    assert (found.objective.gap, found.objective.status) == (0.0, "optimal")
    assert replay(found, two_layers()).limits == Limits(0, 0, 0)


def test_buckets_and_gathering_ahead_are_left_out_where_memory_is_short(tmp_path: Path) -> None:
    data, least = old(bucket_plan()), bucket_plan(Limits(0, 0, 0)).predicted.peak_memory_bytes_per_rank
    assert least < bucket_plan().predicted.peak_memory_bytes_per_rank
    with pytest.warns(OldPlanWarning):
        found = load(write({**data, "memory_limit_bytes_per_rank": least}, tmp_path))
    assert found.limits.bucket_bytes == found.limits.ahead_bytes == 0 and found.predicted.peak_memory_bytes_per_rank == least
    with pytest.warns(OldPlanWarning, match=f"it needs {least} bytes per rank, over its limit of {least - 1}"):
        load(write({**data, "memory_limit_bytes_per_rank": least - 1}, tmp_path))


def without_model(data: Any) -> None:
    data["model"]["graph_sha256"] = "0" * 64


def another_shape(data: Any) -> None:
    data["ops"][0]["inputs"][0]["shape"] = [1, 2]


def late(data: Any) -> None:
    row = next(row for row in data["reshards"] if row["value"] == "w0@whole")
    row["before"] = "f1"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without_model, "cannot be scheduled: ops: their hash is"),
        (another_shape, "cannot be scheduled: ops.f0.inputs"),
        (late, "cannot be scheduled: reshards.w0@whole: it is made before f1, f0 reads it earlier"),
        (lambda data: data.update(predicted=3), "predicted: "),
        (lambda data: data.update(ops=[{"name": 3}]), "ops.0..name: "),
        (lambda data: data["hardware"].update(memory_bandwidth="fast"), "memory_bandwidth"),
        (lambda data: data.update(baselines=[]), "baselines: "),
    ],
)
def test_broken_ones_are_refused(edit: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = old(bucket_plan())
    edit(data)
    with pytest.raises(FileError, match=said):
        load(write(data, tmp_path))
    refused(command(capsys, "show", tmp_path / "old.json"), 3, "hint: ")


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(old(bucket_plan()), tmp_path)
    for verb, more in (("show", []), ("check", []), ("explain", ["w0@whole"]), ("diff", [path])):
        ran = command(capsys, verb, path, *more)
        assert ran.status == 0 and ran.err.startswith(f"note: {path} is of schema autopar.plan/1: it was scheduled on load"), ran
        assert ran.out
