"""What does less memory cost, and is more of it ever worse?

``shares``: every zoo model at shares of the peak of its free plan: gap and step. ``ladder``: limits in equal steps from the least that the
search finds a plan for to the free peak: where more memory costs more than the gap proved, that is a fault.
``deep``, ``deeper``: a deep model in less and less memory, and one in little, beside the best plan written by hand that fits, layers
made again if need be.
Operators may run a second time, as on the command line.
Times are CPU seconds of the search, all threads and children.

    python benchmarks/memory.py [--cases shares|ladder|quick|deep|deeper|all] [--only NAME] [--meshes 2x2 2x4]
        [--time-limit S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.search import SearchResult

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHARES = (1.0, 0.8, 0.6, 0.4)
RUNGS = 20
MODELS = ("zoo:mlp", "zoo:gpt2", "zoo:llama3", "zoo:resnet", "zoo:moe")
LADDERS = (
    *MODELS, "zoo:mlp,layers=4,width=256,batch=64", "zoo:gpt2,batch=8,seq=64,width=128,vocab=512", "zoo:llama3,layers=1,width=256",
    "zoo:resnet,batch=32,width=32", "zoo:moe,layers=1,experts=4",
)  # fmt: skip
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], int | tuple[str, ...]]] = {  # models, meshes, limits or rungs (0: shares)
    "shares": (MODELS, ("2x2", "2x4"), 0),
    "ladder": (LADDERS, ("4", "2x2", "2x4"), RUNGS),
    "quick": (("zoo:mlp", "zoo:gpt2"), ("2x2",), 5),
    "deep": (("zoo:llama3-8b,batch=16,seq=8192",), ("dp=8,tp=8",), ("14GiB", "10GiB", "7GiB")),
    "deeper": (("zoo:llama3-70b,batch=64,seq=8192",), ("dp=32,tp=8",), ("74.5GiB",)),
}


@dataclass(frozen=True)
class Row:
    """One search. ``seconds`` and ``bound_seconds`` are infinite where nothing was found, ``proved`` says whether nothing can be;
    ``by_hand`` are the seconds of the best plan written by hand that fits."""

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
    by_hand: float = float("inf")


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def planner(target: str, mesh: str, time_limit: float) -> Callable[..., SearchResult]:
    """What plans a model, captured once, as the command line does."""
    from autopar.cli.target import capture_target
    from autopar.cost_models import Machine, load_hardware
    from autopar.options import parse_mesh
    from autopar.search import find_plan

    machine = Machine(parse_mesh(mesh), load_hardware("h100-sxm"), "roofline")
    return partial(find_plan, capture_target(target, "train"), machine, recompute=True, time_limit=time_limit)


def row(plan: Callable[..., SearchResult], target: str, mesh: str, limit: int | None, whole: int = 0) -> Row:
    """One search. ``whole``: the peak of the free plan, where that is known; ``limit``: None for that plan."""
    from autopar.errors import AutoparError, InfeasibleError

    began = cpu_seconds()
    try:
        found = plan(memory_bytes=2**62 if limit is None else limit)
    except AutoparError as error:
        proved = isinstance(error, InfeasibleError) and str(error).startswith("no plan fits")
        share = (limit or 0) / whole if whole else 0.0
        return Row(target, mesh, limit or 0, share, float("inf"), float("inf"), 0.0, 0, "", proved, cpu_seconds() - began)
    limit = found.memory.peak if limit is None else limit
    by_hand = min((one.seconds for one in found.baselines.values() if one.feasible), default=float("inf"))
    return Row(
        target, mesh, limit, limit / (whole or limit), found.seconds, found.bound_seconds, found.gap, found.memory.peak, found.solver,
        False, cpu_seconds() - began, by_hand,
    )  # fmt: skip


def rows(target: str, mesh: str, limits: int | Sequence[str], time_limit: float) -> Iterator[Row]:
    """Limits as they are given, or the free plan of a model and so many limits below its peak (0: ``SHARES`` of it)."""
    from autopar.options import parse_memory

    plan = planner(target, mesh, time_limit)
    if not isinstance(limits, int):
        yield from (row(plan, target, mesh, parse_memory(limit)) for limit in limits)
        return
    free = row(plan, target, mesh, None)
    yield free
    low = least(plan) if limits else 0
    steps = [low + (free.peak - low) * rung // max(limits - 1, 1) for rung in range(limits)] or [int(free.peak * share) for share in SHARES]
    yield from (row(plan, target, mesh, limit, free.peak) for limit in steps)


def least(plan: Callable[..., SearchResult]) -> int:
    """The least memory that the search names when nothing can fit."""
    from autopar.errors import InfeasibleError

    try:
        plan(memory_bytes=1)
    except InfeasibleError as error:
        return error.least
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
    parser.add_argument("--meshes", nargs="+", help="these of a case's meshes; all when not given")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    every: list[Row] = []
    head = f"{'case':58} {'limit':>12} {'share':>6} {'step us':>10} {'bound us':>10} {'gap %':>7}"
    print(f"{head} {'peak':>6} {'by hand':>8} {'cpu s':>6} method")
    for name, (models, meshes, limits) in CASES.items():
        if arguments.cases not in (name, "all"):
            continue
        for target in models:
            for mesh in [one for one in meshes if one in (arguments.meshes or meshes)] if arguments.only in target else ():
                for found in rows(target, mesh, limits, arguments.time_limit):
                    every.append(found)
                    gap = "proved" if found.proved else f"{100 * found.gap:7.2f}"
                    times = f"{1e6 * found.seconds:10.2f} {1e6 * found.bound_seconds:10.2f}"
                    print(
                        f"{target + ' ' + mesh:58} {found.limit:12} {found.share:6.3f} {times} {gap:>7} {found.peak / found.limit:6.3f} "
                        f"{found.by_hand / found.seconds:8.3f} {found.cpu_seconds:6.1f} {found.method or 'nothing fits'}",
                        flush=True,
                    )
    gaps = [row.gap for row in every if row.method]
    if not gaps:
        sys.exit("nothing was found" if every else f"no case has {arguments.only!r} on {arguments.meshes}")
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
