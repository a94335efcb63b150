"""What changes in an operator's arguments on a rank: sizes become local, offsets get the rank's start.

One function reads how dims are cut from the strategy; the table's rows say which argument takes what:

    shape output 0      the local shape of that output (or ``input 0``)
    size output 0 1     the local size of a dim of that output
    extent v            the local size of a factor (of several: the product); an argument that is None stays
    start v             the argument plus the rank's first index of the factor
    shift v -w          the argument plus the first index of one factor, less that of another
    ratio               for ``repeat``: local output over local input, dim by dim
    seed output 0       the argument, moved on by the number of the rank's part of that output
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.graph import Argument, Op, Tensor
from autopar.rules.expansion import plain_factors, strategies
from autopar.rules.lookup import find_row, find_rule
from autopar.rules.rule import ShardingRule
from autopar.rules.signature import REQUIRED, Row, signature
from autopar.sharding import ShardingSpec, Strategy, span

SEED_STRIDE = 1 << 20
"""Distance between the seeds of two parts. A graph's own seeds are smaller."""

Arguments = tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]


def localize(op: Op, tensors: Mapping[str, Tensor], strategy: Strategy, sizes: Sequence[int], coordinates: Sequence[int]) -> Arguments:
    """The operator's arguments on one rank, ``Ref`` in place of tensors.

    Args:
        op: the operator.
        tensors: the graph's tensors by name (global shapes).
        strategy: how it is run; its ``factors`` may be missing (a plan read from a file), they are then found by its specs.
        sizes: the mesh's axis sizes.
        coordinates: the rank's place in the mesh.

    Returns:
        (args, kwargs) with local sizes and the rank's offsets.

    Raises:
        RuleError: when no strategy of the operator's rule has these specs.
    """
    row = find_row(op.target)
    if row is None or not row.local:
        return op.args, op.kwargs
    rule = find_rule(op, tensors)
    cut = _Cut(rule, _factors(op, rule, tensors, strategy, sizes), strategy, tuple(sizes), tuple(coordinates))
    parameters = signature(row.operator)
    places = {parameter.name: index for index, parameter in enumerate(parameters)}
    args, kwargs = list(op.args), dict(op.kwargs)
    for name, formula in row.local:
        index = places[name]
        if index < len(args):
            args[index] = cut.value(formula, args[index])
        elif name in kwargs or parameters[index].default is not REQUIRED:
            kwargs[name] = cut.value(formula, kwargs.get(name, parameters[index].default))
    return tuple(args), tuple(kwargs.items())


def find_strategy(
    op: Op, tensors: Mapping[str, Tensor], inputs: Sequence[ShardingSpec], outputs: Sequence[ShardingSpec], sizes: Sequence[int]
) -> Strategy | None:  # fmt: skip
    """The strategy of an operator with these specs; None when its rule has none."""
    of_op = [tensors[name] for name in (*op.inputs, *op.outputs)]
    wanted = tuple(inputs), tuple(outputs)
    return next((item for item in strategies(find_rule(op, tensors), of_op, sizes) if (item.inputs, item.outputs) == wanted), None)


def _factors(
    op: Op, rule: ShardingRule, tensors: Mapping[str, Tensor], strategy: Strategy, sizes: Sequence[int]
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    specs = (*strategy.inputs, *strategy.outputs)
    if strategy.factors or not any(spec.split_axes or spec.partial_axes for spec in specs):
        return plain_factors(strategy)
    found = find_strategy(op, tensors, strategy.inputs, strategy.outputs, sizes)
    if found is None:
        raise RuleError(f"{op.name} ({op.target}) cannot run as {strategy!s}: its rule is {rule!s}", "make the plan again")
    return plain_factors(found)


@dataclass(frozen=True)
class _Cut:
    """How one operator is cut, seen from one rank."""

    rule: ShardingRule
    factors: Mapping[str, tuple[int, ...]]
    strategy: Strategy
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]

    def value(self, formula: str, argument: Argument) -> Argument:
        """The argument's value on this rank."""
        word, *rest = formula.split()
        match word:
            case "shape":
                return self.local_shape(rest[0], int(rest[1]))
            case "size":
                return self.local_shape(rest[0], int(rest[1]))[int(rest[2])]
            case "extent":
                extent = math.prod(self.span(name)[1] for name in rest)
                return (extent,) if isinstance(argument, tuple) else argument if argument is None else extent
            case "start":
                return argument + self.span(rest[0])[0]
            case "shift":
                return argument + sum(-self.span(name[1:])[0] if name.startswith("-") else self.span(name)[0] for name in rest)
            case "ratio":
                shape, result = self.local_shape("input", 0), self.local_shape("output", 0)
                padded = (1,) * (len(result) - len(shape)) + shape
                return tuple(given and big // max(small, 1) for given, big, small in zip(argument, result, padded, strict=True))
            case "seed":
                return argument + SEED_STRIDE * self.part(self.spec(rest[0], int(rest[1])))
            case _:
                raise AssertionError(f"unknown formula {formula!r} in the table")

    def spec(self, side: str, index: int) -> ShardingSpec:
        return (self.strategy.inputs if side == "input" else self.strategy.outputs)[index]

    def local_shape(self, side: str, index: int) -> tuple[int, ...]:
        return self.spec(side, index).own_shape(self.rule.shapes[side == "output"][index], self.sizes, self.coordinates)

    def span(self, name: str) -> tuple[int, int]:
        """The first index of the factor on this rank, and how many."""
        axes = self.factors.get(name, ())
        return span(self.rule.extent.get(name, 1), [self.sizes[axis] for axis in axes], [self.coordinates[axis] for axis in axes])

    def part(self, spec: ShardingSpec) -> int:
        """The number of this rank's part among the parts of a split tensor."""
        number = 0
        for axis in spec.split_axes:
            number = number * self.sizes[axis] + self.coordinates[axis]
        return number


__all__ = ["Row", "find_strategy", "localize"]
