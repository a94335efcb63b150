"""The examples of docstrings say what is true."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.test_layout import ROOT, sources

MODULES = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in sources() if ">>> " in file.read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted and not tried.failed
