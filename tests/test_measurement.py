"""profile: what is measured is a hardware file that loads, predicts what was measured, and plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.plan import Plan
from cost_models import load_hardware
from tests.cli.running import autopar


@pytest.mark.slow
def test_profile_writes_a_file_to_plan_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    ran = autopar(capsys, "profile", "--seconds", "0.02", "-o", path)
    assert ran.status == 0, ran.err
    assert ran.out == path.read_text()
    hardware = load_hardware(path)
    assert hardware.node.bandwidth > 1e6 and hardware.node.latency_seconds < 1.0
    assert hardware.peak("float32") > 1e8 and hardware.memory_bandwidth > 1e8 and 0 < hardware.kernel_launch_seconds < 1e-2
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "--hardware", path, "--json")
    assert Plan.from_json(ran.out).hardware == hardware.to_dict()


def test_profile_says_at_once_that_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert autopar(capsys, "profile", "-o", tmp_path / "absent" / "machine.toml").status == 3
