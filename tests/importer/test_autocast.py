"""``compute_dtype="autocast-bfloat16"``: the casts of ``torch.autocast`` are in the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import zoo
from autopar.errors import UsageError
from autopar.graph import CONVERSION, Graph
from autopar.importer import capture_graph, capturing
from autopar.search.folding.fold import fold_layers

HALF = "autocast-bfloat16"
SIZES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"layers": 3, "width": 32, "heads": 2, "batch": 4, "seq": 8, "vocab": 32},
    "llama3": {"layers": 3, "width": 32, "heads": 2, "kv_heads": 1, "hidden": 64, "batch": 4, "seq": 8, "vocab": 32},
    "resnet": {"batch": 4, "image": 16, "width": 4, "blocks": "1-1", "classes": 4},
    "moe": {"layers": 3, "width": 16, "heads": 2, "hidden": 16, "experts": 4, "batch": 4, "seq": 8, "vocab": 32},
}


def captured(name: str, compute_dtype: str | None = HALF, **sizes: Any) -> Graph:
    made = zoo.build(name, **{**SIZES[name], **sizes}, device="meta")
    return capture_graph(made.model, made.args, made.kwargs, loss=made.loss, loss_args=made.loss_args, compute_dtype=compute_dtype)


class Beside(nn.Module):
    """A function of half-precision activations, and of the inputs that they were made of."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear(x), x)


def _numbers(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.long)


FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda h, x: (h + 1, h + x),
    "mul": lambda h, x: (h * h, h * x),
    "softmax": lambda h, x: (h.softmax(-1), x.softmax(-1)),
    "log_softmax": lambda h, x: h.log_softmax(-1),
    "exp": lambda h, x: h.exp(),
    "pow": lambda h, x: h ** 2,
    "gelu": lambda h, x: F.gelu(h),
    "sum": lambda h, x: (h.sum(), h.mean(-1)),
    "cumsum": lambda h, x: h.cumsum(0),
    "norm": lambda h, x: h.norm(),
    "matmul": lambda h, x: (h @ x, x @ x),
    "bmm": lambda h, x: torch.bmm(x.view(1, 4, 4), x.view(1, 4, 4)),
    "baddbmm": lambda h, x: torch.baddbmm(x, x.view(1, 4, 4), x.view(1, 4, 4)),
    "addmm": lambda h, x: torch.addmm(x, x, x),
    "addbmm": lambda h, x: torch.addbmm(x, x.view(1, 4, 4), x.view(1, 4, 4)),
    "einsum": lambda h, x: torch.einsum("ij,kj->ik", x, x),
    "mv": lambda h, x: (x @ x[0], torch.mv(x, x[0])),
    "dot": lambda h, x: (x[0] @ x[1], torch.dot(x[0], x[1])),
    "addmv": lambda h, x: torch.addmv(x[0], x, x[0]),
    "outer": lambda h, x: torch.outer(x[0], x[0]),
    "linear": lambda h, x: F.linear(x, x, x[0]),
    "bilinear": lambda h, x: F.bilinear(x, x, x.view(1, 4, 4)),
    "vdot": lambda h, x: torch.vdot(x[0], x[1]),
    "addr": lambda h, x: torch.addr(x, x[0], x[0]),
    "attention": lambda h, x: F.scaled_dot_product_attention(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4), x.view(1, 1, 4, 4)),
    "conv1d": lambda h, x: F.conv1d(x.view(1, 4, 4), x.view(4, 4, 1)),
    "conv2d": lambda h, x: F.conv2d(x.view(1, 1, 4, 4), x[:2, :2].reshape(1, 1, 2, 2)),
    "conv_transpose2d": lambda h, x: F.conv_transpose2d(x.view(1, 1, 4, 4), x[:2, :2].reshape(1, 1, 2, 2)),
    "prelu": lambda h, x: F.prelu(x, x[0, :1]),
    "cat": lambda h, x: (torch.cat([h, x]), torch.cat([h, h])),
    "stack": lambda h, x: torch.stack([h, x]),
    "layer_norm": lambda h, x: (F.layer_norm(h, (4,)), F.layer_norm(x, (4,))),
    "group_norm": lambda h, x: F.group_norm(h, 2),
    "rms_norm": lambda h, x: F.rms_norm(h, (4,)),
    "prod": lambda h, x: (h.prod(), h.prod(1)),
    "trace": lambda h, x: h.trace(),
    "inverse": lambda h, x: torch.inverse(h + 9 * torch.eye(4)),
    "where": lambda h, x: torch.where(x > 0, h, x),
    "cholesky": lambda h, x: torch.linalg.cholesky((x @ x.T + 9 * torch.eye(4)).bfloat16()),
    "solve": lambda h, x: torch.linalg.solve(h + 9 * torch.eye(4, dtype=h.dtype), h),
    "cdist": lambda h, x: torch.cdist(h, h),
    "pad": lambda h, x: F.pad(h.view(1, 4, 4), (1, 1), mode="reflect"),
    "avg_pool2d": lambda h, x: F.avg_pool2d(h.view(1, 1, 4, 4), 2),
    "adaptive_avg_pool2d": lambda h, x: F.adaptive_avg_pool2d(h.view(1, 1, 4, 4), 2),
    "adaptive_avg_pool3d": lambda h, x: F.adaptive_avg_pool3d(h.view(1, 1, 4, 2, 2), (2, 1, 1)),
    "avg_pool3d": lambda h, x: F.avg_pool3d(h.view(1, 1, 4, 2, 2), (2, 1, 1)),
    "mse_loss": lambda h, x: (F.mse_loss(h, h), F.mse_loss(h, x)),
    "l1_loss": lambda h, x: F.l1_loss(h, h),
    "smooth_l1_loss": lambda h, x: F.smooth_l1_loss(h, h),
    "huber": lambda h, x: F.huber_loss(h, h),
    "cross_entropy": lambda h, x: F.cross_entropy(h, _numbers(4)),
    "nll_loss": lambda h, x: F.nll_loss(h.log_softmax(-1), _numbers(4)),
    "bce_with_logits": lambda h, x: F.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
    "kl_div": lambda h, x: F.kl_div(h.log_softmax(-1), h.softmax(-1), reduction="batchmean"),
    "embedding": lambda h, x: F.embedding(_numbers(3), x),
    "grid_sample": lambda h, x: F.grid_sample(h.view(1, 1, 4, 4), x[:, :2].view(1, 2, 2, 2), align_corners=False),
    "interpolate": lambda h, x: F.interpolate(h.view(1, 1, 4, 4), scale_factor=2.0, mode="bilinear"),
    "own region": lambda h, x: _own_region(x),
    "max": lambda h, x: (h.max(), h.amax(0)),
    "topk": lambda h, x: h.topk(2).values,
    "as asked": lambda h, x: (x.to(h.dtype), h.to(x.dtype), x @ x if torch.is_autocast_enabled("cpu") else None),
}
"""Of ``h`` in bfloat16 and ``x`` in float32, both [4, 4]."""


def _own_region(x: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", enabled=False):
        inside = x @ x
    return inside, inside @ inside


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operator_has_the_dtypes_that_autocast_gives_it(name: str) -> None:
    torch.manual_seed(0)
    model, x = Beside(FUNCTIONS[name]), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        made = model(x)
    wanted = [str(item.dtype).removeprefix("torch.") for item in (made if isinstance(made, tuple) else (made,))]
    graph = capture_graph(model, (x,), mode="inference", compute_dtype=HALF)
    assert [graph.tensors[output.tensor].dtype for output in graph.outputs] == wanted


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Normed(nn.Module):
    """Norms beside statistics, after a convolution in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.instance = nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.batch(self.conv(x)), self.instance(self.conv(x))


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made, state = self.layer(x)
        return made, *(state if isinstance(state, tuple) else (state,))


@pytest.mark.parametrize(
    "make", [Encoder, Normed, *(lambda kind=kind: Recurrent(kind) for kind in (nn.LSTM, nn.GRU, nn.RNN))],
    ids=["encoder", "norms", "lstm", "gru", "rnn"],
)  # fmt: skip
def test_modules_of_torch_have_the_dtypes_that_autocast_gives_them(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 3, 8)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            made = model(x)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip("oneDNN has no such layer in bfloat16 on this processor, as on those without AVX-512")
    wanted = [str(item.dtype).removeprefix("torch.") for item in (made if isinstance(made, tuple) else (made,))]
    graph = capture_graph(model, (x,), compute_dtype=HALF)
    assert [graph.tensors[output.tensor].dtype for output in graph.outputs if output.kind == "output"] == wanted
    assert {graph.tensors[output.tensor].dtype for output in graph.outputs if output.kind == "gradient"} == {"float32"}


@pytest.mark.parametrize("name", SIZES)
def test_models_keep_losses_and_norms_precise(name: str) -> None:
    graph = captured(name)
    made = {op.target.split(".")[1]: set() for op in graph.ops}  # type: dict[str, set[str]]
    for op in graph.ops:
        if op.phase == "forward":
            made[op.target.split(".")[1]].add(graph.tensors[op.outputs[0]].dtype)
    halves = made.get("contract", set()) | made.get("convolution", set())
    assert halves == {"bfloat16"} and made["_log_softmax"] == {"float32"}
    assert all(graph.tensors[output.tensor].dtype == "float32" for output in graph.outputs if output.kind in ("gradient", "buffer")
               and not output.name.endswith("num_batches_tracked"))  # fmt: skip


def test_weights_are_converted_once_and_activations_once_beside_each_other() -> None:
    graph = captured("gpt2")
    parameters = {item.tensor for item in graph.of_kind("parameter")}
    converted = [(op.inputs[0], op.module) for op in graph.ops if op.target == CONVERSION and op.phase == "forward"]
    weights = [name for name, _ in converted if name in parameters]
    assert len(weights) == len(set(weights)) == len(graph.prepared) and not any("norm" in name for name in weights)
    of_inputs = [module for name, module in converted if name not in parameters and "attn" in module]
    assert of_inputs == [f"layers.{layer}.attn.query" for layer in range(3)]


@pytest.mark.parametrize("name", ["gpt2", "llama3", "moe"])
def test_layers_are_alike_and_the_short_trace_casts_where_the_full_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(name, layers=7)
    folding = fold_layers(graph)
    assert folding is not None and len(folding.group.repeats) == 7
    monkeypatch.setattr(capturing, "_chains", lambda *given: ())
    whole = captured(name, layers=7)
    assert graph == whole and list(graph.tensors) == list(whole.tensors)


def test_gradients_are_made_outside_of_autocast() -> None:
    """What an operator in float32 computes in its backward is float32 too: matrix products of an inverse's gradient."""

    class Inverted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self) -> Tensor:
            return torch.linalg.inv(self.weight).sum()

    graph = capture_graph(Inverted(), (), compute_dtype=HALF)
    made = {graph.tensors[name].dtype for op in graph.ops for name in op.outputs}
    assert "float32" in made and "bfloat16" not in made


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown compute dtype 'autocast-int8'[\s\S]*hint: use one of .*autocast-bfloat16"):
        captured("gpt2", "autocast-int8")
