"""Where an operator comes from: the module path and source line of the nodes of an exported graph."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch.fx import Node
from torch.overrides import TorchFunctionMode

from autopar import torch_compat
from autopar.effort import check_deadline
from autopar.importer.diagnosis.errors import is_user_file

_is_users = lru_cache(maxsize=4096)(is_user_file)
_OUTERMOST = str(Path(__file__).parents[1] / "export" / "exported.py")
"""Frames above this file's are the caller of the capture, not the model."""


class MarkedLines(TorchFunctionMode):
    """Within it, every call of a torch function is traced under a mark: the innermost line outside torch that made it.

    ``replaced`` gives what is called in place of a function.
    """

    def __init__(self, origin: Callable[[str], Any], replaced: Callable[[Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.origin, self.replaced = origin, replaced

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_deadline()
        frame: Any = sys._getframe(1)
        while frame is not None and not _is_users(frame.f_code.co_filename):
            frame = None if frame.f_code.co_filename == _OUTERMOST else frame.f_back
        if frame is None:
            return self.replaced(function)(*args, **(kwargs or {}))
        with self.origin(f"{frame.f_code.co_filename}:{frame.f_lineno}"):
            return self.replaced(function)(*args, **(kwargs or {}))


def module_path(node: Node) -> str:
    """The innermost module around an exported node, ``layers.0.attn``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(list(stack.values()))), "")
    path = path.removeprefix("L['self'].")
    return path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else ""


def user_frame(node: Node) -> tuple[str, int] | None:
    """File and line of the innermost frame outside torch that made an exported node."""
    file, _, line = torch_compat.origin_of(node).rpartition(":")
    return (file, int(line)) if file else None


def source_line(node: Node) -> str:
    """``model.py:12``: the file relative to the working directory or to where its package is installed."""
    frame = user_frame(node)
    return f"{short_path(frame[0])}:{frame[1]}" if frame else ""


@lru_cache(maxsize=1024)
def short_path(file: str) -> str:
    """A file's path below the working directory, else below the directory it is imported from."""
    bases = [os.getcwd(), *sorted((path for path in sys.path if path), key=len, reverse=True)]
    return next((os.path.relpath(file, base) for base in bases if file.startswith(base.rstrip("/") + "/")), os.path.basename(file))
