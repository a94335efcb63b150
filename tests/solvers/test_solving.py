"""What ``solve`` promises around the methods: anytime, deterministic, interruptible, warm starts, imports, plain Python."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autopar.solvers import Problem, Status, evaluate, solve, solving
from autopar.solvers.settings import SETTINGS
from tests.solvers.layered import layered
from tests.solvers.problems import random_problem, shared_folder

ROOT = Path(__file__).resolve().parents[2]


def _python(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_layered_problems_are_solved_to_optimality_like_the_reference():
    for seed in range(3):
        problem = layered(2, 5, 5, seed=seed)
        reference, found = solve(problem, method="pulp-highs"), solve(problem)
        assert reference.status == found.status == Status.OPTIMAL
        assert reference.objective == found.objective


def test_a_layered_problem_of_equal_layers_is_proved_optimal():
    found = solve(layered(4, 10, 12))
    assert found.status == Status.OPTIMAL
    assert found.gap <= 1e-6 and found.bound <= found.objective


def test_the_limit_of_layered_problems_matters():
    free = solve(dataclasses.replace(layered(2, 5, 5), limit=None))
    assert solve(layered(2, 5, 5)).objective > free.objective


def test_progress_only_improves_and_a_gap_stops_the_search():
    told = []
    found = solve(layered(6, 20, 20), gap=0.05, progress=lambda *news: told.append(news))
    assert found.gap <= 0.05
    costs = [cost for cost, *_ in told if cost is not None]
    bounds = [bound for _, bound, *_ in told]
    assert costs == sorted(costs, reverse=True) and bounds == sorted(bounds)
    assert costs[-1] == found.objective


def test_ctrl_c_returns_the_best_so_far():
    def press(cost, bound, gap, seconds):
        if cost is not None and bound > 0:
            raise KeyboardInterrupt

    problem = layered(6, 20, 20)
    found = solve(problem, progress=press)
    assert found.status == Status.FEASIBLE and "interrupted" in found.message
    assert evaluate(problem, found.choices) == (found.objective, found.peak_usage, True)
    assert 0 < found.bound <= found.objective


def test_the_same_seed_gives_the_same_answer():
    problem = layered(6, 20, 20, seed=5)
    runs = [solve(problem, gap=0.02, seed=seed) for seed in (1, 1)]
    assert runs[0].choices.tolist() == runs[1].choices.tolist()
    assert (runs[0].objective, runs[0].bound) == (runs[1].objective, runs[1].bound)


def test_a_start_is_kept_when_nothing_better_is_found_in_time():
    problem = dataclasses.replace(layered(6, 20, 20), limit=None)
    start = np.zeros(problem.num_nodes, dtype=np.int64)
    found = solve(problem, time_limit=0.0, start=start)
    assert found.objective <= evaluate(problem, start)[0]
    wrong = solve(random_problem(3), start=np.zeros(random_problem(3).num_nodes, dtype=np.int64))
    assert wrong.status in {Status.OPTIMAL, Status.INFEASIBLE}


def test_no_time_at_all_is_an_honest_unknown_or_an_answer():
    found = solve(layered(6, 20, 20), time_limit=0.0)
    assert found.status in {Status.UNKNOWN, Status.FEASIBLE}
    assert found.choices is not None or found.message


def test_choices_of_little_memory_have_until_the_deadline_and_a_moment_where_it_is_past(monkeypatch):
    assert solve(layered(6, 20, 20), time_limit=0.0).status == Status.FEASIBLE
    left = []
    monkeypatch.setitem(solving.METHODS, "auto", lambda incumbent: left.append(incumbent.seconds_left))
    for seconds in (0.0, 60.0):
        solve(layered(2, 5, 5), time_limit=seconds)
    assert left == pytest.approx([0.0, SETTINGS.lean_seconds, 60.0, 60.0], abs=0.9)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="no method 'magic'\nhint: one of auto"):
        solve(random_problem(0), method="magic")


def test_import_is_light_and_never_torch():
    code = "import sys; from autopar import solvers; print(*sys.modules)"
    assert not {"pulp", "highspy", "networkx", "torch", "numpy"} & set(_python(code).split())
    code = "import sys; from autopar import solvers; solvers.solve(solvers.Problem.build([[2, 1]])); print(*sys.modules)"
    loaded = set(_python(code).split())
    assert "torch" not in loaded
    rooms = {name.split(".")[1] for name in loaded if name.startswith("autopar.")}
    assert rooms == {"display", "solvers", "version"}, "what the package's own first lines import, and the solvers"


def test_same_work_gives_the_same_answer_when_time_is_short_of_nothing():
    problem = layered(6, 20, 20, seed=5)
    one, other = (solve(problem, work=0.6, time_limit=600.0 * scale) for scale in (1, 2))
    assert not one.cut and not other.cut
    assert (one.objective, one.bound, one.work) == (other.objective, other.bound, other.work)
    assert one.choices.tolist() == other.choices.tolist()


@pytest.mark.parametrize("method", ["auto", "highs", "messages", "pulp-highs"])
def test_work_ends_a_solve(method):
    problem = layered(6, 20, 20, seed=5)
    found = [solve(problem, work=work, time_limit=600.0, gap=0.0, method=method) for work in (0.02, 0.3)]
    assert [one.cut for one in found] == [False, False]
    assert found[0].work < found[1].work < 0.9
    assert found[0].bound <= found[1].bound


def test_the_time_limit_cuts_off_and_says_so():
    found = solve(layered(6, 20, 20), work=1e9, time_limit=0.0)
    assert found.cut
    assert not solve(random_problem(3), work=1e9).cut


def test_work_is_no_more_than_the_time_limit_where_none_is_given():
    assert solve(layered(6, 20, 20), time_limit=0.1, gap=0.0).work <= 0.3


def test_a_large_problem_without_compiled_kernels_is_announced_once(monkeypatch):
    said = []
    monkeypatch.setattr(solving, "announce", lambda: said.append(True))
    monkeypatch.setattr(solving, "SETTINGS", dataclasses.replace(solving.SETTINGS, direct_entries=100))
    small = Problem.build([[2, 1]])
    large = Problem.build([[0] * 10] * 2, [(0, 1, np.zeros((10, 10), dtype=np.int64))])
    monkeypatch.setattr(solving, "COMPILED", True)
    solve(large)
    monkeypatch.setattr(solving, "COMPILED", False)
    solve(small)
    assert said == []
    solve(large)
    solve(large)
    assert said == [True]


@pytest.mark.parametrize("name", ["B", "G"])
def test_real_instances_are_proved_optimal(name):
    best = {"B": 532843, "G": 217039}[name]
    found = solve(Problem.load(shared_folder() / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"))
    assert (found.status, found.objective, found.bound) == (Status.OPTIMAL, best, best)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "best"), [("A", 6548553650), ("P", 651833115436)])
def test_large_real_instances_are_proved_optimal(name, best):
    found = solve(Problem.load(shared_folder() / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"), time_limit=120)
    assert (found.status, found.objective) == (Status.OPTIMAL, best)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["K", "M", "S", "U"])
def test_the_largest_instances_beat_the_published_bounds_of_the_prototype(name):
    worst, published, lowest = {
        "K": (0.075, 2274276676, 2065623588), "M": (0.005, 49928460991, 49407421919),
        "S": (0.01, 1534613444, 1511240135), "U": (0.075, 2569342178, 2018900000),
    }[name]  # fmt: skip
    problem = Problem.load(shared_folder() / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz")
    for seconds in (60, 300):  # on a machine that has other things to do it takes longer
        found = solve(problem, time_limit=seconds, gap=worst)
        if found.objective <= 1.02 * published:
            break
    assert evaluate(problem, found.choices) == (found.objective, found.peak_usage, True)
    assert lowest <= found.objective <= 1.02 * published
    assert found.bound <= found.objective


@pytest.mark.slow
def test_a_large_layered_problem_reaches_a_percent():
    found = solve(layered(32, 60, 35), time_limit=240, gap=0.01)
    assert found.gap <= 0.01


def test_command_writes_the_solution_file(tmp_path):
    file = tmp_path / "p.json"
    problem = layered(2, 3, 3)
    problem.save(file)
    expected = solve(problem)
    code = f"""
import sys
from autopar.cli.main import main
status = main(["solve", {str(file)!r}, "-o", {str(tmp_path / "s.json")!r}, "--json"])
assert "torch" not in sys.modules
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path / 's.json'}\n")
    written = json.loads((tmp_path / "s.json").read_text())
    assert json.loads(done.stdout) == written
    assert written["schema"] == "autopar.solution/1"
    assert (written["objective"], written["status"]) == (expected.objective, "optimal")
    assert evaluate(problem, np.array(written["solution"])) == (written["objective"], written["peak_usage"], True)
    assert set(written) == {"schema", "solution", "objective", "bound", "gap", "status", "solve_seconds", "peak_usage"}


@pytest.mark.parametrize(
    ("text", "arguments", "status", "words"),
    [
        pytest.param("{", [], 3, "not valid JSON", id="broken file"),
        pytest.param(None, [], 3, "cannot read", id="no file"),
        pytest.param(Problem.build([[1]], items=[[[(0, 1, 9)]]], limit=5), [], 1, "usage_limit 9", id="infeasible"),
        pytest.param(Problem.build([[1]]), ["--method", "magic"], 2, "no method 'magic'", id="unknown method"),
        pytest.param(Problem.build([[1]]), ["--time-limit", "0"], 2, "more than 0", id="no time"),
        pytest.param(Problem.build([[1]]), ["-o", "/nosuch/folder/s.json"], 3, "there is no folder /nosuch/folder", id="no folder"),
    ],
)
def test_command_errors(tmp_path, capsys, text, arguments, status, words):
    from autopar.cli.main import main

    file = tmp_path / "p.json"
    if isinstance(text, Problem):
        text.save(file)
    elif text is not None:
        file.write_text(text)
    output = [] if "-o" in arguments else ["-o", str(tmp_path / "s.json")]
    assert main(["solve", str(file), *arguments, *output]) == status
    said = capsys.readouterr()
    assert words in said.err and "hint: " in said.err and "Traceback" not in said.err
    assert said.out == "" and not (tmp_path / "s.json").exists()
