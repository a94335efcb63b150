"""``verify_pipeline``: steps of a pipeline on forked gloo ranks against the plain model, loss, gradients and copies of tied weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import MismatchError
from autopar.pipeline_plan import PipelinePlan
from autopar.runtime.module.compiling import check_torch
from autopar.runtime.pipelines.module import capture_pipeline, compile_pipeline
from autopar.seeds import check_seed
from autopar.target import Target
from autopar.verify.comparison import TOLERANCES, coarsest, compare_values, relative
from autopar.verify.examples import with_values
from autopar.verify.launch import run_ranks
from autopar.verify.trainers import trainer
from autopar.verify.trials import Case, Say, Trial, run_single, silent
from autopar.verify.verifying import make_case, without_model


@dataclass(frozen=True)
class PipelineVerification:
    """What was compared.

    Args:
        gradient_errors: by parameter, in the first step.
        single, pipelined: losses of each step.
        problems: what did not pass, in words.
    """

    ranks: int
    gradient_errors: Mapping[str, float]
    single: tuple[float, ...]
    pipelined: tuple[float, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The keys of the command line's ``--json``."""
        losses = {"single": list(self.single), "pipelined": list(self.pipelined)}
        return {"passed": self.passed, "ranks": self.ranks, "gradients": dict(self.gradient_errors), "losses": losses}

    def __str__(self) -> str:
        worst = max(self.gradient_errors.items(), key=lambda item: item[1], default=("none", 0.0))
        fall = f"{self.single[0]:.6g} to {self.single[-1]:.6g} in {len(self.single)} steps"
        lines = [
            f"{'passed' if self.passed else 'FAILED'} on {self.ranks} ranks",
            f"  gradients    largest error {worst[1]:.2e} ({worst[0]}), {len(self.gradient_errors)} compared",
            f"  losses       {fall}, largest difference {max(map(relative, self.pipelined, self.single)):.2e}",
        ]
        return "\n".join([*lines, *(f"  problem      {problem}" for problem in self.problems)])


def verify_pipeline(
    plan: PipelinePlan, target: Any, *, steps: int = 10, seed: int = 0, timeout: float = 300.0, progress: Say = silent
) -> PipelineVerification:  # fmt: skip
    """Runs a pipeline and the plain model side by side and compares them. The target's model is not changed.

    Args:
        target, seed, timeout, progress: as of ``verify``.
        steps: of the plan's optimizer.

    Raises:
        MismatchError: the plan is not for this model. VerificationError: a rank died.
    """
    check_seed(seed)
    check_torch(plan)
    parts = Target.of(target)
    model = with_values(parts.model, seed)
    progress("capturing the model")

    def alone(_: int) -> tuple[Case, Trial]:
        replayed = capture_pipeline(model, plan, parts.loss)[1]
        case = make_case(replayed.graph, model, parts, steps, seed, plan.model.optimizer)
        return without_model(case), run_single(case, progress)

    bare, single = run_ranks(alone, 1, alone=True)[0]
    case = Case(**{**vars(bare), "model": model, "loss": parts.loss})
    ranks = math.prod(plan.mesh.values())

    def rank_main(rank: int) -> Trial:
        if rank == 0:
            progress(f"compiling for {ranks} ranks")
        module = compile_pipeline(model, plan, loss=parts.loss, device="cpu", dropout=False)
        return _run(case, module)

    trials = run_ranks(rank_main, ranks, timeout=timeout)
    merged, problems = _merge(trials)
    values = compare_values(merged, single, TOLERANCES[coarsest(case.graph)])
    return PipelineVerification(ranks, values.gradients, tuple(single.losses), tuple(merged.losses), (*problems, *values.problems))


def _run(case: Case, module: Any) -> Trial:
    """Steps on this rank: losses, whole gradients of the first step."""
    trial, optimizer = Trial(), trainer(case.optimizer, dict(module.named_parameters()), case.graph)
    for turn in range(case.steps):
        loss = module(*case.args, *case.loss_args, **case.kwargs)
        outputs = case.outputs(loss)
        outputs["loss"].backward()
        trial.losses.append(outputs["loss"].item())
        if turn == 0:
            trial.outputs = {"loss": outputs["loss"].detach()}
            trial.gradients = {name: _whole(parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return trial


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _merge(trials: list[Trial]) -> tuple[Trial, list[str]]:
    """All stages' gradients as one trial's, and where two ranks differ in what both have."""
    merged, problems = Trial(outputs=trials[0].outputs, losses=trials[0].losses), list[str]()
    for rank, trial in enumerate(trials):
        if trial.losses != merged.losses:
            problems.append(f"the loss of rank {rank} is {trial.losses}, of rank 0 {merged.losses}")
        for name, gradient in trial.gradients.items():
            known = merged.gradients.setdefault(name, gradient)
            if not torch.equal(known, gradient):
                problems.append(f"rank {rank} has another gradient of {name} than the ranks before it")
    if not merged.gradients:
        raise MismatchError("no stage has a gradient", "train some parameter")
    return merged, problems
