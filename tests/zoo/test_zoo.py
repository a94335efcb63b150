"""The built-in models: what is listed builds, on the cpu and without memory; wrong keys are answered with the right ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autopar import zoo
from autopar.errors import UsageError

torch.set_num_threads(1)
SMALL = [name for name in zoo.names() if "-" not in name]


def test_listing_needs_no_torch():
    code = "import sys; from autopar import zoo; zoo.names(), zoo.keys('gpt2'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_names():
    assert set(zoo.names()) == {"mlp", "gpt2", "llama3", "llama3-8b", "llama3-70b", "llama3-405b", "resnet", "moe"}


@pytest.mark.parametrize("name", SMALL)
def test_training_returns_a_loss_and_inference_an_answer(name):
    target = zoo.build(name)
    loss = target.model(*target.args)
    assert loss.dim() == 0 and torch.isfinite(loss)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in target.model.parameters())
    target = zoo.build(name, mode="inference")
    assert target.model(*target.args).shape[0] == target.args[0].shape[0]


@pytest.mark.parametrize("name", SMALL)
def test_defaults_divide_by_eight(name):
    for parameter in zoo.build(name).model.parameters():
        assert all(size % 8 == 0 or size < 8 for size in parameter.shape), parameter.shape


@pytest.mark.parametrize(("name", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)])
def test_published_sizes_on_meta(name, billions):
    target = zoo.build(name, device="meta", batch=2, seq=64)
    parameters = list(target.model.parameters())
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in parameters)
    assert round(sum(p.numel() for p in parameters) / 1e9, 2) == billions
    assert target.args[0].shape == (2, 64)


@pytest.mark.parametrize("name", SMALL)
def test_materialize_gives_weights_ties_and_buffers(name):
    model = zoo.materialize(zoo.build(name, device="meta").model, seed=3)
    again = zoo.materialize(zoo.build(name, device="meta").model, seed=3)
    other = zoo.materialize(zoo.build(name, device="meta").model, seed=4)
    state = model.state_dict()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in state.items())
    assert any(not torch.equal(value, other.state_dict()[key]) for key, value in state.items())
    built = zoo.build(name)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in built.model.named_parameters()]
    loss, expected = model(*built.args), built.model(*built.args)
    assert torch.isfinite(loss) and abs(loss - expected) < 0.5 * max(1.0, expected.item())


def test_gpt2_ties_its_embedding():
    model = zoo.build("gpt2", device="meta").model
    assert model.head.weight is model.tokens.weight
    model = zoo.materialize(model)
    assert model.head.weight is model.tokens.weight


def test_materialize_leaves_the_generator_alone():
    state = torch.random.get_rng_state()
    zoo.materialize(zoo.build("mlp", device="meta").model)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_keys_are_read_from_text():
    target = zoo.build("resnet", batch="2", blocks="1-2", bottleneck="true", dtype="float64")
    assert len(target.model.layers) == 3 and target.args[0].shape[0] == 2 and target.args[0].dtype == torch.float64
    assert zoo.build("gpt2", dropout="0.5").model.dropout.p == 0.5


@pytest.mark.parametrize(("call", "message", "hint"), [
    (lambda: zoo.build("gtp2"), "no built-in model 'gtp2'", "did you mean gpt2"),
    (lambda: zoo.keys("zzz"), "no built-in model 'zzz'", "known are mlp"),
    (lambda: zoo.build("gpt2", layer=3), "has no key 'layer'", "did you mean layers"),
    (lambda: zoo.build("gpt2", layers="two"), "layers='two' is not int", "defaults are batch=8"),
    (lambda: zoo.build("gpt2", layers=0), "layers=0 must be positive", "defaults are"),
    (lambda: zoo.build("gpt2", dtype="int4"), "dtype 'int4' is not one of float32", "defaults are"),
    (lambda: zoo.build("gpt2", heads=7), "not a multiple of heads 7", "defaults are"),
    (lambda: zoo.build("llama3", kv_heads=5), "kv_heads 5", "defaults are"),
    (lambda: zoo.build("moe", experts=1), "experts=1", "defaults are"),
    (lambda: zoo.build("resnet", blocks="a-b"), "blocks='a-b'", "defaults are"),
    (lambda: zoo.build("resnet", image=8), "image=8 is too small", "defaults are"),
    (lambda: zoo.build("resnet", bottleneck="maybe"), "not true or false", "defaults are"),
])  # fmt: skip
def test_wrong_keys(call, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert hint in caught.value.hint


def test_llama_positions_and_shared_heads_matter():
    target = zoo.build("llama3", mode="inference", batch=1)
    model, tokens = target.model, torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        whole = model(tokens)
        torch.testing.assert_close(model(tokens[:, :8]), whole[:, :8], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens.roll(1, 1))[:, 1:], whole[:, :-1], atol=1e-4)
    assert model.layers[0].attn.wk.weight.shape[0] < model.layers[0].attn.wq.weight.shape[0]


def test_experts_get_at_most_their_capacity_and_each_token_two():
    model = zoo.build("moe", batch=2, seq=16, capacity_factor=8.0).model
    experts = model.layers[0].experts
    x = torch.randn(2, 16, 64)
    combine, dispatch = experts.routes(x)
    assert dispatch.shape == (2, 16, 8, 16)
    torch.testing.assert_close(dispatch.sum((2, 3)), torch.full((2, 16), 2.0))
    torch.testing.assert_close(combine.sum((2, 3)), torch.ones(2, 16))
    assert dispatch.sum(1).max() == 1
    small = zoo.build("moe", capacity_factor=0.5).model.layers[0].experts
    assert small.routes(x)[1].sum(1).max() == 1 and small.capacity == 2


def test_grouped_dispatch_is_dense_dispatch_with_room_for_all():
    dense, grouped = zoo.build("moe", capacity_factor=8.0), zoo.build("moe", dispatch="grouped")
    grouped.model.load_state_dict(dense.model.state_dict())
    torch.testing.assert_close(grouped.model(*dense.args), dense.model(*dense.args))
