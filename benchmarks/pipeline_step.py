"""How long does a pipeline's training step take, beside torch.distributed.pipelining on the same cut?

    python benchmarks/pipeline_step.py [--stages 2] [--microbatches 8] [--layers 8] [--width 256] [--rounds 20]
        [--order whole]

GPT-2 of the zoo with a head of its own, AdamW, gloo ranks forked on this machine with one thread each, one rank a stage. Both run 1F1B-like
orders: torch ``Schedule1F1B``, autopar the timetable of its plan. Both live in the same ranks and step in turn, in rotating order, with a
barrier before each. A step's time runs from the first rank's start to the last rank's end. Losses must be equal step by step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autopar
from autopar import zoo
from autopar.verify.launch import run_ranks

TOLERANCE = 1e-4
"""Relative difference of losses that passes: float32 sums in another order, and AdamW in between."""


class Part(nn.Module):
    """A stage of the zoo's GPT-2 by hand: some of its layers, with what stands before the first and behind the last."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        self.tokens, self.positions = (model.tokens, model.positions) if first == 0 else (None, None)
        self.layers = nn.ModuleList(list(model.layers)[first:last])
        self.norm, self.head = (model.norm, model.head) if last == len(model.layers) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def build(options: argparse.Namespace) -> tuple[Any, tuple[Tensor, Tensor]]:
    """The same model and batch, whoever asks."""
    torch.manual_seed(0)
    sizes = {"layers": options.layers, "width": options.width, "batch": options.batch, "seq": options.seq, "vocab": options.vocab}
    model = zoo.materialize(zoo.build("gpt2", **sizes).model)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    shape = (options.batch, options.seq)
    return model, (torch.randint(0, options.vocab, shape), torch.randint(0, options.vocab, shape))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torchs(options: argparse.Namespace, rank: int) -> Callable[[], float]:
    """A step of torch's pipeline: its loss on the last rank, 0 elsewhere."""
    model, (x, y) = build(options)
    counts = list(map(int, options.cut.split(",")))
    first = sum(counts[:rank])
    part = Part(model, first, first + counts[rank])
    stage = PipelineStage(part, rank, options.stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        losses: list[Tensor] = []
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == options.stages - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step


def ours(options: argparse.Namespace, plan: autopar.PipelinePlan, rank: int) -> Callable[[], float]:
    """A step of the planned pipeline."""
    model, batch = build(options)
    module = autopar.compile_pipeline(model, plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) if rank == options.stages - 1 else 0.0

    return step


def race(options: argparse.Namespace, plan: autopar.PipelinePlan) -> Callable[[int], dict[str, list[Any]]]:
    """The run of one rank: begin and end of each step, and losses, by contestant."""

    def run(rank: int) -> dict[str, list[Any]]:
        torch.set_num_threads(1)
        steps = {"torch": torchs(options, rank), "autopar": ours(options, plan, rank)}
        seen: dict[str, list[Any]] = {name: [] for name in steps}
        for turn in range(options.warmup + options.rounds):
            names = list(steps)[:: 1 if turn % 2 else -1]
            for name in names:
                dist.barrier()
                begin = time.monotonic()
                loss = steps[name]()
                seen[name].append((begin, time.monotonic(), loss))
        return {name: rows[options.warmup :] for name, rows in seen.items()}

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("stages", 2), ("microbatches", 8), ("layers", 8), ("width", 256), ("batch", 16), ("seq", 64), ("vocab", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--hardware", default="cpu-cluster")
    parser.add_argument("--order", default="whole", help="of autopar's plan: see autopar plan --order; torch's is 1F1B")
    options = parser.parse_args()
    each = options.layers // options.stages
    options.cut = ",".join([str(each)] * (options.stages - 1) + [str(options.layers - each * (options.stages - 1))])
    model, batch = build(options)
    plan = autopar.plan_pipeline(
        model, batch, mesh=f"pp={options.stages}", microbatches=options.microbatches, hardware=options.hardware, stages=options.cut,
        order=options.order,
    )  # fmt: skip
    seen = run_ranks(race(options, plan), options.stages)
    spans = {
        name: [max(row[1] for row in rows) - min(row[0] for row in rows) for rows in zip(*(one[name] for one in seen), strict=True)]
        for name in seen[0]
    }
    losses = {name: [row[2] for row in seen[-1][name]] for name in seen[0]}
    apart = max(abs(one - other) / abs(other) for one, other in zip(losses["autopar"], losses["torch"], strict=True))
    ratios = [one / other for one, other in zip(spans["autopar"], spans["torch"], strict=True)]
    for name, found in spans.items():
        print(f"{name:8} {1e3 * statistics.median(found):8.1f} ms median, {1e3 * min(found):8.1f} ms least")
    least = min(spans["autopar"]) / min(spans["torch"])
    print(f"ratio    {statistics.median(ratios):8.3f} median of {len(ratios)} rounds, {least:.3f} of minima")
    print(f"losses   {apart:.1e} apart")
    print(f"predicted {1e3 * plan.objective.seconds:.1f} ms for {options.hardware}")
    return 0 if apart <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
