"""Operator: what a cost model sees of one operator on one rank."""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, ...]


class Operator(NamedTuple):
    """One operator as one rank runs it. A NamedTuple, since the planner makes one for each operator and strategy.

    Args:
        name: the operator, ``aten.mm.default``.
        family: its class, as the table of rules names it (``contraction``, ``pointwise``, ``view``); ``unknown`` without a row.
        dtype: of the operands, by its torch name.
        inputs, outputs: local shapes.
        flops: floating-point operations on the rank.
        bytes_moved: bytes the rank reads and writes.
        launches: kernels that run one after another, each with an equal part of both.
    """

    name: str
    family: str
    dtype: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    flops: float
    bytes_moved: float
    launches: int = 1
