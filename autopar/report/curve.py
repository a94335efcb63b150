"""A sweep as a table, as CSV and as a drawing: step and memory of a rank against what differs, axes in powers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence

from autopar.report import units
from autopar.report.plot import Axis, Plot, svg
from autopar.report.tables import Table
from autopar.sweeping import Point, Sweep

COLUMNS = (
    "devices", "feasible", "mesh", "step_seconds", "gap", "peak_memory_bytes_per_rank", "received_bytes_per_rank", "objective_seconds",
    "memory_limit_bytes_per_rank", "microbatches",
)  # fmt: skip
CURVES = (("step_seconds", "step", units.seconds), ("peak_memory_bytes_per_rank", "memory", units.size))
"""Column, name and figures of what is drawn."""
WIDTH, HEIGHT = 720, 300
"""Pixels of each plot without its key."""


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
    the first setting whose numbers differ, or the limits; each combination of what else differs is a curve. Beside the steps stand the
    bound, the best plan by hand that fits and, over devices, a step that falls as devices are added."""
    across, of = _across(sweep)
    curves: dict[str, list[Point]] = {}
    for point in sweep.points:
        if point.plan is not None:
            curves.setdefault(_label(sweep, point, across), []).append(point)
    title = _title(sweep)
    return svg(title, [_plot(curves, across, of, title if place == 0 else "", *curve) for place, curve in enumerate(CURVES)])


def _title(sweep: Sweep) -> str:
    names = dict.fromkeys(str(point.plan.hardware.get("name")) for point in sweep.points if point.plan is not None)
    return ", ".join((sweep.target, *names, sweep.mode))


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


def _plot(
    curves: Mapping[str, Sequence[Point]], across: str, of: Callable[[Point], float], title: str, column: str, name: str,
    figure: Callable[[float], str],
) -> Plot:  # fmt: skip
    steps = column == CURVES[0][0]
    every = [point for points in curves.values() for point in points]
    ordered = {label: sorted(points, key=of) for label, points in curves.items()}
    drawn = {label: [(of(point), float(str(point.row()[column]))) for point in points] for label, points in ordered.items()}
    bounds = {label: [(of(one), one.plan.objective.bound_seconds) for one in points if one.plan] for label, points in ordered.items()}
    ideal = {label: [(x, line[0][1] * line[0][0] / x) for x, _ in line] for label, line in drawn.items()} if across == "devices" else {}
    by_hand = [(of(point), *best) for point in every if (best := _by_hand(point)) is not None]
    ups = [y for line in drawn.values() for _, y in line]
    if steps:
        ups += [y for line in (*bounds.values(), *ideal.values()) for _, y in line if y > 0] + [seconds for _, seconds, _ in by_hand]
    words = "memory limit per rank" if across == "memory limit" else across
    said = units.size if across == "memory limit" else lambda value: f"{value:g}"
    at = sorted({of(point) for point in every})
    up_name = "step" if steps else "peak memory per rank"
    up = Axis.over(up_name, figure, ups, powers=True, unit=1.0 if steps else 2.0)
    plot = Plot(title, Axis.over(words, said, at, powers=True), up, WIDTH, HEIGHT, at)
    for number, (label, line) in enumerate(drawn.items()):
        if steps and len(line) > 1:
            plot.guide(ideal.get(label, ()), "ideal: twice the devices, half the step", "2 4")
            plot.guide([(x, y) for x, y in bounds[label] if y > 0], "no plan takes less", "7 4")
        plot.curve(line, number, label)
    for x, seconds, baseline in by_hand if steps else ():
        plot.mark(x, seconds, baseline, "the best plan by hand that fits", named=len(curves) == 1)
    return plot


def _by_hand(point: Point) -> tuple[float, str] | None:
    """Seconds and name of the best baseline that fits."""
    rows = point.plan.baselines.items() if point.plan is not None else ()
    return min(((row.step_seconds, name) for name, row in rows if row.feasible and row.step_seconds), default=None)
