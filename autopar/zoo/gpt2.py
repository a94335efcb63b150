"""GPT-2: learned positions, GELU, layer norm before each part, the output projection tied to the token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value projections, so that heads can be split."""

    def __init__(self, width: int, heads: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, dtype=dtype)
        self.key = nn.Linear(width, width, dtype=dtype)
        self.value = nn.Linear(width, width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = (part(x).view(b, s, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(x.transpose(1, 2).reshape(b, s, width)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, dtype=dtype)
        self.attn = Attention(width, heads, dropout, dtype)
        self.norm2 = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """``tokens [batch, seq]`` to logits ``[batch, seq, vocab]``, or to the mean cross entropy when ``targets`` are given."""

    def __init__(self, vocab: int, seq: int, layers: int, width: int, heads: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width, dtype=dtype)
        self.positions = nn.Embedding(seq, width, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, heads, dropout, dtype) for _ in range(layers))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.head = nn.Linear(width, vocab, bias=False, dtype=dtype)
        self.head.weight = self.tokens.weight
        self.initialize()

    def initialize(self) -> None:
        """Small embeddings, so that the tied output projection starts with small logits."""
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    *, batch: int, seq: int, layers: int, width: int, heads: int, vocab: int, dropout: float, dtype: torch.dtype
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its training inputs ``(tokens, targets)``; inference takes the first."""
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    model = GPT2(vocab, seq, layers, width, heads, dropout, dtype)
    return model, (torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq)))
