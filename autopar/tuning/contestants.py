"""A contestant: a plan compiled on this rank, with its optimizer and its part of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.importer import Capture
from autopar.plan import Plan
from autopar.recording import replay
from autopar.runtime.module.compiling import compile_schedule, execution_of, recapture
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.runtime.ranks.agreement import fetch
from autopar.target import Target
from autopar.verify.examples import with_values
from autopar.verify.live_memory import LiveMemory
from autopar.verify.trainers import trainer
from autopar.verify.trials import Case, Tensors, forget_gradients, name_of, placed_tangents, states_of, with_inputs
from autopar.verify.verifying import make_case


@dataclass(frozen=True)
class Contestant:
    """A plan that is ready to step.

    Args:
        inputs: this rank's parts, by name.
        optimizer: None for a plan of inference.
    """

    module: ShardedModule
    case: Case
    inputs: Tensors
    tangents: Mapping[str, torch.Tensor]
    optimizer: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def step(self) -> None:
        """One step: forward, and of a plan that trains backward and the optimizer."""
        self._differentiate()
        if self.optimizer is not None:
            self.optimizer.step()
            forget_gradients(self.module, self.inputs)

    def peak_bytes(self) -> int:
        """The most bytes of live storages on this rank in forward and backward, with optimizer states."""
        module = self.module
        held = [*module.parameters(), *module.buffers(), *module.constants.values(), *states_of(self.optimizer)]
        with LiveMemory([*held, *self.inputs.values(), *self.tangents.values()]) as memory:
            self._differentiate()
        forget_gradients(module, self.inputs)
        return int(memory.peak)

    def _differentiate(self) -> None:
        outputs = self.case.outputs(self.module(*self.args, **self.kwargs))
        if self.optimizer is not None:
            self.case.backward(outputs, self.tangents)


@dataclass
class Builder:
    """Makes contestants of one target. The model is captured once for all plans of one graph.

    Args:
        seed: of weights and inputs that have no values of their own.
    """

    target: Target
    seed: int
    _captured: dict[str, Capture] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = replace(self.target, model=with_values(self.target.model, self.seed))

    def build(self, plan: Plan) -> Contestant:
        """The plan's contestant. All ranks have the inputs of the first. Collective."""
        target, graph = self.target, plan.model.graph_sha256
        if graph not in self._captured:
            example = target.args, target.kwargs, target.loss_args
            self._captured[graph] = recapture(target.model, plan, loss=target.loss, example=example)
        captured = self._captured[graph]
        schedule = replay(plan, captured.graph)
        module = compile_schedule(
            target.model, schedule, captured.constants, plan=plan, loss=target.loss, inputs="local", seed=self.seed,
            execute=execution_of(plan), left=captured.left, read=captured.read,
        )  # fmt: skip
        place = module.place
        case = make_case(schedule.graph, target.model, target, 1, self.seed, plan.model.optimizer)
        plain, inputs = case.inputs(), dict[str, torch.Tensor]()
        for name, tensor in plain.items():
            whole = fetch(tensor, 0, place.team, place.device)
            part = place.own_part(whole, schedule.specs[name_of(schedule.graph, name)])
            inputs[name] = part.requires_grad_(tensor.requires_grad)
        args, kwargs = with_inputs((case.args + case.loss_args, dict(case.kwargs)), plain, inputs)
        case = replace(case, tangents={name: tensor.to(place.device) for name, tensor in case.tangents.items()})
        tangents = placed_tangents(case, module) if case.trains else {}
        optimizer = trainer(plan.model.optimizer, dict(module.named_parameters()), case.graph, fused=True) if case.trains else None
        return Contestant(module, case, inputs, tangents, optimizer, args, kwargs)
