"""The tune from start to end: the first rank plans, all ranks measure, and all choose the same plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.ending import put_off_interrupts
from autopar.errors import AutoparError, InfeasibleError, UsageError, VerificationError
from autopar.measurement.device import describe
from autopar.options import PlanOptions
from autopar.plan import Plan
from autopar.planning.session import open_session
from autopar.rows import MeasuredCandidate, MeasuredPlan
from autopar.runtime.module.compiling import execution_of, find_device, join_launched, start_process_group
from autopar.runtime.ranks.agreement import together
from autopar.runtime.ranks.groups import Team, team_of
from autopar.target import Target
from autopar.tuning.contestants import Builder
from autopar.tuning.racing import Race, Run, paired_ratio, rank_runs
from autopar.verify.launch import is_consequence
from autopar.verify.trials import Say, silent

ROUNDS = 20
"""Rounds by default, as many as ``benchmarks/step.py`` has: the median of paired ratios then moves by a percent from run to run."""


def tune_target(load: Callable[[], Target], options: PlanOptions, memory_limit: int, rounds: int, say: Say) -> tuple[Plan, bool]:
    """The fastest measured of the best distinct plans, the same on all ranks, and whether all rounds were done. Collective.

    Args:
        load: makes the target; called on each rank.
        options: ``candidates`` of them are measured.
        memory_limit: bytes per rank.
        say: told on the first rank what is being done.

    Raises:
        UsageError: wrong options, or another number of processes than ranks. InfeasibleError: no plan fits, as predicted or as measured.
        VerificationError: another rank ended. KeyboardInterrupt: Ctrl-C before every plan was measured once.
        Others as of ``plan`` and ``compile``. What one rank refuses, all do.
    """
    check_tuning(options, rounds)
    join_launched()
    start_process_group(options.meshes[0])
    device, team = find_device(None), team_of()
    say = say if team.rank == 0 else silent
    try:
        target = together(load, team)
        found = _found_by_first(lambda: _plan(target, options, memory_limit), team)
        with put_off_interrupts() as signals:
            race = Race([plan for _, plan in found], Builder(target, options.seed), team, memory_limit, signals, say, device)
            done = race.run(rounds)
    except RuntimeError as error:
        if not is_consequence(error):
            raise
        raise VerificationError("another rank ended while plans were measured", "see what that rank says, and run it again") from error
    return record_fastest([name for name, _ in found], race.runs, describe(device), target), done


def check_tuning(options: PlanOptions, rounds: int) -> None:
    """Raises UsageError: nothing to choose from, nothing to measure, or no device to run it on."""
    if not isinstance(options.candidates, int) or options.candidates < 2:
        raise UsageError(f"the number of candidates is {options.candidates!r}", "measure at least 2; autopar plan finds the best by prices")
    if not isinstance(rounds, int) or rounds < 1:
        raise UsageError(f"the number of rounds is {rounds!r}", "measure at least 1")
    if options.execute == "cuda_graph" and not torch.cuda.is_available():
        raise UsageError("there is no GPU to capture CUDA graphs on, so none can be measured", "use eager, graph or compiled")


def _plan(target: Target, options: PlanOptions, memory_limit: int) -> list[tuple[str, str]]:
    """The candidates, each with its name, as the text of its file. Raises KeyboardInterrupt: Ctrl-C ended the search."""
    session = open_session(target, options)
    plans, interrupted = session.plan_candidates(memory_limit, session.deadline)
    if interrupted:
        raise KeyboardInterrupt
    return [(name, plan.to_json()) for name, plan in plans]


def _found_by_first(make: Callable[[], list[tuple[str, str]]], team: Team) -> list[tuple[str, Plan]]:
    """What the first rank finds, on all ranks; what it raises, all raise. The others leave Ctrl-C to it. Collective."""
    box: list[Any] = [None]
    if team.rank == 0:
        try:
            box[0] = make()
        except (AutoparError, KeyboardInterrupt) as error:
            box[0] = error
        except Exception as error:
            box[0] = VerificationError(f"rank 0 failed while it planned: {type(error).__name__}: {error}", "see its trace")
            dist.broadcast_object_list(box, team.first, team.group)
            raise
    with put_off_interrupts():
        dist.broadcast_object_list(box, team.first, team.group)
    if isinstance(box[0], BaseException):
        raise box[0]
    return [(name, Plan.from_json(text, f"the plan of {name}")) for name, text in box[0]]


def record_fastest(names: Sequence[str], runs: Sequence[Run], device: str, target: Target) -> Plan:
    """The fastest plan with what was measured of it, and of the others.

    Args:
        names: of the candidates, in the order of ``runs``.
        device: what ranks computed on.

    Raises:
        InfeasibleError: none was timed.
    """
    order = rank_runs(runs)
    if not order:
        reasons = "; ".join(f"{name}: {run.reason}" for name, run in zip(names, runs, strict=True))
        raise InfeasibleError(f"no plan fits when it is run: {reasons}", "raise the memory limit, or plan for a lower one with --memory")
    best = runs[order[0]]
    untimed = [number for number in range(len(runs)) if number not in order]
    measured = MeasuredPlan(
        step_seconds=median(best.seconds), peak_memory_bytes_per_rank=best.peak_bytes, rounds=len(best.seconds), device=device,
        execution=execution_of(best.plan), candidates=tuple(_row(names[number], runs[number], best) for number in (*order, *untimed)),
    )  # fmt: skip
    plan = best.plan.model_copy(update={"measured": measured})
    plan.remember_loss(target.loss)
    return plan


def _row(name: str, run: Run, best: Run) -> MeasuredCandidate:
    predicted = run.plan.predicted
    return MeasuredCandidate(
        name=name, predicted_step_seconds=predicted.step_seconds, step_seconds=median(run.seconds) if run.seconds else None,
        ratio=paired_ratio(run, best) if run.seconds else None,
        predicted_peak_memory_bytes_per_rank=predicted.peak_memory_bytes_per_rank, peak_memory_bytes_per_rank=run.peak_bytes,
        reason=run.reason or None,
    )  # fmt: skip
