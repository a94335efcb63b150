# cython: infer_types=True, annotation_typing=False, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The views of ``tables``, with the same fields as typed buffers."""

from __future__ import annotations

from typing import Any


class Rows:
    """See ``tables.Rows``."""

    def __init__(self, *fields: Any) -> None:
        self.begins, self.entries = fields


class ClockTable:
    """See ``tables.ClockTable``."""

    def __init__(self, *fields: Any) -> None:
        self.first, self.works, self.seconds, self.links, self.late, self.launches, self.reads_back, *rest = fields
        self.flying, self.link_count, self.slowing, self.slowdown, self.overlaps, self.issue = rest


class Timeline:
    """See ``tables.Timeline``."""

    def __init__(self, *fields: Any) -> None:
        self.begins, self.ends, self.stalls, self.since, self.busy, self.until, self.issued, *rest = fields
        self.waited, self.free_at, self.free, self.arrives, self.length = rest


class CallTable:
    """See ``tables.CallTable``."""

    def __init__(self, *fields: Any) -> None:
        self.classes, self.latency, self.beyond, self.launch, self.slope, self.sent, self.came, self.target, *rest = fields
        self.packs, self.unpacks, self.gathers, self.reduces, self.storage, self.source, self.in_place, *rest = rest
        self.laid, self.put = rest


class InstructionTable:
    """See ``tables.InstructionTable``."""

    def __init__(self, *fields: Any) -> None:
        self.segment, self.before, self.after, self.needs, self.makes, self.takes, self.workspace = fields


class StorageTable:
    """See ``tables.StorageTable``."""

    def __init__(self, *fields: Any) -> None:
        self.bytes, self.entered, self.stays = fields


class ArraySchedule:
    """See ``tables.ArraySchedule``."""

    def __init__(self, *fields: Any) -> None:
        self.clock, self.items, self.calls, self.storages, self.rounds = fields


class Order:
    """See ``tables.Order``."""

    def __init__(self, *fields: Any) -> None:
        self.items, self.length, self.head, self.after = fields


class CallCosts:
    """See ``tables.CallCosts``."""

    def __init__(self, *fields: Any) -> None:
        self.seconds, self.copies, self.staging, self.target, self.packs, self.unpacks, self.issued_in, self.issued_out, *rest = fields
        (self.home,) = rest


class Lives:
    """See ``tables.Lives``."""

    def __init__(self, *fields: Any) -> None:
        self.begins, self.ends, self.lies, self.size, self.stamps, self.over, self.taken, self.freed, self.levels, *rest = fields
        self.entered, self.stamp = rest
