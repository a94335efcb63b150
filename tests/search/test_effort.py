"""Budgets of counted work, the time limit that only cuts off, and what phases record."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from autopar import effort, solvers
from autopar.effort import GRACE_SECONDS, GRACE_SHARE, Budget, Meter, check_deadline, unlimited, within
from autopar.errors import TimeLimitError
from autopar.schedule.limit_search import LimitSearch
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search import SearchResult, find_plan, telemetry
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.search.driver.mesh_search import MeshSearch
from autopar.search.driver.phase_table import Search
from autopar.search.ilp.build import build_model
from autopar.search.phases import FailedPhaseWarning, Phase, run_phases
from autopar.search.solving import solve
from autopar.search.telemetry import PhaseRecord, Telemetry
from autopar.solvers import Problem, Solution
from tests.search.requests import asked, budget
from tests.search.small_graphs import small_graph, small_machine

UNLIMITED = 2**62
LIMIT = 100.0
"""Seconds of a time limit."""
GRACE = GRACE_SHARE * LIMIT + GRACE_SECONDS


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a wall clock shows."""
    shown = [1000.0]
    monkeypatch.setattr(effort, "perf_counter", lambda: shown[0])
    return shown


# budgets ----------------------------------------------------------------------------------------------------------------------------


def test_a_budget_is_used_up_by_work(now: list[float]) -> None:
    """Not by time, within the time limit."""
    given = Budget(Meter(LIMIT), 8.0)
    now[0] += 0.9 * LIMIT
    assert given.left == 8.0
    given.charge(3.0)
    assert given.left == 5.0 and not given.over
    given.meter.charge(5.0)
    assert given.left == 0.0 and given.over
    given.charge(1.0)
    assert given.left == 0.0, "never negative"
    assert not given.meter.cut, "work that is used up is no cut"


def test_a_share_is_of_what_is_left() -> None:
    given = budget(8.0)
    given.charge(4.0)
    part = given.share(0.25)
    assert part.left == 1.0
    part.charge(1.0)
    assert part.over and given.left == 3.0, "what a part spends is spent of the whole"


def test_at_most_never_goes_beyond_the_whole() -> None:
    given = budget(8.0)
    given.charge(2.0)
    assert given.at_most(4.0).left == 4.0
    assert given.at_most(40.0).left == 6.0


def test_at_least_goes_beyond_the_whole_where_less_is_left() -> None:
    given = budget(8.0)
    assert given.at_least(4.0).left == 8.0
    given.charge(7.0)
    assert given.at_least(4.0).left == 4.0
    given.charge(7.0)
    assert given.over and given.at_least(4.0).left == 4.0
    assert given.at_most(1.0).at_least(2.0).left == 2.0


def test_the_time_limit_cuts_all_budgets(now: list[float]) -> None:
    meter = Meter(LIMIT)
    meter.has_plan = True
    whole = Budget(meter, 8.0)
    parts = [whole, whole.share(0.5), whole.at_most(1.0), whole.at_least(9.0), Budget(meter, math.inf)]
    now[0] += LIMIT - 1.0
    assert not meter.cut and not any(part.over for part in parts) and meter.seconds_left == pytest.approx(1.0)
    now[0] += 2.0
    assert all(part.over and part.left == 0.0 for part in parts) and meter.cut
    assert whole.at_least(1.0).over, "nor is there a least"
    assert meter.spent == 0.0


def test_until_there_is_a_plan_the_time_limit_has_a_grace(now: list[float]) -> None:
    waiting, found = Meter(LIMIT), Meter(LIMIT)
    found.has_plan = True
    now[0] += LIMIT + 0.9 * GRACE
    assert found.expired and not waiting.expired
    assert waiting.seconds_left == pytest.approx(0.1 * GRACE)
    now[0] += 0.2 * GRACE
    assert waiting.expired


def test_time_is_kept_for_what_follows_the_search(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as it takes on this machine now: four times its CPU seconds where others leave a quarter of a core."""
    cpu = [0.0]
    monkeypatch.setattr("autopar.effort.process_time", lambda: cpu[0])
    meter, other = Meter(LIMIT, ending_seconds=1.0), Meter(LIMIT)
    meter.has_plan = other.has_plan = True
    now[0] += 8.0
    cpu[0] += 2.0
    assert (meter.seconds_left, other.seconds_left) == pytest.approx((LIMIT - 8.0 - 4.0, LIMIT - 8.0))
    cpu[0] += 8.0
    assert meter.seconds_left == pytest.approx(LIMIT - 8.0 - 1.0), "threads do not make it shorter"
    slow = Meter(LIMIT, ending_seconds=1e9)
    assert slow.seconds_left == pytest.approx(LIMIT + GRACE - 0.5 * LIMIT), "half of the time at most"


def test_a_deadline_ends_steps_that_count_no_work(now: list[float]) -> None:
    error = TimeLimitError("too late", "wait")
    with within(now[0] + 1.0, error):
        check_deadline()
        now[0] += 1.0
        with pytest.raises(TimeLimitError, match="too late"):
            check_deadline()
    check_deadline()


def test_the_last_local_search_is_left_out_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    improved: list[ScheduledPlan] = []
    monkeypatch.setattr("autopar.search.driver.state.improve_plan", lambda plan, *rest, **more: improved.append(plan) or plan)
    graph, machine = small_graph(1), small_machine(1, "2x2")
    space = Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {}))
    search = Search(build_model(space), asked(UNLIMITED, gap=0.0, work=1.0), may_recompute=False)
    search.run()
    assert search.best is not None
    search.bound = 0.0
    search.improve_order(search.best)
    assert improved == [search.best]
    search.budget.meter.cut = True
    search.improve_order(search.best)
    assert improved == [search.best]


def test_a_search_that_was_cut_stays_so(now: list[float]) -> None:
    meter = Meter(LIMIT)
    now[0] += 2 * LIMIT
    assert meter.expired
    now[0] -= 2 * LIMIT
    assert meter.expired and Budget(meter, 1.0).over


def test_a_budget_outside_of_a_search_has_no_end() -> None:
    given = unlimited()
    given.charge(1e300)
    assert given.left == math.inf and given.share(0.5).left == math.inf


def test_a_solve_is_charged_and_tells_of_its_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do what is left of its budget, and has the seconds that the time limit leaves."""
    asked, given = dict[str, Any](), budget(8.0)
    given.charge(2.0)
    answer = solvers.solve(problem())

    def solved(problem: Problem, **options: Any) -> Solution:
        asked.update(options)
        return replace(answer, work=3.0, cut=True)

    monkeypatch.setattr(solvers, "solve", solved)
    solve(problem(), given.at_most(4.0), gap=0.1)
    assert asked == {"work": 4.0, "time_limit": math.inf, "gap": 0.1}
    assert given.meter.spent == 5.0 and given.meter.cut and given.over


def problem() -> Problem:
    """Two choices each of two nodes."""
    return Problem.build([[1, 2], [2, 1]], [(0, 1, [[0, 3], [3, 0]])])


# phases -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """What tiny phases work on: each comes nearer."""

    telemetry: Telemetry
    step: float = math.inf
    bound: float = 0.0
    done: list[str] = field(default_factory=list)
    given: list[float] = field(default_factory=list)

    def standing(self) -> tuple[float, float]:
        return self.step, self.bound

    @property
    def budget(self) -> Budget:
        return Budget(self.telemetry.meter, 8.0)


def find(walk: Walk, budget: Budget) -> None:
    walk.done.append("find")
    walk.given.append(budget.left)
    walk.step = 2.0
    budget.charge(4.0)


def prove(walk: Walk, budget: Budget) -> None:
    walk.done.append("prove")
    walk.given.append(budget.left)
    walk.bound = 1.0
    budget.charge(1.0)


def interrupt(walk: Walk, budget: Budget) -> None:
    find(walk, budget)
    raise KeyboardInterrupt


PHASES = (
    Phase[Walk]("find", lambda walk: True, find),
    Phase[Walk]("prove", lambda walk: walk.step < math.inf, prove, 0.25),
    Phase[Walk]("find", lambda walk: walk.bound == 0.0, find),
)


def walk(skip: frozenset[str] = frozenset()) -> Walk:
    return Walk(Telemetry(Meter(math.inf), skip))


def test_phases_run_in_order_where_they_apply_and_say_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(0.0, 1.5)
    monkeypatch.setattr(telemetry, "process_time", lambda: next(ticks))
    some = walk()
    run_phases(PHASES, some)
    assert some.done == ["find", "prove"]
    assert some.given == [8.0, 1.0], "each has its share of what is left"
    assert some.telemetry.records == [
        PhaseRecord("find", 4.0, 1.5, math.inf, 2.0, 0.0, 0.0),
        PhaseRecord("prove", 1.0, 1.5, 2.0, 2.0, 0.0, 1.0),
    ]


@pytest.mark.parametrize(("name", "left"), [("find", []), ("prove", ["find", "find"])])
def test_phases_of_a_name_are_left_out_together(name: str, left: list[str]) -> None:
    """Also those that would apply."""
    some = walk(frozenset([name]))
    run_phases(PHASES, some)
    assert some.done == left == [record.name for record in some.telemetry.records]


def test_a_phase_that_is_interrupted_is_recorded() -> None:
    some = walk()
    with pytest.raises(KeyboardInterrupt):
        run_phases((Phase[Walk]("find", lambda walk: True, interrupt), *PHASES), some)
    assert [(record.name, record.work, record.step_after) for record in some.telemetry.records] == [("find", 4.0, 2.0)]


def contradict(walk: Walk, budget: Budget) -> None:
    walk.done.append("contradict")
    raise AssertionError("one is not the other")


def test_a_phase_that_contradicts_itself_leaves_the_plan_before_it() -> None:
    some, failing = walk(), Phase[Walk]("contradict", lambda walk: True, contradict)
    with pytest.warns(FailedPhaseWarning, match="the phase 'contradict' of the search failed.*one is not the other"):
        run_phases((PHASES[0], failing, PHASES[1]), some)
    assert some.done == ["find", "contradict", "prove"] and some.step == 2.0
    with pytest.raises(AssertionError, match="one is not the other"):
        run_phases((failing,), walk())


def test_records_name_the_model_and_are_of_one_search() -> None:
    some = walk(frozenset(["prove"]))
    inside = Walk(some.telemetry.within("merged axes").within("folded"))
    run_phases(PHASES, inside)
    assert [record.name for record in some.telemetry.records] == ["merged axes: folded: find"] * 2


# searches ---------------------------------------------------------------------------------------------------------------------------


def done(found: SearchResult) -> list[tuple[object, ...]]:
    """What each phase did, but its seconds."""
    return [(one.name, one.work, one.step_before, one.step_after, one.bound_before, one.bound_after) for one in found.trace]


@pytest.mark.parametrize(("seed", "mesh"), [(1, "2x2"), (8, "2x2"), (3, "2x2x2")])
def test_a_plan_depends_on_work_alone(seed: int, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is: on the slow one a day passes whenever it looks at the clock."""
    found = list[SearchResult]()
    for step in (1e-6, 86_400.0):
        for module, name in ((effort, "perf_counter"), (telemetry, "process_time")):
            monkeypatch.setattr(module, name, count(0.0, step).__next__)
        found.append(find_plan(small_graph(seed), small_machine(seed, mesh), memory_bytes=UNLIMITED, time_limit=math.inf))
    quick, slow = found
    assert quick.schedule.instructions == slow.schedule.instructions
    assert (quick.seconds, quick.bound_seconds, quick.memory) == (slow.seconds, slow.bound_seconds, slow.memory)
    assert done(quick) == done(slow) and sum(one.work for one in quick.trace) > 0.0
    assert not quick.cut and not slow.cut
    assert sum(one.seconds for one in slow.trace) > 1e6 * sum(one.seconds for one in quick.trace)


def test_a_search_does_no_more_work_than_its_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what was begun within it."""
    graph, machine = small_graph(8), small_machine(8, "2x2")
    whole = find_plan(graph, machine, memory_bytes=UNLIMITED, gap=0.0)
    spent = sum(one.work for one in whole.trace)
    monkeypatch.setitem(effort.WORK_SECONDS, "low", 0.1 * spent)
    less = find_plan(graph, machine, memory_bytes=UNLIMITED, gap=0.0, effort="low")
    assert 0.0 < sum(one.work for one in less.trace) < 0.7 * spent
    assert whole.effort == "normal" and less.effort == "low" and not less.cut
    assert less.seconds >= whole.seconds * (1 - 1e-9) and less.bound_seconds <= less.seconds


def test_high_effort_begins_as_the_usual_one_and_searches_on() -> None:
    """So it gives no worse plan and no worse bound."""
    graph, machine = small_graph(8), small_machine(8, "2x2")
    usual, high = (find_plan(graph, machine, memory_bytes=UNLIMITED, gap=0.0, effort=level) for level in ("normal", "high"))
    assert done(high)[: len(usual.trace)] == done(usual)
    more = high.trace[len(usual.trace) :]
    assert more and all(one.name.startswith("again: ") for one in more)
    assert high.seconds <= usual.seconds and high.bound_seconds >= usual.bound_seconds
    assert high.baselines.keys() == usual.baselines.keys() and high.effort == "high"


def test_ctrl_c_in_the_second_search_of_high_effort_leaves_the_plan_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, machine = small_graph(8), small_machine(8, "2x2")
    usual, run = find_plan(graph, machine, memory_bytes=UNLIMITED, gap=0.0), MeshSearch.run

    def interrupted(search: MeshSearch, *more: Any) -> SearchResult:
        if search.asked.telemetry.place:
            raise KeyboardInterrupt
        return run(search, *more)

    monkeypatch.setattr(MeshSearch, "run", interrupted)
    found = find_plan(graph, machine, memory_bytes=UNLIMITED, gap=0.0, effort="high")
    assert found.interrupted and found.seconds == usual.seconds and found.schedule.instructions == usual.schedule.instructions


@pytest.fixture
def after_the_first_schedule(now: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock on which the time limit passes when a plan has been scheduled."""
    run = LimitSearch.run

    def late(tuning: LimitSearch, *more: Any, **options: Any) -> Any:
        found = run(tuning, *more, **options)
        now[0] += 2 * LIMIT
        return found

    monkeypatch.setattr(LimitSearch, "run", late)
    return now


def test_a_time_limit_that_passes_is_told(now: list[float]) -> None:
    found = find_plan(small_graph(1), small_machine(1, "2x2"), memory_bytes=UNLIMITED, time_limit=LIMIT)
    assert not found.cut


def test_a_search_that_the_time_limit_cuts_says_so(after_the_first_schedule: list[float]) -> None:
    began = after_the_first_schedule[0]
    found = find_plan(small_graph(1), small_machine(1, "2x2"), memory_bytes=UNLIMITED, time_limit=LIMIT)
    assert found.cut and after_the_first_schedule[0] > began + LIMIT
    assert not found.interrupted and found.bound_seconds <= found.seconds


@pytest.mark.parametrize("name", ["baselines", "surrogate bound"])
def test_a_search_leaves_phases_out_by_name(name: str) -> None:
    graph, machine = small_graph(8), small_machine(8, "2x2")
    whole, less = (find_plan(graph, machine, memory_bytes=UNLIMITED, skip=skip) for skip in (frozenset(), frozenset([name])))
    names = [{one.name for one in found.trace} for found in (whole, less)]
    assert name in names[0] and name not in names[1]
    assert bool(less.baselines) == (name != "baselines")
    assert less.bound_seconds <= whole.seconds and whole.bound_seconds <= less.seconds
