"""Long work says what it does: verify to whom asks, the line on a terminal alone."""

from __future__ import annotations

import io
import os
import sys

import pytest

import autopar
from autopar import zoo
from autopar.cli.terminal import Line


def test_verify_says_each_step() -> None:
    target = zoo.build("mlp", device="cpu")
    plan = autopar.plan(target.model, target.args, mesh="dp=2", hardware="cpu-cluster", time_limit=600)
    reader, writer = os.pipe()  # what is done is done in forked processes
    autopar.verify(plan, target, backend="simulate", steps=2, progress=lambda text: os.write(writer, f"{text}\n".encode()) and None)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert said.read().splitlines() == [
            "capturing the model", "step 1 of 2 on one device", "step 2 of 2 on one device", "step 1 of 2 on 2 simulated ranks",
            "step 2 of 2 on 2 simulated ranks",
        ]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_of_progress_is_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with Line() as line:
        line.elapsed("step 1 of 2")
    assert stream.getvalue() == ("\r\x1b[Kstep 1 of 2, 0 s\r\r\x1b[K" if terminal else "")
