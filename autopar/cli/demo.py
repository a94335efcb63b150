"""``autopar demo``: plans a small GPT, trains it on local ranks beside the single-process run, and compares the losses.

It needs nothing but this installation: the text is Python's own documentation, the ranks are forked processes on this machine.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.files import check_writable, write_text
from autopar.cli.planning import progress
from autopar.cli.terminal import Line, columns, note, out
from autopar.ending import all_of_it
from autopar.errors import UsageError, VerificationError
from autopar.report import tables
from autopar.report.parallelism_words import ways

if TYPE_CHECKING:
    from torch import Tensor

    from autopar.plan import Plan

SIZES = {"batch": 8, "seq": 32, "layers": 2, "width": 256, "heads": 8, "vocab": 4096}
"""A GPT of 2.6 million parameters on words: a step takes a tenth of a second on one core.

In the prices of ``cpu-cluster`` on 2x2 the plan splits attention, MLPs and the vocabulary in different ways. The best single way takes
1.29 times as long. With a vocabulary of bytes it takes 1.12 times as long.
"""
PLAN_FILE = Path("autopar-demo.json")
LEARNING_RATE = 1e-3
TOLERANCE = 1e-3
"""Largest relative difference of two losses of the same step."""
HEIGHT = 12
"""Lines of the drawing of both curves."""


def demo(
    steps: Annotated[int, typer.Option(help="AdamW steps", min=1)] = 20,
    ranks: Annotated[int, typer.Option(help="local processes; from 4 on the mesh is (ranks/2) x 2", min=1)] = 4,
    output: Annotated[Path, typer.Option("--output", "-o", help="the plan file; its page is written beside it")] = PLAN_FILE,
) -> None:
    page = output.with_suffix(".html")
    for path in (output, page):
        check_writable(path)
    import torch

    import autopar
    from autopar import zoo
    from autopar.report import html
    from autopar.verify.launch import run_ranks

    if SIZES["batch"] % ranks:
        raise UsageError(f"the demo's batch of {SIZES['batch']} cannot be split over {ranks} ranks", "use 1, 2, 4 or 8 ranks")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = {"dp": ranks // 2, "tp": 2} if ranks >= 4 else {"dp": ranks}
    sizes: dict[str, Any] = {key: str(value) for key, value in SIZES.items()}
    target = zoo.build("gpt2", **sizes)
    batches = list(_batches(_words(), steps))
    line = Line()
    named = f"zoo:gpt2,{','.join(f'{key}={value}' for key, value in SIZES.items())}"
    note(f"planning a GPT of {sum(weight.numel() for weight in target.model.parameters()):,} parameters for {ranks} ranks of cpu-cluster")
    with line, all_of_it():
        line.say("capturing", now=True)
        plan = autopar.plan(target.model, target.args, mesh=mesh, hardware="cpu-cluster", target=named, progress=progress(line, "stops"))
    out("\n".join(_glance(plan)))
    by_hand = [(row.step_seconds, name) for name, row in plan.baselines.items() if row.feasible and row.step_seconds]
    for seconds, name in sorted(by_hand)[:1]:
        out(f"the best way by hand, {name}, takes {seconds / plan.predicted.step_seconds:.2f} times as long")
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
    write_text(output, plan.to_json())
    write_text(page, html(plan))
    note(f"next: open {page}, or autopar verify {shlex.quote(str(output))} {named}")


def _words() -> list[int]:
    """Python's own help topics, which come with every interpreter, as numbers of words: the commonest words, and 0 for all others."""
    from pydoc_data.topics import topics

    words = re.findall(r"\w+|\s+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)))
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(SIZES["vocab"] - 1), 1)}
    return [numbers.get(word, 0) for word in words]


def _batches(words: Sequence[int], steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``(tokens, targets)``, each ``[batch, seq]``: windows of the text and the same moved on by one word."""
    import torch

    data = torch.tensor(words, dtype=torch.int64)
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
