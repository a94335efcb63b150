"""show, explain, diff, check: commands that read plan files and need no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli.main import VERBS
from autopar.schedule import Limits
from tests.cli.running import autopar, refused
from tests.graphs import bucket_plan, random_plan, two_layer_plan


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "--help")
    assert ran.status == 0 and not ran.err
    for verb, text in VERBS.items():
        assert verb in ran.out and text in ran.out
    assert autopar(capsys).status == 2


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, verb, "--help")
    assert ran.status == 0 and VERBS[verb] in ran.out.replace("\n  ", " ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert autopar(capsys, "--version").out.startswith("autopar 0.")


def test_unknown_verbs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    refused(autopar(capsys, "plna"), 2, "there is no command 'plna'")
    ran = autopar(capsys, "show", "--nosuch", "x")
    assert ran.status == 2 and "No such option" in ran.err and "hint: autopar show --help" in ran.err
    assert autopar(capsys, "show").status == 2


def test_show(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "show", plan_file)
    assert ran.status == 0 and not ran.err
    assert "dp=2 x tp=2 on cpu-cluster" in ran.out and "all_reduce" in ran.out
    ran = autopar(capsys, "show", plan_file, "--html", tmp_path / "plan.html", "--trace", tmp_path / "trace.json")
    assert ran.status == 0 and "wrote" in ran.err
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["name"] == "all_reduce of loss" for event in events)


def test_the_drawing_has_a_row_for_each_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = bucket_plan()
    plan.save(tmp_path / "plan.json")
    words = "show", tmp_path / "plan.json", "--html", tmp_path / "plan.html", "--trace", tmp_path / "trace.json"
    assert autopar(capsys, *words).status == 0
    page = (tmp_path / "plan.html").read_text()
    assert '"streams":["compute","node"]' in page and '["waits for all_gather of 6 values from w0",' in page
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(threads.values()) == ["compute", "node", "layers"]
    timed = [(threads[event["tid"]], event["name"], event["cat"]) for event in events if event["ph"] == "X"]
    assert ("node", "all_gather of 6 values from w0", "moving") in timed
    assert ("compute", "waits for all_gather of 6 values from w0", "stalled") in timed
    assert ("compute", "f0", "forward") in timed
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") * 1e-6
    assert end == pytest.approx(plan.predicted.step_seconds)


def test_a_schedule_that_cannot_be_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(bucket_plan().to_json())
    del data["schedule"][next(index for index, row in enumerate(data["schedule"]) if row["kind"] == "start")]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert autopar(capsys, "show", tmp_path / "plan.json").status == 0
    refused(autopar(capsys, "show", tmp_path / "plan.json", "--html", tmp_path / "plan.html"), 3, "has not started before")
    refused(autopar(capsys, "explain", tmp_path / "plan.json", "w0@whole"), 3, "has not started before")
    ran = autopar(capsys, "check", tmp_path / "plan.json")
    assert ran.status == 1 and "no instruction starts the collective w0@whole+5" in ran.out
    assert ran.err.strip().splitlines()[-1].startswith("hint: ")


def test_show_folds_equal_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = two_layer_plan()
    row = next(iter(plan.parameters.values()))
    rows = {f"layers.{index}.attn.weight": row.model_copy(update={"index": index}) for index in range(32)}
    plan.model_copy(update={"parameters": rows}).save(tmp_path / "plan.json")
    out = autopar(capsys, "show", tmp_path / "plan.json").out
    assert [line.split()[1:3] for line in out.splitlines() if line.startswith("parameter")] == [["layers.*.attn.weight", "32"]]


@pytest.mark.parametrize("verb", ["show", "check", "explain", "diff"])
def test_broken_files(verb: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"explain": ["x"], "diff": [plan_file]}.get(verb, [])
    (tmp_path / "cut.json").write_text(plan_file.read_text()[:200])
    refused(autopar(capsys, verb, tmp_path / "cut.json", *more), 3, "as if truncated")
    (tmp_path / "other.json").write_text('{"schema": "autopar.solution/1"}')
    refused(autopar(capsys, verb, tmp_path / "other.json", *more), 3, "has the schema 'autopar.solution/1'")
    refused(autopar(capsys, verb, tmp_path / "absent.json", *more), 3, "No such file")


def test_explain(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = autopar(capsys, "explain", plan_file, "layers.0.weight").out
    assert "parameter layers.0.weight: float32[32, 8] lies as" in out
    assert "read by h (autopar.contract.default, layers.0)" in out and "its gradient gw0" in out
    out = autopar(capsys, "explain", plan_file, "y").out
    assert "operator y" in out and "at model.py:7" in out and "reads h" in out
    out = autopar(capsys, "explain", plan_file, "output:loss").out
    assert "output loss" in out and "all_reduce over dp,tp of 4 bytes" in out
    assert "input x" in autopar(capsys, "explain", plan_file, "input:x").out
    refused(autopar(capsys, "explain", plan_file, "layers.0.wieght"), 2, "nothing named 'layers.0.wieght'")
    ran = autopar(capsys, "explain", plan_file, "all_reduce")
    refused(ran, 2, "nothing named 'all_reduce'\nhint: of that kind are ")
    first = ran.err.split("of that kind are ")[1].split(",")[0].split(" and ")[0].split(";")[0]
    assert "all_reduce over" in autopar(capsys, "explain", plan_file, first).out
    assert "did you mean layers.0.weight" in autopar(capsys, "explain", plan_file, "layers.0.wieght").err


def test_explain_says_when_collectives_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = bucket_plan(Limits(10**6, 10**6, 0))
    plan.save(tmp_path / "plan.json")
    first, last = plan.schedule[0], plan.schedule[-1]
    out = autopar(capsys, "explain", tmp_path / "plan.json", "layers.0.weight").out
    assert "after all_gather over dp of 1536 bytes" in out and "a bucket of 6 values" in out
    assert re.search(
        rf"all_gather w0@whole\+5 starts before any operator \(instruction {first.id}\), is waited for before f0 "
        r"\(instruction \d+\): not hidden, operators stand still for [\d.e-]+ s\n", out,
    )  # fmt: skip
    assert re.search(
        rf"reduce_scatter gw5@split\+5 starts after gw0 .*, is waited for at the end \(instruction {last.id}\): in part hidden", out
    )
    assert out.count("starts before any operator") == 1
    out = autopar(capsys, "explain", tmp_path / "plan.json", "w0@whole+5").out
    assert out.startswith("collective w0@whole+5, forward: all_gather over dp of 1536 bytes")
    assert "\n  w3@whole: w3 from 'S0 R' to 'R R', 256 bytes, before f3\n" in out
    assert "starts before any operator" in out


def test_explain_has_words_for_everything(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = random_plan("dp=2,tp=2", 3)
    names = [*plan.parameters, *plan.inputs, *plan.outputs, *(row.name for row in plan.ops), *(row.value for row in plan.reshards)]
    plan.save(plan_file.parent / "random.json")
    for name in names:
        ran = autopar(capsys, "explain", plan_file.parent / "random.json", name)
        assert ran.status == 0 and ran.out.strip()


def test_diff(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "diff", plan_file, plan_file)
    assert ran.status == 0 and ran.out == "the plans choose the same\n"
    two_layer_plan("dp=4").save(tmp_path / "four.json")
    out = autopar(capsys, "diff", plan_file, tmp_path / "four.json").out
    assert (
        "mesh: dp=2,tp=2 -> dp=4" in out
        and "all_reduce over dp,tp" in out
        and re.search(r"parameter layers\.0\.weight: 'S(01|10) R' -> 'S0 R'", out)
    )


def test_diff_knows_an_axis_by_another_name_or_place(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(plan_file.read_text())
    text = re.sub(r'"(dp|tp)"', lambda match: {"dp": '"data"', "tp": '"model"'}[match[1]], plan_file.read_text())
    (tmp_path / "renamed.json").write_text(text)
    assert autopar(capsys, "diff", plan_file, tmp_path / "renamed.json").out.splitlines() == [
        "mesh: dp=2,tp=2 -> data=2,model=2",
        "axes: dp is now data, tp is now model; specs of the second are told in those of the first",
    ]
    swapped = re.sub(r"(?<=[SP])[01]+", lambda match: match[0].translate({48: "1", 49: "0"}), json.dumps(data))
    data = {**json.loads(swapped), "mesh": {"tp": 2, "dp": 2}}
    (tmp_path / "swapped.json").write_text(json.dumps(data))
    assert autopar(capsys, "diff", plan_file, tmp_path / "swapped.json").out.splitlines() == [
        "mesh: dp=2,tp=2 -> tp=2,dp=2",
        "axes: dp,tp stand as tp,dp; specs of the second are told in those of the first",
    ]


def test_diff_folds_equal_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = two_layer_plan()
    row = next(iter(plan.parameters.values()))
    for name, spec in (("a", "S0 R"), ("b", "R S0")):
        rows = {f"layers.{index}.w": row.model_copy(update={"index": index, "spec": spec}) for index in range(32)}
        plan.model_copy(update={"parameters": rows}).save(tmp_path / f"{name}.json")
    out = autopar(capsys, "diff", tmp_path / "a.json", tmp_path / "b.json").out
    assert out == "parameter layers.*.w (32): 'S0 R' -> 'R S0'\n"


def test_diff_of_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = bucket_plan(Limits(10**6, 10**6, 0)), bucket_plan(Limits(600, 10**6, 0))
    first.save(tmp_path / "first.json")
    second.save(tmp_path / "second.json")
    out = autopar(capsys, "diff", tmp_path / "first.json", tmp_path / "second.json").out
    assert "all_gather over dp, forward: 1 call for 6 values, 1536 bytes in all -> 3 calls for 6 values, 1536 bytes in all" in out
    assert "limits: bucket_bytes 1000000, ahead_bytes 1000000, aside_bytes 0, held_bytes 0, summed_bytes " in out
    assert " -> bucket_bytes 600, ahead_bytes 1000000" in out
    assert "first at instruction 0: start of w0@whole+5 -> start of w0@whole+1" in out
    data = json.loads(first.to_json())
    moved = data["schedule"].pop(0)
    wait = next(index for index, row in enumerate(data["schedule"]) if row["kind"] == "run")
    data["schedule"].insert(wait, moved)
    (tmp_path / "moved.json").write_text(json.dumps(data))
    out = autopar(capsys, "diff", tmp_path / "first.json", tmp_path / "moved.json").out
    assert re.fullmatch(r"schedule: the same \d+ instructions in another order, first at instruction 0: start of .* -> .*\n", out)


def test_check(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "check", plan_file)
    assert ran.status == 0 and "holds" in ran.out
    data = json.loads(plan_file.read_text())
    data["collectives"][0]["bytes"] = 8
    (tmp_path / "edited.json").write_text(json.dumps(data))
    ran = autopar(capsys, "check", tmp_path / "edited.json")
    assert ran.status == 1
    assert ran.out == "collectives[0].bytes: 8 in the plan, 4 recomputed\n"
    assert "the first at collectives[0]" in ran.err and ran.err.strip().splitlines()[-1].startswith("hint: ")
    data["hardware"]["memory_bandwidth"] = "fast"
    (tmp_path / "edited.json").write_text(json.dumps(data))
    refused(autopar(capsys, "check", tmp_path / "edited.json"), 3, "memory_bandwidth")


def test_a_closed_pipe_is_no_error(plan_file: Path) -> None:
    command = f"{Path(sys.executable).with_name('autopar')} show {plan_file} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "autopar    plan\n" and done.stderr == ""
