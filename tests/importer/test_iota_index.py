"""Rows that are counted are each read at their own place: as torch reads them, and apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.importer.stand_ins.iota_index import OwnRows
from autopar.verify import verify

N, S, C = 4, 3, 5
_ALL = slice(None)


def _rows(size: int, *ones: int) -> Tensor:
    return torch.arange(size).reshape(-1, *ones)


def _drawn(*shape: int, below: int = S) -> Tensor:
    return torch.randint(-below, below, shape)


INDICES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "first": lambda: (_rows(N), _drawn(N)),
    "of a loop": lambda: (range(N), _drawn(N)),
    "written": lambda: (list(range(N)), _drawn(N).int()),
    "columns": lambda: (_rows(N, 1), _drawn(N, 2)),
    "columns of all": lambda: (_rows(N, 1), _drawn(2)),
    "columns before rows": lambda: (_rows(N), _drawn(2, N)),
    "every place": lambda: (_rows(N, 1), _rows(S), _drawn(N, S, below=C)),
    "every place of few": lambda: (_rows(N, 1, 1), _rows(S, 1), _drawn(2, below=C)),
    "in the second": lambda: (_drawn(S, below=N), _rows(S)),
    "apart": lambda: (_rows(N), _ALL, _drawn(N, below=C)),
    "apart, columns": lambda: (_rows(N, 1), _ALL, _drawn(N, 2, below=C)),
    "apart by a number": lambda: (_rows(N), 1, _drawn(N, below=C)),
    "apart by a new dim": lambda: (_rows(N), None, _drawn(N)),
    "at the end": lambda: (..., _rows(S), _drawn(S, below=C)),
    "at the end, columns": lambda: (None, _ALL, _rows(S, 1), _drawn(2, below=C)),
    "of a part": lambda: (_rows(2), slice(1, None), _drawn(2, below=C)),
    "sliced": lambda: (slice(1, 4), _rows(S), _drawn(S, below=C)),
    "beside a slice": lambda: (_rows(N), _drawn(N), slice(1, 3)),
    "a matrix of counts": lambda: (_rows(N, 1).expand(N, S), _drawn(N, S)),
    "alone": lambda: (_rows(N),),
    "alone, behind": lambda: (_ALL, _rows(S), -1),
    "both": lambda: (_rows(N, 1), _rows(S)),
    "both, in a wider index": lambda: (_rows(N, 1, 1, 1), _rows(S)),
    "both, turned": lambda: (_rows(N), _rows(S, 1)),
}


@pytest.mark.parametrize("name", INDICES)
def test_as_torch_reads_and_writes(name: str) -> None:
    torch.manual_seed(0)
    x, items = torch.randn(N, S, C), INDICES[name]()
    own = OwnRows.of(x, items, Tensor.numpy)
    if name in ("of a part", "columns before rows"):
        assert (own is None) == (name == "of a part")
    if own is None:
        return
    wanted = x[items]
    found = own.picked(x)
    assert torch.equal(found, wanted) and found.is_contiguous() and found.data_ptr() != x.data_ptr()
    columns = next((item for item in items if isinstance(item, Tensor) and item.unique().numel() < item.numel() and item.dim() > 1), None)
    for value in (2.5, torch.randn(()), torch.randn(wanted.shape), torch.randn(1, 1, *wanted.shape), torch.randn(wanted.shape[-1:])):
        if columns is not None and isinstance(value, Tensor) and value.dim():
            continue  # one place may be written twice
        mine, other = x.clone(), x.clone()
        other[items] = value
        own.put(mine, value)
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "items",
    [
        (_rows(N) * 0, _drawn(N)), (_rows(N).flip(0), _drawn(N)), (_rows(N) - N, _drawn(N)), (_rows(S), _drawn(S)),
        (_rows(N), _drawn(N), _drawn(N, below=C)), (_rows(N), _rows(N) > 1), (_drawn(N, below=N), _drawn(N)), (_rows(N), [0, 1, 2, 0]),
        (_ALL, 1), (_rows(N), torch.tensor(1)), (_rows(2, 1), _rows(N), _drawn(N)), (),
    ],
)  # fmt: skip
def test_what_counts_no_rows(items: tuple[Any, ...]) -> None:
    assert OwnRows.of(torch.randn(N, S, C), items, Tensor.numpy) is None
    assert OwnRows.of(torch.randn(N, S, C), (_rows(N), _drawn(N)), lambda item: None) is None


class Pooled(nn.Module):
    """The state of each row's last token, by one way to pick it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embedding, self.inner, self.head = how, nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x, rows = self.inner(self.embedding(tokens)).tanh(), torch.arange(len(tokens))
        match self.how:
            case "lengths":
                y = x[torch.arange(len(x), device=x.device), lengths - 1]
            case "padding":
                y = x[rows, (tokens.eq(0).int().argmax(-1) - 1) % tokens.shape[-1]]
            case "scores":
                return self.head(x)[rows, lengths - 1].square().mean()
            case "listed":
                y = x[range(len(x)), lengths - 1]
            case "columns":
                y = x[rows[:, None], torch.stack([lengths - 1, lengths * 0], 1)].flatten(1)[:, 4:12]
            case "turned":
                y = x.transpose(0, 1)[lengths - 1, rows]
            case "mask":
                mask = torch.zeros_like(x[..., 0])
                mask[rows, lengths - 1] = 1
                y = (x * mask[..., None]).sum(1)
            case _:
                y = x[rows * 0, lengths - 1]
        return self.head(y).square().mean()


HOW = ("lengths", "padding", "scores", "listed", "columns", "turned", "mask")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [4, 8])
def test_rows_that_are_picked_train_apart(how: str, count: int) -> None:
    """Microbatches were not proved to make up the step: rows met in the index."""
    torch.manual_seed(0)
    args = torch.randint(0, 16, (8, 6)), torch.randint(1, 7, (8,))
    model = Pooled(how).double()
    found = autopar.capture(model, args, microbatches=count).accumulation
    assert found.whole and not found.reason
    plan = autopar.plan(model, args, mesh="dp=2", microbatches=count)
    assert verify(plan, SimpleNamespace(model=model, args=args, kwargs={}, loss=None, loss_args=()), backend="simulate", steps=3).passed


@pytest.mark.parametrize("how", HOW)
def test_rows_that_are_picked_stay_on_their_ranks(how: str) -> None:
    """The batch was gathered on every rank, or the model computed on all of it there."""
    args = torch.zeros(4096, 64, dtype=torch.int64), torch.ones(4096, dtype=torch.int64)
    plan = autopar.plan(Pooled(how), args, mesh="dp=2", hardware="cpu-cluster")
    large = [item for row in plan.ops for item in (*row.inputs, *row.outputs) if math.prod(item.shape) >= 4096 * 64]
    assert len(large) > 8 and all("S0" in item.spec for item in large)
    assert all(row.bytes <= 4 * 4096 for row in plan.collectives)


def test_rows_that_are_no_rows_of_their_own_meet() -> None:
    found = autopar.capture(Pooled("zero"), (torch.randint(0, 16, (8, 6)), torch.randint(1, 7, (8,))), microbatches=4).accumulation
    assert not found.whole and "rows of the batch meet" in found.reason
