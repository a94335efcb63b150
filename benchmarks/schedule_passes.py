"""What does each pass of ``autopar.schedule`` buy, once the local search has had its turn?

    python benchmarks/schedule_passes.py [--cases small|deep|all] [--plans FOLDER] [--variants NAME ...] [--json FILE]

Every case is planned once, and its plan and baselines are kept in FOLDER. Each variant then schedules the same assignments with one pass
or rule left out: limits tuned, local search as at the end of a search. A row says by how much the step is longer without it (per cent)
and what it costs in CPU seconds. One child process a variant, so that each compiles its own loops.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

SOURCE = os.environ.get("AUTOPAR_SOURCE", str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, SOURCE)

if TYPE_CHECKING:
    from autopar.cost_models import Machine
    from autopar.graph import Graph
    from autopar.schedule import Assignment, Schedule

ZOO = (
    "zoo:gpt2,layers=4,width=768,heads=12,vocab=50304,batch=16,seq=512",
    "zoo:llama3,layers=4,width=1024,hidden=2816,vocab=32000,batch=16,seq=1024",
    "zoo:moe,layers=4,width=512,hidden=2048,vocab=32000,batch=16,seq=256",
    "zoo:resnet,blocks=3-4,width=64,image=64,batch=64",
)
DEEP = "zoo:llama3-8b,layers=4,batch=16,seq=8192"
CASES: dict[str, tuple[tuple[str, str, str], ...]] = {  # target, mesh, bytes on a rank
    "small": tuple((target, mesh, "70GiB") for target in ZOO for mesh in ("dp=2,tp=2", "dp=2,tp=4")),
    "deep": (
        (DEEP, "dp=8,tp=8", "70GiB"), (DEEP, "dp=8,tp=8", "2.5GiB"), ("zoo:llama3-8b,batch=16,seq=8192", "dp=8,tp=8", "70GiB"),
        ("zoo:gpt2,layers=8,width=1600,heads=25,vocab=50304,batch=16,seq=1024", "dp=2,tp=4", "70GiB"),
        ("zoo:llama3-8b,layers=4,batch=16,seq=4096", "dp=2,cp=4,tp=4", "70GiB"),
    ),
}
BESIDE = ("fsdp", "zero2", "megatron_sp")
"""Baselines whose assignments are scheduled beside a case's own plan."""
LONG = 2000
"""Operators of a graph beyond which baselines are left out: they take as long to schedule as the plan and say the same."""
EFFORT = 5
"""Local search's effort for the plan that is kept, as in ``search``."""


def make_cases(cases: str, folder: Path, time_limit: float) -> None:
    """Plans what is not in the folder yet."""
    import autopar
    from autopar.cli.target import load_target
    from autopar.cost_models import Machine, Mesh, load_hardware
    from autopar.options import parse_memory
    from autopar.search import find_plan

    for target, mesh, memory in (case for name, some in CASES.items() if cases in (name, "all") for case in some):
        name = f"{target} {mesh} {memory}"
        path = folder / (name.replace("/", "_") + ".pickle")
        if path.exists():
            continue
        loaded = load_target(target, "train", device="meta")
        graph = autopar.capture(loaded.model, loaded.args, loaded.kwargs, mode="train", loss=loaded.loss, loss_args=loaded.loss_args)
        machine, limit = Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline"), parse_memory(memory)
        found = find_plan(graph, machine, memory_bytes=limit, time_limit=time_limit, recompute=True)
        schedules = {"plan": found.schedule} | {name: found.baselines[name].schedule for name in BESIDE if name in found.baselines}
        whole = {name: schedule for name, schedule in schedules.items() if len(schedule.graph.ops) == len(graph.ops)}
        kept = {name: assignment_of(schedule) for name, schedule in whole.items() if name == "plan" or len(graph.ops) <= LONG}
        path.write_bytes(pickle.dumps((name, graph, machine, limit, kept)))
        print(f"planned {name}: {found.seconds * 1e3:.3f} ms, gap {found.gap:.1%}", file=sys.stderr, flush=True)


def assignment_of(schedule: Schedule) -> Assignment:
    """What a schedule without microbatches was made from."""
    from autopar.schedule import AGAIN, OUTPUT, Assignment

    inputs = {item.tensor: schedule.specs[item.tensor] for item in schedule.graph.inputs}
    runs = [item for item in schedule.instructions if item.kind == "run"]
    reads = {(item.of, place): value for item in runs for place, value in enumerate(item.reads)}
    reads |= {(f"{OUTPUT}{number}", 0): value for number, (_, value) in enumerate(schedule.outputs)}
    strategies = {operation.op.name: operation.strategy for operation in schedule.operations.values()}
    again = frozenset(name.removesuffix(AGAIN) for name in schedule.operations if name.endswith(AGAIN))
    return Assignment(inputs, strategies, tuple(schedule.layouts.values()), reads, again)


def cases_in(folder: Path) -> Iterator[tuple[str, Graph, Machine, int, dict[str, Assignment]]]:
    for path in sorted(folder.glob("*.pickle")):
        yield pickle.loads(path.read_bytes())


def without(module: str, **values: Any) -> Callable[[], None]:
    """Gives names of a module other values, before anything has run."""

    def change() -> None:
        from importlib import import_module

        for name, value in values.items():
            assert hasattr(import_module(module), name), f"{module} has no {name}"
            setattr(import_module(module), name, value)

    return change


def ladders(**values: tuple[int, ...]) -> Callable[[], None]:
    """Gives limits other values to try, none for a limit that is to stay as it is."""

    def change() -> None:
        from autopar.schedule import limit_search as module

        module.LIMIT_LADDERS = {name: values.get(name, rungs) for name, rungs in module.LIMIT_LADDERS.items() if values.get(name, rungs)}

    return change


def limits(**values: int) -> Callable[[], None]:
    """Begins from other limits."""

    def change() -> None:
        from dataclasses import replace

        from autopar.schedule import limit_search

        first = limit_search.default_limits
        limit_search.default_limits = lambda machine: replace(first(machine), **values)

    return change


def other_seed() -> None:
    """Another sequence of moves: how much a step differs by chance."""
    import numpy as np

    first = np.random.default_rng
    np.random.default_rng = lambda seed: first(1)


def weights(**values: int) -> Callable[[], None]:
    """Draws some kinds of moves as often as is said."""

    def change() -> None:
        from autopar.schedule import settings

        settings.MOVE_WEIGHTS = {**settings.MOVE_WEIGHTS, **values}

    return change


def without_local_search() -> None:
    from autopar.schedule import limit_search
    from autopar.schedule.local_search import Improved

    limit_search.improve_order = lambda schedule, *_, **__: Improved(schedule, 0)


def without_passing() -> None:
    from autopar.schedule.prefetching import StartTimes

    StartTimes.holds_up = lambda *_: False  # type: ignore[method-assign]


def without_pulling() -> None:
    from autopar.schedule.gap_filling import _Filling

    _Filling._pull_until = lambda *_: None  # type: ignore[method-assign]


S = "autopar.schedule"
VARIANTS: dict[str, Sequence[Callable[[], None]]] = {
    "everything": (),
    "everything, another seed": (other_seed,),
    "no gap filling": (ladders(aside_bytes=()), limits(aside_bytes=0)),
    "no pulling into gaps": (without_pulling,),
    "no local search": (without_local_search,),
    "no local search at the end": (without("__main__", EFFORT=0),),
    "no headroom": (without(f"{S}.prefetching", Headroom=lambda *_: None),),
    "no bucket": (ladders(bucket_bytes=()), limits(bucket_bytes=0)),
    "no prefetch": (ladders(ahead_bytes=()), limits(ahead_bytes=0)),
    "no lead": (without(f"{S}.prefetching", LEAD=1.0),),
    "no call lets another pass": (without_passing,),
    "moves: none at stalls": (weights(shift=21, shift_at_stall=0, pull_to_stall=0),),
    "deferred loss of 1 KiB": (
        without(f"{S}.deferred_loss", DEFERRED_LEAST_BYTES=2**10, DEFERRED_SHARE=0.0, DEFERRED_MOST_BYTES=2**10),
    ),
    "no deferred loss": (without(f"{S}.ordering", deferred_values=lambda *_: frozenset()),),
    "no limit search": (ladders(ahead_bytes=(), aside_bytes=(), bucket_bytes=()),),
    "bucket and prefetch as given": (ladders(ahead_bytes=(), bucket_bytes=()),),
    "moves: no shift anywhere": (weights(shift=0),),
    "moves: no shift at stalls": (weights(shift_at_stall=0),),
    "moves: no pull to stalls": (weights(pull_to_stall=0),),
    "moves: no unbucket": (weights(unbucket=0),),
    "moves: no merge": (weights(merge=0),),
}  # fmt: skip


def measure(variant: str, folder: Path) -> list[dict[str, Any]]:
    """Schedules all cases in this process, by their names."""
    for change in VARIANTS[variant]:
        change()
    from autopar.effort import Budget, Meter
    from autopar.schedule import limit_search

    rows, budget = [], Budget(Meter(math.inf), math.inf)
    for name, graph, machine, limit, assignments in cases_in(folder):
        for kind, assignment in assignments.items():
            before = sum(os.times()[:4])
            found = limit_search.best_schedule(graph, assignment, machine, "adamw", limit)
            middle = sum(os.times()[:4])
            if EFFORT:
                found = limit_search.improve_plan(found, "adamw", limit, budget, EFFORT, keep_program_order=False)
            rows.append({
                "case": name, "assignment": kind, "seconds": found.seconds, "peak": found.memory.peak, "fits": found.memory.peak <= limit,
                "cpu_seconds": sum(os.times()[:4]) - before, "limit_search_cpu_seconds": middle - before,
            })  # fmt: skip
    return rows


def ask(variant: str, folder: Path) -> list[dict[str, Any]]:
    """One variant in a process of its own."""
    command = [sys.executable, "-P", __file__, "--plans", str(folder), "--one", variant]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant}: {done.stderr.strip()[-2000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def table(rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> str:
    """By how many per cent each case's step is longer than with everything, and CPU seconds of all."""
    pairs = list(zip(rows, base, strict=True))
    longer = [100 * (row["seconds"] / first["seconds"] - 1) if row["fits"] >= first["fits"] else float("inf") for row, first in pairs]
    cpu = sum(row["cpu_seconds"] for row in rows)
    return f"worst {max(longer):+.2f} %, best {min(longer):+.2f} %, mean {sum(longer) / len(longer):+.3f} %; {cpu:.1f} CPU s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all", choices=[*CASES, "all"])
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--variants", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.plans)))
        return
    with tempfile.TemporaryDirectory() as fresh:
        folder = options.plans or Path(fresh)
        folder.mkdir(parents=True, exist_ok=True)
        make_cases(options.cases, folder, options.time_limit)
        if options.plan_only:
            return
        found: dict[str, list[dict[str, Any]]] = {}
        for variant in ("everything", *(options.variants or [name for name in VARIANTS if name != "everything"])):
            found[variant] = ask(variant, folder)
            print(f"{variant:42} {table(found[variant], found['everything'])}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
