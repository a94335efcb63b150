"""What one operator costs under one strategy: seconds and bytes on one rank. Shared by search, program and check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from autopar.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules import family, flops, launches, moves
from autopar.sharding import ShardingSpec, Strategy
from cost_models import Machine, Operator, SubAxis


def local_bytes(tensor: Tensor, spec: ShardingSpec, machine: Machine) -> int:
    """Bytes of one rank's part of ``tensor``, the largest."""
    return math.prod(spec.local_shape(tensor.shape, machine.mesh.sizes)) * DTYPE_BYTES[tensor.dtype]


def whole_axes(axes: tuple[int, ...], machine: Machine) -> tuple[SubAxis, ...]:
    """The axes as sub-axes that are whole."""
    return tuple(SubAxis(axis, 1, machine.mesh.sizes[axis]) for axis in axes)


def local_operator(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, machine: Machine) -> Operator:
    """The operator as one rank runs it, in the words of the cost model. A view moves nothing."""
    sizes = machine.mesh.sizes
    inputs = tuple([spec.local_shape(tensors[name].shape, sizes) for name, spec in zip(op.inputs, strategy.inputs, strict=True)])
    outputs = tuple([spec.local_shape(tensors[name].shape, sizes) for name, spec in zip(op.outputs, strategy.outputs, strict=True)])
    dtypes = [tensors[name].dtype for name in (*op.inputs, *op.outputs)]
    sizes_of = [math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip((*inputs, *outputs), dtypes, strict=True)]
    moved = moves(op, sizes_of[: len(inputs)], sizes_of[len(inputs) :])
    work, kernels = flops(op, tensors) / strategy.parts, launches(op, tensors)
    return Operator(op.target, family(op), dtypes[0], inputs, outputs, work, moved, kernels)


def compute_seconds(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, machine: Machine) -> float:
    """Seconds of the local operator by the machine's cost model, without the collectives inside it."""
    return _compute_seconds(op, tuple([tensors[name] for name in (*op.inputs, *op.outputs)]), strategy, machine)


@lru_cache(maxsize=1 << 18)
def _compute_seconds(op: Op, tensors: tuple[Tensor, ...], strategy: Strategy, machine: Machine) -> float:
    """``tensors``: those that the operator reads and makes. A search asks the same of thousands of schedules."""
    return machine.operator_seconds(local_operator(op, {tensor.name: tensor for tensor in tensors}, strategy, machine))


def inner_seconds(strategy: Strategy, machine: Machine) -> float:
    """Seconds of the collectives that run inside the operator."""
    return sum(machine.collective_seconds(item.kind, item.bytes, whole_axes(item.axes, machine)) for item in strategy.inner)
