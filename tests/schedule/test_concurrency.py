"""Calls that wait for another link: which, until when, and what that gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from autopar.schedule import Schedule, Slot, prefetching, simulated
from autopar.schedule.concurrency import Links, patient
from autopar.schedule.instructions import Instruction
from autopar.schedule.simulation import makespan
from autopar.schedule.windows import anchors, windows
from tests.schedule.cases import CASES, Case

TWO_LINKS = [case for case in CASES if case.mesh == "x=2,y=2"]


def zeros(schedule: Schedule) -> Sequence[float]:
    return [0.0] * (len(anchors(schedule)) + 1)


def busy(slots: Sequence[Slot]) -> float:
    """Seconds for which any link is."""
    total, until = 0.0, 0.0
    for begin, end in sorted((slot.begin, slot.end) for slot in slots if slot.instruction.kind == "start" and slot.instruction.stream):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def call(id: int, stream: str, seconds: float, reads: tuple[str, ...] = ()) -> Instruction:
    return Instruction(id, "start", "backward", reads, (f"v{id}",), stream, seconds, of=f"c{id}")


@pytest.mark.parametrize("case", TWO_LINKS, ids=str)
def test_only_what_trails_waits_and_not_where_operators_wait_most(case: Case) -> None:
    schedule = dict(case.stages())["bucket"]
    found, waits = windows(schedule), patient(schedule, zeros(schedule))
    waited: dict[tuple[str, str], float] = {}
    for item in schedule.instructions:
        if item.kind == "run" or (item.kind == "start" and not found[item.id].ahead and not found[item.id].behind):
            for link in item.streams:
                waited[item.half, link] = waited.get((item.half, link), 0.0) + item.seconds
    for item in schedule.instructions:
        if item.id in waits:
            assert found[item.id].behind
            others = {"node", "network"}.difference(item.streams)
            mine = max(waited.get((item.half, link), 0.0) for link in item.streams)
            assert max(waited.get((item.half, link), 0.0) for link in others) > mine
    calm = replace(schedule, machine=replace(schedule.machine, hardware=replace(schedule.machine.hardware, overlap_slowdown=0.0)))
    assert not patient(calm, zeros(calm)), "operators lose nothing"


@pytest.mark.parametrize("case", [case for case in CASES if case.mesh == "x=2"], ids=str)
def test_on_one_link_nobody_waits(case: Case) -> None:
    schedule = dict(case.stages())["bucket"]
    assert not patient(schedule, zeros(schedule))


def test_due_is_when_the_link_is_just_done_at_the_end() -> None:
    case = next(case for case in TWO_LINKS if case.graph == "gpt2" and case.seed == 1)
    schedule = dict(case.stages())["bucket"]
    found, clock = windows(schedule), [float(number) for number in range(len(anchors(schedule)) + 1)]
    waits = patient(schedule, clock)
    assert len(waits) > 5
    for phase in ("forward", "backward"):
        mine = [item for item in schedule.instructions if item.id in waits and item.half == phase]
        for item in mine:
            later = [other for other in mine if waits[other.id] >= waits[item.id] and set(other.streams) & set(item.streams)]
            assert waits[item.id] + sum(other.seconds for other in later) <= clock[found[item.id].end] * (1 + 1e-9)


def test_a_call_waits_until_another_link_is_busy_and_what_it_reads_has_arrived() -> None:
    links = Links([0.0, 1.0, 2.0, 3.0, 9.0], {1: 9.0, 2: 1.5, 3: 9.0}, {})
    mine = call(1, "network", 1.0)
    assert links.waits(mine), "no other link is busy"
    links.start(call(0, "network", 5.0))
    assert links.waits(mine), "its own is no other"
    links.start(call(4, "node", 0.5))
    assert links.waits(mine), "its own is free when the other is no longer busy"
    links.start(call(5, "node", 6.0, ("v4",)))
    assert not links.waits(mine)
    links.index = 3
    assert not links.waits(mine) and links.waits(call(3, "network", 1.0, ("v5",))), "what it reads is under way until 6.5"
    soon = Links([0.0, 1.0, 2.0], {1: 2.0}, {"network": [(1, 0.5), (2, 1.5)]})
    soon.start(call(0, "node", 5.0))
    assert soon.waits(mine), "another call that is waited for comes in between"
    soon.index = 1
    assert soon.waits(mine)
    soon.index = 2
    assert not soon.waits(mine)
    alone = Links([0.0, 1.0, 2.0], {2: 1.5}, {})
    alone.index = 1
    assert alone.waits(call(2, "network", 1.0))
    alone.index = 2
    assert not alone.waits(call(2, "network", 1.0)), "the phase is only just long enough"


@pytest.mark.parametrize("case", TWO_LINKS, ids=str)
def test_no_more_waits_than_may_be_in_flight(case: Case) -> None:
    """Where that is less than some calls, which do not wait then."""
    before = dict(case.stages())["bucket"]
    sizes = sorted(before.collectives[item.of].held_bytes for item in before.instructions if item.id in patient(before, zeros(before)))
    limit = sizes[len(sizes) // 2] if sizes else 1
    schedule = prefetching.prefetch(replace(before, limits=replace(case.limits, ahead_bytes=limit)))
    found, waits = windows(schedule), patient(schedule, zeros(schedule))
    mine = {item.of: item for item in schedule.instructions if item.id in waits}
    started, index = set[str](), -1
    for item in schedule.instructions:
        if item.kind == "run":
            idle = [of for of, call in mine.items() if found[call.id].ready < index + 1 and of not in started and call.half == item.half]
            assert sum(schedule.collectives[of].held_bytes for of in idle) <= limit
            index += 1
        elif item.of in mine:
            started.add(item.of)


def test_less_time_is_spent_beside_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(schedule: Schedule, begins: Sequence[float]) -> Mapping[int, float]:
        return {}

    gained, beside = 0, [0.0, 0.0]
    for case in TWO_LINKS:
        with monkeypatch.context() as patched:
            patched.setattr(prefetching, "patient", nobody)
            before = simulated(dict(case.stages())["prefetch"])
        after = simulated(dict(case.stages())["prefetch"])
        beside = [beside[0] + busy(before), beside[1] + busy(after)]
        assert makespan(after) <= makespan(before) * (1 + 1e-3), "by a clock without waits it may come a little late"
        gained += makespan(after) < makespan(before) * (1 - 1e-3)
    assert gained >= 4 and beside[1] < beside[0]
