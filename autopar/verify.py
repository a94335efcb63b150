"""verify: a plan's sharded program on N ranks against the single-device model.

Outputs, every gradient, ten AdamW steps, the collectives executed against those planned, and memory measured against predicted.
This process never runs the model: autograd's threads do not survive a fork, so capture and the single-device run have a
process of their own, and so has each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.program import Program
from autopar.runtime.calls import leaves
from autopar.runtime.compiling import check_torch, compile_program, rebuild
from autopar.runtime.examples import with_example_values, with_values
from autopar.runtime.launch import run_ranks
from autopar.runtime.trials import Case, Trial, run_sharded, run_simulated, run_single

Backend = Literal["gloo", "simulate"]


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


@dataclass(frozen=True)
class Verification:
    """What was compared.

    Args:
        passed: every error within its tolerance and the collectives equal.
        ranks: of the mesh.
        output_error: largest |a-b| / max(1, max|b|) over outputs and mutated buffers.
        gradient_errors: by parameter or input.
        single, sharded: losses of each step.
        planned, observed: collectives in execution order.
        predicted_bytes, measured_bytes: peak memory of a rank.
        problems: what did not pass, in words.
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

    def to_json(self) -> dict[str, Any]:
        """The keys of the command line's ``--json``."""
        return {
            "passed": self.passed,
            "ranks": self.ranks,
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
        same = "as planned" if self.planned == self.observed else f"{len(self.planned)} planned"
        lines.append(f"  collectives  {len(self.observed)} executed, {same}")
        lines.append(f"  peak memory  {self.measured_bytes:,} bytes a rank measured, {self.predicted_bytes:,} predicted")
        return "\n".join([*lines, *(f"  problem      {problem}" for problem in self.problems)])


@dataclass(frozen=True)
class Call:
    """A target's parts."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., Any] | None
    loss_args: tuple[Any, ...]


def verify(plan: Plan, target: Any, *, backend: Backend = "gloo", steps: int = 10, seed: int = 0, timeout: float = 300.0) -> Verification:
    """Runs the plan and the plain model side by side and compares them. The target's model is not changed.

    Args:
        target: ``(model, args)``, ``(model, args, kwargs)``, or an object with ``model, args, kwargs, loss, loss_args``.
            Real weights and inputs are used as they are; meta and fake ones are filled from ``seed``.
        backend: ``gloo``: one process a rank; ``simulate``: all ranks in one process.
        steps: of AdamW, for a training plan.
        timeout: seconds that a rank waits for the others in a collective.

    Raises:
        MismatchError: the plan is not for this model. VerificationError: a rank died.
    """
    if backend not in ("gloo", "simulate"):
        raise UsageError(f"unknown backend {backend!r}", "use gloo or simulate")
    check_torch(plan)
    call = _parts(target)
    model = with_values(call.model, seed)

    def alone(_: int) -> tuple[Program, Mapping[str, torch.Tensor], Case, Trial]:
        captured, program = rebuild(model, plan, loss=call.loss, example=(call.args, call.kwargs, call.loss_args))
        case = _case(captured.graph, model, call, steps, seed)
        return program, captured.constants, _without_model(case), run_single(case)

    program, constants, bare, single = run_ranks(alone, 1, alone=True)[0]
    case = Case(**{**vars(bare), "model": model, "loss": call.loss})

    def rank_main(_: int) -> Trial:
        return run_sharded(case, compile_program(model, program, constants, plan=plan, device="cpu", dropout=False))

    if backend == "gloo":
        trials = run_ranks(rank_main, program.machine.mesh.ranks, timeout=timeout)
    else:
        trials = run_ranks(lambda _: run_simulated(case, program, constants), 1, alone=True)
    return compare(plan, program, single, trials)


def _parts(target: Any) -> Call:
    if isinstance(target, (tuple, list)):
        if len(target) not in (2, 3):
            raise UsageError(f"the target has {len(target)} parts", "give (model, args) or (model, args, kwargs)")
        model, args, *rest = target
        return Call(model, tuple(args), dict(rest[0] if rest else {}), None, ())
    model, args, kwargs = target.model, target.args, getattr(target, "kwargs", None)
    return Call(model, tuple(args), dict(kwargs or {}), getattr(target, "loss", None), tuple(getattr(target, "loss_args", None) or ()))


def _case(graph: Graph, model: torch.nn.Module, call: Call, steps: int, seed: int) -> Case:
    trees = graph.arguments
    places = (("args", list(call.args)), ("kwargs", call.kwargs), ("loss_args", list(call.loss_args)))
    names = {id(tensor): name for key, value in places for name, tensor in leaves(trees[key], value)}
    args, kwargs, loss_args = with_example_values((call.args, call.kwargs, call.loss_args), names, graph, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tangents = {}
    for item in graph.of_kind("tangent"):
        tensor = graph.tensors[item.tensor]
        tangents[item.name] = torch.randn(tensor.shape, generator=generator).to(getattr(torch, tensor.dtype))
    return Case(graph, model, args, kwargs, call.loss, loss_args, tangents, steps)


def _without_model(case: Case) -> Case:
    """What of the case goes between processes."""
    return Case(**{**vars(case), "model": None, "loss": None})


def compare(plan: Plan, program: Program, single: Trial, trials: list[Trial]) -> Verification:
    """The ranks' trials against the single-device one."""
    first, mesh = trials[0], program.machine.mesh
    allowed = TOLERANCES[coarsest(program.graph)]
    output_errors = {name: error(first.outputs[name], tensor, 1.0) for name, tensor in single.outputs.items()}
    largest = max((tensor.abs().max().item() for tensor in single.gradients.values() if tensor.numel()), default=0.0)
    gradients = {
        name: error(first.gradients[name], tensor, GRADIENT_FLOOR * largest) if name in first.gradients else sys.float_info.max
        for name, tensor in single.gradients.items()
    }
    planned = tuple(
        {"kind": row.kind, "axes": list(row.axes), "phase": row.phase, "tensor": row.tensor, "before": row.before, "bytes": row.bytes}
        for row in plan.collectives
        for _ in range(row.times)
    )
    rows = [tuple(item.row(mesh) for item in trial.observed) for trial in trials]
    output_error = max(output_errors.values(), default=0.0)
    problems = [f"output {name} differs by {value:.2e}" for name, value in output_errors.items() if value > allowed.outputs]
    problems += [f"gradient of {name} differs by {value:.2e}" for name, value in gradients.items() if value > allowed.gradients]
    for step, (mine, other) in enumerate(zip(first.losses, single.losses, strict=True)):
        if relative(mine, other) > allowed.losses:
            problems.append(f"loss of step {step} is {mine:.8g}, {other:.8g} on a single device")
            break
    if first.replica_difference > allowed.outputs:
        problems.append(f"ranks' copies of the same block differ by {first.replica_difference:.2e}")
    for rank, observed in enumerate(rows):
        if observed != planned:
            problems.append(f"collectives of rank {rank}: {_first_difference(planned, observed)}")
            break
    return Verification(
        not problems, mesh.ranks, output_error, gradients, tuple(single.losses), tuple(first.losses), planned, rows[0],
        plan.predicted.peak_memory_bytes_per_rank, max(trial.peak_bytes for trial in trials), tuple(problems),
    )  # fmt: skip


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
    a, b = found.detach().double(), wanted.detach().double()
    agree = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(agree, 0.0, (a - b).abs()).nan_to_num(nan=sys.float_info.max, posinf=sys.float_info.max).max().item()
    finite = b[b.isfinite()].abs()
    scale = max(finite.max().item() if finite.numel() else 0.0, floor)
    return 0.0 if difference == 0 else min(difference / scale, sys.float_info.max) if scale > 0 else sys.float_info.max


def relative(found: float, wanted: float) -> float:
    """|a-b| / |b|."""
    if found == wanted:
        return 0.0
    return abs(found - wanted) / max(abs(wanted), 1e-12)


def _first_difference(planned: tuple[Mapping[str, Any], ...], observed: tuple[Mapping[str, Any], ...]) -> str:
    for number, (one, other) in enumerate(zip(planned, observed, strict=False)):
        if one != other:
            return f"number {number} is {dict(other)}, planned is {dict(one)}"
    return f"{len(observed)} executed, {len(planned)} planned"
