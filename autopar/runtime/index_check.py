"""A check that indices are in range of the whole table, as torch's own operators check.

A rank with a part of a table reads zeros for rows that it does not hold. An index out of range would then be zeros on all ranks, without
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph import Graph, Op
from autopar.rules import count_entries, ignored_number, looked_up
from autopar.runtime.kernels import Kernel
from autopar.torch_compat import assert_later

BEYOND = "an index is out of range"
"""Message of the assertion."""
HINT = "look at what the data holds, and at how long a sequence may be: in the model itself, too, indices are at least 0 and less than that"


class OutOfReachError(UsageError, IndexError):
    """A row, or a class, that is not there: an IndexError too, as torch's own."""


def check_indices(kernel: Kernel, op: Op, graph: Graph, traced: bool) -> Kernel:
    """The kernel, which raises OutOfReachError where it looks up what the whole table does not have; on a GPU, where nobody waits for the
    answer, and in a traced program an assertion fails, as torch's own does. The kernel itself for other operators.
    """
    lookup = looked_up(op)
    if lookup is None or not lookup.entries or op.phase == "backward" or _of_class_weights(op, graph):
        return kernel
    called, size, ignored = lookup.entries, count_entries(op, graph.tensors), ignored_number(op)
    where = op.location or op.module or op.name

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        _check(tensors[1], size, ignored, called, where, traced or tensors[1].device.type != "cpu")
        return kernel(tensors)

    return run


def _of_class_weights(op: Op, graph: Graph) -> bool:
    """Whether it looks up the weights of classes that a loss looks up itself: a class that the loss ignores has none."""
    maker, losses = graph.producer.get(op.inputs[0]), (other for other in graph.ops if ignored_number(other) is not None)
    unsqueezed = maker is not None and maker.target.startswith("aten.unsqueeze")
    return ignored_number(op) is None and unsqueezed and any(other.inputs[1] == op.inputs[1] for other in losses)


@contextmanager
def raise_index_errors() -> Iterator[None]:
    """An assertion that fails within it is an OutOfReachError, also where torch.compile tells something else of what it ran."""
    try:
        yield
    except Exception as error:
        for one in (error, error.__context__):
            if BEYOND in str(one):
                raise OutOfReachError(str(one).splitlines()[0], HINT) from None
        raise


def _check(indices: Tensor, size: int, ignored: Any, called: str, where: str, later: bool) -> None:
    if not later:
        if not indices.numel():
            return
        low, high = (int(value) for value in torch.aminmax(indices))
        if low >= 0 and high < size:
            return
    beyond = (indices < 0) | (indices >= size)
    if ignored is not None:
        beyond &= indices != ignored
    if later:
        assert_later(~beyond.any(), f"{where}: {BEYOND}, there are {size} {called}")
    elif beyond.any():
        first = int(indices[beyond][0])
        raise OutOfReachError(f"{where}: index {first} is out of range, there are {size} {called}", HINT)
