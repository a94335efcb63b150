"""Plain torch, as users write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.families.row import BATCH, CLASSES, VOCAB, Family, classified, token_ids, trained_by


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


class Physics(nn.Module):
    """A field whose derivatives by place and time shall fit an equation: gradients and second derivatives of a function, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, places: Tensor) -> Tensor:
        value: Callable[[Tensor], Tensor] = lambda place: self.field(place).squeeze(-1)  # noqa: E731
        slope = torch.func.vmap(torch.func.grad(value))(places)
        curve = torch.func.vmap(torch.func.hessian(value))(places)
        return slope[:, 1] + value(places) * slope[:, 0] - 0.01 * curve[:, 0, 0]


class Forces(nn.Module):
    """The energy of atoms by their distances, and forces, its gradient by their places, where nothing trains too."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.radial, self.out = nn.Embedding(8, 16), nn.Linear(8, 16), nn.Linear(16, 1)
        self.register_buffer("centres", torch.linspace(0, 5, 8))

    def forward(self, places: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            apart = (places[:, :, None] - places[:, None] + 1e-3).norm(dim=-1, keepdim=True)
            hidden = (self.radial((-(apart - self.centres).square()).exp()) * self.kinds(kinds)[:, None]).sum(2)
            energy = self.out(F.silu(hidden)).sum((1, 2))
            return energy, -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]


class Contrast(nn.Module):
    """Scores of an encoder's samples against those of one that follows it, and against a queue of older ones."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.follower = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.follower.requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 32))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if not self.training:
            return self.encoder(first)  # type: ignore[no-any-return]
        with torch.no_grad():
            for own, other in zip(self.encoder.parameters(), self.follower.parameters(), strict=True):
                other.data = other.data * 0.99 + own.data * 0.01
            key = F.normalize(self.follower(second), dim=1)
        made = F.normalize(self.encoder(first), dim=1)
        scores = torch.cat([(made * key).sum(1, keepdim=True), made @ self.queue], 1) / 0.07
        self.queue = torch.cat([self.queue[:, len(key) :], key.t()], 1)
        return scores


class Sampled(nn.Module):
    """A variational autoencoder and a policy, by ``torch.distributions``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.policy = nn.Linear(16, 16), nn.Linear(8, 16), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
        drawn = posterior.rsample()
        seen = torch.distributions.Bernoulli(logits=self.decoder(drawn)).log_prob((x > 0).float()).sum(-1, keepdim=True)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.policy(drawn) - seen + torch.distributions.kl_divergence(posterior, prior).sum(-1, keepdim=True)


TORCH: tuple[Family, ...] = (
    trained_by(lambda rest: rest.square().mean(), "physics", Physics, lambda: (torch.rand(16, 2),), None),
    trained_by(lambda found: found[0].square().mean() + found[1].square().mean(), "forces", Forces,
               lambda: (torch.randn(BATCH, 5, 3), torch.randint(8, (BATCH, 5))), None),
    classified("momentum contrast", Contrast, lambda: (torch.randn(8, 16), torch.randn(8, 16)), lambda: torch.zeros(8, dtype=torch.int64)),
    classified("distributions", Sampled, lambda: (torch.randn(8, 16),), lambda: torch.randint(CLASSES, (8,))),
    classified("nn.Transformer", Translator, lambda: (token_ids(), token_ids(BATCH, 8)), lambda: token_ids(BATCH * 8)),
    classified("nn.LSTM", Recurrent, lambda: (token_ids(BATCH, 8),), lambda: token_ids(BATCH * 8)),
    classified("dlrm", Recommender, lambda: (torch.randn(BATCH, 8), token_ids(BATCH, 4)), lambda: torch.randint(CLASSES, (BATCH,))),
)  # fmt: skip
