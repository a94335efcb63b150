"""Plan + Graph -> Schedule, read back from the file: nothing of its order, overlap or lifetimes is derived again.

A file that was edited runs as edited where that is legal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar import pricing
from autopar.check import illegal
from autopar.check.walk import TURN
from autopar.cost_models import CostModelError, Hardware, Machine, Mesh
from autopar.errors import FileError, MismatchError
from autopar.graph import Accumulation, Graph, GraphInput, GraphOutput, Op, Tensor, from_json, to_json
from autopar.plan import Plan
from autopar.rows import EnteringKind, EnteringSpec, OpPlan, ParameterSpec
from autopar.rules import IN_ORDER, MemoryOrder, find_rule, strategies
from autopar.schedule import AGAIN, OUTPUT, Assignment, Collective, Instruction, Layout, Limits, Schedule
from autopar.schedule.collectives import Part
from autopar.schedule.instructions import Cut, Operation, Value
from autopar.schedule.legality import check_legal
from autopar.schedule.memory_orders import MemoryOrders
from autopar.schedule.ordering import on_host, steps_of
from autopar.sharding import Blocks, ShardingSpec, Strategy


def replay(plan: Plan, graph: Graph) -> Schedule:
    """The schedule that a plan holds, for the graph it was made for.

    Raises:
        MismatchError: the graph is another one, or the plan was edited into something that cannot be run; names the first difference.
        ScheduleError: a schedule that is not legal. FileError: hardware that cannot be read.
    """
    broken = illegal(plan)
    if broken:
        hint = "undo the edit, or plan again; autopar check lists all that is wrong with it"
        raise MismatchError(f"the plan cannot be run: {broken[0]}", hint)
    graph = graph.accumulated(accumulation_of(plan))
    if graph.sha256 != plan.model.graph_sha256:
        raise MismatchError(
            f"the plan was made for another model: {first_difference(plan, graph)}",
            "plan this model again, with the same inputs and mode; give compile the loss= that it was planned with, if any",
        )
    return check_legal(_schedule(plan, graph), "the plan file")


def machine_of(plan: Plan) -> Machine:
    """The machine that the plan was made for.

    Raises:
        FileError: a plan whose mesh or hardware cannot be read.
    """
    try:
        hardware = Hardware.from_dict(plan.hardware, "the plan's hardware")
        return Machine(Mesh(tuple(plan.mesh.items())), hardware, plan.created_by.cost_model, plan.created_by.execution)
    except CostModelError as error:
        raise FileError(error.message, error.hint) from error


def graph_of(plan: Plan) -> Graph:
    """The graph that the plan was made for, as far as the plan holds it: all but the groups of equal layers."""
    tensors = {spec.tensor: Tensor(spec.tensor, spec.in_graph(plan.sizes)[0], spec.dtype) for _, _, spec in plan.entering}
    tensors |= {row.tensor: Tensor(row.tensor, row.shape, row.dtype) for op in plan.captured for row in op.outputs}
    inputs = tuple(_entered(kind, name, spec) for kind, name, spec in plan.entering)
    ops = tuple(
        Op(
            row.name, row.op, tuple(entry.tensor for entry in row.inputs), tuple(entry.tensor for entry in row.outputs),
            from_json(row.attributes["args"]), tuple((key, from_json(value)) for key, value in row.attributes["kwargs"].items()),
            row.module, "forward" if row.phase == "forward" else "backward", row.location or "",
        )
        for row in plan.captured
    )  # fmt: skip
    outputs = tuple(GraphOutput(row.tensor, kind, name) for kind, name, row in plan.leaving)
    return Graph(plan.model.mode, tensors, inputs, ops, outputs, arguments=plan.model.arguments, accumulation=accumulation_of(plan))


def _entered(kind: EnteringKind, name: str, spec: EnteringSpec) -> GraphInput:
    if not isinstance(spec, ParameterSpec):
        return GraphInput(spec.tensor, kind, name)
    blocks = None if spec.blocks is None else Blocks(*spec.blocks)
    return GraphInput(spec.tensor, kind, name, spec.aliases or (), bool(spec.trained), blocks)


def accumulation_of(plan: Plan) -> Accumulation:
    """How microbatches make up a step of the plan."""
    row = plan.accumulation
    if plan.microbatches == 1 or row is None:
        return Accumulation()
    cut = tuple(plan.inputs[name].tensor for name in row.cut)
    return Accumulation(plan.microbatches, cut, row.weight, row.whole, row.reason or "", row.divisor or "")


def assignment_of(plan: Plan, graph: Graph) -> Assignment:
    """The plan's choices without its schedule. Raises MismatchError: a strategy that the rules do not have."""
    of_sum = {row.writes[0]: row.reads[0] for row in plan.schedule if row.kind == "add"}
    reads = {(row.name, position): entry.value or entry.tensor for row in plan.ops for position, entry in enumerate(row.inputs)}
    reads |= {(f"{OUTPUT}{row.index}", 0): of_sum.get(row.value, row.value) for _, _, row in plan.leaving if row.value is not None}
    specs = {spec.tensor: spec.in_graph(plan.sizes)[1] for _, _, spec in plan.entering}
    again = frozenset(row.name.removesuffix(AGAIN) for row in plan.recomputed)
    once = frozenset(row.of for row in plan.schedule if row.kind == "run" and row.microbatch < 0)
    layouts = tuple(replace(layout, source=of_sum.get(layout.source, layout.source)) for layout in _layouts(plan).values())
    return Assignment(specs, _strategies(plan, graph), layouts, reads, again, once, _states_on_host(plan))


def first_difference(plan: Plan, graph: Graph) -> str:
    """The first difference between the graph a plan was made for and ``graph``, in words."""
    if plan.model.mode != graph.mode:
        return f"it was planned for mode {plan.model.mode!r}, this graph is for {graph.mode!r}"
    planned = [(kind, name, spec.in_graph(plan.sizes)[0], spec.dtype) for kind, name, spec in plan.entering]
    given = [(item.kind, item.name, graph.tensors[item.tensor].shape, graph.tensors[item.tensor].dtype) for item in graph.inputs]
    for old, new in zip(planned, given, strict=False):
        if old != new:
            return f"{old[0]} {old[1]} was {old[3]}{list(old[2])}, here {new[0]} {new[1]} is {new[3]}{list(new[2])}"
    if len(planned) != len(given):
        return f"it has {len(planned)} inputs, parameters and buffers, here there are {len(given)}"
    for row, op in zip(plan.captured, graph.ops, strict=False):
        before = (row.op, tuple(entry.shape for entry in row.inputs), plain(row.attributes))
        after = (op.target, tuple(graph.tensors[name].shape for name in op.inputs), plain(attributes(op)))
        if before != after:
            shapes = [" x ".join(str(list(shape)) for shape in shapes) for shapes in (before[1], after[1])]
            return f"operator {row.name} was {row.op} of {shapes[0]}, here {op.name} is {op.target} of {shapes[1]} with {after[2]['args']}"
    if len(plan.captured) != len(graph.ops):
        return f"it has {len(plan.captured)} operators, here there are {len(graph.ops)}"
    return "the same operators are wired differently"


def plain(value: Any) -> Any:
    """The value as the file gives it back: lists for tuples, text keys."""
    return json.loads(json.dumps(value))


def attributes(op: Op) -> dict[str, Any]:
    """An operator's arguments as a plan holds them."""
    return {"args": to_json(op.args), "kwargs": to_json(dict(op.kwargs))}


def split(strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """The factors that are split at all."""
    return {name: axes for name, axes in strategy.factors if axes}


def _schedule(plan: Plan, graph: Graph) -> Schedule:
    """The schedule of a plan that is known to be legal."""
    machine = machine_of(plan)
    chosen, layouts = _strategies(plan, graph), _layouts(plan)
    values: dict[str, Value] = {}
    cuts: dict[str, Cut] = {}
    parts: dict[tuple[str, int], Part] = {}
    summed = {row.writes[0]: row.reads[0] for row in plan.schedule if row.kind == "add"}

    orders = MemoryOrders(graph, machine)

    def add(value: str, tensor: str, spec: ShardingSpec, order: MemoryOrder = IN_ORDER) -> None:
        values[value] = Value(tensor, spec, pricing.local_bytes(graph.tensors[tensor], spec, machine), order)

    def make(layout: Layout) -> None:
        if layout.value in values:
            return
        source = layout.source if layout.source in values else summed.get(layout.source, layout.source)
        if source in layouts:
            make(layouts[source])
        if layout.source in summed:
            values[layout.source] = values[source]._replace(order=IN_ORDER)
        steps = steps_of(layout, values[layout.source], graph, machine)
        if not steps:
            cuts[layout.value] = Cut(layout, None)
        for part in steps:
            values[part.target] = Value(layout.tensor, None, part.target_bytes)
            if part.step.is_collective:
                parts[layout.value, part.number] = part
            else:
                cuts[part.target] = Cut(layout, part)
        add(layout.value, layout.tensor, layout.spec, IN_ORDER if steps else values[layout.source].order)
        if layout.on_host:
            values[layout.value] = on_host(values[layout.value])

    def run(row: OpPlan) -> Operation:
        reads = [entry.value or entry.tensor for entry in row.inputs]
        for value in reads:
            if value in layouts:
                make(layouts[value])
        name = row.name.removesuffix(AGAIN)
        strategy = chosen[name]
        results, operation = orders.run(graph.op[name], strategy, tuple(values[value].order for value in reads))
        for entry, spec, order in zip(row.outputs, strategy.outputs, results, strict=True):
            add(entry.value or entry.tensor, entry.tensor, spec, order)
        return operation

    for _, _, row in plan.entering:
        add(row.tensor, row.tensor, row.in_graph(plan.sizes)[1])
    operations = {row.name: run(row) for row in sorted(plan.ops, key=lambda row: TURN.index(row.phase))}
    for layout in layouts.values():
        make(layout)
    in_place = {row.of for row in plan.schedule if row.kind == "start" and row.over is not None}
    late = {row.of for row in plan.schedule if row.late}
    values.update((name, values[source]._replace(order=IN_ORDER)) for name, source in summed.items())
    return Schedule(
        graph,
        machine,
        tuple(map(Instruction.of_row, plan.schedule)),
        operations,
        {
            row.id: Collective(
                row.id, tuple(parts[part.value, part.step]._replace(late=row.id in late) for part in row.members), row.id in in_place
            )
            for row in plan.collectives
            if row.id
        }
        | {row.id: Collective(row.id, (parts[row.value, 0],)) for row in plan.copies},
        cuts,
        values,
        layouts,
        tuple((output, row.value or row.tensor) for output, (_, _, row) in zip(graph.outputs, plan.leaving, strict=True)),
        Limits(**vars(plan.limits)),
        _states_on_host(plan),
    )


def _states_on_host(plan: Plan) -> frozenset[str]:
    return frozenset(row.tensor for row in plan.parameters.values() if row.states_on_host)


def _layouts(plan: Plan) -> dict[str, Layout]:
    return {
        row.value: Layout(
            row.value, row.tensor, row.source, ShardingSpec.parse(row.to_spec), row.phase, row.before, bool(row.on_host), bool(row.once)
        )
        for row in plan.reshards
    }  # fmt: skip


Offered = dict[Any, dict[Any, Strategy]]
"""For each rule its strategies by specs and factors, so that equal layers are enumerated once."""


def _strategies(plan: Plan, graph: Graph) -> dict[str, Strategy]:
    axes = {name: index for index, name in enumerate(plan.mesh)}
    offered: Offered = {}
    return {row.name: _strategy(row, graph, plan, axes, offered) for row in plan.captured}


def _strategy(row: OpPlan, graph: Graph, plan: Plan, axes: Mapping[str, int], offered: Offered) -> Strategy:
    op = graph.op.get(row.name)
    if op is None:
        raise MismatchError(f"the plan has an operator {row.name}, the model none of that name", "plan this model again")
    inputs = tuple(ShardingSpec.parse(entry.spec) for entry in row.inputs)
    outputs = tuple(ShardingSpec.parse(entry.spec) for entry in row.outputs)
    factors = {name: tuple(axes[axis] for axis in chosen) for name, chosen in (row.factors or {}).items()}
    rule = find_rule(op, graph.tensors)
    if rule not in offered:
        operands = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        offered[rule] = {(s.inputs, s.outputs, frozenset(split(s).items())): s for s in strategies(rule, operands, plan.sizes)}
    strategy = offered[rule].get((inputs, outputs, frozenset(factors.items())))
    if strategy is None:
        specs = f"{', '.join(map(str, inputs))} -> {', '.join(map(str, outputs))}"
        raise MismatchError(f"operator {row.name} ({row.op}) has no strategy {specs}", "undo the edit, or plan again")
    return strategy
