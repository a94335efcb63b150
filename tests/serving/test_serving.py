"""Greedy tokens with a cache split over ranks are those of one device without one: static and growing, prompts of several lengths."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, FileError, UsageError
from autopar.serving import Serving
from autopar.serving.planning import example_call
from autopar.verify import verify
from autopar.verify.launch import run_ranks
from tests.serving.models import Causal, Past, causal, greedy, padded, past, simulated

ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [5, 8, 9, 7, 9]]
PINS = {"cache.layers.*": "S0 S1 R R"}
"""Batch over the first axis, heads over the second: at these sizes nothing splits by itself."""


@lru_cache
def planned(growing: bool, mesh: str = "dp=2,tp=2") -> Serving:
    lengths = (6, 8, 12) if growing else None
    return autopar.plan_serving(
        causal(), batch=4, prompt=(3, 5), tokens=7, lengths=lengths, cache=past(4), mesh=mesh, hardware="cpu-cluster", time_limit=300.0,
        constraints={"cache.layers.*": "S0 R R R"} if mesh == "dp=2" else PINS,
    )  # fmt: skip


def test_the_calls_are_planned_alike() -> None:
    serving = planned(True)
    assert set(serving.plans) == {(6, 3), (6, 5), (6, 1), (8, 1), (12, 1)} and serving.prompts == (3, 5) and serving.lengths == (6, 8, 12)
    assert set(planned(False).plans) == {(12, 3), (12, 5), (12, 1)}
    specs = [{name: row.spec for name, row in (plan.parameters | plan.buffers).items()} for plan in serving.plans.values()]
    assert all(found == specs[0] for found in specs) and specs[0]["cache.layers.0.keys"] == "S0 S1 R R"
    assert all(plan.outputs["0"].spec == "R R" for plan in serving.plans.values())
    assert "4 x 5" in str(serving) and serving.seconds(7) > serving.seconds(1) > 0


@pytest.mark.parametrize("growing", [False, True])
def test_tokens_are_those_of_one_device(growing: bool) -> None:
    ids, mask = padded(ROWS)
    found = simulated(causal(), planned(growing), past(4), ids, mask, 7)
    assert found.tolist() == greedy(causal(), ROWS, 7)
    assert len({token for row in found.tolist() for token in row}) > 8, "the model says the same whatever it is asked"


def test_rows_that_ranks_do_not_share_evenly() -> None:
    """A cache of three rows is two on one rank and one on the other."""
    serving = autopar.plan_serving(
        causal(), batch=3, prompt=(3, 5), tokens=7, lengths=(6, 8, 12), cache=past(3), mesh="dp=2", hardware="cpu-cluster",
        constraints={"cache.layers.*": "S0 R R R"},
    )  # fmt: skip
    ids, mask = padded(ROWS[:3])
    assert not any(list(autopar.check(plan)) for plan in serving.plans.values())
    assert simulated(causal(), serving, past(3), ids, mask, 7).tolist() == greedy(causal(), ROWS[:3], 7)


def test_a_cache_is_verified_like_any_buffer() -> None:
    model = autopar.cached(causal(), 4, 12, past(4))
    ids, mask = padded(ROWS)
    call = ids, nn.functional.pad(mask, (0, 7), value=1), (mask.cumsum(1) - 1).clamp(min=0)
    result = verify(planned(False).plans[12, 5], (model, call), backend="simulate")
    assert result.passed


def on_two_ranks(rank: int) -> Any:
    model, serving = causal(rank), planned(True, "dp=2") if rank == 0 else None
    served = autopar.serve(model, serving, cache=past(4))
    ids, mask = padded(ROWS)
    first = served.generate(ids, mask, max_new_tokens=7)
    weights = {name: local.to_local().data_ptr() for name, local in served.module.named_parameters()}
    with served.module.observed_collectives() as observed:
        again = served.generate(ids[:, -4:], mask[:, -4:], max_new_tokens=3)
    held = {name: (tuple(tensor.shape), tuple(tensor.to_local().shape)) for name, tensor in served.module.named_buffers()}
    still = all(weights[name] == local.to_local().data_ptr() for name, local in served.module.named_parameters())
    most = max((item.bytes for item in observed), default=0)
    ends = served.generate(ids, mask, max_new_tokens=7, eos_token_id=[first[0, 6].item(), 31], pad_token_id=0)
    refused = []
    for call, options in (
        ((ids[:2],), {"max_new_tokens": 1}), ((torch.ones(4, 6, dtype=torch.int64),), {"max_new_tokens": 1}),
        ((ids,), {"max_new_tokens": 9}),
        ((ids, mask.flip(1)), {"max_new_tokens": 1}), ((ids.float(),), {"max_new_tokens": 1}), ((ids,), {"max_new_tokens": 0}),
        ((ids, mask[:, 1:]), {"max_new_tokens": 1}),
    ):  # fmt: skip
        with pytest.raises(UsageError) as error:
            served.generate(*call, **options)
        refused.append(str(error.value))
    return first, again, ends, held, still, most, refused


def test_ranks_generate_and_refuse() -> None:
    """One rank plans, weights are the first rank's; a cache grows, and begins anew; a row ends."""
    (first, again, ends, held, still, most, refused), (other, *_) = run_ranks(on_two_ranks, 2)
    ids, _ = padded(ROWS)
    wanted = greedy(causal(), ROWS, 7)
    assert torch.equal(first, other) and first[:, :5].equal(ids) and first[:, 5:].tolist() == wanted
    assert again[:, 4:].tolist() == greedy(causal(), [row[-4:] for row in ROWS], 3)
    assert held["cache.layers.1.values"] == ((4, 4, 8, 4), (2, 4, 8, 4)) and still
    assert most <= 4 * 8 * 16, "what is sent is tokens, or sums of one layer's results, and no cache"
    row = ends[0, 5:].tolist()
    stop = row.index(first[0, 6].item())
    assert stop <= 1 and row[: stop + 1] == wanted[0][: stop + 1] and set(row[stop + 1 :]) <= {0}
    says = (
        "planned was a batch of 4", "longest planned is 5", "do not fit into a cache of 12", "on the left", "int64", "from 1 on",
        "attention mask is",
    )  # fmt: skip
    assert len(refused) == len(says) and all(part in words and "hint:" in words for part, words in zip(says, refused, strict=True))


def test_plans_are_files(tmp_path: Path) -> None:
    serving = planned(True)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder"):
        serving.save(tmp_path / "file")
    serving.save(tmp_path / "plans")
    assert sorted(file.name for file in (tmp_path / "plans").iterdir()) == [
        "prompt-3-of-6.json", "prompt-5-of-6.json", "token-of-12.json", "token-of-6.json", "token-of-8.json",
    ]  # fmt: skip
    loaded = autopar.load_serving(tmp_path / "plans")
    assert set(loaded.plans) == set(serving.plans) and loaded.batch == 4 and loaded.seconds(3) == serving.seconds(3)
    with pytest.raises(FileError, match="no plans of a cache"):
        autopar.load_serving(tmp_path)


class Counting(Past):
    """A cache that counts in Python."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__(batch, length)
        self.calls = 0


class Counted(Causal):
    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None) -> Any:
        past_key_values.calls += 1
        return super().forward(input_ids, attention_mask, position_ids, past_key_values)


def test_what_cannot_be_served_is_said() -> None:
    options = {"batch": 4, "prompt": 5, "tokens": 2, "mesh": "dp=2", "hardware": "cpu-cluster"}
    with pytest.raises(UsageError, match="it is no model with a cache"):
        autopar.plan_serving(nn.Linear(2, 2), **options)
    with pytest.raises(UsageError, match="no model of transformers"):
        autopar.plan_serving(causal(), **options)
    with pytest.raises(UsageError, match="holds no tensors"):
        autopar.cached(causal(), 4, 8, lambda length: SimpleNamespace())
    with pytest.raises(UsageError, match="does not hold a prompt of 5 and a token after it"):
        autopar.plan_serving(causal(), cache=past(4), lengths=(4, 5), **options)
    with pytest.raises(UsageError, match=r"the cache has the model's dtype\nhint: convert the model"):
        autopar.plan_serving(causal(), batch=4, prompt=5, tokens=7, cache=past(4), mesh="2", compute_dtype="autocast-bfloat16")
    with pytest.raises(UsageError, match="optimizer: a model that generates is not trained"):
        autopar.plan_serving(causal(), cache=past(4), optimizer="sgd", **options)
    for wrong, said in (
        ({"prompt": 5.0}, "prompt is 5.0"), ({"prompt": None}, "prompt is None"), ({"prompt": (3, 0)}, "prompt is (3, 0)"),
        ({"lengths": ["12"]}, "lengths is ['12']"), ({"lengths": 4}, "a cache of lengths 4 does not"), ({"cache": 3}, "cache is a int"),
        ({"time_limit": 0}, "the time limit is 0 s"), ({"time_limit": "9"}, "the time limit is '9' s"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=re.escape(said)):
            autopar.plan_serving(causal(), **{**options, "cache": past(4), **wrong})
    with pytest.raises(UsageError, match="the model is a int"):
        autopar.plan_serving(3, **options)
    with pytest.raises(CaptureError, match="changes calls of the cache"):
        autopar.capture(autopar.cached(Counted(), 4, 8, lambda length: Counting(4, length)), example_call(4, 8, 1), mode="inference")
