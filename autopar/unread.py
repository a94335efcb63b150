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

from pydantic import TypeAdapter

from autopar.files import loads
from autopar.rows import Row

R = TypeVar("R", bound=Row)
G = TypeVar("G")

MARK = '"rows that are not read yet"'
"""The text in place of a table that was cut out."""
_AT_ONCE = 64
"""Rows parsed together on first use, doubled each time: few for a reader of the first rows, few calls for a reader of all."""


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

    @property
    def written(self) -> Sequence[str]:
        """The text of each row."""
        return self._lines

    def holding(self, word: str) -> tuple[R, ...]:
        """The rows that may have ``word`` as a value or a key, in which every character of it stands for itself, in order."""
        return self._some(line for line in self._lines if f'"{word}"' in line or "\\" in line)

    def glanced(self, glance: Callable[[str], G | None], look: Callable[[R], G]) -> list[G]:
        """For each row the result of ``glance`` on its text, or of ``look`` on the parsed row where the text is unusual."""
        found = [glance(line) for line in self._lines]
        missed = [place for place, seen in enumerate(found) if seen is None]
        rows = self._rows([self._lines[place] for place in missed]) if missed else ()
        if rows is None:
            return [look(row) for row in self._whole()]
        there = dict(zip(missed, rows, strict=True))
        return [look(there[place]) if seen is None else seen for place, seen in enumerate(found)]

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
        text = f"[{' '.join(lines).rstrip(',')}]"
        try:
            with collector_paused():
                found: tuple[R, ...] = _adapter(self._kind).validate_json(text)
                loads(text)  # of a key that stands twice the model sees the last alone
        except ValueError:
            return None
        return found if len(found) == len(lines) else None


def holding(rows: Sequence[R], word: str) -> Sequence[R]:
    """Rows of a table that include all with ``word`` as a value; few where the table is not parsed yet."""
    return rows.holding(word) if isinstance(rows, Unread) else rows


def glanced(rows: Sequence[R], glance: Callable[[str], G | None], look: Callable[[R], G]) -> list[G]:
    """For each row of a table the result of ``look``, or of ``glance`` on its text where the table is not parsed yet."""
    return rows.glanced(glance, look) if isinstance(rows, Unread) else [look(row) for row in rows]


def written_alike(first: Sequence[R], second: Sequence[R]) -> bool:
    """Whether two tables that are not read yet have the same text; nothing is known of others."""
    return isinstance(first, Unread) and isinstance(second, Unread) and first.written == second.written


def cut(text: str, tables: Iterable[str]) -> tuple[str, dict[str, list[str]]]:
    """A file's text with ``MARK`` for those of its tables that stand a row a line, and the lines of these.

    It goes by the look of the text: whether what was cut are the tables themselves is to be seen by where the marks then are.
    """
    lines = text.split("\n")
    found: dict[str, list[str]] = {}
    for key in tables:
        opening = f' "{key}": ['
        begin = lines.index(opening) + 1 if opening in lines else 0
        end = next((place for place in range(begin, len(lines)) if not lines[place].startswith("  {")), len(lines)) if begin else 0
        rows = lines[begin:end]
        ended = end < len(lines) and lines[end] in (" ]", " ],")
        if rows and ended and all(row.endswith("},") for row in rows[:-1]) and rows[-1].endswith("}"):
            found[key] = rows
            lines[begin - 1 : end + 1] = [f' "{key}": {MARK}{lines[end][2:]}']
    return "\n".join(lines), found


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
