"""Equal layers traced once: most of a chain of equal modules is passed over while a model is traced, and put back into the graph.

A chain is a list of at least ``FEWEST`` modules of one class with equal settings and equal weights that a forward runs one after another,
each on what the one before returned and on the very same other arguments, with nothing between. That is seen in a run of the forward on
fake tensors, not assumed: a loop that treats one layer apart gives no chain. Of a chain the first two and the last two modules are run
and traced; in the run that finds it the others return a copy of what they are given, in the trace that itself. To torch they are modules
without weights then, each of which would cost a trace as much as an operator. The graph is then the same as of a full trace, names
included; where the traced layers turn out not to be alike in it (``unrolling``), or something else reads a weight of the others, which is
an error since the trace has none, the model is traced in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.importer.weights import put_back, registered_hooks

FEWEST = 6
"""Modules from which a chain is worth the run that finds it."""
ENDS = 2
"""Modules traced at each end."""
PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Chain:
    """Equal modules that run one after another, by the path of their list."""

    path: str
    modules: tuple[nn.Module, ...]

    @property
    def left_out(self) -> range:
        return range(ENDS, len(self.modules) - ENDS)

    def alike(self, plain: Mapping[str, frozenset[int]]) -> bool:
        """Whether what is said of parameters by name is said of those of all the modules alike."""
        found: list[dict[str, frozenset[int]]] = [{} for _ in self.modules]
        for name, dims in plain.items():
            number, _, key = name.removeprefix(f"{self.path}.").partition(".")
            if name.startswith(f"{self.path}.") and number.isdecimal() and int(number) < len(found):
                found[int(number)][key] = dims
        return all(other == found[0] for other in found)

    @contextmanager
    def running(self, instead: Callable[..., Any]) -> Iterator[None]:
        """Within, the modules left out do this instead."""
        left_out = [self.modules[index] for index in self.left_out]
        for module in left_out:
            module.forward = instead  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module in left_out:
                del module.forward

    @contextmanager
    def passed_over(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Within, the modules left out return what they are given and hold nothing, but within what is given: the model's own code sees
        all that it has."""
        tables = [table for index in self.left_out for table in (self.modules[index]._parameters, self.modules[index]._modules)]
        held = [dict(table) for table in tables]

        def hold(contents: Sequence[Mapping[str, Any]]) -> None:
            for table, items in zip(tables, contents, strict=True):
                table.clear()
                table.update(items)

        @contextmanager
        def whole() -> Iterator[None]:
            hold(held)
            try:
                yield
            finally:
                hold([{} for _ in tables])

        with self.running(_first):
            hold([{} for _ in tables])
            try:
                yield whole
            finally:
                hold(held)


def _first(given: Any, *args: Any, **kwargs: Any) -> Any:
    return given


def _copy(given: Any, *args: Any, **kwargs: Any) -> Any:
    return given.clone()


def find_chain(model: nn.Module, shared: Mapping[int, Sequence[str]], run: Callable[[], object]) -> Chain | None:
    """The longest chain of ``model``, if it has one.

    Args:
        shared: the paths of each weight, by identity: tied ones have several, those whose gradients go through hooks of their own none.
        run: runs the forward once, on tensors without values.
    """
    lists = [(path, tuple(part)) for path, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    lists = [(path, parts) for path, parts in lists if path and len(parts) >= FEWEST and _alike(parts, shared)]
    if not lists:
        return None
    path, modules = max(lists, key=lambda item: len(item[1]))
    watch, chain = _Watch(modules), Chain(path, modules)
    with as_before(model) as same, chain.running(_copy), watch.hooked():
        run()
    return chain if watch.is_chain and same() else None


@contextmanager
def as_before(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Undo what a run changes in the attributes of modules, such as tables kept for the next call; gives whether there was none."""
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in model.modules()]
    hooks = registered_hooks(model)

    def same(part: nn.Module, values: Mapping[str, Any], buffers: Mapping[str, Any]) -> bool:
        return all(
            one.keys() == other.keys() and all(value is other[name] for name, value in one.items())
            for one, other in ((vars(part), values), (part._buffers, buffers))
        )

    unchanged: list[bool] = []
    try:
        yield lambda: all(unchanged)
    finally:
        for part, values, buffers in before:
            unchanged.append(same(part, values, buffers))
            if not unchanged[-1]:
                vars(part).clear()
                vars(part).update(values)
                part._buffers.clear()
                part._buffers.update(buffers)
        put_back(hooks)


def _alike(parts: Sequence[nn.Module], shared: Mapping[int, Sequence[str]]) -> bool:
    first = list(parts[0].named_modules())
    if any(True for _ in parts[0].buffers()) or not any(True for _ in parts[0].parameters()):
        return False
    for part in parts:
        weights = list(part.named_parameters(remove_duplicate=False))
        if any(len(shared.get(id(weight), ())) != 1 for _, weight in weights):
            return False
        if [_signature(name, weight) for name, weight in weights] != [
            _signature(name, weight) for name, weight in parts[0].named_parameters(remove_duplicate=False)
        ]:
            return False
        named = list(part.named_modules())
        if [name for name, _ in named] != [name for name, _ in first]:
            return False
        if not all(_same_settings(one, other) for (_, one), (_, other) in zip(first, named, strict=True)):
            return False
    return True


def _signature(name: str, weight: Tensor) -> tuple[Any, ...]:
    return name, tuple(weight.shape), weight.dtype, weight.requires_grad


def _same_settings(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = vars(one), vars(other)
    if type(one) is not type(other) or mine.keys() != theirs.keys() or "forward" in mine:
        return False
    return all(_same(mine[name], theirs[name]) for name in mine if name not in ("_parameters", "_modules", "_buffers"))


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, dict | set) and not one and not other  # hooks: none on either


class _Watch(TorchFunctionMode):
    """What happens to the modules of a list in one run: called once each, in order, on each other's results, nothing between."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.inside, self.done, self.odd = 0, 0, False
        self.result: Any = None
        self.rest: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    @property
    def is_chain(self) -> bool:
        return not self.odd and self.done == len(self.modules)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = []
        for index, module in enumerate(self.modules):
            handles.append(module.register_forward_pre_hook(self._before(index), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = not self.inside and 0 < self.done < len(self.modules)
        self.odd |= (outside and not _reads(function)) or _draws(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _before(self, index: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = args[0] if args else None
            self.odd |= bool(self.inside) or index != self.done or not isinstance(first, Tensor)
            if index == 0:
                self.rest = args[1:], dict(kwargs)
            else:
                self.odd |= first is not self.result or not _identical((args[1:], kwargs), self.rest)
            self.result, self.inside = first, self.inside + 1

        return before

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = self.result
        alike = isinstance(result, Tensor) and isinstance(given, Tensor) and result.shape == given.shape and result.dtype == given.dtype
        self.odd |= not alike or result is given
        self.result, self.inside, self.done = result, self.inside - 1, self.done + 1


def _reads(function: Any) -> bool:
    """Whether a torch function only reads what a tensor is: its shape, its dtype."""
    return getattr(function, "__name__", "") == "__get__"


def _draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function is a dropout that drops something: each has a seed of its own, counted over the whole trace."""
    if "dropout" not in getattr(function, "__name__", ""):
        return False
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(share) and bool(kwargs.get("training", args[2] if len(args) > 2 else True))


def _identical(one: tuple[tuple[Any, ...], dict[str, Any]], other: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    def same(mine: Any, theirs: Any) -> bool:
        return mine is theirs or (isinstance(mine, PLAIN) and type(mine) is type(theirs) and mine == theirs)

    return (
        len(one[0]) == len(other[0])
        and one[1].keys() == other[1].keys()
        and all(map(same, one[0], other[0]))
        and all(same(one[1][key], other[1][key]) for key in one[1])
    )
