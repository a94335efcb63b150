"""A plan as one still picture (SVG), for a document: the simulated step, what a rank holds, and how the layers lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from autopar.plan import Plan
from autopar.report import units
from autopar.report.colours import KINDS
from autopar.report.memory_timeline import held
from autopar.report.parallelism_words import ways
from autopar.report.timeline import Bar, bars, layers, levels, streams
from autopar.schedule.instructions import COMPUTE

WIDTH, LEFT, RIGHT, ROW, LINE = 1000, 90, 20, 34, 18
"""Pixels: of the picture, of its margins, of a stream's row, of a line of text."""
MEMORY = 70
"""Pixels of the memory's height."""
SHORTEST = 0.4
"""Pixels of the shortest bar that is drawn alone. Shorter neighbours of one kind are one bar."""
NARROWEST_LAYER = 40
"""Pixels of the narrowest layer that is named."""
LAYER_ROWS = 12
"""Rows of layers, at most. The rest are counted."""


def svg(plan: Plan) -> str:
    """The picture as text. Raises FileError: a schedule that cannot be simulated."""
    found = bars(plan)
    end = max((bar.end for bar in found), default=0.0)
    parts, top = list(_title(plan)), 3.2 * LINE
    if end > 0:
        parts += _step(plan, found, end, top)
        top += LINE + ROW * len(streams(found)) + LINE
        parts += _memory(plan, end, top)
        top += MEMORY + 1.4 * LINE
        parts += _key({bar.kind for bar in found}, top)
        top += 1.8 * LINE
    rows = list(_layers(plan))
    parts += _table(rows, top)
    height = top + LINE * len(rows) + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="#1c1c1c" role="img" aria-label="{escape(f"plan of {plan.model.target}")}"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _title(plan: Plan) -> Iterator[str]:
    objective = plan.objective
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.items())
    proof = "optimal" if objective.gap == 0 else f"no plan takes less than {units.seconds(objective.bound_seconds)}"
    by_hand = sorted((row.step_seconds, name) for name, row in plan.baselines.items() if row.feasible and row.step_seconds)
    compared = f"; {by_hand[0][1]}, the best by hand, {units.seconds(by_hand[0][0])}" if by_hand else ""
    yield _text(LEFT, 1.1 * LINE, f"{plan.model.target} on {mesh}, {plan.hardware.get('name')}", "font-weight='600' font-size='15'")
    yield _text(LEFT, 2.3 * LINE, f"{units.seconds(objective.seconds)} a step; {proof}{compared}", "fill='#5a5a5a'")


def _step(plan: Plan, found: tuple[Bar, ...], end: float, top: float) -> Iterator[str]:
    """One row a stream, with the layers named above them."""
    scale = (WIDTH - LEFT - RIGHT) / end
    for name, begin, until in layers(plan, found):
        if (until - begin) * scale >= NARROWEST_LAYER:
            yield _text(LEFT + begin * scale, top + 10, name, "font-size='11' fill='#5a5a5a'")
            yield f'<path d="M{LEFT + begin * scale:.1f} {top + 14:.1f}V{top + LINE + ROW:.1f}" stroke="#ccc"/>'
    for number, stream in enumerate(streams(found)):
        y = top + LINE + ROW * number
        yield _text(LEFT - 8, y + ROW / 2 + 2, "operators" if stream == COMPUTE else stream, "text-anchor='end'")
        yield f'<rect x="{LEFT}" y="{y:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 6}" fill="#f4f5f7"/>'
        for kind, begin, until, name in _joined([bar for bar in found if bar.stream == stream], SHORTEST / scale):
            yield (
                f'<rect x="{LEFT + begin * scale:.2f}" y="{y:.1f}" width="{max((until - begin) * scale, SHORTEST):.2f}" '
                f'height="{ROW - 6}" fill="{KINDS[kind][0]}"><title>{escape(name)}</title></rect>'
            )


def _joined(found: Sequence[Bar], shortest: float) -> Iterator[tuple[str, float, float, str]]:
    """Bars as (kind, begin, end, name). A run of one kind without gaps is one bar while it is shorter than ``shortest`` seconds."""
    last: tuple[str, float, float, str] | None = None
    for bar in sorted(found, key=lambda bar: bar.begin):
        if last is not None and last[0] == bar.kind and bar.begin - last[2] < shortest and last[2] - last[1] < shortest:
            last = last[0], last[1], bar.end, last[3]
            continue
        if last is not None:
            yield last
        last = bar.kind, bar.begin, bar.end, bar.name
    if last is not None:
        yield last


def _memory(plan: Plan, end: float, top: float) -> Iterator[str]:
    """Bytes that a rank holds over the step, from 0 to the peak."""
    curve = levels(plan, held(plan).levels)
    peak = max((size for _, size in curve), default=0) or 1
    scale = (WIDTH - LEFT - RIGHT) / end
    path = [f"M{LEFT} {top + MEMORY:.1f}"]
    for begin, size in curve:
        path.append(f"H{LEFT + begin * scale:.1f}V{top + MEMORY * (1 - size / peak):.1f}")
    yield f'<path d="{"".join(path)}H{WIDTH - RIGHT}V{top + MEMORY:.1f}Z" fill="#cfe0ee" stroke="#0072b2"/>'
    yield _text(LEFT - 8, top + 12, units.size(peak), "text-anchor='end'")
    yield _text(LEFT - 8, top + MEMORY, "memory", "text-anchor='end'")


def _key(kinds: set[str], top: float) -> Iterator[str]:
    x = float(LEFT)
    for kind, (colour, name) in KINDS.items():
        if kind in kinds:
            yield f'<rect x="{x:.0f}" y="{top - 10:.1f}" width="11" height="11" fill="{colour}"/>'
            yield _text(x + 16, top, name, "font-size='12' fill='#5a5a5a'")
            x += 34 + 7 * len(name)


def _layers(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(layer, spec, words) of matrices and attentions, the first rows."""
    rows = [(way.title, way.spec or "R", way.words) for way in ways(plan) if len(way.shape) > 1]
    yield from rows[:LAYER_ROWS]
    if len(rows) > LAYER_ROWS:
        yield (f"and {len(rows) - LAYER_ROWS} more", "", "")


def _table(rows: Sequence[tuple[str, str, str]], top: float) -> Iterator[str]:
    for number, (name, spec, words) in enumerate(rows):
        y = top + LINE * number
        yield _text(LEFT, y, name, "font-family='ui-monospace, monospace' font-size='12'")
        yield _text(LEFT + 260, y, spec, "font-family='ui-monospace, monospace' font-size='12' fill='#5a5a5a'")
        yield _text(LEFT + 380, y, words)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
