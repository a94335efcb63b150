"""Equal layers traced once: most of a chain of equal modules is passed over while a model is traced, and put back into the graph.

A chain is a run of modules of one list that a forward runs one after another, each on what the one before returned, with nothing between,
and in which a turn of one or a few modules comes again and again: modules of the same classes with equal settings, equal weights and
buffers that nobody changes, told the very same other arguments. That is seen in a run of the forward on fake tensors, not assumed: a loop
that treats one layer apart gives no chain. Whole numbers that differ in all modules (``layer_idx``) number them: where one is read, as what
decides what a layer does, there is no chain either.

The first two and the last two turns of a chain are run and traced. In the run that finds the chain the other modules return a copy of
their input; in the trace they return the input. Skipped modules carry no weights, because tracing a weight costs as much as tracing an
operator. The graph is the same as that of a full trace, names included. The model is traced in full where the traced layers differ
(``unrolling``), or where anything else reads a skipped weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.importer.layers.equal_layers import turns
from autopar.importer.stand_ins.fake_weights import put_back, registered_hooks

ENDS = 2
"""Turns traced at each end."""
FEWEST = 2
"""Skipped modules, at least, that pay for the run that finds a chain."""
PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Chain:
    """Modules that run one after another in equal turns.

    Args:
        path: of their list.
        modules: of the chain alone, in order.
        first: number in the list of the first of them.
        length: modules in a turn.
        further: where modules return a tuple, what follows that which the next is given: each the place or the name of the argument that is
            handed on, None where it is made.
    """

    path: str
    modules: tuple[nn.Module, ...]
    first: int = 0
    length: int = 1
    further: Further = None

    @property
    def turns(self) -> int:
        return len(self.modules) // self.length

    @property
    def left_out(self) -> range:
        """The turns that are passed over."""
        return range(ENDS, self.turns - ENDS)

    @property
    def modules_left_out(self) -> tuple[nn.Module, ...]:
        return self.modules[ENDS * self.length : (self.turns - ENDS) * self.length]

    def turn_of(self, path: str) -> int | None:
        """The turn that a module or a weight is of."""
        number = self._number(path)
        return None if number is None else number // self.length

    def below(self, path: str) -> tuple[int, str]:
        """What a module or a weight of a turn is within that: the place of its module there, and the rest of the path."""
        number = self._number(path)
        assert number is not None, "a path of the chain"
        return number % self.length, path.removeprefix(f"{self.path}.{self.first + number}")

    def named(self, turn: int, below: tuple[int, str]) -> str:
        """The path of what is that within a turn."""
        return f"{self.path}.{self.first + turn * self.length + below[0]}{below[1]}"

    def _number(self, path: str) -> int | None:
        if not path.startswith(f"{self.path}."):
            return None
        number = path.removeprefix(f"{self.path}.").partition(".")[0]
        place = int(number) - self.first if number.isdecimal() else -1
        return place if 0 <= place < self.turns * self.length else None

    def is_beside(self, other: Chain) -> bool:
        """Whether neither list is in the other."""
        return not f"{self.path}.".startswith(f"{other.path}.") and not f"{other.path}.".startswith(f"{self.path}.")

    def alike(self, plain: Mapping[str, frozenset[int]]) -> bool:
        """Whether what is said of parameters by name is said of those of all turns alike."""
        found: list[dict[tuple[int, str], frozenset[int]]] = [{} for _ in range(self.turns)]
        for name, dims in plain.items():
            if (turn := self.turn_of(name)) is not None:
                found[turn][self.below(name)] = dims
        return all(other == found[0] for other in found)

    @contextmanager
    def running(self, instead: Callable[..., Any]) -> Iterator[None]:
        """Within, the modules left out do this instead."""
        for module in self.modules_left_out:
            module.forward = instead
        try:
            yield
        finally:
            for module in self.modules_left_out:
                del module.forward

    @contextmanager
    def passed_over(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Within, the modules left out return what they are given and hold nothing, but within what is given: the model's own code sees
        all that it has."""
        tables = [table for module in self.modules_left_out for table in (module._parameters, module._buffers, module._modules)]
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

        with self.running(lambda given, *args, **kwargs: _results(given, self.further, (given, *args), kwargs)):
            hold([{} for _ in tables])
            try:
                yield whole
            finally:
                hold(held)


Further = tuple[int | str | None, ...] | None


def _results(made: Any, further: Further, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a module returns that makes only this, and hands on what it is told. Whoever reads what others make beside it is seen."""
    if further is None:
        return made
    return made, *(None if at is None else args[at] if isinstance(at, int) else kwargs[at] for at in further)


Numbers = Mapping[tuple[str, str], Sequence[nn.Module]]
"""By path within a module and name, an attribute that only numbers modules: the parts that have it."""


def find_chains(model: nn.Module, shared: Mapping[int, Sequence[str]], run: Callable[[], object]) -> tuple[Chain, ...]:
    """The chains of ``model``, none in another, those first of which most is passed over.

    Args:
        shared: the paths of each weight, by identity: tied ones have several, those whose gradients go through hooks of their own none.
        run: runs the forward once, on tensors without values.
    """
    found: list[_Watch] = []
    for path, parts in model.named_modules():
        if path and isinstance(parts, nn.ModuleList | nn.Sequential) and len(parts) >= 2 * ENDS + FEWEST:
            modules, numbers = tuple(parts), _numbers(tuple(parts))
            kinds = _kinds(modules, shared, numbers)
            if (chain := _longest(Chain(path, modules), kinds)) is not None:
                found.append(_Watch(chain, kinds[chain.first : chain.first + len(chain.modules)], numbers))
    watches: list[_Watch] = []
    for watch in sorted(found, key=lambda watch: -len(watch.chain.modules_left_out)):
        if all(watch.chain.is_beside(other.chain) for other in watches):
            watches.append(watch)
    if not watches:
        return ()
    with as_before(model) as same, ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch.running())
        run()
    if not same():
        return ()
    return tuple(chain for watch in watches if (chain := watch.seen()) is not None)


def _longest(within: Chain, kinds: Sequence[object]) -> Chain | None:
    """The part of a chain of modules of these kinds of which most is passed over."""
    found = [
        Chain(within.path, within.modules[first : first + length * count], within.first + first, length)
        for first, length, count in turns(kinds)
    ]
    longest = max(found, key=lambda chain: len(chain.modules_left_out), default=None)
    return longest if longest is not None and len(longest.modules_left_out) >= FEWEST else None


def _numbers(modules: Sequence[nn.Module]) -> Numbers:
    """Whole numbers that differ in all parts of a path that have them."""
    found: dict[tuple[str, str], dict[nn.Module, int]] = {}
    for path, part, name, value in ((*at, *item) for module in modules for at in module.named_modules() for item in vars(at[1]).items()):
        if type(value) is int:
            found.setdefault((path, name), {})[part] = value
    return {key: tuple(values) for key, values in found.items() if 1 < len(values) == len(set(values.values()))}


@contextmanager
def _watched(numbers: Numbers) -> Iterator[list[str]]:
    """Within, the names of those attributes that are read or set."""
    names: dict[nn.Module, list[str]] = {}
    for (_, name), parts in numbers.items():
        for part in parts:
            names.setdefault(part, []).append(name)
    read: list[str] = []

    def attribute(name: str) -> property:
        def get(part: nn.Module) -> Any:
            read.append(name)
            return vars(part)[name]

        def put(part: nn.Module, value: Any) -> None:
            read.append(name)
            vars(part)[name] = value

        return property(get, put)

    kinds = {part: type(part) for part in names}
    made: dict[tuple[Any, ...], type] = {}
    try:
        for part, watched in names.items():
            key = kinds[part], *watched
            made[key] = made.get(key) or type(kinds[part].__name__, (kinds[part],), {name: attribute(name) for name in watched})
            part.__class__ = made[key]
        yield read
    finally:
        for part, kind in kinds.items():
            part.__class__ = kind


def _kinds(modules: Sequence[nn.Module], shared: Mapping[int, Sequence[str]], numbers: Numbers) -> list[int]:
    """A number for each module, the same for those that are alike."""
    first: list[tuple[int, nn.Module]] = []
    kinds: list[int] = []
    for place, module in enumerate(modules):
        repeats = _may_repeat(module, shared)
        kind = next((kind for kind, other in first if repeats and _alike(module, other, numbers)), place)
        if repeats and kind == place:
            first.append((kind, module))
        kinds.append(kind)
    return kinds


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


def _may_repeat(module: nn.Module, shared: Mapping[int, Sequence[str]]) -> bool:
    """Whether a module has weights, none of them another's too."""
    return any(True for _ in module.parameters()) and all(len(shared.get(id(value), ())) == 1 for _, value in _held(module))


def _held(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _alike(module: nn.Module, other: nn.Module, numbers: Numbers) -> bool:
    """Whether two modules have equal weights and settings, but for what numbers them."""
    mine, theirs = (
        [(name, tuple(value.shape), value.dtype, value.requires_grad, type(value)) for name, value in _held(part)]
        for part in (module, other)
    )
    parts, others = list(module.named_modules()), list(other.named_modules())
    return (
        mine == theirs
        and [path for path, _ in parts] == [path for path, _ in others]
        and all(_same_settings(path, one, two, numbers) for (path, one), (_, two) in zip(parts, others, strict=True))
    )


def _same_settings(path: str, one: nn.Module, other: nn.Module, numbers: Numbers) -> bool:
    mine, theirs = vars(one), vars(other)
    if type(one) is not type(other) or mine.keys() != theirs.keys() or "forward" in mine:
        return False
    compared = [name for name in mine if name not in ("_parameters", "_modules", "_buffers") and (path, name) not in numbers]
    return all(_same(mine[name], theirs[name]) for name in compared)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if isinstance(one, partial):
        return one.func is other.func and _same(one.args, other.args) and _same(one.keywords, other.keywords)
    return isinstance(one, set) and bool(one == other)


class _Watch(TorchFunctionMode):
    """What happens to the modules of a chain in one run: called once each, in order, on each other's results, nothing between."""

    def __init__(self, chain: Chain, kinds: Sequence[int], numbers: Numbers) -> None:
        super().__init__()
        self.chain, self.modules, self.kinds, self.numbers = chain, chain.modules, kinds, numbers
        self.inside, self.done, self.odd = 0, 0, False
        self.result: Any = None
        self.rests: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.gives: list[bool] = []
        self.furthers: list[Further] = []
        self.read: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, it is seen what happens; the modules left out return a copy of what they are given."""
        handles = []
        for index, module in enumerate(self.modules):
            handles.append(module.register_forward_pre_hook(self._before(index), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        before = [buffer._version for buffer in buffers]
        try:
            with self.chain.running(self.copy), _watched(self.numbers) as self.read, self:
                yield
            self.odd |= [buffer._version for buffer in buffers] != before
        finally:
            for handle in handles:
                handle.remove()

    def copy(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        return _results(given.clone(), self.furthers[-1], (given, *args), kwargs)

    def seen(self) -> Chain | None:
        """The part of it whose turns were told the same beside what the module before returned, and returned the like of that."""
        if self.odd or self.read or self.done < len(self.modules):
            return None
        told: list[int] = []
        for place, rest in enumerate(self.rests):
            told.append(next((kind for kind in dict.fromkeys(told) if _identical(rest, self.rests[kind])), place))
        longest = _longest(self.chain, list(zip(self.kinds, told, self.gives, self.furthers, strict=True)))
        return replace(longest, further=self.furthers[longest.first - self.chain.first]) if longest is not None else None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = not self.inside and 0 < self.done < len(self.modules)
        self.odd |= outside and not _reads(function)
        return function(*args, **(kwargs or {}))

    def _before(self, index: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = args[0] if args else None
            self.odd |= bool(self.inside) or index != self.done or not isinstance(first, Tensor)
            self.odd |= index > 0 and first is not self.result
            self.rests.append((args[1:], dict(kwargs)))
            self.result, self.inside = first, self.inside + 1

        return before

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        given, self.inside = self.result, self.inside - 1
        self.result = results[0] if type(results) is tuple and results else results
        self.odd |= not isinstance(self.result, Tensor) or not isinstance(given, Tensor) or self.result is given
        self.gives.append(not self.odd and self.result.shape == given.shape and self.result.dtype == given.dtype)
        told = list(enumerate(args)) + list(kwargs.items())
        others = results[1:] if type(results) is tuple else None
        self.furthers.append(others and tuple(next((at for at, item in told if item is other is not None), None) for other in others))
        self.done += 1


def _reads(function: Any) -> bool:
    """Whether a torch function only reads what a tensor is: its shape, its dtype."""
    return getattr(function, "__name__", "") == "__get__"


def _identical(one: tuple[tuple[Any, ...], dict[str, Any]], other: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    def same(mine: Any, theirs: Any) -> bool:
        return mine is theirs or (isinstance(mine, PLAIN) and type(mine) is type(theirs) and mine == theirs)

    return (
        len(one[0]) == len(other[0])
        and one[1].keys() == other[1].keys()
        and all(map(same, one[0], other[0]))
        and all(same(one[1][key], other[1][key]) for key in one[1])
    )
