"""``autopar solve``: choices for the nodes of a problem file, with a proved bound. The time limit counts from the start of the process."""

from __future__ import annotations

import json as json_format
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

INFEASIBLE, USAGE, BAD_FILE, NO_ANSWER = 1, 2, 3, 4
BETWEEN_LINES = 0.2
"""Seconds between two updates of the progress line."""


def solve(
    problem: Annotated[Path, typer.Argument(help="a problem file in JSON, plain or gzipped")],
    time_limit: Annotated[float, typer.Option(help="seconds from the start of the process, reading included")] = 60.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write the solution to this file")] = None,
    gap: Annotated[float, typer.Option(help="stop when (cost - bound) / cost is proved to be at most this")] = 1e-6,
    seed: Annotated[int, typer.Option(help="the same seed gives the same answer where the time limit does not bind")] = 0,
    method: Annotated[str, typer.Option(help="auto, messages, highs, pulp-highs or pulp-cbc")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="print the solution file's contents instead of a table")] = False,
) -> None:
    if not time_limit > 0:
        _stop("--time-limit must be more than 0", "give seconds, such as --time-limit 60", USAGE)
    if not gap >= 0:
        _stop("--gap must be 0 or more", "give a share, such as --gap 0.01", USAGE)
    import solvers
    from autopar.cli.planning import say_first_use

    if method not in solvers.METHODS:
        _stop(f"there is no method {method!r}", f"one of {', '.join(solvers.METHODS)}", USAGE)
    if output is not None and not output.absolute().parent.is_dir():
        _stop(f"cannot write {output}: its folder does not exist", "make the folder first, or choose another path", USAGE)
    say_first_use()
    try:
        read = solvers.Problem.load(problem)
    except OSError as error:
        _stop(f"cannot read {problem}: {error.strerror or error}", "give the path of a problem file", BAD_FILE)
    except solvers.ProblemError as error:
        what, hint = str(error).split("\nhint: ", 1)
        _stop(what, hint, BAD_FILE)
    left = max(0.1, time_limit - _process_seconds())
    found = solvers.solve(read, time_limit=left, gap=gap, method=method, seed=seed, progress=_progress_line())
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if found.choices is None:
        _report_none(found)
    report = _report(found)
    if output is not None:
        _write(output, report)
    print(json_format.dumps(report) if json else _table(read.name or problem.name, report))


def _report(found: Any) -> dict[str, Any]:
    """The solution file, schema ``autopar.solution/1``."""
    return {
        "schema": "autopar.solution/1",
        "solution": found.choices.tolist(),
        "objective": found.objective,
        "bound": found.bound,
        "gap": found.gap,
        "status": found.status.value,
        "solve_seconds": round(_process_seconds(), 3),
        "peak_usage": found.peak_usage,
    }


def _table(name: str, report: dict[str, Any]) -> str:
    rows = [("problem", name)] + [(key, report[key]) for key in ("status", "objective", "bound", "gap", "peak_usage", "solve_seconds")]
    return "\n".join(f"{key:<14}{value:.3g}" if key == "gap" else f"{key:<14}{value}" for key, value in rows)


def _report_none(found: Any) -> NoReturn:
    known = found.smallest_limit
    hint = "raise usage_limit in the file" if known is None else f"with usage_limit {known} it is feasible"
    if found.status.value == "infeasible":
        _stop(f"infeasible: {found.message}", hint, INFEASIBLE)
    _stop(found.message, f"give more time by --time-limit; {hint}" if known is not None else "give more time by --time-limit", NO_ANSWER)


def _stop(what: str, hint: str, status: int) -> NoReturn:
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    raise typer.Exit(status)


def _write(path: Path, report: dict[str, Any]) -> None:
    """The whole file or none of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json_format.dumps(report) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        _stop(f"cannot write {path}: {error.strerror or error}", "choose a path in a folder that can be written", BAD_FILE)


def _progress_line() -> Any:
    """A line on stderr that follows the search, on a terminal only."""
    if not sys.stderr.isatty():
        return None
    shown = 0.0

    def show(best: int | None, bound: float, gap: float, seconds: float) -> None:
        nonlocal shown
        if time.monotonic() - shown >= BETWEEN_LINES:
            shown = time.monotonic()
            cost = "none yet" if best is None else f"{best}, gap {100 * gap:.3f} %"
            print(f"\r\033[K{seconds:7.1f} s  bound {bound}  best {cost}", end="", file=sys.stderr, flush=True)

    return show


def _process_seconds() -> float:
    """Seconds since this process started; where the system does not say, the CPU time it has used."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, AttributeError, IndexError):
        return time.process_time()
