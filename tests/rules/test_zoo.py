"""The built-in models: every operator of their graphs has a rule, and each distinct one is run split on a 2x2 mesh."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from autopar.cli.target import capture_target
from autopar.graph import Graph, Op
from autopar.rules import find_rule, strategies
from autopar.rules.lookup import find_row
from autopar.runtime.instructions.operators import find_operator, named_results, with_tensors, with_torch_values
from tests.rules.execution import Executed, joined, split_run

MODELS = (
    "zoo:mlp",
    "zoo:gpt2,batch=4,seq=8,layers=1,width=32,heads=4,vocab=32",
    "zoo:gpt2,batch=4,seq=8,layers=1,width=32,heads=4,vocab=32,dropout=0.1",
    "zoo:llama3,batch=4,seq=8,layers=1,width=32,heads=8,kv_heads=4,hidden=64,vocab=32",
    "zoo:resnet,batch=4,image=16,width=8,blocks=1-1",
    "zoo:resnet,batch=4,image=16,width=8,blocks=1-1,bottleneck=True",
    "zoo:moe,batch=4,seq=8,layers=1,width=32,heads=4,hidden=32,experts=4,vocab=32",
    "zoo:moe,batch=4,seq=8,layers=1,width=32,heads=4,hidden=32,experts=4,vocab=32,dispatch=grouped",
)
SIZES = (2, 2)
SAMPLE = 12
"""Strategies tried of each operator."""


@cache
def graph(model: str, mode: str) -> Graph:
    return capture_target(model, "train" if mode == "train" else "inference")


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("model", MODELS)
def test_every_operator_has_a_rule(model: str, mode: str) -> None:
    captured = graph(model, mode)
    assert {op.target for op in captured.ops if not find_rule(op, captured.tensors).known} == set()


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("model", MODELS)
def test_every_operator_splits(model: str, mode: str) -> None:
    """Values flow through the graph, in float64, so that every operator gets inputs as in the model."""
    captured = graph(model, mode)
    torch.manual_seed(0)
    values = {item.tensor: _drawn(captured, item.tensor) for item in captured.inputs}
    seen = set()
    for op in captured.ops:
        run = _run(op, captured, values)
        values.update(zip(op.outputs, run.outputs, strict=True))
        key = (op.target, op.args, op.kwargs, tuple(captured.tensors[name].shape for name in (*op.inputs, *op.outputs)))
        if key not in seen:
            seen.add(key)
            _check(run)


def _drawn(captured: Graph, name: str) -> torch.Tensor:
    tensor = captured.tensors[name]
    if tensor.dtype in ("float32", "float64", "bfloat16", "float16"):
        return torch.rand(tensor.shape, dtype=torch.float64) + 0.1
    return torch.randint(0, 4, tensor.shape).to(getattr(torch, tensor.dtype))


def _run(op: Op, captured: Graph, values: dict[str, torch.Tensor]) -> Executed:
    inputs = tuple(values[name] for name in op.inputs)
    args, kwargs = _wide(with_torch_values(op.args)), _wide(with_torch_values(dict(op.kwargs)))
    results = tuple(named_results(op, find_operator(op.target)(*with_tensors(args, inputs), **with_tensors(kwargs, inputs))))
    for name, result in zip(op.outputs, results, strict=True):
        assert tuple(result.shape) == captured.tensors[name].shape
    return Executed(op, dict(captured.tensors), inputs, results)


def _wide(argument: object) -> object:
    """float64 wherever the graph asks for a smaller float."""
    match argument:
        case torch.dtype() if argument.is_floating_point:
            return torch.float64
        case list():
            return [_wide(item) for item in argument]
        case dict():
            return {key: _wide(item) for key, item in argument.items()}
        case _:
            return argument


def _check(run: Executed) -> None:
    rule = find_rule(run.op, run.tensors)
    found = strategies(rule, run.own, SIZES)
    chosen = found if len(found) <= SAMPLE else random.Random(0).sample(found, SAMPLE)
    for strategy in chosen:
        if strategy.inner or find_row(run.op.target).family == "dispatch":
            continue  # sized by the graph's dtypes; run in test_execution, and rows in no order in test_dispatch
        try:
            parts = split_run(run, strategy, SIZES)
            for index, (spec, whole) in enumerate(zip(strategy.outputs, run.outputs, strict=True)):
                if run.op.target.startswith("autopar.dropout"):
                    assert all(tuple(part[index].shape) == spec.local_shape(whole.shape, SIZES) for part in parts)
                    continue
                value = joined([part[index] for part in parts], spec, whole.shape, SIZES)
                torch.testing.assert_close(value, whole, equal_nan=True, rtol=1e-5, atol=1e-5, check_dtype=False)
        except Exception as problem:
            raise AssertionError(f"{run.op.name} {run.op.target} as {strategy}, rule {rule}: {problem}") from problem
