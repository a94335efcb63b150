"""The interpreter: a program's instructions on the local tensors of the ranks that a backend hosts.

One interpreter serves the simulation of all ranks in one process and the real ranks, so what is tested in lockstep is what runs.
Values are dropped after their last use; every collective executed is recorded when asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autopar.graph import Op
from autopar.program import Move, Program, Run
from autopar.reshard import Step
from autopar.rules import localize
from autopar.runtime.backends import Backend, Exchange, LockstepRanks, part
from autopar.runtime.fusion import Instruction, Local, bind_in_place, bind_pair, find_fusion
from autopar.runtime.inner import body
from autopar.runtime.kernels import Kernel, bind_kernel
from autopar.runtime.operators import find_operator, named_results, takes_device, with_tensors, with_torch_values
from autopar.runtime.placement import gather, scatter
from cost_models import Mesh, SubAxis

Locals = list[torch.Tensor]
"""One tensor for each hosted rank."""


@dataclass(frozen=True)
class Observed:
    """A collective that was executed, in the words of the plan's list."""

    kind: str
    axes: tuple[SubAxis, ...]
    phase: str
    tensor: str
    before: str
    bytes: int

    def row(self, mesh: Mesh) -> dict[str, Any]:
        """As JSON."""
        names = [mesh.sub_axis_name(item) for item in self.axes]
        return {"kind": self.kind, "axes": names, "phase": self.phase, "tensor": self.tensor, "before": self.before, "bytes": self.bytes}


@dataclass(frozen=True)
class Call:
    """Operators bound to this backend's ranks: one, or several as one kernel; none where an earlier call has done the work.

    Args:
        run: the operator that stands here.
        reads, writes: the values; a kernel of several operators reads and writes theirs.
        kernels: by rank. With collectives inside, ``arguments`` by rank are used instead.
    """

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kernels: tuple[Kernel, ...] = ()
    arguments: tuple[tuple[list[Any], dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class Executable:
    """A program bound to a backend and a device.

    Args:
        steps: its instructions; a ``Run`` has become a ``Call``.
        drops: for each instruction, the values nobody reads after it.
        forward_end: index of the first backward instruction.
    """

    program: Program
    backend: Backend
    steps: tuple[Call | Move, ...]
    drops: tuple[tuple[str, ...], ...]
    forward_end: int

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The values that the backward instructions or backward outputs need from before."""
        needed = {value for step in self.steps[self.forward_end :] for value in _reads(step)}
        needed |= {value for output, value in self.program.outputs if output.kind == "gradient"}
        made = {item.tensor for item in self.program.graph.inputs}
        made |= {value for step in self.steps[: self.forward_end] for value in _writes(step)}
        return tuple(sorted(needed & made))

    def forward(self, values: dict[str, Locals], observed: list[Observed] | None = None) -> None:
        """Runs the forward instructions; ``values`` holds the inputs before, what is still needed after."""
        self._run(0, self.forward_end, values, observed)

    def backward(self, values: dict[str, Locals], observed: list[Observed] | None = None) -> None:
        """Runs the backward instructions on what ``forward`` left."""
        self._run(self.forward_end, len(self.steps), values, observed)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)
    @torch.autocast("cuda", enabled=False)
    def _run(self, start: int, stop: int, values: dict[str, Locals], observed: list[Observed] | None) -> None:
        for index in range(start, stop):
            step = self.steps[index]
            if isinstance(step, Move):
                values[step.layout.value] = self._move(step, values[step.layout.source], observed)
            else:
                self._call(step, values, observed)
            for name in self.drops[index]:
                del values[name]

    def _move(self, move: Move, tensors: Locals, observed: list[Observed] | None) -> Locals:
        layout = move.layout
        for step in move.reshard.steps:
            if not step.is_collective:
                local = self._slice if step.kind == "slice" else self._mask
                tensors = [local(step, tensor, rank) for tensor, rank in zip(tensors, self.backend.ranks, strict=True)]
                continue
            exchange = Exchange(step.kind, step.axes, step.dims, step.reduction or "sum", step.sources or ())
            if observed is not None:
                size = exchange.full_bytes(tensors[0])
                observed.append(Observed(step.kind, step.axes, layout.phase, layout.tensor, layout.before, size))
            tensors = self.backend.collective(exchange, tensors)
        return tensors

    def _slice(self, step: Step, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        mesh = self.backend.mesh
        count = Exchange("slice", step.axes).size
        return part(tensor, step.dims[0], mesh.index(rank, step.axes), count).clone(memory_format=torch.contiguous_format)

    def _mask(self, step: Step, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.zeros_like(tensor) if self.backend.mesh.index(rank, step.axes) else tensor.clone()

    def _call(self, call: Call, values: dict[str, Locals], observed: list[Observed] | None) -> None:
        inputs = [values[name] for name in call.reads]
        if call.run.strategy.inner:
            bound = []
            for position, (args, kwargs) in enumerate(call.arguments):
                tensors = [value[position] for value in inputs]
                bound.append((with_tensors(args, tensors), with_tensors(kwargs, tensors)))
            results = self._call_with_collectives(call, bound, observed)
            made = [named_results(call.run.op, result) for result in results]
        else:
            made = [kernel([value[position] for value in inputs]) for position, kernel in enumerate(call.kernels)]
        for place, name in enumerate(call.writes):
            values[name] = [results[place] for results in made]

    def _call_with_collectives(
        self, call: Call, bound: Sequence[tuple[list[Any], dict[str, Any]]], observed: list[Observed] | None
    ) -> list[Any]:  # fmt: skip
        """Runs the ranks' bodies side by side; each yields ``(kind, tensor, axes, reduction)`` and is sent the reduced tensor."""
        run, mesh = call.run, self.backend.mesh
        bodies = [body(run.op, run.strategy, mesh.sizes, args, kwargs) for args, kwargs in bound]
        answers: Sequence[torch.Tensor | None] = [None] * len(bodies)
        while True:
            requests, results = [], []
            for item, answer in zip(bodies, answers, strict=True):
                try:
                    requests.append(item.send(answer))
                except StopIteration as stop:
                    results.append(stop.value)
            if results:
                assert not requests, f"the ranks' bodies of {run.op.name} differ in their collectives"
                return results
            kind, _, axes, reduction = requests[0]
            parts = tuple(mesh.whole(axis) for axis in axes)
            exchange = Exchange(kind, parts, (), reduction)
            tensors = [request[1] for request in requests]
            if observed is not None:
                size = exchange.full_bytes(tensors[0])
                observed.append(Observed(kind, parts, run.phase, run.op.inputs[0], run.op.name, size))
            answers = self.backend.collective(exchange, tensors)


def _reads(step: Call | Move) -> tuple[str, ...]:
    return step.reads


def _writes(step: Call | Move) -> tuple[str, ...]:
    return step.writes


def groups_needed(program: Program) -> tuple[tuple[SubAxis, ...], ...]:
    """Every tuple of sub-axes that a collective of the program runs over, in order of first use."""
    return tuple(dict.fromkeys(item.axes for item in program.collectives()))


def bind(program: Program, backend: Backend, device: torch.device, *, dropout: bool = True, in_place: bool = True) -> Executable:
    """The program on the backend's ranks and ``device``.

    Args:
        dropout: False lets every dropout keep all elements (and still scale by ``1 / (1 - p)``, which the backward graph
            has baked in) and makes every other random number a constant, so that runs can be compared.
        in_place: whether operators may write over what they read last (see ``fusion``).
    """
    items = program.instructions
    backward = [index for index, item in enumerate(items) if item.phase == "backward"]
    forward_end = backward[0] if backward else len(items)
    assert len(backward) == len(items) - forward_end, "forward instructions after backward ones"
    fusion = find_fusion(
        [Instruction(_plain_op(item), item.reads, item.writes, item.phase) for item in items],
        program.storage, [value for _, value in program.outputs], lambda value: _local(program, value), in_place=in_place,
    )  # fmt: skip
    steps = [item if isinstance(item, Move) else _bind(item, program, backend, device, dropout, fusion.in_place.get(index))
             for index, item in enumerate(items)]  # fmt: skip
    drops = list(_drops(program))
    for pair in fusion.pairs.values():
        first, second = steps[pair.contraction], steps[pair.addition]
        assert isinstance(first, Call) and isinstance(second, Call)
        addend = second.reads[pair.addend]
        shapes = [_local(program, value).shape for value in first.reads]
        kernel = bind_pair(pair, first.run.op, shapes, _local(program, addend).shape)
        steps[pair.contraction] = Call(first.run, (*first.reads, addend), second.writes, (kernel,) * len(backend.ranks))
        steps[pair.addition] = Call(second.run, (), ())
        drops[pair.addition] = tuple(value for value in drops[pair.addition] if value not in first.writes)
    return Executable(program, backend, tuple(steps), tuple(drops), forward_end)


def _plain_op(item: Run | Move) -> Op | None:
    return item.op if isinstance(item, Run) and not item.strategy.inner else None


def _local(program: Program, value: str) -> Local:
    tensor = program.graph.tensors[program.tensor_of[value]]
    return Local(tuple(program.specs[value].local_shape(tensor.shape, program.machine.mesh.sizes)), tensor.dtype)


def _bind(run: Run, program: Program, backend: Backend, device: torch.device, dropout: bool, in_place: int | None) -> Call:
    mesh, arguments = backend.mesh, []
    for rank in backend.ranks:
        args, kwargs = localize(run.op, program.graph.tensors, run.strategy, mesh.sizes, mesh.coordinates(rank))
        keywords = with_torch_values(dict(kwargs))
        if takes_device(run.op):
            keywords["device"] = device
        arguments.append((with_torch_values(args), keywords))
    if run.strategy.inner:
        return Call(run, run.reads, run.writes, arguments=tuple(arguments))
    if in_place is not None:
        return Call(run, run.reads, run.writes, tuple(bind_in_place(run.op, in_place, args, kwargs) for args, kwargs in arguments))
    function = find_operator(run.op.target)
    if not dropout:
        function = STILL.get(run.op.target, function)
    shapes = [_local(program, value).shape for value in run.reads]
    return Call(run, run.reads, run.writes, tuple(bind_kernel(run.op, function, args, kwargs, shapes) for args, kwargs in arguments))


def keep_all(x: torch.Tensor, p: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``autopar.dropout`` with a mask that drops nothing."""
    return x * (0.0 if p >= 1 else 1 / (1 - p)), torch.ones_like(x, dtype=torch.bool)


STILL_UNIFORM, STILL_NORMAL = 0.25, 0.5
"""What every random number is while runs are compared."""

STILL: Mapping[str, Callable[..., Any]] = {
    "autopar.dropout.default": keep_all,
    "autopar.uniform.default": lambda like, seed: torch.full_like(like, STILL_UNIFORM),
    "autopar.normal.default": lambda like, seed: torch.full_like(like, STILL_NORMAL),
}
"""Operators that draw random numbers, without chance."""


def _drops(program: Program) -> Iterator[tuple[str, ...]]:
    last: dict[str, int] = {}
    for index, item in enumerate(program.instructions):
        for value in (*item.reads, *item.writes):
            last[value] = index
    for _, value in program.outputs:
        last.pop(value, None)
    at: dict[int, list[str]] = {}
    for value, index in last.items():
        at.setdefault(index, []).append(value)
    return (tuple(at.get(index, ())) for index in range(len(program.instructions)))


@dataclass(frozen=True)
class Simulation:
    """What a simulated run gave.

    Args:
        outputs: one global tensor for each entry of ``Program.outputs``.
        parts: the same, rank by rank.
        observed: the collectives executed.
    """

    outputs: tuple[torch.Tensor, ...]
    parts: tuple[Locals, ...]
    observed: tuple[Observed, ...]


def simulate(program: Program, values: dict[str, torch.Tensor], *, dropout: bool = True) -> Simulation:
    """Runs all ranks in this process, in lockstep.

    Args:
        values: a global tensor for each of the graph's inputs, by tensor name.
    """
    mesh = program.machine.mesh
    executable = bind(program, LockstepRanks(mesh), torch.device("cpu"), dropout=dropout)
    current = {item.tensor: scatter(values[item.tensor], program.specs[item.tensor], mesh) for item in program.graph.inputs}
    observed: list[Observed] = []
    executable.forward(current, observed)
    executable.backward(current, observed)
    parts = tuple(current[value] for _, value in program.outputs)
    outputs = tuple(gather(local, program.specs[value], mesh) for local, (_, value) in zip(parts, program.outputs, strict=True))
    return Simulation(outputs, parts, tuple(observed))
