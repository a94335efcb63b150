"""Stages that differ in nothing but names: a key that they share, and the schedule of one as that of another."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autopar.graph import Graph, layer_of, to_json
from autopar.schedule import Instruction, Layout, Schedule
from autopar.schedule.collectives import Part

_READER = re.compile(r"@(.+?)((?:@again)?:\d+(?:[#~]\d+)*)$")
"""The reader in the name of a resharded value: ``add@mm:0``, ``add@mm@again:0``, ``add@mm:0#1`` on its way."""


def structure_of(graph: Graph, pins: Mapping[str, str]) -> str:
    """Hash of all that a search reads of a graph and its pins, with places for names.

    Graphs with equal hashes have equal operators, shapes, wiring, layers, microbatches and pins, place by place.
    """
    place = {item.tensor: number for number, item in enumerate(graph.inputs)}
    layers: dict[str, int] = {}
    modules: dict[str, int] = {}
    rows: list[Any] = [graph.mode]
    for item in graph.inputs:
        pin = pins.get(item.name, pins.get(f"{item.kind}:{item.name}"))
        rows.append([item.kind, item.trained, item.is_received, repr(item.blocks), len(item.aliases), pin, *_signature(graph, item.tensor)])
    for op in graph.ops:
        home = layers.setdefault(layer_of(op.module), len(layers)), modules.setdefault(op.module, len(modules))
        pin, inputs = pins.get(f"op:{op.name}"), [place[name] for name in op.inputs]
        rows.append([op.target, inputs, to_json(op.args), to_json(dict(op.kwargs)), op.phase, home, pin])
        for name in op.outputs:
            place[name] = len(place)
            rows.append(_signature(graph, name))
    rows += [[output.kind, output.is_sent, place[output.tensor], pins.get(f"output:{output.name}")] for output in graph.outputs]
    number = {op.name: index for index, op in enumerate(graph.ops)}
    rows.append([[[number[name] for name in repeat] for repeat in group] for group in graph.groups])
    made = graph.accumulation
    rows.append([made.microbatches, sorted(place[name] for name in made.cut), made.weight, made.divisor and place[made.divisor]])
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _signature(graph: Graph, name: str) -> list[Any]:
    tensor = graph.tensors[name]
    return [list(tensor.shape), tensor.dtype]


def schedule_for(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule of a graph of equal structure, in this graph's names."""
    return _Renaming(schedule, graph).schedule()


class _Renaming:
    """The names of a schedule's graph -> those of another, place by place."""

    def __init__(self, schedule: Schedule, graph: Graph) -> None:
        old = schedule.graph
        self.old, self.graph = schedule, graph
        self.tensors = {one.tensor: other.tensor for one, other in zip(old.inputs, graph.inputs, strict=True)}
        self.ops = {one.name: other.name for one, other in zip(old.ops, graph.ops, strict=True)}
        for one, other in zip(old.ops, graph.ops, strict=True):
            self.tensors |= zip(one.outputs, other.outputs, strict=True)
        self.outputs = dict(zip(old.outputs, graph.outputs, strict=True))

    def schedule(self) -> Schedule:
        old = self.old
        operations = {}
        for name, one in old.operations.items():
            operations[self._operation(name)] = one._replace(op=self.graph.op[self.ops[one.op.name]])
        cuts = {self._value(name): cut._replace(layout=self._layout(cut.layout), part=cut.part and self._part(cut.part))
                for name, cut in old.cuts.items()}  # fmt: skip
        calls = [replace(call, id=self._call(call.id), parts=tuple(map(self._part, call.parts))) for call in old.collectives.values()]
        return Schedule(
            self.graph, old.machine, tuple(map(self._instruction, old.instructions)), operations,
            {call.id: call for call in calls}, cuts,
            {self._value(name): one._replace(tensor=self.tensors[one.tensor]) for name, one in old.values.items()},
            {self._value(name): self._layout(one) for name, one in old.layouts.items()},
            tuple((self.outputs[output], self._value(value)) for output, value in old.outputs), old.limits,
        )  # fmt: skip

    def _value(self, name: str) -> str:
        """A value's name begins with its tensor's, and may end with a reader's."""
        tensor = self.old.values[name].tensor
        assert name.startswith(tensor), f"the value {name} does not bear the name of its tensor {tensor}"
        return self.tensors[tensor] + self._suffix(name[len(tensor) :])

    def _suffix(self, suffix: str) -> str:
        found = _READER.match(suffix)
        return f"@{self.ops[found[1]]}{found[2]}" if found and found[1] in self.ops else suffix

    def _operation(self, name: str) -> str:
        """An operator's name, or that of its second run."""
        op = self.old.operations[name].op.name
        return self.ops[op] + name[len(op) :]

    def _call(self, name: str) -> str:
        """A call's name begins with its first target's, and ends with the number of others."""
        target = self.old.collectives[name].parts[0].target
        return self._value(target) + name[len(target) :]

    def _values(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(map(self._value, names))

    def _layout(self, layout: Layout) -> Layout:
        before = self._operation(layout.before) if layout.before in self.old.operations else layout.before
        return replace(
            layout, value=self._value(layout.value), tensor=self.tensors[layout.tensor], source=self._value(layout.source), before=before
        )

    def _part(self, part: Part) -> Part:
        return part._replace(layout=self._layout(part.layout), source=self._value(part.source), target=self._value(part.target))

    def _instruction(self, item: Instruction) -> Instruction:
        of = item.of
        if item.kind == "run":
            of = self._operation(of)
        elif item.kind in ("start", "wait"):
            of = self._call(of)
        elif of:
            of = self._value(of)
        over = None if item.over is None else self._value(item.over)
        return item._replace(reads=self._values(item.reads), writes=self._values(item.writes), of=of, over=over)
