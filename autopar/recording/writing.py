"""Result of a search -> Plan. Every row is read off the Schedule that the runtime executes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from autopar.effort import check_effort
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.pricing import whole_axes
from autopar.recording.replaying import attributes, plain, split
from autopar.recording.search_record import search_record
from autopar.rows import (
    AccumulationPlan,
    BaselinePlan,
    CollectivePlan,
    CreatedBy,
    EnteringSpec,
    Inputs,
    InstructionPlan,
    LeavingSpec,
    LimitsPlan,
    MemoryParts,
    Model,
    Objective,
    OpPlan,
    OutputSpec,
    ParameterSpec,
    PartPlan,
    Predicted,
    ReshardPlan,
    SearchRecord,
    TransferPlan,
    ValueSpec,
)
from autopar.schedule import AGAIN, Collective, Instruction, Layout, Memory, Schedule, step_seconds
from autopar.schedule.collectives import Part
from autopar.schedule.liveness import host_peak
from autopar.version import __version__

if TYPE_CHECKING:
    from autopar.search import SearchResult

PROOF = 1e-6
"""A plan is called optimal only when its gap is at most this."""


def record(
    found: SearchResult,
    *,
    target: str,
    memory_limit: int,
    pins: Mapping[str, str] | None = None,
    tried: tuple[int, ...] | None = None,
    inputs: Inputs = "global",
) -> Plan:
    """The plan of a search's result.

    Args:
        target: what was planned, as the user named it.
        memory_limit: bytes per rank that the search kept to.
        pins: the constraints as the user wrote them.
        tried: the numbers of microbatches that the bound is over, where several were tried.
        inputs: ``local``: each rank passes its own rows.
    """
    baselines = {
        name: BaselinePlan(
            objective_seconds=baseline.seconds,
            step_seconds=baseline.step_seconds,
            peak_memory_bytes_per_rank=baseline.memory.peak,
            feasible=baseline.feasible,
        )
        for name, baseline in found.baselines.items()
    }
    machine = found.schedule.machine
    created_by = CreatedBy(
        autopar=__version__, torch=torch_version(), solver=found.solver, cost_model=machine.cost_model, execution=machine.execution
    )  # fmt: skip
    return write(
        found.schedule, found.memory, target=target, optimizer=found.optimizer, memory_limit=memory_limit, pins=pins or {},
        bound_seconds=found.bound_seconds, solve_seconds=found.solve_seconds, tied_seconds=found.tied_seconds,
        baselines=dict(sorted(baselines.items())),
        created_by=created_by, tried=tried, inputs=inputs,
        search=search_record(
            check_effort(found.effort), found.cut, found.trace, found.seconds, found.bound_seconds, found.schedule.graph.microbatches
        ),
    )  # fmt: skip


def write(
    schedule: Schedule,
    memory: Memory,
    *,
    target: str,
    optimizer: str,
    memory_limit: int,
    pins: Mapping[str, str],
    bound_seconds: float,
    solve_seconds: float,
    baselines: dict[str, BaselinePlan],
    created_by: CreatedBy,
    tried: tuple[int, ...] | None = None,
    tied_seconds: float = 0.0,
    search: SearchRecord | None = None,
    inputs: Inputs = "global",
) -> Plan:
    """The plan of a schedule: its rows, and the figures that follow from it."""
    graph, machine = schedule.graph, schedule.machine
    collectives = tuple(list_collectives(schedule))
    compute, communication = schedule.compute_seconds(), schedule.communication_seconds()
    of_optimizer, step = schedule.optimizer_seconds(optimizer), step_seconds(schedule, optimizer)
    seconds = step if machine.overlaps else communication
    bound = min(max(bound_seconds, 0.0), seconds)
    gap = (seconds - bound) / seconds if seconds > 0 else 0.0
    return Plan(
        created_by=created_by,
        model=Model(
            target=target, mode=graph.mode, optimizer=optimizer, graph_sha256=graph.sha256, arguments=plain(graph.arguments),
            inputs="local" if inputs == "local" else None,
        ),
        hardware=plain(machine.hardware.to_dict()),
        mesh=dict(machine.mesh.axes),
        microbatches=graph.microbatches,
        microbatches_tried=tried,
        accumulation=_accumulation(graph),
        memory_limit_bytes_per_rank=memory_limit,
        pins=dict(pins),
        objective=Objective(
            seconds=seconds,
            bound_seconds=bound,
            gap=gap,
            status="optimal" if gap <= PROOF else "feasible",
            solve_seconds=solve_seconds,
            tied_seconds=tied_seconds or None,
        ),
        search=search,
        predicted=Predicted(
            compute_seconds=compute,
            communication_seconds=communication,
            optimizer_seconds=of_optimizer,
            step_seconds=step,
            sequential_seconds=compute + communication + of_optimizer,
            received_bytes_per_rank=sum(row.received_bytes_per_rank * row.times for row in collectives),
            peak_memory_bytes_per_rank=memory.peak,
            memory=_memory(memory, sum(schedule.hosted_states(optimizer).values())),
            peak_host_bytes_per_rank=host_peak(schedule, optimizer) or None,
        ),
        baselines=baselines,
        inputs=dict(_entering(schedule, "input")),
        outputs=dict(_outputs(schedule)),
        parameters=dict(_parameters(schedule)),
        buffers=dict(_entering(schedule, "buffer")),
        constants=dict(_entering(schedule, "constant")),
        tangents=dict(_entering(schedule, "tangent")),
        gradients=tuple(_leaving(schedule, "gradient")),
        buffer_updates=tuple(_leaving(schedule, "buffer")),
        ops=tuple(_ops(schedule)),
        reshards=tuple(_reshards(schedule)),
        collectives=collectives,
        transfers=tuple(_transfers(schedule)) or None,
        limits=LimitsPlan(**vars(schedule.limits)),
        schedule=tuple(InstructionPlan(**item._asdict()) for item in schedule.instructions),
    )


@cache
def torch_version() -> str:
    """The installed torch's version without its build (``2.13.0`` for ``2.13.0+cpu``): a plan made on a CPU runs on GPUs."""
    return metadata.version("torch").partition("+")[0]


def _accumulation(graph: Graph) -> AccumulationPlan | None:
    made = graph.accumulation
    if made.microbatches == 1:
        return None
    cut = tuple(item.name for item in graph.of_kind("input") if item.tensor in made.cut)
    return AccumulationPlan(cut=cut, weight=made.weight, whole=made.whole, reason=made.reason or None, divisor=made.divisor or None)


def _memory(memory: Memory, on_host: int) -> MemoryParts:
    return MemoryParts(
        parameters=memory.parameters,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        activations=memory.activations,
        temporaries=memory.temporaries,
        optimizer_on_host=on_host or None,
    )


def _tensor(schedule: Schedule, name: str, value: str | None = None) -> dict[str, Any]:
    tensor = schedule.graph.tensors[name]
    return {"tensor": name, "shape": tensor.shape, "dtype": tensor.dtype, "spec": str(schedule.specs[value or name])}


def _entering(schedule: Schedule, kind: str) -> Iterator[tuple[str, EnteringSpec]]:
    for index, item in enumerate(schedule.graph.inputs):
        if item.kind == kind:
            yield item.name, EnteringSpec(**_tensor(schedule, item.tensor), index=index)


def _parameters(schedule: Schedule) -> Iterator[tuple[str, ParameterSpec]]:
    for index, item in enumerate(schedule.graph.inputs):
        if item.kind == "parameter":
            row = _tensor(schedule, item.tensor)
            if item.blocks is not None:
                spec = item.own_spec(schedule.specs[item.tensor], schedule.machine.mesh.sizes)
                row |= {"shape": item.own_shape(row["shape"]), "spec": str(spec), "blocks": (item.blocks.dim, item.blocks.count)}
            yield item.name, ParameterSpec(
                **row, index=index, trained=item.trained or None, aliases=item.aliases or None,
                states_on_host=item.tensor in schedule.states_on_host or None,
            )  # fmt: skip


def _outputs(schedule: Schedule) -> Iterator[tuple[str, OutputSpec]]:
    for index, (output, value) in enumerate(schedule.outputs):
        if output.kind == "output":
            yield output.name, OutputSpec(**_tensor(schedule, output.tensor, value), value=_other(value, output.tensor), index=index)


def _leaving(schedule: Schedule, kind: str) -> Iterator[LeavingSpec]:
    for index, (output, value) in enumerate(schedule.outputs):
        if output.kind == kind:
            yield LeavingSpec(**_tensor(schedule, output.tensor, value), value=_other(value, output.tensor), index=index, name=output.name)


def _other(value: str, tensor: str) -> str | None:
    return None if value == tensor else value


def _ops(schedule: Schedule) -> Iterator[OpPlan]:
    """The operators in captured order, then their recomputations."""
    runs = {item.of: item for item in schedule.instructions if item.kind == "run"}
    axes = schedule.machine.mesh.names
    names = [op.name for op in schedule.graph.ops]
    values: dict[tuple[str, str], ValueSpec] = {}
    written: dict[tuple[int, int], Any] = {}  # by identity, since 1 and 1.0 are equal: layers that are alike share theirs
    for name in (*names, *(name + AGAIN for name in names if name + AGAIN in runs)):
        run, op, strategy = runs[name], schedule.operations[name].op, schedule.operations[name].strategy
        arguments = id(op.args), id(op.kwargs)
        if arguments not in written:
            written[arguments] = plain(attributes(op))
        factors = {name: tuple(axes[axis] for axis in chosen) for name, chosen in split(strategy).items()}
        yield OpPlan(
            name=name,
            op=op.target,
            module=op.module,
            location=op.location or None,
            phase=run.phase,
            times=schedule.times(run),
            attributes=written[arguments],
            factors=factors or None,
            inputs=tuple(_values(schedule, op.inputs, run.reads, values)),
            outputs=tuple(_values(schedule, op.outputs, run.writes, values)),
            seconds=schedule.operator_seconds(name),
        )


def _values(
    schedule: Schedule, tensors: tuple[str, ...], values: tuple[str, ...], known: dict[tuple[str, str], ValueSpec]
) -> Iterator[ValueSpec]:  # fmt: skip
    """One row for each tensor and value, shared by all its readers through ``known``."""
    for key in zip(tensors, values, strict=True):
        if key not in known:
            tensor, value = key
            known[key] = ValueSpec(**_tensor(schedule, tensor, value), value=_other(value, tensor))
        yield known[key]


def _reshards(schedule: Schedule) -> Iterator[ReshardPlan]:
    """The reshards, in the order in which they begin."""
    begun: dict[str, Layout] = {}
    for item in schedule.instructions:
        if item.kind == "slice":
            begun.setdefault(item.of, schedule.layouts[item.of])
        elif item.kind == "start":
            begun.update((part.layout.value, part.layout) for part in schedule.collectives[item.of].parts)
    for layout in begun.values():
        yield ReshardPlan(
            value=layout.value,
            tensor=layout.tensor,
            source=layout.source,
            from_spec=str(schedule.specs[layout.source]),
            to_spec=str(layout.spec),
            phase=layout.phase,
            before=layout.before,
            on_host=layout.on_host or None,
            once=layout.once or None,
        )


def _transfers(schedule: Schedule) -> Iterator[TransferPlan]:
    """The copies to the host and back, in execution order."""
    for item in schedule.instructions:
        call = schedule.collectives[item.of] if item.kind == "start" else None
        if call is not None and call.is_transfer:
            (part,) = call.parts
            yield TransferPlan(
                id=call.id, kind=call.kind, phase=call.phase, times=schedule.times(item), tensor=part.layout.tensor,  # type: ignore[arg-type]
                value=part.layout.value, before=part.layout.before, bytes=call.full_bytes, seconds=item.seconds,
            )  # fmt: skip


def list_collectives(schedule: Schedule) -> Iterator[CollectivePlan]:
    """One row a call, in execution order, those inside operators in their place."""
    seconds = {item.of: item.seconds for item in schedule.instructions if item.kind == "start"}
    for item in schedule.instructions:
        if item.kind == "start" and not schedule.collectives[item.of].is_transfer:
            yield _call(schedule, schedule.collectives[item.of], seconds[item.of], schedule.times(item))
        elif item.kind == "run":
            yield from _inside(schedule, item)


def _call(schedule: Schedule, call: Collective, seconds: float, times: int) -> CollectivePlan:
    own = _part(call.parts[0]) if len(call.parts) == 1 else None
    return CollectivePlan(
        id=call.id,
        kind=call.kind,  # type: ignore[arg-type]
        axes=tuple(map(schedule.machine.mesh.sub_axis_name, call.axes)),
        phase=call.phase,
        times=times,
        tensor=own.tensor if own else None,
        value=own.value if own else None,
        step=own.step or None if own else None,
        from_spec=own.from_spec if own else None,
        to_spec=own.to_spec if own else None,
        before=own.before if own else None,
        parts=None if own else tuple(map(_part, call.parts)),
        bytes=call.full_bytes,
        received_bytes_per_rank=call.received_bytes,
        seconds=seconds,
    )


def _part(part: Part) -> PartPlan:
    layout = part.layout
    return PartPlan(
        tensor=layout.tensor,
        value=layout.value,
        step=part.number,
        from_spec=str(part.from_spec),
        to_spec=str(layout.spec),
        before=layout.before,
        bytes=round(part.step.full_bytes),
    )


def _inside(schedule: Schedule, run: Instruction) -> Iterator[CollectivePlan]:
    """The collectives inside an operator."""
    operation, machine = schedule.operations[run.of], schedule.machine
    op, strategy = operation.op, operation.strategy
    for inner in strategy.inner:
        axes = whole_axes(inner.axes, machine)
        yield CollectivePlan(
            kind=inner.kind,  # type: ignore[arg-type]
            axes=tuple(map(machine.mesh.sub_axis_name, axes)),
            phase=run.phase,
            times=schedule.times(run),
            tensor=op.inputs[0],
            from_spec=str(strategy.inputs[0]),
            to_spec=str(strategy.outputs[0]),
            before=run.of,
            bytes=inner.bytes,
            received_bytes_per_rank=int(machine.received_bytes(inner.kind, inner.bytes, machine.group(axes).size)),
            seconds=machine.collective_seconds(inner.kind, inner.bytes, axes),
        )
