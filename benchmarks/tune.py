"""Does ``autopar tune`` write the fastest plan, beside all that are tried by hand?

    python benchmarks/tune.py [--models gpt2,llama,mlp] [--rounds 20] [--again 3] [--hardware FILE.toml] [--json FILE]

Three models of the zoo, AdamW, four gloo ranks forked on this machine with one thread each. For each model ``autopar.tune`` chooses a plan
on these ranks. Then it races the ways by hand, interleaved as in ``benchmarks/step.py``, an untimed step of the same before each timed one:

ddp, fsdp, tensor parallel    torch's own: DistributedDataParallel, fully_shard of each layer, parallelize_module
as ddp, as fsdp               the same as plans, of the planner's own
free                          the planner's best plan by its prices
tuned                         the plan that tune wrote

A ratio is the median over rounds of the ratio within a round, to the fastest of all but ``tuned``. It is asked to be within 2 %.
``--again`` runs as many tunes of each model, since a tune is itself a measurement. A plan that a tune shares with ``free`` shows the noise:
both are the same program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import zoo
from autopar.verify.launch import run_ranks
from benchmarks.step import Contestant, ddp, fsdp, measured, ours, race, summarise
from benchmarks.step import tensor_parallel as gpt2_tensor_parallel

ASKED = 0.02
"""How much longer than the fastest by hand the tuned plan may take."""
RANKS = 4


def llama_tensor_parallel(target: zoo.Target) -> Contestant:
    """parallelize_module of each block, columns then rows; heads follow from the sizes of the parts."""
    columns = ("attn.wq", "attn.wk", "attn.wv", "ffn.w1", "ffn.w3")
    return _parallelized(target, [{**dict.fromkeys(columns, True), "attn.wo": False, "ffn.w2": False}] * len(target.model.layers))


def mlp_tensor_parallel(target: zoo.Target) -> Contestant:
    """parallelize_module of layers by columns and rows in turn."""
    return _parallelized(target, [{"": number % 2 == 0} for number in range(len(target.model.layers))])


def _parallelized(target: zoo.Target, layers: Sequence[Mapping[str, bool]]) -> Contestant:
    """The target with linears of its layers split, by name whether by columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer, linears in zip(target.model.layers, layers, strict=True):
        styles = {name: ColwiseParallel() if columns else RowwiseParallel() for name, columns in linears.items()}
        parallelize_module(layer, mesh, styles.get("") or styles)
    return Contestant(target.model, target.args)


@dataclass(frozen=True)
class Model:
    """A model of the zoo, its sizes, and its tensor parallelism by hand."""

    name: str
    tensor_parallel: Callable[[zoo.Target], Contestant]
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> zoo.Target:
        """The same model, and the same inputs, whoever asks."""
        torch.manual_seed(0)
        return zoo.build(self.name, **self.sizes)


MODELS: Mapping[str, Model] = {
    "gpt2": Model("gpt2", gpt2_tensor_parallel, {"layers": 4, "width": 256, "heads": 8, "vocab": 1024, "batch": 16, "seq": 128}),
    "llama": Model("llama3-8b", llama_tensor_parallel, {
        "layers": 3, "width": 256, "heads": 8, "kv_heads": 4, "hidden": 1024, "vocab": 1024, "batch": 16, "seq": 128, "dtype": "float32",
    }),
    "mlp": Model("mlp", mlp_tensor_parallel, {"layers": 4, "inputs": 1024, "width": 1024, "outputs": 1024, "batch": 128}),
}  # fmt: skip


def tune(model: Model, hardware: str) -> str:
    """The plan that tune writes, as text. On each of the ranks."""
    target = model.build()
    return autopar.tune(target.model, target.args, mesh={"dp": RANKS}, hardware=hardware, target=model.name).to_json()


def plan_by_hand(model: Model, hardware: str) -> dict[str, str]:
    """Plans to compare with, as text: by prices, and as DDP and FSDP."""
    target = model.build()
    graph = autopar.capture(target.model, target.args)
    plan = partial(autopar.plan, graph, mesh={"dp": RANKS}, hardware=hardware)
    free = plan()
    rows, matrices = {"input:*": _first_split(target.args[0].dim())}, {2: "S0 R", 1: "S0"}
    dims = {name: tensor.dim() for name, tensor in target.model.named_parameters()}
    whole, split = ({name: form(dim) for name, dim in dims.items()} for form in (_whole, matrices.__getitem__))
    least = free.baselines["fsdp"].peak_memory_bytes_per_rank
    made = {"free": free, "as ddp": plan(constraints={**rows, **whole}), "as fsdp": plan(constraints={**rows, **split}, memory=least)}
    return {name: one.to_json() for name, one in made.items()}


def _whole(dims: int) -> str:
    return " ".join("R" * dims)


def _first_split(dims: int) -> str:
    return " ".join(["S0", *"R" * (dims - 1)])


def race_model(model: Model, plans: Mapping[str, autopar.Plan], rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant: ``benchmarks/step.py``'s."""
    torchs = {"ddp": ddp, "fsdp": fsdp, "tensor parallel": model.tensor_parallel}
    made: dict[str, Callable[[], Contestant]] = {name: partial(_build, make, model) for name, make in torchs.items()}
    made |= {name: partial(_build, partial(_ours, plan), model) for name, plan in plans.items()}
    return summarise(run_ranks(lambda _: race(made, rounds, 3, fused=True, untimed=1), RANKS), list(made))


def _build(make: Callable[[zoo.Target], Contestant], model: Model) -> Contestant:
    return make(model.build())


def _ours(plan: autopar.Plan, target: zoo.Target) -> Contestant:
    return ours(target, plan)


def to_fastest(rows: Sequence[dict[str, Any]], tuned: str) -> tuple[str, float, float]:
    """The fastest by hand, and the tuned plan's ratio to it: paired, and of the minima, which other work on the machine disturbs less."""
    by_name = {row["name"]: row for row in rows}
    others = [row for row in rows if not row["name"].startswith("tuned")]
    fastest = min(others, key=lambda row: row["median_seconds"])
    pairs = zip(by_name[tuned]["seconds"], fastest["seconds"], strict=True)
    of_minima = by_name[tuned]["minimum_seconds"] / min(row["minimum_seconds"] for row in others)
    return fastest["name"], statistics.median(mine / its for mine, its in pairs), of_minima


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="by comma")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--again", type=int, default=1, help="tunes of each model")
    parser.add_argument("--hardware", help="what plans are made for; this machine, measured first by as many ranks, if not given")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    names = given.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    hardware = given.hardware or str(measured(RANKS, None))
    found: dict[str, Any] = {}
    worst = 0.0
    for name in names:
        model = MODELS[name]
        texts = run_ranks(lambda _, model=model: plan_by_hand(model, hardware), 1, alone=True)[0]
        for number in range(given.again):
            texts[f"tuned {number + 1}"] = run_ranks(lambda _, model=model: tune(model, hardware), RANKS)[0]
        plans = {key: autopar.Plan.from_json(text) for key, text in texts.items()}
        rows = race_model(model, plans, given.rounds)
        print(f"\n{name}, {RANKS} ranks, {given.rounds} rounds")
        for row in sorted(rows, key=lambda row: row["median_seconds"]):
            ours_ = plans.get(row["name"])
            predicted = f"{1e3 * ours_.predicted.step_seconds:8.1f}" if ours_ is not None else " " * 8
            chosen = f"  {ours_.measured.candidates[0].name}" if ours_ is not None and ours_.measured is not None else ""
            figures = f"{1e3 * row['median_seconds']:8.1f} ms, minimum {1e3 * row['minimum_seconds']:8.1f}"
            print(f"  {row['name']:16} {figures}, predicted {predicted}{chosen}", flush=True)
        found[name] = {"rows": rows, "tuned": {}}
        for key in (key for key in plans if key.startswith("tuned")):
            fastest, ratio, of_minima = to_fastest(rows, key)
            worst = max(worst, ratio)
            measured_rows = [row.model_dump() for row in plans[key].measured.candidates]  # type: ignore[union-attr]
            found[name]["tuned"][key] = {"fastest": fastest, "ratio": ratio, "ratio_of_minima": of_minima, "candidates": measured_rows}
            print(f"  {key}: {ratio:.3f} of the fastest by hand, {fastest}; minimum {of_minima:.3f} of the least minimum by hand")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if worst <= 1 + ASKED else 1


if __name__ == "__main__":
    sys.exit(main())
