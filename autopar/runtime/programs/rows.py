"""The rows of a batch that each rank passes: how many, which, and what to say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.graph import GraphInput
from autopar.runtime.steps.step import Step


def block_of(step: Step, item: GraphInput, rank: int) -> tuple[int, ...]:
    """Which part of an input a rank passes: its coordinates on the axes that split it; the same for all where inputs are whole."""
    if step.inputs == "global":
        return ()
    coordinates = step.place.mesh.coordinates(rank)
    return tuple(coordinates[axis] for axis in step.spec(item.tensor).split_axes)


def check_one_batch(step: Step, shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Where each rank passes its own rows: those of all inputs must make up one batch.

    Args:
        shapes: of the whole inputs, by name, as far as the plan's specs tell from this rank's parts.
        tensors: this rank's.

    Raises:
        UsageError: inputs with equally many rows in the plan have another number of rows here; names each one's rows per rank.
    """
    if step.inputs == "global":
        return
    planned = [(item, step.graph.tensors[item.tensor].shape) for item in step.given if item.name in shapes]
    batch = next((shape[0] for _, shape in planned if shape), None)  # of those that the call has
    with_batch = [item for item, shape in planned if shape and shape[0] == batch]
    if len({shapes[item.name][:1] for item in with_batch}) > 1:
        rows = described(step, with_batch, shapes, tensors)
        hint = "pass equally many rows of each"
        if len({step.spec(item.tensor).dims[0] for item in with_batch}) > 1:
            hint = "plan with inputs='local', which splits all inputs' rows alike, or pass whole inputs: compile(..., inputs='global')"
        raise UsageError(f"the rows that each rank passes make up no one batch: {rows}", hint)


def described(
    step: Step, items: Sequence[GraphInput], shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor] | None = None
) -> str:  # fmt: skip
    """The rows per rank of inputs, in words.

    Args:
        shapes: of the whole inputs, by name.
        tensors: this rank's, by name; as planned when not given.
    """
    words = []
    for item in items:
        whole = shapes[item.name]
        axes = step.spec(item.tensor).dims[0] if whole else ()
        given = None if tensors is None else tensors.get(item.name, tensors.get(item.tensor))
        if not whole or not axes or isinstance(given, DTensor):
            words.append(f"{item.name} {whole[0]} on every rank" if whole else f"{item.name} on every rank")
            continue
        names, sizes = step.place.mesh.names, step.place.mesh.sizes
        rows = given.shape[0] if given is not None else -(-whole[0] // step.spec(item.tensor).parts(0, sizes))
        words.append(f"{item.name} {rows} of {whole[0]} over {','.join(names[axis] for axis in axes)}")
    return "; ".join(words)
