"""``find_pinned_plan``: the search with pins, which begins with the plan that is best without them.

Pins take choices away. A search among fewer choices takes other turns and may end with another plan, a worse one too. So the problem is
first solved without the pins. A plan that keeps them all the same is the answer. Otherwise its bound bounds the pinned plans, and what it
takes to pin it is a plan to begin with.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

from autopar.cost_models import Machine
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import Graph
from autopar.schedule import OUTPUT, Schedule
from autopar.search.choices.pins import Pins, resolve_pins
from autopar.search.driver.find_plan import find_plan
from autopar.search.driver.result import SearchResult, Shared

WITHOUT_PINS = "without pins"
"""What the record of a search calls the search without pins."""


def find_pinned_plan(
    graph: Graph, machine: Machine, *, pins: Mapping[str, str], constraints: Mapping[str, str] | None = None, time_limit: float = 60.0,
    shared: Shared | None = None, **options: Any,
) -> SearchResult:  # fmt: skip
    """The fastest schedule found that keeps the pins. Where the plan without them keeps them, it is that plan.

    The search without pins has half of the time, as much work as ``find_plan``, and the pinned search as much again.

    Args:
        pins: the user's.
        constraints: pins that both searches keep.
        shared: what searches of this graph and these pins under other limits left.
        options: others of ``find_plan``.

    Raises:
        Those of ``find_plan``.
    """
    began, shared = perf_counter(), shared or Shared()
    everything = {**(constraints or {}), **pins}
    resolved = resolve_pins(graph, machine.mesh, everything)
    free: SearchResult | None = None
    with suppress(InfeasibleError, TimeLimitError):  # the pinned search says what it finds
        free = find_plan(graph, machine, constraints=constraints, time_limit=time_limit / 2, shared=shared.without_pins, **options)
    if free is not None and keeps_pins(free.schedule, resolved) and (not free.cut or free.interrupted):
        return free
    if free is not None and free.interrupted:
        raise KeyboardInterrupt
    left = max(time_limit - (perf_counter() - began), 0.0)
    found = find_plan(graph, machine, constraints=everything, time_limit=left, shared=shared, relaxed=free, **options)
    if free is None:
        return found
    named = ((f"{WITHOUT_PINS}: {phase.name}", phase) for phase in free.trace)
    trace = tuple(replace(phase, name=name, step_before=inf, step_after=inf) for name, phase in named)  # these plans do not count
    return replace(found, trace=(*trace, *found.trace), cut=found.cut or free.cut, solve_seconds=free.solve_seconds + found.solve_seconds)


def keeps_pins(schedule: Schedule, pins: Pins) -> bool:
    """Whether every pinned tensor is laid, made or handed out as pinned."""
    specs = schedule.specs
    outputs = {f"{OUTPUT}{number}": specs[value] for number, (_, value) in enumerate(schedule.outputs)}
    placed = [(pins.inputs, specs), (pins.tensors, specs), (pins.outputs, outputs)]
    return all(found[name] == spec for place, found in placed for name, spec in place.items())
