"""Models on meta with buffers that no state dict holds, as the tables of rotary embeddings are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.runtime.module.sharded_module import EmptyBufferWarning
from tests.runtime.test_training import on_ranks, whole

X = torch.randn(4, 8)


class Table(nn.Module):
    """A buffer that is made when the module is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.arange(8) / 8 + 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inverse


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), Table()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x)).square().mean()


class OfLibrary(Rotary):
    """As transformers' models do, it says of each submodule how its tensors are made."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.inverse.copy_(torch.arange(8) / 8 + 1)


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


PLAN = autopar.plan(on_meta(Rotary), (X,), mesh="2", hardware="cpu-cluster", constraints={"table.inverse": "S0"})


def loaded(kind: type[nn.Module], state: dict[str, Tensor]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EmptyBufferWarning)
        module = autopar.compile(on_meta(kind), PLAN)
        result = module.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    return module, [str(one.message) for one in caught if one.category is EmptyBufferWarning]


@pytest.mark.parametrize("kind", [Rotary, OfLibrary])
@pytest.mark.parametrize("named", [False, True])
def test_buffers_that_no_state_dict_holds(kind: type[nn.Module], named: bool) -> None:
    """They are made by the model's own code, or given by name; where they are not, loading says so and the call names the way."""
    torch.manual_seed(0)
    model = kind()
    state = dict(model.state_dict())
    if named:
        state["table.inverse"] = model.get_buffer("table.inverse").clone()

    def run(rank: int) -> tuple[Any, list[str]]:
        module, said = loaded(kind, state)
        try:
            return whole(module(X)).item(), said
        except UsageError as error:
            return str(error), said

    for found, said in on_ranks(run, 2):
        if named or kind is OfLibrary:
            assert found == pytest.approx(model(X).item()) and not said
        else:
            assert len(said) == 1 and "holds no values of table.inverse" in said[0]
            assert "no values yet: table.inverse\nhint: give them by name, whole: module.load_state_dict({'table.inverse': ...}" in found
