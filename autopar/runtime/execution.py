"""The interpreter: a schedule's instructions in their order, on the local tensors of the ranks that a backend hosts.

Each instruction is bound once to an action, a closure with nothing left to look up. One interpreter serves the simulation of all ranks in
one process and the real ranks, so what is tested in lockstep is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.library import STILL
from autopar.rules import STORING, localize
from autopar.runtime.backends import Backend
from autopar.runtime.collectives import Call, Flights, Observed, Values, exchange_beside, exchange_inside, exchange_now
from autopar.runtime.filling import fitted, sliced
from autopar.runtime.fusion import bind_in_place, bind_pair, makes_memory, pairs_of
from autopar.runtime.index_check import check_indices
from autopar.runtime.inner import Answer, Request, body
from autopar.runtime.kernels import Kernel, bind_kernel
from autopar.runtime.loss_tail import Tail, loss_tail
from autopar.runtime.operators import find_function, find_operator, named_results, takes_device, with_tensors, with_torch_values
from autopar.schedule import Instruction, Schedule
from autopar.schedule.collectives import Part
from autopar.schedule.instructions import Operation
from cost_models import SubAxis

Action = Callable[[Sequence[Values], Flights, list[Observed] | None], None]
"""Runs an instruction on the values of each hosted rank and the calls in flight."""
AS_A_RESULT: Mapping[str, str] = {stored: made for made, stored in STORING.items()}
"""From an operator that changes its input to the one that gives the same in a new tensor."""
Land = Callable[[Sequence[Values]], None]
"""Waits for late calls and adds their results to the values of each hosted rank."""


@dataclass(frozen=True)
class Late:
    """What of forward may run when the loss is read.

    Args:
        actions: what its instructions do, in order.
        values: what these read and make.
        freed: those of them that forward frees.
    """

    actions: tuple[Action, ...] = ()
    values: frozenset[str] = frozenset()
    freed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Executable:
    """A schedule bound to a backend and a device.

    Args:
        forward_actions, backward_actions: what its instructions do, in order.
        repeated_actions: what they do in backward of microbatches before the last.
        late: of forward, what only the loss asks for.
    """

    schedule: Schedule
    backend: Backend
    forward_actions: tuple[Action, ...]
    backward_actions: tuple[Action, ...]
    repeated_actions: tuple[Action, ...] = ()
    late: Late = Late()

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """The values that the backward instructions or backward outputs need from before."""
        schedule = self.schedule
        made, needed = {item.tensor for item in schedule.graph.inputs if item.kind != "tangent"}, set[str]()
        for item in schedule.instructions:
            if item.half == "forward":
                made.update(item.writes)
            elif item.kind != "free":
                needed.update(item.reads)
        needed.update(value for output, value in schedule.outputs if output.kind == "gradient")
        return tuple(sorted(needed & made))

    def forward(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """Runs the forward instructions; ``ranks`` hold the inputs before, what is still needed after.

        Args:
            ranks: the values of each rank that the backend hosts.
            observed: the collectives that are executed are appended.
        """
        self.forward_but_late(ranks, observed)(ranks)

    def forward_but_late(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> Land:
        """The same but for the loss, if it is late: what is returned waits for it and puts it among the values it is given."""
        flights: Flights = {}
        _run(self.forward_actions, ranks, flights, observed)
        late = self.late
        needed = [{name: held[name] for name in late.values if name in held} for held in ranks]
        for held in ranks:
            for name in late.freed & held.keys():
                del held[name]

        def land(ranks: Sequence[Values]) -> None:
            _run(late.actions, needed, flights, None)
            for held, found in zip(ranks, needed, strict=True):
                held.update((name, value) for name, value in found.items() if name not in late.freed)

        return land

    def backward(self, ranks: Sequence[Values], observed: list[Observed] | None = None, *, last: bool = True) -> None:
        """Runs the backward instructions on what ``forward`` left, and on the sums over microbatches; of the ``last`` of these or not."""
        _run(self.backward_actions if last else self.repeated_actions, ranks, {}, observed)


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
@torch.autocast("cuda", enabled=False)
def _run(actions: Sequence[Action], ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
    for action in actions:
        action(ranks, flights, observed)


_LOSS_GRADIENT: ContextVar[Tensor | None] = ContextVar("autopar_loss_gradient", default=None)


@contextmanager
def loss_gradient(gradient: Tensor | None) -> Iterator[None]:
    """Within it, the backward begins with this gradient of the loss instead of one: scaled losses keep half-precision gradients from
    vanishing."""
    token = _LOSS_GRADIENT.set(gradient)
    try:
        yield
    finally:
        _LOSS_GRADIENT.reset(token)


def given_loss_gradient() -> Tensor:
    """The one that the backward begins with, one number on the CPU."""
    given = _LOSS_GRADIENT.get()
    return torch.ones((), dtype=torch.float64) if given is None else given.detach().to("cpu", torch.float64)


def _scaled(kernel: Kernel) -> Kernel:
    """The kernel that makes the loss's gradient, times the one that was given."""

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        scale, (one,) = _LOSS_GRADIENT.get(), kernel(tensors)
        return (one if scale is None else one * scale.to(one.device, one.dtype),)

    return run


# --- binding -----------------------------------------------------------------------------------------------------------


def bind(schedule: Schedule, backend: Backend, device: torch.device, *, dropout: bool = True, in_place: bool = True) -> Executable:
    """The schedule on the backend's ranks and ``device``.

    Args:
        dropout: False lets every dropout keep all elements (and still scale by ``1 / (1 - p)``, which the backward graph
            has baked in) and makes every other random number a constant, so that runs can be compared.
        in_place: whether operators may write over what they read last (see ``fusion``), and into buffers.
    """
    tail = Tail() if backend.traced else loss_tail(schedule)
    binding = _Binding(schedule, backend, device, dropout, in_place, tail)
    actions = [(index, item, BIND[item.kind](binding, index, item)) for index, item in enumerate(schedule.instructions)]
    bound = [(index, item, action) for index, item, action in actions if action is not None]
    freed = {name for item in schedule.instructions if item.kind == "free" and item.half == "forward" for name in item.reads}
    late = Late(tuple(action for index, _, action in bound if index in tail.places), tail.values, tail.values & freed)
    punctual = [(item, action) for index, item, action in bound if index not in tail.places]
    forward, backward = (tuple(action for item, action in punctual if item.half == phase) for phase in ("forward", "backward"))
    several = schedule.graph.microbatches > 1
    repeated = tuple(action for _, item, action in bound if several and item.half == "backward" and not item.microbatch)
    return Executable(schedule, backend, forward, backward, repeated, late)


class _Binding:
    """Instructions become actions, in order: a start must know which calls are under way."""

    def __init__(self, schedule: Schedule, backend: Backend, device: torch.device, dropout: bool, in_place: bool, tail: Tail) -> None:
        self.schedule, self.backend, self.device, self.dropout, self.in_place = schedule, backend, device, dropout, in_place
        self.pairs, self.tail = pairs_of(schedule, in_place), tail
        self.done = {pair.addition for pair in self.pairs.values()}
        self.unmade = {schedule.instructions[index].writes[0] for index in self.pairs}
        self.maker = {value: item.of for item in schedule.instructions if item.kind == "run" for value in item.writes}
        read = {value: index for index, item in enumerate(schedule.instructions) if item.kind != "free" for value in item.reads}
        freed = {value for item in schedule.instructions if item.kind == "free" for value in item.reads}
        self.ending = {value: index for value, index in read.items() if value in freed}
        self.calls: dict[str, Call] = {}
        self.bringing: dict[str, Call] = {}

    def run(self, index: int, item: Instruction) -> Action | None:
        if index in self.done:
            return None
        operation, reads, writes = self.schedule.operations[item.of], item.reads, item.writes
        if operation.strategy.inner:
            return _with_collectives(operation, item, self.arguments(operation), self.backend)
        pair = self.pairs.get(index)
        if pair is not None:
            other = self.schedule.instructions[pair.addition]
            addend = other.reads[pair.addend]
            shapes = [(self.shapes(reads, rank), self.shapes([addend], rank)[0]) for rank in self.backend.ranks]
            kernels = [bind_pair(pair, operation.op, *both) for both in shapes]
            reads, writes = (*reads, addend), other.writes
        else:
            given = zip(self.backend.ranks, self.arguments(operation), strict=True)
            kernels = [self.kernel(item, operation, args, kwargs, rank) for rank, (args, kwargs) in given]
            if item.of == self.schedule.graph.loss_gradient:
                kernels = list(map(_scaled, kernels))
        return _on_each(kernels, reads, writes)

    def kernel(self, item: Instruction, operation: Operation, args: list[Any], kwargs: dict[str, Any], rank: int) -> Kernel:
        target = operation.op.target if self.in_place else AS_A_RESULT.get(operation.op.target, operation.op.target)
        if item.over and self.may_write(item.over):
            return bind_in_place(operation.op, item.reads.index(item.over), args, kwargs)
        find = find_function if self.dropout and not self.backend.traced else find_operator  # who counts memory counts by operators
        function = find(target) if self.dropout else STILL.get(target) or find(target)
        kernel = bind_kernel(operation.op, function, args, kwargs, self.shapes(item.reads, rank))
        return check_indices(kernel, operation.op, self.schedule.graph, self.backend.traced)

    def may_write(self, value: str) -> bool:
        """Whether a value that nobody needs any more is written over, as planned: not in a trace, nor if torch may have made a view."""
        maker = self.maker.get(value)
        return self.in_place and (maker is None or makes_memory(self.schedule.operations[maker].op))

    def arguments(self, operation: Operation) -> list[tuple[list[Any], dict[str, Any]]]:
        """For each hosted rank, with references in place of tensors."""
        mesh, found = self.backend.mesh, []
        for rank in self.backend.ranks:
            args, kwargs = localize(operation.op, self.schedule.graph.tensors, operation.strategy, mesh.sizes, mesh.coordinates(rank))
            keywords = with_torch_values(dict(kwargs))
            if takes_device(operation.op):
                keywords["device"] = self.device
            found.append((with_torch_values(args), keywords))
        return found

    def shapes(self, values: Sequence[str], rank: int) -> list[tuple[int, ...]]:
        return [own_shape(self.schedule, value, rank) for value in values]

    def start(self, index: int, item: Instruction) -> Action:
        earlier = dict.fromkeys(self.bringing[value] for value in item.reads if value in self.bringing)
        last = frozenset(value for value in item.reads if self.ending.get(value) == index)
        planned = self.schedule.collectives[item.of]
        if item.over is not None and not self.may_write(item.over):
            planned = replace(planned, in_place=False)
        call = self.calls[item.of] = Call(planned, self.backend, tuple(earlier), last)
        self.bringing.update(dict.fromkeys(item.writes, call))
        return call.start

    def wait(self, index: int, item: Instruction) -> Action:
        for value in item.writes:
            del self.bringing[value]
        return self.calls[item.of].finish

    def slice(self, index: int, item: Instruction) -> Action:
        (source,), (target,), part, mesh = item.reads, item.writes, self.schedule.cuts[item.writes[0]].part, self.backend.mesh
        if part is None:
            return _on_each([lambda tensors: tensors] * len(self.backend.ranks), (source,), (target,))
        own = [(part.on(mesh.sizes, mesh.coordinates(rank)), mesh.index(rank, part.step.axes)) for rank in self.backend.ranks]
        return _on_each([CUT[part.step.kind](*both) for both in own], (source,), (target,))

    def add(self, index: int, item: Instruction) -> Action:
        """In place, but for a trace: a graph writes over nothing that it was given."""
        (value,), (total,), in_place = item.reads, item.writes, self.in_place

        def add(ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
            for held in ranks:
                held[total] = held[total].add_(held[value]) if in_place else held[total] + held[value]

        return add

    def free(self, index: int, item: Instruction) -> Action | None:
        late = self.tail.values if item.half == "forward" else frozenset()
        names = tuple(name for name in item.reads if name not in self.unmade and name not in late)

        def free(ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
            for held in ranks:
                for name in names:
                    del held[name]

        return free if names else None


BIND: Mapping[str, Callable[[_Binding, int, Instruction], Action | None]] = {
    "run": _Binding.run, "start": _Binding.start, "wait": _Binding.wait, "slice": _Binding.slice, "add": _Binding.add,
    "free": _Binding.free,
}  # fmt: skip
"""By kind of instruction: its action, none where there is nothing left to do."""


def _on_each(kernels: Sequence[Kernel], reads: Sequence[str], writes: Sequence[str]) -> Action:
    """A kernel for each hosted rank."""
    if len(kernels) == 1:
        return _on_one(kernels[0], reads, writes)

    def run(ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        for kernel, held in zip(kernels, ranks, strict=True):
            held.update(zip(writes, kernel([held[name] for name in reads]), strict=True))

    return run


def _on_one(kernel: Kernel, reads: Sequence[str], writes: Sequence[str]) -> Action:
    if len(writes) == 1:
        (write,) = writes

        def run_one(ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
            held = ranks[0]
            held[write] = kernel([held[name] for name in reads])[0]

        return run_one

    def run(ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        held = ranks[0]
        held.update(zip(writes, kernel([held[name] for name in reads]), strict=True))

    return run


# --- local steps -------------------------------------------------------------------------------------------------------


def _slicing(part: Part, index: int) -> Kernel:
    (dim,), shapes = part.step.dims, part.shapes
    return lambda tensors: (sliced(tensors[0], shapes, dim, index).clone(memory_format=torch.contiguous_format),)


def _masking(part: Part, index: int) -> Kernel:
    shapes = part.shapes

    def run(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        kept = fitted(tensors[0], shapes.target, shapes)
        return (torch.zeros_like(kept) if index else kept.clone(memory_format=torch.contiguous_format),)

    return run


CUT: Mapping[str, Callable[[Part, int], Kernel]] = {"slice": _slicing, "mask": _masking}
"""The local steps of reshards: (the step on this rank, the rank's index in the group) -> what it does."""


# --- operators with collectives inside ---------------------------------------------------------------------------------


def _with_collectives(
    operation: Operation, item: Instruction, arguments: Sequence[tuple[list[Any], dict[str, Any]]], backend: Backend
) -> Action:  # fmt: skip
    """Runs the ranks' bodies side by side; each yields a collective and its tensor, and is sent what the collective gives it."""
    op, strategy, mesh = operation.op, operation.strategy, backend.mesh
    asked = dict.fromkeys((item.kind, item.axes, item.reduction) for item in strategy.inner)
    exchanges = {what: exchange_inside(mesh, *what) for what in asked}

    def answer(requests: Sequence[Request], observed: list[Observed] | None) -> Sequence[Answer]:
        inner, tensors = requests[0][0], [tensor for _, tensor in requests]
        exchange = exchanges[inner.kind, inner.axes, inner.reduction]
        if observed is not None:
            bytes_sent = exchange.full_bytes(tensors[0].nbytes)
            observed.append(Observed(inner.kind, exchange.axes, item.phase, bytes_sent, op.inputs[0], item.of))
        return exchange_now(backend, exchange, tensors) if inner.beside is None else exchange_beside(backend, exchange, tensors)

    def run(ranks: Sequence[Values], flights: Flights, observed: list[Observed] | None) -> None:
        bodies = []
        for (args, kwargs), held in zip(arguments, ranks, strict=True):
            tensors = [held[name] for name in item.reads]
            bodies.append(body(op, strategy, mesh.sizes, with_tensors(args, tensors), with_tensors(kwargs, tensors)))
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
                break
            answers = list(answer(requests, observed))
        for held, result in zip(ranks, results, strict=True):
            held.update(zip(item.writes, named_results(op, result), strict=True))

    return run


def groups_needed(schedule: Schedule) -> tuple[tuple[SubAxis, ...], ...]:
    """Every tuple of sub-axes that a collective of the schedule runs over, in order of first use."""
    found: dict[tuple[SubAxis, ...], None] = {}
    for item in schedule.instructions:
        if item.kind == "start":
            found[schedule.collectives[item.of].axes] = None
        elif item.kind == "run":
            inside = schedule.operations[item.of].strategy.inner
            found.update(dict.fromkeys(tuple(map(schedule.machine.mesh.whole, inner.axes)) for inner in inside))
    return tuple(found)


def own_shape(schedule: Schedule, value: str, rank: int) -> tuple[int, ...]:
    """The shape that a rank holds of a value with a spec."""
    mesh = schedule.machine.mesh
    return schedule.specs[value].own_shape(schedule.graph.tensors[schedule.values[value].tensor].shape, mesh.sizes, mesh.coordinates(rank))
