"""``autopar export``: a folder of programs, or words that say why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.running import autopar, refused


def test_a_plan_is_exported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, folder = tmp_path / "plan.json", tmp_path / "program"
    planned = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "--hardware", "cpu-cluster", "-o", plan)
    assert planned.status == 0, planned
    ran = autopar(capsys, "export", plan, "zoo:mlp", "-o", folder)
    assert ran.status == 0 and "runs it on 2 ranks" in ran.err and ran.out == ""
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    refused(autopar(capsys, "export", plan, "zoo:mlp", "-o", folder), 2, "exists")
    refused(autopar(capsys, "export", plan, "zoo:mlp,layers=3", "-o", tmp_path / "other"), 3, "the plan was made for another model")
    refused(autopar(capsys, "export", plan, "zoo:mlp", "-o", tmp_path / "other", "--weights", plan), 3, "cannot read the weights")
    assert not (tmp_path / "other").exists()
    empty, taken = tmp_path / "empty", tmp_path / "taken"
    empty.mkdir()
    taken.write_text("")
    before = os.umask(0o027)
    try:
        assert autopar(capsys, "export", plan, "zoo:mlp", "-o", empty).status == 0
        assert autopar(capsys, "export", plan, "zoo:mlp", "-o", tmp_path / "new").status == 0
    finally:
        os.umask(before)
    for made in (empty, tmp_path / "new"):
        assert sorted(path.name for path in made.iterdir()) == ["plan.json", "rank-00000.safetensors", "rank-00001.safetensors"]
        assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o640}, "as every new file's"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750
    refused(autopar(capsys, "export", plan, "zoo:mlp", "-o", empty), 2, "empty exists and is not empty")
    refused(autopar(capsys, "export", plan, "zoo:mlp", "-o", taken), 2, "taken exists")
    for verb in (("show", folder), ("explain", folder, "head.weight")):
        ran = autopar(capsys, *verb)
        refused(ran, 3, "Is a directory")
        assert f"hint: give the plan in this folder: {folder / 'plan.json'}" in ran.err
