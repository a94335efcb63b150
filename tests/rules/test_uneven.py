"""Parts of unequal sizes: every row that allows them, against the real operator, of 5, 7, 9 elements on 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autopar.graph import Op, Ref, Tensor
from autopar.rules import ShardingRule, find_rule, localize, rule, strategies
from autopar.rules.lookup import OWN, find_row
from autopar.rules.table import POINTWISE, ROWS
from autopar.sharding import ShardingSpec
from tests.rules.cases import CASES
from tests.rules.drawing import Case, Draw, F, drawn
from tests.rules.execution import Executed, execute
from tests.rules.test_execution import ONLY_ON_GPU, check_split_equals_whole

MESHES = ((2,), (3,), (3, 2), (2, 3))
LONGER: tuple[Mapping[int, int], ...] = ({4: 5, 6: 7, 8: 9, 12: 13}, {4: 5, 6: 7}, {6: 7}, {4: 5}, {4: 7})
"""Sizes of cases that change; other sizes are written into a case's arguments in ways of their own, so the first that fits is taken."""
_DRAW = Draw.tensor
_CASES: dict[str, list[Case]] = {}
for _case in CASES:
    _row = find_row(_case.target)
    assert _row is not None
    _CASES.setdefault(_row.name, []).append(_case)


def group_norm_backward() -> tuple[Any, ...]:
    x, w = torch.randn(7, 8, 3, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, w, w, 7, 8, 6, 4, 1e-5)
    return torch.randn_like(x), x, mean, rstd, w, 7, 8, 6, 4, [True, True, True]


ODD: tuple[Case, ...] = (
    Case("aten.slice_backward.default", (F(7, 4), [7, 6], 1, 1, 5, 1), "a _ -> a _ | linear {0}"),
    Case("aten._unsafe_view.default", (F(7, 6), [7, 2, 3]), "a (b c) -> a b c | linear {0}"),
    Case("aten.native_group_norm.default", (F(7, 8, 3, 2), F(8), F(8), 7, 8, 6, 4, 1e-5), ""),
    Case("aten.native_group_norm_backward.default", group_norm_backward, ""),
)
"""Where no case fits when its sizes are changed."""


def longer(argument: Any, sizes: Mapping[int, int]) -> Any:
    """An argument with its lists of sizes longer; tensors are when they are drawn."""
    if isinstance(argument, list | tuple):
        return type(argument)(sizes.get(item, item) if type(item) is int else longer(item, sizes) for item in argument)
    return argument


def run_of(case: Case, sizes: Mapping[int, int]) -> Executed | None:
    """The case's operator on tensors of other sizes; None where it does not take them."""

    def tensor(draw: Draw) -> torch.Tensor:
        return _DRAW(replace(draw, shape=tuple(sizes.get(extent, extent) for extent in draw.shape)))

    torch.manual_seed(0)
    with patch.object(Draw, "tensor", tensor):
        try:
            given = case.arguments() if callable(case.arguments) else case.arguments
            kwargs = {key: drawn(item) for key, item in case.kwargs.items()}
            return execute(case.target, [drawn(longer(item, sizes)) for item in given], kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None


def splittable(found: ShardingRule) -> list[str]:
    """The factors that may be cut in unequal parts."""
    return [name for name in found.free if name not in found.equal]


def odd_runs(case: Case) -> Iterator[Executed]:
    """The first sizes with which the case runs and some factor is cut in unequal parts, none of them empty."""
    for sizes in ({}, *LONGER):
        run = run_of(case, sizes)
        found = None if run is None else find_rule(run.op, run.tensors)
        if run is not None and found is not None and found.known and any(found.extent[name] in (5, 7, 9) for name in splittable(found)):
            yield run
            return


@pytest.mark.parametrize("name", sorted({row.name for row in ROWS} - ({row.name for row in POINTWISE} - set(_CASES)) - ONLY_ON_GPU))
def test_unequal_parts_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rules.test_execution.MESHES", MESHES)
    allowed = False
    tried = 0
    for case in (*_CASES.get(name, ()), *(case for case in ODD if case.target.startswith(f"{name}."))):
        run = execute(case.target, case.drawn(), {key: drawn(item) for key, item in case.kwargs.items()})
        allowed = allowed or bool(splittable(find_rule(run.op, run.tensors)))
        for odd in odd_runs(case):
            check_split_equals_whole(odd, random=case.random)
            tried += 1
    assert tried or not allowed, f"{name} may be split in unequal parts, and no case tries it: add one, or say equal='all' in its row"


def test_what_must_be_equal_is() -> None:
    """Factors that share a dim, that are counted over, or along which work grows."""
    tensors = {"x": Tensor("x", (6, 10, 8), "float32"), "y": Tensor("y", (60, 8), "float32")}
    view = Op("y", "aten.view.default", ("x",), ("y",), (Ref(0), (60, 8)))
    assert find_rule(view, tensors).equal == {"a", "b"}
    tensors = {"x": Tensor("x", (6, 7), "float32"), "y": Tensor("y", (6,), "float32")}
    variance = Op("y", "aten.var.correction", ("x",), ("y",), (Ref(0), (1,)))
    assert find_rule(variance, tensors).equal == {"d"}
    offered = strategies(find_rule(variance, tensors), list(tensors.values()), (4,))
    assert [str(item) for item in offered] == ["R R -> R"], "7 is not cut, and none of 6 rows on the last rank would be no row"
    softmax = Op("y", "aten._softmax.default", ("x",), ("y",), (Ref(0), 1, False))
    tensors["y"] = Tensor("y", (6, 7), "float32")
    offered = strategies(find_rule(softmax, tensors), list(tensors.values()), (4,))
    assert [str(item) for item in offered] == ["R R -> R R", "S0 R -> S0 R", "R S0 -> R S0"]
    assert [item.parts for item in offered] == [1, 3, 3.5], "the largest part decides"
    assert [inner.bytes for inner in offered[2].inner] == [24, 24]
    offered = strategies(find_rule(softmax, tensors), list(tensors.values()), (4,), uneven=frozenset())
    assert [str(item) for item in offered] == ["R R -> R R"]
    square = {"x": Tensor("x", (7, 7), "float32"), "y": Tensor("y", (7, 7), "float32")}
    offered = strategies(find_rule(softmax, square), list(square.values()), (5,))
    assert [str(item) for item in offered] == ["R R -> R R", "S0 R -> S0 R"], "2, 2, 2, 1 and 0 columns: no rank may be without"
    assert {str(spec) for item in strategies(find_rule(softmax, square), list(square.values()), (2, 2)) for spec in item.inputs} == {
        "R R", "S0 R", "R S0", "S1 R", "R S1", "S0 S1", "S1 S0", "S01 R", "R S01",
    }  # fmt: skip  of two axes the mesh's order alone


def test_operators_of_ones_own_are_cut_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OWN, "mine.op", raising=False)
    rule("mine::op", "a b -> a b")
    tensors = {"x": Tensor("x", (6, 7), "float32"), "y": Tensor("y", (6, 7), "float32")}
    found = find_rule(Op("y", "mine.op.default", ("x",), ("y",), (Ref(0),)), tensors)
    assert {str(item) for item in strategies(found, list(tensors.values()), (2,))} == {"R R -> R R", "S0 R -> S0 R"}
    del OWN["mine.op"]


@pytest.mark.parametrize(("place", "expected"), [((0,), (2, 0)), ((2,), (2, 4)), ((3,), (1, 6))])
def test_arguments_are_those_of_the_ranks_own_part(place: tuple[int, ...], expected: tuple[int, int]) -> None:
    tensors = {"g": Tensor("g", (4, 8), "float32"), "i": Tensor("i", (4,), "int64"), "y": Tensor("y", (7, 8), "float32")}
    op = Op("y", "autopar.embedding_backward.default", ("g", "i"), ("y",), (Ref(0), Ref(1), 7, 0, -1))
    specs = [ShardingSpec.parse(text) for text in ("R R", "R", "S0 R")]
    strategy = next(
        item for item in strategies(find_rule(op, tensors), list(tensors.values()), (4,)) if [*item.inputs, *item.outputs] == specs
    )  # fmt: skip
    args, _ = localize(op, tensors, strategy, (4,), place)
    assert args[2:4] == expected


def test_parts_are_those_of_chunk() -> None:
    for extent in range(1, 20):
        for ranks in range(2, 7):
            parts = [len(part) for part in torch.arange(extent).chunk(ranks)]
            spans = [ShardingSpec.parse("S0").span(0, extent, (ranks,), (rank,)) for rank in range(ranks)]
            assert [length for _, length in spans if length] == parts
            assert [start for start, length in spans if length] == [sum(parts[:number]) for number in range(len(parts))]

