"""The acceptance scripts from outside the repository: commands, keys, exit statuses, and plans with known optima."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("script", "said"), [("contract", "contract holds"), ("plan_cases", "within 1 %")])
def test_script_holds(script: str, said: str, shared: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [shared / "acceptance" / script], capture_output=True, text=True, timeout=1800, env=environment, cwd=shared, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
