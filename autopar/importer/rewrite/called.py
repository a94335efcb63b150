"""Functions that are swapped where the model calls them: what their operators give has no shape on stand-ins, or they look at values.

torch's grouped product knows the shapes of bfloat16 alone, whatever the kernels do; a table of the CTC loss is as large as its lengths say;
the Gaussian loss refuses negative variances, covariances ask what they divide by, quantiles which levels they
are given; what export writes of ``random_`` between two bounds is no Python, and tensors of numbers in tensors are made by reading these.
Packed sequences have as many rows as lengths say, and are refused.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError
from autopar.importer.rewrite.experts import grouped_mm
from autopar.importer.rewrite.losses import ctc_loss, gaussian_nll_loss
from autopar.importer.rewrite.statistics import combinations, corrcoef, cov, nanquantile, quantile


def _packed(*_: Any) -> NoReturn:
    raise CaptureError(
        "sequences are packed into rows whose number follows from the values of their lengths",
        "give the recurrent layer the padded sequences, and take out or mask what lies behind each end afterwards",
    )


def _random(tensor: Tensor, *bounds: int, **named: int) -> Tensor:
    given = {**dict(zip(("from", "to"), bounds, strict=False)), **named}
    if len(given) < 2:
        return tensor.random_(*bounds, **named)
    return tensor.copy_(torch.randint(given["from"], given["to"], tensor.shape))


def _tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **named: Any) -> Tensor:
    """``torch.tensor``; of numbers in tensors, among others, which torch reads, it is their stack."""
    items = _numbers(data) if isinstance(data, (list, tuple)) else []
    if named or not any(isinstance(item, Tensor) for item in items) or any(isinstance(item, Tensor) and item.dim() for item in items):
        return torch.tensor(data, dtype=dtype, device=device, **named)
    parts = [item.detach() if isinstance(item, Tensor) else torch.tensor(item) for item in items]
    dtype = dtype or reduce(torch.promote_types, [part.dtype for part in parts])
    shape = []
    while isinstance(data, (list, tuple)):
        shape.append(len(data))
        data = data[0]
    return torch.stack([part.to(dtype) for part in parts]).reshape(shape)


def _numbers(data: Any) -> list[Any]:
    return [one for item in data for one in _numbers(item)] if isinstance(data, (list, tuple)) else [data]


CALLED = {
    "grouped_mm": grouped_mm, "_grouped_mm": grouped_mm, "ctc_loss": ctc_loss, "gaussian_nll_loss": gaussian_nll_loss,
    "cov": cov, "corrcoef": corrcoef, "combinations": combinations, "_pack_padded_sequence": _packed,
    "quantile": quantile, "nanquantile": nanquantile, "random_": _random, "tensor": _tensor,
}  # fmt: skip
"""By the name of the function, which modules of torch give under several."""


class Called(TorchFunctionMode):
    """Within it, calls of these functions are ours; the generator that is there anyway may be named."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "generator" in kwargs and kwargs["generator"] in (None, torch.default_generator):
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        return CALLED.get(getattr(function, "__name__", ""), function)(*args, **kwargs)
