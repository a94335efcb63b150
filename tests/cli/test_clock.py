"""A command's time limit counts from its begin: what it imports and reads is part of the call."""

from __future__ import annotations

import pytest

from autopar.cli import clock
from tests.cli.running import autopar, refused


def test_a_time_limit_counts_what_came_before_the_capture(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_long_ago(*, with_process: bool) -> None:
        monkeypatch.setattr(clock, "_began", clock.time.perf_counter() - 1000.0)

    monkeypatch.setattr("autopar.cli.main.start_clock", begin_long_ago)
    ran = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "--time-limit", 900)
    refused(ran, 4, "the time limit of 900 s passed before the model was captured")


def test_a_script_s_command_began_with_its_process() -> None:
    clock.start_clock(with_process=True)
    long = clock.command_seconds()
    clock.start_clock(with_process=False)
    assert clock.command_seconds() < long
