"""Equal layers traced once: most of a chain of equal modules is passed over while a model is traced, and put back into the graph.

A chain is a list of at least ``FEWEST`` modules of one class with equal settings and equal weights that a forward runs one after another,
each on what the one before returned and on the very same other arguments, with nothing between. That is seen in a run of the forward on
fake tensors, not assumed: a loop that treats one layer apart gives no chain. Of a chain the first two and the last two modules are run
and traced; in the run that finds it the others return a copy of what they are given, in the trace that itself. The graph is then the same
as of a full trace, names included; where the traced layers turn out not to be alike in it (``unrolled`` gives None), the model is traced
in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.graph import Graph, GraphInput, GraphOutput, Op
from autopar.importer.groups import SEED_AT
from autopar.importer.weights import put_back, registered_hooks

FEWEST = 6
"""Modules from which a chain is worth the run that finds it."""
ENDS = 2
"""Modules traced at each end."""
LOSS_GRADIENT = ("aten.full.default", ((), 1.0))
"""Target and arguments of the operator that begins a backward from a loss."""
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

    def passed_over(self) -> AbstractContextManager[None]:
        """Within, the modules left out return what they are given."""
        return self.running(_first)


def _first(given: Any, *args: Any, **kwargs: Any) -> Any:
    return given


def _copy(given: Any, *args: Any, **kwargs: Any) -> Any:
    return given.clone()


# --- finding ----------------------------------------------------------------------------------------------------------


def find_chain(model: nn.Module, shared: Mapping[int, Sequence[str]], run: Callable[[], object]) -> Chain | None:
    """The longest chain of ``model``, if it has one.

    Args:
        shared: the paths of each weight, by identity: tied ones have several.
        run: runs the forward once, on tensors without values.
    """
    lists = [(path, tuple(part)) for path, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    lists = [(path, parts) for path, parts in lists if path and len(parts) >= FEWEST and _alike(parts, shared)]
    if not lists:
        return None
    path, modules = max(lists, key=lambda item: len(item[1]))
    watch, chain = _Watch(modules), Chain(path, modules)
    with _as_before(model) as same, chain.running(_copy), watch.hooked():
        run()
    return chain if watch.is_chain and same() else None


@contextmanager
def _as_before(model: nn.Module) -> Iterator[Callable[[], bool]]:
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


# --- putting back -----------------------------------------------------------------------------------------------------


def unrolled(graph: Graph, chain: Chain) -> Graph | None:
    """The graph with the modules left out; None where those traced are not alike in it, or are read from outside."""
    made = _Unrolling(graph, chain)
    return made.run() if made.sound() else None


class _Unrolling:
    """The second module of a chain is the pattern; the third traced one, by its number in the whole chain, is its echo."""

    def __init__(self, graph: Graph, chain: Chain) -> None:
        self.graph, self.chain = graph, chain
        count = len(chain.modules)
        self.numbers = [*range(ENDS), *range(count - ENDS, count)]
        self.repeats = [[op for op in graph.ops if _under(op.module, self._prefix(number))] for number in self.numbers]
        self.home = {tensor: slot for slot, ops in enumerate(self.repeats) for op in ops for tensor in op.outputs}
        self.key: dict[str, Any] = {
            tensor: (place, index) for ops in self.repeats for place, op in enumerate(ops) for index, tensor in enumerate(op.outputs)
        }
        for item in graph.inputs:
            for slot, number in enumerate(self.numbers):
                if item.kind == "parameter" and _under(item.name, self._prefix(number)):
                    self.home[item.tensor], self.key[item.tensor] = slot, item.name.removeprefix(self._prefix(number))
        self.at = {(self.home[tensor], key): tensor for tensor, key in self.key.items()}

    def _prefix(self, number: int) -> str:
        return f"{self.chain.path}.{number}"

    def sound(self) -> bool:
        """Whether pattern and echo are alike, read only themselves, neighbours and what all read, and are read by nobody else."""
        pattern, echo = ([self._row(op, slot) for op in self.repeats[slot]] for slot in (1, 2))
        if pattern != echo or not pattern or any(op.target in SEED_AT for op in self.repeats[1]):
            return False
        within = {op.name for ops in self.repeats for op in ops}
        if any(self.home.get(tensor) in (1, 2) for op in self.graph.ops if op.name not in within for tensor in op.inputs):
            return False
        given = {item.name: item.tensor for item in self.graph.inputs}
        gradients: list[list[Any]] = [[], []]
        for output in self.graph.outputs:
            home = self.home.get(output.tensor)
            named = given[output.name] if output.kind != "output" else ""
            if home not in (1, 2) and self.home.get(named) not in (1, 2):
                continue
            if output.kind != "gradient" or home is None or self.home.get(named) != home:
                return False
            gradients[home - 1].append((self.key[output.tensor], self.key[named]))
        return sorted(gradients[0], key=repr) == sorted(gradients[1], key=repr)

    def _row(self, op: Op, slot: int) -> tuple[Any, ...]:
        reads = []
        for tensor in op.inputs:
            home = self.home.get(tensor)
            reads.append(("all", tensor) if home is None else (home - slot, self.key[tensor]))
            if home is not None and abs(home - slot) > 1:
                return ("far", op.name)
        shapes = tuple((self.graph.tensors[t].shape, self.graph.tensors[t].dtype) for t in (*op.inputs, *op.outputs))
        module = op.module.removeprefix(self._prefix(self.numbers[slot]))
        return op.target, op.args, op.kwargs, op.phase, module, op.location, tuple(reads), shapes

    def run(self) -> Graph | None:
        ops: list[Op] = []
        begun: set[str] = set()
        starts = {"forward": self._first_of(2, "forward"), "backward": self._first_of(1, "backward")}
        for op in self.graph.ops:
            if op.name == starts[op.phase] and op.phase not in begun:
                begun.add(op.phase)
                order = self.chain.left_out if op.phase == "forward" else reversed(self.chain.left_out)
                ops += [self._copy(one, number) for number in order for one in self.repeats[1] if one.phase == op.phase]
            ops.append(self._rewired(op))
        return self._named(ops)

    def _first_of(self, slot: int, phase: str) -> str:
        return next((op.name for op in self.repeats[slot] if op.phase == phase), "")

    def _tensor(self, tensor: str, slot: int, number: int) -> str:
        """What the module ``number`` reads where the one traced in ``slot`` reads ``tensor``."""
        home = self.home.get(tensor)
        return tensor if home is None else self._named_at(self.key[tensor], number + home - slot)

    def _named_at(self, key: Any, number: int) -> str:
        if number in self.numbers:
            return self.at[self.numbers.index(number), key]
        if isinstance(key, str):
            return self._prefix(number) + key
        return f"{self.at[1, key]}~{number}"  # until names are given anew

    def _copy(self, op: Op, number: int) -> Op:
        return replace(
            op, name=f"{op.name}~{number}", inputs=tuple(self._tensor(tensor, 1, number) for tensor in op.inputs),
            outputs=tuple(self._tensor(tensor, 1, number) for tensor in op.outputs),
            module=self._prefix(number) + op.module.removeprefix(self._prefix(self.numbers[1])),
        )  # fmt: skip

    def _rewired(self, op: Op) -> Op:
        slot = next((slot for slot in (1, 2) for tensor in op.outputs if self.home.get(tensor) == slot), None)
        if slot is None:
            return op
        return replace(op, inputs=tuple(self._tensor(tensor, slot, self.numbers[slot]) for tensor in op.inputs))

    def _named(self, ops: Sequence[Op]) -> Graph | None:
        """Names as a trace gives them, counted in the order of the operators; None where the order does not hold."""
        graph = self.graph
        taken = {item.tensor for item in graph.inputs}
        new: dict[str, str] = {name: name for name in taken}
        tensors = {name: graph.tensors[name] for name in graph.tensors if name in taken}
        counters: dict[str, int] = {}
        renamed: list[Op] = []
        first = next((op for op in ops if op.phase == "backward"), None)
        if first is not None and (first.target, first.args) == LOSS_GRADIENT:  # it is named before all others
            new[first.outputs[0]] = fresh("full", counters, taken)
            tensors[new[first.outputs[0]]] = replace(graph.tensors[first.outputs[0]], name=new[first.outputs[0]])
        for op in ops:
            if op is first and op.outputs[0] in new:
                renamed.append(replace(op, name=new[op.outputs[0]], outputs=(new[op.outputs[0]],)))
                continue
            if not all(tensor in new for tensor in op.inputs):
                return None
            name = fresh(op.target.split(".")[1].lstrip("_"), counters, taken)
            outputs = tuple(f"{name}:{index}" if index else name for index in range(len(op.outputs)))
            for old, now in zip(op.outputs, outputs, strict=True):
                new[old] = now
                tensors[now] = replace(graph.tensors[old.partition("~")[0]], name=now)
            renamed.append(replace(op, name=name, inputs=tuple(new[tensor] for tensor in op.inputs), outputs=outputs))
        outputs_ = [replace(output, tensor=new[output.tensor]) for output in self._outputs()]
        inputs = tuple(self._in_blocks(item, tensors) for item in graph.inputs)
        return replace(graph, tensors=tensors, inputs=inputs, ops=tuple(renamed), outputs=tuple(outputs_))

    def _in_blocks(self, item: GraphInput, tensors: dict[str, Tensor]) -> GraphInput:
        """A parameter of a module left out, in blocks where the pattern's is; ``tensors`` gets its shape."""
        number = next((number for number in self.chain.left_out if _under(item.name, self._prefix(number))), None)
        if number is None:
            return item
        pattern = self.at.get((1, item.name.removeprefix(self._prefix(number))))
        blocks = next((other.blocks for other in self.graph.inputs if other.tensor == pattern), None)
        if blocks is not None:
            tensors[item.tensor] = replace(tensors[item.tensor], shape=blocks.shape(tensors[item.tensor].shape))
        return replace(item, blocks=blocks)

    def _outputs(self) -> list[GraphOutput]:
        """The outputs with the gradients of the modules left out, in the order of what they are gradients of."""
        order = {item.name: index for index, item in enumerate(self.graph.inputs)}
        given: dict[str, GraphInput] = {item.name: item for item in self.graph.inputs}
        own = [output for output in self.graph.outputs if output.kind == "gradient" and self.home.get(output.tensor) == 1]
        added = [
            GraphOutput(self._tensor(output.tensor, 1, number), "gradient", self._named_at(self.key[given[output.name].tensor], number))
            for number in self.chain.left_out
            for output in own
        ]
        gradients = [output for output in self.graph.outputs if output.kind == "gradient"] + added
        others = [output for output in self.graph.outputs if output.kind != "gradient"]
        return others + sorted(gradients, key=lambda output: order[output.name])


def fresh(base: str, counters: dict[str, int], taken: set[str]) -> str:
    """The next free name: ``base``, ``base_1`` ...; ``counters`` and ``taken`` are brought up to date."""
    while True:
        number = counters.get(base, 0)
        counters[base] = number + 1
        name = f"{base}_{number}" if number else base
        if name not in taken:
            taken.add(name)
            return name


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")
