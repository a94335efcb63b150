"""Optimizers whose states lie on the host: their numbers are those of the optimizer alone, and torch takes them as optimizers."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar.errors import UsageError
from autopar.runtime import HostOptimizer, MasterWeights
from autopar.runtime.optimizers import host_optimizer
from autopar.runtime.optimizers.host_optimizer import PlainOptimizerWarning, is_hosted, mark_hosted
from autopar.target import Target
from autopar.verify import verify
from autopar.verify.live_memory import LiveMemory
from tests.offloading import hardware, hosted, make_short
from tests.runtime.test_training import on_ranks, whole

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {}), (torch.optim.Adagrad, {}), (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {"centered": True}), (torch.optim.ASGD, {}), (torch.optim.NAdam, {}),
]  # fmt: skip
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


def _net(dtype: torch.dtype = torch.float32, *marked: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)
    mark_hosted(dict(net.named_parameters())[name] for name in marked)
    return net


MARKED = ("0.weight", "2.weight", "2.bias")


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(X.to(next(net.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def _again(make: Callable[[], torch.optim.Optimizer], states: dict[str, Any]) -> torch.optim.Optimizer:
    made = make()
    made.load_state_dict(states)
    return made


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_steps_are_bit_equal_and_states_go_over_either_way(make: Any, options: dict[str, Any]) -> None:
    plain, net = _net(), _net(torch.float32, *MARKED)
    groups = [[{"params": [one[0].weight, one[2].weight], "lr": 0.02}, {"params": [one[0].bias, one[2].bias]}] for one in (plain, net)]
    alone, on_host = make(groups[0], lr=0.01, **options), HostOptimizer(groups[1], make, lr=0.01, **options)
    for turn in range(5):
        _step(plain, alone)
        _step(net, on_host)
        if turn == 1:  # each takes over the other's
            saved = copy.deepcopy([alone.state_dict(), on_host.state_dict()])
            alone = _again(lambda: make(groups[0], lr=1.0, **options), saved[1])
            on_host = _again(lambda: HostOptimizer(groups[1], make, lr=1.0, **options), saved[0])
    assert _same(plain, net)
    assert [group["lr"] for group in on_host.param_groups] == [0.02, 0.01]


def test_a_scheduler_a_scaler_and_a_closure_work_as_ever() -> None:
    nets = _net(), _net(torch.float32, *MARKED)
    optimizers = torch.optim.AdamW(nets[0].parameters(), lr=0.1), HostOptimizer(nets[1].parameters(), torch.optim.AdamW, lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for turn in range(4):
        for net, optimizer, scaler, scheduler in zip(nets, optimizers, scalers, schedulers, strict=True):
            optimizer.zero_grad()
            scaler.scale(net(X).square().mean() * (torch.inf if turn == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert _same(*nets) and scalers[0].get_scale() == scalers[1].get_scale() == 2.0
    assert optimizers[1].param_groups[0]["lr"] == 0.1 / 16

    def loss() -> Tensor:
        found = nets[1](X).square().mean()
        found.backward()
        return found

    before = nets[1](X).square().mean()
    assert optimizers[1].step(loss) == before


def test_the_device_has_two_parameters_states_at_a_time() -> None:
    net = _net(torch.float32, *MARKED)
    optimizer = HostOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01, fused=True)
    sizes = {name: 2 * parameter.nbytes for name, parameter in net.named_parameters()}
    on_host = sum(sizes[name] for name in MARKED)
    for turn in range(3):
        net(X).square().mean().backward()
        held = [*net.parameters(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]
        resident = [tensor for tensor in optimizer.state[net[0].bias].values() if tensor.dim()]
        with LiveMemory([*held, *resident]) as memory:
            begun = memory.total
            optimizer.step()
        made = sizes["0.bias"] if turn == 0 else 0  # and a counter of four bytes for each of four, three of them before the peak
        assert memory.peak - begun == made + sizes["0.weight"] + sizes["2.weight"] + (12 if turn == 0 else 0)
        assert memory.total - begun == made + (16 if turn == 0 else 0), "what passed is gone"
        assert memory.host_total == (on_host if turn == 0 else 0), "rooms are made once"
        optimizer.zero_grad()


def test_masters_lie_on_the_host_with_the_states() -> None:
    nets = _net(torch.bfloat16), _net(torch.bfloat16, *MARKED)
    resident, on_host = (MasterWeights(net.parameters(), torch.optim.AdamW, lr=1e-3) for net in nets)
    for turn in range(6):
        for net, optimizer in zip(nets, (resident, on_host), strict=True):
            _step(net, optimizer)
        if turn == 2:
            saved = io.BytesIO()
            torch.save(on_host.state_dict(), saved)
            saved.seek(0)
            read = torch.load(saved)
            on_host = MasterWeights(nets[1].parameters(), torch.optim.AdamW, lr=1.0)
            on_host.load_state_dict(read)
    assert _same(*nets)
    for parameter in nets[1].parameters():
        state = on_host.state[parameter]
        assert state["master"].dtype == state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["master"].bfloat16(), parameter) and parameter.grad is None


def test_what_steps_all_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match=r"LBFGS calls a closure(.|\n)*hint: use"):
        HostOptimizer(_net().parameters(), torch.optim.LBFGS)

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    for marked, refused in (((), False), (MARKED, True)):
        net = _net(torch.float32, *marked)
        groups = [{"params": list(net.parameters()), "count": 0}]
        optimizer = HostOptimizer(groups, Counting, lr=0.1)
        if refused:
            with pytest.raises(UsageError, match=r"Counting keeps 'count' for a group(.|\n)*hint: use"):
                _step(net, optimizer)
        else:
            _step(net, optimizer)
            assert optimizer.param_groups[0]["count"] == 1


def test_a_plain_optimizer_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer._Watch, "warned", False)
    net = _net(torch.float32, *MARKED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(net, HostOptimizer(net.parameters(), torch.optim.AdamW))
        _step(_net(), torch.optim.AdamW(_net().parameters()))
    plain = torch.optim.AdamW(net.parameters())
    with pytest.warns(PlainOptimizerWarning, match=r"AdamW keeps states on the device(.|\n)*hint: make it as autopar.HostOptimizer"):
        _step(net, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(net, plain)


@pytest.mark.parametrize("backend", ["gloo", "simulate"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "own:20,5"])
def test_a_plan_with_states_on_the_host_trains_as_one_device_in_the_memory_predicted(optimizer: str, backend: Any) -> None:
    plan = hosted(optimizer, {"adamw": 120_000, "sgd-momentum": 100_000, "own:20,5": 200_000}[optimizer])
    assert plan.predicted.memory.optimizer_on_host
    found = verify(plan, Target(*make_short()), backend=backend, steps=2)
    assert found.passed, found.problems
    assert found.measured_bytes == found.predicted_bytes


def test_masters_of_a_plan_take_no_more_than_a_gradient_beside_what_is_predicted() -> None:
    model, args = make_short()
    target = Target(model.bfloat16(), tuple(tensor.bfloat16() for tensor in args))
    plan = autopar.plan(
        target.model, target.args, mesh="dp=2,tp=2", hardware=hardware(), memory=90_000, offload="auto", optimizer="adamw-mixed",
        effort="low", time_limit=300,
    )  # fmt: skip
    assert plan.predicted.memory.optimizer_on_host and not autopar.check(plan)
    found = verify(plan, target, backend="gloo", steps=2)
    assert found.passed, found.problems


def test_checkpoints_hold_what_lies_on_the_host(tmp_path: Path) -> None:
    """torch's own calls save states of one mesh, and load them into a fresh optimizer, which goes on as if nothing had been."""
    plan = hosted()

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        module(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank(number: int) -> Any:
        model, (x,) = make_short()
        module = autopar.compile(model, plan)
        optimizer = HostOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2)
        for _ in range(2):
            train(module, optimizer, x)
        kept = get_optimizer_state_dict(module, optimizer)
        dcp.save({"optimizer": kept}, checkpoint_id=tmp_path)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        train(module, optimizer, x)
        wanted = [whole(parameter.detach()).clone() for parameter in module.parameters()]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(before[name])
        fresh = HostOptimizer(module.parameters(), torch.optim.AdamW, lr=1.0)
        states = get_optimizer_state_dict(module, fresh)
        dcp.load({"optimizer": states}, checkpoint_id=tmp_path)
        set_optimizer_state_dict(module, fresh, states)
        train(module, fresh, x)
        found = [whole(parameter.detach()) for parameter in module.parameters()]
        marked = {name for name, parameter in module.named_parameters() if is_hosted(parameter)}
        return marked, all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    wanted = {name for name, row in plan.parameters.items() if row.states_on_host}
    assert on_ranks(rank, 4) == [(wanted, True)] * 4
