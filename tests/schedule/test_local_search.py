"""What the arrays say of a list, in any order and with any calls shared, is what simulation and liveness say of the list itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from autopar.graph import Accumulation
from autopar.schedule import Schedule, memory, tables
from autopar.schedule import array_schedule as module
from autopar.schedule.array_schedule import array_schedule, call_costs, lives_for
from autopar.schedule.in_place import assign_in_place
from autopar.schedule.legality import check_legal, is_legal
from autopar.schedule.local_search import improve_order, rebuilt
from autopar.schedule.passes import PLACING, ordered, run_passes
from autopar.schedule.settings import MOVE_WEIGHTS
from autopar.schedule.simulation import microbatches_seconds, step_seconds
from autopar.schedule.storages import resting_bytes
from autopar.schedule.tables import (
    ArraySchedule,
    Order,
    Timeline,
    descend,
    number_of_call,
    peak_bytes,
    recount_memory,
    step_of,
    timeline_for,
)
from autopar.solvers.arrays import VIEWS, on_arrays
from tests.assignments import random_assignment
from tests.schedule.cases import CASES, Case, graph_of

WEIGHTS = np.cumsum(list(MOVE_WEIGHTS.values()))
UNLIMITED, MOST, SMALL = 2**62, 2000, 15
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def placed(case: Case, microbatches: int = 1) -> Schedule:
    graph = graph_of(case.graph)
    if microbatches > 1:
        (batch, *_) = graph.of_kind("input")
        graph = replace(graph, accumulation=Accumulation(microbatches, {batch.tensor: 0}))
    assignment = random_assignment(graph, case.machine, case.seed, again=0.5 * (case.seed % 2))
    return run_passes(replace(ordered(graph, assignment, case.machine), limits=case.limits), PLACING)


def peak(schedule: Schedule) -> int:
    return memory(assign_in_place(schedule), "sgd").peak


def descended(arrays: ArraySchedule, order: Order, moves: int, seed: int, limit: int, *, captured: bool) -> float:
    """Changes an order by moves; the seconds."""
    costs, lives = call_costs(arrays, order), lives_for(arrays, order)
    return descend(arrays, order, costs, lives, np.array([seed]), WEIGHTS, moves, limit, int(captured))[0]


def room(arrays: ArraySchedule, order: Order) -> Timeline:
    return timeline_for(len(order.items), len(order.head), arrays.clock.link_count, len(arrays.rounds) // 2)


def seconds_of(arrays: ArraySchedule, order: Order) -> float:
    timeline = room(arrays, order)
    return step_of(arrays, order, call_costs(arrays, order), 0, len(order.items) + 1, timeline, timeline)


def says(arrays: ArraySchedule, order: Order) -> tuple[float, int]:
    return seconds_of(arrays, order), peak_bytes(arrays, order, call_costs(arrays, order), lives_for(arrays, order))


def wandered(schedule: Schedule, seed: int) -> Iterator[tuple[ArraySchedule, Order, Schedule]]:
    """Lists that random moves lead to, whether they take or hold more or less: limits and gains are lifted by a machine whose clock stands
    still, and on which nothing takes memory."""
    arrays, order, items = array_schedule(schedule)
    calls, nothing = arrays.calls, np.zeros_like(arrays.calls.sent)
    still = arrays._replace(
        clock=arrays.clock._replace(seconds=np.zeros_like(arrays.clock.seconds)),
        items=arrays.items._replace(workspace=np.zeros_like(arrays.items.workspace)),
        storages=arrays.storages._replace(bytes=np.zeros_like(arrays.storages.bytes)),
        calls=calls._replace(
            latency=np.zeros_like(calls.latency), beyond=np.zeros_like(calls.beyond), launch=np.zeros_like(calls.launch),
            slope=np.zeros_like(calls.slope), sent=nothing, came=nothing, target=nothing,
        ),
    )  # fmt: skip
    chance = random.Random(seed)
    for _ in range(4):
        descended(still, order, chance.choice((3, 30, 300)), chance.randrange(2**30), UNLIMITED, captured=False)
        yield arrays, order, rebuilt(schedule, order, items)


@every_case
def test_arrays_say_what_the_list_says(case: Case) -> None:
    schedule = placed(case)
    arrays, order, items = array_schedule(schedule)
    seconds, held = says(arrays, order)
    held += resting_bytes(schedule, "sgd")
    assert seconds == pytest.approx(microbatches_seconds(schedule), rel=1e-12) and held == peak(schedule)
    again = rebuilt(schedule, order, items)
    assert [(item.kind, item.of) for item in again.instructions] == [(item.kind, item.of) for item in schedule.instructions]


@every_case
def test_whatever_is_moved_is_legal_and_known(case: Case) -> None:
    for arrays, order, found in wandered(placed(case), case.seed):
        check_legal(found, "moves")
        seconds, held = says(arrays, order)
        assert seconds == pytest.approx(microbatches_seconds(found), rel=1e-9)
        assert held + resting_bytes(found, "sgd") == peak(found)


@every_case
def test_what_is_counted_anew_is_what_is_counted_from_the_beginning(case: Case) -> None:
    schedule = placed(case, microbatches=1 + 2 * (case.seed % 3 == 0))
    arrays, order, _ = array_schedule(schedule)
    costs, lives, chance = call_costs(arrays, order), lives_for(arrays, order), random.Random(case.seed)
    known, length = room(arrays, order), int(order.length[0])
    for _ in range(6):
        step_of(arrays, order, costs, 0, length + 1, known, known)
        peak_bytes(arrays, order, costs, lives)
        before, timeline = order.items.copy(), Timeline(*(array.copy() for array in known))
        shifts = np.ones_like(WEIGHTS)
        descend(arrays, order, costs, lives_for(arrays, order), np.array([chance.randrange(2**30)]), shifts, 2, UNLIMITED, 0)
        changed = np.flatnonzero(before != order.items)
        first, behind = (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (0, 0)
        assert step_of(arrays, order, costs, first, behind, known, timeline) == seconds_of(arrays, order)
        fresh = lives_for(arrays, order)
        assert recount_memory(arrays, order, costs, lives, first, behind) == peak_bytes(arrays, order, costs, fresh)
        assert lives.levels.tolist() == fresh.levels.tolist() and lives.over.tolist() == fresh.over.tolist()


@every_case
def test_the_seconds_of_a_descent_are_those_of_its_list(case: Case) -> None:
    schedule = placed(case)
    arrays, order, _ = array_schedule(schedule)
    held = says(arrays, order)[1]
    for limit in (held, held - held // 50):
        seconds = descended(arrays, order, 400, case.seed, limit, captured=False)
        assert seconds == pytest.approx(seconds_of(arrays, order), rel=1e-9)


def test_moves_change_the_order_and_who_shares_a_call() -> None:
    orders, counts = [], []
    for case in CASES:
        first = placed(case)
        lists = [first, *(found for _, _, found in wandered(first, case.seed))]
        counts.append(len({len(one.calls) for one in lists}))
        orders.append(len({tuple(item.of for item in one.instructions if item.kind == "run") for one in lists}))
    assert min(sum(one > 1 for one in found) for found in (orders, counts)) > len(CASES) / 3


@pytest.mark.parametrize("case", CASES[:18], ids=str)
def test_microbatches(case: Case) -> None:
    schedule = placed(case, microbatches=4)
    arrays, order, _ = array_schedule(schedule)
    seconds, held = says(arrays, order)
    assert seconds == pytest.approx(microbatches_seconds(schedule), rel=1e-9)
    assert held + resting_bytes(schedule, "sgd") == peak(schedule)
    found = check_legal(improve_order(schedule, "sgd", peak(schedule)).schedule, "local search")
    assert step_seconds(found, "sgd") <= step_seconds(schedule, "sgd") * (1 + 1e-9) and peak(found) <= peak(schedule)


@every_case
def test_a_list_takes_less_and_holds_no_more_than_it_may(case: Case) -> None:
    schedule = placed(case)
    limit = peak(schedule)
    found = check_legal(improve_order(schedule, "sgd", limit).schedule, "local search")
    assert step_seconds(found, "sgd") <= step_seconds(schedule, "sgd") * (1 + 1e-9)
    assert peak(found) <= limit


def operators(schedule: Schedule) -> list[str]:
    return [item.of for item in schedule.instructions if item.kind in ("run", "add")]


@every_case
def test_operators_leave_their_order_only_where_no_less_is_held(case: Case) -> None:
    """What is proved of memory is proved of operators as they were captured."""
    schedule = placed(case)
    assert operators(improve_order(schedule, "sgd", 1).schedule) == operators(schedule)
    assert peak(improve_order(schedule, "sgd", UNLIMITED, keep_program_order=False).schedule) >= peak(schedule)


def test_many_lists_take_less() -> None:
    gains = []
    for case in CASES:
        schedule = placed(case)
        gains.append(step_seconds(improve_order(schedule, "sgd", UNLIMITED).schedule, "sgd") < 0.99 * step_seconds(schedule, "sgd"))
    assert sum(gains) > len(gains) / 2


def orders(arrays: ArraySchedule, order: Order) -> Iterator[list[int]]:
    """All orders that keep what must follow what, with the calls as they are."""
    numbers, slots = order.items[: order.length[0]].tolist(), len(order.head)
    before = arrays.items.before
    known = set(numbers)

    def follows(number: int) -> set[int]:
        found, shared = set[int](), [number]
        if number < 2 * slots:
            slot = int(order.after[number // 2])
            while slot >= 0:
                shared.append(2 * slot + number % 2)
                slot = int(order.after[slot])
        for one in shared:
            found.update(number_of_call(order, slots, int(other)) for other in before.entries[before.begins[one] : before.begins[one + 1]])
        return (found & known) - {number}

    needs = {number: follows(number) for number in numbers}

    def rest(done: list[int]) -> Iterator[list[int]]:
        if len(done) == len(numbers):
            yield done
        for number in numbers:
            waits = any(arrays.items.segment[other] < arrays.items.segment[number] for other in known.difference(done))
            if number not in done and not waits and needs[number] <= set(done):
                yield from rest([*done, number])

    return rest([])


def test_small_lists_take_hardly_more_than_in_any_order() -> None:
    """Of all that keep what must follow what. Moves are made one at a time, so that two that gain only together may be missed."""
    tried, apart = [], 0
    for case in CASES:
        schedule = placed(case)
        if len(schedule.instructions) > SMALL:
            continue
        arrays, order, _ = array_schedule(schedule)
        some = list(islice(orders(arrays, order), MOST))
        if len(some) == MOST:
            continue
        best = min(seconds_of(arrays, order._replace(items=np.array(one))) for one in some)
        found = microbatches_seconds(improve_order(schedule, "sgd", UNLIMITED).schedule)
        tried.append(found <= best * (1 + 1e-9))
        apart += best < 0.999 * microbatches_seconds(schedule)
        assert found <= 1.1 * best
    assert sum(tried) >= 0.9 * len(tried) >= 9 and apart


def _run_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loops run as plain Python, from the files beside the compiled ones."""
    plain, folder = dict[str, ModuleType](), Path(str(tables.moves.__file__)).parent
    for room in ("views", "clock", "memory", "moves"):
        name, file = f"autopar.schedule.kernels.{room}", str(folder / f"{room}.py")
        spec = spec_from_file_location(name, file, loader=SourceFileLoader(name, file))
        assert spec is not None and spec.loader is not None
        plain[room] = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, plain[room])
        spec.loader.exec_module(plain[room])
    for table in [table for table in VIEWS if table.__module__ == tables.__name__]:
        monkeypatch.setitem(VIEWS, table, getattr(plain["views"], table.__name__))
    monkeypatch.setattr(tables, "_descend", on_arrays(plain["moves"].descend))
    monkeypatch.setattr(module, "price_calls", on_arrays(plain["memory"].price_calls))


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_both_forms_do_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = placed(case)
    if not tables.COMPILED:
        pytest.skip("the loops are not compiled here: the two forms are one")
    found, limit = [], peak(schedule)
    for plain in (False, True):
        if plain:
            _run_plain(monkeypatch)
        arrays, order, _ = array_schedule(schedule)
        seconds = descended(arrays, order, 500, case.seed, limit, captured=True)
        found.append((seconds, order.items[: order.length[0]].tolist(), order.head.tolist()))
    assert found[0] == found[1]
    assert is_legal(schedule)
