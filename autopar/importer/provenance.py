"""Where an operator comes from: the module path and source line that export recorded on the nodes of its graph."""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache

from torch.fx import Node

from autopar.importer.diagnosis import is_user_file

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def module_path(node: Node) -> str:
    """The innermost module around an exported node, ``layers.0.attn``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(path) for path, _ in reversed(list(stack.values()))), "")
    path = path.removeprefix("L['self'].")
    return path.removeprefix("model").removeprefix(".") if path == "model" or path.startswith("model.") else ""


def user_frame(node: Node) -> tuple[str, int] | None:
    """File and line of the innermost frame outside torch that made an exported node."""
    frames = [(m["file"], int(m["line"])) for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    users = [frame for frame in frames if is_user_file(frame[0])]
    return users[-1] if users else None


def source_line(node: Node) -> str:
    """``model.py:12``: the file relative to the working directory or to where its package is installed."""
    frame = user_frame(node)
    return f"{short_path(frame[0])}:{frame[1]}" if frame else ""


@lru_cache(maxsize=1024)
def short_path(file: str) -> str:
    """A file's path below the working directory, else below the directory it is imported from."""
    bases = [os.getcwd(), *sorted((path for path in sys.path if path), key=len, reverse=True)]
    return next((os.path.relpath(file, base) for base in bases if file.startswith(base.rstrip("/") + "/")), os.path.basename(file))
