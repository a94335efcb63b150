"""Alternatives to one choice of a plan: each is fixed in turn, and the problem is solved once for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.effort import Budget, Meter
from autopar.errors import UsageError
from autopar.schedule import Assignment, Schedule, simulated
from autopar.schedule.limit_search import best_schedule
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.overlap import learn_weights
from autopar.search.memory.memory_repair import solve_fixed
from autopar.search.settings import CLOSE_GAP, LEAST_SOLVE_WORK, LONG_TRIES
from autopar.sharding import ShardingSpec, Strategy


@dataclass(frozen=True)
class Alternative:
    """One other choice and what it leads to.

    Args:
        words: the spec, or the specs of an operator.
        seconds: the objective, of all microbatches.
        peak: bytes per rank.
    """

    words: str
    seconds: float
    peak: int


def find_alternatives(
    schedule: Schedule, given: Assignment, name: str, *, optimizer: str, limit: int, pins: Pins, seconds: float, seed: int = 0
) -> tuple[Alternative, ...]:  # fmt: skip
    """The other choices for ``name`` that fit in ``limit`` bytes per rank, the fastest first.

    Args:
        schedule, given: the plan: its schedule and its assignment.
        name: the tensor of a graph input, or an operator.
        pins: choices that stay fixed, except a pin on ``name`` itself.
        seconds: work and time limit for all alternatives; those not reached are left out.

    Raises:
        UsageError: ``name`` is neither a graph input nor an operator.
    """
    graph, machine = schedule.graph, schedule.machine
    inputs = {tensor: spec for tensor, spec in pins.inputs.items() if tensor != name}
    model = build_model(Space(graph, machine, optimizer, replace(pins, inputs=inputs)))
    choices: Sequence[ShardingSpec | Strategy]
    if ("input", name) in model.node_number:
        offered = dict.fromkeys(model.nodes[model.node_number["input", name]].resting)
        choices = [spec for spec in offered if spec != given.inputs[name]]
    elif name in graph.op:
        choices = [one for one in dict.fromkeys(model.space.op_choices(graph.op[name]).strategies) if one != given.strategies[name]]
    else:
        raise UsageError(f"{name!r} is no parameter, buffer, input or operator", "name one of these: only they are chosen for themselves")
    problem, _ = model.problem(limit, learn_weights(schedule, simulated(schedule)))
    budget, found = Budget(Meter(seconds), seconds), dict[str, Alternative]()
    for number, choice in enumerate(choices):
        if budget.over:
            break
        fixed = Assignment({name: choice}, {}) if isinstance(choice, ShardingSpec) else Assignment({}, {name: choice})
        turn = budget.share(1 / (len(choices) - number)).at_least(LEAST_SOLVE_WORK)
        made = solve_fixed(model, problem, fixed, seed, turn, gap=CLOSE_GAP)
        if made is None:
            continue
        timed = best_schedule(
            graph, decode_assignment(model, made), machine, optimizer, limit, start=schedule.limits, tries=LONG_TRIES, budget=budget
        )
        if timed.memory.peak <= limit:
            found[_describe(choice)] = Alternative(_describe(choice), graph.microbatches * timed.seconds, timed.memory.peak)
    return tuple(sorted(found.values(), key=lambda one: (one.seconds, one.peak)))


def _describe(choice: ShardingSpec | Strategy) -> str:
    if isinstance(choice, ShardingSpec):
        return f"'{choice}'"
    reads, makes = (", ".join(f"'{spec}'" for spec in specs) for specs in (choice.inputs, choice.outputs))
    return f"{reads} -> {makes}"
