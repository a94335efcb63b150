"""The exact simulation of a plan: when each action begins and ends, what is in flight, and the bytes of each device over time.

An operation runs alone on its device and is not interrupted. A transfer takes its seconds and holds nobody. What a microbatch holds is kept
from the begin of its F to the end of its last operation. The step ends with the last operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels import run_orders
from .chain import KINDS, coded, make_chain, make_clock
from .problem import PipelineProblem
from .timetable import Action, PipelinePlan, check_legal, numbered


@dataclass(frozen=True)
class Simulation:
    """A plan over time, in seconds and bytes.

    ``spans``: for each device its actions in order with (begin, end). ``busy``: seconds at work of each device. ``in_flight``: the most
    microbatches that each chunk holds. ``levels``: for each device the moments at which its bytes change, with the bytes from then on;
    ``peak_bytes`` their most.
    """

    step: float
    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    busy: tuple[float, ...]
    in_flight: tuple[int, ...]
    levels: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        return tuple(max(level for _, level in device) for device in self.levels)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the step in which each device waits."""
        return tuple(self.step - busy for busy in self.busy)


def simulate(problem: PipelineProblem, plan: PipelinePlan) -> Simulation:
    """Run a plan through time. Raises ProblemError when it is not legal (``check_legal``)."""
    check_legal(problem, plan)
    costs, clock = plan.chunk_costs(problem), make_clock(problem)
    chain = make_chain(problem, costs)
    step = run_orders(chain, coded(plan.orders), clock)
    spans, busy, levels, most = [], [], [], [0] * problem.total_chunks
    for device, order in enumerate(plan.orders):
        line = []
        level = sum(cost.rest for cost, place in zip(costs, problem.places, strict=True) if place == device)
        held, flying = [(0.0, level)], [0] * problem.total_chunks
        for action in numbered(order):
            code = 3 * action.chunk + KINDS.index(action.kind)
            end = float(clock.ends[code * problem.microbatches + action.microbatch])
            begin = end - float(chain.seconds[code])
            line.append((action, begin, end))
            if action.kind == "F" and problem.training:
                level += costs[action.chunk].held
                held.append((begin, level))
                flying[action.chunk] += 1
                most[action.chunk] = max(most[action.chunk], flying[action.chunk])
            if action.kind == problem.kinds[-1] and problem.training:
                level -= costs[action.chunk].held
                held.append((end, level))
                flying[action.chunk] -= 1
        spans.append(tuple(line))
        busy.append(sum(end - begin for _, begin, end in line))
        levels.append(tuple(held))
    return Simulation(step, tuple(spans), tuple(busy), tuple(most), tuple(levels))
