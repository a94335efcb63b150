"""``autopar verify``: a plan on local ranks against the single-device model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from autopar.cli.files import read_pipeline, read_plan
from autopar.cli.terminal import Line, note, out, printing_aside
from autopar.errors import UsageError, VerificationError
from autopar.seeds import check_seed

if TYPE_CHECKING:
    from autopar.pipeline_plan import PipelinePlan
    from autopar.plan import Plan
    from autopar.verify import PipelineVerification, ReducedPipelineVerification, ReducedVerification, Verification


STEPS = 10
"""Steps of a training plan, unless the user says another number."""


def verify(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    target: Annotated[str, typer.Argument(help="the model it was made for")],
    json_: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
    backend: Annotated[str, typer.Option(help="gloo: one process a rank; simulate: all ranks in one process")] = "gloo",
    steps: Annotated[int, typer.Option(help="AdamW steps of a training plan", min=1)] = STEPS,
    seed: Annotated[int, typer.Option(help="of weights and inputs that have no values of their own")] = 0,
    reduced: Annotated[bool, typer.Option("--reduced", help="a step of all ranks in one process, at reduced sizes, in float64")] = False,
) -> None:
    pipeline = read_pipeline(plan)
    read = read_plan(plan) if pipeline is None else None
    if pipeline is not None and backend != "gloo":
        raise UsageError("a pipeline is verified on real ranks, or stage by stage with --reduced", "leave --backend out")
    if reduced and (backend != "gloo" or steps != STEPS):
        raise UsageError("--reduced runs one step of all ranks in one process", "leave --backend and --steps out")
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(check_seed(seed))
    with printing_aside(), Line() as line:
        line.say(f"loading {target}", now=True)
        found: Verification | PipelineVerification | ReducedVerification | ReducedPipelineVerification
        if read is not None:
            found = _verified(read, target, backend, steps, seed, line, reduced)
        elif pipeline is not None:
            found = _verified_pipeline(pipeline, target, steps, seed, line, reduced)
    out(json.dumps(found.to_json(), allow_nan=False) if json_ else found)
    if not found.passed:
        first, *more = found.problems
        rest = f", and {len(more)} more" if more else ""
        hint = f"run autopar check {plan} {target}: it says whether the plan was edited"
        raise VerificationError(f"{plan} failed on {found.ranks} ranks: {first}{rest}", hint)
    note(f"{plan} verified on {found.ranks} ranks")


def _verified_pipeline(
    plan: PipelinePlan, target: str, steps: int, seed: int, line: Line, reduced: bool
) -> PipelineVerification | ReducedPipelineVerification:  # fmt: skip
    from autopar.cli.target import load_target
    from autopar.verify import verify_pipeline, verify_pipeline_reduced

    if reduced:
        return verify_pipeline_reduced(plan, load_target(target, "train", device="meta"), seed=seed, progress=line.elapsed)
    return verify_pipeline(plan, load_target(target, "train"), steps=steps, seed=seed, progress=line.elapsed)


def _verified(
    plan: Plan, target: str, backend: str, steps: int, seed: int, line: Line, reduced: bool
) -> Verification | ReducedVerification:  # fmt: skip
    """A reduced run needs no memory for the model: a built-in one is made without."""
    from autopar.cli.target import load_target
    from autopar.verify import verify, verify_reduced

    if reduced:
        return verify_reduced(plan, load_target(target, plan.model.mode, device="meta"), seed=seed, progress=line.elapsed)
    model = load_target(target, plan.model.mode)
    return verify(plan, model, backend=cast(Any, backend), steps=steps, seed=seed, progress=line.elapsed)
