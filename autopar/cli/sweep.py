"""``autopar sweep``: plans for several numbers of devices, side by side."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import check_writable, write_result
from autopar.cli.planning import OPTIMIZER_HELP, check_options, open_pins, plan_target, read_mode
from autopar.cli.terminal import note, out
from autopar.errors import InfeasibleError, TimeLimitError, UsageError
from autopar.files import STANDARD
from autopar.options import DEFAULT_HARDWARE
from autopar.plan import Plan
from autopar.report import curve, units
from autopar.report.tables import Table

FORMS = {".json": None, ".csv": curve.table, ".svg": curve.drawing}
"""What the table is written as, by the file's suffix."""


def sweep(
    target: Annotated[str, typer.Argument(help="the model")],
    devices: Annotated[str, typer.Option(help="numbers of ranks, e.g. 8,16,32; each tries every mesh of one and two axes")],
    hardware: Annotated[str | None, typer.Option(help=f"a built-in name or a TOML file [default: {DEFAULT_HARDWARE}]")] = None,
    mode: Annotated[str, typer.Option(help="train or inference")] = "train",
    memory: Annotated[str | None, typer.Option(help="limit per rank, e.g. 70GiB [default: the hardware's]")] = None,
    optimizer: Annotated[str, typer.Option(help=OPTIMIZER_HELP)] = "adamw",
    cost_model: Annotated[str, typer.Option(help="roofline, or communication for collectives alone")] = "roofline",
    recompute: Annotated[str, typer.Option(help="auto: run operators again in backward where memory needs it; off")] = "auto",
    pin: Annotated[list[str] | None, typer.Option(help="NAME=SPEC; may be repeated")] = None,
    time_limit: Annotated[float, typer.Option(help="seconds for the whole call, shared by the meshes tried")] = 60.0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same plan")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the table as FILE.csv or JSON, or drawn as FILE.svg")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    from autopar.cli.target import capture_target

    counts = _counts(devices)
    chosen = read_mode(mode)
    options = {
        "hardware": hardware, "memory": memory, "optimizer": optimizer, "cost_model": cost_model, "recompute": recompute,
        "constraints": open_pins(pin or []), "time_limit": time_limit, "seed": seed,
    }  # fmt: skip
    if output is not None:
        check_writable(output)
        if output != STANDARD and output.suffix not in FORMS:
            raise UsageError(f"there is no form of the table for {output.name}", f"name it as one of {', '.join(FORMS)}")
    check_options(hardware=hardware, memory=memory)
    graph = capture_target(target, chosen)
    found: dict[int, Plan | str] = {}
    for count in counts:
        try:
            found[count] = plan_target(target, mode=chosen, graph=graph, devices=count, **options)
        except (InfeasibleError, TimeLimitError) as error:
            found[count] = error.message
            note(f"{count} devices: {error.message}")
    rows = [_row(count, plan) for count, plan in found.items()]
    text = json_format.dumps({"target": target, "mode": chosen, "rows": rows}, indent=1)
    if output is not None:
        written = FORMS.get(output.suffix)
        write_result(output, written(rows) if written else text + "\n")
    if output != STANDARD:
        out(text if json else "\n".join(_table(found).lines()))
    if not any(isinstance(plan, Plan) for plan in found.values()):
        raise typer.Exit(InfeasibleError.exit_status)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"cannot read the numbers of devices {text!r}", "write whole numbers from 1 on, e.g. --devices 8,16,32")
    return list(dict.fromkeys(counts))


def _row(devices: int, plan: Plan | str) -> dict[str, object]:
    if isinstance(plan, str):
        return {"devices": devices, "feasible": False, "message": plan}
    return {
        "devices": devices, "feasible": True, "mesh": plan.mesh, "objective_seconds": plan.objective.seconds, "gap": plan.objective.gap,
        "step_seconds": plan.predicted.step_seconds, "peak_memory_bytes_per_rank": plan.predicted.peak_memory_bytes_per_rank,
        "received_bytes_per_rank": plan.predicted.received_bytes_per_rank,
    }  # fmt: skip


def _table(found: dict[int, Plan | str]) -> Table:
    first = next(((count, plan) for count, plan in found.items() if isinstance(plan, Plan)), None)
    rows = []
    for count, plan in found.items():
        if isinstance(plan, str) or first is None:
            rows.append((str(count), "-", "-", "-", "-", "-", "does not fit"))
            continue
        base, base_plan = first
        step = plan.predicted.step_seconds
        scaling = base_plan.predicted.step_seconds * base / (step * count) if step > 0 else 1.0
        rows.append(
            (
                str(count),
                ",".join(f"{name}={size}" for name, size in plan.mesh.items()),
                units.seconds(step),
                units.percent(plan.objective.gap),
                f"{100 * scaling:.0f} %",
                units.size(plan.predicted.peak_memory_bytes_per_rank),
                plan.objective.status,
            )
        )
    header = ("devices", "mesh", "step", "gap", "efficiency", "memory", "status")
    return Table(header, tuple(rows), frozenset({"devices", "step", "gap", "efficiency", "memory"}))
