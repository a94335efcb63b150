"""What does the search of cuts and orders find against equal cuts with 1F1B, and how far is the bound?

    python benchmarks/pipelines.py [--only 70B] [--without starts=6 ...] [--json FILE]

Chains of the shapes of Llama 3: equal layers of f 1 and b 2, an embedding of no seconds, a head of as many layers as its share of the work.
A layer holds 1 for each microbatch in flight; M is what a device may hold. Steps are in seconds of that unit.
``equal``: as many layers on each stage, the first stages having the remainder, 1F1B. ``counted``: embedding and head count as a layer each.
A plan that M does not fit has no step. ``--without`` solves each again with another number of ``autopar.solvers.pipeline.settings``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar.solvers import ProblemError
from autopar.solvers.pipeline import Mode, Operation, PipelinePlan, PipelineProblem, simulate, solve_pipeline
from autopar.solvers.pipeline.settings import SETTINGS

SHAPES = {"8B": (32, 2.41), "70B": (80, 1.23), "405B": (126, 0.66)}
"""Layers, and the head's work in layers."""
CASES = (
    ("8B", 4, 16, None), ("8B", 4, 16, 32.0), ("70B", 8, 16, None), ("70B", 8, 16, 80.0), ("70B", 8, 32, None), ("70B", 8, 32, 80.0),
    ("70B", 8, 32, 120.0), ("70B", 8, 64, None), ("405B", 8, 32, None), ("405B", 16, 32, None), ("405B", 16, 32, 128.0),
)  # fmt: skip
"""Shape, devices, microbatches, M."""
FORMS: tuple[dict[str, object], ...] = ({"split": True}, {"chunks": 2}, {"chunks": 2, "placement": "v", "split": True})
"""Besides: W split, two chunks, both; tried on ``FORMS_CASE``."""
FORMS_CASE = ("8B", 4, 8, None)
TRANSFER = 0.02
"""Seconds between stages: a fiftieth of a layer's forward."""


@dataclass(frozen=True)
class Row:
    """One chain. Steps and bound in seconds of the unit; ``cpu_seconds`` of the search alone."""

    case: str
    without: str
    equal: float | None
    counted: float | None
    found: float | None
    bound: float
    cut: tuple[int, ...]
    cpu_seconds: float


def chain(shape: str, devices: int, microbatches: int, limit: float | None, **form: object) -> PipelineProblem:
    """The problem of a case."""
    layers, head = SHAPES[shape]
    rows = [Mode(), *[Mode(1, 1, 1, held=1) if form.get("split") else Mode(1, 2, held=1)] * layers, Mode(head, 2 * head)]
    return PipelineProblem(tuple((row,) for row in rows), devices, microbatches, transfer=TRANSFER, limit=limit, **form)  # type: ignore[arg-type]


def by_hand(problem: PipelineProblem, cut: list[int]) -> float | None:
    """The step of a cut with 1F1B; None where it does not fit, or has several chunks a device."""
    m = problem.microbatches
    if problem.chunks > 1:
        return None
    orders = []
    for stage in range(problem.devices):
        forward, backward = Operation("F", stage), [Operation(kind, stage) for kind in problem.kinds[1:]]
        warm = min(m, problem.devices - stage)
        line = [forward] * warm
        for number in range(m):
            line += [*backward, *([forward] if number < m - warm else [])]
        orders.append(tuple(line))
    try:
        return simulate(problem, PipelinePlan(tuple(cut), (0,) * len(problem.layers), tuple(orders))).step
    except ProblemError:
        return None


def even(layers: int, stages: int) -> list[int]:
    """Layers of each stage, the first ones having the remainder."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def measure(case: str, problem: PipelineProblem, without: str) -> Row:
    """Solve one chain, with a setting changed where ``without`` says so."""
    name, _, value = without.partition("=")
    kept = getattr(SETTINGS, name) if without else None
    if without:
        object.__setattr__(SETTINGS, name, type(kept)(float(value)))
    begin = time.process_time()
    try:
        found = solve_pipeline(problem, time_limit=600.0)
    finally:
        if without:
            object.__setattr__(SETTINGS, name, kept)
    seconds = time.process_time() - begin
    equal = even(len(problem.layers) - 2, problem.devices)
    equal[0], equal[-1] = equal[0] + 1, equal[-1] + 1
    counted = even(len(problem.layers), problem.devices)
    cut = () if found.plan is None else found.plan.cut
    return Row(case, without, by_hand(problem, equal), by_hand(problem, counted), found.step, found.bound, cut, round(seconds, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description="What does the search find against equal cuts with 1F1B, and how far is the bound?")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME=VALUE", help="solve again with another number of the settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    problems = {}
    for shape, p, m, limit in CASES:
        problems[f"{shape} p {p} m {m}" + (f" M {limit:g}" if limit is not None else "")] = chain(shape, p, m, limit)
    for form in FORMS:
        shape, p, m, limit = FORMS_CASE
        problems[f"{shape} p {p} m {m} " + " ".join(map(str, form))] = chain(shape, p, m, limit, **form)
    print(f"{'case':32}{'without':>16}{'equal':>9}{'counted':>9}{'found':>9}{'bound':>9}{'gap':>8}{'CPU s':>8}  cut")
    rows = []
    for case, problem in problems.items():
        for without in ("", *arguments.without) if case.startswith(arguments.only) else ():
            row = measure(case, problem, without)
            rows.append(row)
            figures = "".join(f"{'-' if step is None else f'{step:.1f}':>9}" for step in (row.equal, row.counted, row.found, row.bound))
            gap = "-" if row.found is None else f"{100 * (row.found - row.bound) / row.found:.2f} %"
            print(f"{case:32}{without:>16}{figures}{gap:>8}{row.cpu_seconds:8.1f}  {list(row.cut)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
