"""ShardingRule: a rule with an operator's shapes put in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.sharding import smallest

Dims = tuple[tuple[str, ...], ...]
"""For each tensor dim its factors, major to minor; ``()`` is a dim no factor splits."""


@dataclass(frozen=True)
class Statistic:
    """An all-reduce inside the operator, needed when one of the factors in ``over`` is split.

    Args:
        over: over the axes given to these, all at once.
        reduction: one of ``autopar.sharding.REDUCTIONS``.
        factors: the factors of the statistic's dims (cut as they are cut).
        elements: further elements for each of those (a packed pair counts 2).
    """

    over: tuple[str, ...]
    reduction: str
    factors: tuple[str, ...]
    elements: int = 1


@dataclass(frozen=True)
class Mirror:
    """A factor of which ranks may trade halves of their parts: the second half of rank i's goes to rank n - 1 - i, and what is made of it
    comes back. Of a triangle's rows every rank then has as many light ones as heavy ones.

    Args:
        factor: with an even number of rows on each rank.
        sent: groups of tensors, numbered over inputs, then outputs, each a buffer; in the order in which they travel.
    """

    factor: str
    sent: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ring:
    """A factor whose split needs nothing gathered: each rank has a part of what is read along another factor too, and the parts travel
    from rank to rank, once around, while each works on the one that it has. What is made along that factor travels with its part.

    Args:
        factor: which is split; where it has a ``Mirror``, halves of both factors' parts are traded before and after.
        along: the factor of what travels.
        sent: the inputs that travel, by number, in one buffer.
    """

    factor: str
    along: str
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """A collective that is all that the operator does.

    Args:
        factor: over whose axes.
        kind: of ``cost_models.collectives.KINDS``.
        reduction: one of ``autopar.sharding.REDUCTIONS``; empty where it reduces nothing. ``counts`` and ``rows`` are of an all-to-all:
            how many rows a rank has for each expert, and then the rows, as many as there are.
        experts: the factor of the experts that are counted.
    """

    factor: str
    kind: str
    reduction: str
    experts: str = ""


@dataclass(frozen=True)
class ShardingRule:
    """How one operator, of given shapes, can be cut.

    Args:
        operator: its target, for messages.
        family: of the table's row.
        inputs, outputs: the factors of each tensor's dims.
        shapes: of the inputs and outputs.
        extents: each factor with its size (factors of size 1 do not appear), in order of first appearance.
        whole: the factors that no axis may split.
        input_partial: for each input, the factors over whose axes it must come partial, with the reduction.
        output_partial: for each output, the factors over whose axes it comes out partial, with the reduction. A factor
            of neither its dims nor this list does not change the output: it is replicated there.
        flows: groups of inputs: partial sums over an axis together, they make every output a partial sum over it.
        inner: the all-reduces inside the operator.
        triangles: the factors along which the work grows from nothing, evenly: of n parts the last does (2n - 1) / n^2 of it all.
        mirror: the factor whose parts may be traded by halves, if there is one.
        ring: the factor that may be split while parts along another one travel, if there is one.
        exchange: the collective that the operator is, if it is one.
        equal: the factors that are split in equal parts alone.
        full: the factors of which no part may be empty.
        loose: the factors of dims whose entries stand in no order: each may split a dim of several, in equal parts.
        known: False for an operator without a row, or with arguments its row does not fit: everything whole.
        reason: why it is not known.
    """

    operator: str
    family: str
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    extents: tuple[tuple[str, int], ...] = ()
    whole: frozenset[str] = frozenset()
    input_partial: tuple[tuple[tuple[str, str], ...], ...] = ()
    output_partial: tuple[tuple[tuple[str, str], ...], ...] = ()
    flows: tuple[tuple[int, ...], ...] = ()
    inner: tuple[Statistic, ...] = ()
    triangles: frozenset[str] = frozenset()
    mirror: Mirror | None = None
    ring: Ring | None = None
    exchange: Exchange | None = None
    equal: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    known: bool = True
    reason: str = ""

    @cached_property
    def _hash(self) -> int:
        return hash((self.operator, self.inputs, self.outputs, self.shapes, self.extents, self.output_partial, self.flows))

    def __hash__(self) -> int:
        """Computed once: rules are keys of the strategies' cache."""
        return self._hash

    @cached_property
    def extent(self) -> dict[str, int]:
        """The size of each factor."""
        return dict(self.extents)

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The factors that axes may split."""
        return tuple(name for name, _ in self.extents if name not in self.whole)

    def splits(self, name: str, sizes: Sequence[int], *, uneven: bool) -> bool:
        """Whether a factor may be split by axes of these sizes; ``uneven``: in unequal parts too, of which the first are the largest."""
        extent = self.extent[name]
        if extent % math.prod(sizes) == 0:
            return True
        if not uneven or name in self.equal or name in self.loose or extent == 1:
            return False
        return name not in self.full or smallest(extent, sizes) > 0

    def __str__(self) -> str:
        """The whole rule in the notation, with every reduction, flow and inner collective.

        >>> from autopar.rules.binding import bind
        >>> print(bind("m k, k n -> m n | linear {0} {1}", [(4, 8), (8, 2)], [(4, 2)]))
        m k, k n -> m n +k | linear {0} {1}
        """
        left = ", ".join(self._term(*item) for item in zip(self.inputs, self.input_partial, self.shapes[0], strict=True))
        right = ", ".join(
            self._term(dims, partial, shape, self._independent(dims, partial))
            for dims, partial, shape in zip(self.outputs, self.output_partial, self.shapes[1], strict=True)
        )
        return f"{left} -> {right}{self._clauses()}".strip()

    def _term(self, dims: Dims, partial: tuple[tuple[str, str], ...], shape: tuple[int, ...], same: tuple[str, ...] = ()) -> str:
        words = []
        for names, extent in zip(dims, shape, strict=True):
            marked = [name + ("!" if name in self.whole else "") for name in names]
            if self.loose.issuperset(names) and names:
                words.append(f"[{' '.join(marked)}]")
                continue
            words.append(("1" if extent == 1 else "_") if not marked else marked[0] if len(marked) == 1 else f"({' '.join(marked)})")
        words = words or ["()"]
        words += [f"+{name}" + ("" if reduction == "sum" else f":{reduction}") for name, reduction in partial]
        return " ".join(words + [f"~{name}" for name in same])

    def _independent(self, dims: Dims, partial: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
        there = {name for names in dims for name in names} | {name for name, _ in partial}
        return tuple(name for name in self.free if name not in there)

    def _clauses(self) -> str:
        groups = " ".join("{" + " ".join(map(str, inputs)) + "}" for inputs in self.flows)
        clauses = f" | linear {groups}" if groups else ""
        for over in dict.fromkeys(item.over for item in self.inner):
            parts = [
                f"{item.reduction}({' '.join(([str(item.elements)] if item.elements > 1 else []) + list(item.factors))})"
                for item in self.inner
                if item.over == over
            ]
            clauses += f" | inner {' '.join(over)}: {' '.join(parts)}"
        growing = " ".join(name for name, _ in self.extents if name in self.triangles)
        clauses += f" | triangle {growing}" if growing else ""
        if self.mirror is not None:
            clauses += f" | mirror {self.mirror.factor}: " + " ".join("{" + " ".join(map(str, group)) + "}" for group in self.mirror.sent)
        if self.ring is not None:
            clauses += f" | ring {self.ring.factor} {self.ring.along}: {{{' '.join(map(str, self.ring.sent))}}}"
        if self.exchange is not None:
            words = self.exchange.kind, self.exchange.reduction, self.exchange.experts
            clauses += f" | exchange {self.exchange.factor}: {' '.join(word for word in words if word)}"
        return clauses
