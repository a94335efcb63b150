"""A pipeline's step over time: the timetable as a picture with a row a stage, and as a chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import product
from typing import NamedTuple

from autopar.pipeline import STAGE_AXIS
from autopar.pipeline.clock import recorded_costs, recorded_order, recorded_stages, time_pipeline
from autopar.pipeline_plan import PipelinePlan
from autopar.report import units
from autopar.report.colours import KINDS, lighter, text_on
from autopar.report.trace import flow

WIDTH, LEFT, RIGHT, ROW, LINE = 1000, 90, 20, 34, 18
"""Pixels: of the picture, of its margins, of a stage's row, of a line of text."""
LETTER = 7
"""Pixels that a letter of the key takes, at most on average."""
NUMBERED = 16
"""Pixels of the narrowest bar with its microbatch in it."""
LIGHTEST = 0.5
"""Share of white in the bars of a rank's last stage. Those before it have less."""


_DARK = (
    "<style>@media (prefers-color-scheme:dark){.timetable{fill:#e6e6e6}.timetable .paper{fill:#16181c}.timetable .row{fill:#2a2e35}"
    ".timetable .note{fill:#a8adb5}}</style>"
)


class StageBar(NamedTuple):
    """An action over time, in seconds: ``kind`` is a key of ``KINDS``; what a step does once has no microbatch."""

    stage: int
    kind: str
    microbatch: int | None
    begin: float
    end: float

    @property
    def name(self) -> str:
        if self.microbatch is None:
            return "the optimizer's step" if self.kind == "optimizer" else "parameters made ready for all microbatches"
        return f"{KINDS[self.kind][1]} of microbatch {self.microbatch}"


def stage_bars(plan: PipelinePlan) -> tuple[StageBar, ...]:
    """Every action of the timetable, and what each stage does before and behind them: it gathers parameters, and runs its optimizer.

    Raises:
        MismatchError: orders in which a stage waits for ever.
    """
    order, costs = recorded_order(plan), recorded_costs(plan)
    times = time_pipeline(recorded_stages(plan), costs, order, plan.transfer_seconds)
    found, last = list[StageBar](), plan.microbatches - 1
    for action, begin in zip(order, times.begins, strict=True):
        seconds = costs[action.stage].seconds(action.part, last=action.microbatch == last)
        found.append(StageBar(action.stage, action.part, action.microbatch, begin, begin + seconds))
    for position in range(plan.positions):
        mine, begin = range(position, len(costs), plan.positions), 0.0
        end = max(bar.end for bar in found if bar.stage in mine)
        for stage in mine:
            cost = costs[stage]
            found.append(StageBar(stage, "optimizer", None, end, end + cost.optimizer))
            found += [StageBar(stage, "moving", None, begin, begin + cost.begin)] if cost.begin else []
            begin, end = begin + cost.begin, end + cost.optimizer
    return tuple(found)


def pipeline_svg(plan: PipelinePlan) -> str:
    """The timetable as one still picture."""
    bars = stage_bars(plan)
    end = max(bar.end for bar in bars)
    scale = (WIDTH - LEFT - RIGHT) / end if end else 0.0
    top = 3.2 * LINE
    height = top + ROW * plan.positions + 2.4 * LINE
    parts = [*_title(plan), *_rows(plan, bars, scale, top), *_key(bars, plan.positions, top + ROW * plan.positions + 0.4 * LINE)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="timetable" viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="#1c1c1c" role="img" aria-label="{escape(f"timetable of {plan.model.target}")}">'
        f'{_DARK}<rect width="100%" height="100%" class="paper" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _title(plan: PipelinePlan) -> Iterator[str]:
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    words = f"{plan.model.target} on {mesh}, {plan.hardware.get('name')}, {plan.microbatches} microbatches"
    figures = f"{units.seconds(plan.objective.seconds)} a step; no pipeline takes less than {units.seconds(plan.objective.bound_seconds)}"
    yield _text(LEFT, 1.1 * LINE, words, "font-weight='600' font-size='15'")
    yield _text(LEFT, 2.3 * LINE, figures, "class='note' fill='#5a5a5a'")


def _rows(plan: PipelinePlan, bars: tuple[StageBar, ...], scale: float, top: float) -> Iterator[str]:
    for position in range(plan.positions):
        y = top + ROW * position
        yield _text(LEFT - 8, y + ROW / 2 + 2, row_name(plan, position), "text-anchor='end'")
        yield f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 6}" class="row" fill="#f4f5f7"/>'
    for bar in bars:
        position, chunk = bar.stage % plan.positions, bar.stage // plan.positions
        x, y, width = LEFT + bar.begin * scale, top + ROW * position, (bar.end - bar.begin) * scale
        colour = lighter(KINDS[bar.kind][0], LIGHTEST * chunk / max(plan.chunks - 1, 1))
        of = f" of stage {bar.stage}" if plan.chunks > 1 else ""
        title = f"{bar.name}{of}, {units.seconds(bar.begin)} to {units.seconds(bar.end)}"
        yield (
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{ROW - 6}" fill="{colour}" stroke="white" stroke-width="0.6">'
            f"<title>{escape(title)}</title></rect>"
        )
        if width >= NUMBERED and bar.microbatch is not None:
            how = f"text-anchor='middle' fill='{text_on(colour)}' font-size='11'"
            yield _text(x + width / 2, y + ROW / 2 + 2, str(bar.microbatch), how)


def row_name(plan: PipelinePlan, position: int) -> str:
    """Of a row: its stage, or where along the axis of stages it is if it has several."""
    return f"stage {position}" if plan.chunks == 1 else f"{STAGE_AXIS} {position}"


def _key(bars: tuple[StageBar, ...], positions: int, y: float) -> Iterator[str]:
    x, there = float(LEFT), {bar.kind for bar in bars}
    for kind in (kind for kind in ("moving", "forward", "backward", "weights", "optimizer") if kind in there):
        colour, name = KINDS[kind][0], "gathered once" if kind == "moving" else KINDS[kind][1]
        yield f'<rect x="{x:.0f}" y="{y:.1f}" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 18, y + 11, name, "")
        x += 34 + LETTER * len(name)
    later = "; lighter: later stages of the rank" if any(bar.stage >= positions for bar in bars) else ""
    yield _text(x, y + 11, f"idle where grey; a number is a microbatch{later}", "class='note' fill='#5a5a5a'")


def _text(x: float, y: float, words: str, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{escape(words)}</text>'


def pipeline_trace(plan: PipelinePlan) -> str:
    """JSON of a chrome trace with a row a stage, and an arrow from each action to the one that waits for what it sends. A microsecond of
    the trace is one of the prediction."""
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"a rank of each stage of {plan.model.target}"}}
    ]
    for position in range(plan.positions):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": position + 1, "args": {"name": row_name(plan, position)}})
    bars = stage_bars(plan)
    for bar in bars:
        span = {"ts": bar.begin * 1e6, "dur": (bar.end - bar.begin) * 1e6}
        name = f"{bar.name} of stage {bar.stage}" if plan.chunks > 1 else bar.name
        events.append({"name": name, "cat": bar.kind, "ph": "X", "pid": 0, "tid": bar.stage % plan.positions + 1, **span})
    events += _sent(plan, bars)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _sent(plan: PipelinePlan, bars: tuple[StageBar, ...]) -> Iterator[dict[str, object]]:
    """A flow for each pair of actions between which values cross."""
    actions = {(bar.stage, bar.kind, bar.microbatch): bar for bar in bars if bar.microbatch is not None}
    pairs = dict.fromkeys((row.from_stage, row.to_stage) for row in plan.boundaries)
    for place, ((source, target), number) in enumerate(product(pairs, range(plan.microbatches))):
        kind = "forward" if source < target else "backward"
        one, other = actions[source, kind, number], actions[target, kind, number]
        lines = [bar.stage % plan.positions + 1 for bar in (one, other)]
        yield from flow(place, (lines[0], one.begin, one.end), (lines[1], other.begin, other.end))
