"""The peak of a schedule against intervals computed from the list alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cost_models import optimizer_bytes
from autopar.graph import DTYPE_BYTES
from autopar.schedule import Schedule, between, memory
from tests.schedule.cases import CASES, Case, graph_of


def peak_by_intervals(schedule: Schedule, optimizer: str) -> int:
    """Every storage lives from the instruction that takes it to the one that frees the last value in it, both included.

    A storage is a value, with its views; the buffer in which an all-reduce, a reduce-scatter or an unpacked collective arrives is one for
    all of its values, but of one in place it is what is reduced. Beside them each call has the copies it needs from its start to its wait,
    of unequal parts filled up to equal ones.
    """
    graph, calls, end = schedule.graph, schedule.collectives, len(schedule.instructions)
    storage: dict[str, str] = {}
    born: dict[str, int] = {}
    size: dict[str, int] = {}
    dies: dict[str, int] = {}
    extra: list[tuple[int, int, int]] = []
    kept = {value for _, value in schedule.outputs}
    began: dict[str, int] = {}

    def take(name: str, at: int, count: int) -> None:
        born.setdefault(name, at)
        size.setdefault(name, count)

    for item in graph.inputs:
        storage[item.tensor] = item.tensor
        local = schedule.values[item.tensor].bytes
        states = 0
        if item.tensor in graph.stepped:
            dtype = graph.tensors[item.tensor].dtype
            states = optimizer_bytes(optimizer, local // DTYPE_BYTES[dtype], dtype)
        extra.append((0, end, local + states))
    given = set(storage)
    for at, item in enumerate(schedule.instructions):
        if item.kind == "run":
            view = item.bytes == 0 and item.reads and any(schedule.values[value].bytes for value in item.writes)
            for value in item.writes:
                storage[value] = storage[item.reads[0]] if view else value
                take(storage[value], at, schedule.values[value].bytes)
        elif item.kind == "slice":
            (value,) = item.writes
            same = schedule.cuts[value].step is None
            storage[value] = storage[item.reads[0]] if same else value
            take(storage[value], at, schedule.values[value].bytes)
        elif item.kind == "start":
            call = calls[item.of]
            began[call.id] = at
            for part in call.parts:
                storage[part.target] = storage[part.source] if call.in_place else part.target if call.unpacks else call.id
            if not (call.unpacks or call.in_place):
                take(call.id, at, sum(math.prod(part.shapes.target) * part.itemsize for part in call.parts))
        elif item.kind == "wait":
            call = calls[item.of]
            staging = 0
            if call.packs and call.kind != "all_reduce":
                staging += sum(math.prod(part.shapes.sent) * part.itemsize for part in call.parts)
            if call.unpacks:
                staging += sum(math.prod(part.shapes.came) * part.itemsize for part in call.parts)
                for part in call.parts:
                    take(part.target, at, math.prod(part.shapes.target) * part.itemsize)
            extra.append((began[call.id], at, staging))
        for value in item.reads if item.kind == "free" else ():
            dies[storage[value]] = max(at, dies.get(storage[value], 0))
    for value in kept:
        dies[storage[value]] = end
    used = [0] * (end + 1)
    for begin, last, count in [*extra, *((born[name], dies[name], size[name]) for name in born if name not in given)]:
        for at in range(begin, last + 1):
            used[at] += count
    return max(used)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peak_is_that_of_the_intervals(case: Case) -> None:
    schedule = dict(case.stages())["free"]
    assert memory(schedule, "adamw").peak == peak_by_intervals(schedule, "adamw")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_parts_add_up_to_the_peak(case: Case) -> None:
    found = memory(dict(case.stages())["free"], "adamw")
    assert found.peak == found.parameters + found.gradients + found.optimizer + found.activations + found.temporaries
    assert min(found.parameters, found.gradients, found.optimizer, found.activations, found.temporaries) >= 0


@pytest.mark.parametrize("case", CASES[::5], ids=str)
def test_bytes_of_instructions_are_what_they_take_and_give_back(case: Case) -> None:
    """The running sum of ``bytes`` ends with what leaves and what came in."""
    schedule = dict(case.stages())["free"]
    staging = sum(call.staging_bytes for call in schedule.collectives.values())
    taken = sum(item.bytes for item in schedule.instructions if item.kind != "free")
    given = sum(item.bytes for item in schedule.instructions if item.kind == "free")
    roots = {schedule.storage[value] for _, value in schedule.outputs} - {item.tensor for item in schedule.graph.inputs}
    leaving = 0
    for root in roots:
        call = schedule.collectives.get(root)
        leaving += call.target_bytes if call is not None and not call.unpacks else schedule.values[root].bytes
    assert taken - given - staging == leaving


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_held_between_forward_and_backward_is_held_in_any_order(case: Case) -> None:
    stages = dict(case.stages())
    assert between(stages["order"], "adamw") <= memory(stages["free"], "adamw").peak


def test_much_of_what_is_held_is_held_between_forward_and_backward() -> None:
    """The bound says something: where layers are many, that is most of the peak."""
    stages = dict(Case("gpt2", "x=2", 0).stages())
    assert between(stages["order"], "sgd") > 0.5 * memory(stages["free"], "sgd").peak


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_is_the_same_before_the_list_says_when_values_go(case: Case) -> None:
    stages = dict(case.stages())
    assert memory(stages["assign_in_place"], "adamw") == memory(stages["free"], "adamw")


def test_freeing_late_costs_memory() -> None:
    """The measure sees it: with every free at the end the peak is the sum of everything."""
    case = CASES[0]
    schedule = dict(case.stages())["free"]
    late = replace(schedule, instructions=tuple(sorted(schedule.instructions, key=lambda item: item.kind == "free")))
    assert memory(late, "sgd").peak > memory(schedule, "sgd").peak
    assert graph_of(case.graph).mode == "train"
