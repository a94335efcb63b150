"""Tables of a plan's file that stay text until they are asked for: what shows a plan of ten thousand operators needs few of its rows.

Only a table that stands a row a line, as plans are written, can stay: its rows are then counted and compared by their lines. A row is held
to its model when it is first read, as in a plan that is read whole; what a file has wrong in rows that nobody asks for is not found.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Generic, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from autopar.rows import Row

R = TypeVar("R", bound=Row)

MARK = '"rows that are not read yet"'
"""What stands for a table that was cut."""
_AT_ONCE = 64
"""Rows that are read together when one is asked for, so many more each time: few for who looks at the first, few calls for all."""


class Unread(Sequence[R], Generic[R]):
    """The rows of one table, equal to the tuple of them.

    Args:
        kind: what its rows are.
        lines: of each row the text, all but the last with a comma behind it.
        whole: reads the whole file instead where that fails: the table as it stands there, or FileError that says what is wrong.
    """

    def __init__(self, kind: type[R], lines: Sequence[str], whole: Callable[[], tuple[R, ...]]) -> None:
        self._kind, self._lines, self._whole = kind, lines, whole
        self._read: tuple[R, ...] = ()

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[R]:
        place = 0
        while place < len(self):
            if place == len(self._read):
                self._more()
            yield self._read[place]
            place += 1

    @overload
    def __getitem__(self, place: int) -> R: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[R, ...]: ...

    def __getitem__(self, place: int | slice) -> R | tuple[R, ...]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Unread) and self._lines == other._lines:
            return True
        return tuple(self) == tuple(other) if isinstance(other, Unread | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} rows of {self._kind.__name__}>"

    def holding(self, word: str) -> tuple[R, ...]:
        """The rows that may have ``word`` as a value or a key, in which every character of it stands for itself, in order."""
        return self._some(line for line in self._lines if f'"{word}"' in line or "\\" in line)

    def apart(self, other: Unread[R]) -> tuple[R, ...]:
        """The rows whose lines the other table does not have, in order."""
        there = {*other._lines[:-1], *(line + "," for line in other._lines[-1:])}  # the last has no comma
        return self._some(line for line in self._lines if line not in there and line + "," not in there)

    def _more(self) -> None:
        """Reads further rows: once more as many, or all that are left where these are few."""
        begin, number = len(self._read), len(self._lines)
        end = begin + max(begin, _AT_ONCE)
        end = end if 2 * end < number else number
        found = self._rows(self._lines[begin:end])
        well_ended = self._lines[end - 1].endswith(",") == (end < number)
        if found is not None and well_ended:
            self._read += found
        else:
            self._read = self._whole()
            self._lines = ("",) * len(self._read)

    def _some(self, lines: Iterable[str]) -> tuple[R, ...]:
        found = self._rows(list(lines))
        return found if found is not None else self._whole()

    def _rows(self, lines: Sequence[str]) -> tuple[R, ...] | None:
        """The rows of the lines; None where these are none."""
        try:
            with collector_paused():
                found: tuple[R, ...] = _adapter(self._kind).validate_json(f"[{' '.join(lines).rstrip(',')}]")
        except ValidationError:
            return None
        return found if len(found) == len(lines) else None


def holding(rows: Sequence[R], word: str) -> Sequence[R]:
    """Of a table the rows among which all are that have ``word`` as a value: few, where the table is not read yet."""
    return rows.holding(word) if isinstance(rows, Unread) else rows


def apart(first: Sequence[R], second: Sequence[R]) -> tuple[Sequence[R], Sequence[R]]:
    """Of two tables the rows among which all are that one of the two alone has."""
    if isinstance(first, Unread) and isinstance(second, Unread):
        return first.apart(second), second.apart(first)
    return first, second


def cut(text: str, tables: Iterable[str]) -> tuple[str, dict[str, list[str]]]:
    """A file's text with ``MARK`` for those of its tables that stand a row a line, and the lines of these.

    It goes by the look of the text: whether what was cut are the tables themselves is to be seen by where the marks then are.
    """
    found: dict[str, list[str]] = {}
    for key in tables:
        opening = f'\n "{key}": '
        begin = text.find(f"{opening}[\n") + len(opening)
        end = text.find("\n ]", begin)
        if begin < len(opening) or end < 0:
            continue
        block = text[begin + 1 : end]  # a line break, then the rows
        number = block.count("\n")
        if block.count("\n  {") == number == block.count("},\n") + 1 and block.endswith("}"):
            found[key] = block[1:].split("\n")
            text = f"{text[:begin]}{MARK}{text[end + 3 :]}"
    return text, found


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within it nothing looks for cycles: rows have none, and the collector would go through all of a large plan again and again."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@cache
def _adapter(kind: type[R]) -> TypeAdapter[tuple[R, ...]]:
    return TypeAdapter(tuple[kind, ...])  # type: ignore[valid-type]
