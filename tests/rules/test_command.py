"""``autopar rules``."""

from __future__ import annotations

import pytest

from autopar.cli.main import main
from autopar.cli.rules import missing_rules
from autopar.graph import Graph, Op, Tensor


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split(None, 2) for line in out.splitlines()]
    assert ["contraction", "aten.mm", "m k, k n -> m n | linear {0} {1}"] in lines
    assert ["view", "aten.view", "computed: The common factors of both shapes, major to minor"] in lines
    assert err == ""


def test_nothing_is_missing_from_a_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--missing", "zoo:mlp"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "every operator has a rule")


def test_missing_operators_are_counted_and_placed() -> None:
    tensors = {name: Tensor(name, (2,), "float32") for name in "abcd"}
    ops = (
        Op("b", "mine.odd.default", ("a",), ("b",), location="model.py:3"),
        Op("c", "aten.neg.default", ("b",), ("c",)),
        Op("d", "mine.odd.default", ("c",), ("d",), location="model.py:9"),
    )
    assert missing_rules(Graph("inference", tensors, (), ops, ())) == (
        ("mine.odd.default", "2 times", "model.py:3", "it has no row in the table"),
    )
