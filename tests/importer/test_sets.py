"""The same model gives the same graph whatever the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autopar.importer.stand_ins.sets import InOrder

PROGRAM = '''
import torch
from torch import nn
import autopar

KINDS = ("sin", "cos", "exp", "tanh", "sigmoid", "relu")

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.held = set(KINDS[:3])

    def forward(self, x):
        assert isinstance({"sin"}, set) and not isinstance([], set)
        made = {kind: getattr(torch, kind)(x * self.weight) for kind in set(KINDS) | {"atan"}}
        for kind in self.held:
            made[kind] = made[kind] * 2
        return sum(made[kind] for kind in KINDS).sum() + made["atan"].sum()

model = Model()
print(autopar.capture(model, (torch.ones(2, 4),)).sha256, list(set(KINDS)), type(model.held) is set)
'''


def test_graphs_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(PROGRAM, encoding="utf-8")
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=True)
        found.append(run.stdout.split(maxsplit=1))
    (first, one), (second, other) = found
    assert first == second and one != other, "seeds for which Python's own order differs"
    assert one.endswith("True\n"), "the model is left as it was, and so is its file"


def test_a_set_in_order_is_a_set() -> None:
    letters = InOrder("dbca")
    letters.add("z")
    letters.discard("b")
    letters |= {"y"}
    assert list(letters) == ["d", "c", "a", "z", "y"] and letters == {"a", "c", "d", "y", "z"} and len(letters) == 5
    assert list(letters & {"a", "z", "d"}) == ["d", "a", "z"] and list(letters.union("qa")) == ["d", "c", "a", "z", "y", "q"]
    assert list(letters - {"d"}) == ["c", "a", "z", "y"] and "c" in letters and sorted(letters) == ["a", "c", "d", "y", "z"]
    assert isinstance(letters.pop(), str) and len(list(letters)) == 4 and isinstance({1}, InOrder)
    letters.clear()
    assert not letters and list(letters.copy()) == []
