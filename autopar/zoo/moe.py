"""A mixture of experts: transformer blocks whose feed-forward sends each token to its two best experts.

Dispatch is dense and statically shaped: each sequence gives each expert ``capacity`` places; a token's place is its rank among
the sequence's tokens that chose the expert, and tokens beyond the capacity pass by on the residual path. Moving tokens to
experts and back are contractions with a ``[batch, seq, experts, capacity]`` tensor. Grouped dispatch has no capacity: all choices are
sorted by expert, and one grouped product gives each row its expert's matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False, dtype=dtype)
        self.key = nn.Linear(width, width, bias=False, dtype=dtype)
        self.value = nn.Linear(width, width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (part(x).view(b, s, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(b, s, width))


class Experts(nn.Module):
    """Top-2 routing over ``experts`` two-layer networks; ``x [b, s, d]`` to the same shape."""

    def __init__(self, width: int, hidden: int, experts: int, capacity: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.empty(experts, width, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, width, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=self.up.shape[1] ** -0.5)
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)

    def routes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Which place of which expert each token takes, ``[b, s, e, c]``: as weights, and as zeros and ones."""
        probabilities = torch.softmax(self.router(x), -1)
        best, chosen = probabilities.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        experts = torch.arange(probabilities.shape[-1], device=x.device)
        picks = chosen.unsqueeze(-1) == experts
        weights = (best.unsqueeze(-1) * picks).sum(2)
        taken = picks.any(2)
        places = taken.to(x.dtype).cumsum(1) - 1
        slots = torch.arange(self.capacity, device=x.device)
        dispatch = (taken.unsqueeze(-1) & (places.unsqueeze(-1) == slots)).to(x.dtype)
        return weights.unsqueeze(-1) * dispatch, dispatch

    def forward(self, x: Tensor) -> Tensor:
        combine, dispatch = self.routes(x)
        places = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        hidden = nn.functional.gelu(torch.einsum("ebcd,edf->ebcf", places, self.up))
        results = torch.einsum("ebcf,efd->ebcd", hidden, self.down)
        return torch.einsum("bsec,ebcd->bsd", combine, results)


class GroupedExperts(Experts):
    """The same networks and routing without a capacity: no token passes by."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        best, chosen = torch.softmax(self.router(rows), -1).topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        order = chosen.flatten().sort(stable=True).indices
        taken = chosen.flatten().unsqueeze(-1) == torch.arange(self.up.shape[0], device=x.device)
        ends = taken.sum(0).cumsum(0).to(torch.int32)
        hidden = nn.functional.gelu(nn.functional.grouped_mm(rows[order // 2], self.up, offs=ends))
        results = nn.functional.grouped_mm(hidden, self.down, offs=ends) * best.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, order // 2, results).view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, experts: int, capacity: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, dtype=dtype)
        self.attn = Attention(width, heads, dtype)
        self.norm2 = nn.LayerNorm(width, dtype=dtype)
        self.experts = (Experts if capacity else GroupedExperts)(width, hidden, experts, capacity or 0, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.experts(self.norm2(x))


class MixtureOfExperts(nn.Module):
    """``tokens [batch, seq]`` to logits ``[batch, seq, vocab]``, or to the mean cross entropy when ``targets`` are given."""

    def __init__(
        self, vocab: int, layers: int, width: int, heads: int, hidden: int, experts: int, capacity: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width, dtype=dtype)
        self.layers = nn.ModuleList(Block(width, heads, hidden, experts, capacity, dtype) for _ in range(layers))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, vocab, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    *,
    batch: int,
    seq: int,
    layers: int,
    width: int,
    heads: int,
    hidden: int,
    experts: int,
    capacity_factor: float,
    dispatch: str,
    vocab: int,
    dtype: torch.dtype,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its training inputs ``(tokens, targets)``; inference takes the first. An expert has room for
    ``capacity_factor`` times its even share of a sequence's choices under ``dense`` dispatch, and for all under ``grouped``."""
    if dispatch not in ("dense", "grouped"):
        raise ValueError(f"dispatch={dispatch} is not dense or grouped")
    if dispatch == "grouped" and dtype == torch.float64:
        raise ValueError("dispatch=grouped has no kernel for float64")
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    if experts < 2:
        raise ValueError(f"experts={experts}: each token goes to two")
    capacity = min(seq, max(1, round(capacity_factor * 2 * seq / experts)))
    model = MixtureOfExperts(vocab, layers, width, heads, hidden, experts, capacity if dispatch == "dense" else None, dtype)
    return model, (torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq)))
