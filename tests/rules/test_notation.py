"""The rule notation: what it means with shapes put in, and what it says when it cannot be read or does not fit."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.rules import bind, parse
from autopar.rules.lookup import check_table, table

Shapes = list[tuple[int, ...]]

BOUND: list[tuple[str, Shapes, Shapes, str]] = [
    ("m k, k n -> m n", [(4, 8), (8, 2)], [(4, 2)], "m k, k n -> m n +k"),
    ("m k, k n -> m n | linear {0} {1}", [(4, 8), (8, 2)], [(4, 2)], "m k, k n -> m n +k | linear {0} {1}"),
    ("... d! -> ... d!", [(4, 6, 8)], [(4, 6, 8)], "a b d! -> a b d!"),
    ("... d -> ... +d:max", [(4, 6)], [(4,)], "a d -> a +d:max"),
    ("..., ... -> ...", [(4, 6, 8), (6, 1)], [(4, 6, 8)], "a b c, b 1 -> a b c"),
    ("..., ... -> ...", [(4, 6), ()], [(4, 6)], "a b, () -> a b"),
    ("m k, k n -> m n", [(1, 8), (8, 2)], [(1, 2)], "1 k, k n -> 1 n +k"),
    ("n (g i) _..., (g o) i _... -> n (g o) _...", [(2, 8, 5), (6, 4, 3)], [(2, 6, 5)], "n (g i) _, (g o) i _ -> n (g o) _ +i"),
    ("a (b=2 c) -> (a b) c", [(3, 8)], [(6, 4)], "a (b c) -> (a b) c"),
    ("(a=2 _) -> (a=2 _)", [(6,)], [(6,)], "(a _) -> (a _)"),
    ("b t e -> b e, b ~e ~t", [(2, 3, 4)], [(2, 4), (2,)], "b t e -> b e +t, b ~t ~e"),
    ("b? s, b s -> b s", [(1, 3), (2, 3)], [(2, 3)], "1 s, b s -> b s"),
    ("b? s, b s -> b s", [(2, 3), (2, 3)], [(2, 3)], "b s, b s -> b s"),
    ("... * -> ... | linear {all}", [(2, 3), (2, 3)], [(2, 3)], "a b, a b -> a b | linear {0 1}"),
    ("... -> () +...:max", [(2, 3)], [()], "a b -> () +a:max +b:max"),
    ("... k, ... -> _ k", [(4, 6, 8), (4, 6)], [(10, 8)], "a b k, a b -> _ k +a +b"),
    ("... d -> ... d | inner d: max(...) sum(2 ...)", [(4, 6)], [(4, 6)], "a d -> a d | inner d: max(a) sum(2 a)"),
    ("b s t! -> b s | triangle s", [(2, 4, 4)], [(2, 4)], "b s t! -> b s | triangle s"),
    ("b s -> b s | mirror s: {0} {0 1}", [(2, 4)], [(2, 4)], "b s -> b s | mirror s: {0} {0 1}"),
    ("b s! -> b s | mirror s: {0}", [(2, 4)], [(2, 4)], "b s! -> b s!"),
    ("b s, b t! -> b s | ring s t: {1}", [(2, 4), (2, 6)], [(2, 4)], "b s, b t! -> b s | ring s t: {1}"),
    ("b s, b t! -> b s | ring s t: {1}", [(2, 4), (2, 1)], [(2, 4)], "b s, b 1 -> b s"),
    ("s! t -> s | triangle s", [(4, 4)], [(4,)], "s! t -> s! +t"),
    ("-> ... | linear {}", [], [(4, 6)], "-> a b | linear {}"),
    ("m n +k, m k, k n -> m n", [(4, 2), (4, 8), (8, 2)], [(4, 2)], "m n +k, m k, k n -> m n +k"),
]


@pytest.mark.parametrize(("text", "inputs", "outputs", "expected"), BOUND, ids=[item[0] for item in BOUND])
def test_a_rule_with_shapes(text: str, inputs: Shapes, outputs: Shapes, expected: str) -> None:
    assert str(bind(text, inputs, outputs)) == expected


def test_what_is_printed_reads_as_the_same_rule() -> None:
    for text, inputs, outputs, _ in BOUND:
        rule = bind(text, inputs, outputs)
        given = str(rule)
        for name, extent in rule.extents:
            given = given.replace(f"({name} ", f"({name}={extent} ", 1)
        assert str(bind(given, inputs, outputs)) == str(rule)


@pytest.mark.parametrize(
    ("text", "dims", "inputs", "outputs", "expected"),
    [
        ("... d -> ...", (0,), [(4, 6, 8)], [(6, 8)], "d a b -> a b +d"),
        ("... d -> ...", (0, -1), [(4, 6, 8)], [(6,)], "d0 a d1 -> a +d0 +d1"),
        ("... _ -> ... _ *", (1,), [(4, 6, 8)], [(4, 3, 8), (4, 3, 8)], "a _ b -> a _ b, a _ b"),
        ("... _ +i, i, ... i -> ... _ +i", (1,), [(4, 6), (3,), (4, 3)], [(4, 6)], "a _ +i, i, a i -> a _ +i"),
        ("... d! -> ... d!", (0,), [()], [()], "() -> ()"),
        ("... d!, d! -> ... d!, ... 1", (-2, -1), [(4, 6, 8), (6, 8)], [(4, 6, 8), (4, 1, 1)], "a d0! d1!, d0! d1! -> a d0! d1!, a 1 1"),
    ],
)
def test_a_rule_about_given_dims(text: str, dims: tuple[int, ...], inputs: Shapes, outputs: Shapes, expected: str) -> None:
    assert str(bind(text, inputs, outputs, dims=dims)) == expected


def test_reduced_dims_can_be_kept() -> None:
    assert str(bind("... d -> ...", [(4, 6, 8)], [(4, 1, 8)], dims=(1,), keep=True)) == "a d b -> a 1 b +d"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("m k, k n", "it needs one '->'"),
        ("m -> m -> m", "it needs one '->'"),
        ("m k, -> m", "an empty tensor between commas"),
        ("m k ->", "it has no output"),
        ("m (a b -> m", "a '(' is not closed"),
        ("m a) -> m", "a ')' with nothing before it"),
        ("m ((a) b) -> m", "inside parentheses"),
        ("m m -> m", "a factor stands twice"),
        ("m ? -> m", "'?'"),
        ("m k -> m +q", "the suffix names 'q'"),
        ("m k ~k -> m", "'~k' is for outputs"),
        ("m +k k -> m", "follows a suffix"),
        ("... m ... -> m", "more than one '...'"),
        ("m -> m | scatter {0}", "none of linear, inner, triangle, mirror, ring"),
        ("m -> m | mirror m", "write 'mirror s: {0} {3 4}'"),
        ("m -> m | mirror q: {0}", "write 'mirror s: {0} {3 4}'"),
        ("m -> m | mirror m: 0", "write 'mirror s: {0} {3 4}'"),
        ("m -> m | ring m: {0}", "write 'ring s t: {1 2}'"),
        ("m, n -> m n | ring m k: {1}", "write 'ring s t: {1 2}'"),
        ("m -> m | triangle q", "write 'triangle s'"),
        ("m -> m | triangle", "write 'triangle s'"),
        ("m -> m | linear 0", "write the inputs in braces"),
        ("m -> m | linear {x}", "input numbers, or 'all'"),
        ("m -> m | inner d: max(m)", "write 'inner d: max(...)"),
        ("(a b?) -> a", "write '?' after the parentheses"),
    ],
)
def test_a_rule_that_cannot_be_read(text: str, reason: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse(text)
    assert repr(text) in caught.value.message
    assert reason in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "reason"),
    [
        ("m k, k n -> m n", [(4, 8), (6, 2)], [(4, 2)], "a dim of size 6 where 'k' is 8"),
        ("m k, k n -> m n", [(4, 8)], [(4, 2)], "it has 2 inputs, the operator 1"),
        ("m k, k n -> m n", [(4, 8), (8, 2)], [(4, 2), (4,)], "it has 1 outputs, the operator 2"),
        ("m k, k n -> m n", [(4, 8, 1), (8, 2)], [(4, 2)], "a tensor of 3 dims where the rule has 2"),
        ("... a b -> ...", [(4,)], [()], "a tensor of 1 dims where the rule has at least 2"),
        ("..., ... -> ...", [(4, 6), (5,)], [(4, 6)], "sizes 6 and 5 do not broadcast"),
        ("(a b) -> (a b)", [(6,)], [(6,)], "the extent of 'a' is not determined"),
        ("(a=4 b) -> b", [(6,)], [(2,)], "a dim of size 6 is not a multiple of 4"),
        ("m 1 -> m", [(4, 3)], [(4,)], "a dim of size 3 where the rule has 1"),
    ],
)
def test_a_rule_that_does_not_fit(text: str, inputs: Shapes, outputs: Shapes, reason: str) -> None:
    with pytest.raises(RuleError) as caught:
        bind(text, inputs, outputs, operator="aten.some.default")
    message = caught.value.message
    assert reason in message
    assert "aten.some.default" in message and repr(text) in message and str(list(inputs[0])) in message


def test_every_rule_of_the_table_can_be_read() -> None:
    check_table()
    assert all(text and not text.endswith(": ") for _, _, text in table())
