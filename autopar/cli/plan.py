"""``autopar plan``: TARGET -> plan file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from autopar import report
from autopar.cli.clock import command_began
from autopar.cli.files import check_apart, check_writable, write_result
from autopar.cli.planning import (
    ComputeDtypeOption,
    CostModelOption,
    EffortOption,
    ExecuteOption,
    HardwareOption,
    InputsOption,
    ModeOption,
    OffloadOption,
    OptimizerOption,
    OrderOption,
    PinOption,
    RecomputeOption,
    SeedOption,
    open_pins,
    pareto_target,
    pipeline_target,
    plan_target,
    read_inputs,
    read_microbatches,
    read_mode,
    say_cut,
    say_hardware,
    staged_target,
)
from autopar.cli.terminal import columns, out
from autopar.effort import DEFAULT_EFFORT, check_effort
from autopar.errors import UsageError
from autopar.files import STANDARD
from autopar.options import AUTO, PlanOptions, read_execution, read_memory_limit, read_mesh, resolve_hardware
from autopar.pareto import Ladder, Pareto
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.planning.pipelines import is_pipeline

Found = TypeVar("Found", Plan, PipelinePlan, Ladder)


def plan(
    target: Annotated[str, typer.Argument(help="the model; zoo: alone lists the built-in ones")],
    mesh: Annotated[str | None, typer.Option(help="dp=2,tp=4, or sizes alone: 2x4")] = None,
    devices: Annotated[
        int | None, typer.Option(help="number of ranks: tries every mesh of one and two axes, and of three as long as there is time")
    ] = None,
    hardware: HardwareOption = None,
    mode: ModeOption = "train",
    memory: Annotated[str | None, typer.Option(help="limit per rank, e.g. 70GiB [default: the hardware's]")] = None,
    optimizer: OptimizerOption = "adamw",
    compute_dtype: ComputeDtypeOption = None,
    cost_model: CostModelOption = "roofline",
    recompute: RecomputeOption = "auto",
    offload: OffloadOption = "off",
    microbatches: Annotated[
        str | None, typer.Option(help="equal parts of the batch, gradients summed: a number, or auto [default: 1; of pipelines auto]")
    ] = None,
    execute: ExecuteOption = None,
    pin: PinOption = None,
    inputs: InputsOption = "global",
    effort: EffortOption = DEFAULT_EFFORT,
    time_limit: Annotated[float, typer.Option(help="seconds for the whole call, shared by the meshes tried")] = 60.0,
    seed: SeedOption = 0,
    stages: Annotated[
        str | None,
        typer.Option(
            help="with a mesh axis pp: auto, counts of layers (8,9,8,7), or each stage's first module but the first; "
            "with --devices: auto tries pipelines too"
        ),
    ] = None,
    order: OrderOption = "auto",
    pareto: Annotated[bool, typer.Option(help="the least step for a ladder of memory limits, from the least that does")] = False,
    rungs: Annotated[int | None, typer.Option(help="limits of that ladder [default: 8]", min=1)] = None,
    html: Annotated[Path | None, typer.Option(help="write a page too, as show --html does; with --pareto the ladder's")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the plan file to write; - for the standard output")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the plan's JSON instead of its table")] = False,
) -> None:
    if target == "zoo:":
        from autopar.cli.target import zoo_listing

        out(zoo_listing())
        return
    if output is not None:
        check_writable(output)
    if rungs is not None and not pareto:
        raise UsageError("--rungs are those of a ladder of memory limits", "add --pareto")
    if html is not None:
        check_writable(html)
        check_apart(html, output)
    if pareto and memory is not None:
        raise UsageError("--memory and --pareto exclude each other", "drop one of them")
    axes = read_mesh(mesh)
    if microbatches is None:
        microbatches = AUTO if stages is not None or is_pipeline(axes) else "1"
    options = PlanOptions(
        hardware=resolve_hardware(hardware), mesh=axes, devices=devices, mode=read_mode(mode), compute_dtype=compute_dtype,
        optimizer=optimizer, pins=open_pins(pin or []), inputs=read_inputs(inputs), cost_model=cost_model, recompute=recompute,
        offload=offload, microbatches=read_microbatches(microbatches), execute=read_execution(execute), order=order,
        effort=check_effort(effort), time_limit=time_limit, seed=seed, began=command_began(),
    )  # fmt: skip
    memory_limit = read_memory_limit(memory, options.hardware)
    say_hardware(hardware)
    if (stages is not None or is_pipeline(options.mesh)) and pareto:
        raise UsageError("ladders of memory limits are of plans without a pipeline so far", "drop --pareto, or the stages")
    if order != AUTO and not is_pipeline(options.mesh) and stages is None:
        raise UsageError("--order is of a pipeline's stages", "write --mesh pp=2,..., or --devices with --stages auto")
    if (stages is not None or is_pipeline(options.mesh)) and offload != "off":
        raise UsageError("stages of a pipeline keep their values on the device so far", "drop --offload, or the stages")
    if stages is not None and not is_pipeline(options.mesh) and (options.mesh is not None or stages != AUTO):
        raise UsageError("--stages cuts a model along the mesh axis pp", "write --mesh pp=2,..., or --devices with --stages auto")
    found: Plan | PipelinePlan | Pareto
    if is_pipeline(options.mesh):
        found = pipeline_target(target, options, memory_limit, stages)
    elif stages is not None:
        found = staged_target(target, options, memory_limit)
    else:
        found = pareto_target(target, options, rungs or 8) if pareto else plan_target(target, options, memory_limit)
    if isinstance(found, PipelinePlan):
        pipeline = found
        _write(pipeline, output, html, report.pipeline_html, lambda: report.pipeline_summary(pipeline, columns()), json=json)
        return
    say_cut(found.plans if isinstance(found, Pareto) else (found,))
    if isinstance(found, Pareto):
        ladder = found.ladder
        _write(ladder, output, html, report.ladder_html, lambda: report.ladder_summary(ladder, columns()), json=json)
    else:
        _write(found, output, html, report.html, lambda: report.summary(found, columns()), json=json)


def _write(
    found: Found, output: Path | None, html: Path | None, page: Callable[[Found], str], words: Callable[[], str], *, json: bool
) -> None:  # fmt: skip
    """The file first: it took longest. Then the page, and the table or the JSON where the standard output is free."""
    if output is not None:
        write_result(output, found.to_json())
    if html is not None:
        write_result(html, page(found))
    if STANDARD not in (output, html):
        out(found.to_json() if json else words(), end="" if json else "\n")
