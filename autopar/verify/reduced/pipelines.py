"""``verify_pipeline_reduced``: each stage of a pipeline as ``verify_reduced`` runs a plan, stages that differ in names alone once.

What a stage receives is drawn, the same in each microbatch. That stages fit together is read from the plan: the timetable is legal, and
what one sends lies as the other takes it. Both are checked before (``replay_pipeline``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.pipeline.equal_stages import schedule_for, structure_of
from autopar.pipeline_plan import PipelinePlan
from autopar.runtime.module.compiling import check_torch
from autopar.runtime.pipelines.module import capture_pipeline
from autopar.runtime.weights.sharding import has_no_values
from autopar.schedule import Schedule
from autopar.seeds import check_seed
from autopar.target import Target
from autopar.verify.launch import run_ranks
from autopar.verify.reduced.verifying import RUN_NAME, ReducedVerification, verify_schedule
from autopar.verify.trials import Say, silent


@dataclass(frozen=True)
class ReducedPipelineVerification:
    """What was compared.

    Args:
        ranks: of the pipeline.
        stages: the stages that are alike, and what one of them gave.
    """

    ranks: int
    stages: tuple[tuple[tuple[int, ...], ReducedVerification], ...]

    @property
    def passed(self) -> bool:
        return all(found.passed for _, found in self.stages)

    @property
    def problems(self) -> tuple[str, ...]:
        """What did not pass, in words."""
        return tuple(f"stage {numbers[0]}: {problem}" for numbers, found in self.stages for problem in found.problems)

    def to_json(self) -> dict[str, Any]:
        """The keys of the command line's ``--reduced --json``."""
        rows = [{"stages": list(numbers), **found.to_json()} for numbers, found in self.stages]
        return {"passed": self.passed, "reduced": True, "ranks": self.ranks, "stages": rows}

    def __str__(self) -> str:
        lines = [f"{'passed' if self.passed else 'FAILED'} on {self.ranks} ranks, each stage by itself"]
        for numbers, found in self.stages:
            alike = f", and {', '.join(map(str, numbers[1:]))} alike" if len(numbers) > 1 else ""
            lines += [f"stage {numbers[0]}{alike}:", *(f"  {line}" for line in str(found).splitlines())]
        return "\n".join(lines)


def verify_pipeline_reduced(
    plan: PipelinePlan, target: Any, *, seed: int = 0, progress: Say = silent
) -> ReducedPipelineVerification:  # fmt: skip
    """Runs each stage's schedule at reduced sizes on simulated ranks, and its reduced graph on one device, and compares them.

    Args, raises: as of ``verify_reduced``.
    """
    check_seed(seed)
    check_torch(plan)
    parts = Target.of(target)

    def alone(_: int) -> ReducedPipelineVerification:
        progress("capturing the model")
        captured, replayed = capture_pipeline(parts.model, plan, parts.loss)
        given = {name: tensor for name, tensor in parts.model.named_buffers(remove_duplicate=False) if not has_no_values(tensor)}
        found = []
        for numbers in alike(replayed.schedules):
            say = _of_stage(progress, numbers[0])
            row, schedule = plan.stages[numbers[0]].plan, replayed.schedules[numbers[0]]
            found.append((numbers, verify_schedule(row, schedule, {**given, **captured.constants}, seed, say)))
        return ReducedPipelineVerification(plan.positions * replayed.schedules[0].machine.mesh.ranks, tuple(found))

    made: ReducedPipelineVerification = run_ranks(alone, 1, alone=True, name=RUN_NAME)[0]
    return made


def alike(schedules: Sequence[Schedule]) -> list[tuple[int, ...]]:
    """The numbers of the schedules, those together that differ in names alone."""
    found: dict[str, list[list[int]]] = {}
    for number, schedule in enumerate(schedules):
        groups = found.setdefault(structure_of(schedule.graph, {}), [])
        same = next((group for group in groups if _is_same(schedules[group[0]], schedule)), None)
        if same is None:
            groups.append([number])
        else:
            same.append(number)
    return sorted(tuple(group) for groups in found.values() for group in groups)


def _is_same(one: Schedule, other: Schedule) -> bool:
    renamed = schedule_for(other.graph, one)
    facts: list[Mapping[str, Any]] = [
        {"list": made.instructions, "operations": made.operations, "calls": made.collectives, "cuts": made.cuts, "values": made.values}
        for made in (renamed, other)
    ]
    return facts[0] == facts[1]


def _of_stage(progress: Say, number: int) -> Say:
    return lambda words: progress(f"stage {number}: {words}")
