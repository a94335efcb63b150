"""How operators, collectives and specs are called in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from autopar.compare.raw_rows import Operator
from autopar.rows import CollectivePlan, OpPlan
from autopar.sharding import ShardingSpec


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


def unequal(shape: Sequence[int], text: str, mesh: Mapping[str, int]) -> dict[int, str]:
    """By dim, what ranks hold of each that a spec cuts in unequal parts; of none where the spec does not fit the shape.

    >>> unequal((50257, 8), "S1 R", {"dp": 2, "tp": 4})
    {0: '50257 over tp: 12565 on a rank, 12562 on the last'}
    """
    spec, names, sizes = ShardingSpec.parse(text), tuple(mesh), tuple(mesh.values())
    found = {}
    for dim, axes in enumerate(spec.dims if spec.problem(shape, sizes) is None else ()):
        if shape[dim] % spec.parts(dim, sizes):
            first, last = (spec.span(dim, shape[dim], sizes, [end * (size - 1) for size in sizes])[1] for end in (0, 1))
            over = ",".join(names[axis] for axis in axes)
            found[dim] = f"{shape[dim]} over {over}: {first} on a rank, {last or 'none'} on the last"
    return found


def count(number: int, what: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


@cache
def pattern(name: str) -> str:
    """A name with the numbers of layers left out: ``layers.*.w1.weight``."""
    return _NUMBER.sub("*", name)


_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
