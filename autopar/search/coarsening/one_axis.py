"""One-axis neighbourhood: what is searched where all choices are too many, and no mesh with merged axes gives a draft.

Every operator and graph input may be split as in any of the given plans, or as in the first with one axis used differently. Reshards
follow from what readers need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.schedule import Assignment
from autopar.search.choices.reshard_tables import UNUSED, axis_codes
from autopar.search.choices.space import Space
from autopar.sharding import ShardingSpec


def one_axis_neighbourhood(space: Space, plans: Sequence[Assignment]) -> Space:
    """The neighbourhood of plans, as a space. The best plan comes first."""
    strategies, inputs, known = {}, {}, dict[int, np.ndarray]()
    for op in space.graph.ops:
        mine = dict.fromkeys(plan.strategies[op.name] for plan in plans)
        offered = space.op_choices(op).strategies
        if id(offered) not in known:
            read = [_axis_uses(space, [strategy.inputs[at] for strategy in offered]) for at in range(len(op.inputs))]
            made = [_axis_uses(space, [strategy.outputs[at] for strategy in offered]) for at in range(len(op.outputs))]
            known[id(offered)] = np.stack([*read, *made], axis=1)
        best = next(iter(mine))
        uses = _axis_uses(space, [*best.inputs, *best.outputs])
        changed = (known[id(offered)] != uses).any(axis=1).sum(axis=1)
        strategies[op.name] = tuple({**mine, **dict.fromkeys(offered[number] for number in np.flatnonzero(changed <= 1))})
    for item in space.graph.inputs:
        specs = space.input_specs(item)
        own = dict.fromkeys(plan.inputs[item.tensor] for plan in plans)
        changed = (_axis_uses(space, specs) != _axis_uses(space, [next(iter(own))])).sum(axis=1)
        inputs[item.tensor] = tuple({**own, **dict.fromkeys(specs[number] for number in np.flatnonzero(changed <= 1))})
    return space.restricted_to(inputs, strategies)


def _axis_uses(space: Space, specs: Sequence[ShardingSpec]) -> np.ndarray:
    """The dim that each axis splits in each spec, or its code as in ``axis_codes``; shape [specs, axes]."""
    axes = len(space.sizes)
    found = axis_codes(specs, axes)
    return np.where(found > UNUSED, found // axes, found)


def table_entries(space: Space) -> int:
    """About the number of table entries in the problem over all choices."""
    graph, total = space.graph, 0
    for op in graph.ops:
        mine = len(space.op_choices(op).strategies)
        for tensor in op.inputs:
            producer = graph.producer.get(tensor)
            total += mine * (len(space.op_choices(producer).strategies) if producer is not None else mine)
    return total
