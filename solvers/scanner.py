"""The fast road through a problem file: one pass over the bytes of each list of lists, straight into int64 arrays.

It accepts plain well-formed files only and says None to anything else; the careful road then reads the file again and finds the words.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Ints
from solvers.compiled import kernel

LISTS = {
    "problem.nodes.intervals",
    "problem.nodes.costs",
    "problem.nodes.usages",
    "problem.edges.nodes",
    "problem.edges.costs",
}
SCALARS = {"problem.name", "problem.usage_limit"}
_BLANK = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'[ \t\r\n]*"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*')
_TEXT = re.compile(rb'"([^"\\\x00-\x1f]*)"')
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]{0,17})(?![0-9.eE])")


class _Unusual(Exception):
    """The file has something that only the careful road understands."""


def scan(data: bytes) -> dict[str, Any] | None:
    """The file's lists by their path, each as (values, row offsets), and its scalars; None if the file is not plain."""
    found: dict[str, Any] = {}
    try:
        end = _object(data, np.frombuffer(data, dtype=np.uint8), _blank(data, 0), "", found)
        if _blank(data, end) != len(data) or not found.keys() >= LISTS:
            return None
    except (_Unusual, UnicodeDecodeError):
        return None
    return found


def _object(data: bytes, view: NDArray[np.uint8], at: int, prefix: str, found: dict[str, Any]) -> int:
    """Reads the object that begins at ``at`` and returns where it ends."""
    if data[at : at + 1] != b"{":
        raise _Unusual
    while True:
        key = _KEY.match(data, at + 1)
        if key is None:
            raise _Unusual
        path = prefix + key[1].decode()
        if path in found:
            raise _Unusual
        at = _blank(data, _value(data, view, key.end(), path, found))
        if data[at : at + 1] == b"}":
            return at + 1
        if data[at : at + 1] != b",":
            raise _Unusual


def _value(data: bytes, view: NDArray[np.uint8], at: int, path: str, found: dict[str, Any]) -> int:
    if path in LISTS:
        values, ptr = np.empty((len(data) - at) // 2 + 2, dtype=np.int64), np.empty((len(data) - at) // 2 + 2, dtype=np.int64)
        end, count, rows = scan_rows(view, at, values, ptr)
        if end < 0:
            raise _Unusual
        found[path] = (values[:count], ptr[: rows + 1])
        return int(end)
    if path in {"problem", "problem.nodes", "problem.edges"}:
        found[path] = True
        return _object(data, view, at, path + ".", found)
    scalar = (_TEXT if path == "problem.name" else _INTEGER).match(data, at) if path in SCALARS else None
    if scalar is None:
        raise _Unusual
    found[path] = scalar[1].decode() if path == "problem.name" else int(scalar[0])
    return scalar.end()


def _blank(data: bytes, at: int) -> int:
    blank = _BLANK.match(data, at)
    return blank.end() if blank else at


@kernel
def scan_rows(text: NDArray[np.uint8], at: int, values: Ints, ptr: Ints) -> tuple[int, int, int]:
    """Read ``[[1,2],[3]]`` from ``at`` into values and row offsets; returns (end, values, rows), end -1 if unusual."""
    size, count, rows = len(text), 0, 0
    ptr[0] = 0
    depth = 0  # lists that are open
    number, digits, negative = 0, 0, False
    expects = True  # a value or a list is due: after "[" and ","
    first = True  # the open list is empty so far
    while at < size:
        c = text[at]
        at += 1
        if 48 <= c <= 57:
            if depth != 2 or not expects:
                return -1, 0, 0
            number, digits = c - 48, 1
            while at < size and 48 <= text[at] <= 57:
                number = number * 10 + (text[at] - 48)
                digits += 1
                at += 1
            if (digits > 18 and not (digits == 19 and number == 1000000000000000000)) or (digits > 1 and c == 48):
                return -1, 0, 0
            values[count] = -number if negative else number
            count += 1
            negative, expects, first = False, False, False
        elif c == 44:
            if expects or depth == 0:
                return -1, 0, 0
            expects = True
        elif c == 91:
            if not expects or depth == 2 or negative:
                return -1, 0, 0
            depth += 1
            first = True
        elif c == 93:
            if (expects and not first) or depth == 0 or negative:
                return -1, 0, 0
            depth -= 1
            expects, first = False, False
            if depth == 0:
                return at, count, rows
            rows += 1
            ptr[rows] = count
        elif c == 45:
            if negative or not expects or depth != 2:
                return -1, 0, 0
            negative = True
        elif (c != 32 and c != 10 and c != 13 and c != 9) or negative:
            return -1, 0, 0
    return -1, 0, 0
