"""A step of several microbatches: forward and backward of one after another, and gradients summed as the schedule says.

A call runs all of them in its forward, since activations of one are to be gone before the next: ``loss.backward()`` then hands out
gradients that are there, times the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autopar.dialect import random_step
from autopar.dialect.dropout import this_step
from autopar.errors import UsageError
from autopar.graph import Accumulation
from autopar.runtime.collectives import Observed, Values
from autopar.runtime.emission import Graphs
from autopar.runtime.execution import Executable, loss_gradient, own_shape
from autopar.runtime.steps import Call, Saved
from autopar.schedule import Schedule


def run_step(
    executable: Executable | Graphs, at: Sequence[int], enter: Callable[[int], Sequence[Values]],
    observed: list[Observed] | None = None, *,
    draw: int | None = None, trains: bool = True,
) -> Sequence[Values]:  # fmt: skip
    """Runs forward and backward of each microbatch.

    Args:
        at: the ranks that the backend hosts.
        enter: the graph inputs' local parts of a microbatch, for each of them.
        observed: the collectives that are executed are appended.
        draw: chooses the masks of dropout, which differ between microbatches; the step that is under way when not given.
        trains: whether backward runs at all.

    Returns:
        For each rank what is there at the end: gradients, and outputs added up.
    """
    schedule = executable.schedule
    graph, made = schedule.graph, schedule.graph.accumulation
    scaled = isinstance(executable, Executable) and graph.loss_gradient is not None
    weight = torch.tensor(made.weight) if made.weight != 1.0 and scaled else None
    leaving = [value for output, value in schedule.outputs if output.kind == "output"]
    gradients = [value for output, value in schedule.outputs if output.kind == "gradient"]
    totals: list[Values] = []
    sums: list[Values] = []
    for number in range(made.microbatches):
        last = number == made.microbatches - 1
        ranks = enter(number)
        with random_step((this_step() if draw is None else draw) * made.microbatches + number), rows_in_reach(made):
            executable.forward(ranks, observed)
            if made.microbatches > 1:
                found = [{name: held[name].clone() for name in leaving} for held in ranks]
                totals = [_added(made.weight, *pair) for pair in zip(totals or [{}] * len(ranks), found, strict=True)]
                del found
            if not trains or graph.mode != "train":
                continue
            for rank, held, mine in zip(at, ranks, sums or [None] * len(ranks), strict=True):
                held.update(_zeros(schedule, rank, held) if mine is None else mine)
            sums = []
            with loss_gradient(weight):
                executable.backward(ranks, observed, last=last)
            if not last:
                sums = [{name: held[name] for name in schedule.sums} for held in ranks]
    for held, total in zip(ranks, totals, strict=False):
        held.update(total)
        for name in dict.fromkeys(gradients) if not scaled and made.weight != 1.0 and trains else ():
            held[name] = held[name] * made.weight
    return ranks


@contextmanager
def rows_in_reach(made: Accumulation) -> Iterator[None]:
    """Raises UsageError: within it an index goes beyond what there is, in microbatches that are not proved to be the whole batch's step."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if made.microbatches == 1 or made.whole or not any(words in str(error) for words in ("out of bounds", "out of range")):
            raise
        message = f"in one of {made.microbatches} microbatches {str(error).splitlines()[0]}: {made.reason}"
        hint = "what numbers the rows of the whole batch, as the edges of a graph do, cannot be cut: plan without microbatches"
        raise UsageError(message, hint) from error


def _added(weight: float, total: Values, found: Values) -> Values:
    return {name: value * weight + total[name] if name in total else value * weight for name, value in found.items()}


def _zeros(schedule: Schedule, rank: int, held: Values) -> Values:
    """The sums of a rank before the first microbatch."""
    device = next((tensor.device for tensor in held.values()), torch.device("cpu"))
    dtypes = {name: getattr(torch, schedule.graph.tensors[schedule.values[name].tensor].dtype) for name in schedule.sums}
    return {name: torch.zeros(own_shape(schedule, name, rank), dtype=dtype, device=device) for name, dtype in dtypes.items()}


class AccumulatedCall(Call):
    """A call of a step in microbatches.

    Args:
        cut: for each graph input that is cut, this rank's part of a microbatch by its number.
        rest: as of ``Call``.
    """

    def __init__(self, *rest: Any, cut: Mapping[str, Callable[[int], torch.Tensor]]) -> None:
        super().__init__(*rest)
        self.cut = cut

    def forward(self, *, keep: bool) -> tuple[torch.Tensor, ...]:
        """The outputs of the whole step; with gradients, all of it but the optimizer's part is done then."""

        def enter(number: int) -> list[Values]:
            return [self.locals | {name: part(number) for name, part in self.cut.items()}]

        (values,) = run_step(self.step.executable, (self.step.place.rank,), enter, self.observed, draw=self.number, trains=keep)
        if keep:
            self.saved = Saved({value: values[value] for value in self.step.gradients.values()}, {})
        return tuple(self.step.leave(value, values[value]) for _, value in self.leaving)

    def _run_backward(self, values: Values, scale: torch.Tensor | None) -> bool:
        """Nothing is left to run, and the gradient of the loss comes in afterwards."""
        return False
