"""The plans of a model's calls while it generates: one for each length of prompt, one for a token at each length of the cache.

All work on the same weights and the same cache, so these lie in all of them as one of them wants it: the call that leads is planned freely,
and the others with its specs as pins. A prompt is mostly arithmetic and splits rows best; a token mostly reads weights and splits
these. Which of the two leads is what costs less over a prompt and the tokens expected after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from autopar.alike import plan_followers, stored_specs
from autopar.api import capture, plan
from autopar.errors import FileError, InfeasibleError, UsageError
from autopar.files import check_path
from autopar.graph import Graph
from autopar.importer.export.precision import is_autocast
from autopar.options import check_seconds
from autopar.plan import Plan
from autopar.recording import load
from autopar.report.units import seconds as seconds_text
from autopar.report.units import size as bytes_text
from autopar.serving.cached import NAME, MakeCache, cached
from autopar.sharding import ShardingSpec

Call = tuple[int, int]
"""Length of the cache, and columns of tokens: those of a prompt, or 1."""


@dataclass(frozen=True)
class Serving:
    """Plans of a model's calls while it generates, by length of the cache and columns of tokens.

    Each is an ordinary plan, of ``cached(model, batch, length)`` called with ``example_call``.
    """

    plans: Mapping[Call, Plan]

    @property
    def batch(self) -> int:
        """Rows of every call."""
        return next(iter(self.plans.values())).inputs["input_ids"].shape[0]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the cache, the shortest first; one where it is static."""
        return tuple(sorted({length for length, _ in self.plans}))

    @cached_property
    def prompts(self) -> tuple[int, ...]:
        """Lengths of prompts, the shortest first."""
        return tuple(sorted({columns for _, columns in self.plans if columns > 1})) or (1,)

    def prompt_of(self, columns: int) -> int:
        """The length that a prompt is padded to. Raises UsageError: none is as long."""
        fitting = [prompt for prompt in self.prompts if prompt >= columns]
        if not fitting:
            message = f"a prompt of {columns} tokens, the longest planned is {self.prompts[-1]}"
            raise UsageError(message, f"shorten it, or plan with prompt={columns}")
        return fitting[0]

    def room(self, filled: int) -> int:
        """The shortest length of the cache that holds so many tokens. Raises UsageError: none does."""
        if filled > self.lengths[-1]:
            message = f"{filled} tokens, prompt and padding included, do not fit into a cache of {self.lengths[-1]}"
            raise UsageError(message, "ask for fewer tokens, or plan with more: tokens=, or lengths= of the cache")
        return next(length for length in self.lengths if length >= filled)

    def seconds(self, tokens: int) -> float:
        """Predicted time of a prompt, the mean over the lengths planned, and of so many tokens after it."""
        return sum(count * self.plans[call].predicted.step_seconds for call, count in _counts(self.lengths, self.prompts, tokens).items())

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes each plan as a file of its own: ``prompt-64-of-256.json``, ``token-of-256.json``. Raises FileError: it cannot be made."""
        check_path(folder, "where to write", "give the path of a folder")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"cannot make the folder {folder}: {error.strerror}", "give the name of a folder that may be made") from error
        for (length, columns), made in self.plans.items():
            made.save(Path(folder) / f"{f'prompt-{columns}' if columns > 1 else 'token'}-of-{length}.json")

    def __str__(self) -> str:
        rows = [("tokens", "cache", "a call", "memory", "received")]
        for (length, columns), made in sorted(self.plans.items(), key=lambda item: (-item[0][1], item[0][0])):
            row, peak = made.predicted, made.predicted.peak_memory_bytes_per_rank
            figures = seconds_text(row.step_seconds), bytes_text(peak), bytes_text(row.received_bytes_per_rank)
            rows.append((f"{self.batch} x {columns}", str(length), *figures))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows)


def load_serving(folder: str | os.PathLike[str]) -> Serving:
    """Reads the plans that ``Serving.save`` wrote. Raises FileError: there are none, or one cannot be read."""
    files = sorted(Path(folder).glob("*-of-*.json"))
    if not files:
        raise FileError(f"there are no plans of a cache in {folder}", "give the folder that Serving.save wrote")
    plans = {}
    for file in files:
        made = load(file)
        if not {"input_ids", "attention_mask"} <= set(made.inputs):
            raise FileError(f"{file} is not a plan of a model with a cache", "give the folder that Serving.save wrote")
        plans[made.inputs["attention_mask"].shape[1], made.inputs["input_ids"].shape[1]] = made
    return Serving(plans)


def example_call(batch: int, length: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of ``cached(model, batch, length)`` for so many columns of tokens, without values."""
    shapes = (batch, columns), (batch, length), (batch, columns)
    ids, mask, positions = (torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes)
    return ids, mask, positions


def plan_serving(
    model: nn.Module,
    *,
    batch: int,
    prompt: int | Sequence[int],
    tokens: int,
    lengths: int | Sequence[int] | None = None,
    cache: MakeCache | None = None,
    constraints: Mapping[str, str] | None = None,
    time_limit: float = 60.0,
    **options: Any,
) -> Serving:
    """Plans for prompts of a causal model and tokens after them, with weights and cache lying alike in all.

    Args:
        model: a causal model as transformers has them, see ``cached``; weights real, fake or meta.
        batch: rows of every call.
        prompt: tokens of a prompt, or several such lengths; one in between is padded on the left to the next.
        tokens: expected after a prompt: which call leads is decided for so many.
        lengths: of the cache, through which it grows; one that holds prompt and tokens when not given: a static cache.
        cache: makes a cache of a length; for models of transformers not needed.
        constraints: as of ``plan``; ``cache.*`` are the cache's tensors.
        time_limit: seconds for all searches; captures come on top.
        options: of ``plan``: mesh or devices, hardware, memory, compute_dtype (not autocast's), cost_model, effort, seed.

    Raises:
        UsageError: lengths that hold no prompt, a model without a cache; else as ``plan``.
    """
    prompts, rooms = _sizes("prompt", prompt), () if lengths is None else _sizes("lengths", lengths)
    _check_sizes(batch, prompts, tokens, None if lengths is None else rooms)
    check_seconds(time_limit)
    unknown = sorted(set(options) & {"mode", "loss", "loss_args", "optimizer", "microbatches", "recompute"})
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: a model that generates is not trained", "leave it out")
    if is_autocast(options.get("compute_dtype")):
        message = f"compute_dtype={options['compute_dtype']!r} makes keys and values in half precision, the cache has the model's dtype"
        raise UsageError(message, "convert the model and leave it out, as in plan_serving(model.bfloat16(), ...)")
    rooms = rooms or (prompts[-1] + tokens,)
    counts = _counts(rooms, prompts, tokens)
    computed = {"compute_dtype": options.pop("compute_dtype", None)}
    graphs = {}
    for length in rooms:
        whole = cached(model, batch, length, cache, device="meta")
        for call in (call for call in counts if call[0] == length):
            graphs[call] = capture(whole, example_call(batch, *call), mode="inference", **computed)
    leads = dict.fromkeys((max(counts, key=lambda call: call[1]), (rooms[-1], 1)))
    pins, ends = {"output:*": "R R", **(constraints or {})}, perf_counter() + time_limit
    name = options.pop("target", None) or type(model).__name__
    found: list[Serving] = []
    failed: InfeasibleError | None = None
    for number, lead in enumerate(leads):
        seconds = max(ends - perf_counter(), 1.0) / (len(leads) - number) / len(graphs)
        try:
            found.append(_led(graphs, lead, pins, {"time_limit": seconds, "target": name, **options}))
        except InfeasibleError as error:
            failed = error
    if not found:
        assert failed is not None
        raise failed
    return min(found, key=lambda made: made.seconds(tokens))


def _led(graphs: Mapping[Call, Graph], lead: Call, pins: Mapping[str, str], options: Mapping[str, Any]) -> Serving:
    """Plans of all calls with weights and cache as the call that leads wants them."""
    first = plan(graphs[lead], constraints=pins, **options)
    alike = stored_specs(first)
    whole = {name: _without(alike[name], dims) for name, dims in _growing(graphs.values()).items()}
    if any(alike[name] != spec for name, spec in whole.items()):  # what grows would have to move between ranks whenever it does
        first = plan(graphs[lead], constraints={**pins, **whole}, **options)
        alike = stored_specs(first)
    return Serving(plan_followers(graphs, lead, first, alike, pins, options))


def _growing(graphs: Iterable[Graph]) -> dict[str, list[int]]:
    """The dims of the cache's tensors that grow with its length."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for graph in graphs:
        for item in graph.of_kind("buffer"):
            if item.name.startswith(f"{NAME}."):
                shapes.setdefault(item.name, set()).add(graph.tensors[item.tensor].shape)
    return {
        name: [dim for dim, extents in enumerate(zip(*known, strict=True)) if len(set(extents)) > 1] for name, known in shapes.items()
    }  # fmt: skip


def _without(spec: str, dims: Sequence[int]) -> str:
    """The spec with these dims whole."""
    held = ShardingSpec.parse(spec)
    return str(ShardingSpec(tuple(() if dim in dims else axes for dim, axes in enumerate(held.dims))))


def _counts(lengths: Sequence[int], prompts: Sequence[int], tokens: int) -> dict[Call, float]:
    """How often each call is made for a prompt, the mean over their lengths, and the tokens after it."""
    found: dict[Call, float] = {(_room(lengths, prompt), prompt): 1 / len(prompts) for prompt in prompts}
    for length in (length for length in lengths if length > prompts[0]):
        found[length, 1] = found.get((length, 1), 0.0)
    for prompt in prompts:
        for filled in range(prompt + 1, min(prompt + tokens, lengths[-1] + 1)):
            found[_room(lengths, filled), 1] += 1 / len(prompts)
    return found


def _room(lengths: Sequence[int], filled: int) -> int:
    """The shortest that holds so many; the longest where none does."""
    return next((length for length in lengths if length >= filled), lengths[-1])


def _sizes(what: str, given: object) -> tuple[int, ...]:
    """One size, or several, the smallest first. Raises UsageError: what are no whole numbers from 1 on."""
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    sizes = [item for item in several if isinstance(item, int) and item > 0]
    if len(sizes) < len(several):
        raise UsageError(f"{what} is {given!r}", "give a whole number from 1 on, or several")
    return tuple(sorted(set(sizes)))


def _check_sizes(batch: int, prompts: Sequence[int], tokens: int, lengths: Sequence[int] | None) -> None:
    for what, number in (("batch", batch), ("tokens", tokens)):
        if not isinstance(number, int) or number < 1:
            raise UsageError(f"{what} is {number!r}", "give a whole number from 1 on")
    if not prompts:
        raise UsageError("no length of prompt is given", "give prompt=, the tokens of the longest")
    if lengths is not None and (not lengths or max(lengths) <= prompts[-1]):
        known = ", ".join(map(str, lengths)) or "none"
        message = f"a cache of lengths {known} does not hold a prompt of {prompts[-1]} and a token after it"
        raise UsageError(message, f"let the longest be {prompts[-1] + tokens}, or leave lengths out")
