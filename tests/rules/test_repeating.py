"""Views that repeat, against torch's own strides: what memory has of them, and when a matrix of them is a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from autopar.graph import Argument, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.rules import DENSE, find_copied, find_repeated, is_expansion, repeats, stored_elements
from autopar.runtime.operators import find_function
from autopar.verify.live_memory import LiveMemory

Step = tuple[str, tuple[Argument, ...]]
"""A view by its target, and its arguments behind the tensor."""

CHAINS: dict[str, tuple[tuple[int, ...], tuple[Step, ...]]] = {
    "scalar": ((), (("aten.expand.default", ((4, 6),)),)),
    "rows": ((1, 6), (("aten.expand.default", ((4, 6),)),)),
    "new dims": ((6,), (("aten.expand.default", ((3, 4, 6),)),)),
    "turned": ((1, 6), (("aten.expand.default", ((4, 6),)), ("aten.permute.default", ((1, 0),)))),
    "twice": ((1, 6), (("aten.expand.default", ((4, 6),)), ("aten.unsqueeze.default", (0,)), ("aten.expand.default", ((3, 4, 6),)))),
    "grouped": ((2, 1, 6), (("aten.expand.default", ((2, 4, 6),)), ("aten.view.default", ((2, 2, 2, 6),)))),
    "joined": ((4, 1, 1), (("aten.expand.default", ((4, 3, 2),)), ("aten.view.default", ((4, 6),)))),
    "cut": ((1, 6), (("aten.expand.default", ((4, 6),)), ("aten.slice.Tensor", (0, 0, 2)))),
    "one of it": ((6,), (("aten.expand.default", ((4, 6),)), ("aten.select.int", (0, 1)))),
    "windows": ((2, 16, 3), (("aten.unfold.default", (1, 8, 4)),)),
    "turned windows": ((2, 16, 3), (("aten.unfold.default", (1, 8, 4)), ("aten.permute.default", ((0, 2, 1, 3),)))),
    "windows apart": ((2, 16, 3), (("aten.unfold.default", (1, 4, 4)),)),
    "dense": ((4, 6), (("aten.permute.default", ((1, 0),)), ("aten.unsqueeze.default", (1,)))),
}  # fmt: skip


def chain(shape: tuple[int, ...], steps: Sequence[Step]) -> tuple[Graph, list[torch.Tensor]]:
    """The views one after another as a graph, and as torch makes them."""
    made = [torch.arange(torch.Size(shape).numel()).reshape(shape)]
    ops = []
    for number, (target, rest) in enumerate(steps):
        _, name, overload = target.split(".")
        made.append(getattr(getattr(torch.ops.aten, name), overload)(made[-1], *rest))
        ops.append(Op(f"t{number + 1}", target, (f"t{number}",), (f"t{number + 1}",), (Ref(0), *rest)))
    tensors = {f"t{number}": Tensor(f"t{number}", tuple(each.shape), "int64") for number, each in enumerate(made)}
    leaving = GraphOutput(f"t{len(steps)}", "output", "0")
    return Graph("inference", tensors, (GraphInput("t0", "input", "x"),), tuple(ops), (leaving,)), made


@pytest.mark.parametrize("name", CHAINS)
def test_memory_has_as_many_elements_as_are_told_apart(name: str) -> None:
    """A view of other numbers than any other place holds as many different numbers as memory has elements for it."""
    graph, made = chain(*CHAINS[name])
    found = find_repeated(graph)
    for number, tensor in enumerate(made):
        dims = found.get(f"t{number}", DENSE)
        assert repeats(tensor.shape, dims) == (tensor.unique().numel() < tensor.numel())
        if repeats(tensor.shape, dims):
            assert stored_elements(tensor.shape, dims) == tensor.unique().numel()


def test_views_that_are_larger_than_their_source_are_expansions() -> None:
    graph, _ = chain(*CHAINS["turned"])
    assert [is_expansion(op, graph.tensors) for op in graph.ops] == [True, False]


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
    assert find_copied(op, shapes, [dict.fromkeys(dims, 1), DENSE]) == ((0,) if flat.data_ptr() != x.data_ptr() else ())


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


@pytest.mark.parametrize("along", [0, -1])
@pytest.mark.parametrize(("target", "place"), [(name, place) for name, (tensors, _) in KERNELS.items() for place in range(len(tensors))])
def test_kernels_copy_the_operands_that_are_said_to_be_copied(target: str, place: int, along: int) -> None:
    """The bytes beside those with the same values in memory of their own."""
    tensors = list(KERNELS[target][0])
    repeated = tensors[place] = tensors[place].narrow(along, 0, 1).expand(tensors[place].shape)
    op = Op("y", target, tuple(map(str, range(len(tensors)))), ("y",), tuple(Ref(number) for number in range(len(tensors))))
    dims = [{along % one.dim(): 1} if one is repeated else DENSE for one in tensors]
    found = find_copied(op, [one.shape for one in tensors], dims)
    more = _most_bytes(target, tensors) - _most_bytes(target, [one.contiguous() for one in tensors])
    assert more == sum(tensors[number].numel() * tensors[number].itemsize for number in found)
