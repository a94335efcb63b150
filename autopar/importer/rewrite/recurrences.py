"""LSTM, GRU and plain recurrent networks as ``autopar.recurrence``, an operator for each layer and direction.

Taken apart they would be a dozen operators a step, as torch's own with projections (``proj_size``) are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.importer.rewrite.contractions import autocast, linear

aten = torch.ops.aten
CELLS = {
    "lstm": aten.lstm.input, "gru": aten.gru.input, "tanh": aten.rnn_tanh.input, "relu": aten.rnn_relu.input,
}  # fmt: skip


def recurrences(next_seed: Callable[[], int]) -> dict[Any, Callable[..., Any]]:
    """By torch's operator."""
    return {operator: _network(cell, operator, next_seed) for cell, operator in CELLS.items()}


def _network(cell: str, operator: Any, next_seed: Callable[[], int]) -> Callable[..., Any]:
    def network(
        x: Tensor, begin: Any, weights: Sequence[Tensor], biased: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
    ) -> tuple[Tensor, ...]:
        begin = begin if cell == "lstm" else (begin,)
        ways, each = 2 if both else 1, len(weights) // layers
        projected = each // ways > (4 if biased else 2)
        x, ends = x.transpose(0, 1) if first else x, []
        for layer in range(layers):
            if layer and train and dropout:  # torch's own decomposition leaves it out
                x = torch.ops.autopar.dropout.default(x, dropout, next_seed())[0]
            states = [state.narrow(0, layer * ways, ways) for state in begin]
            mine = weights[layer * each : (layer + 1) * each]
            if projected:
                x, *end = operator(x, states, mine, biased, 1, 0.0, train, both, False)
            else:
                x, end = _layer(x, torch.stack(states), mine, cell, ways)
            ends.append(end)
        return x.transpose(0, 1) if first else x, *(torch.cat(parts) for parts in zip(*ends, strict=True))

    return network


def _layer(x: Tensor, states: Tensor, weights: Sequence[Tensor], cell: str, ways: int) -> tuple[Tensor, Sequence[Tensor]]:
    """``x [t, b, k]`` to its results and the states at the end ``[ways, b, k]``, from ``states [n, ways, b, k]``."""
    found, each = [], len(weights) // ways
    for way in range(ways):
        of_input, of_state, *biases = weights[way * each : (way + 1) * each]
        gates = linear(x.flip(0) if way else x, of_input, biases[0] if biases else None)
        given = autocast(gates, states[:, way], of_state, biases[1] if biases else None)
        if cell == "gru" and torch.is_autocast_enabled("cpu"):  # torch adds to a state that stays in float32
            given = tuple(item if item is None else item.float() for item in given)
        found.append(torch.ops.autopar.recurrence.default(*given, cell))
    out = [states[0].flip(0) if way else states[0] for way, states in enumerate(found)]
    return torch.cat(out, -1) if ways > 1 else out[0], torch.stack([states[:, -1] for states in found], 1).unbind(0)
