"""Files that are read and written: text whole or not at all, ``-`` for the standard streams, and what is wrong in words."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from autopar.errors import FileError, UsageError

STANDARD = Path("-")
"""The standard input, or the standard output."""
HEAD_BYTES = 200
"""Bytes at a file's begin among which its schema stands."""


def read_text(path: str | os.PathLike[str], what: str, hint: str) -> str:
    """The UTF-8 text of a file or, for ``-``, of the standard input.

    Args:
        what: what the file is called: ``the plan``.
        hint: what to give instead where it cannot be read.

    Raises:
        FileError: it cannot be read, is empty, or is not UTF-8. UsageError: no path at all.
    """
    check_path(path, what, hint)
    try:
        data = sys.stdin.buffer.read() if Path(path) == STANDARD else Path(path).read_bytes()
        text = data.decode("utf-8-sig")  # with or without a byte-order mark, which editors of other systems write
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot read {what} {path}: {reason}", hint) from error
    if not text.strip():
        raise FileError(f"{name_of(path)} is empty, where {what} should be", hint)
    return text


def begins_with(path: str | os.PathLike[str], schema: str) -> bool:
    """Whether the first bytes of a file name the schema. False for what is no file, and for the standard input."""
    if Path(path) == STANDARD or not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return schema.encode() in file.read(HEAD_BYTES)


def name_of(path: object) -> str:
    """What errors call a file that is read.

    >>> name_of("plan.json"), name_of("-")
    ('plan.json', 'the standard input')
    """
    return "the standard input" if str(path) == str(STANDARD) else str(path)


def check_path(path: object, what: str, hint: str) -> None:
    """Raises UsageError: something else than a path was given."""
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        raise UsageError(f"{what} is {path!r}, which is not a path", hint)


def check_writable(path: Path, *sources: Path | None) -> None:
    """Says at once, before any long work, that a file could not be written at ``path``.

    Args:
        sources: files that are read; ``path`` may be none of them.

    Raises:
        FileError: no folder, a folder of that name, or no permission. UsageError: the file is one of ``sources``.
    """
    if path == STANDARD:
        return
    try:
        path.is_dir()
        named, path = path, _followed(path)
    except (OSError, ValueError) as error:  # too long for a name, a character that no name has
        raise FileError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}", "choose another name") from error
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: there is no folder {path.parent}", f"make it first: mkdir -p {path.parent}")
    if path.is_dir():
        raise FileError(f"cannot write {path}: it is a folder", "give a file name in it")
    if not os.access(path if _in_place(path) else path.parent, os.W_OK):
        where = "" if _in_place(path) else f" in {path.parent}"
        raise FileError(f"cannot write {named}: no permission{where}", "choose another place")
    for source in sources:
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise UsageError(f"{path} would be written over while it is what is read", "choose another file to write")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes the file whole or not at all: a temporary file beside it, then a rename. A link stays one, to what is written; a device or
    a pipe is written to, and stays too. Raises FileError, the old file as it was."""
    check_path(path, "what to write", "give the path of a file")
    check_writable(Path(path))
    target, name = _followed(Path(path)), ""
    try:
        if _in_place(target):
            target.write_text(text, encoding="utf-8")
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~umask())
        os.replace(name, target)
    except BaseException as error:
        if name:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FileError(f"cannot write {target}: {error.strerror}", "make room, or choose another path") from error
        raise


def _followed(path: Path) -> Path:
    """The file itself, where ``path`` is a link to it; a link to a pipe (``/dev/stdout``) leads to no path, and is opened as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() and not _in_place(path) else path


def _in_place(path: Path) -> bool:
    """Whether no other file can take the place: a device or a pipe is there."""
    return path.exists() and not path.is_file() and not path.is_dir()


def parse_json(text: str, name: str, hint: str) -> Any:
    """The value of a JSON text.

    Raises:
        FileError: naming the line and column where it ends too early or is broken, that it nests too deep, or a key that stands twice.
    """
    try:
        return loads(text)
    except json.JSONDecodeError as broken:
        cut = broken.pos >= len(text.rstrip()) or "Unterminated" in broken.msg
        what = "it ends too early, as if truncated," if cut else broken.msg
        raise FileError(f"{name} is not a whole JSON file: {what} at line {broken.lineno}, column {broken.colno}", hint) from broken
    except RecursionError:
        raise FileError(f"{name} is not a file of autopar: its lists are nested too deep to be read", hint) from None
    except ValueError as error:  # a number of thousands of digits
        raise FileError(f"{name} cannot be read: {str(error).partition(';')[0]}", hint) from error


def loads(text: str) -> Any:
    """As ``json.loads``, but a key that stands twice in one object raises ValueError."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {key[:60]!r} stands twice in one object, and one value alone could count")
    return found


def umask() -> int:
    """The permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
