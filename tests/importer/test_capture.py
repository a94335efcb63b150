"""What a capture records beside the operators: names, kinds, ties, buffers, constants, nested arguments, losses, regions, groups."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from autopar import zoo
from autopar.errors import CaptureError, UsageError
from autopar.graph import Graph, from_json, to_json
from autopar.importer import Capture, capture, capture_graph
from autopar.importer.rewrite.factorisations import cholesky, inverse, solve
from autopar.importer.stand_ins.autograd_calls import CheckpointWarning
from autopar.rules import find_rule
from autopar.search.folding.fold import fold_layers
from tests.importer.graph_interpreter import run_graph

torch.set_num_threads(1)


def by_kind(graph: Graph, kind: str) -> list[str]:
    return [item.name for item in graph.inputs if item.kind == kind]


def outputs(graph: Graph, kind: str) -> list[str]:
    return [item.name for item in graph.outputs if item.kind == kind]


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]


def run(
    captured: Capture, model: nn.Module, inputs: dict[str, Tensor], tangents: dict[str, Tensor] | None = None
) -> dict[tuple[str, str], Tensor]:
    """Results by kind and name."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    sources = {"input": inputs, "constant": captured.constants, "tangent": tangents or {}, "parameter": state, "buffer": state}
    graph = captured.graph
    tensors = run_graph(graph, {item.tensor: sources[item.kind][item.name].detach() for item in graph.inputs})
    own = {item.name: state[item.name].shape for item in graph.inputs if item.blocks is not None}
    return {(item.kind, item.name): tensors[item.tensor].reshape(own.get(item.name, tensors[item.tensor].shape)) for item in graph.outputs}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Ties(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def test_tied_weights_are_one_input_with_summed_gradient():
    model, x = Ties(), torch.randn(3, 4)
    captured = capture(model, (x,))
    (weight,) = captured.graph.of_kind("parameter")
    assert (weight.name, weight.aliases, weight.trained) == ("first.weight", ("second.weight",), True)
    model(x).backward()
    torch.testing.assert_close(run(captured, model, {"x": x})["gradient", "first.weight"], model.first.weight.grad)


class Counting(nn.Module):
    """One buffer changed in place, one assigned anew, a plain tensor attribute and a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.scale = torch.full((4,), 3.0)
        self.unused = torch.ones(2)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return (self.layer(x) * self.scale * torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.mean).sum() * self.steps


def test_buffers_that_change_are_outputs_and_tensors_in_the_code_are_constants():
    model, x = Counting(), torch.randn(3, 4)
    scale = model.scale
    captured = capture(model, (x,))
    assert model.scale is scale and "scale" in vars(model) and "scale" not in dict(model.named_buffers())
    assert outputs(captured.graph, "buffer") == ["steps", "mean"]
    assert by_kind(captured.graph, "buffer") == ["steps", "mean"]
    assert by_kind(captured.graph, "constant") == ["scale", "lifted_tensor_0"] and set(captured.constants) == {"scale", "lifted_tensor_0"}
    results = run(captured, model, {"x": x})
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(results["output", "loss"], expected.detach())
    torch.testing.assert_close(results["buffer", "mean"], model.mean)
    torch.testing.assert_close(results["buffer", "steps"], model.steps)
    torch.testing.assert_close(results["gradient", "layer.weight"], model.layer.weight.grad)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Nested(nn.Module):
    def forward(self, batch: dict, pair: Pair, *rest: Tensor, flag: bool, factor: float, extra: list) -> dict:
        x = batch["x"] + batch["more"][0] + pair.left * factor + rest[0] + extra[1]
        return {"logits": x if flag else -x, "parts": (pair.right, rest[1] * 2), "count": 3}


def test_nested_arguments_are_named_by_path():
    names = ["batch.x", "batch.more.0", "pair.left", "pair.right", "rest.0", "rest.1", "extra.0", "extra.1"]
    values = {name: torch.randn(2, 2) for name in names}
    x, more, left, right, first, second, extra, last = values.values()
    args = ({"x": x, "more": [more]}, Pair(left, right), first, second)
    captured = capture(Nested(), args, {"flag": False, "factor": 2.5, "extra": [extra, last]}, mode="inference")
    assert sorted(by_kind(captured.graph, "input")) == sorted(names)
    assert captured.graph.arguments == {
        "args": [
            {"x": {"tensor": "batch.x"}, "more": [{"tensor": "batch.more.0"}]},
            {"left": {"tensor": "pair.left"}, "right": {"tensor": "pair.right"}},
            {"tensor": "rest.0"},
            {"tensor": "rest.1"},
        ],
        "kwargs": {"flag": False, "factor": 2.5, "extra": [{"tensor": "extra.0"}, {"tensor": "extra.1"}]},
        "loss_args": [],
        "outputs": {"logits": {"tensor": "logits"}, "parts": [{"tensor": "parts.0"}, {"tensor": "parts.1"}], "count": 3},
    }
    results = run(captured, nn.Module(), values)
    torch.testing.assert_close(results["output", "logits"], -(x + more + left * 2.5 + first + last))
    torch.testing.assert_close(results["output", "parts.0"], right)
    torch.testing.assert_close(results["output", "parts.1"], second * 2)


def test_a_loss_function_gives_its_own_arguments_their_names():
    def loss(outputs: Tensor, labels: Tensor, weights: dict) -> Tensor:
        return (weights["w"] * (outputs - labels) ** 2).mean()

    model, x, labels, w = Linear(), torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4)
    captured = capture(model, (x,), loss=loss, loss_args=(labels, {"w": w}))
    assert by_kind(captured.graph, "input") == ["x", "labels", "weights.w"]
    assert captured.graph.arguments["loss_args"] == [{"tensor": "labels"}, {"w": {"tensor": "weights.w"}}]
    assert captured.graph.arguments["outputs"] == {"tensor": "loss"}
    results = run(captured, model, {"x": x, "labels": labels, "weights.w": w})
    expected = loss(model(x), labels, {"w": w})
    expected.backward()
    torch.testing.assert_close(results["output", "loss"], expected.detach())
    torch.testing.assert_close(results["gradient", "layer.bias"], model.layer.bias.grad)


def test_a_loss_module_and_an_argument_named_like_the_models():
    class Loss(nn.Module):
        def forward(self, outputs: Tensor, x: Tensor) -> Tensor:
            return (outputs - x).abs().mean()

    captured = capture(Linear(), (torch.randn(3, 4),), loss=Loss(), loss_args=(torch.randn(3, 4),))
    assert by_kind(captured.graph, "input") == ["x", "loss.x"]


def test_a_dictionary_with_a_loss_is_trained_on_it_and_keeps_the_other_outputs():
    class Both(Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"loss": y.square().mean(), "logits": y}

    model, x = Both(), torch.randn(3, 4)
    captured = capture(model, (x,))
    assert outputs(captured.graph, "output") == ["loss", "logits"] and not by_kind(captured.graph, "tangent")
    results = run(captured, model, {"x": x})
    model(x)["loss"].backward()
    torch.testing.assert_close(results["gradient", "layer.weight"], model.layer.weight.grad)


def test_without_a_scalar_loss_tangents_are_inputs():
    class Two(Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.layer(x)
            return y, y[0], x > 0

    model, x = Two(), torch.randn(3, 4, requires_grad=True)
    captured = capture(model, (x,))
    assert by_kind(captured.graph, "tangent") == ["0", "1"]
    assert outputs(captured.graph, "output") == ["0", "1", "2"]
    tangents = {"0": torch.randn(3, 4), "1": torch.randn(4)}
    results = run(captured, model, {"x": x}, tangents)
    torch.autograd.backward(model(x)[:2], list(tangents.values()))
    torch.testing.assert_close(results["gradient", "x"], x.grad)
    torch.testing.assert_close(results["gradient", "layer.weight"], model.layer.weight.grad)


def test_parameters_that_are_frozen_or_unused():
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x)).sum()

    graph = capture_graph(Partly(), (torch.randn(2, 4),))
    assert {i.name: i.trained for i in graph.of_kind("parameter") if i.name.endswith("weight")} == {
        "frozen.weight": False, "used.weight": True, "unused.weight": True,
    }  # fmt: skip
    assert outputs(graph, "gradient") == ["used.weight", "used.bias"]


@pytest.mark.parametrize("kind", ["real", "meta", "fake"])
def test_real_meta_and_fake_weights_give_the_same_graph(kind):
    from torch._subclasses.fake_tensor import FakeTensorMode

    expected = capture_graph(*_small("cpu"))
    if kind == "fake":
        with FakeTensorMode():
            model, args = _small("cpu")
    else:
        model, args = _small("meta" if kind == "meta" else "cpu")
    before = {name: id(value) for name, value in model.named_parameters()}
    assert capture_graph(model, args).sha256 == expected.sha256
    assert {name: id(value) for name, value in model.named_parameters()} == before


def _small(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    target = zoo.build("gpt2", device=device, layers=1, batch=2, seq=8, width=16, heads=2, vocab=32)
    return target.model, target.args


def test_no_device_layout_or_format_stays_in_arguments():
    graph = capture_graph(*_small("cpu"))
    kept = {key for op in graph.ops for key, _ in op.kwargs}
    assert kept <= {"dtype", "approximate"}
    arange = next(op for op in graph.ops if op.target.startswith("aten.arange"))
    assert [key for key, _ in arange.kwargs] == ["dtype"]


def test_linear_layers_are_contractions_over_their_own_dims_and_attention_is_one_operator():
    graph = capture_graph(*_small("cpu"))
    equations = {op.args[2] for op in graph.ops if op.target == "autopar.contract.default"}
    assert equations == {"b s k, n k -> b s n", "b s n, n k -> b s k", "b s n, b s k -> n k"}
    assert targets(graph).count("autopar.attention.default") == targets(graph).count("autopar.attention_backward.default") == 1
    assert not {"aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.clone.default"} & set(targets(graph))


def test_the_loss_is_taken_of_logits_whose_dims_are_not_merged():
    graph = capture_graph(*_small("cpu"))
    (op,) = [op for op in graph.ops if op.target == "aten._log_softmax.default"]
    assert graph.tensors[op.outputs[0]].shape == (2, 8, 32)


def test_every_operator_has_its_module_its_phase_and_the_users_line():
    graph = capture_graph(*_small("cpu"))
    for op in graph.ops:
        assert op.location.startswith("autopar/zoo/gpt2.py:") or op.target == "aten.full.default", op
    by_module = {(op.module, op.phase, op.target) for op in graph.ops}
    for phase in ("forward", "backward"):
        assert ("layers.0.attn.query", phase, "autopar.contract.default") in by_module
    assert ("layers.0.attn", "backward", "autopar.attention_backward.default") in by_module
    assert ("tokens", "backward", "autopar.embedding_backward.default") in by_module
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, reverse=True), "all of the forward comes first"


def test_operators_are_in_order_and_named_once():
    graph = capture_graph(*_small("cpu"))
    known = {item.tensor for item in graph.inputs}
    for op in graph.ops:
        assert set(op.inputs) <= known
        assert op.outputs[0] == op.name and not set(op.outputs) & known
        known |= set(op.outputs)
    assert {item.tensor for item in graph.outputs} <= known == set(graph.tensors)


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_capture_is_the_same_where_nothing_is_recorded(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    loss, made = (nn.functional.mse_loss, (torch.zeros(5, 3),)) if mode == "train" else (None, ())
    hashes = {capture_graph(model, (torch.zeros(5, 3),), mode=mode, loss=loss, loss_args=made).sha256}
    for within in (torch.no_grad, torch.inference_mode):
        with within():
            hashes.add(capture_graph(model, (torch.ones(5, 3),), mode=mode, loss=loss, loss_args=made).sha256)
    assert len(hashes) == 1


def test_the_same_model_gives_the_same_graph_twice():
    assert capture_graph(*_small("meta")).ops == capture_graph(*_small("meta")).ops


class Recording(nn.Module):
    """Registers hooks in its first call, notes that it did, and returns what they saw."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    def forward(self, x):
        if not getattr(self, "recording", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda layer, args, output: self.seen.append(output))
            self.recording = True
        self.seen = []
        self.layers(x)
        return torch.stack(self.seen).sum()


@pytest.mark.parametrize("layers", [2, 8])
def test_hooks_that_a_forward_registers_are_gone_after_a_capture(layers):
    model, x = Recording(layers), torch.randn(2, 4)
    graphs = [capture(model, (x,)).graph for _ in range(2)]
    assert graphs[0] == graphs[1] and not any(layer._forward_hooks for layer in model.layers) and "recording" not in vars(model)
    assert len(graphs[0].op["stack"].inputs) == layers


def test_dropout_is_kept_in_training_and_gone_in_inference():
    target = zoo.build("gpt2", dropout=0.1, layers=1)
    train = capture_graph(target.model, target.args)
    seeds = [op.args[2] for op in train.ops if op.target == "autopar.dropout.default"]
    assert len(seeds) == 3 and len(set(seeds)) == 3
    assert target.model.training
    assert "autopar.dropout.default" not in targets(capture_graph(target.model, target.args[:1], mode="inference"))
    assert target.model.training and all(part.training for part in target.model.modules())


def test_dropout_of_attention_probabilities_takes_attention_apart():
    class Attend(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2, is_causal=True)

    graph = capture_graph(Attend(), (torch.randn(2, 4, 6, 8, requires_grad=True),))
    assert "autopar.dropout.default" in targets(graph) and "autopar.attention.default" not in targets(graph)


@pytest.mark.parametrize(
    ("shape", "mask"), [((6, 8), (6, 6)), ((2, 6, 8), (2, 6, 6)), ((2, 3, 4, 6, 8), (2, 3, 4, 6, 6)), ((2, 4, 6, 8), (6, 6))]
)
def test_attention_of_any_rank(shape, mask):
    class Attend(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, q * 2, q * 3, mask)

    values = {"q": torch.randn(shape, dtype=torch.float64), "mask": torch.randn(mask, dtype=torch.float64)}
    captured = capture(Attend(), tuple(values.values()), mode="inference")
    assert "autopar.attention.default" in targets(captured.graph)
    torch.testing.assert_close(run(captured, nn.Module(), values)["output", "0"], Attend()(*values.values()))


EINSUMS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("bij,bjk", (2, 3, 4), (2, 4, 5)),
    ("...ij,jk->...ik", (2, 2, 3, 4), (4, 5)),
    ("ij,kl->j", (2, 3), (4, 5)),
    ("ab,bc,cd->ad", (2, 3), (3, 4), (4, 5)),
    ("ii,ij->j", (3, 3), (3, 4)),
    ("bsec,bsd->ebcd", (2, 3, 4, 5), (2, 3, 6)),
]


@pytest.mark.parametrize(("equation", "shapes"), [(first, rest) for first, *rest in EINSUMS], ids=[case[0] for case in EINSUMS])
def test_einsum_and_its_gradients(equation, shapes):
    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(shape, dtype=torch.float64) for shape in shapes)

        def forward(self) -> Tensor:
            return torch.einsum(equation, *self.weights).square().sum()

    _same_as_eager(Einsum(), {})


@pytest.mark.parametrize(("a", "b"), [((3,), (3,)), ((3,), (2, 3, 4)), ((2, 3), (3,)), ((2, 1, 3, 4), (5, 4, 2)), ((1, 3, 4), (6, 4, 2))])
def test_matmul_broadcasts(a, b):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in (a, b))

        def forward(self) -> Tensor:
            return (self.a @ self.b).square().sum()

    graph = _same_as_eager(Product(), {})
    assert targets(graph).count("autopar.contract.default") == 3


class Moved(nn.Module):
    """Takes its parts to where its input is, where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(x.device)
        made = nn.Linear(4, 2, dtype=x.dtype).to(x.device)  # of this call alone
        return self.layer.to(x.dtype).double()(x).square().sum() + (made.weight * 0).sum()


def test_modules_that_are_told_to_be_what_they_are():
    _same_as_eager(Moved(), {"x": torch.randn(3, 4, dtype=torch.float64)})


class Losses(nn.Module):
    """Many losses at once."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(6, 5, 3, dtype=torch.float64))
        self.register_buffer("classes", torch.rand(5, dtype=torch.float64))

    def forward(self, target: Tensor, soft: Tensor, labels: Tensor) -> Tensor:
        f, x = nn.functional, self.logits
        total = f.cross_entropy(x, target) + f.cross_entropy(x[:, :, 0], target[:, 0], self.classes, label_smoothing=0.1)
        total = total + f.cross_entropy(x, target, ignore_index=2, reduction="none").sum()
        total = total + f.cross_entropy(x, soft.softmax(1), self.classes)
        total = total + f.nll_loss(f.log_softmax(x, 1), target, self.classes, ignore_index=1) + f.cross_entropy(x[0, :, 0], target[0, 0])
        total = total + f.mse_loss(x, soft) + f.smooth_l1_loss(x, soft, beta=0.7) + f.huber_loss(x, soft, delta=0.4, reduction="sum")
        p, t = x.sigmoid(), soft.sigmoid()
        weights = f.binary_cross_entropy_with_logits(x, t, pos_weight=self.classes[:, None]) + f.binary_cross_entropy(p, t, reduction="sum")
        several = f.multilabel_margin_loss(x[:, :, 0], labels) + f.multilabel_margin_loss(x[0, :, 1], labels[0], reduction="sum")
        return total + weights + several + f.l1_loss(x, soft) + f.kl_div(x.log_softmax(1), t, reduction="batchmean")


def test_losses():
    labels = torch.tensor([[3, 0, -1, 4, -1], [-1, 2, 2, 2, 2], [4, 1, 0, 2, 3], [1, -1, -1, -1, -1], [0, 0, -1, 1, 1], [2, 3, 4, 0, -1]])
    inputs = {"target": torch.randint(5, (6, 3)), "soft": torch.randn(6, 5, 3, dtype=torch.float64), "labels": labels}
    graph = _same_as_eager(Losses(), inputs)
    assert not {name for name in targets(graph) if "nll_loss" in name and name.startswith("aten")}


AMINMAX_IS_DIFFERENTIATED = "NotImplemented" not in torch.ones(1, requires_grad=True).aminmax()[0].grad_fn.name()
"""Without autopar, that is: torch 2.11 has no derivative of it, so there is nothing to compare with."""


class Extremes(nn.Module):
    """What torch gives by values: extremes with their places, paths through sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5, dtype=torch.float64))

    def forward(self, x: Tensor, sequences: Tensor) -> Tensor:
        x = x * self.weight
        low, high = x.aminmax(dim=1) if AMINMAX_IS_DIFFERENTIATED else (x.amin(1), x.amax(1))
        largest, smallest = x.max(-1, keepdim=True), x.min(0)
        picked = x.argmax(1).to(x.dtype).sum() + x[x.argmin(0)].sum() + largest.indices.sum() * smallest.values.sum()
        steps, lengths = (8, 7, 6), (3, 2, 0)
        paths = sum(
            nn.functional.ctc_loss(x.log_softmax(-1), sequences, steps, lengths, reduction=how).sum() for how in ("mean", "sum", "none")
        )
        one = nn.functional.ctc_loss(x[:, 0].log_softmax(-1), sequences[0], torch.tensor(8), torch.tensor(3), zero_infinity=True)
        return (high - low).sum() + (largest.values * x).sum() + picked + paths + one


def test_extremes_and_paths():
    graph = _same_as_eager(Extremes(), {"x": torch.randn(8, 3, 5, dtype=torch.float64), "sequences": torch.randint(1, 5, (3, 3))})
    assert all(find_rule(op, graph.tensors).known for op in graph.ops)


class Seldom(nn.Module):
    """Operators that are others under another name, a size that a trace asks for, a loss that looks at values, a complex factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:
        f, x, picture = nn.functional, x * self.weight, picture * self.weight[0]
        added = torch.addmv(x[0, :, 0], x[0], x[0, 0]).sum() + torch.addbmm(x[0], x.mT, x, beta=0.5, alpha=2).sum()
        added = added + torch.addr(x[0], x[0, :, 0], x[1, 0], alpha=3).square().sum()
        unset = torch.full((6, 6), torch.nan, dtype=x.dtype)  # of which nothing is taken
        added = added + torch.addmm(unset, x[0], x[1], beta=0).sum() + torch.addr(unset, x[0, 0], x[1, 0], beta=0).sin().sum()
        grids = [f.affine_grid(x[:2, :2, :3], [2, 1, 3, 5], align_corners=align).square().sum() for align in (True, False)]
        grids.append(f.affine_grid(x[:2, :3, :4], [2, 1, 3, 2, 5], align_corners=False).square().sum())
        moved = (f.channel_shuffle(picture, 2) * picture).sum() + torch.conv_tbc(x, x[:3, :, :4], x[0, 0, :4], 1).sum()
        parts = x.quantile(torch.tensor([0.1, 0.5], dtype=x.dtype), dim=1).sum() + torch.complex(x, x).abs().sum()
        losses = [f.gaussian_nll_loss(x, x * 2, x.abs() + 1e-3, full=True), f.gaussian_nll_loss(x, x * 2, x[..., 0].abs(), reduction="sum")]
        return added + moved + parts + sum(grids) + sum(losses)


def test_what_is_seldom_called():
    inputs = {"x": torch.randn(6, 6, 6, dtype=torch.float64), "picture": torch.randn(2, 4, 3, 3, dtype=torch.float64)}
    graph = _same_as_eager(Seldom(), inputs)
    assert all(find_rule(op, graph.tensors).known for op in graph.ops)
    for op in graph.ops:
        assert from_json(json.loads(json.dumps(to_json(op.args)))) == op.args


def test_targets_in_one_row_are_refused():
    model = nn.CTCLoss()
    with pytest.raises(CaptureError, match=r"targets of all sequences in one row(.*\n)+hint: pad them"):
        capture(model, (torch.randn(8, 3, 5).requires_grad_(), torch.ones(7, dtype=torch.int64), (8, 8, 8), (3, 2, 2)))


class Waves(nn.Module):
    """Products of complex numbers, whose gradients are of conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.rand(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        f, x = nn.functional, torch.complex(x * self.phase, x.flip(1))
        y = x + self.weight
        found = [x @ y.t(), x @ y.mH, torch.mv(x, y[0]), f.linear(x, y), torch.bmm(x[None], y.mT[None]), torch.dot(x[0], y[1])]
        found += [torch.vdot(x[0], y[1]), torch.einsum("ik,jk->ij", x, y.conj()), torch.einsum("ij,kj,lj->ikl", x, y, y)]
        found += [torch.addmm(x[:, :4], x, y.t(), beta=0.5), torch.addmv(x[:, 0], y, x[0]), y.conj().imag.cumsum(0) * 1j]
        found += [f.conv1d(x[None], y[None, :, :3], x[:1, 0], padding=1), f.conv_transpose1d(x[None], y[:, None, :3])]
        found += [f.rms_norm(x, (5,), y[0], eps=0.5)]
        return torch.stack([item.abs().sin().sum() * scale for scale, item in enumerate(found, 1)]).sum()


def test_products_of_complex_numbers():
    torch.manual_seed(0)
    model, x = Waves(), torch.randn(4, 5, dtype=torch.float64)
    graph = _same_as_eager(model, {"x": x})
    assert all(find_rule(op, graph.tensors).known for op in graph.ops)


class Statistics(nn.Module):
    """Covariances, whose kernel looks at what it divides by, and all pairs of rows."""

    def __init__(self, complex_: bool = False) -> None:
        super().__init__()
        self.weight, self.complex = nn.Parameter(torch.rand(5, dtype=torch.float64)), complex_

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        x = x * self.weight
        x = torch.complex(x, x.flip(1)) if self.complex else x
        found = [x.cov(), torch.cov(x, correction=0), torch.corrcoef(x), torch.cov(x[0]), x[0].corrcoef()]
        found += [torch.cov(x, fweights=counts), x.cov(aweights=weights, correction=2), torch.cov(x, fweights=counts, aweights=weights)]
        found += [torch.combinations(x[0]), torch.combinations(x[1], 3, with_replacement=True), torch.combinations(x[0], 0)]
        return torch.stack([(item * item.conj()).real.sum() * scale for scale, item in enumerate(found, 1)]).sum()


@pytest.mark.parametrize("complex_", [False, True])
def test_statistics_that_look_at_values(complex_: bool):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 5, dtype=torch.float64), "weights": torch.rand(5, dtype=torch.float64), "counts": torch.arange(1, 6)}
    graph = _same_as_eager(Statistics(complex_), inputs)
    assert all(find_rule(op, graph.tensors).known for op in graph.ops)


class Quantiles(nn.Module):
    """Levels that are learned, along a dim and of all entries, with what is no number in some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.levels = nn.Parameter(torch.rand(5, dtype=torch.float64)), nn.Parameter(torch.tensor([0.1, 0.45, 1.0]).double())

    def forward(self, x: Tensor, holes: Tensor) -> Tensor:
        x, level = x * self.weight, self.levels[1]
        gaps = x.masked_fill(holes, torch.nan)
        found = [x.quantile(self.levels), x.quantile(0.3, keepdim=True), torch.quantile(input=x, q=level, dim=-2, keepdim=True)]
        for way in ("linear", "lower", "higher", "nearest", "midpoint"):
            found += [x.quantile(self.levels, 1, keepdim=True, interpolation=way), x.quantile(0.6, dim=0, interpolation=way)]
            found += [torch.nanquantile(gaps, self.levels, -1, interpolation=way), gaps.quantile(level, 0, interpolation=way)]
        shapes = [item.ravel() * torch.arange(1, item.numel() + 1) * item.dim() for item in found]
        return torch.stack([item.nan_to_num(0.5).sum() * scale for scale, item in enumerate(shapes, 1)]).sum()


def test_quantiles_whose_levels_torch_looks_at():
    torch.manual_seed(0)
    holes = torch.zeros(4, 5, dtype=torch.bool)
    holes[1, 2] = holes[2] = True  # one entry, and a row of nothing else
    graph = _same_as_eager(Quantiles(), {"x": torch.randn(4, 5, dtype=torch.float64), "holes": holes})
    assert all(find_rule(op, graph.tensors).known for op in graph.ops)


class Factorisations(nn.Module):
    """Linear algebra that torch checks by values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.weight
        definite = x @ x.mT + torch.eye(3, dtype=x.dtype)
        solved = torch.linalg.solve(definite, y) + torch.linalg.inv(definite) @ y + torch.inverse(definite).sum()
        vectors = torch.linalg.solve(definite, y[..., 0])
        powers = torch.linalg.eigvals(definite).abs().sum() + torch.linalg.eig(x.mT @ x)[0].real.sin().sum()  # backward solves, and checks
        factors = (solved * torch.linalg.cholesky(definite)[..., :1]).sum()
        return factors + vectors.square().sum() + torch.logdet(definite).sum() + powers


def test_linear_algebra_has_its_checks_left_out_and_says_nan():
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 3, 3, dtype=torch.float64), "y": torch.randn(4, 3, 2, dtype=torch.float64)}
    graph = _same_as_eager(Factorisations(), inputs)
    assert all(find_rule(op, graph.tensors).known for op in graph.ops)
    singular = torch.zeros(2, 3, 3)
    singular[1] = torch.eye(3)
    assert inverse(singular).isnan().all((1, 2)).tolist() == [True, False]
    assert cholesky(-torch.eye(3)).isnan().all() and solve(singular, torch.ones(2, 3)).isnan().all(1).tolist() == [True, False]


VECTORS = [((4, 3, 3), (3,), True), ((4, 3, 3), (4, 3), True)]
MATRICES = [((3, 3), (2, 3, 3)), ((4, 3, 3), (2, 4, 3, 3)), ((2, 4, 3, 3), (1, 3, 3))]


@pytest.mark.parametrize(("first", "second", "left"), [*VECTORS, *((*shapes, left) for shapes in MATRICES for left in (True, False))])
def test_solutions_broadcast(first, second, left):
    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3, dtype=torch.float64))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.linalg.solve(a + self.weight.diag(), b, left=left).square().sum()

    _same_as_eager(Solve(), {"a": torch.randn(first, dtype=torch.float64), "b": torch.randn(second, dtype=torch.float64)})


class Regions(nn.Module):
    """Layers under no_grad and under autocast, a checkpoint, views written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(3, 3, 3, padding="same")
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x).relu()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(x + y)
        y = self.c(y.float()).relu()
        z = torch.zeros_like(y)
        z[:, 1:] = y[:, 1:] * 2
        return (z + torch.utils.checkpoint.checkpoint(torch.tanh, y, use_reentrant=False)).sum()


def test_regions_and_views_written_in_place():
    torch.manual_seed(0)
    with pytest.warns(CheckpointWarning, match=r"test_capture.py:\d+: torch.utils.checkpoint is not followed"):
        graph = _same_as_eager(Regions(), {"x": torch.randn(2, 3, 4)}, tolerance=2e-2)
    contraction = next(op for op in graph.ops if op.module == "b" and op.target == "autopar.contract.default")
    assert graph.tensors[contraction.name].dtype == "bfloat16"


class CheckpointedTwice(nn.Module):
    """A checkpoint within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def outer(y: Tensor) -> Tensor:
            return self.outer(torch.utils.checkpoint.checkpoint(self.inner, y, use_reentrant=False).tanh())

        return torch.utils.checkpoint.checkpoint(outer, x, use_reentrant=False).sum()


@pytest.mark.filterwarnings("ignore::autopar.importer.stand_ins.autograd_calls.CheckpointWarning")
def test_a_checkpoint_within_a_checkpoint_records_as_it_does_alone():
    torch.manual_seed(0)
    _same_as_eager(CheckpointedTwice().double(), {"x": torch.randn(2, 4, dtype=torch.float64)})


class Mixed(nn.Module):
    """Losses under autocast, of whatever device, and a part that is in evaluation mode."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.layer, self.drop = device, nn.Linear(8, 8), nn.Dropout(0.5)
        self.drop.eval()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            logits = self.drop(self.layer(x))
            total = nn.functional.cross_entropy(logits, y) + nn.functional.mse_loss(logits, x)
        return total + nn.functional.cross_entropy(logits, torch.softmax(x, -1)).float()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_honoured_whatever_the_device_and_losses_are_precise(device):
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 8), "y": torch.randint(8, (4,))}
    graph = capture_graph(Mixed(device), (inputs["x"], inputs["y"]))
    dtypes = {op.target.split(".")[1]: graph.tensors[op.outputs[0]].dtype for op in graph.ops if op.phase == "forward"}
    assert dtypes["contract"] == "bfloat16" and dtypes["nll_loss"] == "float32" and "dropout" not in dtypes
    assert [graph.tensors[op.outputs[0]].dtype for op in graph.ops if "_log_softmax.default" in op.target] == ["float32", "bfloat16"]
    if device == "cpu":
        _same_as_eager(Mixed(device), inputs, tolerance=2e-2)


class Torsos(nn.Module):
    """torch's own modules that choose fused kernels of the CPU where they can."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(16, 8, batch_first=True)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.tables = nn.Embedding(9, 16, padding_idx=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.recurrent(self.encoder(self.tables(x)))[0]).square().sum()


def test_modules_with_kernels_of_their_own_are_captured_as_plain_operators():
    torch.manual_seed(0)
    graph = _same_as_eager(Torsos(), {"x": torch.randint(9, (2, 5))}, tolerance=1e-4)
    assert not [name for name in targets(graph) if "mkldnn" in name or "_native_multi_head" in name]
    assert torch.backends.mkldnn.enabled and torch.backends.mha.get_fastpath_enabled()


class Replacing(nn.Module):
    """Tensors that are put into attributes anew in each call: weights that older hooks compute, attention that is kept to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.weight_norm(nn.Linear(8, 8, dtype=torch.float64))
        self.pruned = prune.l1_unstructured(nn.Linear(8, 8, dtype=torch.float64), "weight", 0.3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        self.seen = torch.zeros(1)
        self.state, self.calls = torch.zeros(8, dtype=torch.float64), 0

    def forward(self, x: Tensor, stateful: bool = False) -> Tensor:
        y, self.seen = self.attention(x, x, x)
        self.calls += 1
        if stateful:
            self.state = (y[0, 0] + self.state).detach()
        return (self.pruned(self.normed(y)) + self.state).square().sum()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_tensors_that_a_call_puts_into_attributes_are_of_that_call():
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 5, 8, dtype=torch.float64)}
    model = Replacing()
    model(**inputs)
    held = model.seen, model.normed.weight, model.calls
    with pytest.warns(UserWarning, match=r"changes its number calls, from 1 to 2: .* first call"):
        captured = capture(model, tuple(inputs.values()))
    assert (model.seen, model.normed.weight, model.calls) == held
    assert {item.name for item in captured.graph.inputs} >= {"normed.weight_g", "normed.weight_v", "pruned.weight_orig", "state"}
    assert not {"seen", "normed.weight", "pruned.weight"} & {item.name for item in captured.graph.inputs}
    with pytest.warns(UserWarning, match="changes its number calls"):
        _same_as_eager(model, inputs)
    with pytest.warns(UserWarning), pytest.raises(CaptureError, match="reads the tensor state and then puts another") as caught:
        capture(model, (*inputs.values(), True))
    assert "self.state = (y[0, 0] + self.state).detach()" in str(caught.value) and "hint: register it as a buffer" in str(caught.value)


@pytest.mark.parametrize(("name", "draw"), [("random", random.random), ("numpy.random", lambda: numpy.random.beta(0.2, 0.2))])
def test_numbers_drawn_outside_of_torch_are_said_to_be_drawn_once(name, draw):
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * draw() + x.flip(0) * torch.rand(())

    with pytest.warns(UserWarning, match=f"draws numbers from {name}: they are drawn once"):
        capture(Mixed(), (torch.randn(4, 8),), mode="inference")


def _same_as_eager(model: nn.Module, inputs: dict[str, Tensor], tolerance: float = 1e-9) -> Graph:
    captured = capture(model, tuple(inputs.values()))
    results = run(captured, model, inputs)
    loss = model(*inputs.values())
    loss.backward()
    torch.testing.assert_close(results["output", "loss"], loss.detach(), rtol=tolerance, atol=tolerance)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(results["gradient", name], parameter.grad, rtol=tolerance, atol=tolerance)
    return captured.graph


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "keys", "repeats"), [
    ("mlp", {"layers": 4}, [3]),
    ("gpt2", {"layers": 3, "dropout": 0.1}, [3]),
    ("llama3", {"layers": 3}, [3]),
    ("moe", {"layers": 3}, [3]),
    ("resnet", {"blocks": "3-3"}, [3, 2]),
])  # fmt: skip
def test_equal_layers_are_a_group(name, keys, repeats):
    target = zoo.build(name, device="meta", **keys)
    graph = capture_graph(target.model, target.args)
    groups = sorted(graph.groups, key=lambda group: -len(group[0]))[: len(repeats)]
    assert [len(group) for group in groups] == repeats
    for group in groups:
        for ops in zip(*([graph.op[name] for name in repeat] for repeat in group), strict=True):
            assert len({(op.target, op.phase, tuple(graph.tensors[t].shape for t in op.outputs)) for op in ops}) == 1
        assert {graph.op[name].phase for name in group[0]} == {"forward", "backward"}
    names = [name for group in graph.groups for repeat in group for name in repeat]
    assert len(names) == len(set(names))


def test_layers_that_differ_are_not_a_group():
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 6), nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert capture_graph(Uneven(), (torch.randn(2, 4),), mode="inference").groups == ()


class Masked(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=bias)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x).relu() * mask


class Turns(nn.Module):
    """Layers of two kinds in turn; ``told``: equal layers that are told one of two masks in turn."""

    def __init__(self, layers: int, told: bool) -> None:
        super().__init__()
        self.told, self.first = told, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Masked(bias=told or number % 2 == 0) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        masks = x.detach().gt(0.0).to(x.dtype), x.detach().lt(1.0).to(x.dtype)
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, masks[number % 2 if self.told else 0])
        return x.sum()


@pytest.mark.parametrize("told", [False, True], ids=["other operators", "other masks"])
def test_layers_that_take_turns_are_repeats_together_and_fold(told: bool) -> None:
    graph = capture_graph(Turns(17, told), (torch.randn(4, 8),))
    (group,) = graph.groups
    assert len(group) == 8, "the last layer is left"
    places = [[int(graph.op[name].module.split(".")[1]) for name in repeat if graph.op[name].module] for repeat in group]
    assert [set(found) for found in places] == [{2 * number, 2 * number + 1} for number in range(8)]
    order = [op.name for op in graph.ops]
    assert all(sorted(repeat, key=order.index) == list(repeat) for repeat in group)
    folding = fold_layers(graph)
    assert folding is not None and len(folding.graph.ops) < len(graph.ops)


def test_deep_models_capture_layers_completely():
    target = zoo.build("llama3", device="meta", layers=4)
    graph = capture_graph(target.model, target.args)
    (group,) = graph.groups
    inside = {name for repeat in group for name in repeat}
    assert {op.name for op in graph.ops if op.module.startswith("layers.")} == inside


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(("call", "message"), [
    (lambda: capture(torch.relu, (torch.ones(1),)), "needs an nn.Module"),
    (lambda: capture(Linear(), torch.ones(1)), "not a tuple"),
    (lambda: capture(nn.Sequential(torch.jit.trace(Linear(), torch.ones(4))), (torch.ones(4),)), "0, a part of the model, is a Torch"),
    (lambda: capture(Linear(), (torch.ones(4),), mode="test"), "unknown mode 'test'"),
    (lambda: capture(Linear(), ()), r"the model's forward takes \(x"),
    (lambda: capture(Linear(), (torch.ones(4), torch.ones(4))), "too many positional"),
    (lambda: capture(Linear(), (torch.ones(4),), ["x"]), "not a mapping"),
    (lambda: capture(Linear(), (torch.ones(4),), loss=3), "not a function"),
    (lambda: capture(Linear(), (torch.ones(4),), loss=lambda outputs, labels: outputs.sum()), "the loss takes"),
    (lambda: capture(Linear(), (torch.ones(4),), loss=lambda outputs: outputs * 2), "does not return a scalar"),
])  # fmt: skip
def test_wrong_arguments_are_usage_errors(call, message):
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\nhint: " in str(caught.value)
