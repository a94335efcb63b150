"""What training scripts do to a module: it is done to the compiled one too, or refused in words."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune

import autopar
from autopar.plan import Plan
from autopar.runtime import MasterWeights, ShardedModule
from autopar.verify import verify
from tests.runtime.test_training import gradients, on_ranks, refused, same, whole

X, Y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, dtype=torch.float64)
        self.mid = nn.Linear(16, 16, dtype=torch.float64)
        self.last = nn.Linear(16, 16, bias=False, dtype=torch.float64)
        self.last.weight = self.first.weight
        self.still = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.still(self.mid(torch.tanh(self.first(x))))))


def mse(outputs: Tensor, wanted: Tensor) -> Tensor:
    return (outputs - wanted).square().mean()


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


@lru_cache
def plan_of(microbatches: int = 1, mesh: str = "2") -> Plan:
    pins = {"input:x": "S0 R", "first.weight": "S0 R", "mid.weight": "R S0" if mesh == "2" else "R S10", "mid.bias": "R"}
    return autopar.plan(
        tied(), (X,), loss=mse, loss_args=(Y,), mesh=mesh, hardware="cpu-cluster", constraints=pins, microbatches=microbatches
    )


PLAN = plan_of()


def compiled(plan: Plan = PLAN) -> ShardedModule:
    return autopar.compile(tied(), plan)


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def steps(
    module: nn.Module, call: Callable[[], Tensor], count: int = 3, make: Callable[..., torch.optim.Optimizer] = descent
) -> list[float]:
    optimizer, found = make(module.parameters()), []
    for _ in range(count):
        value = call()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_may_be_joined_by_what_is_asked_of_the_parameters(microbatches: int) -> None:
    """The loss's gradient is a DTensor then."""

    def asked(module: nn.Module) -> Any:
        return 0.1 * sum(one.square().sum() for one in module.parameters()) + 0.1 * module.mid.weight.norm()  # type: ignore[union-attr, operator]

    reference, plan = tied(), plan_of(microbatches)
    wanted = steps(reference, lambda: mse(reference(X), Y) + asked(reference))

    def run(rank: int) -> list[float]:
        module = compiled(plan)
        return steps(module, lambda: module(X, Y) + asked(module))

    for found in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9)


def added_up(module: Any, outputs: Tensor, own: Tensor) -> Tensor:
    return mse(outputs, Y) + 0.1 * sum(one.square().sum() for one in module.parameters()) + own * module.mid.weight.norm()


def added_in_place(module: Any, outputs: Tensor, own: Tensor) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    loss += 0.1 * module.mid.weight.square().sum()
    loss += mse(outputs, Y) * own
    loss *= module.last.weight.norm()
    return loss


@pytest.mark.parametrize("joined", [added_up, added_in_place])
def test_a_loss_outside_is_joined_by_penalties_of_weights_and_by_weights_of_ones_own(joined: Callable[..., Tensor]) -> None:
    """The outputs and these weights are plain, the penalties are DTensors."""

    def trained(module: Any) -> list[float]:
        own = nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer, found = torch.optim.SGD([*module.parameters(), own], lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = joined(module, module(X), own)
            loss.backward()
            norm = torch.zeros((), dtype=torch.float64)
            for one in module.parameters():
                norm += one.grad.norm() ** 2
            optimizer.step()
            found += [loss.item(), norm.item(), own.item()]
        assert not isinstance(norm, DTensor) and type(own.grad) is Tensor
        return found

    wanted = trained(tied())
    plan = autopar.plan(tied(), (X,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R", "mid.weight": "R S0"})
    for found in on_ranks(lambda rank: trained(autopar.compile(tied(), plan, outputs="full")), 2):
        assert found == pytest.approx(wanted, rel=1e-9)


class Pair(NamedTuple):
    """What a model may return."""

    out: Tensor
    hidden: Tensor


class Named(Tied):
    """Returns what has names, and places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.mid(x)
        out = self.last(hidden)
        if self.kind == "torch's own":
            return {"largest": out.max(1), "sorted": [hidden.sort(1)]}
        return Pair(out, hidden) if self.kind == "tuple" else {7: out, "pair": [hidden, Pair(out, hidden)]}


READ: dict[str, Callable[[Any], list[Tensor]]] = {
    "tuple": lambda result: [*result, result[1], result.hidden],
    "dict": lambda result: [result[7], *result["pair"][1], result["pair"][1].out],
    "torch's own": lambda result: [result["largest"].values, result["largest"][1], result["sorted"][0].indices, result["sorted"][0].values],
}


@pytest.mark.parametrize("kind", READ)
def test_parts_of_a_result_are_read_as_the_models_own(kind: str) -> None:
    def named() -> Named:
        torch.manual_seed(0)
        return Named(kind)

    plan = autopar.plan(named(), (X,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})
    wanted = READ[kind](named()(X))

    def run(rank: int) -> list[bool]:
        result = autopar.compile(named(), plan)(X)
        return [torch.allclose(whole(one), other) for one, other in zip(READ[kind](result), wanted, strict=True)]

    assert on_ranks(run, 2) == [[True] * 4] * 2
    assert verify(plan, (named(), (X,)), steps=2).passed


def test_keys_and_lists_of_a_result_are_the_models_own() -> None:
    model = Named("dict")
    plan = autopar.plan(model, (X,), mesh="2", hardware="cpu-cluster", mode="inference")

    def run(rank: int) -> tuple[list[Any], type]:
        result = autopar.compile(model, plan)(X)
        return list(result), type(result["pair"])

    assert on_ranks(run, 2) == [([7, "pair"], list)] * 2


def test_layers_are_found_by_place_where_the_models_are() -> None:
    """A model without places says so as it does by itself."""
    model = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 16)).double()
    plan = autopar.plan(model, (X,), mesh="2", hardware="cpu-cluster")
    other = autopar.plan(tied(), (X,), mesh="2", hardware="cpu-cluster")

    def run(rank: int) -> list[Any]:
        module, plain = autopar.compile(model, plan), autopar.compile(tied(), other)
        with pytest.raises(TypeError, match="'Tied' object is not subscriptable"):
            plain[0]
        with pytest.raises(TypeError, match="object of type 'Tied' has no len"):
            len(plain)
        with torch.no_grad():
            module[-1].bias.fill_(1.0)
        return [len(module), [type(part).__name__ for part in module], module[1] in module, len(module[1:]), bool(plain),
                module.get_parameter("2.bias").full_tensor().sum().item()]  # fmt: skip

    assert on_ranks(run, 2) == [[3, ["Linear", "Tanh", "Linear"], True, 2, True, 16.0]] * 2


def named() -> Named:
    torch.manual_seed(0)
    return Named("tuple")


@pytest.mark.parametrize(("mesh", "execute"), [("2", "eager"), ("2", "graph"), ("2x2", "eager")])
def test_a_part_that_backward_does_not_run_from_has_no_gradient(mesh: str, execute: Any) -> None:
    """Zeros would decay its weights, and keep its moments going."""

    def heads(module: Any) -> list[list[float]]:
        optimizer, found = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.3), []
        for turn in range(4):
            optimizer.zero_grad()
            module(X)[turn % 2].square().mean().backward()
            found.append([0.0 if one.grad is None else 1.0 for one in module.parameters()])
            optimizer.step()
        return [*found, *(whole(one.detach()).flatten().tolist() for one in module.parameters())]

    wanted = heads(named())
    assert wanted[1] == [0.0, 0.0, 1.0, 1.0]
    plan = autopar.plan(named(), (X,), mesh=mesh, hardware="cpu-cluster", constraints={"input:x": "S0 R", "mid.weight": "S0 R"})
    for found in on_ranks(lambda rank: heads(autopar.compile(named(), plan, execute=execute)), math.prod(plan.mesh.values())):
        assert all(one == pytest.approx(other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("spec", ["S0 R", "R R"])
def test_what_backward_reads_of_a_result_is_not_written_over(spec: str) -> None:
    """That is ``hidden``, of which the other part is made; torch refuses it too."""
    plan = autopar.plan(named(), (X,), mesh="2", hardware="cpu-cluster", constraints={"input:x": spec, "output:*": spec})

    def run(rank: int) -> list[Any]:
        found: list[Any] = []
        for written in (0, 1):
            module = autopar.compile(named(), plan)
            result = module(X)
            result[written].mul_(2)
            try:
                sum(one.square().mean() for one in result).backward()
                found.append([whole(one.grad).sum().item() for one in (module.last.weight, module.mid.weight)])
            except RuntimeError as error:
                found.append(str(error))
        return found

    plain = named()
    result = plain(X)
    result[0].mul_(2)
    sum(one.square().mean() for one in result).backward()
    wanted = [one.grad.sum().item() for one in (plain.last.weight, plain.mid.weight) if one.grad is not None]
    for right, refused_ in on_ranks(run, 2):
        assert right == pytest.approx(wanted)
        assert refused_ == "output hidden was changed in place between the forward and the backward pass of this step"


def scaled(outputs: Tensor, wanted: Tensor, scale: Tensor) -> Tensor:
    return ((outputs - wanted) * scale).square().mean()


CALLS: dict[str, Callable[[nn.Module, int], Tensor]] = {
    "by place": lambda module, rows: module(X[:rows], Y[:rows], X[:rows]),
    "by name": lambda module, rows: module(X[:rows], wanted=Y[:rows], scale=X[:rows]),
    "all by name": lambda module, rows: module(scale=X[:rows], wanted=Y[:rows], x=X[:rows]),
    "the last by name": lambda module, rows: module(X[:rows], Y[:rows], scale=X[:rows]),
    "the first by name": lambda module, rows: module(X[:rows], X[:rows], wanted=Y[:rows]),
}
LACKING: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "one": (lambda module: module(X, Y), "of the loss's arguments lacks scale\n"),
    "both": (lambda module: module(X), "has what the model takes, and of the loss's arguments lacks wanted, scale\n"),
    "all but one, by name": (lambda module: module(x=X, scale=X), "and of the loss's arguments lacks wanted\n"),
    "all": (lambda module: module(), "the call has 0 arguments by position, the loss alone takes 2"),
    "another name": (lambda module: module(X, Y, X, labels=Y), "got an unexpected keyword argument 'labels'"),
    "too many": (lambda module: module(X, Y, X, wanted=Y), "too many positional arguments"),
}

ALONE = "; for the model's outputs alone call eval() first, and pass its arguments by name"


def test_what_the_loss_takes_may_be_given_by_name() -> None:
    plan = autopar.plan(tied(), (X,), loss=scaled, loss_args=(Y, X), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})
    wanted = [[scaled(tied()(X[:rows]), Y[:rows], X[:rows]).item()] * len(CALLS) for rows in (8, 6)]

    def run(rank: int) -> tuple[list[list[float]], list[str]]:
        module = compiled(plan)
        found = [[call(module, rows).item() for call in CALLS.values()] for rows in (8, 6)]
        return found, [refused(lambda: call(module)) for call, _ in LACKING.values()]  # noqa: B023

    for found, words in on_ranks(run, 2):
        assert all(one == pytest.approx(other, rel=1e-9) for one, other in zip(found, wanted, strict=True))
        for text, (_, said) in zip(words, LACKING.values(), strict=True):
            assert said in text and text.removesuffix(ALONE).endswith("those that the loss takes after the outputs: wanted, scale")
            assert text.endswith(ALONE) == ("of the loss's arguments lacks" in said)


CHANGES: dict[str, tuple[Callable[[ShardedModule], Any], str]] = {
    "a plain parameter": (
        lambda module: setattr(module.mid, "bias", nn.Parameter(torch.zeros(16, dtype=torch.float64))),
        "parameter mid.bias is now a plain tensor, where the module has a DTensor",
    ),
    "no bias": (lambda module: setattr(module.mid, "bias", None), "parameter mid.bias is now None, where the module has a DTensor"),
    "another dtype": (lambda module: module.float(), "parameter first.bias is now float32 [16], planned was float64 [16]"),
    "another place": (
        lambda module: setattr(module.mid, "bias", nn.Parameter(module.mid.bias.detach().redistribute(placements=[Shard(0)]))),
        "parameter mid.bias now lies as [Shard(dim=0)] on the plan's mesh, the module's lies as [Replicate()]",
    ),
    "parted": (
        lambda module: setattr(module.last, "weight", nn.Parameter(module.last.weight.detach().clone())),
        "first.weight and last.weight are one parameter in the plan, and two in the module now",
    ),
    "gone": (lambda module: delattr(module.mid, "weight"), "mid.weight is no longer in the module, the plan has it"),
    "a part gone": (lambda module: delattr(module, "mid"), "mid (Linear) is no longer in the module, the plan has it"),
    "another part": (lambda module: setattr(module, "mid", nn.Identity()), "mid (Linear) was replaced by another module (Identity)"),
    "another part without weights": (lambda module: setattr(module, "still", nn.ReLU()), "still (Identity) was replaced by another module"),
    "a plain tensor in .data": (
        lambda module: setattr(module.mid.weight, "data", torch.zeros(16, 16, dtype=torch.float64)),
        "a plain tensor [16, 16] is assigned to .data of a DTensor",
    ),
}


class Summed(nn.Module):
    """A bias from a matrix whose columns each rank sums for itself."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        parts = torch.ones(16, 4, dtype=torch.float64)
        if isinstance(module, ShardedModule):
            mesh = module.mid.bias.device_mesh
            parts = distribute_tensor(parts, mesh, [Shard(1)] * mesh.ndim)
        self.parts = nn.Parameter(parts)

    def forward(self, bias: Tensor) -> Tensor:
        return bias + self.parts.sum(1)


def test_weights_that_are_not_laid_as_planned_are_refused() -> None:
    def run(rank: int) -> list[str]:
        found = []
        for change, _ in CHANGES.values():
            module = compiled()
            module(X, Y)
            found.append(refused(lambda: (change(module), module(X, Y))))  # noqa: B023
        return found

    for found in on_ranks(run, 2):
        for text, (_, words) in zip(found, CHANGES.values(), strict=True):
            assert words in text and "\nhint: " in text


def trains_as_one_device_does(changed: Callable[[Any], Any], plan: Plan = PLAN, ranks: int = 2) -> None:
    """The losses of a module that is changed after it was compiled, beside the plain one changed alike: in training and evaluation."""

    def losses(module: Any, call: Callable[[], Tensor]) -> list[float]:
        changed(module)
        trained = steps(module, call)
        with torch.no_grad():
            module.eval()
            return [*trained, call().item()]

    reference = tied()
    wanted = losses(reference, lambda: mse(reference(X), Y))

    def run(rank: int) -> list[float]:
        module = compiled(plan)
        return losses(module, lambda: module(X, Y))

    for found in on_ranks(run, ranks):
        assert found == pytest.approx(wanted, rel=1e-9)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def spectral(module: Any) -> None:
    """The power method begins with equal vectors."""
    torch.manual_seed(0)
    parametrizations.spectral_norm(module.mid, n_power_iterations=30)


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda module: parametrize.register_parametrization(module.mid, "weight", Twice()),
    "a sum over ranks": lambda module: parametrize.register_parametrization(module.mid, "bias", Summed(module), unsafe=True),
    "weight_norm": lambda module: parametrizations.weight_norm(module.mid),
    "weight_norm of columns": lambda module: parametrizations.weight_norm(module.mid, dim=1),
    "weight_norm of all": lambda module: parametrizations.weight_norm(module.mid, dim=None),
    "spectral_norm": spectral,
    "orthogonal": lambda module: parametrizations.orthogonal(module.mid),
    "orthogonal by householder": lambda module: parametrizations.orthogonal(module.mid, "weight", "householder", use_trivialization=False),
}

STRIDED = ["weight_norm", "scaled", "orthogonal"]


@pytest.mark.parametrize(("kind", "mesh"), [*((kind, "2") for kind in COMPUTED), *((kind, "2x2") for kind in STRIDED)])
def test_weights_may_be_computed_by_what_is_registered_later(kind: str, mesh: str) -> None:
    """On two axes a weight lies innermost axis first, which DTensor calls strided."""
    trains_as_one_device_does(COMPUTED[kind], *((PLAN, 2) if mesh == "2" else (plan_of(mesh="2x2"), 4)))


ADDED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "the older weight_norm": (lambda module: nn.utils.weight_norm(module.mid), "weight_g"),
    "the older spectral_norm": (lambda module: nn.utils.spectral_norm(module.mid), "weight_orig"),
    "pruning": (lambda module: prune.l1_unstructured(module.mid, "weight", amount=0.3), "weight_orig"),
    "a parameter": (lambda module: setattr(module.mid, "scale", nn.Parameter(torch.ones(1))), "scale"),
}


def test_parameters_that_no_program_has_are_refused() -> None:
    def run(rank: int) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [refused(lambda: add(compiled())) for add, _ in ADDED.values()]  # noqa: B023

    for found in on_ranks(run, 2):
        for text, (_, name) in zip(found, ADDED.values(), strict=True):
            assert f"mid, a part of a compiled module, is given a parameter {name}," in text and "\nhint: " in text


@pytest.mark.parametrize(("kind", "way"), [
    *((kind, {"foreach": foreach}) for kind in ("Rprop", "Adafactor", "NAdam") for foreach in (False, True)), ("Adagrad", {"fused": True}),
])  # fmt: skip
def test_optimizers_that_look_into_gradients(kind: str, way: dict[str, bool]) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(parameters, lr=1e-2, **way)
        return made

    reference = tied()
    wanted = steps(reference, lambda: mse(reference(X), Y), 4, optimizer)

    def run(rank: int) -> list[float]:
        module = compiled()
        return steps(module, lambda: module(X, Y), 4, optimizer)

    for found in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_attributes_of_weights_are_kept() -> None:
    """By which parameters are sorted into an optimizer's groups."""

    def marked() -> Tied:
        made = tied()
        made.mid.bias.no_weight_decay = True
        made.first.weight.rate = 0.1
        return made

    def sorted_by_marks(parameters: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [one], "weight_decay": 0.0 if hasattr(one, "no_weight_decay") else 0.5, "lr": getattr(one, "rate", 1e-2)}
            for one in parameters
        ]
        return torch.optim.AdamW(groups)

    reference = marked()
    wanted = steps(reference, lambda: mse(reference(X), Y), make=sorted_by_marks)

    def run(rank: int) -> list[float]:
        module = autopar.compile(marked(), PLAN)
        return steps(module, lambda: module(X, Y), make=sorted_by_marks)

    for found in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_copies_of_weights_follow_what_is_written_into_them() -> None:
    """And have groups with options of their own. Small changes of what was not written to are not lost."""

    def trained(then: float | None) -> list[list[float]]:
        module = nn.Linear(2, 1, dtype=torch.bfloat16)
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        groups = [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.0}]
        optimizer = MasterWeights(groups, torch.optim.SGD, lr=2.0**-11)
        for turn in range(6):
            optimizer.zero_grad(set_to_none=False)
            module(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            if turn == 1 and then is not None:
                with torch.no_grad():
                    module.weight[:, 1] = then
        return [*module.weight.tolist(), module.bias.tolist()]

    assert trained(None) == [[1.0 - 2.0**-8] * 2, [1.0]]
    assert trained(4.0) == [[1.0 - 2.0**-8, 4.0], [1.0]]


class Annealed(Tied):
    """What schedules and users change between steps: numbers of the whole and of a part, a flag of the class, a tensor, an activation's
    name."""

    squared = False

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.kind, self.unused, self.activation = 0.5, "tanh", 0, torch.sigmoid
        self.mask = torch.ones(16, dtype=torch.float64)
        self.normed = nn.LayerNorm(16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.normed(super().forward(x) * self.mask)) * self.beta
        return getattr(torch, self.kind)(y.square() if self.squared else y)


def test_attributes_that_change_are_followed() -> None:
    changes: list[Callable[[Any], Any]] = [
        lambda module: setattr(module, "unused", 1), lambda module: setattr(module, "beta", 0.25), lambda module: None,
        lambda module: setattr(module.normed, "eps", 0.5), lambda module: setattr(module, "squared", True),
        lambda module: setattr(module, "kind", "sin"), lambda module: module.mask[:4].zero_(),
        lambda module: setattr(module, "activation", torch.exp), lambda module: setattr(module.mid, "forward", lambda x: x),
        lambda module: setattr(module.mid, "forward", lambda x: 2 * x),
        lambda module: setattr(module, "mask", torch.zeros(16, dtype=torch.float64)), lambda module: setattr(module, "epoch", 3),
    ]  # fmt: skip

    def losses(module: Any, call: Callable[[], Tensor]) -> list[float]:
        return [loss for change in changes for loss in (change(module), steps(module, call, 1))[1]]

    def annealed() -> Annealed:
        torch.manual_seed(0)
        return Annealed()

    reference = annealed()
    wanted = losses(reference, lambda: mse(reference(X), Y))
    assert len(set(wanted)) == len(wanted)
    plan = autopar.plan(annealed(), (X,), loss=mse, loss_args=(Y,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})

    def run(rank: int) -> tuple[list[float], int]:
        module = autopar.compile(annealed(), plan)
        found = losses(module, lambda: module(X, Y))
        return found, len(set(map(id, module._programs.made.values())) - {id(module._programs.main)})

    for found, programs in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9) and programs == 9


def test_what_is_loaded_in_place_of_tied_weights_stays_tied() -> None:
    torch.manual_seed(5)
    other = Tied()
    wanted = mse(other(X), Y)
    wanted.backward()

    def run(rank: int) -> tuple[bool, float, bool]:
        module = compiled()
        module.load_state_dict(other.state_dict(), assign=True)
        value = module(X, Y)
        value.backward()
        return module.first.weight is module.last.weight, value.item(), same(gradients(module), gradients(other))

    for one, value, right in on_ranks(run, 2):
        assert one and right and value == pytest.approx(wanted.item())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_input_that_has_no_gradient_is_refused(microbatches: int) -> None:
    """Of several microbatches it got none, without a word."""

    plan_of(microbatches)  # made here once, not on every rank
    def run(rank: int) -> str:
        module = compiled(plan_of(microbatches))
        return refused(lambda: module(X.clone().requires_grad_(), Y))

    for found in on_ranks(run, 2):
        assert "input x requires grad, the plan gives it no gradient" in found and "\nhint: " in found


class Versioned(Tied):
    """Saves and loads in ways of its own: an older name, a number beside the weights, an entry that no module takes."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 5
        self._register_load_state_dict_pre_hook(self.of_older_names)

    def of_older_names(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}middle.")]:
            state[name.replace("middle.", "mid.")] = state.pop(name)

    def get_extra_state(self) -> int:
        return self.epoch

    def set_extra_state(self, state: int) -> None:
        self.epoch = state + 1

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "written_by": "a test"}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({name: value for name, value in state.items() if name != "written_by"}, *args, **kwargs)


def load_older(module: Any) -> None:
    state = {name.replace("mid.", "middle."): value for name, value in versioned(1).state_dict().items()}
    module.load_state_dict(state)


STATES: dict[str, Callable[[Any], Any]] = {
    "its own": lambda module: module.load_state_dict(module.state_dict()),
    "older names": load_older,
    "into a copy": lambda module: load_older(copy.deepcopy(module)),
    "a part's": lambda module: module.mid.load_state_dict(versioned(2).mid.state_dict()),
    "in place of a part's": lambda module: module.mid.load_state_dict(versioned(3).mid.state_dict(), assign=True),
    "within another module": lambda module: nn.ModuleDict({"net": module}).load_state_dict(
        {f"net.{name}": value for name, value in versioned(4).state_dict().items() if name != "written_by"}
    ),
}


def versioned(seed: int = 0) -> Versioned:
    torch.manual_seed(seed)
    return Versioned()


@pytest.mark.parametrize("kind", STATES)
def test_states_are_saved_and_loaded_in_the_models_own_ways(kind: str) -> None:
    """Hooks, extra states and overridden methods of the whole were left out; parts took no whole tensors."""

    def found_in(module: Any) -> tuple[list[str], int, list[Tensor]]:
        STATES[kind](module)
        state = module.state_dict()
        return list(state), module.epoch, [whole(value) for value in state.values() if isinstance(value, Tensor)]

    wanted = found_in(versioned())

    def run(rank: int) -> tuple[tuple[list[str], int, list[Tensor]], Any]:
        model = versioned()
        module = autopar.compile(model, PLAN)
        found = found_in(module)
        return found, (len(model._load_state_dict_pre_hooks), module(X, Y).item() > 0)

    for (names, epoch, values), (hooks, runs) in on_ranks(run, 2):
        assert (names, epoch) == wanted[:2] and hooks == 1 and runs
        assert all(map(torch.equal, values, wanted[2]))


def test_data_may_be_assigned() -> None:
    """``parameter.data = ...``, which DTensor alone leaves without effect."""

    def assigned(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.data = 2 * parameter.data
        vector = nn.utils.parameters_to_vector([parameter.detach() / 4 for parameter in module.parameters()])
        nn.utils.vector_to_parameters(vector, module.parameters())
        return module

    trains_as_one_device_does(assigned)


def test_gradients_of_gradients_and_transforms_are_refused() -> None:
    def forward_mode(module: ShardedModule) -> None:
        with torch.autograd.forward_ad.dual_level():
            module(torch.autograd.forward_ad.make_dual(X, X), Y)

    def run(rank: int) -> list[str]:
        module = compiled()
        return [
            refused(lambda: torch.autograd.grad(module(X, Y), module.mid.weight, create_graph=True)),
            refused(lambda: torch.func.vmap(lambda x: module(x, Y))(torch.stack([X, X]))), refused(lambda: forward_mode(module)),
            refused(lambda: torch.func.grad(lambda one: torch.func.functional_call(module, one, (X, Y)))(dict(module.named_parameters()))),
        ]  # fmt: skip

    for first, *others in on_ranks(run, 2):
        assert "create_graph=True asks for gradients that can be differentiated" in first and "\nhint: " in first
        assert all("called within torch.func or forward-mode differentiation" in other and "\nhint: " in other for other in others)


def test_anomalies_are_found_on_all_ranks() -> None:
    reference = tied()
    wanted = steps(reference, lambda: mse(reference(X), Y))
    broken = X.clone()
    broken[7] = float("nan")  # among the second rank's rows

    def run(rank: int) -> tuple[list[float], str]:
        module = compiled()
        with torch.autograd.set_detect_anomaly(True):
            found = steps(module, lambda: module(X, Y))
            with pytest.raises(RuntimeError) as error:
                module(broken, Y).backward()
        return found, str(error.value)

    for found, words in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9) and "returned nan values" in words


def test_torch_compile_leaves_the_program_as_it_is() -> None:
    reference = tied()
    wanted = steps(reference, lambda: mse(reference(X), Y))

    def run(rank: int) -> tuple[list[float], list[float], int]:
        one, other = compiled(), compiled()
        graphs: list[Any] = []

        def counted(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        called = torch.compile(one, backend=counted)

        def step() -> Tensor:
            value = other(X, Y)
            value.backward()
            return value

        whole_step, found = torch.compile(step, backend=counted), []
        optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
        for _ in range(3):
            found.append(whole_step().item())
            optimizer.step()
            optimizer.zero_grad()
        return steps(one, lambda: called(X, Y)), found, len(graphs)

    for first, second, graphs in on_ranks(run, 2):
        assert first == pytest.approx(wanted, rel=1e-9) and second == pytest.approx(wanted, rel=1e-9) and graphs == 0


def compiled_before(kind: str) -> Any:
    """A model, or a part of it, that was given to ``torch.compile`` before it is planned."""
    model: Any = tied()
    match kind:
        case "part":
            model.mid = torch.compile(model.mid)
        case "part in place":
            model.mid.compile()
        case "whole":
            model = torch.compile(model)
        case "whole in place":
            model.compile()
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["part", "part in place", "whole", "whole in place"])
def test_what_was_given_to_torch_compile_is_the_module_it_is(kind: str) -> None:
    def losses(module: Any, call: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        found = steps(module, lambda: call(X, Y))
        module.eval()
        with torch.no_grad():
            return [*found, call(X[:2], Y[:2]).item()]

    reference = tied()
    wanted = losses(reference, lambda x, y: mse(reference(x), y))
    plan = autopar.plan(compiled_before(kind), (X,), loss=mse, loss_args=(Y,), mesh="2", hardware="cpu-cluster")
    assert list(plan.inputs) == ["x", "wanted"]
    target = SimpleNamespace(model=compiled_before(kind), args=(X,), loss=mse, loss_args=(Y,))
    assert verify(plan, target, backend="simulate", steps=2).passed

    def run(rank: int) -> list[float]:
        module = autopar.compile(compiled_before(kind), plan)
        return losses(module, lambda x, y: module(x, wanted=y))

    for found in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9)


class Caller:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(self.module(x), 0.5, self.module.training and x.shape[0] == 2)


class Indirect(Tied):
    """Comes by its parts otherwise than by attributes and plain containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        mid, forward = self.mid, self.mid.forward
        self.calls: Any = {
            "a partial function": partial(self._twice, 1.0),
            "a lambda": lambda x: self.mid(x),
            "a closure": [lambda x: mid(x)],
            "an object": Caller(mid),
            "an ordered dictionary": OrderedDict(mid=mid),
        }.get(kind)
        if kind == "a forward of its own":
            mid.forward = lambda x: forward(x)  # type: ignore[method-assign, assignment]
        if kind == "a hook":
            self.last.register_forward_hook(lambda module, args, result: result * self.mid.weight.mean())

    def _twice(self, factor: float, x: Tensor) -> Tensor:
        return factor * self.mid(x)

    def forward(self, x: Tensor) -> Tensor:
        call = {"a closure": lambda: self.calls[0], "an ordered dictionary": lambda: self.calls["mid"]}.get(self.kind, lambda: self.calls)()
        return self.last(torch.tanh((call or self.mid)(torch.tanh(self.first(x)))))


KINDS = ["a partial function", "a lambda", "a closure", "an object", "an ordered dictionary", "a forward of its own", "a hook", "a loss"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_may_come_by_its_weights_in_any_way(kind: str) -> None:
    """In further programs and in what is verified the weights are those of the copies, which functions and objects do not hold."""
    def indirect() -> Indirect:
        torch.manual_seed(0)
        return Indirect(kind)

    def losses(module: Any, call: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        found = steps(module, lambda: call(X, Y))
        module.eval()
        with torch.no_grad():
            return [*found, call(X[:2], Y[:2]).item()]

    def loss_of(model: Indirect) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, y: mse(outputs, y) + (model.mid.weight.square().mean() if kind == "a loss" else 0.0)

    reference, original = indirect(), indirect()
    wanted = losses(reference, lambda x, y: loss_of(reference)(reference(x), y))
    loss = loss_of(original)
    plan = autopar.plan(original, (X,), loss=loss, loss_args=(Y,), mesh="2", hardware="cpu-cluster")
    attributes = vars(original), vars(original.mid)
    assert verify(plan, SimpleNamespace(model=original, args=(X,), loss=loss, loss_args=(Y,)), backend="simulate", steps=2).passed

    def run(rank: int) -> tuple[list[float], bool]:
        module = autopar.compile(original, plan)
        found = losses(module, module)
        return found, vars(original) is attributes[0] and vars(original.mid) is attributes[1]

    for found, untouched in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9) and untouched


def test_ranks_that_are_given_other_rows_are_told() -> None:
    """As a DistributedSampler does: each rank would take its rows of a batch of its own."""
    def run(rank: int) -> list[str]:
        own = X + rank
        words = [refused(partial(compiled(), *call)) for call in ((own, Y), (X, Y + rank))]
        local = autopar.compile(tied(), PLAN, inputs="local")
        rows = X[4 * rank : 4 * rank + 4]
        wanted = Y if PLAN.inputs["wanted"].spec == "R R" else Y[4 * rank : 4 * rank + 4]
        assert local(rows, wanted).item() == pytest.approx(mse(tied()(X), Y).item())
        return words

    for rank, words in enumerate(on_ranks(run, 2)):
        for text, name in zip(words, ("x", "wanted"), strict=True):
            assert f"rank {1 - rank} is given another {name} than this rank" in text and "module.local_batch" in text


def test_rows_of_their_own_are_found_after_an_equal_evaluation() -> None:
    """Compared are the first call of each program, and calls 2, 4, 8."""
    def run(rank: int) -> list[str | None]:
        module, own = compiled(), X + rank
        equal, later, short = partial(module, X, Y), partial(module, own, Y), partial(module, own[:4], Y[:4])
        with torch.no_grad():
            module.eval()(X, Y)
        module.train()
        words: list[str | None] = [refused(later)]  # call 2
        equal()
        return [*words, refused(later), refused(short)]  # calls 4 and 5

    for rank, words in enumerate(on_ranks(run, 2)):
        for text, call in zip(words, (2, 4, 5), strict=True):
            assert text is not None and f"rank {1 - rank} is given another x than this rank in call {call};" in text


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x) * self.scale


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_every_call_draws_anew_without_gradients_too(mode: str) -> None:
    """Samples are drawn under ``no_grad``; how many of them were does not change what training draws. The first is what the next step
    draws, since a forward within a reentrant checkpoint is the step's."""
    x = torch.zeros(4, 8)
    plan = autopar.plan(Noise(), (x,), mode=mode, mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})

    def run(rank: int) -> list[float]:
        module = autopar.compile(Noise(), plan)
        found = []
        for number in range(9):
            with torch.set_grad_enabled(mode == "train" and number in (2, 5)):
                found += whole(module(x)).flatten().tolist()
        other = autopar.compile(Noise(), plan)
        return [*found, *(whole(other(x)).flatten().tolist() if mode == "train" else ())]

    for found in on_ranks(run, 2):
        calls = [tuple(found[at : at + 32]) for at in range(0, len(found), 32)]
        assert len(set(found)) == 32 * len(set(calls)) == 32 * (9 if mode == "inference" else 7)
        assert mode == "inference" or (calls[0] == calls[2] == calls[9] and calls[3] == calls[5])


def test_modules_are_copied_and_not_pickled() -> None:
    def run(rank: int) -> tuple[list[str], bool, list[float]]:
        module = compiled()
        words = [refused(lambda: pickle.dumps(module)), refused(lambda: torch.save(module, io.BytesIO()))]
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        values = [one(X, Y).item() for one in (module, copy.copy(module), copy.deepcopy(module))]
        return words, all(torch.equal(whole(state[name]), one) for name, one in tied().state_dict().items()), values

    for words, equal, values in on_ranks(run, 2):
        assert all("a compiled module cannot be pickled" in text and "\nhint: " in text for text in words)
        assert equal and values == pytest.approx([mse(tied()(X), Y).item()] * 3)


class Counter:
    """Counts calls of the module that it was made for."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def count(self, module: nn.Module, *_: Any) -> None:
        assert module is self.module
        self.calls += 1


def test_a_copy_has_the_hooks_and_attributes_of_its_own_as_a_plain_models_has() -> None:
    def copied_of(module: Any) -> list[Any]:
        module.counter, module.tags, module.kept = Counter(module), ["a"], [module.first.weight]
        handles = [module.register_forward_hook(module.counter.count), module.register_forward_pre_hook(module.counter.count)]
        module.register_forward_hook(lambda *given: module.tags.append("with keywords") if len(given) == 4 else None, with_kwargs=True)
        twin = copy.deepcopy(module)
        for handle in handles:
            handle.remove()
        twin.tags.append("b")
        call = (X, Y) if isinstance(module, ShardedModule) else (X,)
        twin(*call)
        return [twin.counter.calls, module.counter.calls, module.tags, twin.tags, twin.kept[0] is twin.first.weight]

    wanted = copied_of(tied())
    assert wanted == [2, 0, ["a", "with keywords"], ["a", "b"], True]
    assert on_ranks(lambda rank: copied_of(compiled()), 2) == [wanted] * 2


def test_a_copy_of_a_compiled_call_computes_with_weights_of_its_own() -> None:
    def run(rank: int) -> tuple[float, float]:
        module = compiled()
        module.compile(backend="eager")
        before, twin = module(X, Y).item(), copy.deepcopy(module)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        return twin(X, Y).item(), module(X, Y).item() - before

    assert on_ranks(run, 2) == [(pytest.approx(Y.square().mean().item()), 0.0)] * 2


class Router(nn.Module):
    """Leaves a term of the loss for whoever trains it."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.choose = nn.Linear(16, 16, dtype=torch.float64)
        if before is not None:
            self.term = before

    def forward(self, x: Tensor) -> Tensor:
        shares = self.choose(x).softmax(-1)
        self.term = [shares.square().mean()] if isinstance(getattr(self, "term", None), list) else shares.square().mean()
        return x * shares


class Routed(Tied):
    def __init__(self, before: Any) -> None:
        super().__init__()
        self.router = Router(before)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.router(x))


BEFORE = {"nothing": None, "a number": 0.0, "a tensor": torch.zeros((), dtype=torch.float64), "a list": []}
READINGS: list[Callable[[Any], Any]] = [
    lambda term: 1.0 + term, lambda term: sum(term), lambda term: term.item(), lambda term: isinstance(term, Tensor) and term + 1,
    lambda term: term.clear(), lambda term: f"{term:.3f}", lambda term: torch.stack([term]), lambda term: term[0],
]  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
def test_what_a_forward_leaves_in_attributes_is_not_there(before: str) -> None:
    """What stood there before was read in its place, without a word: a loss of routers trained nothing. Who does not read it, or has set
    it, goes on in all programs."""

    def routed() -> Routed:
        torch.manual_seed(0)
        return Routed(BEFORE[before])

    def losses(module: Any, call: Callable[[], Tensor]) -> list[float]:
        found = steps(module, call)
        module.router.term = BEFORE[before]
        module.eval()
        with torch.no_grad():
            found.append(call().item())
        return [*found, *steps(module.train(), call)]

    reference = routed()
    wanted = losses(reference, lambda: mse(reference(X), Y))
    plan = autopar.plan(routed(), (X,), loss=mse, loss_args=(Y,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})

    def run(rank: int) -> tuple[list[float], list[str]]:
        module = autopar.compile(routed(), plan)
        found = losses(module, lambda: module(X, Y))
        words = [refused(lambda: read(module.router.term)) for read in READINGS]  # noqa: B023
        twin = copy.deepcopy(module)
        twin(X, Y)
        return found, [*words, refused(lambda: twin.router.term.mean())]

    for found, words in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9)
        assert all("router.term is read, where the model's forward leaves a tensor" in text and "\nhint: " in text for text in words)


class Observing(Tied):
    """Looks at a part by a hook that its first call registers, as models of transformers that return hidden states do."""

    def __init__(self) -> None:
        super().__init__()
        self.observed, self.seen = False, []

    def forward(self, x: Tensor) -> Tensor:
        if not self.observed:
            self.mid.register_forward_hook(lambda part, args, result: self.seen.append(result))
            self.observed = True
        self.seen.clear()
        return super().forward(x) + self.seen[-1]


def test_a_forward_may_register_hooks_in_every_program() -> None:
    """In all but the planned one it was told that they would never be called."""

    def observing() -> Observing:
        torch.manual_seed(0)
        return Observing()

    wanted = [mse(observing()(X[:rows]), Y[:rows]).item() for rows in (8, 2)]
    plan = autopar.plan(observing(), (X,), loss=mse, loss_args=(Y,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})

    def run(rank: int) -> tuple[list[float], list[str]]:
        module = autopar.compile(observing(), plan)
        registers = module.mid.register_forward_hook, module.mid.register_forward_pre_hook, module.mid.register_full_backward_hook
        found = [module(X[:rows], Y[:rows]).item() for rows in (8, 2)]
        return found, [refused(partial(register, print)) for register in registers]

    for found, words in on_ranks(run, 2):
        assert found == pytest.approx(wanted, rel=1e-9) and all("a hook on mid, a part of a compiled module" in text for text in words)


class Kept(Tied):
    """Overrides what ``nn.Module`` does with modes and weights, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, dtype=torch.float64).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()  # and returns nothing, as is often forgotten

    def parameters(self, recurse: bool = True) -> Any:
        return (parameter for name, parameter in self.named_parameters(recurse=recurse) if "norm" not in name)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.mid.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)

    @property
    def width(self) -> Any:
        return super().__getattr__("mid").in_features


def test_what_a_model_does_with_modes_and_weights_is_its_own() -> None:
    """A batch norm that ``train`` keeps in evaluation was trained after ``module.train()``, without a word."""

    def kept() -> Kept:
        torch.manual_seed(0)
        return Kept()

    def tell(module: Any, call: Callable[[], Tensor]) -> list[Any]:
        found = steps(module, call)
        module.eval()
        module.train()
        found += steps(module, call)
        value = call()
        value.backward()
        module.requires_grad_(False)
        module.zero_grad()
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        return [found, module.training, module.norm.training, frozen, [one.grad is None for one in module.parameters()], module.width]

    reference = kept()
    losses, *rest = tell(reference, lambda: mse(reference(X), Y))
    plan = autopar.plan(kept(), (X,), loss=mse, loss_args=(Y,), mesh="2", hardware="cpu-cluster", constraints={"input:x": "S0 R"})

    def run(rank: int) -> list[Any]:
        module = autopar.compile(kept(), plan)
        return tell(module, lambda: module(X, Y))

    for found, *others in on_ranks(run, 2):
        assert found == pytest.approx(losses, rel=1e-9) and others == rest
