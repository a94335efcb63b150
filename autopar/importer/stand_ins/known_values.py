"""Conditions whose answer is known while the model runs on stand-ins: of constants that its code makes, of checks, of finiteness.

The model runs once, on tensors without values. Where Python asks for a value (``if (mask == causal).all()``), the answer is computed
when it depends on nothing but numbers in the code and buffers to which the forward does not write: a stride that is kept in one is a
constant. As an index and in arithmetic buffers stay tensors. Checks (torch's own, ``assert``) leave no trace in the graph. Guards against
values that are not finite (``if torch.isnan(x).any()``) are answered as for finite values, and a warning says so. Everything else is the
user's to rewrite.
"""

from __future__ import annotations

import ast
import copy
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count, islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.diagnosis.errors import Maker, at_line, is_user_file
from autopar.importer.diagnosis.fixed_sizes import REWRITES

_ASKING = frozenset({"__bool__", "item", "__int__", "__float__", "__index__", "tolist", "is_nonzero", "equal", "allclose"})
_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_SETTING = frozenset({"__set__", "set_"})
"""What gives a tensor another storage. What is written by ``out=`` is no other version of itself to torch either."""
_CHECKS = frozenset({"_check_tensor_all", "_check_tensor_all_with", "_assert_async", "_assert"})
_FOR_SPEED = frozenset({"_detect_is_causal_mask"})
"""torch functions that ask for values to choose a faster way: the answer no is always right."""
_DISTRIBUTIONS = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "distributions") + os.sep
_CONSTRAINTS = os.path.join(_DISTRIBUTIONS, "constraints.py")
_CHANCE = (
    "rand",
    "bernoulli",
    "multinomial",
    "normal",
    "dropout",
    "empty",
    "uniform",
    "exponential",
    "poisson",
    "cauchy",
    "geometric",
    "seed",
)


class AssumedFiniteWarning(UserWarning):
    """A condition on whether values are finite was planned as if all were."""


@dataclass(frozen=True, eq=False)
class Known:
    """How a value is computed from numbers in the code: ``function(*args, **kwargs)``, in which what is known of a tensor is in its place.

    ``given``: both; ``number``: of the call, among those noted; ``part``: which of its results; ``assumed``: finiteness was taken for
    granted. ``buffers``: those of the model that it is made of.
    """

    function: Callable[..., Any]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    number: int
    part: int | None = None
    assumed: bool = False
    buffers: frozenset[str] = frozenset()


@dataclass
class KnownValues(TorchFunctionMode):
    """Notes how tensors come about, and answers for those that are known.

    Args:
        makers: by size that only values tell, what made it first.
        failed: what was last called in vain for a value or a size.
        read: buffers whose values were read, with the user's line.
    """

    noted: dict[int, tuple[Tensor, Known]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    makers: dict[str, Maker] = field(default_factory=dict)
    failed: Maker | None = None
    read: dict[str, tuple[str, int] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def note_buffer(self, name: str, stand_in: Tensor, value: Tensor) -> None:
        """From now on a buffer has the value that the model has it in, until it is written to."""
        self._note(stand_in, Known(lambda: value.detach().cpu().clone(), ((), {}), next(self.numbers), buffers=frozenset((name,))))

    def maker_of(self, error: Exception) -> Maker | None:
        """What made the size, or asked for the value, for which the program failed."""
        made = [self.makers[name] for name in sorted(torch_compat.unknown_sizes(error)) if name in self.makers]
        return made[0] if made else self.failed

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _CHECKS:
            return None
        tensors = [item for item in torch_compat.leaves_of((args, kwargs)) if isinstance(item, Tensor)]
        known = all(id(item) in self.noted for item in tensors)
        assumed = known and any(self.noted[id(item)][1].assumed for item in tensors)
        buffers = self._buffers(tensors) if known else frozenset()
        if name in _ASKING and tensors:
            wanted = _wanted_by_check() if name in ("__bool__", "item") and (assumed or not known) else None
            if wanted is not None:
                return wanted
            if known:
                self._read(buffers)
                return self._answer(function, args, kwargs, assumed)
        versions = {id(item): item._version for item in tensors}
        result = self._called(function, name, args, kwargs)
        written = [item for item in tensors if item._version != versions[id(item)]]
        given = torch_compat.leaves_of(kwargs.get("out"))
        replaced = tensors[:1] if name in _SETTING else [item for item in given if isinstance(item, Tensor)]
        sure = known and not any(word in name for word in _CHANCE)
        if written or replaced:
            again = sure and not replaced and bool(args) and all(item is args[0] for item in written)
            self._write([*written, *replaced], (function, self._now(args[1:]), self._now(kwargs), assumed) if again else None)
        elif name in _FINITE and not known and isinstance(result, Tensor):
            self._note(result, Known(torch.full, ((tuple(result.shape), _FINITE[name]), {}), next(self.numbers), assumed=True))
        elif sure and name != "__get__":
            made = Known(function, self._now((args, kwargs)), next(self.numbers), assumed=assumed, buffers=buffers)
            results = result if isinstance(result, (tuple, list)) else [result]
            for index, item in enumerate(results):
                if isinstance(item, Tensor) and not any(item is one for one in tensors):
                    self._note(item, made if item is result else replace(made, part=index))
        return result

    def answered(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, sized: bool = False) -> Any:
        """What the function gives where all that it takes is known, tensors as arrays; None otherwise.

        Args:
            sized: the size of the result depends on it, so that values of buffers are taken too.
        """
        tensors = [item for item in torch_compat.leaves_of((args, kwargs)) if isinstance(item, Tensor)]
        if not tensors or any(id(item) not in self.noted or self.noted[id(item)][1].assumed for item in tensors):
            return None
        if buffers := self._buffers(tensors):
            if not sized:
                return None
            self._read(buffers)
        return self._answer(lambda *args, **kwargs: torch_compat.map_tensors(Tensor.numpy, function(*args, **kwargs)), args, kwargs, False)

    def _called(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result; notes what made sizes that only values tell."""
        try:
            result = function(*args, **kwargs)
        except Exception:
            if name in REWRITES:
                self.failed = self._maker(name)
            raise
        for item in result if isinstance(result, (tuple, list)) else (result,):
            for size in torch_compat.unknown_sizes(item) - self.makers.keys():
                self.makers[size] = self._maker(name)
        return result

    def _maker(self, name: str) -> Maker:
        return Maker(name, _running_line())

    def _buffers(self, tensors: list[Tensor]) -> frozenset[str]:
        """Those that what is known of the tensors is made of."""
        return frozenset[str]().union(*(self.noted[id(item)][1].buffers for item in tensors))

    def _read(self, buffers: frozenset[str]) -> None:
        for name in buffers:
            self.read.setdefault(name, _running_line())

    def _note(self, tensor: Tensor, known: Known) -> None:
        self.noted[id(tensor)] = (tensor, known)

    def _now(self, tree: Any) -> Any:
        """What is known of tensors, in their place."""
        return torch_compat.map_tensors(lambda tensor: self.noted[id(tensor)][1], tree)

    def _write(self, written: list[Tensor], how: tuple[Any, ...] | None) -> None:
        """What shares its storage with tensors that were written to is known no longer, or is what it has become where it is known how."""
        keys = {torch_compat.storage_key(item) for item in written}
        sharing = [entry for entry in self.noted.values() if torch_compat.storage_key(entry[0]) in keys]
        for tensor, _ in sharing:
            del self.noted[id(tensor)]
        buffers = frozenset[str]().union(*(known.buffers for _, known in sharing))
        for name in sorted(buffers & self.read.keys()):
            message = f"the forward reads a value of its buffer {name} as a constant, and writes to it afterwards, so that it is none"
            raise CaptureError(at_line(message, self.read[name]), "keep what changes in tensor operators, or count in a plain attribute")
        if how is not None and not buffers:
            function, *given, assumed = how
            place = next(number for number, (tensor, _) in enumerate(sharing) if tensor is written[0])
            before = [known for _, known in sharing]
            made = Known(partial(_written, function, place), ((before, *given), {}), next(self.numbers))
            for part, (tensor, known) in enumerate(sharing):
                self._note(tensor, replace(made, part=part, assumed=assumed or known.assumed))

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], assumed: bool) -> Any:
        if assumed:
            frame = running_user_frame()
            file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
            text = f"{file}:{line}: planned as if all values were finite: {linecache.getline(file, line).strip()}"
            warnings.warn(text, AssumedFiniteWarning, stacklevel=2)
        given = self._now((args, kwargs))
        with torch_compat.real_tensors():
            args, kwargs = _real(given)
            return function(*args, **kwargs)


def _written(
    function: Callable[..., Any], place: int, sharing: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:  # fmt: skip
    """Tensors that share a storage, when ``function`` has written to one of them."""
    copies = copy.deepcopy(sharing)  # which share one again
    function(copies[place], *args, **kwargs)
    return copies


def _real(tree: Any) -> Any:
    """The same containers with values in place of how they are computed, each computed once."""
    wanted = {known.number: known for known in _knowns(tree)}
    waiting = list(wanted.values())
    while waiting:
        found = [known for known in _knowns(waiting.pop().given) if known.number not in wanted]
        wanted.update((known.number, known) for known in found)
        waiting += found
    values: dict[int, Any] = {}

    def value(known: Known) -> Any:
        return values[known.number] if known.part is None else values[known.number][known.part]

    def put_in(given: Any) -> Any:
        return torch_compat.map_only(Known, value, given)

    for number in sorted(wanted):
        args, kwargs = put_in(wanted[number].given)
        values[number] = wanted[number].function(*args, **kwargs)
    return put_in(tree)


def _knowns(tree: Any) -> list[Known]:
    return [leaf for leaf in torch_compat.leaves_of(tree) if isinstance(leaf, Known)]


def _running_line() -> tuple[str, int] | None:
    """The user's file and line in the calls that are running."""
    frame = running_user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def running_user_frame() -> FrameType | None:
    """The innermost frame of the user's code in the calls that are running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _wanted_by_check() -> bool | None:
    """What a value must be for the statement that asks for it to let the program pass: one of torch's checks, an ``assert``, or an ``if``
    that only raises, in the user's code or where distributions look at their parameters (there also: that only returns). No where torch
    asks for speed alone. None where it is none of them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (is_user_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_DISTRIBUTIONS)):
        if frame.f_code.co_name in _CHECKS:
            return True
        if frame.f_code.co_name in _FOR_SPEED:
            return False
        frame = frame.f_back
    if frame is None:
        return None
    number = frame.f_lasti // 2
    asking = set(islice(frame.f_code.co_positions(), max(0, number - 1), number + 1))  # the jump, and what came before it: the operand
    for node in _checks(frame.f_code.co_filename):
        if node.test.lineno <= frame.f_lineno <= (node.test.end_lineno or 0):
            operands = list(_operands(node.test, isinstance(node, ast.Assert)))
            for places, wanted in operands:
                if asking.intersection(places) or len(operands) == 1:
                    return wanted
    return None


@lru_cache(maxsize=256)
def _checks(file: str) -> list[Any]:
    """The statements of a file that raise and do nothing else; of torch's constraints also those that return, what did not hold."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return []
    ending = (ast.Raise, ast.Return) if file == _CONSTRAINTS else (ast.Raise,)
    raising = [item for item in nodes if isinstance(item, ast.If) and not item.orelse and all(isinstance(x, ending) for x in item.body)]
    return [*(item for item in nodes if isinstance(item, ast.Assert)), *raising]


def _operands(test: ast.expr, wanted: bool, places: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """The operands of ``and``, ``or`` and ``not`` in a test, with their places in the file and the truth that the test wants of them."""
    places = (*places, (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, not wanted, places)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _operands(part, wanted)
    else:
        yield places, wanted
