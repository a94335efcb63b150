"""How results lie in memory, against torch's own strides: every row of the table, and views one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autopar.graph import Op, Ref
from autopar.rules import find_orders, keeps_order
from autopar.rules.lookup import find_row
from autopar.rules.memory_order import UNKNOWN, MemoryOrder, order_of
from autopar.runtime.instructions.operators import find_function
from tests.rules.cases import CASES
from tests.rules.drawing import Case, drawn


def _in_turn(tensor: torch.Tensor, turned: list[int]) -> torch.Tensor:
    """The same tensor, its dims from the slowest to the fastest being ``turned``."""
    return tensor.permute(turned).contiguous().permute([turned.index(dim) for dim in range(tensor.dim())])


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return _in_turn(tensor, list(reversed(range(tensor.dim()))))


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    return _in_turn(tensor, [*range(tensor.dim() - 2), tensor.dim() - 1, tensor.dim() - 2]) if tensor.dim() > 1 else tensor


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]] if tensor.dim() else tensor


LYING: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "in order": lambda tensor, place: tensor,
    "turned": lambda tensor, place: _turned(tensor),
    "swapped": lambda tensor, place: _swapped(tensor),
    "with gaps": lambda tensor, place: _with_gaps(tensor),
    "the first turned": lambda tensor, place: tensor if place else _turned(tensor),
    "the others turned": lambda tensor, place: _turned(tensor) if place else tensor,
}
"""From a tensor and its place among the operands to the same values elsewhere in memory."""
NOT_SAFE = ("unpool", "fractional_max_pool", "adaptive_max_pool3d_backward", "recurrence")
"""Kernels of torch that end the process, or read elsewhere, where indices of windows do not lie in order."""


def _laid(argument: Any, lay: Callable[[torch.Tensor, int], torch.Tensor], operands: list[torch.Tensor]) -> tuple[Any, Any]:
    """An argument with its tensors laid out, and with ``Ref`` in place of them."""
    if isinstance(argument, torch.Tensor):
        operands.append(lay(argument, len(operands)))
        return operands[-1], Ref(len(operands) - 1)
    if isinstance(argument, (list, tuple)):
        pairs = [_laid(item, lay, operands) for item in argument]
        return [pair[0] for pair in pairs], tuple(pair[1] for pair in pairs)
    return argument, argument


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors(item)


def _order(tensor: torch.Tensor) -> MemoryOrder:
    return order_of(tuple(tensor.shape), tensor.stride())


def _run(case: Case, lies: str) -> tuple[Op, list[torch.Tensor], list[torch.Tensor]] | None:
    """The operator on operands that lie so, with these and what it makes; None where torch's kernel refuses them."""
    operands: list[torch.Tensor] = []
    pairs = [_laid(argument, LYING[lies], operands) for argument in case.drawn()]
    named = {name: _laid(drawn(argument), LYING[lies], operands) for name, argument in case.kwargs.items()}
    try:
        result = find_function(case.target)(*[one for one, _ in pairs], **{name: one for name, (one, _) in named.items()})
    except RuntimeError as error:
        if lies == "in order" or not any(word in str(error) for word in ("contiguous", "stride 1")):
            raise
        return None
    made, args = list(_tensors(result)), tuple(ref for _, ref in pairs)
    op = Op("y", case.target, ("x",) * len(operands), ("y",) * len(made), args, tuple((name, ref) for name, (_, ref) in named.items()))
    return op, operands, made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_lie_as_is_said(case: Case) -> None:
    row = find_row(case.target)
    assert row is not None
    for lies in LYING if not any(name in case.target for name in NOT_SAFE) else ("in order",):
        ran = _run(case, lies)
        if ran is None:
            continue
        op, operands, made = ran
        given = [_order(operand) for operand in operands]
        found = find_orders(op, [tuple(operand.shape) for operand in operands], given, [tuple(result.shape) for result in made])
        for order, result in zip(found, made, strict=True):
            assert order in (UNKNOWN, _order(result)), lies
        if (row.alias or row.family == "pointwise") and case.target != "aten.view.dtype":
            assert UNKNOWN not in found
        if lies == "in order" and keeps_order(op):
            assert all(order == MemoryOrder() for order in found)


@pytest.mark.parametrize("seed", range(60))
def test_views_of_views_lie_as_torch_makes_them(seed: int) -> None:
    """Ten views after another, drawn at random among those that fit."""
    draw = torch.Generator().manual_seed(seed)
    tensor, order = torch.zeros(4, 1, 6), MemoryOrder()

    def choose(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=draw))

    for _ in range(10):
        dims, before = tensor.dim(), tuple(tensor.shape)
        steps: list[tuple[str, tuple[Any, ...]]] = [("aten.unsqueeze.default", (choose(dims + 1),)), ("aten.alias.default", ())]
        if dims:
            dim, other = choose(dims), choose(dims)
            turned = tuple(torch.randperm(dims, generator=draw).tolist())
            steps += [
                ("aten.permute.default", (turned,)), ("aten.transpose.int", (dim, other - dims)), ("aten.squeeze.dim", (dim,)),
                ("aten.slice.Tensor", (dim, 0, max(1, before[dim] - 1), 1 + choose(2))), ("aten.sin.default", ()),
                ("aten.expand.default", (tuple(3 if extent == 1 else extent for extent in before),)),
                ("aten.view.default", ((before[0] * before[1], *before[2:]) if dims > 1 else (*before, 1),)),
            ]  # fmt: skip
        if dims > 2:
            steps += [("aten.select.int", (dim, 0)), ("aten.unfold.default", (dim, min(2, before[dim]), 1))]
        target, rest = steps[choose(len(steps))]
        tensor = find_function(target)(tensor, *rest)
        op = Op("y", target, ("x",), ("y",), (Ref(0), *rest))
        (order,) = find_orders(op, [before], [order], [tuple(tensor.shape)])
        assert order == _order(tensor), (target, rest, before)
        assert order.in_order == tensor.is_contiguous()
