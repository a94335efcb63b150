"""Programs of a pipeline's module: the planned one, and one for each further mode and batch size that it is called with.

A call without gradients runs the forward part of a program alone. Where evaluation captures the planned graph, as without dropout, the
planned program serves. Any other is cut where the plan is cut, with weights where they lie and each stage planned by its first rank;
microbatches have no more rows than planned, and run in the order of 1F1B, interleaved where ranks run several stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.dialect.library import STILL
from autopar.errors import MismatchError, UsageError
from autopar.graph import Graph
from autopar.importer import Capture, Captures, capture
from autopar.importer.arguments.containers import changed
from autopar.pipeline import Action, Stages, cut_graph
from autopar.pipeline.crossing import crossing_pins
from autopar.pipeline.orders import interleave, write_lines
from autopar.pipeline.timetable import merge_queues, read_order
from autopar.pipeline_plan import PipelinePlan
from autopar.recording import replay
from autopar.runtime.pipelines.mail import Groups, ProcessMail, Ranks, create_groups
from autopar.runtime.programs.parts import captured_again
from autopar.runtime.programs.programs import MOST, Key, Programs, Shapes, whole_shape
from autopar.runtime.ranks.agreement import everyones, together
from autopar.runtime.steps.step import Step
from autopar.schedule import Schedule
from autopar.schedule.splitting import defer_once
from autopar.sharding import ShardingSpec

log = logging.getLogger("autopar")
Absent = Mapping[tuple[str, str], nn.Parameter]
"""Parameters of other stages, on meta, by the module's path and the name in it."""


@dataclass(frozen=True)
class Running:
    """What runs a step of a pipeline on this rank.

    Args:
        whole: the graph before it was cut.
        steps: the program of each stage of this rank.
    """

    whole: Graph
    stages: Stages
    steps: Mapping[int, Step]
    order: tuple[Action, ...]
    ranks: Ranks
    mail: ProcessMail
    groups: Groups

    @property
    def last(self) -> int:
        """The stage that makes the loss."""
        return next(number for number, graph in enumerate(self.stages.graphs) if graph.loss is not None)

    @property
    def main(self) -> Step:
        """The program of this rank's first stage, which stands for all of them."""
        return next(iter(self.steps.values()))

    @cached_property
    def draws(self) -> bool:
        """Whether a stage, of whichever rank, draws anything at random."""
        return any(op.target in STILL for graph in self.stages.graphs for op in graph.ops)

    @cached_property
    def mine(self) -> tuple[tuple[int, Action], ...]:
        """This rank's actions with their places in the total order."""
        return tuple((place, action) for place, action in enumerate(self.order) if action.stage in self.steps)


@dataclass
class PipelinePrograms(Programs):
    """A pipeline's programs. Of several stages of this rank the first one's stands for all.

    Args:
        plan: of the pipeline.
        running: of the planned program.
        absent: parameters of other stages, for captures of the whole model.
        bind_stage: a capture and a stage's schedule -> what runs them; None without the model.
    """

    plan: PipelinePlan = field(kw_only=True)
    running: Running = field(kw_only=True)
    absent: Absent = field(kw_only=True)
    bind_stage: Callable[[Capture, Schedule], Step] | None = field(kw_only=True)
    runs: dict[int, Running] = field(default_factory=dict)
    """By identity of the step, of the programs beside the planned one."""

    def running_of(self, step: Step) -> Running:
        """The pipeline that a program is part of."""
        return self.running if step is self.main else self.runs[id(step)]

    def name_of(self, step: Step) -> str:
        whole = self.running_of(step).whole
        return f"{whole.sha256} x {whole.microbatches}"

    def find(self, parts: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Step, dict[str, Tensor]]:
        """The program of a call, and the call's tensors by input name. Collective over the stages where it is a new one.

        Raises:
            UsageError: other dtypes than planned; a batch that cannot be cut into microbatches; too many programs.
        """
        tensors = self.main.call.tensors(args, kwargs)
        shapes, planned = list[tuple[str, tuple[int, ...], bool, str]](), dict[str, tuple[int, ...]]()
        for item in self.running.whole.of_kind("input"):
            tensor, dtype = tensors[item.name], self.running.whole.tensors[item.tensor].dtype
            if str(tensor.dtype).removeprefix("torch.") != dtype:
                message = f"input {item.name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, planned was {dtype}"
                raise UsageError(message, "give it the planned dtype, or plan the model again for this one")
            shapes.append((item.name, tuple(tensor.shape), False, ""))
            planned[item.name] = whole_shape(self.running.whole, item)
        key = Key(tuple(part.training for part in parts), (), "train", tuple(shapes), self.settings.changes(parts))
        as_planned = key.training == self.training and not key.changes and {name: shape for name, shape, *_ in shapes} == planned
        if as_planned:
            return self.main, tensors
        if self.bind_stage is None:
            raise self.other_call(self.running.whole, tuple(self.running.whole.of_kind("input")))
        if key not in self.made:
            with torch.inference_mode(False):
                self.made[key] = self._make_pipeline(key, parts[0], args, kwargs, tensors)
        step = self.made[key]
        return step, step.call.tensors(args, kwargs)

    def _make_pipeline(
        self, key: Key, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Step:  # fmt: skip
        """The program of a call. Collective over the stages."""
        running, team = self.running, self.running.ranks.team
        if len(set(everyones(key, team))) > 1:
            message = "ranks call the pipeline in other modes or with other shapes"
            raise MismatchError(message, "call it on all ranks alike; a shorter last batch must be so on all of them")
        if len({id(step) for step in self.made.values()} - {id(self.main)}) == MOST:
            hint = "pad batches to a few shapes, and pass numbers that change as tensors"
            raise UsageError(f"the pipeline was called in {MOST + 1} ways beside the planned one", hint)
        log.info("planning a pipeline beside the plan")
        with self.settings.kept():
            captured = together(lambda: self._capture_whole(key.shapes, model, args, kwargs, tensors), team)
        for step in (self.main, *self.made.values()):
            known = self.running_of(step).whole
            if (captured.graph.sha256, captured.graph.accumulation) == (known.sha256, known.accumulation):
                return step
        stages = cut_graph(captured.graph, self.plan.cut, self.plan.positions)
        specs, schedules = self._crossing_specs(stages), dict[int, Schedule]()
        for stage in running.steps:
            graph = stages.graphs[stage]
            plan = partial(self._plan_stage, graph, model, crossing_pins(graph, specs))
            schedules[stage] = together(plan, team)
        groups = running.groups if _groups_of(stages) == _groups_of(running.stages) else create_groups(stages, running.ranks)
        order = self._order(len(stages.graphs), captured.graph.microbatches)
        mail = ProcessMail(stages, schedules, order, running.ranks, groups.pairs, self.main.place.device)
        assert self.bind_stage is not None
        steps = {stage: self.bind_stage(captured, schedule) for stage, schedule in schedules.items()}
        made = Running(captured.graph, stages, steps, order, running.ranks, mail, groups)
        self.runs[id(made.main)] = made
        return made.main

    def _plan_stage(self, graph: Graph, model: nn.Module, pins: Mapping[str, str]) -> Schedule:
        return defer_once(replay(self._plan(graph, model, pins), graph))

    def _order(self, stages: int, microbatches: int) -> tuple[Action, ...]:
        """That of 1F1B, or Megatron-LM's where ranks run several stages."""
        if self.plan.chunks == 1:
            return read_order(write_lines("1f1b", stages, microbatches))
        return merge_queues(interleave(self.plan.positions, self.plan.chunks, microbatches))

    def _capture_whole(
        self, shapes: Shapes, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Capture:  # fmt: skip
        """One microbatch of a call, captured with stand-ins of its shapes.

        Raises:
            UsageError: microbatches that do not add up to the batch.
        """
        sizes = {name: shape for name, shape, *_ in shapes}
        stand_ins = {id(tensor): torch.empty(sizes[name], dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
        args, kwargs = changed(lambda tensor: stand_ins.get(id(tensor), tensor), (tuple(args), dict(kwargs)))
        own, own_kwargs, loss_args = self.main.call.parted(args, kwargs)
        found = dict[int, Capture]()

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_args: tuple[Any, ...]) -> Graph:
            made = capture(
                model, args, kwargs, mode="train", loss=self.loss, loss_args=loss_args,
                compute_dtype=self.main.graph.arguments.get("compute_dtype"), plain=self._plain(),
            )  # fmt: skip
            found[id(made.graph)] = made
            return made.graph

        captures, count = Captures(run, (tuple(own), own_kwargs, loss_args)), self._count(shapes)
        with torch.enable_grad(), captured_again(model.modules()), _filled(model, self.absent), _trained_as(self.running.whole, model):
            graph = captures.of(count)
        if not graph.accumulation.whole:
            message = f"{count} microbatches do not add up to the batch of this call: {graph.accumulation.reason}"
            raise UsageError(message, "pad the batch to the planned size")
        return replace(found[id(captures.made[count])], graph=graph)

    def _count(self, shapes: Shapes) -> int:
        """The fewest microbatches of a batch that have no more rows than planned."""
        whole = self.running.whole
        item = next(item for item in whole.of_kind("input") if whole.tensors[item.tensor].shape)
        rows, planned = {name: shape for name, shape, *_ in shapes}[item.name][0], whole.tensors[item.tensor].shape[0]
        return next(count for count in range(1, rows + 1) if rows % count == 0 and rows // count <= planned)

    def _crossing_specs(self, stages: Stages) -> dict[str, ShardingSpec]:
        """Values cross in the layouts of the plan where these divide them, else whole."""
        planned = dict[tuple[int, int], list[ShardingSpec]]()
        for row in self.plan.boundaries:
            planned.setdefault((row.from_stage, row.to_stage), []).append(ShardingSpec.parse(row.spec))
        found, sizes = dict[str, ShardingSpec](), self.main.place.mesh.sizes
        for one in stages.boundaries:
            shape, left = stages.graphs[one.target].tensors[one.tensor].shape, planned.get((one.source, one.target), [])
            spec = left.pop(0) if left else ShardingSpec.replicated(len(shape))
            fits = len(spec.dims) == len(shape) and spec.problem(shape, sizes) is None and spec.is_even(shape, sizes)
            found.setdefault(one.tensor, spec if fits else ShardingSpec.replicated(len(shape)))
        return found


def _groups_of(stages: Stages) -> tuple[object, ...]:
    """What the processes' groups of a pipeline depend on."""
    return {(one.source, one.target) for one in stages.boundaries}, dict(stages.tied)


@contextmanager
def _filled(model: nn.Module, absent: Absent) -> Iterator[None]:
    """Within it the model has parameters for those of other stages."""
    for (path, name), parameter in absent.items():
        model.get_submodule(path)._parameters[name] = parameter
    try:
        yield
    finally:
        for path, name in absent:
            model.get_submodule(path)._parameters[name] = None


@contextmanager
def _trained_as(graph: Graph, model: nn.Module) -> Iterator[None]:
    """Within it parameters require grad as in the graph. A rank does not see which of another's were frozen since."""
    planned = {item.name: item.trained for item in graph.of_kind("parameter")}
    named = model.named_parameters(remove_duplicate=False)
    others = [one for name, one in named if planned.get(name, one.requires_grad) is not one.requires_grad]
    for parameter in others:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(not parameter.requires_grad)
