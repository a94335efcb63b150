"""How long does planning take, and how large do the problems get?

One child process a case, so that peak memory is the case's own (``-P``, since this folder holds files named as packages).
Times are CPU seconds of all threads and children, from the process's beginning; garbage is collected as the command does it.

    python benchmarks/planning.py [--json FILE] [--cases small|depth|width|mesh|devices|large|huge|all]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from autopar.garbage import young_garbage_only

MESHES = ("x=2", "x=2,y=2", "x=2,y=4", "x=8,y=8", "x=2,y=2,z=2", "x=2,y=2,z=2,w=2")
GROWING = ("dp=8", "dp=64", "dp=64,tp=8", "dp=512,tp=8")
CASES: dict[str, list[tuple[str, ...]]] = {  # (target, mesh, memory, mode), and that forward may run again in backward
    "small": [(f"zoo:{name}", "dp=2,tp=2", "70GiB", "train") for name in ("mlp", "gpt2", "llama3", "resnet", "moe")],
    "depth": [(f"zoo:llama3-8b,layers={n},batch=16,seq=8192", "dp=8,tp=8", "70GiB", "train") for n in (1, 2, 4, 8, 32, 128)],
    "width": [(f"zoo:gpt2,layers=2,width={n},heads=8,batch=8,seq=128", "dp=2,tp=2", "70GiB", "train") for n in (64, 256, 1024)],
    "mesh": [("zoo:gpt2,layers=2", mesh, "70GiB", "train") for mesh in MESHES],
    "devices": [("zoo:llama3-8b,layers=8,batch=4096,seq=8192", mesh, "70GiB", "train") for mesh in GROWING],
    "large": [("zoo:llama3-8b,batch=16,seq=8192", "dp=8,tp=8", "70GiB", "train")],
    "huge": [
        ("zoo:llama3-405b,batch=256,seq=8192", "dp=8,cp=8,tp=8", "70GiB", "train", "recompute"),
        ("zoo:llama3-405b,batch=2048,seq=8192", "dp=16,cp=16,tp=16", "70GiB", "train", "recompute"),
    ],
}
STAGES = ("import", "capture", "search", "write")


def cpu_seconds() -> float:
    return sum(os.times()[:4])


@young_garbage_only()
def measure(target: str, mesh: str, memory: str, mode: str, again: str = "", *, time_limit: float) -> dict[str, object]:
    """One case in this process; returns sizes, CPU seconds a stage, peak MiB, objective and gap."""
    laps = {}
    last = 0.0

    def lap(stage: str) -> None:
        nonlocal last
        now = cpu_seconds()
        laps[stage], last = now - last, now

    import torch  # noqa: F401

    import autopar
    from autopar import importer, search  # noqa: F401
    from autopar.cli.target import load_target
    from autopar.options import parse_memory

    lap("import")
    found = load_target(target, mode, device="meta")
    graph = autopar.capture(found.model, found.args, found.kwargs, mode=mode, loss=found.loss, loss_args=found.loss_args)
    lap("capture")
    from autopar.cost_models import Machine, Mesh, load_hardware

    machine = Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")
    result = search.find_plan(graph, machine, memory_bytes=parse_memory(memory), time_limit=time_limit, recompute=bool(again))
    lap("search")
    from autopar.recording import record

    with tempfile.TemporaryDirectory() as folder:
        record(result, target=target, memory_limit=parse_memory(memory)).save(str(Path(folder, "plan.json")))
    lap("write")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "target": target, "mesh": mesh, "memory": memory, "mode": mode, "ops": len(graph.ops), **result.sizes,
        "seconds": result.seconds, "bound_seconds": result.bound_seconds, "gap": result.gap, "status": result.status,
        "peak_memory_bytes_per_rank": result.memory.peak, "peak_mib": peak, "cpu_seconds": laps, "total_cpu_seconds": sum(laps.values()),
        "baselines": {name: [rival.seconds, rival.feasible] for name, rival in result.baselines.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="small", choices=[*CASES, "all"])
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from autopar.garbage import young_garbage_only

        with young_garbage_only():  # as the command does
            print(json.dumps(measure(*arguments.one, time_limit=arguments.time_limit)))
        return
    chosen = [case for name, cases in CASES.items() if arguments.cases in (name, "all") for case in cases]
    rows = []
    head = (
        f"{'case':58} {'ops':>6} {'nodes':>6} {'entries':>9} "
        + " ".join(f"{stage:>9}" for stage in STAGES)
        + f" {'total':>7} {'MiB':>6} {'gap %':>7} {'step ms':>9} {'baseline':>9}"
    )
    print(head)
    for case in chosen:
        command = [sys.executable, "-P", __file__, "--time-limit", str(arguments.time_limit), "--one", *case]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{case[0]} {case[1]}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        times = " ".join(f"{row['cpu_seconds'].get(stage, 0.0):9.2f}" for stage in STAGES)
        name = f"{row['target']} {row['mesh']}"
        best = min((seconds for seconds, fits in row["baselines"].values() if fits), default=float("nan"))
        print(
            f"{name:58} {row['ops']:6} {row['nodes']:6} {row['edge_entries']:9} {times} {row['total_cpu_seconds']:7.1f} "
            f"{row['peak_mib']:6.0f} {100 * row['gap']:7.4f} {1e3 * row['seconds']:9.3f} {1e3 * best:9.3f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
