"""Indices that are one number in a tensor, masks that the code writes down, rows written where one holds: as on one device, split."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import CaptureError
from tests.runtime.models import example
from tests.runtime.test_execution import check

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
PLACES = torch.arange(120).view(6, 4, 5) * 7 % 6
"""Of entries along a dim of size 6. The trace asks such a tensor for its sizes."""


class Indexed(nn.Module):
    """Of x [6, 4, 5], one number below 4, another, and a mask of [6]."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor, one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        return self.function(x * self.scale, one, other, mask)


def _written(*index: object, value: Callable[[Tensor], object] = lambda x: -1.5) -> Function:
    def written(x: Tensor, one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        named = {"one": one, "other": other, "mask": mask}
        x = x.clone()
        x[tuple(named.get(item, item) if isinstance(item, str) else item for item in index)] = value(x)
        return x.sin()

    return written


def _alone(x: Tensor, one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = x[1, 2] + 1
    x[mask.unsqueeze(1) & (x.detach()[:, :, 0] > 0)] = x[1, :1] * 2
    x[one] *= 2
    x[one] = other
    return x


def _contrasted(x: Tensor, one: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """The similarities of all pairs but of each row with itself."""
    rows = F.normalize(x.flatten(1))
    alike = rows @ rows.T
    return alike[~torch.eye(len(alike), dtype=torch.bool)].view(len(alike), -1).logsumexp(1)


PICKED: dict[str, Function] = {
    "a row": lambda x, one, other, mask: x[one],
    "from the end": lambda x, one, other, mask: x[one - 5],
    "of the last dim": lambda x, one, other, mask: x[..., one],
    "two": lambda x, one, other, mask: x[one, other],
    "apart": lambda x, one, other, mask: x[one, :, other],
    "beside slices": lambda x, one, other, mask: x[1:5, None, one, ..., ::2],
    "beside a number": lambda x, one, other, mask: x[2, other, 1:],
    "beside a list": lambda x, one, other, mask: x[one, :, [0, 2, 2]],
    "beside indices": lambda x, one, other, mask: x[torch.tensor([0, 5, 1]), one],
    "that was found": lambda x, one, other, mask: x[x[:, 0, 0].argmax(), 1],
    "rows of a loop": lambda x, one, other, mask: sum(x[i] * i for i in torch.arange(3)),
    "what is unlike": _contrasted,
    "selected": lambda x, one, other, mask: x[:, :, :4].sum(0).masked_select(torch.ones(4, 4).triu() > 0),
    "flags": lambda x, one, other, mask: x[:, [True, False, True, True]],
    "an array of flags": lambda x, one, other, mask: x[:, numpy.arange(4) % 2 == 0],
    "flags of two dims": lambda x, one, other, mask: x[:, torch.ones(4, 5).tril() > 0],
    "places": lambda x, one, other, mask: x[:, (torch.arange(4) % 2).nonzero().squeeze(1)],
    "where": lambda x, one, other, mask: x[torch.where(torch.arange(6) > 2)],
    "counts": lambda x, one, other, mask: x * torch.bincount(torch.tensor([0, 1, 1, 4])),
    "kinds": lambda x, one, other, mask: x[..., torch.unique(torch.tensor([3, 1, 1]))],
    "numbers in tensors": lambda x, one, other, mask: x[..., :4] * torch.tensor([[x.detach()[0, 0, 0], 2], [one, x.data.sum()]]).view(-1),
    "then scaled": lambda x, one, other, mask: F.interpolate(x[..., torch.tensor([0, 2, 0])], size=5, mode="linear"),
    "repeated": lambda x, one, other, mask: x.repeat_interleave(torch.tensor([2, 0, 1, 1]), 1),
    "joined to what a tensor of the code picks": lambda x, one, other, mask: torch.cat([x.gather(0, PLACES), x], 1),
}
WRITTEN: dict[str, Function] = {
    "a row": _written("one"),
    "a row of its own": _written("one", value=lambda x: x[0] + 1),
    "one value": _written("one", "other", 2, value=lambda x: x.mean()),
    "beside slices": _written(slice(1, 5), "one", Ellipsis, slice(0, 3), value=lambda x: x[:4, 0, 2:]),
    "beside a new dim": _written(None, ..., "one", value=lambda x: x[:, :, :1].squeeze(-1)),
    "with more dims": _written("one", "other", value=lambda x: x[:1, :1, 2:3] + torch.zeros(1, 1, 5)),
    "apart": _written("one", slice(None), "other", value=lambda x: x[0, :, 0]),
    "a row where it holds": _written("mask", value=lambda x: x[0, 0] * 3),
    "a matrix where it holds": _written("mask", value=lambda x: x[:1] * 2),
    "in turn": _alone,
}
CASES = {**{f"picked: {name}": one for name, one in PICKED.items()}, **{f"written: {name}": one for name, one in WRITTEN.items()}}


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_device(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5, dtype=torch.float64, requires_grad=True)
    args = (x, torch.tensor(3), torch.tensor(1, dtype=torch.int32), torch.tensor([True, False, True, True, False, False]))
    found = example(Indexed(CASES[name]), args, "train")
    for seed in range(4):
        check(found, "2x2", seed)


def test_a_mask_that_is_given_has_no_size() -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        autopar.capture(Indexed(lambda x, one, other, mask: x[mask]), (torch.randn(6, 4, 5), *[torch.tensor(1)] * 2, torch.rand(6) > 0.5))


class Adaptive(nn.Module):
    """Words of the shortlist and of both tails, and the loss of one word alone."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [6, 12], div_value=2.0, head_bias=True).double()

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        found = self.softmax(x, words)
        return found.output, found.loss + self.softmax(x[0], words[0]).output


def test_adaptive_softmax() -> None:
    torch.manual_seed(0)
    found = example(Adaptive(), (torch.randn(8, 8, dtype=torch.float64), torch.tensor([0, 5, 6, 11, 12, 19, 3, 13])), "train")
    for seed in range(4):
        check(found, "2x2", seed)
