"""Rematerialization as choices: what backward needs of forward is kept, or recomputed just before it is needed.

Every forward operator that may run twice gets a node ``recompute``: no recomputation, or its time, in the strategy of the first run.
``saved`` says of each tensor of forward whether it is kept and until when, or gone, or recomputed. A recomputation needs each of its inputs
in backward, kept or recomputed no later than itself, and pays for their reshards.

An operator is recomputed just before the first operator of backward that needs its result, directly or through other recomputations. The
possible times are known. Of many times some are told apart, the late ones more finely; each stands for those since the one before. A
recomputed tensor lives from that time until its first reader at least, so the model asks for no more memory than a program.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.graph import Graph, Op
from autopar.rules import is_alias, storage_roots, why_once
from autopar.search.choices.space import IMPOSSIBLE
from autopar.search.ilp.model import Model, Node, Reader, Site
from autopar.search.settings import SMALL_TENSOR_SHARE
from autopar.sharding import ShardingSpec


@dataclass(frozen=True)
class RecomputeTimes:
    """The operators that may be recomputed, and when.

    Args:
        times: ascending times for each such operator. Each stands for those between it and the one before as well.
        earliest: for each of these times, the first that it stands for.
        needed: the first time at which backward reads each tensor of forward.
        roots: the tensor whose storage each tensor shares.
        leaving: those of ``roots`` whose storage leaves the model, and is kept anyway.
        moments: number of times that are told apart for one operator.
    """

    times: Mapping[str, tuple[int, ...]]
    earliest: Mapping[str, tuple[int, ...]]
    needed: Mapping[str, int]
    roots: Mapping[str, str]
    leaving: frozenset[str]
    moments: int

    def may_recompute(self, op: Op | None) -> bool:
        """Whether an operator may be recomputed."""
        return op is not None and op.name in self.times

    def earliest_time(self, name: str, moment: int) -> int:
        """The earliest time that class ``moment`` of an operator stands for."""
        return self.earliest[name][moment]


def find_recompute_times(
    graph: Graph, times: Mapping[str, int], moments: int, alike: Mapping[str, str] | None = None, small_share: float = SMALL_TENSOR_SHARE
) -> RecomputeTimes:  # fmt: skip
    """The operators whose recomputation could save memory. They may run twice, and backward depends on their results.

    Args:
        times: the index of each operator, forward first.
        moments: number of times that are told apart for one operator.
        alike: the group of each operator, by name. All members have as many times as the member that has fewest.
        small_share: see ``SMALL_TENSOR_SHARE``.
    """
    needed: dict[str, int] = {}
    for op in graph.ops:
        if op.phase == "backward":
            for tensor in op.inputs:
                producer = graph.producer.get(tensor)
                if producer is not None and producer.phase == "forward":
                    needed[tensor] = min(times[op.name], needed.get(tensor, times[op.name]))
    least = small_share * sum(graph.tensors[tensor].bytes for tensor in needed)
    leaving = {output.tensor for output in graph.outputs}
    known: dict[str, set[int]] = {}
    for op in reversed(graph.ops):
        if op.phase == "forward" and not why_once(op) and not leaving & set(op.outputs):
            readers = {graph.ops[index].name for tensor in op.outputs for index, _ in graph.consumers[tensor]}
            found = set().union(*(known.get(name, ()) for name in readers))
            own = [needed[tensor] for tensor in op.outputs if tensor in needed]
            if found or any(tensor in needed and graph.tensors[tensor].bytes >= least for tensor in op.outputs):
                known[op.name] = found.union(own)
    fewest: dict[str, int] = {}
    for name, found in known.items():
        together = (alike or {}).get(name, name)
        fewest[together] = min(len(found), fewest.get(together, moments))
    chosen = {name: _group_times(sorted(found), fewest[(alike or {}).get(name, name)]) for name, found in known.items()}
    roots = storage_roots(graph)
    return RecomputeTimes(
        {name: last for name, (last, _) in chosen.items()}, {name: first for name, (_, first) in chosen.items()}, needed,
        roots, frozenset(roots[tensor] for tensor in leaving), moments,
    )  # fmt: skip


def _group_times(found: list[int], moments: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As many of the times as asked, the late ones closer together, and the first time that each stands for."""
    if len(found) <= moments:
        return tuple(found), tuple(found)
    wanted = [0, *(1 + number * (number - 1) // 2 for number in range(1, moments))]
    back = [min(offset, len(found) - moments + number) for number, offset in enumerate(wanted)]
    places = [len(found) - 1 - offset for offset in reversed(back)]
    return tuple(found[place] for place in places), tuple(found[place] for place in (0, *(place + 1 for place in places[:-1])))


def add_recomputations(model: Model, runs: RecomputeTimes) -> None:
    """Adds the nodes of recomputations. Choice 0 is none; the others are ordered by time, then by strategy."""
    space = model.space
    for op in space.graph.ops:
        if op.name in runs.times:
            choices = space.op_choices(op)
            count, again, moments = len(choices.strategies), choices.in_each, len(runs.times[op.name])
            seconds = np.concatenate(([0.0], np.tile(choices.seconds[:again], moments)))
            picks = np.concatenate(([-1], np.tile(np.arange(again), moments)))
            node = model.add(Node("recompute", op.name, seconds, phase="backward", strategy_numbers=picks))
            known = "recompute", count, again, moments
            table = model.cached(known, lambda p=picks, n=count: _equal_strategies(p, n))  # type: ignore[misc]
            model.connect(model.node_number["op", op.name], node, table, phase="backward")


def _equal_strategies(picks: np.ndarray, count: int) -> np.ndarray:
    """Edge from an operator to its recomputation, which has the strategy of the first run. What is kept over microbatches has none."""
    return np.where((picks[None, :] == np.arange(count)[:, None]) | (picks[None, :] < 0), 0.0, IMPOSSIBLE)


@dataclass
class _Choices:
    """The choices of a ``saved`` node in the making."""

    specs: list[ShardingSpec] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    from_layout: list[bool] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    common: list[bool] = field(default_factory=list)
    """Whether it is the producer's version that all microbatches read, which is there anyway."""

    def add(
        self, spec: ShardingSpec, state: str, *, from_layout: bool = False, moment: int = 0, end: int = 0, common: bool = False
    ) -> None:  # fmt: skip
        self.specs.append(spec)
        self.states.append(state)
        self.from_layout.append(from_layout)
        self.moments.append(moment)
        self.ends.append(end)
        self.common.append(common)


def add_saved(
    model: Model, runs: RecomputeTimes, site: Site, layout: Node | None, second: Sequence[Reader], times: Mapping[str, int]
) -> int:
    """The number of the node for what backward has of a tensor, which this adds with its edges.

    A choice keeps the producer's version or the layout's, or a free slice of either, until some time; or the tensor is gone, or recomputed.
    """
    space, graph = model.space, model.space.graph
    tensor, producer = graph.tensors[site.tensor], graph.producer.get(site.tensor)
    op = producer.name if producer is not None and producer.name in runs.times else ""
    early, late = site.phases(graph)
    own, made = keepable_specs(site.specs), keepable_specs(layout.specs if layout is not None else ())
    shared_by_all = space.op_choices(producer).kept or None if producer is not None else None
    first = min((reader.time for reader in late), default=None)
    ends = (first,) if first is not None else _keep_until(runs, second, whole=producer is not None)
    found = _Choices()
    for end in ends:
        for spec in own:
            found.add(spec, "kept", end=end)
        for spec in made:
            found.add(spec, "kept", from_layout=True, end=end)
    for spec in () if shared_by_all is None else dict.fromkeys(spec for spec in shared_by_all if spec is not None):
        found.add(spec, "kept", end=ends[-1], common=True)
    if first is None and producer is not None:
        found.add(own[0], "gone")
    if op:
        for moment, time in enumerate(runs.times[op]):
            if first is None or moment == 0 or runs.times[op][moment - 1] < first:
                for spec in dict.fromkeys(site.specs):
                    found.add(spec, "recompute", moment=moment, end=first or time)
    specs, states = tuple(found.specs), tuple(found.states)
    viewed = producer is not None and bool(op) and is_alias(producer) and bool(producer.inputs)
    from_layout, moments = tuple(found.from_layout), tuple(found.moments)
    spans = _choice_spans(model, runs, site, found, early, viewed, times)
    node = model.add(Node("saved", site.tensor, np.zeros(len(specs)), specs, "forward", from_layout, states, moments, spans))
    kept, copied = np.array([state == "kept" for state in states]), np.array(from_layout)
    key = states, from_layout, moments
    same = space.equality_table(site.specs, specs)
    whole = same if producer is None or layout is None else model.free_only(space.reshard_table(tensor, site.specs, specs))
    own_table = model.cached((id(whole), key, viewed, "own"), lambda: from_producer(whole, same, copied, kept, viewed), whole, same)
    if shared_by_all is not None:
        known_by_all, before = (shared_by_all, specs, tuple(found.common)), own_table
        own_table = model.cached((id(before), known_by_all), lambda: _common_alone(before, *known_by_all), before)
    model.connect(site.producer, node, own_table)
    if layout is not None:
        assert site.forward is not None
        shared = model.free_only(space.reshard_table(tensor, layout.specs, specs))
        table = model.cached((id(shared), key, layout.deferred, "made"), lambda: copied_from_layout(layout, shared, copied), shared)
        model.connect(site.forward, node, table)
    if op:
        again = model.node_number["recompute", op]
        choices = space.op_choices(graph.op[op])
        outputs = choices.outputs(graph.op[op].outputs.index(site.tensor))[: choices.in_each]
        alone = len(graph.op[op].outputs) == 1
        second_run = model.nodes[again]
        known = outputs, specs, key, alone, len(second_run.seconds), "agrees"
        agrees = model.cached(known, lambda: _made_by_recomputation(second_run, outputs, found, alone))
        model.connect(again, node, agrees, phase="backward")
    for name in dict.fromkeys(reader.name for reader in second):
        number = model.node_number["recompute", name]
        rows = tuple(_exists_in_time(runs, op, name, found, index, ends) for index in range(len(specs)))
        if any(not all(row) for row in rows):
            count = (len(model.nodes[number].seconds) - 1) // len(runs.times[name])
            needed = model.cached((rows, count, "needs"), lambda r=rows, c=count: _needed_by_recomputation(r, c))  # type: ignore[misc]
            model.connect(node, number, needed, phase="backward")
    return node


def _keep_until(runs: RecomputeTimes, second: Sequence[Reader], *, whole: bool) -> tuple[int, ...]:
    """Times until which a tensor may be kept that recomputations alone read.

    Args:
        whole: all such times; otherwise the earliest.
    """
    found = sorted({runs.earliest_time(reader.name, moment) for reader in second for moment in range(len(runs.times[reader.name]))})
    return _group_times(found, runs.moments)[1] if whole else (found[0],)


def from_producer(
    table: np.ndarray, same: np.ndarray, copied: np.ndarray, kept: np.ndarray | bool = True, viewed: bool = False
) -> np.ndarray:  # fmt: skip
    """Edge from the producer's version: a free slice where the choice is made from it, else any spec but the choice's.

    Of a view nothing is kept, since recomputing it is free; the tensor that it views is kept instead.
    """
    of_own = np.where(same == 0.0, IMPOSSIBLE, table) if viewed else table
    return np.where(kept, np.where(copied, np.where(same == 0.0, IMPOSSIBLE, 0.0), of_own), 0.0)


def _common_alone(
    table: np.ndarray, shared: Sequence[ShardingSpec | None], specs: Sequence[ShardingSpec], common: Sequence[bool]
) -> np.ndarray:  # fmt: skip
    """The edge from a producer where some choices are the version that all microbatches read: these go with that version alone."""
    fits = np.array([[read == spec for spec in specs] for read in shared])
    return np.where(np.array(common), np.where(fits, 0.0, IMPOSSIBLE), table)


def keepable_specs(specs: Sequence[ShardingSpec]) -> tuple[ShardingSpec, ...]:
    """Of the specs of a tensor, those in which backward may keep it: no partial sums, unless there is nothing else."""
    found = tuple(dict.fromkeys(specs))
    return tuple(spec for spec in found if not spec.partial) or found


def copied_from_layout(layout: Node, table: np.ndarray, copied: np.ndarray) -> np.ndarray:
    """Edge from the layout to what is copied from it. Nothing is kept of a choice for the deferred loss."""
    late = np.array(layout.deferred or (False,) * len(layout.specs))
    return np.where(copied, np.where(late[:, None], IMPOSSIBLE, table), 0.0)


def _made_by_recomputation(again: Node, outputs: tuple[ShardingSpec, ...], found: _Choices, alone: bool) -> np.ndarray:
    """Edge from a recomputation to what it makes: in the same spec, at the same time.

    Args:
        alone: the operator has one result, so it is recomputed for that alone.
    """
    assert again.strategy_numbers is not None
    count = len(outputs)
    table = np.zeros((len(again.seconds), len(found.specs)))
    for column, (spec, state, moment) in enumerate(zip(found.specs, found.states, found.moments, strict=True)):
        if state == "recompute":
            fits = [pick >= 0 and (row - 1) // count == moment and outputs[pick] == spec for row, pick in enumerate(again.strategy_numbers)]
            table[:, column] = np.where(fits, 0.0, IMPOSSIBLE)
        elif alone:
            table[1:, column] = IMPOSSIBLE
    return table


def _exists_in_time(runs: RecomputeTimes, op: str, reader: str, found: _Choices, index: int, ends: Sequence[int]) -> tuple[bool, ...]:
    """For each time of the reader's recomputation, whether a tensor of choice ``index`` exists then."""
    state = found.states[index]
    allowed = []
    for moment, time in enumerate(runs.times[reader]):
        if state == "gone":
            allowed.append(False)
        elif state == "kept":
            lowest = runs.earliest_time(reader, moment)
            allowed.append(len(ends) == 1 or found.ends[index] >= ends[max(bisect_right(ends, lowest) - 1, 0)])
        else:
            mine = runs.times[op]
            allowed.append(found.moments[index] <= min(bisect_left(mine, time), len(mine) - 1))
    return tuple(allowed)


def _needed_by_recomputation(rows: Sequence[Sequence[bool]], count: int) -> np.ndarray:
    """Edge to a recomputation that needs a tensor. No recomputation needs nothing."""
    return np.array([[0.0, *(0.0 if fits else IMPOSSIBLE for fits in row for _ in range(count))] for row in rows])


def recompute_read_table(model: Model, table: np.ndarray, moments: int) -> np.ndarray:
    """Seconds of the reshards that a recomputation reads, from those of its first run; 0 without a recomputation."""
    nothing = np.zeros((len(table), 1))
    return model.cached((id(table), moments, "recompute"), lambda: np.hstack([nothing, *([table] * moments)]), table)


def free_if_gone(model: Model, source: int, table: np.ndarray) -> np.ndarray:
    """The table of reshards from ``source``, free where its tensor is gone and nobody reads it; once per table."""
    gone = tuple(state == "gone" for state in model.nodes[source].states)
    if not any(gone):
        return table
    return model.cached((id(table), gone), lambda: np.where(np.array(gone)[:, None], 0.0, table), table)


def _choice_spans(
    model: Model, runs: RecomputeTimes, site: Site, found: _Choices, early: Sequence[Reader], viewed: bool, times: Mapping[str, int]
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Begin and end of the time for which each choice of ``saved`` exists.

    A kept tensor exists from its last reader in forward, a recomputed one until its first reader in backward.
    """
    graph = model.space.graph
    producer = graph.producer.get(site.tensor)
    begin = max((reader.time for reader in early), default=times[producer.name] if producer else 0) + 1
    tiny = producer is not None and producer.name not in runs.times and not why_once(producer)
    carries = not viewed or _is_only_view(graph, runs, producer)
    root = runs.roots[site.tensor]
    stored = root not in graph.producer or root in runs.leaving
    spans = []
    choices = zip(found.states, found.moments, found.ends, found.from_layout, found.common, strict=True)
    for state, moment, end, copied, common in choices:
        span = (0, 0)
        if state == "kept" and not tiny and not common and (copied or not stored):
            span = begin, end
        elif state == "recompute" and carries and not stored and producer is not None:
            span = runs.times[producer.name][moment], end
        spans.append(span if span[1] > span[0] else (0, 0))
    return tuple(spans)


def _is_only_view(graph: Graph, runs: RecomputeTimes, op: Op | None) -> bool:
    """Whether a view alone keeps its storage alive in backward, all the way to the tensor that it views."""
    while op is not None and is_alias(op) and op.inputs:
        tensor = op.inputs[0]
        readers = {graph.ops[index].name for index, _ in graph.consumers[tensor]}
        if tensor in runs.needed or len(op.outputs) > 1 or any(name in runs.times for name in readers - {op.name}):
            return False
        op = graph.producer.get(tensor)
    return True


def without_kept_memory(model: Model) -> Model:
    """The model without the memory of tensors that could be recomputed instead.

    Every plan with recomputation takes at least the time and memory that this model asks for.
    """
    graph, roots = model.space.graph, storage_roots(model.space.graph)
    middle = sum(op.phase == "forward" for op in graph.ops)

    def made_once(name: str) -> bool:
        return bool(why_once(graph.op[name]))

    def light(node: Node) -> Node:
        if node.kind == "saved" and node.name in graph.producer and not made_once(graph.producer[node.name].name):
            stored = roots[node.name] not in graph.producer
            return node if stored else replace(node, items=[[] for _ in node.items])
        if node.kind == "op" and node.phase == "forward" and not made_once(node.name):
            items = [[(begin, min(end, middle), size) for begin, end, size in found if begin < middle] for found in node.items]
            return replace(node, items=items)
        return node

    return replace(model, nodes=[light(node) for node in model.nodes])
