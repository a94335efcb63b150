"""The optimizer on one rank: the memory of its states, and how often its step reads and writes an element.

States are as PyTorch keeps them, in the parameter's own dtype; an optimizer with master weights keeps them, and a copy of the weight, in
float32 beside a parameter of fewer bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import UnknownOptimizerError

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
    "float32": 4, "float64": 8, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


UNLIMITED = 2**62
"""Bytes that no plan needs."""
FULL_BYTES = 4
"""Bytes of an element of a master weight and of its states: float32."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer does to one parameter element.

    Args:
        states: how many values it keeps between steps.
        accesses: how many values a step reads and writes, the gradient's and the weight's among them.
        master: whether it works on a float32 copy where the parameter has fewer bytes.
        state_bytes: kept beside ``states``, whatever the parameter's dtype.
        others: where it steps matrices alone, each made orthogonal as a whole: the name of the one that steps the other parameters.
    """

    states: int
    accesses: int
    master: bool = False
    state_bytes: int = 0
    others: str | None = None

    def bytes_kept(self, dtype: str) -> int:
        """Of the states of one element of a parameter of ``dtype``."""
        own = DTYPE_BYTES[dtype]
        return self.state_bytes + ((self.states + 1) * FULL_BYTES if self._copies(own) else self.states * own)

    def bytes_moved(self, dtype: str) -> int:
        """Read and written by a step for one element: with a master weight, the gradient and the weight alone in the parameter's dtype."""
        own = DTYPE_BYTES[dtype]
        return 2 * own + (self.accesses - 1) * FULL_BYTES if self._copies(own) else self.accesses * own

    def _copies(self, own: int) -> bool:
        return self.master and own < FULL_BYTES


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(states=2, accesses=7),  # reads weight, gradient, both moments; writes weight, both moments
    "adamw-mixed": Optimizer(states=2, accesses=7, master=True),
    "sgd": Optimizer(states=0, accesses=3),  # without momentum: reads weight and gradient, writes weight
    "sgd-momentum": Optimizer(states=1, accesses=5),  # reads and writes the momentum too
    # momentum: reads it and the gradient, writes it; direction: reads both, writes one, narrows it, divides it by its norm (2.5, of two
    # bytes); reads the weight, writes it smaller; reads it and the direction, writes it
    "muon": Optimizer(states=1, accesses=14, others="adamw"),
    "none": Optimizer(states=0, accesses=0),
}


def find_optimizer(text: str) -> Optimizer:
    """The optimizer of a name, or of ``NAME:BYTES,ACCESSES``: bytes kept and values read and written for each parameter element.

    Raises:
        UnknownOptimizerError: neither.

    >>> find_optimizer("lion:4,5").bytes_kept("float32"), find_optimizer("lion:4,5").bytes_moved("bfloat16")
    (4, 10)
    """
    named = isinstance(text, str)
    if named and text in OPTIMIZERS:
        return OPTIMIZERS[text]
    own = re.fullmatch(r"[\w.-]+:(\d{1,6}),(\d{1,6})", text) if named else None
    if own is None:
        names = ", ".join(OPTIMIZERS)
        raise UnknownOptimizerError(
            f"unknown optimizer {text!r}",
            f"use one of {names}, or your own as NAME:BYTES,ACCESSES: bytes kept, and values read and written, for each element",
        )
    return Optimizer(states=0, accesses=int(own[2]), state_bytes=int(own[1]))


def optimizer_of(optimizer: str, is_matrix: bool) -> Optimizer:
    """The one that steps a parameter where ``optimizer`` steps the model: another than that where it steps matrices alone.

    >>> optimizer_of("muon", True).states, optimizer_of("muon", False).states
    (1, 2)
    """
    found = find_optimizer(optimizer)
    return found if found.others is None or is_matrix else find_optimizer(found.others)


def optimizer_bytes(optimizer: str, elements: int, dtype: str, is_matrix: bool = False) -> int:
    """Bytes of the states that ``optimizer`` keeps for ``elements`` parameter elements of ``dtype``.

    Args:
        is_matrix: of a layer's matrix, which is all that some optimizers step.

    >>> optimizer_bytes("adamw", 10, "bfloat16"), optimizer_bytes("adamw-mixed", 10, "bfloat16")
    (40, 120)
    """
    return optimizer_of(optimizer, is_matrix).bytes_kept(dtype) * elements
