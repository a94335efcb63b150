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
Places = tuple[Tensor | None, Tensor]
"""Rows in the order of the experts at hand, those of others last ``[s]``, None where they lie so; where the rows of each of these experts
end ``[experts]``."""
FindPlaces = Callable[..., Places]
"""As ``places_of``."""
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

    def of(self, tensor: Tensor) -> Tensor:
        """The view, or a copy where memory does not allow it."""
        tensor = tensor if self.order is None else tensor.permute(self.order)
        return tensor if self.shape is None else tensor.reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """What an equation does to tensors of some shapes.

    Args:
        a, b: the operands as matrices, or one for each expert.
        outer: whether the result has a matrix for each expert.
        shape: the result's, with its factors in the order in which they come; order: of its dims, then, None where they have it.
    """

    a: View
    b: View
    outer: bool
    shape: tuple[int, ...]
    order: tuple[int, ...] | None


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
def _layout(a: Sequence[int], b: Sequence[int], ids: Sequence[int], equation: str, experts: int) -> Layout:
    sizes = _sizes((a, b, ids), equation, experts)
    first, second, rows, result = parse(equation)
    outer = not set(rows) <= set(result)
    inner = tuple(name for name in first if name not in rows)
    columns = tuple(name for name in (second if outer else result) if name not in rows)
    order = (EXPERTS, *inner, *columns) if outer else (*rows, *columns)
    right = _view(sizes, second, rows, columns) if outer else _view(sizes, second, (EXPERTS,), inner, columns)
    turned = _unless_sorted(tuple(order.index(name) for name in result))
    shape = tuple(sizes[name] for name in order)
    return Layout(_view(sizes, first, rows, inner), right, outer, shape, turned)


def _expert_contract(
    a: Tensor, b: Tensor, ids: Tensor, equation: str, experts: int, first_expert: int, find_places: FindPlaces | None = None
) -> Tensor:  # fmt: skip
    """The product of each row with its expert's matrix, or the sums over each expert's rows.

    Args:
        find_places: ``places_of``, or one that remembers (``KeptPlaces``).
    """
    layout = _layout(a.shape, b.shape, ids.shape, equation, experts)
    x, y = layout.a.of(a), layout.b.of(b)
    _, ends = (find_places or places_of)(ids, first_expert, experts, dispatched=True)
    made = _outer(x, y, ends, experts) if layout.outer else _product(x, y, ends)
    made = made if made.shape == layout.shape else made.reshape(layout.shape)
    return (made if layout.order is None else made.permute(layout.order)).contiguous()


def _product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """``out[s] = x[s] w[e]`` of row ``s`` of expert ``e``. torch's grouped kernel waits for no value on a GPU."""
    if runs_grouped(x.dtype, x.shape[1], w.shape[2]):
        return torch.nn.functional.grouped_mm(x, w, offs=ends)
    out = x.new_zeros(x.shape[0], w.shape[2])
    for expert, rows in _by_expert(ends):
        out[rows] = x[rows] @ w[expert]
    return out


def _outer(x: Tensor, y: Tensor, ends: Tensor, experts: int) -> Tensor:
    """``out[e] = sum of x[s]^T y[s]`` over the rows of expert ``e``. On a GPU the grouped kernel leaves out experts without rows."""
    if not runs_grouped(x.dtype, x.shape[1], y.shape[1]):
        out = x.new_zeros(experts, x.shape[1], y.shape[1])
        for expert, rows in _by_expert(ends):
            out[expert] = x[rows].t() @ y[rows]
        return out
    made = torch.nn.functional.grouped_mm(x.t(), y, offs=ends)
    if x.device.type == "cpu":
        return made
    rows = torch.diff(ends, prepend=ends.new_zeros(1))
    return made.masked_fill((rows == 0).reshape(-1, 1, 1), 0)


def places_of(ids: Tensor, first: int, experts: int, dispatched: bool = False) -> Places:
    """Where the rows of the experts at hand are.

    Args:
        ids: each row's expert.
        dispatched: whether rows lie by expert, and all are of experts at hand.
    """
    numbers = ids if ids.dim() == 1 else ids.reshape(-1)
    if dispatched:
        here = torch.arange(max(first, 0), max(first, 0) + experts, device=ids.device, dtype=ids.dtype)
        return None, torch.searchsorted(numbers, here, right=True, out_int32=True)
    own = numbers if first == WHOLE else torch.where((numbers >= first) & (numbers < first + experts), numbers - first, experts)
    own, order = own.sort(stable=True)
    return order, torch.searchsorted(own, torch.arange(experts, device=ids.device, dtype=own.dtype), right=True, out_int32=True)


class KeptPlaces:
    """``places_of``, computed once for all products that read the same numbers, until ``let_go``.

    A row takes 8 bytes, and its number is kept alive. Its values take kilobytes.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], tuple[Tensor, int, Places]] = {}

    def find(self, ids: Tensor, first: int, experts: int, dispatched: bool = False) -> Places:
        """As ``places_of``."""
        if ids.is_inference():  # it does not say whether it was written over
            return places_of(ids, first, experts, dispatched)
        key = id(ids), first, experts
        held = self._found.get(key)
        if held is None or held[1] != ids._version:
            held = self._found[key] = ids, ids._version, places_of(ids, first, experts, dispatched)
        return held[2]

    def let_go(self) -> None:
        """Forgets all places."""
        self._found.clear()


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
