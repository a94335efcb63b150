"""The simulated step as a chrome trace (chrome://tracing, Perfetto): one thread a stream, one for the layers, and a counter of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from autopar.compare.simulated_step import Flight, SimulatedStep
from autopar.plan import Plan
from autopar.report.memory_timeline import held
from autopar.report.timeline import Bar, bars, layers, levels, streams
from autopar.rows import CollectivePlan, OpPlan
from autopar.schedule.instructions import COMPUTE

FLOW_INSIDE = 0.01
"""Share of a bar before an arrow's end in it. At the very edge the bar before it would be found."""


def chrome_trace(plan: Plan) -> str:
    """JSON with one complete event for each operator, collective, stall, layer and the optimizer's step, an arrow from each collective to
    the operator that waits for it, and a counter of the bytes held. A microsecond of the trace is one of the prediction."""
    found = bars(plan)
    threads = {stream: number for number, stream in enumerate((*streams(found), "layers"), 1)}
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"a rank of {plan.model.target}"}}
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": stream}} for stream, number in threads.items()
    ]
    ops = {row.name: row for row in plan.ops}
    calls = {row.id: row for row in plan.collectives if row.id is not None}
    events += [_event(bar.name, bar.kind, threads[bar.stream], bar.begin, bar.end, _arguments(bar, ops, calls)) for bar in found]
    events += _arrows(found, SimulatedStep(plan).flights, threads)
    events += [_event(name, "layer", threads["layers"], begin, end, {}) for name, begin, end in layers(plan, found)]
    events += [
        {"name": "memory", "ph": "C", "pid": 0, "ts": at * 1e6, "args": {"bytes": level}} for at, level in levels(plan, held(plan).levels)
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _event(name: str, kind: str, thread: int, begin: float, end: float, arguments: dict[str, object]) -> dict[str, object]:
    more = {"args": arguments} if arguments else {}
    return {"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": thread, "ts": begin * 1e6, "dur": (end - begin) * 1e6, **more}


def _arrows(found: Sequence[Bar], flights: Mapping[str, Flight], threads: Mapping[str, int]) -> Iterator[dict[str, object]]:
    """A flow from each collective to the operator after its wait, hidden ones too; to the optimizer where none follows."""
    calls = {bar.of: bar for bar in found if bar.kind == "moving"}
    operators = {bar.of: bar for bar in found if bar.stream == COMPUTE and bar.kind not in ("moving", "stalled")}
    for number, (name, flight) in enumerate(flights.items()):
        call, reader = calls.get(name), operators.get(flight.before)
        if call is None or reader is None:
            continue
        more = {"args": {"stalled_seconds": flight.stalled}} if flight.stalled > 0 else {}
        yield from flow(number, (threads[call.stream], call.begin, call.end), (threads[reader.stream], reader.begin, reader.end), more)


def flow(
    number: int, source: tuple[int, float, float], target: tuple[int, float, float], more: Mapping[str, object] | None = None
) -> Iterator[dict[str, object]]:
    """An arrow between two bars, each (thread, begin, end) in seconds. Its ends lie within the bars, as viewers find them by that."""
    shared = {"name": "waited for by", "cat": "waits", "pid": 0, "id": number, **(more or {})}
    yield {**shared, "ph": "s", "tid": source[0], "ts": (source[1] + FLOW_INSIDE * (source[2] - source[1])) * 1e6}
    yield {**shared, "ph": "f", "bp": "e", "tid": target[0], "ts": (target[1] + FLOW_INSIDE * (target[2] - target[1])) * 1e6}


def _arguments(bar: Bar, ops: dict[str, OpPlan], calls: dict[str, CollectivePlan]) -> dict[str, object]:
    """Details of a bar: an operator's module, arguments, line and tensors, or a collective's axes and bytes."""
    if bar.of in ops:
        op = ops[bar.of]
        lies = {entry.tensor: f"{entry.dtype}{list(entry.shape)} {entry.spec}".strip() for entry in (*op.inputs, *op.outputs)}
        return {"operator": op.op, "module": op.module, "line": op.location or "", "arguments": op.attributes, "tensors": lies}
    if bar.of in calls:
        call = calls[bar.of]
        tensors = [part.tensor for part in call.members]
        return {"axes": list(call.axes), "bytes": call.bytes, "phase": call.phase, "tensors": tensors, "before": call.members[0].before}
    return {}
