"""Files that commands write: whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

from autopar.errors import FileError


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` and says so on stderr. Raises FileError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}", "choose a path in a folder that exists and can be written") from error
    print(f"wrote {path}", file=sys.stderr)
