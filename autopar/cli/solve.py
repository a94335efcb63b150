"""``autopar solve``: choices for the nodes of a problem file, or a pipeline for its layers, with a proved bound.

The time limit counts from the start of the process.
"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.clock import command_seconds
from autopar.cli.files import check_writable, write_result
from autopar.cli.pipelines import solve_pipeline_file
from autopar.cli.terminal import Line, out
from autopar.errors import FileError, InfeasibleError, TimeLimitError, UsageError
from autopar.files import STANDARD

if TYPE_CHECKING:
    from autopar.solvers import Problem
    from autopar.solvers.pipeline import PipelineProblem


def solve(
    problem: Annotated[Path, typer.Argument(help="a problem file in JSON, plain or gzipped")],
    time_limit: Annotated[float, typer.Option(help="seconds from the start of the process, reading included")] = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the solution to this file")] = None,
    gap: Annotated[float, typer.Option(help="stop when (cost - bound) / cost is proved to be at most this")] = 1e-6,
    seed: Annotated[int, typer.Option(help="the same seed gives the same answer where the time limit does not bind")] = 0,
    method: Annotated[str, typer.Option(help="auto, messages, highs or pulp-highs")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="print the solution file's contents instead of a table")] = False,
) -> None:
    if not time_limit > 0:
        raise UsageError("--time-limit must be more than 0", "give seconds, such as --time-limit 60")
    if not gap >= 0:
        raise UsageError("--gap must be 0 or more", "give a share, such as --gap 0.01")
    if seed < 0:
        raise UsageError("--seed must be 0 or more", "give a whole number, such as --seed 1")
    from autopar import solvers
    from autopar.cli.planning import say_slow_solver

    if method not in solvers.METHODS:
        raise UsageError(f"there is no method {method!r}", f"one of {', '.join(solvers.METHODS)}")
    if output is not None:
        check_writable(output, problem)
    say_slow_solver()
    read = _read(problem)
    left = max(0.1, time_limit - command_seconds())
    if not isinstance(read, solvers.Problem):
        if method != "auto":
            raise UsageError(f"{problem} is a pipeline, which method {method} does not solve", "leave --method out")
        solve_pipeline_file(read, read.name or problem.name, time_limit=left, gap=gap, seed=seed, output=output, json=json)
        return
    with Line() as line:
        found = solvers.solve(read, time_limit=left, gap=gap, method=method, seed=seed, progress=_progress(line))
    if found.choices is None:
        raise _none(found)
    report = _report(found)
    if output is not None:
        write_result(output, json_format.dumps(report) + "\n")
    if output != STANDARD:
        out(json_format.dumps(report) if json else _table(read.name or problem.name, report))


def _read(path: Path) -> Problem | PipelineProblem:
    """The problem in a file, of either schema. Raises FileError, which names the file."""
    from autopar import solvers
    from autopar.solvers.documents import read_document
    from autopar.solvers.pipeline.file_format import from_document, is_pipeline

    try:
        document = read_document(path)
        return from_document(document) if is_pipeline(document) else solvers.Problem.from_document(document)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}", "give the path of a problem file") from error
    except solvers.ProblemError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def _report(found: Any) -> dict[str, Any]:
    """The solution file, schema ``autopar.solution/1``."""
    return {
        "schema": "autopar.solution/1",
        "solution": found.choices.tolist(),
        "objective": found.objective,
        "bound": found.bound,
        "gap": found.gap,
        "status": found.status.value,
        "solve_seconds": round(command_seconds(), 3),
        "peak_usage": found.peak_usage,
    }


def _table(name: str, report: dict[str, Any]) -> str:
    rows = [("problem", name)] + [(key, report[key]) for key in ("status", "objective", "bound", "gap", "peak_usage", "solve_seconds")]
    return "\n".join(f"{key:<14}{value:.3g}" if key == "gap" else f"{key:<14}{value}" for key, value in rows)


def _none(found: Any) -> InfeasibleError | TimeLimitError:
    known = found.smallest_limit
    hint = "raise usage_limit in the file" if known is None else f"with usage_limit {known} it is feasible"
    if found.status.value == "infeasible":
        return InfeasibleError(f"infeasible: {found.message}", hint)
    return TimeLimitError(found.message, "give more time by --time-limit" + (f"; {hint}" if known is not None else ""))


def _progress(line: Line) -> Any:
    """Shows the solver's progress on the line."""

    def show(best: int | None, bound: float, gap: float, seconds: float) -> None:
        cost = "none yet" if best is None else f"{best}, gap {100 * gap:.3f} %"
        line.say(f"{seconds:7.1f} s  bound {bound}  best {cost}")

    return show
