"""Contrastive losses: a matrix of how alike all of a batch are is split along its rows, and what reads its diagonal keeps it so."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.target import Target
from autopar.verify import verify
from benchmarks.models import stressed


def _cross_entropy(sim: Tensor) -> Tensor:
    labels = torch.arange(len(sim))
    return (F.cross_entropy(sim, labels) + F.cross_entropy(sim.T, labels)) / 2


def _sigmoid(sim: Tensor) -> Tensor:
    return -F.logsigmoid((2 * torch.eye(*sim.shape) - 1) * sim).sum() / len(sim)


def _hardest(sim: Tensor) -> Tensor:
    beside = (0.2 + sim - sim.diag().unsqueeze(1)).clamp(min=0)
    return beside.masked_fill(torch.eye(len(sim), dtype=torch.bool), 0).amax(1).mean()


def _without_itself(sim: Tensor) -> Tensor:
    sim = sim.clone()
    own = sim.diagonal().clone()
    sim.diagonal().fill_(-10.0)
    return (sim.logsumexp(1) - own).mean()


LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "labels": _cross_entropy,
    "diagonal": lambda sim: (sim.logsumexp(1) - sim.diag()).mean(),
    "identity": _sigmoid,
    "hardest": _hardest,
    "without itself": _without_itself,
    "beside": lambda sim: sim.logsumexp(1).mean() - sim.diagonal(3).mean() - sim.diagonal(-2).square().mean(),
    "trace": lambda sim: sim.logsumexp(1).mean() - torch.trace(sim) / len(sim),
    "embedded": lambda sim: (sim.exp() - torch.diag_embed(sim.diag() + 1)).square().mean(),
    "triangles": lambda sim: sim.tril(-1).square().mean() + sim.triu(1).tanh().mean(),
}


class Pairs(nn.Module):
    """Two encoders, and a loss of how alike each output of one is to each of the other."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.scale, self.loss = nn.Parameter(torch.tensor(1.0)), LOSSES[loss]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = F.normalize(self.first(x), dim=-1), F.normalize(self.second(y), dim=-1)
        return self.loss(self.scale.exp() * first @ second.T)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_rank_has_the_matrix_whole(loss: str) -> None:
    batch = 8192
    x = torch.empty(batch, 16, device="meta")
    plan = autopar.plan(Pairs(loss).to("meta"), (x, x), mesh="dp=4", hardware="h100-sxm", time_limit=10)
    made = [op for op in plan.ops if op.op != "aten.expand.default"]  # a number seen as a matrix takes no memory
    matrices = [item for op in made for item in op.outputs if item.shape in ((batch, batch), (batch * batch,))]
    assert matrices and not [item.tensor for item in matrices if "S0" not in item.spec]
    assert not [item.tensor for item in plan.collectives if item.bytes >= batch * batch]
    assert plan.predicted.peak_memory_bytes_per_rank < 8 * batch * batch, "half of what it takes whole, twice"


def _gradients_of_traces_are_right() -> bool:
    """torch 2.11's own gradient of the trace reaches beside the diagonal where a matrix has more rows than columns."""
    matrix = torch.zeros(6, 4, requires_grad=True)
    torch.trace(matrix).backward()
    return bool((matrix.grad == torch.eye(6, 4)).all())


UNEQUAL = ("beside", "triangles", *(("trace",) if _gradients_of_traces_are_right() else ()))
"""What takes matrices that are not square, and has a right gradient of them in torch, which the sharded one is compared with."""


@pytest.mark.parametrize(("mesh", "rows", "columns", "losses"), [
    ("dp=3", 50, 50, tuple(LOSSES)), ("dp=2,tp=2", 44, 30, UNEQUAL),
])  # fmt: skip
def test_split_matrices_give_the_same(mesh: str, rows: int, columns: int, losses: tuple[str, ...]) -> None:
    for loss in losses:
        torch.manual_seed(0)
        model, args = Pairs(loss), (torch.randn(rows, 16), torch.randn(columns, 16))
        found = verify(autopar.plan(model, args, mesh=mesh, hardware=stressed()), Target(model, args), backend="simulate", steps=2)
        assert found.passed, f"{loss}: {found}"


class Bags(nn.Module):
    """Two look-ups whose product is compared with indices that the model makes, beside bags by offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(31, 4, mode="sum", include_last_offset=True)
        self.user, self.top = nn.Embedding(41, 4), nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor, user: Tensor, item: Tensor, y: Tensor) -> Tensor:
        score = self.top(torch.stack([self.bag(ids, offsets), self.user(user)], 1).flatten(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, y) + F.cross_entropy(self.user(user) @ self.user(item).T, torch.arange(len(y)))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_bags_beside_indices_that_the_model_makes(dtype: str | None) -> None:
    torch.manual_seed(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), torch.sort(torch.randint(0, 40, (7,)))[0], torch.tensor([40])])
    rows = [torch.randint(0, 41, (8,)), torch.randint(1, 41, (8,)), torch.randint(0, 2, (8,)).float()]
    model, args = Bags(), (torch.randint(0, 15, (40,)), offsets, *rows)
    plan = autopar.plan(model, args, mesh="2x2", hardware=stressed(), compute_dtype=dtype, time_limit=15)
    found = verify(plan, Target(model, args), backend="simulate", steps=2)
    assert found.passed, str(found)
