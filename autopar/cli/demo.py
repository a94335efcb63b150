"""``autopar demo``: plans a byte-level GPT, trains it on local ranks beside the single-process run, and compares the losses.

It needs nothing but this installation: the text is Python's own documentation, the ranks are forked processes on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.terminal import note, out
from autopar.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"batch": 16, "seq": 64, "layers": 2, "width": 128, "heads": 8, "vocab": 256}
"""A GPT of 0.5 million parameters on bytes: a step takes a tenth of a second on one core."""
LEARNING_RATE = 1e-3
TOLERANCE = 1e-3
"""Largest relative difference of two losses of the same step."""
BAR = 40


def demo(
    steps: Annotated[int, typer.Option(help="AdamW steps", min=1)] = 30,
    ranks: Annotated[int, typer.Option(help="local processes; from 4 on the mesh is (ranks/2) x 2", min=1)] = 4,
) -> None:
    import torch

    import autopar
    from autopar import zoo
    from autopar.verify.launch import run_ranks

    if SIZES["batch"] % ranks:
        raise UsageError(f"the demo's batch of {SIZES['batch']} cannot be split over {ranks} ranks", "use 1, 2, 4, 8 or 16 ranks")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = {"dp": ranks // 2, "tp": 2} if ranks >= 4 else {"dp": ranks}
    target = zoo.build("gpt2", **{key: str(value) for key, value in SIZES.items()})
    batches = list(_batches(_text(), steps))
    note(f"planning a byte-level GPT for {ranks} local ranks")
    # Collectives alone are priced: with arithmetic priced too, a model this small is best computed whole on every rank, and shows nothing.
    plan = autopar.plan(target.model, target.args, mesh=mesh, hardware="cpu-cluster", cost_model="communication", target="zoo:gpt2")
    out(plan)
    note(f"training {steps} steps in a single process")
    started = time.monotonic()
    single = run_ranks(lambda _: _train(target.model, batches), 1, alone=True)[0]
    note(f"took {time.monotonic() - started:.1f} s; training the same steps on {ranks} ranks")
    started = time.monotonic()
    sharded = run_ranks(lambda _: _train(autopar.compile(target.model, plan), batches), ranks)[0]
    note(f"took {time.monotonic() - started:.1f} s (the ranks share this machine's cores)")
    out("\n".join(_curves(single, sharded)))
    worst = max(abs(a - b) / abs(b) for a, b in zip(sharded, single, strict=True))
    out(f"largest difference between the two curves: {worst:.1e} (relative)")
    if not worst <= TOLERANCE:
        raise VerificationError(f"the losses differ by {worst:.1e}, more than {TOLERANCE:.0e}", "report this with the plan printed above")


def _text() -> bytes:
    """Python's own documentation: the help topics, which come with every interpreter."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _batches(text: bytes, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``(tokens, targets)``, each ``[batch, seq]``: windows of the text and the same moved on by one byte."""
    import torch

    data = torch.tensor(list(text), dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    batch, seq = SIZES["batch"], SIZES["seq"]
    for _ in range(steps):
        starts = torch.randint(len(data) - seq - 1, (batch,), generator=generator).tolist()
        yield torch.stack([data[s : s + seq] for s in starts]), torch.stack([data[s + 1 : s + seq + 1] for s in starts])


def _train(model: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _curves(single: Sequence[float], sharded: Sequence[float]) -> Iterator[str]:
    top = max(*single, *sharded)
    yield f"{'step':>4}  {'single':>9}  {'sharded':>9}"
    for step, (one, other) in enumerate(zip(single, sharded, strict=True)):
        yield f"{step:4}  {one:9.5f}  {other:9.5f}  {'#' * round(BAR * min(one, other) / top)}"
