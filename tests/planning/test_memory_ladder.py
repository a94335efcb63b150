"""The ladder of limits, with plans that somebody else finds."""

from __future__ import annotations

from itertools import pairwise

import pytest

import autopar
from autopar import zoo
from autopar.errors import InfeasibleError
from autopar.plan import Plan
from autopar.planning.memory_ladder import plan_ladder
from autopar.planning.session import Planned

LEAST, MOST = 1000, 1400
FOUND = {1000: (9.0, 1000), 1100: (7.0, 1050), 1200: (8.0, 1200), 1300: (7.5, 1100), 1400: (5.5, 1350)}
"""By limit, the seconds of what is found and its bytes: more memory is not always used well."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    target = zoo.build("mlp", device="meta")
    return autopar.plan(target.model, target.args, mesh="dp=2", hardware="h100-sxm", time_limit=20)


def test_a_plan_for_less_memory_stands_where_nothing_better_was_found(plan: Plan) -> None:
    asked = []

    def within(memory_limit: int, deadline: float) -> Planned:
        asked.append(memory_limit)
        if memory_limit < LEAST:
            error = InfeasibleError("no plan fits", "allow more")
            error.least = LEAST
            raise error
        seconds, peak = FOUND.get(memory_limit, (5.0, MOST))
        objective = plan.objective.model_copy(update={"seconds": seconds, "bound_seconds": 4.0 + memory_limit % 7 / 10})
        predicted = plan.predicted.model_copy(update={"peak_memory_bytes_per_rank": peak})
        return Planned(plan.model_copy(update={"objective": objective, "predicted": predicted}))

    ladder = plan_ladder(within, 5, float("inf")).plans
    assert sorted(asked[2:]) == sorted(FOUND)
    assert [one.memory_limit_bytes_per_rank for one in ladder] == sorted(FOUND)
    assert [one.objective.seconds for one in ladder] == [9.0, 7.0, 7.0, 7.0, 5.0]
    for less, more in pairwise(ladder):
        assert less.objective.bound_seconds >= more.objective.bound_seconds
    for one in ladder:
        assert one.predicted.peak_memory_bytes_per_rank <= one.memory_limit_bytes_per_rank
        assert one.objective.bound_seconds <= one.objective.seconds


@pytest.mark.parametrize(("at", "rungs"), [(0, 1), (1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("raises", [False, True])
def test_ctrl_c_ends_it_with_what_is_there(plan: Plan, at: int, rungs: int, raises: bool) -> None:
    asked = []

    def within(memory_limit: int, deadline: float) -> Planned:
        asked.append(memory_limit)
        ended = len(asked) > at
        if ended and raises:
            raise KeyboardInterrupt
        if memory_limit < LEAST:
            error = InfeasibleError("no plan fits", "allow more")
            error.least = LEAST
            raise error
        peak = min(memory_limit, MOST)
        predicted = plan.predicted.model_copy(update={"peak_memory_bytes_per_rank": peak})
        return Planned(plan.model_copy(update={"predicted": predicted}), ended)

    if at == 0 and raises:
        with pytest.raises(KeyboardInterrupt):
            plan_ladder(within, 5, float("inf"))
        return
    found = plan_ladder(within, 5, float("inf")).plans
    assert found and len(asked) <= at + 1 + (at == 1 and not raises), "nothing is asked after it"
    assert len(found) <= rungs
    assert all(one.predicted.peak_memory_bytes_per_rank <= one.memory_limit_bytes_per_rank for one in found)
