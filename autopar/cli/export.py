"""``autopar export``: each rank's program and weights in a folder, to be run without the model's code."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.files import read_pipeline, read_plan
from autopar.seeds import check_seed


def export(
    plan: Annotated[Path, typer.Argument(help="a file written by autopar plan -o")],
    target: Annotated[str, typer.Argument(help="the model it was made for")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the folder to write, new or empty")],
    weights: Annotated[list[Path] | None, typer.Option(help="a safetensors file of the model's weights; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="of a built-in model's weights, where no file has them")] = 0,
) -> None:
    read = read_pipeline(plan) or read_plan(plan)
    import torch

    from autopar.cli.target import load_target
    from autopar.runtime import export_program

    torch.manual_seed(check_seed(seed))
    found = load_target(target, read.model.mode, device="meta" if weights else "cpu")
    export_program(read, found.model, output, loss=found.loss, weights=weights or ())
    print(f"wrote {output}: autopar.load_program({str(output)!r}) runs it on {math.prod(read.mesh.values())} ranks", file=sys.stderr)
