"""The cost of one operator under one strategy: seconds and bytes on one rank. Search, schedule and recording ask it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from autopar.cost_models import Machine, Operator, SubAxis, optimizer_bytes
from autopar.graph import DTYPE_BYTES, Graph, Op, Tensor
from autopar.rules import bytes_moved, family, flops, issued_kernels, kernel_launches
from autopar.sharding import InnerCollective, ShardingSpec, Strategy


def local_bytes(tensor: Tensor, spec: ShardingSpec, machine: Machine) -> int:
    """Bytes of one rank's part of ``tensor``, the largest."""
    return math.prod(spec.local_shape(tensor.shape, machine.mesh.sizes)) * DTYPE_BYTES[tensor.dtype]


def launches(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, machine: Machine, asks: bool = True) -> int | None:
    """Kernels that the host issues for an operator, with the collectives inside it; None where the host has no price.

    Args:
        asks: as of ``issued_kernels``.
    """
    return issued_kernels(op, tensors, strategy, machine.mesh.sizes, asks=asks) if machine.issue_seconds else None


def optimizer_seconds(graph: Graph, tensor: str, spec: ShardingSpec, machine: Machine, optimizer: str) -> float:
    """Seconds of the optimizer's step on a trained parameter that lies so."""
    return _optimizer_seconds(graph.tensors[tensor], graph.matrices.get(tensor), spec, machine, optimizer)


@lru_cache(maxsize=1 << 16)
def _optimizer_seconds(tensor: Tensor, matrix: tuple[int, ...] | None, spec: ShardingSpec, machine: Machine, optimizer: str) -> float:
    elements = local_bytes(tensor, spec, machine) // DTYPE_BYTES[tensor.dtype]
    return machine.optimizer_seconds(optimizer, elements, tensor.dtype, matrix, spec.split_axes)


def stepping_seconds(resident: float, hosted: Iterable[tuple[float, float]]) -> float:
    """Seconds of the optimizer's step where states of some parameters lie on the host.

    Those that lie on the device are stepped first. There is room for the states of two others: while one is stepped, or goes back, the
    next comes. Each way of the link has a stream.

    Args:
        resident: seconds of the step of parameters whose states lie on the device.
        hosted: of each other parameter, in order: seconds of copying its states one way, and of its step.

    >>> stepping_seconds(0.0, [(5.0, 1.0), (5.0, 1.0)])  # the second comes from 5 to 10, and goes back from 11 to 16
    16.0
    """
    came, stepped, last, before = 0.0, resident, 0.0, 0.0
    for copied, each in hosted:
        came = max(came, before) + copied
        stepped = max(stepped, came) + each
        last, before = max(stepped, last) + copied, last
    return max(stepped, last)


def state_bytes(graph: Graph, tensor: str, local: int, optimizer: str) -> int:
    """Optimizer states' bytes for a trained parameter, from the ``local`` bytes that a rank holds."""
    dtype = graph.tensors[tensor].dtype
    return optimizer_bytes(optimizer, local // DTYPE_BYTES[dtype], dtype, tensor in graph.matrices)


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
    moved = bytes_moved(op, sizes_of[: len(inputs)], sizes_of[len(inputs) :])
    work, turns = flops(op, tensors) / strategy.parts, strategy.turns
    return Operator(op.target, family(op), dtypes[0], inputs, outputs, work, turns * moved, turns * kernel_launches(op, tensors))


def compute_seconds(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, machine: Machine) -> float:
    """Seconds of the local operator by the machine's cost model, without the collectives inside it."""
    return _compute_seconds(op, tuple([tensors[name] for name in (*op.inputs, *op.outputs)]), strategy, machine)


@lru_cache(maxsize=1 << 18)
def _compute_seconds(op: Op, tensors: tuple[Tensor, ...], strategy: Strategy, machine: Machine) -> float:
    """``tensors``: those that the operator reads and makes. A search asks the same of thousands of schedules."""
    seconds = machine.operator_seconds(local_operator(op, {tensor.name: tensor for tensor in tensors}, strategy, machine))
    return seconds + machine.merge_seconds(strategy.merged, strategy.turns, tensors[0].dtype)


def inner_seconds(strategy: Strategy, machine: Machine) -> float:
    """Seconds of the collectives that run inside the operator, beside its work or not."""
    return sum(_inner(item, machine) for item in strategy.inner)


def run_seconds(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, machine: Machine) -> float:
    """Seconds that a run of the operator takes: its work in equal turns, each with the collectives that travel beside it, of which the
    longer counts; and the collectives that it waits for."""
    work, slowdown = compute_seconds(op, tensors, strategy, machine), machine.hardware.overlap_slowdown
    if all(item.beside is None for item in strategy.inner):
        return work + inner_seconds(strategy, machine)
    travelling = [0.0] * strategy.turns
    waited = 0.0
    for item in strategy.inner:
        if item.beside is None:
            waited += _inner(item, machine)
        else:
            travelling[item.beside] += _inner(item, machine)
    each = work / strategy.turns
    return waited + sum(max(busy, beside(0.0, each, busy, slowdown)) for busy in travelling)


def beside(begin: float, seconds: float, busy: float, slowdown: float) -> float:
    """When work of ``seconds`` that begins at ``begin`` ends, while links are busy until ``busy``.

    >>> beside(0.0, 3.0, 4.0, 0.5), beside(0.0, 3.0, 4.0, 0.0)
    (5.0, 3.0)
    """
    if busy <= begin or slowdown == 0.0 or seconds == 0.0:
        return begin + seconds
    rate = 1.0 - slowdown
    done = rate * (busy - begin)
    return begin + seconds / rate if seconds <= done else busy + seconds - done


def _inner(item: InnerCollective, machine: Machine) -> float:
    return machine.collective_seconds(item.kind, item.bytes, whole_axes(item.axes, machine))
