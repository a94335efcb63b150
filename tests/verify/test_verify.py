"""verify: says yes to right programs with figures, no to wrong ones with the reason, and which rank died."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.compare import explain
from autopar.errors import FileError, MismatchError, UsageError, VerificationError
from autopar.plan import Plan
from autopar.runtime.execution.footprint import spared_bytes
from autopar.runtime.module.compiling import rebuild
from autopar.target import Target
from autopar.verify import trials, verify, verifying
from autopar.verify.comparison import MEMORY_TOLERANCE, error, relative
from autopar.verify.examples import index_bound, with_values
from autopar.verify.live_memory import LiveMemory
from benchmarks.models import stressed

KEYS = {"passed", "ranks", "compared_in", "outputs", "gradients", "losses", "collectives", "peak_memory_bytes_per_rank"}


@lru_cache
def target(name: str = "mlp", mode: str = "train") -> Target:
    torch.manual_seed(0)
    return zoo.build(name, mode=mode)


@lru_cache
def graph_of(name: str, mode: str) -> autopar.Graph:
    made = target(name, mode)
    return autopar.capture(made.model, made.args, mode=mode)


@lru_cache
def plan_of(name: str = "mlp", mode: str = "train", mesh: str = "dp=2,tp=2") -> Plan:
    return autopar.plan(graph_of(name, mode), mesh=mesh, hardware="cpu-cluster", cost_model="communication")


@pytest.mark.parametrize(
    ("optimizer", "dtype", "backend"),
    [
        ("adamw-mixed", "bfloat16", "gloo"), ("sgd", "float32", "simulate"), ("sgd-momentum", "float32", "simulate"),
        ("own:6,4", "float32", "simulate"),
    ],
)  # fmt: skip
def test_each_optimizer_trains_and_keeps_what_was_planned(optimizer: str, dtype: str, backend: Any) -> None:
    made = zoo.build("mlp", dtype=dtype, width="64", batch="8")
    plan = autopar.plan(made.model, made.args, mesh="dp=2", hardware="cpu-cluster", cost_model="communication", optimizer=optimizer)
    found = verify(plan, made, backend=backend, steps=3)
    assert found.passed, found.problems
    predicted = plan.predicted
    share = predicted.memory.optimizer / predicted.peak_memory_bytes_per_rank
    assert share > 2 * MEMORY_TOLERANCE or optimizer == "sgd", "states left out, or counted double, would not pass"


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
def test_a_right_program_passes(backend: Any) -> None:
    before = {name: tensor.clone() for name, tensor in target().model.state_dict().items()}
    found = verify(plan_of(), target(), backend=backend, steps=3)
    data = found.to_json()
    assert found.passed and not found.problems and set(data) == KEYS
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["ranks"] == 4 and data["outputs"]["max_error"] <= 1e-5
    assert set(data["gradients"]) == set(dict(target().model.named_parameters())) and max(data["gradients"].values()) <= 1e-4
    assert len(data["losses"]["single"]) == len(data["losses"]["sharded"]) == 3
    assert data["losses"]["single"][0] > data["losses"]["single"][-1]
    assert data["collectives"]["planned"] == data["collectives"]["observed"] and data["collectives"]["planned"]
    assert {"kind", "axes", "phase", "bytes"} <= set(data["collectives"]["planned"][0])
    memory = data["peak_memory_bytes_per_rank"]
    assert memory["measured"] == pytest.approx(memory["predicted"], rel=0.02)
    assert "passed on 4 ranks" in str(found)
    assert all(tensor.equal(before[name]) for name, tensor in target().model.state_dict().items()), "the target is not changed"


def test_inference_has_no_gradients_and_no_losses() -> None:
    data = verify(plan_of(mode="inference"), target(mode="inference"), backend="simulate").to_json()
    assert data["passed"] and data["gradients"] == {} and data["losses"] == {"single": [], "sharded": []}


@pytest.mark.parametrize("name", ["gpt2", "llama3", "resnet", "moe"])
def test_the_zoo_passes_in_lockstep(name: str) -> None:
    found = verify(plan_of(name, mesh="dp=2"), target(name), backend="simulate", steps=2)
    assert found.passed, found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1", "2", "4", "2x2", "8", "2x4"])
@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama3", "resnet", "moe"])
def test_the_zoo_passes_on_real_ranks(name: str, mode: str, mesh: str) -> None:
    found = verify(plan_of(name, mode, mesh), target(name, mode))
    assert found.passed, found


class Unusual(nn.Module):
    """Two outputs and no loss, dropout, a mutated buffer, a dictionary argument, a meta integer input that indexes a table of 5."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x = self.norm(self.table(batch["words"]).sum(1) * scale + batch["more"])
        return self.out(self.drop(x)), x.sum(-1)


def unusual(device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    with torch.device(device):
        model = Unusual()
        batch = {"words": torch.randint(5, (16, 4)), "more": torch.randn(16, 16, requires_grad=True)}
    return model, (batch,), {"scale": 2.0}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_that_are_not_plain_pass(device: str) -> None:
    made = unusual(device)
    plan = autopar.plan(made[0], made[1], made[2], mesh="2", hardware="cpu-cluster", cost_model="communication")
    for backend in ("gloo", "simulate"):
        found = verify(plan, made, backend=backend, steps=3)
        assert found.passed, found
        assert "batch.more" in found.gradient_errors


class Drawing(nn.Module):
    """Random numbers of every kind beside dropout, in place and not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3, inplace=True), nn.AlphaDropout(0.1))
        self.spread = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        kept = nn.functional.dropout1d((y + torch.randn_like(y) * self.spread(x).exp()).unsqueeze(-1), 0.4, True).squeeze(-1)
        noise = torch.rand(8, 16) + torch.randn(8, 16) + torch.bernoulli(y.sigmoid()) + torch.zeros_like(y).uniform_(-1, 1)
        noise = noise + torch.empty_like(y).normal_(1.0, 2.0) + torch.zeros_like(y).bernoulli_(0.3) + torch.normal(0.0, 2.0, (8, 16))
        soft = nn.functional.gumbel_softmax(y) + torch.normal(y, y.exp()) + torch.randint(0, 5, (8, 16))
        return (kept * noise + soft)[torch.randperm(8)].square().mean()


def test_models_that_draw_random_numbers_pass() -> None:
    made = Drawing(), (torch.randn(8, 16),)
    for mesh in ("2x2", "3"):
        plan = autopar.plan(*made, mesh=mesh, hardware="cpu-cluster", cost_model="communication")
        found = verify(plan, made, backend="simulate", steps=3)
        assert found.passed, found


def test_a_plan_whose_mesh_or_hardware_cannot_be_read_is_refused() -> None:
    made = target()
    plan = plan_of("mlp", "train", "2")
    for broken, words in (({"mesh": {}}, "no axis"), ({"hardware": {"name": "mine"}}, "field memory_bytes")):
        with pytest.raises(FileError, match=words):
            verify(plan.model_copy(update=broken), made)


def test_a_loss_from_outside() -> None:
    made = SimpleNamespace(
        model=target().model, args=(target().args[0],), kwargs={}, loss=nn.functional.mse_loss, loss_args=(target().args[1],)
    )  # fmt: skip
    plan = autopar.plan(
        made.model, made.args, loss=made.loss, loss_args=made.loss_args, mesh="2", hardware="cpu-cluster", cost_model="communication"
    )
    assert verify(plan, made, steps=2).passed
    with pytest.raises(MismatchError, match="the plan was made for another model: input target"):
        verify(plan, (made.model, made.args), steps=2)


def test_half_precision_has_its_own_tolerance() -> None:
    made = zoo.build("mlp", dtype="bfloat16")
    plan = autopar.plan(made.model, made.args, mesh="2x2", hardware="cpu-cluster", cost_model="communication")
    assert verify(plan, made, backend="simulate", steps=3).passed


def test_a_wrong_program_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.runtime.ranks import backends

    monkeypatch.setitem(backends.REDUCE, "sum", torch.maximum)
    found = verify(plan_of(), target(), backend="simulate", steps=2)
    assert not found.passed and not found.to_json()["passed"]
    assert any("gradient of" in problem or "output loss" in problem for problem in found.problems)
    assert "FAILED" in str(found) and "problem" in str(found)


class Cancelling(nn.Module):
    """A sum of large numbers that is small: the order in which it is made shows. Beside it an operator with collectives inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x * torch.ones((), dtype=torch.float32) * self.scale).float()
        return scaled.sum() + torch.linalg.vector_norm(scaled.clamp(-1, 1))


@pytest.mark.parametrize("error", [0.0, 1e-2])
def test_rounding_is_told_from_error(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    large = torch.randn(2048) * 1e6
    x = torch.cat([large + torch.rand(2048), -large[torch.randperm(2048)]])
    pins = {"input:x": "S0", "op:mul": "S0", "op:mul_1": "S0", "op:mul_2": "S0"}
    plan = autopar.plan(Cancelling(), (x,), mesh="dp=4", hardware="cpu-cluster", constraints=pins, cost_model="communication")
    if error:
        whole = trials.gather
        monkeypatch.setattr(trials, "gather", lambda *args: whole(*args) * (1 + error))
    found = verify(plan, (Cancelling(), (x,)), backend="simulate", steps=1)
    assert abs(found.single[0] - found.sharded[0]) > 1e-4 * abs(found.single[0])
    assert found.compared_in == "float64" and found.passed == (error == 0), found.problems
    assert any(call["before"] == "linalg_vector_norm" for call in found.planned)


class DividedOut(nn.Module):
    """A scale that the norm after it divides out again: its gradient is rounding and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.normed, self.linear = nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.normed(self.scaled(x).bfloat16())).float().square().mean()


@pytest.mark.parametrize("wrong", ["", "in bfloat16", "everywhere"])
def test_rounding_is_told_from_error_in_half_precision(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = DividedOut().bfloat16(), torch.randn(32, 16, dtype=torch.bfloat16)
    pins = {"input:x": "S0 R"}
    plan = autopar.plan(model, (x,), mesh="dp=4", hardware="cpu-cluster", constraints=pins, cost_model="communication")
    if wrong:
        whole = trials.gather

        def gathered(*args: Any) -> Tensor:
            found = whole(*args)
            return found + 1e3 if wrong == "everywhere" or found.dtype == torch.bfloat16 else found

        monkeypatch.setattr(trials, "gather", gathered)
    found = verify(plan, (model, (x,)), backend="simulate", steps=1)
    assert (found.compared_in, found.beyond, found.passed) == ("float64", "bfloat16", not wrong), found.problems
    assert wrong or "beyond the tolerance in bfloat16" in str(found)


class Routed(nn.Module):
    """Each row goes to the expert of its largest score. Rounded otherwise, which expert that is changes, and whole rows of gradients. What
    multiplies them has no kernel for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 16, bias=False), nn.Parameter(torch.randn(16, 64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).sigmoid().topk(1, -1)
        order = chosen.flatten().sort(stable=True).indices
        ends = (chosen == torch.arange(16)).sum(0).cumsum(0).to(torch.int32)
        made = nn.functional.grouped_mm(x[order], self.experts, offs=ends) * best[order]
        return made.float().square().mean()


@pytest.mark.parametrize("wrong", [False, True])
def test_what_rounding_chooses_is_told_from_error(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Routed().bfloat16(), torch.randn(256, 64, dtype=torch.bfloat16)
    pins = {"input:x": "R S0", "router.weight": "R S0"}
    plan = autopar.plan(model, (x,), mesh="dp=4", hardware="cpu-cluster", constraints=pins, cost_model="communication")
    if wrong:
        whole = trials.gather
        monkeypatch.setattr(trials, "gather", lambda *args: whole(*args) * 1.01)
    found = verify(plan, (model, (x,)), backend="simulate", steps=1)
    assert (found.compared_in, found.beyond, found.passed) == ("float64", "bfloat16", not wrong), found.problems


class Rootless(nn.Module):
    """A gradient of zero times infinity, and a result that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + (self.scale * 0).sqrt() + self.shift).square().mean()


def test_what_is_not_a_number_proves_nothing() -> None:
    model, x = Rootless(), torch.ones(4, 4)
    plan = autopar.plan(model, (x,), mesh="dp=2", hardware="cpu-cluster", cost_model="communication")
    found = verify(plan, (model, (x,)), backend="simulate", steps=1)
    assert found.problems == ("1 of 2 gradients (scale) are not numbers on one device: nothing is compared by them",)
    assert not found.passed


def test_buffers_without_values_scale_by_about_one() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.register_buffer("scale", torch.ones(()))
        model.register_buffer("frequencies", torch.ones(64))
    found = dict(with_values(model, 0).named_buffers())
    assert all(value.min() >= 0.5 and value.max() <= 1.5 for value in found.values())
    assert found["frequencies"].unique().numel() > 32


def test_collectives_that_were_not_planned_fail() -> None:
    first, *others = plan_of().collectives
    other = plan_of().model_copy(update={"collectives": (first.model_copy(update={"bytes": first.bytes + 8}), *others)})
    found = verify(other, target(), backend="simulate", steps=1)
    assert not found.passed and "collectives of rank 0: number 0" in found.problems[0]


def test_memory_that_was_not_predicted_fails() -> None:
    plan = plan_of()
    for factor, passes in ((1.05, True), (1.3, False), (0.8, False)):
        bytes_ = int(plan.predicted.peak_memory_bytes_per_rank * factor)
        other = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"peak_memory_bytes_per_rank": bytes_})})
        found = verify(other, target(), backend="simulate", steps=2)
        assert found.passed == passes
        assert passes or "peak memory" in found.problems[0]


@pytest.mark.parametrize("backend", ["simulate", "gloo"])
def test_of_a_single_step_memory_is_measured_with_moments(backend: Any) -> None:
    found = verify(plan_of(), target(), backend=backend, steps=1)
    assert found.passed and len(found.sharded) == 1, found.problems


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x @ self.w) @ self.w).sum()


class Monitored(nn.Module):
    """A head that nothing reads, one that is only looked at, and a target that no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.target, self.seen, self.unused = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wanted = torch.zeros_like(x).add_(self.target(x)).detach()
        return {"loss": (self.body(x) - wanted).square().mean(), "seen": self.seen(x).detach(), "best": self.seen(x).argmax(-1)}


def test_parameters_without_a_gradient_have_no_states() -> None:
    """As optimizers pass over them: moments of theirs were predicted, and a model that detaches was refused."""
    torch.manual_seed(0)
    target = Monitored(), (torch.randn(8, 64),)
    plan = autopar.plan(*target, mesh="dp=2,tp=2", hardware="cpu-cluster")
    assert verify(plan, target, backend="simulate", steps=2).passed
    assert not autopar.check(plan)
    trained = sum(parameter.numel() for parameter in target[0].body.parameters())
    assert plan.predicted.memory.optimizer <= 8 * trained


def test_memory_that_operators_in_place_do_not_take_is_predicted() -> None:
    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(4, 8, 8)
    plan = autopar.plan(model, (x,), mesh="dp=2", hardware="cpu-cluster", constraints={"input:x": "R R R"})
    _, schedule = rebuild(model, plan, example=((x,), {}, ()))
    found = verify(plan, (model, (x,)), backend="simulate", steps=2)
    assert found.passed, found.problems
    assert any(item.over for item in schedule.instructions) and not spared_bytes(schedule, "adamw", ())
    assert found.measured_bytes == found.predicted_bytes


class Products(nn.Module):
    """A weight that is made of two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, torch.kron(self.a, self.b)).relu().square().mean()


class Turned(nn.Module):
    """A result in another order than it is computed in, and one that is computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(8, 256, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = self.a(x).t()
        return turned, self.b(x).tanh().cos().sin()


@pytest.mark.parametrize(("model", "given", "mesh", "pins"), [
    (Products, (32, 128), "dp=4", {}),
    (Turned, (64, 8), "dp=2", {"input:x": "S0 R", "a.weight": "R R", "b.weight": "R R", "output:0": "R R", "output:1": "S0 R"}),
])  # fmt: skip
def test_what_collectives_give_back_before_their_wait_is_known(
    model: type[nn.Module], given: tuple[int, int], mesh: str, pins: dict[str, str]
) -> None:
    torch.manual_seed(0)
    target, mode = Target(model(), (torch.randn(*given),)), "train" if model is Products else "inference"
    plan = autopar.plan(target.model, target.args, mesh=mesh, mode=mode, constraints=pins, hardware=stressed())
    found = verify(plan, target, backend="simulate", steps=2)
    assert found.passed, str(found)
    assert found.measured_bytes < 0.9 * found.predicted_bytes


def test_what_a_view_shows_is_counted_where_it_was_made() -> None:
    """gloo reduces a copy that no operator of the program made, and views it."""
    held, made_elsewhere = torch.ones(8), torch.ones(1024)
    with LiveMemory([held]) as memory:
        made_elsewhere[:4].add_(1)
        assert memory.peak == held.nbytes
        kept = held[:4] + 1
        assert memory.peak == held.nbytes + kept.nbytes
        del kept
        assert memory.total == held.nbytes


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(MismatchError, match="hint: "):
        verify(plan_of(), target("gpt2"), backend="simulate")
    with pytest.raises(UsageError, match="unknown backend"):
        verify(plan_of(), target(), backend="nccl")  # type: ignore[arg-type]


def die_in_rank_1(case: Any, module: Any, *rest: Any) -> Any:
    """Stands in for ``run_sharded``."""
    if module.place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return trials.run_sharded(case, module, *rest)


def test_a_rank_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "run_sharded", die_in_rank_1)
    with pytest.raises(VerificationError, match="rank 1 of 4 died: it was killed by SIGKILL; the other 3 were stopped"):
        verify(plan_of(), target(), timeout=60.0)


def run_command(*words: str) -> int:
    from autopar.cli.main import main

    return main(["verify", *words])


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "plan.json")
    plan_of(mesh="dp=2").save(path)
    assert run_command(path, "zoo:mlp", "--json", "--backend", "simulate") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["passed"] and "verified on 2 ranks" in err
    assert run_command(path, "zoo:mlp", "--steps", "2") == 0
    assert "passed on 2 ranks" in capfd.readouterr().out
    assert run_command(path, "zoo:gpt2") == 3
    assert "hint: " in capfd.readouterr().err
    assert run_command(path, "zoo:mlp", "--backend", "none") == 2
    monkeypatch.setattr(verifying, "run_sharded", die_in_rank_1)
    assert run_command(path, "zoo:mlp") == 1
    out, err = capfd.readouterr()
    assert out == "" and "rank 1 of 2 died: it was killed by SIGKILL" in err and "hint: " in err


def test_integers_are_bounded_by_the_table_they_index() -> None:
    graph = autopar.capture(target("gpt2").model, target("gpt2").args)
    names = {item.name: item.tensor for item in graph.inputs}
    assert index_bound(graph, names["tokens"]) == 128
    assert index_bound(graph, names["targets"]) == 128


def test_meta_weights_get_values_and_real_ones_keep_theirs() -> None:
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4), nn.LayerNorm(4, device="meta"))
    filled = with_values(model, 0)
    assert filled[1].weight.equal(model[1].weight) and filled[0].weight.std() > 0 and filled[2].weight.equal(torch.ones(4))
    assert model[0].weight.is_meta, "the model is not changed"


def test_errors_are_relative_and_never_silent() -> None:
    inf, nan = math.inf, math.nan
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), 0.0) == 0.5
    assert error(torch.tensor([1e-6]), torch.tensor([0.0]), 1e-3) == pytest.approx(1e-3)
    assert error(torch.tensor([-inf, nan, 1.0]), torch.tensor([-inf, nan, 1.0]), 1.0) == 0
    assert error(torch.tensor([nan]), torch.tensor([0.0]), 1.0) == sys.float_info.max
    assert error(torch.tensor([1.0]), torch.tensor([inf]), 1.0) == sys.float_info.max
    assert error(torch.zeros(2), torch.zeros(3), 1.0) == sys.float_info.max
    assert error(torch.zeros(0), torch.zeros(0), 1.0) == 0
    assert error(torch.tensor([1 + 2j]), torch.tensor([1 + 4j]), 0.0) == pytest.approx(2 / 17**0.5)
    assert relative(1.1, 1.0) == pytest.approx(0.1) and relative(0.0, 0.0) == 0
    assert relative(math.nan, 1.0) == relative(1.0, math.nan) == relative(math.inf, 1.0) == sys.float_info.max
    assert relative(math.nan, math.nan) == relative(math.inf, math.inf) == 0


class Unlearned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).square().mean()


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_model_without_parameters_is_trained(differentiated: bool) -> None:
    x = torch.randn(4, 6, requires_grad=differentiated)
    found = verify(autopar.plan(Unlearned(), (x,), mesh="dp=2"), (Unlearned(), (x,)), backend="simulate", steps=2)
    assert found.passed and len(found.gradient_errors) == differentiated


class Watched(nn.Module):
    """Hooks on a module, a parameter and a tensor, and draws of every kind that has no operator in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cell = nn.Linear(6, 6), nn.GRU(6, 6, 2, dropout=0.5)
        self.layer.register_full_backward_hook(lambda module, inputs, outputs: None)
        self.layer.register_full_backward_pre_hook(lambda module, outputs: tuple(gradient * 3 for gradient in outputs))
        self.layer.weight.register_hook(lambda gradient: gradient.sign())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.rrelu(self.layer(x * torch.randint_like(x, 5)), training=True)
        h.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        first = torch.multinomial(h.detach().softmax(-1), 2)
        return (self.cell(h)[0] * first.sum(-1, keepdim=True)).square().mean()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_single_model_runs_with_its_hooks_and_without_chance() -> None:
    torch.manual_seed(0)
    model, x = Watched(), torch.randn(4, 6)
    plan = autopar.plan(model, (x,), mesh="dp=2", constraints={"input:x": "S0 R"})
    found = verify(plan, (model, (x,)), backend="simulate", steps=2)
    assert found.passed, found.problems
    assert found.gradient_errors["layer.weight"] < 1e-5


class Asking(nn.Module):
    """Rows of a table with sparse gradients; a gradient by an input that the forward itself asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x.requires_grad_()
        value = self.layer(x).tanh()
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return (value * self.table(words) - slope).square().mean()


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
def test_gradients_that_are_sparse_and_those_a_forward_asks_for(backend: Any) -> None:
    torch.manual_seed(0)
    made = Asking(), (torch.randn(4, 6), torch.randint(5, (4,)))
    plan = autopar.plan(*made, mesh="dp=2", constraints={"input:x": "S0 R"})
    found = verify(plan, made, backend=backend, steps=2)
    assert found.passed, found.problems
    assert set(found.gradient_errors) == {"table.weight", "layer.weight", "layer.bias"}


class Momentum(nn.Module):
    """An encoder that trains, one that follows it, and a queue of what that one made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.data = self.second.weight.data * 0.9 + self.first.weight.data * 0.1
            self.second.bias.mul_(0.9).add_(self.first.bias, alpha=0.1)
            key = self.second(x)
        made = self.first(x)
        scores = torch.cat([(made * key).sum(1, keepdim=True), made @ self.queue], 1)
        self.queue = torch.cat([self.queue[:, 4:], key.t()], 1)
        return nn.functional.cross_entropy(scores, torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
def test_frozen_parameters_that_a_forward_changes_are_kept_as_buffers_are(backend: Any) -> None:
    torch.manual_seed(0)
    made = Momentum(), (torch.randn(4, 6),)
    plan = autopar.plan(*made, mesh="dp=2", constraints={"input:x": "S0 R"})
    found = verify(plan, made, backend=backend, steps=3)
    assert found.passed, found.problems
    assert set(plan.buffers) == {"second.weight", "second.bias", "queue"}


class Listed(nn.Module):
    """Layers and their methods in plain containers beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [nn.Linear(6, 6), nn.BatchNorm1d(6)]
        for number, step in enumerate(self.steps):
            self.add_module(str(number), step)
        self.out = nn.Linear(6, 4)
        self.last = {"run": (self.out.forward,)}

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.last["run"][0](x).square().mean()


class Namesakes(nn.Linear):
    """Arguments and results with the names of the module's own tensors."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
        self.scale.mul_(0.9).add_(scale.mean(0), alpha=0.1)
        return {"bias": super().forward(x) * scale * self.scale, "scale": (x.sum(1) * weight).tanh()}


@pytest.mark.parametrize("loss", [None, lambda out: (out["bias"].sum(1) * out["scale"]).mean()], ids=["tangents", "loss"])
@pytest.mark.parametrize("backend", ["simulate", "gloo"])
def test_arguments_and_results_named_as_parameters_are(loss: Any, backend: Any) -> None:
    torch.manual_seed(0)
    model = Target(Namesakes(), (torch.randn(6, 8), torch.randn(6).requires_grad_(), torch.rand(6, 4)), {}, loss)
    pins = {"weight": "R S0", "input:weight": "S0", "scale": "S0", "input:scale": "R R"}
    plan = autopar.plan(model.model, model.args, loss=loss, mesh="dp=2", hardware="cpu-cluster", constraints=pins)
    assert {row.name: (row.shape, row.spec) for row in plan.gradients} == {
        "weight": ((4, 8), "R S0"), "bias": ((4,), plan.parameters["bias"].spec), "input:weight": ((6,), "S0"),
    }  # fmt: skip
    assert not autopar.check(plan) and any("its gradient" in line for line in explain(plan, "input:weight"))
    found = verify(plan, model, backend=backend, steps=2)
    assert found.passed and set(found.gradient_errors) == {"weight", "bias", "input:weight"}, found.problems


def test_modules_in_plain_containers_are_those_that_train() -> None:
    torch.manual_seed(0)
    made = Listed(), (torch.randn(8, 6),)
    plan = autopar.plan(*made, mesh="dp=2", constraints={"input:x": "S0 R"})
    found = verify(plan, made, backend="simulate", steps=3)
    assert found.passed, found.problems
    assert set(found.gradient_errors) == {name for name, _ in made[0].named_parameters()}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).square().sum(1).sigmoid().mean()


@pytest.mark.parametrize("pin", ["R R", "S0 R"])
def test_weights_beside_running_statistics_stay_whole_where_the_rest_is_computed_in_half(pin: str) -> None:
    """The kernels take no half weights beside statistics in float32."""
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(32, 16)
    plan = autopar.plan(model, (x,), mesh="dp=2", compute_dtype="bfloat16", constraints={"input:x": pin})
    assert plan.parameters["norm.weight"].dtype == "float32"
    found = verify(plan, (model, (x,)), backend="simulate", steps=2)
    assert found.passed, found.problems


@pytest.mark.parametrize("mesh", ["dp=3", pytest.param("dp=3,tp=2", marks=pytest.mark.slow)])
def test_unequal_parts_are_joined_without_a_copy_between(mesh: str) -> None:
    """Along an inner dim; with two axes one gather after another, of which the first one's result goes when the second has read it."""
    model, x = nn.Linear(8, 37, bias=False), torch.randn(4, 8, 8)
    rows = "S1" if "tp" in mesh else "R"
    pins = {"input:input": f"{rows} R R", "weight": "S0 R", "op:contract": f"{rows} R S0", "output:0": "R R R"}
    plan = autopar.plan(model, (x,), mesh=mesh, mode="inference", hardware="h100-sxm", constraints=pins)
    assert any(call.kind == "all_gather" for call in plan.collectives)
    found = verify(plan, (model, (x,)), steps=1)
    assert found.passed and found.measured_bytes == found.predicted_bytes


class NormedColumns(nn.Module):
    """A norm over what lies last in memory, then over what lies first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norms = nn.Linear(12, 12), nn.ModuleList(nn.GroupNorm(2, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for norm in self.norms:
            x = x + norm(x.transpose(1, 2)).transpose(1, 2)
        return x.square().mean()


class Statistics(nn.Module):
    """Of columns, which are split, of a tensor that backward reads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return getattr(y, self.name)(1).mean()


@pytest.mark.parametrize("name", ["logsumexp", "var", "std"])
def test_statistics_of_a_split_dim_hold_nothing_of_its_size(name: str) -> None:
    """Logits are large: their exponentials were held twice beside them."""
    model, x = Statistics(name), torch.randn(64, 8)
    pins = {"linear.weight": "S0 R", "input:x": "R R", "module:linear": "R S0"}
    plan = autopar.plan(model, (x,), mesh="2", mode="inference", constraints=pins, hardware=stressed())
    assert any(op.name.startswith(name) and op.inputs[0].spec == "R S0" for op in plan.ops)
    found = verify(plan, Target(model, (x,)), backend="simulate", steps=2)
    assert found.passed and found.measured_bytes < found.predicted_bytes + 64 * 48 * 4 / 4, str(found)


class Rare(nn.Module):
    """Tokens as data sets are stored, and a scale of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.register_buffer("scale", torch.ones(8, dtype=torch.float8_e4m3fnuz))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        x = self.embedding(tokens.long()) * self.scale.float()
        return x.square().mean() + counts.long().float().mean() * x.mean()


@pytest.mark.parametrize("backend", ["simulate", "gloo"])
def test_rare_dtypes(backend: Any) -> None:
    torch.manual_seed(0)
    model, args = Rare(), (torch.randint(50, (8, 4)).to(torch.uint16), torch.arange(8).to(torch.uint32))
    plan = autopar.plan(model, args, mesh="2", constraints={"input:tokens": "S0 R"})
    found = verify(plan, Target(model, args), backend=backend, steps=2)
    assert found.passed, str(found)


class Conjugated(nn.Module):
    """Complex weights, conjugates that are sent and parts of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape, dtype=torch.complex128)) for shape in ((6, 8), (8, 6)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x.sin()) @ self.up
        c = y.conj()
        parts = torch.view_as_real(c.cumsum(0).cumsum(1)).sin().mean() + c.imag.cumsum(0).mean() + c.flip(0).real.cumsum(1).mean()
        return parts + (c.t() @ y).abs().mean() + (c @ self.down.conj()).abs().mean()


@pytest.mark.parametrize("backend", ["simulate", "gloo"])
def test_conjugates_travel_as_what_they_are(backend: Any) -> None:
    """On real ranks a conjugate that is only marked as one cannot be sent."""
    torch.manual_seed(0)
    model, x = Conjugated(), torch.randn(12, 6, dtype=torch.float64)
    plan = autopar.plan(model, (x,), mesh="2", hardware=stressed(), constraints={"up": "R S0"})
    assert any("conj" in str(row.tensor) for row in plan.collectives)
    found = verify(plan, Target(model, (x,)), backend=backend, steps=2)
    assert found.passed and found.measured_bytes == found.predicted_bytes, str(found)


class Replaced(nn.Module):
    """Parts of a part of a larger tensor are written to: a slice, a row, the diagonal, all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for write in (
            lambda part, y: part[1:].copy_(y[1:] * 2), lambda part, y: part[0].copy_(y[1]), lambda part, y: part.copy_(y.t()),
            lambda part, y: part.diagonal().copy_(y[0]),
        ):  # fmt: skip
            room = x.new_zeros(16, 256)
            write(room[:, :16], self.linear(x))
            x = room[:, :16].tanh()
        return x.square().mean()


def test_a_part_that_is_written_to_takes_no_memory_of_the_whole() -> None:
    model, x = Replaced(), torch.randn(16, 16)
    plan = autopar.plan(model, (x,), mesh="dp=1", recompute="off", mode="inference")
    found = verify(plan, Target(model, (x,)), backend="simulate", steps=2)
    assert found.passed and found.measured_bytes <= found.predicted_bytes, str(found)


def test_what_is_copied_to_lie_in_order_is_copied_once() -> None:
    model, x = NormedColumns(), torch.randn(16, 32, 12)
    plan = autopar.plan(model, (x,), mesh="dp=1", recompute="off")
    found = verify(plan, Target(model, (x,)), backend="simulate", steps=2)
    assert found.passed and found.measured_bytes == found.predicted_bytes, str(found)


def test_padding_is_computed_in_evaluation_as_in_training() -> None:
    """torch's fast path for encoders gives zeros there."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=torch.float64)
    model, x, padding = nn.TransformerEncoder(layer, 1), torch.randn(2, 4, 8, dtype=torch.float64), torch.tensor([[False] * 3 + [True]] * 2)
    plan = autopar.plan(model, (x,), kwargs={"src_key_padding_mask": padding}, mesh="dp=1", mode="inference")
    found = verify(plan, Target(model, (x,), {"src_key_padding_mask": padding}), backend="simulate")
    assert found.passed, str(found)
    assert torch.backends.mha.get_fastpath_enabled()
