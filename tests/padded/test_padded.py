"""Batches of any length, padded to planned ones, are those of one device without padding; where they would not be, calls are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, FileError, UsageError
from autopar.padded import Padded
from autopar.padded.planning import _length_dims
from autopar.verify.launch import run_ranks

LENGTHS = (8, 16, 24)
GIVEN: dict[str, Any] = {"mesh": "dp=2", "hardware": "cpu-cluster", "time_limit": 300.0}


class Net(nn.Module):
    """Attention under a mask of keys, or causal without one."""

    def __init__(self, causal: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.table, self.q, self.o = nn.Embedding(32, 16), nn.Linear(16, 48), nn.Linear(16, 32)
        self.drop, self.causal = nn.Dropout(drop), causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.table(x)
        q, k, v = self.q(h).chunk(3, -1)
        keys = None if mask is None else mask[:, None, :].bool()
        out: Tensor = self.o(h + self.drop(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keys, is_causal=self.causal)))
        return out


class Ending(Net):
    """Computes its loss itself, and returns it with its outputs by name, as models of libraries do."""

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = super().forward(x, mask)
        return {"logits": logits} if labels is None else {"loss": loss(logits, labels), "logits": logits}


class Pooled(Net):
    """Means over tokens: those of padding count."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask).mean(1)


class Normed(Net):
    """Statistics of all tokens."""

    def __init__(self) -> None:
        super().__init__(causal=True)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.o(self.norm(self.table(x).transpose(1, 2)).transpose(1, 2))
        return out


def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten())


def mean_of_masked(outputs: Tensor, wanted: Tensor) -> Tensor:
    """Padding adds nothing, and is divided by."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten(), reduction="none").mean()


def made(kind: type[Net] = Net, *args: Any, **kwargs: Any) -> Net:
    torch.manual_seed(0)
    return kind(*args, **kwargs).double()


def batch(length: int, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and targets; one row is shorter than the others."""
    generator = torch.Generator().manual_seed(length)
    x, wanted = (torch.randint(32, (rows, length), generator=generator) for _ in range(2))
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1, length - 2 :], wanted[1, length - 2 :] = 0, -100
    return x, mask, wanted


ALL = frozenset({frozenset({"x", "mask", "wanted"})})
"""Calls with all inputs were looked at."""
EXAMPLE = torch.zeros(4, 7, dtype=torch.int64)


@lru_cache
def planned() -> Padded:
    options = {**GIVEN, "mesh": "dp=2,tp=2"}
    return autopar.plan_padded(made(), (EXAMPLE, EXAMPLE), loss=loss, loss_args=(EXAMPLE,), lengths=LENGTHS, **options)


@lru_cache
def planned_on_two(drop: float = 0.0) -> Padded:
    return autopar.plan_padded(made(drop=drop), (EXAMPLE, EXAMPLE), loss=loss, loss_args=(EXAMPLE,), lengths=(8, 16), **GIVEN)


def test_weights_lie_alike_and_each_plan_is_an_ordinary_one() -> None:
    padded = planned()
    assert padded.lengths == LENGTHS and padded.values == {"x": 0, "mask": 0, "wanted": -100}
    specs = [{name: row.spec for name, row in plan.parameters.items()} for plan in padded.plans.values()]
    assert all(found == specs[0] for found in specs)
    assert not any(autopar.check(plan) for plan in padded.plans.values())
    assert [plan.inputs["x"].shape for plan in padded.plans.values()] == [(4, length) for length in LENGTHS]
    steps = [plan.predicted.step_seconds for plan in padded.plans.values()]
    assert padded.seconds() == pytest.approx(sum(steps) / 3) and padded.seconds((0, 0, 1)) == steps[2]
    assert str(padded).splitlines()[1].split()[0] == "8"


def compared(module: Any, single: nn.Module, lengths: tuple[int, ...]) -> float:
    """How far losses and gradients are from those of one device without padding."""
    worst = 0.0
    for length in lengths:
        x, mask, wanted = batch(length)
        mine, other = module(x, mask, wanted), loss(single(x, mask), wanted)
        mine.backward()
        other.backward()
        gradients = zip(module.parameters(), single.parameters(), strict=True)
        errors = [(one.grad.full_tensor() - two.grad).abs().max().item() for one, two in gradients]
        worst = max(worst, abs(mine.item() - other.item()), *errors)
        module.zero_grad()
        single.zero_grad()
    return worst


def test_training_is_that_of_one_device_without_padding() -> None:
    """One rank has the plans. No length is planned anew, and a copy pads too."""

    padded = planned()

    def rank_main(rank: int) -> tuple[float, int, float]:
        module = autopar.compile_padded(made(), padded if rank == 0 else None, loss=loss)
        error = compared(module, made(), (5, 8, 11, 24, 20))
        return error, len(module._programs.made), compared(copy.deepcopy(module), made(), (13,))

    for error, programs, of_copy in run_ranks(rank_main, 4):
        assert error < 1e-12 and of_copy < 1e-12 and programs == 2


def test_evaluation_without_targets_gives_outputs_of_the_own_length() -> None:
    padded = autopar.plan_padded(
        made(Ending), (EXAMPLE, EXAMPLE), {"labels": EXAMPLE}, lengths=(8, 16), pad={"labels": -100}, **GIVEN
    )  # fmt: skip

    def rank_main(rank: int) -> float:
        module = autopar.compile_padded(made(Ending), padded, outputs="full").eval()
        worst = 0.0
        with torch.no_grad():
            for length in (5, 13):
                x, mask, _ = batch(length)
                found, wanted = module(x, mask)["logits"], made(Ending)(x, mask)["logits"]
                assert found.shape == wanted.shape
                worst = max(worst, (found - wanted).abs().max().item())
        return worst

    assert max(run_ranks(rank_main, 2)) < 1e-12


def test_a_causal_model_needs_no_mask_and_may_return_its_loss_by_name() -> None:
    padded = autopar.plan_padded(
        made(Ending, causal=True), (EXAMPLE,), {"labels": EXAMPLE}, lengths=(8, 16), pad={"labels": -100}, **GIVEN
    )  # fmt: skip

    def rank_main(rank: int) -> float:
        module, single, worst = autopar.compile_padded(made(Ending, causal=True), padded), made(Ending, causal=True), 0.0
        for length in (3, 11):
            x, _, wanted = batch(length)
            mine, other = module(x, labels=wanted), single(x, labels=wanted)
            logits = mine["logits"]
            assert logits.shape == other["logits"].shape
            whole = logits.full_tensor() if isinstance(logits, torch.distributed.tensor.DTensor) else logits
            worst = max(worst, abs(mine["loss"].item() - other["loss"].item()), (whole - other["logits"]).abs().max().item())
        return worst

    assert max(run_ranks(rank_main, 2)) < 1e-12


def test_one_tensor_may_be_two_inputs() -> None:
    """As ``labels=input_ids``: tokens are padded with 0, and the same ones as labels with -100."""
    padded = autopar.plan_padded(made(causal=True), (EXAMPLE,), loss=loss, loss_args=(EXAMPLE,), lengths=(8, 16), **GIVEN)
    assert padded.values == {"x": 0, "wanted": -100}

    def rank_main(rank: int) -> float:
        module, single = autopar.compile_padded(made(causal=True), padded, loss=loss), made(causal=True)
        rows = [batch(length)[0] for length in (3, 11)]
        return max(abs(module(x, x).item() - loss(single(x), x).item()) for x in rows)

    assert max(run_ranks(rank_main, 2)) < 1e-12


def test_plans_know_the_loss_that_they_were_made_with(tmp_path: Path) -> None:
    """As ``compile`` takes it of a plan; files have none."""
    padded = autopar.plan_padded(made(causal=True), (EXAMPLE,), loss=loss, loss_args=(EXAMPLE,), lengths=(8, 16), **GIVEN)
    padded.save(tmp_path)

    def rank_main(rank: int) -> tuple[float, str]:
        module, single = autopar.compile_padded(made(causal=True), padded), made(causal=True)
        x = batch(11)[0]
        with pytest.raises(AutoparError) as refused:
            autopar.compile_padded(made(causal=True), tmp_path)
        return abs(module(x, x).item() - loss(single(x), x).item()), str(refused.value)

    for off, words in run_ranks(rank_main, 2):
        assert off < 1e-12 and "made with a loss that takes 1 arguments, none is given" in words


def test_inference_and_each_ranks_own_rows() -> None:
    padded = autopar.plan_padded(made(causal=True), (EXAMPLE,), lengths=(8, 16), mode="inference", inputs="local", **GIVEN)

    def rank_main(rank: int) -> float:
        """Rows of ranks are of different lengths: all are padded to the plan of the longest of them."""
        module = autopar.compile_padded(made(causal=True), padded)
        assert module.replica == {"num_replicas": 2, "rank": rank}
        rows = batch(5 + 6 * rank, rows=2)[0]
        with torch.no_grad():
            found = module(rows)
        wanted = made(causal=True)(rows)
        assert found.shape == (4, 11, 32)
        return (found.to_local()[:, : rows.shape[1]] - wanted).abs().max().item()

    assert max(run_ranks(rank_main, 2)) < 1e-12


def refusal(model: Callable[[], nn.Module], args: int, wanted: Any, pad: dict[str, float] | None = None) -> list[str]:
    """What ranks say to a padded call, two times; that of the shortest length is run all the same."""
    padded = autopar.plan_padded(
        model(), (EXAMPLE,) * args, loss=wanted, loss_args=(EXAMPLE,) if wanted is not pooled else (EXAMPLE[:, 0],), lengths=(8, 16),
        pad=pad, **GIVEN,
    )  # fmt: skip

    def rank_main(rank: int) -> list[str]:
        module, said = autopar.compile_padded(model(), padded, loss=wanted), []
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for length in (5, 11):
            x, mask, targets = batch(length)
            targets = targets[:, 0] if wanted is pooled else targets.clamp(min=0) if pad else targets
            try:
                module(*(x, mask)[:args], targets)
                said.append("run")
            except AutoparError as error:
                said.append(str(error))
        assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers()), "a check leaves buffers as they were"
        x, mask, targets = batch(8)
        module(*(x, mask)[:args], targets[:, 0] if wanted is pooled else targets)
        return said

    one, other = run_ranks(rank_main, 2)
    assert one == other
    return one


def pooled(outputs: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, wanted)


@pytest.mark.parametrize(
    ("model", "args", "wanted", "pad"),
    [
        (lambda: made(), 1, loss, None), (lambda: made(causal=True), 1, loss, {"wanted": 0}), (lambda: made(), 2, mean_of_masked, None),
        (lambda: made(Pooled), 2, pooled, None), (lambda: made(Normed), 1, loss, None),
    ],
    ids=["no mask", "targets that count", "a mean that divides by padding", "a mean over tokens", "statistics of tokens"],
)  # fmt: skip
def test_padding_that_counts_is_refused(model: Any, args: int, wanted: Any, pad: Any) -> None:
    for text in refusal(model, args, wanted, pad):
        assert "padding changes what the model computes: loss of a batch of length 8, padded to 16, is another one" in text
        assert "hint: let the model leave padding out" in text


def test_a_model_that_draws_is_looked_at_as_an_evaluation() -> None:
    """Its draws are then those of a module that was not looked at."""
    padded = planned_on_two(0.5)

    def rank_main(rank: int) -> tuple[list[float], bool]:
        torch.manual_seed(3)
        found, module = [], autopar.compile_padded(made(drop=0.5), padded, loss=loss)
        for looks in (True, False):
            module.dropout_seed, module.dropout_step, module.other_calls = 3, 0, 0
            module._programs.padding.checked = frozenset() if looks else ALL
            found.append(module(*batch(5)).item())
            assert module.training and all(part.training for part in module.parts)
        return found, module._programs.padding.checked == ALL

    for found, checked in run_ranks(rank_main, 2):
        assert found[0] == found[1] and checked


def test_a_batch_without_targets_says_nothing_and_the_next_is_looked_at() -> None:
    padded = planned_on_two()

    def rank_main(rank: int) -> list[bool]:
        module, seen = autopar.compile_padded(made(), padded, loss=loss), []
        x, mask, wanted = batch(5)
        for targets in (torch.full_like(wanted, -100), wanted):
            module(x, mask, targets)
            seen.append(module._programs.padding.checked == ALL)
        return seen

    assert run_ranks(rank_main, 2) == [[False, True]] * 2


def test_evaluation_without_targets_gives_outputs_and_the_loss_is_looked_at_all_the_same() -> None:
    padded = planned_on_two()

    def rank_main(rank: int) -> tuple[float, list[bool]]:
        module, seen = autopar.compile_padded(made(), padded, loss=loss), []
        x, mask, wanted = batch(5)
        found = module.eval()(x, mask)
        error = (found.full_tensor() if isinstance(found, DTensor) else found).sub(made().eval()(x, mask)).abs().max().item()
        for call in ((x, mask), (x, mask, wanted)):
            module(*call)
            seen.append(module._programs.padding.checked >= ALL)
        return error, seen

    for error, seen in run_ranks(rank_main, 2):
        assert error < 1e-9 and seen == [False, True]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda *call: tuple(item.repeat(1, 5) for item in call), "a batch of length 25, the longest planned is 16"),
        (lambda x, mask, wanted: (x, mask[:, :4], wanted), r"inputs have several lengths: x \[4, 5\], mask \[4, 4\], wanted \[4, 5\]"),
    ],
)
def test_calls_that_cannot_be_padded_are_refused(call: Any, text: str) -> None:
    padded = planned_on_two()

    def rank_main(rank: int) -> None:
        module = autopar.compile_padded(made(), padded, loss=loss)
        with pytest.raises(UsageError, match=text):
            module(*call(*batch(5)))

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lengths": (8,)}, "lengths is"), ({"lengths": (16, 8)}, "lengths is"), ({"lengths": 8}, "lengths is"),
        ({"lengths": (8, 16), "shares": (1,)}, "shares is"), ({"lengths": (8, 16), "pad": {"y": 1}}, "pad names 'y'"),
        ({"lengths": (8, 16), "pad": {"x": "no"}}, "pad has 'no' for x"),
        ({"lengths": (8, 16), "dim": 2}, "no input of the example has a dim 2"),
        ({"lengths": (8, 16), "microbatches": "auto"}, "number of microbatches"),
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_cannot_be_made_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        autopar.plan_padded(made(), (EXAMPLE, EXAMPLE), loss=loss, loss_args=(EXAMPLE,), **GIVEN, **options)


def test_an_ambiguous_example_and_an_output_without_the_length_are_refused() -> None:
    square = torch.zeros(4, 4, dtype=torch.int64)
    with pytest.raises(UsageError, match="which dims have the length 4 cannot be told"):
        autopar.plan_padded(made(), (square, square), loss=loss, loss_args=(square,), lengths=(8, 16), **GIVEN)

    class Flat(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask).flatten(0, 1)

    with pytest.raises(UsageError, match=r"is \[32, 32\] for length 8 and \[64, 32\] for 16: padding cannot be cut off"):
        autopar.plan_padded(made(Flat), (EXAMPLE, EXAMPLE), lengths=(8, 16), **GIVEN)


def test_dims_that_have_the_length() -> None:
    shapes = [{"mask": (4, 1, length, length), "table": (8, 8), "row": (length,)} for length in (8, 16)]
    assert _length_dims(shapes, (8, 16)) == {"mask": (2, 3), "row": (0,)}


def test_plans_are_written_and_read(tmp_path: Path) -> None:
    padded = planned_on_two()
    padded.save(tmp_path / "plans")
    read = autopar.load_padded(tmp_path / "plans")
    assert read.lengths == (8, 16) and read.padding == padded.padding
    assert [plan.to_json() for plan in read.plans.values()] == [plan.to_json() for plan in padded.plans.values()]
    with pytest.raises(FileError, match=r"padding\.json"):
        autopar.load_padded(tmp_path)
    (tmp_path / "plans" / "padding.json").write_text(json.dumps({"lengths": [8]}))
    with pytest.raises(FileError, match="does not say how calls are padded"):
        autopar.load_padded(tmp_path / "plans")
