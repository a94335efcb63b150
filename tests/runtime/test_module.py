"""The compiled module on real ranks: it trains, clips, saves, loads, initialises and refuses as users expect."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import MismatchError, UsageError
from autopar.importer import capture
from autopar.runtime import ShardedModule, compile_schedule
from autopar.schedule import Schedule
from autopar.verify.comparison import planned
from autopar.verify.launch import run_ranks
from autopar.verify.trials import placed_tangents
from tests.graphs import machine, plan_of, random_schedule
from tests.runtime.models import Example, example, sixes

X, Y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


class Net(nn.Module):
    """Two layers and a weight used twice; the loss comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16, dtype=torch.float64)
        self.again = self.up
        self.down = nn.Linear(16, 8, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.again(torch.tanh(self.up(x)))))


def loss(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs - wanted).square().mean()


@lru_cache
def net() -> Example:
    torch.manual_seed(0)
    return example(Net(), (X,), "train", loss, (Y,))


def compiled(made: Example, schedule: Schedule, **options: Any) -> ShardedModule:
    return compile_schedule(made.model, schedule, made.captured.constants, **options)


def on_ranks(
    function: Callable[[ShardedModule], Any], *, mesh: str = "2x2", seed: int = 0, made: Example | None = None, again: float = 0.0,
    **options: Any,
) -> list[Any]:  # fmt: skip
    """``function`` of the compiled module on every rank of a random plan; what it returns."""
    made = made or net()
    schedule = random_schedule(made.captured.graph, machine(mesh), seed, again=again)
    if options.get("execute") == "compiled":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch itself has deprecated
            import torch._inductor.compile_fx  # noqa: F401  once here: each rank would import it for itself

    def rank_main(_: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own words about DTensor
            return function(compiled(made, schedule, **options))

    return run_ranks(rank_main, schedule.machine.mesh.ranks)


def train(module: nn.Module, call: Callable[[], Tensor], steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = call()
        value.backward()
        found.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_adamw_and_clipping_work_on_it(seed: int) -> None:
    reference = copy.deepcopy(net().model)
    wanted = train(reference, lambda: loss(reference(X), Y))

    def run(module: ShardedModule) -> tuple[list[float], list[str], bool]:
        found = train(module, lambda: module(X, Y))
        return found, [name for name, _ in module.named_parameters()], all(isinstance(p, DTensor) for p in module.parameters())

    for found, names, distributed in on_ranks(run, seed=seed):
        assert found == pytest.approx(wanted, rel=1e-9)
        assert names == [name for name, _ in reference.named_parameters()]
        assert distributed


def test_tied_parameters_are_one_and_its_own_methods_stay() -> None:
    def run(module: ShardedModule) -> tuple[bool, int, str]:
        return module.again.weight is module.up.weight, len(list(module.parameters())), repr(module)

    for tied, count, text in on_ranks(run):
        assert tied and count == 3
        assert "mesh=x=2,y=2, mode=train" in text


def test_gradients_have_their_parameters_spec_and_their_own_storage() -> None:
    def run(module: ShardedModule) -> bool:
        module(X, Y).backward()
        gradients = [p.grad for p in module.parameters()]
        pointers = {gradient.to_local().data_ptr() for gradient in gradients}
        return len(pointers) == 3 and all(p.grad.placements == p.placements for p in module.parameters())

    assert all(on_ranks(run))


def bucketed_gradients(schedule: Schedule) -> list[str]:
    """Names of the parameters whose gradients arrive in one buffer, where there are such."""
    leaving = {value: output.name for output, value in schedule.outputs if output.kind == "gradient"}
    for call in schedule.calls:
        names = [leaving[part.target] for part in call.parts if part.target in leaving]
        if len(names) > 1 and not call.unpacks:
            return names
    return []


def test_gradients_stay_in_their_bucket_and_may_be_written() -> None:
    reference = copy.deepcopy(net().model)
    wanted = train(reference, lambda: loss(reference(X), Y))
    graph, where = net().captured.graph, machine("2")
    made = (random_schedule(graph, where, seed) for seed in range(100))
    schedule = next(item for item in made if len(bucketed_gradients(item)) > 1)
    names = bucketed_gradients(schedule)

    def run(module: ShardedModule) -> tuple[bool, bool, list[float]]:
        held = dict(module.named_parameters())
        module(X, Y).backward()
        one = len({held[name].grad.to_local().untyped_storage().data_ptr() for name in names}) == 1
        (module(X, Y) * 2).backward()
        thrice = [held[name].grad.full_tensor() for name in names]
        module.zero_grad()
        module(X, Y).backward()
        right = all(torch.allclose(many, 3 * held[name].grad.full_tensor()) for name, many in zip(names, thrice, strict=True))
        module.zero_grad()
        return one, right, train(module, lambda: module(X, Y))

    for one, right, found in run_ranks(lambda _: run(compiled(net(), schedule)), 2):
        assert one and right
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_scaled_loss_scales_the_gradients_and_they_accumulate() -> None:
    wanted = net().single.gradients["down.weight"]

    def run(module: ShardedModule) -> float:
        for _ in range(2):
            (module(X, Y) * 3).backward()
        return (module.down.weight.grad.full_tensor() - 6 * wanted).abs().max().item()

    assert max(on_ranks(run)) < 1e-12


def test_backward_twice_needs_retain_graph() -> None:
    def run(module: ShardedModule) -> str:
        value = module(X, Y)
        value.backward(retain_graph=True)
        first = module.up.weight.grad.full_tensor()
        module.zero_grad()
        value.backward()
        assert module.up.weight.grad.full_tensor().equal(first)
        try:
            value.backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert all("a second time" in found for found in on_ranks(run, mesh="2"))


def test_a_parameter_changed_between_forward_and_backward_is_an_error() -> None:
    def run(module: ShardedModule) -> str:
        value = module(X, Y)
        with torch.no_grad():
            module.down.weight.mul_(2)
        try:
            value.backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert all("down.weight was changed in place" in found for found in on_ranks(run, mesh="1"))


def test_without_grad_only_the_forward_runs() -> None:
    def run(module: ShardedModule) -> tuple[float, bool, set[str]]:
        with torch.no_grad(), module.observed_collectives() as observed:
            value = module(X, Y)
        return value.item(), value.requires_grad, {item.phase for item in observed}

    for value, requires_grad, phases in on_ranks(run, seed=1):
        assert value == pytest.approx(net().single.losses[0]) and not requires_grad and phases <= {"forward"}


def test_outputs_without_a_loss_take_their_gradients_and_buffers_are_written_back() -> None:
    made = sixes()
    (x,) = made.case.args

    def run(module: ShardedModule) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Tensor]]:
        mine = x.detach().clone().requires_grad_(True)
        outputs = module(mine)
        made.case.backward(outputs, placed_tangents(made.case, module))
        whole = {name: _whole(tensor).detach() for name, tensor in outputs.items()}
        buffers = {f"buffer:{name}": _whole(tensor) for name, tensor in module.named_buffers()}
        gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
        return {**whole, **buffers}, mine.grad, _whole(module.calls), gradients

    for seed in range(3):
        for outputs, gradient, calls, gradients in on_ranks(run, mesh="2x3", seed=seed, made=made):
            for name, wanted in made.single.outputs.items():
                assert torch.allclose(outputs[name], wanted), name
            assert torch.allclose(gradient, made.single.gradients["x"])
            assert calls.item() == 1
            assert all(torch.allclose(found, made.single.gradients[name]) for name, found in gradients.items())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_inputs_may_be_dtensors_or_local_parts() -> None:
    def run(module: ShardedModule) -> tuple[float, float]:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        place, spec = module.place, {item.name: module.schedule.specs[item.tensor] for item in module.schedule.graph.inputs}
        x = distribute_tensor(X, place.device_mesh, [Shard(1), Replicate()])
        global_ = module(x, Y).item()
        module._programs.main = replace(module._programs.main, inputs="local")
        parts = [place.own_part(tensor, spec[name]) for tensor, name in ((X, "x"), (Y, "wanted"))]
        return global_, module(*parts).item()

    for seed in range(2):
        for first, second in on_ranks(run, seed=seed):
            assert first == pytest.approx(net().single.losses[0]) and second == pytest.approx(net().single.losses[0])


def test_state_comes_back_whole_or_placed(tmp_path: Path) -> None:
    other = Net()
    wanted = loss(other(X), Y).item()

    def run(module: ShardedModule) -> tuple[list[str], float, float, float]:
        import torch.distributed.checkpoint as checkpoint

        before = module(X, Y).item()
        names = sorted(module.state_dict())
        checkpoint.save({"model": module.state_dict()}, checkpoint_id=tmp_path)
        module.load_state_dict(other.state_dict())
        loaded = module(X, Y).item()
        state = module.state_dict()
        checkpoint.load({"model": state}, checkpoint_id=tmp_path)
        module.load_state_dict(state)
        assert module(X, Y).item() == before
        moved = {name: tensor.redistribute(placements=[_replicate()] * 2) for name, tensor in module.state_dict().items()}
        module.load_state_dict(moved)
        return names, before, loaded, module(X, Y).item()

    for names, before, loaded, again in on_ranks(run, seed=4):
        assert names == sorted(net().model.state_dict())
        assert before == again == pytest.approx(net().single.losses[0])
        assert loaded == pytest.approx(wanted)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def test_a_checkpoint_of_four_ranks_loads_on_two(tmp_path: Path) -> None:
    def save(module: ShardedModule) -> None:
        import torch.distributed.checkpoint as checkpoint

        checkpoint.save({"model": module.state_dict()}, checkpoint_id=tmp_path)

    on_ranks(save, mesh="2x2", seed=2)
    torch.manual_seed(5)
    other = Net()

    def load(module: ShardedModule) -> float:
        import torch.distributed.checkpoint as checkpoint

        state = module.state_dict()
        checkpoint.load({"model": state}, checkpoint_id=tmp_path)
        module.load_state_dict(state)
        return module(X, Y).item()

    changed = Example(other, net().captured, net().case, net().single)
    assert on_ranks(load, mesh="2", seed=1, made=changed) == [pytest.approx(net().single.losses[0])] * 2


def meta_net() -> Example:
    with torch.device("meta"):
        model = Net()
    return Example(model, net().captured, net().case, net().single)


def test_meta_weights_are_initialised_alike_on_all_ranks() -> None:
    def run(module: ShardedModule) -> list[Tensor]:
        module(X, Y)
        return [p.full_tensor().detach() for p in module.parameters()]

    found = [on_ranks(run, mesh=mesh, seed=1, made=meta_net())[0] for mesh in ("2", "2x2")]
    for one, other in zip(*found, strict=True):
        assert one.equal(other), "the same weights on any mesh"
        assert one.std() > 0


def test_meta_weights_take_the_users_init() -> None:
    def init(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            nn.init.constant_(parameter, len(name))

    def run(module: ShardedModule) -> set[tuple[int, float]]:
        return {(len(name), value) for name, p in module.named_parameters() for value in p.full_tensor().flatten().tolist()}

    assert on_ranks(run, made=meta_net(), init=init)[3] == {(9, 9.0), (7, 7.0), (11, 11.0)}


def test_meta_weights_without_an_init_must_be_loaded() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).square().mean()

    with torch.device("meta"):
        model = Own()
    captured = capture(model, (X,), mode="train")
    made = Example(model, captured, net().case, net().single)

    def run(module: ShardedModule) -> tuple[str, float]:
        try:
            module(X)
        except UsageError as error:
            message = str(error)
        module.load_state_dict({"scale": torch.full((16,), 2.0, dtype=torch.float64)})
        return message, module(X).item()

    for message, value in on_ranks(run, made=made):
        assert "no values yet: scale" in message and "hint: pass init=" in message
        assert value == pytest.approx((X * 2).square().mean().item())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda module: module(X[:4], Y[:4]), "a program for this call needs the loss, which is not known"),
        (lambda module: module(X.float(), Y), "input x is float32 [8, 16], the plan was made for float64 [8, 16]"),
        (lambda module: module(), "the loss alone takes 1"),
        (lambda module: module(X, Y, Y), "do not fit the model's forward"),
        (lambda module: module("text", Y), "argument 0 is a str, the plan was made for a tensor"),
        (lambda module: module(X.clone().requires_grad_(True), Y), "input x requires grad, the plan gives it no gradient"),
        (lambda module: module.load_state_dict({"down.weight": torch.zeros(3, 3)}, strict=False), "holds down.weight with shape [3, 3]"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call: Callable[[ShardedModule], Any], words: str) -> None:
    def run(module: ShardedModule) -> str:
        try:
            call(module)
        except (UsageError, MismatchError) as error:
            return str(error)
        return "no error"

    (found,) = on_ranks(run, mesh="1")
    assert words in found and "\nhint: " in found


@pytest.mark.parametrize("again", [0.0, 1.0])
@pytest.mark.parametrize("execute", ["graph", pytest.param("compiled", marks=pytest.mark.slow)])
def test_graphs_do_what_the_interpreter_does(execute: str, again: float) -> None:
    reference = copy.deepcopy(net().model)
    wanted = train(reference, lambda: loss(reference(X), Y))

    def run(module: ShardedModule) -> tuple[list[float], bool, set[str], int]:
        graphs = module.step.executable
        backward = [str(node.target) for node in graphs.backward_graph.graph.nodes]
        with module.observed_collectives() as observed:
            module(X, Y).backward()
        nodes = [str(node.target) for graph in (graphs.forward_graph, graphs.backward_graph) for node in graph.graph.nodes]
        sent = [name for name in nodes if name.startswith("_c10d_functional") and "wait" not in name]
        listed = [planned(row) for row in plan_of(module.schedule).collectives]
        as_planned = [item.row(module.place.mesh) for item in observed] == listed and len(sent) == len(listed)
        module.zero_grad()
        ours = {name for name in nodes if name.startswith("autopar")}
        return train(module, lambda: module(X, Y)), as_planned, ours, backward.count("aten.tanh.default")

    for found, as_planned, whole, made_again in on_ranks(run, mesh="2", seed=1, execute=execute, again=again):
        assert found == pytest.approx(wanted, rel=1e-9)
        assert as_planned and whole == set()
        assert made_again == 2 * again


class Dropping(Net):
    """Draws between its layers; no dropout is ever left out."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(nn.functional.dropout(torch.tanh(self.up(x)), 0.5, True)))
        return self.down(hidden * torch.rand_like(hidden))


@pytest.mark.parametrize("execute", ["eager", "graph", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_is_drawn_in_forward_is_drawn_again_in_backward(execute: str) -> None:
    torch.manual_seed(0)
    made = example(Dropping(), (X,), "train", loss, (Y,))
    trained = [
        on_ranks(lambda module: train(module, lambda: module(X, Y)), mesh="2", made=made, again=again, execute=execute)
        for again in (0.0, 1.0)
    ]
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-9)
    assert len(set(trained[0][0][1::2])) == 3, "every step draws anew"


class WithLogits(Net):
    """Returns the loss and what it came from."""

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": (logits - wanted).square().mean(), "logits": logits}


def test_a_loss_among_other_outputs() -> None:
    torch.manual_seed(0)
    made = example(WithLogits(), (X, Y), "train")

    def run(module: ShardedModule) -> tuple[float, str, Tensor, Tensor]:
        result = module(X, wanted=Y)
        result.loss.backward()
        other = module(X, wanted=Y)
        with pytest.raises(UsageError) as error:
            (other.loss + _whole(other.logits).mean()).backward()
        return result["loss"].item(), str(error.value), _whole(result.logits).detach(), module.down.weight.grad.full_tensor()

    for value, words, logits, gradient in on_ranks(run, made=made, seed=3):
        assert value == pytest.approx(made.single.losses[0])
        assert "the output logits is part of what backward runs from, the plan has gradients of the loss alone\nhint: " in words
        assert torch.allclose(logits, made.single.outputs["logits"]) and torch.allclose(gradient, made.single.gradients["down.weight"])


def test_an_init_that_forgets_a_weight_is_noticed() -> None:
    def init(model: nn.Module) -> None:
        nn.init.ones_(model.up.weight)

    def run(module: ShardedModule) -> str:
        try:
            module(X, Y)
        except UsageError as error:
            return str(error)
        return "no error"

    assert all("no values yet: again.bias, down.weight, up.bias" in found for found in on_ranks(run, made=meta_net(), init=init, mesh="2"))


def test_gradients_of_inputs_leave_as_the_inputs_came() -> None:
    made = sixes()
    (x,) = made.case.args
    wanted = made.single.gradients["x"]

    def run(module: ShardedModule) -> tuple[float, float]:
        place, spec = module.place, module.schedule.specs["x"]
        part = place.own_part(x, spec).requires_grad_(True)
        tangents = placed_tangents(made.case, module)
        made.case.backward(module(part), tangents)
        placed = place.dtensor(place.own_part(x, spec), spec, x.shape).requires_grad_(True)
        made.case.backward(module(placed), tangents)
        assert isinstance(placed.grad, DTensor) and placed.grad.placements == placed.placements
        return (part.grad - place.own_part(wanted, spec)).abs().max().item(), (placed.grad.full_tensor() - wanted).abs().max().item()

    for seed in range(2):
        for local, whole in on_ranks(run, made=made, mesh="2x3", seed=seed, inputs="local"):
            assert local < 1e-12 and whole < 1e-12
