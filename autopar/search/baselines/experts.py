"""What of a graph are a mixture's experts: weights that hold a matrix for each, and the operators that read them."""

from __future__ import annotations

from typing import NamedTuple

from autopar.graph import Graph, Op
from autopar.search.choices.space import CONTRACTION

OF_ROWS = "autopar.expert_contract.default"


class Terms(NamedTuple):
    """The factors of an operator's rows by their experts: of its three inputs, the last being the rows' experts, and of its result."""

    inputs: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]


def terms_of(op: Op) -> Terms | None:
    """Of an operator in which each row has its own expert's matrix; None of any other."""
    if op.target != OF_ROWS:
        return None
    operands, _, result = _equation(op).partition("->")
    return Terms(tuple(tuple(term.split()) for term in operands.split(",")), tuple(result.split()))


def weight_of_experts(graph: Graph, tensor: str) -> bool:
    """Whether a parameter holds one matrix for each expert: contractions read it with a batch factor as its first dim, or rows that have
    their own experts do."""
    reads = [(graph.ops[index], position) for index, position in graph.consumers[tensor]]
    return len(graph.tensors[tensor].shape) > 2 and bool(reads) and all(by_expert(op, position) for op, position in reads)


def by_expert(op: Op, position: int) -> bool:
    """Whether an operand has the experts as its first dim, of a product that does for each what it does with its own."""
    if op.target == OF_ROWS:
        return _equation(op).split(",")[position].split()[:1] == ["e"]
    if op.target != CONTRACTION:
        return False
    operands, _, result = _equation(op).partition("->")
    terms = [term.split() for term in operands.split(",")]
    first = terms[position][:1] if position < len(terms) else []
    return bool(first) and all(first[0] in term for term in terms) and first[0] in result.split()


def _equation(op: Op) -> str:
    return next((value for value in (*op.args, *dict(op.kwargs).values()) if isinstance(value, str) and "->" in value), "")
