"""``autopar demo``: plans a byte-level GPT, trains it on local ranks beside the single-process run, and compares the losses.

It needs nothing but this installation: the text is Python's own documentation, the ranks are forked processes on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.planning import progress
from autopar.cli.terminal import Line, columns, note, out
from autopar.ending import all_of_it
from autopar.errors import UsageError, VerificationError
from autopar.report import tables
from autopar.report.parallelism_words import ways

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.plan import Plan

SIZES = {"batch": 16, "seq": 64, "layers": 2, "width": 128, "heads": 8, "vocab": 256}
"""A GPT of 0.5 million parameters on bytes: a step takes a tenth of a second on one core."""
LEARNING_RATE = 1e-3
TOLERANCE = 1e-3
"""Largest relative difference of two losses of the same step."""
HEIGHT = 12
"""Lines of the drawing of both curves."""


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
    sizes: dict[str, Any] = {key: str(value) for key, value in SIZES.items()}
    target = zoo.build("gpt2", **sizes)
    batches = list(_batches(_text(), steps))
    line = Line()
    note(f"planning a byte-level GPT for {ranks} local ranks")
    # Collectives alone are priced: with arithmetic priced too, a model this small is best computed whole on every rank, and shows nothing.
    with line, all_of_it():
        line.say("capturing", now=True)
        plan = autopar.plan(
            target.model, target.args, mesh=mesh, hardware="cpu-cluster", cost_model="communication", target="zoo:gpt2",
            progress=progress(line, "stops"),
        )  # fmt: skip
    out("\n".join(_glance(plan)))
    note(f"training {steps} steps in a single process")
    started = time.monotonic()
    single = run_ranks(lambda _: _train(target.model, batches, line), 1, alone=True)[0]
    note(f"took {time.monotonic() - started:.1f} s; training the same steps on {ranks} ranks")
    started = time.monotonic()
    sharded = run_ranks(lambda rank: _train(autopar.compile(target.model, plan), batches, line if rank == 0 else None), ranks)[0]
    note(f"took {time.monotonic() - started:.1f} s (the ranks share this machine's cores)")
    out("\n".join([*_drawn(single, sharded), *_curves(single, sharded)]))
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


def _train(model: Any, batches: Sequence[tuple[Tensor, Tensor]], line: Line | None) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for tokens, targets in batches:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if line is not None:
            line.say(f"step {len(losses)} of {len(batches)}: loss {losses[-1]:.4f}")
    if line is not None:
        line.clear()
    return losses


def _glance(plan: Plan) -> Iterator[str]:
    """The plan at a glance: figures, what others would write, and how each kind of layer lies."""
    rows = tuple((way.title, str(len(way.layers)), way.spec or "R", way.words) for way in ways(plan))
    lies = tables.Table(("layer", "times", "spec", "how it lies"), rows, frozenset({"times"}))
    for table in (tables.overview(plan), tables.baselines(plan), lies, tables.collectives(plan)):
        yield from (*table.lines(columns()), "")


def _drawn(single: Sequence[float], sharded: Sequence[float]) -> Iterator[str]:
    """Both curves over the steps: ``o`` the single process, ``x`` the ranks, ``*`` where both are."""
    low, high = min(*single, *sharded), max(*single, *sharded)
    yield "loss: o one process, x sharded, * both at the same place"
    for row in range(HEIGHT - 1, -1, -1):
        marks = []
        for one, other in zip(single, sharded, strict=True):
            here = [round((value - low) / (high - low or 1.0) * (HEIGHT - 1)) == row for value in (one, other)]
            marks.append("*" if all(here) else "o" if here[0] else "x" if here[1] else " ")
        yield f"{low + (high - low) * row / (HEIGHT - 1):8.3f} |{''.join(marks)}".rstrip()
    yield f"{'':8} +{'-' * len(single)} step {len(single) - 1}"


def _curves(single: Sequence[float], sharded: Sequence[float]) -> Iterator[str]:
    """The figures, about ten of them, the last among them."""
    every = max(len(single) // 10, 1)
    yield f"{'step':>4}  {'single':>9}  {'sharded':>9}"
    for step, (one, other) in enumerate(zip(single, sharded, strict=True)):
        if step % every == 0 or step == len(single) - 1:
            yield f"{step:4}  {one:9.5f}  {other:9.5f}"
