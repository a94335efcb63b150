"""Output of commands: control characters of files and models made visible, errors with their hint, a line of progress."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from autopar.errors import FileError

BETWEEN_LINES = 0.2
"""Seconds between two updates of the progress line."""
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """``text`` with its control characters written out, so that no name in a file can move the cursor or change colours.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return text.translate(_VISIBLE)


def out(text: object, end: str = "\n") -> None:
    """Prints words, or JSON, to the standard output; what its encoding lacks stands there as ``\\u00e9``, which JSON reads as the letter.

    Raises:
        FileError: it cannot be written (a full disk); a closed pipe ends the command.
    """
    with _written():
        print(escaped(printable(str(text)), sys.stdout.encoding), end=end, flush=True)


def out_document(text: str) -> None:
    """Writes a file's text to the standard output, in UTF-8 as to a file. Raises FileError as ``out`` does."""
    with _written():
        sys.stdout.flush()
        sys.stdout.buffer.write(printable(text).encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()


@contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        raise FileError(f"cannot write to the standard output: {error.strerror}", "make room, or send it elsewhere") from error


def escaped(text: str, encoding: str | None) -> str:
    """``text`` with each character that an encoding lacks as JSON writes it.

    >>> print(escaped("\u00e9t\u00e9", "ascii"))
    \\u00e9t\\u00e9
    """
    try:
        text.encode(encoding or "utf-8")
        return text
    except UnicodeEncodeError:
        return "".join(one if _fits(one, encoding or "utf-8") else json.dumps(one)[1:-1] for one in text)


def _fits(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def columns() -> int | None:
    """Characters to a line of the terminal that the standard output goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def note(text: object) -> None:
    """Prints a line beside the answer, to the standard error."""
    print(printable(str(text)), file=sys.stderr, flush=True)


def fail(message: str, hint: str, status: int) -> int:
    """Prints an error with its hint and gives the exit status."""
    note(f"error: {message}\nhint: {hint}")
    return status


def open_closed_streams() -> None:
    """Opens the null device for each standard stream that was closed (``>&-``), so that no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)


def discard_output() -> None:
    """Nothing more goes to the standard output, nor at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def printing_aside() -> Iterator[None]:
    """Sends the prints of the user's own code to the standard error, so that they never stand in an answer."""
    with redirect_stdout(sys.stderr):
        yield


class Line:
    """One line on a terminal's standard error that is written over; nothing where that is no terminal."""

    def __init__(self) -> None:
        self.shown, self.began, self.on = 0.0, time.monotonic(), sys.stderr.isatty()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def say(self, text: str, *, now: bool = False) -> None:
        """Shows ``text``, at most every ``BETWEEN_LINES`` seconds unless ``now``."""
        if self.on and (now or time.monotonic() - self.shown >= BETWEEN_LINES):
            self.shown = time.monotonic()
            print(f"\r\x1b[K{printable(text)}", end="\r", file=sys.stderr, flush=True)

    def elapsed(self, text: str) -> None:
        """Shows ``text`` with the seconds since the line began."""
        self.say(f"{text}, {time.monotonic() - self.began:.0f} s", now=True)

    def clear(self) -> None:
        """Takes the line away."""
        if self.on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
