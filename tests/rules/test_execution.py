"""Split equals whole: every row of the table, against the real operator, under every strategy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar.rules import find_rule, strategies
from autopar.rules.lookup import find_row
from autopar.rules.table import POINTWISE, ROWS
from autopar.runtime.instructions.operators import find_operator
from tests.rules.cases import CASES, is_gone
from tests.rules.drawing import Case, F, I, P
from tests.rules.drawing import drawn as with_tensors
from tests.rules.execution import Executed, execute, joined, split_run

MESHES = ((2,), (2, 2), (3, 2), (4,))
ROWS_IN_NO_ORDER = {"autopar.dispatch", "autopar.dispatch_ids", "autopar.combine"}
"""Parts do not join to the whole: see ``test_dispatch``."""
ONLY_ON_GPU = {"aten._fused_rms_norm_backward"}
"""No CPU kernel; its rule is that of ``autopar.rms_norm_backward``."""


def check_split_equals_whole(run: Executed, *, random: bool = False) -> None:
    """Every strategy on every mesh gives the whole operator's outputs; random ones equal on replicas, and no two parts the same draw."""
    rule = find_rule(run.op, run.tensors)
    tolerance = 1e-3 if any(value.dtype == torch.float32 for value in (*run.inputs, *run.outputs)) else 1e-8
    for sizes in MESHES:
        for strategy in strategies(rule, run.own, sizes):
            try:
                found = split_run(run, strategy, sizes)
                for index, (spec, whole) in enumerate(zip(strategy.outputs, run.outputs, strict=True)):
                    parts = [results[index] for results in found]
                    if "empty" in run.op.target:
                        places = itertools.product(*map(range, sizes))
                        assert [tuple(part.shape) for part in parts] == [spec.own_shape(whole.shape, sizes, place) for place in places]
                    elif random:
                        drawn = joined(parts, spec, whole.shape, sizes)
                        assert drawn.dtype == torch.bool or len(drawn[drawn != 0].unique()) == (drawn != 0).sum()
                        assert abs(drawn.double().mean() - whole.double().mean()) < 1.5
                    else:
                        value = joined(parts, spec, whole.shape, sizes)
                        torch.testing.assert_close(value, whole, equal_nan=True, rtol=1e-6, atol=tolerance)
            except Exception as problem:
                raise AssertionError(f"{run.op.target} as {strategy} on mesh {sizes}, rule {rule}: {problem}") from problem


@pytest.mark.parametrize("case", CASES, ids=str)
def test_split_equals_whole(case: Case) -> None:
    run = execute(case.target, case.drawn(), {name: with_tensors(value) for name, value in case.kwargs.items()})
    assert str(find_rule(run.op, run.tensors)) == case.rule
    check_split_equals_whole(run, random=case.random)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_lie_in_memory_of_their_own_size(case: Case) -> None:
    """Plans count that much of them; what a kernel took more for itself lives as long as its result. A periodic window is one number
    more."""
    run = execute(case.target, case.drawn(), {name: with_tensors(value) for name, value in case.kwargs.items()})
    entered = {value.untyped_storage().data_ptr() for value in run.inputs}
    for value in run.outputs:
        storage = value.untyped_storage()
        assert storage.data_ptr() in entered or storage.nbytes() <= value.nbytes + value.element_size()


def test_group_norm_of_parts_that_lie_otherwise_in_memory() -> None:
    """torch's own kernels refuse such parts, or take one operand for laid out as another is."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 4, 4, 6).permute(0, 3, 1, 2), torch.randn(2, 6, 4, 4)
    weight = torch.rand(6)
    settings = (2, 6, 16, 3)
    forward, backward = (find_operator(f"aten.native_group_norm{name}.default") for name in ("", "_backward"))
    out, *_ = forward(x[:, :, :, 1:], weight, None, 2, 6, 12, 3, 1e-5)
    assert (out - torch.nn.functional.group_norm(x[:, :, :, 1:], 3, weight)).abs().max() < 1e-5
    _, mean, rstd = forward(x, weight, None, *settings, 1e-5)
    found = backward(grad, x, mean, rstd, weight, *settings, [True, True, True])
    wanted = torch.ops.aten.native_group_norm_backward.default(grad, x.contiguous(), mean, rstd, weight, *settings, [True, True, True])
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(found, wanted, strict=True))


LISTED = {row.name for case in CASES if (row := find_row(case.target))}


def test_every_row_has_a_case() -> None:
    missing = {row.name for row in ROWS if row not in POINTWISE} - LISTED - ONLY_ON_GPU - ROWS_IN_NO_ORDER
    assert not {name for name in missing if not is_gone(f"{name}.default")}


@pytest.mark.parametrize("name", sorted({row.name for row in POINTWISE} - LISTED))
def test_elementwise_split_equals_whole(name: str) -> None:
    """The elementwise operators without a case: tensors are drawn for whatever their schema asks."""
    tried = 0
    for target in _overloads(name):
        run = _first_that_runs(target)
        if run is not None:
            tried += 1
            assert find_rule(run.op, run.tensors).known
            check_split_equals_whole(run)
    assert tried, f"no arguments were found for {name}"


def _overloads(name: str) -> list[str]:
    """The targets that get this row's rule."""
    namespace, _, rest = name.partition(".")
    if "." in rest:
        return [name]
    packet = getattr(getattr(torch.ops, namespace), rest)
    taken = {row.name for row in ROWS}
    found = [f"{name}.{overload}" for overload in packet.overloads() if "out" not in overload.lower() and "generator" not in overload]
    return [target for target in found if target not in taken and _takes_tensors(target)]


def _takes_tensors(target: str) -> bool:
    return any("Tensor" in str(argument.type) for argument in find_operator(target)._schema.arguments)  # type: ignore[attr-defined]


def _first_that_runs(target: str) -> Executed | None:
    torch.manual_seed(0)
    for drawn in (P(4, 7), F(4, 7), I(4, 4, 7)):
        arguments = list(_arguments(target, drawn))
        try:
            return execute(target, arguments)
        except (RuntimeError, TypeError, ValueError):
            continue
    return None


def _arguments(target: str, drawn: Any) -> Iterator[Any]:
    for argument in find_operator(target)._schema.arguments:  # type: ignore[attr-defined]
        optional = argument.has_default_value() and argument.default_value is not None and "Tensor" not in str(argument.type)
        if argument.kwarg_only or optional:
            return
        match str(argument.type):
            case "Tensor":
                yield drawn.tensor()
            case "Optional[Tensor]":
                yield drawn.tensor()
            case "bool":
                yield False
            case "str":
                yield "none"
            case "int":
                yield 1
            case "List[int]":
                yield [4, 7]
            case _:
                yield 0.5 if drawn.kind != "integer" else 2
