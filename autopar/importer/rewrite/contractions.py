"""linear, matmul, addmm and einsum as contractions of two tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from autopar.dialect import contraction


def contract(a: Tensor, first: Sequence[str], b: Tensor, second: Sequence[str], result: Sequence[str]) -> Tensor:
    """A contraction of two tensors by factor letters, in the form the dialect wants.

    Dims of size 1 that the other operand has larger are dropped (broadcasting), and factors that only one operand has
    and the result has not are summed first, so that each operand's gradient is again a contraction.
    """
    a, b = autocast(a, b)
    sizes = {factor: max(n, 1) for factor, n in zip(first, a.shape, strict=True)}
    for factor, n in zip(second, b.shape, strict=True):
        sizes[factor] = max(sizes.get(factor, 1), n)
    a, first = _prepare(a, tuple(first), sizes, {*second, *result})
    b, second = _prepare(b, tuple(second), sizes, {*first, *result})
    return torch.ops.autopar.contract.default(a, b, contraction.write(first, second, tuple(result)))


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The operands in the dtype that ``torch.autocast`` computes contractions in, as they are outside of it."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t.to(dtype) if t is not None and t.dtype in narrow else t for t in tensors)


def uncast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A contraction that ``torch.autocast`` leaves in the dtypes of its operands, because its operator is not on the list of CPUs."""

    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return replacement


def _prepare(tensor: Tensor, factors: tuple[str, ...], sizes: Mapping[str, int], wanted: set[str]) -> tuple[Tensor, tuple[str, ...]]:
    broadcast = [dim for dim, factor in enumerate(factors) if tensor.shape[dim] == 1 and sizes[factor] > 1]
    alone = [dim for dim, factor in enumerate(factors) if factor not in wanted and dim not in broadcast]
    if broadcast:
        tensor = tensor.squeeze(broadcast)
        alone = [dim - sum(other < dim for other in broadcast) for dim in alone]
    if alone:
        tensor = tensor.sum(alone)
    dropped = {factors[dim] for dim in broadcast} | {factor for factor in factors if factor not in wanted}
    return tensor, tuple(factor for factor in factors if factor not in dropped)


Contract = Callable[[Tensor, Sequence[str], Tensor, Sequence[str], Sequence[str]], Tensor]
"""``contract``, or what does the same in a region of ranks' parts."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, by: Contract = contract) -> Tensor:
    """``x [..., k] -> [..., n]``; a weight in blocks, ``[p, n, k]``, gives ``[..., p, n]``."""
    batch, of_weight = _batch_letters(x.dim() - 1), ("p", "n", "k")[3 - weight.dim() :]
    out = by(x, (*batch, "k"), weight, of_weight, (*batch, *of_weight[:-1]))
    return out if bias is None else out + autocast(bias)[0]


def linear_over(x: Tensor, rows: Sequence[int], weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` of what is ``[..., k]`` with ``rows`` before the last dim."""
    return linear(x.reshape(*rows, -1), weight, bias)


def _batch_letters(dims: int) -> tuple[str, ...]:
    """Letters for leading dims: b, s and so on for the common cases, never k, m, n."""
    return tuple("bsthuvwxyzacdefg"[:dims])


def matmul(a: Tensor, b: Tensor, *, blocks: bool = False, by: Contract = contract) -> Tensor:
    """``a [..., m, k]`` times ``b [..., k, n]``; in blocks, ``b [..., k, p, n]`` gives ``[..., m, p, n]``."""
    columns, rank = ("p", "n") if blocks else ("n",), b.dim() - blocks
    letters = _batch_letters(max(a.dim(), rank, 2) - 2)
    first = ("k",) if a.dim() == 1 else (*letters[len(letters) - (a.dim() - 2) :], "m", "k")
    second = ("k",) if rank == 1 else (*letters[len(letters) - (rank - 2) :], "k", *columns)
    kept = [*letters, *(["m"] if a.dim() > 1 else []), *(columns if rank > 1 else [])]
    return by(a, first, b, second, kept)


def vdot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of ``conj(a) b``."""
    return matmul(a.conj(), b)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, blocks: bool = False) -> Tensor:
    return _added(autocast(bias)[0], beta, _scaled(matmul(a, b, blocks=blocks), alpha))


def addbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta bias + alpha sum over n of a[n] b[n]``."""
    return _added(autocast(bias)[0], beta, _scaled(einsum("nik,nkj->ij", (a, b)), alpha))


def addr(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta bias + alpha a b^T`` of vectors."""
    return _added(bias, beta, _scaled(a.unsqueeze(1) * b, alpha))


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``out[..., o] = sum over i and j of a[..., i] weight[o, i, j] b[..., j]``."""
    out = einsum("...i,oij,...j->...o", (a, weight, b))
    return out if bias is None else out + autocast(bias)[0]


def _added(bias: Tensor, beta: float, product: Tensor) -> Tensor:
    """``beta bias + product``; what is in a bias of which nothing is taken does not matter."""
    return product if beta == 0 else _scaled(bias, beta) + product


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def einsum(equation: str, operands: Sequence[Tensor], path: Sequence[int] | None = None, *, by: Contract = contract) -> Tensor:
    """Operands are contracted left to right, keeping at each step the factors that are still needed."""
    parsed = _parse_einsum(equation, operands)
    if parsed is None or len(operands) < 2:
        return torch.ops.aten.einsum.default(equation, operands)
    factors, result = parsed
    tensor, have = operands[0], factors[0]
    for index in range(1, len(operands)):
        later = {factor for rest in factors[index + 1 :] for factor in rest} | set(result)
        last = index == len(operands) - 1
        keep = result if last else tuple(f for f in dict.fromkeys((*have, *factors[index])) if f in later)
        tensor = by(tensor, have, operands[index], factors[index], keep)
        have = keep
    return tensor


def _parse_einsum(equation: str, operands: Sequence[Tensor]) -> tuple[list[tuple[str, ...]], tuple[str, ...]] | None:
    """Factors of operands and result, ellipses spelled out; None when a factor repeats inside one operand (a diagonal)."""
    text, arrow, right = equation.replace(" ", "").partition("->")
    terms = text.split(",")
    spare = [letter for letter in ascii_letters if letter not in equation]
    widest = max(operand.dim() - len(term.replace("...", "")) for term, operand in zip(terms, operands, strict=True))
    rest = tuple(spare[:widest]) if "..." in text else ()

    def spell(term: str, dims: int) -> tuple[str, ...]:
        before, dots, after = term.partition("...")
        missing = dims - len(before) - len(after)
        return (*before, *(rest[len(rest) - missing :] if dots else ()), *after)

    factors = [spell(term, operand.dim()) for term, operand in zip(terms, operands, strict=True)]
    if any(len(set(term)) != len(term) for term in factors):
        return None
    if not arrow:
        every = [factor for term in factors for factor in term]
        return factors, (*rest, *sorted(factor for factor in set(every) - set(rest) if every.count(factor) == 1))
    return factors, spell(right, len(right.replace("...", "")) + len(rest))
