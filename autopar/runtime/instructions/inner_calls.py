"""Operators with collectives inside, as a statement of the straight-line code that runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autopar.runtime.instructions.code import Code
from autopar.runtime.instructions.expert_exchange import KeptWays
from autopar.runtime.instructions.inner import Answer, Request, body
from autopar.runtime.instructions.operators import named_results, with_tensors
from autopar.runtime.ranks.backends import Backend, Unequal
from autopar.runtime.ranks.collectives import Observed, exchange_beside, exchange_inside, exchange_now
from autopar.schedule import Instruction
from autopar.schedule.instructions import Operation


def write_with_collectives(
    code: Code, operation: Operation, item: Instruction, arguments: Sequence[tuple[list[Any], dict[str, Any]]], backend: Backend,
    ways: Sequence[KeptWays],
) -> None:  # fmt: skip
    """Runs the ranks' bodies side by side; each yields a collective and its tensor, and is sent what the collective gives it.

    Args:
        ways: of each hosted rank.
    """
    op, strategy, mesh = operation.op, operation.strategy, backend.mesh
    asked = dict.fromkeys((item.kind, item.axes, item.reduction) for item in strategy.inner)
    exchanges = {what: exchange_inside(mesh, *what) for what in asked}

    def answer(requests: Sequence[Request], observed: list[Observed] | None) -> Sequence[Answer | None]:
        inner = requests[0][0]
        exchange = exchanges[inner.kind, inner.axes, inner.reduction]
        tensors = [given for _, given in requests if isinstance(given, Tensor)]
        rows = [given for _, given in requests if isinstance(given, Unequal)]
        if observed is not None:  # rows are counted as planned, and so are numbers that ranks know
            bytes_sent = exchange.full_bytes(tensors[0].nbytes) if tensors else inner.bytes
            observed.append(Observed(inner.kind, exchange.axes, item.phase, bytes_sent, op.inputs[0], item.of))
        if not (rows or tensors):
            return [None] * len(requests)
        if inner.beside is not None:
            return exchange_beside(backend, exchange, tensors)
        return backend.exchange(exchange, rows) if rows else exchange_now(backend, exchange, tensors)

    def run(observed: list[Observed] | None, *given: Sequence[Tensor]) -> list[list[Tensor]]:
        bodies = []
        for (args, kwargs), tensors, kept in zip(arguments, given, ways, strict=True):
            bodies.append(body(op, strategy, mesh.sizes, with_tensors(args, tensors), with_tensors(kwargs, tensors), kept))
        answers: list[Answer | None] = [None] * len(bodies)
        while True:
            requests, results = [], []
            for one in bodies:
                try:
                    requests.append(one.send(answers.pop(0)))
                except StopIteration as stop:
                    results.append(stop.value)
            if results:
                assert not requests, f"the ranks' bodies of {op.name} differ in their collectives"
                return [named_results(op, result) for result in results]
            answers = list(answer(requests, observed))

    hosted = range(code.hosted)
    given = [f"({''.join(f'{code.read(value, place)}, ' for value in item.reads)})" for place in hosted]
    made = [f"[{', '.join(code.write(value, place) for value in item.writes)}]" for place in hosted]
    code.add(f"[{', '.join(made)}] = {code.object(run)}(observed, {', '.join(given)})")
