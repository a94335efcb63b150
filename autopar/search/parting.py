"""Plans that need too much memory, with a part of each tensor on a rank: of what rests between the phases, and of what forward makes and
backward reads, a rank holds its share and gathers the whole when it is read.

So ZeRO splits parameters with what the optimizer keeps of them, and activations (Rajbhandari et al. 2020). Here any plan is treated so: its
strategies stay, and where all ranks compute the same, gradients are cut for nothing. The largest tensors come first, as many as it takes:
halving finds how many. Whether what is gathered for forward stays until backward, and whether all parameters come before any activation,
is tried both ways, since neither is better everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from time import perf_counter

from autopar.graph import DTYPE_BYTES, GraphInput
from autopar.schedule import Assignment
from autopar.search.changes import kept_for_backward, with_part_kept, with_placed
from autopar.search.space import Space, spec_bytes
from autopar.search.tuning import Timed
from autopar.sharding import ShardingSpec
from cost_models import optimizer_bytes


def parted(space: Space, plan: Assignment, limit: int, tune: Callable[[Assignment], Timed], until: float) -> Iterator[Timed]:
    """For each way, the schedule with fewest tensors parted that was found to fit; none of a way in which all of them are too few.

    Args:
        tune: the schedule of an assignment.
        until: the ``perf_counter`` at which it ends.
    """
    for keep, together in product((True, False), (True, False)):
        order = _order(space, together=together)
        found, fewest, most = tune(_with_parts(space, plan, order, until, keep=keep)), 0, len(order)
        if found.memory.peak > limit:
            continue
        while fewest < most and perf_counter() < until:
            middle = (fewest + most) // 2
            other = tune(_with_parts(space, plan, order[:middle], until, keep=keep))
            if other.memory.peak <= limit:
                most, found = middle, min(found, other, key=lambda one: one.seconds)
            else:
                fewest = middle + 1
        yield found


def _order(space: Space, *, together: bool) -> list[GraphInput | str]:
    """What may be parted, the largest first: graph inputs with all that is held for them, and names of what backward reads of forward.

    Args:
        together: all by size, not inputs first.
    """
    graph = space.graph
    inputs: dict[GraphInput | str, float] = {item: float(_held(space, item)) for item in graph.inputs if item.kind != "tangent"}
    made: dict[GraphInput | str, float] = {name: float(graph.tensors[name].bytes) for name in kept_for_backward(graph)}
    sizes = inputs | made
    return sorted(sizes, key=lambda one: -sizes[one]) if together else [*sorted(inputs, key=lambda one: -inputs[one]), *made]


def _held(space: Space, item: GraphInput) -> int:
    """Bytes of a graph input, with its gradient and the optimizer's states where it is trained."""
    tensor = space.graph.tensors[item.tensor]
    more = tensor.bytes + optimizer_bytes(space.optimizer, tensor.bytes // DTYPE_BYTES[tensor.dtype], tensor.dtype)
    return tensor.bytes + (more if item.tensor in space.graph.stepped else 0)


def _with_parts(space: Space, plan: Assignment, names: Sequence[GraphInput | str], until: float, *, keep: bool) -> Assignment:
    for one in names:
        if perf_counter() >= until:
            break
        if isinstance(one, str):
            plan = with_part_kept(space, plan, one) or plan
        else:
            plan = with_placed(space, plan, one.tensor, _least(space, plan, one), keep) or plan
    return plan


def _least(space: Space, plan: Assignment, item: GraphInput) -> ShardingSpec:
    """The spec of which a rank holds least, and of these the one that is gathered soonest."""
    tensor, specs = space.graph.tensors[item.tensor], space.input_specs(item)
    back = space.reshard_table(tensor, specs, (plan.inputs[item.tensor],))[:, 0]
    sizes = spec_bytes(tensor, specs, space.machine)
    return specs[min(range(len(specs)), key=lambda place: (sizes[place], back[place]))]
