"""Kernels give the same answers as plain Python and compiled, and the compiled ones are those of the source beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.solvers import kernels

ROOT = Path(__file__).resolve().parents[2]

PLAIN = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

class Plain:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("autopar.solvers.kernels.") or path is None:
            return None
        file = str(Path(list(path)[0]) / (name.rpartition(".")[2] + ".py"))
        return spec_from_file_location(name, file, loader=SourceFileLoader(name, file))

sys.meta_path.insert(0, Plain())
"""

ANSWERS = """
from autopar.solvers import kernels, solve
from autopar.solvers.pipeline import solve_pipeline
from tests.solvers.layered import layered
from tests.solvers.pipeline.problems import random_pipeline
from tests.solvers.problems import random_problem

print(kernels.COMPILED)
found = [solve(random_problem(seed), work=0.01, time_limit=600.0, method=method) for seed in range(60) for method in ("auto", "messages")]
found += [solve(layered(3, 6, 9, seed=seed), work=0.02, time_limit=600.0, method="messages") for seed in range(3)]
for one in found:
    print(one.status.value, one.objective, one.bound, one.work, one.cut, None if one.choices is None else one.choices.tolist())
for seed in range(40):
    one = solve_pipeline(random_pipeline(seed), work=0.02, time_limit=600.0)
    print(one.status.value, one.step, one.bound, one.work, one.cut_off, one.plan)
"""


def _said(code: str) -> tuple[bool, str]:
    """Whether kernels were compiled, and what a process says of its answers."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, _, rest = done.stdout.partition("\n")
    return first == "True", rest


def test_plain_and_compiled_kernels_give_the_same_answers():
    if not kernels.COMPILED:
        pytest.skip("kernels are not compiled here: the two forms are one")
    compiled, plain = _said(ANSWERS), _said(PLAIN + ANSWERS)
    assert (compiled[0], plain[0]) == (True, False)
    assert compiled[1] == plain[1]
