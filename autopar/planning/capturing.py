"""A model's graphs, each captured when it is first asked for: one for each number of microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from autopar.graph import Graph
from autopar.options import Mode
from autopar.target import Target

if TYPE_CHECKING:
    from autopar.importer import Captures

_tracing = Lock()
"""Torch traces one model at a time: what it patches meanwhile, all threads see."""


class Graphs(Protocol):
    """The graphs of one call by number of microbatches: those of a model (``importer.Captures``), or one captured before."""

    def of(self, count: int) -> Graph:
        """The graph of one of ``count`` microbatches."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that the user captured, of one number of microbatches."""

    graph: Graph

    def of(self, count: int) -> Graph:
        assert count == self.graph.microbatches
        return self.graph


def captures_of(
    target: Target, *, mode: Mode, compute_dtype: str | None, pins: Mapping[str, str], staged: bool = False
) -> Captures:  # fmt: skip
    """The model's graphs.

    Args:
        pins: those that split a fused weight as a whole keep it whole in the graph.
        staged: they are for a pipeline, and hints name what helps there.
    """
    from autopar.importer import Captures, capture_graph  # for start-up time: imports torch
    from autopar.importer.passes.microbatches import WITHOUT_MICROBATCHES, WITHOUT_STAGES
    from autopar.placements import plain_dims, without_placement

    kwargs: Any = dict(target.kwargs) if isinstance(target.kwargs, Mapping) else target.kwargs  # what else it is, capture refuses

    def run(args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_args: tuple[Any, ...]) -> Graph:
        with _tracing:
            graph: Graph = capture_graph(
                target.model, args, kwargs, mode=mode, loss=target.loss, loss_args=loss_args, compute_dtype=compute_dtype,
                plain=plain_dims(target.model, pins),
            )  # fmt: skip
        return graph

    call = without_placement((target.args, kwargs, target.loss_args))
    return Captures(run, call, WITHOUT_STAGES if staged else WITHOUT_MICROBATCHES)
