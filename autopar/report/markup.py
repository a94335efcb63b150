"""Parts of pages: the document, sections, tables, tiles and bars. A page is one file that fetches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files

from autopar.report.tables import Table


def document(title: str, body: str, scripts: Iterable[str] = ()) -> str:
    """A whole page with the given body and the named scripts of this package."""
    code = "".join(f"<script>{_asset(name)}</script>\n" for name in scripts)
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<meta name=color-scheme content='light dark'><title>{escape(title)}</title>"
        f"<style>body {{ margin: 1.5rem auto; max-width: 80rem; padding: 0 1rem }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ body {{ background: #16181c }} }}\n{style()}</style></head>"
        f"<body><main class=autopar>{body}</main>\n{code}</body></html>\n"
    )


def section(title: str, text: str) -> str:
    """A section with its heading; nothing where there is no text."""
    return f"<section aria-label='{escape(title, quote=True)}'><h2>{escape(title)}</h2>{text}</section>" if text else ""


@cache
def _asset(name: str) -> str:
    return (files("autopar.report") / name).read_text(encoding="utf-8")


def style() -> str:
    """Of every page."""
    return _asset("page.css")


def table_html(table: Table, header: bool = True, name: str = "table") -> str:
    """The table's markup, which scrolls on its own where the window is narrow. ``name`` is read out for it."""
    marks = [" class=figure" if title in table.right else "" for title in table.header]
    cells = zip(table.header, marks, strict=True)
    head = "<tr>" + "".join(f"<th scope=col{mark}>{escape(title)}</th>" for title, mark in cells) + "</tr>"
    rows = [
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>" for row in table.rows
    ]
    return scrolled(f"<table>{head if header else ''}" + "\n".join(rows) + "</table>", name)


def scrolled(text: str, name: str) -> str:
    """Markup that scrolls sideways on its own, by the keyboard too."""
    return f"<div class=wide tabindex=0 role=region aria-label='{escape(name, quote=True)}'>{text}</div>"


def rows_html(table: Table, name: str) -> str:
    """The table, or nothing where it has no rows."""
    return table_html(table, name=name) if table.rows else ""


def tiles(found: Iterable[tuple[str, str]]) -> str:
    """Figures in large type, each with its words."""
    return "<div class=tiles>" + "".join(f"<div class=tile><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in found) + "</div>"


def bar(name: str, share: float, figure: str, kind: str = "") -> str:
    """A named bar of ``share`` of the width."""
    return f"<div class='part {kind}'><span>{escape(name)}</span><i style='width: {100 * share:.1f}%'></i><b>{escape(figure)}</b></div>"


def note(words: str) -> str:
    return f"<p class=note>{escape(words)}</p>"


def now() -> str:
    """The date that a page bears, to the minute."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
