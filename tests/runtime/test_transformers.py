"""Models of transformers, compiled: their own output classes, calls without labels, saving in their own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from tests.runtime.test_training import gradients, on_ranks, same, whole

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 64, (8, 8))


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_causal_model_trains_evaluates_and_is_saved_as_itself(tmp_path: Path) -> None:
    call = {"input_ids": IDS, "labels": IDS}
    plan, plain = autopar.plan(llama(), (), call, mesh="2", hardware="cpu-cluster", constraints={"input:input_ids": "S0 R"}), llama()
    plain(**call).loss.backward()
    wanted = plain(input_ids=IDS).logits

    def run(rank: int) -> list[bool]:
        module = autopar.compile(llama(), plan)
        result = module(**call)
        result.loss.backward()
        right = [type(result) is type(plain(**call)), result[0] is result.loss, same(gradients(module), gradients(plain))]
        with torch.no_grad():
            found = module.eval()(IDS)
        module.save_pretrained(tmp_path / "saved")
        return [*right, list(found) == ["logits"], found.loss is None, torch.allclose(whole(found.logits), wanted, atol=1e-5)]

    for right in on_ranks(run, 2):
        assert all(right), right
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config.architectures == ["LlamaForCausalLM"] and saved.lm_head.weight is saved.model.embed_tokens.weight
    assert all(torch.equal(one, other) for one, other in zip(saved.state_dict().values(), plain.state_dict().values(), strict=True))


def test_ranks_hear_that_one_could_not_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = autopar.plan(llama(), (), {"input_ids": IDS, "labels": IDS}, mesh="2", hardware="cpu-cluster")

    def run(rank: int) -> str:
        module = autopar.compile(llama(), plan)
        try:
            module.save_pretrained(tmp_path / "file" / "below")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, second = on_ranks(run, 2)
    assert first.startswith("NotADirectoryError") and second.startswith("RuntimeError: rank 0 could not save the model: NotADirectoryError")
