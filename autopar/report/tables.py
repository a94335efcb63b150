"""The tables of a plan as rows of text: the terminal and the HTML page print the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

from autopar.compare.words import pattern, unequal
from autopar.graph import DTYPE_BYTES
from autopar.plan import Plan
from autopar.report import units
from autopar.rows import BaselinePlan, MeasuredPlan, Predicted, TensorSpec
from autopar.sharding import ALL_ORDERS, ShardingSpec

NARROW = 16
"""Characters that a column of words keeps however narrow the terminal is."""
ROUNDING = 1e-9
"""Share of the step up to which a difference of sums is rounding."""


@dataclass(frozen=True)
class Table:
    """Rows under a header; ``right`` names the columns of figures."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()

    def lines(self, columns: int | None = None) -> Iterator[str]:
        """Aligned text, two blanks between columns. Where ``columns`` characters are too few, the widest column of words wraps."""
        widths = [max(len(row[column]) for row in (self.header, *self.rows)) for column in range(len(self.header))]
        over = sum(widths) + 2 * len(widths) - 2 - (columns or math.inf)
        words = [index for index, name in enumerate(self.header) if name not in self.right]
        if over > 0 and words:
            widest = max(words, key=widths.__getitem__)
            widths[widest] = max(widths[widest] - int(over), NARROW, len(self.header[widest]))
        for row in (self.header, *self.rows):
            cells = [
                [cell] if len(cell) <= width else wrap(cell, width, break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)
            ]
            for line in zip_longest(*cells, fillvalue=""):
                aligned = [
                    cell.rjust(width) if name in self.right else cell.ljust(width)
                    for cell, width, name in zip(line, widths, self.header, strict=True)
                ]
                yield "  ".join(aligned).rstrip()


CUT = "the time limit cut it: another run may give another plan"
"""Text for a search that the time limit ended before its work was done."""

HOST_BOUND = 0.9
"""Share of the step from which the host's time is said to be what it waits for."""

ONE_ORDER = "on plans that split a dim by several axes with the innermost major, as are searched on meshes of three and more"


def overview(plan: Plan) -> Table:
    """The plan in a few rows: mesh, step, bound, memory."""
    objective, predicted, memory = plan.objective, plan.predicted, plan.predicted.memory
    what = " (collectives alone)" if plan.created_by.cost_model == "communication" else " a step"
    parts = [(name, getattr(memory, name)) for name in ("parameters", "gradients", "optimizer", "activations", "temporaries")]
    rows = [
        ("model", f"{plan.model.target}, {plan.model.mode}" + (f", {plan.model.optimizer}" if plan.model.optimizer != "none" else "")),
        (
            "mesh",
            f"{' x '.join(f'{name}={size}' for name, size in plan.mesh.items())} on {plan.hardware.get('name')}; in specs {_legend(plan)}",
        ),
        (
            "objective",
            f"{units.seconds(objective.seconds)}{what}, bound {units.seconds(objective.bound_seconds)}, "
            f"gap {units.percent(objective.gap)}: {objective.status}, solved in {objective.solve_seconds:.1f} s "
            f"by {plan.created_by.solver}",
        ),
        *([("search", CUT)] if plan.search is not None and plan.search.cut else []),
        *([("bound", ONE_ORDER)] if sum(size > 1 for size in plan.mesh.values()) > ALL_ORDERS else []),
        *([("layers", _tied(plan))] if objective.tied_seconds else []),
        ("step", _step(plan)),
        *([("measured", _measured(plan.measured, predicted))] if plan.measured is not None else []),
        *([("host", _host(plan))] if plan.created_by.execution else []),
        ("schedule", _schedule(plan)),
        (
            "memory",
            f"{units.size(predicted.peak_memory_bytes_per_rank)} per rank at the peak, "
            f"limit {units.size(plan.memory_limit_bytes_per_rank)}{_reserve(plan)}",
        ),
        ("", ", ".join(f"{name} {units.size(value)}" for name, value in parts)),
        *([("microbatches", _microbatches(plan))] if plan.microbatches > 1 or plan.microbatches_tried else []),
        *([("recompute", _again(plan))] if plan.recomputed else []),
        *([("offload", _offloaded(plan))] if plan.copies else []),
        *([("states", _hosted(plan))] if memory.optimizer_on_host else []),
        ("received", f"{units.size(predicted.received_bytes_per_rank)} per rank and step"),
    ]
    if max(plan.sizes) > 1 and _is_whole(plan):
        rows.append(("note", "nothing is sharded: at these sizes communication costs more than it saves"))
    rows += [("unequal", f"{words}; time and memory are those of the largest part") for words in _unequal(plan)]
    rows += [("pin", f"{name} = {spec!r}") for name, spec in plan.pins.items()]
    return Table(("autopar", "plan"), tuple(rows))


def _reserve(plan: Plan) -> str:
    """Where the limit is the hardware's own, what of its memory it leaves to others."""
    memory, reserved = plan.hardware.get("memory_bytes", 0.0), plan.hardware.get("reserved_bytes", 0.0)
    if not reserved or int(memory - reserved) != plan.memory_limit_bytes_per_rank:
        return ""
    return f": {units.size(int(reserved))} of {units.size(int(memory))} are left to CUDA, NCCL and the allocator"


def _tied(plan: Plan) -> str:
    """The cost of one sharding for equal layers."""
    more = plan.objective.tied_seconds or 0.0
    share = units.percent(more / plan.objective.seconds)
    return f"equal layers share one sharding; costs {units.seconds(more)} ({share}) over the best plan"


def _step(plan: Plan) -> str:
    """The parts of the step. Hidden communication is the time that overlap saves over running in sequence.

    A host adds time that is none of the parts, so nothing is said of hiding then.
    """
    predicted = plan.predicted
    hidden = min(predicted.sequential_seconds - predicted.step_seconds, predicted.communication_seconds)
    hidden = hidden if hidden > ROUNDING * predicted.sequential_seconds else 0.0
    share = f" ({units.percent(hidden / predicted.communication_seconds)})" if predicted.communication_seconds > 0 else ""
    overlap = "" if plan.created_by.execution else f", {units.seconds(hidden)}{share} of it hidden"
    return (
        f"{units.seconds(predicted.step_seconds)} simulated: compute {units.seconds(predicted.compute_seconds)}, "
        f"communication {units.seconds(predicted.communication_seconds)}{overlap}, "
        f"optimizer {units.seconds(predicted.optimizer_seconds)}; in sequence {units.seconds(predicted.sequential_seconds)}"
    )


def _measured(measured: MeasuredPlan, predicted: Predicted) -> str:
    """What a run took, and how far the prediction was from it."""
    words = f"{units.seconds(measured.step_seconds)} a step, {_off(measured.step_seconds, predicted.step_seconds)}"
    if measured.peak_memory_bytes_per_rank is not None:
        off = _off(measured.peak_memory_bytes_per_rank, predicted.peak_memory_bytes_per_rank)
        words += f"; {units.size(measured.peak_memory_bytes_per_rank)} per rank at the peak, {off}"
    return f"{words}; median of {measured.rounds} rounds, {measured.execution}, on {measured.device}"


def _off(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f} times the prediction" if predicted > 0 else "nothing was predicted"


def _host(plan: Plan) -> str:
    """What the host issues, and whether the step waits for it."""
    execution, seconds = plan.created_by.execution, dict(plan.hardware.get("host", {}).get("issue_seconds", {}))
    count = sum((row.launches or 0) * row.times(plan.microbatches) for row in plan.schedule)
    busy = count * seconds.get(execution, 0.0)
    waits = busy > HOST_BOUND * (plan.predicted.step_seconds - plan.predicted.optimizer_seconds)
    more = "; the step waits for it, so more ranks gain nothing" if waits else ""
    return f"{count} kernels and calls, issued in {units.seconds(busy)} ({execution}){more}"


def _unequal(plan: Plan) -> list[str]:
    """The dims that are cut in unequal parts, each said once. Operators are read only where something that enters has such a dim."""
    tables = (plan.inputs, plan.parameters, plan.buffers, plan.constants, plan.outputs)
    rows: list[TensorSpec] = [row for table in tables for row in table.values()]
    if any(extent > size and extent % size for extent in {extent for row in rows for extent in row.shape} for size in plan.sizes):
        rows += [entry for op in plan.ops for entry in op.outputs]
    cut = dict.fromkeys((row.shape, row.spec) for row in rows if "S" in row.spec)
    return list(dict.fromkeys(words for shape, spec in cut for words in unequal(shape, spec, plan.mesh).values()))


def _again(plan: Plan) -> str:
    """The recomputation in backward: operators, and seconds."""
    forward = [row for row in plan.captured if row.phase == "forward"]
    calls = sum(row.seconds * row.times for row in plan.collectives if row.phase == "recompute")
    more = f" and {units.seconds(calls)} of collectives" if calls else ""
    seconds = sum(row.seconds * row.times for row in plan.recomputed)
    return f"{len(plan.recomputed)} of {len(forward)} operators are recomputed in backward: {units.seconds(seconds)} of compute{more}"


def _hosted(plan: Plan) -> str:
    """The optimizer's states that lie on the host: of how many parameters, their bytes, and what steps them."""
    count = sum(bool(row.states_on_host) for row in plan.parameters.values())
    size = units.size(plan.predicted.memory.optimizer_on_host or 0)
    return f"optimizer states of {count} parameters, {size} of a rank, lie on the host between steps; autopar.HostOptimizer steps them"


def _offloaded(plan: Plan) -> str:
    """The values that lie on the host until backward: their number, bytes at one time, and what their copies take."""
    out, back = ([row for row in plan.copies if row.kind == kind] for kind in ("to_host", "from_host"))
    each = [f"{units.seconds(sum(row.seconds * row.times for row in rows))} {way}" for rows, way in ((out, "to it"), (back, "back"))]
    held = units.size((plan.predicted.peak_host_bytes_per_rank or 0) - (plan.predicted.memory.optimizer_on_host or 0))
    return f"{len(out)} values lie on the host until backward, up to {held} of a rank at one time; copies take {' and '.join(each)}"


def _microbatches(plan: Plan) -> str:
    """The number of microbatches, how they make up the step, and the numbers that the bound covers."""
    made, words = plan.accumulation, []
    if made is not None:
        once = [row for row in plan.collectives if row.times < plan.microbatches]
        adds, gathers = (sum(row.bytes for row in once if (row.phase == "forward") is first) for first in (False, True))
        counts = f"{made.weight:.3g}" if made.divisor is None else "by its share of what the mean divides by"
        words.append(f"{plan.microbatches}, one after another, cut from {', '.join(made.cut)}; each one's loss counts {counts}")
        words += [f"{units.size(gathers)} of parameters gathered once"] if gathers else []
        words += [f"{units.size(adds)} of gradients reduced once"] if adds else []
        if made.reason:
            words.append(f"{'' if made.whole else 'not proved to be '}the whole batch's step{'' if made.whole else ':'} {made.reason}")
    else:
        words.append("1")
    words += [f"the best of {', '.join(map(str, plan.microbatches_tried))} tried, the bound over these"] if plan.microbatches_tried else []
    return "; ".join(words)


def _schedule(plan: Plan) -> str:
    calls = [row for row in plan.collectives if row.id is not None]
    values = sum(row.values for row in calls)
    limits = f"buckets up to {units.size(plan.limits.bucket_bytes)}, {units.size(plan.limits.ahead_bytes)} in flight ahead"
    return f"{len(plan.schedule)} instructions, {len(calls)} calls for {values} values; {limits}"


def baselines(plan: Plan) -> Table:
    """The plan beside the baselines, by the objective: the step, or the sum of the collectives."""
    what = "collectives" if plan.created_by.cost_model == "communication" else "step"
    return compare_baselines(plan.objective.seconds, plan.predicted.peak_memory_bytes_per_rank, plan.baselines, what)


def compare_baselines(mine: float, peak: int, others: Mapping[str, BaselinePlan], what: str) -> Table:
    """A plan of ``mine`` seconds and ``peak`` bytes on a rank beside others, by the seconds that ``what`` names."""
    rows = [("this plan", units.seconds(mine), "", units.size(peak), "yes")]
    for name, row in others.items():
        fits = "yes" if row.feasible else "no"
        fits = f"{fits}: {row.reason}" if row.reason else fits
        if row.objective_seconds is None or row.peak_memory_bytes_per_rank is None:
            rows.append((name, "-", "", "-", fits))
            continue
        ratio = f"{row.objective_seconds / mine:.2f}x" if mine > 0 else ""
        rows.append((name, units.seconds(row.objective_seconds), ratio, units.size(row.peak_memory_bytes_per_rank), fits))
    return Table(("baseline", what, "ratio", "memory", "fits"), tuple(rows), frozenset({what, "ratio", "memory"}))


def candidates(plan: Plan) -> Table:
    """The plans that were measured, the fastest first, beside what was predicted of them."""
    header = ("candidate", "predicted", "measured", "ratio", "predicted memory", "measured memory", "note")
    rows = []
    for number, row in enumerate(plan.measured.candidates if plan.measured is not None else ()):
        seconds = "-" if row.step_seconds is None else units.seconds(row.step_seconds)
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}x"
        peak = "-" if row.peak_memory_bytes_per_rank is None else units.size(row.peak_memory_bytes_per_rank)
        note = row.reason or ("this plan" if number == 0 else "")
        predicted = units.seconds(row.predicted_step_seconds), units.size(row.predicted_peak_memory_bytes_per_rank)
        rows.append((row.name, predicted[0], seconds, ratio, predicted[1], peak, note))
    return Table(header, tuple(rows), frozenset(header[1:-1]))


def tensors(plan: Plan) -> Table:
    """Inputs, parameters, buffers and outputs; equal layers folded into one row."""
    rows: list[tuple[str, ...]] = []
    tables: tuple[tuple[str, Iterable[tuple[str, TensorSpec]]], ...] = (
        ("input", plan.inputs.items()), ("parameter", plan.parameters.items()), ("buffer", plan.buffers.items()),
        ("constant", plan.constants.items()), ("output", plan.outputs.items()),
    )  # fmt: skip
    for kind, items in tables:
        for name, count, row in _folded(items):
            held = _held(row, plan)
            rows.append((kind, name, str(count) if count > 1 else "", units.shape(row.shape), row.dtype, row.spec or "R", held))
    return Table(("kind", "name", "times", "shape", "dtype", "spec", "on a rank"), tuple(rows), frozenset({"times", "on a rank"}))


def collectives(plan: Plan) -> Table:
    """Collectives summed by kind, axes and phase, dearest first: how many calls, and for how many values."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for row in plan.collectives:
        found = sums.setdefault((row.kind, ",".join(row.axes), row.phase), [0, 0, 0, 0, 0.0])
        for index, value in enumerate((1, row.values or 1, row.bytes, row.received_bytes_per_rank, row.seconds)):
            found[index] += value * row.times
    rows = [
        (kind, axes, phase, f"{found[0]:.0f}", f"{found[1]:.0f}", units.size(found[2]), units.size(found[3]), units.seconds(found[4]))
        for (kind, axes, phase), found in sorted(sums.items(), key=lambda item: (-item[1][4], item[0]))
    ]
    return Table(
        ("collective", "axes", "phase", "calls", "values", "bytes", "received", "seconds"),
        tuple(rows),
        frozenset({"calls", "values", "bytes", "received", "seconds"}),
    )


def _held(row: TensorSpec, plan: Plan) -> str:
    """Bytes of one rank's part, or ``-`` where the spec does not fit the shape."""
    spec = ShardingSpec.parse(row.spec)
    if row.dtype not in DTYPE_BYTES or spec.problem(row.shape, plan.sizes) is not None:
        return "-"
    return units.size(math.prod(spec.local_shape(row.shape, plan.sizes)) * DTYPE_BYTES[row.dtype])


def _is_whole(plan: Plan) -> bool:
    """Whether at least 98 % of the operators' time is work that every rank repeats."""
    few, split = 0.02 * plan.predicted.compute_seconds, 0.0
    return few > 0 and all((split := split + row.seconds * row.times) < few for row in plan.ops if row.factors)


def _folded(items: Iterable[tuple[str, TensorSpec]]) -> Iterator[tuple[str, int, TensorSpec]]:
    """Rows that differ only in the numbers in their names, as one: (pattern, how many, the first)."""
    groups: dict[tuple[str, Sequence[int], str, str], list[tuple[str, TensorSpec]]] = {}
    for name, row in items:
        groups.setdefault((pattern(name), row.shape, row.dtype, row.spec), []).append((name, row))
    for (folded, *_), members in groups.items():
        name, row = members[0]
        yield (folded if len(members) > 1 else name), len(members), row


def _legend(plan: Plan) -> str:
    return ", ".join(f"{index} is {name}" for index, name in enumerate(plan.mesh))
