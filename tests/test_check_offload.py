"""``check`` finds what is wrong with copies to the host and back, by rules of its own."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.errors import MismatchError
from autopar.plan import Plan
from autopar.recording import replay
from tests.offloading import hosted, offloaded, short_graph


def _edited(table: str, number: int, **fields: Any) -> Plan:
    plan = offloaded()
    rows = list(getattr(plan, table))
    rows[number] = rows[number].model_copy(update=fields)
    return plan.model_copy(update={table: tuple(rows)})


def _place(table: str, **wanted: Any) -> int:
    rows = getattr(offloaded(), table)
    return next(number for number, row in enumerate(rows) if all(getattr(row, key) == value for key, value in wanted.items()))


def _found(plan: Plan) -> str:
    return "\n".join(map(str, autopar.check(plan)))


def test_a_plan_with_values_on_the_host_holds() -> None:
    plan = offloaded()
    assert plan.copies and autopar.check(plan) == ()
    assert autopar.check(Plan.from_json(plan.to_json())) == ()


def test_a_copy_of_other_bytes_seconds_or_kind_is_found() -> None:
    assert "transfers[0].bytes" in _found(_edited("transfers", 0, bytes=offloaded().copies[0].bytes + 4))
    assert "transfers[0].seconds" in _found(_edited("transfers", 0, seconds=1.0))
    assert "transfers[0].kind" in _found(_edited("transfers", 0, kind="from_host"))


def test_a_copy_that_is_missing_is_found() -> None:
    plan = offloaded()
    assert "missing: the copy that makes" in _found(plan.model_copy(update={"transfers": plan.copies[1:]}))


def test_copies_out_of_order_are_found() -> None:
    plan = offloaded()
    swapped = (plan.copies[1], plan.copies[0], *plan.copies[2:])
    assert "by the schedule" in _found(plan.model_copy(update={"transfers": swapped}))


def test_a_copy_that_resharded_is_found() -> None:
    place = _place("reshards", on_host=True)
    row = offloaded().reshards[place]
    other = " ".join(["R"] * len(row.to_spec.split())) if "S" in row.to_spec else "S0 R"
    assert "turns nothing" in _found(_edited("reshards", place, to_spec=other))


def test_an_operator_that_reads_what_lies_on_the_host_is_found() -> None:
    plan = offloaded()
    place, row = next(
        (number, row) for number, row in enumerate(plan.ops) if any((entry.value or "").endswith("@back") for entry in row.inputs)
    )
    inputs = tuple(entry.model_copy(update={"value": (entry.value or "").replace("@back", "@host") or None}) for entry in row.inputs)
    assert "which lies on the host" in _found(_edited("ops", place, inputs=inputs))


def test_a_value_freed_before_its_copy_has_ended_is_found() -> None:
    plan = offloaded()
    rows = list(plan.schedule)
    copy = plan.copies[0]
    wait = next(number for number, row in enumerate(rows) if row.kind == "wait" and row.of == copy.id)
    value = next(row.source for row in plan.reshards if row.value == copy.value)
    gone = next(number for number, row in enumerate(rows) if row.kind == "free" and value in row.reads)
    assert gone > wait
    rows.insert(wait, rows.pop(gone))
    moved = plan.model_copy(update={"schedule": tuple(row.model_copy(update={"id": number}) for number, row in enumerate(rows))})
    assert f"frees {value}, which {copy.id} still reads" in _found(moved)


@pytest.mark.parametrize("field", ["peak_host_bytes_per_rank", "step_seconds", "peak_memory_bytes_per_rank"])
def test_a_figure_that_is_off_is_found(field: str) -> None:
    plan = offloaded()
    changed = plan.predicted.model_copy(update={field: type(getattr(plan.predicted, field))(getattr(plan.predicted, field) * 2)})
    assert f"predicted.{field}" in _found(plan.model_copy(update={"predicted": changed}))


def test_a_host_without_room_or_link_is_found() -> None:
    plan = offloaded()
    host = plan.predicted.peak_host_bytes_per_rank
    assert host is not None
    small = {**plan.hardware, "host": {"memory_bytes": 4.0 * (host - 1)}}
    assert "over a rank's part of host.memory_bytes" in _found(plan.model_copy(update={"hardware": small}))
    links = {name: link for name, link in plan.hardware["links"].items() if name != "host"}
    assert "has no links.host" in _found(plan.model_copy(update={"hardware": {**plan.hardware, "links": links}}))


def _with_states(plan: Plan, *names: str) -> Plan:
    """The plan with the states of these parameters alone on the host."""
    rows = {name: row.model_copy(update={"states_on_host": name in names or None}) for name, row in plan.parameters.items()}
    return plan.model_copy(update={"parameters": rows})


def test_states_that_lie_elsewhere_are_found() -> None:
    plan = hosted()
    names = [name for name, row in plan.parameters.items() if row.states_on_host]
    assert _found(_with_states(plan, *names)) == ""
    problems = _found(_with_states(plan, *names[1:]))
    for field in ("memory.optimizer:", "memory.optimizer_on_host:", "peak_host_bytes_per_rank:", "optimizer_seconds:", "step_seconds:"):
        assert f"predicted.{field}" in problems


@pytest.mark.parametrize("field", ["optimizer_on_host", "temporaries"])
def test_bytes_of_states_that_are_off_are_found(field: str) -> None:
    plan = hosted()
    parts = plan.predicted.memory.model_copy(update={field: getattr(plan.predicted.memory, field) + 4})
    changed = plan.predicted.model_copy(update={"memory": parts})
    assert f"predicted.memory.{field}" in _found(plan.model_copy(update={"predicted": changed}))


def test_states_that_cannot_lie_on_the_host_are_found() -> None:
    plan = hosted()
    names = [name for name, row in plan.parameters.items() if row.states_on_host]
    links = {name: link for name, link in plan.hardware["links"].items() if name != "host"}
    assert "has no links.host" in _found(plan.model_copy(update={"hardware": {**plan.hardware, "links": links}}))
    muon = plan.model_copy(update={"model": plan.model.model_copy(update={"optimizer": "muon"})})
    assert "muon steps matrices together" in _found(muon)
    rows = {**plan.parameters, names[0]: plan.parameters[names[0]].model_copy(update={"trained": None})}
    assert "no optimizer steps it" in _found(plan.model_copy(update={"parameters": rows}))
    with pytest.raises(MismatchError, match=r"has no links\.host"):
        replay(plan.model_copy(update={"hardware": {**plan.hardware, "links": links}}), short_graph())
