"""A step in microbatches: the call of one, and what its losses add up to.

The model is captured with a part of the batch, and with the whole of it for comparison. Rows of the batch that the model keeps apart are a
split of every operator over an axis of so many parts: the same rules that split operators over ranks say whether that is so, operator by
operator, and where sums over the batch are left. What a mean divides by is then another number in the two captures: the ratio is the
weight of a microbatch's loss. Of a mean over the targets that count, each microbatch counts its own, and its share of them all is its
weight; where other terms join such a mean, it is one over microbatches in which equally many count. Where rows meet otherwise (statistics
of the batch, sorting), nothing is proved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar import torch_compat
from autopar.errors import CaptureError, NumberError, UsageError
from autopar.graph import CONVERSION, Accumulation, Graph, Op, Tensor
from autopar.importer.passes.dense_gradients import COPY
from autopar.rules import effect_of_number, family, find_rule, localize, strategies
from autopar.sharding import ShardingSpec, Strategy

COUNTED = "where every microbatch has as many targets that count"
"""The condition for a mean over targets that are not ignored, where another term is added."""
WITHOUT_MICROBATCHES = "plan without --microbatches"
"""What helps where no number of microbatches makes up the step, and one was asked for."""
WITHOUT_STAGES = "plan without a pipeline"
"""What helps there of a pipeline, which runs in microbatches anyway."""
_LOSS_ALONE = "let forward return the loss alone"
"""What helps where forward returns more, or no scalar."""
MIXED = "several"
"""Stands for a divisor's name where there are several, or another term is added."""


def divisors(batch: int) -> str:
    """The numbers of microbatches that a batch can be cut into, in words."""
    found = [number for number in range(1, batch + 1) if batch % number == 0]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")


def batch_of(call: Any, instead: str = WITHOUT_STAGES) -> int:
    """The size of dim 0 of the first tensor of a call. Raises UsageError: there is none; ``instead`` is what helps."""
    sizes: list[int] = []

    def note_size(tensor: Any) -> Any:
        sizes.extend(tensor.shape[:1])
        return tensor

    torch_compat.map_tensors(note_size, call)
    if not sizes:
        raise UsageError("no input has a dim that could be cut into microbatches", instead)
    return sizes[0]


def cut_call(call: Any, count: int, number: int = 0) -> Any:
    """Microbatch ``number`` of ``count`` of a call: of every tensor whose dim 0 is the batch, that part.

    Raises:
        UsageError: the batch cannot be cut into so many equal parts.
    """
    if count == 1:
        return call
    batch = batch_of(call)
    if batch % count:
        message = f"a batch of {batch} cannot be cut into {count} equal microbatches"
        raise UsageError(message, f"use a number that divides the batch: {divisors(batch)}")
    made: dict[int, torch.Tensor] = {}

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != batch:
            return tensor
        if id(tensor) not in made:
            size = batch // count
            made[id(tensor)] = tensor.detach().narrow(0, number * size, size).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    return torch_compat.map_tensors(part, call)


def _doubled(call: Any) -> Any:
    """A call with each row of the batch twice."""
    batch, made = batch_of(call), dict[int, torch.Tensor]()

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != batch:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = torch.cat([tensor.detach(), tensor.detach()])
        return made[id(tensor)]

    return torch_compat.map_tensors(twice, call)


def check_step(whole: Graph, instead: str) -> None:
    """Raises UsageError: a step that no number of microbatches makes up; ``instead`` is what helps beside other models."""
    buffers, inputs = _buffers(whole), _inputs_with_gradient(whole)
    others = [output.name for output in whole.outputs if output.kind == "output" and whole.tensors[output.tensor].shape]
    for wrong, what, hint in (
        (whole.mode != "train", "a plan for inference has no gradients to accumulate", ""),
        (any(whole.of_kind("tangent")), "without a scalar loss the step has no gradients of its own to accumulate", _LOSS_ALONE),
        (buffers, f"each microbatch would change {buffers}", ""),
        (inputs, f"the gradient of the input {inputs} is of the whole batch", "detach it"),
        (others, f"the output {', '.join(others[:1])} would be kept for the whole batch", _LOSS_ALONE),
    ):
        if wrong:
            raise UsageError(f"the model cannot be run in microbatches: {what}", f"{hint}, or {instead}" if hint else instead)


def accumulation(whole: Graph, part: Graph, count: int) -> Accumulation:
    """How ``count`` microbatches make up the step of the whole batch. ``part`` is the graph of one, ``whole`` that of the batch."""
    cut = tuple(
        mine.tensor for mine, other in zip(part.inputs, whole.inputs, strict=True)
        if part.tensors[mine.tensor].shape != whole.tensors[other.tensor].shape
    )  # fmt: skip
    try:
        pairing = _Pairing(whole, part, count)
        named = [output for output in pairing.whole.outputs if output.kind == "output"]
        states = [pairing.state(output.tensor) for output in named]
        if len({state.factor for state in states}) > 1:
            raise _Unproved(f"its outputs add up differently: {pairing.described({one.tensor: f'{one.name} is ' for one in named})}")
        pairing.check_gradients()
    except _Unproved as reason:
        return Accumulation(count, cut, 1 / count, False, str(reason))
    factor, divisors = states[0].factor, {state.over for state in states}
    if divisors == {""} or len(divisors) > 1 or MIXED in divisors or part.loss_gradient is None:
        return Accumulation(count, cut, factor, reason="" if divisors == {""} else COUNTED)
    return Accumulation(count, cut, factor, divisor=divisors.pop())


def _buffers(graph: Graph) -> str:
    names = [output.name for output in graph.outputs if output.kind == "buffer"]
    return f"the buffer {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def _inputs_with_gradient(graph: Graph) -> str:
    return next((item.name for item in graph.of_kind("input") if item.tensor in graph.gradients), "")


class Captures:
    """The graphs of one call in any number of microbatches, each captured once.

    Args:
        run: captures (args, kwargs, loss_args).
        call: with the whole batch.
        instead: what hints say where no number of microbatches makes up the step.
    """

    def __init__(self, run: Callable[..., Graph], call: tuple[Any, ...], instead: str = WITHOUT_STAGES) -> None:
        self.run, self.call, self.instead, self.made = run, call, instead, dict[int, Graph]()

    def of(self, count: int) -> Graph:
        """The graph of one of ``count`` microbatches.

        Raises:
            UsageError: the step cannot be made up of any number. NumberError: the model does not run with so few rows.
        """
        if count == 1:
            return self._captured(1)
        whole = self._captured(1)
        check_step(whole, self.instead)
        part = self._captured(count)
        made = accumulation(whole, part, count)
        if not made.whole and batch_of(self.call) == count:
            made = self._of_two_rows(made, part)
        return part.accumulated(made)

    def _of_two_rows(self, made: Accumulation, part: Graph) -> Accumulation:
        """How microbatches of one row add up that are captured as other operators: as those of two rows do.

        Torch captures one row with fewer operators. Where it has more that are no views, the model branches on it: nothing is proved.
        """
        count, even = made.microbatches, made.microbatches % 2 == 0 and made.microbatches > 2
        captures, number = (self, count // 2) if even else (Captures(self.run, _doubled(self.call)), count)
        try:
            whole, two = captures._captured(1), captures._captured(number)
        except (CaptureError, NumberError):
            return made
        other = accumulation(whole, two, number)
        graphs = part, two
        ones, twos = (Counter(op.target for op in graph.ops if family(op) != "view" and op.target != COPY) for graph in graphs)
        if ones - twos or not other.whole or other.weight not in (1.0, 1 / number):
            return made
        found = replace(other, microbatches=count, cut=made.cut, weight=1.0 if other.weight == 1.0 else 1 / count)
        return found if not other.divisor or _same_sum(other.divisor, part, two) else replace(found, divisor="", reason=COUNTED)

    def numbers(self) -> tuple[int, ...]:
        """Powers of two that divide the batch, from 1 on."""
        batch, found = batch_of(self.call, self.instead), [1]
        while batch % (2 * found[-1]) == 0:
            found.append(2 * found[-1])
        return tuple(found)

    def _captured(self, count: int) -> Graph:
        if count not in self.made:
            call = cut_call(self.call, count)
            try:
                self.made[count] = self.run(*call)
            except CaptureError as error:
                if count == 1:
                    raise
                message, batch = f"the model cannot be run in {count} microbatches: {error.message}", batch_of(self.call)
                cut = f"every input whose dim 0 is that of the first, {batch}, is cut: what is no batch can be given a dim of 1 before it"
                fewer = "take fewer microbatches, or " if any(batch % number == 0 for number in range(2, count)) else ""
                refusal = NumberError(message, f"{cut}; or {fewer}{self.instead}")
                refusal.rows = batch // count
                raise refusal from error
        return self.made[count]


def _same_sum(name: str, one: Graph, two: Graph) -> bool:
    """Whether a scalar is made alike in two captures of the same model, from the sum on."""
    while True:
        ops = [graph.producer[name] for graph in (one, two) if name in graph.producer]
        if len(ops) < 2 or ops[0].target != ops[1].target or not ops[0].inputs:
            return False
        if one.tensors[ops[0].inputs[0]].shape:
            return True
        name = ops[0].inputs[0]


def _without_copies(graph: Graph) -> Graph:
    """The graph whose readers of a copy read what is copied: a microbatch of one row is captured with fewer copies."""
    copied, ops = dict[str, str](), list[Op]()
    for op in graph.ops:
        inputs = tuple(copied.get(name, name) for name in op.inputs)
        if op.target == COPY:
            copied[op.outputs[0]] = inputs[0]
        else:
            ops.append(replace(op, inputs=inputs))
    outputs = tuple(replace(output, tensor=copied.get(output.tensor, output.tensor)) for output in graph.outputs)
    return replace(graph, ops=tuple(ops), outputs=outputs)


class _Unproved(Exception):
    """Why the microbatches' losses are not known to add up, in words."""


@dataclass(frozen=True)
class _State:
    """How a tensor of the whole batch is made of those of the microbatches: by its spec on an axis of microbatches, times ``factor``.

    ``over``: the sum (as a microbatch's tensor) that a mean divides by; the factor is of microbatches in which it is the same. ``MIXED``:
    of several such, or of one beside something else.
    """

    spec: ShardingSpec
    factor: float = 1.0
    over: str = ""


class _Pairing:
    """The two captures, operator by operator."""

    def __init__(self, whole: Graph, part: Graph, count: int) -> None:
        self.whole, self.part, self.count = _without_copies(whole), _without_copies(part), count
        self.states: dict[str, _State | str] = {}
        self.made: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.same: dict[str, str] = {}
        """The microbatch's tensor for each of the whole batch."""
        self.first: dict[str, str] = {}
        """Of a microbatch's tensors, which of them is the first that is made alike."""
        self.trained = {item.tensor for item in whole.inputs if item.kind in ("parameter", "input") and item.tensor in whole.gradients}
        """What has a gradient."""
        for item in whole.inputs:
            same = next(other for other in part.inputs if (other.kind, other.name) == (item.kind, item.name))
            self.states[item.tensor] = _State(self._split(whole.tensors[item.tensor], part.tensors[same.tensor]))
            self.same[item.tensor] = same.tensor
        self._walk("forward", self._after)

    def _walk(self, phase: str, after: Callable[[Op, Op], Iterator[_State]]) -> None:
        """The states of what the operators of a phase make, by what is said of each."""
        mine, others = ([op for op in graph.ops if op.phase == phase] for graph in (self.whole, self.part))
        for op, other in self._paired(mine, others):
            key = other.target, str(other.args), str(other.kwargs), *(self.first.get(name, name) for name in other.inputs)
            self.first.update(zip(other.outputs, self.made.setdefault(key, other.outputs), strict=True))
            try:
                self.states.update(zip(op.outputs, after(op, other), strict=True))
            except _Unproved as reason:
                self.states.update(dict.fromkeys(op.outputs, str(reason)))

    def _paired(self, mine: Sequence[Op], others: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
        """Each operator with the microbatch's that reads the same, in whatever order: of several alike, they come in order."""
        waiting: dict[tuple[str, tuple[str, ...]], list[Op]] = {}
        for other in reversed(others):
            waiting.setdefault((other.target, other.inputs), []).append(other)
        for op in mine:
            alike = waiting.get((op.target, tuple(self.same[name] for name in op.inputs)), [])
            if not alike or len(mine) != len(others):
                raise _Unproved("a microbatch is captured as other operators than the whole batch")
            other = alike.pop()
            self.same.update(zip(op.outputs, other.outputs, strict=True))
            yield op, other

    def check_gradients(self) -> None:
        """Raises _Unproved: a gradient that is no sum over rows. Of a derivative of forward it is one, and adds up as the loss does; what
        is none (a function's own backward, embeddings that scale it by how often a row is read) may look at rows together."""
        self._walk("backward", self._backward)
        for output in self.whole.outputs:
            state = self.states[output.tensor]
            if output.kind == "gradient" and isinstance(state, str):
                raise _Unproved(state)

    def _backward(self, op: Op, other: Op) -> Iterator[_State]:
        """Numbers and factors aside, which are forward's: rows stay apart, or are summed. What was summed in forward is the same for all,
        and what is the same for all may be added to a sum."""
        found = []
        for tensor in op.inputs:
            state = self.states[tensor]
            if isinstance(state, str):
                raise _Unproved(state)
            later = tensor in self.whole.producer and self.whole.producer[tensor].phase == "backward"
            found.append(state.spec if later else replace(state.spec, partial=()))
        pairs = zip(op.outputs, other.outputs, strict=True)
        wanted = [self._split(self.whole.tensors[one], self.part.tensors[two]).dims for one, two in pairs]
        if family(op) == "factory" or not any(spec.partial or any(spec.dims) for spec in found):
            return (_State(ShardingSpec(dims)) for dims in wanted)
        if op.target == CONVERSION and all(map(self._floating, (op.inputs[0], op.outputs[0]))):
            return iter((_State(found[0]),))
        for strategy in self._offered(op):
            fits = all(one == two or one == replace(two, partial=()) for one, two in zip(found, strategy.inputs, strict=True))
            if fits and not strategy.inner and _sums(strategy) and [spec.dims for spec in strategy.outputs] == wanted:
                return (_State(spec) for spec in strategy.outputs)
        raise self._meeting(op)

    def state(self, tensor: str) -> _State:
        """How a scalar of the whole batch is made of each microbatch's; its factor is their weight."""
        state = self.states[tensor]
        if isinstance(state, str):
            raise _Unproved(state)
        if not state.spec.partial:
            raise _Unproved("the loss does not depend on the batch")
        return state

    def _mean(self, state: _State) -> bool:
        """Whether the weights of the microbatches are 1 together."""
        return bool(state.spec.partial) and abs(state.factor * self.count - 1) < 1e-9

    def _counted(self, name: str) -> bool:
        """Whether a sum over rows is one number, in which nothing has a gradient."""
        return name not in self.trained and not self.whole.tensors[name].shape

    def _floating(self, name: str) -> bool:
        dtype: torch.dtype = getattr(torch, self.whole.tensors[name].dtype)
        return dtype.is_floating_point

    def _split(self, whole: Tensor, part: Tensor) -> ShardingSpec:
        if len(whole.shape) != len(part.shape):
            raise _Unproved(f"{whole.name} has other dims in a microbatch")
        ends = [(0,) if one != other else () for one, other in zip(whole.shape, part.shape, strict=True)]
        if sum(map(bool, ends)) > 1:
            raise _Unproved(f"{whole.name} has two dims of the batch's size")
        return ShardingSpec(tuple(ends))

    def _after(self, op: Op, other: Op) -> Iterator[_State]:
        found: list[_State] = []
        for tensor in op.inputs if family(op) != "factory" else ():  # which reads no values
            state = self.states[tensor]
            if isinstance(state, str):
                raise _Unproved(state)
            found.append(state)
        if found and not self.trained.isdisjoint(op.inputs):
            self.trained.update(name for name in op.outputs if self._floating(name))
        summed = len(found) == 2 and all(state.spec.partial and not state.over for state in found)
        if op.target == "aten.div.Tensor" and summed and self._counted(op.inputs[-1]):
            over = self.first.get(other.inputs[1], other.inputs[1])
            return iter((_State(found[0].spec, found[0].factor / found[1].factor / self.count, over),))
        if op.target == CONVERSION and found[0].spec.partial and self._floating(op.outputs[0]):
            return iter((found[0],))  # a loss in fewer digits is rounded for each microbatch, as every operator rounds
        same = (op.args, op.kwargs) == (other.args, other.kwargs)
        if effect_of_number(op) == "adds" and len(found) == 1 and self._mean(found[0]) and same:
            return iter((found[0],))  # a mean's weights are 1 together, so that the mean of sums with a number is the number more
        strategy, states = self._strategy(op, other, found)
        factor = self._factor(op, states) * self._ratio(op, other, strategy)
        divisors = {state.over for state in found if state.spec.partial} or {""}
        shared = MIXED if len(divisors) > 1 else divisors.pop()
        return (_State(spec, factor, shared) for spec in strategy.outputs)

    def _strategy(self, op: Op, other: Op, states: list[_State]) -> tuple[Strategy, list[_State]]:
        """The operator split as its inputs are. A value that is the same in every microbatch is also their weighted sum."""
        wanted = [self._split(self.whole.tensors[one], self.part.tensors[two]) for one, two in zip(op.outputs, other.outputs, strict=True)]
        offered = self._offered(op)
        mean = next(filter(self._mean, states), None)
        tries = [states]
        if mean is not None:
            tries.append([_State(mean.spec, mean.factor) if not state.spec.dims and not state.spec.partial else state for state in states])
        for inputs in tries:
            for strategy in offered:
                read = tuple(state.spec for state in inputs)
                fits = not strategy.inner and (strategy.inputs == read if read else not any(spec.partial for spec in strategy.outputs))
                if fits and _sums(strategy) and [spec.dims for spec in strategy.outputs] == [spec.dims for spec in wanted]:
                    return strategy, inputs
        raise self._unlike(op) or self._meeting(op)

    def _offered(self, op: Op) -> Sequence[Strategy]:
        """The ways to split an operator over the microbatches."""
        tensors = [self.whole.tensors[name] for name in (*op.inputs, *op.outputs)]
        return strategies(find_rule(op, self.whole.tensors), tensors, (self.count,), uneven=frozenset()) if self.count > 1 else ()

    def _meeting(self, op: Op) -> _Unproved:
        return _Unproved(f"rows of the batch meet in {op.target}{_at(op)}")

    def _unlike(self, op: Op) -> _Unproved | None:
        """Where numbers that are added to one do not add up alike over microbatches, which do how; None where it is another trouble."""
        added = frozenset(range(len(op.inputs))) in {frozenset(group) for group in find_rule(op, self.whole.tensors).flows}
        if not added or len(op.inputs) < 2 or any(self.whole.tensors[name].shape for name in op.inputs):
            return None
        if len({self._adds_up(name) for name in op.inputs}) == 1:
            return None
        return _Unproved(f"{op.target}{_at(op)} joins what adds up differently: {self.described(dict.fromkeys(op.inputs, ''))}")

    def described(self, scalars: Mapping[str, str]) -> str:
        """How each of some numbers is made of those of the microbatches, and where in the user's code, after its words."""
        return ", ".join(f"{words}{self._adds_up(name)}{_at(self._reduced(name))}" for name, words in scalars.items())

    def _adds_up(self, name: str) -> str:
        state = self.states[name]
        if isinstance(state, str):
            return "not known"
        if not state.spec.partial:
            return "the same in every microbatch"
        if self._mean(state):
            return "a mean over the batch"
        return "a sum over the batch" + ("" if state.factor == 1.0 else f" of which each microbatch's counts {state.factor:g}")

    def _reduced(self, name: str) -> Op | None:
        """The operator that makes a number of more than one, before it is scaled."""
        op = self.whole.producer.get(name)
        while op is not None and len(op.inputs) == 1 and not self.whole.tensors[op.inputs[0]].shape:
            op = self.whole.producer.get(op.inputs[0])
        return op

    def _factor(self, op: Op, states: list[_State]) -> float:
        """The factor of what is made of inputs with factors: it is linear in those that have one."""
        scaled = frozenset(index for index, state in enumerate(states) if state.factor != 1.0)
        if not scaled:
            return 1.0
        flows = {frozenset(group) for group in find_rule(op, self.whole.tensors).flows}
        factors = {states[index].factor for index in scaled}
        if len(factors) > 1 or scaled not in flows:
            raise self._unlike(op) or _Unproved(f"{op.target} is not linear in a mean over the batch{_at(op)}")
        return factors.pop()

    def _ratio(self, op: Op, other: Op, strategy: Strategy) -> float:
        """What the operator's own number adds to the factor: it has to be the same in both, or one that it multiplies or divides by."""
        args, kwargs = localize(op, self.whole.tensors, strategy, (self.count,), (0,))
        others, other_kwargs = localize(other, self.part.tensors, self._uncut(other), (1,), (0,))
        if (args, kwargs) == (others, other_kwargs) or family(op) == "random":
            return 1.0
        pairs = [(one, two) for one, two in zip(args, others, strict=True) if one != two]
        effect, scaled = effect_of_number(op), len(pairs) == 1 and all(isinstance(number, int | float) and number for number in pairs[0])
        if scaled and effect in ("multiplies", "divides"):
            ratio = pairs[0][0] / pairs[0][1]
            return 1 / ratio if effect == "divides" else ratio
        raise _Unproved(f"{op.target} is given other numbers in a microbatch{_at(op)}")

    def _uncut(self, op: Op) -> Strategy:
        """A microbatch's operator, whole."""
        specs = [ShardingSpec.replicated(len(self.part.tensors[name].shape)) for name in (*op.inputs, *op.outputs)]
        return Strategy(tuple(specs[: len(op.inputs)]), tuple(specs[len(op.inputs) :]))


def _at(op: Op | None) -> str:
    return f" (at {op.location})" if op is not None and op.location else ""


def _sums(strategy: Strategy) -> bool:
    """Whether no result is reduced otherwise than as a sum."""
    return all(reduction == "sum" for spec in strategy.outputs for _, reduction in spec.partial)
