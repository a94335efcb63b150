"""``autopar rules``: THE table, one operator a line; with ``--missing``, a model's operators that are not in it."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from autopar.cli.planning import read_mode
from autopar.cli.terminal import note, out
from autopar.graph import Graph
from autopar.rules import find_rule, table


def rules(
    missing: Annotated[str | None, typer.Option(metavar="TARGET", help="list this model's operators without a rule")] = None,
    mode: Annotated[str, typer.Option(help="with --missing: train or inference")] = "train",
) -> None:
    if missing is None:
        out(_columns(table()))
        return
    from autopar.cli.target import capture_target

    rows = missing_rules(capture_target(missing, read_mode(mode)))
    if rows:
        out(_columns(rows))
    else:
        note("every operator has a rule")


def missing_rules(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """The operators that would run replicated: (operator, how often, where first, why), most frequent first."""
    found = [(op, find_rule(op, graph.tensors)) for op in graph.ops]
    unknown = [(op, rule.reason) for op, rule in found if not rule.known]
    first = {op.target: (op.location or op.module, reason) for op, reason in reversed(unknown)}
    return tuple((target, f"{count} times", *first[target]) for target, count in Counter(op.target for op, _ in unknown).most_common())


def _columns(rows: tuple[tuple[str, ...], ...]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows)
