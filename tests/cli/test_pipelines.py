"""``autopar solve`` on pipeline files: the file it writes, the table it prints, and its exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from runpy import run_path

import pytest

from autopar.cli.main import main
from tests.cli.running import autopar, refused

LAYER = {"forward": 1, "backward": 2, "held": 1}
PIPELINE = {
    "schema": "autopar.pipeline-problem/1", "name": "six layers", "layers": [*[LAYER] * 5, {"forward": 3, "backward": 6, "held": 1}],
    "devices": 2, "microbatches": 4, "limit": 6,
}  # fmt: skip


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path, **keys: object) -> Path:
    path = folder / "pipeline.json"
    path.write_text(json.dumps({**PIPELINE, **keys}))
    return path


TABLE = """\
problem six layers
status  optimal
step    69
bound   69
gap     0

chunk  device      layers        busy        idle  in flight    peak bytes
    0       0         0-2          36          33          2             6
    1       1         3-5          60           9          1             3
"""


def test_the_table_shows_each_stage(capsys, problem):
    ran = autopar(capsys, "solve", problem)
    assert (ran.status, ran.out, ran.err) == (0, TABLE, "")


def test_the_file_holds_cut_orders_step_and_bound(capsys, problem, tmp_path):
    out = tmp_path / "solution.json"
    ran = autopar(capsys, "solve", problem, "--time-limit", 20, "-o", out)
    answer = json.loads(out.read_text())
    assert ran.status == 0 and ran.out == TABLE
    assert answer["schema"] == "autopar.pipeline-solution/1" and answer["cut"] == [3, 3]
    assert (answer["step"], answer["bound"], answer["gap"], answer["status"]) == (69, 69, 0, "optimal")
    assert json.loads(autopar(capsys, "solve", problem, "--json").out) == answer
    assert json.loads(autopar(capsys, "solve", problem, "-o", "-").out) == answer


def test_figures_of_a_device_stand_at_its_first_chunk(capsys, tmp_path):
    lines = autopar(capsys, "solve", written(tmp_path, chunks=2, placement="v", limit=None)).out.splitlines()
    assert [len(line.split()) for line in lines[-4:]] == [7, 7, 5, 5]


def test_a_limit_that_nothing_fits_is_infeasible(capsys, tmp_path):
    ran = autopar(capsys, "solve", written(tmp_path, limit=2))
    refused(ran, 1, "infeasible: no cut lets a device hold one microbatch within the limit 2")
    assert "with limit 3 one microbatch at a time fits" in ran.err


def test_malformed_files_are_refused(capsys, tmp_path):
    refused(autopar(capsys, "solve", written(tmp_path, devices=7)), 3, "6 layers are too few for 7 devices")
    refused(autopar(capsys, "solve", written(tmp_path, schema="autopar.pipeline-problem/9")), 3, "pipeline-problem/9")
    refused(autopar(capsys, "solve", written(tmp_path), "--method", "highs"), 2, "does not solve")


def test_known_cases_of_the_acceptance_script(shared):
    if not (shared / "acceptance" / "pipeline_cases").is_file():
        pytest.skip("no pipeline cases beside the acceptance scripts")
    sys.path.insert(0, str(shared / "acceptance"))
    try:
        cases = run_path(str(shared / "acceptance" / "pipeline_cases"))
        from autopar.solvers.pipeline import solve_pipeline
        from autopar.solvers.pipeline.file_format import from_document, to_document

        for name, document, optimum in cases["CASES"]:
            answer = to_document(solve_pipeline(from_document(document), time_limit=600.0))
            right, best, line = cases["judge"](name, document, answer, optimum)
            assert right and best, line
    finally:
        sys.path.remove(str(shared / "acceptance"))


@pytest.mark.slow
def test_the_acceptance_script_runs(shared, monkeypatch, capsys):
    """Its commands run in this process, so that what they import is imported once."""
    if not (shared / "acceptance" / "pipeline_cases").is_file():
        pytest.skip("no pipeline cases beside the acceptance scripts")

    def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert words[0] == "autopar" and options == {"capture_output": True, "text": True}
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = main(words[1:])
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    with pytest.raises(SystemExit) as ended:
        run_path(str(shared / "acceptance" / "pipeline_cases"), run_name="__main__")
    said = capsys.readouterr().out
    assert not ended.value.code, said
    assert " cases: 0 wrong" in said
