"""Rows sorted by expert for grouped products are left unsorted, however that is written; where rows meet they stay sorted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.dialect.experts import NOT_KEPT, KeptPlaces, Places
from autopar.dialect.library import WHOLE
from autopar.importer import capture
from tests.importer.test_capture import run, targets

torch.set_num_threads(1)
TOKENS, WIDTH, EXPERTS, CHOICES = 12, 8, 4, 2
Dispatch = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """Top-2 routing over gated experts, dispatched as ``form`` does: ``(self, x [t, d], weights [t, 2], ids [t, 2]) -> [t, d]``."""

    def __init__(self, form: Dispatch) -> None:
        super().__init__()
        self.form, self.router = form, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * 8, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(CHOICES, -1)
        return self.form(self, x, weights, ids).tanh().square().sum() + weights.square().sum()

    def apart(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)


def counted(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)


def inverse(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Put back by the inverse order, with a bias looked up for each row."""
    chosen, order = ids.reshape(-1).sort()
    rows = self.apart(x[order // CHOICES], counted(chosen))
    rows.add_(self.bias[chosen])
    rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return rows[back].view(-1, CHOICES, WIDTH).sum(1)


def added(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Added to where they belong; experts counted by comparison."""
    order = ids.flatten().argsort(stable=True)
    ends = (ids.flatten().unsqueeze(-1) == torch.arange(EXPERTS)).sum(0).cumsum(0).to(torch.int32)
    rows = self.apart(x.index_select(0, torch.div(order, CHOICES, rounding_mode="floor")), ends)
    return torch.zeros_like(x).index_add(0, order // CHOICES, rows * weights.flatten()[order, None])


def repeated(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Rows repeated first; experts counted one-hot; put back by writing."""
    order = ids.flatten().sort(stable=True).indices
    ends = F.one_hot(ids.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
    rows = self.apart(x.repeat_interleave(CHOICES, 0)[order], ends)
    back = torch.zeros_like(rows)
    back[order] = rows
    return (back.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


FORMS = (inverse, added, repeated)


def one(model: nn.Module, x: Tensor) -> dict[tuple[str, str], Tensor]:
    """What the model gives, and its gradients."""
    loss = model(x)
    loss.backward()
    gradients = {("gradient", name): item.grad for name, item in model.named_parameters() if item.grad is not None}
    return {("output", "0"): loss.detach(), **gradients}


def check_the_same(model: nn.Module, tokens: int = TOKENS) -> list[str]:
    """The captured graph's operators, whose results are the model's."""
    torch.manual_seed(0)
    x = torch.randn(tokens, WIDTH)
    captured = capture(model, (x,))
    results = run(captured, model, {"x": x})
    for (kind, name), value in one(model, x).items():
        found = next(item for key, item in results.items() if key[0] == kind and (kind == "output" or key[1] == name))
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    return targets(captured.graph)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_rows_are_left_unsorted(form: Dispatch) -> None:
    found = check_the_same(Mixture(form))
    assert found.count("autopar.expert_contract.default") == 5, "two products, the gradients of their matrices, that of the second's rows"
    assert not {"aten.sort.default", "aten.sort.stable", "aten.argsort.stable", "autopar.grouped_mm.default"} & set(found)


def test_fused_matrices_are_in_blocks() -> None:
    graph = capture(Mixture(inverse), (torch.randn(TOKENS, WIDTH),)).graph
    assert [(item.name, item.blocks.dim, item.blocks.count) for item in graph.inputs if item.blocks] == [("up", 1, 2)]


def mixed(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Rows take part in a running sum."""
    chosen, order = ids.reshape(-1).sort()
    rows = self.apart(x[order // CHOICES], counted(chosen)).cumsum(0)
    return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


def cut(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Only the first rows count."""
    chosen, order = ids.reshape(-1).sort()
    rows = self.apart(x[order // CHOICES], counted(chosen))
    return rows[: TOKENS // 2]


def elsewhere(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Groups end where other choices say."""
    order = ids.reshape(-1).argsort(stable=True)
    rows = self.apart(x[order // CHOICES], counted((EXPERTS - 1) - ids.reshape(-1)))
    return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


def written(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The choices are others when they are read again."""
    ids = ids.reshape(-1).clone()
    order = ids.argsort(stable=True)
    ends = counted(ids)
    ids.fill_(0)
    rows = self.apart(x[order // CHOICES], ends)
    return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


def normed(self: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Each row is compared with the one of its place."""
    order = ids.reshape(-1).argsort(stable=True)
    rows = self.apart(x[order // CHOICES], counted(ids.reshape(-1))) * torch.arange(CHOICES * TOKENS).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


@pytest.mark.parametrize("form", [mixed, cut, elsewhere, written, normed], ids=lambda form: form.__name__)
def test_where_rows_meet_they_stay_sorted(form: Dispatch) -> None:
    found = check_the_same(Mixture(form))
    assert "autopar.grouped_mm.default" in found
    assert "autopar.expert_contract.default" not in found


class Activated(Mixture):
    """With an activation between two products."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__(added)
        self.activation = activation

    def apart(self, rows: Tensor, ends: Tensor) -> Tensor:
        made = F.grouped_mm(rows, self.up[:, :8].transpose(1, 2), offs=ends)
        return F.grouped_mm(self.activation(made), self.down, offs=ends)


STEEP = {
    "quotient": lambda x: x / x, "logarithm": lambda x: x.square().log(), "root": lambda x: x.square().sqrt(), "inverse": torch.reciprocal,
    "power": lambda x: x.square() ** 0.5, "over": lambda x: 1.0 / x, "norm without a margin": lambda x: F.layer_norm(x, (8,), eps=0.0),
    "root mean square without a margin": lambda x: F.rms_norm(x, (8,), eps=0.0), "infinite": lambda x: x.masked_fill(x == 0, float("inf")),
}  # fmt: skip
MILD = {
    "gelu": F.gelu, "relu": F.relu, "clamped": lambda x: x.clamp(-1, 1) * torch.sigmoid(1.7 * x), "power": lambda x: 0.1 * x**2,
    "halves": lambda x: x / 2, "norm": lambda x: F.layer_norm(x, (8,)), "root mean square": lambda x: F.rms_norm(x, (8,), eps=1e-6),
    "in place": lambda x: F.silu(x).mul_(x), "mean": lambda x: x - x.mean(-1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", STEEP)
def test_what_spoils_gradients_at_zero_stays_sorted(name: str) -> None:
    """Two rows of zeros fill up 26 choices, and their gradients would be no numbers."""
    found = check_the_same(Activated(STEEP[name]), tokens=13)
    assert "autopar.expert_contract.default" not in found


@pytest.mark.parametrize("name", MILD)
def test_what_is_finite_at_zero_is_dispatched(name: str) -> None:
    found = check_the_same(Activated(MILD[name]), tokens=13)
    assert "autopar.expert_contract.default" in found


@pytest.mark.parametrize("name", ["find_order", "find_ends"])
def test_places_are_found_once_until_the_numbers_are_written_over(name: str) -> None:
    """Numbers of choices lie in any order, and those of rows by expert."""
    ids, kept = torch.tensor([0, 0, 2, 2, 2, 3, 3, 3] if name == "find_ends" else [2, 0, 3, 2, 0, 0, 3, 2]), KeptPlaces()
    find, find_anew = getattr(kept, name), getattr(NOT_KEPT, name)
    first = find(ids, 0, 4)
    assert find(ids, 0, 4) is first
    for number in (0, 1):
        if number:
            ids.copy_(torch.tensor([0, 1, 1, 1, 1, 2, 3, 3]))
        for window in ((0, 4), (1, 2), (WHOLE, 4)):
            assert torch.equal(find(ids, *window), find_anew(ids, *window)), (number, window)
    assert find(ids, 0, 4) is not first
    again = find(ids, 0, 4)
    kept.let_go()
    assert find(ids, 0, 4) is not again


def test_choices_at_hand_are_by_expert_and_rows_end_where_the_next_expert_begins() -> None:
    ids, places = torch.tensor([2, 0, 3, 2, 0, 0, 3, 2]), Places()
    assert places.find_order(ids, WHOLE, 4).tolist() == places.find_order(ids, 0, 4).tolist() == [1, 4, 5, 0, 3, 7, 2, 6]
    assert places.find_order(ids, 1, 2).tolist() == [0, 3, 7]
    assert places.find_ends(ids.sort()[0].view(2, 4), WHOLE, 4).tolist() == [3, 3, 6, 8]
    assert places.find_ends(torch.tensor([[2, 2], [3, 3]]), 1, 3).tolist() == [0, 2, 4]


def test_numbers_that_count_no_writes_are_sorted_each_time() -> None:
    kept = KeptPlaces()
    with torch.inference_mode():
        ids = torch.tensor([2, 0, 1])
        before = kept.find_order(ids, 0, 3).tolist()
        ids.neg_().add_(2)
        assert kept.find_order(ids, 0, 3).tolist() != before


@pytest.mark.parametrize("equation", ["e j k, e k n, e j -> e j n", "e j k, e j n, e j -> e k n"])
@pytest.mark.parametrize("ids", [[0, 0, 1, 2, 2, 2, 2, 3], [1, 1, 1, 1, 1, 1, 1, 1]])
def test_the_grouped_kernel_and_a_product_for_each_expert_agree(equation: str, ids: list[int]) -> None:
    """torch has the one for float32, and not for float64."""
    torch.manual_seed(0)
    inner = 4 if "e k n" in equation.split("->")[0] else 2
    x, other, numbers = torch.randn(4, 2, 4), torch.randn(4, inner, 8), torch.tensor(ids).view(4, 2)
    contract = torch.ops.autopar.expert_contract.default
    found, wanted = (contract(x.to(dtype), other.to(dtype), numbers, equation, 4, 0) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(found, wanted.float())
