"""The changes from one plan to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from autopar.compare.axes import Axes, same_axes
from autopar.compare.raw_rows import Instruction, Operator, collectives, instructions, operators
from autopar.compare.words import count, pattern, spec_text, where
from autopar.plan import Plan
from autopar.rows import TensorSpec
from autopar.unread import written_alike

Strategy = tuple[tuple[str, ...], int]
"""The specs of an operator's inputs and outputs, and how many are inputs'."""
SAME = Axes({}, {}, "")
"""The same axes, or axes that are not to be compared."""


def changes(first: Plan, second: Plan) -> Iterator[str]:
    for what, old, new in (
        ("model", first.model.target, second.model.target), ("mode", first.model.mode, second.model.mode),
        ("graph", first.model.graph_sha256[:12], second.model.graph_sha256[:12]),
        ("mesh", _mesh(first), _mesh(second)), ("hardware", first.hardware.get("name"), second.hardware.get("name")),
        ("cost model", first.created_by.cost_model, second.created_by.cost_model),
        ("optimizer", first.model.optimizer, second.model.optimizer),
    ):  # fmt: skip
        if old != new:
            yield f"{what}: {old} -> {new}"
    yield from _searches(first, second)
    axes = same_axes(first, second)
    if axes is not None and not axes.trivial:
        yield f"axes: {axes.words}; specs of the second are told in those of the first"
    axes = SAME if axes is None or axes.trivial else axes
    yield from _figures(first, second)
    for kind in ("inputs", "parameters", "buffers", "constants", "outputs"):
        yield from _specs(kind.removesuffix("s"), getattr(first, kind), getattr(second, kind), axes)
    yield from _operators(first, second, axes)
    yield from _collectives(first, second, axes)
    yield from _schedules(first, second)


def _searches(first: Plan, second: Plan) -> Iterator[str]:
    """Effort, and whether the time limit cut the search. Work and times of its phases do not make plans differ."""
    if first.search is None or second.search is None:
        return
    if first.search.effort != second.search.effort:
        yield f"effort: {first.search.effort} -> {second.search.effort}"
    if first.search.cut != second.search.cut:
        yield f"search: cut by the time limit only in the {'first' if first.search.cut else 'second'}"


def _figures(first: Plan, second: Plan) -> Iterator[str]:
    for key, old, new in (
        ("objective.seconds", first.objective.seconds, second.objective.seconds),
        ("predicted.step_seconds", first.predicted.step_seconds, second.predicted.step_seconds),
        ("predicted.sequential_seconds", first.predicted.sequential_seconds, second.predicted.sequential_seconds),
        ("predicted.received_bytes_per_rank", first.predicted.received_bytes_per_rank, second.predicted.received_bytes_per_rank),
        ("predicted.peak_memory_bytes_per_rank", first.predicted.peak_memory_bytes_per_rank, second.predicted.peak_memory_bytes_per_rank),
    ):  # fmt: skip
        if old != new:
            change = f" ({100 * (new - old) / old:+.1f} %)" if old else ""
            yield f"{key}: {old:.6g} -> {new:.6g}{change}"


def _specs(kind: str, old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec], axes: Axes) -> Iterator[str]:
    """Tensors with another spec; one line for equal layers that change alike."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            change = f"only in the first, {spec_text(old[name].spec)}"
        elif name not in old:
            change = f"only in the second, {spec_text(axes.spec(new[name].spec))}"
        elif old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            change = f"{old[name].dtype}{list(old[name].shape)} -> {new[name].dtype}{list(new[name].shape)}"
        elif old[name].spec != axes.spec(new[name].spec):
            change = f"{spec_text(old[name].spec)} -> {spec_text(axes.spec(new[name].spec))}"
        else:
            continue
        found.setdefault((pattern(name), change), []).append(name)
    for (folded, change), names in found.items():
        yield f"{kind} {names[0] if len(names) == 1 else f'{folded} ({len(names)})'}: {change}"


def _operators(first: Plan, second: Plan, axes: Axes) -> Iterator[str]:
    if axes is SAME and written_alike(first.ops, second.ops):
        return
    rows = operators(first.ops), operators(second.ops)
    old, new = ({row.name: row for row in table if row.phase != "recompute"} for table in rows)
    found: dict[tuple[str, str, Strategy, Strategy], list[Operator]] = {}
    for name, row in old.items():
        if name in new and row.specs != (specs := tuple(map(axes.spec, new[name].specs))):
            change = (row.specs, row.reads), (specs, new[name].reads)
            found.setdefault((row.op, pattern(row.module), *change), []).append(row)
    for (op, module, before, after), like in found.items():
        many = f"{like[0].name} and {len(like) - 1} like it ({op}, {module})"
        yield f"operator {where(like[0]) if len(like) == 1 else many}: {_strategy(*before)} -> {_strategy(*after)}"
    for names, word in (([n for n in old if n not in new], "first"), ([n for n in new if n not in old], "second")):
        if names:
            yield f"{len(names)} operators only in the {word}, e.g. {names[0]}"
    # operators that only one of the two recomputes
    again = [{row.name for row in table if row.phase == "recompute"} for table in rows]
    for only, word in ((again[0] - again[1], "first"), (again[1] - again[0], "second")):
        if only:
            yield f"{count(len(only), 'operator')} recomputed in backward only in the {word}, e.g. {min(only)}"


def _collectives(first: Plan, second: Plan, axes: Axes) -> Iterator[str]:
    if axes is SAME and written_alike(first.collectives, second.collectives):
        return
    old, new = _counts(first, SAME), _counts(second, axes)
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, (0, 0, 0)), new.get(key, (0, 0, 0))
        if before != after:
            kind, over, phase = key
            yield f"{kind} over {over}, {phase}: {_counted(*before)} -> {_counted(*after)}"


def _counts(plan: Plan, axes: Axes) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    """By kind, axes and phase: calls, values that they move, bytes in all."""
    found: dict[tuple[str, str, str], tuple[int, int, int]] = {}
    for row in collectives(plan.collectives):
        key = (row.kind, ",".join(map(axes.name, row.axes)), row.phase)
        calls, values, size = found.get(key, (0, 0, 0))
        found[key] = calls + row.times, values + (row.values or 1) * row.times, size + row.bytes * row.times
    return found


def _counted(calls: int, values: int, size: int) -> str:
    shared = f" for {count(values, 'value')}" if values != calls else ""
    return f"{count(calls, 'call')}{shared}, {size} bytes in all"


def _schedules(first: Plan, second: Plan) -> Iterator[str]:
    """Differences of the schedules: a line on limits, a line on the instructions."""
    limits = [", ".join(f"{key} {value}" for key, value in vars(plan.limits).items()) for plan in (first, second)]
    if limits[0] != limits[1]:
        yield f"limits: {limits[0]} -> {limits[1]}"
    if written_alike(first.schedule, second.schedule):
        return
    old, new = ([row for row in instructions(plan.schedule) if row.kind != "free"] for plan in (first, second))
    done = [[row[1:] for row in rows] for rows in (old, new)]
    if done[0] == done[1]:
        return
    place = next((index for index, pair in enumerate(zip(*done, strict=False)) if pair[0] != pair[1]), None)
    where_ = f", first at instruction {old[place].id}: {_what(old[place])} -> {_what(new[place])}" if place is not None else ""
    if Counter(done[0]) == Counter(done[1]):
        yield f"schedule: the same {len(old)} instructions in another order{where_}"
    else:
        yield f"schedule: {len(old)} -> {len(new)} instructions{where_}"


def _what(row: Instruction) -> str:
    return f"{row.kind} of {row.of}"


def _strategy(specs: tuple[str, ...], reads: int) -> str:
    return " -> ".join(", ".join(map(spec_text, some)) for some in (specs[:reads], specs[reads:]))


def _mesh(plan: Plan) -> str:
    return ",".join(f"{name}={size}" for name, size in plan.mesh.items())
