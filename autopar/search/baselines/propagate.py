"""Spec propagation: one pass over the graph turns a ``Recipe`` into an assignment.

The batch (first dim of the inputs) is split over as many axes as divide it, the sequence (second dim) over the rest. Each operator takes
its cheapest strategy that reads the inputs as they lie. Only reductions of partial sums may communicate.

A parameter that is stored split is gathered before use. If it is stored in another dtype than it computes in, it is converted first, so
that the smaller dtype travels. Gradients are converted after their reduction likewise (``MixedPrecisionPolicy`` of fully_shard).

Where a pin lays a tensor otherwise than the recipe, it lies as pinned and is resharded for its readers. Everything else stays as it is
without the pin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.graph import COMBINE, CONVERSION, DISPATCHES, DTYPE_BYTES, Op, Phase
from autopar.rules import plain_factors
from autopar.schedule import OUTPUT, Assignment, Layout
from autopar.search.baselines.experts import ExpertFactors, expert_factors, is_expert_operand, is_expert_weight
from autopar.search.choices.reshard_tables import UNUSED, axis_codes, split_codes
from autopar.search.choices.space import CONTRACTION, OpChoices, Space
from autopar.search.settings import FORCED_RESHARD_WEIGHT, SLICE_WEIGHT
from autopar.sharding import ALL_ORDERS, ShardingSpec, Strategy

Specs = tuple[ShardingSpec, ...]
EMBEDDING = "autopar.embedding.default"


@dataclass(frozen=True)
class Recipe:
    """How a baseline lays out tensors.

    Args:
        token_axes: axes that split batch and sequence of the inputs.
        stored_axes: axes that split each trained parameter in memory.
        tensor_axis: axis that splits the weights of contractions, if any.
        keeps_gathered: gathered parameters stay in memory until backward, of several microbatches until the last has ended.
        reduces_whole: gradients are all-reduced, and each rank cuts out its part.
        splits_sequence: partial sums over ``tensor_axis`` are scattered along the second dim, which contractions gather again.
        expert_axis: axis that splits the weights of experts, if any.
    """

    token_axes: tuple[int, ...]
    stored_axes: tuple[int, ...] = ()
    tensor_axis: int | None = None
    keeps_gathered: bool = False
    reduces_whole: bool = False
    splits_sequence: bool = False
    expert_axis: int | None = None


class SpecPropagation:
    """One pass over the graph, which tracks the spec of every value.

    Args:
        splits_masks: each rank makes the rows of its own batch part of tensors that do not depend on the inputs.
    """

    def __init__(self, space: Space, recipe: Recipe, splits_masks: bool = True) -> None:
        self.space, self.recipe, self.graph, self.splits_masks = space, recipe, space.graph, splits_masks
        self.gathers_masks = False
        self.input_independent = {item.tensor for item in self.graph.inputs if item.kind in ("buffer", "constant")}
        """Tensors that are equal for all inputs."""
        self.stored = {item.tensor: item for item in self.graph.inputs}
        self.parameters = {item.tensor for item in self.graph.of_kind("parameter")}
        """Tensors that are gathered before use where they are stored split: parameters and their conversions."""
        self.gradients = {output.tensor: owner for output, owner in self.graph.owners.items() if output.kind == "gradient"}
        self.inputs: dict[str, ShardingSpec] = {}
        self.current: dict[str, tuple[str, ShardingSpec]] = {}
        self.undecided_parameters: set[str] = set()
        self.undecided_results: dict[str, Op] = {}
        """Results of operators without inputs, such as zeros, until their first reader decides their spec."""
        self.layouts: list[Layout] = []
        self.made_layouts: dict[tuple[str, ShardingSpec, Phase], str] = {}
        self.reads: dict[tuple[str, int], str] = {}
        self.strategies: dict[str, Strategy] = {}
        self.once: set[str] = set()
        """Operators that run once a step: what they make is gathered once."""
        self.resharded: set[str] = set()
        """Tensors that a pin lays otherwise than the recipe. They are resharded once, and kept so."""
        self.expert_tensors: set[str] = set()
        self.chosen_by_key: dict[object, int] = {}
        self.is_applicable = self._place_inputs()

    def _place_inputs(self) -> bool:
        shapes = [self.graph.tensors[item.tensor].shape for item in self.graph.of_kind("input")]
        lead = next((shape for shape in shapes if shape), ())
        place = self._find_token_axes(lead)
        if place is None:
            return False
        self.rows, self.split_rows = lead[:1], place[0]
        for item in self.graph.inputs:
            shape = self.graph.tensors[item.tensor].shape
            spec = ShardingSpec.replicated(len(shape))
            if item.kind == "input" and shape and shape[0] == lead[0] and (not place[1] or shape[1:2] == lead[1:2]):
                spec = ShardingSpec((*place, *((),) * len(shape))[: len(shape)])
            elif item.kind == "parameter" and item.trained and self.recipe.stored_axes:
                spec = _split_first(shape, self.recipe.stored_axes, self.space.sizes, partial(self.space.may_hold, item))
            elif item.kind == "parameter" and self.recipe.expert_axis is not None and is_expert_weight(self.graph, item.tensor):
                spec = _split_first(shape[:1], (self.recipe.expert_axis,), self.space.sizes)
                spec = ShardingSpec((*spec.dims, *((),) * (len(shape) - 1)))
            elif item.kind == "parameter" and self.recipe.tensor_axis is not None:
                self.undecided_parameters.add(item.tensor)
            if item.kind == "parameter" and self.recipe.stored_axes:  # gathered from wherever it lies
                spec = self.space.pins.inputs.get(item.tensor, spec)
            self._place_input(item.tensor, spec)
        return True

    def _find_token_axes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Axes of batch and sequence for inputs of ``shape``, the innermost axis major; None when they do not divide.

        Where both orders are searched, the expert axis is minor, so that one all-to-all brings tokens to their experts.
        """
        axes, sizes = self.recipe.token_axes, self.space.sizes
        if self.recipe.expert_axis is not None and len(axes) <= ALL_ORDERS:
            axes = (self.recipe.expert_axis, *(axis for axis in axes if axis != self.recipe.expert_axis))
        for count in range(len(axes), -1, -1):
            batch, sequence = (math.prod(sizes[axis] for axis in some) for some in (axes[:count], axes[count:]))
            if (batch == 1 or (shape and shape[0] % batch == 0)) and (sequence == 1 or (len(shape) > 1 and shape[1] % sequence == 0)):
                return axes[:count][::-1], axes[count:][::-1]
        return None

    def _place_input(self, tensor: str, spec: ShardingSpec, pinned: ShardingSpec | None = None) -> None:
        """Places a graph input in the spec that the recipe has it in. It lies as pinned, by its own pin or by ``pinned``."""
        self.inputs[tensor] = self.space.pins.inputs.get(tensor, pinned or spec)
        self.current[tensor] = (tensor, spec)
        if self.inputs[tensor] != spec:
            self.resharded.add(tensor)

    def _place_result(self, tensor: str, spec: ShardingSpec) -> None:
        """Places an operator's result in the spec that it is made in. Its readers find it as pinned, without partial sums."""
        if self.space.pins.tensors.get(tensor, spec) == spec:
            self.resharded.discard(tensor)
        else:
            self.resharded.add(tensor)
            spec = ShardingSpec(spec.dims)
        self.current[tensor] = (tensor, spec)

    def run(self) -> Assignment:
        forward = [op for op in self.graph.ops if op.phase == "forward"]
        backward = [op for op in self.graph.ops if op.phase == "backward"]
        for op in forward:
            self._run_op(op)
        made_late = {tensor for op in backward for tensor in op.outputs}  # a stage sends gradients too
        for index, output in enumerate(self.graph.outputs):
            if output.kind == "output" and output.tensor not in made_late:
                self._read_output(index, self.space.pins.outputs.get(f"{OUTPUT}{index}"))
        for op in backward:
            self._run_op(op)
        for index, output in enumerate(self.graph.outputs):
            if output.kind != "output":
                self._read_output(index, self.inputs[self.graph.owners[output]])
            elif output.tensor in made_late:
                self._read_output(index, self.space.pins.outputs.get(f"{OUTPUT}{index}"))
        return Assignment(self.inputs, self.strategies, tuple(self.layouts), self.reads, once=frozenset(self.once))

    def _run_op(self, op: Op) -> None:
        choices = self.space.op_choices(op)
        same = self.input_independent.issuperset(op.inputs)
        if same:
            self.input_independent.update(op.outputs)
        if not op.inputs and len(op.outputs) == 1:
            self.undecided_results[op.outputs[0]] = op
            self._decide_result(op.outputs[0], choices.strategies[self._cheapest_strategy(op, choices)].outputs[0])
            return
        if all(tensor in self.undecided_results or not self.graph.tensors[tensor].shape for tensor in op.inputs):
            for tensor in op.inputs:  # no operand decides how the others lie
                self.undecided_results.pop(tensor, None)
        asked = (id(choices), *(self._reader_key(tensor) for tensor in op.inputs))
        chosen = self._own_rows_strategy(op, choices) if same and self.splits_masks else self._conversion_strategy(op, choices)
        if chosen is None and self.recipe.expert_axis is None:  # the key does not know whose tokens are at their experts
            chosen = self.chosen_by_key.get(asked)
        if chosen is None:
            chosen = self.chosen_by_key[asked] = self._cheapest_strategy(op, choices)
        strategy = choices.strategies[chosen]
        self.strategies[op.name] = strategy
        given = list(zip(op.inputs, strategy.inputs, strict=True))
        for tensor, spec in given:
            if tensor in self.undecided_parameters:
                self.undecided_parameters.discard(tensor)
                self._place_input(tensor, spec)
            elif tensor in self.undecided_results:
                self._decide_result(tensor, spec)
                del self.undecided_results[tensor]
        carried = any(tensor in self.expert_tensors and spec == self.current[tensor][1] for tensor, spec in given)
        stays = self._runs_at_experts(op) or (carried and op.target != COMBINE)
        for position, (tensor, spec) in enumerate(given):
            self._read(op.name, position, tensor, spec, op.phase)
        for tensor, spec in zip(op.outputs, strategy.outputs, strict=True):
            self._place_result(tensor, spec)
            if stays and self.recipe.expert_axis in (*spec.split_axes, *spec.partial_axes):
                self.expert_tensors.add(tensor)

    def _conversion_strategy(self, op: Op, choices: OpChoices) -> int | None:
        """The strategy of a conversion that lets the smaller dtype travel; None for other operators.

        A parameter that shrinks is converted as stored, before it is gathered. A gradient that grows is converted as kept, after its
        reduction.
        """
        if op.target != CONVERSION or not self.recipe.stored_axes:
            return None
        (read,), (made,), current = op.inputs, op.outputs, self.current[op.inputs[0]][1]
        grows = DTYPE_BYTES[self.graph.tensors[made].dtype] - DTYPE_BYTES[self.graph.tensors[read].dtype]
        if read in self.parameters and grows < 0:
            wanted = current
        elif made in self.gradients and current.partial and grows > 0:
            if self.recipe.reduces_whole:
                self._read(op.name, 0, read, ShardingSpec(current.dims), op.phase)
            wanted = self.inputs[self.gradients[made]]
        else:
            return None
        chosen = next((number for number, strategy in enumerate(choices.strategies) if strategy.inputs == (wanted,)), None)
        if chosen is not None and read in self.parameters:
            self.parameters.add(made)
        return chosen

    def _own_rows_strategy(self, op: Op, choices: OpChoices) -> int | None:
        """The strategy by which each rank makes its own rows of an input-independent tensor; None where there is none.

        The strategy must read every operand without communication.
        """
        shape = self.graph.tensors[op.outputs[0]].shape
        if not self.split_rows or len(shape) < 2 or shape[:1] != self.rows or len(op.outputs) > 1:
            return None
        wanted = ShardingSpec((self.split_rows, *((),) * (len(shape) - 1)))

        def free(tensor: str, spec: ShardingSpec) -> bool:
            if tensor in self.undecided_results:
                return spec in self._offered_specs(tensor)
            return bool(self._reshard_seconds(tensor, (spec,))[0] == 0.0)

        for number, strategy in enumerate(choices.strategies):
            if strategy.outputs == (wanted,) and all(map(free, op.inputs, strategy.inputs)):
                return number
        return None

    def _offered_specs(self, tensor: str) -> set[ShardingSpec]:
        """The specs in which a tensor of ``undecided_results`` can be made."""
        return {strategy.outputs[0] for strategy in self.space.op_choices(self.undecided_results[tensor]).strategies}

    def _reader_key(self, tensor: str) -> tuple[object, ...]:
        """Everything about a tensor that its reader's strategy depends on: a part of a cache key."""
        maker = self.undecided_results.get(tensor)
        offered = id(self.space.op_choices(maker)) if maker is not None else None
        pinned = self.space.pins.inputs.get(tensor) if tensor in self.undecided_parameters else None
        return tensor in self.undecided_parameters, tensor in self.parameters, offered, self.current[tensor][1], pinned

    def _decide_result(self, tensor: str, spec: ShardingSpec) -> None:
        """Decides the spec of a tensor of ``undecided_results``."""
        op = self.undecided_results[tensor]
        self.strategies[op.name] = next(strategy for strategy in self.space.op_choices(op).strategies if strategy.outputs[0] == spec)
        self._place_result(tensor, spec)

    def _runs_at_experts(self, op: Op) -> bool:
        """Whether an operator works on each expert's weights alone: experts are its batch factor, or it is an expert product."""
        return self.recipe.expert_axis is not None and any(
            (tensor in self.expert_tensors or self._is_expert(tensor))
            and (expert_factors(op) is not None or is_expert_operand(op, position))
            for position, tensor in enumerate(op.inputs)
        )

    def _without_experts(self, spec: ShardingSpec) -> tuple[tuple[int, ...], ...]:
        """The axes that split each dim, without the expert axis."""
        return tuple(tuple(axis for axis in axes if axis != self.recipe.expert_axis) for axes in spec.dims)

    def _is_expert(self, tensor: str) -> bool:
        return tensor not in self.graph.producer and is_expert_weight(self.graph, tensor)

    def _cheapest_strategy(self, op: Op, choices: OpChoices) -> int:
        """Number of the cheapest strategy.

        Strategies compare by unintended communication, then by reductions and compute, then by the number of partial outputs.
        """
        every = choices.without_rings  # no recipe passes attention keys around a ring
        if op.target in (*DISPATCHES, COMBINE):
            every = self._dispatching(choices)
        total, meant = self._strategy_costs(op, choices, every, lambda tensor, specs: np.ones(len(specs)))
        some = every[total == 0.0]  # every reshard of theirs is intended, so the others need no price
        if len(some):
            total, meant = self._strategy_costs(op, choices, some, self._reshard_seconds)
        if not len(some) or total.min() > 0.0:
            some = every
            total, meant = self._strategy_costs(op, choices, some, self._reshard_seconds)
        meant = np.where(np.isfinite(total), meant + choices.seconds[some], math.inf)
        least = np.flatnonzero(total == total.min())
        least = least[meant[least] == meant[least].min()]
        left = [int(some[place]) for place in least]
        return min(left, key=lambda place: sum(len(spec.partial) for spec in choices.strategies[place].outputs))

    def _dispatching(self, choices: OpChoices) -> np.ndarray:
        """Numbers of the strategies of a dispatch or a combine that send rows over the expert axis, if there is one, and over no other."""
        axis = self.recipe.expert_axis
        given = [plain_factors(strategy) for strategy in choices.strategies]
        places = [{name: axes for name, axes in factors.items() if name in ("x", "y")} for factors in given]
        sending = [found == {"x": (axis,)} for found in places]
        return np.flatnonzero(sending if any(sending) else [not found for found in places])

    def _strategy_costs(
        self, op: Op, choices: OpChoices, some: np.ndarray, moves: Callable[[str, Specs], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Unintended communication (weighted seconds) and intended communication (seconds); both of shape [some].

        Args:
            some: numbers of the strategies to price.
            moves: seconds of the reshards of a tensor to specs.
        """
        total, meant = np.zeros(len(some)), np.zeros(len(some))
        for position, tensor in enumerate(op.inputs):
            read = choices.operand(position)
            asked, each = np.arange(len(read.specs)), read.numbers[some]
            if len(some) < len(read.numbers):
                asked, each = np.unique(each, return_inverse=True)
            wanted = tuple([read.specs[number] for number in asked.tolist()])
            free = tensor in self.undecided_parameters or tensor in self.undecided_results
            own = free or (tensor in self.parameters and (self.recipe.stored_axes or self.recipe.expert_axis is not None))
            costs = np.zeros(len(wanted)) if own else moves(tensor, wanted)
            prices = self._operand_costs(op, tensor, wanted, read.axis_codes[asked], read.split_codes[asked], costs)
            total, meant = total + prices[0][each], meant + prices[1][each]
        return total, meant

    def _reshard_seconds(self, tensor: str, wanted: Specs) -> np.ndarray:
        """Seconds of the reshard from a tensor's spec to each of ``wanted``."""
        found: np.ndarray = self.space.reshard_table(self.graph.tensors[tensor], (self.current[tensor][1],), wanted)[0]
        return found

    def _operand_costs(
        self, op: Op, tensor: str, specs: Specs, codes: np.ndarray, coded: np.ndarray, costs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """The costs of ``_strategy_costs`` for reading one tensor in each of ``specs``; both of shape [specs].

        Args:
            codes, coded: the specs as ``reshard_tables.axis_codes`` and ``split_codes``.
            costs: seconds of the reshards.
        """
        none = np.zeros(len(specs))
        if tensor in self.undecided_parameters:
            placed, pinned = np.array([self._placement_cost(op, tensor, spec) for spec in specs]), self.space.pins.inputs.get(tensor)
            if pinned in specs and placed[specs.index(pinned)] == 0.0:  # the pin is a choice that the recipe leaves open
                placed = np.where([spec == pinned for spec in specs], 0.0, FORCED_RESHARD_WEIGHT)
            return placed, none
        if tensor in self.undecided_results:
            offered = self._offered_specs(tensor)
            return np.array([0.0 if spec in offered else math.inf for spec in specs]), none
        if tensor in self.parameters and self.recipe.stored_axes:
            return np.array([0.0 if spec.is_replicated else FORCED_RESHARD_WEIGHT for spec in specs]), none
        _, current = self.current[tensor]
        if tensor in self.parameters and self.recipe.expert_axis is not None:
            return np.array([0.0 if spec == current else FORCED_RESHARD_WEIGHT for spec in specs]), none
        rank, axes = len(current.dims), len(self.space.sizes)
        own = axis_codes((current,), axes)
        dims, whole = coded == split_codes(own, axes, rank), (codes >= UNUSED).all(axis=1)
        reached = ((codes >= UNUSED) | (own < UNUSED)).all(axis=1)
        meant = reached & whole & (costs > 0.0)
        meant[meant] = self._is_intended(op, tensor, current, [specs[place] for place in np.flatnonzero(meant)], dims[meant])
        same = dims.all(axis=1) & (np.minimum(codes, UNUSED) == np.minimum(own, UNUSED)).all(axis=1)
        total = np.where(reached, np.where(meant | same, 0.0, FORCED_RESHARD_WEIGHT * costs + SLICE_WEIGHT), math.inf)
        if self.recipe.expert_axis is not None:
            there = {spec for name, spec, _ in self.made_layouts if name == tensor}
            known = np.array([spec in there and bool(self._existing_layout(tensor, spec, op.phase)) for spec in specs], dtype=bool)
            total, meant = np.where(known, 0.0, total), meant & ~known
        return total, np.where(meant, costs, 0.0)

    def _placement_cost(self, op: Op, tensor: str, spec: ShardingSpec) -> float:
        """Cost of the spec that an operator chooses for an undecided parameter: 0, ``FORCED_RESHARD_WEIGHT`` or infinite.

        The tensor axis alone may split it, in a spec that ranks can hold. Contraction weights must be split, embeddings by rows of the
        vocabulary.
        """
        axis = self.recipe.tensor_axis
        if spec.partial or not set(spec.split_axes) <= {axis} or not self.space.may_hold(self.stored[tensor], spec):
            return math.inf
        terms = expert_factors(op)
        if terms is not None:
            return 0.0 if self._columns_or_rows(op, terms, spec) else FORCED_RESHARD_WEIGHT
        whole = axis is not None and all(extent % self.space.sizes[axis] for extent in self.graph.tensors[tensor].shape)
        wanted = {CONTRACTION: bool(spec.split_axes), EMBEDDING: bool(spec.dims) and bool(spec.dims[0])}
        return 0.0 if whole or wanted.get(op.target, True) else FORCED_RESHARD_WEIGHT

    def _columns_or_rows(self, op: Op, terms: ExpertFactors, spec: ShardingSpec) -> bool:
        """Whether a spec splits experts' matrices by rows where their operand is split by columns, and by columns otherwise."""
        first, matrices, rows = terms.inputs
        given = self.current[op.inputs[0]][1].dims
        inner = {name for name in first if name not in rows}
        by_rows = any(axes and name in inner for name, axes in zip(first, given, strict=True))
        split = {name for name, axes in zip(matrices, spec.dims, strict=True) if axes}
        return len(split) == 1 and split <= (inner if by_rows else set(terms.result) - set(rows))

    def _is_intended(self, op: Op, tensor: str, current: ShardingSpec, specs: Sequence[ShardingSpec], same: np.ndarray) -> np.ndarray:
        """Whether the recipe intends the reshard to each of ``specs``; shape [specs].

        It intends reductions in place, scatters and gathers of the second dim with ``splits_sequence``, and all-to-alls of tokens to
        experts and back.

        Args:
            specs: targets of the reshard, without partial sums.
            same: whether each dim stays split as it is; shape [specs, dims].
        """
        if tensor in self.expert_tensors or self._runs_at_experts(op):
            mine = self._without_experts(current)
            return np.array([self._without_experts(spec) == mine for spec in specs], dtype=bool)
        if not self.recipe.splits_sequence or len(current.dims) < 3:
            return np.asarray(same.all(axis=1))
        axis = (self.recipe.tensor_axis,)
        if current.partial:
            second = [spec.dims[1] == axis for spec in specs]
        else:
            second = [op.target == CONTRACTION and current.dims[1] == axis and not spec.dims[1] for spec in specs]
        return np.asarray(np.delete(same, 1, axis=1).all(axis=1) & np.array(second, dtype=bool))

    def _read(self, reader: str, position: int, tensor: str, spec: ShardingSpec, phase: Phase) -> None:
        source, current = self._source(reader, tensor, phase)
        if spec == current:
            value = source
        else:
            value = self._existing_layout(tensor, spec, phase)
            if not value:
                self.gathers_masks |= (
                    self.splits_masks and tensor in self.input_independent and bool(self._reshard_seconds(tensor, (spec,))[0] > 0.0)
                )
                value = self._add_layout(reader, tensor, source, spec, phase)
            if current.partial and not spec.partial:
                self.current[tensor] = (value, spec)
        if value != tensor:
            self.reads[reader, position] = value

    def _source(self, reader: str, tensor: str, phase: Phase) -> tuple[str, ShardingSpec]:
        """The value of a tensor from which a reader has it, and its spec."""
        source, current = self.current[tensor]
        if tensor not in self.resharded or source != tensor:
            return source, current
        if tensor in self.inputs:
            return tensor, self.inputs[tensor]
        pinned = self.space.pins.tensors[tensor]
        return self._existing_layout(tensor, pinned, phase) or self._add_layout(reader, tensor, tensor, pinned, phase), pinned

    def _add_layout(self, reader: str, tensor: str, source: str, spec: ShardingSpec, phase: Phase) -> str:
        """Adds a layout, and returns its value."""
        value = f"{tensor}@{phase}:{spec}"
        once = self.recipe.keeps_gathered and phase == "forward" and tensor in self.parameters and source == tensor
        if once and tensor not in self.stored:
            once = self._runs_once(self.graph.producer[tensor])
        self.layouts.append(Layout(value, tensor, source, spec, phase, reader, once=once))
        self.made_layouts[tensor, spec, phase] = value
        return value

    def _runs_once(self, op: Op) -> bool:
        """Whether a conversion of a parameter can run once a step, which it then does: of the parameter as it lies."""
        can = op.name in self.space.made_once and (op.name, 0) not in self.reads
        self.once.update([op.name] if can else ())
        return can

    def _existing_layout(self, tensor: str, spec: ShardingSpec, phase: Phase) -> str:
        """The layout that exists already and can be read in this phase; empty without one."""
        return self.made_layouts.get((tensor, spec, phase), "") or (
            self.made_layouts.get((tensor, spec, "forward"), "") if self._is_kept(tensor) else ""
        )

    def _is_kept(self, tensor: str) -> bool:
        return self.recipe.keeps_gathered or tensor in self.resharded or (tensor in self.graph.producer and tensor not in self.parameters)

    def _read_output(self, index: int, spec: ShardingSpec | None) -> None:
        """Reads one output in ``spec``; without one it is reduced and keeps its dims."""
        output = self.graph.outputs[index]
        producer = self.graph.producer.get(output.tensor)
        phase: Phase = "backward" if output.kind == "gradient" or (producer and producer.phase == "backward") else "forward"
        _, current = self.current[output.tensor]
        tangents = [item.tensor for item in self.graph.of_kind("tangent") if output.kind == "output" and item.name == output.name]
        pinned = next((spec for tensor in tangents if (spec := self.space.pins.inputs.get(tensor)) is not None), None)
        own = ShardingSpec(current.dims)
        target = spec or pinned or own
        if self.recipe.reduces_whole and output.kind == "gradient" and current.partial:
            self._read(f"{OUTPUT}{index}", 0, output.tensor, ShardingSpec(current.dims), phase)
        self._read(f"{OUTPUT}{index}", 0, output.tensor, target, phase)
        for tensor in tangents:
            self._place_input(tensor, own, target)


def _split_first(
    shape: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...], may_hold: Callable[[ShardingSpec], bool] = lambda spec: True
) -> ShardingSpec:  # fmt: skip
    """The spec that splits the first dim that these axes divide and ranks may hold so; replicated without one."""
    parts = math.prod(sizes[axis] for axis in axes)
    for dim, extent in enumerate(shape):
        spec = ShardingSpec(tuple(axes[::-1] if d == dim else () for d in range(len(shape))))
        if extent % parts == 0 and may_hold(spec):
            return spec
    return ShardingSpec.replicated(len(shape))
