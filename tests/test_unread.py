"""Tables that are read when they are asked for: the same rows, the same words for what is wrong, whatever the file looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar import compare
from autopar.compare.raw_rows import collectives, instructions, operators
from autopar.errors import FileError
from autopar.plan import Plan
from autopar.recording import load
from autopar.report import summary
from autopar.unread import Unread, holding, written_alike
from tests.graphs import bucket_plan, random_plan, two_layer_plan

TABLES = ("ops", "reshards", "collectives", "schedule")
PLANS = {"two layers": two_layer_plan, "buckets": bucket_plan, "random": lambda: random_plan("dp=2,tp=2", 3)}


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
def test_read_in_part_is_read(made: Callable[[], Plan], tmp_path: Path) -> None:
    plan = made()
    plan.save(tmp_path / "plan.json")
    found = load(tmp_path / "plan.json", in_part=True)
    for table in TABLES:
        unread, rows = getattr(found, table), getattr(plan, table)
        assert isinstance(unread, Unread) or not rows
        assert len(unread) == len(rows) and unread == rows and rows == tuple(unread)
        assert not rows or (unread[-1] == rows[-1] and unread[:1] == rows[:1])
    fresh = load(tmp_path / "plan.json", in_part=True)
    assert fresh == plan and str(fresh) == summary(plan) and fresh.recomputed == plan.recomputed
    assert load(tmp_path / "plan.json", in_part=True).to_json() == plan.to_json()


def test_rows_that_differ_and_rows_that_hold_a_word(tmp_path: Path) -> None:
    first = two_layer_plan()
    changed = first.ops[1].model_copy(update={"seconds": 1.0, "location": 'a "forward" line'})
    second = first.model_copy(update={"ops": (first.ops[0], changed, *first.ops[2:-1])})
    plans = []
    for name, plan in (("first", first), ("second", second)):
        plan.save(tmp_path / f"{name}.json")
        plans.append(load(tmp_path / f"{name}.json", in_part=True))
    assert not written_alike(plans[0].ops, plans[1].ops) and written_alike(plans[0].schedule, plans[1].schedule)
    backward = tuple(row for row in second.ops if row.phase == "backward")
    assert tuple(row for row in holding(plans[1].ops, "backward") if row.phase == "backward") == backward
    assert changed in holding(plans[1].ops, "nothing")  # its text has escapes, which could stand for anything
    assert compare.diff(*plans) == compare.diff(first, second)


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
def test_rows_are_compared_by_their_text(made: Callable[[], Plan]) -> None:
    """No row of a file that stands as it was written is parsed for a comparison, and its text says what the row does."""
    plan = made()
    part = Plan.from_json_in_part(plan.to_json())
    for seen, table in ((operators, "ops"), (collectives, "collectives"), (instructions, "schedule")):
        rows: Any = getattr(part, table)
        assert seen(rows) == seen(getattr(plan, table))
        assert not rows or not rows._read


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"spec": "S0', '"spec":"S0'), ('"spec": "S0', '"spec": "\\u00530'), ('"spec": "S0', '"spec" : "S0'), ('"inputs": [', '"inputs":['),
        ('"name": "', '"name":"'), ('"phase": "backward"', '"phase": "\\u0062ackward"'), ('"of": "', '"of":  "'),
        ('"attributes": {', '"attributes": {"inputs": [{"tensor": "spec", "spec": "S1"}], '), ('"times": 1', '"times":1'),
        ('"axes": ["', '"axes": [ "'), ('"axes": ["', '"axes": ["\\u0064p", "'), ('"value": "', '"value":"'),
    ],
)  # fmt: skip
def test_rows_that_somebody_wrote_anew_are_read(old: str, new: str) -> None:
    text = bucket_plan().to_json()
    assert old in text
    plan, part = Plan.from_json(text.replace(old, new)), Plan.from_json_in_part(text.replace(old, new))
    for seen, table in ((operators, "ops"), (collectives, "collectives"), (instructions, "schedule")):
        assert seen(getattr(part, table)) == seen(getattr(plan, table))


def rewritten(plan: Plan, **how: Any) -> str:
    return json.dumps(json.loads(plan.to_json()), **how)


def nested(plan: Plan) -> str:
    """Operators of a table that is none of the plan's, where those of the plan would stand."""
    data = json.loads(plan.to_json())
    rows = ",\n  ".join(json.dumps(row) for row in data["ops"])
    return json.dumps(data).replace('"hardware": {', '"hardware": {\n "ops": [\n  ' + rows + "\n ], ", 1)


def two_a_line(plan: Plan) -> str:
    return plan.to_json().replace('}]},\n  {"name"', '}]}, {"name"').replace('},\n  {"id"', '}, {"id"', 2)


LOOKS: dict[str, Callable[[Plan], str]] = {
    "one line": rewritten, "indented": lambda plan: rewritten(plan, indent=1), "indented by two": lambda plan: rewritten(plan, indent=2),
    "keys in another order": lambda plan: rewritten(plan, sort_keys=True), "nested": nested, "two a line": two_a_line,
    "carriage returns": lambda plan: plan.to_json().replace("\n", "\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_however_the_file_looks(look: Callable[[Plan], str]) -> None:
    plan = two_layer_plan()
    text = look(plan)
    whole, part = Plan.from_json(text), Plan.from_json_in_part(text)
    assert part == whole and part.ops == plan.ops and part.hardware.keys() >= plan.hardware.keys()


BROKEN = {
    "value": lambda text: text.replace('"phase": "backward"', '"phase": "sideways"', 1),
    "key": lambda text: text.replace('"factors"', '"factor"', 1),
    "no comma": lambda text: text.replace('},\n  {"name"', '}\n  {"name"', 1),
    "too many commas": lambda text: text.replace('},\n  {"name"', '},,\n  {"name"', 1),
    "comma at the end": lambda text: text.replace('}\n ],\n "reshards"', '},\n ],\n "reshards"', 1),
    "cut": lambda text: text[: text.index('"reshards"') - 40],
    "cut in a row": lambda text: text.replace('"outputs": [', '"outputs": ', 1),
    "no rows": lambda text: text.replace('"ops": [\n', '"ops": [\n  {},\n', 1),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_said_in_the_same_words(broken: Callable[[str], str]) -> None:
    plan = two_layer_plan()
    text = broken(plan.to_json())
    assert text != plan.to_json()
    with pytest.raises(FileError) as whole:
        Plan.from_json(text)
    with pytest.raises(FileError) as part:
        tuple(Plan.from_json_in_part(text).ops)
    assert str(part.value) == str(whole.value)


def test_what_is_not_asked_for_is_not_held_against_a_plan(tmp_path: Path) -> None:
    text = two_layer_plan().to_json().replace('"kind": "run"', '"kind": "walk"', 1)
    part = Plan.from_json_in_part(text)
    assert f"{len(part.schedule)} instructions" in str(part)
    with pytest.raises(FileError, match=r"schedule\[\d+\]\.kind"):
        part.to_json()
