"""How an operator of the dialect is declared: one schema, one eager body, one shape function, one gradient.

The operators live in the ``autopar::`` namespace of torch, so that a captured graph names them like any other operator
and runs them without this package's Python types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

NAMESPACE = torch.library.Library("autopar", "DEF")
"""Keeps the registrations alive for as long as the process."""

WHOLE = -1
"""In the place of an offset: the operand holds the whole table, or all experts, and each index is one of them."""

BODIES: dict[str, Callable[..., Any]] = {}
"""What each operator computes, by its name without ``autopar::``: for graphs in which they are to be taken apart."""
STILL: dict[str, Callable[..., Any]] = {}
"""What an operator that draws computes while runs are compared, by target (``autopar.dropout.default``)."""

LOOKING: set[str] = set()
"""Operators whose bodies look at values, but for bfloat16 on a GPU, which torch's grouped kernel takes there."""


@cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 at least. torch counts the question as an operator, so each is asked once."""
    return torch.promote_types(dtype, torch.float32)


def define(
    schema: str,
    body: Callable[..., Any],
    shapes: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    still: Callable[..., Any] | None = None,
    *,
    looks: bool = False,
) -> None:
    """Register ``autopar::<schema>``.

    Args:
        schema: the operator's name and signature, ``contract(Tensor a, Tensor b, str equation) -> Tensor``.
        body: what it computes, for every device.
        shapes: the same arguments to empty tensors of the results' shapes, dtypes and strides.
        gradient: ``(context, *output gradients) -> input gradients``; absent for operators that are gradients themselves.
        save: ``(context, inputs, output)``: what the gradient needs.
        still: of an operator that draws random numbers, the same with constants in place of the numbers.
        looks: whether what is computed depends on values in Python, so that it cannot be traced (see ``LOOKING``).
    """
    name = "autopar::" + schema.partition("(")[0]
    if still is not None:
        STILL[f"autopar.{schema.partition('(')[0]}.default"] = still
    NAMESPACE.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    BODIES[schema.partition("(")[0]] = body
    LOOKING.update([schema.partition("(")[0]] if looks else [])
    NAMESPACE.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(name, shapes, lib=NAMESPACE)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # torch passes these by name
        if save is not None:
            save(ctx, inputs, output)

    def none(context: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{name} has no gradient: what it computes is not differentiated again")

    torch.library.register_autograd(name, gradient or none, setup_context=setup_context, lib=NAMESPACE)
