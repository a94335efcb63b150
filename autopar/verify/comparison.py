"""The ranks' trials against the single-device one: errors, their tolerances, collectives, memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.graph import Graph
from autopar.plan import Plan
from autopar.rows import CollectivePlan
from autopar.rules import splits_experts
from autopar.runtime.execution.footprint import spared_bytes
from autopar.runtime.ranks.placement import difference, in_double
from autopar.schedule import Schedule
from autopar.verify.trials import Trial


@dataclass(frozen=True)
class Tolerance:
    """Largest errors that pass: outputs relative to max(1, largest entry), gradients and losses relative."""

    outputs: float
    gradients: float
    losses: float


TOLERANCES: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-5, 1e-4, 1e-4),
    "float32": Tolerance(1e-5, 1e-4, 1e-4),
    "float16": Tolerance(1e-2, 4e-2, 1e-2),
    "bfloat16": Tolerance(5e-2, 1.5e-1, 5e-2),
}
"""By the coarsest dtype in the graph. In half precision, partial and whole sums round differently, by a few units in the last place."""

GRADIENT_FLOOR = 1e-3
"""A gradient's error is relative to its largest entry, or this times the model's largest: some gradients are zero in exact arithmetic."""


ROUNDING = 4.0
"""Where float64 shows that two runs differ by rounding alone, they may by so many times what one device's own is; gradients by their share
of the model's largest, since sums over ranks round parts that may cancel, which a kernel does not round."""
MEMORY_TOLERANCE = 0.1
"""Relative error allowed between the measured and the predicted peak."""


@dataclass(frozen=True)
class Verification:
    """What was compared.

    Args:
        passed: every error within its tolerance, the collectives equal, the peak of memory as predicted.
        ranks: of the mesh.
        output_error: largest |a-b| / max(1, max|b|) over outputs and mutated buffers.
        gradient_errors: by parameter or input.
        single, sharded: losses of each step.
        planned, observed: collectives in execution order.
        predicted_bytes, measured_bytes: peak memory of a rank.
        problems: what did not pass, in words.
        compared_in: the dtype of the errors: the coarsest of the graph, or float64 where that was beyond its tolerance; what agrees there
            differed by rounding alone. ``single`` and ``sharded`` are of the first comparison.
        beyond: the dtype that was beyond its tolerance.
    """

    passed: bool
    ranks: int
    output_error: float
    gradient_errors: Mapping[str, float]
    single: tuple[float, ...]
    sharded: tuple[float, ...]
    planned: tuple[Mapping[str, Any], ...]
    observed: tuple[Mapping[str, Any], ...]
    predicted_bytes: int
    measured_bytes: int
    problems: tuple[str, ...]
    compared_in: str = "float32"
    beyond: str = ""

    def to_json(self) -> dict[str, Any]:
        """The keys of the command line's ``--json``."""
        return {
            "passed": self.passed,
            "ranks": self.ranks,
            "compared_in": self.compared_in,
            "outputs": {"max_error": self.output_error},
            "gradients": dict(self.gradient_errors),
            "losses": {"single": list(self.single), "sharded": list(self.sharded)},
            "collectives": {"planned": [dict(row) for row in self.planned], "observed": [dict(row) for row in self.observed]},
            "peak_memory_bytes_per_rank": {"predicted": self.predicted_bytes, "measured": self.measured_bytes},
        }

    def __str__(self) -> str:
        worst = max(self.gradient_errors.items(), key=lambda item: item[1], default=None)
        lines = [
            f"{'passed' if self.passed else 'FAILED'} on {self.ranks} ranks",
            f"  outputs      largest error {self.output_error:.2e}",
        ]
        if worst is not None:
            lines.append(f"  gradients    largest error {worst[1]:.2e} ({worst[0]}), {len(self.gradient_errors)} compared")
        if self.single:
            difference = max(map(relative, self.sharded, self.single))
            fall = f"{self.single[0]:.6g} to {self.single[-1]:.6g} in {len(self.single)} steps"
            lines.append(f"  losses       {fall}, largest difference {difference:.2e}")
        if self.beyond and self.passed:
            lines.append(f"  rounding     beyond the tolerance in {self.beyond}; compared in {self.compared_in} above")
        same = "as planned" if self.planned == self.observed else f"{len(self.planned)} planned"
        lines.append(f"  collectives  {len(self.observed)} executed, {same}")
        lines.append(f"  peak memory  {self.measured_bytes:,} bytes per rank measured, {self.predicted_bytes:,} predicted")
        return "\n".join([*lines, *(f"  problem      {problem}" for problem in self.problems)])


@dataclass(frozen=True)
class Values:
    """What the values of two trials differ by.

    Args:
        output_error, gradients: as in ``Verification``.
        loss_error: the largest of all steps, relative.
        problems: what is beyond its tolerance, in words.
    """

    output_error: float
    gradients: Mapping[str, float]
    loss_error: float
    problems: tuple[str, ...]

    def times(self, factor: float, least: Tolerance) -> Tolerance:
        """So many times the largest errors, and no less than ``least``."""
        gradients = max(self.gradients.values(), default=0.0)
        return Tolerance(
            max(least.outputs, factor * self.output_error), max(least.gradients, factor * gradients),
            max(least.losses, factor * self.loss_error),
        )  # fmt: skip


def compare_values(first: Trial, single: Trial, allowed: Tolerance, floor: float = GRADIENT_FLOOR) -> Values:
    """Outputs, gradients, losses and replicas.

    Args:
        floor: times the model's largest gradient: a gradient's error is relative to no less.
    """
    output_errors = {name: error(first.outputs[name], tensor, 1.0) for name, tensor in single.outputs.items()}
    largest = max((tensor.abs().max().item() for tensor in single.gradients.values() if tensor.numel()), default=0.0)
    gradients = {
        name: error(first.gradients[name], tensor, floor * largest) if name in first.gradients else sys.float_info.max
        for name, tensor in single.gradients.items()
    }
    problems = [f"output {name} differs by {value:.2e}" for name, value in output_errors.items() if value > allowed.outputs]
    problems += [f"gradient of {name} differs by {value:.2e}" for name, value in gradients.items() if value > allowed.gradients]
    for step, (mine, other) in enumerate(zip(first.losses, single.losses, strict=True)):
        if relative(mine, other) > allowed.losses:
            problems.append(f"loss of step {step} is {mine:.8g}, {other:.8g} on a single device")
            break
    if first.replica_difference > allowed.outputs:
        problems.append(f"ranks' copies of the same block differ by {first.replica_difference:.2e}")
    losses = max(map(relative, first.losses, single.losses), default=0.0)
    return Values(max(output_errors.values(), default=0.0), gradients, losses, tuple(problems))


def compare(
    plan: Plan, schedule: Schedule, single: Trial, trials: list[Trial], wide: tuple[Trial, Trial] | None = None
) -> Verification:  # fmt: skip
    """The ranks' trials against the single-device one. ``wide``: the ranks' and the single device's once more in float64; they decide
    then, and what rounding makes of one device's values says by how much it may make ranks differ."""
    first, mesh, dtype = trials[0], schedule.machine.mesh, coarsest(schedule.graph)
    values = compare_values(first, single, TOLERANCES[dtype])
    if wide is not None:
        own = compare_values(single, wide[1], TOLERANCES[dtype])
        rounded = compare_values(first, single, own.times(ROUNDING, TOLERANCES[dtype]), floor=1.0)
        values = compare_values(*wide, TOLERANCES["float64"])
        values = replace(values, problems=(*values.problems, *rounded.problems))
    problems = [*values.problems, *_without_numbers(single)]
    rows_planned = tuple(map(planned, plan.collectives_in_a_step))
    rows = [tuple(item.row(mesh) for item in trial.observed) for trial in trials]
    shapes = {name: schedule.graph.tensors[value.tensor].shape for name, value in schedule.values.items()}
    even = all(spec.is_even(shapes[name], mesh.sizes) for name, spec in schedule.specs.items())
    for rank, observed in enumerate(rows):
        if observed != rows_planned and (even or rank == 0 or not _of_smaller_parts(rows_planned, observed)):
            problems.append(f"collectives of rank {rank}: {_first_difference(rows_planned, observed)}")
            break
    predicted, measured = plan.predicted.peak_memory_bytes_per_rank, max(trial.peak_bytes for trial in trials)
    most, least = (predicted - spared_bytes(schedule, plan.model.optimizer, observed) for observed in ((), first.observed))
    less = even or len(trials) == mesh.ranks  # of simulated ranks the mean is measured, which is less than the largest of unequal parts
    known = not any(splits_experts(item.op, item.strategy) for item in schedule.operations.values())  # else it is what tokens choose
    if (known and measured - most > MEMORY_TOLERANCE * most) or (less and least - measured > MEMORY_TOLERANCE * least):
        problems.append(f"peak memory is {measured:,} bytes per rank, predicted {predicted:,}: more than {MEMORY_TOLERANCE:.0%} apart")
    return Verification(
        not problems, mesh.ranks, values.output_error, values.gradients, tuple(single.losses), tuple(first.losses), rows_planned, rows[0],
        predicted, measured, tuple(problems), "float64" if wide else dtype, dtype if wide else "",
    )  # fmt: skip


def _without_numbers(single: Trial) -> list[str]:
    """Of what are not numbers on one device a comparison says nothing."""
    found = []
    for what, tensors in (("outputs", single.outputs), ("gradients", single.gradients)):
        lost = [name for name, tensor in tensors.items() if tensor.numel() and tensor.is_floating_point() and tensor.isnan().all()]
        if lost:
            found.append(f"{len(lost)} of {len(tensors)} {what} ({lost[0]}) are not numbers on one device: nothing is compared by them")
    return found


def _of_smaller_parts(planned: tuple[Mapping[str, Any], ...], observed: tuple[Mapping[str, Any], ...]) -> bool:
    """Whether collectives are those planned but for fewer bytes: the first rank holds the largest parts, others may hold less."""

    def fits(one: Any, other: Any) -> bool:
        if isinstance(one, Mapping):
            return set(one) == set(other) and all(
                other[key] <= one[key] if key == "bytes" else fits(one[key], other[key]) for key in one
            )  # fmt: skip
        if isinstance(one, list):
            return len(one) == len(other) and all(map(fits, one, other))
        return bool(one == other)

    return len(planned) == len(observed) and all(map(fits, planned, observed))


def planned(row: CollectivePlan) -> Mapping[str, Any]:
    """A row of the plan in the words of ``Observed.row``."""
    what: dict[str, Any] = {"tensor": row.tensor, "before": row.before}
    if row.parts is not None:
        what = {"parts": [{"tensor": part.tensor, "before": part.before, "bytes": part.bytes} for part in row.parts]}
    return {"kind": row.kind, "axes": list(row.axes), "phase": row.phase, **what, "bytes": row.bytes}


def coarsest(graph: Graph) -> str:
    """The floating dtype of the graph with the fewest digits."""
    present = {tensor.dtype for tensor in graph.tensors.values()}
    return next((name for name in ("bfloat16", "float16", "float32") if name in present), "float64")


def error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    """max|a-b| / max(max|b|, floor); equal infinities agree; what is not a number on one side alone is the largest float."""
    if found.shape != wanted.shape:
        return sys.float_info.max
    if not wanted.numel():
        return 0.0
    apart, whole = difference(found, wanted), in_double(wanted.detach())
    finite = whole[whole.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, floor)
    return 0.0 if apart == 0 else min(apart / scale, sys.float_info.max) if scale > 0 else sys.float_info.max


def relative(found: float, wanted: float) -> float:
    """|a-b| / |b|; of a loss that is zero in exact arithmetic both are rounding, and its difference is taken as of 1e-9. What is not a
    number on both sides agrees, on one side alone it is the largest float."""
    if found == wanted or (math.isnan(found) and math.isnan(wanted)):
        return 0.0
    apart = abs(found - wanted) / max(abs(wanted), 1e-9)
    return apart if math.isfinite(apart) else sys.float_info.max


def _first_difference(planned: tuple[Mapping[str, Any], ...], observed: tuple[Mapping[str, Any], ...]) -> str:
    for number, (one, other) in enumerate(zip(planned, observed, strict=False)):
        if one != other:
            return f"number {number} is {dict(other)}, planned is {dict(one)}"
    return f"{len(observed)} executed, {len(planned)} planned"
