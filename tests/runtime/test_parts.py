"""What is asked of the parts of a compiled module by themselves."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

import autopar
from autopar.errors import UsageError
from autopar.runtime import ShardedModule
from tests.runtime.test_training import on_ranks, whole

X = torch.randn(8, 16)


class Coder(nn.Module):
    """Two parts, and methods beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.decoder, self.table, self.attention = nn.Linear(16, 16), nn.Embedding(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def project(self, x: Tensor) -> Tensor:
        return x @ self.decoder.weight

    def width(self, times: int = 1) -> int:
        return self.decoder.weight.shape[0] * times

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x) + self.table.weight.sum(0)
        return self.decoder(hidden + self.attention(hidden[None], hidden[None], hidden[None])[0][0])


def coder() -> Coder:
    torch.manual_seed(0)
    return Coder()


PINS = {"encoder.0.weight": "S0 R", "input:x": "S0 R"}
PLAN = autopar.plan(coder(), (X,), mesh="2", hardware="cpu-cluster", mode="train", constraints=PINS)

ALONE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a part": (lambda module: module.decoder(X), "decoder (Linear), a part of a compiled module, is called by itself with a plain"),
    "by name": (lambda module: module.decoder(input=X), "decoder (Linear), a part of a compiled module"),
    "a part's part": (lambda module: module.encoder(X), "encoder.0 (Linear), a part of a compiled module"),
    "its forward": (lambda module: module.decoder.forward(X), "decoder (Linear), a part of a compiled module, is called by itself with a"),
    "a part's part's forward": (lambda module: module.encoder.forward(X), "encoder.0 (Linear), a part of a compiled module"),
    "a copy's forward": (lambda module: copy.deepcopy(module).decoder.forward(X), "decoder (Linear), a part of a compiled module"),
    "numbers": (lambda module: module.table(torch.arange(3)), "table (Embedding), a part of a compiled module"),
    "several": (lambda module: module.attention(X[None], X[None], X[None]), "attention (MultiheadAttention), a part of a compiled module"),
    "a method": (lambda module: module.encode(X), "encoder.0 (Linear), a part of a compiled module"),
    "with weights": (lambda module: module.project(X), "Coder.project, a method of a compiled module, computes with plain tensors"),
    "of a copy": (lambda module: copy.deepcopy(module).decoder(X), "decoder (Linear), a part of a compiled module"),
}  # fmt: skip


def test_parts_called_by_themselves_are_refused() -> None:
    def run(rank: int) -> list[str]:
        module, found = autopar.compile(coder(), PLAN), []
        for call, _ in ALONE.values():
            with pytest.raises(UsageError) as caught:
                call(module)
            found.append(str(caught.value))
        return found

    for found in on_ranks(run, 2):
        for said, (_, words) in zip(found, ALONE.values(), strict=True):
            assert words in said and "\nhint: call the compiled module itself" in said


def test_what_parts_do_beside_goes_on() -> None:
    """Parts without weights, parts that are given DTensors, methods that compute nothing; the whole, in calls that are captured anew."""
    reference = coder()
    wanted = [reference(X), reference.decoder(X), reference.decoder(X), reference.encoder[1](X), reference(X[:4])]

    def run(rank: int) -> tuple[list[Tensor], list[Any]]:
        module: ShardedModule = autopar.compile(coder(), PLAN)
        given = distribute_tensor(X, module.place.device_mesh, [Replicate()])
        found = [module(X), module.decoder(given), module.decoder.forward(given), module.encoder[1](X), module.eval()(X[:4])]
        assert str(inspect.signature(module.decoder.forward)) == str(inspect.signature(nn.Linear(1, 1).forward))
        words = [module.width(2), module.encode == module.encode, module.encode.__name__, [name for name, _ in module.named_modules()]]
        return [whole(one) for one in found], words

    for found, words in on_ranks(run, 2):
        torch.testing.assert_close(found, wanted)
        assert words == [32, True, "encode", [name for name, _ in coder().named_modules()]]


def test_parts_are_copied_with_the_whole_alone() -> None:
    def run(rank: int) -> tuple[list[str], bool]:
        module, said = autopar.compile(coder(), PLAN), []
        module(X).sum().backward()
        for part in (module.decoder, module.encoder, module.encoder[1], module.tree):
            with pytest.raises(UsageError) as caught:
                copy.deepcopy(part)
            said.append(str(caught.value))
        return said, torch.equal(whole(copy.deepcopy(module).decoder.weight), whole(module.decoder.weight))

    for said, equal in on_ranks(run, 2):
        assert equal and all("is copied by itself" in words and "\nhint: copy the whole and take the part" in words for words in said)
