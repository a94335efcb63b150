"""Changes of a plan, one at a time: what another plan is, not what it costs.

A change moves a graph input to another spec, or an operator to another strategy that reads or makes what is there, lets an operator run
again or no more, or gathers anew what was kept, or keeps it. The tensors that it touches are resharded anew (``_Plan.touch``); all else
stays as it is. Where a call gathers many graph inputs at once, none of them alone is what is waited for: the first few of them move
together (``_whole``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from autopar.graph import Graph
from autopar.pricing import local_bytes
from autopar.rules import why_once
from autopar.schedule import AGAIN, OUTPUT, Assignment, Layout
from autopar.search.recompute import recompute
from autopar.search.space import Space, spec_bytes
from autopar.search.tuning import Timed
from autopar.sharding import ShardingSpec, Strategy

Change = Callable[[Assignment], Assignment | None]
"""None where it does not apply any more."""


def moves(space: Space, found: Timed, among: frozenset[str] | None = None) -> Iterator[Change]:
    """All changes of a plan but other strategies, what holds most first; each is of the plan as it is when it is asked.

    Args:
        among: tensors of which, or of whose gradients, less is to be held; any change of any when not given.
    """
    graph = space.graph
    names = frozenset(graph.tensors) if among is None else among
    for call in found.schedule.calls if among is None else ():
        gathered = {part.layout.tensor: part.layout.spec for part in call.parts if part.layout.tensor in found.assignment.inputs}
        for count in (len(gathered) >> power for power in range(len(gathered).bit_length() - 1)):
            some = dict(islice(gathered.items(), count))
            yield lambda plan, some=some: _whole(space, plan, some)  # type: ignore[misc]
    movable = (item for item in graph.inputs if item.kind != "tangent")  # those lie as the outputs leave
    for item in sorted(movable, key=lambda item: -graph.tensors[item.tensor].bytes):
        if names.isdisjoint(_with_gradient(graph, item.tensor)):
            continue
        specs, whole = space.input_specs(item), graph.tensors[item.tensor]
        most = math.inf if among is None else local_bytes(whole, found.assignment.inputs[item.tensor], space.machine)
        for spec in (spec for spec in specs if local_bytes(whole, spec, space.machine) < most):
            for keep in (True, False):
                yield lambda plan, name=item.tensor, spec=spec, keep=keep: with_placed(space, plan, name, spec, keep)  # type: ignore[misc]
    for op in graph.ops:
        if op.phase == "forward" and not why_once(op) and not names.isdisjoint(op.outputs):
            yield lambda plan, name=op.name: _run(space, plan, name)  # type: ignore[misc]
    for layout in found.assignment.layouts:
        for keep in (True, False) if layout.tensor in names else ():
            yield lambda plan, name=layout.tensor, keep=keep: _anew(space, plan, (name,), keep)  # type: ignore[misc]
    for name in kept_for_backward(graph):
        if name in names:
            yield lambda plan, name=name: with_part_kept(space, plan, name)  # type: ignore[misc]


def splits(space: Space, found: Timed, among: frozenset[str] | None = None) -> Iterator[Change]:
    """Other strategies of all operators, or of those that read or make some tensors: such as hold less of these."""
    for op in space.graph.ops:
        places = [(place, name) for place, name in enumerate((*op.inputs, *op.outputs)) if among is None or name in among]

        def local(strategy: Strategy, places: Sequence[tuple[int, str]] = places) -> int:
            specs = (*strategy.inputs, *strategy.outputs)
            return sum(local_bytes(space.graph.tensors[name], specs[place], space.machine) for place, name in places)

        most = math.inf if among is None else local(found.assignment.strategies[op.name])
        for strategy in space.op_choices(op).strategies if places else ():
            if among is None or local(strategy) < most:
                yield lambda plan, name=op.name, strategy=strategy: _split(space, plan, name, strategy)  # type: ignore[misc]


def towards(space: Space, guide: Assignment) -> Iterator[Change]:
    """The changes to what a plan has, what holds most last: of the small ones more fit."""
    graph = space.graph
    for item in sorted(graph.inputs, key=lambda item: graph.tensors[item.tensor].bytes):
        if item.kind != "tangent":
            for keep in (True, False):
                yield lambda plan, name=item.tensor, keep=keep: with_placed(space, plan, name, guide.inputs[name], keep)  # type: ignore[misc]
    for op in graph.ops:
        yield lambda plan, name=op.name: _split(space, plan, name, guide.strategies[name])  # type: ignore[misc]


def _whole(space: Space, plan: Assignment, specs: Mapping[str, ShardingSpec]) -> Assignment | None:
    """With graph inputs in the specs that they were gathered to; None where one cannot be."""
    for name, spec in specs.items():
        item = next(item for item in space.graph.inputs if item.tensor == name)
        moved = with_placed(space, plan, name, spec, True) if spec in space.input_specs(item) else None
        if moved is None:
            return None
        plan = moved
    return plan


def with_placed(space: Space, plan: Assignment, name: str, spec: ShardingSpec, keep: bool) -> Assignment | None:
    """With a graph input in another spec; its gradient leaves in it. None where it is in that already, or what it touches is pinned."""
    if plan.inputs[name] == spec:
        return None
    return _anew(space, plan, _with_gradient(space.graph, name), keep, inputs={**plan.inputs, name: spec})


def _with_gradient(graph: Graph, name: str) -> tuple[str, ...]:
    """A graph input and what leaves for it."""
    return name, *(output.tensor for output, owner in graph.owners.items() if owner == name)


def _split(space: Space, plan: Assignment, name: str, strategy: Strategy) -> Assignment | None:
    """With an operator in another strategy, which reads or makes what is there."""
    old, op = plan.strategies[name], space.graph.op[name]
    if old == strategy:
        return None
    specs = _made(space.graph, plan)
    fits = sum(specs[tensor] == spec for tensor, spec in zip(op.inputs, strategy.inputs, strict=True))
    if fits < len(op.inputs) - 1 and old.outputs != strategy.outputs:
        return None
    return _anew(space, plan, (*op.inputs, *op.outputs), True, strategies={**plan.strategies, name: strategy})


def _run(space: Space, plan: Assignment, name: str) -> Assignment | None:
    """With an operator's second run, or without it."""
    graph = space.graph
    if name not in plan.again:
        return recompute(graph, plan, (name,), space.machine)
    left = _needed(graph, plan.again - {name})
    gone = [op for op in graph.ops if op.name in plan.again - left]
    return _anew(space, plan, [tensor for op in gone for tensor in (*op.inputs, *op.outputs)], True, again=left)


def kept_for_backward(graph: Graph) -> list[str]:
    """What forward makes and backward reads, the largest first."""
    names = [
        name
        for name, op in graph.producer.items()
        if op.phase == "forward" and any(graph.ops[index].phase == "backward" for index, _ in graph.consumers[name])
    ]
    return sorted(names, key=lambda name: -graph.tensors[name].bytes)


def with_part_kept(space: Space, plan: Assignment, name: str) -> Assignment | None:
    """With a part of a tensor kept for backward, which gathers it; None where there is none to cut, or it is pinned."""
    return _anew(space, plan, (name,), True, parts=True)


def _needed(graph: Graph, again: frozenset[str]) -> frozenset[str]:
    """Of second runs those whose results backward reads, itself or for others of them."""

    def read(name: str) -> bool:
        readers = [graph.ops[index] for tensor in graph.op[name].outputs for index, _ in graph.consumers[tensor]]
        return any(reader.phase == "backward" or reader.name in again for reader in readers)

    while not all(map(read, again)):
        again = frozenset(filter(read, again))
    return again


def _anew(
    space: Space, plan: Assignment, tensors: Collection[str], keep: bool, *, parts: bool = False, **changed: Any
) -> Assignment | None:  # fmt: skip
    """With what is changed, and the reshards of some tensors chosen anew; not where one of these is pinned."""
    if any(tensor in space.pins.tensors for tensor in tensors):
        return None
    made = _Plan(space, plan, replace(plan, **changed))
    if not all(made.touch(tensor, keep, parts) for tensor in dict.fromkeys(tensors)):
        return None
    found = made.done()
    return None if found == plan else found


_Read = tuple[str, int, ShardingSpec, bool]
"""See ``_Plan.readers``."""


class _Plan:
    """An assignment in the making, whose outputs leave as before."""

    def __init__(self, space: Space, before: Assignment, plan: Assignment) -> None:
        self.space, self.plan, self.graph = space, plan, space.graph
        self.specs = _made(self.graph, plan)
        known = _made(self.graph, before) | {layout.value: layout.spec for layout in before.layouts}
        names = {f"{OUTPUT}{index}": output.tensor for index, output in enumerate(self.graph.outputs)}
        self.leaves = {name: known[(before.reads or {}).get((name, 0), tensor)] for name, tensor in names.items()}
        self.layouts = {layout.value: layout for layout in plan.layouts}
        gone = {name + AGAIN for name in before.again - plan.again}
        self.reads = {read: value for read, value in (plan.reads or {}).items() if read[0] not in gone}

    def done(self) -> Assignment:
        return replace(self.plan, layouts=tuple(self.layouts.values()), reads=self.reads)

    def readers(self, tensor: str) -> Iterator[_Read]:
        """Who reads a tensor, where, in which spec, and whether that is in backward."""
        graph, plan = self.graph, self.plan
        for index, position in graph.consumers[tensor]:
            op = graph.ops[index]
            spec = plan.strategies[op.name].inputs[position]
            yield op.name, position, spec, op.phase == "backward"
            if op.name in plan.again:
                yield op.name + AGAIN, position, spec, True
        producer = graph.producer.get(tensor)
        for index, output in enumerate(graph.outputs):
            if output.tensor == tensor:
                name = f"{OUTPUT}{index}"
                spec = plan.inputs[graph.owners[output]] if output.kind != "output" else self.leaves[name]
                yield name, 0, spec, output.kind == "gradient" or (producer is not None and producer.phase == "backward")

    def touch(self, tensor: str, keep: bool, parts: bool = False) -> bool:
        """Reshards a tensor anew for all who read it; whether that can be.

        Args:
            keep: what forward reads is kept for backward where that reads it in the same spec, not made again of what was there first.
            parts: the smallest part is kept that costs nothing to cut.
        """
        readers = list(self.readers(tensor))
        for value in [value for value, layout in self.layouts.items() if layout.tensor == tensor]:
            del self.layouts[value]
        producer = self.graph.producer.get(tensor)
        own = self.specs[tensor]
        first = {own: tensor}
        again = producer is not None and producer.name in self.plan.again
        later = {own: tensor + AGAIN if again else tensor}
        if keep and not again:
            later = first
        for late, values in ((False, first), (True, later)):
            if late and parts and not again:
                cut = self._cut(tensor, first, readers)
                if cut is None:
                    return False
                values = cut
            for name, position, spec, backward in readers:
                if backward != late:
                    continue
                if spec not in values and not self._make(tensor, spec, values, late, name):
                    return False
                value = values[spec]
                if value == tensor or (value == tensor + AGAIN and name.endswith(AGAIN)):
                    self.reads.pop((name, position), None)
                    if value == tensor and name.endswith(AGAIN):
                        self.reads[name, position] = value
                else:
                    self.reads[name, position] = value
        return True

    def _cut(self, tensor: str, values: Mapping[ShardingSpec, str], readers: Sequence[_Read]) -> dict[ShardingSpec, str] | None:
        """The part of a tensor that is kept for backward, alone; None where there is none to cut."""
        whole, wanted = self.graph.tensors[tensor], tuple(dict.fromkeys(spec for _, _, spec, backward in readers if backward))
        own, early = self.specs[tensor], [name for name, _, _, backward in readers if not backward]
        specs = self.space.splits(tensor)
        free = self.space.reshard_table(whole, (own,), specs)[0] == 0.0
        back = self.space.reshard_table(whole, specs, wanted).sum(axis=1)
        sizes = spec_bytes(whole, specs, self.space.machine)
        least = min(((sizes[place], back[place], place) for place in range(len(specs)) if free[place]), default=None)
        if least is None or specs[least[2]] == own or not early:
            return None
        value = f"{tensor}@part"
        self.layouts[value] = Layout(value, tensor, values[own], specs[least[2]], "forward", early[0])
        return {specs[least[2]]: value}

    def _make(self, tensor: str, spec: ShardingSpec, values: dict[ShardingSpec, str], late: bool, reader: str) -> bool:
        """A reshard of the nearest there is; whether there is one."""
        whole = self.graph.tensors[tensor]
        seconds = {source: float(self.space.reshard_table(whole, (source,), (spec,))[0, 0]) for source in values}
        source = min(seconds, key=lambda one: seconds[one])
        if seconds[source] == float("inf"):
            return False
        value = f"{tensor}@{'backward' if late else 'forward'}:{len(values)}"
        self.layouts[value] = Layout(value, tensor, values[source], spec, "backward" if late else "forward", reader)
        values[spec] = value
        return True


def _made(graph: Graph, plan: Assignment) -> dict[str, ShardingSpec]:
    """The spec of every tensor as it comes in or is made."""
    found = dict(plan.inputs)
    for op in graph.ops:
        found.update(zip(op.outputs, plan.strategies[op.name].outputs, strict=True))
    return found
