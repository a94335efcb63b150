"""Assignment: the decisions of a search. Specs, strategies and reshards, without an order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from autopar.graph import Phase
from autopar.sharding import ShardingSpec, Strategy

HOST, BACK = "@host", "@back"
"""Suffixes of a value's copy in the memory of the host, and of what is copied back from there."""
OUTPUT = "output:"
"""Prefix of the reader name of a graph output: ``output:0`` is the first entry of ``Graph.outputs``."""
AGAIN = "@again"
"""Suffix of an operator's second run, and of the values that it makes."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a microbatch, in order."""
FORWARD, BACKWARD = PHASES
Moment = Literal["forward", "recompute", "backward"]
"""The phase of an instruction. Second runs and their reshards are ``recompute``, and interleave with backward."""


def half(moment: Moment) -> Phase:
    """The half of the step that a phase belongs to. Recomputation belongs to backward."""
    return FORWARD if moment == FORWARD else BACKWARD


@dataclass(frozen=True)
class Layout:
    """A tensor in a further spec, made once and shared by its readers.

    Args:
        value: unique name of the resharded value.
        tensor: the graph tensor.
        source: the value it is made from: the tensor's own name, or another layout's.
        spec: its spec.
        phase: when it is made; an assignment need not tell ``recompute`` from ``backward``, the schedule does.
        before: the operator that reads it first (a second run by its own name), or ``output:N``. The schedule corrects it where
            another reader comes first.
        on_host: it lies in the memory of the rank's host, and layouts of the same spec alone are made from it: copies back.
        once: where a step has several microbatches, it is made before the first, and kept until the last has ended. It is of forward,
            and made of a parameter, buffer or constant, of the result of an operator that runs once, or of another layout made once.
    """

    value: str
    tensor: str
    source: str
    spec: ShardingSpec
    phase: Moment
    before: str
    on_host: bool = False
    once: bool = False

    @property
    def half(self) -> Phase:
        """Whether it is made in forward or in backward."""
        return half(self.phase)


@dataclass(frozen=True)
class Assignment:
    """The decisions of a search.

    Args:
        inputs: spec of each graph input, by tensor name.
        strategies: strategy of each operator, by name.
        layouts: the reshards, in any order.
        reads: (operator, second run or ``output:N``, input position) -> value read. An absent key reads the tensor as it was made. A
            second run reads the value of its producer's second run, where there is one.
        again: forward operators that run a second time, in backward, under the same strategy. Their first results need not be kept.
            The second run of ``mm`` is called ``mm@again`` and makes ``mm@again``, ``mm:1@again`` ... from the same inputs, or from
            ``reads``. It stands just before its first reader in backward.
        once: forward operators that run once, where a step has several microbatches: before the first, and what microbatches read of their
            results is kept until the last has ended. They may run a second time, and read parameters, buffers, constants, results of one
            another, and layouts made once.
        states_on_host: the parameters, as tensors, whose optimizer states lie on the host between steps.
    """

    inputs: Mapping[str, ShardingSpec]
    strategies: Mapping[str, Strategy]
    layouts: tuple[Layout, ...] = ()
    reads: Mapping[tuple[str, int], str] | None = None
    again: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()
    states_on_host: frozenset[str] = frozenset()

    def in_each_microbatch(self) -> Assignment:
        """The assignment in which nothing runs once before all microbatches; itself where nothing does."""
        if not self.once and not any(layout.once for layout in self.layouts):
            return self
        return replace(self, layouts=tuple(replace(layout, once=False) for layout in self.layouts), once=frozenset())
