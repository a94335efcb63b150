"""Pipeline files for ``autopar solve``: the answer as a file, and as a table of stages."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.files import write_result
from autopar.cli.terminal import Line, note, out
from autopar.errors import AutoparError, InfeasibleError, TimeLimitError
from autopar.files import STANDARD

if TYPE_CHECKING:
    from autopar.solvers.pipeline import PipelineProblem, PipelineSolution


def solve_pipeline_file(
    problem: PipelineProblem, name: str, *, time_limit: float, gap: float, seed: int, output: Path | None, json: bool
) -> None:
    """Solves, writes and prints. Raises InfeasibleError where no pipeline fits, TimeLimitError where none was found in time."""
    from autopar.solvers.pipeline import solve_pipeline
    from autopar.solvers.pipeline.file_format import to_document

    with Line() as line:
        found = solve_pipeline(problem, time_limit=time_limit, gap=gap, seed=seed, progress=_progress(line))
    if found.plan is None:
        raise _none(found)
    if found.message:
        note(f"note: {found.message}")
    report = json_format.dumps(to_document(found))
    if output is not None:
        write_result(output, report + "\n")
    if output != STANDARD:
        out(report if json else _table(problem, found, name))


def _table(problem: PipelineProblem, found: PipelineSolution, name: str) -> str:
    """The figures of the answer, then a row for each chunk: device, layers, seconds at work and idle, bytes, the order of its device."""
    from autopar.solvers.pipeline import simulate

    assert found.plan is not None
    times = simulate(problem, found.plan)
    rows = [("problem", name), ("status", found.status.value), ("step", f"{found.step:g}"), ("bound", f"{found.bound:g}")]
    lines = [f"{key:<8}{value}" for key, value in [*rows, ("gap", f"{found.gap:.3g}")]]
    lines.append(f"\n{'chunk':>5}{'device':>8}{'layers':>12}{'busy':>12}{'idle':>12}{'in flight':>11}{'peak bytes':>14}")
    begin, costs = 0, found.plan.chunk_costs(problem)
    for chunk, (layers, device) in enumerate(zip(found.plan.cut, problem.places, strict=True)):
        busy = problem.microbatches * (costs[chunk].forward + costs[chunk].backward + costs[chunk].weights)
        whole = problem.places.index(device) == chunk  # a device's figures stand at its first chunk
        figures = f"{times.idle[device]:12g}" if whole else " " * 12
        held = f"{times.peak_bytes[device]:14g}" if whole else ""
        span = f"{begin}-{begin + layers - 1}" if layers > 1 else str(begin)
        lines.append(f"{chunk:>5}{device:>8}{span:>12}{busy:12g}{figures}{times.in_flight[chunk]:>11}{held}".rstrip())
        begin += layers
    return "\n".join(lines)


def _none(found: PipelineSolution) -> AutoparError:
    hint = f"with limit {found.smallest_limit:g} one microbatch at a time fits"
    if found.status.value == "infeasible":
        return InfeasibleError(f"infeasible: {found.message}", hint)
    return TimeLimitError(found.message, f"give more time by --time-limit; {hint}")


def _progress(line: Line) -> Any:
    """Shows the search's progress on the line."""

    def show(best: float | None, bound: float, gap: float, seconds: float) -> None:
        step = "none yet" if best is None else f"{best:g}, gap {100 * gap:.3f} %"
        line.say(f"{seconds:7.1f} s  bound {bound:g}  best {step}")

    return show
