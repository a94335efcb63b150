"""accumulate: gradients of the microbatches of a step are summed.

A gradient is added to its sum as soon as it is made. The calls that lead from it to an output run once, on the sum, after the last
microbatch: the reductions of data parallelism, and reshards of them. A partial sum is as large as the whole parameter on each rank. Where
sums hold more than ``limits.summed_bytes`` beyond the least that they can, some gradients are reduced in every microbatch instead: first
the largest for their seconds. Where a reduction was cut in two (``reduce_early``), its first half alone runs in every microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import count

from autopar.cost_models import UNLIMITED
from autopar.rules import IN_ORDER
from autopar.schedule.collectives import Part
from autopar.schedule.early_reduction import REDUCED
from autopar.schedule.instructions import COMPUTE, Instruction
from autopar.schedule.ordering import start_and_wait, taken_by
from autopar.schedule.schedule import Schedule

SUM = "@sum"
"""Suffix of the value that a gradient is summed in."""


def accumulate(schedule: Schedule) -> Schedule:
    """The schedule with an ``add`` for each gradient; instructions that read only sums run in the last microbatch alone.

    A schedule of one microbatch stays as it is.
    """
    last = schedule.graph.microbatches - 1
    if not last:
        return schedule
    late = {index for chain in _afforded(schedule) for index in chain.indices}
    written = {value for index in late for value in schedule.instructions[index].writes}
    read = {value for index in late for value in schedule.instructions[index].reads} - written
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"} - written
    summed = dict.fromkeys(sorted(read | leaving))
    return _rebuilt(_leaving_sums(schedule, late, summed), late, summed, last)


@dataclass
class _Chain:
    """Instructions that must run in the same microbatches, because their calls share buckets.

    Args:
        indices: their places in the list.
        sums: the values that they begin with.
        leaving: the gradients that they end with.
    """

    indices: set[int]
    sums: set[str]
    leaving: set[str]

    def extra(self, schedule: Schedule) -> int:
        """Bytes by which the sums are larger than the least."""
        return sum(schedule.values[name].bytes for name in self.sums) - sum(least_summed(schedule, name) for name in self.leaving)

    def seconds(self, schedule: Schedule) -> float:
        return sum(schedule.instructions[index].seconds for index in self.indices)


def least_summed(schedule: Schedule, leaving: str) -> int:
    """Bytes of a rank's sum of a gradient that is reduced as far as makes it smaller, in every microbatch."""
    value = schedule.values[leaving]
    reduced = schedule.values.get(value.tensor + REDUCED, value)
    return min(value.bytes, reduced.bytes)


def _chains(schedule: Schedule, reduced: Set[str] = frozenset()) -> list[_Chain]:
    """The instructions that lead only to gradients that leave, in groups that run in the same microbatches: those that share a value.

    Args:
        reduced: values that are made in every microbatch, so that chains begin with them at the earliest.
    """
    items = schedule.instructions
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"}
    others = {value for output, value in schedule.outputs if output.kind != "gradient"}
    readers: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        for value in item.reads:
            readers.setdefault(value, []).append(index)
    waits = {item.of: index for index, item in enumerate(items) if item.kind == "wait"}
    there = {value: index for index, item in enumerate(items) if item.kind != "start" for value in item.writes}
    late: set[int] = set()
    last = schedule.segments[-1]
    for index in reversed(range(len(items))):
        item = items[index]
        ends = all(value not in others and value not in reduced and (value in leaving or value in readers) for value in item.writes)
        follows = all(reader in late for value in item.writes for reader in readers.get(value, ()))
        if item.kind in ("start", "slice") and item.segment == last and ends and follows:
            late.add(index)
    while True:
        made = {value for index in late for value in items[index].writes}
        wrong = [index for index in late if not _may_wait(schedule, index, made, there)]
        if not wrong:
            break
        late.difference_update(wrong)
        late -= {index for index in late if any(r not in late for v in items[index].writes for r in readers.get(v, ()))}
    groups: dict[str, tuple[set[int], set[str]]] = {}
    for index in sorted(late):
        item = items[index]
        indices, values = {index, *((waits[item.of],) if item.kind == "start" else ())}, {*item.reads, *item.writes}
        for before, theirs in {id(groups[value]): groups[value] for value in item.reads if value in groups}.values():
            indices |= before
            values |= theirs
        groups.update(dict.fromkeys(values, (indices, values)))
    found = {id(group): group for group in groups.values()}.values()
    return [_Chain(indices, values - made, values & made & leaving) for indices, values in found]


def _may_wait(schedule: Schedule, index: int, made: Set[str], there: Mapping[str, int]) -> bool:
    """Whether an instruction can read a sum: its source lies in a spec and is there, or is ``made`` after the last microbatch too."""
    return all(
        value in made or (schedule.values[value].spec is not None and there.get(value, -1) < index)
        for value in schedule.instructions[index].reads
    )  # fmt: skip


def summed_halfway(schedule: Schedule) -> frozenset[str]:
    """The values between the two halves of a reduction that microbatches are summed in, under the schedule's limits."""
    reduced = _reduced(schedule)
    if schedule.limits.summed_bytes >= UNLIMITED or not reduced:
        return frozenset()
    return frozenset(value for chain in _afforded(schedule) for value in chain.sums if value in reduced)


def _reduced(schedule: Schedule) -> frozenset[str]:
    """The values between the two halves of reductions (``reduce_early``)."""
    return frozenset(layout.value for layout in schedule.layouts.values() if layout.value == layout.tensor + REDUCED)


def _afforded(schedule: Schedule) -> Iterator[_Chain]:
    """The chains that run once, within the limit: first those that save most seconds for their bytes.

    Where a whole chain takes too many bytes, the second half of a reduction that was cut in two still runs once.
    """
    left, taken = schedule.limits.summed_bytes, set[int]()
    reduced = _reduced(schedule)
    for chains in (_chains(schedule), _chains(schedule, reduced) if reduced else []):
        for chain in sorted(chains, key=lambda chain: (chain.extra(schedule) / max(chain.seconds(schedule), 1e-30), min(chain.indices))):
            extra = max(chain.extra(schedule), 0)
            if extra <= left and taken.isdisjoint(chain.indices):
                left -= extra
                taken |= chain.indices
                yield chain


def _rebuilt(schedule: Schedule, late: set[int], summed: Mapping[str, None], last: int) -> Schedule:
    """The list with the sums in it. Outputs and the instructions that run once read them in place of the gradients."""
    values = dict(schedule.values)
    values.update((name + SUM, values[name]._replace(order=IN_ORDER)) for name in summed)
    number = count(max((item.id for item in schedule.instructions), default=0) + 1)
    waiting = dict.fromkeys(summed)
    found: list[Instruction] = []
    phase, begun = schedule.segments[-1].phase, False

    def add(value: str) -> None:
        waiting.pop(value)
        tensor = schedule.graph.tensors[values[value].tensor]
        seconds = schedule.machine.sum_seconds(values[value].bytes, tensor.dtype)
        stream, launches = COMPUTE if seconds else "", 1 if schedule.machine.issue_seconds else None
        found.append(Instruction(next(number), "add", phase, (value,), (value + SUM,), stream, seconds, 0, value, launches=launches))

    early = {item.tensor for item in schedule.graph.inputs}
    for index, item in enumerate(schedule.instructions):
        if item.half == phase and not begun:
            begun = True
            for value in [value for value in waiting if value in early]:
                add(value)
        if index in late:
            reads = tuple(value + SUM if value in summed else value for value in item.reads)
            found.append(item._replace(reads=reads, microbatch=last))
            continue
        found.append(item)
        if item.kind != "start":
            early.update(item.writes)
            for value in item.writes if begun else ():
                if value in waiting:
                    add(value)
    for value in tuple(waiting):
        add(value)
    outputs = tuple((output, value + SUM if output.kind == "gradient" and value in summed else value) for output, value in schedule.outputs)
    return _moved(replace(schedule, instructions=tuple(found), values=values, outputs=outputs), late, summed, schedule)


def _leaving_sums(schedule: Schedule, late: set[int], summed: Mapping[str, None]) -> Schedule:
    """The schedule with calls that reduce copies of the sums: a sum is there until the step ends. It is no view."""
    calls = dict(schedule.collectives)
    for index in late:
        item = schedule.instructions[index]
        if item.kind == "start" and item.over in summed:
            calls[item.of] = replace(calls[item.of], in_place=False)
        elif item.kind == "start" and any(part.copied and part.source in summed for part in calls[item.of].parts):
            parts = [part._replace(copied=part.copied and part.source not in summed) for part in calls[item.of].parts]
            calls[item.of] = replace(calls[item.of], parts=tuple(parts))
    changed = {name for name, call in calls.items() if call is not schedule.collectives[name]}
    items, begun = list(schedule.instructions), dict[str, int]()
    for index, item in enumerate(items):
        if item.kind == "start" and item.of in changed:
            begun[item.of] = index
        elif item.kind == "wait" and item.of in changed:
            start, call = begun[item.of], calls[item.of]
            items[start], items[index] = start_and_wait(call, taken_by(call, schedule.machine), iter((items[start].id, item.id)))
    return replace(schedule, instructions=tuple(items), collectives=calls) if changed else schedule


def _moved(made: Schedule, late: set[int], summed: Mapping[str, None], before: Schedule) -> Schedule:
    """The schedule with reshards of gradients made of their sums."""
    layouts = dict(before.layouts)
    once = [before.instructions[index] for index in late]
    for item in once:
        parts = before.collectives[item.of].parts if item.kind == "start" else ()
        for layout in (*(part.layout for part in parts), *((before.cuts[item.writes[0]].layout,) if item.kind == "slice" else ())):
            if layout.source in summed:
                layouts[layout.value] = replace(layout, source=layout.source + SUM)

    def part_of(part: Part) -> Part:
        layout = layouts[part.layout.value]
        return part._replace(layout=layout, source=part.source if part.source != part.layout.source else layout.source)

    calls = {name: replace(call, parts=tuple(map(part_of, call.parts))) for name, call in before.collectives.items()}
    cuts = {value: cut._replace(layout=layouts[cut.layout.value]) for value, cut in before.cuts.items()}
    return replace(made, layouts=layouts, collectives=calls, cuts=cuts)
