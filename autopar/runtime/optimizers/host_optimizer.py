"""``HostOptimizer``: an optimizer of torch's, or of one's own, whose states lie on the host for the parameters that a plan says.

States of a parameter come to the device, are stepped there by the optimizer's own code, and go back. There is room for two parameters:
while one is stepped, or goes back, the next comes. So the numbers are those of the optimizer alone. On CPUs, states are copied too.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import UsageError
from autopar.runtime.ranks.offloading import HostMemory, stream_of

Pair = tuple[dict[str, Any], nn.Parameter]
"""A group of options, and a parameter in it."""
State = dict[str, Any]
MARK = "states_on_host"
"""Attribute of a parameter whose states lie on the host."""


class PlainOptimizerWarning(UserWarning):
    """An optimizer keeps states on the device that the plan has on the host."""


def is_hosted(parameter: Any) -> bool:
    """Whether a plan keeps the states of a parameter on the host."""
    return bool(getattr(parameter, MARK, False))


def mark_hosted(parameters: Iterable[nn.Parameter]) -> None:
    """Says of parameters that their states lie on the host. An optimizer that keeps them on the device is warned of, once."""
    for parameter in parameters:
        setattr(parameter, MARK, True)
        if not _Watch.begun:
            _Watch.begun = True
            register_optimizer_step_pre_hook(_warn_of_plain)


class _Watch:
    """Whether optimizers are looked at, and whether one was warned of."""

    begun = warned = False


def _warn_of_plain(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _Watch.warned or isinstance(optimizer, HostOptimizer) or getattr(optimizer, "in_host_optimizer", False):
        return
    if any(is_hosted(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        _Watch.warned = True
        name = type(optimizer).__name__
        hint = f"make it as autopar.HostOptimizer(module.parameters(), {name}, lr=...)"
        message = f"{name} keeps states on the device that the plan has on the host: memory may not suffice"
        warnings.warn(f"{message}\nhint: {hint}", PlainOptimizerWarning, stacklevel=3)


class HostOptimizer(torch.optim.Optimizer):
    """Steps parameters as ``make`` does; states of those that the plan says lie on the host between steps, in pinned memory beside CUDA.

    It is an optimizer as any other: learning rate schedulers, ``GradScaler``, ``state_dict`` and torch's distributed checkpoints take it.

    Args:
        parameters: of the module, or groups of them with options of their own, as optimizers take them.
        make: an optimizer class, called with ``parameters`` and ``options``. It steps a parameter from the parameter's own gradient and
            state alone.

    Raises:
        UsageError: the optimizer steps with a closure that it calls several times.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> optimizer = HostOptimizer([weight], torch.optim.SGD, lr=0.5)
    >>> weight.sum().backward(); optimizer.step(); weight.tolist()
    [0.5, 0.5]
    """

    at_once = 1
    """Parameters whose states pass through the device together."""

    def __init__(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> None:  # fmt: skip
        self.stepper = make(parameters, **options)
        self.stepper.in_host_optimizer = True
        closure = inspect.signature(self.stepper.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(self.stepper).__name__} calls a closure, over all parameters at once",
                "use an optimizer that steps each parameter by itself, or plan without offload",
            )
        super().__init__(self.stepper.param_groups, self.stepper.defaults)
        for parameter, state in self.stepper.state.items():
            self.state[parameter] = self._placed(parameter, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients that the parameters hold. On a GPU it ends when the states are back.

        Raises:
            UsageError: the optimizer keeps numbers of a group of parameters, which steps of single ones would change.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(group, parameter) for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        hosted = sorted((pair for pair in pairs if is_hosted(pair[1])), key=lambda pair: -self._size(pair[1]))
        units = [hosted[place : place + self.at_once] for place in range(0, len(hosted), self.at_once)]
        passages = [_Passage([self.state[parameter] for _, parameter in unit], unit[0][1].device) for unit in units]
        for passage in passages[:2]:
            passage.come()
        self._step_together([pair for pair in pairs if not is_hosted(pair[1])])
        for place, (unit, passage) in enumerate(zip(units, passages, strict=True)):
            passage.arrive()
            self._step_together(unit)
            passage.leave()
            if place:
                passages[place - 1].end()
                if place + 1 < len(passages):
                    passages[place + 1].come()
        for passage in passages[-1:]:
            passage.end()
            passage.synchronize()
        for parameter in [parameter for parameter, state in self.state.items() if not state]:
            del self.state[parameter]
        return loss

    def _size(self, parameter: nn.Parameter) -> int:
        """Bytes of its states, by which plans order what passes; before there are any, of itself."""
        return sum(value.nbytes for value in _large(self.state.get(parameter, {})).values()) or parameter.nbytes

    def _step_together(self, pairs: Sequence[Pair]) -> None:
        """Steps parameters whose states are on the device."""
        if not pairs:
            return
        stepped = {parameter: self._begin(parameter) for _, parameter in pairs}
        views = [(group, [stepped[parameter] for own, parameter in pairs if own is group]) for group in self.param_groups]
        given = [(group, {**group, "params": mine}) for group, mine in views if mine]
        self.stepper.param_groups = [view for _, view in given]
        self.stepper.state = defaultdict(dict, {stepped[parameter]: self.state[parameter] for _, parameter in pairs})
        self.stepper.step()
        for group, view in given:
            changed = [key for key in group if key != "params" and view[key] is not group[key]]
            if changed and is_hosted(pairs[0][1]):
                raise UsageError(
                    f"{type(self.stepper).__name__} keeps {changed[0]!r} for a group of parameters, and these are stepped one by one",
                    "use an optimizer that steps each parameter by itself, or plan without offload",
                )
            group.update((key, view[key]) for key in changed)
        for _, parameter in pairs:
            self._end(parameter, stepped[parameter])
        self.stepper.param_groups, self.stepper.state = self.param_groups, defaultdict(dict)

    def _begin(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is stepped for a parameter, with its gradient."""
        return parameter

    def _end(self, parameter: nn.Parameter, stepped: nn.Parameter) -> None:
        """Takes over what was stepped for a parameter."""

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        """That of a parameter's states, where it is not the one that torch gives them."""
        return None

    def _placed(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> State:
        """A state with its large tensors where they lie between steps."""
        return {**state, **{key: self._put(parameter, value) for key, value in _large(state).items()}}

    def _put(self, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        own = self._dtype(parameter) or parameter.dtype
        dtype = own if value.is_floating_point() and parameter.is_floating_point() else value.dtype
        if not is_hosted(parameter):
            return value.to(parameter.device, dtype)
        return _room(value, dtype, parameter.device).copy_(value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` gave, or that of ``make``'s optimizer. States that lie on the host never come to the device for it."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        placed = {number: one for number, one in zip(saved, parameters, strict=False) if is_hosted(one) or self._dtype(one) is not None}
        left = {number: dict(state) for number, state in state_dict["state"].items()}
        taken = [(placed[number], key, left[number].pop(key)) for number in placed if number in left for key in _large(left[number])]
        super().load_state_dict({**state_dict, "state": left})
        for parameter, key, value in taken:
            self.state[parameter][key] = self._put(parameter, value)
        self.stepper.__setstate__({"state": self.state, "param_groups": self.param_groups})


class _Passage:
    """States on their way through the device: they come, are stepped, leave, and are gone.

    Args:
        states: of the parameters that pass together.
        device: the parameters'.
    """

    def __init__(self, states: Sequence[State], device: torch.device) -> None:
        self.states, self.device = states, device
        self.rooms: list[State] = [{} for _ in states]
        self.passing: list[State] = [{} for _ in states]
        self.came: Any = None
        self.went: Any = None

    def come(self) -> None:
        """Begins the copies to the device, into memory of the stream that copies."""
        self.rooms = [_large(state) for state in self.states]
        with self._beside(to_host=False):
            for rooms, passing in zip(self.rooms, self.passing, strict=True):
                for key, room in rooms.items():
                    passing[key] = torch.empty_like(room, device=self.device).copy_(room, non_blocking=True)
        self.came = self._record(to_host=False)

    def arrive(self) -> None:
        """The current stream waits for the copies; the states are on the device."""
        if self.came is not None:
            torch.cuda.current_stream(self.device).wait_event(self.came)
        for state, passing in zip(self.states, self.passing, strict=True):
            state.update(passing)

    def leave(self) -> None:
        """Begins the copies back, behind what the current stream was given so far."""
        self.passing = [_large(state) for state in self.states]
        made = [
            {key: rooms[key] if key in rooms else _room(value, value.dtype, self.device) for key, value in passing.items()}
            for rooms, passing in zip(self.rooms, self.passing, strict=True)
        ]
        if self.device.type == "cuda":
            stream_of(self.device, to_host=True).wait_stream(torch.cuda.current_stream(self.device))
        with self._beside(to_host=True):
            for state, rooms, passing in zip(self.states, made, self.passing, strict=True):
                for key, value in passing.items():
                    state[key] = rooms[key].copy_(value, non_blocking=True)
        self.went = self._record(to_host=True)

    def end(self) -> None:
        """The device's memory is given up, for the next that comes and for what the current stream does."""
        if self.went is not None:
            torch.cuda.current_stream(self.device).wait_event(self.went)
            stream_of(self.device, to_host=False).wait_event(self.went)
        self.passing = []

    def synchronize(self) -> None:
        """The host waits for the copies to it."""
        if self.went is not None:
            self.went.synchronize()

    def _beside(self, *, to_host: bool) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream_of(self.device, to_host)) if self.device.type == "cuda" else nullcontext()

    def _record(self, *, to_host: bool) -> Any:
        return stream_of(self.device, to_host).record_event() if self.device.type == "cuda" else None


def _large(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state that lie where the plan says. Counters of steps have no dims, and stay where the optimizer has them."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() > 0}


def _room(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host for a tensor of a parameter on ``device``; a DTensor's for its local part."""
    with HostMemory.allocate():
        return torch.empty_like(value, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
