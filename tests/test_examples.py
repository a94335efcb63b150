"""The examples of docstrings say what is true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for package in ("autopar", "cost_models", "solvers")
    for file in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted and not tried.failed
