"""``verify``: the steps of a trial of the plain model and of the sharded program, each in processes of their own.

This process never runs the model: autograd's threads do not survive a fork, so capture and the single-device run have a
process of their own, and so has each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from autopar.errors import AutoparError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.runtime.module.compiling import check_torch, compile_schedule, rebuild
from autopar.runtime.steps.calls import leaves
from autopar.schedule import Schedule
from autopar.seeds import check_seed
from autopar.target import Target
from autopar.verify.comparison import TOLERANCES, Verification, coarsest, compare, compare_values
from autopar.verify.examples import with_example_values, with_values
from autopar.verify.launch import run_ranks
from autopar.verify.trials import Case, Say, Trial, run_sharded, run_simulated, run_single, silent
from autopar.verify.widened import Widening, wide_tensors, widened, widened_case

Backend = Literal["gloo", "simulate"]
SIMULATED = "the run of all ranks in one process"


def verify(
    plan: Plan, target: Any, *, backend: Backend = "gloo", steps: int = 10, seed: int = 0, timeout: float = 300.0, progress: Say = silent
) -> Verification:  # fmt: skip
    """Runs the plan and the plain model side by side and compares them. The target's model is not changed.

    Args:
        target: ``(model, args)``, ``(model, args, kwargs)``, or an object with ``model, args, kwargs, loss, loss_args``.
            Real weights and inputs are used as they are; meta and fake ones are filled from ``seed``.
        backend: ``gloo``: one process a rank; ``simulate``: all ranks in one process.
        steps: of the plan's optimizer, for a training plan.
        timeout: seconds that a rank waits for the others in a collective.
        progress: called with what is being done, in the process that does it.

    Raises:
        UsageError: another backend or seed than there are. MismatchError: the plan is not for this model. VerificationError: a rank died.
    """
    if backend not in ("gloo", "simulate"):
        raise UsageError(f"unknown backend {backend!r}", "use gloo or simulate")
    check_seed(seed)
    check_torch(plan)
    parts = Target.of(target)
    model = with_values(parts.model, seed)

    progress("capturing the model")

    def alone(_: int) -> tuple[Schedule, Mapping[str, torch.Tensor], Case, Trial]:
        captured, schedule = rebuild(model, plan, loss=parts.loss, example=(parts.args, parts.kwargs, parts.loss_args))
        case = make_case(captured.graph, model, parts, steps, seed, plan.model.optimizer)
        return schedule, captured.constants, without_model(case), run_single(case, progress)

    schedule, constants, bare, single = run_ranks(alone, 1, alone=True)[0]
    case = Case(**{**vars(bare), "model": model, "loss": parts.loss})

    def rank_main(rank: int) -> Trial:
        say = progress if rank == 0 else silent
        say(f"compiling for {schedule.machine.mesh.ranks} ranks")
        return run_sharded(case, compile_schedule(model, schedule, constants, plan=plan, device="cpu", dropout=False), say)

    if backend == "gloo":
        trials = run_ranks(rank_main, schedule.machine.mesh.ranks, timeout=timeout)
    else:
        trials = run_ranks(lambda _: run_simulated(case, schedule, constants, progress), 1, alone=True, name=SIMULATED)
    wide, dtype = None, coarsest(schedule.graph)
    if dtype != "float64" and compare_values(trials[0], single, TOLERANCES[dtype]).problems:
        wide = _in_float64(case, schedule, constants)
    return compare(plan, schedule, single, trials, wide)


def _in_float64(case: Case, schedule: Schedule, constants: Mapping[str, torch.Tensor]) -> tuple[Trial, Trial] | None:
    """The ranks' trial and the single device's once more in float64, all ranks in one process; None where the model itself cannot be run
    in it."""
    wide = widened(schedule)

    def alone(_: int) -> Trial:
        torch.set_default_dtype(torch.float64)
        with Widening():
            return run_single(widened_case(case, wide.graph))

    def ranks(_: int) -> Trial:
        return run_simulated(widened_case(case, wide.graph), wide, wide_tensors(dict(constants)))

    try:
        single = run_ranks(alone, 1, alone=True)[0]
    except AutoparError:
        return None
    return run_ranks(ranks, 1, alone=True, name=SIMULATED)[0], single


def make_case(graph: Graph, model: torch.nn.Module, target: Target, steps: int, seed: int, optimizer: str) -> Case:
    """What both sides of a comparison run: the target's call, with values where it has none."""
    trees = graph.arguments
    places = (("args", list(target.args)), ("kwargs", target.kwargs), ("loss_args", list(target.loss_args)))
    names = {id(tensor): name for key, value in places for name, tensor in leaves(trees[key], value)}
    args, kwargs, loss_args = with_example_values((target.args, target.kwargs, target.loss_args), names, graph, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    tangents = {}
    for item in graph.of_kind("tangent"):
        tensor = graph.tensors[item.tensor]
        tangents[item.name] = torch.randn(tensor.shape, generator=generator).to(getattr(torch, tensor.dtype))
    return Case(graph, model, args, kwargs, target.loss, loss_args, tangents, steps if graph.mode == "train" else 1, optimizer)


def without_model(case: Case) -> Case:
    """What of the case goes between processes."""
    return Case(**{**vars(case), "model": None, "loss": None})
