"""torchtitan's Trainer with a planned model: ``plan_config`` puts autopar in place of a model's ``parallelize_fn``.

torchtitan deals rows out to its data-parallel ranks and computes the loss of each rank's own; the gradients are those of their sum. So the
plan takes ``inputs="local"``, with the rows split over the axes of data parallelism, and a call gives the logits of the rank's rows. How
weights and all between rows and logits lie is the planner's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from autopar.api import compile as compile_model
from autopar.api import plan as plan_model
from autopar.cost_models import Mesh
from autopar.errors import UsageError
from autopar.integrations.planning import check_planning
from autopar.options import read_mesh
from autopar.runtime import ShardedModule
from autopar.runtime.ranks.agreement import together
from autopar.runtime.ranks.groups import team_of
from autopar.seeds import SEEDS

try:
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.models.common.moe import MoE
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(f"autopar.integrations.torchtitan: {error}\nhint: pip install 'autopar[torchtitan]'") from error


class DocumentAttention(Module):
    """Causal attention within documents, of plain operators: what ``FlexAttention`` computes in kernels that have no rule of sharding.

    Called with ``attention_masks`` as ``number_documents`` gives them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """In place of a FlexAttention's: the Trainer asks the model for masks where it finds one."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_masks: torch.Tensor, scale: float | None = None,
        enable_gqa: bool = False, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Queries, keys, values ``[rows, length, heads, dim]`` -> ``[rows, length, heads, dim]``."""
        places = torch.arange(q.shape[1], device=q.device)
        seen = (attention_masks[:, None, :, None] == attention_masks[:, None, None, :]) & (places[:, None] >= places)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)


def number_documents(positions: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its row, ``[rows, length]``, from positions that begin at 0 in each."""
    return (positions == 0).cumsum(1)


def plan_config(config: Any, **planning: Any) -> Any:
    """A configuration of torchtitan's Trainer that trains the same model as autopar plans it.

    Args:
        config: a ``Trainer.Config``, which is not used any more afterwards.
        planning: arguments of ``autopar.plan``, such as ``hardware``, ``memory`` and ``constraints``. The first axes of a ``mesh`` make up
            torchtitan's data parallelism; by default it is ``dp`` and ``tp`` of torchtitan's degrees.

    Raises:
        UsageError: a model, an attention or an option of planning that cannot be honoured.
    """
    check_planning(planning, own={"compute_dtype", "devices"})
    spec = config.model_spec
    if not isinstance(spec.model, Decoder.Config):
        raise UsageError(f"{spec.name} is not a decoder of tokens", "plan it in a loop of your own, by autopar.plan and autopar.compile")
    if any(spec.traverse(MoE.Config)):  # their dispatch has collectives of its own, and balancing sums counts of tokens over ranks
        raise UsageError(f"{spec.name} has MoE layers, whose tokens torchtitan dispatches itself", "take a dense model")
    if any(spec.traverse(VarlenAttention.Config)):
        hint = "take the configuration with FlexAttention, whose masks a plan computes with plain operators"
        raise UsageError(f"{spec.name} has VarlenAttention, whose kernels have no rule of sharding", hint)
    for _, attention, parent, name in list(spec.traverse(FlexAttention.Config)):
        if type(attention) is not FlexAttention.Config:
            raise UsageError(f"{name} is a {type(attention).__qualname__}, which cannot be planned", "take FlexAttention.Config")
        setattr(parent, str(name), DocumentAttention.Config())
    if isinstance(config.loss, ChunkedLossWrapper.Config):  # it calls lm_head by itself; the values are the same
        config.loss = config.loss.loss_fn
    config.training.disable_cuda_graphs, config.parallelism.spmd_backend = True, "partial_dtensor"  # logits are plain tensors
    config.model_spec = replace(spec, parallelize_fn=partial(parallelize, planning=planning), pipelining_fn=None)
    return config


def parallelize(
    model: nn.Module, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any,
    planning: Mapping[str, Any] | None = None, **_: Any,
) -> ShardedModule:  # fmt: skip
    """A ``parallelize_fn`` of torchtitan: the planned module, with weights, on this rank. Every rank calls it.

    Args:
        model: on meta.
        planning: arguments of ``autopar.plan``.

    Raises:
        UsageError: settings of torchtitan that a plan cannot honour. Others as ``autopar.plan`` and ``autopar.compile``.
    """
    refuse_settings(parallel_dims, training, parallelism, compile_config)
    options = dict(planning or {})
    ways = parallel_dims.dp_replicate * parallel_dims.dp_shard
    mesh = find_mesh(options.pop("mesh", None), ways, parallel_dims.tp)
    axes = row_axes(mesh, ways)
    execute = options.pop("execute", None)
    rows = "S" + "".join(map(str, axes)) if axes else "R"
    pins = {"input:tokens": f"{rows} R", "output:0": f"{rows} R R", **options.pop("constraints", {})}
    tokens = torch.empty(training.local_batch_size * ways, training.seq_len, dtype=torch.int64, device="meta")
    half = training.mixed_precision_param if training.mixed_precision_param != training.dtype else None

    def make_plan() -> Any:
        if dist.get_rank() != 0:
            return None
        return plan_model(
            model, (tokens,), {"positions": tokens, "attention_masks": tokens}, mesh=mesh, inputs="local", constraints=pins,
            compute_dtype=half, execute=execute, **options,
        )  # fmt: skip

    plan = together(make_plan, team_of())
    module = compile_model(model, plan, init=lambda whole: whole.init_weights(), seed=torch.initial_seed() % SEEDS, execute=execute)
    module.register_forward_hook(partial(take_rows, axes=axes))
    has_weights = {"to_empty": lambda **_: module, "init_weights": lambda **_: None}  # the Trainer calls them next
    module.__dict__.update(has_weights, get_attention_masks=number_documents)
    return module


def take_rows(module: nn.Module, args: tuple[Any, ...], logits: torch.Tensor, *, axes: tuple[int, ...]) -> torch.Tensor:
    """A hook after forward: the logits of this rank's rows, as the loss of torchtitan takes them."""
    if not isinstance(logits, DTensor):
        return logits
    placements = [Shard(0) if axis in axes else Replicate() for axis in range(logits.device_mesh.ndim)]
    return logits.redistribute(placements=placements).to_local()


def find_mesh(asked: Any, ways: int, tensor_ways: int) -> Mesh:
    """The mesh of the plan: the one asked for, or torchtitan's degrees of data and tensor parallelism."""
    named = {name: size for name, size in (("dp", ways), ("tp", tensor_ways)) if size > 1}
    mesh = read_mesh(asked or named or {"dp": 1})
    assert mesh is not None
    return mesh


def row_axes(mesh: Mesh, ways: int) -> tuple[int, ...]:
    """The axes that rows are split over: the first ones, of ``ways`` parts.

    Raises:
        UsageError: no number of first axes has ``ways`` ranks together.
    """
    for count in range(len(mesh.sizes) + 1):
        if prod(mesh.sizes[:count]) == ways:
            return tuple(range(count))
    hint = "begin the mesh with axes whose product is data_parallel_replicate_degree times data_parallel_shard_degree"
    raise UsageError(f"torchtitan deals rows out to {ways} ranks, which no first axes of the mesh {mesh} make up", hint)


def refuse_settings(parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any) -> None:
    """Raises UsageError: torchtitan is asked for what a compiled module cannot honour."""
    compiles = compile_config.enable and "model" in compile_config.components
    refused = {
        "pipeline_parallel_degree": (parallel_dims.pp > 1, "set it to 1; autopar.compile_pipeline trains pipelines"),
        "context_parallel_degree": (parallel_dims.cp > 1, "set it to 1: the planner splits sequences where that pays"),
        "expert_parallel_degree": (parallel_dims.ep > 1, "set it to 1: the planner splits experts where that pays"),
        "spmd_backend": (parallelism.spmd_backend != "partial_dtensor", "set it to partial_dtensor"),
        "enable_cpu_offload": (training.enable_cpu_offload, "drop it: weights stay on the device"),
        "compile of the model": (compiles, "drop it, and pass execute='compiled' to plan_config"),
    }
    for name, (is_set, hint) in refused.items():
        if is_set:
            raise UsageError(f"torchtitan is asked for {name}, which a compiled module cannot honour", hint)
