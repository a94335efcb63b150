"""Compiled modules where people train: weights that differ, evaluation, last batches, copies, hooks, replicas around the mesh."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, TimeLimitError
from autopar.plan import Plan
from autopar.runtime.programs import programs
from autopar.runtime.ranks.agreement import find_sources
from autopar.runtime.ranks.groups import team_of
from autopar.search import find_plan
from autopar.verify.launch import run_ranks

X, Y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


class Net(nn.Module):
    """What evaluation changes: dropout and batch norm; and a tensor that is neither parameter nor buffer."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(16, 8, dtype=torch.float64)
        self.scale = torch.rand(8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.norm(self.up(x))))) * self.scale


def mse(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs - wanted).square().mean()


def net(seed: int = 0, dropout: float = 0.5) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


@lru_cache
def plan_of(mesh: str, dropout: float = 0.5, mode: Any = "train") -> Plan:
    pins = {"input:x": "S0 R", "up.weight": "S1 R", "up.bias": "S1"} if mesh == "2x2" else {}
    return autopar.plan(
        net(dropout=dropout), (X,), loss=mse, loss_args=(Y,), mesh=mesh, mode=mode, hardware="cpu-cluster", constraints=pins
    )


def on_ranks(function: Callable[[int], Any], ranks: int) -> list[Any]:
    def rank_main(rank: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own words about DTensor
            return function(rank)

    return run_ranks(rank_main, ranks)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.grad).clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return set(found) == set(wanted) and all(torch.allclose(found[name], wanted[name]) for name in wanted)


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except AutoparError as error:
        return str(error)
    return "no error"


def test_weights_that_differ_become_those_of_the_first_rank_that_has_any() -> None:
    reference = net(7, dropout=0.0)
    reference.scale = torch.arange(8.0, dtype=torch.float64)
    wanted, plan = mse(reference(X), Y).item(), plan_of("2x2", 0.0)

    def run(rank: int) -> tuple[float, list[bool]]:
        if rank == 0:
            with torch.device("meta"):
                model = Net(0.0)
            model.scale = torch.arange(8.0, dtype=torch.float64)
        else:
            model = net(7 if rank == 1 else rank, dropout=0.0)
            model.scale = model.scale if rank == 3 else torch.arange(8.0, dtype=torch.float64)
        module = autopar.compile(model, plan)
        state = module.state_dict()
        equal = [torch.equal(whole(state[name]), tensor) for name, tensor in net(7).state_dict().items()]
        return module(X, Y).item(), equal

    for value, equal in on_ranks(run, 4):
        assert value == pytest.approx(wanted, rel=1e-12) and all(equal)


def test_models_of_other_sizes_and_an_init_that_differs_are_refused() -> None:
    plan = plan_of("2")

    def other(rank: int) -> str:
        model = net()
        if rank == 1:
            model.register_parameter("more", nn.Parameter(torch.zeros(3)))
        return refused(lambda: autopar.compile(model, plan))

    first, second = on_ranks(other, 2)
    assert "rank 1 refuses: the plan was made for another model" in first and "the plan was made for another model" in second
    assert on_ranks(lambda rank: refused(lambda: find_sources({"w": torch.zeros(2 + rank)}, team_of())), 2) == [
        "the models of ranks 0 and 1 differ: w: float32[2] on rank 0, w: float32[3] on rank 1\nhint: build the same model on all ranks"
    ] * 2

    def init(rank: int) -> str:
        with torch.device("meta"):
            model = Net()
        model.scale = torch.ones(8, dtype=torch.float64)

        def fill(whole: nn.Module) -> None:
            for name, tensor in whole.state_dict().items():
                tensor.fill_(rank if name == "down.bias" else 1)

        return refused(lambda: autopar.compile(model, plan, init=fill))

    assert all("init gives down.bias other values on rank 1 than on rank 0\nhint: " in found for found in on_ranks(init, 2))


def test_one_rank_plans_for_all() -> None:
    plan = plan_of("2", 0.0)

    def run(rank: int) -> tuple[float, str]:
        module = autopar.compile(net(dropout=0.0), plan if rank == 1 else None, loss=mse)
        return module(X, Y).item(), refused(lambda: autopar.compile(net(), None))

    for value, words in on_ranks(run, 2):
        assert value == pytest.approx(mse(net(dropout=0.0)(X), Y).item()) and "there is no plan" in words


@pytest.mark.parametrize(("execute", "without"), [("eager", torch.no_grad), ("eager", torch.inference_mode), ("graph", torch.no_grad)])
def test_eval_and_train_do_what_they_say(execute: Any, without: Callable[[], Any]) -> None:
    plan = plan_of("2x2")

    def run(rank: int) -> tuple[list[float], list[float], bool, bool, int]:
        reference = net()
        reference.up.requires_grad_(False)
        reference(X)  # moves the statistics, as the first training step below does
        reference.eval()
        wanted = mse(reference(X), Y)
        wanted.backward()
        module = autopar.compile(net(), plan, execute=execute)
        first = module(X, Y).item()
        module.eval()
        with without():
            values = [module(X, Y).item(), module(X[:6], Y[:6]).item(), module(X, Y).item()]
        module.up.requires_grad_(False)
        value = module(X, Y)
        value.backward()
        right = same(gradients(module), gradients(reference))
        module.train()
        differ = first != values[0] != module(X, Y).item()
        expected = [wanted.item(), mse(reference(X[:6]), Y[:6]).item(), wanted.item(), wanted.item()]
        return [*values, value.item()], expected, right, differ, len(module._programs.made)

    for values, expected, right, differ, made in on_ranks(run, 4):
        assert values == pytest.approx(expected, rel=1e-12)
        assert right and differ and made == 3


def test_a_frozen_part_keeps_its_statistics_and_a_short_batch_trains() -> None:
    plan = plan_of("2", 0.0)

    def run(rank: int) -> tuple[bool, bool]:
        reference = net(dropout=0.0)
        module = autopar.compile(net(dropout=0.0), plan)
        for one in (reference, module):
            one.norm.eval()
        for batch in (8, 5):
            mse(reference(X[:batch]), Y[:batch]).backward()
            module(X[:batch], Y[:batch]).backward()
        return same(gradients(module), gradients(reference)), torch.equal(whole(module.norm.running_mean), reference.norm.running_mean)

    assert on_ranks(run, 2) == [(True, True)] * 2


def test_batch_norms_may_average_over_all_batches() -> None:
    """``momentum=None``: the running statistics are the mean over the batches so far, and torch makes a number of their count."""

    def counting() -> Net:
        made = net(dropout=0.0)
        made.norm.momentum = None
        return made

    own = nn.BatchNorm1d.forward
    plan = autopar.plan(counting(), (X,), loss=mse, loss_args=(Y,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})
    assert nn.BatchNorm1d.forward is own and "forward" not in vars(nn.BatchNorm1d)

    def run(rank: int) -> tuple[list[float], list[float], bool]:
        reference, module = counting(), autopar.compile(counting(), plan)
        found, wanted = [], []
        for turn in range(3):
            wanted.append(mse(reference(X + turn), Y).item())
            found.append(module(X + turn, Y).item())
        equal = [torch.allclose(whole(state), reference.state_dict()[name]) for name, state in module.state_dict().items()]
        with torch.no_grad():
            wanted.append(mse(reference.eval()(X), Y).item())
            found.append(module.eval()(X, Y).item())
        return found, wanted, all(equal)

    for found, wanted, equal in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9) and equal


def test_a_program_that_computes_the_same_is_not_planned_twice() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.layer(x), -1).square().mean()

    plan = autopar.plan(Plain(), (X,), mesh="2", hardware="cpu-cluster")

    def run(rank: int) -> bool:
        module = autopar.compile(Plain(), plan).eval()
        with torch.no_grad():
            module(X)
        module(X)
        return all(step is module._programs.main for step in module._programs.made.values()) and len(module._programs.made) == 2

    assert on_ranks(run, 2) == [True, True]


def test_a_further_call_has_the_time_that_its_plan_takes(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    """On a busy machine, or for a large model, the search has no plan in its first seconds."""
    module, reference = autopar.compile(net(), plan_of("1")), net().eval()
    asked: list[float] = []

    def slow(*args: Any, time_limit: float, **options: Any) -> Any:
        asked.append(time_limit)
        if time_limit < enough:
            raise TimeLimitError("no plan was found", "allow more time")
        return find_plan(*args, time_limit=time_limit, **options)

    monkeypatch.setattr(programs, "find_plan", slow)
    enough = 40.0
    assert module.eval()(X, Y).item() == pytest.approx(mse(reference(X), Y).item()) and asked == [20.0, 40.0]
    enough = 1e9
    with pytest.raises(TimeLimitError):
        module(X[:6], Y[:6])
    assert asked[-1] == programs.LONGEST


def test_ranks_that_call_in_other_ways_are_told() -> None:
    plan = plan_of("2")

    def run(rank: int) -> str:
        module = autopar.compile(net(), plan).eval()
        size = 8 if rank == 0 else 4
        return refused(lambda: module(X[:size], Y[:size]))

    first, second = on_ranks(run, 2)
    assert "rank 1 call the module in other modes or with other shapes (evaluation with gradients, x [8, 16]" in first
    assert "rank 0 call" in second and "\nhint: " in second


@pytest.mark.parametrize("before", [0, 1])
def test_a_rank_that_calls_as_planned_is_told_of_a_shorter_batch_elsewhere(before: int) -> None:
    """The first call agrees on a seed, the second compares inputs; the rank with a shorter batch plans a program for it meanwhile."""
    plan = plan_of("2")

    def run(rank: int) -> str:
        module = autopar.compile(net(), plan)
        for _ in range(before):
            module(X, Y).backward()
        size = 8 if rank == 0 else 4
        return refused(lambda: module(X[:size], Y[:size]))

    for rank, words in enumerate(on_ranks(run, 2)):
        where = "here" if rank == 1 else "on rank 1"
        assert f"rank {1 - rank} call the module in other modes or with other shapes (training, x [4, 16], wanted [4, 8] {where})" in words


def test_an_inference_plan_does_not_train() -> None:
    reference = net().eval()(X)
    plan = autopar.plan(net(), (X,), mesh="2", mode="inference", hardware="cpu-cluster")

    def run(rank: int) -> tuple[bool, bool, str]:
        module = autopar.compile(net(), plan)
        return module.training, torch.allclose(whole(module(X)), reference), refused(module.train)

    assert all(not training and equal and "the plan is for inference" in words for training, equal, words in on_ranks(run, 2))


def test_what_cannot_be_honoured_is_refused() -> None:
    frozen = net()
    frozen.up.requires_grad_(False)
    plan = autopar.plan(frozen, (X,), loss=mse, loss_args=(Y,), mesh="1", hardware="cpu-cluster")

    def run(rank: int) -> list[str]:
        module = autopar.compile(frozen, plan)

        def under_autocast() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                module(X, Y)

        return [
            refused(under_autocast), refused(lambda: module.norm.register_forward_hook(print)),
            refused(lambda: module.down.register_full_backward_pre_hook(print)), refused(module.no_sync),
            refused(lambda: module.requires_grad_(True)(X, Y)),
        ]  # fmt: skip

    (found,) = on_ranks(run, 1)
    words = [
        "under autocast to bfloat16, the plan computes in its own dtypes", "a hook on norm, a part of a compiled module",
        "a hook on down", "reduced within the planned backward",
        "parameter up.weight requires grad, the plan was made with it frozen",
    ]  # fmt: skip
    assert all(word in text and "\nhint: " in text for word, text in zip(words, found, strict=True)), found


def test_copies_have_weights_of_their_own() -> None:
    """``AveragedModel`` copies the module and moves its weights."""
    reference = torch.optim.swa_utils.AveragedModel(net(dropout=0.0), avg_fn=lambda old, new, count: (old + new) / 2)
    other = net(3, dropout=0.0)
    other.scale = net(dropout=0.0).scale  # not in a state dict
    for _ in range(2):
        reference.update_parameters(other)
    wanted, expected, plan = mse(reference(X), Y).item(), mse(other(X), Y).item(), plan_of("2", 0.0)

    def run(rank: int) -> tuple[float, float]:
        module = autopar.compile(net(dropout=0.0), plan)
        average = torch.optim.swa_utils.AveragedModel(module, avg_fn=lambda old, new, count: (old + new) / 2)
        module.load_state_dict(other.state_dict())
        for _ in range(2):
            average.update_parameters(module)
        before = module(X, Y).item()
        return before, average(X, Y).item()

    assert on_ranks(run, 2) == [(pytest.approx(expected), pytest.approx(wanted))] * 2


def averaged(module: nn.Module, mesh: Any) -> nn.Module:
    """Data parallelism by hand: each gradient becomes its mean over the replicas."""

    def average(parameter: Any) -> None:
        dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group())
        parameter.grad.to_local().div_(mesh.size())

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return module


def fully_sharded(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh)


AROUND: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "averaged gradients": averaged,
    "fully_shard": fully_sharded,
    "DistributedDataParallel": lambda module, mesh: nn.parallel.DistributedDataParallel(module, device_mesh=mesh),
}


def test_data_parallelism_around_a_plan() -> None:
    """``parallelize_fn(model, mesh)``: the plan is for a replica's batch on one axis, the other axis is the user's."""
    plan = plan_of("2", 0.0)
    batch = torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)

    def parallelize(model: nn.Module, mesh: Any, around: str) -> nn.Module:
        return AROUND[around](autopar.compile(model, plan, mesh=mesh["tp"]), mesh["dp"])

    def train(module: nn.Module, parts: list[slice]) -> list[float]:
        optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), []
        for _ in range(3):
            value = sum(module(batch[0][part], batch[1][part]) for part in parts) / len(parts)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        return losses

    def run(rank: int) -> list[tuple[list[float], list[float]]]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = mesh.get_local_rank("dp")
        reference = net(dropout=0.0)  # batch norm sees a replica's batch, here as there
        wanted = train(Pair(reference), [slice(0, 8), slice(8, 16)])
        found = []
        for around in AROUND:
            losses = torch.tensor(train(parallelize(net(dropout=0.0), mesh, around), [slice(8 * mine, 8 * mine + 8)]))
            dist.all_reduce(losses, group=mesh.get_group("dp"))
            found.append(((losses / 2).tolist(), wanted))
        return found

    for found in on_ranks(run, 4):
        for losses, wanted in found:
            assert losses == pytest.approx(wanted, rel=1e-6)


def test_replicas_around_what_they_cannot_send_are_refused() -> None:
    """Torch's own words would be of operators that have no sharding strategy."""
    plan = plan_of("2", 0.0)
    whole_mesh = plan_of("2x2", 0.0)
    tied_plan = autopar.plan(tied_net(), (X,), loss=mse, loss_args=(X,), mesh="2", hardware="cpu-cluster")

    def run(rank: int) -> list[str]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tied = autopar.compile(tied_net(), tied_plan, mesh=mesh["tp"])
        around = nn.parallel.DistributedDataParallel
        return [
            refused(lambda: around(autopar.compile(net(dropout=0.0), plan, mesh=mesh["tp"]))),
            refused(lambda: around(autopar.compile(net(dropout=0.0), whole_mesh))), refused(lambda: around(tied, device_mesh=mesh["dp"])),
        ]  # fmt: skip

    for within, everywhere, one in on_ranks(run, 4):
        assert "without device_mesh cannot send DTensors, of a module that is compiled for x=2\nhint: " in within
        assert "compiled for x=2,y=2\nhint: train the compiled module as it is" in everywhere
        assert "does not know that 1.weight is tied to another parameter\nhint: fully_shard" in one


def tied_net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64), nn.Linear(16, 16, dtype=torch.float64))
    model[1].weight = model[0].weight
    return model


class Pair(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.model(x), y)


def test_an_environment_that_names_no_meeting_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SLURM's scripts leave it, or a shell without torchrun."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    words = refused(lambda: autopar.compile(net(), plan_of("2")))
    assert "cannot be started from the environment" in words and "MASTER_ADDR" in words and "\nhint: start the script" in words


def test_a_mesh_of_other_sizes_is_refused() -> None:
    plan = plan_of("2")

    def run(rank: int) -> str:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        return refused(lambda: autopar.compile(net(), plan, mesh=mesh))

    assert all("the plan is for the mesh x=2, the given one has the sizes [1, 2]\nhint: " in words for words in on_ranks(run, 2))


class Counting(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Examples by index, and which were asked for."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 16, dtype=torch.float64, generator=generator)
        self.y = torch.randn(size, 8, dtype=torch.float64, generator=generator)
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.loaded.append(index)
        return self.x[index], self.y[index]


def test_each_rank_loads_its_own_rows() -> None:
    """21 examples in batches of 8: the last one, of 5, does not divide and is loaded whole."""
    plan = plan_of("2x2", 0.0)
    axes = plan.inputs["x"].spec
    assert axes == "S0 R"

    def run(rank: int) -> tuple[list[float], list[float], list[int], list[list[int]]]:
        dataset, reference = Counting(21), net(dropout=0.0)
        module = autopar.compile(net(dropout=0.0), plan)
        batches = module.local_batch(dataset)
        assert len(batches) == 3
        found, wanted = [module(*batch).item() for batch in batches], []
        for begin in range(0, 21, 8):
            wanted.append(mse(reference(dataset.x[begin : begin + 8]), dataset.y[begin : begin + 8]).item())
        loaded = list(dataset.loaded)
        dataset.loaded.clear()
        shuffled = module.local_batch(dataset, shuffle=True, drop_last=True)
        orders = [[whole(x)[:, 0].tolist() for x, _ in shuffled] for _ in range(2)]
        assert orders[0] != orders[1] and all(len({one for batch in order for one in batch}) == 16 for order in orders)
        indices = list(module.local_batch(torch.utils.data.BatchSampler(range(16), 8, False)))
        local = autopar.compile(net(dropout=0.0), plan, inputs="local")
        for batch in (list(range(8)), list(range(8, 12))):  # x is split over the first axis, what is wanted is whole
            half = len(batch) // 2
            mine = batch[rank // 2 * half :][:half]
            found.append(local(dataset.x[mine], dataset.y[batch]).item())
            wanted.append(mse(reference(dataset.x[batch]), dataset.y[batch]).item())
        return found, wanted, loaded, indices

    for rank, (found, wanted, loaded, indices) in enumerate(on_ranks(run, 4)):
        assert found == pytest.approx(wanted, rel=1e-12)
        first = 4 * (rank // 2)
        mine = [list(range(begin + first, begin + first + 4)) for begin in (0, 8)]
        assert indices == mine and loaded == [*mine[0], *mine[1], *range(16, 21)]


def test_what_ranks_load_of_a_batch_fits_together() -> None:
    """Ranks that padded to the longest of their own rows waited for ever, or broke off; what is not of rows was cut as if it were."""
    plan = plan_of("2x2", 0.0)

    def longest_of_own(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        return nn.functional.pad(x, (0, 0 if torch.equal(x[0], Counting(8).x[0]) else 3)), y

    def with_weights(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        return *(torch.stack(part) for part in zip(*rows, strict=True)), torch.arange(8.0)

    def run(rank: int) -> list[str]:
        module = autopar.compile(net(dropout=0.0), plan)
        given = longest_of_own, with_weights
        words = [refused(lambda one=one: list(module.local_batch(Counting(8), collate_fn=one))) for one in given]  # type: ignore[misc]
        return [*words, refused(lambda: module.place_batch(torch.zeros(()), 8))]

    for longest, beside, scalar in on_ranks(run, 4):
        assert "collate_fn makes rows of [[16], [8]] on rank 0 and of [[19], [8]] on rank 2" in longest
        assert "a batch of 4 loaded rows has a tensor [8] in it, which is none of rows" in beside
        assert "a batch of 4 loaded rows has a tensor [] in it" in scalar


class Wide(nn.Module):
    """Linear layers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def faint(outputs: Tensor) -> Tensor:
    """A loss whose gradients vanish in float16 unless they are scaled from the start."""
    return 1e-7 * outputs.square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_mixed_precision_keeps_whole_parameters_and_scaled_losses(execute: Any, microbatches: int) -> None:
    wide = torch.randn(8, 16)
    plan = autopar.plan(
        Wide(), (wide,), loss=faint, mesh="2", hardware="cpu-cluster", compute_dtype="float16", constraints={"input:x": "S0 R"},
        microbatches=microbatches,
    )  # fmt: skip
    assert {row.dtype for row in plan.parameters.values()} == {"float32"} and plan.outputs["loss"].dtype == "float32"
    assert {row.dtype for op in plan.ops for row in op.outputs if "contract" in op.op} == {"float16"}

    def train(call: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], inputs: list[Tensor]) -> tuple[list[float], float]:
        optimizer, scaler, largest = torch.optim.SGD(parameters, lr=1e6), torch.amp.GradScaler("cpu", init_scale=2.0**16), []
        for x in inputs:
            scaler.scale(call(x)).backward()
            scaler.unscale_(optimizer)
            largest.append(max(whole(parameter.grad).abs().max().item() for parameter in parameters))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return largest, scaler.get_scale()

    def run(rank: int) -> tuple[list[float], list[float], bool, float]:
        torch.manual_seed(1)
        model = Wide()
        module, reference = autopar.compile(model, plan, execute=execute), copy.deepcopy(model)
        with torch.autocast("cpu", torch.float16), torch.no_grad():
            assert module(wide) == module(wide), "autocast to the planned dtype is what is done anyway"
        endless = wide.clone()
        endless[7] = float("inf")  # among the second rank's rows
        expected, _ = train(lambda x: faint(reference(x)), list(reference.parameters()), [wide, wide])
        found, scale = train(module, list(module.parameters()), [wide, wide, endless])
        pairs = zip(module.parameters(), reference.parameters(), strict=True)
        return found[:2], expected, all(torch.allclose(whole(one), other, atol=2e-3) for one, other in pairs), scale

    for found, expected, close, scale in on_ranks(run, 2):
        assert found == pytest.approx(expected, rel=1e-2) and close
        assert scale == 2.0**15, "the step with infinite gradients is left out on both ranks, and the scale halved"


def test_a_parallelize_fn_on_meta_is_initialised_by_the_model_itself() -> None:
    """Made on meta, compiled, sharded and initialised by the model's own method, in this order."""

    class Own(Wide):
        words = "of the class"

        def __init__(self) -> None:
            super().__init__()
            self.config = {"width": 32}

        def init_weights(self) -> None:
            for parameter in self.parameters():
                nn.init.constant_(parameter, 1 / self.config["width"])

    with torch.device("meta"):
        empty = Own()
    wide = torch.randn(8, 16)
    plan = autopar.plan(empty, (wide,), loss=faint, mesh="2", hardware="cpu-cluster", constraints={"up.weight": "S0 R"})
    reference = Own()
    reference.init_weights()
    wanted = faint(reference(wide)).item()

    def run(rank: int) -> tuple[str, float, str]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = fully_sharded(autopar.compile(empty, plan, mesh=mesh["tp"], init=lambda model: None), mesh["dp"])
        early = refused(lambda: module(wide))
        module.init_weights()
        return early, module(wide).item(), module.words

    for early, value, words in on_ranks(run, 4):
        assert "4 parameters or buffers were on meta and have no values yet" in early
        assert value == pytest.approx(wanted) and words == "of the class"
