"""The plans of a model's calls by length of the batch: weights lie in all of them as one of them wants it.

The longest batch and the shortest are tried as the one that leads; what takes less time over all lengths is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn

from autopar.alike import plan_followers, stored_specs
from autopar.api import capture, plan
from autopar.errors import AutoparError, FileError, InfeasibleError, TimeLimitError, UsageError
from autopar.files import check_path, parse_json, read_text, write_whole
from autopar.graph import Graph
from autopar.options import check_number, check_seconds
from autopar.plan import Plan
from autopar.recording import load
from autopar.report.units import seconds as seconds_text
from autopar.report.units import size as bytes_text
from autopar.runtime.programs.padding import Dims, Padding
from autopar.torch_compat import map_tensors

IGNORED = -100
"""What fills whole numbers among the loss's arguments: the ``ignore_index`` that torch's losses have by default."""
PADDING_FILE = "padding.json"
_FOLDER_HINT = "give the folder that Padded.save wrote"


@dataclass(frozen=True)
class Padded:
    """Plans by length of the batch, the shortest first, each an ordinary plan.

    Args:
        values: what fills each padded input, by name.
        dim: of the first input, the dim that has the length.
    """

    plans: Mapping[int, Plan]
    values: Mapping[str, float]
    dim: int = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Planned lengths, the shortest first."""
        return tuple(self.plans)

    @cached_property
    def padding(self) -> Padding:
        """How calls are padded. Raises UsageError: an output with the length in a dim that holds something else too."""
        inputs = _length_dims([{name: row.shape for name, row in made.inputs.items()} for made in self.plans.values()], self.lengths)
        shapes = [{name: row.shape for name, row in made.outputs.items()} for made in self.plans.values()]
        outputs = _length_dims(shapes, self.lengths)
        for name in shapes[0]:
            extents = [list(item[name]) for item in shapes]
            changing = [dim for dim, along in enumerate(zip(*extents, strict=True)) if len(set(along)) > 1]
            if changing != list(outputs.get(name, ())):
                some = f"{extents[0]} for length {self.lengths[0]} and {extents[1]} for {self.lengths[1]}"
                hint = "return it with a dim that is as long as the batch, or return the loss alone"
                raise UsageError(f"output {name or 'of the model'} is {some}: padding cannot be cut off", hint)
        return Padding(self.lengths, inputs, {name: self.values[name] for name in inputs}, outputs, self.dim)

    def seconds(self, shares: Sequence[float] | None = None) -> float:
        """Predicted time of a step, the mean over the lengths; ``shares`` says how often each comes."""
        steps = [made.predicted.step_seconds for made in self.plans.values()]
        given = [1.0] * len(steps) if shares is None else list(shares)
        return sum(share * step for share, step in zip(given, steps, strict=True)) / sum(given)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes each plan as a file of its own, ``length-512.json``, and what fills inputs. Raises FileError: it cannot be made."""
        check_path(folder, "where to write", "give the path of a folder")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot make the folder {folder}: {error.strerror}", "give the name of a folder that may be made") from error
        for length, made in self.plans.items():
            made.save(Path(folder) / f"length-{length}.json")
        written = {"lengths": self.lengths, "dim": self.dim, "values": dict(self.values)}
        write_whole(Path(folder) / PADDING_FILE, json.dumps(written, indent=1) + "\n")

    def __str__(self) -> str:
        rows = [("length", "a step", "memory", "received")]
        for length, made in self.plans.items():
            row = made.predicted
            figures = seconds_text(row.step_seconds), bytes_text(row.peak_memory_bytes_per_rank), bytes_text(row.received_bytes_per_rank)
            rows.append((str(length), *figures))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows)


def load_padded(folder: str | os.PathLike[str]) -> Padded:
    """Reads what ``Padded.save`` wrote. Raises FileError: a file is missing, or cannot be read."""
    check_path(folder, "what to read", _FOLDER_HINT)
    file = Path(folder) / PADDING_FILE
    data = parse_json(read_text(file, "how calls are padded", _FOLDER_HINT), str(file), _FOLDER_HINT)
    try:
        lengths, dim, values = list(map(int, data["lengths"])), int(data["dim"]), dict(data["values"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{file} does not say how calls are padded: {error!r}", _FOLDER_HINT) from error
    return Padded({length: load(Path(folder) / f"length-{length}.json") for length in lengths}, values, dim)


def plan_padded(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    lengths: Sequence[int],
    dim: int = 1,
    pad: Mapping[str, float] | None = None,
    shares: Sequence[float] | None = None,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    microbatches: int = 1,
    constraints: Mapping[str, str] | None = None,
    time_limit: float = 60.0,
    **options: Any,
) -> Padded:
    """Plans for batches of several lengths, with weights lying alike in all.

    Args:
        model, args, kwargs, mode, loss, loss_args, compute_dtype, constraints: as of ``plan``. The example has any length that is no other
            extent of its tensors: each dim as long as ``dim`` of the first input is one that changes.
        lengths: two or more; a batch is padded at its end to the next one.
        pad: what fills an input, by its name. Without it the loss's whole numbers are filled with -100, all else with zeros.
        shares: how often each length comes; alike when not given. It decides which length leads.
        microbatches: a number.
        time_limit: seconds for all searches; captures come on top.
        options: further ones of ``plan``.

    Raises:
        UsageError: lengths that are none, an example whose length is ambiguous, an output that cannot be cut; else as ``plan``.
    """
    wanted = _check_lengths(lengths, shares)
    check_seconds(time_limit)
    check_number(microbatches)
    call = (tuple(args), dict(kwargs or {}), tuple(loss_args))
    given = _example_length(call, dim)
    graphs: dict[int, Graph] = {}
    for length in wanted:
        own, named, wanted_by_loss = map_tensors(partial(_resized, given=given, length=length), call)
        graphs[length] = capture(
            model, own, named, mode=mode, loss=loss, loss_args=wanted_by_loss, compute_dtype=compute_dtype, microbatches=microbatches
        )
    values = _values(graphs[wanted[0]], wanted, graphs, dict(pad or {}))
    ends, leads = perf_counter() + time_limit, (wanted[-1], wanted[0])
    pins = dict(constraints or {})
    options = {"target": type(model).__name__, **options}
    found: list[Padded] = []
    failed: AutoparError | None = None
    for number, lead in enumerate(leads):
        seconds = max(ends - perf_counter(), 1.0) / (len(leads) - number) / len(wanted)
        limited = {"time_limit": seconds, **options}
        try:
            first = plan(graphs[lead], constraints=pins, **limited)
            found.append(Padded(plan_followers(graphs, lead, first, stored_specs(first), pins, limited), values, dim))
        except (InfeasibleError, TimeLimitError) as error:
            failed = error
    if not found:
        assert failed is not None
        raise failed
    best = min(found, key=lambda made: made.seconds(shares))
    assert best.padding
    for made in best.plans.values():
        made.remember_loss(loss)
    return best


def _check_lengths(lengths: Sequence[int], shares: Sequence[float] | None) -> tuple[int, ...]:
    """The lengths. Raises UsageError: fewer than two, not in order, or shares that are none of theirs."""
    several = tuple(lengths) if isinstance(lengths, Sequence) and not isinstance(lengths, str) else ()
    if len(several) < 2 or not all(isinstance(length, int) and length > 0 for length in several) or sorted(set(several)) != list(several):
        raise UsageError(f"lengths is {lengths!r}", "give two or more whole numbers, the shortest first, e.g. (512, 1024, 2048)")
    if shares is not None and (len(shares) != len(several) or min(shares) < 0 or not sum(shares)):
        raise UsageError(f"shares is {shares!r} for {len(several)} lengths", "say of each length how often it comes, e.g. (0.5, 0.3, 0.2)")
    return several


def _example_length(call: Any, dim: int) -> int:
    """The length of the example. Raises UsageError: it has none, or the batch has as many rows."""
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, call)
    first = next((tensor for tensor in tensors if tensor.dim() > dim), None)
    if dim < 0 or first is None:
        raise UsageError(f"no input of the example has a dim {dim}", "say by dim= which dim of the first input has the length, from 0 on")
    length = first.shape[dim]
    if any(other != dim and extent == length for other, extent in enumerate(first.shape)):
        hint = "give an example of a length that no other dim has; its values are not read"
        raise UsageError(f"the example's first input is {list(first.shape)}: which dims have the length {length} cannot be told", hint)
    return int(length)


def _resized(tensor: torch.Tensor, given: int, length: int) -> torch.Tensor:
    """A tensor without values, of another length."""
    shape = [length if extent == given else extent for extent in tensor.shape]
    return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)


def _length_dims(shapes: Sequence[Mapping[str, Sequence[int]]], lengths: Sequence[int]) -> Dims:
    """By name the dims that are as long as the batch is, in all of the shapes; names without one are left out."""
    found = {}
    for name in shapes[0]:
        along = [tuple(extents) for extents in zip(*(item[name] for item in shapes), strict=True)]
        dims = tuple(dim for dim, extents in enumerate(along) if extents == tuple(lengths))
        if dims:
            found[name] = dims
    return found


def _values(graph: Graph, lengths: Sequence[int], graphs: Mapping[int, Graph], pad: dict[str, float]) -> dict[str, float]:
    """What fills each padded input. Raises UsageError: a name that is no such input, or what is no number."""
    shapes = [{item.name: made.tensors[item.tensor].shape for item in made.of_kind("input")} for made in graphs.values()]
    names = _length_dims(shapes, lengths)
    for name, value in pad.items():
        if name not in names:
            raise UsageError(f"pad names {name!r}, which is no input that has the length", f"name some of {', '.join(names)}")
        if not isinstance(value, int | float):
            raise UsageError(f"pad has {value!r} for {name}", "give a number")
    of_loss = set(_names(graph.arguments.get("loss_args", [])))
    dtypes = {item.name: graph.tensors[item.tensor].dtype for item in graph.of_kind("input")}
    usual = {name: IGNORED if name in of_loss and dtypes[name] in ("int64", "int32") else 0 for name in names}
    return {**usual, **pad}


def _names(tree: Any) -> list[str]:
    """The tensors in a tree of arguments."""
    if isinstance(tree, Mapping):
        return [tree["tensor"]] if set(tree) == {"tensor"} else [name for item in tree.values() for name in _names(item)]
    return [name for item in tree for name in _names(item)] if isinstance(tree, list | tuple) else []
