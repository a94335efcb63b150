"""bucket: small collectives of one kind, group, dtype and segment become one call on a flat buffer, which pays one latency.

Two calls may share a bucket when their windows meet: the later one is ready before the earlier one is needed. Calls of one chain never
do. Calls that may run ahead join in the order of their deadlines, all others as they are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count

from autopar.cost_models.collectives import KINDS
from autopar.schedule.collectives import Collective
from autopar.schedule.instructions import Instruction
from autopar.schedule.ordering import start_and_wait, taken_by
from autopar.schedule.schedule import Schedule
from autopar.schedule.windows import Window, anchors, as_late_as_possible, moving, moving_groups, windows

JOINED = frozenset(name for name, kind in KINDS.items() if kind.bucketable)
"""The kinds that are put in buckets."""


def bucket(schedule: Schedule) -> Schedule:
    """The schedule with buckets of at most ``limits.bucket_bytes``; a value larger than that is a call of its own."""
    depth, found = 1, schedule.once(windows) if schedule.limits.bucket_bytes else {}
    while depth <= max((window.depth for window in found.values()), default=0):
        before, schedule = schedule, _at_depth(schedule, found, depth)
        found = found if schedule is before else schedule.once(windows)
        depth += 1
    return schedule


def bucket_class(item: Instruction, call: Collective) -> tuple[object, ...] | None:
    """The key that calls of one bucket have in common; None for a call that never shares one."""
    if call.kind not in JOINED:
        return None
    return item.segment, item.microbatch, call.kind, call.axes, call.reduction, call.dtype, call.late


def size(call: Collective) -> int:
    """The bytes of a call that count against the limit: the larger of those that a rank sends and receives."""
    return max(call.source_bytes, call.target_bytes)


def _at_depth(schedule: Schedule, found: Mapping[int, Window], depth: int) -> Schedule:
    """Joins the calls at one depth. Calls that read their results follow at the next depth, with new windows."""
    open_: dict[object, _Group] = {}
    groups: list[_Group] = []
    starts = [item for item in schedule.once(moving) if item.kind == "start" and found[item.id].depth == depth]
    starts.sort(key=lambda item: found[item.id].deadline if found[item.id].ahead else found[item.id].ready)
    for item in starts:
        call, window = schedule.collectives[item.of], found[item.id]
        shared = bucket_class(item, call)
        if shared is None:
            continue
        key = shared, window.ahead, window.behind
        current = open_.get(key)
        if current is None or not current.takes(item, size(call), window, schedule.limits.bucket_bytes):
            current = open_[key] = _Group([item], size(call), window.ready, window.deadline)
            groups.append(current)
    joined = {item.id: group.members for group in groups if len(group.members) > 1 for item in group.members}
    return _rebuilt(schedule, joined) if joined else schedule


@dataclass
class _Group:
    """Calls that share a bucket: their bytes, and where all of them may stand."""

    members: list[Instruction]
    bytes: int
    ready: int
    deadline: int

    def takes(self, item: Instruction, size: int, window: Window, limit: int) -> bool:
        """Takes a call in where there is room for it and its window meets all others."""
        ready, deadline = max(self.ready, window.ready), min(self.deadline, window.deadline)
        if self.bytes + size > limit or ready >= deadline:
            return False
        self.members.append(item)
        self.bytes, self.ready, self.deadline = self.bytes + size, ready, deadline
        return True


def _rebuilt(schedule: Schedule, joined: Mapping[int, list[Instruction]]) -> Schedule:
    """The list with each group as one call, everything as late as its readers allow."""
    calls = dict(schedule.collectives)
    number = count(max(item.id for item in schedule.instructions) + 1)
    made: dict[int, tuple[Instruction, ...]] = {}
    for group in {id(group): group for group in joined.values()}.values():
        parts = tuple(part for item in group for part in calls.pop(item.of).parts)
        call = Collective(f"{parts[0].target}+{len(parts) - 1}", parts)
        calls[call.id] = call
        start, wait = start_and_wait(call, taken_by(call, schedule.machine), number)
        begin = group[0].microbatch
        pair = start._replace(microbatch=begin), wait._replace(microbatch=begin)
        made.update((item.id, pair) for item in group)
    soft = list({group[0].id: group for group in (made.get(group[0].id, group) for group in moving_groups(schedule))}.values())
    return replace(schedule, instructions=as_late_as_possible(schedule.segments, schedule.once(anchors), soft), collectives=calls)
