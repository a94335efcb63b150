"""Elementwise optimizers of torch step the parts of DTensors that a rank holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from autopar import torch_compat
from autopar.torch_compat import local_steps
from autopar.torch_compat.local_steps import ELEMENTWISE
from autopar.verify.launch import run_ranks

STEPS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {"t0": 1}, "NAdam": {}, "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip
"""Options by optimizer, so that it keeps all that it may."""
FORMS: list[tuple[str, dict[str, bool]]] = [
    *((kind, {"foreach": foreach}) for kind in STEPS for foreach in (False, True)), *((kind, {}) for kind in STEPS),
    *((kind, {"fused": True}) for kind in ("Adagrad", "Adam", "AdamW", "SGD")),
]  # fmt: skip
OTHERS = {"Adafactor", "LBFGS", "Muon", "Optimizer", "SparseAdam"}
"""Those of torch that look at more than one element, or at sparse gradients."""
PLACES = ([Shard(0)], [Replicate()], [Shard(1)], [Shard(0)], None)
"""Of parameters on 2 ranks: the fourth in unequal parts, the last a plain tensor."""


def test_every_elementwise_optimizer_of_torch_is_stepped_so() -> None:
    kinds = {name for name, item in vars(torch.optim).items() if isinstance(item, type) and issubclass(item, torch.optim.Optimizer)}
    assert kinds - OTHERS == set(STEPS)

    def rank_main(rank: int) -> list[str]:
        torch_compat.step_local_parts()
        functions = {kind: "adam" if kind == "AdamW" else kind.lower() for kind in STEPS}
        assert set(functions.values()) == set(ELEMENTWISE)
        called = {kind: inspect.unwrap(getattr(torch.optim, kind).step).__globals__[name] for kind, name in functions.items()}
        return [kind for kind, step in called.items() if step.__code__.co_name != "stepped"]

    assert run_ranks(rank_main, 1) == [[]]


class Noticing(torch_compat.dispatch_mode()):  # type: ignore[misc]
    """The operators that DTensors are given to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch_compat.leaves_of((args, kwargs or {}))
        if operator is not torch.ops.aten.detach.default and any(isinstance(item, DTensor) for item in given):
            self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


def plain_and_placed() -> tuple[list[nn.Parameter], list[nn.Parameter], Callable[[Sequence[Any], int, Sequence[Any]], None]]:
    """The same values twice, as plain parameters and as ``PLACES`` says, and a function that sets gradients of a turn."""
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.arange(float(rows * 2)).view(rows, 2) for rows in (4, 2, 2, 3, 2)]

    def laid(tensor: Tensor, place: Any) -> Tensor:
        return tensor.clone() if place is None else distribute_tensor(tensor.clone(), mesh, place)

    def set_gradients(parameters: Sequence[Any], turn: int, places: Sequence[Any]) -> None:
        for tensor, value, place in zip(parameters, whole, places, strict=False):
            tensor.grad = laid(torch.cos(value) + turn, place)

    placed = [nn.Parameter(laid(tensor, place)) for tensor, place in zip(whole, PLACES, strict=True)]
    return [nn.Parameter(tensor.clone()) for tensor in whole], placed, set_gradients


def whole_of(parameters: Sequence[Any]) -> list[Tensor]:
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in parameters]


def wrong(kind: str, form: dict[str, bool]) -> Iterator[str]:
    """What three steps of DTensors do otherwise than three of plain parameters."""
    plain, placed, set_gradients = plain_and_placed()
    options = {"lr": 0.1, **STEPS[kind], **form}
    ours, other = (getattr(torch.optim, kind)(item, **options) for item in (placed, plain))
    for turn in range(3):
        set_gradients(plain, turn, [None] * len(PLACES))
        set_gradients(placed, turn, PLACES)
        versions = [parameter._version for parameter in placed]
        other.step()
        with Noticing() as noticing:
            ours.step()
        if turn and noticing.seen:  # the first makes the states
            yield f"dispatched {noticing.seen}"
        if any(parameter._version == version for parameter, version in zip(placed[:-1], versions, strict=False)):
            yield "does not say that it was changed"
    if not all(map(torch.equal, plain, whole_of(placed))):
        yield "other values"
    states = [value for parameter in placed[:-1] for value in ours.state[parameter].values() if isinstance(value, Tensor)]
    if not all(isinstance(value, DTensor) or value.dim() == 0 for value in states):
        yield "plain states"


def test_a_step_is_of_local_parts() -> None:
    def rank_main(rank: int) -> list[str]:
        torch_compat.teach_dtensors()
        return [f"{kind} {form}: {text}" for kind, form in FORMS for text in wrong(kind, form)]

    assert run_ranks(rank_main, 2) == [[]] * 2


@pytest.mark.parametrize("place", [Replicate(), Shard(1)], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_gradient_placed_otherwise_is_left_to_the_dispatcher(kind: str, place: Any) -> None:
    def rank_main(rank: int) -> bool:
        torch_compat.teach_dtensors()
        plain, placed, set_gradients = plain_and_placed()
        for parameters, places in ((plain, [None] * len(PLACES)), (placed, [[place], *PLACES[1:]])):
            optimizer = getattr(torch.optim, kind)(parameters, **{"lr": 0.1, **STEPS[kind]})
            for turn in range(2):
                set_gradients(parameters, turn, places)
                optimizer.step()
        return all(map(torch.equal, plain, whole_of(placed)))

    assert run_ranks(rank_main, 2) == [True] * 2


@pytest.mark.parametrize("place", [Replicate(), Partial()], ids=str)
def test_what_is_still_a_sum_over_ranks_is_left_to_the_dispatcher(place: Any) -> None:
    def rank_main(rank: int) -> float:
        torch_compat.teach_dtensors()
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.full((2,), 4.0), mesh, [place]))
        weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        torch.optim.Adam([weight], lr=0.25).step()
        return weight.full_tensor()[0].item()

    assert run_ranks(rank_main, 2) == [3.75 if place.is_replicate() else 7.75] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_of_gradients_steps_local_parts(fused: bool) -> None:
    """It hands a fused optimizer the scale, by which that divides; a step with an infinite gradient on one rank is left out on all."""

    def rank_main(rank: int) -> tuple[bool, list[str], list[float]]:
        torch_compat.teach_dtensors()
        plain, placed, set_gradients = plain_and_placed()
        plain, placed = plain[:-1], placed[:-1]  # torch's scaler does not take plain tensors beside DTensors
        scales: list[float] = []
        seen: list[str] = []
        for parameters, places in ((plain, [None] * 4), (placed, PLACES[:-1])):
            optimizer, scaler = torch.optim.AdamW(parameters, lr=0.1, fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
            for turn in range(3):
                scaler.scale(torch.ones(()))  # makes the scale
                set_gradients(parameters, turn, places)
                if turn == 2:
                    gradient = parameters[0].grad
                    if isinstance(gradient, DTensor):
                        gradient.to_local()[-1] = float("inf") if rank == 1 else 1.0
                    else:
                        gradient[-1] = float("inf")
                with Noticing() as noticing:
                    scaler.step(optimizer)
                scaler.update()
                seen += noticing.seen
            scales.append(scaler.get_scale())
        updated = [name for name in seen if "_fused" in name or "addcdiv" in name]
        return all(map(torch.equal, plain, whole_of(placed))), updated, scales

    assert run_ranks(rank_main, 2) == [(True, [], [2.0, 2.0])] * 2


def test_sums_over_ranks_are_not_stepped_so() -> None:
    """An optimizer's step of a part of a sum is no part of the step of the sum."""

    def rank_main(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,))
        found = []
        for place in (Replicate(), Partial()):
            tensors = [DTensor.from_local(torch.ones(3), mesh, [place]) for _ in range(4)]
            found.append(local_steps._lie_alike([[tensor] for tensor in tensors]))
        return found

    assert run_ranks(rank_main, 2) == [[True, False]] * 2
