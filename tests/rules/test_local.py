"""A rank's arguments: local sizes and offsets; and the size of the work."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.graph import Argument, Op, Ref, Tensor
from autopar.rules import find_rule, find_strategy, flops, is_alias, localize
from autopar.sharding import ShardingSpec, Strategy

Shape = tuple[int, ...]


def operator(target: str, inputs: list[Shape], outputs: list[Shape], args: tuple[Argument, ...]) -> tuple[Op, dict[str, Tensor]]:
    names = [f"x{index}" for index in range(len(inputs))], [f"y{index}" for index in range(len(outputs))]
    tensors = {name: Tensor(name, shape, "float32") for name, shape in zip(names[0] + names[1], inputs + outputs, strict=True)}
    return Op("op", target, tuple(names[0]), tuple(names[1]), args), tensors


def local_args(op: Op, tensors: dict[str, Tensor], text: str, sizes: Shape, coordinates: Shape) -> tuple[Argument, ...]:
    """Arguments under the strategy written ``inputs -> outputs``."""
    left, right = text.split("->")
    inputs = [ShardingSpec.parse(word) for word in left.split(",")] if op.inputs else []
    outputs = [ShardingSpec.parse(word) for word in right.split(",")]
    strategy = find_strategy(op, tensors, inputs, outputs, sizes)
    assert strategy is not None
    args, kwargs = localize(op, tensors, strategy, sizes, coordinates)
    assert kwargs == op.kwargs
    from_specs = Strategy(strategy.inputs, strategy.outputs)
    assert localize(op, tensors, from_specs, sizes, coordinates)[0] == args, "the factors can be found again from the specs alone"
    return args


@pytest.mark.parametrize(
    ("target", "inputs", "outputs", "args", "text", "coordinates", "expected"),
    [
        ("aten.view.default", [(4, 6, 8)], [(4, 6, 2, 4)], (Ref(0), (4, 6, 2, 4)), "S0 R S1 -> S0 R S1 R", (1, 1), (Ref(0), (2, 6, 1, 4))),
        ("aten.expand.default", [(4, 1)], [(3, 4, 8)], (Ref(0), (3, -1, 8)), "S0 R -> R S0 S1", (0, 1), (Ref(0), (3, 2, 4))),
        ("aten.repeat.default", [(4,)], [(2, 12)], (Ref(0), (2, 3)), "R -> S0 R", (0, 1), (Ref(0), (1, 3))),
        ("aten.full.default", [], [(4, 6)], ((4, 6), 1.0), "-> S01 R", (0, 1), ((1, 6), 1.0)),
        ("aten.slice_backward.default", [(4, 2)], [(4, 6)], (Ref(0), (4, 6), 1, 0, 2, 1), "S10 R -> S10 R", (0, 1),
         (Ref(0), (1, 6), 1, 0, 2, 1)),
        ("autopar.embedding.default", [(12, 8), (4,)], [(4, 8)], (Ref(0), Ref(1), 0), "S01 R, R -> R R +P0 +P1", (1, 0),
         (Ref(0), Ref(1), 6)),
        ("autopar.embedding.default", [(12, 8), (4,)], [(4, 8)], (Ref(0), Ref(1), 0), "S10 R, R -> R R +P0 +P1", (1, 0),
         (Ref(0), Ref(1), 3)),
        ("autopar.embedding_backward.default", [(4, 8), (4,)], [(12, 8)], (Ref(0), Ref(1), 12, 0, -1), "S0 R, S0 -> S1 R +P0", (1, 1),
         (Ref(0), Ref(1), 6, 6, -1)),
        ("autopar.nll_loss_backward.default", [(4,), (4,)], [(4, 6)], (Ref(0), Ref(1), 6, -100, 0), "S0, S0 -> S0 S1", (0, 1),
         (Ref(0), Ref(1), 3, -100, 3)),
        ("aten.native_group_norm.default", [(4, 8, 9), (8,), (8,)], [(4, 8, 9), (4, 4), (4, 4)],
         (Ref(0), Ref(1), Ref(2), 4, 8, 9, 4, 1e-5), "S0 S1 R, S1, S1 -> S0 S1 R, S0 S1, S0 S1", (0, 0),
         (Ref(0), Ref(1), Ref(2), 2, 4, 9, 2, 1e-5)),
        ("autopar.convolution.default", [(4, 8, 9), (8, 2, 3)], [(4, 8, 9)], (Ref(0), Ref(1), (1,), (1,), (1,), 4),
         "R S01 R, S01 R R -> R S01 R", (0, 0), (Ref(0), Ref(1), (1,), (1,), (1,), 1)),
        ("autopar.dropout.default", [(4, 6)], [(4, 6), (4, 6)], (Ref(0), 0.5, 3), "S0 R -> S0 R, S0 R", (1, 0), (Ref(0), 0.5, 3 + 2**20)),
        ("autopar.dropout.default", [(4, 6)], [(4, 6), (4, 6)], (Ref(0), 0.5, 3), "S0 R -> S0 R, S0 R", (0, 1), (Ref(0), 0.5, 3)),
        ("autopar.attention.default", [(2, 4, 8, 16)] * 3, [(2, 4, 8, 16), (2, 4, 8)],
         (Ref(0), Ref(1), Ref(2), None, True, 0.25, 0.0, 0), "R R S10 R, R R R R, R R R R -> R R S10 R, R R S10", (1, 0),
         (Ref(0), Ref(1), Ref(2), None, True, 0.25, 0.0, 2)),
        ("autopar.attention_backward.default", [(2, 4, 8, 16)] * 5 + [(2, 4, 8)], [(2, 4, 8, 16)] * 3,
         (*map(Ref, range(6)), None, True, 0.25, 0.0, 0),
         "R S0 S1 R, R S0 S1 R, R S0 R R, R S0 R R, R S0 S1 R, R S0 S1 -> R S0 S1 R, R S0 R R +P1, R S0 R R +P1", (0, 1),
         (*map(Ref, range(6)), None, True, 0.25, 0.0, 4)),
        ("aten.slice.Tensor", [(4, 6)], [(4, 2)], (Ref(0), 1, 2, 4), "S0 R -> S0 R", (1, 1), (Ref(0), 1, 2, 4)),
    ],
)  # fmt: skip
def test_arguments_on_a_rank(
    target: str, inputs: list[Shape], outputs: list[Shape], args: tuple[Argument, ...], text: str, coordinates: Shape, expected: object
) -> None:
    op, tensors = operator(target, inputs, outputs, args)
    assert local_args(op, tensors, text, (2, 2), coordinates) == expected


def test_keyword_arguments_are_local_too() -> None:
    tensors = {"y": Tensor("y", (4, 6), "float32")}
    op = Op("y", "aten.full.default", (), ("y",), (), (("size", (4, 6)), ("fill_value", 1.0)))
    strategy = find_strategy(op, tensors, [], [ShardingSpec.parse("S0 R")], (2,))
    assert strategy is not None
    assert localize(op, tensors, strategy, (2,), (1,)) == ((), (("size", (2, 6)), ("fill_value", 1.0)))


def test_specs_that_no_strategy_has() -> None:
    op, tensors = operator("aten.view.default", [(4, 6)], [(24,)], (Ref(0), (24,)))
    wrong = Strategy((ShardingSpec.parse("R S0"),), (ShardingSpec.parse("S0"),))
    with pytest.raises(RuleError, match=r"cannot run as R S0 -> S0: its rule is a b -> \(a b\)"):
        localize(op, tensors, wrong, (2,), (0,))


def test_an_operator_without_a_row_is_known_to_be_unknown() -> None:
    op, tensors = operator("mine.op.default", [(4, 6)], [(4,)], (Ref(0),))
    rule = find_rule(op, tensors)
    assert not rule.known
    assert rule.reason == "it has no row in the table"
    assert str(rule) == "_ _ -> _"
    assert find_strategy(op, tensors, [ShardingSpec.parse("S0 R")], [ShardingSpec.parse("S0")], (2,)) is None


def test_a_call_that_its_row_does_not_fit_is_unknown_and_says_why() -> None:
    op, tensors = operator("aten._softmax.default", [(4, 6)], [(4, 6)], (Ref(0),))
    rule = find_rule(op, tensors)
    assert (rule.known, rule.reason) == (False, "aten._softmax.default has no argument 'dim', which its rule needs")
    op, tensors = operator("aten.mm.default", [(4, 6), (5, 7)], [(4, 7)], (Ref(0), Ref(1)))
    assert "a dim of size 5 where 'k' is 6" in find_rule(op, tensors).reason


@pytest.mark.parametrize(
    ("target", "inputs", "outputs", "args", "expected"),
    [
        ("autopar.contract.default", [(2, 3, 5), (7, 5)], [(2, 3, 7)], (Ref(0), Ref(1), "b s k, n k -> b s n"), 2 * 2 * 3 * 5 * 7),
        ("aten.mm.default", [(1, 5), (5, 7)], [(1, 7)], (Ref(0), Ref(1)), 2 * 5 * 7),
        ("autopar.convolution.default", [(2, 4, 5, 5), (6, 4, 3, 3)], [(2, 6, 5, 5)], (Ref(0), Ref(1), (1, 1), (1, 1), (1, 1), 1),
         2 * 2 * 6 * 25 * 4 * 9),
        ("autopar.convolution_input_gradient.default", [(2, 6, 5, 5), (6, 2, 3, 3)], [(2, 4, 5, 5)],
         (Ref(0), Ref(1), (2, 4, 5, 5), (1, 1), (1, 1), (1, 1), 2), 2 * 2 * 6 * 25 * 2 * 9),
        ("autopar.convolution_weight_gradient.default", [(2, 6, 5, 5), (2, 4, 5, 5)], [(6, 4, 3, 3)],
         (Ref(0), Ref(1), (6, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1), 2 * 2 * 6 * 25 * 4 * 9),
        ("autopar.attention.default", [(2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)], [(2, 4, 8, 16), (2, 4, 8)],
         (Ref(0), Ref(1), Ref(2), None, False, 0.25, 0.0, 0), 4 * 2 * 4 * 8 * 8 * 16),
        ("autopar.attention.default", [(2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16)], [(2, 4, 8, 16), (2, 4, 8)],
         (Ref(0), Ref(1), Ref(2), None, True, 0.25, 0.0, 0), 2 * 2 * 4 * 8 * 8 * 16),
        ("autopar.attention_backward.default",
         [(2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8)], [(2, 4, 8, 16)] * 3,
         (Ref(0), Ref(1), Ref(2), Ref(3), Ref(4), Ref(5), None, False, 0.25, 0.0, 0), 10 * 2 * 4 * 8 * 8 * 16),
        ("aten.add.Tensor", [(4, 6), (6,)], [(4, 6)], (Ref(0), Ref(1)), 24),
        ("aten.sum.dim_IntList", [(4, 6)], [(4,)], (Ref(0), (1,)), 24),
        ("aten.view.default", [(4, 6)], [(24,)], (Ref(0), (24,)), 0),
        ("aten.clone.default", [(4, 6)], [(4, 6)], (Ref(0),), 0),
    ],
)  # fmt: skip
def test_operations(target: str, inputs: list[Shape], outputs: list[Shape], args: tuple[Argument, ...], expected: float) -> None:
    op, tensors = operator(target, inputs, outputs, args)
    assert flops(op, tensors) == expected


def test_views_share_storage() -> None:
    aliases = {target: is_alias(Op("op", target, ("x",), ("y",))) for target in (
        "aten.view.default", "aten.permute.default", "aten.slice.Tensor", "aten.split.Tensor", "aten.clone.default", "aten.repeat.default",
        "aten.cat.default", "mine.op.default",
    )}  # fmt: skip
    assert [target for target, alias in aliases.items() if alias] == [
        "aten.view.default", "aten.permute.default", "aten.slice.Tensor", "aten.split.Tensor",
    ]  # fmt: skip
