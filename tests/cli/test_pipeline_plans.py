"""``autopar plan --mesh pp=...``, and what other commands do with its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from autopar.check.pipelines import check_pipeline
from autopar.errors import UsageError
from autopar.pipeline import explanation
from autopar.pipeline.clock import recorded_costs
from autopar.pipeline.explanation import layer_counts, move_layers
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.report.phases import pipeline_search_summary, search_summary
from autopar.report.pipeline_timetable import pipeline_svg
from autopar.report.utilisation import pipeline_utilisation, utilisation
from tests.cli.running import autopar, refused
from tests.report.pages import read_page

TARGET = "zoo:gpt2,layers=3"
PLAN = ("plan", TARGET, "--mesh", "pp=2,dp=1", "--microbatches", "4", "--hardware", "cpu-cluster", "--effort", "low")


@pytest.fixture(scope="module")
def text() -> str:
    import autopar as package
    from autopar import zoo

    target = zoo.build("gpt2", layers=3)
    made = package.plan_pipeline(
        target.model, target.args, dict(target.kwargs), loss=target.loss, loss_args=target.loss_args, mesh="pp=2,dp=1", microbatches=4,
        hardware="cpu-cluster", effort="low", target=TARGET,
    )  # fmt: skip
    return made.to_json()


@pytest.fixture
def plan(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(text)
    return path


def test_a_plan_is_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    made = autopar(capsys, *PLAN, "--stages", "1,2", "-o", path)
    assert made.status == 0 and "stage  begins with" in made.out and "tokens.weight in stages 0, 1" in made.out
    plan = PipelinePlan.from_json(path.read_text())
    assert plan.cut == ("layers.1",) and PipelinePlan.from_json(plan.to_json()) == plan
    shown = autopar(capsys, "show", path)
    assert shown.out == made.out
    assert json.loads(autopar(capsys, "show", path, "--json").out)["schema"] == "autopar.pipeline-plan/1"


def test_the_timetable_is_drawn(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace = tmp_path / "plan.svg", tmp_path / "trace.json"
    assert autopar(capsys, "show", plan, "--svg", svg, "--trace", trace).status == 0
    drawn = ElementTree.parse(svg).getroot()
    titles = [element.text for element in drawn.iter() if element.tag.endswith("title")]
    assert len(titles) == 2 * (2 * 4 + 1) and sum("forward of microbatch 3" in str(title) for title in titles) == 2
    traced = json.loads(trace.read_text())["traceEvents"]
    events = [event for event in traced if event["ph"] == "X"]
    for kind, half in (("s", 0), ("f", 1)):
        ends = [event for event in traced if event["ph"] == kind]
        assert len(ends) == 2 * 4, "each microbatch crosses forward and backward"
        assert {event["tid"] for event in ends[:4]} == {1 + half} and {event["tid"] for event in ends[4:]} == {2 - half}
    starts, ends = ({event["id"]: event["ts"] for event in traced if event["ph"] == kind} for kind in "sf")
    assert all(starts[number] < ends[number] for number in starts), "what receives begins later"
    step = PipelinePlan.from_json(plan.read_text()).objective.seconds
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(step * 1e6)
    for stage in (1, 2):
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == stage)
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(spans))


def test_the_page_has_the_timetable_the_stages_and_the_plan_of_each(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert autopar(capsys, "show", plan, "--html", tmp_path / "x.html").status == 0
    text = (tmp_path / "x.html").read_text()
    page = read_page(text)
    assert {"Timetable", "Stages", "Particulars", "One step, simulated"} <= set(page.texts["h2"])
    assert len([words for words in page.texts["summary"] if words.startswith("Stage ")]) == 2
    data = [json.loads(words) for words in page.texts["script"] if words.startswith("{")]
    saved = PipelinePlan.from_json(plan.read_text())
    assert [one["limit"] for one in data] == [stage.plan.memory_limit_bytes_per_rank for stage in saved.stages]
    assert all(one["bars"] and one["mesh"]["ways"] for one in data), "each stage is drawn from its own plan"
    assert f"autopar plan {TARGET} --mesh pp=2,dp=1" in text and f"--stages {saved.cut[0]}" in text
    used, stages = pipeline_utilisation(saved), [utilisation(stage.plan) for stage in saved.stages]
    assert used is not None and f"{100 * used.share:.3g} % MFU" in text
    done = sum(stage.flops for stage in stages if stage is not None)
    assert used.flops == done and used.share == pytest.approx(done / (saved.objective.seconds * 2 * used.peak)), "of both ranks' step"
    assert pipeline_svg(saved).strip() in text and not re.search(r"https?:(?!//www.w3.org/2000/svg)|@import|url\(", text)


def test_a_page_of_orders_that_wait_for_ever_is_refused(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stuck = MUTATIONS["backward before forward"](PipelinePlan.from_json(plan.read_text()))
    plan.write_text(stuck.to_json())
    for option in ("--html", "--svg", "--trace"):
        refused(autopar(capsys, "show", plan, option, tmp_path / "x"), 3, "wait")
    assert not (tmp_path / "x").exists()


def test_the_search_of_each_stage_is_shown(text: str, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = PipelinePlan.from_json(text)
    shown = autopar(capsys, "show", plan, "--search").out
    assert re.findall(r"^stages? .*", shown, re.M) == ["stage 0, one microbatch", "stage 1, one microbatch"]
    for stage, words in zip(saved.stages, shown.split("\n\nstage "), strict=True):
        assert stage.plan.search is not None and search_summary(stage.plan) in words
    records = [stage.plan.search.model_dump(mode="json") for stage in saved.stages if stage.plan.search is not None]
    assert json.loads(autopar(capsys, "show", plan, "--search", "--json").out) == records
    alike = _changed(saved, 1, plan=saved.stages[1].plan.model_copy(update={"search": saved.stages[0].plan.search}))
    assert pipeline_search_summary(alike) == f"stages 0, 1, one microbatch\n{search_summary(saved.stages[0].plan)}"
    plan.write_text(_changed(saved, 1, plan=saved.stages[1].plan.model_copy(update={"search": None})).to_json())
    refused(autopar(capsys, "show", plan, "--search"), 3, "stage 1 has no record of its search")


def test_figures_add_up(text: str) -> None:
    plan = PipelinePlan.from_json(text)
    assert 0 < plan.objective.bound_seconds <= plan.objective.seconds
    for stage in plan.stages:
        busy = 3 * stage.forward_seconds + 3 * stage.backward_seconds + stage.forward_seconds + stage.last_backward_seconds
        assert stage.busy_seconds == pytest.approx(busy + stage.optimizer_seconds)
        assert stage.busy_seconds <= plan.objective.seconds * (1 + 1e-9)
        peak = stage.plan.predicted.peak_memory_bytes_per_rank + (stage.in_flight - 1) * stage.held_bytes_per_rank
        assert stage.peak_memory_bytes_per_rank == peak


def test_verify_runs_it(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = autopar(capsys, "verify", plan, TARGET, "--steps", "2")
    assert found.status == 0 and "passed on 2 ranks" in found.out


def test_verify_finds_another_model(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, "verify", plan, "zoo:gpt2,layers=4", "--steps", "2"), 3, "the plan was made for another model")


def test_check_recomputes_it(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = autopar(capsys, "check", plan, TARGET)
    assert found.status == 0 and "holds: 2 stages, 2 values that cross, the timetable" in found.out


def _changed(plan: PipelinePlan, stage: int, /, **fields: object) -> PipelinePlan:
    rows = [row.model_copy(update=fields) if number == stage else row for number, row in enumerate(plan.stages)]
    return plan.model_copy(update={"stages": tuple(rows)})


MUTATIONS: dict[str, Callable[[PipelinePlan], PipelinePlan]] = {
    "step": lambda plan: plan.model_copy(update={"objective": plan.objective.model_copy(update={"seconds": 1e-9})}),
    "backward before forward": lambda plan: _changed(plan, 0, order="B0 " + plan.stages[0].order.replace(" B0", "", 1)),
    "dropped": lambda plan: _changed(plan, 1, order=plan.stages[1].order.replace(" B3", "")),
    "twice": lambda plan: _changed(plan, 1, order=plan.stages[1].order + " B3"),
    "swapped": lambda plan: _changed(plan, 0, order=plan.stages[0].order.replace("F1", "Fx").replace("F2", "F1").replace("Fx", "F2")),
    "in flight": lambda plan: _changed(plan, 0, in_flight=1),
    "memory": lambda plan: _changed(plan, 0, peak_memory_bytes_per_rank=1),
    "sent": lambda plan: _changed(plan, 1, last_sent_seconds=plan.stages[1].last_backward_seconds / 2),
    "forward": lambda plan: _changed(plan, 0, forward_seconds=plan.stages[0].forward_seconds / 2),
    "dropped transfer": lambda plan: plan.model_copy(update={"boundaries": plan.boundaries[:1]}),
    "layout": lambda plan: plan.model_copy(
        update={"boundaries": (plan.boundaries[0].model_copy(update={"spec": "R R S0"}), *plan.boundaries[1:])}
    ),
    "bytes": lambda plan: plan.model_copy(
        update={"boundaries": (plan.boundaries[0].model_copy(update={"bytes_per_rank": 4}), *plan.boundaries[1:])}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_check_finds_what_is_changed(name: str, text: str) -> None:
    assert not check_pipeline(PipelinePlan.from_json(text))
    assert check_pipeline(MUTATIONS[name](PipelinePlan.from_json(text)))


def _sent(data: dict[str, Any]) -> dict[str, Any]:
    """The first value that the first stage sends."""
    return next(row for name, row in data["stages"][0]["plan"]["outputs"].items() if name.startswith("send."))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no mesh": (lambda data: data["mesh"].clear(), "mesh"),
    "more positions": (lambda data: data["mesh"].update(pp=4), "2 stages cannot be dealt to the 4 positions"),
    "a stage less": (lambda data: data["stages"].pop(), "1 stages cannot be dealt to the 2 positions"),
    "from no stage": (lambda data: data["boundaries"][0].update(from_stage=9), "crosses from stage 9 to stage 1, of 2 stages"),
    "a dtype of none": (lambda data: _sent(data).update(dtype="float7"), "unknown dtype 'float7'"),
    "cut of none": (lambda data: data["accumulation"].update(cut=["none"]), "microbatches cut the input none, which the call has not"),
    "whole in one stage": (
        lambda data: data["stages"][0]["plan"]["accumulation"].update(cut=[]), "the accumulation of stage 0 is not that of the pipeline"
    ),
    "another weight": (
        lambda data: data["stages"][1]["plan"]["accumulation"].update(weight=0.5),
        "the accumulation of stage 1 is not that of the pipeline",
    ),
    "more microbatches": (lambda data: data.update(microbatches=8), "the order of stage 0 has 4 actions F, of 8 microbatches"),
    "an action less": (
        lambda data: data["stages"][1].update(order=data["stages"][1]["order"].replace(" B3", "")),
        "the order of stage 1 has 3 actions B, of 4 microbatches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_file_that_contradicts_itself_is_refused_by_all_that_read_it(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (edit, words), data, file = EDITS[name], json.loads(text), tmp_path / "edited.json"
    edit(data)
    file.write_text(json.dumps(data))
    for command in (["check", file], ["explain", file, "cut"], ["show", file], ["show", file, "--trace", tmp_path / "x.json"]):
        refused(autopar(capsys, *command), 3, words)
    assert not (tmp_path / "x.json").exists()


def test_a_pipeline_is_exported(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, files = tmp_path / "program", ["plan.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    ran = autopar(capsys, "export", plan, TARGET, "-o", folder)
    assert ran.status == 0 and "runs it on 2 ranks" in ran.err and sorted(path.name for path in folder.iterdir()) == files
    assert (folder / "plan.json").read_text() == plan.read_text()
    refused(autopar(capsys, "export", plan, TARGET, "-o", folder), 2, "exists")
    refused(autopar(capsys, "export", plan, "zoo:gpt2,layers=4", "-o", tmp_path / "other"), 3, "the plan was made for another model")


def test_commands_that_do_not_take_pipelines_say_so(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, "explain", plan, "tokens.weight", "--next", "2"), 2, "--next solves a plan without stages")


def test_explain_says_what_a_stage_has_and_where_not(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = autopar(capsys, "explain", plan, "tokens.weight").out
    assert "stage 0 of 2, from the beginning:" in found and "stage 1 of 2, from layers." in found, "tied: in both"
    layer = autopar(capsys, "explain", plan, "layers.2.up.weight")
    assert layer.status == 0 and "stage 1 of 2" in layer.out and "stage 0" not in layer.out
    refused(autopar(capsys, "explain", plan, "nothing"), 2, "no stage has anything called nothing")


def test_explain_cut_prices_a_layer_more_on_each_side(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = PipelinePlan.from_json(plan.read_text())
    lines = autopar(capsys, "explain", plan, "cut").out.splitlines()
    counts = layer_counts(read)
    assert sum(counts) == 3 and lines[0].startswith(f"2 stages of {counts[0]}, {counts[1]} layers, 4 microbatches")
    moved = move_layers(read)
    assert [(one.source, one.target) for one in moved] == [pair for pair in ((1, 0), (0, 1)) if counts[pair[0]] > 1]
    assert sum(line.startswith("a layer from stage") for line in lines) == len(moved) > 0
    tight = read.model_copy(update={"memory_limit_bytes_per_rank": read.peak_memory_bytes_per_rank // 2})
    assert all(one.seconds is None for one in move_layers(tight)), "nothing fits in half"


def test_a_layer_moved_and_moved_back_leaves_the_step(text: str) -> None:
    """The stages' own figures, timed as for a moved layer, give the plan's step or less: orders are solved again."""
    read = PipelinePlan.from_json(text)
    times = explanation._time(read, recorded_costs(read))
    assert times is not None and times.step == pytest.approx(read.objective.seconds, rel=1e-6)


def test_diff_of_cuts(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the plans choose the same" in autopar(capsys, "diff", plan, plan).out
    first = PipelinePlan.from_json(plan.read_text())
    other, number = tmp_path / "other.json", 3 - layer_counts(first)[0]
    autopar(capsys, *PLAN, "--stages", f"{number},{3 - number}", "-o", other)
    second = PipelinePlan.from_json(other.read_text())
    found = autopar(capsys, "diff", plan, other).out
    assert f"cut: stages begin with {first.cut[0]} -> {second.cut[0]}" in found and "objective.seconds:" in found
    assert "stage 0: forward_seconds:" in found and json.loads(autopar(capsys, "diff", plan, other, "--json").out)["same"] is False
    order = _changed(first, 0, order="F0 F1 F2 F3 B0 B1 B2 B3")
    other.write_text(order.to_json())
    assert ("stage 0: order:" in autopar(capsys, "diff", plan, other).out) is (order != first)


def test_diff_with_a_plan_without_stages(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = tmp_path / "whole.json"
    autopar(capsys, "plan", TARGET, "--mesh", "dp=2", "--hardware", "cpu-cluster", "--effort", "low", "-o", whole)
    found = autopar(capsys, "diff", plan, whole).out
    assert "stages: 2 -> none" in found and "mesh: pp=2,dp=1 -> dp=2" in found and "microbatches: 4 -> 1" in found


def test_one_road_in_python(plan: Path) -> None:
    import autopar as package

    read = package.load(plan)
    assert isinstance(read, PipelinePlan) and read == package.load_pipeline(plan)
    with pytest.raises(UsageError, match="compiled without inputs"):
        package.compile(None, plan, inputs="local")  # type: ignore[arg-type]


def test_devices_in_python_is_the_better_of_both() -> None:
    import autopar as package
    from autopar import zoo

    target = zoo.build("mlp")
    call = {"loss": target.loss, "loss_args": target.loss_args, "hardware": "cpu-cluster", "microbatches": 4, "effort": "low"}
    found = package.plan_pipeline(target.model, target.args, dict(target.kwargs), devices=2, **call)
    alone = package.plan_pipeline(target.model, target.args, dict(target.kwargs), mesh="pp=2", **call)
    assert found.objective.seconds <= alone.objective.seconds
    with pytest.raises(UsageError, match="with devices the mesh axis pp is chosen"):
        package.plan_pipeline(target.model, target.args, dict(target.kwargs), devices=2, stages="1,1", **call)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mesh", "dp=2,pp=2"), "the mesh axis pp must be the outermost"),
        (("--mesh", "pp=2", "--microbatches", "3"), "cannot be cut into 3"),
        (("--mesh", "pp=2", "--mode", "inference"), "pp is for training"),
        (("--mesh", "pp=2", "--pareto"), "without a pipeline so far"),
        (("--mesh", "pp=2", "--order", "dualpipe"), "unknown order 'dualpipe'"),
        (("--mesh", "pp=2", "--order", "interleaved:9"), "18 stages are asked for"),
        (("--mesh", "dp=2", "--order", "1f1b"), "--order is of a pipeline's stages"),
        (("--mesh", "pp=2", "--stages", "1,1"), "the stages 1,1 are 2 with 2 layers"),
        (("--mesh", "pp=2", "--stages", "nowhere"), "cannot begin with nowhere"),
        (("--mesh", "pp=9", "--microbatches", "4"), "9 stages are asked for"),
        (("--mesh", "dp=2", "--stages", "1,2"), "--stages cuts a model along the mesh axis pp"),
        (("--devices", "2", "--stages", "1,2"), "--stages cuts a model along the mesh axis pp"),
        (("--devices", "2", "--stages", "auto", "--microbatches", "1"), "one microbatch keeps one stage busy"),
        (("--devices", "2", "--stages", "auto", "--pareto"), "without a pipeline so far"),
        (("--mesh", "pp=2", "--inputs", "local"), "takes the whole batch on every rank"),
        (("--mesh", "pp=2", "--pin", "output:loss=R"), "the loss is all that a pipeline hands out"),
        (("--mesh", "pp=2", "--microbatches", "4", "--pin", "nowhere=R"), "the pin 'nowhere' names no parameter"),
    ],
)
def test_bad_input(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, "plan", TARGET, "--hardware", "cpu-cluster", *words), 2, said)


def test_gradients_of_weights_apart_are_planned_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    made = autopar(capsys, *PLAN, "--stages", "1,2", "--order", "zero-bubble", "-o", path)
    assert made.status == 0 and "weights" in made.out.split("begins with")[1].splitlines()[0]
    assert "order     zero-bubble" in made.out
    found = PipelinePlan.from_json(path.read_text())
    times = explanation._time(found, recorded_costs(found))
    assert times is not None and times.step == pytest.approx(found.objective.seconds, rel=1e-6), "explain counts gradients of weights too"
    assert autopar(capsys, "check", path, TARGET).status == 0
    assert autopar(capsys, "show", path, "--html", tmp_path / "x.html").status == 0
    assert "--stages layers.1 --order zero-bubble" in (tmp_path / "x.html").read_text()
    found = autopar(capsys, "verify", path, TARGET, "--steps", "2")
    assert found.status == 0 and "passed on 2 ranks" in found.out


def test_devices_with_stages_keep_the_faster_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, words = tmp_path / "plan.json", ("plan", "zoo:mlp", "--devices", "2", "--microbatches", "4", "--hardware", "cpu-cluster")
    autopar(capsys, *words, "-o", path)
    without = Plan.from_json(path.read_text()).objective.seconds
    made = autopar(capsys, *words, "--stages", "auto", "-o", path)
    assert made.status == 0 and "stage  begins with" in made.out
    assert PipelinePlan.from_json(path.read_text()).objective.seconds < without


def test_auto_takes_the_number_of_microbatches_with_the_shortest_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, steps, bounds = tmp_path / "plan.json", dict[int, float](), []
    words = [word for word in PLAN if word not in ("--microbatches", "4")]
    made = autopar(capsys, *words, "--microbatches", "auto", "-o", path)
    plan = PipelinePlan.from_json(path.read_text())
    tried = plan.microbatches_tried
    assert tried is not None and 4 * plan.mesh["pp"] in tried and f"tried     {', '.join(map(str, tried))} microbatches" in made.out
    for number in tried:
        autopar(capsys, *words, "--microbatches", str(number), "-o", path)
        single = PipelinePlan.from_json(path.read_text())
        steps[number] = single.objective.seconds
        bounds.append(single.objective.bound_seconds)
    assert plan.microbatches == min(steps, key=steps.__getitem__)
    assert (plan.objective.seconds, plan.objective.bound_seconds) == pytest.approx((min(steps.values()), min(bounds)), rel=1e-9)
