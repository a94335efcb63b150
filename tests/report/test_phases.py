"""The record of a search: in the plan file, printed by phase, and said where the time limit cut it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopar.compare import diff
from autopar.errors import FileError
from autopar.plan import Plan
from autopar.recording.search_record import search_record
from autopar.report import summary
from autopar.report.phases import search_summary
from tests.cli.running import autopar, refused
from tests.graphs import two_layer_plan

INFINITE = float("inf")


@dataclass(frozen=True)
class Phase:
    name: str
    work: float
    seconds: float
    step_before: float
    step_after: float
    bound_before: float
    bound_after: float


TRACE = (
    Phase("baselines", 1.0, 1.5, INFINITE, 0.5, 0.0, 0.0),
    Phase("linear bound", 2.0, 2.25, 0.5, 0.5, 0.0, 0.3),
    Phase("overlap prices", 3.0, 3.5, 0.5, 0.4, 0.3, 0.3),
    Phase("tie layers", 0.5, 0.25, 0.4, 0.4, 0.3, 0.3),
)


def recorded(*, cut: bool = False, seconds: float = 0.0) -> Plan:
    """A plan whose phases each took ``seconds`` longer than in ``TRACE``."""
    slower = tuple(Phase(**{**vars(phase), "seconds": phase.seconds + seconds}) for phase in TRACE)
    return two_layer_plan().model_copy(update={"search": search_record("normal", cut, slower, 0.4, 0.3)})


def test_the_record_names_the_phases_that_found_and_proved() -> None:
    search = recorded().search
    assert search is not None
    assert (search.found_by, search.proved_by) == ("overlap prices", "linear bound")


def test_no_phase_found_or_proved_without_a_gain() -> None:
    search = search_record("low", False, TRACE[3:], 0.4, 0.3)
    assert (search.found_by, search.proved_by) == (None, None)


def test_what_a_part_of_the_search_reached_later_or_beyond_the_plan_did_not_find_it() -> None:
    """Another mesh comes down to the same step later, its own bound lies above the plan's, and equal layers cost the plan a little."""
    merged = (
        Phase("merged axes: free plan", 1.0, 1.0, INFINITE, 0.4, 0.0, 0.0),
        Phase("merged axes: bound", 1.0, 1.0, 0.4, 0.4, 0.0, 0.39),
    )
    search = search_record("normal", False, (*TRACE, *merged), 0.41, 0.3)
    assert (search.found_by, search.proved_by) == ("overlap prices", "linear bound")


def test_seconds_of_phases_are_those_of_the_whole_step() -> None:
    search = search_record("normal", False, TRACE, 1.6, 1.2, microbatches=4)
    assert (search.found_by, search.proved_by) == ("overlap prices", "linear bound")
    last = search.phases[-1]
    assert (last.step_seconds_after, last.bound_seconds_after, last.cpu_seconds) == (1.6, 1.2, 0.25)


def test_the_file_has_a_phase_a_line_and_null_before_the_first_plan(tmp_path: Path) -> None:
    plan = recorded()
    text = plan.to_json()
    first = {
        "name": "baselines", "work_seconds": 1.0, "cpu_seconds": 1.5, "step_seconds_before": None, "step_seconds_after": 0.5,
        "bound_seconds_before": 0.0, "bound_seconds_after": 0.0,
    }  # fmt: skip
    data = json.loads(text)["search"]
    assert (data["effort"], data["cut"], data["phases"][0]) == ("normal", False, first)
    assert sum(json.dumps(first) in line for line in text.splitlines()) == 1
    assert Plan.from_json(text) == plan and Plan.from_json_in_part(text).search == plan.search


def test_a_file_without_the_record_loads() -> None:
    plan = two_layer_plan().model_copy(update={"search": None})
    assert "search" not in json.loads(plan.to_json())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("key", "value"), [("effort", "most"), ("cut", "no"), ("phases", [{"name": "baselines"}])])
def test_a_wrong_record_is_refused_by_its_place(key: str, value: object) -> None:
    data = json.loads(recorded().to_json())
    data["search"][key] = value
    with pytest.raises(FileError, match=rf"search\.{key}"):
        Plan.from_json(json.dumps(data))


def test_the_table_says_what_each_phase_gained() -> None:
    lines = search_summary(recorded()).splitlines()
    assert lines[:3] == [
        "effort normal: 6.5 s of counted work, done in 7.5 CPU s", "plan found by overlap prices", "bound proved by linear bound",
    ]  # fmt: skip
    assert [" ".join(line.split()) for line in lines[4:]] == [
        "phase work s CPU s step bound gained",
        "baselines 1 1.5 - -> 500 ms 0 s first plan",
        "linear bound 2 2.25 500 ms 0 s -> 300 ms first bound",
        "overlap prices 3 3.5 500 ms -> 400 ms 300 ms step -20 %",
        "tie layers 0.5 0.25 400 ms 300 ms -",
    ]


def test_a_cut_search_is_said_where_the_plan_is_printed() -> None:
    said = "the time limit cut it: another run may give another plan"
    assert said in summary(recorded(cut=True)) and said in search_summary(recorded(cut=True))
    assert said not in summary(recorded()) and said not in search_summary(recorded())


def test_diff_ignores_times_and_names_effort_and_cut() -> None:
    assert diff(recorded(), recorded(seconds=1.0)) == ()
    assert diff(recorded(), two_layer_plan().model_copy(update={"search": None})) == ()
    assert diff(recorded(), recorded(cut=True)) == ("search: cut by the time limit only in the second",)
    low = recorded().model_copy(update={"search": search_record("low", False, TRACE, 0.4, 0.3)})
    assert diff(low, recorded()) == ("effort: low -> normal",)


def test_show_prints_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded().save(tmp_path / "plan.json")
    ran = autopar(capsys, "show", tmp_path / "plan.json", "--search")
    assert ran.status == 0 and not ran.err and ran.out.rstrip("\n") == search_summary(recorded())
    ran = autopar(capsys, "show", tmp_path / "plan.json", "--search", "--json")
    assert json.loads(ran.out) == json.loads(recorded().to_json())["search"]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_show_of_a_plan_without_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    two_layer_plan().model_copy(update={"search": None}).save(tmp_path / "plan.json")
    refused(autopar(capsys, "show", tmp_path / "plan.json", "--search", *words), 3, "the plan has no record of its search")


def test_plan_says_that_the_limit_cut_its_search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.plan.plan_target", lambda *given: recorded(cut=True))
    ran = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2")
    assert ran.status == 0 and "warning: the time limit cut the search" in ran.err
    monkeypatch.setattr("autopar.cli.plan.plan_target", lambda *given: recorded())
    assert "cut" not in autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2").err
