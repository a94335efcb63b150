"""``autopar schema``: the JSON Schema of a file format, for editors and for programs that read plans."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from autopar.cli.terminal import out
from autopar.errors import UsageError


def schema(kind: Annotated[str, typer.Argument(help="plan")]) -> None:
    if kind != "plan":
        raise UsageError(f"there is no schema of {kind!r}", "autopar schema plan")
    from autopar.plan import SCHEMA, Plan

    found = Plan.model_json_schema(by_alias=True)
    out(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **found}, indent=1))
