"""Operands that kernels copy since they do not lie in order, against torch's own copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from autopar.graph import Op, Ref
from autopar.rules import IN_ORDER, find_copied
from autopar.rules.memory_order import order_of
from autopar.runtime.instructions.operators import find_function
from autopar.verify.live_memory import LiveMemory

EQUATIONS = ("b s k, k n -> b s n", "b s k, b k n -> b s n", "b s k, b s n -> k n", "b s k, s k n -> b n")


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_operands_are_copied_where_torch_copies_them(equation: str, dims: tuple[int, ...]) -> None:
    """A contraction takes dims together; torch copies an operand when their places in memory are no equal steps apart."""
    sizes = {"b": 2, "s": 3, "k": 4, "n": 5}
    first, second = (tuple(term.split()) for term in equation.split("->")[0].split(","))
    result = tuple(equation.split("->")[1].split())
    shape = tuple(sizes[name] for name in first)
    x = torch.randn([1 if dim in dims else size for dim, size in enumerate(shape)]).expand(shape)
    taken: list[Callable[[str], bool]] = [
        lambda name: name in second and name in result, lambda name: name not in second, lambda name: name in second and name not in result,
    ]  # fmt: skip
    groups = [[name for name in first if wanted(name)] for wanted in taken]
    matrix = x.permute([first.index(name) for group in groups for name in group])
    flat = matrix.reshape([torch.Size([sizes[name] for name in group]).numel() for group in groups])
    op = Op("y", "autopar.contract.default", ("x", "w"), ("y",), (Ref(0), Ref(1), equation))
    shapes = [shape, tuple(sizes[name] for name in second)]
    assert find_copied(op, shapes, [order_of(shape, x.stride()), IN_ORDER]) == ((0,) if flat.data_ptr() != x.data_ptr() else ())


def _shaped(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


HEADS = (2, 1, 8, 16)
"""One head: results are in the order of memory at once."""
KERNELS: dict[str, tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]] = {
    "autopar.attention.default": (_shaped(HEADS, HEADS, HEADS), (None, False, 1.0, 0.0, 0)),
    "autopar.attention_backward.default": (_shaped(HEADS, HEADS, HEADS, HEADS, HEADS, HEADS[:3]), (None, False, 1.0, 0.0, 0)),
    "aten.native_group_norm.default": (_shaped((2, 4, 8), (4,), (4,)), (2, 4, 8, 2, 1e-5)),
    "aten.native_group_norm_backward.default": (
        _shaped((2, 4, 8), (2, 4, 8), (2, 2), (2, 2), (4,)), (2, 4, 8, 2, [True, True, True])),
    "autopar.batch_norm_backward.default": (_shaped((2, 4, 8), (2, 4, 8), (4,), (4,), (4,)), ()),
}  # fmt: skip
"""Calls of the kernels that read operands in the order of memory: tensors, then the other arguments."""


def _most_bytes(target: str, tensors: Sequence[torch.Tensor]) -> int:
    """The most bytes while an operator runs, beside its operands'."""
    with torch.no_grad(), LiveMemory(tensors) as live:
        before = live.total
        find_function(target)(*tensors, *KERNELS[target][1])
    return live.peak - before


def _turned(x: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "repeats first": lambda x: x.narrow(0, 0, 1).expand(x.shape),
    "repeats last": lambda x: x.narrow(-1, 0, 1).expand(x.shape),
    "turned": _turned,
    "with gaps": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
"""Operands that lie otherwise than in order."""


@pytest.mark.parametrize("lies", MADE)
@pytest.mark.parametrize(("target", "place"), [(name, place) for name, (tensors, _) in KERNELS.items() for place in range(len(tensors))])
def test_kernels_copy_the_operands_that_are_said_to_be_copied(target: str, place: int, lies: str) -> None:
    """The bytes beside those with the same values in memory of their own."""
    tensors = list(KERNELS[target][0])
    tensors[place] = MADE[lies](tensors[place])
    op = Op("y", target, tuple(map(str, range(len(tensors)))), ("y",), tuple(Ref(number) for number in range(len(tensors))))
    shapes = [tuple(one.shape) for one in tensors]
    found = find_copied(op, shapes, [order_of(shape, one.stride()) for shape, one in zip(shapes, tensors, strict=True)])
    more = _most_bytes(target, tensors) - _most_bytes(target, [one.contiguous() for one in tensors])
    assert more == sum(tensors[number].numel() * tensors[number].itemsize for number in found)
