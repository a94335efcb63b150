"""The plan file: read back equal, written whole or not at all, and refused with the place named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import FileError, MismatchError
from autopar.graph import Op
from autopar.plan import SCHEMA, Plan
from autopar.recording import first_difference, load, record, replay
from autopar.report import units
from autopar.rows import BaselinePlan
from autopar.schedule import Limits
from autopar.search import find_plan
from tests.graphs import bucket_graph, bucket_plan, machine, plan_of, random_graph, random_schedule, two_layer_plan, two_layers


def test_reads_back_equal(tmp_path: Path) -> None:
    plan = two_layer_plan()
    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert again == plan
    assert again.to_json() == plan.to_json() == (tmp_path / "plan.json").read_text()
    assert plan.collectives


def test_schema_and_one_row_a_line(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    assert data["schema"] == SCHEMA
    lines = plan_file.read_text().splitlines()
    for row in (*data["ops"], *data["collectives"], *data["reshards"], *data["schedule"]):
        assert sum(json.dumps(row) in line for line in lines) == 1
    for name, row in data["parameters"].items():
        assert sum(f"{json.dumps(name)}: {json.dumps(row)}" in line for line in lines) == 1


def test_same_seed_same_file() -> None:
    first, second = (json.loads(two_layer_plan().to_json()) for _ in range(2))
    for data in (first, second):
        del data["objective"]["solve_seconds"]
        for phase in data.get("search", {}).get("phases", ()):
            del phase["cpu_seconds"]
    assert first == second


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "x=4", "x=2,y=2,z=2"])
@pytest.mark.parametrize("seed", range(4))
def test_replays_the_same_schedule(mesh: str, seed: int) -> None:
    for graph in (two_layers(), random_graph(seed)):
        schedule = random_schedule(graph, machine(mesh), seed, Limits(2000, 4000, 1000))
        assert replay(Plan.from_json(plan_of(schedule).to_json()), graph) == schedule


def test_a_bucket_is_one_row_of_parts() -> None:
    plan = bucket_plan(limits=Limits(bucket_bytes=600))
    gathers = [row for row in plan.collectives if row.kind == "all_gather"]
    assert [len(row.parts or ()) for row in gathers] == [2, 2, 2]
    first = gathers[0]
    assert (first.tensor, first.value, first.before) == (None, None, None)
    assert first.parts and [(part.tensor, part.step, part.from_spec, part.to_spec, part.bytes) for part in first.parts] == [
        ("w0", 0, "S0 R", "R R", 256),
        ("w1", 0, "S0 R", "R R", 256),
    ]
    assert first.bytes == 512
    assert {row.kind for row in plan.schedule if row.of == first.id} == {"start", "wait"}
    assert replay(plan, bucket_graph()).collectives[first.id or ""].kind == "all_gather"


def test_the_objective_is_the_step() -> None:
    plan = bucket_plan()
    assert plan.objective.seconds == plan.predicted.step_seconds < plan.predicted.sequential_seconds
    parts = plan.predicted.compute_seconds, plan.predicted.communication_seconds, plan.predicted.optimizer_seconds
    assert plan.predicted.sequential_seconds == pytest.approx(sum(parts))
    alone = two_layer_plan("dp=2,tp=2", "communication")
    assert alone.objective.seconds == alone.predicted.communication_seconds == sum(row.seconds for row in alone.collectives)


def test_baselines_without_a_price_say_why() -> None:
    found = find_plan(two_layers(), machine("dp=2"), time_limit=600.0)
    plan = record(found, target="two_layers", memory_limit=10**9)
    assert plan.baselines["ddp"].step_seconds == found.baselines["ddp"].seconds
    old = plan.model_copy(update={"baselines": {**plan.baselines, "hsdp": BaselinePlan(feasible=False, reason="it was not priced")}})
    assert re.search(r"^hsdp +- +- +no: it was not priced$", str(old), re.MULTILINE)


def test_an_edited_schedule_runs_as_edited() -> None:
    plan, graph = bucket_plan(), bucket_graph()
    data = json.loads(plan.to_json())
    rows = data["schedule"]
    start = next(index for index, row in enumerate(rows) if row["kind"] == "start" and row["phase"] == "backward")
    wait = next(index for index, row in enumerate(rows) if row["kind"] == "wait" and row["of"] == rows[start]["of"])
    assert wait > start + 1
    rows.insert(start + 1, rows.pop(wait))
    again = replay(Plan.from_json(json.dumps(data)), graph)
    assert [item.id for item in again.instructions] == [row["id"] for row in rows] != list(range(len(rows)))
    data["limits"]["aside_bytes"] = 7
    assert replay(Plan.from_json(json.dumps(data)), graph).limits.aside_bytes == 7


def test_refuses_another_graph() -> None:
    plan = two_layer_plan()
    with pytest.raises(MismatchError, match=r"parameter layers\.0\.weight was float32\[32, 8\], here .* float32\[64, 8\]"):
        replay(plan, two_layers(hidden=64))
    graph = two_layers()
    renamed = [Op(op.name, "aten.mean.default", op.inputs, op.outputs, op.args, op.kwargs) if op.name == "loss" else op for op in graph.ops]
    other = type(graph)(graph.mode, graph.tensors, graph.inputs, tuple(renamed), graph.outputs)
    assert "operator loss was aten.sum.default" in first_difference(plan, other)


def test_refuses_an_edited_plan(plan_file: Path) -> None:
    edited = broken(json.loads(plan_file.read_text()), "parameters", "layers.0.weight", "spec", value="S1 S0")
    with pytest.raises(MismatchError, match=r"cannot be run: ops\.h\.inputs\[1\]: w0 has the spec 'S1 S0', it is read as"):
        replay(Plan.from_json(edited), two_layers())


def broken(data: dict[str, Any], *path: str | int, value: Any) -> str:
    place: Any = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("schema",), "autopar.plan/3", "schema 'autopar.plan/3', this autopar reads 'autopar.plan/2'"),
        (("mesh", "dp"), 0, r"mesh.dp: .*greater than or equal to 1"),
        (("mesh", "dp"), "2", r"mesh.dp: .*valid integer, found '2'"),
        (("ops", 2, "inputs", 0, "spec"), "S0 Q", r"ops\[2\].inputs\[0\].spec: .*cannot read 'Q'"),
        (("parameters", "layers.0.weight", "shape"), "32x8", r"parameters.layers.0.weight.shape: .*array, found '32x8'"),
        (("collectives", 0, "kind"), "broadcast", r"collectives\[0\].kind: "),
        (("objective", "status"), "lucky", r"objective.status: "),
        (("ops", 0, "colour"), "red", r"ops\[0\].colour: Extra inputs"),
        (("schedule", 0, "kind"), "send", r"schedule\[0\].kind: "),
        (("schedule", 0, "seconds"), "soon", r"schedule\[0\].seconds: .*found 'soon'"),
        (("collectives", 0, "tensor"), None, r"collectives\[0\]: .*a bucket needs parts"),
        (("collectives", 0, "parts"), [], r"collectives\[0\]: .*a bucket has two parts or more"),
        (("collectives", 0, "id"), None, r"collectives\[0\]: .*a collective between operators has an id"),
    ],
)
def test_names_the_broken_place(plan_file: Path, path: tuple[str | int, ...], value: Any, said: str) -> None:
    text = broken(json.loads(plan_file.read_text()), *path, value=value)
    with pytest.raises(FileError, match=said) as caught:
        Plan.from_json(text, "plan.json")
    assert caught.value.message.startswith("plan.json ")
    assert str(caught.value).splitlines()[-1].startswith("hint: ")


@pytest.mark.parametrize(
    ("cut", "said"),
    [(200, "ends too early, as if truncated, at line"), (0, "ends too early"), (-40, "ends too early, as if truncated, at line")],
)
def test_truncated(plan_file: Path, cut: int, said: str) -> None:
    with pytest.raises(FileError, match=said):
        Plan.from_json(plan_file.read_text()[:cut])


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"a": 1}'])
def test_not_a_plan(text: str) -> None:
    with pytest.raises(FileError, match="no schema"):
        Plan.from_json(text)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        load(tmp_path / "absent.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not UTF-8"):
        load(tmp_path / "bytes.json")


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = two_layer_plan()
    path = tmp_path / "plan.json"
    path.write_text("the old plan")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        plan.save(path)
    assert path.read_text() == "the old plan"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.json"]


def test_save_says_what_is_wrong_with_the_path(tmp_path: Path) -> None:
    plan = two_layer_plan()
    with pytest.raises(FileError, match="there is no folder"):
        plan.save(tmp_path / "absent" / "plan.json")
    with pytest.raises(FileError, match="it is a folder"):
        plan.save(tmp_path)


def test_prints_what_a_person_asks_first() -> None:
    text = str(two_layer_plan())
    for word in (
        "two_layers, train, adamw",
        "dp=2 x tp=2 on cpu-cluster",
        "(collectives alone), bound",
        "0 s (0 %) of it hidden",
        "optimal",
        "per rank at the peak",
        "this plan",
        "ddp",
        "all_reduce",
    ):
        assert word in text, word
    assert all(not line.endswith(" ") for line in text.splitlines())


def test_prints_the_step_and_the_buckets() -> None:
    plan = bucket_plan()
    text = str(plan)
    step, hidden = (
        units.seconds(plan.predicted.step_seconds),
        units.seconds(plan.predicted.sequential_seconds - plan.predicted.step_seconds),
    )
    assert f"objective  {step} a step, bound" in text
    assert re.search(rf"^step +{step} simulated: compute .*, communication .*, {hidden} \(.* %\) of it hidden", text, re.MULTILINE)
    assert re.search(r"^all_gather +dp +forward +1 +6 ", text, re.MULTILINE)
    assert "instructions, 3 calls for 13 values; buckets up to 25 MiB" in text
