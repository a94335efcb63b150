"""Assignment: what a search decides. Values, no order yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.graph import Phase
from autopar.sharding import ShardingSpec, Strategy

OUTPUT = "output:"
"""Prefix of the reader name of a graph output: ``output:0`` is the first entry of ``Graph.outputs``."""
AGAIN = "@again"
"""Suffix of an operator's second run, and of the values that it makes."""

PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases of a microbatch, in order."""
FORWARD, BACKWARD = PHASES
Moment = Literal["forward", "recompute", "backward"]
"""The phase of what a rank does: what is done for an operator's second run alone is ``recompute``, and interleaves with backward."""


def half(moment: Moment) -> Phase:
    """The half of the step that a phase belongs to: what is made again is made in backward."""
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
        before: the operator that reads it first (a second run by its own name), or ``output:N``; where others turn out to read it
            earlier, the schedule says so.
    """

    value: str
    tensor: str
    source: str
    spec: ShardingSpec
    phase: Moment
    before: str

    @property
    def half(self) -> Phase:
        """Whether it is made in forward or in backward."""
        return half(self.phase)


@dataclass(frozen=True)
class Assignment:
    """What a search decides.

    Args:
        inputs: spec of each graph input, by tensor name.
        strategies: strategy of each operator, by name.
        layouts: the reshards, in any order.
        reads: (operator, second run or ``output:N``, input position) -> value read; what is absent reads the tensor as it was made, a
            second run the value that was made again, if its producer runs again too.
        again: forward operators that run a second time, in backward, under the same strategy: what they made need not be kept until then.
            The second run of ``mm`` is called ``mm@again`` and makes ``mm@again``, ``mm:1@again`` ... from the same inputs, or what
            ``reads`` says. It stands just before its first reader in backward.
    """

    inputs: Mapping[str, ShardingSpec]
    strategies: Mapping[str, Strategy]
    layouts: tuple[Layout, ...] = ()
    reads: Mapping[tuple[str, int], str] | None = None
    again: frozenset[str] = frozenset()
