"""``loop``: a loop of the schedule that runs as machine code, as ``machine`` makes it, in a tenth of a second and anew in each process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, update_wrapper
from importlib.util import find_spec
from threading import Lock
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

AVAILABLE = find_spec("llvmlite") is not None
"""Whether there can be machine code."""

_lock = Lock()
NOTHING, LOOPS = range(2)
"""What runs as machine code."""
_wanted: ContextVar[int] = ContextVar("wanted", default=LOOPS if AVAILABLE else NOTHING)


class Loop:
    """A function of numbers and arrays that is ``translated`` where Python calls it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return (self.translated if runs_loops() else self.function)(*arguments)

    @cached_property
    def translated(self) -> Callable[..., Any]:
        from solvers.machine import loaded

        with _lock:
            return loaded(self.function)


def loop(function: Function) -> Function:
    """The function as a loop. Arguments must be numbers and arrays of one type at every call."""
    return cast(Function, Loop(function))


@contextmanager
def machine_code(wanted: int) -> Iterator[None]:
    """Within, so much of the loops that this thread calls runs as machine code, if there can be any."""
    before = _wanted.set(wanted if AVAILABLE else NOTHING)
    try:
        yield
    finally:
        _wanted.reset(before)


def runs_loops() -> bool:
    """Whether loops run as machine code."""
    return _wanted.get() >= LOOPS
