"""``verify_reduced``: a plan's own schedule on all its ranks in this process, on tensors that are small.

The model is captured at its own size without values. Of layers that are equal one is kept (``layers``), every factor is shrunk
(``shrinking``), and what is left runs in lockstep on as many ranks as the plan has. The same reduced graph runs on one device, operator by
operator. In float64 the two differ by less than ``TOLERANCE``, or something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.errors import UsageError
from autopar.graph import DIVISOR, Accumulation, Graph, GraphInput
from autopar.plan import Plan
from autopar.rows import CollectivePlan
from autopar.runtime.module.compiling import check_torch, rebuild
from autopar.runtime.ranks.backends import SharingRanks
from autopar.runtime.ranks.collectives import Observed
from autopar.runtime.ranks.placement import replica_difference
from autopar.runtime.steps.simulation import Simulation, simulate
from autopar.runtime.weights.sharding import has_no_values
from autopar.schedule import Schedule
from autopar.seeds import check_seed
from autopar.target import Target
from autopar.verify.comparison import Tolerance, compare_values
from autopar.verify.examples import example_like, index_bound
from autopar.verify.launch import run_ranks
from autopar.verify.reduced.extents import Kept
from autopar.verify.reduced.footprint import total_bytes, without_overwriting
from autopar.verify.reduced.layers import Fewer, with_fewer_layers
from autopar.verify.reduced.shrinking import Shrunk, shrink
from autopar.verify.reduced.single import OperatorFailure, Whole, run_on_one_device
from autopar.verify.trials import Say, Trial, silent
from autopar.verify.widened import wide_tensors, widened

TOLERANCE = Tolerance(1e-9, 1e-9, 1e-9)
"""In float64: rounding of sums in another order is below 1e-11 at these sizes."""
MOST_BYTES = 9 * 2**29
"""Bytes of all ranks' tensors together at the peak: the process then stays within 6 GiB."""
ROOMS = ((2, True), (2, False), (1, True), (1, False))
"""``least`` and ``apart`` of ``Extents``, in the order in which they are tried: the first that fits is taken."""
ATTEMPTS = 8
"""Times that sizes are solved anew because an operator fails on values that do not fit them."""
RUN_NAME = "the reduced run"


@dataclass(frozen=True)
class ReducedVerification:
    """What was compared.

    Args:
        passed: every error within 1e-9, the collectives as planned.
        ranks: of the mesh, all of them simulated.
        output_error, gradient_errors: as in ``Verification``, in float64.
        operators, planned_operators: that ran on each rank in a step, second runs counted, and those of the plan.
        collectives, planned_collectives: likewise; one that runs in several microbatches counts once.
        layers, planned_layers: repeats of equal layers that ran, and those of the plan.
        broken_buckets: kinds of buckets that ran with fewer parts than planned: they span more layers than were kept.
        kept: the dims that keep their sizes.
        peak_bytes: of all ranks' tensors together.
        problems: what did not pass, in words.
    """

    passed: bool
    ranks: int
    output_error: float
    gradient_errors: Mapping[str, float]
    operators: int
    planned_operators: int
    collectives: int
    planned_collectives: int
    layers: int
    planned_layers: int
    broken_buckets: int
    kept: tuple[Kept, ...]
    peak_bytes: int
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The keys of the command line's ``--reduced --json``."""
        return {
            "passed": self.passed, "reduced": True, "ranks": self.ranks, "compared_in": "float64",
            "outputs": {"max_error": self.output_error}, "gradients": dict(self.gradient_errors),
            "operators": {"planned": self.planned_operators, "run": self.operators},
            "collectives": {"planned": self.planned_collectives, "run": self.collectives},
            "layers": {"planned": self.planned_layers, "run": self.layers},
            "broken_buckets": self.broken_buckets,
            "kept_sizes": [vars(item) for item in self.kept],
            "peak_memory_bytes": self.peak_bytes,
            "problems": list(self.problems),
        }  # fmt: skip

    def __str__(self) -> str:
        worst = max(self.gradient_errors.items(), key=lambda item: item[1], default=None)
        lines = [
            f"{'passed' if self.passed else 'FAILED'} on {self.ranks} simulated ranks, at reduced sizes",
            f"  outputs      largest error {self.output_error:.2e}",
        ]
        if worst is not None:
            lines.append(f"  gradients    largest error {worst[1]:.2e} ({worst[0]}), {len(self.gradient_errors)} compared")
        if self.planned_layers:
            lines.append(f"  layers       {self.layers} of {self.planned_layers}; the others are equal to one of them in all the plan says")
        lines.append(f"  operators    {self.operators} of {self.planned_operators} on each rank")
        lines.append(f"  collectives  {self.collectives} of {self.planned_collectives}, in the planned order")
        if self.broken_buckets:
            lines.append(f"  buckets      {self.broken_buckets} kinds span more layers: they ran with the parts of those that are left")
        lines.append(f"  memory       {self.peak_bytes:,} bytes, all ranks together")
        lines += [f"  kept         {item.where}, {item.size} entries: {item.reason}" for item in self.kept]
        return "\n".join([*lines, *(f"  problem      {problem}" for problem in self.problems)])


def verify_reduced(plan: Plan, target: Any, *, seed: int = 0, progress: Say = silent) -> ReducedVerification:
    """Runs the plan's schedule at reduced sizes on simulated ranks, and the reduced model on one device, and compares them.

    Args:
        target: as of ``verify``. Its weights need no values: they are drawn from ``seed`` at their reduced sizes.
        progress: called with what is being done.

    Raises:
        UsageError: sizes that cannot be reduced, by the line that keeps them. MismatchError: the plan is not for this model.
        VerificationError: the process that runs it died.
    """
    check_seed(seed)
    check_torch(plan)
    parts = Target.of(target)

    def alone(_: int) -> ReducedVerification:
        progress("capturing the model")
        captured, schedule = rebuild(parts.model, plan, loss=parts.loss, example=(parts.args, parts.kwargs, parts.loss_args))
        given = {name: tensor for name, tensor in parts.model.named_buffers(remove_duplicate=False) if not has_no_values(tensor)}
        return verify_schedule(plan, schedule, {**given, **captured.constants}, seed, progress)

    found: ReducedVerification = run_ranks(alone, 1, alone=True, name=RUN_NAME)[0]
    return found


def verify_schedule(
    plan: Plan, schedule: Schedule, given: Mapping[str, torch.Tensor], seed: int = 0, progress: Say = silent
) -> ReducedVerification:  # fmt: skip
    """Runs a plan's schedule at reduced sizes in this process and compares it.

    Args:
        given: buffers and constants that have values, by name: a table of positions or a mask may mean something.

    Raises:
        UsageError: sizes that cannot be reduced.
    """
    progress("shrinking the model")
    fewer = with_fewer_layers(schedule)
    shrunk, values, single = reduced_run(widened(fewer.schedule), given, seed)
    progress(f"running on {schedule.machine.mesh.ranks} simulated ranks")
    lean = without_overwriting(shrunk.schedule)
    return compare_reduced(plan, fewer, shrunk, single, simulate(lean, values, dropout=False, ranks=SharingRanks(lean.machine.mesh)))


def reduced_run(
    schedule: Schedule, given: Mapping[str, torch.Tensor], seed: int
) -> tuple[Shrunk, dict[str, torch.Tensor], Whole]:  # fmt: skip
    """The schedule shrunk, values for its graph's inputs, and what these give on one device.

    Args:
        schedule: in float64.
        given: buffers and constants that have values, by name.

    Raises:
        UsageError: it needs more memory than ``MOST_BYTES``, or fails on all sizes that were tried.
    """
    held: dict[str, str] = {}
    for _ in range(ATTEMPTS):
        shrunk = _fitting(schedule, held)
        values = values_for(shrunk.schedule.graph, given, seed)
        try:
            return shrunk, values, run_on_one_device(shrunk.schedule.graph, values)
        except OperatorFailure as failure:
            op, reason = failure.op, failure.reason
            if op.name in held:
                break
            held[op.name] = f"{op.target.removesuffix('.default')} at {op.location or op.name}"
    message = f"{op.location or op.module or op.name}: {op.target} fails at reduced sizes: {reason}"
    raise UsageError(message, "take sizes and indices from shapes there, or verify on as many ranks as the plan has")


def _fitting(schedule: Schedule, held: Mapping[str, str]) -> Shrunk:
    """The schedule shrunk so that it fits. Raises UsageError: it needs more than ``MOST_BYTES``; names the dim that keeps most, and why."""
    for least, apart in ROOMS:
        shrunk = shrink(schedule, held, least, apart)
        needed = total_bytes(shrunk.schedule)
        if needed <= MOST_BYTES:
            return shrunk
    message = f"at reduced sizes all ranks take {needed / 2**30:.1f} GiB together, more than {MOST_BYTES / 2**30:.1f} GiB"
    if shrunk.kept:
        first = shrunk.kept[0]
        message = f"{first.where} keeps its {first.size} entries ({first.reason}): {message}"
    raise UsageError(message, "take that size from a shape, plan for smaller example inputs, or verify on as many ranks as the plan has")


def values_for(graph: Graph, given: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A value for each graph input by tensor name, of the whole batch where it is cut.

    Buffers and constants with values keep the first entries along each dim. Everything else is drawn: matrices of a size that keeps
    activations near one, vectors and buffers from 0.5 to 1.5, integers in the range of what they index. A stage of a pipeline has the same
    values in each microbatch, as what it receives is.
    """
    generator = torch.Generator().manual_seed(seed)
    return {item.tensor: _value(item, graph, given, generator) for item in graph.inputs}


def _value(item: GraphInput, graph: Graph, given: Mapping[str, torch.Tensor], generator: torch.Generator) -> torch.Tensor:
    tensor, parts = graph.tensors[item.tensor], graph.parts(item.tensor)
    if parts > 1 and (any(one.is_received for one in graph.inputs) or any(one.is_sent for one in graph.outputs)):
        alone = replace(graph, accumulation=Accumulation())
        return torch.cat([_value(item, alone, given, generator)] * parts)
    shape = (tensor.shape[0] * parts, *tensor.shape[1:]) if parts > 1 else tensor.shape
    dtype = getattr(torch, tensor.dtype)
    if item.kind in ("buffer", "constant") and item.name in given and given[item.name].dim() == len(shape):
        whole = wide_tensors(given[item.name].detach().cpu())
        part: torch.Tensor = whole[tuple(slice(extent) for extent in shape)].to(dtype).clone()
        if not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool:
            part = part.clamp(max=max(index_bound(graph, item.tensor, default=2**62) - 1, 0))
        return part
    if item.kind == "parameter" and len(shape) > 1 and dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype) * shape[-1] ** -0.5
    if item.kind in ("parameter", "buffer", "constant") and dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=dtype) + 0.5
    if item.kind in ("parameter", "buffer", "constant") and not dtype.is_complex:
        return torch.zeros(shape, dtype=dtype)
    return example_like(torch.empty(shape, dtype=dtype, device="meta"), item.name, graph, generator)


def compare_reduced(plan: Plan, fewer: Fewer, shrunk: Shrunk, single: Whole, ranks: Simulation) -> ReducedVerification:
    """What the ranks gave against what one device did."""
    schedule = shrunk.schedule
    mesh = schedule.machine.mesh
    trial, other = Trial(), Trial(outputs=single.outputs | {f"buffer:{name}": tensor for name, tensor in single.buffers.items()})
    other.gradients = single.gradients
    for (output, value), tensor, parts in zip(schedule.outputs, ranks.outputs, ranks.parts, strict=True):
        trial.replica_difference = max(trial.replica_difference, replica_difference(parts, schedule.specs[value], mesh))
        if output.kind == "gradient":
            trial.gradients[output.name] = tensor
        elif output.name != DIVISOR:
            trial.outputs[output.name if output.kind == "output" else f"buffer:{output.name}"] = tensor
    values = compare_values(trial, other, TOLERANCE)
    problems = [*values.problems, *_without_numbers(single), *_other_collectives(plan, schedule, ranks.observed)]
    return ReducedVerification(
        passed=not problems,
        ranks=mesh.ranks,
        output_error=values.output_error,
        gradient_errors=values.gradients,
        operators=len(schedule.operations),
        planned_operators=len(plan.ops),
        collectives=sum(_planned(item, schedule) is not None for item in plan.collectives),
        planned_collectives=len(plan.collectives),
        layers=fewer.kept,
        planned_layers=fewer.layers,
        broken_buckets=fewer.buckets,
        kept=shrunk.kept,
        peak_bytes=total_bytes(schedule),
        problems=tuple(problems),
    )


def _without_numbers(single: Whole) -> list[str]:
    found = {**single.outputs, **single.gradients}
    lost = [name for name, tensor in found.items() if tensor.numel() and not tensor.isfinite().any()]
    return [f"{len(lost)} of {len(found)} values ({lost[0]}) are not finite on one device: nothing is compared by them"] if lost else []


Row = tuple[str, tuple[str, ...], str, tuple[str, ...]]
"""Of a collective: its kind, axes and phase, and the tensors that travel, or the first operand of the operator that it is inside of."""


def _other_collectives(plan: Plan, schedule: Schedule, observed: Sequence[Observed]) -> list[str]:
    """What was executed otherwise than the plan lists it."""
    wanted = [row for item in plan.collectives_in_a_step if (row := _planned(item, schedule)) is not None]
    found = [_executed(item.row(schedule.machine.mesh)) for item in observed]
    for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
        if one != other:
            return [f"collective {number} is {_said(other)}, planned is {_said(one)}"]
    return [f"{len(found)} collectives were executed, {len(wanted)} planned"] if len(found) != len(wanted) else []


def _planned(item: CollectivePlan, schedule: Schedule) -> Row | None:
    """None where its layer was left out."""
    if item.id is None:
        operation = schedule.operations.get(str(item.before))
        return None if operation is None else (item.kind, tuple(item.axes), item.phase, operation.op.inputs[:1])
    call = schedule.collectives.get(item.id)
    if call is None:
        return None
    there = {part.layout.tensor for part in call.parts}
    tensors = [part.tensor for part in item.parts] if item.parts is not None else [str(item.tensor)]
    return item.kind, tuple(item.axes), item.phase, tuple(name for name in tensors if name in there)


def _executed(row: Mapping[str, Any]) -> Row:
    tensors = tuple(part["tensor"] for part in row["parts"]) if "parts" in row else (row["tensor"],)
    return row["kind"], tuple(row["axes"]), row["phase"], tensors


def _said(row: Row) -> str:
    return f"{row[0]} over {','.join(row[1])} of {', '.join(row[3])} ({row[2]})"
