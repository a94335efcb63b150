"""``autopar.expert_contract``: products in which each row has its expert's matrix, and the gradients of these.

The equation has the operands, the experts' numbers and the result, as the operator's rule. ``e j k, e k n, e j -> e j n`` multiplies rows
by their expert's matrices. ``e j k, e j n, e j -> e k n`` sums products of rows by expert. ``e`` are the experts, and ``e j`` the rows,
which lie by expert (``autopar.dispatch``). ``ids`` gives each row's expert. A rank has ``experts`` experts from ``first_expert`` on, and
rows of these alone. In captured graphs these are all and 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import WHOLE, define

EXPERTS = "e"
FIRST_EXPERT = 5
"""Position of the first expert among the arguments, behind the number of experts."""
GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Those for which torch has a grouped product."""
GROUPED_BYTES = 16
"""Rows of its operands begin at multiples of this."""
Terms = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]


@lru_cache(maxsize=4096)
def parse(equation: str) -> Terms:
    """Factors of both operands, of the experts' numbers and of the result.

    >>> parse("e j k, e k n, e j -> e j n")
    (('e', 'j', 'k'), ('e', 'k', 'n'), ('e', 'j'), ('e', 'j', 'n'))
    """
    operands, _, result = equation.partition("->")
    a, b, ids = (tuple(term.split()) for term in operands.split(","))
    return a, b, ids, tuple(result.split())


def write(a: tuple[str, ...], b: tuple[str, ...], ids: tuple[str, ...], result: tuple[str, ...]) -> str:
    """The equation of these factors, the inverse of ``parse``."""
    return f"{' '.join(a)}, {' '.join(b)}, {' '.join(ids)} -> {' '.join(result)}"


@dataclass(frozen=True)
class View:
    """A tensor with dims of groups of its factors.

    Args:
        order: of its dims, None where it has it; shape: then, None where it has it.
    """

    order: tuple[int, ...] | None
    shape: tuple[int, ...] | None

    def take(self, tensor: Tensor) -> Tensor:
        """The view, or a copy where memory does not allow it."""
        tensor = tensor if self.order is None else tensor.permute(*self.order)
        return tensor if self.shape is None else tensor.reshape(*self.shape)  # torch reads sizes one by one sooner than a tuple


@dataclass(frozen=True)
class Layout:
    """What an equation does to tensors of some shapes.

    Args:
        a, b: the operands as matrices, or one for each expert.
        outer: whether the result has a matrix for each expert.
        shape: of what is computed, with its factors in the order in which they come, None where it has it; order: of the result's dims,
            then, None where they have it.
        grouped: whether torch's grouped kernel takes the operands.
    """

    a: View
    b: View
    outer: bool
    shape: tuple[int, ...] | None
    order: tuple[int, ...] | None
    grouped: bool


def _sizes(shapes: Sequence[Sequence[int]], equation: str, experts: int) -> dict[str, int]:
    sizes = {EXPERTS: experts}
    for factors, shape in zip(parse(equation), shapes, strict=False):
        fits = len(factors) == len(shape)
        if not fits or any(sizes.setdefault(name, size) != size for name, size in zip(factors, shape, strict=True)):
            a, b, ids = map(tuple, shapes)
            raise ValueError(f"expert_contract {equation!r} does not fit {a}, {b} and {ids}")
    return sizes


def _view(sizes: Mapping[str, int], factors: tuple[str, ...], *groups: tuple[str, ...]) -> View:
    """A tensor with one dim for each group of its factors."""
    order = tuple(factors.index(name) for group in groups for name in group)
    shape = tuple(math.prod(sizes[name] for name in group) for group in groups)
    return View(_unless_sorted(order), None if all(len(group) == 1 for group in groups) else shape)


def _unless_sorted(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order


@lru_cache(maxsize=4096)
def settle_layout(a: Sequence[int], b: Sequence[int], ids: Sequence[int], equation: str, experts: int, dtype: torch.dtype) -> Layout:
    """Raises ValueError: the equation does not fit the shapes ``a``, ``b`` and ``ids``."""
    sizes = _sizes((a, b, ids), equation, experts)
    first, second, rows, result = parse(equation)
    outer = not set(rows) <= set(result)
    inner = tuple(name for name in first if name not in rows)
    columns = tuple(name for name in (second if outer else result) if name not in rows)
    order = (EXPERTS, *inner, *columns) if outer else (*rows, *columns)
    right = _view(sizes, second, rows, columns) if outer else _view(sizes, second, (EXPERTS,), inner, columns)
    turned = _unless_sorted(tuple(order.index(name) for name in result))
    lengths = [math.prod(sizes[name] for name in group) for group in (inner, columns)]
    made = (experts, *lengths) if outer else (math.prod(sizes[name] for name in rows), lengths[1])
    shape = tuple(sizes[name] for name in order)
    left, grouped = _view(sizes, first, rows, inner), runs_grouped(dtype, *lengths)
    return Layout(left, right, outer, None if shape == made else shape, turned, grouped)


class Places:
    """Where rows of experts are."""

    def find_order(self, ids: Tensor, first: int, experts: int) -> Tensor:
        """The choices whose experts are at hand, by expert ``[choices at hand]``.

        Args:
            ids: each choice's expert ``[choices]``.
            first: ``WHOLE``, or the first expert at hand. The host waits for the number of choices then.
        """
        own, order = sort_choices(ids, first, experts)
        return order if first == WHOLE else order[: int(torch.searchsorted(own, first + experts))]

    def find_ends(self, numbers: Tensor, first: int, experts: int) -> Tensor:
        """Where the rows of each expert at hand end, int32 ``[experts]``.

        Args:
            numbers: each row's expert. Rows lie by expert, and all are of experts at hand.
        """
        return find_ends(numbers, list_experts(numbers, first, experts))


NOT_KEPT = Places()


def sort_choices(ids: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """Experts of choices in rising order, and the choices in that order, both ``[choices]``. Those of experts not at hand come last."""
    own = ids if first == WHOLE else torch.where((ids >= first) & (ids < first + experts), ids, first + experts)
    found: tuple[Tensor, Tensor] = own.sort(stable=True)
    return found


def list_experts(numbers: Tensor, first: int, experts: int) -> Tensor:
    """The numbers of the experts at hand ``[experts]``."""
    first = max(first, 0)
    return torch.arange(first, first + experts, device=numbers.device, dtype=numbers.dtype)


def find_ends(numbers: Tensor, experts: Tensor) -> Tensor:
    """Where each expert's numbers end among numbers in rising order, int32 ``[experts]``."""
    return torch.searchsorted(numbers.reshape(-1), experts, right=True, out_int32=True)


class KeptPlaces(Places):
    """``Places`` that are computed once for all operators that read the same numbers, until ``let_go``.

    A choice takes 8 bytes, and its number is kept alive. The values of its row take kilobytes.
    """

    def __init__(self) -> None:
        self._orders: Kept = {}
        self._ends: Kept = {}
        self._experts: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}

    def find_order(self, ids: Tensor, first: int, experts: int) -> Tensor:
        """As of ``Places``."""
        return _find_once(self._orders, NOT_KEPT.find_order, ids, first, experts)

    def find_ends(self, numbers: Tensor, first: int, experts: int) -> Tensor:
        """As of ``Places``."""
        return _find_once(self._ends, self._find_ends, numbers, first, experts)

    def _find_ends(self, numbers: Tensor, first: int, experts: int) -> Tensor:
        key = first, experts, numbers.device, numbers.dtype
        here = self._experts.get(key)
        if here is None:
            here = self._experts[key] = list_experts(numbers, first, experts)
        return find_ends(numbers, here)

    def let_go(self) -> None:
        """Forgets all places."""
        self._orders.clear()
        self._ends.clear()
        self._experts.clear()


Kept = dict[tuple[int, int, int], tuple[Tensor, int, Tensor]]
"""By identity of numbers, which are kept so that no others take it, and the experts at hand: version of the numbers, and what was found."""


def _find_once(kept: Kept, find: Callable[[Tensor, int, int], Tensor], numbers: Tensor, first: int, experts: int) -> Tensor:
    if numbers.is_inference():  # it does not say whether it was written over
        return find(numbers, first, experts)
    key = id(numbers), first, experts
    held = kept.get(key)
    if held is None or held[1] != numbers._version:
        held = kept[key] = numbers, numbers._version, find(numbers, first, experts)
    return held[2]


def _expert_contract(
    a: Tensor, b: Tensor, ids: Tensor, equation: str, experts: int, first_expert: int, places: Places = NOT_KEPT
) -> Tensor:  # fmt: skip
    """The product of each row with its expert's matrix, or the sums over each expert's rows."""
    layout = settle_layout(a.shape, b.shape, ids.shape, equation, experts, a.dtype)
    x, y, ends = layout.a.take(a), layout.b.take(b), places.find_ends(ids, first_expert, experts)
    if layout.grouped:
        made = sum_grouped(x, y, ends) if layout.outer else multiply_grouped(x, y, ends)
    else:
        made = _sum(x, y, ends) if layout.outer else _product(x, y, ends)
    made = made if layout.shape is None else made.view(*layout.shape)
    return (made if layout.order is None else made.permute(*layout.order)).contiguous()


def _product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """``out[s] = x[s] w[e]`` of row ``s`` of expert ``e``."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    for expert, rows in _by_expert(ends):
        out[rows] = x[rows] @ w[expert]
    return out


def _sum(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """``out[e] = sum of x[s]^T y[s]`` over the rows of expert ``e``."""
    out = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for expert, rows in _by_expert(ends):
        out[expert] = x[rows].t() @ y[rows]
    return out


def multiply_grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """As ``_product``. torch's grouped kernel waits for no value on a GPU.

    Args:
        x: ``[s, k]``, by expert; w: ``[e, k, n]``.
        ends: where each expert's rows end, int32 ``[e]``.
    """
    return torch.nn.functional.grouped_mm(x, w, offs=ends)


def sum_grouped(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """As ``_sum``. torch's grouped kernel leaves out experts without rows on a GPU.

    Args:
        x, y: ``[s, k]`` and ``[s, n]``, by expert.
        ends: as of ``multiply_grouped``.
    """
    made = torch.nn.functional.grouped_mm(x.t(), y, offs=ends)
    if x.device.type == "cpu":
        return made
    rows = torch.diff(ends, prepend=ends.new_zeros(1))
    return made.masked_fill((rows == 0).reshape(-1, 1, 1), 0)


def _by_expert(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Of each expert at hand that has any, its number among them and its rows."""
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end > begin:
            yield expert, slice(begin, end)


def runs_grouped(dtype: torch.dtype, *columns: int) -> bool:
    """Whether torch's grouped kernel takes matrices of this dtype and these numbers of columns."""
    return dtype in GROUPED_DTYPES and all(count * dtype.itemsize % GROUPED_BYTES == 0 for count in columns)


def _shapes(a: Tensor, b: Tensor, ids: Tensor, equation: str, experts: int, first_expert: int) -> Tensor:
    sizes = _sizes((a.shape, b.shape, ids.shape), equation, experts)
    return a.new_empty([sizes[name] for name in parse(equation)[3]])


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ids, context.equation, context.experts, _ = inputs
    needs_a, needs_b = context.needs_input_grad[:2]
    context.save_for_backward(a if needs_b else None, b if needs_a else None, ids)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b, ids = context.saved_tensors
    first, second, rows, result = parse(context.equation)
    needs_a, needs_b = context.needs_input_grad[:2]
    contract = torch.ops.autopar.expert_contract.default
    to_a = contract(gradient, b, ids, write(result, second, rows, first), context.experts, 0) if needs_a else None
    to_b = contract(a, gradient, ids, write(first, result, rows, second), context.experts, 0) if needs_b else None
    return to_a, to_b, None, None, None, None


define(
    "expert_contract(Tensor a, Tensor b, Tensor ids, str equation, int experts, int first_expert) -> Tensor",
    _expert_contract, _shapes, _gradient, _save, looks=True,
)  # fmt: skip
