"""Found -> Plan, and Plan + Graph -> Assignment: the two ways across the border between values in memory and the file.

Everything a plan lists is read off the Program that the runtime executes. The predicted ``step_seconds`` is the end of the two-stream
timeline of ``autopar.timeline`` plus the optimizer's step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from autopar import __version__, pricing
from autopar.check import illegal
from autopar.errors import MismatchError
from autopar.graph import Graph, Op, to_json
from autopar.plan import (
    BaselinePlan,
    CollectivePlan,
    CreatedBy,
    EnteringSpec,
    LeavingSpec,
    MemoryParts,
    Model,
    Objective,
    OpPlan,
    OutputSpec,
    ParameterSpec,
    Plan,
    Predicted,
    ReadSpec,
    ReshardPlan,
    TensorSpec,
)
from autopar.program import Assignment, Layout, Memory, Move, Program, Run
from autopar.rules import find_rule, strategies
from autopar.sharding import ShardingSpec, Strategy
from autopar.timeline import Task, makespan, move_tasks, op_task

if TYPE_CHECKING:
    from autopar.search import Found

PROOF = 1e-6
"""A plan is called optimal only when its gap is at most this."""


def record(found: Found, *, target: str, memory_bytes: int, pins: Mapping[str, str] | None = None) -> Plan:
    """The plan of what a search found.

    Args:
        target: what was planned, as the user named it.
        memory_bytes: the limit per rank that the search respected.
        pins: the constraints as the user wrote them.
    """
    program = found.program
    graph, machine = program.graph, program.machine
    compute, optimizer = program.compute_seconds(), program.optimizer_seconds(found.optimizer)
    collectives = tuple(_collectives(program))
    communication = sum(row.seconds for row in collectives)
    seconds = compute + communication + optimizer
    bound = min(max(found.bound_seconds, 0.0), seconds)
    gap = (seconds - bound) / seconds if seconds > 0 else 0.0
    return Plan(
        created_by=CreatedBy(autopar=__version__, torch=torch_version(), solver=found.solver, cost_model=machine.cost_model),
        model=Model(
            target=target, mode=graph.mode, optimizer=found.optimizer, graph_sha256=graph.sha256, arguments=_plain(graph.arguments)
        ),
        hardware=_plain(machine.hardware.to_dict()),
        mesh=dict(machine.mesh.axes),
        memory_limit_bytes_per_rank=memory_bytes,
        pins=dict(pins or {}),
        objective=Objective(
            seconds=seconds,
            bound_seconds=bound,
            gap=gap,
            status="optimal" if gap <= PROOF else "feasible",
            solve_seconds=found.solve_seconds,
        ),
        predicted=Predicted(
            compute_seconds=compute,
            communication_seconds=communication,
            optimizer_seconds=optimizer,
            step_seconds=makespan(program_tasks(program)) + optimizer,
            received_bytes_per_rank=sum(row.received_bytes_per_rank for row in collectives),
            peak_memory_bytes_per_rank=found.memory.peak,
            memory=_memory(found.memory),
        ),
        baselines={
            name: BaselinePlan(
                objective_seconds=baseline.seconds,
                step_seconds=makespan(program_tasks(baseline.program)) + baseline.program.optimizer_seconds(found.optimizer),
                peak_memory_bytes_per_rank=baseline.memory.peak,
                feasible=baseline.feasible,
            )
            for name, baseline in sorted(found.baselines.items())
        },
        inputs=dict(_entering(program, "input")),
        outputs=dict(_outputs(program)),
        parameters=dict(_parameters(program)),
        buffers=dict(_entering(program, "buffer")),
        constants=dict(_entering(program, "constant")),
        tangents=dict(_entering(program, "tangent")),
        gradients=tuple(_leaving(program, "gradient")),
        buffer_updates=tuple(_leaving(program, "buffer")),
        ops=tuple(_ops(program)),
        reshards=tuple(_reshards(program)),
        collectives=collectives,
    )


def torch_version() -> str:
    """The installed torch's version without its build (``2.13.0`` for ``2.13.0+cpu``): a plan made on a CPU runs on GPUs."""
    return metadata.version("torch").partition("+")[0]


def program_tasks(program: Program) -> Iterator[Task]:
    """The program as tasks of the simulated timeline."""
    for item in program.instructions:
        if isinstance(item, Run):
            seconds = pricing.compute_seconds(item.op, program.graph.tensors, item.strategy, program.machine)
            inside = pricing.inner_seconds(item.strategy, program.machine)
            yield op_task(item.op.name, item.phase, item.reads, item.writes, seconds, inside)
        else:
            steps = [(step.kind, step.seconds) for step in item.reshard.steps if step.is_collective]
            yield from move_tasks(item.layout.tensor, item.phase, item.layout.source, item.layout.value, steps)


def replay(plan: Plan, graph: Graph) -> Assignment:
    """The assignment that a plan holds for the graph it was made for.

    Raises:
        MismatchError: the graph is another one, or the plan was edited into something that cannot be run; names the first difference.
    """
    if graph.sha256 != plan.model.graph_sha256:
        raise MismatchError(
            f"the plan was made for another model: {first_difference(plan, graph)}",
            "plan this model again, with the same inputs and mode; give compile the loss= that it was planned with, if any",
        )
    broken = illegal(plan)
    if broken:
        hint = "undo the edit, or plan again; autopar check lists all that is wrong with it"
        raise MismatchError(f"the plan cannot be run: {broken[0]}", hint)
    axes = {name: index for index, name in enumerate(plan.mesh)}
    offered: Offered = {}
    chosen = {row.name: _strategy(row, graph, plan, axes, offered) for row in plan.ops}
    layouts = tuple(
        Layout(row.value, row.tensor, row.source, ShardingSpec.parse(row.to_spec), _phase(row.phase), row.before) for row in plan.reshards
    )
    reads = {(row.name, position): entry.value for row in plan.ops for position, entry in enumerate(row.inputs) if entry.value is not None}
    reads |= {(f"output:{row.index}", 0): row.value for _, _, row in plan.leaving if row.value is not None}
    return Assignment({spec.tensor: ShardingSpec.parse(spec.spec) for _, _, spec in plan.entering}, chosen, layouts, reads)


def first_difference(plan: Plan, graph: Graph) -> str:
    """What differs first between the graph a plan was made for and ``graph``."""
    if plan.model.mode != graph.mode:
        return f"it was planned for mode {plan.model.mode!r}, this graph is for {graph.mode!r}"
    planned = [(kind, name, spec.shape, spec.dtype) for kind, name, spec in plan.entering]
    given = [(item.kind, item.name, graph.tensors[item.tensor].shape, graph.tensors[item.tensor].dtype) for item in graph.inputs]
    for old, new in zip(planned, given, strict=False):
        if old != new:
            return f"{old[0]} {old[1]} was {old[3]}{list(old[2])}, here {new[0]} {new[1]} is {new[3]}{list(new[2])}"
    if len(planned) != len(given):
        return f"it has {len(planned)} inputs, parameters and buffers, here there are {len(given)}"
    for row, op in zip(plan.ops, graph.ops, strict=False):
        before = (row.op, tuple(entry.shape for entry in row.inputs), _plain(row.attributes))
        after = (op.target, tuple(graph.tensors[name].shape for name in op.inputs), _plain(_attributes(op)))
        if before != after:
            shapes = [" x ".join(str(list(shape)) for shape in shapes) for shapes in (before[1], after[1])]
            return f"operator {row.name} was {row.op} of {shapes[0]}, here {op.name} is {op.target} of {shapes[1]} with {after[2]['args']}"
    if len(plan.ops) != len(graph.ops):
        return f"it has {len(plan.ops)} operators, here there are {len(graph.ops)}"
    return "the same operators are wired differently"


Offered = dict[Any, dict[Any, Strategy]]
"""For each rule its strategies by specs and factors, so that equal layers are enumerated once."""


def _strategy(row: OpPlan, graph: Graph, plan: Plan, axes: Mapping[str, int], offered: Offered) -> Strategy:
    op = graph.op.get(row.name)
    if op is None:
        raise MismatchError(f"the plan has an operator {row.name}, the model none of that name", "plan this model again")
    inputs = tuple(ShardingSpec.parse(entry.spec) for entry in row.inputs)
    outputs = tuple(ShardingSpec.parse(entry.spec) for entry in row.outputs)
    factors = {name: tuple(axes[axis] for axis in split) for name, split in (row.factors or {}).items()}
    rule = find_rule(op, graph.tensors)
    if rule not in offered:
        operands = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        offered[rule] = {(s.inputs, s.outputs, frozenset(_split(s).items())): s for s in strategies(rule, operands, plan.sizes)}
    strategy = offered[rule].get((inputs, outputs, frozenset(factors.items())))
    if strategy is None:
        specs = f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}"
        raise MismatchError(f"operator {row.name} ({row.op}) has no strategy {specs}", "undo the edit, or plan again")
    return strategy


def _split(strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """The factors that are split at all."""
    return {name: axes for name, axes in strategy.factors if axes}


def _phase(name: str) -> Any:
    return "backward" if name == "recompute" else name


def _plain(value: Any) -> Any:
    """As it comes back from the file: lists for tuples, text keys."""
    return json.loads(json.dumps(value))


def _attributes(op: Op) -> dict[str, Any]:
    return {"args": to_json(op.args), "kwargs": to_json(dict(op.kwargs))}


def _memory(memory: Memory) -> MemoryParts:
    return MemoryParts(
        parameters=memory.parameters,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        activations=memory.activations,
        temporaries=memory.temporaries,
    )


def _tensor(program: Program, name: str, value: str | None = None) -> dict[str, Any]:
    tensor = program.graph.tensors[name]
    return {"tensor": name, "shape": tensor.shape, "dtype": tensor.dtype, "spec": str(program.specs[value or name])}


def _entering(program: Program, kind: str) -> Iterator[tuple[str, EnteringSpec]]:
    for index, item in enumerate(program.graph.inputs):
        if item.kind == kind:
            yield item.name, EnteringSpec(**_tensor(program, item.tensor), index=index)


def _parameters(program: Program) -> Iterator[tuple[str, ParameterSpec]]:
    for index, item in enumerate(program.graph.inputs):
        if item.kind == "parameter":
            yield (
                item.name,
                ParameterSpec(**_tensor(program, item.tensor), index=index, trained=item.trained or None, aliases=item.aliases or None),
            )


def _outputs(program: Program) -> Iterator[tuple[str, OutputSpec]]:
    for index, (output, value) in enumerate(program.outputs):
        if output.kind == "output":
            yield output.name, OutputSpec(**_tensor(program, output.tensor, value), value=_other(value, output.tensor), index=index)


def _leaving(program: Program, kind: str) -> Iterator[LeavingSpec]:
    for index, (output, value) in enumerate(program.outputs):
        if output.kind == kind:
            yield LeavingSpec(**_tensor(program, output.tensor, value), value=_other(value, output.tensor), index=index, name=output.name)


def _other(value: str, tensor: str) -> str | None:
    return None if value == tensor else value


def _ops(program: Program) -> Iterator[OpPlan]:
    runs = {item.op.name: item for item in program.instructions if isinstance(item, Run)}
    axes = program.machine.mesh.names
    for op in program.graph.ops:
        run = runs[op.name]
        split = {name: tuple(axes[axis] for axis in chosen) for name, chosen in _split(run.strategy).items()}
        yield OpPlan(
            name=op.name,
            op=op.target,
            module=op.module,
            location=op.location or None,
            phase=op.phase,
            attributes=_plain(_attributes(op)),
            factors=split or None,
            inputs=tuple(
                ReadSpec(**_tensor(program, name, value), value=_other(value, name))
                for name, value in zip(op.inputs, run.reads, strict=True)
            ),
            outputs=tuple(TensorSpec(**_tensor(program, name)) for name in op.outputs),
            seconds=pricing.compute_seconds(op, program.graph.tensors, run.strategy, program.machine),
        )


def _reshards(program: Program) -> Iterator[ReshardPlan]:
    for item in program.instructions:
        if isinstance(item, Move):
            layout = item.layout
            yield ReshardPlan(
                value=layout.value,
                tensor=layout.tensor,
                source=layout.source,
                from_spec=str(item.reshard.source),
                to_spec=str(item.reshard.target),
                phase=layout.phase,
                before=layout.before,
            )


def _collectives(program: Program) -> Iterator[CollectivePlan]:
    mesh = program.machine.mesh
    for item, value in zip(program.collectives(), _collective_values(program), strict=True):
        yield CollectivePlan(
            kind=item.kind,  # type: ignore[arg-type]
            axes=tuple(mesh.sub_axis_name(part) for part in item.axes),
            phase=item.phase,
            tensor=item.tensor,
            value=value,
            from_spec=item.source,
            to_spec=item.target,
            before=item.before,
            bytes=round(item.full_bytes),
            received_bytes_per_rank=round(item.received_bytes_per_rank),
            seconds=item.seconds,
        )


def _collective_values(program: Program) -> Iterator[str | None]:
    """For each collective of the program the reshard's value; None inside an operator."""
    for item in program.instructions:
        if isinstance(item, Move):
            yield from (item.layout.value for step in item.reshard.steps if step.is_collective)
        else:
            yield from (None for _ in item.strategy.inner)
