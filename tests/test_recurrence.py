"""Recurrent layers as one operator: torch's values and gradients, split batches, as many kernels as are priced."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.dialect import recurrence as bodies
from autopar.graph import Op, Ref, Tensor
from autopar.importer.rewrite.recurrences import CELLS, recurrences
from autopar.rules import kernel_launches
from benchmarks.models import stressed
from tests.test_dialect import registered

ops = torch.ops.autopar
GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}
STATES = {"lstm": 2, "gru": 1, "tanh": 1, "relu": 1}


def network(cell: str, **options) -> nn.Module:
    torch.manual_seed(0)
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}.get(cell, nn.RNN)
    return kind(5, 6, 2, **options, **({"nonlinearity": cell} if kind is nn.RNN else {})).double()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_values_and_gradients_are_torchs(cell, bias, both):
    module = network(cell, bias=bias, bidirectional=both, batch_first=both)
    x, begin = drawn(4, 3, 5), [drawn(4 if both else 2, 4 if both else 3, 6) for _ in range(STATES[cell])]
    weights = module._flat_weights

    def run(operator):
        results = operator(x, begin if cell == "lstm" else begin[0], weights, bias, 2, 0.0, False, both, both)
        total = sum((result * drawn(*result.shape).detach()).sum() for result in results)
        return [*results, *torch.autograd.grad(total, [x, *begin, *weights])]

    torch.testing.assert_close(run(recurrences(lambda: 0)[CELLS[cell]]), run(CELLS[cell]), rtol=1e-10, atol=1e-12)


def operands(cell: str, steps: int) -> tuple:
    gates = GATES[cell] * 6
    return drawn(steps, 3, gates), drawn(STATES[cell], 3, 6), drawn(gates, 6), drawn(gates), cell


@pytest.mark.parametrize("cell", CELLS)
def test_recurrence_is_registered(cell):
    registered(ops.recurrence.default, *operands(cell, 4))


class Kernels(TorchDispatchMode):
    """Counts operators that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and "empty" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cell", CELLS)
def test_every_step_runs_the_kernels_that_are_priced(cell):
    def counted(body, *arguments) -> int:
        with Kernels() as kernels:
            body(*arguments)
        return kernels.count

    def taken(steps: int) -> tuple[int, int]:
        given = [item.detach() if isinstance(item, torch.Tensor) else item for item in operands(cell, steps)]
        states = bodies._recurrence(*given)
        back = (torch.ones_like(states), given[0], states, *given[1:])
        return counted(bodies._recurrence, *given), counted(bodies._recurrence_backward, *back)

    more = [late - soon for soon, late in zip(taken(3), taken(4), strict=True)]
    gates = Tensor("gates", (1, 3, GATES[cell] * 6), "float32")
    reads = tuple(map(Ref, range(5)))
    forward = Op("f", "autopar.recurrence.default", ("gates", "state", "weight"), ("states",), (*reads[:3], None, cell))
    names = ("grad", "gates", "states", "state", "weight")
    backward = Op("b", "autopar.recurrence_backward.default", names, ("of_gates", "of_state"), (*reads, None, cell))
    assert [kernel_launches(op, {"gates": gates}) for op in (forward, backward)] == more


class Tagger(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 8)
        self.rnn = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=dropout)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.rnn(self.embed(tokens))[0]).flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 40, (8, 12)), torch.randint(0, 40, (8, 12))


def test_a_network_has_as_many_operators_however_many_steps():
    short, long = (autopar.capture(Tagger(), tuple(item[:, :steps] for item in batch())) for steps in (3, 12))
    assert len(short.ops) == len(long.ops)
    assert sum(op.target.startswith("autopar.recurrence") for op in long.ops) == 8, "two layers, two directions, and their gradients"


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_network_is_split_over_the_batch(dropout):
    model, arguments = Tagger(dropout), batch()
    plan = autopar.plan(model, arguments, mesh="2x2", hardware=stressed(), time_limit=600)
    cut = [row.outputs[0].spec for row in plan.ops if row.op == "autopar.recurrence.default"]
    assert len(cut) == 4
    assert all(spec.split()[2].startswith("S") for spec in cut), cut
    assert not autopar.check(plan)
    found = autopar.verify(plan, (model, arguments), backend="simulate", steps=3)
    assert found.passed, found.problems


def test_projections_are_captured_as_torch_takes_them_apart():
    module = nn.LSTM(4, 6, proj_size=3)
    graph = autopar.capture(module, (torch.randn(3, 2, 4),), loss=lambda out: out[0].sum())
    assert not any(op.target.startswith("autopar.recurrence") for op in graph.ops)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 6)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths))[1]


def test_packed_sequences_are_refused_at_their_line():
    with pytest.raises(
        autopar.AutoparError, match=r"(?s)test_recurrence.py:\d+: sequences are packed .*hint: give the recurrent layer the padded"
    ):
        autopar.capture(Packed(), (torch.randn(5, 3, 4), torch.tensor([5, 4, 2])), mode="inference")
