"""The hardware file's text: sections for links, a line for each class of operators and each residual."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from autopar.measurement.hardware import Measured

DIGITS = 5
"""Significant digits of a figure in the file."""
ROWS = ("efficiency", "residuals")
"""Tables whose entries take a line each."""
SECTIONS = ("links", "axes", "host", *ROWS)
"""Tables with a heading of their own."""


def to_toml(measured: Measured) -> str:
    """The text, which ``load_hardware`` reads back."""
    data = measured.hardware.to_dict()
    lines = [f"# {note}" for note in measured.notes]
    lines += [f"{key} = {_value(value)}" for key, value in data.items() if key not in SECTIONS]
    for link, content in data["links"].items():
        lines += _section(f"links.{link}", content)
    if "host" in data:
        lines += _section("host", data["host"])
    for name in ROWS:
        if name in data:
            lines += ["", f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in data[name].items())]
    return "\n".join(lines) + "\n"


def _section(name: str, content: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    for key, value in content.items():
        yield f"{key} = {_value(value)}"


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else f'"{text}"'


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.{DIGITS}g}" if isinstance(value, float) and value else repr(value)
