"""What the host issues for each instruction: kernels of an operator's body, calls, and copies around them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from autopar.check.differences import Difference
from autopar.check.legs import Call
from autopar.check.order import Order
from autopar.check.walk import AGAIN
from autopar.rows import InstructionPlan
from autopar.rules import find_askers, find_fusable_additions, issued_kernels, reads_back


def issued(order: Order) -> Iterator[Difference]:
    """Instructions whose number of kernels, or whose reading of values, is another than recomputed; of a host without a price, none."""
    walk, priced = order.walk, bool(order.walk.machine.issue_seconds)
    fusable = find_fusable_additions(walk.captured) if priced else {}
    readers = Counter(value for row in order.rows if row.kind != "free" for value in row.reads)
    ops, askers = {op.name: op for op in walk.ops}, find_askers(walk.captured.ops) if priced else frozenset()

    def kernels(row: InstructionPlan) -> int | None:
        if row.kind == "run":
            op = ops[row.of]
            place, suffix = fusable.get(row.of.removesuffix(AGAIN)), AGAIN if row.of.endswith(AGAIN) else ""
            if place is not None and row.reads[place] == op.inputs[place] + suffix and readers[row.reads[place]] == 1:
                return 0
            return issued_kernels(op, walk.tensors, walk.strategies[row.of], walk.plan.sizes, asks=row.of.removesuffix(AGAIN) in askers)
        if row.kind == "start":
            return 1 + _copies_in(order.calls[row.of])
        if row.kind == "wait":
            return 1 + _copies_out(order.calls[row.of])
        return 1 if row.kind == "add" else None

    def waits(row: InstructionPlan) -> bool:
        op = ops[row.of]
        return reads_back(op, walk.tensors, walk.strategies[row.of], asks=row.of.removesuffix(AGAIN) in askers)

    for place, row in enumerate(order.rows):
        wanted = kernels(row) if priced else None
        if row.launches != wanted:
            yield Difference(f"schedule[{place}].launches", f"{row.launches} in the plan, {wanted} recomputed")
        reads = priced and row.kind == "run" and waits(row)
        if bool(row.reads_back) != reads:
            yield Difference(f"schedule[{place}].reads_back", f"{bool(row.reads_back)} in the plan, {reads} recomputed")


def _copies_in(call: Call) -> int:
    """One kernel for all sources of equal parts; for one that is filled up zeros, and a copy of each block."""
    if not call.copies_in:
        return 0
    blocks = _ranks(call) if call.first.kind in ("reduce_scatter", "all_to_all") else 1
    filled = sum(leg.filled for leg in call.legs)
    return (filled < len(call.legs)) + filled * (1 + blocks)


def _copies_out(call: Call) -> int:
    """A kernel for each target; for one that came filled up a copy of each block."""
    blocks = _ranks(call) if call.first.kind in ("all_gather", "all_to_all") else 1
    return sum(blocks if leg.filled else 1 for leg in call.legs) if call.copies_out else 0


def _ranks(call: Call) -> int:
    return math.prod(axis.size for axis in call.first.axes)
