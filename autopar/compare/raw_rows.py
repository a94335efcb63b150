"""The compared fields of rows of long tables. Of rows that are not parsed yet, their text is searched.

A row's text is taken for what it says only where it looks as plans are written, character by character of what is taken; one that somebody
wrote anew (keys in another order, other spaces, escapes) is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from autopar.rows import CollectivePlan, InstructionPlan, OpPlan
from autopar.unread import glanced

_TEXT = r'"([^"\\]*)"'
_OPERATOR = re.compile(
    rf'\s*\{{"name": {_TEXT}, "op": {_TEXT}, "module": {_TEXT}, (?:"location": (?:null|"(?:[^"\\]|\\.)*"), )?"phase": {_TEXT}, '
)
_INSTRUCTION = re.compile(rf'\s*\{{"id": (\d+), "kind": {_TEXT}, .*, "of": {_TEXT}[,}}]')
_COLLECTIVE = re.compile(
    rf'\s*\{{(?:"id": {_TEXT}, )?"kind": {_TEXT}, "axes": \[([^]\\]*)\], "phase": {_TEXT}, "stage": \d+, "times": (\d+), '
    r'.*"bytes": (\d+), "received_bytes_per_rank": \d+, "seconds": [^"]*$'
)
_NAME = re.compile(_TEXT)
_SPEC = re.compile(rf'"spec": {_TEXT}')


class Operator(NamedTuple):
    """An operator's names, and the specs of its inputs (the first ``reads``) and outputs."""

    name: str
    op: str
    module: str
    phase: str
    specs: tuple[str, ...]
    reads: int


class Collective(NamedTuple):
    """A call's kind, axes, phase, times, number of values moved between operators, and bytes."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    times: int
    values: int
    bytes: int


class Instruction(NamedTuple):
    """An instruction's action, with its number in the file."""

    id: int
    kind: str
    of: str


def operators(rows: Sequence[OpPlan]) -> list[Operator]:
    """In order."""
    return glanced(rows, _operator_in, _operator_of)


def collectives(rows: Sequence[CollectivePlan]) -> list[Collective]:
    """In order."""
    return glanced(rows, _collective_in, _collective_of)


def instructions(rows: Sequence[InstructionPlan]) -> list[Instruction]:
    """In order."""
    return glanced(rows, _instruction_in, lambda row: Instruction(row.id, row.kind, row.of))


def _operator_in(line: str) -> Operator | None:
    names = _OPERATOR.match(line)
    begin = line.rfind('"inputs": [')  # of the row: its values have no such key, and arguments come before
    end = line.rfind('"outputs": [')
    if names is None or not 0 <= begin < end:
        return None
    specs = _SPEC.findall(line, begin)
    if len(specs) != line.count('"tensor"', begin) or line.find("\\", begin) >= 0:
        return None
    name, op, module, phase = names.group(1, 2, 3, 4)
    return Operator(name, op, module, phase, tuple(specs), line.count('"tensor"', begin, end))


def _operator_of(row: OpPlan) -> Operator:
    return Operator(row.name, row.op, row.module, row.phase, tuple(value.spec for value in (*row.inputs, *row.outputs)), len(row.inputs))


def _collective_in(line: str) -> Collective | None:
    found = _COLLECTIVE.match(line)
    values = line.count('"value": "')
    if found is None or values != line.count('"value"') or "\\" in line:
        return None
    kind, axes, phase, times, size = found.group(2, 3, 4, 5, 6)
    return Collective(kind, tuple(_NAME.findall(axes)), phase, int(times), values, int(size))


def _collective_of(row: CollectivePlan) -> Collective:
    return Collective(row.kind, row.axes, row.phase, row.times, row.values, row.bytes)


def _instruction_in(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    return None if found is None else Instruction(int(found[1]), found[2], found[3])
