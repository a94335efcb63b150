"""Strategies: which there are, in what order, and under ``must_split``."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from autopar.graph import Tensor
from autopar.rules import ShardingRule, bind, strategies
from autopar.rules.expansion import plain_factors
from autopar.sharding import InnerCollective, Strategy, innermost_first

Shape = tuple[int, ...]


def tensors(rule: ShardingRule) -> list[Tensor]:
    return [Tensor("", shape, "float32") for shape in rule.shapes[0] + rule.shapes[1]]


EVEN: frozenset[str] = frozenset()
"""No factor in unequal parts."""


def offered(rule: ShardingRule, sizes: Shape, *, must_split: bool = False, uneven: frozenset[str] = EVEN) -> list[str]:
    return [str(item) for item in strategies(rule, tensors(rule), sizes, must_split=must_split, uneven=uneven)]


def test_a_matrix_product_on_one_axis() -> None:
    rule = bind("m k, k n -> m n", [(4, 8), (8, 6)], [(4, 6)])
    assert offered(rule, (2,)) == ["R R, R R -> R R", "S0 R, R R -> S0 R", "R S0, S0 R -> R R +P0", "R R, R S0 -> R S0"]


def test_both_orders_of_two_axes_on_one_dim() -> None:
    rule = bind("... -> ...", [(4,)], [(4,)])
    assert offered(rule, (2, 2)) == ["R -> R", "S1 -> S1", "S0 -> S0", "S01 -> S01", "S10 -> S10"]


def test_one_order_of_axes_and_whole_inputs_are_those_among_all() -> None:
    for text, shapes in (
        ("m k, k n -> m n | linear {0} {1}", ([(8, 8), (8, 16)], [(8, 16)])),
        ("(a=2 b) -> a b", ([(16,)], [(2, 8)])),
        ("a b -> (a b)", ([(4, 8)], [(32,)])),
    ):
        rule = bind(text, *shapes)
        own = tensors(rule)
        every = strategies(rule, own, (2, 2, 2), uneven=EVEN)
        some = strategies(rule, own, (2, 2, 2), uneven=EVEN, orders=innermost_first, partial_inputs=False)
        whole = [item for item in every if not any(spec.partial for spec in item.inputs)]
        words = {item: [axes for spec in item.inputs + item.outputs for axes in spec.dims] for item in whole}
        assert list(some) == [item for item in whole if all([*axes] == sorted(axes)[::-1] for axes in words[item])]
        assert len(some) < len(every)


def test_partial_sums_flow_over_axes_given_to_no_factor() -> None:
    rule = bind("..., ... -> ... | linear {0 1}", [(2,), (2,)], [(2,)])
    assert offered(rule, (2, 2)) == [
        "R, R -> R", "S1, S1 -> S1", "R +P1, R +P1 -> R +P1", "S0, S0 -> S0", "S0 +P1, S0 +P1 -> S0 +P1",
        "R +P0, R +P0 -> R +P0", "S1 +P0, S1 +P0 -> S1 +P0", "R +P0 +P1, R +P0 +P1 -> R +P0 +P1",
    ]  # fmt: skip


def test_a_minor_factor_is_split_only_below_a_fully_split_major_one() -> None:
    rule = bind("(a=2 b) -> a b", [(8,)], [(2, 4)])
    assert offered(rule, (2, 2)) == [
        "R -> R R", "S1 -> S1 R", "S0 -> S0 R", "S01 -> S0 S1", "S10 -> S1 S0",
    ]  # fmt: skip
    assert offered(bind("(a=4 b) -> a b", [(8,)], [(4, 2)]), (2,)) == ["R -> R R", "S0 -> S0 R"]


def test_a_dim_is_split_only_by_what_divides_it() -> None:
    rule = bind("... -> ...", [(6,)], [(6,)])
    assert offered(rule, (4, 2)) == ["R -> R", "S1 -> S1"]
    assert offered(rule, (4, 2), uneven=frozenset(rule.free)) == ["R -> R", "S1 -> S1", "S0 -> S0", "S01 -> S01"], "or in mesh order"
    assert offered(rule, (3, 2)) == ["R -> R", "S1 -> S1", "S0 -> S0", "S01 -> S01", "S10 -> S10"]


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 4)])
def test_the_last_part_of_a_triangle_does_the_most(sizes: Shape) -> None:
    rows = 480
    rule = bind("b s t! -> b s | triangle s", [(2, rows, rows)], [(2, rows)])
    whole = sum(range(1, rows + 1))
    for strategy in strategies(rule, tensors(rule), sizes, uneven=EVEN):
        cuts = {name: math.prod(sizes[axis] for axis in axes) for name, axes in strategy.factors}
        length = rows // cuts.get("s", 1)
        last = sum(range(rows - length + 1, rows + 1))
        assert strategy.parts == pytest.approx(cuts.get("b", 1) * whole / last, rel=5e-3)
        assert strategy.parts == (1 if not cuts else 2) or "s" in cuts


@pytest.mark.parametrize("sizes", [(2,), (4,), (3,), (2, 4)])
def test_parts_traded_by_halves_have_all_the_same_to_do(sizes: Shape) -> None:
    """Each rank has the first half of its own rows of a triangle and the second half of the mirrored rank's."""
    rows = 48
    rule = bind("b s t! -> b s | triangle s | mirror s: {0} {0 1}", [(2, rows, rows)], [(2, rows)])
    own = [Tensor("", (2, rows, rows), "bfloat16"), Tensor("", (2, rows), "float32")]
    offers = strategies(rule, own, sizes, uneven=EVEN)
    plain = {(item.inputs, item.outputs, item.parts): item for item in offers if not item.inner}
    traded = [item for item in offers if item.inner]
    assert traded and {item.inputs for item in traded} == {item.inputs for item in plain.values() if dict(item.factors).get("s")}
    for strategy in traded:
        factors = plain_factors(strategy)
        count, others = math.prod(sizes[axis] for axis in factors["s"]), math.prod(sizes[axis] for axis in factors.get("b", ()))
        half = rows // count // 2
        work = [
            sum(row + 1 for part in (2 * rank, 2 * (count - 1 - rank) + 1) for row in range(part * half, (part + 1) * half))
            for rank in range(count)
        ]
        assert len(set(work)) == 1 and sum(work) == sum(range(1, rows + 1)) and strategy.parts == count * others
        moved = [2 * rows * rows * 2 // others // 2, (2 * rows * rows * 2 + 2 * rows * 4) // others // 2]
        axes = factors["s"]
        assert strategy.inner == tuple(InnerCollective("permute", axes, size, "mirror") for size in moved)


def test_rows_that_do_not_halve_are_not_traded() -> None:
    rule = bind("s -> s | mirror s: {0}", [(6,)], [(6,)])
    assert [len(item.inner) for item in strategies(rule, tensors(rule), (2,))] == [0, 0]
    assert [len(item.inner) for item in strategies(rule, tensors(rule), (3,))] == [0, 0, 1]


def test_axes_of_size_one_are_left_out() -> None:
    rule = bind("... -> ...", [(4,)], [(4,)])
    assert offered(rule, (1, 2, 1)) == ["R -> R", "S1 -> S1"]


def test_an_operator_without_a_rule_is_whole() -> None:
    from autopar.rules.lookup import unknown

    assert offered(unknown("mine.op.default", [(4, 6)], [(4,)], "no row"), (2, 2)) == ["R R -> R"]


def test_parts_counts_what_cuts_the_work() -> None:
    rule = bind("m k, k n -> m n | linear {0} {1}", [(4, 8), (8, 6)], [(4, 6)])
    parts = {str(item): item.parts for item in strategies(rule, tensors(rule), (2, 4))}
    assert parts["R R, R R -> R R"] == 1
    assert parts["S0 S1, S1 R -> S0 R +P1"] == 8
    assert parts["S0 R +P1, R R -> S0 R +P1"] == 2


def test_factors_that_no_output_depends_on_cut_no_work() -> None:
    rule = bind("b -> a ~b", [(4,)], [(4,)])
    assert {str(item): item.parts for item in strategies(rule, tensors(rule), (2,))} == {"R -> R": 1, "S0 -> R": 1, "R -> S0": 2}


def test_inner_collectives_are_declared_with_local_bytes() -> None:
    rule = bind("... d -> ... d | inner d: max(...) sum(2 ...)", [(8, 6)], [(8, 6)])
    found = {str(item): item.inner for item in strategies(rule, [Tensor("", (8, 6), "bfloat16")] * 2, (2, 2))}
    assert found["S0 R -> S0 R"] == ()
    assert [(item.reduction, item.axes, item.bytes) for item in found["S0 S1 -> S0 S1"]] == [("max", (1,), 16), ("sum", (1,), 32)]


def test_must_split_keeps_the_largest_sets_of_axes_without_partial_inputs() -> None:
    rule = bind("m k, k n -> m n | linear {0} {1}", [(4, 8), (8, 3)], [(4, 3)], family="contraction")
    assert offered(rule, (2,), must_split=True) == ["S0 R, R R -> S0 R", "R S0, S0 R -> R R +P0"]
    assert offered(rule, (5,), must_split=True) == ["R R, R R -> R R"]
    both = strategies(rule, tensors(rule), (2, 2), must_split=True, uneven=EVEN)
    assert {axis for item in both for axis in (0, 1) if axis not in {a for _, axes in item.factors for a in axes}} == set()
    other = bind("... -> ...", [(4,)], [(4,)], family="pointwise")
    assert "R -> R" in offered(other, (2,), must_split=True)


def test_must_split_leaves_an_axis_that_divides_nothing() -> None:
    rule = bind("m k, k n -> m n", [(4, 8), (8, 2)], [(4, 2)], family="contraction")
    assert all("0" not in text and "1" in text for text in offered(rule, (3, 2), must_split=True))


RULES = [
    "m k, k n -> m n | linear {0} {1}",
    "b (h d) -> b h d | linear {0}",
    "... d -> ... +d:max",
    "a b, b a -> a, b ~a",
]


@pytest.mark.parametrize("text", RULES)
@given(sizes=draw.lists(draw.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3), extents=draw.tuples(*[draw.integers(1, 12)] * 3))
def test_strategies_are_those_of_a_naive_enumeration(text: str, sizes: list[int], extents: tuple[int, int, int]) -> None:
    a, b, c = extents
    shapes: dict[str, tuple[list[Shape], list[Shape]]] = {
        RULES[0]: ([(a, b), (b, c)], [(a, c)]),
        RULES[1]: ([(a, b * c)], [(a, b, c)]),
        RULES[2]: ([(a, b)], [(a,)]),
        RULES[3]: ([(a, b), (b, a)], [(a,), (b,)]),
    }
    rule = bind(text, *shapes[text])
    rule = replace(rule, equal=frozenset(name for term in rule.inputs for names in term if len(names) > 1 for name in names))
    for uneven in (EVEN, frozenset(rule.free)):
        found = strategies(rule, tensors(rule), sizes, uneven=uneven)
        assert len(set(found)) == len(found)
        assert found == strategies(rule, tensors(rule), tuple(sizes), uneven=uneven)
        for item in found:
            assert_legal(item, rule, sizes)
        assert {frozenset(dict(item.factors).items()) for item in found} == naive(rule, sizes, uneven - rule.equal)


def assert_legal(item: Strategy, rule: ShardingRule, sizes: list[int]) -> None:
    for spec, shape in zip(item.inputs + item.outputs, rule.shapes[0] + rule.shapes[1], strict=True):
        assert spec.problem(shape, sizes) is None
        assert all(sizes[axis] > 1 for axis in spec.split_axes + spec.partial_axes)


def naive(rule: ShardingRule, sizes: list[int], uneven: frozenset[str]) -> set[frozenset[tuple[str, Shape]]]:
    """Every way to put some axes, in some order, on factors: words over the axes, one for each factor, no axis twice; words in the mesh's
    order on those that come in unequal parts."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    words = [word for count in range(len(axes) + 1) for word in itertools.permutations(axes, count)]
    found = set()
    for choice in itertools.product(words, repeat=len(rule.free)):
        used = [axis for word in choice for axis in word]
        if len(set(used)) != len(used):
            continue
        given_axes = dict(zip(rule.free, choice, strict=True))
        parts = {name: math.prod(sizes[axis] for axis in word) for name, word in given_axes.items()}
        ordered = {name for name, word in given_axes.items() if list(word) == sorted(word)} & uneven
        if any(rule.extent[name] % count and name not in ordered for name, count in parts.items()):
            continue
        composite = [names for term in rule.inputs + rule.outputs for names in term if len(names) > 1]
        if all(parts[minor] == 1 or parts[major] == rule.extent[major] for major, minor in composite):
            found.add(frozenset((name, word) for name, word in given_axes.items() if word))
    return found
