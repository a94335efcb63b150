"""A schedule of fewer layers: of layers that are equal in all the plan says of them one is kept.

Two repeats of a group are equal when their operators, in order, have the same strategies, are run again alike, and read the same: the
same places of the layer before or after, weights of their own, or one tensor of the model; each in the same spec, by the same steps of the
same kinds of calls. The first and the last repeat are kept, and as many more as hold every kind of repeat and every kind of bucket.
Instructions of the others are left out; the order of the rest stays. What a kept layer read of one that is left out it reads of the kept
layer that is next in that direction, which lies alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from autopar.graph import Graph, GraphInput
from autopar.schedule import AGAIN, Collective, Instruction, Schedule
from autopar.schedule.collectives import Part

MOST_RUNS = 400_000
"""Operators of all ranks together up to which layers are kept for their buckets alone: a minute of one processor."""


@dataclass(frozen=True)
class Place:
    """An operator's place: the group, the repeat and the position in it."""

    group: int
    repeat: int
    position: int


@dataclass(frozen=True)
class Fewer:
    """A schedule of some of the layers.

    Args:
        schedule: of those.
        layers, kept: repeats of all groups before, and those that are left.
        buckets: kinds of buckets of which none is whole: they span too many layers.
    """

    schedule: Schedule
    layers: int
    kept: int
    buckets: int


def with_fewer_layers(schedule: Schedule) -> Fewer:
    """The schedule with one of each kind of layer."""
    layers = _Layers(schedule)
    total = sum(map(len, schedule.graph.groups))
    chosen = layers.chosen()
    while more := _Cut(layers, _rising(chosen)).unlike():
        for group, repeat in more:
            chosen[group].add(repeat)
    kept = _rising(chosen)
    if sum(map(len, kept)) == total:
        return Fewer(schedule, total, total, 0)
    return Fewer(_Cut(layers, kept).schedule(), total, sum(map(len, kept)), layers.broken(kept))


def _rising(chosen: list[set[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(repeats)) for repeats in chosen)


class _Layers:
    """Which repeats are equal, and which are needed."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.graph = schedule, schedule.graph
        self.place: dict[str, Place] = {
            name: Place(number, index, position)
            for number, group in enumerate(self.graph.groups)
            for index, repeat in enumerate(group)
            for position, name in enumerate(repeat)
        }
        self.owner = self._owners()
        self.runs = {item.of: item for item in schedule.instructions if item.kind == "run"}
        self.over = {item.of: item.over for item in schedule.instructions if item.kind == "run"}
        self.kinds = [[self._kind(number, index) for index in range(len(group))] for number, group in enumerate(self.graph.groups)]

    def _owners(self) -> dict[str, tuple[int, int]]:
        """The repeat that a tensor is of: that which makes it, or the only one that reads a weight."""
        found = {
            tensor: (place.group, place.repeat)
            for name, place in self.place.items() for tensor in self.graph.op[name].outputs
        }  # fmt: skip
        readers: dict[str, set[tuple[int, int] | None]] = defaultdict(set)
        for op in self.graph.ops:
            place = self.place.get(op.name)
            for tensor in op.inputs:
                readers[tensor].add((place.group, place.repeat) if place else None)
        for item in self.graph.inputs:
            if item.kind in ("parameter", "buffer", "constant") and len(readers[item.tensor]) == 1:
                (owner,) = readers[item.tensor]
                if owner is not None:
                    found[item.tensor] = owner
        return found

    def _kind(self, group: int, repeat: int) -> Hashable:
        return tuple(self._operator(name, group, repeat) for name in self.graph.groups[group][repeat])

    def _operator(self, name: str, group: int, repeat: int) -> Hashable:
        """What the plan says of an operator and of what it reads, and of its second run."""
        found: list[Hashable] = []
        for run in (name, f"{name}{AGAIN}"):
            if run in self.runs:
                item, operation = self.runs[run], self.schedule.operations[run]
                over = item.reads.index(item.over) if item.over in item.reads else None
                reads = tuple(self._read(value, group, repeat) for value in item.reads)
                found.append((operation.strategy, operation.strategy.factors, operation.copied, item.phase, over, reads))
        return tuple(found)

    def _read(self, value: str, group: int, repeat: int) -> Hashable:
        known = self.schedule.values[value]
        owner, maker = self.owner.get(known.tensor), self.graph.producer.get(known.tensor)
        where: Hashable
        if owner is None or owner[0] != group:
            where = known.tensor
        elif maker is not None:
            where = owner[1] - repeat, self.place[maker.name].position, maker.outputs.index(known.tensor)
        else:
            where = owner[1] - repeat
        return where, value.endswith(AGAIN), self._steps(value)

    def _steps(self, value: str) -> Hashable:
        """How a value was made of its tensor: specs and steps, back to the tensor itself."""
        layout = self.schedule.layouts.get(value)
        if layout is None:
            return self.schedule.values[value].spec
        steps = tuple((part.step.kind, part.step.axes, part.step.dims) for part in self.parts_of.get(value, ()))
        return layout.spec, layout.phase, steps, self._steps(layout.source)

    @cached_property
    def parts_of(self) -> Mapping[str, list[Part]]:
        """The collective steps of each layout."""
        found: dict[str, list[Part]] = defaultdict(list)
        for call in self.schedule.collectives.values():
            for part in call.parts:
                found[part.layout.value].append(part)
        return {value: sorted(parts, key=lambda part: part.number) for value, parts in found.items()}

    def chosen(self) -> list[set[int]]:
        """The repeats of each group that are kept."""
        chosen = [{0, len(group) - 1} for group in self.graph.groups]
        for number, kinds in enumerate(self.kinds):
            have = {kinds[index] for index in chosen[number]}
            for index, kind in enumerate(kinds):
                if kind not in have:
                    have.add(kind)
                    chosen[number].add(index)
        self._add_read_from_outside(chosen)
        self._add_of_buckets(chosen)
        return chosen

    def _add_read_from_outside(self, chosen: list[set[int]]) -> None:
        """A repeat is kept that anything but the repeats next to it reads, or that reads of such."""
        leaving = {output.tensor for output in self.graph.outputs if output.kind != "gradient"}
        for op in self.graph.ops:
            reader = self.place.get(op.name)
            for tensor in op.inputs:
                owner = self.owner.get(tensor)
                if owner is None or tensor not in self.graph.producer:
                    continue
                near = reader is not None and reader.group == owner[0] and abs(reader.repeat - owner[1]) <= 1
                if not near:
                    chosen[owner[0]].add(owner[1])
                    if reader is not None:
                        chosen[reader.group].add(reader.repeat)
        for tensor in leaving:
            if tensor in self.owner:
                group, repeat = self.owner[tensor]
                chosen[group].add(repeat)

    def bucket(self, call: Collective) -> tuple[Hashable, frozenset[tuple[int, int]]]:
        """The kind of a bucket, by its parts relative to the first of its layers, and the repeats it spans."""
        owners = [self.owner.get(part.layout.tensor) for part in call.parts]
        first = min((owner for owner in owners if owner is not None), default=(0, 0))
        rows: list[Hashable] = []
        for part, owner in zip(call.parts, owners, strict=True):
            maker = self.graph.producer.get(part.layout.tensor)
            name: Hashable = part.layout.tensor
            if owner is not None:
                below = self.place[maker.name].position if maker is not None else self._reading(part.layout.tensor, owner)
                name = owner[0] - first[0], owner[1] - first[1], below
            rows.append((name, part.step.kind, part.step.axes, part.step.dims, part.from_spec, part.layout.spec, part.layout.phase))
        return tuple(rows), frozenset(owner for owner in owners if owner is not None)

    def _reading(self, tensor: str, owner: tuple[int, int]) -> Hashable:
        """The place of the first reader of a weight."""
        index, position = self.graph.consumers[tensor][0]
        return self.place[self.graph.ops[index].name].position, position

    def _buckets(self) -> Iterator[tuple[Hashable, frozenset[tuple[int, int]]]]:
        for call in self.schedule.collectives.values():
            if len(call.parts) > 1:
                yield self.bucket(call)

    def _add_of_buckets(self, chosen: list[set[int]]) -> None:
        """The repeats of one bucket of each kind, those first that need fewest more, for as long as there is time for them."""
        spans: dict[Hashable, list[frozenset[tuple[int, int]]]] = defaultdict(list)
        for kind, span in self._buckets():
            spans[kind].append(span)

        def missing(found: list[frozenset[tuple[int, int]]]) -> list[tuple[int, int]]:
            return min(([owner for owner in sorted(span) if owner[1] not in chosen[owner[0]]] for span in found), key=len)

        for found in sorted(spans.values(), key=lambda found: len(missing(found))):
            larger = [set(repeats) for repeats in chosen]
            for group, repeat in missing(found):
                larger[group].add(repeat)
            if self.operators(larger) <= MOST_RUNS:
                chosen[:] = larger

    def operators(self, chosen: list[set[int]]) -> int:
        """The operators that all ranks run together, second runs counted."""
        count = 0
        for name in self.runs:
            place = self.place.get(name.removesuffix(AGAIN))
            count += place is None or place.repeat in chosen[place.group]
        return count * self.schedule.machine.mesh.ranks * self.graph.microbatches

    def broken(self, kept: tuple[tuple[int, ...], ...]) -> int:
        """Kinds of buckets of which none is kept whole."""
        whole: dict[Hashable, bool] = defaultdict(bool)
        for kind, span in self._buckets():
            whole[kind] |= all(repeat in kept[group] for group, repeat in span)
        return sum(not there for there in whole.values())


class _Cut:
    """The schedule without the repeats that are left out."""

    def __init__(self, layers: _Layers, kept: tuple[tuple[int, ...], ...]) -> None:
        self.layers, self.kept, self.whole, self.graph = layers, kept, layers.schedule, layers.graph
        self.instead: dict[tuple[int, int, str], str] = {}

    def gone(self, tensor: str) -> bool:
        owner = self.layers.owner.get(tensor)
        return owner is not None and owner[1] not in self.kept[owner[0]]

    def is_left(self, op: str) -> bool:
        place = self.layers.place.get(op.removesuffix(AGAIN))
        return place is None or place.repeat in self.kept[place.group]

    def schedule(self) -> Schedule:
        """The values of kept layers, read in place of those that are left out."""
        renamed = self._renamed()
        whole = self.whole
        collectives = {
            call.id: replace(call, parts=tuple(part for part in call.parts if not self.gone(part.layout.tensor)))
            for call in whole.collectives.values()
        }
        collectives = {name: call for name, call in collectives.items() if call.parts}
        values = {name: value for name, value in whole.values.items() if not self.gone(value.tensor)}
        instructions = tuple(self._instructions(renamed, collectives))
        graph = self._graph(renamed)
        named = {(output.kind, output.name): value for output, value in whole.outputs}
        return replace(
            whole, graph=graph, instructions=instructions, collectives=collectives, values=values,
            operations={
                name: item._replace(op=graph.op[name.removesuffix(AGAIN)])
                for name, item in whole.operations.items() if self.is_left(name)
            },
            cuts={name: cut for name, cut in whole.cuts.items() if not self.gone(cut.layout.tensor)},
            layouts={name: layout for name, layout in whole.layouts.items() if not self.gone(layout.tensor)},
            outputs=tuple((output, named[output.kind, output.name]) for output in graph.outputs),
        )  # fmt: skip

    def _joints(self) -> Iterator[tuple[int, int, int, int]]:
        """Where layers are left out: the group, the repeat that is read instead, the one that reads it so far, and the one that will."""
        for group, kept in enumerate(self.kept):
            for before, after in pairwise(kept):
                if after > before + 1:
                    yield group, before, before + 1, after
                    yield group, after, after - 1, before

    def _pairs(self, joint: tuple[int, int, int, int]) -> Iterator[tuple[str, str]]:
        """The values of a joint: what is read of the kept repeat so far, and what is read in its place by the one that will."""
        group, source, reader, kept = joint
        repeats, runs = self.graph.groups[group], self.layers.runs
        own = {tensor for name in repeats[source] for tensor in self.graph.op[name].outputs}
        for one, other in zip(repeats[reader], repeats[kept], strict=True):
            for suffix in ("", AGAIN):
                if one + suffix in runs and other + suffix in runs:
                    for given, read in zip(runs[one + suffix].reads, runs[other + suffix].reads, strict=True):
                        if self.whole.values[given].tensor in own:
                            yield given, read

    def unlike(self) -> set[tuple[int, int]]:
        """Repeats without which a kept one would read a value that lies otherwise than its own."""
        values, found = self.whole.values, set[tuple[int, int]]()
        for joint in self._joints():
            if any(values[given].spec != values[read].spec for given, read in self._pairs(joint)):
                found.add((joint[0], joint[2]))
        return found

    def _renamed(self) -> dict[str, str]:
        """For each value of a layer that is left out and that a kept one reads, the value that it reads then."""
        found: dict[str, str] = {}
        for joint in self._joints():
            for given, read in self._pairs(joint):
                found[read] = given
                found[self.whole.values[read].tensor] = self.whole.values[given].tensor
        return found

    def _instructions(self, renamed: Mapping[str, str], collectives: Mapping[str, Collective]) -> Iterator[Instruction]:
        left = [item for item in self.whole.instructions if self._is_left(item, collectives)]
        last = {renamed.get(value, value): index for index, item in enumerate(left) if item.kind == "free" for value in item.reads}
        for index, item in enumerate(left):
            reads = tuple(dict.fromkeys(renamed.get(value, value) for value in item.reads)) if item.kind == "free" else tuple(
                renamed.get(value, value) for value in item.reads
            )
            if item.kind == "free":
                reads = tuple(value for value in reads if last[value] == index and not self.gone(self.whole.values[value].tensor))
                if not reads:
                    continue
            writes = item.writes
            if item.kind in ("start", "wait"):
                parts = collectives[item.of].parts
                reads, writes = (tuple(part.source for part in parts) if item.reads else ()), tuple(part.target for part in parts)
                reads = tuple(renamed.get(value, value) for value in reads)
            yield item._replace(reads=reads, writes=writes, over=renamed.get(item.over, item.over) if item.over else item.over)

    def _is_left(self, item: Instruction, collectives: Mapping[str, Collective]) -> bool:
        match item.kind:
            case "run":
                return self.is_left(item.of)
            case "start" | "wait":
                return item.of in collectives
            case "free":
                return True
            case _:
                return not any(self.gone(self.whole.values[name].tensor) for name in item.writes)

    def _graph(self, renamed: Mapping[str, str]) -> Graph:
        graph = self.graph
        ops = tuple(
            replace(op, inputs=tuple(renamed.get(name, name) for name in op.inputs)) for op in graph.ops if self.is_left(op.name)
        )  # fmt: skip
        inputs: tuple[GraphInput, ...] = tuple(item for item in graph.inputs if not self.gone(item.tensor))
        names = {tensor for op in ops for tensor in (*op.inputs, *op.outputs)} | {item.tensor for item in inputs}
        outputs = tuple(output for output in graph.outputs if output.kind == "output" or not self.gone(graph.owners[output]))
        groups = tuple(tuple(group[index] for index in kept) for group, kept in zip(graph.groups, self.kept, strict=True))
        tensors = {name: tensor for name, tensor in graph.tensors.items() if name in names}
        return replace(graph, tensors=tensors, inputs=inputs, ops=ops, outputs=outputs, groups=groups)
