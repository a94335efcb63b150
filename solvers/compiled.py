"""``kernel``: a function over arrays that numba compiles when it is first called for a large problem, and keeps on disk.

Compiling all kernels takes some 30 s, once an installation. Only very large problems wait for that (``solving.PATIENT``), given the time,
and small ones never need it: for them, and where numba is missing or switched off (``NUMBA_DISABLE_JIT=1``), a kernel runs as plain
Python, or in a second form written with NumPy where a loop is run millions of times. Those few in which most of the time goes are
``loop_or``: they are compiled in 3 s, so that a process which solves more than a little has them made alone (``LOOPS``), and calls
them from the others as they are. Tests hold the forms against each other.
Compiled kernels hold no interpreter lock, so that two threads use two cores on the same arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from hashlib import sha1
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

AVAILABLE = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in {"", "0"}
"""Whether there can be machine code."""

announce: Callable[[int], None] | None = None
"""Called with ``LOOPS`` or ``EVERYTHING`` before that is compiled for the first time on a machine, for a program that can say so."""

_made: list[Kernel] = []
_lock = Lock()
_known = set[int]()
"""The levels of which a kernel is known to numba."""
NOTHING, LOOPS, EVERYTHING = range(3)
"""What runs as machine code."""
SIGN = {LOOPS: ("messages", "pass_both"), EVERYTHING: ("propagation", "run_queues")}
"""Module and name of the kernel whose machine code tells that a level's is there: every solve of a large problem calls it."""
_wanted: ContextVar[int] = ContextVar("wanted", default=EVERYTHING if AVAILABLE else NOTHING)
"""A choice of each solve: threads of their own solve beside each other, and a solve's own threads copy its context."""


class Kernel:
    """A function of numbers and arrays with two forms; ``machine`` is compiled when it is first asked for."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any], level: int) -> None:
        self.function, self.plain, self.level, self._machine = function, plain, level, None
        update_wrapper(self, function)
        _made.append(self)

    def __call__(self, *arguments: Any) -> Any:
        return (self.machine if _wanted.get() >= self.level else self.plain)(*arguments)

    @property
    def machine(self) -> Any:
        """The numba function. Kernels that call this one are compiled to call it."""
        if self._machine is None:
            with _lock:
                _make_known(_wanted.get())
                self._machine = self._machine or _compilable(self.function)
        return self._machine


def kernel(function: Function) -> Function:
    """The function as a kernel. Arguments must be numbers and arrays of one type at every call."""
    return kernel_or(function)(function)


def kernel_or(plain: Function) -> Callable[[Function], Function]:
    """A kernel whose form without compilation is ``plain``, of the same arguments and results."""
    return _made_of(plain, EVERYTHING)


def loop_or(plain: Function) -> Callable[[Function], Function]:
    """The same of a loop in which much of the time goes."""
    return _made_of(plain, LOOPS)


def _made_of(plain: Function, level: int) -> Callable[[Function], Function]:
    if not AVAILABLE:
        return lambda function: plain
    return lambda function: cast(Function, Kernel(function, plain, level))


@contextmanager
def machine_code(wanted: int) -> Iterator[None]:
    """Within, so much of the kernels that this thread calls runs as machine code, if there can be any."""
    before = _wanted.set(wanted if AVAILABLE else NOTHING)
    try:
        yield
    finally:
        _wanted.reset(before)


def runs_compiled() -> bool:
    """Whether all kernels run as machine code at present."""
    return _wanted.get() >= EVERYTHING


def is_first_use(level: int = EVERYTHING) -> bool:
    """Whether the kernels of a level are still to be compiled: there is no machine code of them where numba keeps it."""
    module, name = SIGN[level]
    signs = [made._machine for made in _made if made.function.__name__ == name]
    if not AVAILABLE or any(machine is not None and machine.signatures for machine in signs):
        return False
    named, here = os.environ.get("NUMBA_CACHE_DIR"), Path(__file__).absolute().parent
    own = f"{here.name}_{sha1(str(here).encode(), usedforsecurity=False).hexdigest()}"  # as numba names it
    shared = [Path(named)] if named else [Path.home() / ".cache/numba", Path.home() / "Library/Caches/numba"]
    places = [*(place / own for place in shared), *([] if named else [here / "__pycache__"])]
    return not any(next(place.glob(f"{module}.{name}-*.nbi"), None) for place in places)


def _compilable(function: Callable[..., Any]) -> Any:
    import numba

    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder can be written for the machine code: compile anew in each process
        return numba.njit(nogil=True)(function)


def _make_known(level: int) -> None:
    """Tell numba, before the first kernel, that a Kernel among a function's globals is its numba function."""
    if level in _known:
        return
    if announce is not None and is_first_use(level):
        announce(level)
    if not _known:
        from numba.extending import typeof_impl

        typeof_impl.register(Kernel)(lambda value, context: typeof_impl(value.machine, context))
    _known.add(level)
