"""show, explain, diff, check: commands that read plan files and need no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli.main import VERBS
from tests.cli.running import autopar, refused
from tests.graphs import random_plan, two_layer_plan


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "--help")
    assert ran.status == 0 and not ran.err
    for verb, text in VERBS.items():
        assert verb in ran.out and text in ran.out
    assert autopar(capsys).status == 2


@pytest.mark.parametrize("verb", ["plan", "show", "explain", "diff", "check", "verify", "sweep", "rules", "profile", "solve", "demo"])
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
    assert page.startswith("<!doctype html>") and "http" not in page and "<svg" in page
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["name"].startswith("all_reduce") for event in events)


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
    assert "did you mean layers.0.weight" in autopar(capsys, "explain", plan_file, "layers.0.wieght").err


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


def test_check(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "check", plan_file)
    assert ran.status == 0 and "holds" in ran.out
    data = json.loads(plan_file.read_text())
    data["collectives"][0]["bytes"] = 8
    (tmp_path / "edited.json").write_text(json.dumps(data))
    ran = autopar(capsys, "check", tmp_path / "edited.json")
    assert ran.status == 1
    assert ran.out.startswith("collectives[0].bytes: 8 in the plan, 4 recomputed")
    assert "the first at collectives[0]" in ran.err and ran.err.strip().splitlines()[-1].startswith("hint: ")
    data["hardware"]["memory_bandwidth"] = "fast"
    (tmp_path / "edited.json").write_text(json.dumps(data))
    refused(autopar(capsys, "check", tmp_path / "edited.json"), 3, "memory_bandwidth")


def test_a_closed_pipe_is_no_error(plan_file: Path) -> None:
    command = f"{Path(sys.executable).with_name('autopar')} show {plan_file} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "autopar    plan\n" and done.stderr == ""
