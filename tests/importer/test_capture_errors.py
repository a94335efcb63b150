"""A model that cannot be captured: one sentence, at the user's line, with a hint; and the model is left as it was."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_of
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import CaptureError
from autopar.importer import capture

torch.library.define("autopar_tests::shapeless", "(Tensor x) -> Tensor")
torch.library.impl("autopar_tests::shapeless", "CPU", lambda x: x * 2)


class Model(nn.Module):
    """A linear layer before a function under test."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = torch.ones(4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def branch(model, x):
    y = model.layer(x)
    if y.sum() > 0:  # here
        y = -y
    return y


def item(model, x):
    return model.layer(x)[: int(x.sum().item())]  # here


def lengths(model, x):
    return model.layer(x) * len(set((x > 0).sum(1).tolist()))  # here


def nonzero(model, x):
    return model.layer(x)[x[:, 0].nonzero()]  # here


def counted(model, x):
    return torch.bincount(x[:, 0].long(), minlength=4) * model.layer(x)  # here


def drawn(model, x):
    return model.layer(x) + torch.randn(4, 4, generator=torch.Generator().manual_seed(1))  # here


def wrong_shape(model, x):
    return model.layer(x) @ torch.ones(3, 3)  # here


def own_error(model, x):
    raise KeyError("no such layer")  # here


def input_written(model, x):
    x.add_(1)  # here
    return model.layer(x)


def constant_written(model, x):
    model.scale.mul_(2)  # here
    return model.layer(x) * model.scale


def parameter_written(model, x):
    with torch.no_grad():
        model.layer.bias.zero_()  # here
    return model.layer(x)


def data_written(model, x):
    model.layer.weight.data.clamp_(-1, 1)  # here
    return model.layer(x)


def data_replaced(model, x):
    model.layer.bias.data = model.layer.bias.data * 0.5  # here
    return model.layer(x)


def data_of_another_shape(model, x):
    model.layer.bias.data = x.new_zeros(2)  # here
    return x


def converted(model, x):
    return model.layer.double()(x.double())  # here


def cut_by_values(model, x):
    sizes = (x[:2, 0] > 0).long().tolist()  # here
    return torch.cat([part * 2 for part in model.layer(x)[: sum(sizes)].split(sizes)])


def numpy(model, x):
    return model.layer(x) + torch.from_numpy(x.detach().numpy())  # here


def fixed_device(model, x):
    return model.layer(x) + torch.ones(4, device="meta")  # here


def condition(model, x):
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (model.layer(x),))  # here


def scanned(model, x):
    y = model.layer(x)
    return map_of(lambda a: a + 1, y)  # here


def shapeless(model, x):
    return torch.ops.autopar_tests.shapeless(model.layer(x))  # here


def beyond(model, x):
    return model.layer(x)[1:].as_strided((2, 4), (4, 1), 0)  # here


def asks_backward(model, x):
    model.layer(x).sum().backward()  # here
    return x


def returns_module(model, x):
    return model.layer


def sparse(model, x):
    return torch.sparse.mm(torch.eye(4).to_sparse(), model.layer(x))  # here


@torch.library.custom_op("autopar_capture_errors::doubled_", mutates_args=("x",))
def doubled_(x: torch.Tensor) -> None:
    x.mul_(2)


def changed_by_ones_own(model, x):
    y = model.layer(x).clone()
    doubled_(y)  # here
    return y


def put_by_mask(model, x):
    return model.layer(x).index_put((x[:, 0] > 0,), model.layer.bias)  # here


def changed_by_mask(model, x):
    y = model.layer(x)
    y[x[:, 0] > 0] *= 2  # here
    return y


def formatted(model, x):
    y = model.layer(x)
    print(f"mean {y.mean():.3f}")  # here
    return y


@pytest.mark.parametrize(("function", "message", "hint"), [
    (formatted, "the values of a tensor are read", "outside of the forward"),
    (sparse, "aten.to_sparse.default gives a sparse_coo tensor; plans are made of dense ones", "dense tensor"),
    (changed_by_ones_own, "calls autopar_capture_errors.doubled_.default, which changes an input in place", "return the new value"),
    (changed_by_mask, "size of the result of aten.index.Tensor depends on the values", "torch.where"),
    (branch, "Python control flow or a size depends on the values", "torch.where"),
    (item, "Python control flow or a size depends on the values", "known before the run"),
    (lengths, "Python control flow or a size depends on the values", "known before the run"),
    (nonzero, "size of the result of aten.nonzero.default depends on the values", "argsort(descending=True, stable=True)"),
    (counted, "size of the result of aten.bincount.default depends on the values", "index_add(0, i,"),
    (drawn, "drawn from a torch.Generator of the model's own", "leave generator= out"),
    (wrong_shape, r"RuntimeError: .*\[4, 4\] X \[3, 3\]", "without autopar"),
    (own_error, "KeyError: 'no such layer'", "without autopar"),
    (input_written, "changes its input x in place", "clone"),
    (constant_written, "changes its constant scale in place", "buffer"),
    (parameter_written, "changes its parameter layer.bias in place", "clone"),
    (converted, "converts its Linear to another dtype", "before planning"),
    (data_written, "changes its parameter layer.weight in place", "clone"),
    (data_replaced, "changes its parameter layer.bias in place", "clone"),
    (data_of_another_shape, "data of another shape", "new tensor"),
    (cut_by_values, "depends on the values of a tensor", "known before the run"),
    (numpy, "tensors leave torch", "torch operators"),
    (fixed_device, "made on different devices", "device=x.device"),
    (condition, "runs a graph of its own", "choose by torch.where"),
    (scanned, "runs a graph of its own", "plain tensor operators: a Python loop over the parts"),
    (shapeless, "no shape function.*shapeless", "register_fake"),
    (beyond, "as_strided reaches beyond the tensor", "whole tensor"),
    (asks_backward, "forward calls backward", "create_graph=True"),
    (returns_module, "takes or returns an object that is not a tensor", "return tensors"),
])  # fmt: skip
def test_the_cause_and_the_line(function, message, hint, capfd):
    model = Model(function)
    weight, scale = model.layer.weight, model.scale
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, (torch.randn(4, 4),), mode="inference")
    text = str(caught.value)
    lines = Path(__file__).read_text().splitlines()
    here = [number for number, line in enumerate(lines, 1) if "# here" in line and number >= function.__code__.co_firstlineno]
    if function is not returns_module:
        assert f"{Path(__file__).name}:{here[0]}: " in text and lines[here[0] - 1].strip() in text
    assert re.search(rf"\nhint: .*{re.escape(hint)}", text)
    assert len(text.splitlines()) <= 3
    assert caught.value.__cause__ is None and (caught.value.__suppress_context__ or caught.value.__context__ is None)
    assert capfd.readouterr() == ("", "")
    assert model.layer.weight is weight and model.scale is scale and "scale" in vars(model) and model.training


def reduced(model, x):
    y = model.layer(x)
    dist.all_reduce(y)  # here
    return y


def gathered(model, x):
    return functional.all_gather_tensor(model.layer(x), 0, dist.group.WORLD)  # here


def met(model, x):
    y = model.layer(x)
    dist.barrier(group=dist.group.WORLD)  # here
    return y


def broadcast(model, x):
    y = model.layer(x)
    dist.broadcast(y, 0)  # here
    return y


def test_a_size_that_only_a_gradient_does_not_know_is_told() -> None:
    with pytest.raises(CaptureError, match=r"(?s)the size of index depends on the values of a tensor.*# here.*hint: .* where or a mask"):
        capture(Model(put_by_mask), (torch.randn(4, 4),))


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("function", [reduced, gathered, met, broadcast])
def test_collectives_of_the_models_own_are_refused(function, ranks):
    if ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with pytest.raises(CaptureError, match=r"the model calls .*torch.distributed itself") as caught:
            capture(Model(function), (torch.randn(4, 4),))
    finally:
        if ranks:
            dist.destroy_process_group()
    assert "# here" in str(caught.value) and "hint: leave it out: the model is written for one device" in str(caught.value)


def of_world(model, x):
    return model.layer(x) * dist.get_rank()  # here


def of_group(model, x):
    return model.layer(x) if dist.get_rank(dist.group.WORLD) == 0 else x  # here


def of_mesh(model, x):
    return model.layer(x) * model.mesh.get_local_rank("dp")  # here


def of_layer(model, x):
    return model.layer(x) * model.mesh["dp"].get_rank()  # here


@pytest.mark.parametrize("function", [of_world, of_group, of_mesh, of_layer])
def test_models_that_ask_for_their_rank_are_refused(function):
    """It would be a constant, that of the rank that captured, on all of them."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = Model(function)
        model.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with pytest.raises(CaptureError, match="the model asks which rank it runs on") as caught:
            capture(model, (torch.randn(4, 4),))
    finally:
        dist.destroy_process_group()
    assert "# here" in str(caught.value) and "hint: ask outside of the model" in str(caught.value)


@pytest.mark.parametrize("count", [
    lambda model: dist.get_world_size(),
    lambda model: dist.get_world_size(dist.group.WORLD),
    lambda model: dist.group.WORLD.size(),
    lambda model: model.mesh.size(),
    lambda model: model.mesh["dp"].size(0),
    lambda model: model.mesh.shape[0],
    lambda model: model.mesh.get_group("dp").size(),
    lambda model: int(os.environ["WORLD_SIZE"]),
    lambda model: 1 + dist.is_initialized(),
    lambda model: 1 + int(os.environ.get("RANK", 0)),
])  # fmt: skip
def test_models_that_ask_for_the_number_of_ranks_are_answered_as_on_one_device(count, monkeypatch):
    """It would be a constant of the program, whose loss is that of the whole batch."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    wanted = capture(Model(lambda model, x: model.layer(x) * 1), (torch.randn(4, 4),))
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = Model(lambda model, x: model.layer(x) * count(model))
        model.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        assert count(model) == 2
        found = capture(model, (torch.randn(4, 4),))
        assert count(model) == 2
    finally:
        dist.destroy_process_group()
    assert found.graph.sha256 == wanted.graph.sha256


@pytest.mark.parametrize("function", [
    lambda model, x: model.layer(x).detach().sum(),
    lambda model, x: (model.layer(x) > 0).sum(),
    lambda model, x: torch.no_grad()(model.layer)(x).mean(),
])  # fmt: skip
def test_a_used_parameter_without_gradient_is_named(function):
    with pytest.raises(CaptureError, match=r"no gradient reaches 2 parameters that the forward uses: layer.weight, layer.bias"):
        capture(Model(function), (torch.randn(4, 4),))


def test_failures_of_the_users_loss_are_at_the_loss():
    def loss(outputs, labels):
        return (outputs - labels).sum()  # the loss

    with pytest.raises(CaptureError, match=r"\(outputs - labels\).sum\(\)  # the loss"):
        capture(Model(lambda model, x: model.layer(x)), (torch.randn(4, 4),), loss=loss, loss_args=(torch.randn(3),))


def test_logging_and_printing_of_the_users_own_is_kept(capfd):
    def talk(model, x):
        import sys

        print("words", file=sys.stderr)
        return model.layer(x)

    capture(Model(talk), (torch.randn(4, 4),), mode="inference")
    assert "words" in capfd.readouterr().err


def test_torchs_loggers_are_silent_meanwhile_and_as_before_after_it():
    """One with a level of its own, one that follows another's, and a user's."""
    own, following, users = (logging.getLogger(name) for name in ("torch.own", "torch.own.following", "torches"))
    own.setLevel(logging.DEBUG)
    users.setLevel(logging.DEBUG)
    found = []

    def look(model, x):
        found.extend(logger.isEnabledFor(logging.CRITICAL) for logger in (own, following, logging.getLogger("torch"), users))
        return model.layer(x)

    capture(Model(look), (torch.randn(4, 4),), mode="inference")
    assert set(found[0::4] + found[1::4] + found[2::4]) == {False} and all(found[3::4])
    assert own.level == following.getEffectiveLevel() == logging.DEBUG and logging.getLogger("torch").isEnabledFor(logging.WARNING)


def test_failures_inside_a_layer_of_torch_are_at_the_layer():
    model = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 4], div_value=1.0)
    model.forward = model.predict
    with pytest.raises(CaptureError, match=r"adaptive.py:\d+: Python control flow or a size depends on the values of a tensor"):
        capture(model, (torch.randn(4, 4),), mode="inference")


def test_a_weight_that_the_forward_assigns_is_named():
    class Assigned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.kept = torch.zeros(4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x, *, buffer):
            y = self.layer(x)
            if buffer:
                self.mean.mul_(0.9).add_(y.mean(0))
                return (y - self.mean).sum()
            self.kept.add_(y.mean(0))
            return (y - self.kept).sum()

    with pytest.raises(CaptureError, match="the new value of the buffer mean depends on parameters"):
        capture(Assigned(), (torch.randn(2, 4),), {"buffer": True})
    with pytest.raises(CaptureError, match="the forward changes its constant kept in place"):
        capture(Assigned(), (torch.randn(2, 4),), {"buffer": False})


def test_a_buffer_of_another_size_afterwards_is_refused_until_it_has_that_size():
    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("low", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.low = torch.minimum(x.detach().amin(0), self.low)
            return x * self.low

    model, x = Observed(), torch.randn(2, 4, requires_grad=True)
    message = r"gives the buffer low another size: \[1\] becomes \[4\]\n +self.low = torch.minimum.*\nhint: run the model"
    with pytest.raises(CaptureError, match=message):
        capture(model, (x,))
    model(x)
    assert capture(model, (x,)).graph.ops


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_buffer_of_another_dtype_afterwards_is_refused(mode):
    """The model would compute in that dtype from its next call on."""

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.tensor(1))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.level = self.level * 0.5
            return self.layer(x) * self.level

    message = r"gives the buffer level another dtype: int64 becomes float32\n +self.level = self.level \* 0.5\nhint: convert what is put"
    with pytest.raises(CaptureError, match=message):
        capture(Halving(), (torch.randn(2, 4),), mode=mode)


def test_the_line_that_writes_to_a_parameter_that_trains():
    with pytest.raises(CaptureError, match=r"changes its parameter layer\.bias in place") as caught:
        capture(Model(lambda model, x: parameter_written(model, x).sum()), (torch.randn(4, 4),))
    assert "model.layer.bias.zero_()  # here" in str(caught.value)


def test_a_weight_beside_its_module_is_refused_since_its_gradient_would_be_lost():
    model = Model(lambda model, x: (model.layer(x) * model.held["pair"][0].sum()).sum())
    model.held = {"pair": (model.layer.weight, model.layer.bias)}
    with pytest.raises(CaptureError, match=r"weight of shape \[4, 4\] otherwise than by its module"):
        capture(model, (torch.randn(4, 4),))
    assert model.held["pair"][0] is model.layer.weight
