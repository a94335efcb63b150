"""Views that repeat, against torch's own: what memory has of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from autopar.graph import Argument, Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.rules import DENSE, find_expanded, find_repeated, is_expansion, repeats, stored_elements

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


def test_an_expansion_repeats_however_its_source_lies() -> None:
    """Of views of it that is not known: a reshard in between makes them dense."""
    for name, known in (("turned", {"t1": 6}), ("twice", {"t1": 6, "t3": 24}), ("windows", {"t1": 96}), ("dense", {})):
        graph, made = chain(*CHAINS[name])
        found = find_expanded(graph)
        assert {tensor: stored_elements(made[int(tensor[1:])].shape, dims) for tensor, dims in found.items()} == known, name


def test_views_that_are_larger_than_their_source_are_expansions() -> None:
    graph, _ = chain(*CHAINS["turned"])
    assert [is_expansion(op, graph.tensors) for op in graph.ops] == [True, False]
