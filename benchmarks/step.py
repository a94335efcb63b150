"""How long does a training step take, beside the ways of torch itself?

    python benchmarks/step.py [--layers 4] [--width 256] ... [--rounds 20] [--only ddp,"as ddp"] [--plans FOLDER] [--json FILE]

GPT-2 of the zoo, AdamW, gloo ranks forked on this machine with one thread each. All contestants live in the same ranks with weights of
their own, equal at the start, and step in turn: a round is one step of each, in an order that rotates, with a barrier before each.
A step's time runs from the first rank's start to the last rank's end, so a rank that waits for another is counted once.
Plans are made for this machine as ``autopar profile`` measures it: with ranks that share cores, a collective's latency is milliseconds,
and what is put in buckets follows from that.
Medians and minima over rounds; processor time is all ranks', threads of the backend included; ratios are medians over rounds of the
ratio within a round, so that a slow moment of the machine hits both sides. Losses, averaged over ranks where each has its own batch,
must be equal step by step.

Single-rank contestants (plain eager, and a mesh of one) are a run of their own, on one rank.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import zoo
from autopar.runtime.ranks.placement import local_part
from autopar.verify.launch import run_ranks
from autopar.verify.trials import name_of

COLUMNS, ROWS = ("attn.query", "attn.key", "attn.value", "up"), ("attn.out", "down")
"""The linears of a block that tensor parallelism splits by columns, and by rows."""
TOLERANCE = 1e-4
"""Relative difference of losses that passes: float32 sums in another order, and AdamW in between."""


@dataclass(frozen=True)
class Sizes:
    """The model and its batch, whole."""

    layers: int
    width: int
    heads: int
    vocab: int
    batch: int
    seq: int

    def build(self) -> zoo.Target:
        """The same model, and the same inputs, whoever asks."""
        torch.manual_seed(0)
        return zoo.build("gpt2", **asdict(self))


@dataclass(frozen=True)
class Contestant:
    """A model ready to train.

    Args:
        model: forward gives the loss.
        inputs: this rank's.
        averaged: the loss is that of the rank's own inputs.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    averaged: bool = False


# --- torch's own ways --------------------------------------------------------------------------------------------------


def _own_rows(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.chunk(dist.get_world_size())[dist.get_rank()].clone() for tensor in inputs)


def eager(target: zoo.Target) -> Contestant:
    """The model as it is."""
    return Contestant(target.model, target.args)


def ddp(target: zoo.Target) -> Contestant:
    """DistributedDataParallel with its defaults."""
    return Contestant(nn.parallel.DistributedDataParallel(target.model), _own_rows(target.args), averaged=True)


def fsdp(target: zoo.Target) -> Contestant:
    """fully_shard of each block, then of the rest, with its defaults: blocks are gathered again in backward."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in target.model.layers:
        fully_shard(layer, mesh=mesh)
    return Contestant(fully_shard(target.model, mesh=mesh), _own_rows(target.args), averaged=True)


def tensor_parallel(target: zoo.Target) -> Contestant:
    """parallelize_module of each block, columns then rows; what lies between blocks is replicated."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in target.model.layers:
        parallelize_module(layer, mesh, {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}})
        layer.attn.heads //= mesh.size()
        layer.attn.forward = _own_heads.__get__(layer.attn)
    return Contestant(target.model, target.args)


def _own_heads(self: Any, x: Tensor) -> Tensor:
    """The zoo's attention on this rank's heads."""
    b, s, _ = x.shape
    q, k, v = (part(x).view(b, s, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
    x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.dropout(self.out(x.transpose(1, 2).reshape(b, s, -1)))


# --- ours --------------------------------------------------------------------------------------------------------------

_WHOLE = {"input:*": "R R", "positions.weight": "R R", "tokens.weight": "R R", "*norm*": "R"}
_COLUMNS = {f"layers.*.{name}.{kind}": spec for name in COLUMNS for kind, spec in (("weight", "S0 R"), ("bias", "S0"))}
_ROWS = {f"layers.*.{name}.{kind}": spec for name in ROWS for kind, spec in (("weight", "R S0"), ("bias", "R"))}


@dataclass(frozen=True)
class Pinned:
    """What a plan of ours is asked for.

    Args:
        mesh: its axes; ``{}`` is a mesh of one, None any mesh of all ranks.
        matrices, vectors: the spec of parameters of two dims and of one, where all are alike.
        pins: any others.
        like: the baseline whose memory it may take at most, so that it does what the baseline does to stay small.
    """

    mesh: tuple[str, ...] | None
    matrices: str | None = None
    vectors: str | None = None
    pins: Mapping[str, str] | None = None
    like: str | None = None


ROWS_OF_ALL = {"input:*": "S0 R"}
PINNED: Mapping[str, Pinned] = {
    "as ddp": Pinned(("dp",), "R R", "R", ROWS_OF_ALL),
    "as fsdp": Pinned(("dp",), "S0 R", "S0", ROWS_OF_ALL, like="fsdp"),
    "as tensor parallel": Pinned(("tp",), pins={**_WHOLE, **_COLUMNS, **_ROWS}),
    "free": Pinned(None),
    "mesh of one": Pinned(()),
}
PLAIN: Mapping[str, Callable[[zoo.Target], Contestant]] = {
    "eager": eager,
    "ddp": ddp,
    "fsdp": fsdp,
    "tensor parallel": tensor_parallel,
}
RIVAL = {"as ddp": "ddp", "as fsdp": "fsdp", "as tensor parallel": "tensor parallel", "mesh of one": "eager"}
"""Whom each of ours is held against; the free plan, against the best of torch's on all ranks."""
PARTS = ("forward", "backward", "optimizer")
ALONE = ("eager", "mesh of one")
"""Those that run on one rank."""


def measured(ranks: int, folder: Path | None) -> Path:
    """The hardware file of this machine, as ``autopar profile`` writes it; kept where plans are kept."""
    from autopar.measurement import measure, to_toml

    path = (folder or Path(tempfile.mkdtemp())) / f"measured-{ranks}.toml"
    if not path.exists():
        made = measure(ranks)
        assert made is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(made))
    return path


def make_plans(names: Sequence[str], sizes: Sizes, ranks: int, hardware: str, folder: Path | None) -> dict[str, autopar.Plan]:
    """A plan for each of ours among the names; read from ``folder`` where an earlier run with these settings left it."""
    target, plans = sizes.build(), {}
    graph: autopar.Graph | None = None
    dims = {name: tensor.dim() for name, tensor in target.model.named_parameters()}
    for name in (name for name in names if name in PINNED):
        wanted = PINNED[name]
        key = hashlib.sha256(json.dumps([asdict(sizes), ranks, hardware, name, repr(wanted)]).encode()).hexdigest()[:12]
        path = None if folder is None else folder / f"{name.replace(' ', '-')}-{key}.json"
        if path is not None and path.exists():
            plans[name] = autopar.load(path)
            continue
        if graph is None:
            graph = autopar.capture(target.model, target.args)
        options: dict[str, Any] = {"hardware": hardware}
        where = {"devices": ranks} if wanted.mesh is None else {"mesh": dict.fromkeys(wanted.mesh, ranks) or {"dp": 1}}
        if wanted.like is not None:
            options["memory"] = autopar.plan(graph, **where, **options).baselines[wanted.like].peak_memory_bytes_per_rank
        alike = {1: wanted.vectors, 2: wanted.matrices}
        pins = {parameter: spec for parameter, dim in dims.items() if (spec := alike[dim]) is not None}
        plans[name] = autopar.plan(graph, **where, **options, constraints={**pins, **(wanted.pins or {})})
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            plans[name].save(path)
    return plans


def ours(target: zoo.Target, plan: autopar.Plan) -> Contestant:
    """A plan's module; each rank passes its own part."""
    module: Any = autopar.compile(target.model, plan, inputs="local")
    place, schedule, graph = module.place, module.schedule, module.schedule.graph
    names = [item.name for item in graph.of_kind("input")]
    specs = [schedule.specs[name_of(graph, name)] for name in names]
    parts = [local_part(tensor, spec, place.mesh, place.rank).clone() for tensor, spec in zip(target.args, specs, strict=True)]
    return Contestant(module, tuple(parts))


def make_contestant(name: str, plans: Mapping[str, autopar.Plan], sizes: Sizes) -> Contestant:
    """The contestant of a name, with weights of its own."""
    return ours(sizes.build(), plans[name]) if name in plans else PLAIN[name](sizes.build())


# --- the race ----------------------------------------------------------------------------------------------------------


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Plain parameters and DTensors apart: one fused update takes one kind."""
    kinds: dict[type, list[Tensor]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return [{"params": parameters} for parameters in kinds.values()]


def race(
    contestants: Mapping[str, Callable[[], Contestant]], rounds: int, warmup: int, fused: bool, untimed: int = 0
) -> dict[str, Any]:  # fmt: skip
    """What one rank sees: for each contestant the losses, and of every step its start, the ends of its parts, and its processor time.

    Args:
        untimed: steps before each timed one in a turn.
    """
    names = list(contestants)
    made = {name: make() for name, make in contestants.items()}
    optimizers = {name: torch.optim.AdamW(_groups(item.model), lr=1e-4, fused=fused) for name, item in made.items()}
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()
    for turn in range(warmup + rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            item, optimizer = made[name], optimizers[name]
            for _ in range(untimed):
                item.model(*item.inputs).backward()
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            loss = item.model(*item.inputs)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            end, worked = time.perf_counter(), time.process_time() - worked
            value = loss.detach().clone()
            if item.averaged:
                dist.all_reduce(value, op=dist.ReduceOp.SUM)
                value /= dist.get_world_size()
            losses[name].append(value.item())
            if turn >= warmup:
                times[name].append((begin, forward, backward, end, worked))
    return {"times": times, "losses": losses}


def summarise(seen: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row a contestant. The clock is the machine's, the same for all ranks."""
    rows = []
    for name in names:
        steps = list(zip(*(rank["times"][name] for rank in seen), strict=True))
        seconds = [max(times[3] for times in step) - min(times[0] for times in step) for step in steps]
        parts = [[max(times[n + 1] - times[n] for times in step) for step in steps] for n in range(3)]
        row = {"name": name, "median_seconds": statistics.median(seconds), "minimum_seconds": min(seconds), "seconds": seconds}
        row |= {f"{part}_seconds": statistics.median(found) for part, found in zip(PARTS, parts, strict=True)}
        row["processor_seconds"] = statistics.median(sum(times[4] for times in step) for step in steps)
        rows.append(row | {"losses": seen[0]["losses"][name]})
    return rows


def hold_against(rows: Sequence[dict[str, Any]]) -> None:
    """Writes into each of our rows whom it is held against and the ratio."""
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        rival = RIVAL.get(row["name"])
        if row["name"] == "free":
            torchs = [name for name in PLAIN if name in by_name and name not in ALONE]
            rival = min(torchs, key=lambda name: by_name[name]["median_seconds"], default=None)
        if rival in by_name:
            other = by_name[rival]
            row["against"] = rival
            row["ratio"] = statistics.median(mine / its for mine, its in zip(row["seconds"], other["seconds"], strict=True))
            row["ratio_of_minima"] = row["minimum_seconds"] / other["minimum_seconds"]


def loss_difference(rows: Sequence[dict[str, Any]]) -> float:
    """The largest relative difference of a step's losses between two contestants."""
    return max((max(step) - min(step)) / max(map(abs, step)) for step in zip(*(row["losses"] for row in rows), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("layers", 4), ("width", 256), ("heads", 8), ("vocab", 1024), ("batch", 16), ("seq", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--hardware", help="what plans are made for; this machine, measured first by as many ranks, if not given")
    parser.add_argument("--for-loop", action="store_true", help="AdamW parameter by parameter, torch's default on CPUs; else fused")
    parser.add_argument("--only", default=",".join((*PLAIN, *PINNED)), help="contestants, by comma")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="keep plans there, and take them from there")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    names = [name.strip() for name in given.only.split(",")]
    if unknown := [name for name in names if name not in PLAIN and name not in PINNED]:
        parser.error(f"no contestant {', '.join(unknown)}; there are {', '.join((*PLAIN, *PINNED))}")
    sizes = Sizes(given.layers, given.width, given.heads, given.vocab, given.batch, given.seq)
    hardware = given.hardware or str(measured(given.ranks, given.plans))
    plans = run_ranks(lambda _: make_plans(names, sizes, given.ranks, hardware, given.plans), 1, alone=True)[0]
    rows: list[dict[str, Any]] = []
    for ranks, group in ((given.ranks, [name for name in names if name not in ALONE]), (1, [name for name in names if name in ALONE])):
        if group:
            made = {name: partial(make_contestant, name, plans, sizes) for name in group}
            seen = run_ranks(lambda _, made=made: race(made, given.rounds, given.warmup, not given.for_loop), ranks)
            rows += summarise(seen, group)
    hold_against(rows)
    head = ("median", "minimum", "forward", "backward", "optimizer", "processor")
    print(f"{'':20} {'{:>8} {:>8} {:>8} {:>8} {:>9} {:>9}'.format(*head)}  {'ratio':>6} {'of minima':>9}  against")
    for row in rows:
        figures = " ".join(f"{1e3 * row[f'{part}_seconds']:8.1f}" for part in ("median", "minimum", "forward", "backward"))
        ratio = f"{row['ratio']:6.3f} {row['ratio_of_minima']:9.3f}  {row['against']}" if "ratio" in row else ""
        print(f"{row['name']:20} {figures} {1e3 * row['optimizer_seconds']:9.1f} {1e3 * row['processor_seconds']:9.1f}  {ratio}")
    difference = loss_difference(rows)
    print(f"milliseconds, {given.rounds} rounds, {given.ranks} ranks; losses differ by at most {difference:.1e}, relatively")
    if given.json:
        data = {"sizes": asdict(sizes), "ranks": given.ranks, "loss_difference": difference, "rows": rows}
        given.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
