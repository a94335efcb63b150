"""How operators, collectives and specs are called in sentences."""

from __future__ import annotations

import re
from functools import cache

from autopar.compare.glances import Operator
from autopar.rows import CollectivePlan, OpPlan


def call(row: CollectivePlan) -> str:
    """A collective with its price; of a bucket also how many values share it."""
    shared = f", a bucket of {count(len(row.members), 'value')}" if row.parts is not None else ""
    return f"{row.kind} over {','.join(row.axes)} of {row.bytes} bytes ({row.seconds:.3g} s{shared})"


def where(row: OpPlan | Operator) -> str:
    """An operator with its module."""
    return f"{row.name} ({row.op}{', ' + row.module if row.module else ''})"


def spec_text(text: str) -> str:
    """A spec in quotes: that of a scalar is empty."""
    return f"'{text}'"


def count(number: int, what: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


@cache
def pattern(name: str) -> str:
    """A name with the numbers of layers left out: ``layers.*.w1.weight``."""
    return _NUMBER.sub("*", name)


_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
