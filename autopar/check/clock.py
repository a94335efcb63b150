"""How long the schedule takes, by what every instruction has to wait for.

For each instruction the earlier ones are looked up that hold it back: the last operator or wait, the last holder of each of its links, the
calls that bring what it reads (where launches do not overlap with work, everything after a start is held back by these too). A late wait
is not held back by its call. It begins when the last of these has ended, and the host has issued it. Operators beside busy links are
slower, but not beside copies to the host and back: the time that an operator, or a wait's copies, shares with any collective is counted at
the reduced speed.

The host issues kernels and calls in the order of the list, each in the same time. The last of an operator's kernels takes its part of the
operator's seconds after it is issued, and a collective begins after its copies are issued. The host waits for the
last operator or wait to end before an operator whose values it reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.rows import InstructionPlan

COMPUTE = "compute"
BESIDE = frozenset({"to_host", "from_host"})
"""The streams whose copies leave operators their speed."""


def makespan(rows: Sequence[InstructionPlan], slowdown: float, overlaps: bool = True, issue: float = 0.0) -> float:
    """Seconds from the first instruction to the end of the last.

    Args:
        slowdown, overlaps: the hardware's ``overlap_slowdown`` and ``launch_overlaps``.
        issue: seconds that the host takes for a kernel or a call.
    """
    ends: dict[int, float] = {}
    busy: list[tuple[float, float]] = []
    gate, held = -1, 0.0
    holder: dict[str, int] = {}
    bringer: dict[str, int] = {}
    started: dict[str, int] = {}
    ready = 0.0
    for place, row in enumerate(rows):
        if row.kind not in ("run", "add", "start", "wait"):
            continue
        links = [name for name in row.stream.split("+") if name and name != COMPUTE]
        before = [gate, *(holder.get(link, -1) for link in links)]
        if row.kind == "start":
            bringing = [bringer[value] for value in row.reads if value in bringer]
            before += bringing
            held = held if overlaps else max([held, *(ends[other] for other in bringing)])
        elif row.kind == "wait" and not row.late:
            before.append(started[row.of])
        count = row.launches or 0
        if row.reads_back and issue:
            ready = max(ready, held, ends.get(gate, 0.0))
        first = ready + issue * min(count, 1)
        ready += issue * count
        issued = ready if row.kind == "start" else first
        begin = max(held, issued if count else 0.0, *(ends.get(other, 0.0) for other in before))
        ends[place] = begin + row.seconds if links else slowed(begin, row.seconds, busy, slowdown)
        if count > 1 and not links:
            ends[place] = max(ends[place], ready + row.seconds / count)
        if row.kind == "start":
            started[row.of] = place
            bringer.update(dict.fromkeys(row.writes, place))
        else:
            gate = place
        if row.kind == "start" or links:
            holder.update(dict.fromkeys(links, place))
            since = ends.get(gate, 0.0) if row.kind == "start" else begin  # one that waits for a copy slows operators from here on
            busy = [span for span in busy if span[1] > ends.get(gate, 0.0)] + [(since, ends[place])] * (not BESIDE.issuperset(links))
    return max(ends.values(), default=0.0)


def step(
    rows: Sequence[InstructionPlan], microbatches: int, slowdown: float, overlaps: bool = True, issue: float = 0.0
) -> float:  # fmt: skip
    """Seconds of what runs once, before all microbatches, and of these, one after another: each runs the rows that do not wait for a
    later one."""
    first, rows = [row for row in rows if row.microbatch < 0], [row for row in rows if row.microbatch >= 0]
    spans: dict[int, float] = {}
    for number in range(microbatches):
        running = [row for row in rows if row.microbatch <= number]
        if len(running) not in spans:
            spans[len(running)] = makespan(running, slowdown, overlaps, issue)
    found = math.fsum(spans[sum(row.microbatch <= number for row in rows)] for number in range(microbatches))
    return found + makespan(first, slowdown, overlaps, issue)


def slowed(begin: float, seconds: float, busy: list[tuple[float, float]], slowdown: float) -> float:
    """When work that begins at ``begin`` ends: within the spans in which a link is busy it goes on at ``1 - slowdown``."""
    edges = sorted({begin, *(edge for span in busy for edge in span if edge > begin)})
    left = seconds
    for at, until in zip(edges, [*edges[1:], float("inf")], strict=True):
        beside = any(first <= at < last for first, last in busy)
        rate = 1.0 - slowdown if beside else 1.0
        if left <= rate * (until - at):
            return at + (left / rate if left else 0.0)
        left -= rate * (until - at)
    raise AssertionError("after the last edge nothing is busy")
