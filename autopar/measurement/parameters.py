"""What a step costs for each parameter beside its instructions and the optimizer: its local part, its gradient's DTensor, autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import median

import torch
import torch.distributed as dist

from autopar import zoo
from autopar.cost_models import Machine, Mesh
from autopar.graph import Graph
from autopar.importer import capture
from autopar.measurement.clock import Clock
from autopar.measurement.operators import ALONE
from autopar.runtime.module.compiling import compile_schedule
from autopar.runtime.module.sharded_module import ShardedModule
from autopar.schedule import Assignment, make_schedule
from autopar.sharding import ShardingSpec, Strategy
from autopar.target import Target

LAYERS = (1, 12)
"""Of two models with operators of no size: what the second takes longer, beside its instructions, is its parameters'."""
STEPS = 40


@cache
def prepared(layers: int) -> tuple[Target, Graph]:
    """A model of so many layers, captured: once, before ranks are forked, and not by every rank. All ranks have the same inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = zoo.build("mlp", layers=layers)
    return target, capture(target.model, target.args, mode="train").graph


def time_parameters(clock: Clock) -> float:
    """Seconds a parameter, of this rank. Collective.

    0 without other ranks, where nothing can be compiled; and on a GPU, whose host does this while the device works.
    """
    if not dist.is_initialized() or clock.device.type == "cuda":
        return 0.0
    (few, least), (many, most) = (_beside_instructions(layers, clock) for layers in LAYERS)
    return max(0.0, (most - least) / (many - few))


def _beside_instructions(layers: int, clock: Clock) -> tuple[int, float]:
    """How many parameters the model has, and the seconds of a step in which no instruction runs."""
    target, graph = prepared(layers)
    module = _replicated(target, graph, clock.device)
    inside = 0.0
    executable = module.step.executable

    def timed(ranks: Sequence[dict[str, torch.Tensor]], observed: object, *, name: str) -> None:
        nonlocal inside
        begin = clock.now()
        getattr(type(executable), name)(executable, ranks, observed)
        inside += clock.now() - begin

    for name in ("forward", "backward"):
        executable.__dict__[name] = lambda ranks, observed=None, name=name: timed(ranks, observed, name=name)
    seen = []
    for _ in range(STEPS):
        inside, begin = 0.0, clock.now()
        module(*target.args).backward()
        seen.append(clock.now() - begin - inside)
        module.zero_grad()
    return len(list(module.parameters())), median(seen)


def _replicated(target: Target, graph: Graph, device: torch.device) -> ShardedModule:
    """The model whole on every rank: a step without collectives."""

    def whole(name: str) -> ShardingSpec:
        return ShardingSpec.replicated(len(graph.tensors[name].shape))

    strategies = {op.name: Strategy(tuple(map(whole, op.inputs)), tuple(map(whole, op.outputs))) for op in graph.ops}
    machine = Machine(Mesh((("all", dist.get_world_size()),)), ALONE.hardware)
    schedule = make_schedule(graph, Assignment({item.tensor: whole(item.tensor) for item in graph.inputs}, strategies), machine)
    return compile_schedule(target.model, schedule, {}, device=device)
