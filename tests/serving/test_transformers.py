"""Causal models of transformers with their static cache, split over simulated ranks: greedy tokens are those of ``model.generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from benchmarks.models import without_vision_operators
from tests.serving.models import padded, simulated

transformers = pytest.importorskip("transformers")
without_vision_operators()

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.5,
}  # fmt: skip
GPT = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.5,
}  # fmt: skip
ROWS = [[3, 11, 41, 15, 9], [9, 26], [6, 5, 35], [58, 9, 7, 9, 3]]


@pytest.mark.parametrize("lengths", [None, (6, 8, 12)], ids=["static", "growing"])
@pytest.mark.parametrize(
    ("kind", "sizes"), [("llama", SIZES), ("gpt2", GPT), ("qwen2", SIZES), ("mistral", SIZES | {"sliding_window": 4})],
    ids=["llama", "gpt2", "qwen2", "mistral"],
)  # fmt: skip
def test_tokens_are_those_of_generate(kind: str, sizes: dict[str, Any], lengths: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()
    serving = autopar.plan_serving(
        model, batch=4, prompt=5, tokens=7, lengths=lengths, mesh="dp=2,tp=2", hardware="cpu-cluster", time_limit=300.0,
        constraints={"cache.layers.*.keys": "S0 S1 R R", "cache.layers.*.values": "S0 S1 R R"},
    )  # fmt: skip
    ids, mask = padded(ROWS)
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False)
    assert torch.equal(simulated(model, serving, None, ids, mask, 7), wanted[:, 5:])
