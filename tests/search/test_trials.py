"""What a search remembers of plans that fit, and how close its solves for bounds come."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.schedule import Assignment
from autopar.search import scarcity, trials
from autopar.search.baselines import find_baselines
from autopar.search.effort import Budget
from autopar.search.moving import LESS
from autopar.search.rounds import close_enough
from autopar.search.scarcity import change_one
from autopar.search.tuning import Timed
from tests.search.test_in_less import trials as searched


def test_the_best_plans_that_fit_are_kept_none_as_long_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "FITTED", 3)
    some = searched(2**62)
    found = some.schedule(find_baselines(some.model.space)[0]["ddp"], None, 0)
    for share in (1.3, 1.0, 1.2001, 1.2, 1.1, 1.4):
        some.offer(replace(found, seconds=share * found.seconds), "auto")
    assert [one.seconds / found.seconds for one in some.fitted] == pytest.approx([1.0, 1.1, 1.2])
    some.limit = found.memory.peak - 1
    some.offer(replace(found, seconds=0.5 * found.seconds), "auto")
    assert [one.seconds / found.seconds for one in some.fitted] == pytest.approx([1.0, 1.1, 1.2])


def test_a_plan_is_changed_until_nothing_helps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towards the best without a limit, and to anything; what is found on the way is changed in turn, by what adds nothing first."""
    some, asked = searched(2**40), list[tuple[Assignment, bool, int]]()
    plans = find_baselines(some.model.space)[0]
    found = {name: some.schedule(plans[name], None, 0) for name in ("ddp", "fsdp")}
    some.plain = replace(found["ddp"], seconds=1e-9)
    some.offer(found["ddp"], "baseline")
    ahead = replace(found["fsdp"], seconds=found["ddp"].seconds * 0.9)

    def improve(
        space: object, begin: Timed, limit: int, tune: object, budget: Budget, guide: Assignment | None, stages: tuple[bool, ...]
    ) -> Timed:  # fmt: skip
        asked.append((begin.assignment, guide is not None, len(stages)))
        assert len(asked) < 20, "again and again"
        return ahead if stages == LESS[1:] else begin

    monkeypatch.setattr(scarcity, "improve", improve)
    change_one(some, some.budget)
    change_one(some, some.budget)
    first, second = found["ddp"].assignment, found["fsdp"].assignment
    begun = [(first, True, 2), (first, False, 1), (first, False, 1)]  # with what adds to be done there is another best
    ended = [(second, False, 1), (second, False, 1), (second, True, 2)]
    assert asked == begun + ended


def test_solves_for_a_bound_come_as_close_as_any_weights_still_can() -> None:
    """Else the bound stays below what its weights come to by the whole gap at which solves stop."""
    assert close_enough(1.0, 100.0, math.inf) == 0.02
    assert close_enough(0.04, 100.0, math.inf) == pytest.approx(0.01)
    assert close_enough(1.0, 99.0, 100.0) == pytest.approx(0.005)
    assert close_enough(1.0, 99.9, 100.0) == trials.CLOSE
