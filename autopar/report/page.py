"""A plan as one self-contained HTML page: how layers lie, the simulated step to zoom into, memory beside it, the tables.

Nothing is fetched. The drawing is a canvas, since a step of tens of thousands of bars as elements would not scroll; its data is in the page
as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib.resources import files

from autopar.plan import Plan
from autopar.report import tables, units
from autopar.report.colours import KINDS
from autopar.report.memory_timeline import Held, held
from autopar.report.parallelism_words import differing, ways
from autopar.report.tables import Table
from autopar.report.timeline import bars, layers, levels, streams

LEVELS = 4000
"""Levels of memory that are drawn, at most: of more that follow each other the highest."""
RANKS = 128
"""Ranks that are drawn, at most."""
PARTS = 12
"""Largest items at the peak that are listed, at most."""
LARGE_GAP = 0.2
"""Gap from which the page says what it means."""


def html(plan: Plan) -> str:
    """The whole page as text. Raises FileError: a schedule that cannot be simulated."""
    title = f"autopar plan: {plan.model.target}"
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>body {{ margin: 1.5rem auto; max-width: 80rem; padding: 0 1rem }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ body {{ background: #16181c }} }}\n{style()}</style></head>"
        f"<body><div class=autopar>{_body(plan, title)}</div>\n<script>{_asset('page.js')}</script></body></html>\n"
    )


def fragment(plan: Plan) -> str:
    """The plan in a notebook: figures and tables, styled within themselves, no script."""
    parts = [_tiles(plan), _ways(plan), table_html(tables.baselines(plan)), table_html(tables.collectives(plan))]
    return f"<div class=autopar><style>{style()}</style><h1>{escape(plan.model.target)}</h1>{''.join(parts)}</div>"


def _body(plan: Plan, title: str) -> str:
    memory = held(plan)
    sections = [
        ("Against plans written by hand", _ladder(plan)), ("How the layers lie on the mesh", _mesh(plan) + _ways(plan)),
        ("One step, simulated", _step(plan, memory)), ("What fills the memory at the peak", _parts(plan, memory)),
        ("Measured", _rows(tables.candidates(plan))), ("Baselines", table_html(tables.baselines(plan)) if plan.baselines else ""),
        ("Collectives", _rows(tables.collectives(plan))), ("Tensors", _rows(tables.tensors(plan))),
        ("Particulars", table_html(_particulars(plan), header=False)),
    ]  # fmt: skip
    shown = [f"<section><h2>{name}</h2>{text}</section>" for name, text in sections if text]
    return "\n".join([f"<h1>{escape(title)}</h1>", _tiles(plan), *shown])


def _rows(table: Table) -> str:
    """The table, or nothing where it has no rows."""
    return table_html(table) if table.rows else ""


def _particulars(plan: Plan) -> Table:
    """The overview, and the software."""
    made = plan.created_by
    table = tables.overview(plan)
    software = f"autopar {made.autopar}, torch {made.torch}, prices of {made.cost_model}, solver {made.solver}"
    return Table(table.header, (*table.rows, ("made by", software)), table.right)


def _ladder(plan: Plan) -> str:
    """The bound, the plan and the baselines that fit as bars of one scale, the shortest step first."""
    objective = plan.objective
    found = [("no plan takes less", objective.bound_seconds, "bound"), ("this plan", objective.seconds, "plan")]
    by_hand = [(row.objective_seconds, name) for name, row in plan.baselines.items() if row.feasible and row.objective_seconds]
    found += [(name, seconds, "hand") for seconds, name in sorted(by_hand)]
    most = max(seconds for _, seconds, _ in found)
    if not most:
        return ""
    drawn = "".join(_bar(name, seconds / most, units.seconds(seconds), kind) for name, seconds, kind in found)
    return drawn + (f"<p class=note>{escape(_meaning(plan))}</p>" if objective.gap >= LARGE_GAP else "")


def _bar(name: str, share: float, figure: str, kind: str = "") -> str:
    """A named bar of ``share`` of the width."""
    return f"<div class='part {kind}'><span>{escape(name)}</span><i style='width: {100 * share:.1f}%'></i><b>{figure}</b></div>"


def _meaning(plan: Plan) -> str:
    """What a large gap says."""
    objective = plan.objective
    most = f"at most {objective.seconds / objective.bound_seconds:.1f} times the optimum" if objective.bound_seconds else "not bounded"
    return f"The step is {most}. The bound of small steps leaves most latencies out: a large gap does not say that a shorter plan exists."


@cache
def _asset(name: str) -> str:
    return (files("autopar.report") / name).read_text(encoding="utf-8")


def style() -> str:
    """Of every page."""
    return _asset("page.css")


def table_html(table: Table, header: bool = True) -> str:
    """The table's markup."""
    marks = [" class=figure" if name in table.right else "" for name in table.header]
    head = "<tr>" + "".join(f"<th{mark}>{escape(name)}</th>" for name, mark in zip(table.header, marks, strict=True)) + "</tr>"
    rows = [
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>" for row in table.rows
    ]
    return "<div class=wide><table>" + (head if header else "") + "\n".join(rows) + "</table></div>"


def _tiles(plan: Plan) -> str:
    objective, predicted = plan.objective, plan.predicted
    used = predicted.peak_memory_bytes_per_rank / plan.memory_limit_bytes_per_rank if plan.memory_limit_bytes_per_rank else 0.0
    what = "in collectives" if plan.created_by.cost_model == "communication" else "a step"
    gap = objective.status if objective.gap == 0 else f"gap {units.percent(objective.gap)}"
    found = (
        (units.seconds(objective.seconds), what),
        (gap, f"proved: not below {units.seconds(objective.bound_seconds)}"),
        (units.size(predicted.peak_memory_bytes_per_rank), f"per rank at the peak, {units.percent(used)} of the limit"),
        *_exposed(plan),
        (units.size(predicted.received_bytes_per_rank), "received per rank and step"),
        (" x ".join(f"{name}={size}" for name, size in plan.mesh.items()), f"mesh on {plan.hardware.get('name')}"),
    )  # fmt: skip
    return "<div class=tiles>" + "".join(f"<div class=tile><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in found) + "</div>"


def _exposed(plan: Plan) -> Iterator[tuple[str, str]]:
    """The time for which operators wait for collectives, where the step is of operators, waits and the optimizer alone."""
    predicted = plan.predicted
    if plan.created_by.execution is None and plan.created_by.cost_model != "communication" and predicted.communication_seconds:
        waits = max(predicted.step_seconds - predicted.compute_seconds - predicted.optimizer_seconds, 0.0)
        yield units.seconds(waits), f"exposed, of {units.seconds(predicted.communication_seconds)} of communication"


def _mesh(plan: Plan) -> str:
    """The ranks, the last axis across."""
    names, sizes = list(plan.mesh), plan.sizes
    if not sizes or math.prod(sizes) > RANKS:
        return ""
    across, down = (names[-1], " x ".join(names[:-1])) if len(names) > 1 else (names[0], "")
    cells = "".join(f"<i>{rank}</i>" for rank in range(math.prod(sizes)))
    words = f"{math.prod(sizes)} ranks: {escape(across)} across" + (f", {escape(down)} down" if down else "")
    grid = f"<div class=mesh style='grid-template-columns: repeat({sizes[-1]}, auto)'>{cells}</div>"
    return f"<div class=wide>{grid}</div><p class=note>{words}</p>"


def _ways(plan: Plan) -> str:
    # the words before the figures: a narrow window shows the first columns
    rows = tuple((way.title, way.words, way.spec or "R", units.shape(way.shape), str(len(way.layers))) for way in ways(plan))
    table = table_html(Table(("layer", "how it lies", "spec", "shape", "times"), rows, frozenset({"times"})))
    said = [f"<li>{escape(sentence)}</li>" for sentence in differing(plan)]
    if not said:
        return table + "<p class=note>Equal layers share one sharding.</p>"
    return f"{table}<p class=note>Equal layers that lie in different ways:</p><ul>{''.join(said)}</ul>"


def _step(plan: Plan, memory: Held) -> str:
    data = _data(plan, memory)
    if not data["end"]:
        return "<p class=note>Nothing takes time under this cost model.</p>"
    last = f"The last of {plan.microbatches} microbatches; those before it leave out what runs once. " if plan.microbatches > 1 else ""
    key = "".join(f"<span><i style='background: {colour}'></i>{name}</span> " for colour, name in KINDS.values())
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    buttons = (("in", "+"), ("out", "\u2212"), ("left", "\u2190"), ("right", "\u2192"), ("all", "whole step"))
    return (
        f"<p class='note key'>{key}</p><div class=buttons>"
        + "".join(f"<button name={name} type=button>{text}</button>" for name, text in buttons)
        + "</div><canvas class=steps role=img aria-label='the step, a row a stream'></canvas>"
        "<canvas class=memory role=img aria-label='memory over the step'></canvas><p class=said></p>"
        f"<p class=note>{last}One row a stream: the operators, then the collectives on each link; below, what a rank holds. Scroll with "
        "ctrl to zoom, drag to move, double-click for the whole; point at a bar for its name.</p>"
        f"<script type='application/json'>{text}</script>"
    )


def _data(plan: Plan, memory: Held) -> dict[str, object]:
    """What the drawing draws. Bars are [stream, kind, begin, seconds, number of the name]; a name is what it is called, its module, its
    operator and the user's line."""
    found = bars(plan)
    rows, kinds = streams(found), list(KINDS)
    number = {stream: place for place, stream in enumerate(rows)}
    ops = {row.name: row for row in plan.ops}
    names: dict[tuple[str, ...], int] = {}
    drawn = []
    for bar in found:
        op = ops.get(bar.of)
        words = (bar.name, op.module, op.op, op.location or "") if op is not None else (bar.name,)
        name = names.setdefault(words, len(names))
        drawn.append([number[bar.stream], kinds.index(bar.kind), round(bar.begin, 10), round(bar.end - bar.begin, 10), name])
    held_from = list(_thinned(levels(plan, memory.levels)))
    colours = [colour for colour, _ in KINDS.values()]
    return {
        "end": max((bar.end for bar in found), default=0.0), "streams": rows, "kinds": kinds, "colours": colours, "bars": drawn,
        "names": list(names),
        "layers": [[name, round(begin, 10), round(end, 10)] for name, begin, end in layers(plan, found)], "levels": held_from,
        "peak": max(range(len(held_from)), key=lambda place: held_from[place][1]), "limit": plan.memory_limit_bytes_per_rank,
    }  # fmt: skip


def _thinned(found: tuple[tuple[float, int], ...]) -> Iterator[tuple[float, int]]:
    share = -(-len(found) // LEVELS)
    for place in range(0, len(found), share):
        several = found[place : place + share]
        yield round(several[0][0], 10), max(level for _, level in several)


def _parts(plan: Plan, memory: Held) -> str:
    """The largest items at the peak, as bars."""
    if not memory.parts:
        return ""
    most, rest = memory.parts[0][1], memory.parts[PARTS:]
    rows = [*memory.parts[:PARTS], *([(f"{len(rest)} smaller", sum(size for _, size in rest))] if rest else [])]
    most = max(most, rows[-1][1])
    drawn = [_bar(name, size / most, units.size(size)) for name, size in rows]
    at = plan.schedule[memory.peak] if plan.schedule else None
    where = f"{at.kind} of {at.of}, {at.phase}" if at is not None and at.of else "the end"
    limit, peak = plan.memory_limit_bytes_per_rank, plan.predicted.peak_memory_bytes_per_rank
    return f"<p class=note>{units.size(peak)} of {units.size(limit)}, at {escape(where)}; equal layers are one row.</p>{''.join(drawn)}"
