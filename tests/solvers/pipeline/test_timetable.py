"""Timetables: what is legal, the total order behind the orders of devices, and the exact simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.solvers import ProblemError
from autopar.solvers.kernels import run_warm_ups
from autopar.solvers.pipeline import (
    Mode,
    Operation,
    PipelinePlan,
    PipelineProblem,
    check_legal,
    merge_orders,
    parse_orders,
    simulate,
    solve_pipeline,
)  # fmt: skip
from autopar.solvers.pipeline.chain import decoded, make_chain, make_clock
from autopar.solvers.pipeline.timetable import PREDICATES, needs
from tests.solvers.pipeline.problems import random_pipeline
from tests.solvers.pipeline.replay import replay
from tests.strategies import pipelines

PROBLEM = PipelineProblem(((Mode(1, 2, 1, held=1, rest=1), Mode(1, 3, 1, rest=1)),) * 3, 2, 2, split=True, limit=4)
PLAN = PipelinePlan((2, 1), (0, 1, 0), parse_orders(["F0 F0 B0 W0 B0 W0", "F1 B1 W1 F1 B1 W1"]))


def orders(*lines):
    return replace(PLAN, orders=parse_orders(list(lines)))


BROKEN = {
    "an empty chunk": (replace(PLAN, cut=(3, 0)), 0, "does not lay 3 layers"),
    "a layer too few": (replace(PLAN, cut=(1, 1)), 0, "does not lay 3 layers"),
    "a chunk too many": (replace(PLAN, cut=(1, 1, 1)), 0, "into 2 chunks"),
    "a mode too few": (replace(PLAN, modes=(0, 1)), 1, "2 modes for 3 layers"),
    "an unknown mode": (replace(PLAN, modes=(0, 1, 2)), 1, "mode 2 is none of them"),
    "a device too few": (replace(PLAN, orders=PLAN.orders[:1]), 2, "1 orders for 2 devices"),
    "an operation left out": (orders("F0 F0 B0 W0 B0", "F1 B1 W1 F1 B1 W1"), 2, "device 0 runs W0 1 times, not 2"),
    "one of another device": (orders("F0 F0 B0 W0 B0 W0 F1", "F1 B1 W1 F1 B1 W1"), 2, "device 0 runs F1 1 times, not 0"),
    "one of no chunk": (orders("F0 F0 B0 W0 B0 W0", "F1 B1 W1 F1 B1 W1 F7"), 2, "F7, which is no operation"),
    "B before F": (orders("F0 B0 B0 F0 W0 W0", "F1 B1 W1 F1 B1 W1"), 3, "B0.1 before its F"),
    "W before B": (orders("F0 F0 W0 B0 B0 W0", "F1 B1 W1 F1 B1 W1"), 3, "W0.0 before its B"),
    "a wait for ever": (orders("F0 B0 F0 W0 B0 W0", "F1 F1 B1 W1 B1 W1"), 4, "wait for one another for ever"),
    "too many bytes": (replace(PLAN, modes=(0, 0, 0)), 5, "device 0 holds 6 bytes at F0.1, more than 4"),
}


def test_the_plan_that_is_broken_below_is_legal():
    assert check_legal(PROBLEM, PLAN) is PLAN


@pytest.mark.parametrize(("plan", "rule", "words"), BROKEN.values(), ids=list(BROKEN))
def test_each_predicate_refuses_what_breaks_it(plan, rule, words):
    with pytest.raises(ProblemError) as caught:
        check_legal(PROBLEM, plan)
    assert words in caught.value.what and caught.value.hint == f"the rule is: {PREDICATES[rule][0]}"


def test_every_predicate_is_broken_above():
    assert {rule for _, rule, _ in BROKEN.values()} == set(range(len(PREDICATES)))


def mutated(problem, plan, chance):
    """A plan with one thing changed: operations swapped, moved, lost, repeated or renamed; another cut, mode or device's order."""
    lines = [list(line) for line in plan.orders]
    line = chance.choice(lines)
    a, b = chance.randrange(len(line)), chance.randrange(len(line))
    way = chance.randrange(8)
    if way == 0:
        line[a], line[b] = line[b], line[a]
    elif way == 1:
        line.insert(b, line.pop(a))
    elif way == 2:
        line.pop(a)
    elif way == 3:
        line.insert(b, line[a])
    elif way == 4:
        line[a] = Operation(chance.choice("FBW"), chance.randrange(problem.total_chunks + 1))
    elif way == 5:
        chance.shuffle(lines)
    elif way == 6:
        at = chance.randrange(len(plan.cut))
        return replace(plan, cut=tuple(layers + chance.choice((-1, 1)) * (c == at) for c, layers in enumerate(plan.cut)))
    else:
        at = chance.randrange(len(plan.modes))
        return replace(plan, modes=tuple(mode + (layer == at) for layer, mode in enumerate(plan.modes)))
    return replace(plan, orders=tuple(map(tuple, lines)))


def test_500_mutated_timetables_are_refused():
    """Those that the independent replay calls none; the others it times, and so does the simulation, alike."""
    chance, refused, seed = random.Random(0), 0, 0
    while refused < 500:
        problem = random_pipeline(seed, layers=6, devices=3, microbatches=4)
        seed += 1
        plan = solve_pipeline(problem, work=0.01, time_limit=600.0).plan
        for _ in range(20 if plan is not None else 0):
            other = mutated(problem, plan, chance)
            wanted = replay(problem, other)
            if wanted is None:
                with pytest.raises(ProblemError):
                    simulate(problem, other)
                refused += 1
            else:
                assert simulate(problem, other).step == pytest.approx(wanted[0], rel=1e-12)


def test_simulation_of_an_order_by_hand():
    times = simulate(PROBLEM, PLAN)
    spans = [{str(action): (begin, end) for action, begin, end in line} for line in times.spans]
    assert spans[0]["F0.1"] == (2, 4) and spans[1]["F1.0"] == (2, 3) and spans[1]["W1.0"] == (5, 6)
    assert spans[0]["B0.0"] == (5, 10) and spans[1]["F1.1"] == (6, 7) and spans[0]["W0.1"] == (17, 19)
    assert times.step == 19 and times.busy == (18, 8) and times.idle == (1, 11)
    assert times.in_flight == (2, 1) and times.peak_bytes == (4, 2)
    assert times.levels[1] == ((0.0, 1.0), (2.0, 2.0), (6.0, 1.0), (6.0, 2.0), (10.0, 1.0))


@settings(max_examples=40)
@given(pipelines())
def test_a_total_order_has_each_devices_order_in_it(problem):
    plan = solve_pipeline(problem, work=0.01, time_limit=600.0).plan
    if plan is None:
        return
    total, waiting = merge_orders(problem, plan)
    assert not waiting and len(total) == len(set(total)) == sum(map(len, plan.orders))
    place = {action: at for at, action in enumerate(total)}
    for action in total:
        assert all(place[need] < place[action] for need in needs(problem, action))
    for device, line in enumerate(plan.orders):
        kept = [Operation(action.kind, action.chunk) for action in total if problem.places[action.chunk] == device]
        assert kept == list(line)


@pytest.mark.parametrize("text", ["", "F", "X0", "F-1", "f0", "F0x", "F²"])
def test_other_texts_are_no_operation(text):
    with pytest.raises(ProblemError, match="is no operation"):
        Operation.parse(text)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_in_a_loop_take_turns_as_written(seed):
    """Rounds of as many microbatches as devices, forward from the first chunk on, backward from the last; the last round may be short."""
    random_ = random.Random(seed)
    p, v, m = random_.randint(1, 4), random_.randint(1, 3), random_.randint(1, 9)
    problem = PipelineProblem(((Mode(1.0, 2.0),),) * (p * v), p, m, v)
    warm_ups = np.array([random_.randint(1, v * m) for _ in range(p)], dtype=np.int64)
    codes = np.zeros(2 * p * v * m, dtype=np.int64)
    run_warm_ups(make_chain(problem, [Mode(1.0, 2.0)] * (p * v)), warm_ups, codes, make_clock(problem))
    rounds = [min(p, m - begin) for begin in range(0, m, p)]
    for device, line in enumerate(decoded(codes, problem)):
        chunks = range(device, p * v, p)
        forward = [f"F{chunk}" for size in rounds for chunk in chunks for _ in range(size)]
        backward = [f"B{chunk}" for size in rounds for chunk in reversed(chunks) for _ in range(size)]
        warm = int(warm_ups[device])
        wanted = forward[:warm]
        for number, operation in enumerate(backward):
            wanted += [operation, *forward[warm + number : warm + number + 1]]
        assert [str(operation) for operation in line] == wanted
