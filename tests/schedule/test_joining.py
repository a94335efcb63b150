"""join: every part travels as before, in fewer calls; the list takes less, is legal, and holds no more than it may."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autopar.graph import Accumulation
from autopar.schedule import Limits, Schedule, joining, memory
from autopar.schedule.bucketing import JOINED, size
from autopar.schedule.joining import join
from autopar.schedule.legality import check_legal
from autopar.schedule.passes import PLACING, ordered, run_passes
from autopar.schedule.reusing import reuse
from autopar.schedule.simulation import step_seconds
from tests.assignments import random_assignment
from tests.schedule.cases import CASES, Case, graph_of


def placed(case: Case, bucket_bytes: int) -> Schedule:
    """With all calls small."""
    graph = graph_of(case.graph)
    assignment = random_assignment(graph, case.machine, case.seed, again=0.5 * (case.seed % 2))
    limits = replace(case.limits, bucket_bytes=bucket_bytes, ahead_bytes=2**40)
    return run_passes(replace(ordered(graph, assignment, case.machine), limits=limits), PLACING)


def peak(schedule: Schedule) -> int:
    return memory(reuse(schedule), "sgd").peak


def parts(schedule: Schedule) -> Counter[object]:
    """What travels, by what decides whether two parts may share a call."""
    found: Counter[object] = Counter()
    for item in schedule.instructions:
        if item.kind == "start":
            call = schedule.collectives[item.of]
            found.update((item.half, call.kind, call.axes, call.reduction, call.dtype, part) for part in call.parts)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bucket_bytes", [0, 2**12])
def test_the_same_travels_in_fewer_calls_and_takes_less(case: Case, bucket_bytes: int) -> None:
    before = placed(case, bucket_bytes)
    after = check_legal(join(before, lambda schedule: True), "join")
    assert parts(after) == parts(before)
    assert len(after.calls) <= len(before.calls) and {call.id for call in after.calls} == after.collectives.keys()
    assert [item for item in after.instructions if item.kind == "run"] == [item for item in before.instructions if item.kind == "run"]
    fewer = len(after.calls) < len(before.calls)
    assert (step_seconds(after, "sgd") < step_seconds(before, "sgd")) is fewer
    assert fewer or after is before
    joined = [call for call in after.calls if len(call.parts) > 1]
    assert all(call.kind in JOINED and size(call) <= after.limits.bucket_bytes for call in joined)
    assert replace(after.limits, bucket_bytes=bucket_bytes) == before.limits


@pytest.mark.parametrize("case", CASES[:18], ids=str)
def test_no_list_is_taken_that_holds_more_than_it_may(case: Case) -> None:
    before = placed(case, 0)
    free = join(before, lambda schedule: True)
    room = peak(before) + (peak(free) - peak(before)) // 2
    within = join(before, lambda schedule: peak(schedule) <= room)
    assert peak(within) <= max(room, peak(before))
    assert step_seconds(within, "sgd") <= step_seconds(before, "sgd")
    assert join(before, lambda schedule: False) is before


@pytest.mark.parametrize("seed", range(4))
def test_sums_over_microbatches_are_complete_when_they_are_sent(seed: int) -> None:
    """They are there from the beginning of the step on, but lack the last microbatch until that is added."""
    graph = graph_of("gpt2")
    cut = tuple(item.tensor for item in graph.of_kind("input"))
    graph, on = replace(graph, accumulation=Accumulation(3, cut)), CASES[0].machine
    limits = Limits(bucket_bytes=0, ahead_bytes=2**40, aside_bytes=0)
    before = run_passes(replace(ordered(graph, random_assignment(graph, on, seed), on), limits=limits), PLACING)
    after = check_legal(join(before, lambda schedule: True), "join")
    assert before.sums and len(after.calls) < len(before.calls)
    there: set[str] = set()
    for item in after.instructions:
        if item.kind == "add":
            there.update(item.writes)
        elif item.kind == "start":
            assert there.issuperset(set(item.reads).intersection(after.sums))


def test_calls_are_joined_where_memory_allows() -> None:
    """The cases say something: many lists have fewer calls, some of them by memory's leave alone."""
    lists = [placed(case, 0) for case in CASES[:18]]
    fewer = [len(join(one, lambda schedule: True).calls) < len(one.calls) for one in lists]
    grown = [peak(join(one, lambda schedule: True)) > peak(one) for one in lists]
    assert sum(fewer) > len(lists) // 2 and any(grown)


def test_what_saves_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call's latency is nothing beside the step, no list is tried."""
    before = placed(CASES[0], 0)
    slow = tuple(item._replace(seconds=1.0) if item.kind == "run" else item for item in before.instructions)
    monkeypatch.setattr(joining, "_joined", None)
    assert join(replace(before, instructions=slow), lambda schedule: True).instructions == slow
    with pytest.raises(TypeError):
        join(before, lambda schedule: True)
