"""explain and diff: why one thing in a plan is as it is, and what changed between two plans. Words for people; from the plans alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from autopar.errors import UsageError
from autopar.plan import CollectivePlan, EnteringSpec, OpPlan, OutputSpec, ParameterSpec, Plan, TensorSpec

UNCHANGED = "the plans choose the same"


def explain(plan: Plan, name: str) -> tuple[str, ...]:
    """Lines that say what ``name`` is, where it comes from, who reads it in which spec, and what the collectives around it cost.

    Args:
        name: a parameter, buffer, input (``input:NAME``), output (``output:NAME``), operator, tensor or reshard.

    Raises:
        UsageError: the plan has nothing of that name; names the nearest.
    """
    return tuple(_Story(plan).tell(name))


def diff(first: Plan, second: Plan) -> tuple[str, ...]:
    """Lines that say what changed from ``first`` to ``second``; empty when both choose the same at the same cost."""
    return tuple(_changes(first, second))


class _Story:
    """A plan with its readers, producers and collectives looked up."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ops = {row.name: row for row in plan.ops}
        self.producer = {entry.tensor: row for row in plan.ops for entry in row.outputs}
        self.entering = {spec.tensor: (kind, public, spec) for kind, public, spec in plan.entering}
        self.reshards = {row.value: row for row in plan.reshards}
        self.moves: dict[str, list[CollectivePlan]] = {}
        self.inside: dict[str, list[CollectivePlan]] = {}
        for row in plan.collectives:
            for part in row.members:
                self.moves.setdefault(part.value, []).append(row)
            if row.id is None:
                self.inside.setdefault(row.before or "", []).append(row)

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
            row = next(entry for entry in self.producer[name].outputs if entry.tensor == name)
            yield from self._value(f"tensor {name}", row)
        elif name in self.reshards:
            yield from self._reshard(name, "")
        else:
            raise self._unknown(name)

    def _unknown(self, name: str) -> UsageError:
        plan = self.plan
        known = [*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs, *self.ops, *self.producer, *self.reshards]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "autopar show lists parameters, inputs and outputs"
        return UsageError(f"the plan has nothing named {name!r}", hint)

    def _value(self, title: str, row: TensorSpec) -> Iterator[str]:
        yield f"{title}: {row.dtype}{list(row.shape)} lies as {_spec(row.spec)} {self._axes(row.spec)}"
        public = title.split(" ", 1)[1]
        for pin in (public, f"input:{public}", f"output:{public}"):
            if pin in self.plan.pins:
                yield f"  pinned by {pin}={self.plan.pins[pin]!r}"
        if isinstance(row, OutputSpec) and row.value is not None:
            yield from self._reshard(row.value, "  ")
        if row.tensor in self.producer:
            op = self.producer[row.tensor]
            yield f"  made by {_where(op)} as {_spec(next(entry.spec for entry in op.outputs if entry.tensor == row.tensor))}"
        elif row.tensor in self.entering:
            yield "  comes from outside; placing it so at the start is free"
        yield from self._readers(row.tensor)
        for gradient in self.plan.gradients:
            if gradient.name == public:
                yield f"  its gradient {gradient.tensor} leaves as {_spec(gradient.spec)}"
                if gradient.tensor in self.producer:
                    yield f"    made by {_where(self.producer[gradient.tensor])}"
                if gradient.value is not None:
                    yield from self._reshard(gradient.value, "    ")

    def _readers(self, tensor: str) -> Iterator[str]:
        found = [(op, entry) for op in self.plan.ops for entry in op.inputs if entry.tensor == tensor]
        for op, entry in found:
            how = f" after {self._cost(entry.value)}" if entry.value else " as it is"
            yield f"  read by {_where(op)} as {_spec(entry.spec)}{how}"
        if not found:
            yield "  read by no operator"

    def _op(self, row: OpPlan) -> Iterator[str]:
        yield f"operator {_where(row)}, {row.phase}, {row.seconds:.3g} s on each rank" + (f", at {row.location}" if row.location else "")
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
            how = f"after {self._cost(entry.value)}" if entry.value else "as it is"
            yield f"  reads {entry.tensor} {entry.dtype}{list(entry.shape)} as {_spec(entry.spec)} {how} ({origin})"
        for inner in self.inside.get(row.name, ()):
            yield f"  inside it: {_collective(inner)}"
        for output in row.outputs:
            yield f"  makes {output.tensor} {output.dtype}{list(output.shape)} as {_spec(output.spec)} {self._axes(output.spec)}"
            yield from (f"  {line}" for line in self._readers(output.tensor))

    def _reshard(self, value: str, indent: str) -> Iterator[str]:
        row = self.reshards[value]
        specs = f"from {_spec(row.from_spec)} to {_spec(row.to_spec)}"
        yield f"{indent}reshard of {row.tensor} {specs} before {row.before}, {row.phase}: {self._cost(value)}"

    def _cost(self, value: str) -> str:
        moves = self.moves.get(value, ())
        return ", ".join(map(_collective, moves)) or "a free slice"

    def _axes(self, text: str) -> str:
        names = [name for index, name in enumerate(self.plan.mesh) if str(index) in text]
        return f"(split or partial over {', '.join(names)})" if names else "(whole on every rank)"


def _collective(row: CollectivePlan) -> str:
    return f"{row.kind} over {','.join(row.axes)} of {row.bytes} bytes ({row.seconds:.3g} s)"


def _where(row: OpPlan) -> str:
    return f"{row.name} ({row.op}{', ' + row.module if row.module else ''})"


def _spec(text: str) -> str:
    return f"'{text}'"


def _changes(first: Plan, second: Plan) -> Iterator[str]:
    for what, old, new in (
        ("model", first.model.target, second.model.target), ("mode", first.model.mode, second.model.mode),
        ("graph", first.model.graph_sha256[:12], second.model.graph_sha256[:12]),
        ("mesh", _mesh(first), _mesh(second)), ("hardware", first.hardware.get("name"), second.hardware.get("name")),
        ("cost model", first.created_by.cost_model, second.created_by.cost_model),
        ("optimizer", first.model.optimizer, second.model.optimizer),
    ):  # fmt: skip
        if old != new:
            yield f"{what}: {old} -> {new}"
    yield from _figures(first, second)
    for kind in ("inputs", "parameters", "buffers", "constants", "outputs"):
        yield from _specs(kind.removesuffix("s"), getattr(first, kind), getattr(second, kind))
    yield from _operators(first, second)
    yield from _collectives(first, second)


def _figures(first: Plan, second: Plan) -> Iterator[str]:
    for key, old, new in (
        ("objective.seconds", first.objective.seconds, second.objective.seconds),
        ("predicted.step_seconds", first.predicted.step_seconds, second.predicted.step_seconds),
        ("predicted.received_bytes_per_rank", first.predicted.received_bytes_per_rank, second.predicted.received_bytes_per_rank),
        ("predicted.peak_memory_bytes_per_rank", first.predicted.peak_memory_bytes_per_rank, second.predicted.peak_memory_bytes_per_rank),
    ):  # fmt: skip
        if old != new:
            change = f" ({100 * (new - old) / old:+.1f} %)" if old else ""
            yield f"{key}: {old:.6g} -> {new:.6g}{change}"


def _specs(kind: str, old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> Iterator[str]:
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            yield f"{kind} {name}: only in the first, {_spec(old[name].spec)}"
        elif name not in old:
            yield f"{kind} {name}: only in the second, {_spec(new[name].spec)}"
        elif old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            yield f"{kind} {name}: {old[name].dtype}{list(old[name].shape)} -> {new[name].dtype}{list(new[name].shape)}"
        elif old[name].spec != new[name].spec:
            yield f"{kind} {name}: {_spec(old[name].spec)} -> {_spec(new[name].spec)}"


def _operators(first: Plan, second: Plan) -> Iterator[str]:
    old, new = ({row.name: row for row in plan.ops} for plan in (first, second))
    changed = [(old[name], new[name]) for name in old if name in new and _strategy(old[name]) != _strategy(new[name])]
    for before, after in changed:
        yield f"operator {_where(before)}: {_strategy(before)} -> {_strategy(after)}"
    for names, word in (([n for n in old if n not in new], "first"), ([n for n in new if n not in old], "second")):
        if names:
            yield f"{len(names)} operators only in the {word}, e.g. {names[0]}"


def _collectives(first: Plan, second: Plan) -> Iterator[str]:
    old, new = _counts(first), _counts(second)
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, (0, 0)), new.get(key, (0, 0))
        if before != after:
            kind, axes, phase = key
            yield f"{kind} over {axes}, {phase}: {before[0]} of {before[1]} bytes in all -> {after[0]} of {after[1]} bytes in all"


def _counts(plan: Plan) -> dict[tuple[str, str, str], tuple[int, int]]:
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in plan.collectives:
        key = (row.kind, ",".join(row.axes), row.phase)
        count, size = found.get(key, (0, 0))
        found[key] = (count + row.times, size + row.bytes * row.times)
    return found


def _strategy(row: OpPlan) -> str:
    return f"{', '.join(_spec(entry.spec) for entry in row.inputs)} -> {', '.join(_spec(entry.spec) for entry in row.outputs)}"


def _mesh(plan: Plan) -> str:
    return ",".join(f"{name}={size}" for name, size in plan.mesh.items())
