"""A step of several microbatches: forward and backward of each in turn, gradients summed as the schedule says.

The forward call runs all of them, since one microbatch's activations must be freed before the next begins. ``loss.backward()`` then hands
out gradients that are already there, times the gradient of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autopar.dialect import random_step
from autopar.dialect.dropout import this_step
from autopar.errors import UsageError
from autopar.graph import DIVISOR, Accumulation
from autopar.runtime.execution.emission import Graphs
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.loss_gradient import LOSS_GRADIENT, LossScale, given_loss_gradient, loss_gradient
from autopar.runtime.ranks.agreement import everyones
from autopar.runtime.ranks.collectives import Observed, Values
from autopar.runtime.ranks.groups import Team
from autopar.runtime.ranks.placement import own_shape
from autopar.runtime.steps.saved_values import Saved, Unchanged, changed_in_place
from autopar.runtime.steps.training_step import Call, plain
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
    step = MicrobatchedStep(executable, at, observed, draw=draw, trains=trains)
    for number in range(executable.schedule.graph.microbatches):
        ranks = enter(number)
        step.begin(ranks)
        step.forward(number, ranks)
        if step.trains:
            step.backward(number, ranks)
    step.finish(ranks)
    return ranks


class MicrobatchedStep:
    """Forward and backward of single microbatches, each in rising order; others may run between the two of one.

    Args:
        at, observed, draw, trains: see ``run_step``.
        scaled: whether gradients come out of backward times the weight of their microbatch's loss; None where the graph itself says so. A
            pipeline's stages receive them so from the one that has the loss.
    """

    def __init__(
        self, executable: Executable | Graphs, at: Sequence[int], observed: list[Observed] | None = None, *,
        draw: int | None = None, trains: bool = True, scaled: bool | None = None,
    ) -> None:  # fmt: skip
        schedule, graph = executable.schedule, executable.schedule.graph
        self.executable, self.at, self.observed, self.draw = executable, at, observed, draw
        self.made, self.trains = graph.accumulation, trains and graph.mode == "train"
        self.begins = graph.loss_gradient is not None and (isinstance(executable, Executable) or executable.weighted)
        self.scaled = self.begins if scaled is None else scaled
        self.weights = Weights(schedule)
        self.leaving = [value for output, value in schedule.outputs if output.kind == "output" and not output.is_sent]
        self.gradients = dict.fromkeys(value for output, value in schedule.outputs if output.kind == "gradient")
        self.totals: list[Values] = [Values() for _ in at]
        self.dtypes = _dtypes(schedule, self.leaving)
        self.sums: list[Values] | None = None
        self.common: list[Values] | None = None
        """What is made before the first microbatch and read in all."""

    def forward(self, number: int, ranks: Sequence[Values], send: Callable[[], None] | None = None) -> None:
        """Runs forward of a microbatch on what each hosted rank holds of it, and adds its outputs up.

        Args:
            send: called before a mean's divisor of nothing becomes one, so that other stages count it as nothing too.
        """
        with self._within(number):
            self.executable.forward(ranks, self.observed)
        if send is not None:
            send()
        self.weights.take(number, ranks)
        if self.made.microbatches > 1:
            found = [{name: held[name].clone() for name in self.leaving} for held in ranks]
            self.totals = [_added(self.weights.of[number], *pair) for pair in zip(self.totals, found, strict=True)]

    def begin(self, ranks: Sequence[Values]) -> None:
        """Adds what all microbatches read to the values of one, before its forward; for the first it is made, and so are the sums."""
        schedule = self.executable.schedule
        if self.common is None:
            if self.trains:
                self.sums = [_zeros(schedule, rank, held) for rank, held in zip(self.at, ranks, strict=True)]
            self.executable.begin(ranks, self.observed)
            self.common = [{name: held[name] for name in schedule.kept_values} for held in ranks]
        else:
            for held, common in zip(ranks, self.common, strict=True):
                held.update(common)

    def backward(self, number: int, ranks: Sequence[Values], send: Callable[[], None] | None = None) -> None:
        """Runs backward of a microbatch on what forward left, and keeps the sums of gradients for the next one.

        Args:
            send: called when what leaves for another stage is made. A microbatch that is not part of a pipeline has none.
        """
        with self._summed(number, ranks) as last, self._differentiated(number):
            if send is None:
                self.executable.backward(ranks, self.observed, last=last)
            else:
                assert isinstance(self.executable, Executable)
                self.executable.backward(ranks, self.observed, last=last, send=send)

    def make_input_gradients(self, number: int, ranks: Sequence[Values]) -> None:
        """Runs the first part of a microbatch's backward, where it has two."""
        assert isinstance(self.executable, Executable)
        with self._differentiated(number):
            self.executable.make_input_gradients(ranks, self.observed)

    def make_weight_gradients(self, number: int, ranks: Sequence[Values]) -> None:
        """Runs the second part on what the first left, and keeps the sums of gradients for the next microbatch."""
        assert isinstance(self.executable, Executable)
        with self._summed(number, ranks) as last, self._differentiated(number):
            self.executable.make_weight_gradients(ranks, self.observed, last=last)

    @contextmanager
    def _differentiated(self, number: int) -> Iterator[None]:
        """Within it backward begins with the weight of the microbatch's loss, times the gradient of the step's loss that is given."""
        weighs = self.begins and (self.made.microbatches > 1 or LOSS_GRADIENT.get() is not None)
        scale = torch.as_tensor(self.weights.of[number], dtype=torch.float64) * given_loss_gradient() if weighs else None
        with self._within(number), loss_gradient(scale):
            yield

    @contextmanager
    def _summed(self, number: int, ranks: Sequence[Values]) -> Iterator[bool]:
        """Within it the sums of gradients are among the values; whether the microbatch is the last."""
        schedule, last = self.executable.schedule, number == self.made.microbatches - 1
        assert self.sums is not None
        for held, mine in zip(ranks, self.sums, strict=True):
            held.update(mine)
        self.sums = None
        yield last
        del self.weights.of[number]
        if not last:
            self.sums = [{name: held[name] for name in schedule.sums} for held in ranks]

    def finish(self, ranks: Sequence[Values]) -> None:
        """Leaves the step's outputs and gradients among the values of the last microbatch."""
        weights = self.weights
        for held, total in zip(ranks, self.totals, strict=True):
            held.update({name: _times(value, weights.share).to(self.dtypes[name]) for name, value in total.items()})
            for name in self.gradients if self.trains else ():
                held[name] = _times(held[name], torch.as_tensor(weights.share).nan_to_num(1.0) if self.scaled else weights.now)

    @contextmanager
    def _within(self, number: int) -> Iterator[None]:
        """Within it what is drawn is of one microbatch, and rows out of reach are told of."""
        step = (this_step() if self.draw is None else self.draw) * self.made.microbatches + number
        with random_step(step), rows_in_reach(self.made):
            yield


class Weights:
    """What each microbatch's loss and gradients count in the step's.

    Where a mean divides by what every microbatch counts for itself, the sum of that is known after the last one: until then it is counted
    in units of the first that is not 0.
    """

    def __init__(self, schedule: Schedule) -> None:
        made = self.made = schedule.graph.accumulation
        self.divisor = next((value for output, value in schedule.outputs if made.divisor and output.name == DIVISOR), None)
        self.now: torch.Tensor | float = made.weight
        """Of the last microbatch."""
        self.of: dict[int, torch.Tensor | float] = {}
        """Of the microbatches whose forward has run, and backward not."""
        self.share: torch.Tensor | float = 1.0
        """What is missing in the sum of those so far."""
        self._unit: torch.Tensor | float = 0.0
        self._sum: torch.Tensor | float = 0.0

    def take(self, number: int, ranks: Sequence[Values]) -> None:
        """The forward of the next microbatch has run.

        One in which nothing counts weighs nothing, and its backward divides by one: nothing by nothing would be no number.
        """
        self.of[number] = self.now
        if self.divisor is None:
            return
        found = _wide(ranks[0][self.divisor])
        before = torch.as_tensor(self._unit).to(found)
        self._sum, self._unit = self._sum + found, torch.where(before == 0, found, before)
        self.now = self.of[number] = torch.where(found == 0, found, found / self._unit * self.made.weight)
        self.share = self.made.microbatches * self._unit / self._sum
        for held in ranks:
            own = held[self.divisor]
            held[self.divisor] = torch.where(own == 0, torch.ones_like(own), own)


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


def _added(weight: torch.Tensor | float, total: Values, found: Values) -> Values:
    """The sums with what is found so weighted, of half precision in float32; what weighs nothing may be no number."""
    here = {name: _times(_wide(value), weight, nothing=True) for name, value in found.items()}
    return {name: value + total[name] if name in total else value for name, value in here.items()}


def _times(value: torch.Tensor, factor: torch.Tensor | float, *, nothing: bool = False) -> torch.Tensor:
    """``nothing``: whether it is 0 where the factor is, whatever the value."""
    if not isinstance(factor, torch.Tensor):
        return value if factor == 1.0 else value * factor
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return value
    product = value * factor.to(value)
    return torch.where(factor.to(value.device) == 0, 0, product).to(value) if nothing else product


def _zeros(schedule: Schedule, rank: int, held: Values) -> Values:
    """The sums of a rank before the first microbatch."""
    device, dtypes = next((tensor.device for tensor in held.values()), torch.device("cpu")), _dtypes(schedule, schedule.sums)
    return {name: torch.zeros(own_shape(schedule, name, rank), dtype=dtype, device=device) for name, dtype in dtypes.items()}


def _dtypes(schedule: Schedule, names: Sequence[str]) -> dict[str, torch.dtype]:
    return {name: getattr(torch, schedule.graph.tensors[schedule.values[name].tensor].dtype) for name in names}


def _is_same(one: float | None, other: float | None) -> bool:
    """Whether two scales are the same, as what is no number is too."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def _wide(value: torch.Tensor) -> torch.Tensor:
    """A number of half precision in float32, as it is in torch's own sums."""
    return value.float() if value.is_floating_point() and value.itemsize < 4 else value


class AccumulatedCall(Call):
    """A call of a step in microbatches.

    Args:
        cut: for each graph input that is cut, this rank's part of a microbatch by its number.
        scale: of the module's losses, which is read and written where gradients may vanish without it.
        rest: as of ``Call``.
    """

    def __init__(self, *rest: Any, cut: Mapping[str, Callable[[int], torch.Tensor]], scale: LossScale) -> None:
        super().__init__(*rest)
        self.cut, self.scale = cut, scale
        self.vanishes = self.step.vanishes
        self.begun = 1.0
        """What backward began with."""
        self.read = Unchanged()
        """All that the step reads, where it may run again."""

    def forward(self, *, keep: bool) -> tuple[torch.Tensor, ...]:
        """The outputs of the whole step; with gradients, all of it but the optimizer's part is done then."""
        with self.begin():
            ranks = run_step(self.step.executable, (self.step.place.rank,), self.enter, self.observed, draw=self.number, trains=keep)
        (values,) = ranks
        if keep:
            self.save(values)
        return tuple(self.step.leave(value, values[value]) for _, value in self.leaving)

    def enter(self, number: int) -> list[Values]:
        """This rank's part of what a microbatch takes."""
        return [{**self.locals, **{name: part(number) for name, part in self.cut.items()}}]

    def begin(self) -> AbstractContextManager[None]:
        """Within it backward begins with the scale of the loss, as far as it is known."""
        self.begun = self.scale.value if self.vanishes else 1.0
        return loss_gradient(torch.tensor(self.begun, dtype=torch.float64) if self.vanishes else None)

    def save(self, values: Values) -> None:
        """Keeps the gradients for ``backward``, which may run the step again."""
        self.saved = Saved({value: values[value] for value in self.step.gradients.values()})
        self.read = self._read_again() if self.vanishes else Unchanged()

    def backward(self, gradients: Sequence[torch.Tensor | None], *, keep: bool) -> list[torch.Tensor | None]:
        """As of ``Call``."""
        self.begin_again([self], gradients)
        return super().backward(gradients, keep=keep)

    def _read_again(self) -> Unchanged:
        """All of the user's tensors that the step reads, but those made in inference mode: nothing counts their changes."""
        read = [(name, held[name]) for held in (self.owners, self.locals) for name in self.owners if name in held]
        counted = [(name, tensor) for name, tensor in read if not tensor.is_inference()]
        return Unchanged([name for name, _ in counted], [tensor for _, tensor in counted])

    @property
    def team(self) -> Team:
        """The processes that run the step together."""
        return self.step.place.team

    @torch.no_grad()
    def begin_again(self, calls: Sequence[AccumulatedCall], gradients: Sequence[torch.Tensor | None]) -> None:
        """Runs all of the step again where its gradients may have vanished and the loss has another scale than they began with. Collective
        where they may.

        Args:
            calls: those that hold the gradients.

        Raises:
            UsageError: ranks scale the loss differently. RuntimeError: what the step reads was changed in place, on whichever rank.
        """
        if not self.vanishes:
            return
        scale = self._agreed_scale(gradients)
        saved = [call.saved for call in calls if call.saved is not None and call.saved.kept]
        if scale is None or _is_same(scale, self.begun) or not saved:
            return
        changed = next((name for call in calls if (name := call.read.find_changed()) is not None), None)
        for name in everyones(changed, self.team):
            if name is not None:
                raise changed_in_place(name)
        for one in saved:
            one.take(keep=False)
        self.scale.value = scale
        self.forward(keep=True)

    def _agreed_scale(self, gradients: Sequence[torch.Tensor | None]) -> float | None:
        """The gradient of the loss, None where backward does not run from it. Collective: all ranks run the step again, or none does."""
        given = next((one for name, one in zip(self.names, gradients, strict=True) if name == self.loss), None)
        scale = None if given is None else float(plain(given).item())
        for rank, other in enumerate(everyones(scale, self.team)):
            if not _is_same(scale, other):
                message = f"rank {rank} scales the loss by {other}, this rank by {scale}: gradients in float16 begin with the scale"
                raise UsageError(message, "scale the loss alike on all ranks; a GradScaler of each must see the same gradients overflow")
        return scale

    def _run_backward(self, values: Values, scale: torch.Tensor | None) -> bool:
        """Nothing is left to run; the gradient of the loss is in what it begins with, or comes in afterwards."""
        return self.vanishes
