"""Straight-line Python for a segment: the statements of its instructions in one function, made once and called every step.

A value is a local variable of the function, so that reading one costs no look-up and ``del`` frees it. With several hosted ranks each
instruction is written once for each of them.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import TracebackType
from typing import Any

from torch import Tensor

from autopar.graph import Op
from autopar.runtime.instructions.ranges import Ranges
from autopar.torch_compat import profiler_records

ErrorHandler = Callable[[Exception, Mapping[str, Any]], None]
"""Handler of a statement's error, given the function's variables too. It raises an error that says more, or returns."""
LITERALS = (bool, int, str, type(None))
"""Types whose values are written as they are; all others are global names of the function."""


@dataclass(frozen=True)
class Segment:
    """The instructions of a segment as one function.

    Args:
        run: the values of each hosted rank, the calls in flight, the collectives observed. Takes from the values what it reads, and
            puts there what is left at its end.
        source: its text.
        handlers: error handlers by line number.
        operators: line numbers in rising order, and the operator of the statements from each on; None for those of no operator.
        marked: makes the same with ranges for a profiler; None where there are no marks.
    """

    run: Callable[..., None]
    source: str
    handlers: Mapping[int, ErrorHandler] = field(default_factory=dict)
    operators: Sequence[tuple[int, Op | None]] = ()
    marked: Callable[[], Segment] | None = None

    def __call__(self, ranks: Sequence[MutableMapping[str, Tensor]], flights: MutableMapping[str, Any], observed: list[Any] | None) -> None:
        """Runs the instructions. Raises what their operators raise."""
        if self.marked is not None and profiler_records():
            self.marked()(ranks, flights, observed)
            return
        try:
            self.run(ranks, flights, observed)
        except (IndexError, RuntimeError) as error:
            trace = self._trace(error)
            if trace is not None and trace.tb_lineno in self.handlers:
                self.handlers[trace.tb_lineno](error, trace.tb_frame.f_locals)
            raise

    def operator_of(self, error: BaseException) -> Op | None:
        """The operator whose statement raised an error; None where it was none of these."""
        trace = self._trace(error)
        place = 0 if trace is None else bisect(self.operators, trace.tb_lineno, key=lambda item: item[0])
        return self.operators[place - 1][1] if place else None

    def _trace(self, error: BaseException) -> TracebackType | None:
        """The part of an error's trace that begins in this function."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not self.run.__code__:
            trace = trace.tb_next
        return trace


class Code:
    """A segment's function while it is written.

    Args:
        hosted: number of ranks that the backend hosts.
    """

    def __init__(self, hosted: int) -> None:
        self.hosted = hosted
        self._lines: list[str] = []
        self._handlers: dict[int, ErrorHandler] = {}
        self._operators: list[tuple[int, Op | None]] = []
        self._marks: list[tuple[int, str]] = []
        self._objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._variables: dict[str, str] = {}
        self._entering: dict[str, None] = {}
        self._live: dict[str, None] = {}

    def add(self, line: str, handler: ErrorHandler | None = None) -> None:
        """Appends a statement."""
        self._lines.append(line)
        if handler is not None:
            self._handlers[len(self._lines)] = handler

    def begin(self, operator: Op | None) -> None:
        """The statements from here on are of this operator, or of none."""
        self._operators.append((len(self._lines) + 1, operator))

    def mark(self, statement: str) -> None:
        """A statement on ``ranges`` (``ranges.Ranges``), for the text that runs while a profiler records."""
        self._marks.append((len(self._lines), statement))

    def object(self, value: Any) -> str:
        """The expression of anything that is settled before the first step."""
        if type(value) in LITERALS or (type(value) is float and value - value == 0):
            return repr(value)
        if type(value) is tuple and all(type(item) in LITERALS for item in value):
            return repr(value)
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"k{len(self._objects)}"
            self._objects[name] = value
        return name

    def read(self, value: str, place: int = 0) -> str:
        """The variable of a value on a hosted rank, which is there."""
        if value not in self._live:
            self._entering[value] = self._live[value] = None
        return self._variable(value, place)

    def write(self, value: str, place: int = 0) -> str:
        """The variable of a value that a statement makes on a hosted rank."""
        self._live[value] = None
        return self._variable(value, place)

    def free(self, values: Sequence[str]) -> None:
        """Ends values on all ranks."""
        names = [self.read(value, place) for value in values for place in range(self.hosted)]
        for value in values:
            del self._live[value]
        if names:
            self.add(f"del {', '.join(names)}")

    def _variable(self, value: str, place: int) -> str:
        return f"{self._variables.setdefault(value, f'v{len(self._variables)}')}_{place}"

    def segment(self, name: str) -> Segment:
        """What was written so far, as a function of this name."""
        before = [f"take{place} = ranks[{place}].pop" for place in range(self.hosted)] if self._entering else []
        before += [f"{self._variable(value, place)} = take{place}({value!r})" for value, place in self._placed(self._entering)]
        after = [f"left{place} = ranks[{place}]" for place in range(self.hosted)] if self._live else []
        after += [f"left{place}[{value!r}] = {self._variable(value, place)}" for value, place in self._placed(self._live)]
        handlers = {len(before) + line: handler for line, handler in self._handlers.items()}
        plain = self._made(name, [*before, *self._lines, *after, "return"], handlers)
        plain = replace(plain, operators=tuple((1 + len(before) + line, operator) for line, operator in self._operators))
        marked = cache(lambda: self._with_marks(name, before, after))
        return replace(plain, marked=marked) if self._marks else plain

    def _with_marks(self, name: str, before: Sequence[str], after: Sequence[str]) -> Segment:
        """The segment with its marks."""
        lines = ["ranges = make_ranges()", "try:", *(f"    {line}" for line in before)]
        handlers, at = dict[int, ErrorHandler](), 0
        for place, mark in (*self._marks, (len(self._lines), "")):
            for number in range(at, place):
                lines.append(f"    {self._lines[number]}")
                if number + 1 in self._handlers:
                    handlers[len(lines)] = self._handlers[number + 1]
            lines += [f"    {mark}"] if mark else []
            at = place
        lines += [*(f"    {line}" for line in after), "finally:", "    ranges.close()"]
        return self._made(name, lines, handlers)

    def _made(self, name: str, lines: Sequence[str], handlers: Mapping[int, ErrorHandler]) -> Segment:
        """A function of these lines; ``handlers`` by the number of the line in it, from 1 on."""
        source = "\n    ".join([f"def {name}(ranks, flights, observed):", *lines]) + "\n"
        made = {**self._objects, "make_ranges": Ranges}
        exec(compile(source, f"<autopar {name}>", "exec"), made)
        return Segment(made[name], source, {1 + line: handler for line, handler in handlers.items()})

    def _placed(self, values: Mapping[str, None]) -> Iterator[tuple[str, int]]:
        return ((value, place) for place in range(self.hosted) for value in values)
