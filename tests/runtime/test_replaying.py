"""Programs whose segments are recorded once and replayed, by a recorder for CPUs: they do what the eager program does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.importer import capture
from autopar.plan import Plan
from autopar.runtime import ShardedModule, compile_schedule
from tests.graphs import machine, random_schedule
from tests.runtime.recorders import RunAgain, on_cpus
from tests.runtime.test_training import on_ranks, whole

X, Y = torch.randn(8, 16), torch.randn(8, 8)


class Net(nn.Module):
    """Draws, and buffers that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


def mse(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs - wanted).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


@lru_cache
def plan_of(mesh: str = "1", **options: Any) -> Plan:
    return autopar.plan(net(), (X,), loss=mse, loss_args=(Y,), mesh=mesh, hardware="cpu-cluster", **options)


@pytest.fixture(autouse=True)
def _recorder_of_cpus() -> Iterator[None]:
    with on_cpus():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def compiled(execute: Any, plan: Plan | None = None, model: nn.Module | None = None, loss: Any = mse, device: Any = "cpu") -> ShardedModule:
    torch.manual_seed(3)  # of the draws
    given = copy.deepcopy(model or net()).to(device)
    return autopar.compile(given, plan or plan_of(), loss=loss, execute=execute)


def state(module: nn.Module) -> dict[str, Tensor]:
    """Weights, buffers and gradients."""
    found = {name: whole(tensor.detach()).clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    return found | {f"{name}.grad": whole(one.grad).clone() for name, one in module.named_parameters() if one.grad is not None}


def both(use: Callable[[ShardedModule], Any], **given: Any) -> None:
    """What is done with a program that is replayed, and with one that is not, gives the same to the last bit."""
    found, wanted = (use(compiled(execute, **given)) for execute in ("cuda_graph", "eager"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def steps(module: ShardedModule, count: int = 4, set_to_none: bool = True) -> list[Any]:
    optimizer, found = torch.optim.AdamW(module.parameters(), lr=1e-2), list[Any]()
    for number in range(1, count + 1):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = module(X * number, Y)
        loss.backward()
        found += [loss.item(), float(nn.utils.clip_grad_norm_(module.parameters(), 0.1))]
        optimizer.step()
    return [*found, state(module)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_are_those_of_the_eager_program(set_to_none: bool) -> None:
    """Losses, gradients, draws of dropout and statistics of batch norm, with other inputs in each step."""
    both(lambda module: steps(module, set_to_none=set_to_none))
    assert RunAgain.made == 1


def test_gradients_add_up_until_they_are_taken() -> None:
    def accumulate(module: ShardedModule) -> Any:
        for number in range(3):
            (module(X + number, Y) / 3).backward()
        return state(module)

    both(accumulate)


def test_the_gradient_of_the_loss_may_be_any_number() -> None:
    def scale(module: ShardedModule) -> Any:
        found = []
        for by in (8.0, 8.0, 0.5, 1.0):
            (by * module(X, Y)).backward()
            module(X, Y).backward(torch.tensor(by / 2))
            found.append(state(module))
        return found

    both(scale)


def test_gradients_and_outputs_that_a_user_holds_stay_as_they_are() -> None:
    """The next replay does not write over them, and what a user writes into them changes no later call."""
    plan = autopar.plan(Sigmoid(), (X,), mesh="1", hardware="cpu-cluster")

    def hold(module: ShardedModule) -> Any:
        held, seen = list[Tensor](), list[Tensor]()
        for number in range(3):
            module.zero_grad()
            out = module(X + number)
            out.sum().backward()
            held += [out.detach(), whole(module.weight.grad)]
            seen += [one.clone() for one in held[-2:]]
        torch.testing.assert_close(held, seen, rtol=0, atol=0)
        for one in held:
            one.zero_()
        return seen, module(X).detach()

    both(hold, plan=plan, model=Sigmoid(), loss=None)


class Sigmoid(nn.Module):
    """An output that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.weight)


class Decaying(nn.Module):
    """Backward reads a buffer as it was before forward has written it."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))
        self.register_buffer("level", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        found = (x * self.weight * self.level).sum()
        self.level = self.level * 0.5
        return found


def test_backward_reads_a_buffer_as_it_was() -> None:
    plan = autopar.plan(Decaying(), (X,), mesh="1", hardware="cpu-cluster")

    def use(module: ShardedModule) -> Any:
        for number in range(3):
            module(X + number).backward()
        return state(module)

    both(use, plan=plan, model=Decaying(), loss=None)


class Counting(nn.Module):
    """Looks up a row by the number of the call; there is no third row."""

    table: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("table", torch.arange(32.0).view(2, 16))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        found = (x * self.weight * self.table[self.place]).sum()
        self.place.add_(1)
        return found


def test_a_counter_stands_still_while_a_program_is_recorded() -> None:
    plan = autopar.plan(Counting(), (X,), mesh="1", hardware="cpu-cluster")

    def use(module: ShardedModule) -> Any:
        for number in range(2):
            module(X + number).backward()
        return state(module)

    both(use, plan=plan, model=Counting(), loss=None)


def test_other_shapes_and_evaluation_are_recordings_of_their_own() -> None:
    def use(module: ShardedModule) -> Any:
        found = []
        for rows in (8, 4, 8, 4):
            module(X[:rows], Y[:rows]).backward()
            found.append(state(module))
        module.eval()
        with torch.no_grad():
            return [*found, module(X, Y), module(X * 2, Y), state(module)]

    both(use)
    assert RunAgain.made == 3


def test_a_call_without_gradients_in_between() -> None:
    """It draws as the eager program does, updates buffers, and leaves nothing for a backward."""

    def use(module: ShardedModule) -> Any:
        found = []
        for _ in range(2):
            with torch.no_grad():
                found.append(module(X, Y))
            with torch.inference_mode():
                found.append(module(X, Y).clone())
            module(X, Y).backward()
        return [one.tolist() for one in found], state(module)

    both(use)


def test_the_first_call_in_inference_mode() -> None:
    def use(module: ShardedModule) -> Any:
        with torch.inference_mode():
            first = module(X, Y).item()
        return first, steps(module)

    both(use)


def test_weights_that_have_moved_are_copied_in() -> None:
    """A copy of the module has others; the recording that reads where the first's are is made again, once."""

    def use(module: ShardedModule) -> Any:
        other, found = copy.deepcopy(module), []
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        for one in (module, other, module, other):
            one(X, Y).backward()
            found.append((state(module), state(other)))
        return found

    both(use)
    assert RunAgain.made == 2


def test_a_draw_that_is_computed_again_is_the_same() -> None:
    """Forward's masks are made anew in backward, of another generator."""
    captured = capture(net(), (X,), loss=mse, loss_args=(Y,))
    schedule = random_schedule(captured.graph, machine("1"), 0, again=1.0)

    def rank_main(_: int) -> Any:
        found, drawn = [], list[list[int]]()
        for execute in ("eager", "cuda_graph"):
            torch.manual_seed(3)
            module = compile_schedule(net(), schedule, captured.constants, loss=mse, execute=execute)
            found.append(steps(module))
        drawn = [draws.seeds for draws in module.step.executable.recorded.draws.values()]  # type: ignore[union-attr]
        return found, drawn

    (((eager, again), drawn),) = on_ranks(rank_main, 1)
    torch.testing.assert_close(again, eager, rtol=0, atol=0)
    assert len(drawn) == 2 and drawn[0] == drawn[1] and len(drawn[0]) == 1


class Conditioned(nn.Module):
    """No loss, an input with a gradient, and an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x: Tensor, by: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.lin(x) * by, by.exp(), x


def test_gradients_of_outputs_come_in_and_those_of_inputs_go_out() -> None:
    model, by = Conditioned(), torch.ones(16, requires_grad=True)
    plan = autopar.plan(model, (X, by), mesh="1", hardware="cpu-cluster")

    def use(module: ShardedModule) -> Any:
        found = []
        for number in range(3):
            given = (by.detach() + number).requires_grad_()
            first, second, third = module(X + number, given)
            torch.autograd.backward([first, second], [torch.full_like(first, 0.5), torch.ones_like(second)])
            first, _, _ = module(X, given)
            first.sum().backward()
            found.append((given.grad, third, state(module)))
        return found

    both(use, plan=plan, model=model, loss=None)


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "bfloat16"}], ids=["plain", "bfloat16"])
def test_each_microbatch_is_a_replay(options: dict[str, Any]) -> None:
    """In bfloat16 the parameters are converted once, before the first."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.25), nn.Linear(32, 8))
    plan = autopar.plan(model, (X,), loss=mse, loss_args=(Y,), mesh="1", hardware="cpu-cluster", microbatches=4, **options)
    assert (compiled("eager", plan, model).step.executable.first_segment is not None) is bool(options)  # type: ignore[union-attr]
    both(steps, plan=plan, model=model)
    assert RunAgain.made == 1


def of_some(outputs: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    return ((outputs - wanted).square().mean(1) * counts).sum() / counts.sum()


def test_microbatches_that_count_otherwise() -> None:
    """The weight of each is known when its forward has run. One in which nothing counts divides by one in backward, not by nothing."""
    model, counts = nn.Linear(16, 8), torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    plan = autopar.plan(model, (X,), loss=of_some, loss_args=(Y, counts), mesh="1", hardware="cpu-cluster", microbatches=4)

    def use(module: ShardedModule) -> Any:
        found = []
        for number in range(3):
            loss = module(X + number, Y, counts.roll(number))
            loss.backward()
            found.append((loss.item(), state(module)))
        assert not any(tensor.isnan().any() for tensor in state(module).values())
        return found

    both(use, plan=plan, model=model, loss=of_some)


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_collectives_are_replayed(mesh: str) -> None:
    """Those of the eager program, on gloo ranks, of a plan drawn at random."""
    captured = capture(net(), (X,), loss=mse, loss_args=(Y,))
    schedule = random_schedule(captured.graph, machine(mesh), 1)

    def rank_main(_: int) -> Any:
        found = []
        for execute in ("eager", "cuda_graph"):
            torch.manual_seed(3)
            module = compile_schedule(net(), schedule, captured.constants, loss=mse, execute=execute)
            with module.observed_collectives() as calls:
                found.append((steps(module), [(call.kind, call.axes, call.bytes, call.phase) for call in calls]))
        return found

    for eager, again in on_ranks(rank_main, schedule.machine.mesh.ranks):
        torch.testing.assert_close(again[0], eager[0], rtol=1e-5, atol=1e-6)
        assert again[1] == eager[1] and {call[3] for call in again[1]} == {"forward", "backward"}


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16)

    def forward(self, numbers: Tensor) -> Tensor:
        return nn.functional.dropout(self.table(numbers), 0.5).sum()


def test_a_first_call_that_fails_leaves_nothing_behind() -> None:
    """The next one records what the program draws."""
    numbers, model = torch.arange(4), Looking()
    plan = autopar.plan(model, (numbers,), mesh="1", hardware="cpu-cluster")

    def use(module: ShardedModule) -> Any:
        with pytest.raises(UsageError, match="index 4 is out of range"):
            module(numbers + 1)
        module(numbers).backward()
        return state(module)

    both(use, plan=plan, model=model, loss=None)


def test_a_backward_whose_values_are_gone_is_refused() -> None:
    module = compiled("cuda_graph")
    first, second = module(X, Y), module(X * 2, Y)
    with pytest.raises(UsageError, match="after another call") as raised:
        first.backward()
    assert "before the module is called again" in str(raised.value.hint)
    second.backward()
    third = module(X, Y)
    with torch.no_grad():
        module(X, Y)
    with pytest.raises(UsageError, match="after another call"):
        third.backward()


def test_a_second_backward_is_refused() -> None:
    module = compiled("cuda_graph")
    loss = module(X, Y)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="a second time"):
        loss.backward()
    module(X, Y).backward()


def test_a_weight_changed_before_backward_is_refused() -> None:
    module = compiled("cuda_graph")
    loss = module(X, Y)
    with torch.no_grad():
        module.down.weight.mul_(2)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"changed in place"):
        loss.backward()
