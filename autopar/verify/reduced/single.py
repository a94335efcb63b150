"""The reduced graph on one device: every operator on whole tensors, in the graph's order, without a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.dialect.library import STILL
from autopar.graph import DIVISOR, Graph, Op
from autopar.runtime.instructions.index_check import check_lookup
from autopar.runtime.instructions.operators import find_operator, named_results, takes_device, with_tensors, with_torch_values

Tensors = dict[str, torch.Tensor]


class OperatorFailure(Exception):
    """An operator of the reduced graph that fails on its values: an index beyond a dim that is smaller now."""

    def __init__(self, op: Op, reason: str) -> None:
        super().__init__(reason)
        self.op, self.reason = op, reason


@dataclass(frozen=True)
class Whole:
    """What a step gives on one device.

    Args:
        outputs: by name; of what a stage sends, the last microbatch's.
        gradients: by the name of their parameter or input.
        buffers: the new values of buffers that change.
    """

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors


def run_on_one_device(graph: Graph, values: Mapping[str, torch.Tensor]) -> Whole:
    """A step of the graph, of all its microbatches, in float64.

    Args:
        values: of each graph input, by tensor name; of one that is cut, of the whole batch.

    Raises:
        OperatorFailure: an operator fails.
    """
    made, count = graph.accumulation, graph.microbatches
    pieces = {name: tensor.chunk(count) if graph.parts(name) > 1 else (tensor,) * count for name, tensor in values.items()}
    runs = [_run(graph, {name: piece[number] for name, piece in pieces.items()}) for number in range(count)]
    divisors = [float(run["output", DIVISOR]) for run in runs] if made.divisor else []
    weights = [divisor / sum(divisors) for divisor in divisors] or [made.weight if count > 1 else 1.0] * count
    found: dict[str, Tensors] = {"output": {}, "gradient": {}, "buffer": {}}
    sent = _sent_shares(graph, weights[-1])
    for kind, name in runs[0]:
        if (kind, name) in sent:
            found[kind][name] = runs[-1][kind, name] * sent[kind, name]
        elif kind == "buffer":
            found[kind][name] = runs[-1][kind, name]
        elif name != DIVISOR:
            terms = [run[kind, name] if weight == 1.0 else run[kind, name] * weight for run, weight in zip(runs, weights, strict=True)]
            found[kind][name] = sum(terms[1:], terms[0])
    return Whole(found["output"], found["gradient"], found["buffer"])


def _sent_shares(graph: Graph, weight: float) -> dict[tuple[str, str], float]:
    """What a stage's values are sent times: gradients leave the stage of the loss times the microbatch's ``weight``."""
    backward = {name for op in graph.ops if op.phase == "backward" for name in op.outputs} if graph.loss_gradient is not None else set()
    return {(one.kind, one.name): weight if one.tensor in backward else 1.0 for one in graph.outputs if one.is_sent}


@torch.no_grad()
def _run(graph: Graph, values: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """Forward and backward of one microbatch."""
    held, last = dict(values), {name: places[-1][0] for name, places in graph.consumers.items() if places}
    leaving = {output.tensor for output in graph.outputs}
    for index, op in enumerate(graph.ops):
        given = [held[name] for name in op.inputs]
        args, kwargs = with_tensors(with_torch_values(op.args), given), with_tensors(with_torch_values(dict(op.kwargs)), given)
        if takes_device(op):
            kwargs["device"] = torch.device("cpu")
        try:
            check_lookup(op, graph, given)  # a table that a rank holds in part reads zeros beyond it
            results = named_results(op, STILL.get(op.target, find_operator(op.target))(*args, **kwargs))
        except (RuntimeError, IndexError, ValueError) as error:
            raise OperatorFailure(op, str(error).strip().splitlines()[0]) from error
        held.update(zip(op.outputs, results, strict=True))
        for name in {*op.inputs, *op.outputs}:
            if last.get(name, index) <= index and name not in leaving and name not in values:
                del held[name]
    return {(output.kind, output.name): held[output.tensor] for output in graph.outputs}


