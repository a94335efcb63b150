"""Models whose weights are several in one, cut as people cut them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """A transformer layer with one weight for queries, keys and values, or three, and one for gate and up, or two. ``x [b, s, width]``."""

    def __init__(self, width: int = 32, heads: int = 4, *, qkv: bool = True, gate_up: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, (qkv, gate_up)
        self.qkv = nn.ModuleList(nn.Linear(width, size, bias=bias) for size in ([3 * width] if qkv else [width] * 3))
        self.out = nn.Linear(width, width, bias=bias)
        self.gate_up = nn.ModuleList(nn.Linear(width, size, bias=False) for size in ([8 * width] if gate_up else [4 * width] * 2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        qkv = self.qkv[0](x).split(width, 2) if self.fused[0] else [part(x) for part in self.qkv]
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width))
        gate, up = self.gate_up[0](x).chunk(2, -1) if self.fused[1] else [part(x) for part in self.gate_up]
        return x + self.down(F.silu(gate) * up)


class Vision(nn.Module):
    """Heads as vision transformers make them: one view, one permute, unbind."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(x).reshape(b, s, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, width))


class Rows(nn.Module):
    """A weight ``[in, out]`` as GPT-2's, on flattened rows, cut by slices."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, 3 * width) / 8), nn.Parameter(torch.randn(3 * width))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        y = torch.addmm(self.bias, x.view(-1, width), self.weight).view(b, s, -1)
        return self.proj(y[:, :, :width] * torch.tanh(y[..., width : 2 * width]) + y[..., 2 * width :])


class Cell(nn.Module):
    """A recurrent cell: two products added, four gates."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.given, self.held = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.tanh(x[:, 0])
        for step in range(2):
            i, f, g, o = (self.given(x[:, step]) + self.held(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class Attention(nn.Module):
    """torch's own: of ``x`` to itself, or to the first half of it, where its weight is cut in one and two blocks."""

    def __init__(self, *, cross: bool) -> None:
        super().__init__()
        self.cross, self.attention = cross, nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        other = x[:, : x.shape[1] // 2] if self.cross else x
        found: Tensor = self.attention(x, other, other, need_weights=False)[0]
        return found


MODELS = {
    "layer": Layer, "vision": Vision, "rows": Rows, "cell": Cell,
    "attention": lambda: Attention(cross=False), "cross": lambda: Attention(cross=True),
}  # fmt: skip


def loss(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def x(batch: int = 4) -> Tensor:
    return torch.randn(batch, 8, 32)
