"""A plan as one self-contained HTML page: how layers lie, the simulated step to zoom into, memory beside it, the tables.

Nothing is fetched. The drawings are canvases, since a step of tens of thousands of bars as elements would not scroll; their data is in the
page as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from autopar.plan import Plan
from autopar.report import tables, units
from autopar.report.colours import KINDS, text_on
from autopar.report.layer_details import Groups, reasons, ways_by_group
from autopar.report.markup import bar, document, note, now, rows_html, scrolled, section, style, table_html, tiles
from autopar.report.memory_timeline import Held, held
from autopar.report.mesh_picture import mesh_data, mesh_words
from autopar.report.parallelism_words import Way, differing, meanings, ways
from autopar.report.planning_command import planning_command, unsaid
from autopar.report.tables import Table
from autopar.report.timeline import bars, layers, levels, streams
from autopar.report.utilisation import utilisation, utilisation_tile

LEVELS = 4000
"""Levels of memory that are drawn, at most: of more that follow each other the highest."""
PARTS = 12
"""Largest items at the peak that are listed, at most."""
LARGE_GAP = 0.2
"""Gap from which the page says what it means."""
SCRIPTS = ("page.js", "mesh.js")
"""What draws a plan's body."""


def html(plan: Plan) -> str:
    """The whole page as text, dated today. Raises FileError: a schedule that cannot be simulated."""
    title = f"autopar plan: {plan.model.target}"
    return document(title, f"<h1>{escape(title)}</h1>{body(plan)}{section('Particulars', particulars(plan))}", SCRIPTS)


def fragment(plan: Plan) -> str:
    """The plan in a notebook: figures and tables, styled within themselves, no script."""
    parts = [_tiles(plan), _ways(plan, ways(plan)), table_html(tables.baselines(plan)), table_html(tables.collectives(plan))]
    return f"<div class=autopar><style>{style()}</style><h1>{escape(plan.model.target)}</h1>{''.join(parts)}</div>"


def body(plan: Plan) -> str:
    """The plan's drawings and tables, with their data, for ``SCRIPTS`` to draw. Raises FileError as ``html``."""
    memory, rows = held(plan), ways(plan)
    data = _data(plan, memory, rows)
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    sections = [
        ("Against plans written by hand", _compared(plan)), ("How the layers lie on the mesh", _mesh(plan, rows) + _ways(plan, rows, True)),
        ("One step, simulated", _step(plan) if data["end"] else note("Nothing takes time under this cost model.")),
        ("What fills the memory at the peak", _parts(plan, memory)), ("Measured", rows_html(tables.candidates(plan), "measured plans")),
        ("Baselines", table_html(tables.baselines(plan), name="baselines") if plan.baselines else ""),
        ("Collectives", rows_html(tables.collectives(plan), "collectives")), ("Tensors", rows_html(tables.tensors(plan), "tensors")),
    ]  # fmt: skip
    shown = "\n".join(section(title, words) for title, words in sections)
    return f"<div class=planned>{_tiles(plan)}{shown}<script type='application/json'>{text}</script></div>"


def particulars(plan: Plan) -> str:
    """The overview, the software, how to plan it again, and the date of the page."""
    made = plan.created_by
    table = tables.overview(plan)
    software = f"autopar {made.autopar}, torch {made.torch}, prices of {made.cost_model}, solver {made.solver}"
    rows = [*table.rows, ("made by", software)]
    command = planning_command(plan)
    if command:
        rows += [("planned again by", command), ("", unsaid(plan))]
    rows.append(("page of", now()))
    return table_html(Table(table.header, tuple(rows), table.right), header=False, name="particulars")


def _compared(plan: Plan) -> str:
    """The bound, the plan and the baselines that fit as bars of one scale, the shortest step first."""
    objective = plan.objective
    found = [("no plan takes less", objective.bound_seconds, "bound"), ("this plan", objective.seconds, "plan")]
    by_hand = [(row.objective_seconds, name) for name, row in plan.baselines.items() if row.feasible and row.objective_seconds]
    found += [(name, seconds, "hand") for seconds, name in sorted(by_hand)]
    most = max(seconds for _, seconds, _ in found)
    if not most:
        return ""
    drawn = "".join(bar(name, seconds / most, units.seconds(seconds), kind) for name, seconds, kind in found)
    return drawn + (note(_meaning(plan)) if objective.gap >= LARGE_GAP else "")


def _from_optimal(plan: Plan) -> str:
    """How far the plan may be from the best, in words."""
    objective = plan.objective
    if objective.gap == 0:
        return "no plan takes less, proved"
    if not objective.bound_seconds:
        return "nothing is proved of the optimum"
    times = f"{objective.seconds / objective.bound_seconds:.2f}".removesuffix("0")
    return f"at most {times} times the optimum: no plan takes less than {units.seconds(objective.bound_seconds)}"


def _meaning(plan: Plan) -> str:
    """What a large gap says."""
    why = "The bound of small steps leaves most latencies out: a large gap does not say that a shorter plan exists."
    if plan.search is not None and plan.search.cut:
        why = "The time limit cut the search: more time may find a shorter plan or raise the bound."
    return f"The step is {_from_optimal(plan)}. {why}"


def _tiles(plan: Plan) -> str:
    objective, predicted = plan.objective, plan.predicted
    used = predicted.peak_memory_bytes_per_rank / plan.memory_limit_bytes_per_rank if plan.memory_limit_bytes_per_rank else 0.0
    gap = objective.status if objective.gap == 0 else f"gap {units.percent(objective.gap)}"
    return tiles((
        (units.seconds(objective.seconds), "in collectives" if plan.created_by.cost_model == "communication" else "a step"),
        (gap, _from_optimal(plan)),
        (
            units.size(predicted.peak_memory_bytes_per_rank),
            f"per rank at the peak, {units.percent(used)} of the limit of {units.size(plan.memory_limit_bytes_per_rank)}",
        ),
        *_exposed(plan), *utilisation_tile(utilisation(plan)),
        (units.size(predicted.received_bytes_per_rank), "received per rank and step"),
        (" x ".join(f"{name}={size}" for name, size in plan.mesh.items()), f"mesh on {plan.hardware.get('name')}"),
    ))  # fmt: skip


def _exposed(plan: Plan) -> Iterator[tuple[str, str]]:
    """The time for which operators wait for collectives, where the step is of operators, waits and the optimizer alone."""
    predicted = plan.predicted
    if plan.created_by.execution is None and plan.created_by.cost_model != "communication" and predicted.communication_seconds:
        waits = max(predicted.step_seconds - predicted.compute_seconds - predicted.optimizer_seconds, 0.0)
        yield units.seconds(waits), f"exposed, of {units.seconds(predicted.communication_seconds)} of communication"


def _mesh(plan: Plan, rows: Sequence[Way]) -> str:
    """The ranks and the parts of one weight, which the reader picks."""
    if not rows:
        return note(mesh_words(plan))
    first = next((place for place, way in enumerate(rows) if len(way.shape) > 1 and "S" in way.spec), 0)
    options = "".join(
        f"<option value={place}{' selected' if place == first else ''}>{escape(way.title)}</option>" for place, way in enumerate(rows)
    )
    return (
        f"<p><label>Parts of <select name=way>{options}</select></label></p>"
        "<canvas class=mesh role=img aria-label='the ranks of the mesh, coloured by the part that each holds'></canvas>"
        f"<p class='said where' aria-live=polite></p>{note(mesh_words(plan))}"
    )


def _ways(plan: Plan, rows: Sequence[Way], pick: bool = False) -> str:
    """The table of layers in words; with ``pick`` its names choose what the mesh shows. Words stand before figures: a narrow window shows
    the first columns."""
    if not rows:
        return ""
    head = "<tr><th scope=col>layer</th><th scope=col>how it lies</th><th scope=col>spec</th><th scope=col>shape</th>"
    lines = []
    for place, way in enumerate(rows):
        name = escape(way.title)
        first = f"<button class=link type=button name=way value={place}>{name}</button>" if pick else name
        cells = "".join(f"<td>{escape(text)}</td>" for text in (way.spec or "R", units.shape(way.shape)))
        lines.append(f"<tr><td>{first}</td><td class=words>{escape(way.words)}</td>{cells}<td class=figure>{len(way.layers)}</td></tr>")
    table = scrolled(f"<table>{head}<th scope=col class=figure>times</th></tr>{''.join(lines)}</table>", "how the layers lie")
    said = [f"<li>{escape(sentence)}</li>" for sentence in differing(plan)]
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in meanings(way.words for way in rows))
    glossary = f"<details><summary>What these words mean</summary><dl>{words}</dl></details>" if words else ""
    if not said:
        return table + note("Equal layers share one sharding.") + glossary
    return f"{table}<p class=note>Equal layers that lie in different ways:</p><ul>{''.join(said)}</ul>{glossary}"


def _step(plan: Plan) -> str:
    last = f"The last of {plan.microbatches} microbatches; those before it leave out what runs once. " if plan.microbatches > 1 else ""
    key = "".join(f"<span><i style='background: {colour}'></i>{name}</span> " for colour, name in KINDS.values())
    buttons = (
        ("in", "+", "zoom in"), ("out", "\u2212", "zoom out"), ("left", "\u2190", "earlier"), ("right", "\u2192", "later"),
        ("all", "whole step", "the whole step"),
    )  # fmt: skip
    drawn = "".join(f"<button name={name} type=button aria-label='{words}'>{sign}</button>" for name, sign, words in buttons)
    return (
        f"<p class='note key'>{key}</p><div class=buttons>{drawn}"
        "<label>layer <select name=group><option value=''>none</option></select></label></div>"
        "<canvas class=steps tabindex=0 role=img aria-label='the step, a row a stream; arrows move, plus and minus zoom'></canvas>"
        "<canvas class=memory role=img aria-label='memory over the step'></canvas><p class=said aria-live=polite></p>"
        f"<p class=note>{last}One row a stream: the operators, then the collectives on each link; below, what a rank holds. Scroll with "
        "ctrl to zoom, drag to move, double-click for the whole; point at a bar for its name. Click a layer for its operators, its "
        "collectives and how its weights lie.</p><div class=layer aria-live=polite></div>"
    )


def _data(plan: Plan, memory: Held, rows: Sequence[Way]) -> dict[str, object]:
    """What the drawings draw. Bars are [stream, kind, begin, seconds, number of the name]; a name is what it is called, its module, its
    operator, the user's line, and the number of its group."""
    found, groups, by_group = bars(plan), Groups(plan), ways_by_group(rows)
    lanes, kinds = streams(found), list(KINDS)
    number = {stream: place for place, stream in enumerate(lanes)}
    ops = {row.name: row for row in plan.ops}
    names: dict[tuple[str | int, ...], int] = {}
    titles: dict[str, int] = {}
    drawn = []
    for one in found:
        op = ops.get(one.of)
        group = titles.setdefault(groups.of(one.of), len(titles))
        words = (one.name, op.module, op.op, op.location or "", group) if op is not None else (one.name, "", "", "", group)
        name = names.setdefault(words, len(names))
        drawn.append([number[one.stream], kinds.index(one.kind), round(one.begin, 10), round(one.end - one.begin, 10), name])
    held_from = list(_thinned(levels(plan, memory.levels)))
    colours = [colour for colour, _ in KINDS.values()]
    return {
        "end": max((one.end for one in found), default=0.0), "streams": lanes, "kinds": kinds, "colours": colours,
        "inks": [text_on(colour) for colour in colours], "kindNames": [name for _, name in KINDS.values()], "bars": drawn,
        "names": list(names), "groups": list(titles), "groupWays": [by_group.get(title, []) for title in titles],
        "reasons": reasons(plan, rows), "mesh": mesh_data(plan, rows),
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
    drawn = [bar(name, size / most, units.size(size)) for name, size in rows]
    at = plan.schedule[memory.peak] if plan.schedule else None
    where = f"{at.kind} of {at.of}, {at.phase}" if at is not None and at.of else "the end"
    limit, peak = plan.memory_limit_bytes_per_rank, plan.predicted.peak_memory_bytes_per_rank
    return note(f"{units.size(peak)} of {units.size(limit)}, at {where}; equal layers are one row.") + "".join(drawn)
