"""The simulated timeline as a chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json

from autopar.plan import Plan
from autopar.timeline import plan_tasks, simulate

_THREADS = {"compute": 1, "communication": 2}


def trace(plan: Plan) -> str:
    """JSON with one complete event for each operator and collective; a microsecond of the trace is one of the prediction."""
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": stream}} for stream, number in _THREADS.items()
    ]
    for slot in simulate(plan_tasks(plan)):
        if slot.end > slot.begin:
            for stream in _THREADS if slot.task.stream == "both" else (slot.task.stream,):
                events.append(
                    {
                        "name": slot.task.name,
                        "cat": slot.task.phase,
                        "ph": "X",
                        "pid": 0,
                        "tid": _THREADS[stream],
                        "ts": slot.begin * 1e6,
                        "dur": (slot.end - slot.begin) * 1e6,
                    }
                )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
