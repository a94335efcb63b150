"""``benchmarks/optimizer.py``: what it compares, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import optimizer


def test_a_table_of_small_models_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.json"
    sizes = ["--layers", "1", "--width", "8", "--heads", "2", "--vocab", "16", "--batch", "2", "--seq", "4"]
    assert optimizer.main([*sizes, "--ranks", "2", "--rounds", "1", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    names = ("ddp", "whole", "mixed")
    assert [(row["form"], row["parameters"]) for row in rows] == [(form, name) for form in optimizer.FORMS for name in names]
    assert all(row["ratio"] == 1.0 for row in rows if row["parameters"] == "ddp")
