"""A sweep as a table, as CSV and as a drawing: step and memory of a rank against what differs, both axes in powers."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from autopar.report import units
from autopar.report.tables import Table
from autopar.sweeping import Point, Sweep

COLUMNS = (
    "devices", "feasible", "mesh", "step_seconds", "gap", "peak_memory_bytes_per_rank", "received_bytes_per_rank", "objective_seconds",
    "memory_limit_bytes_per_rank", "microbatches",
)  # fmt: skip
CURVES = (("step_seconds", "step", units.seconds), ("peak_memory_bytes_per_rank", "memory", units.size))
"""Column, name and figures of what is drawn."""
COLOURS = ("#1f5fa8", "#a8481f", "#2f7d32", "#7b3fa0", "#9a7d0a", "#0f7f8c", "#b0306a", "#555555")
"""Colours of the curves of one drawing, in turn."""
LEAST = 1.25
"""A scale goes over such a factor at least."""
WIDTH, HEIGHT, EDGE, LINE = 640, 220, 70, 15


def table(sweep: Sweep) -> Table:
    """A row a point. Efficiency: steps a second and rank against the first number of devices with the same settings and limit."""
    varied, several = _settings(sweep), len({point.memory_limit for point in sweep.points}) > 1
    cut = any(point.plan is not None and point.plan.microbatches > 1 for point in sweep.points)
    rows, first = [], dict[object, tuple[int, float]]()
    for point in sweep.points:
        named = [str(point.settings[key]) for key in varied] + [units.size(point.memory_limit)] * several + [str(point.devices)]
        if point.plan is None:
            rows.append((*named, *["-"] * (5 + cut), "does not fit" if point.fits is False else "no plan"))
            continue
        step = point.plan.predicted.step_seconds
        ranks, before = first.setdefault((tuple(point.settings.items()), point.memory_limit), (point.devices, step))
        scaling = before * ranks / (step * point.devices) if step > 0 else 1.0
        mesh = ",".join(f"{name}={size}" for name, size in point.plan.mesh.items())
        rows.append((
            *named, mesh, units.seconds(step), units.percent(point.plan.objective.gap), f"{100 * scaling:.0f} %",
            units.size(point.plan.predicted.peak_memory_bytes_per_rank), *[str(point.plan.microbatches)] * cut, point.plan.objective.status,
        ))  # fmt: skip
    header = (*varied, *["limit"] * several, "devices", "mesh", "step", "gap", "efficiency", "memory", *["microbatches"] * cut, "status")
    return Table(header, tuple(rows), frozenset(header) - {"mesh", "status"})


def text(sweep: Sweep) -> str:
    """The table as text."""
    return "\n".join(table(sweep).lines())


def csv_table(sweep: Sweep) -> str:
    """One line a point, its settings first, ``settings.KEY`` where one has a column's name; empty where no plan was found."""
    named = {key: f"settings.{key}" if key in COLUMNS else key for key in _settings(sweep)}
    lines = io.StringIO()
    writer = csv.DictWriter(lines, [*named.values(), *COLUMNS], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for point in sweep.points:
        row = point.row()
        mesh = row.get("mesh")
        flat = ",".join(f"{name}={size}" for name, size in mesh.items()) if isinstance(mesh, Mapping) else ""
        writer.writerow({**row, **{name: point.settings[key] for key, name in named.items()}, "mesh": flat})
    return lines.getvalue()


def drawing(sweep: Sweep) -> str:
    """An SVG with the steps above and the memory below; what does not fit is left out. Across are the devices or, where all have the same,
    the first setting whose numbers differ, or the limits; each combination of what else differs is a curve."""
    across, of = _across(sweep)
    curves: dict[str, list[Point]] = {}
    for point in sweep.points:
        if point.plan is not None:
            curves.setdefault(_label(sweep, point, across), []).append(point)
    height = HEIGHT + LINE * max(len(curves) - 1, 0)
    parts = [part for place, curve in enumerate(CURVES) for part in _panel(curves, across, of, place * height, height, *curve)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height * len(CURVES)}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _settings(sweep: Sweep) -> list[str]:
    return list(sweep.points[0].settings) if sweep.points else []


def _across(sweep: Sweep) -> tuple[str, Callable[[Point], float]]:
    """The horizontal axis: its name, and its value at a point."""
    if len({point.devices for point in sweep.points}) > 1:
        return "devices", lambda point: point.devices
    for key in _settings(sweep):
        values = [point.settings[key] for point in sweep.points]
        if len(set(map(str, values))) > 1 and all(_number(value) for value in values):
            return key, lambda point, key=key: float(point.settings[key])
    if len({point.memory_limit for point in sweep.points}) > 1:
        return "memory limit", lambda point: point.memory_limit
    return "devices", lambda point: point.devices


def _number(value: object) -> bool:
    try:
        return float(str(value)) > 0
    except ValueError:
        return False


def _label(sweep: Sweep, point: Point, across: str) -> str:
    """The words of what differs beside what the drawing goes over."""
    words = [f"{key} {value}" for key, value in point.settings.items() if key != across]
    if across != "memory limit" and len({other.memory_limit for other in sweep.points}) > 1:
        words.append(f"limit {units.size(point.memory_limit)}")
    return ", ".join(words)


def _panel(
    curves: Mapping[str, Sequence[Point]], across: str, of: Callable[[Point], float], top: float, height: float, column: str, name: str,
    figure: Callable[[float], str],
) -> Iterator[str]:  # fmt: skip
    every = [point for points in curves.values() for point in points]
    ups = {id(point): float(str(point.row()[column])) for point in every}
    low, high = top + height - 40, top + 40 + LINE * max(len(curves) - 1, 0)
    place_x, place_y = _scale([of(point) for point in every], EDGE, WIDTH - EDGE), _scale(list(ups.values()), low, high)
    yield f'<text x="{EDGE}" y="{top + 16}">{name} against {escape(across)}</text>'
    for number, (label, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        ordered = sorted(points, key=of)
        if label:
            yield f'<text x="{EDGE}" y="{top + 16 + LINE * (number + 1)}" fill="{colour}">{escape(label)}</text>'
        if len(ordered) > 1:
            line = " ".join(f"{place_x(of(point)):.1f},{place_y(ups[id(point)]):.1f}" for point in ordered)
            yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for point in ordered:
            x, y = place_x(of(point)), place_y(ups[id(point)])
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{figure(ups[id(point)])}</title></circle>'
            if len(curves) == 1:
                yield f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{figure(ups[id(point)])}</text>'
    if len(curves) > 1:
        for value in sorted({min(ups.values()), max(ups.values())}):
            yield f'<text x="{EDGE - 8}" y="{place_y(value) + 4:.1f}" text-anchor="end">{figure(value)}</text>'
    for value in sorted({of(point) for point in every}):
        said = units.size(value) if across == "memory limit" else f"{value:g}"
        yield f'<text x="{place_x(value):.1f}" y="{top + height - 14}" text-anchor="middle">{said}</text>'


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """Where a value stands between two ends of a scale of powers; what is nearly equal stands in the middle."""
    logs = [math.log(max(value, 1e-30)) for value in values]
    least, most = min(logs, default=0.0), max(logs, default=0.0)
    span = max(most - least, math.log(LEAST))

    def place(value: float) -> float:
        return low + (high - low) * (0.5 + (math.log(max(value, 1e-30)) - (least + most) / 2) / span)

    return place
