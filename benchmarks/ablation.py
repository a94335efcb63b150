"""What does each phase of the search buy?

Every case is planned whole, and then with one phase left out after another (``--without``): step, bound and CPU seconds beside those of
the whole search. What buys less than 0.3 % of step or bound on every case is to go. Passes of the schedule are left out by their names in
``schedule_passes.py``.

Each search runs in a process of its own, forked from one that has captured the model. CPU seconds are those of that process.

    pip install '.[models]'
    python benchmarks/ablation.py [--cases GLOB ...] [--without NAME ...|all] [--effort normal] [--time-limit S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("AUTOPAR_SOURCE", str(Path(__file__).resolve().parent.parent)))

HERE = Path(__file__).resolve().parent
FULL = f"{HERE / 'full_size' / 'models.py'}:"
ROUNDING = 1e-9


@dataclass(frozen=True)
class Case:
    """A model, a mesh and the memory of one device."""

    target: str
    mesh: str
    memory: str = "70GiB"
    mode: str = "train"
    given: dict[str, str] = field(default_factory=dict)


LLAMA_8B = "zoo:llama3-8b,batch=16,seq=8192"
CASES: dict[str, Case] = {
    "llama3-8b 70GiB": Case(LLAMA_8B, "dp=8,tp=8"),
    "llama3-8b 14GiB": Case(LLAMA_8B, "dp=8,tp=8", "14GiB"),
    "llama3-8b 10GiB": Case(LLAMA_8B, "dp=8,tp=8", "10GiB"),
    "llama3-8b 7GiB": Case(LLAMA_8B, "dp=8,tp=8", "7GiB"),
    "llama3-70b": Case("zoo:llama3-70b,batch=64,seq=8192", "dp=32,tp=8"),
    "llama3-70b 74GiB": Case("zoo:llama3-70b,batch=64,seq=8192", "dp=32,tp=8", "74.5GiB"),
    "llama3-405b": Case("zoo:llama3-405b,batch=2048,seq=8192", "dp=16,cp=16,tp=16"),
    "llama3-8b 4x4x4": Case("zoo:llama3-8b,layers=4,batch=16,seq=8192", "dp=4,cp=4,tp=4"),
    "llama3-8b 8": Case("zoo:llama3-8b,batch=8,seq=8192", "dp=8"),
    "llama3-8b 128k": Case("zoo:llama3-8b,batch=1,seq=131072", "cp=16"),
    "llama3-8b 8x128k": Case("zoo:llama3-8b,batch=8,seq=131072", "dp=8,tp=8"),
    "llama3-8b inference": Case("zoo:llama3-8b,batch=8,seq=4096", "tp=8", mode="inference"),
    "gpt2-xl": Case("zoo:gpt2,layers=48,width=1600,heads=25,vocab=50257,batch=32,seq=1024,dtype=bfloat16", "dp=2,tp=4"),
    "mixtral-8x7b": Case(f"{FULL}mixtral_8x7b", "dp=8,tp=8"),
    "vit-huge": Case(f"{FULL}vit_huge", "dp=8,tp=8"),
    "t5-11b": Case(f"{FULL}t5_11b", "dp=8,tp=8"),
    "unet": Case(f"{FULL}unet_sd15", "dp=2,tp=4"),
    "unet 30GiB": Case(f"{FULL}unet_sd15", "dp=2,tp=4", "30GiB"),
    "unet 8x8": Case(f"{FULL}unet_sd15", "dp=8,tp=8"),
    "whisper-large": Case(f"{FULL}whisper_large", "dp=8"),
    "whisper-large 8x8": Case(f"{FULL}whisper_large", "dp=8,tp=8"),
    "deepseek-v3-like": Case(f"{FULL}deepseek_v3_like", "dp=8,ep=8"),
    "llama3 2x2x2x2": Case("zoo:llama3", "x=2,y=2,z=2,w=2"),
    "moe 2x2x2x2": Case("zoo:moe", "x=2,y=2,z=2,w=2"),
}


@dataclass
class Row:
    """One search. Seconds of the step and its bound; CPU seconds of the search; ``phases`` is the record of the search."""

    case: str
    without: str
    seconds: float = 0.0
    bound_seconds: float = 0.0
    gap: float = 0.0
    by_hand: float = 0.0
    cpu_seconds: float = 0.0
    solver: str = ""
    failed: str = ""
    phases: list[dict[str, Any]] = field(default_factory=list)


def search(graph: Any, case: Case, without: str, options: dict[str, Any]) -> Row:
    """One search in this process."""
    from autopar.cost_models import Machine, load_hardware
    from autopar.errors import AutoparError
    from autopar.options import parse_memory, parse_mesh
    from autopar.search import find_plan
    from benchmarks.schedule_passes import VARIANTS

    machine = Machine(parse_mesh(case.mesh), load_hardware("h100-sxm"), "roofline")
    options = dict(options)
    names = without.split("+") if without else []
    for change in (change for name in names for change in VARIANTS.get(name, ())):
        change()
    if without:
        options["skip"] = frozenset(name for name in names if name not in VARIANTS)
    began = sum(os.times()[:4])
    row = Row("", without)
    try:
        found = find_plan(graph, machine, memory_bytes=parse_memory(case.memory), recompute=True, **options)
    except AutoparError as error:
        row.failed = str(error).splitlines()[0]
    else:
        row.seconds, row.bound_seconds, row.gap, row.solver = found.seconds, found.bound_seconds, found.gap, found.solver
        row.by_hand = min((one.seconds for one in found.baselines.values() if one.feasible), default=0.0)
        row.phases = [asdict(phase) for phase in getattr(found, "trace", ())]
    row.cpu_seconds = sum(os.times()[:4]) - began
    return row


def rows_of(name: str, case: Case, variants: list[str], options: dict[str, Any]) -> list[Row]:
    """The whole search and each variant, one forked process after another."""
    import autopar
    from autopar.cli.target import load_target

    found = load_target(case.target, case.mode, device="meta", given=case.given)
    graph = autopar.capture(found.model, found.args, found.kwargs, mode=case.mode, loss=found.loss, loss_args=found.loss_args)
    context = multiprocessing.get_context("fork")
    made = []
    for without in variants:
        receive, send = context.Pipe(duplex=False)

        def work(without: str = without, send: Any = send) -> None:
            send.send(search(graph, case, without, options))

        child = context.Process(target=work)
        child.start()
        send.close()
        try:
            row = receive.recv()
        except EOFError:
            row = Row(name, without, failed="the process died")
        child.join()
        row.case = name
        made.append(row)
        _print(row, made[0])
    return made


def _print(row: Row, whole: Row) -> None:
    if row.failed:
        print(f"{row.case:22} {row.without or '-':34} {row.failed[:90]} ({row.cpu_seconds:.1f} CPU s)", flush=True)
        return
    less = ""
    if row is not whole and whole.seconds:
        step, bound = row.seconds / whole.seconds - 1, 1 - row.bound_seconds / max(whole.bound_seconds, ROUNDING)
        less = f"step {100 * step:+7.2f} %  bound {-100 * bound:+7.2f} %  CPU {row.cpu_seconds - whole.cpu_seconds:+6.1f} s"
    figures = f"{1e3 * row.seconds:10.3f} ms {1e3 * row.bound_seconds:10.3f} ms {100 * row.gap:6.2f} % {row.cpu_seconds:6.1f} CPU s"
    print(f"{row.case:22} {row.without or '-':34} {figures} by hand {row.by_hand / row.seconds:6.3f} {row.solver:12} {less}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--without", nargs="*", default=[], help="phases left out, one at a time; A+B leaves out both; all: each of them")
    parser.add_argument("--effort")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"time_limit": arguments.time_limit}
    if arguments.effort:
        options["effort"] = arguments.effort
    variants = arguments.without
    if variants == ["all"]:
        from autopar.search.driver.phase_table import BY_STEP

        variants = list(dict.fromkeys(phase.name for phase in BY_STEP)) + ["final local search", "tied layers", "folding"]
    began, rows = time.perf_counter(), list[Row]()
    for name, case in CASES.items():
        if any(fnmatchcase(name, pattern) for pattern in arguments.cases):
            try:
                rows += rows_of(name, case, ["", *variants], options)
            except Exception as error:  # a model that is not captured is a row as well
                print(f"{name:22} {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(f"{len(rows)} searches in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
