"""A ladder of memory limits: a table, and a page with the step over the memory as a drawing."""

from __future__ import annotations

from html import escape

from autopar.pareto import Pareto
from autopar.report import units
from autopar.report.markup import style, table_html
from autopar.report.tables import Table

_WIDTH, _HEIGHT, _LEFT, _FOOT = 1000.0, 420.0, 90.0, 40.0
_TICKS = 4


def table(found: Pareto) -> Table:
    """A row a limit."""
    rows = [
        (
            units.size(plan.memory_limit_bytes_per_rank), units.size(plan.predicted.peak_memory_bytes_per_rank),
            units.seconds(plan.objective.seconds), units.seconds(plan.objective.bound_seconds), units.percent(plan.objective.gap),
            str(plan.microbatches), str(len(plan.recomputed)), ",".join(f"{name}={size}" for name, size in plan.mesh.items()),
        )
        for plan in found.plans
    ]  # fmt: skip
    header = ("limit", "peak", "step", "bound", "gap", "microbatches", "recomputed", "mesh")
    return Table(header, tuple(rows), frozenset(header) - {"mesh"})


def frontier(found: Pareto) -> str:
    """The table as text."""
    return "\n".join(table(found).lines())


def frontier_html(found: Pareto) -> str:
    """The table and the drawing as one self-contained page."""
    title = f"autopar: step over memory, {found.plans[0].model.target}"
    return "\n".join(
        (
            f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title><style>{style()}"
            ".step { stroke: #3b6fb6 } .bound { stroke: #c9702b } circle { fill: #3b6fb6 }</style></head><body><div class=autopar>",
            f"<h1>{escape(title)}</h1>", _drawing(found), table_html(table(found)), "</div></body></html>\n",
        )
    )  # fmt: skip


def _drawing(found: Pareto) -> str:
    limits = [plan.memory_limit_bytes_per_rank for plan in found.plans]
    steps = [plan.objective.seconds for plan in found.plans]
    bounds = [plan.objective.bound_seconds for plan in found.plans]
    low, high, top = min(limits), max(limits), 1.08 * max(steps) or 1.0

    def x(value: float) -> float:
        return _LEFT + (value - low) / max(high - low, 1) * (_WIDTH - _LEFT - 20)

    def y(value: float) -> float:
        return (_HEIGHT - _FOOT) * (1 - value / top)

    def line(values: list[float], kind: str) -> str:
        """Level between limits: what is allowed more may stay as it is."""
        points = [f"{x(limits[0]):.1f},{y(values[0]):.1f}"]
        for before, limit, value in zip(values, limits[1:], values[1:], strict=False):
            points += [f"{x(limit):.1f},{y(before):.1f}", f"{x(limit):.1f},{y(value):.1f}"]
        return f'<polyline points="{" ".join(points)}" fill="none" class="{kind}" stroke-width="2"/>'

    marks = []
    for tick in range(_TICKS + 1):
        seconds, size = top * tick / _TICKS, low + (high - low) * tick / _TICKS
        marks.append(f'<text x="4" y="{max(y(seconds), 12):.1f}">{units.seconds(seconds)}</text>')
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        marks.append(f'<text x="{x(size):.1f}" y="{_HEIGHT - 12:.1f}" text-anchor="{anchor}">{units.size(size)}</text>')
    dots = [
        f'<circle cx="{x(limit):.1f}" cy="{y(step):.1f}" r="5" class="forward">'
        f"<title>{units.size(limit)}: {units.seconds(step)}</title></circle>"
        for limit, step in zip(limits, steps, strict=True)
    ]
    drawn = "".join((*marks, line(bounds, "bound"), line(steps, "step"), *dots))
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role=img aria-label="step over memory">{drawn}</svg>'
        "<p class=note>Seconds per step over the memory limit per rank: the plans (blue) and the bound on all plans (orange).</p>"
    )
