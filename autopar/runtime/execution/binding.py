"""A schedule's instructions as straight-line code, on the local tensors of the ranks that a backend hosts.

Each instruction is written once as a statement (see ``code``). One writer serves the simulation of all ranks in one process and the real
ranks, so what is tested in lockstep is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from autopar.dialect.batch_norm import batch_norm_in_place
from autopar.dialect.experts import KeptPlaces
from autopar.dialect.library import STILL, WHOLE
from autopar.errors import UsageError
from autopar.graph import EXPERT_CONTRACT, Op
from autopar.rules import STORING, find_dispatched, localize
from autopar.runtime.execution.executable import Executable, Late
from autopar.runtime.execution.loss_gradient import begin_gradient
from autopar.runtime.execution.loss_tail import Tail, loss_tail
from autopar.runtime.instructions.buffer_writes import BATCH_NORM, find_buffer_writes, find_counters
from autopar.runtime.instructions.code import Code, Segment
from autopar.runtime.instructions.expert_exchange import KeptWays
from autopar.runtime.instructions.fusion import makes_memory, pairs_of, write_in_place, write_pair
from autopar.runtime.instructions.gradient_pairs import find_gradient_pairs, write_gradient_pair
from autopar.runtime.instructions.index_check import write_check
from autopar.runtime.instructions.inner_calls import write_with_collectives
from autopar.runtime.instructions.kernels import assign, write_call, write_expert_product, write_operator
from autopar.runtime.instructions.local_steps import CUT
from autopar.runtime.instructions.means import Mean, find_means
from autopar.runtime.instructions.mixed_norms import check_norms
from autopar.runtime.instructions.operators import (
    find_function,
    find_operator,
    takes_device,
    with_torch_values,
)
from autopar.runtime.instructions.ranges import call_of, layer_of
from autopar.runtime.instructions.whole_operands import FIRST_EXPERT, mark_whole
from autopar.runtime.ranks.backends import Backend
from autopar.runtime.ranks.collectives import GONE, Call
from autopar.runtime.ranks.offloading import Transfer
from autopar.runtime.ranks.placement import own_shape
from autopar.schedule import Instruction, Schedule
from autopar.schedule.instructions import BEFORE_ALL, Operation
from autopar.schedule.splitting import find_once_part, find_weight_part
from autopar.torch_compat import add_to_each, sums_with

AS_A_RESULT: Mapping[str, str] = {stored: made for made, stored in STORING.items()}
"""From an operator that changes its input to the one that gives the same in a new tensor."""
def bind(
    schedule: Schedule, backend: Backend, device: torch.device, *, dropout: bool = True, in_place: bool = True, split: bool = False
) -> Executable:  # fmt: skip
    """The schedule on the backend's ranks and ``device``.

    Args:
        split: whether backward runs in two parts.
        dropout: False lets every dropout keep all elements (and still scale by ``1 / (1 - p)``, which the backward graph
            has baked in) and makes every other random number a constant, so that runs can be compared.
        in_place: whether operators may write over what they read last (see ``fusion``), and into buffers.

    Raises:
        UsageError: the device has no kernel for one of the operators, or a trace is asked for of a plan with values on the host.
    """
    check_norms(schedule.graph, device)
    if backend.traced and any(call.is_transfer for call in schedule.calls):
        message = "the plan keeps values on the host, and a traced program makes no copies there"
        raise UsageError(message, "compile it for eager execution, or plan without offload")
    tail = Tail() if backend.traced else loss_tail(schedule)
    places = range(len(schedule.instructions))
    half = [item.half for item in schedule.instructions]
    first = [index for index in places if schedule.instructions[index].microbatch == BEFORE_ALL]
    punctual = [index for index in places if index not in tail.places]
    freed = {name for item in schedule.instructions if item.kind == "free" and item.half == "forward" for name in item.reads}
    early = [index for index in punctual if half[index] == "backward" and index < find_weight_part(schedule)] if split else []
    rest = [index for index in punctual if half[index] == "backward" and index not in set(early)]
    repeated = [index for index in rest if not schedule.instructions[index].microbatch]
    once = [index for index in rest if index >= find_once_part(schedule)] if any(output.is_sent for output, _ in schedule.outputs) else []

    parts = {*([find_weight_part(schedule)] if split else ()), *once[:1]}
    binding = Binding(schedule, backend, device, dropout, in_place, tail, parts)
    before = binding.segment("first", first) if first else None
    forward = binding.segment("forward", [index for index in punctual if half[index] == "forward" and index >= len(first)])
    late = Late(binding.segment("late", tail.places), tail.values, tail.values & freed) if tail.places else Late()
    inputs = binding.segment("inputs", early) if split else None
    backward = binding.segment("backward", rest)
    again = binding.segment("repeated", repeated if schedule.graph.microbatches > 1 else [])
    ending = binding.segment("once", once) if once else None
    return Executable(schedule, backend, forward, backward, again, late, inputs, ending, before)


class Binding:
    """Instructions become statements, in order: a start must know which calls are under way."""

    def __init__(
        self, schedule: Schedule, backend: Backend, device: torch.device, dropout: bool, in_place: bool, tail: Tail,
        parts: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.schedule, self.backend, self.device, self.dropout, self.in_place = schedule, backend, device, dropout, in_place
        self.pairs, self.tail, self.places = pairs_of(schedule, in_place), tail, KeptPlaces()
        self.ways = [KeptWays() for _ in backend.ranks]
        self.dispatched = find_dispatched(schedule.graph)
        self.buffer_writes = find_buffer_writes(schedule) if in_place else {}
        self.counters = find_counters(schedule, find_buffer_writes(schedule))
        self.gradient_pairs, self.means = find_gradient_pairs(schedule, parts), find_means(schedule, parts)
        self.done = {*self.gradient_pairs.values(), *(pair.addition for pair in self.pairs.values())}
        self.done.update(index for group in self.counters.values() for index in group[:-1])
        self.done.update(index for mean in self.means.values() for index in mean.places[1:])
        self.unmade = {schedule.instructions[index].writes[0] for index in self.pairs}
        self.unmade.update(schedule.instructions[index].writes[0] for mean in self.means.values() for index in mean.places[:-1])
        self.maker = {value: item.of for item in schedule.instructions if item.kind == "run" for value in item.writes}
        read = {value: index for index, item in enumerate(schedule.instructions) if item.kind != "free" for value in item.reads}
        freed = {value for item in schedule.instructions if item.kind == "free" for value in item.reads}
        self.ending = {value: index for value, index in read.items() if value in freed}
        self.calls, self.in_flight = self.bind_calls()

    def bind_calls(self) -> tuple[Mapping[str, Call | Transfer], Mapping[str, frozenset[str]]]:
        """The collectives by id, and what each reads that is in flight when it starts."""
        calls, bringing, in_flight = dict[str, Call | Transfer](), dict[str, Call | Transfer](), dict[str, frozenset[str]]()
        for index, item in enumerate(self.schedule.instructions):
            if item.kind == "start":
                in_flight[item.of] = frozenset(value for value in item.reads if value in bringing)
                earlier = dict.fromkeys(bringing[value] for value in item.reads if value in bringing)
                last = frozenset(value for value in item.reads if self.ending.get(value) == index)
                planned = self.schedule.collectives[item.of]
                if planned.is_transfer:
                    calls[item.of] = bringing[item.writes[0]] = Transfer(planned, self.device, tuple(earlier))
                    continue
                if item.over is not None and not self.may_write(item.over):
                    planned = replace(planned, in_place=False)
                call = calls[item.of] = Call(planned, self.backend, tuple(earlier), last)
                bringing.update(dict.fromkeys(item.writes, call))
            elif item.kind == "wait":
                for value in item.writes:
                    del bringing[value]
        return calls, in_flight

    def segment(self, name: str, places: Sequence[int]) -> Segment:
        """The instructions at these places as one function."""
        code, run = Code(len(self.backend.ranks)), [self.schedule.instructions[index] for index in places]
        for index, item in zip(places, run, strict=True):
            code.begin(self.schedule.operations[item.of].op if item.kind == "run" else None)
            if item.kind == "run":
                code.mark(f"ranges.layer({layer_of(self.schedule, item)!r})")
            if item.kind in ("start", "wait"):
                code.mark(f"ranges.begin_call({call_of(self.schedule, item)!r})")
            WRITE[item.kind](self, code, index, item)
            if item.kind in ("start", "wait"):
                code.mark("ranges.end_call()")
        code.begin(None)
        of_experts = [self.schedule.operations[item.of] for item in run if item.kind == "run"]
        of_experts = [operation for operation in of_experts if operation.op.target in FIRST_EXPERT]
        if of_experts:
            code.add(f"{code.object(self.places.let_go)}()")
        for kept in self.ways if any(operation.strategy.inner for operation in of_experts) else ():
            code.add(f"{code.object(kept.let_go)}()")
        return code.segment(name)

    def run(self, code: Code, index: int, item: Instruction) -> None:
        if index in self.done:
            return
        if index in self.counters:
            self.count(code, self.counters[index])
            return
        if index in self.means:
            self.average(code, self.means[index])
            return
        operation, reads, writes = self.schedule.operations[item.of], item.reads, item.writes
        if operation.strategy.inner:
            write_with_collectives(code, operation, item, self.arguments(operation), self.backend, self.ways)
            return
        pair, beside = self.pairs.get(index), None
        if index in self.gradient_pairs:
            beside = self.schedule.instructions[self.gradient_pairs[index]]
            writes = (*writes, *beside.writes)
        if pair is not None:
            other = self.schedule.instructions[pair.addition]
            addend = other.reads[pair.addend]
            reads, writes = (*reads, addend), other.writes
        arguments, dense = self.arguments(operation), dict[tuple[int, int], str]()
        for number, place in product(operation.copied, range(code.hosted)):
            dense[number, place] = f"dense_{number}_{place}"
            code.add(f"{dense[number, place]} = {code.read(reads[number], place)}.contiguous()")
        for place, rank in enumerate(self.backend.ranks):
            given, handler = [dense.get((number, place)) or code.read(value, place) for number, value in enumerate(reads)], None
            if pair is not None:
                expression = write_pair(code, pair, operation.op, self.shapes(item.reads, rank), self.shapes([addend], rank)[0], given)
            elif beside is not None:
                others = [code.read(value, place) for value in beside.reads]
                expression = write_gradient_pair(code, arguments[place][0], given, others)
            elif index in self.buffer_writes and operation.op.target == BATCH_NORM:
                expression = write_call(code, batch_norm_in_place, *arguments[place], given)
            elif index in self.buffer_writes:
                (buffer,) = self.buffer_writes[index].values()
                expression = write_in_place(code, operation.op, item.reads.index(buffer), *arguments[place], given)
            elif item.over and self.may_write(item.over):
                expression = write_in_place(code, operation.op, item.reads.index(item.over), *arguments[place], given)
            else:
                shapes = self.shapes(reads, rank)
                function, (args, kwargs) = _view_apart if operation.apart else self.function(operation.op.target), arguments[place]
                if self.varies(operation):
                    function = partial(_with_own_columns, function)
                marked = mark_whole(operation.op, self.schedule.graph, args, shapes)
                handler = write_check(code, operation.op, self.schedule.graph, marked, given, self.backend.traced)
                expression = self.write_product(code, operation.op, marked, shapes, given) or write_operator(
                    code, operation.op, function, marked, kwargs, shapes, given
                )
            if item.of == self.schedule.graph.loss_gradient:
                dtype = getattr(torch, self.schedule.graph.tensors[operation.op.outputs[0]].dtype)
                expression = f"{code.object(partial(begin_gradient, dtype, self.device))}(lambda: {expression})"
            op = operation.op if pair is None else self.schedule.operations[other.of].op
            assign(code, op, [code.write(value, place) for value in writes], expression, handler)
        if dense:
            code.add(f"del {', '.join(dense.values())}")

    def count(self, code: Code, group: Sequence[int]) -> None:
        """Adds a number to buffers in one call, where they lie, but for a trace."""
        items = [self.schedule.instructions[index] for index in group]
        number = self.schedule.operations[items[0].of].op.args[1]
        for place in range(code.hosted):
            buffers = [code.read(item.reads[0], place) for item in items]
            call = f"{code.object(add_to_each if self.in_place else sums_with)}([{', '.join(buffers)}], {code.object(number)})"
            made = [code.write(item.writes[0], place) for item in items]
            if self.in_place:
                code.add(call)
                code.add(f"{', '.join(made)} = {', '.join(buffers)}")
            else:
                code.add(f"{', '.join(made)} = {call}")

    def average(self, code: Code, mean: Mean) -> None:
        """Runs the operators of a mean as one."""
        op = self.schedule.operations[self.schedule.instructions[mean.places[-1]].of].op
        args, kwargs = with_torch_values(mean.args), with_torch_values(dict(mean.kwargs))
        for place in range(code.hosted):
            given = [code.read(value, place) for value in mean.reads]
            expression = write_call(code, self.function(mean.target), args, kwargs, given)
            assign(code, op, [code.write(value, place) for value in mean.writes], expression)

    def function(self, target: str) -> Callable[..., Any]:
        """What runs for an operator."""
        target = target if self.in_place else AS_A_RESULT.get(target, target)
        if not self.dropout or self.backend.traced:  # who counts memory counts by operators
            return (None if self.dropout else STILL.get(target)) or find_operator(target)
        found = find_function(target)
        return partial(found, places=self.places) if target in FIRST_EXPERT else found

    def write_product(
        self, code: Code, op: Op, marked: Sequence[Any], shapes: Sequence[Sequence[int]], reads: Sequence[str]
    ) -> str | None:  # fmt: skip
        """The expression of a product by expert on a rank with all experts, whose rows have the planned sizes; else None."""
        if op.target != EXPERT_CONTRACT or marked[FIRST_EXPERT[op.target]] != WHOLE or not self.dropout or self.backend.traced:
            return None
        dtype = getattr(torch, self.schedule.graph.tensors[op.inputs[0]].dtype)
        return write_expert_product(code, marked[3], marked[4], dtype, shapes, self.places, reads)

    def varies(self, operation: Operation) -> bool:
        """Whether its argument says the size of rows of experts that are split among ranks, which values decide."""
        op, made = operation.op, operation.op.outputs[0]
        sizes = op.args[1] if len(op.args) > 1 and isinstance(op.args[1], tuple) else ()
        rows = made in self.dispatched and op.inputs[0] in self.dispatched and bool(operation.strategy.outputs[0].dims[0])
        return rows and sizes[:2] == self.schedule.graph.tensors[made].shape[:2]

    def may_write(self, value: str) -> bool:
        """Whether a value that nobody needs any more is written over, as planned: not in a trace, nor if torch may have made a view.

        Nor is the gradient of the loss: a caller may have given it."""
        maker = self.maker.get(value)
        if not self.in_place or (maker is not None and maker == self.schedule.graph.loss_gradient):
            return False
        return maker is None or makes_memory(self.schedule.operations[maker].op)

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

    def start(self, code: Code, index: int, item: Instruction) -> None:
        """The call holds what it reads alone, where nobody reads that after it."""
        call, there = self.calls[item.of], [value for value in item.reads if value not in self.in_flight[item.of]]
        code.add(f"given = {_write_values(code, there)}")
        if not call.earlier:
            for value in call.last:
                code.add(" = ".join([*(code.write(value, place) for place in range(code.hosted)), code.object(GONE)]))
        code.add(f"{code.object(call.start)}(given, flights, observed)")
        code.add("del given")

    def wait(self, code: Code, index: int, item: Instruction) -> None:
        code.add(f"came = [{', '.join(['{}'] * code.hosted)}]")
        code.add(f"{code.object(self.calls[item.of].finish)}(came, flights, observed)")
        for place in range(code.hosted):
            for value in item.writes:
                code.add(f"{code.write(value, place)} = came[{place}][{value!r}]")
        code.add("del came")

    def slice(self, code: Code, index: int, item: Instruction) -> None:
        (source,), (target,), part, mesh = item.reads, item.writes, self.schedule.cuts[item.writes[0]].part, self.backend.mesh
        for place, rank in enumerate(self.backend.ranks):
            expression = code.read(source, place)
            if part is not None:
                cut = CUT[part.step.kind](part.on(mesh.sizes, mesh.coordinates(rank)), mesh.index(rank, part.step.axes))
                expression = f"{code.object(cut)}({expression})"
            code.add(f"{code.write(target, place)} = {expression}")

    def add(self, code: Code, index: int, item: Instruction) -> None:
        """In place, but for a trace: a graph writes over nothing that it was given."""
        (value,), (total,) = item.reads, item.writes
        for place in range(code.hosted):
            old, more = code.read(total, place), code.read(value, place)
            code.add(f"{code.write(total, place)} = {f'{old}.add_({more})' if self.in_place else f'{old} + {more}'}")

    def free(self, code: Code, index: int, item: Instruction) -> None:
        late = self.tail.values if item.half == "forward" else frozenset()
        code.free([name for name in item.reads if name not in self.unmade and name not in late])


WRITE: Mapping[str, Callable[[Binding, Code, int, Instruction], None]] = {
    "run": Binding.run, "start": Binding.start, "wait": Binding.wait, "slice": Binding.slice, "add": Binding.add,
    "free": Binding.free,
}  # fmt: skip
"""By kind of instruction: writes its statements."""


def _write_values(code: Code, values: Sequence[str]) -> str:
    """Values of each hosted rank by name."""
    ranks = (", ".join(f"{value!r}: {code.read(value, place)}" for value in values) for place in range(code.hosted))
    return "[" + ", ".join(f"{{{items}}}" for items in ranks) + "]"


def _with_own_columns(function: Callable[..., Any], rows: Tensor, sizes: Sequence[int], *others: Any, **named: Any) -> Any:
    """An operator that is told the size of dispatched rows ``[experts, columns, ...]``: columns are those that there are."""
    return function(rows, [sizes[0], rows.shape[1], *sizes[2:]], *others, **named)


def _view_apart(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A view in memory of its own, as the plan counts it."""
    return tensor.clone(memory_format=torch.contiguous_format).view(shape)
