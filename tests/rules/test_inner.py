"""Bodies with collectives inside, in the dtypes models use: the whole operator's result, and the declared bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.graph import Op
from autopar.rules import find_rule, strategies
from autopar.runtime.instructions.inner import body
from autopar.sharding import InnerCollective, ShardingSpec, Strategy
from tests.rules.execution import execute, joined, split_run

Make = Callable[[torch.dtype], tuple[Any, ...]]


def softmax_gradient(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(4, 6).to(dtype), torch.randn(4, 6).softmax(-1).to(dtype), -1, dtype


def batch_norm(dtype: torch.dtype) -> tuple[Any, ...]:
    x = (torch.randn(4, 6, 5) + 100).to(dtype)  # a mean far from zero: squares must not cancel
    return x, torch.rand(6), torch.rand(6), torch.rand(6), torch.rand(6), 0.1, 1e-5


def batch_norm_gradient(dtype: torch.dtype) -> tuple[Any, ...]:
    x = torch.randn(4, 6, 5).to(dtype)
    _, mean, invstd, _, _ = torch.ops.autopar.batch_norm.default(x, None, None, None, None, 0.1, 1e-5)
    return torch.randn(4, 6, 5).to(dtype), x, torch.rand(6), mean, invstd


def attention(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v = (torch.randn(2, heads, 16, 8).to(dtype) for heads in (4, 2, 2))
    return q, k, v, None, True, 0.5, 0.0, 0


def attention_gradient(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v, *settings = attention(dtype)
    out, lse = torch.ops.autopar.attention.default(q, k, v, *settings)
    return torch.randn_like(out), q, k, v, out, lse, *settings


CASES: list[tuple[str, Make]] = [
    ("autopar.attention.default", attention),
    ("autopar.attention_backward.default", attention_gradient),
    ("aten._softmax.default", lambda dtype: (torch.randn(4, 6).to(dtype), -1, False)),
    ("aten._log_softmax.default", lambda dtype: (torch.randn(4, 6).to(dtype) * 20, -1, False)),
    ("aten._softmax_backward_data.default", softmax_gradient),
    ("aten._log_softmax_backward_data.default", softmax_gradient),
    ("autopar.batch_norm.default", batch_norm),
    ("autopar.batch_norm_backward.default", batch_norm_gradient),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("target", "make"), CASES, ids=[target for target, _ in CASES])
def test_split_statistics_give_the_whole_result(target: str, make: Make, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    run = execute(target, make(dtype))
    chosen = [item for item in strategies(find_rule(run.op, run.tensors), run.own, (2, 2)) if item.inner and not item.inputs[0].partial]
    assert chosen
    for strategy in chosen:
        found = split_run(run, strategy, (2, 2))
        for index, (spec, whole) in enumerate(zip(strategy.outputs, run.outputs, strict=True)):
            value = joined([results[index] for results in found], spec, whole.shape, (2, 2))
            assert value.dtype == whole.dtype
            close = 1e-5 if whole.dtype == torch.float32 and not (dtype.itemsize == 2 and "attention" in target) else 2e-2
            torch.testing.assert_close(value, whole, rtol=close, atol=close)


def test_a_row_of_nothing_but_minus_infinity_is_as_in_the_whole_operator() -> None:
    values = torch.tensor([[float("-inf")] * 4, [0.0, float("-inf"), 1.0, 2.0], [1.0] * 4, [float("-inf")] * 2 + [0.0] * 2])
    for target in ("aten._softmax.default", "aten._log_softmax.default"):
        run = execute(target, (values, 1, False))
        for strategy in strategies(find_rule(run.op, run.tensors), run.own, (2,)):
            found = split_run(run, strategy, (2,))
            value = joined([results[0] for results in found], strategy.outputs[0], (4, 4), (2,))
            torch.testing.assert_close(value, run.outputs[0], equal_nan=True)


def test_a_collective_that_was_not_declared_is_caught() -> None:
    split = ShardingSpec.parse("R S0")
    declared = InnerCollective("all_reduce", (0,), 16, "max")
    op = Op("op", "aten._softmax.default", ("x",), ("op",))
    too_few = body(op, Strategy((split,), (split,), 2, (declared,)), (2,), [torch.rand(4, 2), 1, False], {})
    asked, tensor = too_few.send(None)
    assert (asked, tensor.shape) == (declared, (4, 1))
    with pytest.raises(AssertionError, match="more collectives than its strategy declares"):
        too_few.send(tensor)
    wrong = InnerCollective("all_reduce", (0,), 8, "max")
    with pytest.raises(AssertionError, match="declared"):
        body(op, Strategy((split,), (split,), 2, (wrong,)), (2,), [torch.rand(4, 2), 1, False], {}).send(None)
