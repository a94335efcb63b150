"""Runs an operator under a strategy on simulated ranks: cut the inputs, run each rank on its own arguments, join the outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import autopar.dialect  # noqa: F401  registers the operators of ours
from autopar.cost_models.collectives import KINDS
from autopar.graph import Dtype, Op, Ref, Tensor
from autopar.rules import localize
from autopar.runtime.instructions.inner import Answer, body
from autopar.runtime.instructions.operators import find_function, find_operator, named_results, with_tensors, with_torch_values
from autopar.runtime.ranks.backends import Unequal
from autopar.sharding import InnerCollective, ShardingSpec, Strategy

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Executed:
    """An operator run whole: its description and its tensors."""

    op: Op
    tensors: dict[str, Tensor]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def own(self) -> list[Tensor]:
        """The operator's inputs and outputs, as ``strategies`` wants them."""
        return [self.tensors[name] for name in (*self.op.inputs, *self.op.outputs)]


def execute(target: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Executed:
    """Runs ``target`` on real tensors among its arguments."""
    found: list[torch.Tensor] = []

    def described(argument: Any) -> Any:
        match argument:
            case torch.Tensor():
                found.append(argument)
                return Ref(len(found) - 1)
            case torch.dtype():
                return Dtype(str(argument).removeprefix("torch."))
            case list() | tuple():
                return tuple(described(item) for item in argument)
            case _:
                return argument

    given, named = tuple(described(item) for item in args), tuple((key, described(item)) for key, item in (kwargs or {}).items())
    keywords = with_tensors(with_torch_values(dict(named)), found)
    result = find_operator(target)(*with_tensors(with_torch_values(given), found), **keywords)
    results = [item for item in (result if isinstance(result, (tuple, list)) else [result]) if item is not None]
    inputs = tuple(f"x{index}" for index in range(len(found)))
    outputs = tuple("op" if index == 0 else f"op:{index}" for index in range(len(results)))
    values = dict(zip((*inputs, *outputs), (*found, *results), strict=True))
    tensors = {name: Tensor(name, tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in values.items()}
    return Executed(Op("op", target, inputs, outputs, given, named), tensors, tuple(found), tuple(results))


def split_run(run: Executed, strategy: Strategy, sizes: Sizes) -> list[list[torch.Tensor]]:
    """The outputs of every rank, in rank order, of the operator run under a strategy."""
    shares = [cut(value, spec, sizes) for value, spec in zip(run.inputs, strategy.inputs, strict=True)]
    return run_ranks_of(run, strategy, sizes, shares)


def run_ranks_of(run: Executed, strategy: Strategy, sizes: Sizes, shares: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The same of given parts of its inputs, by input and rank."""
    ranks, bound = list(itertools.product(*(range(size) for size in sizes))), []
    for index, coordinates in enumerate(ranks):
        args, kwargs = localize(run.op, run.tensors, strategy, sizes, coordinates)
        local = [share[index] for share in shares]
        bound.append((with_tensors(with_torch_values(args), local), with_tensors(with_torch_values(dict(kwargs)), local)))
    if strategy.inner:
        results = _lockstep(run.op, strategy, sizes, ranks, bound)
    else:
        function = find_function(run.op.target)
        results = [function(*args, **kwargs) for args, kwargs in bound]
    return [named_results(run.op, result) for result in results]


def _lockstep(op: Op, strategy: Strategy, sizes: Sizes, ranks: list[Sizes], bound: list[tuple[list[Any], dict[str, Any]]]) -> list[Any]:
    bodies = [body(op, strategy, sizes, args, kwargs) for args, kwargs in bound]
    answers: list[Answer | None] = [None] * len(ranks)
    for item in strategy.inner:
        requests, asked = [running.send(answer) for running, answer in zip(bodies, answers, strict=True)], []
        ranks_of_group = 1 if KINDS[item.kind].takes_full else math.prod(sizes[axis] for axis in item.axes)
        for request, tensor in requests:
            assert request == item
            if isinstance(tensor, Unequal):
                continue
            asked.append(tensor.numel() * tensor.element_size() * ranks_of_group)
        assert not asked or asked[0] == max(asked) == item.bytes, f"{asked} bytes asked, {item.bytes} declared"
        answers = []
        for own in ranks:
            others = _group(own, item.axes, ranks)
            group = [requests[ranks.index(other)][1] for other in others]
            if isinstance(group[0], Unequal):
                answers.append(torch.cat([one.rows.split(one.sent)[others.index(own)] for one in group]))
            elif item.kind in RECEIVED:
                answers.append(RECEIVED[item.kind](group, others.index(own), item.reduction))
            elif item.kind == "permute":
                came = requests[ranks.index(_source(own, item, sizes))][1].clone()
                answers.append(came if item.beside is None else partial(_as_it_was, came))
            else:
                answers.append(reduced(group, item.reduction))
    results = []
    for running, answer in zip(bodies, answers, strict=True):
        try:
            running.send(answer)
        except StopIteration as stop:
            results.append(stop.value)
    assert len(results) == len(ranks), "a body asks for more than its strategy declares"
    return results


def _group(own: Sizes, axes: Sizes, ranks: list[Sizes]) -> list[Sizes]:
    """The ranks along some axes through one, the first axis major."""
    others = [other for other in ranks if all(a == b for axis, (a, b) in enumerate(zip(own, other, strict=True)) if axis not in axes)]
    return sorted(others, key=lambda other: [other[axis] for axis in axes])


RECEIVED: dict[str, Callable[[list[torch.Tensor], int, str], torch.Tensor]] = {
    "all_gather": lambda group, place, _: torch.cat([tensor.flatten() for tensor in group]),
    "reduce_scatter": lambda group, place, reduction: reduced([tensor.flatten().chunk(len(group))[place] for tensor in group], reduction),
    "all_to_all": lambda group, place, _: torch.cat([tensor.flatten().chunk(len(group))[place] for tensor in group]).view(group[0].shape),
}
"""What a rank of a group gets of a collective that is an operator of its own, by kind: of the tensors, by the rank's place."""


def _as_it_was(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _source(own: Sizes, item: InnerCollective, sizes: Sizes) -> Sizes:
    """The rank whose tensor this one receives: as far from the other end of every axis, or one place before, the last before the first."""
    number, group = 0, math.prod(sizes[axis] for axis in item.axes)
    for axis in item.axes:
        number = number * sizes[axis] + own[axis]
    number = group - 1 - number if item.reduction == "mirror" else (number + group - 1) % group
    source = list(own)
    for axis in reversed(item.axes):
        number, source[axis] = divmod(number, sizes[axis])
    return tuple(source)


def reduced(tensors: list[torch.Tensor], reduction: str) -> torch.Tensor:
    """The sum, product, maximum or minimum of tensors of one shape."""
    combine: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda t: t.sum(0, dtype=tensors[0].dtype), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0),
        "product": lambda t: t.prod(0, dtype=tensors[0].dtype),
    }  # fmt: skip
    return combine[reduction](torch.stack(tensors))


def cut(value: torch.Tensor, spec: ShardingSpec, sizes: Sizes) -> list[torch.Tensor]:
    """Each rank's part; for a partial spec random addends that sum to the value."""
    assert all(reduction == "sum" for _, reduction in spec.partial)
    parts = math.prod(sizes[axis] for axis in spec.partial_axes)
    continuous = value.is_floating_point() or value.is_complex()
    addends = [torch.randn_like(value) if continuous else torch.randint_like(value, -9, 9) for _ in range(parts - 1)]
    addends.append(value - sum(addends) if addends else value)
    found = []
    for coordinates in itertools.product(*(range(size) for size in sizes)):
        place = 0
        for axis in spec.partial_axes:
            place = place * sizes[axis] + coordinates[axis]
        found.append(block(addends[place], spec, sizes, coordinates).clone(memory_format=torch.contiguous_format))
    return found


def block(value: torch.Tensor, spec: ShardingSpec, sizes: Sizes, coordinates: Sizes) -> torch.Tensor:
    """The part of a global tensor that one rank holds under the spec's splits."""
    for dim, extent in enumerate(tuple(value.shape)):
        value = value.narrow(dim, *spec.span(dim, extent, sizes, coordinates))
    return value


def joined(locals_: list[torch.Tensor], spec: ShardingSpec, shape: Sequence[int], sizes: Sizes) -> torch.Tensor:
    """The global tensor; asserts local shapes, and that ranks that should hold the same part do."""
    whole = torch.full(tuple(shape), 77, dtype=locals_[0].dtype)
    ranks = list(itertools.product(*(range(size) for size in sizes)))
    groups: dict[Sizes, dict[Sizes, list[torch.Tensor]]] = {}
    for coordinates, local in zip(ranks, locals_, strict=True):
        assert tuple(local.shape) == spec.own_shape(shape, sizes, coordinates), f"local shape {tuple(local.shape)} under {spec}"
        at = tuple(coordinates[axis] for axis in spec.split_axes)
        share = tuple(coordinates[axis] for axis in spec.partial_axes)
        groups.setdefault(at, {}).setdefault(share, []).append(local)
    for coordinates in ranks:
        shares = groups[tuple(coordinates[axis] for axis in spec.split_axes)]
        for replicas in shares.values():
            for other in replicas[1:]:
                torch.testing.assert_close(other, replicas[0], equal_nan=True, msg=lambda text: f"replicas differ: {text}")
        value = _total({share: replicas[0] for share, replicas in shares.items()}, spec)
        block(whole, spec, sizes, coordinates).copy_(value)
    return whole


def _total(shares: dict[Sizes, torch.Tensor], spec: ShardingSpec) -> torch.Tensor:
    """Reduces the shares axis by axis, the last partial axis first."""
    for position in reversed(range(len(spec.partial))):
        grouped: dict[Sizes, list[torch.Tensor]] = {}
        for share, value in shares.items():
            grouped.setdefault(share[:position], []).append(value)
        shares = {share: reduced(values, spec.partial[position][1]) for share, values in grouped.items()}
    return shares[()]
