"""What one operator costs under one strategy: seconds and bytes on one rank. Shared by search, program and check."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.graph import DTYPE_BYTES, Op, Tensor
from autopar.rules import flops, is_alias
from autopar.sharding import ShardingSpec, Strategy
from cost_models import Machine, SubAxis


def local_bytes(tensor: Tensor, spec: ShardingSpec, machine: Machine) -> int:
    """Bytes of one rank's part of ``tensor``."""
    elements = tensor.elements
    for axis in spec.split_axes:
        elements //= machine.mesh.sizes[axis]
    return elements * DTYPE_BYTES[tensor.dtype]


def whole_axes(axes: tuple[int, ...], machine: Machine) -> tuple[SubAxis, ...]:
    """The axes as sub-axes that are whole."""
    return tuple(SubAxis(axis, 1, machine.mesh.sizes[axis]) for axis in axes)


def compute_seconds(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, machine: Machine) -> float:
    """Roofline seconds of the local operator; views cost nothing, and so does everything under the communication model."""
    if is_alias(op):
        return 0.0
    moved = sum(local_bytes(tensors[name], spec, machine) for name, spec in zip(op.inputs, strategy.inputs, strict=True))
    moved += sum(local_bytes(tensors[name], spec, machine) for name, spec in zip(op.outputs, strategy.outputs, strict=True))
    dtype = tensors[(op.inputs or op.outputs)[0]].dtype
    return machine.compute_seconds(flops(op, tensors) / strategy.parts, moved, dtype)


def inner_seconds(strategy: Strategy, machine: Machine) -> float:
    """Seconds of the collectives that run inside the operator."""
    return sum(machine.collective_seconds(item.kind, item.bytes, whole_axes(item.axes, machine)) for item in strategy.inner)
