"""Newton-Schulz: what a matrix optimizer computes of each whole matrix, in bfloat16 (Jordan and others 2024, Muon)."""

from __future__ import annotations

import math

from .memory import DTYPE_BYTES
from .operator import Operator, Shape

DTYPE = "bfloat16"
"""In which a matrix is made orthogonal, and travels for it, whatever the parameter's dtype: as ``torch.optim.Muon`` does."""
STEPS = 5
"""Turns of the iteration, of three products each: the default of ``torch.optim.Muon``."""


def matrix_bytes(matrix: Shape) -> int:
    """Bytes of a whole matrix as it travels.

    >>> matrix_bytes((8, 4))
    64
    """
    return math.prod(matrix) * DTYPE_BYTES[DTYPE]


def products(matrix: Shape) -> tuple[Operator, ...]:
    """The products of one turn, of a matrix with its long side last: ``x @ x.T``, its square, and that times ``x``.

    >>> [(product.outputs[0], product.flops) for product in products((8, 4))]
    [((4, 4), 256.0), ((4, 4), 128.0), ((4, 8), 256.0)]
    """
    short, long = sorted(matrix)
    return _product(short, long, short), _product(short, short, short), _product(short, short, long)


def _product(rows: int, inner: int, columns: int) -> Operator:
    inputs, outputs = ((rows, inner), (inner, columns)), ((rows, columns),)
    moved = sum(map(matrix_bytes, (*inputs, *outputs)))
    return Operator("aten.mm.default", "contraction", DTYPE, inputs, outputs, 2.0 * rows * inner * columns, moved)
