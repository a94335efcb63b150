"""How far is a plan's predicted step, and its predicted peak memory, from what real ranks take?

    python benchmarks/prediction.py [--ranks 2,4] [--models mlp,gpt2,...] [--ways free,ddp,...] [--rounds 12] [--seconds 25]
                                    [--hardware measured-{ranks}.toml] [--keep FOLDER] [--json FILE]

For each number of ranks, this machine is profiled by as many ranks (or read from ``--hardware``, where ``{ranks}`` stands for the number);
the built-in models are planned in several ways for what was measured; every plan is compiled and trained by forked gloo ranks with one
thread each, warm. All plans of a model live in the same ranks and step in turn: a round is one step of each, in an order that rotates,
with a barrier before each. A step is forward, backward and fused AdamW; it lasts from the first rank's start to the last rank's end.

Other programs on the machine only ever add to a step, so what is held against the prediction is the lower quartile of the rounds; minimum
and median stand beside it and show how quiet the machine was, as do the load averages. Memory is the storage of live tensors, counted
operator by operator on every rank (see ``autopar.verify.live_memory``), the largest rank's.

Ranks that outnumber the free cores are stretched: a second of their work takes longer. The profile notes by how much, and every round
here measures it again by a short product on all ranks at once. Where other programs come or go in between, the two differ, and no model
of the plan could know: the last column is the error of ``predicted * stretch here / stretch in the profile``. On a quiet machine it is
the error itself; under loads in bursts neither is of use, and the two stretches say so.

Kendall's tau tells whether plans of one model are put in the right order: pairs of plans that measured within 10 % of each other count
neither way; a pair is right when the plan that measured faster was predicted faster.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.cost_models import Hardware
from autopar.graph import Graph
from autopar.measurement import measure, to_toml
from autopar.measurement.clock import Clock
from autopar.options import resolve_hardware
from autopar.runtime.ranks.placement import local_part
from autopar.sharding import splits
from autopar.verify.launch import run_ranks
from autopar.verify.live_memory import LiveMemory
from autopar.verify.trials import name_of

MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"batch": 512, "inputs": 512, "width": 1536, "layers": 3, "outputs": 256},
    "gpt2": {"batch": 8, "seq": 64, "width": 384, "layers": 3, "heads": 8, "vocab": 2048},
    "llama3": {"batch": 8, "seq": 128, "width": 256, "layers": 2, "heads": 8, "kv_heads": 4, "hidden": 768, "vocab": 2048},
    "resnet": {"batch": 32, "image": 64, "width": 32, "blocks": "1-1"},
    "moe": {"batch": 16, "seq": 64, "width": 256, "layers": 2, "hidden": 512, "experts": 8, "vocab": 1024},
}
"""Sizes whose steps take 50 ms to a second on two to four ranks of a CPU, with collectives that a plan can spend or save."""

TIES = 0.1
"""Plans whose measured steps differ by less than this share of the slower one are equal."""
WARM = 4
"""Steps before the first that counts: allocations, the optimizer's states, the backend's connections."""
COUNTED = 3
"""Steps in which live memory is counted; the least peak holds, since a backend's thread may keep a buffer for a moment."""

Shape = tuple[int, ...]
Pins = dict[str, str]


# --- ways to plan ------------------------------------------------------------------------------------------------------


def _first(shape: Shape, ranks: int) -> str:
    """The first dim that the ranks divide is split."""
    found = next((dim for dim, extent in enumerate(shape) if extent % ranks == 0), None)
    return " ".join("S0" if dim == found else "R" for dim in range(len(shape)))


def _whole(shape: Shape, ranks: int) -> str:
    return " ".join("R" for _ in shape)


def _pins(graph: Graph, ranks: int, inputs: Callable[[Shape, int], str], weights: Callable[[Shape, int], str]) -> Pins:
    """A pin for every input and every parameter, by its shape."""
    of_inputs = {f"input:{item.name}": inputs(graph.tensors[item.tensor].shape, ranks) for item in graph.of_kind("input")}
    return of_inputs | {item.name: weights(graph.tensors[item.tensor].shape, ranks) for item in graph.of_kind("parameter")}


COLUMNS = (
    "*.query.*", "*.key.*", "*.value.*", "*.up.*",
    "*.wq.*", "*.wk.*", "*.wv.*", "*.w1.*", "*.w3.*",
    "layers.[02].weight", "*.convs.0.*",
)  # fmt: skip
ROWS = ("*.out.weight", "*.down.weight", "*.wo.weight", "*.w2.weight", "layers.[13].weight", "*.convs.1.*")
EXPERTS = ("*.experts.up", "*.experts.down")


def _tensor_parallel(graph: Graph, ranks: int, seed: int) -> Pins:
    """Inputs whole; weights by columns, then by rows, and experts apart; what has no such name is whole."""
    found = _pins(graph, ranks, _whole, _whole)
    for item in graph.of_kind("parameter"):
        shape = graph.tensors[item.tensor].shape
        for dim, names in ((0, COLUMNS), (1, ROWS), (0, EXPERTS)):
            if any(fnmatchcase(item.name, name) for name in names) and dim < len(shape) and shape[dim] % ranks == 0:
                found[item.name] = " ".join("S0" if place == dim else "R" for place in range(len(shape)))
    return found


def _at_random(graph: Graph, ranks: int, seed: int) -> Pins:
    """Every parameter and input in some legal spec on the mesh; the search finds the best operators for them."""
    chance, sizes = random.Random(seed), mesh_sizes(ranks)
    items = [*graph.of_kind("parameter"), *graph.of_kind("input")]
    specs = {item.name: str(chance.choice(list(splits(graph.tensors[item.tensor].shape, sizes)))) for item in items}
    return {f"input:{item.name}" if item.kind == "input" else item.name: specs[item.name] for item in items}


def mesh_sizes(ranks: int) -> tuple[int, ...]:
    """Of the mesh of two axes, where there can be two."""
    return (ranks // 2, 2) if ranks > 2 else (ranks,)


Way = Callable[[Graph, int, int], Pins]
WAYS: Mapping[str, tuple[Way, bool]] = {
    "free": (lambda graph, ranks, seed: {}, True),
    "ddp": (lambda graph, ranks, seed: _pins(graph, ranks, _first, _whole), False),
    "split weights": (lambda graph, ranks, seed: _pins(graph, ranks, _first, _first), False),
    "tensor parallel": (_tensor_parallel, False),
    "random": (_at_random, True),
}
"""What is pinned, and whether the mesh has two axes where it can."""


def make_plans(jobs: Sequence[tuple[str, str]], ranks: int, hardware: Hardware, given: argparse.Namespace) -> list[tuple[str, str, Any]]:
    """``(model, way, plan)`` of each job."""
    graphs: dict[str, Graph] = {}
    found = []
    for model, way in jobs:
        if model not in graphs:
            target = zoo.build(model, device="meta", **MODELS[model])
            graphs[model] = autopar.capture(target.model, target.args)
        pins, two = WAYS[way]
        mesh = dict(zip(("dp", "tp"), mesh_sizes(ranks) if two else (ranks,), strict=False))
        constraints = pins(graphs[model], ranks, given.seed)
        begin = time.perf_counter()
        plan = autopar.plan(graphs[model], mesh=mesh, hardware=hardware, constraints=constraints, time_limit=given.seconds)
        print(f"{model}, {way}, {ranks} ranks: planned in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        found.append((model, way, plan))
    return found


# --- running them ------------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """A plan's module on this rank, ready to step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: tuple[Tensor, ...]

    @staticmethod
    def of(model: str, plan: autopar.Plan) -> Runner:
        torch.manual_seed(0)
        target = zoo.build(model, **MODELS[model])
        module: Any = autopar.compile(target.model, plan, inputs="local")
        place, schedule = module.place, module.schedule
        specs = [schedule.specs[name_of(schedule.graph, item.name)] for item in schedule.graph.of_kind("input")]
        parts = [local_part(tensor, spec, place.mesh, place.rank).clone() for tensor, spec in zip(target.args, specs, strict=True)]
        return Runner(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True), tuple(parts))

    def forward_and_backward(self) -> None:
        self.model(*self.inputs).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> int:
        """Of a step's forward and backward."""
        states = [value for state in self.optimizer.state.values() for value in state.values() if value.dim() > 0]
        held = [*self.model.parameters(), *self.model.buffers(), *self.model.constants.values(), *self.inputs, *states]
        with LiveMemory(held) as memory:
            self.forward_and_backward()
        self.update()
        return int(memory.peak)


def race(model: str, plans: Mapping[str, autopar.Plan], rounds: int) -> dict[str, dict[str, Any]]:
    """What one rank sees of each plan: ``(start, end of backward, end)`` of every step, and the peak of live memory."""
    runners = {way: Runner.of(model, plan) for way, plan in plans.items()}
    for runner in runners.values():
        for _ in range(WARM):
            runner.forward_and_backward()
            runner.update()
    peaks = {way: min(runner.peak_bytes() for _ in range(COUNTED)) for way, runner in runners.items()}
    times: dict[str, list[tuple[float, float, float]]] = {way: [] for way in plans}
    clock, stretches = Clock(torch.device("cpu"), 0.0), []
    gc.collect()
    gc.freeze()
    ways = list(plans)
    for turn in range(-1, rounds):
        stretches.append(clock.stretch())
        for place in range(len(ways)):
            runner = runners[way := ways[(place + turn) % len(ways)]]
            dist.barrier()
            begin = time.perf_counter()
            runner.forward_and_backward()
            backward = time.perf_counter()
            runner.update()
            if turn >= 0:
                times[way].append((begin, backward, time.perf_counter()))
    return {way: {"times": times[way], "peak": peaks[way], "stretch": stretches} for way in plans}


# --- what is said of them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One plan, predicted and measured; seconds, and bytes on a rank. Over rounds: ``measured`` a lower quartile, ``stretch`` a median."""

    ranks: int
    model: str
    way: str
    mesh: str
    predicted: float
    measured: float
    error: float
    minimum: float
    median: float
    predicted_optimizer: float
    measured_optimizer: float
    predicted_bytes: int
    measured_bytes: int
    memory_error: float
    stretch: float
    error_at_stretch: float
    seconds: tuple[float, ...]


def summarise(ranks: int, model: str, plans: Mapping[str, autopar.Plan], seen: Sequence[Mapping[str, Any]], profiled: float) -> list[Row]:
    """A row a plan. The clock is the machine's, the same for all ranks; ``profiled`` is the profile's stretch."""
    rows = []
    for way, plan in plans.items():
        steps = list(zip(*(rank[way]["times"] for rank in seen), strict=True))
        seconds = sorted(max(times[-1] for times in step) - min(times[0] for times in step) for step in steps)
        optimizer = statistics.median(statistics.median(times[2] - times[1] for times in step) for step in steps)
        stretch = statistics.median([statistics.mean(each) for each in zip(*(rank[way]["stretch"] for rank in seen), strict=True)])
        measured, predicted = lower_quartile(seconds), plan.predicted
        peak = max(rank[way]["peak"] for rank in seen)
        rows.append(
            Row(
                ranks, model, way, ",".join(f"{name}={size}" for name, size in plan.mesh.items()),
                predicted.step_seconds, measured, predicted.step_seconds / measured - 1, seconds[0], statistics.median(seconds),
                predicted.optimizer_seconds, optimizer,
                predicted.peak_memory_bytes_per_rank, peak, predicted.peak_memory_bytes_per_rank / peak - 1,
                stretch, predicted.step_seconds * stretch / profiled / measured - 1, tuple(seconds),
            )
        )  # fmt: skip
    return rows


def lower_quartile(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def kendall_tau(rows: Sequence[Row]) -> float | None:
    """Of the order of these plans; None where all are equal."""
    signs = []
    for a, b in itertools.combinations(rows, 2):
        if abs(a.measured - b.measured) >= TIES * max(a.measured, b.measured):
            signs.append(1 if (a.measured < b.measured) == (a.predicted < b.predicted) else -1)
    return sum(signs) / len(signs) if signs else None


HEAD = (
    "ranks", "model", "plan", "mesh", "predicted", "measured", "error", "minimum", "median",
    "optimizer", "measured", "MiB", "measured", "error", "stretch", "error",
)  # fmt: skip


def show(rows: Sequence[Row]) -> None:
    """The table."""
    print("{:>5} {:7} {:15} {:9} {:>9} {:>9} {:>7} {:>8} {:>8} {:>9} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7}".format(*HEAD))
    for row in rows:
        times = f"{1e3 * row.predicted:9.1f} {1e3 * row.measured:9.1f} {row.error:+7.1%} {1e3 * row.minimum:8.1f} {1e3 * row.median:8.1f}"
        parts = f"{1e3 * row.predicted_optimizer:9.1f} {1e3 * row.measured_optimizer:8.1f}"
        memory = f"{row.predicted_bytes / 2**20:8.1f} {row.measured_bytes / 2**20:8.1f} {row.memory_error:+7.1%}"
        stretched = f"{row.stretch:7.2f} {row.error_at_stretch:+7.1%}"
        print(f"{row.ranks:5} {row.model:7} {row.way:15} {row.mesh:9} {times} {parts} {memory} {stretched}", flush=True)


def judge(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that the table comes to, by number of ranks."""
    found: dict[str, Any] = {}
    for ranks in sorted({row.ranks for row in rows}):
        some = [row for row in rows if row.ranks == ranks]
        steps, memory, stretched = ([abs(error) for error in errors] for errors in zip(*map(_errors, some), strict=True))
        found[str(ranks)] = {
            "pairs": len(some),
            "step_error": {"median": statistics.median(steps), "largest": max(steps)},
            "memory_error": {"median": statistics.median(memory), "largest": max(memory)},
            "step_error_at_stretch": {"median": statistics.median(stretched), "largest": max(stretched)},
            "noise": statistics.median(row.median / row.minimum - 1 for row in some),
            "tau": {model: kendall_tau([row for row in some if row.model == model]) for model in dict.fromkeys(row.model for row in some)},
        }
    return found


def _errors(row: Row) -> tuple[float, float, float]:
    return row.error, row.memory_error, row.error_at_stretch


def words(judged: Mapping[str, Any]) -> None:
    for ranks, item in judged.items():
        step, memory, stretched = item["step_error"], item["memory_error"], item["step_error_at_stretch"]
        taus = ", ".join(f"{model} {'-' if tau is None else f'{tau:.2f}'}" for model, tau in item["tau"].items())
        print(f"{ranks} ranks, {item['pairs']} plans: step error median {step['median']:.1%}, largest {step['largest']:.1%};", end=" ")
        print(f"at the stretch here {stretched['median']:.1%}, {stretched['largest']:.1%};", end=" ")
        print(f"memory {memory['median']:.1%}, {memory['largest']:.1%}; medians over minima {item['noise']:.1%}; tau: {taus}")


def load() -> str:
    return "load averages " + " ".join(f"{value:.1f}" for value in os.getloadavg())


def profiled(ranks: int, given: argparse.Namespace) -> tuple[Hardware, float]:
    """The hardware file, or what as many ranks measure now; and the stretch that its notes tell."""
    if given.hardware:
        path = Path(given.hardware.format(ranks=ranks))
        hardware: Hardware = resolve_hardware(path)
        return hardware, stretch_told(path.read_text())
    begin = time.perf_counter()
    measured = measure(ranks, quiet=True)
    assert measured is not None
    print(f"profiled by {ranks} ranks in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    if given.keep:
        given.keep.mkdir(parents=True, exist_ok=True)
        (given.keep / f"measured-{ranks}.toml").write_text(to_toml(measured))
    return measured.hardware, stretch_told(to_toml(measured))


def stretch_told(text: str) -> float:
    """By the notes of a hardware file."""
    found = re.search(r"a second of work takes ([0-9.]+) s", text)
    return float(found[1]) if found else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, by comma")
    parser.add_argument("--models", default=",".join(MODELS), help="by comma")
    parser.add_argument("--ways", default=",".join(WAYS), help="by comma")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0, help="the solver's time limit for each mesh")
    parser.add_argument("--seed", type=int, default=1, help="of random plans")
    parser.add_argument("--hardware", metavar="FILE", help="in place of a profile; {ranks} stands for the number of ranks")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the profiles there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    models, ways = given.models.split(","), given.ways.split(",")
    if unknown := [name for name in models if name not in MODELS] + [name for name in ways if name not in WAYS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join((*MODELS, *WAYS))}")
    loads = [load()]
    print(f"{loads[0]} at the start; {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    jobs = [(model, way) for model in models for way in ways]
    rows: list[Row] = []
    for ranks in map(int, given.ranks.split(",")):
        hardware, stretch = profiled(ranks, given)
        print(f"{ranks} ranks: stretch {stretch:.2f} in the profile; {load()}", flush=True)
        made = run_ranks(lambda rank, ranks=ranks, hardware=hardware: make_plans(jobs[rank::2], ranks, hardware, given), 2, alone=True)
        by_job = {(model, way): plan for part in made for model, way, plan in part}
        for model in models:
            plans = {way: by_job[model, way] for way in ways}
            seen = run_ranks(lambda _, model=model, plans=plans: race(model, plans, given.rounds), ranks)
            rows += summarise(ranks, model, plans, seen, stretch)
            print(f"{model} on {ranks} ranks: {load()}", file=sys.stderr, flush=True)
        show([row for row in rows if row.ranks == ranks])
    judged = judge(rows)
    words(judged)
    loads.append(load())
    print(f"milliseconds; the lower quartile of {given.rounds} rounds is held against the prediction; {loads[-1]} at the end")
    if given.json:
        given.json.write_text(json.dumps({"loads": loads, "rows": [asdict(row) for row in rows], **judged}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
