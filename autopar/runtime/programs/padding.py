"""Calls of any length are padded to the next planned one, and results are cut back.

Whether padding is left out of what a model computes is the model's business: masks, and losses that ignore targets. It is not taken on
trust. Before the first padded call, and the first without targets, a batch of the shortest planned length is run as it is, and padded to
the next one. Where that makes a difference, the call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.importer.arguments.containers import changed
from autopar.runtime.ranks.agreement import everyones
from autopar.runtime.ranks.groups import Team
from autopar.runtime.steps.calls import leaves
from autopar.runtime.steps.step import Step

HandOut = Callable[[str, torch.Tensor], torch.Tensor]
"""What becomes of an output, by its name."""
Dims = Mapping[str, tuple[int, ...]]
"""By name of an input or an output the dims that are as long as the batch is."""

ALLOWED = {"float64": 1e-7, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""By the coarsest dtype in a graph the largest relative error that rounding may make of sums over another number of zeros."""

MASK_HINT = (
    "let the model leave padding out, by a mask that it takes or makes of its inputs, and the loss too (ignore_index); pad= says which"
    " values are padding, e.g. pad={'labels': -100}"
)


class Runs(Protocol):
    """What is asked of a compiled module (``ShardedModule``)."""

    training: bool
    parts: tuple[nn.Module, ...]

    @property
    def step(self) -> Step: ...

    @property
    def team(self) -> Team: ...

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def named_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]: ...

    def program_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step: ...

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], hand_out: HandOut | None = None) -> Any: ...


@dataclass
class Padding:
    """How a module's calls are padded.

    Args:
        lengths: planned, the shortest first; two or more.
        inputs: the dims to be padded, at their end.
        values: what fills each of these inputs.
        outputs: the dims to be cut.
        dim: of an output that no plan has, the dim to be cut where it is as long.
        checked: names of inputs. Calls with these were seen to give the same with padding.
    """

    lengths: tuple[int, ...]
    inputs: Dims
    values: Mapping[str, float]
    outputs: Dims
    dim: int
    checked: frozenset[frozenset[str]] = frozenset()

    def call(self, module: Runs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's result for a call of any length up to the longest.

        Raises:
            UsageError: a longer call, inputs of different lengths, or a model of which padding changes the result.
        """
        args, kwargs = _told_apart((args, dict(kwargs)))
        tensors = {name: tensor for name, tensor in module.named_inputs(args, kwargs).items() if name in self.inputs}
        lengths = [self._length(tensors)]
        if module.step.inputs == "local":  # ranks' rows may differ in length: what ranks make together is as long as the longest
            lengths = everyones(lengths[0], module.team)
        wanted = self._planned(max(lengths))
        if set(lengths) == {wanted}:
            return module.run(args, kwargs)
        if frozenset(tensors) not in self.checked:
            self._check(module, args, kwargs, tensors)
        return self._padded(module, args, kwargs, tensors, wanted, max(lengths))

    def _length(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The length of a call. Raises UsageError: its inputs have several, or a DTensor would have to be padded."""
        found = {f"{name} {list(tensor.shape)}": tensor.shape[dim] for name, tensor in tensors.items() for dim in self.inputs[name]}
        if len(set(found.values())) > 1:
            raise UsageError(f"inputs have several lengths: {', '.join(found)}", "pad them to one length, the longest row of the batch")
        length = next(iter(found.values()), self.lengths[-1])
        placed = next((name for name, tensor in tensors.items() if isinstance(tensor, DTensor)), None)
        if placed is not None and length not in self.lengths:
            hint = f"pad it before it is laid on ranks, to one of {', '.join(map(str, self.lengths))}"
            raise UsageError(f"{placed} is a DTensor of length {length}, which is not planned", hint)
        return length

    def _planned(self, length: int) -> int:
        """The shortest planned length that is as long. Raises UsageError: none is."""
        for planned in self.lengths:
            if planned >= length:
                return planned
        raise UsageError(f"a batch of length {length}, the longest planned is {self.lengths[-1]}", f"cut it, or plan {length} too")

    def _padded(
        self, module: Runs, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], wanted: int,
        length: int,
    ) -> Any:  # fmt: skip
        """The result of the call padded to a planned length, cut back to ``length``."""
        made = {id(tensor): self._pad(name, tensor, wanted) for name, tensor in tensors.items()}
        own, named = changed(lambda tensor: made.get(id(tensor), tensor), (args, dict(kwargs)))
        return module.run(own, named, lambda name, tensor: self._cut(name, tensor, wanted, length))

    def _pad(self, name: str, tensor: torch.Tensor, wanted: int) -> torch.Tensor:
        widths = [0] * (2 * tensor.dim())
        for dim in self.inputs[name]:
            widths[2 * (tensor.dim() - 1 - dim) + 1] = wanted - tensor.shape[dim]
        return nn.functional.pad(tensor, widths, value=self.values[name])

    def _cut(self, name: str, tensor: torch.Tensor, padded: int, length: int) -> torch.Tensor:
        """An output without what padding added."""
        usual = (self.dim,) if tensor.dim() > self.dim and tensor.shape[self.dim] == padded else ()
        for dim in self.outputs.get(name, usual):
            tensor = tensor.narrow(dim, 0, length)
        return tensor

    def _check(
        self, module: Runs, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:  # fmt: skip
        """Raises UsageError: a batch of the shortest length is another one when it is padded to the next. Collective.

        The batch is the call's, cut, or repeated where it is shorter. Where a model draws, both are run as an evaluation. A batch without
        any number in the result, as where no target counts, says nothing: the next call is checked then.
        """
        shortest, longer = self.lengths[:2]
        made = {id(tensor): self._sample(name, tensor, shortest) for name, tensor in tensors.items()}
        own, named = changed(lambda tensor: made.get(id(tensor), tensor), (args, dict(kwargs)))
        samples = {name: made[id(tensor)] for name, tensor in tensors.items()}
        with _untouched(module):
            graph = module.program_of(own, named).graph
            short, padded = module.run(own, named), self._padded(module, own, named, samples, longer, shortest)
        allowed = ALLOWED[_coarsest(graph)]
        results = [list(_compared(graph, result)) for result in (short, padded)]
        if not all(one.isfinite().any() for _, one in results[0]):
            return
        for (name, one), (_, other) in zip(*results, strict=True):
            error = _difference(one, other)
            if error > allowed:
                figures = f"{one.item():.6g}, padded {other.item():.6g}" if one.dim() == 0 else f"relative error {error:.2g}"
                what = f"{name or 'the result'} of a batch of length {shortest}, padded to {longer}, is another one: {figures}"
                raise UsageError(f"padding changes what the model computes: {what}", MASK_HINT)
        self.checked |= {frozenset(tensors)}

    def _sample(self, name: str, tensor: torch.Tensor, length: int) -> torch.Tensor:
        for dim in self.inputs[name]:
            places = torch.arange(length, device=tensor.device) % tensor.shape[dim]
            tensor = tensor.index_select(dim, places)
        return tensor.detach()


def _told_apart(call: Any) -> Any:
    """A call in which no tensor stands twice: each input is padded with what is its own."""
    seen = set[int]()

    def alias(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return tensor.view_as(tensor)
        seen.add(id(tensor))
        return tensor

    return changed(alias, call)


def _compared(graph: Graph, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What of a result says whether padding counts: the loss, or all floats of it where there is none; whole, by name."""
    names = {output.tensor: output.name for output in graph.outputs if output.kind == "output"}
    found = [(names.get(name, name), tensor) for name, tensor in leaves(graph.arguments["outputs"], result)]
    loss = [item for item in found if item[0] == "loss" and item[1].dim() == 0]
    for name, tensor in loss or found:
        if tensor.is_floating_point():
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double()


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """max|a-b| / max|a|; what is in neither a number agrees."""
    gap = torch.where(one.isnan() & other.isnan() | (one == other), 0.0, (one - other).abs()).nan_to_num(nan=torch.inf)
    largest = one.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if one.numel() else 0.0
    return float(gap.max().item() / max(largest, torch.finfo(torch.float64).tiny)) if gap.numel() else 0.0


def _coarsest(graph: Graph) -> str:
    present = {tensor.dtype for tensor in graph.tensors.values()}
    return next((name for name in reversed(ALLOWED) if name in present), "float64")


@contextmanager
def _untouched(module: Runs) -> Iterator[None]:
    """Within it calls without gradients leave buffers, and what is drawn next, as they were; as an evaluation where the model draws."""
    held = [(buffer, buffer.clone()) for _, buffer in module.named_buffers()]
    counts = {name: module.__dict__[name] for name in ("dropout_step", "other_calls")}
    parts: list[Any] = [module, *module.parts]
    flags = [part.training for part in parts]
    try:
        if module.step.draws:
            for part in parts:
                part.training = False
        with torch.no_grad():
            yield
    finally:
        for part, flag in zip(parts, flags, strict=True):
            part.training = flag
        module.__dict__.update(counts)
        with torch.no_grad():
            for buffer, before in held:
                buffer.copy_(before)
