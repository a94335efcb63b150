"""The weights that a compiled module holds, looked up and checked at each call.

Most calls find everything unchanged. The check is then that the module has the same submodules, and one comparison for each weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.runtime.steps.step import Step
from autopar.torch_compat import lie_as_before, local_of, spec_of

_HINT = "change the model before it is planned: what a compiled module runs is fixed"


class Entered(NamedTuple):
    """Weights that a call takes.

    Args:
        locals: this rank's parts, by tensor name.
        owners: the parameters and buffers that these are parts of.
        trained: those of them whose gradients are wanted, in order.
    """

    locals: dict[str, torch.Tensor]
    owners: dict[str, torch.Tensor]
    trained: list[tuple[str, torch.Tensor]]

    def copy(self) -> Entered:
        """The same for another call, which adds its inputs."""
        return Entered(dict(self.locals), dict(self.owners), list(self.trained))


@dataclass(frozen=True)
class _Call:
    """Record of a call.

    Args:
        places: attributes of a submodule, the kind of a weight among them, its name.
        tensors, trains: the weights there, and whether each required grad.
        specs, parts: how and where they lay.
    """

    step: Step
    differentiates: bool
    entered: Entered
    places: Sequence[tuple[dict[str, Any], str, str]]
    tensors: Sequence[torch.Tensor]
    trains: Sequence[bool]
    specs: Sequence[Any]
    parts: Sequence[torch.Tensor]

    def is_unchanged(self, step: Step, differentiates: bool) -> bool:
        """Whether a call takes the same of the weights."""
        if self.step is not step or self.differentiates != differentiates:
            return False
        there = [attributes[kind].get(name) for attributes, kind, name in self.places if name not in attributes]
        if len(there) != len(self.tensors) or not all(map(is_, there, self.tensors)):
            return False
        return [tensor.requires_grad for tensor in there] == self.trains and lie_as_before(there, self.specs, self.parts)


class HeldWeights:
    """Parameters and buffers of a module, by name.

    Args:
        module: its submodules are to stay what they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parents = [(path, part, dict(part.named_children())) for path, part in module.named_modules()]
        self._children = [children for _, _, children in self._parents]
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._laid: dict[str, Any] = {}
        self._last: dict[int, _Call] = {}
        """Record of each program's last call, by identity of the program."""

    def enter(self, step: Step, *, differentiates: bool) -> Entered:
        """What a call of the step takes. What is computed in a parameter's place (``parametrize``) is laid as planned.

        Raises:
            UsageError: a submodule or a weight is not there any more, or another one is; something was put in the place of a weight that is
                not laid as the plan has it; what is tied was parted; a parameter requires grad that was frozen.
        """
        self.check_submodules()
        last = self._last.get(id(step))
        if last is not None and last.is_unchanged(step, differentiates):
            return last.entered.copy()
        if last is not None:
            self._last.clear()  # records keep tensors alive
        found = self._enter(step, differentiates)
        record = self._record_call(step, differentiates, found)
        if record is not None:
            self._last[id(step)] = record
        return found.copy()

    def _record_call(self, step: Step, differentiates: bool, entered: Entered) -> _Call | None:
        """Record of the call, which the next is compared with; None where something is computed in a weight's place, or laid anew."""
        places, tensors = list[tuple[dict[str, Any], str, str]](), list[torch.Tensor]()
        for name, key in ((name, item.tensor) for item, _ in step.weights for name in (item.name, *item.aliases)):
            part, last = self._owners[name]
            attributes = part.__dict__
            kind = "_parameters" if last in attributes["_parameters"] else "_buffers"
            tensor = attributes[kind].get(last)
            if tensor is None or entered.owners.get(key, tensor) is not tensor:
                return None
            places.append((attributes, kind, last))
            tensors.append(tensor)
        trains = [tensor.requires_grad for tensor in tensors]
        return _Call(step, differentiates, entered, places, tensors, trains, list(map(spec_of, tensors)), list(map(local_of, tensors)))

    def _enter(self, step: Step, differentiates: bool) -> Entered:
        found, laid = Entered({}, {}, []), self._laid
        for item, has_gradient in step.weights:
            name, key = item.name, item.tensor
            tensor = self.find(name)
            lies = spec_of(tensor)
            if lies is None or lies is not laid.get(name):
                tensor = self._lay(step, name, tensor)
            for other in item.aliases:
                if self.find(other) is not tensor:
                    message = f"{name} and {other} are one {item.kind} in the plan, and two in the module now"
                    raise UsageError(message, "keep them tied (write into the one there is), or untie them before the model is planned")
            local = local_of(tensor)
            found.locals[key] = local if item.blocks is None else step.held(item, local)
            found.owners[key] = tensor
            is_parameter = item.kind == "parameter"
            if tensor.requires_grad:
                if has_gradient:
                    found.trained.append((key, tensor))
                elif is_parameter and not item.trained and differentiates:
                    hint = "let it require grad when the model is planned; requires_grad_(False) afterwards freezes it"
                    raise UsageError(f"parameter {name} requires grad, the plan was made with it frozen", hint)
        return found

    def find(self, name: str) -> torch.Tensor:
        """A parameter or buffer.

        DistributedDataParallel leaves a plain attribute in a parameter's place for the time of a call: the DTensor of its own.

        Raises:
            UsageError: it is not there any more.
        """
        owner = self._owners.get(name)
        if owner is None:
            path, _, last = name.rpartition(".")
            try:
                owner = self._owners[name] = self._module.get_submodule(path), last
            except AttributeError:
                self._refuse(name)
        part, last = owner
        attributes = part.__dict__
        if last not in attributes:  # nn.Module looks there itself, at five times the cost
            for kind in ("_parameters", "_buffers"):
                if (tensor := attributes[kind].get(last)) is not None:
                    return tensor
        try:
            return getattr(part, last)
        except AttributeError:
            self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(f"{name} is no longer in the module, the plan has it", _HINT) from None

    def find_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name. Raises UsageError: as of ``check_submodules`` and ``find``."""
        self.check_submodules()
        return {name: self.find(name) for name in names}

    def check_submodules(self) -> None:
        """Raises UsageError: a submodule is not there any more, or another one is."""
        if [part.__dict__["_modules"] for _, part, _ in self._parents] == self._children:
            return
        for path, part, children in self._parents:
            if part.__dict__["_modules"] == children:
                continue
            for name, child in children.items():
                if (now := getattr(part, name, None)) is not child:
                    its, gone = f"{path}.{name}" if path else name, "is no longer in the module"
                    what = gone if now is None else f"was replaced by another module ({type(now).__name__})"
                    raise UsageError(f"{its} ({type(child).__name__}) {what}, the plan has it", _HINT)

    def _lay(self, step: Step, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight that does not lie as it did in the call before."""
        item = step.weight_of[name]
        if isinstance(tensor, DTensor) and item.kind == "parameter" and tensor.device_mesh == step.place.device_mesh:
            is_computed = not isinstance(tensor, nn.Parameter)
            is_whole = item.blocks is not None and all(one.is_replicate() for one in tensor.placements)  # a bias within fully_shard
            tensor = step.laid(item, tensor) if is_computed or is_whole else tensor
        step.check_laid(item, tensor)
        self._laid[name] = spec_of(tensor)
        return tensor
