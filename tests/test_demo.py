"""demo: prints the plan, both curves and their difference; says so when they part."""

from __future__ import annotations

import re
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli.main import main


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_two_ranks_train_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "3", "--ranks", "2"]) == 0
    out, err = capfd.readouterr()
    assert "how it lies" in out and "all_reduce" in out, "the plan is printed"
    drawn = [line.partition("|")[2] for line in out.splitlines() if re.match(r" *-?\d+\.\d+ \|", line)]
    assert drawn and sum(line.count("*") for line in drawn) == 3, "the curves lie on one another"
    assert "largest difference between the two curves" in out and "training the same steps on 2 ranks" in err


@pytest.mark.slow
def test_the_demo_splits_and_leaves_a_plan(capfd: pytest.CaptureFixture[str]) -> None:
    """On four ranks with computation priced; the command that it names verifies the plan."""
    assert main(["demo", "--steps", "10", "-o", "mine.json"]) == 0
    assert Path("mine.html").read_text().startswith("<!doctype html>")
    plan = autopar.load("mine.json")
    by_hand = min(row.step_seconds for row in plan.baselines.values())
    assert by_hand >= 1.2 * plan.predicted.step_seconds, "no single way of splitting is near"
    for name, one in plan.parameters.items():
        if name.startswith("layers.0."):
            assert one.spec == plan.parameters[name.replace("layers.0.", "layers.1.")].spec, "equal layers lie alike"
    (command,) = re.findall(r"or autopar (verify .*)", capfd.readouterr().err)
    assert main(command.split()) == 0


def test_a_folder_that_is_not_there_is_said_before_planning(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "-o", "nowhere/plan.json"]) == 3
    err = capfd.readouterr().err
    assert "nowhere" in err and "planning" not in err


def test_curves_that_part_are_a_failure(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("autopar.cli.demo"), "TOLERANCE", -1.0)
    assert main(["demo", "--steps", "1", "--ranks", "1"]) == 1
    assert "error: the losses differ" in capfd.readouterr().err


def test_ctrl_c_ends_the_demo_where_there_is_a_plan(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The search would keep its best: who stops a demo does not want to see it go on."""

    def interrupted(*_: Any) -> Any:
        def report(best: float, *_: float) -> None:
            if best < float("inf"):
                signal.raise_signal(signal.SIGINT)

        return report

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(import_module("autopar.cli.demo"), "progress", interrupted)
        assert main(["demo", "--steps", "1", "--ranks", "2"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "training" not in capfd.readouterr().err


def test_ranks_that_do_not_divide_the_batch_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--ranks", "3"]) == 2
    assert "hint: use 1, 2, 4" in capfd.readouterr().err
