"""Tables of text fit the terminal, and any width where they go elsewhere."""

from __future__ import annotations

import pytest

from autopar.report import summary
from autopar.report.tables import NARROW, Table
from tests.graphs import two_layer_plan

ROWS = (("parameter", "layers.0.attention.query.weight", "64 KiB"), ("input", "x", "4 B"))
WIDE = Table(("kind", "name", "size"), ROWS, frozenset({"size"}))


def test_any_width_is_one_line_a_row() -> None:
    assert list(WIDE.lines()) == [
        "kind       name                               size",
        "parameter  layers.0.attention.query.weight  64 KiB",
        "input      x                                   4 B",
    ]
    assert list(WIDE.lines(50)) == list(WIDE.lines())


@pytest.mark.parametrize("columns", [49, 40, 35])
def test_words_go_on_below_and_none_is_lost(columns: int) -> None:
    lines = list(WIDE.lines(columns))
    assert max(map(len, lines)) <= columns
    name = slice(11, columns - 8)
    assert "".join(line[name].strip() for line in lines[1:3]) == "layers.0.attention.query.weight"
    assert lines[1].endswith("64 KiB") and not lines[2].strip().endswith("KiB") and lines[3].startswith("input      x")


def test_figures_and_short_words_are_left_whole() -> None:
    lines = list(WIDE.lines(10))
    assert max(map(len, lines)) == 11 + NARROW + 8, "no column of words is narrower than NARROW"
    assert lines[1].endswith("64 KiB")


@pytest.mark.parametrize("columns", [100, 80, 72])
def test_a_plan_fits_the_terminal(columns: int) -> None:
    plan = two_layer_plan()
    assert max(map(len, summary(plan).splitlines())) > 80
    fitted = summary(plan, columns)
    assert max(map(len, fitted.splitlines())) <= columns
    assert fitted.split() == summary(plan).split()
