"""Conditions whose answer is known while the model runs on stand-ins: of constants that its code makes, of checks, of finiteness.

The model runs once, on tensors without values. Where Python asks for a value (``if (mask == causal).all()``), the answer is computed
when it depends on nothing but numbers in the code. Checks (torch's own, ``assert``) leave no trace in the graph. Guards against
values that are not finite (``if torch.isnan(x).any()``) are answered as for finite values, and a warning says so. Everything else is the
user's to rewrite.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.importer.diagnosis import is_user_file

_ASKING = frozenset({"__bool__", "item", "__int__", "__float__", "__index__", "tolist", "is_nonzero", "equal", "allclose"})
_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_CHECKS = frozenset({"_check_tensor_all", "_check_tensor_all_with", "_assert_async", "_assert"})
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


@dataclass
class Known:
    """How a value is computed from numbers in the code: ``function(*args, **kwargs)``; ``assumed``: finiteness was taken for granted."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: int | None = None
    assumed: bool = False


@dataclass
class KnownValues(TorchFunctionMode):
    """Notes how tensors come about, and answers for those that are known."""

    noted: dict[int, tuple[Tensor, Known]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _CHECKS:
            return None
        tensors = [item for item in torch_compat.leaves_of((args, kwargs)) if isinstance(item, Tensor)]
        known = all(id(item) in self.noted for item in tensors)
        if name in _ASKING and tensors:
            assumed = known and any(self.noted[id(item)][1].assumed for item in tensors)
            wanted = _wanted_by_check() if name in ("__bool__", "item") and (assumed or not known) else None
            if wanted is not None:
                return wanted
            if known:
                return self._answer(function, args, kwargs, assumed)
        result = function(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or "out" in kwargs:
            self._forget(tensors[:1])
        elif name in _FINITE and not known and isinstance(result, Tensor):
            self._note(result, Known(torch.full, (tuple(result.shape), _FINITE[name]), {}, assumed=True))
        elif known and not any(word in name for word in _CHANCE) and name != "__get__":
            made = Known(function, args, kwargs, assumed=any(self.noted[id(item)][1].assumed for item in tensors))
            results = result if isinstance(result, (tuple, list)) else [result]
            for index, item in enumerate(results):
                if isinstance(item, Tensor) and not any(item is given for given in tensors):
                    self._note(item, made if item is result else Known(function, args, kwargs, index, made.assumed))
        return result

    def _note(self, tensor: Tensor, known: Known) -> None:
        self.noted[id(tensor)] = (tensor, known)

    def _forget(self, written: list[Tensor]) -> None:
        """What shares its storage with a tensor that was written to is known no longer."""
        keys = {torch_compat.storage_key(item) for item in written}
        for number, (tensor, _) in list(self.noted.items()):
            if torch_compat.storage_key(tensor) in keys:
                del self.noted[number]

    def _answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], assumed: bool) -> Any:
        if assumed:
            frame = running_user_frame()
            file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
            text = f"{file}:{line}: planned as if all values were finite: {linecache.getline(file, line).strip()}"
            warnings.warn(text, AssumedFiniteWarning, stacklevel=2)
        values: dict[int, Any] = {}
        with torch_compat.real_tensors():
            return function(*self._real(args, values), **self._real(kwargs, values))

    def _real(self, tree: Any, values: dict[int, Any]) -> Any:
        return torch_compat.map_tensors(lambda tensor: self._value(tensor, values), tree)

    def _value(self, tensor: Tensor, values: dict[int, Any]) -> Tensor:
        if id(tensor) not in values:
            known = self.noted[id(tensor)][1]
            made = known.function(*self._real(known.args, values), **self._real(known.kwargs, values))
            values[id(tensor)] = made if known.part is None else made[known.part]
        return values[id(tensor)]


def running_user_frame() -> FrameType | None:
    """The innermost frame of the user's code in the calls that are running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _wanted_by_check() -> bool | None:
    """What a value must be for the statement that asks for it to let the program pass: one of torch's checks, an ``assert``, or an ``if``
    that only raises, in the user's code or where distributions look at their parameters (there also: that only returns). None where it is
    none of them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (is_user_file(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_DISTRIBUTIONS)):
        if frame.f_code.co_name in _CHECKS:
            return True
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
