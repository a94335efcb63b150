"""A ladder of memory limits: a table, a drawing of the step over the memory, and a page with both."""

from __future__ import annotations

from html import escape

from autopar.pareto import Ladder
from autopar.report import units
from autopar.report.markup import document, now, section, table_html
from autopar.report.plot import Axis, Plot, svg
from autopar.report.tables import Table

WIDTH, HEIGHT = 900, 440
"""Pixels of the drawing without its key."""
BEYOND = 3.0
"""Baselines that take this many times the longest step of the ladder, or its most memory, are named and not drawn."""


def table(found: Ladder) -> Table:
    """A row a limit."""
    rows = [
        (
            units.size(row.memory_limit_bytes_per_rank), units.size(row.peak_memory_bytes_per_rank),
            units.seconds(row.objective_seconds), units.seconds(row.bound_seconds), units.percent(row.gap),
            str(row.microbatches), str(row.recomputed_operators), ",".join(f"{name}={size}" for name, size in row.mesh.items()),
        )
        for row in found.rows
    ]  # fmt: skip
    header = ("limit", "peak", "step", "bound", "gap", "microbatches", "recomputed", "mesh")
    return Table(header, tuple(rows), frozenset(header) - {"mesh"})


def frontier(found: Ladder, columns: int | None = None) -> str:
    """The table as text; ``columns`` is the width of the terminal."""
    return "\n".join(table(found).lines(columns))


def frontier_html(found: Ladder) -> str:
    """The drawing and the tables as one self-contained page, dated today."""
    title = f"autopar: step over memory, {found.target}"
    picture = f"<div class='wide picture' tabindex=0 role=region aria-label='step over memory'>{frontier_svg(found)}</div>"
    parts = [
        section("Step over memory", picture), section("Limits", table_html(table(found), name="limits")),
        section("Plans written by hand", _baselines(found)), f"<p class=note>Page of {now()}.</p>",
    ]  # fmt: skip
    return document(title, f"<h1>{escape(title)}</h1>{''.join(parts)}")


def frontier_svg(found: Ladder) -> str:
    """The step over the memory limit, the bound below it, and the plans written by hand where they take about as much."""
    rows = found.rows
    limits = [float(row.memory_limit_bytes_per_rank) for row in rows]
    steps, bounds = [row.objective_seconds for row in rows], [row.bound_seconds for row in rows]
    by_hand = {name: (float(row.peak_memory_bytes_per_rank), row.objective_seconds) for name, row in found.baselines.items()}
    near = {name: at for name, at in by_hand.items() if at[0] <= BEYOND * max(limits) and at[1] <= BEYOND * max(steps)}
    across = [*limits, *(at[0] for at in near.values())]
    words = "memory per rank: the plans' limit" + (", the peak of those by hand" if near else "")
    memory = Axis.over(words, units.size, across, unit=units.binary_unit(max(across)))
    step = Axis.over("step", units.seconds, [*steps, *bounds, *(at[1] for at in near.values())], zero=True)
    title = _title(found)
    plot = Plot(title, memory, step, WIDTH, HEIGHT)
    plot.guide(list(zip(limits, bounds, strict=True)), "no plan within the limit takes less", "7 4", steps=True)
    plot.curve(list(zip(limits, steps, strict=True)), 0, "the best plan within the limit", steps=True)
    for name, at in near.items():
        plot.mark(*at, name, "a plan written by hand")
    return svg(title, [plot])


def _title(found: Ladder) -> str:
    meshes = dict.fromkeys(" x ".join(f"{name}={size}" for name, size in row.mesh.items()) for row in found.rows)
    words = [found.target, " or ".join(meshes), found.hardware, found.mode]
    return ", ".join(word for word in words if word)


def _baselines(found: Ladder) -> str:
    """The plans written by hand, the shortest step first; nothing where there are none."""
    rows = sorted(found.baselines.items(), key=lambda item: item[1].objective_seconds)
    if not rows:
        return ""
    cells = tuple((name, units.seconds(row.objective_seconds), units.size(row.peak_memory_bytes_per_rank)) for name, row in rows)
    return table_html(Table(("baseline", "step", "peak"), cells, frozenset({"step", "peak"})), name="baselines")
