"""The optimizer on one rank: the memory of its states, and how often its step reads and writes an element.

States are as PyTorch keeps them: in the parameter's own dtype, without a float32 copy of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
    "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer does to one parameter element.

    Args:
        states: how many values it keeps between steps.
        accesses: how many values a step reads and writes.
    """

    states: int
    accesses: int


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(states=2, accesses=7),  # reads weight, gradient, both moments; writes weight, both moments
    "sgd": Optimizer(states=0, accesses=3),  # without momentum: reads weight and gradient, writes weight
    "none": Optimizer(states=0, accesses=0),
}


def optimizer_bytes(optimizer: str, elements: int, dtype: str) -> int:
    """Bytes of the states that ``optimizer`` keeps for ``elements`` parameter elements of ``dtype``.

    >>> optimizer_bytes("adamw", 10, "bfloat16")
    40
    """
    return OPTIMIZERS[optimizer].states * elements * DTYPE_BYTES[dtype]
