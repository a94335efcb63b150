"""Why one thing in a plan is as it is: where it comes from, who reads it, and what the collectives around it cost and delay."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping

from autopar.compare.simulated_step import Flight, SimulatedStep
from autopar.compare.words import call, spec_text, unequal, where
from autopar.errors import UsageError
from autopar.graph import DTYPE_BYTES, Op
from autopar.plan import Plan
from autopar.rows import CollectivePlan, EnteringSpec, OpPlan, OutputSpec, ParameterSpec, TensorSpec, ValueSpec
from autopar.rules import why_once
from autopar.sharding import ShardingSpec

ROUNDING = 1e-9
"""Share of a call up to which standing still is rounding."""


class Explanation:
    """A plan with its readers, producers and collectives looked up."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ops = {row.name: row for row in plan.ops}
        self.producer = {entry.value or entry.tensor: row for row in plan.ops for entry in row.outputs}
        self.again = {entry.tensor: row for row in plan.recomputed for entry in row.outputs}
        self.entering = {spec.tensor: (kind, public, spec) for kind, public, spec in plan.entering}
        self.reshards = {row.value: row for row in plan.reshards}
        self.copies = {row.value: row for row in plan.copies}
        self.once = {row.of for row in plan.schedule if row.kind == "run" and row.microbatch < 0}
        self.sums = {row.writes[0]: row.reads[0] for row in plan.schedule if row.kind == "add"}
        self.moves: dict[str, list[CollectivePlan]] = {}
        self.inside: dict[str, list[CollectivePlan]] = {}
        for row in plan.collectives:
            for part in row.members:
                self.moves.setdefault(part.value, []).append(row)
            if row.id is None:
                self.inside.setdefault(row.before or "", []).append(row)
        self.gradients = {self._owner(row.name): row for row in plan.gradients}
        self.calls = {row.id: row for row in plan.collectives if row.id is not None}
        self.step = SimulatedStep(plan)
        self.told: set[str | None] = set()

    def _owner(self, gradient: str) -> str:
        """The tensor of a gradient, as in its title."""
        for kind, names in (("parameter", set(self.plan.parameters)), ("buffer", set(self.plan.buffers))):
            if gradient in names:
                return f"{kind} {gradient}"
        return f"input {gradient.removeprefix('input:')}"

    def tell(self, name: str) -> Iterator[str]:
        kind, _, rest = name.rpartition(":")
        plan = self.plan
        tables: Mapping[str, Mapping[str, EnteringSpec]] = {
            "parameter": plan.parameters, "buffer": plan.buffers, "input": plan.inputs, "constant": plan.constants,
            "tangent": plan.tangents,
        }  # fmt: skip
        for table_kind, table in tables.items():
            alias = {other: key for key, row in table.items() if isinstance(row, ParameterSpec) for other in row.aliases or ()}
            for wanted in (name, rest if kind == table_kind else name):
                key = alias.get(wanted, wanted)
                if key in table:
                    yield from self._value(f"{table_kind} {key}", table[key])
                    return
        for wanted in (name, rest if kind == "output" else name):
            if wanted in plan.outputs:
                yield from self._value(f"output {wanted}", plan.outputs[wanted])
                return
        if name in self.ops:
            yield from self._op(self.ops[name])
        elif name in self.producer:
            row = next(entry for entry in self.producer[name].outputs if name in (entry.value, entry.tensor))
            yield from self._value(f"tensor {name}", row)
        elif name in self.reshards:
            yield from self._reshard(name, "")
        elif name in self.calls:
            yield from self._call(self.calls[name])
        else:
            raise self._unknown(name)

    def _unknown(self, name: str) -> UsageError:
        plan = self.plan
        known = [*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs, *self.ops, *self.producer, *self.reshards, *self.calls]
        near = difflib.get_close_matches(name, dict.fromkeys(known), n=3, cutoff=0.4)
        calls = [row.id for row in plan.collectives if row.kind == name and row.id is not None]
        hint = f"did you mean {', '.join(near)}?" if near else "autopar show lists parameters, inputs and outputs"
        if calls:
            hint = f"of that kind are {', '.join(calls[:5])}{f' and {len(calls) - 5} more' if len(calls) > 5 else ''}; name one of them"
        return UsageError(f"the plan has nothing named {name!r}", hint)

    def _value(self, title: str, row: TensorSpec) -> Iterator[str]:
        yield f"{title}: {row.dtype}{list(row.shape)} lies as {spec_text(row.spec)} {self._axes(row.spec)}"
        for dim, words in unequal(row.shape, row.spec, self.plan.mesh).items():
            yield f"  dim {dim} in unequal parts: {words}; time and memory are those of the largest"
        public = title.split(" ", 1)[1]
        for pin in (public, f"input:{public}", f"output:{public}"):
            if pin in self.plan.pins:
                yield f"  pinned by {pin}={self.plan.pins[pin]!r}"
        if isinstance(row, OutputSpec) and row.value is not None:
            yield from self._reshard(row.value, "  ")
        if row.tensor in self.producer:
            op = self.producer[row.tensor]
            yield f"  made by {where(op)} as {spec_text(next(entry.spec for entry in op.outputs if entry.tensor == row.tensor))}"
        elif row.tensor in self.entering:
            yield "  comes from outside; placing it so at the start is free"
        yield from self._keeping(row.tensor, "  ")
        yield from self._readers(row.tensor)
        if isinstance(row, ParameterSpec) and row.states_on_host:
            yield "  its optimizer states lie on the host between steps"
        gradient = self.gradients.get(title)
        if gradient is not None:
            yield f"  its gradient {gradient.tensor} leaves as {spec_text(gradient.spec)}"
            if gradient.tensor in self.producer:
                yield f"    made by {where(self.producer[gradient.tensor])}"
            if gradient.value is not None:
                yield from self._leaving(gradient.value, "    ")

    def _keeping(self, tensor: str, indent: str) -> Iterator[str]:
        """Which layouts of what forward makes are there for backward: kept, or made again, and why."""
        later = [row for row in self.plan.ops if row.phase != "forward"]
        read = {entry.value or tensor: entry.spec for row in later for entry in row.inputs if entry.tensor == tensor}
        moved = [row for row in self.plan.reshards if row.phase != "forward" and row.tensor == tensor]
        read |= {row.source: row.from_spec for row in moved}
        first = self.producer.get(tensor)
        again = self.again.get(tensor)
        if again is not None:
            yield f"{indent}recomputed in backward by {again.name}, {again.seconds:.3g} s"
        for value, spec in read.items():
            reshard = self.reshards.get(value)
            own = value == tensor and first is not None and first.phase == "forward"
            made_once = own and first is not None and first.name in self.once
            if made_once or (reshard is not None and reshard.once and self.plan.microbatches > 1):
                yield f"{indent}kept over all microbatches as {spec_text(spec)}, {self._held(tensor, spec)} bytes on each rank"
            elif own or (reshard is not None and reshard.phase == "forward"):
                reason = why_once(Op(first.name, first.op, (), ())) if first is not None else ""
                why = f", since {first.op} may not run a second time: {reason}" if first is not None and reason else ""
                if reshard is not None and reshard.on_host:
                    yield f"{indent}lies on the host until backward as {spec_text(spec)}, {self.copies[value].bytes} bytes of each rank"
                    continue
                yield f"{indent}kept for backward as {spec_text(spec)}, {self._held(tensor, spec)} bytes on each rank{why}"

    def _held(self, tensor: str, spec: str) -> int:
        """Bytes of a rank's part."""
        rows = [self.entering[tensor][2]] if tensor in self.entering else self.producer[tensor].outputs
        row = next(entry for entry in rows if entry.tensor == tensor)
        return math.prod(ShardingSpec.parse(spec).local_shape(row.shape, self.plan.sizes)) * DTYPE_BYTES[row.dtype]

    def _readers(self, tensor: str) -> Iterator[str]:
        found = [(op, entry) for op in self.plan.ops for entry in op.inputs if entry.tensor == tensor]
        for op, entry in found:
            how = f" {self._how(entry)}"
            yield f"  read by {where(op)} as {spec_text(entry.spec)}{how}"
            yield from self._flights(entry.value, "    ")
        if not found:
            yield "  read by no operator"

    def _op(self, row: OpPlan) -> Iterator[str]:
        yield f"operator {where(row)}, {row.phase}, {row.seconds:.3g} s on each rank" + (f", at {row.location}" if row.location else "")
        if row.name in self.once:
            yield "  runs once a step, before its microbatches"
        split = ", ".join(f"{factor} over {','.join(axes)}" for factor, axes in (row.factors or {}).items())
        yield f"  factors split: {split}" if split else "  no factor is split: each rank does all of it, or partial sums pass through"
        for entry in row.inputs:
            made = self.producer.get(entry.tensor)
            origin = (
                f"made by {made.name}"
                if made
                else " ".join(self.entering[entry.tensor][:2])
                if entry.tensor in self.entering
                else "unknown"
            )
            how = self._how(entry)
            yield f"  reads {entry.tensor} {entry.dtype}{list(entry.shape)} as {spec_text(entry.spec)} {how} ({origin})"
            yield from self._flights(entry.value, "    ")
        for inner in self.inside.get(row.name, ()):
            yield f"  inside it: {call(inner)}"
        for output in row.outputs:
            yield f"  makes {output.tensor} {output.dtype}{list(output.shape)} as {spec_text(output.spec)} {self._axes(output.spec)}"
            if row.phase != "recompute":
                yield from self._keeping(output.tensor, "    ")
                yield from (f"  {line}" for line in self._readers(output.tensor))

    def _reshard(self, value: str, indent: str) -> Iterator[str]:
        row = self.reshards[value]
        specs = f"from {spec_text(row.from_spec)} to {spec_text(row.to_spec)}"
        when = "once a step, kept over its microbatches" if row.once and self.plan.microbatches > 1 else f"before {row.before}, {row.phase}"
        yield f"{indent}reshard of {row.tensor} {specs} {when}: {self._cost(value)}"
        yield from self._flights(value, f"{indent}  ")

    def _leaving(self, value: str, indent: str) -> Iterator[str]:
        """How a gradient becomes what leaves: its reshard and its sum over microbatches, in the order in which they are made."""
        source = self.reshards[value].source if value in self.reshards else self.sums[value]
        if source in self.sums or source in self.reshards:
            yield from self._leaving(source, indent)
        if value in self.sums:
            yield f"{indent}summed over {self.plan.microbatches} microbatches"
        else:
            yield from self._reshard(value, indent)

    def _call(self, row: CollectivePlan) -> Iterator[str]:
        yield f"collective {row.id}, {row.phase}: {call(row)}"
        for part in row.members:
            step = f"step {part.step} of " if part.step else ""
            yield (
                f"  {step}{part.value}: {part.tensor} from {spec_text(part.from_spec)} to {spec_text(part.to_spec)}, "
                f"{part.bytes} bytes, before {part.before}"
            )
        yield from self._flights(row.members[0].value, "  ", only=row.id)

    def _flights(self, value: str | None, indent: str, only: str | None = None) -> Iterator[str]:
        """When the calls that make a value start, when they are waited for, and whether that is hidden; each call once."""
        for row in self.moves.get(value or "", ()):
            flight = self.step.flights.get(row.id or "")
            if flight is None or row.id in self.told or only not in (None, row.id):
                continue
            self.told.add(row.id)
            after = f"after {flight.after}" if flight.after else "before any operator"
            before = f"before {flight.before}" if flight.before else "at the end"
            yield (
                f"{indent}{row.kind} {row.id} starts {after} (instruction {flight.start.id}), is waited for {before} "
                f"(instruction {flight.wait.id}): {_hidden(flight)}"
            )

    def _how(self, entry: ValueSpec) -> str:
        """How an operator comes by what it reads."""
        if entry.value is None:
            return "as it is"
        return f"after {self._cost(entry.value)}" if entry.value in self.reshards else "as made again"

    def _cost(self, value: str) -> str:
        copy = self.copies.get(value)
        if copy is not None:
            return f"a copy {'to the host' if copy.kind == 'to_host' else 'back from the host'}, {copy.seconds:.3g} s"
        moves = self.moves.get(value, ())
        return ", ".join(map(call, moves)) or "a free slice"

    def _axes(self, text: str) -> str:
        names = [name for index, name in enumerate(self.plan.mesh) if str(index) in text]
        return f"(split or partial over {', '.join(names)})" if names else "(whole on every rank)"


def _hidden(flight: Flight) -> str:
    """How much of a call operators stand still for."""
    busy = flight.end - flight.begin
    if flight.stalled <= ROUNDING * busy:
        return "hidden"
    if flight.stalled >= busy:
        return f"not hidden, operators stand still for {flight.stalled:.3g} s"
    return f"in part hidden, operators stand still for {flight.stalled:.3g} s of {busy:.3g} s"
