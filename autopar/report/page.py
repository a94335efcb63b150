"""A plan as one self-contained HTML page: the tables of the terminal and the simulated step as a drawing. No script, nothing fetched."""

from __future__ import annotations

from html import escape

from autopar.plan import Plan
from autopar.report import tables, units
from autopar.report.tables import Table
from autopar.report.timeline import Bar, bars, streams

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1c1c1c; background: #fff }
table { border-collapse: collapse; margin: 0 0 2rem } th, td { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #888; font-weight: 600 } td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto; background: #f4f4f4; margin-bottom: .3rem } .note { color: #555; margin-bottom: 2rem }
.forward { fill: #3b6fb6 } .backward { fill: #7a4fa3 } .recompute { fill: #b58ad6 } .moving { fill: #c9702b } .stalled { fill: #c33 }
.step { stroke: #3b6fb6 } .bound { stroke: #c9702b }
svg text { font-size: 13px; fill: #555 }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #161616 } svg { background: #242424 } .note { color: #aaa } }
"""
_WIDTH, _ROW, _LABELS = 1200.0, 26.0, 90.0


def html(plan: Plan) -> str:
    """The whole page as text."""
    title = f"autopar plan: {plan.model.target}"
    parts = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>", table_html(tables.overview(plan), header=False), "<h2>Against plans written by hand</h2>",
        table_html(tables.baselines(plan)), "<h2>One step, simulated</h2>", _drawing(plan), "<h2>Collectives</h2>",
        table_html(tables.collectives(plan)), "<h2>Tensors</h2>", table_html(tables.tensors(plan)), "</body></html>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def table_html(table: Table, header: bool = True) -> str:
    """The table's markup."""
    marks = [" class=figure" if name in table.right else "" for name in table.header]
    head = "<tr>" + "".join(f"<th{mark}>{escape(name)}</th>" for name, mark in zip(table.header, marks, strict=True)) + "</tr>"
    rows = [
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>" for row in table.rows
    ]
    return "<table>" + (head if header else "") + "\n".join(rows) + "</table>"


def _drawing(plan: Plan) -> str:
    found = bars(plan)
    end = max((bar.end for bar in found), default=0.0)
    if end == 0.0:
        return "<p class=note>Nothing takes time under this cost model.</p>"
    rows = {stream: row for row, stream in enumerate(streams(found))}
    height = len(rows) * _ROW + 4
    labels = [f'<text x="4" y="{2 + (row + 0.65) * _ROW:.0f}">{escape(stream)}</text>' for stream, row in rows.items()]
    drawn = [text for bar in found for text in _bar(bar, rows[bar.stream], end)]
    last = f"The last of {plan.microbatches} microbatches; those before it leave out what runs once. " if plan.microbatches > 1 else ""
    return (
        f'<svg viewBox="0 0 {_LABELS + _WIDTH:.0f} {height:.0f}" role=img aria-label="timeline">{"".join(labels + drawn)}</svg>'
        f"<p class=note>{last}One row a stream: the operators (blue forward, violet backward, pale violet what backward makes again, red "
        f"where they stand still for a collective), then the collectives on each link; {units.seconds(end)} in all, the optimizer's step "
        "left out. Point at a bar for its name.</p>"
    )


def _bar(bar: Bar, row: int, end: float) -> list[str]:
    left, width = _LABELS + bar.begin / end * _WIDTH, (bar.end - bar.begin) / end * _WIDTH
    if width < 0.02:
        return []
    title = escape(f"{bar.name}: {units.seconds(bar.end - bar.begin)}")
    return [
        f'<rect x="{left:.2f}" y="{2 + row * _ROW:.0f}" width="{width:.2f}" height="{_ROW - 4:.0f}" '
        f"class={bar.kind}><title>{title}</title></rect>"
    ]
