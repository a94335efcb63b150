"""The acceptance scripts from outside the repository: commands, keys, exit statuses, and plans with known optima."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main

pytestmark = pytest.mark.slow


def test_contract_script_holds(shared: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [shared / "acceptance" / "contract"], capture_output=True, text=True, timeout=1800, env=environment, cwd=shared, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "contract holds" in done.stdout


def test_plan_cases_script_finds_the_known_optima(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """Its commands run in this process, so that torch is imported once; those of ``contract`` run as they are."""

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert words[0] == "autopar" and options == {"capture_output": True, "text": True}
        return subprocess.CompletedProcess(words, main(words[1:]), "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(shared)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(shared / "acceptance" / "plan_cases"))
    said = capsys.readouterr().out
    assert not ended.value.code, said
    assert "14 of 14 within 1 %" in said
