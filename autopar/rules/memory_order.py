"""How tensors lie in memory: the strides of an operator's results from those of what it reads, as torch makes them.

Views lie where their source does: turned, with gaps, or with several elements at one place. Pointwise results lie as their operands do.
All else is made in order, but for what the table says (``Row.lies``). Whoever needs a tensor in order, a collective for one, copies it
first where it lies otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from autopar.graph import Op
from autopar.rules.lookup import find_row
from autopar.rules.signature import Row, call_of

Shape = tuple[int, ...]
Strides = tuple[int, ...]
"""Elements of memory from one entry to the next, for each dim."""


class MemoryOrder(NamedTuple):
    """How a rank's part of a tensor lies in memory.

    Args:
        strides: None where the elements lie in order, and where it is not known how they lie.
        in_order: the elements lie one behind another, the last dim fastest: what torch calls contiguous.
        repeats: several elements lie at one place.
    """

    strides: Strides | None = None
    in_order: bool = True
    repeats: bool = False


IN_ORDER = MemoryOrder()
UNKNOWN = MemoryOrder(in_order=False)

BY_FAMILY: Mapping[str, str] = {
    "pointwise": "operands",
    "quantisation": "operands 0",
    "sort": "operands 0",
    "linear algebra": "untold",
    "fft": "untold",
    "own": "as given",
    "pooling": "as given",
    "convolution": "as given",
    "recurrence": "as given",
}
"""``Row.lies`` of operators whose row does not say. Results of other families lie in order.

================  ======================================================================================================
in order          results lie in order
operands          as torch's loops over all operands make them: like these, without gaps
operands 1 0      the same, in the order in which a kernel takes them; other operands tell nothing
as given          in order where all operands are; nobody says how they lie otherwise
untold            nobody says; single rows lie in order
0 2 1 3           without gaps, the dims from the slowest to the fastest
================  ======================================================================================================

Where results differ, ``;`` stands between them.
"""


def find_orders(
    op: Op, shapes: Sequence[Shape], given: Sequence[MemoryOrder], results: Sequence[Shape], exchanges: bool = False
) -> tuple[MemoryOrder, ...]:  # fmt: skip
    """How the results of an operator lie in memory.

    Args:
        shapes, given: of its operands on a rank, and how they lie.
        results: the shapes of its results on a rank.
        exchanges: ranks exchange parts inside of it, so that other kernels make its results.
    """
    row = find_row(op.target)
    if row is not None and (row.alias or row.stores):
        return _of_view(op, row, shapes, given, results)
    words = ("as given",) if exchanges and not _in_turned_order(row) else lies(row)
    return tuple(_of_result(words[min(place, len(words) - 1)], shape, shapes, given) for place, shape in enumerate(results))


def view_copies(op: Op, shapes: Sequence[Shape], given: Sequence[MemoryOrder], results: Sequence[Shape]) -> bool:
    """Whether a view copies its source: dims that become one do not lie as one in memory. They did when the graph was traced.

    Args:
        shapes, given, results: see ``find_orders``.
    """
    row = find_row(op.target)
    if row is None or _VIEWS.get(row.name) is not _reshaped or given[0].in_order:
        return False
    strides = strides_of(shapes[0], given[0])
    return strides is not None and _viewed(shapes[0], strides, results[0]) is None


def keeps_order(op: Op) -> bool:
    """Whether results lie in order wherever all operands do."""
    row = find_row(op.target)
    views = row is not None and (row.alias or row.stores)
    return not views and all(word == "in order" or word == "as given" or word.startswith("operands") for word in lies(row))


def _in_turned_order(row: Row | None) -> bool:
    """Whether the table says for each dim how fast it is: so lies what a kernel of our own makes in whatever way."""
    return row is not None and row.lies[:1].isdigit()


def lies(row: Row | None) -> tuple[str, ...]:
    """How each result of an operator lies that is no view; the last word holds for all after it. Nobody knows operators without a row."""
    text = "as given" if row is None else row.lies or BY_FAMILY.get(row.family, "in order")
    return tuple(word.strip() for word in text.split(";"))


def _of_result(word: str, shape: Shape, shapes: Sequence[Shape], given: Sequence[MemoryOrder]) -> MemoryOrder:
    kind, *rest = word.split()
    if word == "in order":
        return IN_ORDER
    if word == "as given":
        return IN_ORDER if all(order.in_order for order in given) else UNKNOWN
    if word == "untold":
        return IN_ORDER if len(shape) < 2 else UNKNOWN
    if kind == "operands":
        places = list(map(int, rest)) or range(len(shapes))
        fits = all(len(shapes[place]) <= len(shape) for place in places)
        return _of_operands(shape, [shapes[place] for place in places], [given[place] for place in places]) if fits else IN_ORDER
    turned = tuple(map(int, word.split()))
    return order_of(shape, turned_strides(shape, turned))


def order_of(shape: Shape, strides: Strides | None) -> MemoryOrder:
    """How a tensor lies that has these strides; ``UNKNOWN`` without."""
    if strides is None:
        return UNKNOWN
    if strides == dense_strides(shape) or not math.prod(shape):
        return IN_ORDER
    return MemoryOrder(strides, _in_order(shape, strides), _repeats(shape, strides))


@cache
def dense_strides(shape: Shape) -> Strides:
    """The strides of a tensor that lies in order."""
    return turned_strides(shape, tuple(range(len(shape))))


def turned_strides(shape: Shape, turned: Sequence[int]) -> Strides:
    """The strides of a tensor without gaps, its dims from the slowest to the fastest being ``turned``."""
    found, stride = [1] * len(shape), 1
    for dim in reversed(turned):
        found[dim] = stride
        stride *= max(shape[dim], 1)
    return tuple(found)


def strides_of(shape: Shape, order: MemoryOrder) -> Strides | None:
    """The strides of a tensor; None where nobody knows."""
    return dense_strides(shape) if order.strides is None and order.in_order else order.strides


def _in_order(shape: Shape, strides: Strides) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def _repeats(shape: Shape, strides: Strides) -> bool:
    last = 0
    """The last element that the dims so far reach."""
    for stride, extent in sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        if stride <= last or not stride:
            return True
        last += stride * (extent - 1)
    return False


# --- views --------------------------------------------------------------------------------------------------------------


def _of_view(op: Op, row: Row, shapes: Sequence[Shape], given: Sequence[MemoryOrder], results: Sequence[Shape]) -> tuple[MemoryOrder, ...]:
    strides, rule = strides_of(shapes[0], given[0]), _VIEWS.get(row.name)
    if strides is None or (rule is None and not row.stores):
        return tuple(IN_ORDER if math.prod(shape) <= 1 else UNKNOWN for shape in results)
    if rule is None:
        return (given[0],)
    arguments = call_of(op, row, (), ()).arguments
    return tuple(order_of(shape, rule(arguments, shapes[0], strides, shape)) for shape in results)


_Rule = Callable[[Mapping[str, Any], Shape, Strides, Shape], Strides | None]
"""Arguments, shape and strides of the source, shape of the result -> strides of the result; None where nobody knows."""


def _same(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    return strides


def _reshaped(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    """A view where memory allows, else a copy, which lies in order."""
    found = _viewed(shape, strides, result)
    return dense_strides(result) if found is None else found


def _viewed(shape: Shape, strides: Strides, result: Shape) -> Strides | None:
    """The strides of a view: each run of dims that lie as one is a run of dims of the result. None where memory does not allow one."""
    found, place = [1] * len(result), len(result)
    elements, base = 1, strides[-1] if strides else 1
    for dim in reversed(range(len(shape))):
        elements *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == elements * base):
            continue
        covered = 1
        while place and (covered < elements or result[place - 1] == 1):
            place -= 1
            found[place] = covered * base
            covered *= result[place]
        if covered != elements:
            return None
        elements, base = 1, strides[dim - 1]
    return dense_strides(result) if place and shape else tuple(found)


def _permuted(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    return tuple(strides[dim] for dim in arguments["dims"])


def _transposed(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    found, one, other = list(strides), arguments["dim0"], arguments["dim1"]
    if found:
        found[one], found[other] = found[other], found[one]
    return tuple(found)


def _turned(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    return strides[::-1]


def _unsqueezed(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    dim = arguments["dim"] % len(result)
    new = shape[dim] * strides[dim] if dim < len(shape) else 1
    return (*strides[:dim], new, *strides[dim:])


def _squeezed(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides | None:
    dims = arguments.get("dim", tuple(range(len(shape))))
    gone = {dim % max(len(shape), 1) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    left = tuple(stride for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)) if extent != 1 or dim not in gone)
    return left if len(left) == len(result) else None


def _expanded(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    new = len(result) - len(shape)
    padded = tuple(zip((0,) * new + shape, (0,) * new + strides, result, strict=True))
    return tuple(stride if extent == length else 0 for extent, stride, length in padded)


def _unfolded(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    if not shape:
        return (1,)
    dim = arguments["dimension"] % len(shape)
    return (*strides[:dim], strides[dim] * arguments["step"], *strides[dim + 1 :], strides[dim])


def _sliced(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    dim = arguments["dim"] % len(shape)
    return (*strides[:dim], strides[dim] * arguments["step"], *strides[dim + 1 :])


def _selected(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    dim = arguments["dim"] % len(shape)
    return (*strides[:dim], *strides[dim + 1 :])


def _as_real(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    return (*(2 * stride for stride in strides), 1)


def _as_complex(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides:
    return tuple(stride // 2 for stride in strides[:-1])


def _retyped(arguments: Mapping[str, Any], shape: Shape, strides: Strides, result: Shape) -> Strides | None:
    return strides if shape == result else dense_strides(result) if strides == dense_strides(shape) else None


_VIEWS: Mapping[str, _Rule] = {
    **dict.fromkeys(("aten.alias", "aten.detach", "aten.lift_fresh", "autopar.shard", "autopar.on_axes"), _same),
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape"), _reshaped),
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.chunk"), _same),
    **dict.fromkeys(("aten.squeeze", "aten.squeeze.default"), _squeezed),
    **dict.fromkeys(("aten.select", "aten.unbind"), _selected),
    "aten.view.dtype": _retyped,
    "aten.permute": _permuted,
    "aten.transpose": _transposed,
    "aten.t": _turned,
    "aten.unsqueeze": _unsqueezed,
    "aten.expand": _expanded,
    "aten.unfold": _unfolded,
    "aten.slice": _sliced,
    "aten.view_as_real": _as_real,
    "aten.view_as_complex": _as_complex,
}
"""By the name of a view."""


# --- pointwise ----------------------------------------------------------------------------------------------------------


def _of_operands(shape: Shape, shapes: Sequence[Shape], given: Sequence[MemoryOrder]) -> MemoryOrder:
    """How a pointwise result lies: as its operands if these lie alike without gaps, else without gaps in the order of their strides."""
    if all(order is IN_ORDER for order in given):
        return IN_ORDER
    known = [strides_of(one, order) for one, order in zip(shapes, given, strict=True)]
    operands = [strides for strides in known if strides is not None]
    if len(operands) < len(known):
        return UNKNOWN
    if all(one == shape for one in shapes):
        if all(order.in_order for order in given):
            return IN_ORDER
        if all(strides == operands[0] and _is_filled(shape, strides) for strides in operands):
            return order_of(shape, operands[0])
    spread = [_spread(*pair, shape) for pair in zip(shapes, operands, strict=True)]
    return order_of(shape, turned_strides(shape, _slowest_first(shape, spread)))


def _spread(shape: Shape, strides: Strides, result: Shape) -> Strides:
    """The strides of an operand that is broadcast."""
    new = len(result) - len(shape)
    return (0,) * new + tuple(
        0 if extent == 1 != length else stride for extent, stride, length in zip(shape, strides, result[new:], strict=True)
    )


def _is_filled(shape: Shape, strides: Strides) -> bool:
    """Whether each place of a stretch of memory holds one element."""
    long = sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1)
    ends = [1, *(stride * extent for stride, extent in long)]
    return all(stride == end for (stride, _), end in zip(long, ends, strict=False))


def _slowest_first(shape: Shape, operands: Sequence[Strides]) -> list[int]:
    """The dims by stride, the first operand that tells two apart deciding; as torch sorts them."""

    def compare(one: int, other: int) -> int:
        """Above 0 where ``one`` must be slower than ``other``, below where faster, 0 where no operand says."""
        for strides in operands:
            if not strides[one] or not strides[other]:
                continue
            if strides[one] != strides[other]:
                return 1 if strides[one] > strides[other] else -1
            if shape[one] > shape[other]:
                return 1
        return 0

    fastest = list(reversed(range(len(shape))))
    for first in range(1, len(fastest)):
        place = first
        for before in reversed(range(first)):
            found = compare(fastest[before], fastest[place])
            if found > 0:
                fastest[before], fastest[place] = fastest[place], fastest[before]
                place = before
            elif found < 0:
                break
    return fastest[::-1]
