"""Plain torch, as users write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.target import Target
from benchmarks.families.row import BATCH, CLASSES, VOCAB, Family, Mode, token_ids


class Recurrent(nn.Module):
    """Two LSTM layers under spectral and weight norm as they were written before parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens))
        return self.head(hidden).flatten(0, 1)


class Recommender(nn.Module):
    """Bags of categories by ``embedding_bag``, crossed with dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(VOCAB, 16, mode=mode) for mode in ("sum", "mean")])
        self.dense = nn.Linear(8, 16)
        self.top = nn.Linear(16 + 3, CLASSES)

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        parts = torch.stack([self.dense(features), *(bag(categories) for bag in self.bags)], 1)
        row, column = torch.triu_indices(3, 3, 1)
        crossed = (parts @ parts.mT)[:, row, column]
        return self.top(torch.cat([parts[:, 0], crossed], 1))


def _plain(name: str, model: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], labels: Callable[[], Tensor]) -> Family:
    def build(mode: Mode) -> Target:
        return Target(model(), inputs(), {}, *((F.cross_entropy, (labels(),)) if mode == "train" else (None, ())))

    return Family(name, "torch", build)


class Translator(nn.Module):
    """``nn.Transformer`` with the masks that its tutorial gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        return self.head(hidden).flatten(0, 1)


TORCH: tuple[Family, ...] = (
    _plain("nn.Transformer", Translator, lambda: (token_ids(), token_ids(BATCH, 8)), lambda: token_ids(BATCH * 8)),
    _plain("nn.LSTM", Recurrent, lambda: (token_ids(BATCH, 8),), lambda: token_ids(BATCH * 8)),
    _plain("dlrm", Recommender, lambda: (torch.randn(BATCH, 8), token_ids(BATCH, 4)), lambda: torch.randint(CLASSES, (BATCH,))),
)
