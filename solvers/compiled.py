"""``kernel``: a function over arrays that runs as machine code for a large problem.

numba compiles a kernel when it is first called, and keeps it on disk. All of them take some 30 s, once an installation, for which only very
large problems wait (``solving.PATIENT``), given the time; small ones never need it: for them, and where numba is missing or switched off
(``NUMBA_DISABLE_JIT=1``), a kernel runs as plain Python, or in a second form written with NumPy where a loop is run millions of times.

Those few in which most of the time goes are ``loop_or``: where Python calls one, it runs as ``machine`` makes it, in a tenth of a second
and anew in each process. Only for the kernels that call it numba compiles it too. Tests hold the forms against each other.
Machine code holds no interpreter lock, so that two threads use two cores on the same arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, update_wrapper
from hashlib import sha1
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

AVAILABLE = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in {"", "0"}
"""Whether there can be machine code."""

announce: Callable[[], None] | None = None
"""Called before kernels are compiled by numba for the first time on a machine, for a program that can say so."""

_made: list[Kernel] = []
_lock = Lock()
NOTHING, LOOPS, EVERYTHING = range(3)
"""What runs as machine code."""
SIGN = ("propagation", "run_queues")
"""Module and name of the kernel whose machine code tells that numba's is there: every solve of a very large problem calls it."""
_wanted: ContextVar[int] = ContextVar("wanted", default=EVERYTHING if AVAILABLE else NOTHING)
"""A choice of each solve: threads of their own solve beside each other, and a solve's own threads copy its context."""


class Kernel:
    """A function of numbers and arrays with two forms; ``compiled`` is made when it is first asked for."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self.function, self.plain, self._compiled = function, plain, None
        update_wrapper(self, function)
        _made.append(self)

    def __call__(self, *arguments: Any) -> Any:
        return (self.compiled if _wanted.get() >= EVERYTHING else self.plain)(*arguments)

    @property
    def compiled(self) -> Any:
        """The numba function. Kernels that call this one are compiled to call it."""
        if self._compiled is None:
            with _lock:
                _make_known()
                self._compiled = self._compiled or _compilable(self.function)
        return self._compiled


class Loop(Kernel):
    """A kernel that is ``translated`` where Python calls it."""

    def __call__(self, *arguments: Any) -> Any:
        return (self.translated if _wanted.get() >= LOOPS else self.plain)(*arguments)

    @cached_property
    def translated(self) -> Callable[..., Any]:
        from solvers.machine import loaded

        with _lock:
            return loaded(self.function)


def kernel(function: Function) -> Function:
    """The function as a kernel. Arguments must be numbers and arrays of one type at every call."""
    return kernel_or(function)(function)


def kernel_or(plain: Function) -> Callable[[Function], Function]:
    """A kernel whose form without compilation is ``plain``, of the same arguments and results."""
    return _made_of(plain, Kernel)


def loop_or(plain: Function) -> Callable[[Function], Function]:
    """The same of a loop in which much of the time goes, of what ``translation`` knows."""
    return _made_of(plain, Loop)


def loop(function: Function) -> Function:
    """The same of one that has no other form."""
    return loop_or(function)(function)


def _made_of(plain: Function, kind: type[Kernel]) -> Callable[[Function], Function]:
    if not AVAILABLE:
        return lambda function: plain
    return lambda function: cast(Function, kind(function, plain))


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


def runs_loops() -> bool:
    """Whether those kernels do in which most of the time goes."""
    return _wanted.get() >= LOOPS


def is_first_use() -> bool:
    """Whether numba is still to compile the kernels: there is no machine code of them where it keeps it."""
    module, name = SIGN
    signs = [made._compiled for made in _made if made.function.__name__ == name]
    if not AVAILABLE or any(sign is not None and sign.signatures for sign in signs):
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


_known = False
"""Whether numba knows kernels."""


def _make_known() -> None:
    """Tell numba, before the first kernel, that a Kernel among a function's globals is its numba function."""
    global _known
    if _known:
        return
    if announce is not None and is_first_use():
        announce()
    from numba.extending import typeof_impl

    typeof_impl.register(Kernel)(lambda value, context: typeof_impl(value.compiled, context))
    _known = True
