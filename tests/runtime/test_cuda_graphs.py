"""Programs as CUDA graphs: what is refused, what the recorder asks of torch, and on a GPU the capture itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.errors import UsageError
from autopar.recording import replay
from autopar.runtime.execution.cuda_graphs import find_recorder
from autopar.runtime.execution.read_back import check_recordable
from tests.runtime.recorders import RunAgain, on_cpus
from tests.runtime.test_replaying import X, Y, compiled, mse, state

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU to capture on")


@pytest.fixture(autouse=True)
def _recorder_of_cpus() -> Iterator[None]:
    with on_cpus():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_a_cpu_captures_nothing() -> None:
    with pytest.raises(UsageError, match="CUDA graphs, and this rank computes on cpu") as raised:
        find_recorder(torch.device("cpu"))
    assert "on a GPU, or pass execute='compiled'" in str(raised.value.hint)


def grouped() -> Any:
    sizes = {"batch": 2, "seq": 4, "layers": 1, "width": 16, "heads": 2, "hidden": 16, "experts": 4}
    return zoo.build("moe", dispatch="grouped", **sizes)


def test_what_reads_values_back_is_refused_at_the_models_line() -> None:
    target = grouped()
    plan = autopar.plan(target.model, target.args, mesh="1", hardware="h100-sxm")
    with pytest.raises(UsageError, match=r"moe\.py:\d+: autopar\.expert_contract cannot be captured .*: the host reads values") as raised:
        compiled("cuda_graph", plan, target.model, None)
    assert "execute='eager'" in str(raised.value.hint)


def refused(model: nn.Module, args: tuple[Any, ...], device: str = "cuda") -> str:
    captured = autopar.capture(model, args, mode="inference")
    plan = autopar.plan(captured, mesh="1", hardware="h100-sxm")
    try:
        check_recordable(replay(plan, captured), torch.device(device))
    except UsageError as error:
        return error.message
    return ""


class Filling(nn.Module):
    def __init__(self, with_mask: bool) -> None:
        super().__init__()
        self.with_mask = with_mask

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[(x > 0) if self.with_mask else torch.arange(2)] = 3.0
        return x


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x @ x.T)


def test_operators_whose_kernels_wait_are_known() -> None:
    assert "test_cuda_graphs.py" in refused(Filling(True), (X,)) and refused(Filling(False), (X,)) == ""
    assert "_linalg_eigh" in refused(Spectrum(), (X,))
    in_half = zoo.build("moe", dispatch="grouped", dtype="bfloat16", batch=2, seq=4, layers=1, width=16, heads=2, hidden=16, experts=4)
    assert refused(in_half.model.eval(), in_half.args) == ""
    assert "expert_contract" in refused(in_half.model, in_half.args, "cpu"), "there it looks at values in any dtype"


def test_what_fails_while_it_is_captured_is_said_at_the_models_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the attempt stays: buffers are as before, the next call tries again."""
    module, capturing = compiled("cuda_graph"), list[bool]()
    tanh, record = torch.tanh, RunAgain.record

    def recorded(self: RunAgain, *given: Any) -> Any:
        capturing.append(True)
        try:
            return record(self, *given)
        finally:
            capturing.clear()

    segment = module.step.executable.program.forward_segment  # type: ignore[union-attr]
    (name,) = [name for name, value in segment.run.__globals__.items() if value is tanh]

    def refusing(*given: Any, **named: Any) -> Tensor:
        if capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nsome more")
        return tanh(*given, **named)

    before = state(module)
    monkeypatch.setitem(segment.run.__globals__, name, refusing)
    monkeypatch.setattr(RunAgain, "record", recorded)
    with pytest.raises(UsageError, match=r"test_replaying\.py:\d+: aten\.tanh cannot be captured in a CUDA graph: .*is capturing\n"):
        module(X, Y)
    torch.testing.assert_close(state(module), before, rtol=0, atol=0)
    monkeypatch.undo()
    module(X, Y).backward()


def test_a_plan_priced_for_cuda_graphs_runs_so_by_default() -> None:
    target = zoo.build("mlp")
    plan = autopar.plan(target.model, target.args, mesh="1", hardware="h100-sxm", execute="cuda_graph")
    autopar.compile(target.model, plan)(*target.args).backward()
    assert RunAgain.made == 1


class Calls:
    """Stands for ``torch.cuda``: notes what it is asked for."""

    def __init__(self) -> None:
        self.noted = list[str]()

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.noted.append("side waits"))

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_stream=lambda other: self.noted.append("user waits"))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def CUDAGraph(self) -> Any:
        register = lambda generator: self.noted.append("register")  # noqa: E731
        return SimpleNamespace(register_generator_state=register, replay=lambda: self.noted.append("replay"))

    @contextmanager
    def graph(self, graph: Any, pool: str, stream: Any, mode: str) -> Iterator[None]:
        self.noted.append(f"begin in {pool}, {mode}")
        yield
        self.noted.append("end")


def test_generators_are_registered_before_a_capture_and_runs_warm_up_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    for name in ("graph_pool_handle", "Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    recorder = find_recorder(torch.device("cuda", 0))()
    recorder.warm_up(lambda: calls.noted.append("run"))
    assert calls.noted == ["side waits", "run", "run", "run", "user waits"]
    calls.noted.clear()
    replay_it, found = recorder.record(lambda: calls.noted.append("run") or {"y": X}, [torch.Generator()])
    replay_it()
    assert calls.noted == ["register", "begin in pool, thread_local", "run", "end", "replay"] and found == {"y": X}


# --- on a GPU -----------------------------------------------------------------------------------------------------------


@GPU
def test_captured_steps_are_those_of_the_eager_program() -> None:
    def use(execute: str) -> Any:
        module = compiled(execute, device="cuda")
        optimizer, found = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True), list[Any]()
        for number in range(1, 6):
            optimizer.zero_grad()
            loss = module((X * number).cuda(), Y.cuda())
            loss.backward()
            found += [loss.item(), float(nn.utils.clip_grad_norm_(module.parameters(), 0.1))]
            optimizer.step()
        module.eval()
        return [*found, module(X.cuda(), Y.cuda()).item(), state(module)]

    torch.testing.assert_close(use("cuda_graph"), use("eager"), rtol=1e-5, atol=1e-6)


@GPU
def test_captured_microbatches_are_those_of_the_eager_program() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.25), nn.Linear(32, 8))
    plan = autopar.plan(model, (X,), loss=mse, loss_args=(Y,), mesh="1", hardware="cpu-cluster", microbatches=4)

    def use(execute: str) -> Any:
        module, found = compiled(execute, plan, model, device="cuda"), list[Any]()
        for number in range(3):
            loss = module((X + number).cuda(), Y.cuda())
            loss.backward()
            found += [loss.item(), state(module)]
        return found

    torch.testing.assert_close(use("cuda_graph"), use("eager"), rtol=1e-5, atol=1e-6)


@GPU
def test_a_capture_that_fails_names_the_line() -> None:
    """The operator is one that the table of those that wait lacks."""
    model = Spectrum()
    plan = autopar.plan(model, (X,), mesh="1", mode="inference", hardware="cpu-cluster")
    with patch("autopar.runtime.module.compiling.check_recordable", lambda *_: None):
        module = compiled("cuda_graph", plan, model, None, device="cuda")
    with pytest.raises(UsageError, match=r"test_cuda_graphs\.py:\d+: aten\._linalg_eigh cannot be captured"):
        module(X.cuda())
