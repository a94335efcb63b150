"""A sweep as CSV and as a drawing: step and memory of a rank against the number of devices, both axes in powers."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.report import units

Row = Mapping[str, object]
COLUMNS = (
    "devices", "feasible", "mesh", "step_seconds", "gap", "peak_memory_bytes_per_rank", "received_bytes_per_rank", "objective_seconds",
)  # fmt: skip
CURVES = (("step_seconds", "step", "#1f5fa8", units.seconds), ("peak_memory_bytes_per_rank", "memory", "#a8481f", units.size))
"""Column, name, colour and figures of what is drawn."""
WIDTH, HEIGHT, EDGE = 640, 220, 70


def table(rows: Sequence[Row]) -> str:
    """One line for each number of devices; empty where no plan was found.

    >>> print(table([{"devices": 8, "feasible": False, "message": "no plan fits"}]).splitlines()[1])
    8,False,,,,,,
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        mesh = row.get("mesh")
        flat = ",".join(f"{name}={size}" for name, size in mesh.items()) if isinstance(mesh, Mapping) else ""
        writer.writerow({**row, "mesh": flat})
    return text.getvalue()


def drawing(rows: Sequence[Row]) -> str:
    """An SVG with one curve above the other; what does not fit is left out."""
    found = [row for row in rows if row["feasible"]]
    parts = [part for place, curve in enumerate(CURVES) for part in _curve(found, place * HEIGHT, *curve)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(CURVES)}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _curve(rows: Sequence[Row], top: int, column: str, name: str, colour: str, figure: object) -> Iterator[str]:
    points = [(float(str(row["devices"])), float(str(row[column]))) for row in rows]
    yield f'<text x="{EDGE}" y="{top + 16}" fill="{colour}">{name} against devices</text>'
    across, up = _places([x for x, _ in points], EDGE, WIDTH - EDGE), _places([y for _, y in points], top + HEIGHT - 40, top + 40)
    if len(points) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, up, strict=True))
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (devices, value), x, y in zip(points, across, up, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        yield f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{figure(value) if callable(figure) else value}</text>'
        yield f'<text x="{x:.1f}" y="{top + HEIGHT - 14}" text-anchor="middle">{devices:.0f}</text>'


def _places(values: Sequence[float], low: float, high: float) -> list[float]:
    """Where values stand between two ends of a scale of powers; in the middle if they are equal."""
    logs = [math.log(max(value, 1e-30)) for value in values]
    least, most = min(logs, default=0.0), max(logs, default=0.0)
    return [low + (high - low) * ((log - least) / (most - least) if most > least else 0.5) for log in logs]
