"""What one device of the machine is: its memory, and the most that a large product and a large copy reach beside the other ranks."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.cost_models import OPTIMIZERS
from autopar.cost_models.fitting import OperatorTime
from autopar.cost_models.memory import DTYPE_BYTES
from autopar.measurement.clock import Clock

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
UPDATED = (2**10, 2**14, 2**18, 2**22)
"""Elements of the parameters whose optimizer's step is timed."""
COPIED = ((8, 64), (64, 128), (256, 256), (1024, 512), (2048, 1024))
"""Rows and columns of the blocks whose copies are timed."""
PLACES = 64
"""Places that blocks are copied from, at most."""
OUT_OF_CACHE = 2**26
"""Bytes of all places together, at most: more than a CPU's cache holds."""

OUTSIDE_BYTES, BETWEEN_BLOCKS = 2e9, 0.04
"""Bytes of a CUDA context and of NCCL's buffers, and share of the memory between the allocator's blocks. Assumed, not measured."""


@dataclass(frozen=True)
class Peaks:
    """Of one rank beside the others.

    Args:
        flops: operations a second of a large product, by dtype.
        bandwidth: bytes a second, read and written, of a copy that no cache holds.
    """

    flops: dict[str, float]
    bandwidth: float


def peaks(clock: Clock) -> Peaks:
    """Measures them on this rank."""
    device = clock.device
    size = 8192 if device.type == "cuda" else 768
    flops = {}
    for name, dtype in DTYPES.items():
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        flops[name] = 2 * size**3 / clock.seconds(partial(torch.matmul, a, b))
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return Peaks(flops, 2 * source.nbytes / clock.seconds(lambda: target.copy_(source)))


def time_optimizer(clock: Clock) -> list[OperatorTime]:
    """Fused AdamW's step on parameters of some sizes, eight at a time, per parameter: on DTensors where there are ranks, as in a step."""
    mesh = init_device_mesh(clock.device.type, (dist.get_world_size(),)) if dist.is_initialized() else None
    found = []
    for elements in UPDATED:
        locals_ = [torch.ones(elements, device=clock.device) for _ in range(16)]
        placed = locals_ if mesh is None else [DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in locals_]
        parameters = [torch.nn.Parameter(tensor) for tensor in placed[:8]]
        for parameter, gradient in zip(parameters, placed[8:], strict=True):
            parameter.grad = gradient
        optimizer = torch.optim.AdamW(parameters, fused=True)
        moved = OPTIMIZERS["adamw"].accesses * elements * DTYPE_BYTES["float32"]
        found.append(OperatorTime("optimizer", "adamw", "float32", 0.0, float(moved), clock.seconds(optimizer.step) / len(parameters)))
    return found


def time_copies(clock: Clock) -> list[OperatorTime]:
    """Copies of blocks that lie one after another to one tensor in which they lie side by side: what collectives along any dim but
    the first need before or after. They come from many places in turn, since what a collective brings is in no cache."""
    found = []
    for rows, columns in COPIED:
        size = 2 * rows * columns * DTYPE_BYTES["float32"]
        many = itertools.cycle([torch.ones(2, rows, columns, device=clock.device) for _ in range(min(PLACES, OUT_OF_CACHE // size))])
        seconds = clock.seconds(partial(_copy_next, many))
        found.append(OperatorTime("copy", "autopar.copy", "float32", 0.0, 2.0 * size, seconds))
    return found


def describe(device: torch.device) -> str:
    """The device in words."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {platform.machine()} CPU of {os.cpu_count()} cores"
    return f"{name} with torch {torch.__version__}, {torch.get_num_threads()} threads a rank"


def memory_bytes(device: torch.device, per_node: int) -> int:
    """Memory of one rank: the GPU's, or its share of the node's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node


def reserved_bytes(device: torch.device) -> float:
    """Bytes of a GPU that no plan may fill: as the built-in files assume. 0 of a CPU, whose memory is not a device's."""
    if device.type != "cuda":
        return 0.0
    return OUTSIDE_BYTES + BETWEEN_BLOCKS * torch.cuda.get_device_properties(device).total_memory


def _copy_next(many: Iterator[torch.Tensor]) -> torch.Tensor:
    return next(many).movedim(0, 1).contiguous()
