"""A planned pipeline -> PipelinePlan, and back: the stages of a captured graph, each with its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.errors import MismatchError, ScheduleError
from autopar.graph import DTYPE_BYTES, Accumulation, Graph, GraphInput, GraphOutput, Op, Tensor
from autopar.pipeline import Action, Stages, cut_graph
from autopar.pipeline.clock import recorded_order, recorded_stages
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.result import PipelineResult
from autopar.pipeline.timetable import problems_of, stages_split, write_order, write_turns
from autopar.pipeline_plan import BoundaryPlan, CallInput, PipelinePlan, StagePlan
from autopar.recording.replaying import graph_of, plain, replay
from autopar.recording.writing import PROOF, record, torch_version
from autopar.rows import AccumulationPlan, BaselinePlan, CreatedBy, Model, Objective
from autopar.schedule import Schedule
from autopar.schedule.splitting import find_weight_part
from autopar.version import __version__


def record_pipeline(
    graph: Graph,
    asked: PipelineRequest,
    found: PipelineResult,
    *,
    target: str,
    pins: Mapping[str, str],
    solve_seconds: float,
    tried: tuple[int, ...] | None = None,
) -> PipelinePlan:
    """The plan of a pipeline.

    Args:
        graph: of one microbatch, whole.
        target: what was planned, as the user named it.
        pins: the constraints as the user wrote them.
        solve_seconds: spent on the search.
        tried: the numbers of microbatches that the bound is over, where several were tried.
    """
    stages = []
    for number, (result, cost) in enumerate(zip(found.found, found.costs, strict=True)):
        stages.append(
            StagePlan(
                first_module=found.cut[number - 1] if number else "",
                order=write_order(found.order, number),
                forward_seconds=cost.forward,
                backward_seconds=cost.backward,
                last_backward_seconds=cost.last_backward,
                optimizer_seconds=cost.optimizer,
                busy_seconds=found.times.busy[number],
                held_bytes_per_rank=cost.held,
                peak_memory_bytes_per_rank=found.peaks[number],
                in_flight=found.times.in_flight[number],
                last_sent_seconds=cost.last_sent if cost.last_sent < cost.last_backward else None,
                begin_seconds=cost.begin or None,
                weights_seconds=cost.weights if found.split else None,
                last_weights_seconds=cost.last_weights if found.split else None,
                held_for_weights_bytes_per_rank=cost.held_for_weights if found.split else None,
                rest_bytes_per_rank=cost.rest,
                plan=record(result, target=f"stage {number} of {target}", memory_limit=asked.memory_limit),
            )
        )
    made, gap = graph.accumulation, max(found.gap, 0.0)
    names = {item.tensor: item.name for item in graph.of_kind("input")}
    return PipelinePlan(
        created_by=CreatedBy(
            autopar=__version__, torch=torch_version(), solver=found.found[0].solver, cost_model=asked.machine.cost_model,
            execution=asked.machine.execution,
        ),
        model=Model(
            target=target, mode=graph.mode, optimizer=asked.optimizer, graph_sha256=graph.sha256, arguments=plain(graph.arguments)
        ),
        hardware=plain(asked.machine.hardware.to_dict()),
        mesh=dict(asked.machine.mesh.axes),
        microbatches=graph.microbatches,
        microbatches_tried=tried,
        accumulation=None if made.microbatches == 1 else AccumulationPlan(
            cut=tuple(names[name] for name in made.cut), weight=made.weight, whole=made.whole, reason=made.reason or None,
            divisor=made.divisor or None,
        ),
        memory_limit_bytes_per_rank=asked.memory_limit,
        pins=dict(pins),
        order=asked.order,
        objective=Objective(
            seconds=found.times.step, bound_seconds=found.bound_seconds, gap=gap, status="optimal" if gap <= PROOF else "feasible",
            solve_seconds=solve_seconds,
        ),
        transfer_seconds=found.transfer_seconds,
        inputs={item.name: CallInput(shape=graph.tensors[item.tensor].shape, dtype=graph.tensors[item.tensor].dtype)
                for item in graph.of_kind("input")},
        boundaries=tuple(_boundaries(found)),
        tied=dict(found.stages.tied),
        baselines={
            name: BaselinePlan(
                objective_seconds=one.times.step, step_seconds=one.times.step, peak_memory_bytes_per_rank=max(one.peaks), feasible=one.fits
            )
            for name, one in sorted(found.baselines.items())
        },
        turns=write_turns(found.order, asked.positions) if asked.chunks > 1 else None,
        stages=tuple(stages),
    )  # fmt: skip


def _boundaries(found: PipelineResult) -> list[BoundaryPlan]:
    rows = []
    for one in found.stages.boundaries:
        schedule = found.schedules[one.target]
        tensor, spec = schedule.graph.tensors[one.tensor], schedule.specs[one.tensor]
        size = DTYPE_BYTES[tensor.dtype]
        for length in spec.local_shape(tensor.shape, schedule.machine.mesh.sizes):
            size *= length
        rows.append(BoundaryPlan(tensor=one.tensor, from_stage=one.source, to_stage=one.target, spec=str(spec), bytes_per_rank=size))
    return rows


@dataclass(frozen=True)
class ReplayedPipeline:
    """A pipeline as its file says it, on the model's graph."""

    graph: Graph
    stages: Stages
    schedules: tuple[Schedule, ...]
    order: tuple[Action, ...]


def replay_pipeline(plan: PipelinePlan, graph: Graph) -> ReplayedPipeline:
    """The stages, schedules and timetable that a plan holds, for the graph of one microbatch that it was made for.

    Raises:
        MismatchError: the graph is another one, or the plan was edited into something that cannot be run; names the first difference.
    """
    graph = graph.accumulated(_accumulation(plan, graph))
    if graph.sha256 != plan.model.graph_sha256:
        raise MismatchError("the plan was made for another model", "plan this model again, with the same inputs, mode and loss=")
    _check_places(plan)
    return _replay_stages(plan, graph, cut_graph(graph, plan.cut, plan.positions))


def recorded_pipeline(plan: PipelinePlan) -> ReplayedPipeline:
    """The same without the model: the stages' graphs as the plan holds them (``graph_of``), the whole one as one operator, the call.

    Raises:
        MismatchError: the plan was edited into something that cannot be run; names the first difference.
    """
    _check_places(plan)
    stages = replace(recorded_stages(plan), graphs=tuple(graph_of(row.plan) for row in plan.stages), tied=plan.tied)
    return _replay_stages(plan, _call_of(plan, stages), stages)


def _call_of(plan: PipelinePlan, stages: Stages) -> Graph:
    """What a call takes and gives, with one operator between: a microbatch's inputs by their names, and the loss."""
    last, loss = next(graph for graph in stages.graphs if graph.loss is not None), GraphOutput("output:loss", "output", "loss")
    made = last.tensors[last.outputs[last.loss or 0].tensor]
    given = {name: Tensor(name, row.shape, row.dtype) for name, row in plan.inputs.items()}
    graph = Graph(
        "train", {**given, loss.tensor: replace(made, name=loss.tensor)}, tuple(GraphInput(name, "input", name) for name in given),
        (Op("pipeline", "pipeline", tuple(given), (loss.tensor,)),), (loss,), arguments=plan.model.arguments,
    )  # fmt: skip
    return replace(graph, accumulation=replace(_accumulation(plan, graph), divisor=""))


def _check_places(plan: PipelinePlan) -> None:
    """Raises MismatchError: stages that are not on the plan's ranks."""
    if plan.chunks * plan.positions != len(plan.stages) or (plan.turns is None) is not (plan.chunks == 1):
        message = f"{len(plan.stages)} stages on {plan.positions} positions{', without turns' * (plan.turns is None)}"
        raise MismatchError(f"{message} cannot be run", "undo the edit, or plan again")


def _replay_stages(plan: PipelinePlan, graph: Graph, stages: Stages) -> ReplayedPipeline:
    """The schedules of the stages, and the timetable. Raises as ``replay_pipeline``."""
    order = recorded_order(plan)
    for words in problems_of(order, stages, plan.microbatches):
        raise MismatchError(f"the timetable cannot be run: {words}", "undo the edit, or plan again")
    schedules, split = list[Schedule](), stages_split(order)
    for number, (row, stage) in enumerate(zip(plan.stages, stages.graphs, strict=True)):
        if dict(list(plan.mesh.items())[1:]) != row.plan.mesh and len(plan.mesh) > 1:
            raise MismatchError(f"stage {number} is planned for another mesh than the pipeline's", "undo the edit, or plan again")
        schedules.append(replay(row.plan, stage))
        if number in split:
            try:
                find_weight_part(schedules[-1])
            except ScheduleError as error:
                raise MismatchError(f"stage {number} cannot be run: {error.message}", "undo the edit, or plan again") from error
    for one in stages.boundaries:
        sent, received = (
            next(spec for output, value in schedules[one.source].outputs if output.is_sent and output.tensor == one.tensor
                 for spec in (schedules[one.source].specs[value],)),
            schedules[one.target].specs[one.tensor],
        )  # fmt: skip
        if sent != received:
            message = f"stage {one.source} sends {one.tensor} as {sent}, stage {one.target} takes it as {received}"
            raise MismatchError(message, "undo the edit, or plan again")
    return ReplayedPipeline(graph, stages, tuple(schedules), order)


def _accumulation(plan: PipelinePlan, graph: Graph) -> Accumulation:
    row = plan.accumulation
    if row is None:
        return Accumulation()
    tensors = {item.name: item.tensor for item in graph.of_kind("input")}
    cut = tuple(tensors[name] for name in row.cut)
    return Accumulation(plan.microbatches, cut, row.weight, row.whole, row.reason or "", row.divisor or "")

