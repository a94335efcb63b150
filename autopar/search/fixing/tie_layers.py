"""Equal layers get equal plans if that costs next to nothing: a plan with 25 layers one way and 7 another is hard to read.

After the search every repeat of a group takes the strategies and input specs of its commonest repeat, and reshards are solved anew. Where
that is dear, input specs alone are tied and everything else is solved anew; the first layer may read other tensors than the rest. The
answer is taken if it fits in memory and its step is at most ``NEAR`` longer.

A plan proved optimal stays optimal. Plans with recomputation are left alone, since layers may differ in what they keep for backward. A
folded problem ties its layers from the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from autopar.graph import Graph
from autopar.schedule import Assignment
from autopar.schedule.scheduled_plan import ScheduledPlan
from autopar.schedule.settings import EQUAL_SECONDS
from autopar.search.driver.state import SearchState
from autopar.search.folding.layer_groups import LayerGroup, group_layers
from autopar.search.folding.tied_model import TiedModel
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.overlap import learn_weights
from autopar.search.memory.memory_repair import solve_fixed
from autopar.search.settings import CLOSE_GAP, LEAST_SOLVE_WORK, NEAR, PROOF, TIED_LAYERS_TRIED
from autopar.sharding import ShardingSpec


def tie_equal_layers(search: SearchState) -> ScheduledPlan | None:
    """The incumbent of an ended search with its equal layers tied.

    None where they are equal already, or where tying costs too much.
    """
    best, model = search.best, search.model
    if best is None or isinstance(model, TiedModel) or best.assignment.again or search.interrupted:
        return None
    share = EQUAL_SECONDS if search.open_gap <= PROOF else NEAR
    problem, _ = model.problem(search.limit, learn_weights(best.schedule, best.slots))
    candidates = tuple(_candidates(model.space.graph, best.assignment))
    whole = (replace(one, inputs={**best.assignment.inputs, **one.inputs}) for one in candidates)
    for wanted in (*whole, *(replace(one, strategies={}) for one in candidates)):
        if search.work_left <= 0:
            break
        choices = solve_fixed(model, problem, wanted, search.request.seed, search.budget.at_least(LEAST_SOLVE_WORK), gap=CLOSE_GAP)
        if choices is None:
            continue
        made = search.schedule(decode_assignment(model, choices), best.limits, search.size.tries, best.placed_seconds)
        if made.memory.peak <= search.limit and made.seconds <= best.seconds * (1 + share):
            return made
    return None


def _candidates(graph: Graph, given: Assignment) -> Iterator[Assignment]:
    """Assignments in which every repeat is as the commonest one, then as the next commonest one.

    There are none where all repeats are equal already.
    """
    groups = [group_layers(graph, repeats) for repeats in graph.groups]
    ways = [
        Counter(_repeat_choices(group, repeat, given) for repeat in range(len(group.repeats))).most_common(TIED_LAYERS_TRIED)
        for group in groups
    ]
    for number in range(max((len(way) for way in ways if len(way) > 1), default=0)):
        inputs, strategies = dict[str, ShardingSpec](), dict(given.strategies)
        for group, way in zip(groups, ways, strict=True):
            chosen = way[min(number, len(way) - 1)][0]
            source = next(repeat for repeat in range(len(group.repeats)) if _repeat_choices(group, repeat, given) == chosen)
            for names, tensors in zip(group.repeats, group.by_key, strict=True):
                strategies.update((name, given.strategies[one]) for name, one in zip(names, group.repeats[source], strict=True))
                entering = [(key, tensor) for key, tensor in tensors.items() if tensor in given.inputs and key in group.by_key[source]]
                inputs.update((tensor, given.inputs[group.by_key[source][key]]) for key, tensor in entering)
        yield Assignment(inputs, strategies)


def _repeat_choices(group: LayerGroup, repeat: int, given: Assignment) -> tuple[object, ...]:
    """The strategies of a repeat, and the specs of the graph inputs that it alone reads."""
    entering = sorted((repr(key), str(given.inputs[name])) for key, name in group.by_key[repeat].items() if name in given.inputs)
    return (*(given.strategies[name] for name in group.repeats[repeat]), *entering)
