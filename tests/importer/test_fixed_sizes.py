"""Sizes that depend on values: the line that makes one is named, and what the hint writes in its place is captured and does the same.

Sizes kept in buffers that nothing writes are constants.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import torch_compat
from autopar.errors import CaptureError, UsageError
from autopar.importer import capture
from autopar.verify.launch import run_ranks
from tests.importer.graph_interpreter import run_graph


class Model(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function
        self.register_buffer("stride", torch.tensor(2))
        self.register_buffer("sizes", torch.tensor([1, 3]))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.table = torch.tensor([2, 0, 1, 1])  # a plain attribute

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        made: Tensor = self.function(self, self.layer(x), values)
        return made


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
MASK, COUNTS = torch.tensor([True, False, True, True]), torch.tensor([2, 0, 1, 1])


def run(function: Any, values: Tensor) -> Tensor:
    """What the captured program of a model gives."""
    model = Model(function)
    captured = capture(model, (X, values), mode="inference")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants, "x": X, "values": values}
    found = run_graph(captured.graph, {item.tensor: held[item.name].detach() for item in captured.graph.inputs})
    (output,) = captured.graph.outputs
    return found[output.tensor]


def masked_rows(model, x, mask):
    return x[mask].mean(0)  # here


def masked_rows_of_fixed_size(model, x, mask):
    return torch.where(mask[:, None], x, 0).sum(0) / mask.sum()


def places(model, x, mask):
    i = mask.nonzero()[:, 0]  # here
    if len(i) > 0:
        x = x * 1
    return x[i].sum(0)


def places_of_fixed_size(model, x, mask):
    i = mask.int().argsort(descending=True, stable=True)
    return torch.where(mask[i][:, None], x[i], 0).sum(0)


def distinct(model, x, values):
    return values.unique().sum() + 0 * x.sum()  # here


def distinct_of_fixed_size(model, x, values):
    s = values.sort().values
    first = torch.cat([s[:1] == s[:1], s[1:] != s[:-1]])
    return torch.where(first, s, 0).sum() + 0 * x.sum()


def repeated(model, x, r):
    return x.repeat_interleave(r, 0).cumsum(0)[-1]  # here


def repeated_of_fixed_size(model, x, r):
    i = torch.arange(6)
    rows = x[(i[:, None] >= r.cumsum(0)).sum(1).clamp(max=len(x) - 1)]
    return torch.where((i < r.sum())[:, None], rows, 0).sum(0)


def repeated_to_a_size(model, x, r):
    return x.repeat_interleave(r, 0, output_size=4).sum(0)


def split(model, x, sizes):
    return torch.stack([part.sum(0) for part in x.split(sizes.tolist())])  # here


def split_of_fixed_size(model, x, sizes):
    k = (torch.arange(len(x))[:, None] >= sizes.cumsum(0)).sum(1)
    return x.new_zeros(len(sizes), x.shape[1]).index_add(0, k, x)


def first_rows(model, x, counts):
    n = counts[0].item()  # here
    if n > 1:
        x = x * 1
    return x[: int(n)].sum(0)


def first_rows_of_fixed_size(model, x, counts):
    n = counts[0]
    return torch.where(torch.arange(len(x))[:, None] < n, x, 0).sum(0)


@pytest.mark.parametrize(("function", "rewritten", "values", "words"), [
    (masked_rows, masked_rows_of_fixed_size, MASK, ["torch.where(mask[:, None], x, 0)", "divided by mask.sum()"]),
    (places, places_of_fixed_size, MASK, ["mask.int().argsort(descending=True, stable=True)", "torch.where(mask[i][:, None], x[i], 0)"]),
    (distinct, distinct_of_fixed_size, COUNTS, ["s = x.sort().values", "torch.cat([s[:1] == s[:1], s[1:] != s[:-1]])"]),
    (repeated, repeated_of_fixed_size, COUNTS, ["x[(i[:, None] >= r.cumsum(0)).sum(1).clamp(max=len(x) - 1)]", "i < r.sum()"]),
    (repeated, repeated_to_a_size, COUNTS, ["output_size="]),
    (split, split_of_fixed_size, COUNTS, [
        "k = (torch.arange(len(x))[:, None] >= sizes.cumsum(0)).sum(1)", "x.new_zeros(len(sizes), x.shape[1]).index_add(0, k, x)",
    ]),
    (first_rows, first_rows_of_fixed_size, COUNTS, ["torch.where(torch.arange(len(x))[:, None] < n, x, 0)"]),
])  # fmt: skip
def test_what_the_hint_writes_does_the_same(function, rewritten, values, words):
    """At the line that makes the size, also where another one looks at it first."""
    with pytest.raises(CaptureError, match=r"test_fixed_sizes.py:\d+: .*depends on the values of a tensor\n.*# here") as refused:
        run(function, values)
    assert all(word in refused.value.hint for word in words), refused.value.hint
    torch.manual_seed(0)
    wanted = Model(function)(X, values)
    torch.manual_seed(0)
    assert torch.allclose(run(rewritten, values), wanted)


def pooled(model, x, values):
    return F.avg_pool1d(x.T[None], 2, stride=int(model.stride)).sum() + x[:: model.stride.item()].sum()


def parted(model, x, values):
    one, other = x.split(model.sizes.tolist())
    return one.sum() - other.sum() + x[model.mask].sum() + x.repeat_interleave(model.table, 0)[1].sum()


@pytest.mark.parametrize("function", [pooled, parted])
def test_sizes_in_buffers_that_nothing_writes_are_constants(function):
    torch.manual_seed(0)
    wanted = Model(function)(X, COUNTS)
    torch.manual_seed(0)
    assert torch.allclose(run(function, COUNTS), wanted)


def test_an_index_in_a_buffer_stays_a_tensor():
    captured = capture(Model(lambda model, x, values: x[model.stride]), (X, COUNTS), mode="inference")
    assert "stride" in {item.name for item in captured.graph.of_kind("buffer")}


def counting(model, x, values):
    n = int(model.stride)  # here
    model.stride += 1
    return x[:n].sum()


def assigned(model, x, values):
    n = int(model.stride)  # here
    model.stride = model.stride + 1
    return x[:n].sum()


def written_before(model, x, values):
    model.stride.add_(1)
    return x[: int(model.stride)].sum()  # here


@pytest.mark.parametrize("function", [counting, assigned, written_before])
def test_a_buffer_that_the_forward_writes_is_no_constant(function):
    with pytest.raises(CaptureError, match=r"test_fixed_sizes.py:\d+: .*\n.*# here") as refused:
        run(function, COUNTS)
    if function is not written_before:
        assert "reads a value of its buffer stride as a constant, and writes to it afterwards" in refused.value.message


def test_buffers_without_values_are_not_known():
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Model(pooled).to("meta"), (X, COUNTS), mode="inference")


def as_eager(model, x, values):
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        raise TypeError("no mask is made here")
    return x.sin()


def at_all(model, x, values):
    raise TypeError("no mask is made here")


def test_a_model_that_asks_whether_it_is_exported_goes_as_in_eager() -> None:
    torch.manual_seed(0)
    wanted = Model(as_eager)(X, COUNTS)
    torch.manual_seed(0)
    assert torch.allclose(run(as_eager, COUNTS), wanted)
    assert torch.compiler.is_compiling.__module__ == "torch.compiler"


def test_what_fails_while_it_is_exported_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match="running the model fails with TypeError: no mask is made here"):
        run(at_all, COUNTS)
    monkeypatch.setattr(torch_compat, "answered_as_not_exported", nullcontext)
    with pytest.raises(CaptureError, match="the model runs, and fails while it is exported, with TypeError: no mask") as refused:
        run(as_eager, COUNTS)
    assert "give it the masks" in refused.value.hint


def test_a_loss_that_fails_is_not_taken_for_a_model_that_is_exported() -> None:
    """A target with fewer rows than the outputs fails outside of an export too."""
    with pytest.raises(CaptureError) as refused:
        capture(nn.Linear(8, 4), (torch.randn(8, 8),), loss=F.cross_entropy, loss_args=(torch.zeros(6, dtype=torch.int64),))
    words = "running the model and its loss fails with ValueError: Expected input batch_size (8) to match target batch_size (6)"
    assert words in str(refused.value) and "exported" not in str(refused.value)


class Strided(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("stride", torch.tensor(stride))

    def forward(self, x: Tensor) -> Tensor:
        picked = self.layer(x)[:, :: int(self.stride)]
        return x + picked.repeat_interleave(int(self.stride), 1)


class Chain(nn.Module):
    """Enough equal layers to be traced once, but for what their buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Strided(stride) for stride in (2, 2, 2, 2, 4, 1, 2, 2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def test_layers_with_other_values_in_their_buffers_are_no_equal_layers() -> None:
    captured = capture(chain(), (torch.zeros(4, 8),), mode="inference")
    steps = [op.args[4] if len(op.args) > 4 else 1 for op in captured.graph.ops if op.target == "aten.slice.Tensor"]
    assert sorted(captured.read) == [f"layers.{number}.stride" for number in range(10)]
    assert [step for step in steps if step > 1] == [2, 2, 2, 2, 4, 2, 2, 2, 2]


@pytest.mark.parametrize("part", ["", "layers", "layers.3"])
def test_a_state_dict_with_another_constant_is_refused(part: str) -> None:
    """The module computes with what the model had; a state dict that says the same is loaded, into a part by itself too."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    plan = autopar.plan(chain(), (x,), mode="inference", mesh="dp=2", hardware="cpu-cluster")

    def rank_main(rank: int) -> None:
        module = autopar.compile(chain(), plan, outputs="full")
        assert torch.allclose(module(x), chain()(x), atol=1e-6)
        loaded, state = module.get_submodule(part), chain().get_submodule(part).state_dict()
        loaded.load_state_dict(state)
        state["layers.3.stride".removeprefix(part).removeprefix(".")] = torch.tensor(4)
        with pytest.raises(UsageError, match=r"the buffer layers\.3\.stride becomes another one, and forward reads"):
            loaded.load_state_dict(state)

    run_ranks(rank_main, 2)
