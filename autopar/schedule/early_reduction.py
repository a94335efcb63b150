"""reduce_early: a gradient's reduction as two reshards, so that microbatches may be summed between them.

A gradient that is partial over a fast link and a slow one is as large as the whole parameter on each rank. Its route begins with a
reduce-scatter. Summed behind that, it is a fraction as large to add and to hold, and the rest of its route still runs once a step. Here the
value between is named as a layout; ``accumulate`` decides where the sum stands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.cost_models.collectives import STEP_KINDS
from autopar.graph import Graph
from autopar.schedule.assignment import OUTPUT, Assignment, Layout
from autopar.schedule.ordering import Prices
from autopar.schedule.settings import EQUAL_SECONDS
from autopar.sharding import ShardingSpec

REDUCED = "@reduced"
"""Suffix of the value between the two reshards of a gradient."""


def reduce_early(graph: Graph, assignment: Assignment, prices: Prices) -> Assignment:
    """The assignment with two layouts in place of one for each gradient whose route begins with a reduce-scatter and goes on.

    The two are the same steps as the one. An assignment of one microbatch stays as it is.
    """
    if graph.microbatches == 1:
        return assignment
    reads = assignment.reads or {}
    leaving = {reads.get((f"{OUTPUT}{index}", 0)) for index, output in enumerate(graph.outputs) if output.kind == "gradient"}
    users = Counter([*reads.values(), *(layout.source for layout in assignment.layouts)])
    layouts = list[Layout]()
    for layout in assignment.layouts:
        op = graph.producer.get(layout.tensor)
        if op is not None and layout.source == layout.tensor and layout.value in leaving and users[layout.value] == 1:
            made = assignment.strategies[op.name].outputs[op.outputs.index(layout.tensor)]
            between = _scattered(graph, layout, made, prices)
            if between is not None:
                first = replace(layout, value=layout.tensor + REDUCED, spec=between)
                layouts.append(first)
                layout = replace(layout, source=first.value)
        layouts.append(layout)
    return replace(assignment, layouts=tuple(layouts))


def _scattered(graph: Graph, layout: Layout, made: ShardingSpec, prices: Prices) -> ShardingSpec | None:
    """The spec after the first step of the route from ``made`` to the layout; None where that is no reduce-scatter, or the only step."""
    tensor, sizes = graph.tensors[layout.tensor], prices.machine.mesh.sizes
    route = prices.route(tensor, made, layout.spec)
    kind = STEP_KINDS[route[0].step.kind] if len(route) > 1 else None
    if kind is None or not (kind.reduces and kind.cuts):
        return None
    step = route[0].step
    axes = tuple(part.axis for part in step.axes)
    if any(part.size != sizes[part.axis] for part in step.axes) or not set(axes) <= set(made.partial_axes):
        return None
    (dim,) = step.dims
    dims = tuple((*split, *axes) if place == dim else split for place, split in enumerate(made.dims))
    between = ShardingSpec(dims, tuple(pair for pair in made.partial if pair[0] not in axes))
    if between.problem(tensor.shape, sizes) is not None or not between.is_even(tensor.shape, sizes):
        return None
    first, rest = prices.route(tensor, made, between), prices.route(tensor, between, layout.spec)
    same = [leg.step for leg in first] == [step]
    seconds = sum(leg.step.seconds for leg in rest) <= sum(leg.step.seconds for leg in route[1:]) * (1 + EQUAL_SECONDS)
    return between if same and seconds else None
