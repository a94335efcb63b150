"""What does less memory cost, and is more of it ever worse?

``shares``: every zoo model at shares of the peak of its free plan: gap and step. ``ladder``: limits in equal steps from the least that the
search finds a plan for to the free peak: where more memory costs more than the gap proved, that is a fault.
Times are CPU seconds of the search, all threads and children.

    python benchmarks/memory.py [--cases shares|ladder|quick|all] [--time-limit S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SHARES = (1.0, 0.8, 0.6, 0.4)
RUNGS = 20
MODELS = ("zoo:mlp", "zoo:gpt2", "zoo:llama3", "zoo:resnet", "zoo:moe")
LADDERS = (
    *MODELS, "zoo:mlp,layers=4,width=256,batch=64", "zoo:gpt2,batch=8,seq=64,width=128,vocab=512", "zoo:llama3,layers=1,width=256",
    "zoo:resnet,batch=32,width=32", "zoo:moe,layers=1,experts=4",
)  # fmt: skip
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {  # models, meshes, rungs (0: shares)
    "shares": (MODELS, ("2x2", "2x4"), 0),
    "ladder": (LADDERS, ("4", "2x2", "2x4"), RUNGS),
    "quick": (("zoo:mlp", "zoo:gpt2"), ("2x2",), 5),
}


@dataclass(frozen=True)
class Row:
    """One search. ``seconds`` and ``bound_seconds`` are infinite where nothing was found, ``proved`` says whether nothing can be."""

    target: str
    mesh: str
    limit: int
    share: float
    seconds: float
    bound_seconds: float
    gap: float
    peak: int
    method: str
    proved: bool
    cpu_seconds: float


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def rows(target: str, mesh: str, rungs: int, time_limit: float) -> Iterator[Row]:
    """The free plan of a model, then limits below its peak."""
    from autopar.cli.target import capture_target
    from autopar.errors import AutoparError, InfeasibleError
    from autopar.options import parse_mesh
    from autopar.search import find_plan
    from cost_models import Machine, load_hardware

    graph = capture_target(target, "train")
    machine = Machine(parse_mesh(mesh), load_hardware("h100-sxm"), "roofline")
    began = cpu_seconds()
    free = find_plan(graph, machine, time_limit=time_limit)
    whole = free.memory.peak
    yield Row(target, mesh, whole, 1.0, free.seconds, free.bound_seconds, free.gap, whole, free.solver, False, cpu_seconds() - began)

    def at(limit: int) -> Row:
        began = cpu_seconds()
        try:
            found = find_plan(graph, machine, memory_bytes=limit, time_limit=time_limit)
        except AutoparError as error:
            proved = isinstance(error, InfeasibleError) and str(error).startswith("no plan fits")
            return Row(target, mesh, limit, limit / whole, float("inf"), float("inf"), 0.0, 0, "", proved, cpu_seconds() - began)
        return Row(
            target, mesh, limit, limit / whole, found.seconds, found.bound_seconds, found.gap, found.memory.peak, found.solver, False,
            cpu_seconds() - began,
        )  # fmt: skip

    if not rungs:
        yield from (at(int(whole * share)) for share in SHARES)
        return
    low = least(graph, machine, time_limit)
    for rung in range(rungs):
        yield at(low + (whole - low) * rung // max(rungs - 1, 1))


def least(graph: object, machine: object, time_limit: float) -> int:
    """The least memory that the search names when nothing can fit."""
    from autopar.errors import InfeasibleError
    from autopar.search import find_plan

    try:
        find_plan(graph, machine, memory_bytes=1, time_limit=time_limit)  # type: ignore[arg-type]
    except InfeasibleError as error:
        return int(str(error).split("allow at least ")[1].split()[0])
    return 1


def faults(found: Iterable[Row]) -> list[str]:
    """Where more memory costs more than a plan for less, by more than the gap proved for it."""
    said = []
    best: dict[tuple[str, str], Row] = {}
    for row in sorted(found, key=lambda row: row.limit):
        before = best.get((row.target, row.mesh))
        if before is not None and row.seconds > before.seconds * (1 + 1e-9) and row.seconds * (1 - row.gap) > before.seconds * (1 - 1e-9):
            said.append(f"{row.target} {row.mesh}: {row.seconds:.4g} s in {row.limit}, {before.seconds:.4g} s in {before.limit}")
        if before is None or row.seconds < before.seconds:
            best[row.target, row.mesh] = row
    return said


def worse(found: Iterable[Row], tolerance: float = 0.0) -> list[tuple[float, Row]]:
    """Searches that cost more than one for less memory, with how much more, whatever gap they state."""
    said = []
    best: dict[tuple[str, str], float] = {}
    for row in sorted(found, key=lambda row: row.limit):
        before = best.get((row.target, row.mesh), float("inf"))
        if row.seconds > before * (1 + tolerance):
            said.append((row.seconds / before - 1, row))
        best[row.target, row.mesh] = min(before, row.seconds)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="shares", choices=[*CASES, "all"])
    parser.add_argument("--only", default="", help="models whose target has this in it")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    every: list[Row] = []
    print(f"{'case':58} {'limit':>12} {'share':>6} {'step us':>10} {'bound us':>10} {'gap %':>7} {'peak':>6} {'cpu s':>6} method")
    for name, (models, meshes, rungs) in CASES.items():
        if arguments.cases not in (name, "all"):
            continue
        for target in models:
            for mesh in meshes if arguments.only in target else ():
                for row in rows(target, mesh, rungs, arguments.time_limit):
                    every.append(row)
                    gap = "proved" if row.proved else f"{100 * row.gap:7.2f}"
                    times = f"{1e6 * row.seconds:10.2f} {1e6 * row.bound_seconds:10.2f}"
                    print(
                        f"{target + ' ' + mesh:58} {row.limit:12} {row.share:6.3f} {times} {gap:>7} {row.peak / row.limit:6.3f} "
                        f"{row.cpu_seconds:6.1f} {row.method or 'nothing fits'}",
                        flush=True,
                    )
    gaps = [row.gap for row in every if row.method]
    print(f"gap: median {100 * statistics.median(gaps):.2f} %, worst {100 * max(gaps):.2f} %")
    print(f"CPU: median {statistics.median(row.cpu_seconds for row in every):.1f} s, most {max(row.cpu_seconds for row in every):.1f} s")
    print(f"nothing found though not proved: {sum(not row.method and not row.proved for row in every)} of {len(every)}")
    more = worse(every)
    print(f"more memory costs more: {len(more)} of {len(every)}, at most {100 * max((by for by, _ in more), default=0.0):.2f} %")
    print(*faults(every), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")


if __name__ == "__main__":
    main()
