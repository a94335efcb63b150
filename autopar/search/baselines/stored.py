"""Parameters split further at rest: a plan by hand whose parameters, gradients and optimizer states are split over more axes (FSDP)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from autopar.graph import Graph, Phase
from autopar.schedule import OUTPUT, Assignment, Layout
from autopar.search.choices.space import Space
from autopar.sharding import ShardingSpec


def store_split(graph: Graph, assignment: Assignment, space: Space, axes: tuple[int, ...], *, once: bool = False) -> Assignment:
    """The assignment with each trained parameter split over ``axes`` at rest, beside those that split it already.

    It is gathered in forward and again in backward, or once a step; where all that is done with it is to give it a smaller dtype, behind
    that. Its gradient is reduced to the part that a rank keeps. A parameter that the axes do not divide, or that is pinned, stays as it is.
    Nothing of the assignment may run a second time yet.

    Args:
        once: whether all microbatches read one gathered copy.
    """
    strategies, runs_once = dict(assignment.strategies), set(assignment.once)
    inputs, layouts, reads = dict(assignment.inputs), {layout.value: layout for layout in assignment.layouts}, dict(assignment.reads or {})
    users = Counter([*reads.values(), *(layout.source for layout in assignment.layouts)])
    gradients = {owner: (index, output) for index, output in enumerate(graph.outputs) if output.kind == "gradient"
                 for owner in (graph.owners[output],)}  # fmt: skip
    for item in graph.of_kind("parameter"):
        name, spec = item.tensor, inputs[item.tensor]
        is_free = item.trained and name in gradients and name not in space.pins.inputs
        others = tuple(axis for axis in axes if axis not in spec.split_axes)
        stored = _split_further(space, name, spec, others) if is_free else spec
        if stored == spec or not space.may_hold(item, stored):
            continue
        inputs[name] = stored
        whole = name  # what is gathered
        op = graph.ops[graph.consumers[name][0][0]] if users[name] == 0 and space.is_narrowed(name) else None
        if op is not None and len(graph.consumers[name]) == 1:
            split = next((one for one in space.op_choices(op).strategies if one.inputs == one.outputs == (stored,)), None)
            if split is not None and strategies[op.name].outputs == (spec,):
                strategies[op.name], whole = split, op.outputs[0]
                runs_once.update([op.name] if once else ())

        def gather(phase: Phase, before: str, name: str = whole, spec: ShardingSpec = spec) -> str:
            value = f"{name}@once:{spec}" if once else f"{name}@{phase}:{spec}"
            layouts.setdefault(value, Layout(value, name, name, spec, "forward" if once else phase, before, once=once))
            return value

        for layout in [layout for layout in layouts.values() if layout.source == whole]:
            layouts[layout.value] = replace(layout, source=gather(layout.half, layout.before))
        for index, position in graph.consumers[whole]:
            op = graph.ops[index]
            if (op.name, position) not in reads:
                reads[op.name, position] = gather(op.phase, op.name)
        index, output = gradients[name]
        reader = f"{OUTPUT}{index}"
        made = reads.get((reader, 0), output.tensor)
        kept = Layout(f"{output.tensor}@backward:{stored}", output.tensor, made, stored, "backward", reader)
        if made in layouts and users[made] == 1:
            kept = replace(kept, source=layouts.pop(made).source)
        layouts[kept.value] = kept
        reads[reader, 0] = kept.value
    made_once = frozenset(runs_once)
    return replace(assignment, inputs=inputs, strategies=strategies, layouts=tuple(layouts.values()), reads=reads, once=made_once)


def _split_further(space: Space, name: str, spec: ShardingSpec, axes: tuple[int, ...]) -> ShardingSpec:
    """The spec with the first dim that the axes divide split over them too; the same without one."""
    shape, sizes = space.graph.tensors[name].shape, space.sizes
    parts = math.prod(sizes[axis] for axis in axes)
    for dim, extent in enumerate(shape):
        if extent % (parts * math.prod(sizes[axis] for axis in spec.dims[dim])) == 0:
            return ShardingSpec(tuple((*split, *axes) if place == dim else split for place, split in enumerate(spec.dims)), spec.partial)
    return spec
