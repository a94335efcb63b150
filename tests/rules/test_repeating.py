"""Views that repeat, against torch's own strides: what memory has of them, and when a matrix of them is a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from autopar.graph import Argument, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.rules import DENSE, find_copied, find_repeated, is_expansion, repeats, stored_elements

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
