"""``autopar tune``: TARGET -> the fastest measured plan, under torchrun."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import check_writable, write_result
from autopar.cli.planning import (
    ComputeDtypeOption,
    EffortOption,
    ExecuteOption,
    HardwareOption,
    MicrobatchesOption,
    ModeOption,
    OffloadOption,
    OptimizerOption,
    PinOption,
    RecomputeOption,
    SeedOption,
    open_pins,
    progress,
    read_microbatches,
    read_mode,
    say_cut,
    say_hardware,
    words_beside,
)
from autopar.cli.terminal import columns, note, out
from autopar.effort import DEFAULT_EFFORT, check_effort
from autopar.files import STANDARD
from autopar.options import PlanOptions, read_execution, read_memory_limit, read_mesh, resolve_hardware, user_errors
from autopar.plan import Plan
from autopar.report.tables import candidates as candidates_table


def tune(
    target: Annotated[str, typer.Argument(help="the model, as for autopar plan")],
    mesh: Annotated[str | None, typer.Option(help="dp=2,tp=4, or sizes alone: 2x4; as many ranks as torchrun started")] = None,
    devices: Annotated[int | None, typer.Option(help="number of ranks: tries several meshes, as autopar plan does")] = None,
    candidates: Annotated[int, typer.Option(help="distinct plans to measure, plans by hand among them")] = 5,
    rounds: Annotated[int, typer.Option(help="timed steps of each, one a round")] = 20,
    hardware: HardwareOption = None,
    mode: ModeOption = "train",
    memory: Annotated[str | None, typer.Option(help="limit per rank, e.g. 70GiB [default: the hardware's]")] = None,
    optimizer: OptimizerOption = "adamw",
    compute_dtype: ComputeDtypeOption = None,
    recompute: RecomputeOption = "auto",
    offload: OffloadOption = "off",
    microbatches: MicrobatchesOption = "1",
    execute: ExecuteOption = None,
    pin: PinOption = None,
    effort: EffortOption = DEFAULT_EFFORT,
    time_limit: Annotated[float, typer.Option(help="seconds for the search; measuring comes on top")] = 60.0,
    seed: SeedOption = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the plan file to write; - for the standard output")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the plan's JSON instead of the table of candidates")] = False,
) -> None:
    if output is not None:
        check_writable(output)
    options = PlanOptions(
        hardware=resolve_hardware(hardware), mesh=read_mesh(mesh), devices=devices, mode=read_mode(mode), compute_dtype=compute_dtype,
        optimizer=optimizer, pins=open_pins(pin or []), recompute=recompute, offload=offload, microbatches=read_microbatches(microbatches),
        execute=read_execution(execute), effort=check_effort(effort), time_limit=time_limit, seed=seed, name=target, candidates=candidates,
    )  # fmt: skip
    memory_limit = read_memory_limit(memory, options.hardware)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        say_hardware(hardware)
    plan, done = _measure(target, options, memory_limit, rounds, first)
    if not first:
        return
    say_cut((plan,))
    if not done and plan.measured is not None:
        note(f"interrupted: the fastest of the first {plan.measured.rounds} rounds of {rounds} is kept")
    if output is not None:
        write_result(output, plan.to_json())
    if output != STANDARD:
        out(plan.to_json() if json else "\n".join(candidates_table(plan).lines(columns())), end="" if json else "\n")


def _measure(target: str, options: PlanOptions, memory_limit: int, rounds: int, first: bool) -> tuple[Plan, bool]:
    import torch

    from autopar.cli.target import load_target
    from autopar.tuning import tune_target

    torch.manual_seed(options.seed)  # models and inputs that draw their values are then equal on all ranks
    with words_beside() as line, user_errors():
        line.on &= first
        if first:
            options = replace(options, progress=progress(line))
        return tune_target(lambda: load_target(target, options.mode), options, memory_limit, rounds, line.elapsed)
