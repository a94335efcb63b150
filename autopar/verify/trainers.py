"""The optimizers that plans name, as users run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.cost_models import Mesh, find_optimizer
from autopar.graph import Graph
from autopar.runtime.optimizers.host_optimizer import HostOptimizer, is_hosted
from autopar.runtime.optimizers.master_weights import MasterWeights
from autopar.runtime.ranks.placement import gather, local_part
from autopar.sharding import ShardingSpec

LEARNING_RATE = 2e-4
"""Small: where a gradient is zero but for rounding, AdamW takes whole steps of this size in directions that rounding chooses."""


class Own(torch.optim.SGD):
    """Stands for an optimizer that is known by the bytes it keeps alone."""

    def __init__(self, parameters: Any, state_bytes: int, **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                self.state[parameter]["own"] = torch.zeros(local.numel() * state_bytes, dtype=torch.uint8)


class Together:
    """Several optimizers, each of its own parameters."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @property
    def state(self) -> dict[Any, Any]:
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}


@dataclass(frozen=True)
class Parted:
    """A matrix of which all ranks' parts are in this process.

    Args:
        parts: of each rank, as the graph has them.
        spec: as the graph has it.
        graph_shape, shape: of the whole, as the graph and as the model have it.
    """

    parts: Sequence[torch.Tensor]
    spec: ShardingSpec
    mesh: Mesh
    graph_shape: tuple[int, ...]
    shape: tuple[int, ...]

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The matrix of which these are the parts."""
        return gather([part.detach() for part in parts], self.spec, self.mesh).reshape(self.shape)

    def write(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Writes a matrix into its parts."""
        for rank, part in enumerate(parts):
            part.detach().copy_(local_part(whole.detach().reshape(self.graph_shape), self.spec, self.mesh, rank))


class MuonOfParts:
    """Muon of matrices of which all ranks' parts are in this process: each is put together, stepped, and cut again."""

    def __init__(self, matrices: Sequence[Parted], lr: float) -> None:
        self.matrices, self.lr = matrices, lr
        self.state = {part: {"momentum_buffer": torch.zeros_like(part)} for matrix in matrices for part in matrix.parts}

    def step(self) -> None:
        for matrix in self.matrices:
            grads = [part.grad for part in matrix.parts if part.grad is not None]
            if not grads:
                continue
            momenta = [self.state[part]["momentum_buffer"] for part in matrix.parts]
            parameter = nn.Parameter(matrix.whole(matrix.parts))
            parameter.grad = matrix.whole(grads)
            optimizer = torch.optim.Muon([parameter], lr=self.lr)
            optimizer.state[parameter]["momentum_buffer"] = matrix.whole(momenta)
            optimizer.step()
            matrix.write(parameter, matrix.parts)
            matrix.write(optimizer.state[parameter]["momentum_buffer"], momenta)

    def zero_grad(self) -> None:
        for matrix in self.matrices:
            for part in matrix.parts:
                part.grad = None


TRAINERS: Mapping[str, Callable[..., Any]] = {
    "adamw": torch.optim.AdamW,
    "adamw-mixed": lambda parameters, **options: MasterWeights(parameters, torch.optim.AdamW, **options),
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "none": torch.optim.SGD,
}
"""The optimizers that plans name, as users run them. ``none`` keeps nothing, and a trial that never moves would show little."""


FUSED = ("adamw", "adamw-mixed")
"""Those that hardware files price by their fused step, which makes no copies of a parameter's size."""
WITH_MASTERS = ("adamw-mixed",)
"""Those that keep states on the host where the plan says, as ``HostOptimizer`` does."""


def matrix_names(graph: Graph) -> frozenset[str]:
    """The names of the parameters that an optimizer of matrices steps."""
    return frozenset(item.name for item in graph.inputs if item.tensor in graph.matrices)


def trainer(name: str, parameters: Mapping[str, Any], graph: Graph, *, fused: bool = False) -> Any:
    """The optimizer of a trial. A model without parameters gets one with nothing to do, since torch refuses an empty list.

    Args:
        parameters: by the names that they have in the graph; ``Parted`` ones among them.
        fused: one kernel for all parameters, as steps are priced; of optimizers and parameters that torch has one for. Where states lie on
            the host, it is fused, so that what the step holds can be measured.
    """
    others = find_optimizer(name).others
    if others is not None:
        names = matrix_names(graph)
        matrices = {key: item for key, item in parameters.items() if key in names}
        rest = trainer(others, {key: item for key, item in parameters.items() if key not in names}, graph, fused=fused)
        return Together(MATRIX_TRAINERS[name](matrices), rest) if matrices else rest
    trained = [part for item in parameters.values() for part in (item.parts if isinstance(item, Parted) else (item,))]
    trained = [parameter for parameter in trained if parameter.requires_grad] or [nn.Parameter(torch.empty(0))]
    hosted = any(map(is_hosted, trained))
    options: dict[str, Any] = {}
    if name in TRAINERS:
        fuses = (fused or hosted) and name in FUSED and all(parameter.is_floating_point() for parameter in trained)
        make, options = TRAINERS[name], {"fused": True} if fuses else {}
    else:
        make, options = Own, {"state_bytes": find_optimizer(name).state_bytes}
    if hosted and name not in WITH_MASTERS:
        return HostOptimizer(trained, make, lr=LEARNING_RATE, **options)
    return make(trained, lr=LEARNING_RATE, **options)


def _muon(matrices: Mapping[str, Any]) -> Any:
    parted = [item for item in matrices.values() if isinstance(item, Parted)]
    return MuonOfParts(parted, LEARNING_RATE) if parted else torch.optim.Muon(list(matrices.values()), lr=LEARNING_RATE)


MATRIX_TRAINERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {"muon": _muon}
"""The optimizers of matrices alone."""
