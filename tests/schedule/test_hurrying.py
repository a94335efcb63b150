"""hurry: nothing but the order of calls and waits changes, and the list takes less where operators waited for what could follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.schedule import Instruction, hurrying
from autopar.schedule.hurrying import hurry
from autopar.schedule.passes import PLACING, ordered, run_passes
from autopar.schedule.simulation import makespan, simulated
from cost_models import Machine, Mesh
from tests.assignments import random_assignment
from tests.schedule.cases import CASES, Case, graph_of, hardware_of

MACHINE = Machine(Mesh.parse("x=2"), replace(hardware_of(True), overlap_slowdown=0.0), "roofline")


def taking(items: Sequence[Instruction], monkeypatch: pytest.MonkeyPatch) -> tuple[float, tuple[str, ...]]:
    """Seconds of a list of one's own, hurried, and its order."""
    monkeypatch.setattr(hurrying, "within_limits", lambda schedule: True)  # there are no collectives behind its calls
    graph = graph_of("two_layers")
    first = ordered(graph, random_assignment(graph, MACHINE, 0), MACHINE)
    found = hurry(replace(first, instructions=tuple(items)))
    return makespan(simulated(found)), tuple(f"{item.kind} {item.of}" for item in found.instructions)


def listed(*lines: str) -> list[Instruction]:
    """``run NAME SECONDS READS WRITES``, the same of a start; ``wait`` and ``slice`` without seconds; ``-`` for nothing."""
    found: list[Instruction] = []
    for number, line in enumerate(lines):
        kind, name, seconds, reads, writes = line.split()
        stream = {"run": "compute", "start": "node"}.get(kind, "")
        values = [tuple(part.split(",")) if part != "-" else () for part in (reads, writes)]
        found.append(Instruction(number, kind, "forward", *values, stream, float(seconds), 0, name))  # type: ignore[arg-type]
    return found


def test_what_is_waited_for_passes_what_can_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is needed last has its link when an activation is to be sent: 50 s later."""
    items = listed(
        "start W 50 w W", "run a 10 x a", "start X 10 a X", "wait X 0 - X", "run b 10 X b", "run d 60 b d", "wait W 0 - W",
        "run c 10 W,d c",
    )  # fmt: skip
    assert makespan(hurrying.simulate(items)) == pytest.approx(140.0)
    seconds, order = taking(items, monkeypatch)
    assert seconds == pytest.approx(100.0)
    assert order.index("start X") < order.index("start W") < order.index("run b")


def test_what_is_needed_later_is_waited_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step of a reshard is made of a slice of the first, for which operators stood still at once; ``a`` can run meanwhile."""
    items = listed(
        "start V 50 v V", "wait V 0 - V", "slice s 0 V s", "start W 10 s W", "run a 60 x a", "wait W 0 - W", "run b 10 W,a b",
    )  # fmt: skip
    assert makespan(hurrying.simulate(items)) == pytest.approx(120.0)
    seconds, order = taking(items, monkeypatch)
    assert seconds == pytest.approx(80.0)
    assert order == ("start V", "run a", "wait V", "slice s", "start W", "wait W", "run b")


def test_what_the_next_operator_needs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    items = listed("start V 50 v V", "wait V 0 - V", "slice s 0 V s", "run a 60 s a", "run b 10 a b")
    seconds, order = taking(items, monkeypatch)
    assert seconds == pytest.approx(120.0)
    assert order == tuple(f"{item.kind} {item.of}" for item in items)


def test_bytes_in_flight_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    items = listed("start V 50 v V", "wait V 0 - V", "slice s 0 V s", "run a 60 x a", "run b 10 s,a b")
    assert taking(items, monkeypatch)[0] == pytest.approx(70.0)
    monkeypatch.undo()
    asked: list[object] = []
    monkeypatch.setattr(hurrying, "within_limits", asked.append)  # None: they would not
    graph = graph_of("two_layers")
    first = replace(ordered(graph, random_assignment(graph, MACHINE, 0), MACHINE), instructions=tuple(items))
    assert hurry(first).instructions == first.instructions and asked


def test_what_an_operator_between_needs_is_not_moved() -> None:
    items = listed("start V 50 v V", "wait V 0 - V", "run a 60 V a", "start X 10 x X", "run b 10 a b", "wait X 0 - X")
    starts, x = hurrying.Move(frozenset([0]), 3), hurrying.Move(frozenset([3]), 4)
    assert hurrying._after(items, [starts]) == tuple(items)
    assert [item.id for item in hurrying._after(items, [starts, x])] == [0, 1, 2, 4, 3, 5]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_calls_and_waits_change_their_places(case: Case) -> None:
    graph = graph_of(case.graph)
    assignment = random_assignment(graph, case.machine, case.seed, again=0.5 * (case.seed % 2))
    before = run_passes(replace(ordered(graph, assignment, case.machine), limits=case.limits), PLACING)
    after = hurry(before)
    assert sorted(after.instructions) == sorted(before.instructions)
    fixed = [[item for item in found.instructions if item.kind in ("run", "add")] for found in (before, after)]
    assert fixed[0] == fixed[1]
    assert makespan(simulated(after)) <= makespan(simulated(before))


def test_many_lists_gain() -> None:
    """Of the cases above so many do; their operators wait for latencies, where little can be gained."""
    gained = 0
    for case in CASES:
        stages = dict(case.stages())
        gained += makespan(simulated(stages["hurry"])) < 0.99 * makespan(simulated(stages["accumulate"]))
    assert gained >= 5
