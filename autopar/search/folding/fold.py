"""Folding: equal layers are decided once, in a graph that leaves most of them out.

Of n equal repeats four are kept: the first, the last, and two between them, the *representative* and the *last representative*. These two
stand for all n - 2 repeats between the first and the last. Choices of the representative hold for the last representative and for the
repeats left out. ``Folding.unfold`` turns an assignment of the folded graph into one of the whole graph.

A group folds under four conditions. Repeats read only their own tensors, those of their neighbours, and tensors that all repeats read. All
repeats between read in the same way. No operator outside the group reads tensors of the repeats between. What these give as outputs, all
give alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from autopar.graph import Graph, GraphOutput, Op
from autopar.schedule import AGAIN, OUTPUT, Assignment, Layout
from autopar.schedule.scheduled_plan import Sample
from autopar.search.choices.pins import Pins
from autopar.search.folding.layer_groups import REPRESENTATIVE, Key, LayerGroup, group_layers
from autopar.search.settings import FEWEST_REPEATS
from autopar.sharding import ShardingSpec

Specs = TypeVar("Specs", bound=Mapping[str, ShardingSpec])


@dataclass(frozen=True)
class Folding:
    """A graph with repeats left out.

    Args:
        whole, graph: the graph before and after.
        group: the repeats, numbered as in the whole graph, with the folded graph's outputs of repeats.
        neighbour_of_key: for each key that a neighbour reads, that neighbour: 1 the next repeat, -1 the one before.
        outputs: indices of the folded graph's outputs in the whole graph.
    """

    whole: Graph
    graph: Graph
    group: LayerGroup
    neighbour_of_key: Mapping[Key, int]
    outputs: tuple[int, ...]

    @property
    def represented_count(self) -> int:
        """Number of repeats that the representative stands for, itself included."""
        return len(self.group.represented)

    @cached_property
    def representatives(self) -> Mapping[str, str]:
        """The counterpart in the representative of each operator and tensor of a repeat, where there is one."""
        group, found = self.group, dict[str, str]()
        for repeat, names in enumerate(group.repeats):
            found.update(zip(names, group.repeats[REPRESENTATIVE], strict=True))
            named = group.by_key[repeat].items()
            found.update((tensor, group.by_key[REPRESENTATIVE][key]) for key, tensor in named if key in group.by_key[REPRESENTATIVE])
        return found

    def count_of(self, name: str) -> int:
        """How often an operator or tensor of the folded graph stands in the whole one. The last representative counts for itself."""
        repeat = self.group.repeat_of(name)
        return self.represented_count - 1 if repeat == REPRESENTATIVE else 1

    def pins(self, pins: Pins) -> Pins | None:
        """The pins on the folded graph; None where pins differ between the repeats that the representative stands for."""
        for place, names in self._pinned_together(pins.inputs, pins.outputs, pins.tensors):
            if len({place.get(name) for name in names}) > 1:
                return None
        number = {f"{OUTPUT}{whole}": f"{OUTPUT}{index}" for index, whole in enumerate(self.outputs)}
        return Pins(
            {name: spec for name, spec in pins.inputs.items() if name in self.graph.tensors},
            {number[name]: spec for name, spec in pins.outputs.items() if name in number},
            {name: spec for name, spec in pins.tensors.items() if name in self.graph.tensors},
            pins.merged,
            pins.on_axes,
        )

    def spread_pins(self, pins: Pins) -> Pins | None:
        """The pins on the folded graph, where one of a repeat between holds for all of them; None where two disagree."""
        inputs, tensors, outputs = dict(pins.inputs), dict(pins.tensors), dict(pins.outputs)
        for place, names in self._pinned_together(inputs, outputs, tensors):
            for spec in [place[name] for name in names if name in place][:1]:
                place.update({name: spec for name in names if name not in place})
        return self.pins(replace(pins, inputs=inputs, tensors=tensors, outputs=outputs))

    def _pinned_together(self, inputs: Specs, outputs: Specs, tensors: Specs) -> Iterator[tuple[Specs, list[str]]]:
        """Yields pins of one kind, and names in the repeats between that have the same pin or none."""
        for place in (inputs, tensors):
            for name in [name for name in place if name in self.group.tensors and self.group.is_represented(name)]:
                yield place, [self.group.counterpart(name, repeat) for repeat in self.group.represented]
        for names in self._outputs_between():
            yield outputs, names

    def _outputs_between(self) -> Iterator[list[str]]:
        """Yields the outputs that the repeats between give at one place, by name."""
        places: dict[Key, list[str]] = {}
        for index, output in enumerate(self.whole.outputs):
            home = self.group.tensors.get(output.tensor)
            if output.kind == "output" and home is not None and home[0] in self.group.represented:
                places.setdefault(home[1], []).append(f"{OUTPUT}{index}")
        yield from places.values()

    def unfold(self, assignment: Assignment) -> Assignment | None:
        """The assignment of the whole graph; None where the two representatives disagree."""
        return _Unfolding(self, assignment).run()

    def unfolds(self, assignment: Assignment) -> bool:
        """Whether an assignment of the folded graph unfolds. One repeat left out shows that, since all are equal."""
        return self._shorten_to(FEWEST_REPEATS - 1).unfold(assignment) is not None

    def samples(self, assignment: Assignment, depths: tuple[int, int]) -> tuple[Sample, ...]:
        """An assignment of the folded graph at two smaller numbers of repeats, weighted as the line through them."""
        shorter, longer = depths
        share = (len(self.group.repeats) - shorter) / (longer - shorter)
        found = []
        for weight, short in zip((1.0 - share, share), map(self._shorten_to, depths), strict=True):
            plan = short.unfold(assignment)
            assert plan is not None, "a plan that unfolds to one depth does to another"
            found.append(Sample(weight, short.whole, plan))
        return tuple(found)

    def _shorten_to(self, repeats: int) -> Folding:
        if repeats not in self._shorter:
            self._shorter[repeats] = shorten(self, repeats)
        return self._shorter[repeats]

    @cached_property
    def _shorter(self) -> dict[int, Folding]:
        return {}


def fold_layers(whole: Graph) -> Folding | None:
    """The graph with the repeats of its largest group left out; None where no group folds."""
    for repeats in sorted(whole.groups, key=lambda group: -len(group) * len(group[0])):
        if len(repeats) >= FEWEST_REPEATS:
            group = group_layers(whole, repeats)
            toward = _find_neighbours(whole, group)
            if toward is not None and _have_equal_interfaces(whole, group):
                graph, outputs = _leave_out(whole, group, group.left_out)
                return Folding(whole, graph, _with_outputs(group, graph), toward, outputs)
    return None


def _with_outputs(group: LayerGroup, graph: Graph) -> LayerGroup:
    """The group, with the folded graph's outputs that its repeats give."""
    tensors, named = dict(group.tensors), tuple(dict(names) for names in group.by_key)
    for index, output in enumerate(graph.outputs):
        home = group.tensors.get(output.tensor)
        if output.kind == "output" and home is not None:
            key = ("output", *home[1])
            tensors[f"{OUTPUT}{index}"] = home[0], key
            named[home[0]][key] = f"{OUTPUT}{index}"
    return replace(group, tensors=tensors, by_key=named)


def _find_neighbours(whole: Graph, group: LayerGroup) -> dict[Key, int] | None:
    """The neighbour that reads each key (``Folding.neighbour_of_key``); None where repeats are wired differently."""
    last = len(group.repeats) - 1

    def wiring(repeat: int) -> Iterator[tuple[int, int, Any]]:
        for place, name in enumerate(group.repeats[repeat]):
            for position, tensor in enumerate(whole.op[name].inputs):
                home = group.tensors.get(tensor)
                yield place, position, ("all", tensor) if home is None else (home[0] - repeat, home[1])

    expected = list(wiring(REPRESENTATIVE))
    if any(list(wiring(repeat)) != expected for repeat in range(REPRESENTATIVE + 1, last)):
        return None
    toward: dict[Key, int] = {}
    for repeat in range(last + 1):
        for _, _, (offset, key) in wiring(repeat):
            if offset == "all" or offset == 0:
                continue
            if offset not in (1, -1) or toward.setdefault(key, -offset) != -offset:
                return None
    for op in whole.ops:
        if op.name not in group.ops and any(map(group.is_represented, op.inputs)):
            return None
    keys = {frozenset(group.by_key[repeat]) for repeat in group.represented}
    return toward if len(keys) == 1 else None


def _have_equal_interfaces(whole: Graph, group: LayerGroup) -> bool:
    """Whether the repeats between give equal outputs and gradients of their own parameters, and read equal graph inputs."""
    found: dict[int, list[Any]] = {repeat: [] for repeat in group.represented}
    for output in whole.outputs:
        source = group.tensors.get(output.tensor)
        target = group.tensors.get(whole.owners[output]) if output.kind != "output" else source
        if source is None and target is None:
            continue
        if source is None or target is None or source[0] != target[0]:
            if any(place is not None and place[0] in found for place in (source, target)):
                return False
        elif source[0] in found:
            found[source[0]].append((output.kind, source[1], target[1]))
    for item in whole.inputs:
        home = group.tensors.get(item.tensor)
        if home is not None and home[0] in found:
            tensor = whole.tensors[item.tensor]
            found[home[0]].append(("input", home[1], item.kind, item.trained, tensor.shape, tensor.dtype, len(item.aliases)))
    signatures = {tuple(sorted(map(repr, rows))) for rows in found.values()}
    return len(signatures) == 1 and all(len(set(rows)) == len(rows) for rows in found.values())


def shorten(folding: Folding, repeats: int) -> Folding:
    """The folding of the same graph with ``repeats`` repeats, half of them from its end. The folded graph stays as it is."""
    group, count = folding.group, len(folding.group.repeats)
    left_out = range(repeats // 2, count - (repeats - repeats // 2))
    whole, outputs = _leave_out(folding.whole, group, left_out)
    number = {repeat: place for place, repeat in enumerate(repeat for repeat in range(count) if repeat not in left_out)}
    kept = LayerGroup(
        tuple(group.repeats[repeat] for repeat in number),
        {name: (number[repeat], place) for name, (repeat, place) in group.ops.items() if repeat in number},
        {name: (number[repeat], key) for name, (repeat, key) in group.tensors.items() if repeat in number},
        tuple(group.by_key[repeat] for repeat in number),
    )
    return Folding(whole, folding.graph, kept, folding.neighbour_of_key, tuple(outputs.index(index) for index in folding.outputs))


def _leave_out(whole: Graph, group: LayerGroup, left_out: range) -> tuple[Graph, tuple[int, ...]]:
    """The graph without the consecutive repeats ``left_out``, and the indices of its outputs in the whole graph.

    The repeats before and after them read each other instead.
    """
    gone = {tensor for tensor, (repeat, _) in group.tensors.items() if repeat in left_out}

    def rewired(op: Op) -> Op:
        if op.name not in group.ops or not gone & set(op.inputs):
            return op
        source = left_out.stop if group.ops[op.name][0] < left_out.start else left_out.start - 1
        return replace(op, inputs=tuple(group.counterpart(tensor, source) if tensor in gone else tensor for tensor in op.inputs))

    ops = tuple(rewired(op) for op in whole.ops if op.name not in group.ops or group.ops[op.name][0] not in left_out)
    kept = [(index, output) for index, output in enumerate(whole.outputs) if output.tensor not in gone]
    graph = Graph(
        whole.mode, {name: tensor for name, tensor in whole.tensors.items() if name not in gone},
        tuple(item for item in whole.inputs if item.tensor not in gone), ops, tuple(output for _, output in kept), (), whole.arguments,
        whole.accumulation,
    )  # fmt: skip
    return graph, tuple(index for index, _ in kept)


class _Unfolding:
    """One assignment of the folded graph, rewritten for the whole graph. Repeats are numbered as in the whole graph."""

    def __init__(self, folding: Folding, assignment: Assignment) -> None:
        self.folding, self.group, self.folded_assignment = folding, folding.group, assignment
        self.outputs = [f"{OUTPUT}{index}" for index in folding.outputs]
        self.leaving = {
            self._output_identity(output, folding.whole): f"{OUTPUT}{index}" for index, output in enumerate(folding.whole.outputs)
        }
        self.layouts: dict[str, Layout] = {}
        self.reads: dict[tuple[str, int], str] = {}

    def _output_identity(self, output: GraphOutput, graph: Graph) -> tuple[str, str, str]:
        """The identity of an output. In the repeats between, outputs are identified by the tensor that they give, without their name."""
        name = "" if self.group.is_represented(output.tensor) else output.name
        return output.kind, output.tensor, name if output.kind == "output" else graph.owners[output]

    def run(self) -> Assignment | None:
        group, given = self.group, self.folded_assignment
        representative, last = group.repeats[REPRESENTATIVE], group.repeats[group.last_representative]
        if any(given.strategies[one] != given.strategies[other] for one, other in zip(representative, last, strict=True)):
            return None
        inputs: dict[str, ShardingSpec] = dict(given.inputs)
        for key, tensor in group.by_key[REPRESENTATIVE].items():
            if tensor in inputs:
                if inputs[tensor] != inputs[group.by_key[group.last_representative][key]]:
                    return None
                inputs.update((group.by_key[repeat][key], inputs[tensor]) for repeat in group.left_out)
        strategies = dict(given.strategies)
        for repeat in group.left_out:
            strategies.update((name, given.strategies[one]) for name, one in zip(group.repeats[repeat], representative, strict=True))
        for layout in given.layouts:
            self._add_layout(layout)
        for (reader, position), value in (given.reads or {}).items():
            self._add_read(reader, position, value)
        for repeat in group.left_out:
            if not self._add_reads_of(repeat):
                return None
        if not self._alike(given.once):
            return None
        return Assignment(
            inputs, strategies, tuple(self.layouts.values()), self.reads, self._in_all(given.again), self._in_all(given.once)
        )  # fmt: skip

    def _alike(self, names: frozenset[str]) -> bool:
        """Whether both representatives have the same of the operators."""
        group = self.group
        pairs = zip(group.repeats[REPRESENTATIVE], group.repeats[group.last_representative], strict=True)
        return all((one in names) == (other in names) for one, other in pairs)

    def _in_all(self, names: frozenset[str]) -> frozenset[str]:
        """The operators, recomputed or run once a step, with those of the repeats left out, which are as the representative's."""
        own = names.intersection(self.group.repeats[REPRESENTATIVE])
        return names.union(self.group.counterpart(name, repeat) for name in own for repeat in self.group.left_out)

    def _model_repeat(self, key: Key) -> int:
        """The repeat that shows how the repeats between use a key.

        Of the two representatives, it is the one whose readers are both in the folded graph.
        """
        return self.group.last_representative if self.folding.neighbour_of_key.get(key) == -1 else REPRESENTATIVE

    def _add_layout(self, layout: Layout) -> None:
        """Adds a layout where it stands, and in the repeats left out if it is the model of theirs."""
        group = self.group
        place = group.tensors.get(layout.tensor)
        if place is None or place[0] not in (REPRESENTATIVE, group.last_representative):
            self._put_layout(replace(layout, before=self._outside(layout.before)))
            return
        self._put_layout(self._layout_in(layout, place[0]))
        if place[0] == self._model_repeat(place[1]):
            for repeat in group.left_out:
                self._put_layout(self._layout_in(layout, repeat))

    def _put_layout(self, layout: Layout) -> None:
        self.layouts[layout.value] = layout

    def _layout_in(self, layout: Layout, repeat: int) -> Layout:
        """The counterpart of a layout in ``repeat``."""
        return replace(
            layout, value=self._value_in(layout.value, layout.tensor, repeat), tensor=self.group.counterpart(layout.tensor, repeat),
            source=self._value_in(layout.source, layout.tensor, repeat), before=self._reader_in(layout.before, layout.tensor, repeat),
        )  # fmt: skip

    def _value_in(self, value: str, tensor: str, repeat: int) -> str:
        """The counterpart of a value's name in ``repeat``. A name begins with the tensor's, and may end with a reader's."""
        suffix = value[len(tensor) + 1 :]
        reader, colon, rest = suffix.partition(":")
        if reader.removesuffix(AGAIN) in self.group.ops or reader.startswith(OUTPUT[:-1]):
            name, colon, rest = suffix.rpartition(":")
            suffix = self._reader_in(name, tensor, repeat) + colon + rest
        moved = self.group.counterpart(tensor, repeat)
        return f"{moved}@{suffix}" if suffix else moved

    def _reader_in(self, reader: str, tensor: str, repeat: int) -> str:
        """The counterpart in the whole graph of a tensor's reader, for the tensor's counterpart in ``repeat``."""
        group = self.group
        home = group.tensors[tensor][0]
        if reader.startswith(OUTPUT):
            kind, _, target = self._output_identity_of(reader)
            target = group.counterpart(target, repeat) if group.repeat_of(target) == home else target
            return self.leaving[kind, group.counterpart(tensor, repeat), target]
        op = reader.removesuffix(AGAIN)
        suffix = reader[len(op) :]
        other, _ = group.ops.get(op, (None, 0))
        if other == home:
            return group.counterpart(op, repeat) + suffix
        if other is not None and {home, other} == {REPRESENTATIVE, group.last_representative}:
            return group.counterpart(op, repeat + (1 if home == REPRESENTATIVE else -1)) + suffix
        return reader

    def _output_identity_of(self, reader: str) -> tuple[str, str, str]:
        output = self.folding.graph.outputs[int(reader.removeprefix(OUTPUT))]
        return self._output_identity(output, self.folding.graph)

    def _outside(self, reader: str) -> str:
        return self.outputs[int(reader.removeprefix(OUTPUT))] if reader.startswith(OUTPUT) else reader

    def _add_read(self, reader: str, position: int, value: str) -> None:
        """Adds a read of the folded graph where it stands."""
        group = self.group
        tensor = self._tensor(reader, position)
        place, here = group.tensors.get(tensor), group.repeat_of(reader.removesuffix(AGAIN)) if not reader.startswith(OUTPUT) else None
        between = place is not None and place[0] in (REPRESENTATIVE, group.last_representative)
        if reader.startswith(OUTPUT):
            for repeat in ([place[0], *(group.left_out if place[0] == REPRESENTATIVE else ())]) if place and between else ():
                self.reads[self._reader_in(reader, tensor, repeat), position] = self._value_in(value, tensor, repeat)
            if not between:
                self.reads[self._outside(reader), position] = value
        elif place is not None and between:
            repeat = place[0]
            if here is not None and {here, repeat} == {REPRESENTATIVE, group.last_representative}:
                repeat = here - 1 if here == group.last_representative else here + 1
            self.reads[reader, position] = self._value_in(value, tensor, repeat)
        else:
            self.reads[reader, position] = value

    def _tensor(self, reader: str, position: int) -> str:
        graph = self.folding.graph
        if reader.startswith(OUTPUT):
            return graph.outputs[int(reader.removeprefix(OUTPUT))].tensor
        return graph.op[reader.removesuffix(AGAIN)].inputs[position]

    def _add_reads_of(self, repeat: int) -> bool:
        """Adds the reads of a repeat left out. False where both representatives differ in how they read a tensor of all repeats."""
        group = self.group
        for place, name in enumerate(group.repeats[repeat]):
            for suffix in ("", AGAIN) if group.repeats[REPRESENTATIVE][place] in self.folded_assignment.again else ("",):
                for position, tensor in enumerate(self.folding.whole.op[name].inputs):
                    if not self._add_read_of(repeat, place, suffix, position, tensor):
                        return False
        return True

    def _add_read_of(self, repeat: int, place: int, suffix: str, position: int, tensor: str) -> bool:
        """Adds one read of the operator at ``place`` of a repeat left out, in its first run or its recomputation."""
        group, reads = self.group, self.folded_assignment.reads or {}
        home, name = group.tensors.get(tensor), group.repeats[repeat][place] + suffix
        one, other = (group.repeats[at][place] + suffix for at in (REPRESENTATIVE, group.last_representative))
        if home is None:
            value = self._shared_value(tensor, repeat, name, reads.get((one, position)), reads.get((other, position)), (one, position))
            if value is not None and value != tensor:
                self.reads[name, position] = value
            return value is not None
        at_home = one if self._model_repeat(home[1]) == REPRESENTATIVE else other
        reader = {0: at_home, -1: other, 1: one}[home[0] - repeat]
        found = reads.get((reader, position))
        if found is not None:
            self.reads[name, position] = self._value_in(found, self._tensor(reader, position), home[0])
        return True

    def _shared_value(self, tensor: str, repeat: int, reader: str, one: str | None, other: str | None, at: tuple[str, int]) -> str | None:
        """The value that a repeat left out reads of a tensor that all repeats read; None where the two representatives disagree.

        It is the value that both representatives read, or a layout of the repeat's own where they have one each.
        """
        if one == other or one is None:
            return (one or tensor) if one == other else None
        layout = self.layouts[one]
        before = layout.before.removesuffix(AGAIN)
        if self.group.repeat_of(before) != REPRESENTATIVE:
            return None
        value = f"{tensor}@{reader}:{at[1]}" if one == f"{tensor}@{at[0]}:{at[1]}" else f"{one}~{repeat}"
        if value not in self.layouts:
            self._put_layout(replace(layout, value=value, before=self.group.counterpart(before, repeat) + layout.before[len(before) :]))
        return value
