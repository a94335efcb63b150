"""check against second runs: what is edited in them is found, and refused where it cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from autopar.check import check, illegal
from autopar.errors import MismatchError
from autopar.plan import Plan
from autopar.recording import replay
from tests.graphs import bucket_graph, machine, plan_of, random_schedule

Edit = Callable[[Any], None]


@lru_cache
def text() -> str:
    """Six products one after another, all made again."""
    return plan_of(random_schedule(bucket_graph(), machine("dp=2,tp=2"), 3, again=1.0)).to_json()


def second(data: Any) -> Any:
    """A second run that reads what another has made again, and is read in backward."""
    rows = [row for row in data["ops"] if row["phase"] == "recompute"]
    return next(row for row in rows if row["inputs"][0].get("value", "").endswith("@again"))


def first(data: Any) -> Any:
    return next(row for row in data["ops"] if row["name"] + "@again" == second(data)["name"])


def edited(key: str, value: Any, of: Callable[[Any], Any] = second) -> Edit:
    def edit(data: Any) -> None:
        of(data)[key] = value

    edit.__name__ = key
    return edit


def another_name(data: Any) -> None:
    second(data)["name"] = "other@again"


def taken_out(data: Any) -> None:
    data["ops"].remove(second(data))


def of_backward(data: Any) -> None:
    row = next(row for row in data["ops"] if row["phase"] == "backward")
    row["phase"] = "recompute"


def another_spec(data: Any) -> None:
    """Where two strategies share a shape: the second run as another would do it."""
    row = second(data)
    row["outputs"][0]["spec"] = "R R" if row["outputs"][0]["spec"] != "R R" else "S0 R"


def another_value(data: Any) -> None:
    second(data)["outputs"][0]["value"] = "elsewhere"


def own_name(data: Any) -> None:
    first(data)["outputs"][0]["value"] = "elsewhere"


def in_forward(data: Any) -> None:
    run = next(row for row in data["schedule"] if row["kind"] == "run" and row["of"] == second(data)["name"])
    run["phase"] = "forward"


def from_backward(data: Any) -> None:
    row, later = second(data), next(row for row in data["ops"] if row["name"].startswith("b"))
    row["inputs"][0]["value"] = later["outputs"][0]["tensor"]


def what_draws(data: Any) -> None:
    for row in (first(data), second(data)):
        row["op"] = "aten.empty_like.default"


REFUSED: list[tuple[Edit, str]] = [
    (another_name, "no operator of forward runs a second time under this name"),
    (taken_out, "which has not been made before it"),
    (of_backward, "no operator of forward runs a second time under this name"),
    (edited("op", "aten.mm.default"), "the first run has 'autopar.contract.default'"),
    (edited("factors", {"k": ["dp"]}), "factors: {'k': ('dp',)}, the first run has"),
    (another_spec, "their tensors and specs are not those of the first run"),
    (another_value, "makes f1 as 'elsewhere', not as 'f1@again'"),
    (own_name, "makes f1 under the name elsewhere"),
    (in_forward, "is of the forward phase, its operator of the recompute phase"),
    (from_backward, "which has not been made before it"),
    (what_draws, "may not run a second time: what it makes does not follow from the graph"),
]


@pytest.mark.parametrize(("edit", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_run_is_refused(edit: Edit, said: str) -> None:
    data = json.loads(text())
    edit(data)
    plan = Plan.from_json(json.dumps(data))
    found = "\n".join(map(str, illegal(plan)))
    assert said in found, found
    with pytest.raises(MismatchError, match="the plan cannot be run"):
        replay(plan, bucket_graph())


def test_it_holds_before_it_is_edited() -> None:
    plan = Plan.from_json(text())
    assert check(plan) == () and len(plan.recomputed) >= 4
    assert replay(plan, bucket_graph()).operations.keys() == {row.name for row in plan.ops}


def test_prices_of_second_runs_are_recomputed() -> None:
    data = json.loads(text())
    name = second(data)["name"]
    second(data)["seconds"] = 1.0
    assert f"ops.{name}.seconds: 1 in the plan" in "\n".join(map(str, check(Plan.from_json(json.dumps(data)))))
