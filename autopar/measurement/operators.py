"""Times of operators: the distinct ones of the built-in models, in some sizes, with their own arguments and in their own order.

What a planner prices is measured as it is run: the operators of the dialect, forward and backward, on tensors that others of the model
made, with flops and bytes counted by the planner's own functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from autopar import pricing, zoo
from autopar.cost_models import Hardware, Link, Machine, Mesh, Operator
from autopar.cost_models.fitting import OperatorTime
from autopar.graph import Graph, GraphInput, Op
from autopar.importer import capture
from autopar.measurement import rearrangements
from autopar.measurement.clock import Clock, mean_over_ranks
from autopar.measurement.gpu_clock import CallTime
from autopar.measurement.rearrangements import NAME
from autopar.runtime.instructions.kernels import Kernel, bind_kernel
from autopar.runtime.instructions.operators import find_operator, takes_device, with_torch_values
from autopar.sharding import ShardingSpec, Strategy
from autopar.verify.examples import index_bound

ALONE = Machine(Mesh((("one", 1),)), Hardware("one", 1, 1, 0, (("float32", 1),), 1, Link(0, 1), Link(0, 1)))
"""The machine on which an operator's local tensors are whole."""

Keys = Mapping[str, Any]

SMALL: tuple[tuple[str, Keys], ...] = (
    ("mlp", {}),
    ("mlp", {"batch": 128, "inputs": 128, "width": 256, "outputs": 64}),
    ("mlp", {"batch": 512, "inputs": 512, "width": 512, "layers": 1, "outputs": 64}),
    ("mlp", {"batch": 256, "inputs": 1024, "width": 1024, "layers": 1, "outputs": 256}),
    ("gpt2", {"layers": 1}),
    ("gpt2", {"layers": 1, "batch": 4, "seq": 64, "width": 128, "vocab": 512}),
    ("gpt2", {"layers": 1, "batch": 8, "seq": 128, "width": 256, "vocab": 2048}),
    ("llama3", {"layers": 1, "batch": 2, "width": 64, "heads": 8, "kv_heads": 4, "hidden": 128}),
    ("llama3", {"layers": 1, "batch": 4, "seq": 64}),
    ("llama3", {"layers": 1, "batch": 4, "seq": 128, "width": 256, "heads": 8, "kv_heads": 4, "hidden": 512, "vocab": 1024}),
    ("resnet", {"blocks": "1-1"}),
    ("resnet", {"blocks": "1-1", "batch": 16, "width": 32}),
    ("resnet", {"blocks": "1-1", "batch": 4, "width": 8}),
    ("moe", {"layers": 1}),
    ("moe", {"layers": 1, "batch": 8, "seq": 64, "width": 128, "hidden": 256, "vocab": 512}),
    (NAME, {"batch": 2, "channels": 16, "image": 16, "seq": 32, "heads": 2}),
    (NAME, {"batch": 8, "channels": 32, "image": 32, "seq": 64, "heads": 4}),
    (NAME, {"batch": 16, "channels": 64, "image": 32, "seq": 128, "heads": 8}),
)
"""Models that a CPU's core runs in milliseconds to a second."""

LARGE: tuple[tuple[str, Keys], ...] = tuple(
    (name, {**keys, **({"dtype": "bfloat16"} if name not in ("resnet", NAME) else {})})
    for name, keys in (
        ("mlp", {}),
        ("mlp", {"batch": 1024, "inputs": 1024, "width": 1024, "outputs": 1024}),
        ("mlp", {"batch": 8192, "inputs": 4096, "width": 4096, "layers": 1, "outputs": 1024}),
        ("gpt2", {"layers": 1}),
        ("gpt2", {"layers": 1, "batch": 8, "seq": 512, "width": 768, "heads": 12, "vocab": 8192}),
        ("gpt2", {"layers": 1, "batch": 8, "seq": 1024, "width": 2048, "heads": 16, "vocab": 32768}),
        ("llama3", {"layers": 1}),
        ("llama3", {"layers": 1, "batch": 2, "seq": 2048, "width": 4096, "heads": 32, "hidden": 14336, "vocab": 32768}),
        ("resnet", {"batch": 64, "image": 224, "width": 64, "blocks": "1-1"}),
        ("moe", {"layers": 1, "batch": 8, "seq": 512, "width": 1024, "heads": 16, "hidden": 2048, "vocab": 8192}),
        (NAME, {"batch": 8, "channels": 64, "image": 28, "seq": 256, "heads": 12}),
        (NAME, {"batch": 32, "channels": 128, "image": 56, "seq": 1024, "heads": 16}),
        (NAME, {"batch": 32, "channels": 256, "image": 56, "seq": 2048, "heads": 32}),
    )
)
"""Models for a GPU."""


LEAST_PASSES = 5
"""Runs of a model on a CPU, at least."""
MOST_PASSES = 40
"""Runs of a model on a CPU, at most."""
FILLING = 2**25
"""Bytes that are written to clear a CPU's caches between passes."""
MODEL_WINDOWS = 100
"""Windows that one model may take on a CPU before it has been run ``MOST_PASSES`` times."""


@dataclass(frozen=True)
class Sample:
    """A model whose operators are timed."""

    name: str
    graph: Graph


def samples(models: Sequence[tuple[str, Keys]]) -> list[Sample]:
    """Captures the models; no values are needed."""
    found = []
    for name, keys in models:
        target = rearrangements.build(**keys) if name == NAME else zoo.build(name, device="meta", **keys)
        graph = capture(target.model, target.args, target.kwargs, mode="train", loss=target.loss, loss_args=target.loss_args).graph
        found.append(Sample(name, graph))
    return found


def time_operators(given: Sequence[Sample], clock: Clock, say: Callable[[str], None]) -> tuple[list[OperatorTime], float]:
    """The times of all distinct operators, and the ranks' stretch, as this rank saw them; the same list in the same order on every rank.
    Collective."""
    found: dict[Hashable, OperatorTime] = {}
    stretches = []
    for number, sample in enumerate(given, 1):
        say(f"operators of {sample.name} ({number} of {len(given)})")
        stretches.append(clock.stretch())
        times = _times_in_a_row if clock.device.type == "cuda" else _times_in_passes
        for key, timed in times(sample.graph, clock):
            found.setdefault(key, timed)
    return list(found.values()), median(mean_over_ranks(stretches))


def _times_in_a_row(graph: Graph, clock: Clock) -> Iterator[tuple[Hashable, OperatorTime]]:
    """Each operator's time on a GPU under a key that equal ones share: the device's of many calls in a row, and the host's.

    An operator without work, a view, has no kernel, and is left out.
    """
    seen = set[Hashable]()
    for op, call, _ in _run(graph, _bind_all(graph, clock.device), clock.device, clock.now):
        local, key = _local(graph, op), _key(graph, op)
        if key not in seen and (local.flops or local.bytes_moved):
            seen.add(key)
            yield key, _timed(local, clock.measure(call))


def _times_in_passes(graph: Graph, clock: Clock) -> Iterator[tuple[Hashable, OperatorTime]]:
    """Each operator's time on a CPU under a key that equal ones share.

    The graph is run again and again and the median time of each operator counts: in a row of equal calls, caches would hold what they do
    not hold in a step. Between passes they are filled with something else, as an optimizer fills them.
    """
    runs: dict[Hashable, list[float]] = {}
    named: dict[Hashable, Op] = {}
    kernels = _bind_all(graph, clock.device)
    other = torch.zeros(FILLING // 4)
    end, passes = time.perf_counter() + MODEL_WINDOWS * clock.window, 0
    while passes < LEAST_PASSES or (passes < MOST_PASSES and time.perf_counter() < end):
        other.add_(1.0)
        for op, _, seconds in _run(graph, kernels, clock.device, clock.now):
            key = _key(graph, op)
            if passes:  # a first pass warms up
                runs.setdefault(key, []).append(seconds)
            named[key] = op
        passes += 1
    for key, seen in runs.items():
        yield key, _timed(_local(graph, named[key]), CallTime(median(seen)))


def _key(graph: Graph, op: Op) -> Hashable:
    """Equal for operators that do the same to tensors of the same shapes and dtypes."""
    return (op.target, op.args, op.kwargs, tuple((graph.tensors[name].shape, graph.tensors[name].dtype) for name in op.inputs))


def _bind_all(graph: Graph, device: torch.device) -> dict[str, Kernel]:
    return {op.name: _bound(op, graph, device) for op in graph.ops}


@torch.no_grad()
def _run(
    graph: Graph, kernels: Mapping[str, Kernel], device: torch.device, now: Callable[[], float]
) -> Iterator[tuple[Op, Callable[[], Any], float]]:  # fmt: skip
    """Each operator in order, with a call of it and how long that took; values are dropped after their last use."""
    values = {item.tensor: _value(graph, item, device) for item in graph.inputs}
    last = {name: index for index, op in enumerate(graph.ops) for name in (*op.inputs, *op.outputs)}
    for index, op in enumerate(graph.ops):
        call = partial(kernels[op.name], [values[name] for name in op.inputs])
        begin = now()
        made = call()
        seconds = now() - begin
        values.update(zip(op.outputs, made, strict=True))
        yield op, call, seconds
        for name in {*op.inputs, *op.outputs}:
            if last[name] == index:
                del values[name]


def _local(graph: Graph, op: Op) -> Operator:
    """The operator whole, in the words of the cost model."""
    whole = [tuple(ShardingSpec.replicated(len(graph.tensors[name].shape)) for name in names) for names in (op.inputs, op.outputs)]
    return pricing.local_operator(op, graph.tensors, Strategy(whole[0], whole[1]), ALONE)


def _timed(local: Operator, took: CallTime) -> OperatorTime:
    return OperatorTime(local.family, local.name, local.dtype, local.flops, float(local.bytes_moved), took.device, took.host)


def _bound(op: Op, graph: Graph, device: torch.device) -> Kernel:
    """The operator as the runtime binds it: a contraction is a product of matrices where it can be."""
    function = find_operator(op.target)
    args, kwargs = with_torch_values(op.args), {name: with_torch_values(value) for name, value in op.kwargs}
    if takes_device(op):
        kwargs["device"] = device
    return bind_kernel(op, function, args, kwargs, [graph.tensors[name].shape for name in op.inputs])


def _value(graph: Graph, item: GraphInput, device: torch.device) -> torch.Tensor:
    tensor = graph.tensors[item.tensor]
    dtype = getattr(torch, tensor.dtype)
    if dtype.is_floating_point:
        return torch.randn(tensor.shape, device=device).mul_(0.1).to(dtype)
    bound = 2 if dtype == torch.bool else index_bound(graph, item.tensor)
    return torch.randint(bound, tensor.shape, device=device).to(dtype)
