"""What each rank loads: the rows of a batch that its part of the inputs needs, placed as DTensors that know the whole batch's size.

The batch is dim 0 of the largest input; its spec says which rows are whose. A batch whose size the split does not divide, a last one say,
is loaded whole by every rank, unless it was planned to be cut in unequal parts. Where another input lies in another way, or other dims are
split too, the module cuts or gathers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.runtime.ranks.agreement import everyones
from autopar.runtime.ranks.groups import Team
from autopar.runtime.steps.step import Step
from autopar.runtime.weights.sharding import Place
from autopar.sharding import ShardingSpec
from autopar.torch_compat import flatten_with_paths, map_tensors


@dataclass(frozen=True)
class Rows:
    """How the rows of a batch lie on the mesh.

    Args:
        size: of the planned batch.
        axes: of the mesh that split it, major to minor.
    """

    place: Place
    size: int
    axes: tuple[int, ...]

    def spec(self, size: int, dims: int) -> ShardingSpec:
        """Of a tensor of ``dims`` dims and ``size`` rows: split as planned, or whole where that does not divide it and was not planned."""
        split = ShardingSpec((self.axes, *((),) * (dims - 1)))
        return split if size == self.size or size % split.parts(0, self.place.mesh.sizes) == 0 else ShardingSpec.replicated(dims)

    def of(self, size: int) -> slice:
        """The rows of a batch of ``size`` that this rank needs."""
        mesh = self.place.mesh
        start, length = self.spec(size, 1).span(0, size, mesh.sizes, mesh.coordinates(self.place.rank))
        return slice(start, start + length)

    def placed(self, tree: Any, size: int) -> Any:
        """This rank's rows, in any nesting of tensors, as DTensors of a batch of ``size``.

        Raises:
            UsageError: a tensor that has not the rows that were loaded.
        """
        here = self.of(size)
        loaded = max(here.stop - here.start, 1)  # see ``LocalIndices``

        def place(rows: torch.Tensor) -> torch.Tensor:
            if rows.shape[:1] != (loaded,):
                message = f"a batch of {loaded} loaded rows has a tensor {list(rows.shape)} in it, which is none of rows"
                raise UsageError(message, "leave out of the batch what is not of rows, and pass it to the module beside the batch")
            rows = rows[: here.stop - here.start].to(self.place.device)
            return self.place.dtensor(rows, self.spec(size, rows.dim()), (size, *rows.shape[1:]))

        return map_tensors(place, tree)


def rows_of(step: Step) -> Rows:
    """The rows of the planned batch.

    Raises:
        UsageError: no input has a dim.
    """
    graph: Graph = step.graph
    entering = [item.tensor for item in graph.of_kind("input") if graph.tensors[item.tensor].shape]
    if not entering:
        raise UsageError("the plan has no input with a batch", "load data as the model's forward takes it")
    largest = max(entering, key=lambda name: graph.tensors[name].bytes)
    return Rows(step.place, graph.parts(largest) * graph.tensors[largest].shape[0], step.spec(largest).dims[0])


class LocalIndices:
    """A batch sampler: of each batch of another one, the indices whose rows this rank needs; one where it needs none, for their shapes."""

    def __init__(self, batches: Iterable[Sequence[int]], rows: Rows) -> None:
        self.batches, self.rows = batches, rows

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            indices = list(batch)
            yield indices[self.rows.of(len(indices))] or indices[:1]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class LocalBatches:
    """The batches of a dataset, of which each rank loads its own rows. The order is the same on all ranks.

    Args:
        dataset: of indexed examples.
        batch_size: of whole batches; the planned one when not given.
        shuffle: draws a new order each epoch, from ``seed`` and the epoch's number.
        options: of torch's DataLoader. With ``collate_fn`` ranks compare the shapes that it makes of each batch.
    """

    def __init__(
        self, dataset: Dataset[Any], rows: Rows, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool, options: dict[str, Any]
    ) -> None:  # fmt: skip
        self.dataset, self.rows, self.seed, self.epoch = dataset, rows, seed, 0
        self.generator = torch.Generator()
        order = RandomSampler(dataset, generator=self.generator) if shuffle else SequentialSampler(dataset)
        self.batches = BatchSampler(order, batch_size or rows.size, drop_last)
        self.options = options

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.generator.manual_seed(self.seed + self.epoch)
        self.epoch += 1
        batches = [list(batch) for batch in self.batches]
        loader = DataLoader(self.dataset, batch_sampler=LocalIndices(batches, self.rows), **self.options)
        for batch, loaded in zip(batches, loader, strict=True):
            if self.options.get("collate_fn") is not None:
                _check_alike(loaded, self.rows.place.team)
            yield self.rows.placed(loaded, len(batch))


def _check_alike(loaded: Any, team: Team) -> None:
    """Raises UsageError on all ranks: rows are not of one shape, as where each rank pads to the longest of its own. Collective."""
    shapes = [list(tensor.shape[1:]) for _, tensor in flatten_with_paths(loaded)[0] if isinstance(tensor, torch.Tensor)]
    everyone = everyones(shapes, team)
    rank = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if rank is not None:
        message = f"collate_fn makes rows of {everyone[0]} on rank 0 and of {everyone[rank]} on rank {rank}"
        raise UsageError(message, "pad to a length that is the same on all ranks, not to the longest of the rows that a rank has")
