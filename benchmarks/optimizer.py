"""How long does an optimizer's step take on the parameters of a plan, beside those of DistributedDataParallel?

    python benchmarks/optimizer.py [--layers 4] [--width 64] [--ranks 4] [--rounds 40] [--json FILE]

GPT-2 of the zoo with small weights, so that a step is what its calls cost the host. Gloo ranks forked on this machine with one thread each.
The contestants are a plan that leaves every parameter whole, one that splits the matrices over half of the mesh, and DDP. They live in the
same ranks; each has gradients of one backward pass, and steps in turn, in an order that rotates. Given is the first rank's processor time:
medians, and the median over rounds of the ratio to DDP's within a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

import autopar
from autopar import zoo
from autopar.verify.launch import run_ranks

FORMS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9, lr=1e-4),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4),
}
DDP = "ddp"
WARMUP = 5
"""Rounds that are not counted."""


def make_plans(graph: autopar.Graph, ranks: int) -> dict[str, autopar.Plan]:
    """By contestant: all parameters whole, and matrices split over the second of two axes."""
    shapes = {item.name: graph.tensors[item.tensor].shape for item in graph.of_kind("parameter")}
    whole = {name: " ".join("R" * len(shape)) for name, shape in shapes.items()}
    split = {name: "S1 R" if len(shape) == 2 else spec for (name, shape), spec in zip(shapes.items(), whole.values(), strict=True)}
    rows = {"input:*": "S0 R"}
    return {
        "whole": autopar.plan(graph, mesh={"dp": ranks}, hardware="cpu-cluster", constraints={**whole, **rows}),
        "mixed": autopar.plan(graph, mesh={"dp": ranks // 2, "tp": 2}, hardware="cpu-cluster", constraints={**split, **rows}),
    }


def race(build: Callable[[], zoo.Target], plans: Mapping[str, autopar.Plan], rounds: int) -> list[dict[str, Any]]:
    """One row a form of the optimizer, as one rank sees it."""
    models: dict[str, nn.Module] = {DDP: nn.parallel.DistributedDataParallel(build().model)}
    models |= {name: autopar.compile(build().model, plan) for name, plan in plans.items()}
    args = build().args
    for model in models.values():
        model(*args).backward()
    rows = []
    for form, make in FORMS.items():
        optimizers = {name: make(model.parameters()) for name, model in models.items()}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        gc.collect()
        gc.freeze()
        for turn in range(WARMUP + rounds):
            for place in range(len(models)):
                name = list(models)[(place + turn) % len(models)]
                begin = time.process_time()
                optimizers[name].step()
                if turn >= WARMUP:
                    seconds[name].append(time.process_time() - begin)
        for name, found in seconds.items():
            ratio = statistics.median(one / other for one, other in zip(found, seconds[DDP], strict=True))
            rows.append({"form": form, "parameters": name, "seconds": statistics.median(found), "ratio": ratio})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("layers", 4), ("width", 64), ("heads", 4), ("vocab", 256), ("batch", 8), ("seq", 16), ("ranks", 4), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = vars(parser.parse_args(argv))
    ranks, rounds, path = given.pop("ranks"), given.pop("rounds"), given.pop("json")
    if ranks < 2 or ranks % 2:
        parser.error(f"--ranks must be even, for a mesh of two axes: got {ranks}")

    def build() -> zoo.Target:
        torch.manual_seed(0)
        return zoo.build("gpt2", **given)

    target = build()
    plans = make_plans(autopar.capture(target.model, target.args), ranks)
    rows = run_ranks(lambda _: race(build, plans, rounds), ranks, timeout=600)[0]
    print(f"{len(list(target.model.parameters()))} parameters, {ranks} ranks, processor time of a step")
    print(f"{'optimizer':20} {'parameters':12} {'ms':>8} {'to DDP':>8}")
    for row in rows:
        print(f"{row['form']:20} {row['parameters']:12} {row['seconds'] * 1e3:8.2f} {row['ratio']:8.2f}")
    if path is not None:
        path.write_text(json.dumps({"ranks": ranks, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
