"""Llama 3: RMS norm, rotary positions computed in the forward, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``x [b, h, s, d]`` turned pairwise (first half against second) by the angles ``[s, d / 2]``."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal self-attention in which ``heads / kv_heads`` query heads share a key and value head."""

    def __init__(self, width: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_size = width // heads
        self.wq = nn.Linear(width, heads * self.head_size, bias=False, dtype=dtype)
        self.wk = nn.Linear(width, kv_heads * self.head_size, bias=False, dtype=dtype)
        self.wv = nn.Linear(width, kv_heads * self.head_size, bias=False, dtype=dtype)
        self.wo = nn.Linear(heads * self.head_size, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (part(x).view(b, s, -1, self.head_size).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(x.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.w2 = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.w3 = nn.Linear(width, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(width, eps=1e-5, dtype=dtype)
        self.attn = Attention(width, heads, kv_heads, dtype)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-5, dtype=dtype)
        self.ffn = FeedForward(width, hidden, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """``tokens [batch, seq]`` to logits ``[batch, seq, vocab]``, or to the mean cross entropy when ``targets`` are given."""

    def __init__(
        self, vocab: int, layers: int, width: int, heads: int, kv_heads: int, hidden: int, rope_base: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if width % heads or heads % kv_heads or (width // heads) % 2:
            raise ValueError(f"width {width}, heads {heads}, kv_heads {kv_heads}: heads must divide width into even parts, kv_heads heads")
        self.rope_base = rope_base
        self.head_size = width // heads
        self.tokens = nn.Embedding(vocab, width, dtype=dtype)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, hidden, dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5, dtype=dtype)
        self.head = nn.Linear(width, vocab, bias=False, dtype=dtype)

    def angles(self, seq: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[seq, head_size / 2]`` of position times frequency, computed in float32 at least."""
        wide = torch.promote_types(like.dtype, torch.float32)
        exponents = torch.arange(0, self.head_size, 2, device=like.device, dtype=wide) / self.head_size
        places = torch.arange(seq, device=like.device, dtype=wide)
        angles = places.unsqueeze(1) * self.rope_base**-exponents
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = self.angles(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
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
    kv_heads: int,
    hidden: int,
    vocab: int,
    rope_base: float,
    dtype: torch.dtype,
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its training inputs ``(tokens, targets)``; inference takes the first."""
    model = Llama(vocab, layers, width, heads, kv_heads, hidden, rope_base, dtype)
    return model, (torch.randint(vocab, (batch, seq)), torch.randint(vocab, (batch, seq)))
