"""The result of a search, and what searches of one graph share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.schedule import Assignment, Memory, Schedule
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.search.choices.space import Space
from autopar.search.driver.candidates import Candidate
from autopar.search.ilp.model import Model
from autopar.search.telemetry import PhaseRecord


@dataclass(frozen=True)
class Baseline:
    """A plan that a person would write: its schedule and its cost.

    Args:
        schedule: of the planned graph; of a deep graph perhaps of one with fewer equal layers, from which the figures are extrapolated.
        seconds: the objective: the step, or under the communication model the sum of collectives.
        step_seconds: the step.
    """

    schedule: Schedule
    seconds: float
    step_seconds: float
    memory: Memory
    feasible: bool


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        schedule: what every rank runs.
        seconds: the objective: the simulated step with the optimizer's, or under the communication model the sum of collectives.
        bound_seconds: no plan for this mesh, in any order, costs less. With several microbatches, no plan that runs them one after another
            and gathers weights in each. With short memory, no plan in captured order: other orders may hold a little less at the peak.
        gap: (seconds - bound) / seconds.
        status: ``optimal`` or ``feasible``.
        solver: the method that gave the choices.
        baselines: the plans written by hand, by name.
        unknown: targets without a rule, with the line of one such operator; they run replicated.
        sizes: nodes, choices, edges and edge entries of the problem.
        interrupted: whether Ctrl-C ended the search.
        ended: False where the search was left for another, on the whole graph.
        own_seconds: the bound over the choices of the mesh itself. Plans of merged axes may beat it.
        floor_seconds: a bound over those too.
        trace: what each phase did.
        effort: see ``find_plan``.
        cut: whether the time limit cut the search off: with more time the plan may be another.
        used_up: whether the search spent all its work.
        scheduled_plan: the schedule with its assignment, for searches that follow.
        searched_assignment: the assignment as it was searched: of the folded graph where equal layers are folded.
        tied_seconds: increase of the objective over the best plan found, for equal layers to lie alike.
        candidates: the best distinct plans, this one among them, the fastest first; none where they were not asked for.
    """

    schedule: Schedule
    seconds: float
    bound_seconds: float
    gap: float
    status: str
    solve_seconds: float
    solver: str
    optimizer: str
    memory: Memory
    baselines: Mapping[str, Baseline]
    unknown: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    interrupted: bool = False
    ended: bool = True
    tied_seconds: float = 0.0
    own_seconds: float = 0.0
    floor_seconds: float = 0.0
    trace: tuple[PhaseRecord, ...] = ()
    effort: str = "normal"
    cut: bool = False
    used_up: bool = False
    scheduled_plan: ScheduledPlan | None = None
    searched_assignment: Assignment | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass
class Shared:
    """What searches of one graph, machine, optimizer and pins share under different memory limits.

    Args:
        spaces, models: enumerated and priced, by kind.
        known: the plans found.
    """

    spaces: dict[str, Space] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    known: list[ScheduledPlan] = field(default_factory=list)

    @cached_property
    def without_pins(self) -> Shared:
        """What the searches without the user's pins share."""
        return Shared()

    def with_in_flight(self, count: int) -> Shared:
        """What searches of the same graph with ``count`` microbatches in flight may take over: all but models and plans."""
        found = Shared()
        for kind, space in self.spaces.items():
            made = replace(space.graph.accumulation, in_flight=count)
            found.spaces[kind] = replace(space, graph=space.graph.accumulated(made))
        return found

    def space(self, kind: str, make: Callable[[], Space]) -> Space:
        """The space of a kind, made once."""
        if kind not in self.spaces:
            self.spaces[kind] = make()
        return self.spaces[kind]

    def model(self, kind: str, make: Callable[[], Model]) -> Model:
        """The model of a kind, made once."""
        if kind not in self.models:
            self.models[kind] = make()
        return self.models[kind]

    def remember(self, found: SearchResult) -> SearchResult:
        """Keeps the plan of a result for searches that follow, and returns the result."""
        if found.scheduled_plan is not None:
            self.known.append(found.scheduled_plan)
        return found
