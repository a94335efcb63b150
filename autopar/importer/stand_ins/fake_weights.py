"""The user's module with its tensors replaced by fake ones on the cpu, for the time of a capture.

Nothing is copied and nothing is initialised: real, meta, fake and distributed tensors all become shapes on the cpu, which
is the one device where the joint capture keeps every gradient. Ties are kept by identity. On leaving, the module is as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar import torch_compat
from autopar.attributes import exchanged

_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_NUMBERS = bool | int | float


@dataclass
class FakeWeights:
    """What stands in for what.

    Args:
        mode: the fake mode that all stand-ins belong to.
        paths: for each stand-in, by identity, every path at which the module holds its original.
        hooks: for each stand-in, by identity, the hooks on its original's gradient.
        values: of buffers and plain tensor attributes that have some, whole on this rank, by path.
        constants: plain tensor attributes of modules, by path: neither parameters nor buffers, yet part of the model.
        numbers: each module with its path and the numbers and true-or-false attributes it had before it ran.
    """

    mode: Any
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    originals: list[Tensor] = field(default_factory=list)
    paths: dict[int, list[str]] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    numbers: list[tuple[str, nn.Module, dict[str, Any]]] = field(default_factory=list)
    hooks: dict[int, tuple[Callable[..., Any], ...]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)

    def flagged(self) -> bool:
        """Whether the forward has noted in some module that something was done, so that its next call will not do it again."""
        return any(isinstance(number, bool) for _, number, _ in self.changed())

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Numbers and flags that the forward changed in attributes: their path, what they were and what they are, other numbers or None.
        A tensor that is left in such a place is looked at as all that are (``hidden_state``)."""
        for path, part, numbers in self.numbers:
            now = ((name, number, vars(part).get(name)) for name, number in numbers.items())
            yield from ((_path(path, name), was, new) for name, was, new in now if new is not was and isinstance(new, _NUMBERS | None))

    def fake(self, tensor: Tensor, *, train: bool) -> Tensor:
        """The stand-in of a tensor, the same for the same tensor."""
        known = self.stand_ins.get(id(tensor))
        if known is None:
            with self.mode:
                known = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
            trained = train and tensor.requires_grad
            known = nn.Parameter(known, requires_grad=trained) if isinstance(tensor, nn.Parameter) else known.requires_grad_(trained)
            self.stand_ins[id(tensor)] = known
            if trained and tensor._backward_hooks:
                self.hooks[id(known)] = tuple(tensor._backward_hooks.values())
            self.originals.append(tensor)
        return known


@contextmanager
def fake_weights(module: nn.Module, mode: Any, *, train: bool) -> Iterator[FakeWeights]:
    """Replace every parameter, buffer and plain tensor attribute of ``module``; ``train`` keeps what requires grad."""
    weights = FakeWeights(mode)
    undo: list[tuple[dict[str, Any], str, Any]] = []
    added: list[tuple[nn.Module, str]] = []
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    contents = _contents(value for _, before in attributes for name, value in before.items() if name not in _REGISTERED)
    hooks = registered_hooks(module)
    try:
        for prefix, part in module.named_modules():
            for values in (part._parameters, part._buffers):
                for name, tensor in list(values.items()):
                    if tensor is not None:
                        undo.append((values, name, tensor))
                        values[name] = weights.fake(tensor, train=train)
                        weights.paths.setdefault(id(values[name]), []).append(_path(prefix, name))
                        if values is part._buffers and (whole := torch_compat.values_of(tensor)) is not None:
                            weights.values[_path(prefix, name)] = whole
        for prefix, part in module.named_modules():
            for name, value in list(vars(part).items()):
                stand_in = value if name in _REGISTERED else exchanged(value, weights.stand_ins)
                if stand_in is not value:
                    undo.append((vars(part), name, value))
                    vars(part)[name] = stand_in
                elif isinstance(value, Tensor):
                    undo.append((vars(part), name, value))
                    del vars(part)[name]
                    part.register_buffer(name, weights.fake(value, train=False), persistent=False)
                    added.append((part, name))
                    weights.constants[_path(prefix, name)] = value
                    if (whole := torch_compat.values_of(value)) is not None:
                        weights.values[_path(prefix, name)] = whole
        if not train:
            module.eval()
        weights.numbers = [
            (path, part, {name: item for name, item in vars(part).items() if isinstance(item, _NUMBERS)})
            for path, part in module.named_modules()
        ]  # fmt: skip
        yield weights
    finally:
        for part, name in added:
            part._buffers.pop(name, None)
            part._non_persistent_buffers_set.discard(name)
        for values, name, tensor in undo:
            values[name] = tensor
        for part, before in attributes:  # what the forward noted in attributes while it ran on stand-ins is not so
            vars(part).clear()
            vars(part).update(before)
        for container, items in contents:  # nor what it put into lists and dictionaries
            if _held(container) != _held(items):
                container.clear()
                container.update(items) if isinstance(container, (dict, set)) else container.extend(items)
        put_back(hooks)


def _contents(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Lists, dictionaries and sets among values and in one another, each with what it holds."""
    found: dict[int, tuple[Any, Any]] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, deque, dict, set)) and id(value) not in found:
            found[id(value)] = value, dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
            waiting += value.values() if isinstance(value, dict) else value
    return list(found.values())


def _held(container: Any) -> list[int]:
    """What a container holds, by identity: tensors have no truth."""
    items = [one for pair in container.items() for one in pair] if isinstance(container, dict) else container
    return sorted(map(id, items)) if isinstance(container, set) else list(map(id, items))


Hooks = list[tuple[dict[int, Any], dict[int, Any]]]
"""The tables of hooks of modules, each with what was in it."""


def registered_hooks(module: nn.Module) -> Hooks:
    """What ``put_back`` needs: a forward may register hooks in its first call and note in an attribute that it did."""
    tables = (table for part in module.modules() for name, table in vars(part).items() if "_hooks" in name and isinstance(table, dict))
    return [(table, dict(table)) for table in tables]


def put_back(hooks: Hooks) -> None:
    """The hooks as they were."""
    for table, before in hooks:
        if dict(table) != before:
            table.clear()
            table.update(before)


def _path(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
