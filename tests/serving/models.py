"""A small causal model with a cache, in plain torch, called as those of transformers are; and what it generates on one device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.module.compiling import rebuild
from autopar.runtime.steps.simulation import simulate
from autopar.serving.cached import NAME, cached
from autopar.serving.planning import Serving

VOCAB, WIDTH, HEADS, LAYERS = 32, 16, 4, 2


class Past:
    """Keys and values of earlier tokens by layer, and how many there are."""

    def __init__(self, batch: int, length: int) -> None:
        shape = (batch, HEADS, length, WIDTH // HEADS)
        self.layers = [SimpleNamespace(keys=torch.zeros(shape), values=torch.zeros(shape)) for _ in range(LAYERS)]
        self.filled = torch.zeros((), dtype=torch.int64)
        self.kind = "whole"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor, past: Any, places: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        if past is not None:
            past.keys.index_copy_(2, places, k)
            past.values = past.values.index_copy(2, places, v)
            k, v = past.keys, past.values
        made = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(made.transpose(1, 2).flatten(2))


class Causal(nn.Module):
    """``input_ids [batch, n]`` to logits ``[batch, n, VOCAB]``."""

    def __init__(self, most: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(most, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Past | None = None,
    ) -> Any:  # fmt: skip
        columns, past = input_ids.shape[1], past_key_values
        places = torch.arange(columns) + (0 if past is None else past.filled)
        length = columns if past is None else past.layers[0].keys.shape[2]
        mask = (torch.arange(length) <= places[:, None])[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        x = self.tokens(input_ids) + self.positions(places if position_ids is None else position_ids)
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = x + layer(norm(x), mask, None if past is None else past.layers[index], places)
        if past is not None:
            past.filled = past.filled + columns
        return SimpleNamespace(logits=self.head(x))


def causal(seed: int = 0) -> Causal:
    """Weights large enough for tokens to differ from place to place and row to row."""
    with torch.random.fork_rng():
        torch.manual_seed(seed + 1)
        model = Causal()
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, std=2.0 if name.startswith(("tokens", "positions")) else 0.3)
    return model.eval()


def past(batch: int) -> Callable[[int], Past]:
    return lambda length: Past(batch, length)


@torch.no_grad()
def greedy(model: nn.Module, rows: list[list[int]], new: int) -> list[list[int]]:
    """The tokens after each prompt alone, without padding and without a cache."""
    found = []
    for row in rows:
        tokens = list(row)
        for _ in range(new):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(row) :])
    return found


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask of prompts of several lengths, padded on the left."""
    columns = max(map(len, rows))
    ids = torch.tensor([[0] * (columns - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.no_grad()
def simulated(model: nn.Module, serving: Serving, make: Any, ids: Tensor, mask: Tensor, new: int) -> Tensor:
    """What the plans generate on all their ranks in one process; prompts as long as one planned."""
    prompt, length, held, made = ids.shape[1], 0, dict[str, Tensor](), []
    weights = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    tokens, positions, rebuilt = ids, (mask.cumsum(1) - 1).clamp(min=0), {}
    for number in range(new):
        length = max(length, serving.room(prompt + number))
        call = length, tokens.shape[1]
        if call not in rebuilt:
            rebuilt[call] = rebuild(cached(model, ids.shape[0], length, make, device="meta"), serving.plans[call])
        captured, schedule = rebuilt[call]
        graph, values = schedule.graph, dict[str, Tensor]()
        places = nn.functional.pad(mask, (0, length - prompt), value=1)
        given = dict(zip(("input_ids", "attention_mask", "position_ids"), (tokens, places, positions), strict=True))
        for item in graph.inputs:
            if item.kind == "buffer" and item.name.startswith(f"{NAME}."):
                tensor = graph.tensors[item.tensor]
                whole = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
                if item.name in held:
                    whole[tuple(slice(extent) for extent in held[item.name].shape)] = held[item.name]
                values[item.tensor] = whole
            else:
                value = {"input": given, "constant": captured.constants}.get(item.kind, weights)[item.name]
                values[item.tensor] = value.reshape(graph.tensors[item.tensor].shape)  # of a dim of blocks, two
        outputs = simulate(schedule, values).outputs
        held = {output.name: whole for (output, _), whole in zip(schedule.outputs, outputs, strict=True) if output.kind == "buffer"}
        (tokens,) = (whole for (output, _), whole in zip(schedule.outputs, outputs, strict=True) if output.kind == "output")
        made.append(tokens)
        positions = positions[:, -1:] + 1
    return torch.cat(made, 1)
