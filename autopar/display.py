"""How values print themselves. Python asks the value, but what draws it stands above it, and a value imports nothing from above.

``Plan.__str__`` calls ``render("Plan.__str__", self)``; ``autopar/__init__.py`` names the function, which is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

_VIEWS: dict[str, str] = {}
"""By method, as ``CLASS.METHOD``, the function that draws its value, as ``MODULE.FUNCTION``."""


def set_views(views: Mapping[str, str]) -> None:
    """Names the functions that draw values, by method."""
    _VIEWS.update(views)


def render(method: str, value: object) -> str:
    """The text that a method of ``value`` returns."""
    module, _, function = _VIEWS[method].rpartition(".")
    return str(getattr(import_module(module), function)(value))
