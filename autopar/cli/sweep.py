"""``autopar sweep``: plans over numbers of devices, memory limits and settings of the model, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.clock import command_began
from autopar.cli.files import check_writable, write_result
from autopar.cli.planning import (
    ComputeDtypeOption,
    CostModelOption,
    EffortOption,
    ExecuteOption,
    HardwareOption,
    InputsOption,
    MicrobatchesOption,
    ModeOption,
    OffloadOption,
    OptimizerOption,
    PinOption,
    RecomputeOption,
    SeedOption,
    open_pins,
    read_inputs,
    read_microbatches,
    read_mode,
    say_cut,
    say_hardware,
    sweep_target,
)
from autopar.cli.target import read_value
from autopar.cli.terminal import note, out
from autopar.effort import DEFAULT_EFFORT, check_effort
from autopar.errors import UsageError
from autopar.files import STANDARD
from autopar.options import PlanOptions, factorizations, read_execution, read_memory_limit, resolve_hardware
from autopar.planning.grid import Grid, combinations
from autopar.sweeping import Point, Sweep

FORMS: Mapping[str, Callable[[Sweep], str]] = {".json": Sweep.to_json, ".csv": Sweep.to_csv, ".svg": Sweep.to_svg}
"""The form of the written table, by the file's suffix."""


def sweep(
    target: Annotated[str, typer.Argument(help="the model")],
    devices: Annotated[str, typer.Option(help="numbers of ranks, e.g. 8,16,32; each tries meshes as plan does")],
    vary: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE,VALUE: a setting of the model, e.g. batch=8,16 or seq=1024,2048; may be repeated")
    ] = None,
    hardware: HardwareOption = None,
    mode: ModeOption = "train",
    memory: Annotated[str | None, typer.Option(help="limits per rank, e.g. 40GiB,70GiB [default: the hardware's]")] = None,
    optimizer: OptimizerOption = "adamw",
    compute_dtype: ComputeDtypeOption = None,
    cost_model: CostModelOption = "roofline",
    recompute: RecomputeOption = "auto",
    offload: OffloadOption = "off",
    microbatches: MicrobatchesOption = "1",
    execute: ExecuteOption = None,
    pin: PinOption = None,
    inputs: InputsOption = "global",
    effort: EffortOption = DEFAULT_EFFORT,
    time_limit: Annotated[float, typer.Option(help="seconds for the whole call, shared by all that is planned")] = 60.0,
    seed: SeedOption = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the table as FILE.csv or JSON, or drawn as FILE.svg")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    if output is not None:
        check_writable(output)
        if output != STANDARD and output.suffix not in FORMS:
            raise UsageError(f"there is no form of the table for {output.name}", f"name it as one of {', '.join(FORMS)}")
    machine = resolve_hardware(hardware)
    memory_limits = [read_memory_limit(word, machine) for word in (memory.split(",") if memory is not None else [None])]
    grid = Grid(combinations(_varied(vary or [])), tuple(dict.fromkeys(_counts(devices))), tuple(dict.fromkeys(memory_limits)))
    options = PlanOptions(
        hardware=machine, devices=grid.devices[0], mode=read_mode(mode), compute_dtype=compute_dtype, optimizer=optimizer,
        pins=open_pins(pin or []), inputs=read_inputs(inputs), cost_model=cost_model, recompute=recompute, offload=offload,
        microbatches=read_microbatches(microbatches), execute=read_execution(execute), effort=check_effort(effort),
        time_limit=time_limit, seed=seed, began=command_began(),
    )  # fmt: skip
    say_hardware(hardware)
    found = sweep_target(target, options, grid, _say)
    say_cut(point.plan for point in found.points if point.plan is not None)
    if output is not None:
        write_result(output, FORMS.get(output.suffix, Sweep.to_json)(found))
    if output != STANDARD:
        out(found.to_json() if json else str(found), end="" if json else "\n")
    if not any(point.plan for point in found.points):
        raise typer.Exit(next(point.error.exit_status for point in found.points if point.error is not None))


def _say(point: Point) -> None:
    """Why there is no plan for a point, at once."""
    if point.error is not None:
        settings = "".join(f"{key}={value}, " for key, value in point.settings.items())
        note(f"{settings}{point.devices} devices: {point.error.message}")


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"cannot read the numbers of devices {text!r}", "write whole numbers from 1 on, e.g. --devices 8,16,32")
    for count in counts:
        list(factorizations(count))
    return list(dict.fromkeys(counts))


def _varied(words: list[str]) -> dict[str, list[Any]]:
    """Values by setting, from ``KEY=VALUE,VALUE`` texts."""
    found: dict[str, list[Any]] = {}
    for text in words:
        key, equals, values = text.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not equals or not key.strip() or not all(listed):
            raise UsageError(f"cannot read --vary {text!r}", "write KEY=VALUE,VALUE, e.g. --vary batch=8,16,32")
        if key.strip() in found:
            raise UsageError(f"{key.strip()} is varied twice", "give all values of a setting at once")
        found[key.strip()] = [read_value(value) for value in dict.fromkeys(listed)]
    return found
