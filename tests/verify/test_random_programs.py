"""Programs drawn at random, planned where every split pays: results are those of one device, and memory is what was predicted."""

from __future__ import annotations

import os

import pytest
import torch

import autopar
from autopar.check import check
from autopar.recording.replaying import replay
from autopar.runtime.execution.binding import bind
from autopar.runtime.execution.footprint import spared_bytes
from autopar.runtime.ranks.backends import LoneRank
from autopar.runtime.ranks.collectives import Observed
from autopar.runtime.steps.accumulation import run_step
from autopar.runtime.steps.simulation import entering, scatter_all
from autopar.schedule import Schedule
from autopar.schedule.storages import states_bytes
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.live_memory import LiveMemory
from benchmarks.models import stressed
from tests.verify.random_programs import Program

PROGRAMS = int(os.environ.get("AUTOPAR_PROGRAMS", "100"))
"""Programs that are drawn, planned and run: three CPU seconds each. ``AUTOPAR_PROGRAMS=500`` takes half an hour."""
QUICK = 20
"""Of them run with the fast tests."""
OPTIMIZER = "adamw"


@pytest.mark.parametrize("seed", [seed if seed < QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(PROGRAMS)])
def test_a_program_drawn_at_random_is_that_of_one_device(seed: int) -> None:
    program = Program(seed)
    graph = autopar.capture(program, program.args, mode="train")
    plan = autopar.plan(graph, mesh=program.mesh, hardware=stressed(), optimizer=OPTIMIZER)
    found = verify(plan, Target(program, program.args), backend="simulate", steps=1)
    assert found.passed, f"{found.problems}\n{program}"
    assert check(plan) == (), f"{check(plan)}\n{program}"
    measured, spared = measure_first_rank(replay(plan, graph))
    assert measured == found.predicted_bytes - spared, str(program)


def measure_first_rank(schedule: Schedule) -> tuple[int, int]:
    """The peak of the rank that holds the largest parts, in bytes, and by how much that is less than planned, as operators ran.

    Ranks in one process tell their mean alone, which hides what is not counted where parts are unequal.
    """
    graph, mesh = schedule.graph, schedule.machine.mesh
    values = {item.tensor: _fill(graph.tensors[item.tensor].shape, graph.tensors[item.tensor].dtype) for item in graph.inputs}
    scattered = {name: [[parts[0].clone()] for parts in scatter_all(schedule, name, whole)] for name, whole in values.items()}
    executable, observed = bind(schedule, LoneRank(mesh), torch.device("cpu"), dropout=False), list[Observed]()
    with LiveMemory(part for parts in scattered.values() for (part,) in parts) as memory:
        run_step(executable, range(1), lambda number: entering(scattered, number, 1), observed)
    return memory.peak + states_bytes(schedule, OPTIMIZER), spared_bytes(schedule, OPTIMIZER, observed)


def _fill(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Ones, and zeros of what may be an index."""
    made = torch.zeros(shape, dtype=getattr(torch, dtype))
    return made + 1 if made.is_floating_point() else made


def test_the_same_seed_gives_the_same_program() -> None:
    one, other, third = Program(3), Program(3), Program(4)
    assert str(one) == str(other) != str(third)
    assert torch.equal(one(*one.args), other(*other.args))
