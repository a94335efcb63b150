"""Whether what is written over is needed no more: for each memory that a result takes over, or is a change of, who reads what was in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.check.differences import Difference
from autopar.check.legs import Leg
from autopar.check.order import Order
from autopar.check.parts import held
from autopar.graph import Op
from autopar.rows import InstructionPlan
from autopar.rules import is_alias, may_write_over, stores


def overwriting(order: Order) -> Iterator[Difference]:
    """What is wrong with the results that are written over something, in a list that is otherwise in order."""
    walk, rows = order.walk, order.rows
    ops = {op.name: op for op in walk.ops}
    cuts = {leg.target: leg for made in walk.legs.values() for leg in made if not leg.is_collective}
    lies: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        source = row.over or ""
        views = row.kind == "run" and row.reads and is_alias(ops[row.of]) and row.of not in walk.orders.apart
        if views or (row.kind == "slice" and cuts[row.writes[0]].step is None):
            source = row.reads[0]
        if row.over is not None and not (_may_reduce(order, ops, cuts, row) if row.kind == "start" else _may(order, ops, row)):
            yield Difference(f"schedule[{place}].over", f"instruction {row.id}, {row.kind} of {row.of}: may not be written over {row.over}")
            return
        for value in row.writes:
            lies.setdefault(value, lies.get(source, source) or value)
            members.setdefault(lies[value], []).append(value)
    last = _last_reads(order)
    for place, row in enumerate(rows):
        changes = row.kind == "run" and stores(ops[row.of])
        over = row.reads[0] if changes else row.over
        if over is None:
            continue
        memory = lies.get(over, over)
        kept = order.kept - ({memory} if changes and _replaced(order, memory) else set())
        for value in dict.fromkeys((memory, *members.get(memory, ()))):
            made = order.there.get(value, -1)
            if made < place and value in kept:
                yield order.say(place, f"is written over {value}, which came in or leaves")
            elif made < place < last.get(value, -1):
                yield order.say(place, f"is written over {value}, which instruction {rows[last[value]].id} still reads")
            elif value != over and value in row.reads:
                yield order.say(place, f"is written over {value}, which it reads itself")


def _replaced(order: Order, tensor: str) -> bool:
    """Whether it is a buffer that a new value takes the place of."""
    leaving = {name for kind, name, _ in order.walk.plan.leaving if kind == "buffer"}
    return any(kind == "buffer" and spec.tensor == tensor and name in leaving for kind, name, spec in order.walk.plan.entering)


def _may(order: Order, ops: Mapping[str, Op], row: InstructionPlan) -> bool:
    """Whether the result fits there and its operator can write there; a backward pass may run twice on what forward left."""
    walk = order.walk
    if row.kind != "run" or len(row.writes) != 1 or walk.strategies[row.of].inner:
        return False
    values = (row.over or "", row.writes[0])
    made = order.there.get(values[0], -1)
    if row.over not in [row.reads[place] for place in may_write_over(ops[row.of])] or made < 0 or order.rows[made].kind != "run":
        return False
    maker, turn = order.rows[made], "forward"
    alike = {held(walk.tensors[walk.tensor_of[value]].shape, walk.specs[value], walk.plan.sizes) for value in values}
    same = {walk.tensors[walk.tensor_of[value]].dtype for value in values}
    return (
        len(alike) == len(same) == 1 and (maker.phase == turn) == (row.phase == turn) and not walk.strategies[maker.of].inner
        and not is_alias(ops[maker.of])
    )  # fmt: skip


def _may_reduce(order: Order, ops: Mapping[str, Op], cuts: Mapping[str, Leg], row: InstructionPlan) -> bool:
    """Whether a call may reduce its source where it lies: an all-reduce of one value, made in memory of its own in the same half of the
    step."""
    call, made = order.calls[row.of], order.there.get(row.over or "", -1)
    if call.first.kind != "all_reduce" or len(call.legs) > 1 or call.filled or row.reads != (row.over,) or made < 0:
        return False
    maker = order.rows[made]
    if (maker.phase == "forward") != (row.phase == "forward"):
        return False
    if maker.kind == "run":
        return not order.walk.strategies[maker.of].inner and not is_alias(ops[maker.of])
    return maker.kind == "wait" or (maker.kind == "slice" and cuts[maker.writes[0]].step is not None)


def _last_reads(order: Order) -> dict[str, int]:
    """The place of the last instruction that needs each value as it is; what a call reads where it lies, until its wait."""
    found: dict[str, int] = {}
    for place, row in enumerate(order.rows):
        if row.kind != "free":
            found.update(dict.fromkeys(row.reads, place))
        if row.kind == "wait":
            call = order.calls[row.of]
            found.update((leg.source, place) for leg in call.reads_on)
    return found
