"""demo: prints the plan, both curves and their difference; says so when they part."""

from __future__ import annotations

import re
import signal
from importlib import import_module
from typing import Any

import pytest

from autopar.cli.main import main


def test_two_ranks_train_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "3", "--ranks", "2"]) == 0
    out, err = capfd.readouterr()
    assert "how it lies" in out and "all_reduce" in out, "the plan is printed"
    drawn = [line.partition("|")[2] for line in out.splitlines() if re.match(r" *-?\d+\.\d+ \|", line)]
    assert drawn and sum(line.count("*") for line in drawn) == 3, "the curves lie on one another"
    assert "largest difference between the two curves" in out and "training the same steps on 2 ranks" in err


@pytest.mark.slow
def test_four_ranks_train_as_one() -> None:
    assert main(["demo", "--steps", "10"]) == 0


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
