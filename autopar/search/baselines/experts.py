"""Mixture of experts: which weights hold one matrix per expert, and which operators read them."""

from __future__ import annotations

from typing import NamedTuple

from autopar.graph import Graph, Op
from autopar.search.choices.space import CONTRACTION

EXPERT_PRODUCT = "autopar.expert_contract.default"


class ExpertFactors(NamedTuple):
    """Factors of a product in which each row names its expert (``autopar.expert_contract``).

    Args:
        inputs: factors of its three inputs; the last input holds the expert of each row.
        result: factors of its result.
    """

    inputs: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]


def expert_factors(op: Op) -> ExpertFactors | None:
    """The factors of an expert product; None for any other operator."""
    if op.target != EXPERT_PRODUCT:
        return None
    operands, _, result = _equation(op).partition("->")
    return ExpertFactors(tuple(tuple(term.split()) for term in operands.split(",")), tuple(result.split()))


def is_expert_weight(graph: Graph, tensor: str) -> bool:
    """Whether a parameter holds one matrix per expert.

    Such a parameter has three dims or more. Every reader has its first dim as a batch factor, or is an expert product.
    """
    reads = [(graph.ops[index], position) for index, position in graph.consumers[tensor]]
    return len(graph.tensors[tensor].shape) > 2 and bool(reads) and all(is_expert_operand(op, position) for op, position in reads)


def is_expert_operand(op: Op, position: int) -> bool:
    """Whether the first dim of an operand is the expert, in a product that treats each expert alone."""
    if op.target == EXPERT_PRODUCT:
        return _equation(op).split(",")[position].split()[:1] == ["e"]
    if op.target != CONTRACTION:
        return False
    operands, _, result = _equation(op).partition("->")
    terms = [term.split() for term in operands.split(",")]
    first = terms[position][:1] if position < len(terms) else []
    return bool(first) and all(first[0] in term for term in terms) and first[0] in result.split()


def _equation(op: Op) -> str:
    return next((value for value in (*op.args, *dict(op.kwargs).values()) if isinstance(value, str) and "->" in value), "")
