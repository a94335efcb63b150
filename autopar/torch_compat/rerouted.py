"""Functions of torch that run ours instead, under every name by which they were imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from types import FunctionType
from typing import Any

_ROUTES: dict[str, Callable[..., Any]] = {}
"""What is called in place of each function, by its full name, while ``rerouted`` is on."""


def _reroute(*args: Any, **kwargs: Any) -> Any:
    import sys as system  # this code runs in place of another function's, with the globals of that function

    return system.modules["autopar.torch_compat.rerouted"]._ROUTES[system._getframe().f_code.co_name](*args, **kwargs)


@contextmanager
def rerouted(routes: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Within it, a call by this thread of one of these Python functions calls ``routes[function](plain, *args, **kwargs)``.

    ``plain`` is the function as it was. The code of each function is replaced, not its name in a module: names that were imported
    before are rerouted too. Within another such context nothing changes.
    """
    if _ROUTES:
        yield
        return
    thread, kept = get_ident(), list[tuple[FunctionType, Any]]()

    def route(plain: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: instead(plain, *args, **kwargs) if get_ident() == thread else plain(*args, **kwargs)

    try:
        for function, instead in routes.items():
            inner: Any = inspect.unwrap(function)
            name = f"{inner.__module__}.{inner.__qualname__}"
            plain = FunctionType(inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
            plain.__kwdefaults__ = inner.__kwdefaults__
            _ROUTES[name] = route(plain, instead)
            kept.append((inner, inner.__code__))
            inner.__code__ = _reroute.__code__.replace(co_name=name)
        yield
    finally:
        for inner, code in kept:
            inner.__code__ = code
        _ROUTES.clear()
