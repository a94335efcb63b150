"""Pipeline files: schema ``autopar.pipeline-problem/1`` to a problem, and an answer to ``autopar.pipeline-solution/1``."""

from __future__ import annotations

import difflib
from os import PathLike, fspath
from typing import Any

from ..documents import read_document
from ..errors import ProblemError
from .problem import Mode, PipelineProblem
from .solution import PipelineSolution

SCHEMA = "autopar.pipeline-problem/1"
SOLUTION_SCHEMA = "autopar.pipeline-solution/1"
FAMILY = SCHEMA.partition("/")[0]
TRAINING = {"train": True, "inference": False}
KEYS = ("schema", "name", "layers", "devices", "microbatches", "chunks", "placement", "transfer", "mode", "split", "limit")
"""Keys of a problem; ``layers``, ``devices`` and ``microbatches`` are needed."""


def is_pipeline(document: Any) -> bool:
    """Whether a document is, or means to be, a pipeline problem: its schema or its layers say so."""
    return isinstance(document, dict) and (str(document.get("schema", "")).startswith(FAMILY) or "layers" in document)


def load(path: str | PathLike[str]) -> PipelineProblem:
    """The problem in a file, plain or gzipped. Raises ProblemError for its contents, with the path; OSError for the file."""
    try:
        return from_document(read_document(path))
    except ProblemError as error:
        raise ProblemError(f"{fspath(path)}: {error.what}", error.hint) from error


def from_document(document: Any) -> PipelineProblem:
    """A problem from a document of JSON. Raises ProblemError, one line with a hint, for whatever the schema does not say."""
    if not isinstance(document, dict):
        raise ProblemError("not a pipeline problem: no object", f'write {{"schema": "{SCHEMA}", "layers": [...], ...}}')
    schema = document.get("schema")
    if schema != SCHEMA:
        what = "schema is missing" if schema is None else f"schema is {str(schema)[:60]!r}"
        raise ProblemError(what, f'this version reads "schema": "{SCHEMA}"')
    _known(document, KEYS, "the problem")
    for key in ("layers", "devices", "microbatches"):
        if key not in document:
            raise ProblemError(f"{key} is missing", f"a pipeline problem has the keys {', '.join(KEYS)}")
    layers = document["layers"]
    if not isinstance(layers, list):
        raise ProblemError("layers is not a list", 'write "layers": [{"forward": 1, "backward": 2}, ...]')
    split, mode, name = document.get("split", False), document.get("mode", "train"), document.get("name", "")
    if not isinstance(split, bool):
        raise ProblemError(f"split is {_shown(split)}", "write true or false")
    if mode not in ("train", "inference"):
        raise ProblemError(f"mode is {_shown(mode)}", "one of train, inference")
    if not isinstance(name, str):
        raise ProblemError(f"name is {_shown(name)}, no text", 'write "name": "..." or leave it out')
    return PipelineProblem(
        tuple(_modes(layer, f"layer {number}") for number, layer in enumerate(layers)),
        document["devices"],
        document["microbatches"],
        document.get("chunks", 1),
        document.get("placement", "loop"),
        document.get("transfer", 0.0),
        TRAINING[mode],
        split,
        document.get("limit"),
        name,
    )


def _modes(layer: Any, what: str) -> tuple[Mode, ...]:
    if not isinstance(layer, dict):
        raise ProblemError(f"{what} is {_shown(layer)}, no object", 'write {"forward": 1, "backward": 2}, or {"modes": [...]}')
    if "modes" not in layer:
        return (_mode(layer, what),)
    _known(layer, ("modes",), what)
    modes = layer["modes"]
    if not isinstance(modes, list):
        raise ProblemError(f"modes of {what} is {_shown(modes)}, no list", 'write "modes": [{"forward": 1, "backward": 2}, ...]')
    return tuple(_mode(mode, f"mode {number} of {what}") for number, mode in enumerate(modes))


def _mode(mode: Any, what: str) -> Mode:
    if not isinstance(mode, dict):
        raise ProblemError(f"{what} is {_shown(mode)}, no object", 'write {"forward": 1, "backward": 2}')
    _known(mode, tuple(Mode.__dataclass_fields__), what)
    return Mode(**mode)


def _known(document: dict[str, Any], keys: tuple[str, ...], what: str) -> None:
    for key in document:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its keys are {', '.join(keys)}"
            raise ProblemError(f"{what} has an unknown key {key[:60]!r}", hint)


def _shown(value: Any) -> str:
    return repr(value)[:60]


def to_document(found: PipelineSolution) -> dict[str, Any]:
    """An answer as schema ``autopar.pipeline-solution/1``. Raises ValueError for one without a cut."""
    if found.plan is None:
        raise ValueError("there is no answer to write")
    return {
        "schema": SOLUTION_SCHEMA,
        "cut": list(found.plan.cut),
        "modes": list(found.plan.modes),
        "orders": [[str(operation) for operation in line] for line in found.plan.orders],
        "step": found.step,
        "bound": found.bound,
        "gap": found.gap,
        "status": found.status.value,
    }
