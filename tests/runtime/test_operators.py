"""Functions that run in place of operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from autopar.runtime.instructions.operators import SOONER, find_function, registered
from autopar.torch_compat import is_operator

X = torch.linspace(-3, 3, 12).view(3, 4).t()
CALLS: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "aten.gelu.default": ((X,), {"approximate": "tanh"}),
    "aten.silu.default": ((X,), {}),
    "aten.expand.default": ((X, [2, -1, 3]), {"implicit": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("target", SOONER)
def test_what_is_called_sooner_computes_the_operator(target: str, dtype: torch.dtype) -> None:
    (first, *rest), named = CALLS[target]
    for kwargs in ({}, named):
        found, wanted = (function(first.to(dtype), *rest, **kwargs) for function in (find_function(target), registered(target)))
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert torch.equal(found, wanted)


def test_an_operator_without_a_function_is_called_without_a_frame_of_python() -> None:
    found = find_function("aten.threshold_backward.grad_input")
    assert not is_operator(found) and is_operator(registered("aten.threshold_backward.grad_input"))
    gradient = torch.ones_like(X)
    assert found(gradient, X, 0, grad_input=gradient) is gradient
    assert torch.equal(gradient, (X > 0).float())
