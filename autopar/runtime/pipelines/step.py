"""A pipeline's step: the stages' actions in one total order, each on the ranks that run its stage and that this process hosts.

An action is one part of a microbatch in one stage: forward, backward, or its gradients of weights. What crosses to another stage is sent
when the action is over; in the last microbatch's backward, before what is done once a step where that stands behind it. It is received when
the reading action begins. Gradients of tied weights are summed over their stages at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autopar.graph import Graph
from autopar.pipeline import Action, Boundary, Stages
from autopar.pipeline.timetable import Part, stages_split
from autopar.runtime.execution.binding import bind
from autopar.runtime.execution.executable import Executable
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.runtime.ranks.collectives import Observed, Values
from autopar.runtime.ranks.placement import gather
from autopar.runtime.steps.accumulation import MicrobatchedStep
from autopar.runtime.steps.simulation import Parts, entering, scatter_all
from autopar.schedule import Schedule


class Mail(Protocol):
    """Brings tensors from the ranks of one stage to those of another, rank by rank."""

    def send(self, boundary: Boundary, microbatch: int, parts: Sequence[Tensor]) -> None:
        """Hands over the parts of the hosted ranks; they are not written to any more."""

    def receive(self, boundary: Boundary, microbatch: int) -> Sequence[Tensor]:
        """The parts that the hosted ranks are sent."""


class InProcessMail:
    """All stages are in this process."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[Boundary, int], Sequence[Tensor]] = {}

    def send(self, boundary: Boundary, microbatch: int, parts: Sequence[Tensor]) -> None:
        self.boxes[boundary, microbatch] = [part.clone() for part in parts]

    def receive(self, boundary: Boundary, microbatch: int) -> Sequence[Tensor]:
        return self.boxes.pop((boundary, microbatch))


class StageRun:
    """One stage's part of a step, on the ranks that its backend hosts.

    Args:
        stages: of the whole pipeline.
        enter: the local parts of a microbatch's graph inputs, but for what is received, of each hosted rank.
        scaled: whether gradients leave the last stage times the weight of their microbatch's loss.
        trains: whether backward runs at all.
    """

    def __init__(
        self, stages: Stages, stage: int, executable: Executable, enter: Callable[[int], Sequence[Values]], mail: Mail, *,
        scaled: bool, draw: int | None = None, observed: list[Observed] | None = None, trains: bool = True,
    ) -> None:  # fmt: skip
        self.stages, self.stage, self.enter, self.mail = stages, stage, enter, mail
        self.step = MicrobatchedStep(executable, executable.backend.ranks, observed, draw=draw, trains=trains, scaled=scaled)
        self.executable = executable
        self.sent = {output.tensor: value for output, value in executable.schedule.outputs}
        self.in_flight: dict[int, Sequence[Values]] = {}

    def begin(self) -> None:
        """Makes what is made once, before the first microbatch."""
        self.step.begin(self.enter(0))

    def run(self, part: Part, microbatch: int) -> None:
        """Receives, computes and sends."""
        ranks = self.enter(microbatch) if part == "forward" else self.in_flight.pop(microbatch)
        if part == "forward":
            self.step.begin(ranks)
        for boundary in self.stages.received(self.stage, part):
            for held, received in zip(ranks, self.mail.receive(boundary, microbatch), strict=True):
                held[boundary.tensor] = received
        self._compute(part, microbatch, ranks)
        wanted = self._wanted_behind(part)
        self.in_flight[microbatch] = [{name: held[name] for name in wanted if name in held} for held in ranks]

    def _compute(self, part: Part, microbatch: int, ranks: Sequence[Values]) -> None:
        """Runs a part, and sends what crosses as soon as it is made."""

        def send() -> None:
            for boundary in self.stages.sent(self.stage, part):
                self.mail.send(boundary, microbatch, [held[self.sent[boundary.tensor]] for held in ranks])

        if part == "backward" and not self.split:
            self.step.backward(microbatch, ranks, send)
            return
        if part == "forward":
            self.step.forward(microbatch, ranks, send)
            return
        if part == "weights":
            self.step.make_weight_gradients(microbatch, ranks)
        else:
            self.step.make_input_gradients(microbatch, ranks)
        send()

    @property
    def split(self) -> bool:
        """Whether gradients of weights are a part of their own."""
        return self.executable.input_segment is not None

    def _wanted_behind(self, part: Part) -> Sequence[str]:
        """The values of a microbatch that are needed after one of its parts."""
        if part == "forward":
            return self.kept if self.step.trains else self.step.leaving
        return (*self.executable.kept_for_weights, *self.left) if part == "backward" and self.split else self.left

    @property
    def kept(self) -> Sequence[str]:
        """The values that backward reads."""
        late = [self.sent[one.tensor] for one in self.stages.sent(self.stage, "backward")]
        return (*self.executable.kept, *late, *self.step.leaving)

    @property
    def left(self) -> Sequence[str]:
        """The values that leave at the end of the step."""
        return (*self.step.gradients, *self.step.leaving)

    def finish(self) -> Sequence[Values]:
        """The step's outputs and gradients of each hosted rank; gradients of tied weights are this stage's share."""
        (ranks,) = [self.in_flight[number] for number in sorted(self.in_flight)[-1:]]
        self.step.finish(ranks)
        return ranks


@dataclass(frozen=True)
class PipelineSimulation:
    """What a simulated step gave.

    Args:
        outputs: global tensors by kind and public name (``gradient``, ``layers.0.weight``); gradients of tied weights are whole.
        observed: the collectives executed in each stage.
    """

    outputs: Mapping[tuple[str, str], Tensor]
    observed: tuple[tuple[Observed, ...], ...]


def simulate_pipeline(
    stages: Stages, schedules: Sequence[Schedule], order: Sequence[Action], values: Mapping[str, Tensor], *, dropout: bool = True
) -> PipelineSimulation:  # fmt: skip
    """Runs all ranks of all stages in this process, along the total order.

    Args:
        schedules: of each stage's graph, on the stage's mesh.
        order: every action once.
        values: a global tensor for each graph input of the whole, by tensor name; of an input that is cut, that of the whole batch.
    """
    mail, scaled, split = InProcessMail(), starts_scaled(stages), stages_split(order)
    observed: tuple[list[Observed], ...] = tuple([] for _ in schedules)
    runs = []
    for stage, schedule in enumerate(schedules):
        executable = bind(schedule, LockstepRanks(schedule.machine.mesh), torch.device("cpu"), dropout=dropout, split=stage in split)
        enter = _entering(schedule, values)
        runs.append(StageRun(stages, stage, executable, enter, mail, scaled=scaled, observed=observed[stage]))
    for run in runs:
        run.begin()
    for action in order:
        runs[action.stage].run(action.part, action.microbatch)
    outputs: dict[tuple[str, str], Tensor] = {}
    for schedule, run in zip(schedules, runs, strict=True):
        ranks = run.finish()
        for output, value in schedule.outputs:
            if value not in ranks[0]:
                continue  # sent to another stage, or a divisor that each stage counts
            whole = gather([held[value] for held in ranks], schedule.specs[value], schedule.machine.mesh)
            key = output.kind, output.name
            outputs[key] = outputs[key] + whole if output.kind == "gradient" and key in outputs else whole
    return PipelineSimulation(outputs, tuple(map(tuple, observed)))


def starts_scaled(stages: Stages) -> bool:
    """Whether backward begins with the weight of its microbatch's loss."""
    return any(graph.loss_gradient is not None for graph in stages.graphs)


def _entering(schedule: Schedule, values: Mapping[str, Tensor]) -> Callable[[int], list[Values]]:
    graph = schedule.graph
    scattered: dict[str, Parts] = {item: scatter_all(schedule, item, values[item]) for item in given(graph)}
    return lambda number: entering(scattered, number, schedule.machine.mesh.ranks)


def given(graph: Graph) -> list[str]:
    """The graph inputs, by tensor name, that a stage does not receive from another."""
    return [item.tensor for item in graph.inputs if not item.is_received]
