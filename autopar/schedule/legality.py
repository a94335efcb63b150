"""The legality of a schedule: a table of predicates, checked after each pass. A violation names the pass and the instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.cost_models.collectives import CALLS, FROM_HOST
from autopar.errors import ScheduleError
from autopar.rules import stores, why_each, why_once
from autopar.schedule.assignment import AGAIN, FORWARD, PHASES
from autopar.schedule.instructions import BEFORE_ALL, Instruction
from autopar.schedule.schedule import Schedule
from autopar.schedule.storages import may_take, needed
from autopar.schedule.windows import windows

Violations = Iterator[tuple[int, str]]
"""(instruction id, its violation)."""


def check_legal(schedule: Schedule, after: str) -> Schedule:
    """Checks a schedule and returns it.

    Args:
        after: the pass that made it, or its source; the error names it.

    Raises:
        ScheduleError: the first predicate of ``PREDICATES`` that does not hold, with the instruction's id.
    """
    for name, predicate in PREDICATES:
        for number, what in predicate(schedule):
            raise ScheduleError(f"the schedule after {after} is not legal: instruction {number} {what}", f"the rule is: {name}")
    return schedule


def _reads_made(schedule: Schedule) -> Violations:
    there = {item.tensor for item in schedule.graph.inputs} | set(schedule.sums)
    coming: set[str] = set()
    for item in schedule.instructions:
        for value in item.reads:
            if value not in there and not (item.kind == "start" and value in coming):
                why = "is in flight and was not waited for" if value in coming else "is not there: it was not made yet, or is freed"
                yield item.id, f"({item.kind} of {item.of or 'values'}) reads {value}, which {why}"
        if item.kind == "free":
            there.difference_update(item.reads)
        elif item.kind == "start":
            coming.update(item.writes)
        else:
            there.update(item.writes)
            coming.difference_update(item.writes)


def _waited_once(schedule: Schedule) -> Violations:
    flying: dict[str, int] = {}
    done: set[str] = set()
    for item in schedule.instructions:
        if item.kind == "start":
            if item.of in flying or item.of in done:
                yield item.id, f"starts {item.of}, which has been started before"
            flying[item.of] = item.id
        elif item.kind == "wait":
            if item.of not in flying:
                why = "was waited for before" if item.of in done else "was not started"
                yield item.id, f"waits for {item.of}, which {why}"
            flying.pop(item.of, None)
            done.add(item.of)
    for name, number in flying.items():
        yield number, f"starts {name}, which nobody waits for"


def _freed_once(schedule: Schedule) -> Violations:
    kept = {item.tensor for item in schedule.graph.inputs} | {value for _, value in schedule.outputs}
    gone: set[str] = set()
    needed: dict[str, str] = {}
    for item in schedule.instructions:
        if item.kind == "start":
            needed.update(dict.fromkeys(schedule.collectives[item.of].reads_in_flight, item.of))
        elif item.kind == "wait":
            needed = {value: call for value, call in needed.items() if call != item.of}
        elif item.kind == "free":
            for value in item.reads:
                if value in gone:
                    yield item.id, f"frees {value} a second time"
                if value in kept:
                    yield item.id, f"frees {value}, which came in or leaves"
                if value in needed:
                    yield item.id, f"frees {value}, which {needed[value]} still reads"
                gone.add(value)


def _written_over(schedule: Schedule) -> Violations:
    """A value that is written over has the same size, may be written over, and is read no more; nor is a view of it.

    No operator changes an input in place, but for a buffer that gets a new value.
    """
    root, written = schedule.storage, dict[str, int]()
    made: dict[str, int] = {}
    entered = {item.tensor for item in schedule.graph.inputs}
    new = {output.name for output in schedule.graph.outputs if output.kind == "buffer"}
    replaced = {item.tensor for item in schedule.graph.of_kind("buffer") if item.name in new}
    kept = entered | set(schedule.sums) | {root[value] for value in schedule.kept_values}
    for index, item in enumerate(schedule.instructions):
        for value in needed(schedule, item):
            over = written.get(_memory(schedule, value), -1)
            if made.get(value, -1) < over:
                yield item.id, f"reads {value}, which instruction {schedule.instructions[over].id} has written over"
        if item.over:
            if item.over not in _may_take(schedule, item) or root.get(item.over) in kept:
                yield item.id, f"writes over {item.over}, which it may not"
            written[_memory(schedule, item.over)] = index
        elif item.kind == "run" and stores(schedule.operations[item.of].op):
            if root[item.reads[0]] in entered - replaced:
                yield item.id, f"changes {item.reads[0]}, which no new value replaces"
            written[_memory(schedule, item.reads[0])] = index
        made.update(dict.fromkeys(item.writes, index))
    final = schedule.instructions[-1].id if schedule.instructions else 0
    for output, value in schedule.outputs:
        if made.get(value, -1) < written.get(_memory(schedule, value), -1):
            yield final, f"is the last, and the {output.kind} {output.name} ({value}) was written over"


def _memory(schedule: Schedule, value: str) -> str:
    """The memory that a value lies in: of a call's buffer its own part."""
    root = schedule.storage.get(value, value)
    return value if root in schedule.collectives else root


def _may_take(schedule: Schedule, item: Instruction) -> tuple[str, ...]:
    """The values that an operator may write over, or a call reduce in place."""
    if item.kind != "start":
        return may_take(schedule, item)
    call = schedule.collectives[item.of]
    return item.reads if call.in_place and CALLS[call.kind].in_place and len(call.parts) == 1 and not call.filled else ()


def _microbatches(schedule: Schedule) -> Violations:
    """Only instructions of the last microbatch read sums, or results made of sums. Gradients leave as sums."""
    last, summed = schedule.graph.microbatches - 1, set(schedule.sums)
    made, short = set[str](), set(schedule.sums)
    for item in schedule.instructions:
        if item.microbatch == BEFORE_ALL:
            continue
        if item.kind == "add" and (len(item.reads) != 1 or len(item.writes) != 1 or not last):
            yield item.id, "adds to a sum, which is one value read and one written, where a step has several microbatches"
        if item.kind == "add":
            short.difference_update(item.writes)
        if item.microbatch not in (0, last):
            yield item.id, f"first runs in microbatch {item.microbatch}, which is neither the first nor the last of {last + 1}"
        elif item.microbatch == 0 and last:
            if made & set(item.reads):
                yield item.id, "runs in every microbatch and reads what the last alone makes"
            if item.kind == "free" and summed & set(item.reads):
                yield item.id, "frees a sum before the last microbatch"
            if item.kind in ("run", "start", "slice") and summed & set(item.reads):
                yield item.id, "reads a sum before the last microbatch"
        elif last:
            if item.kind != "wait" and not set(item.reads) <= made | summed:
                yield item.id, "runs in the last microbatch alone and reads what is of that one"
            if not short.isdisjoint(item.reads):
                yield item.id, "reads a sum before the last microbatch is added to it"
            made.update(item.writes)
    final = schedule.instructions[-1].id if schedule.instructions else 0
    for output, value in schedule.outputs if last and summed else ():  # before ``accumulate`` there are no sums
        if output.kind == "gradient" and value not in made | summed:
            yield final, f"is the last, and the gradient {output.name} ({value}) is that of one microbatch"


def _before_all(schedule: Schedule) -> Violations:
    """What runs before the first microbatch stands first, one call after another, and reads what all microbatches have alike. It makes the
    same however often it runs. What they read of it stays."""
    graph, kept, begun, flying = schedule.graph, frozenset(schedule.kept_values), False, ""
    there = {item.tensor for item in graph.inputs if item.kind in ("parameter", "buffer", "constant")}
    for item in schedule.instructions:
        if item.kind == "free" and not kept.isdisjoint(item.reads):
            yield item.id, "frees what is kept until the last microbatch has ended"
        if item.microbatch != BEFORE_ALL:
            begun = True
            continue
        if begun or graph.microbatches == 1:
            yield item.id, "runs before the first microbatch and stands behind what runs in each, or there are no others"
        if item.kind == "add" or item.phase != FORWARD:
            yield item.id, f"is a {item.kind} of {item.phase} before the first microbatch, where only forward is"
        reason = why_each(schedule.operations[item.of].op) if item.kind == "run" else ""
        if reason:
            yield item.id, f"runs {item.of} before the first microbatch for all of them, which it may not: {reason}"
        if not set(item.reads) <= there:
            yield item.id, "runs before the first microbatch and reads what a microbatch brings"
        if item.kind == "start" and flying:
            yield item.id, f"starts before the first microbatch, with {flying} in flight"
        flying = item.of if item.kind == "start" else "" if item.kind == "wait" else flying
        there.update(item.writes)


def _phases_in_order(schedule: Schedule) -> Violations:
    begun = 0
    for item in schedule.instructions:
        place = PHASES.index(item.half)
        begun = max(begun, place)
        if place < begun:
            yield item.id, f"is of the {item.half} phase and comes after the {PHASES[begun]} phase has begun"


def _second_runs(schedule: Schedule) -> Violations:
    for item in schedule.instructions:
        if item.kind == "run" and (item.phase == "recompute" or item.of.endswith(AGAIN)):
            again, first = schedule.operations[item.of], schedule.operations.get(item.of.removesuffix(AGAIN))
            if item.phase != "recompute" or first is None or item.of == first.op.name or first.op.phase != FORWARD:
                yield item.id, f"runs {item.of} in phase {item.phase}, which is no second run of an operator of forward"
            elif (again.op, again.strategy) != (first.op, first.strategy):  # what it reads may lie otherwise, and be copied
                yield item.id, f"runs {item.of} otherwise than {first.op.name} has run"
            elif why_once(first.op):
                yield item.id, f"runs {first.op.name} a second time, which it may not: {why_once(first.op)}"


def _late(schedule: Schedule) -> Violations:
    loss = schedule.graph.loss
    leaving = {value for index, (_, value) in enumerate(schedule.outputs) if index != loss}
    found: set[str] = set()
    for item in schedule.instructions:
        if item.kind == "free" or not (item.late or not found.isdisjoint(item.reads)):
            continue
        if item.half != FORWARD or item.kind not in (("wait",) if item.late else ("run", "slice")) or loss is None:
            yield item.id, f"is a {item.kind} of {item.half} that is late, or reads what comes late"
        if not leaving.isdisjoint(item.writes):
            yield item.id, "is late, or reads what comes late, and what it makes leaves"
        found.update(item.writes)


def _everything_runs(schedule: Schedule) -> Violations:
    run = {item.of for item in schedule.instructions if item.kind == "run"}
    last = schedule.instructions[-1].id if schedule.instructions else 0
    for name in schedule.operations:
        if name not in run:
            yield last, f"is the last, and the operator {name} has not run"
    there = {item.tensor for item in schedule.graph.inputs} | {value for item in schedule.instructions for value in item.writes}
    for output, value in schedule.outputs:
        if value not in there:
            yield last, f"is the last, and the {output.kind} {output.name} ({value}) has not been made"


def _on_host(schedule: Schedule) -> Violations:
    """Only a copy back reads what lies on the host, and only as many bytes lie there as a rank may fill."""
    values, held, limit = schedule.values, 0, schedule.machine.hardware.offloadable_bytes
    for item in schedule.instructions:
        lying = [value for value in item.reads if values[value].host_bytes]
        if lying and item.kind != "free" and (item.kind != "start" or schedule.collectives[item.of].kind != FROM_HOST.name):
            yield item.id, f"reads {lying[0]}, which lies on the host"
        if item.kind == "start":
            held += sum(values[value].host_bytes for value in item.writes)
            if held > limit:
                yield item.id, f"copies {item.writes[0]} to the host, which then holds {held} bytes of the rank; the limit is {limit}"
        elif item.kind == "free":
            held -= sum(values[value].host_bytes for value in lying)


def is_legal(schedule: Schedule) -> bool:
    """Whether all of ``PREDICATES`` hold."""
    return all(next(iter(predicate(schedule)), None) is None for _, predicate in PREDICATES)


def bytes_in_flight(schedule: Schedule) -> int:
    """The least ``Limits.ahead_bytes`` to which the list keeps."""
    return max((total for _, _, total in _flights(schedule)), default=0)


def _within_limits(schedule: Schedule) -> Violations:
    """Bytes in flight ahead of readers, and behind: one call of each is always allowed."""
    limit = schedule.limits.ahead_bytes
    for item, side, total in _flights(schedule):
        if total > limit:
            yield item.id, f"starts {item.of}: {total} bytes are in flight {side}, the limit is {limit}"


def _flights(schedule: Schedule) -> Iterator[tuple[Instruction, str, int]]:
    """The starts after which calls in flight ahead or behind count against the limit, with their side and bytes."""
    found = windows(schedule)
    flying: dict[str, dict[str, int]] = {"ahead": {}, "behind": {}}
    for item in schedule.instructions:
        if item.kind == "start":
            window = found[item.id]
            side = "ahead" if window.ahead else "behind" if window.behind else ""
            if side:
                flying[side][item.of] = schedule.collectives[item.of].held_bytes
                if len(flying[side]) > _chain(schedule, flying[side]):
                    yield item, side, sum(flying[side].values())
        elif item.kind == "wait":
            for calls in flying.values():
                calls.pop(item.of, None)


def _chain(schedule: Schedule, flying: dict[str, int]) -> int:
    """How many calls in flight may pass the limit: the longest chain in which each reads the result of the one before."""
    lengths: dict[str, int] = {}
    maker: dict[str, str] = {}
    for name in flying:
        parts = schedule.collectives[name].parts
        lengths[name] = 1 + max((lengths[maker[part.source]] for part in parts if part.source in maker), default=0)
        maker.update((part.target, name) for part in parts)
    return max(lengths.values(), default=1)


PREDICATES: tuple[tuple[str, Callable[[Schedule], Violations]], ...] = (
    ("what is read was made before and is not freed", _reads_made),
    ("a collective is started once, and waited for once after that", _waited_once),
    ("what is freed is there, once, and neither leaves nor is on its way", _freed_once),
    ("what is written over is not needed any more", _written_over),
    ("forward comes before backward", _phases_in_order),
    ("gradients of all microbatches are summed before they are reduced and leave", _microbatches),
    ("what runs once before all microbatches stands first, call after call, and all of them find it", _before_all),
    ("an operator that runs a second time may, and does the same in backward", _second_runs),
    ("what comes late leads to the loss alone", _late),
    ("every operator runs, and every output is made", _everything_runs),
    ("bytes in flight stay within the limit", _within_limits),
    ("copies back alone read what lies on the host, and it has room there", _on_host),
)
