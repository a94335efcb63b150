"""Values on the host between forward and backward: the copies in the list, what they hold, when they run, what is legal."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from autopar.errors import ScheduleError
from autopar.pricing import stepping_seconds
from autopar.schedule import Instruction, parse, simulate
from autopar.schedule.freeing import free
from autopar.schedule.legality import check_legal
from autopar.schedule.limit_search import best_schedule
from autopar.schedule.liveness import held, held_in_step, host_peak, memory
from autopar.schedule.offloading import choose_for_host, choose_offloaded, choose_states, find_hostable_states, find_offloadable, offload
from autopar.schedule.schedule import Schedule
from tests.offloading import LIMITS, free_plan, graph, hardware


@cache
def moved() -> Schedule:
    """The free plan with values on the host, so that it fits."""
    plan = free_plan()
    found = find_offloadable(plan.schedule, plan.schedule)
    values, left = choose_offloaded(found, held(plan.schedule, "adamw"), LIMITS[1], 10**9)
    assert values and not left
    assignment = offload(graph(), plan.assignment, plan.schedule, values)
    return free(best_schedule(graph(), assignment, plan.schedule.machine, "adamw", LIMITS[1], tries=20).schedule)


def test_values_that_are_idle_longest_come_first_if_the_link_keeps_pace() -> None:
    plan = free_plan()
    found = find_offloadable(plan.schedule, plan.schedule)
    ascents = [number for number, (one, two) in enumerate(pairwise(found)) if two.idle_seconds > one.idle_seconds]
    assert found and len(ascents) <= 1, "first those that are on pace, then the others"
    fast = replace(plan.schedule, machine=replace(plan.schedule.machine, hardware=hardware(bandwidth=1e15)))
    idle = [item.idle_seconds for item in find_offloadable(fast, plan.schedule)]
    assert idle == sorted(idle, reverse=True), "a fast link keeps pace with all"
    leaving = {value for _, value in plan.schedule.outputs} | {item.tensor for item in graph().inputs}
    assert leaving.isdisjoint(item.value for item in found)


def test_what_is_chosen_lowers_every_peak() -> None:
    plan = free_plan()
    found, levels = find_offloadable(plan.schedule, plan.schedule), held(plan.schedule, "adamw")
    assert choose_offloaded(found, levels, max(levels), 10**9) == ((), 0)
    (few, _), (more, left) = (choose_offloaded(found, levels, limit, 10**9) for limit in (LIMITS[1] + 60_000, LIMITS[1]))
    assert few and more and set(few) < set(more) and not left
    assert choose_offloaded(found, levels, 1000, 10**9)[1] > 0
    assert choose_offloaded(found, levels, LIMITS[1], 1000)[1] > 0, "the host has no room"


def test_a_value_goes_to_the_host_in_forward_and_comes_back_in_backward() -> None:
    schedule = moved()
    kinds = {name: call.kind for name, call in schedule.collectives.items() if call.is_transfer}
    for name, kind in kinds.items():
        start, wait = (item for item in schedule.instructions if item.of == name and item.kind in ("start", "wait"))
        assert start.half == ("forward" if kind == "to_host" else "backward") and start.stream == kind
        if kind == "to_host":
            (value,) = start.reads
            assert wait.bytes == start.bytes == 0 and schedule.values[name].host_bytes == schedule.values[value].bytes
            freed = next(item for item in schedule.instructions if item.kind == "free" and value in item.reads)
            assert freed.id > wait.id, "the device's memory goes when the copy has ended"
            readers = [item for item in schedule.instructions if value in item.reads and item.kind != "free"]
            assert all(item.half == "forward" for item in readers)
    assert sorted(kinds.values()).count("to_host") * 2 == len(kinds)


def test_the_host_is_counted_from_the_start_of_a_copy_to_its_free() -> None:
    schedule, host, most = moved(), dict[str, int](), 0
    for item in schedule.instructions:
        if item.kind == "free":
            for name in item.reads:
                host.pop(name, None)
        elif item.kind == "start":
            host.update((name, schedule.values[name].host_bytes) for name in item.writes)
        most = max(most, sum(host.values()))
    assert most == host_peak(schedule, "adamw") > 0
    assert max(held(schedule, "adamw")) <= LIMITS[1] < max(held(free_plan().schedule, "adamw"))


def test_the_text_form_reads_back() -> None:
    schedule = moved()
    assert parse(str(schedule)) == schedule.instructions and "start to_host(rank)" in str(schedule)


def _list() -> list[Instruction]:
    """A value is made in 1 s and copied in 5 s each way beside work of 4 s."""
    return [
        Instruction(0, "run", "forward", ("x",), ("v",), "compute", 1.0, of="v"),
        Instruction(1, "start", "forward", ("v",), ("v@host",), "to_host", 5.0, of="v@host"),
        Instruction(2, "run", "forward", ("v",), ("w",), "compute", 4.0, of="w"),
        Instruction(3, "wait", "forward", (), ("v@host",), of="v@host"),
        Instruction(4, "start", "backward", ("v@host",), ("v@back",), "from_host", 5.0, of="v@back"),
        Instruction(5, "run", "backward", ("w",), ("u",), "compute", 4.0, of="u"),
        Instruction(6, "wait", "backward", (), ("v@back",), of="v@back"),
        Instruction(7, "run", "backward", ("u", "v@back"), ("t",), "compute", 1.0, of="t"),
    ]  # fmt: skip


def test_copies_run_beside_operators_and_do_not_slow_them() -> None:
    slots = simulate(_list(), 0.5)
    assert [slot.end for slot in slots] == [1.0, 6.0, 5.0, 6.0, 11.0, 10.0, 11.0, 12.0]
    collective = [item._replace(stream="node") if item.kind == "start" else item for item in _list()]
    assert simulate(collective, 0.5)[-1].end > 12.0, "a collective slows them"


def test_each_way_has_a_stream_of_its_own() -> None:
    both = [_list()[0], _list()[1], _list()[4]._replace(reads=("x@host",)), _list()[3], _list()[6]]
    assert simulate(both)[-1].end == 6.0
    same = [item._replace(stream="to_host") if item.kind == "start" else item for item in both]
    assert simulate(same)[-1].end == 11.0


def _changed(schedule: Schedule, number: int, **fields: object) -> Schedule:
    items = list(schedule.instructions)
    items[number] = items[number]._replace(**fields)
    return replace(schedule, instructions=tuple(items))


def test_only_copies_back_read_what_lies_on_the_host() -> None:
    schedule = check_legal(moved(), "the test")
    ended = next(item for item in schedule.instructions if item.kind == "wait" and schedule.collectives[item.of].kind == "to_host")
    after = next(item for item in schedule.instructions[ended.id :] if item.kind == "run" and item.reads)
    with pytest.raises(ScheduleError, match=r"reads .*@host, which lies on the host"):
        check_legal(_changed(schedule, after.id, reads=(ended.of, *after.reads[1:])), "the test")


def test_the_host_has_room() -> None:
    schedule = moved()
    machine = replace(schedule.machine, hardware=hardware(host_memory=4.0 * (host_peak(schedule, "adamw") - 1)))
    with pytest.raises(ScheduleError, match="to the host, which then holds"):
        check_legal(replace(schedule, machine=machine), "the test")


def test_a_value_is_not_read_on_the_device_after_it_went() -> None:
    schedule = moved()
    back = next(item for item in schedule.instructions if item.kind == "run" and any(value.endswith("@back") for value in item.reads))
    reads = tuple(value.removesuffix("@back") for value in back.reads)
    with pytest.raises(ScheduleError, match="is freed"):
        check_legal(_changed(schedule, back.id, reads=reads), "the test")


def _latest(resident: float, hosted: list[tuple[float, float]]) -> float:
    """End of the step: the longest path through copies in, steps and copies back, with two slots."""
    tasks = {("step", -1): (resident, [])}
    for number, (copied, each) in enumerate(hosted):
        tasks["come", number] = copied, [("come", number - 1), ("back", number - 2)]
        tasks["step", number] = each, [("step", number - 1), ("come", number)]
        tasks["back", number] = copied, [("back", number - 1), ("step", number)]
    ends = dict.fromkeys(tasks, 0.0)
    for _ in tasks:
        ends = {task: seconds + max((ends.get(other, 0.0) for other in after), default=0.0) for task, (seconds, after) in tasks.items()}
    return max(ends.values())


def test_the_step_waits_for_copies_as_two_slots_and_two_ways_allow() -> None:
    draw = random.Random(0)
    for _ in range(50):
        hosted = [(draw.random(), draw.random()) for _ in range(draw.randrange(7))]
        resident = draw.choice([0.0, draw.random() * 3])
        assert stepping_seconds(resident, hosted) == pytest.approx(_latest(resident, hosted))


def _with_states(*names: str) -> Schedule:
    return replace(free_plan().schedule, states_on_host=frozenset(names))


def test_states_on_the_host_leave_the_device_but_for_two_in_the_step() -> None:
    plain = free_plan().schedule
    sizes = find_hostable_states(plain, "adamw")
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True) and sum(sizes.values()) == memory(plain, "adamw").optimizer
    names = list(sizes)[:3]
    some, moved = memory(_with_states(*names), "adamw"), sum(sizes[name] for name in names)
    assert some.optimizer == sum(sizes.values()) - moved and some.peak == memory(plain, "adamw").peak - moved
    assert host_peak(_with_states(*names), "adamw") == moved
    assert plain.optimizer_seconds("adamw") < _with_states(*names).optimizer_seconds("adamw")
    assert held_in_step(_with_states(*sizes), "adamw") == held_in_step(plain, "none"), "all of them have left"


def test_the_step_is_the_peak_where_what_passes_is_most() -> None:
    """An optimizer with many states: two large parameters' in passing are more than all that forward makes."""
    many = "own:400,5"
    sizes = find_hostable_states(free_plan().schedule, many)
    schedule = _with_states(*sizes)
    found, two = memory(schedule, many), sum(list(sizes.values())[:2])
    assert found.peak == held_in_step(schedule, many) + two and found.temporaries == two
    assert found.at == "the optimizer's step" and max(held(schedule, many)) < found.peak


def test_states_that_there_are_not_do_not_move() -> None:
    assert find_hostable_states(free_plan().schedule, "sgd") == {}
    matrices, schedule = free_plan().schedule.graph.matrices, free_plan().schedule
    assert matrices and not matrices.keys() & find_hostable_states(schedule, "muon").keys(), "Muon steps matrices together"


def test_the_fewest_bytes_over_what_is_wanted_are_chosen() -> None:
    sizes = {"a": 100, "b": 60, "c": 60, "d": 10}
    assert choose_states(sizes, 0, 1000) == ()
    assert choose_states(sizes, 5, 1000) == ("d",)
    assert choose_states(sizes, 55, 1000) == ("c",)
    assert choose_states(sizes, 105, 1000) == ("a", "d")
    assert choose_states(sizes, 10_000, 1000) == tuple(sizes)
    assert sum(sizes[name] for name in choose_states(sizes, 10_000, 130)) <= 130


@pytest.mark.parametrize("states_first", [False, True])
@pytest.mark.parametrize("limit", [400_000, 300_000])
def test_what_is_chosen_for_the_host_lowers_every_level(limit: int, states_first: bool) -> None:
    plan = free_plan().schedule
    candidates, states = find_offloadable(plan, plan), find_hostable_states(plan, "adamw")
    levels = [*held(plan, "adamw"), held_in_step(plan, "adamw")]
    chosen = choose_for_host(candidates, levels, states, limit, 10**9, states_first=states_first)
    assert chosen is not None
    values, names = chosen
    sizes = sorted((states[name] for name in names), reverse=True)
    for place, level in enumerate(levels[:-1]):
        away = sum(item.saved for item in candidates if item.value in values and item.begin < place < item.end)
        assert level - away - sum(sizes) <= limit
    assert levels[-1] - sum(sizes[2:]) <= limit
    assert bool(names) is (states_first or limit == 300_000), "states go where values do not suffice"
    assert choose_for_host(candidates, levels, states, 200_000, 10**9, states_first=states_first) is None
    assert choose_for_host(candidates, levels, states, limit, 1000, states_first=states_first) is None, "the host has no room"
