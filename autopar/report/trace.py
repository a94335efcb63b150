"""The simulated step as a chrome trace (chrome://tracing, Perfetto): one thread a stream."""

from __future__ import annotations

import json

from autopar.plan import Plan
from autopar.report.timeline import step_bars, streams


def chrome_trace(plan: Plan) -> str:
    """JSON with one complete event for each operator, collective and stall; a microsecond of the trace is one of the prediction."""
    found = step_bars(plan)
    threads = {stream: number for number, stream in enumerate(streams(found), 1)}
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": stream}} for stream, number in threads.items()
    ]
    events += [
        {
            "name": bar.name,
            "cat": bar.kind,
            "ph": "X",
            "pid": 0,
            "tid": threads[bar.stream],
            "ts": bar.begin * 1e6,
            "dur": (bar.end - bar.begin) * 1e6,
        }
        for bar in found
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
