"""``autopar hardware``: the built-in hardware files, and the text of one with the source of each figure."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.terminal import out
from autopar.cost_models import hardware_names, hardware_text, load_hardware
from autopar.options import user_errors
from autopar.report import units
from autopar.report.tables import Table

HALVES = ("bfloat16", "float16")
"""16-bit types. Older devices have no bfloat16."""


def hardware(
    name: Annotated[str | None, typer.Argument(help="prints its file, with the source of each figure: a start for your own")] = None,
) -> None:
    with user_errors():
        out(_table() if name is None else hardware_text(name), end="\n" if name is None else "")


def _table() -> str:
    rows = []
    for name in hardware_names():
        one = load_hardware(name)
        rows.append((
            name, units.size(int(one.memory_bytes)), units.size(one.usable_bytes), _flops(max(map(one.peak, HALVES))),
            _speed(one.memory_bandwidth),
            str(one.devices_per_node), _speed(one.node.bandwidth), _speed(one.network.bandwidth),
        ))  # fmt: skip
    header = ("name", "memory", "for plans", "16-bit", "memory speed", "a node", "in a node", "between nodes")
    words = "published figures and marked assumptions; autopar hardware NAME gives their sources, autopar profile measures this machine"
    return "\n".join([*Table(header, tuple(rows), frozenset(header) - {"name"}).lines(), "", words])


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _speed(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:,.0f} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:,.0f} MB/s"
