"""hardware: the built-in files as a table, and each whole, as a start for one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.cost_models import hardware_names, load_hardware


def test_every_file_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tuple(line.split()[0] for line in lines[1 : 1 + len(hardware_names())]) == hardware_names()
    assert "125 TFLOP/s" in next(line for line in lines if line.startswith("v100")), "float16, where there is no bfloat16"


def test_a_file_printed_can_be_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "h200"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    assert load_hardware(tmp_path / "mine.toml") == load_hardware("h200")


def test_an_unknown_name_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "h100"]) == 2
    err = capsys.readouterr().err
    assert "unknown hardware 'h100'" in err and "h100-sxm" in err


def test_the_built_in_cpus_are_said_to_be_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "zoo:mlp", "--mesh", "2", "--hardware", "cpu-cluster"]) == 0
    assert "autopar profile -o hardware.toml measures this machine" in capsys.readouterr().err
