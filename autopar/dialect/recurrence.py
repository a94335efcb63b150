"""``autopar.recurrence``: a recurrent layer, step after step, as one operator with its own gradient operator.

``gates [t, b, g]`` is what each step has of its input, made by one product outside of the operator; ``state [n, b, k]`` where it begins:
``h``, and of an LSTM ``c``; ``weight [g, k]`` and ``bias [g]`` multiply ``h`` and are added at every step. It gives the states after
each step, ``[n, t, b, k]``. The cells are torch's, their gates in torch's order:

- ``lstm`` (``g = 4k``: i, f, g, o; Hochreiter and Schmidhuber 1997, Gers et al. 2000): ``c = f c + i g``, ``h = o tanh(c)``;
- ``gru`` (``g = 3k``: r, z, n; Cho et al. 2014, ``r`` after the product): ``n = tanh(gates + r (W h + bias))``, ``h = (1 - z) n + z h``;
- ``tanh`` and ``relu`` (``g = k``; Elman 1990): ``h`` of the sum.

The gradient keeps the gates and the states alone: the products of all steps are made again as one, and so is the weight's gradient.
Rows of the batch know nothing of one another: they are what may be split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import define


def _product(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[b, k]`` to ``[b, g]``."""
    return h @ weight.t() if bias is None else torch.addmm(bias, h, weight.t())


def _activations(gates: Tensor, product: Tensor, cell: str) -> tuple[Tensor, ...]:
    """What the gates let through, of one step or of all: of a GRU also the part of the product that ``r`` multiplies."""
    if cell == "lstm":
        i, f, g, o = (gates + product).chunk(4, -1)
        return torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    if cell == "gru":
        of_r, of_z, of_n = gates.chunk(3, -1)
        r, z, inner = product.chunk(3, -1)
        r, z = torch.sigmoid(of_r + r), torch.sigmoid(of_z + z)
        return r, z, torch.tanh(of_n + r * inner), inner
    return ((torch.tanh if cell == "tanh" else torch.relu)(gates + product),)


def _recurrence(gates: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, cell: str) -> Tensor:
    states = _shapes(gates, state, weight, bias, cell)
    now = state
    for step, gate in enumerate(gates):
        made = _activations(gate, _product(now[0], weight, bias), cell)
        after = states[:, step]
        if cell == "lstm":
            i, f, g, o = made
            torch.addcmul(i * g, f, now[1], out=after[1])
            torch.mul(o, torch.tanh(after[1]), out=after[0])
        elif cell == "gru":
            torch.lerp(made[2], now[0], made[1], out=after[0])
        else:
            after[0].copy_(made[0])
        now = after
    return states


def _recurrence_backward(
    grad: Tensor, gates: Tensor, states: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, cell: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    before = torch.cat([state.unsqueeze(1), states[:, :-1]], 1)
    rows = before[0].flatten(0, 1)
    made = _activations(gates, _product(rows, weight, bias).view_as(gates), cell)
    of_gates = torch.empty_like(gates)
    of_product = torch.empty_like(gates) if cell == "gru" else of_gates
    back = torch.zeros_like(state)
    for step in range(gates.shape[0] - 1, -1, -1):
        now = tuple(tensor[step] for tensor in made)
        found, back = _back(back + grad[:, step], now, states[:, step], before[:, step], cell)
        torch.cat(found, 1, out=of_gates[step])
        if cell == "gru":
            torch.cat([*found[:2], found[2] * now[0]], 1, out=of_product[step])
        torch.addmm(back[0], of_product[step], weight, out=back[0])
    moved = of_product.flatten(0, 1)
    return of_gates, back, moved.t() @ rows, moved.sum(0)


def _back(back: Tensor, made: tuple[Tensor, ...], after: Tensor, before: Tensor, cell: str) -> tuple[list[Tensor], Tensor]:
    """Gradients of a step's gates, and of the states before it but for what goes through the product; ``back``: of those after it."""
    if cell == "lstm":
        i, f, g, o = made
        through = torch.tanh(after[1])
        of_c = back[1] + back[0] * o * (1 - through * through)
        found = [of_c * g * i * (1 - i), of_c * before[1] * f * (1 - f), of_c * i * (1 - g * g), back[0] * through * o * (1 - o)]
        return found, torch.stack([torch.zeros_like(of_c), of_c * f])
    if cell == "gru":
        r, z, n, inner = made
        of_n = back[0] * (1 - z) * (1 - n * n)
        return [of_n * inner * r * (1 - r), back[0] * (before[0] - n) * z * (1 - z), of_n], back * z
    return [back[0] * (1 - after[0] * after[0] if cell == "tanh" else after[0] > 0)], torch.zeros_like(back)


def _shapes(gates: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, cell: str) -> Tensor:
    return gates.new_empty([state.shape[0], gates.shape[0], *state.shape[1:]])


def _backward_shapes(
    grad: Tensor, gates: Tensor, states: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, cell: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = gates.new_empty(gates.shape), state.new_empty(state.shape), weight.new_empty(weight.shape)
    return *like, gates.new_empty(gates.shape[-1:])


def _save(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gates, state, weight, bias, context.cell = inputs
    context.save_for_backward(gates, output, state, weight, bias)


def _gradient(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    bias = context.saved_tensors[-1]
    *found, of_bias = torch.ops.autopar.recurrence_backward.default(gradient, *context.saved_tensors, context.cell)
    return *found, None if bias is None else of_bias, None


_TENSORS = "Tensor state, Tensor weight, Tensor? bias, str cell"
define(f"recurrence(Tensor gates, {_TENSORS}) -> Tensor", _recurrence, _shapes, _gradient, _save)
define(
    f"recurrence_backward(Tensor grad, Tensor gates, Tensor states, {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _recurrence_backward, _backward_shapes,
)  # fmt: skip
