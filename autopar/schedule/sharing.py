"""share: equal reshards of one phase are made once."""

from __future__ import annotations

from dataclasses import replace

from autopar.graph import Phase
from autopar.schedule.assignment import Assignment, Layout
from autopar.sharding import ShardingSpec


def share(assignment: Assignment) -> Assignment:
    """The assignment with one layout for each (source, spec, phase), on the device or on the host, made once a step or not. Readers of the
    others read the first.

    A layout that was made from a dropped one is made from the one that stays.
    """
    kept: dict[tuple[str, ShardingSpec, Phase, bool, bool], Layout] = {}
    renamed: dict[str, str] = {}
    waiting = {layout.value: layout for layout in assignment.layouts}
    layouts: list[Layout] = []

    def place(layout: Layout) -> None:
        if layout.value in renamed or layout.value not in waiting:
            return
        if layout.source in waiting:
            place(waiting[layout.source])
        moved = replace(layout, source=renamed[layout.source]) if layout.source in renamed else layout
        first = kept.setdefault((moved.source, moved.spec, moved.half, moved.on_host, moved.once), moved)
        renamed[layout.value] = first.value
        if first is moved:
            layouts.append(moved)

    for layout in assignment.layouts:
        place(layout)
    reads = {place_: renamed.get(value, value) for place_, value in (assignment.reads or {}).items()}
    return replace(assignment, layouts=tuple(layouts), reads=reads)
