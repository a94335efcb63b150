"""Levels of ``vmap`` as axes of ranks: within one, a tensor may hold the values of all ranks along an axis, and looks like one rank's.

What ``torch.vmap`` does for arguments and results, this does at any place in a function that runs under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def rank_level(size: int) -> Iterator[int]:
    """One more level of ``vmap``, over ``size`` ranks, each of which draws random numbers of its own. Gives the level's number."""
    from torch._functorch.vmap import lazy_load_decompositions, vmap_increment_nesting

    lazy_load_decompositions()
    with vmap_increment_nesting(size, "different") as level:
        yield level


@contextmanager
def met_functions(met: Callable[[type[torch.autograd.Function]], None]) -> Iterator[None]:
    """Within it, ``met`` is told of each ``torch.autograd.Function`` that is applied under ``vmap``, before it runs."""
    from torch._functorch.autograd_function import CustomFunctionHigherOrderOperator as Operator

    plain = Operator.__call__

    def call(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        met(function)
        return plain(self, function, *args, **kwargs)

    Operator.__call__ = call
    try:
        yield
    finally:
        Operator.__call__ = plain


def with_level(tensor: Tensor, level: int) -> Tensor:
    """One rank's view at ``level`` of a tensor whose first dim is the ranks. The tensor has no higher level than this one."""
    return torch._C._functorch._add_batch_dim(tensor, 0, level)


def without_levels(tensor: Tensor, levels: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor outside of these levels, the highest of all, with a first dim for each in which its values differ by rank.

    Returns:
        the tensor ``[ranks of each found level ..., its own shape]``; the levels found, ascending.
    """
    functorch = torch._C._functorch
    if not functorch.is_batchedtensor(tensor) or functorch.maybe_get_level(tensor) not in levels:
        return tensor, ()
    inner, found = without_levels(functorch.get_unwrapped(tensor), levels)
    at = len(found)
    return inner.movedim(functorch.maybe_get_bdim(tensor) + at, at), (*found, functorch.maybe_get_level(tensor))


def beneath_levels(tensor: Tensor) -> Tensor:
    """The tensor that holds the values of all levels."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
