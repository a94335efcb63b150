"""Legal assignments made at random, without a search: what records, checks and runs plans must be right whatever a search decides."""

from __future__ import annotations

import random
from dataclasses import replace

from autopar.cost_models import Machine
from autopar.graph import Graph, Phase
from autopar.reshard import has_way
from autopar.rules import find_rule, strategies, why_once
from autopar.schedule import OUTPUT, Assignment, Layout
from autopar.search.baselines.checkpointing import recompute
from autopar.sharding import ShardingSpec, Strategy, splits


def random_assignment(graph: Graph, where: Machine, seed: int, again: float = 0.0, once: float = 0.0) -> Assignment:
    """Strategies, inputs and output specs drawn at random; a layout wherever a reader needs another spec.

    A value without a way to the needed spec (replicated to partial) makes the reader choose again. Of the operators that may run twice
    a share of ``again``, drawn too, does. Of the layouts of forward that are made of parameters, buffers and constants, and of the
    conversions of parameters, a share of ``once`` is made once a step.
    """
    found = made_once(graph, _random_assignment(graph, where, seed), seed, once)
    chance = random.Random(seed)
    names = [op.name for op in graph.ops if op.phase == "forward" and not why_once(op) and chance.random() < again]
    return recompute(graph, found, names, where) if names else found


def made_once(graph: Graph, given: Assignment, seed: int, share: float) -> Assignment:
    """The assignment with a share of the layouts of stored tensors made once a step, and of the conversions of parameters."""
    chance, stored, layouts = random.Random(seed), {item.tensor for item in graph.inputs if item.kind not in ("input", "tangent")}, []
    source = {layout.value: layout.source for layout in given.layouts}
    runs = {name for name in graph.conversions if graph.microbatches > 1 and chance.random() < share}
    needed = {(given.reads or {}).get((name, 0), "") for name in runs}
    while more := {source[value] for value in needed if value in source} - needed:
        needed |= more
    stored.update(tensor for name in runs for tensor in graph.op[name].outputs)
    for layout in given.layouts:
        once = layout.value in needed or (layout.source in stored and layout.phase == "forward" and chance.random() < share)
        stored.update([layout.value] if once else ())
        layouts.append(replace(layout, once=once))
    return replace(given, layouts=tuple(layouts), once=frozenset(runs))


def _splits(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[ShardingSpec]:
    """Every legal spec, in unequal parts too."""
    return list(splits(shape, sizes, frozenset(range(len(shape)))))


def _random_assignment(graph: Graph, where: Machine, seed: int) -> Assignment:
    chance = random.Random(seed)
    sizes = where.mesh.sizes
    specs: dict[str, ShardingSpec] = {}
    inputs: dict[str, ShardingSpec] = {}
    made: dict[tuple[str, ShardingSpec], Layout] = {}
    layouts: list[Layout] = []
    reads: dict[tuple[str, int], str] = {}
    chosen: dict[str, Strategy] = {}

    def read(tensor: str, spec: ShardingSpec, reader: str, position: int, phase: Phase) -> None:
        if specs[tensor] == spec:
            return
        known = made.get((tensor, spec))
        if known is None or chance.random() < 0.2:
            source = tensor
            options = [layout for layout in layouts if layout.tensor == tensor and layout.phase in ("forward", phase)]
            if options and chance.random() < 0.3:
                other = chance.choice(options)
                if has_way(other.spec, spec):
                    source = other.value
            known = Layout(f"{tensor}@{len(layouts)}", tensor, source, spec, phase, reader)
            layouts.append(known)
            made[tensor, spec] = known
        reads[reader, position] = known.value

    for item in graph.inputs:
        options = _splits(graph.tensors[item.tensor].shape, sizes)
        inputs[item.tensor] = specs[item.tensor] = chance.choice(options)
    for op in sorted(graph.ops, key=lambda op: op.phase == "backward"):
        of_op = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
        options = [
            option
            for option in strategies(find_rule(op, graph.tensors), of_op, sizes)
            if all(has_way(specs[tensor], spec) for tensor, spec in zip(op.inputs, option.inputs, strict=True))
        ]  # fmt: skip
        strategy = chance.choice(options)
        chosen[op.name] = strategy
        for position, (tensor, spec) in enumerate(zip(op.inputs, strategy.inputs, strict=True)):
            read(tensor, spec, op.name, position, op.phase)
        specs.update(zip(op.outputs, strategy.outputs, strict=True))
    by_name = {item.name: item.tensor for item in graph.inputs}
    producer = graph.producer
    for index, output in enumerate(graph.outputs):
        if output.kind == "output":
            wanted = chance.choice(_splits(graph.tensors[output.tensor].shape, sizes))
        else:
            wanted = inputs[by_name[output.name]]
        phase = "forward" if output.kind != "gradient" or output.tensor not in producer else producer[output.tensor].phase
        read(output.tensor, wanted, f"{OUTPUT}{index}", 0, phase)
    return Assignment(inputs, chosen, tuple(layouts), reads)
