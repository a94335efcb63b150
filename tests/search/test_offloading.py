"""The search with values on the host: what fits only so, what the bound covers, what stays as it is without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.plan import Plan
from autopar.recording import replay
from autopar.schedule import step_seconds
from autopar.search import SearchResult, find_plan
from autopar.search.driver.offloading import _HostSearch, find_plan_with_host
from tests.offloading import LIMITS, STATES_LIMIT, graph, hardware, hosted, make, offloaded, short_graph


def _plan(memory: int, offload: str, bandwidth: float = 1e9, host_memory: float = 1e9) -> Plan:
    return autopar.plan(
        graph(), mesh="dp=2,tp=2", hardware=hardware(bandwidth, host_memory), memory=memory, recompute="off", offload=offload, effort="low",
        time_limit=300,
    )  # fmt: skip


def test_a_plan_fits_that_does_not_without_the_host() -> None:
    tight = 400_000
    with pytest.raises(InfeasibleError):
        _plan(tight, "off")
    found = _plan(tight, "auto")
    assert found.predicted.peak_memory_bytes_per_rank <= tight and found.copies and autopar.check(found) == ()


def test_without_room_on_the_host_nothing_is_moved() -> None:
    with pytest.raises(InfeasibleError):
        _plan(400_000, "auto", host_memory=4.0)


def test_the_bound_holds_for_a_fast_link_too() -> None:
    """A slower link, less room on the host or less memory never give a plan below the bound of more."""
    slow, fast = _plan(LIMITS[1], "auto", bandwidth=1e8), _plan(LIMITS[1], "auto", bandwidth=1e12)
    assert fast.objective.bound_seconds <= slow.objective.seconds
    assert fast.objective.seconds <= slow.objective.seconds * (1 + 1e-9)
    free = _plan(10**9, "auto")
    assert not free.copies and free.objective.bound_seconds <= offloaded().objective.seconds
    assert offloaded().objective.bound_seconds <= free.objective.seconds + 1e-12, "it is over plans that hold everything, too"


def test_the_bound_is_of_the_limit_with_what_the_link_carries() -> None:
    machine = replay(offloaded(), graph()).machine
    search = _HostSearch(graph(), machine, 1000, 1.0, 1.0, find_plan, {"optimizer": "adamw"})
    search.bounds = {1000 + 10**9: 1.0, 2500: 2.0, 1500: 3.0}
    assert search._most_on_host(1e-6) == 1000 and search._bound(1e-6) == 1e-6
    assert search._bound(1.2) == 1.0, "1.2 GB may be carried, and the host has room for 250 MB"
    search.bounds = {2500: 2.0e-6, 1500: 3.0e-6}
    assert search._bound(1.4e-6) == 1.4e-6 and search._bound(2.2e-6) == 0.0, "2200 bytes beyond the limit are over 2500"


def test_states_go_to_the_host_where_they_do_not_fit() -> None:
    with pytest.raises(InfeasibleError):
        autopar.plan(short_graph(), mesh="dp=2,tp=2", hardware=hardware(), memory=STATES_LIMIT, effort="low", time_limit=300)
    plan = hosted()
    rows = [row for row in plan.parameters.values() if row.states_on_host]
    assert rows and plan.predicted.peak_memory_bytes_per_rank <= STATES_LIMIT and autopar.check(plan) == ()
    assert plan.predicted.memory.optimizer_on_host == plan.predicted.peak_host_bytes_per_rank
    assert plan.predicted.memory.temporaries > 0, "the optimizer's step is the peak, with states of two parameters in passing"
    read = Plan.from_json(plan.to_json())
    assert read == plan and replay(read, short_graph()).states_on_host == {row.tensor for row in rows}


def test_the_bound_covers_states_on_the_host() -> None:
    """Every plan with states on the host takes no less, on a link that is fast or slow, than the bound says."""
    free = autopar.plan(short_graph(), mesh="dp=2,tp=2", hardware=hardware(), memory=10**9, offload="auto", effort="low", time_limit=300)
    assert free.predicted.memory.optimizer_on_host is None, "there is room on the device"
    assert hosted().objective.bound_seconds <= hosted().objective.seconds
    assert hosted().objective.bound_seconds <= free.objective.seconds + 1e-12, "it is over plans that hold everything, too"
    assert free.objective.bound_seconds <= hosted().objective.seconds
    without = replace(replay(hosted(), short_graph()), states_on_host=frozenset())
    assert step_seconds(without, "adamw") < hosted().objective.seconds, "its copies take time"
    assert hosted().objective.bound_seconds <= step_seconds(without, "adamw")


def test_of_several_microbatches_states_are_copied_once() -> None:
    """What may lie on the host: bytes that are copied there in a step, values once a microbatch, states once, no more than there are."""
    machine = replay(offloaded(), graph()).machine
    one, two = (_HostSearch(graph(times), machine, 1000, 1.0, 1.0, find_plan, {"optimizer": "adamw"}) for times in (1, 2))
    states = 2 * 4 * sum(parameter.numel() for parameter in make()[0].parameters())
    assert one.states_bytes == two.states_bytes == states
    for seconds in (1e-6, 1e-4, 1e-2):
        carried = round(1e9 * seconds)
        best = max(kept + (carried - kept) // 2 for kept in range(0, min(states, carried) + 1, 100))
        assert one._most_on_host(seconds) == carried and best <= two._most_on_host(seconds) <= best + 100
    assert _HostSearch(graph(2), machine, 1000, 1.0, 1.0, find_plan, {"optimizer": "sgd"})._most_on_host(1e-2) == round(1e9 * 1e-2) // 2


def _with_host(*outcomes: SearchResult | BaseException) -> SearchResult:
    """The result where the searches under the limit and under larger ones end so, one after another."""
    left = iter(outcomes)

    def find(*args: Any, **asked: Any) -> SearchResult:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    machine = replay(offloaded(), graph()).machine
    return find_plan_with_host(graph(), machine, memory_bytes=10**9, optimizer="adamw", time_limit=60.0, effort="low", find=find)


def test_an_interrupt_leaves_the_plan_that_fits() -> None:
    fitting = find_plan(graph(), replay(offloaded(), graph()).machine, memory_bytes=10**9, effort="low")
    found = _with_host(fitting, KeyboardInterrupt())
    assert found.seconds == fitting.seconds and found.interrupted
    with pytest.raises(KeyboardInterrupt):
        _with_host(KeyboardInterrupt())


def test_a_search_that_ran_out_of_time_counts_as_cut() -> None:
    fitting = find_plan(graph(), replay(offloaded(), graph()).machine, memory_bytes=10**9, effort="low")
    assert not fitting.cut and _with_host(TimeLimitError("no plan was found in 1 s", "allow more time"), fitting, fitting).cut
    assert not _with_host(fitting, fitting, fitting).cut
