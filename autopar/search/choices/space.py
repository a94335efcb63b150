"""The search space: strategies of every operator, specs of every graph input and output, and their prices.

Operators with equal targets, arguments and shapes share strategies and prices, so that the repeats of a layer are priced once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from autopar import pricing
from autopar.cost_models import Machine
from autopar.effort import Budget
from autopar.graph import DTYPE_BYTES, Graph, GraphInput, Op, Tensor
from autopar.reshard import find_reshard
from autopar.reshard.cuts import prime_cut
from autopar.rules import DENSE, Repeated, find_dispatched, find_expanded, find_rule, splits_experts, stored_elements, strategies
from autopar.schedule import OUTPUT, Assignment
from autopar.search.choices.pins import Pins
from autopar.search.choices.reshard_tables import ReshardPricing, axis_codes, known_pricing, split_codes
from autopar.search.choices.uneven import UnevenSplits, find_uneven_splits, op_signature
from autopar.search.settings import RESHARD_WORK, STRATEGY_WORK
from autopar.sharding import ALL_ORDERS, Orders, ShardingSpec, Strategy, innermost_first, lies_so, splits

CONTRACTION = "autopar.contract.default"
IMPOSSIBLE = float("inf")


class BudgetExhausted(Exception):
    """The budget was used up while choices were still to be enumerated or priced."""


@dataclass(frozen=True)
class OperandSpecs:
    """The distinct specs in which an operator's input is read.

    Args:
        specs: the distinct specs.
        numbers: for each strategy, the index of its spec; shape [strategies].
        axis_codes, split_codes: the specs as ``reshard_tables.axis_codes`` and ``split_codes``.
    """

    specs: tuple[ShardingSpec, ...]
    numbers: np.ndarray
    axis_codes: np.ndarray
    split_codes: np.ndarray


@dataclass(frozen=True)
class OpChoices:
    """The strategies of one operator and their prices.

    Args:
        seconds: compute and inner collectives of one microbatch, with its share of what runs once a step; shape [strategies].
        loads: seconds for which inner collectives hold each link; shape [strategies] each.
        axes: number of mesh axes.
        kept: of a conversion that may run once a step: the spec in which all microbatches read its result, gathered once where its strategy
            has another. None where it runs in each, as it does in the first ``in_each`` strategies, which come again. Empty otherwise.
    """

    strategies: tuple[Strategy, ...]
    seconds: np.ndarray
    loads: Mapping[str, np.ndarray]
    axes: int
    kept: tuple[ShardingSpec | None, ...] = ()
    _read: dict[int, OperandSpecs] = field(default_factory=dict, repr=False, compare=False)

    def operand(self, position: int) -> OperandSpecs:
        """The distinct specs of the input at ``position``."""
        if position not in self._read:
            specs = self.inputs(position)
            number = {spec: place for place, spec in enumerate(dict.fromkeys(specs))}
            codes = axis_codes(tuple(number), self.axes)
            coded = split_codes(codes, self.axes, len(specs[0].dims))
            self._read[position] = OperandSpecs(tuple(number), np.array([number[spec] for spec in specs]), codes, coded)
        return self._read[position]

    @cached_property
    def in_each(self) -> int:
        """Number of the strategies that run in each microbatch, which come first."""
        return sum(spec is None for spec in self.kept) if self.kept else len(self.strategies)

    @cached_property
    def once(self) -> np.ndarray | None:
        """Of ``seconds`` the shares of what runs once a step; None without any."""
        return np.where([spec is not None for spec in self.kept], self.seconds, 0.0) if self.kept else None

    @cached_property
    def without_rings(self) -> np.ndarray:
        """Numbers of the strategies that pass nothing around a ring of ranks, each once."""
        return np.flatnonzero([strategy.turns == 1 for strategy in self.strategies[: self.in_each]])

    def inputs(self, position: int) -> tuple[ShardingSpec, ...]:
        return tuple(strategy.inputs[position] for strategy in self.strategies)

    def outputs(self, index: int) -> tuple[ShardingSpec, ...]:
        """The spec of a result under each strategy, as its readers find it."""
        made = tuple(strategy.outputs[index] for strategy in self.strategies)
        return tuple(spec or own for spec, own in zip(self.kept, made, strict=True)) if self.kept else made


@dataclass
class Space:
    """Choices and prices of one graph on one machine, cached by operator signature.

    Args:
        optimizer: see ``autopar.cost_models.find_optimizer``.
        pins: specs that the user fixed.
        unknown: targets without a rule, with the place of one such operator.
        only_strategies, only_inputs: the strategies of each operator and the specs of each graph input, by name, if the search is
            restricted to these.
        budget: for enumeration and pricing; ``BudgetExhausted`` is raised when it is used up. None: no limit.
    """

    graph: Graph
    machine: Machine
    optimizer: str
    pins: Pins
    unknown: dict[str, str] = field(default_factory=dict)
    only_strategies: Mapping[str, tuple[Strategy, ...]] | None = None
    only_inputs: Mapping[str, tuple[ShardingSpec, ...]] | None = None
    budget: Budget | None = None
    _ops: dict[object, OpChoices] = field(default_factory=dict)
    _restricted_ops: dict[object, OpChoices] = field(default_factory=dict)
    _ops_by_name: dict[str, OpChoices] = field(default_factory=dict)
    _conversions: dict[int, tuple[OpChoices, OpChoices]] = field(default_factory=dict)
    """By identity of the choices in each microbatch, which are held so that no others take it."""
    _tables: dict[object, tuple[np.ndarray, ...]] = field(default_factory=dict)
    _equal: dict[object, np.ndarray] = field(default_factory=dict)
    _gathers: dict[object, float] = field(default_factory=dict)
    _local: dict[tuple[int, ...], dict[ShardingSpec, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.machine.mesh.sizes

    def op_choices(self, op: Op) -> OpChoices:
        """The strategies of ``op``, priced. An operator without a rule runs whole and is noted in ``unknown``.

        Raises:
            BudgetExhausted: the budget is used up.
        """
        found = self._in_each(op)
        if op.name not in self.made_once:
            return found
        if id(found) not in self._conversions:
            self._conversions[id(found)] = found, self._with_kept(op, found)
        return self._conversions[id(found)][1]

    def least_seconds(self, op: Op, graph: Graph) -> float:
        """Least seconds of an operator of ``graph`` in a microbatch; 0 where its strategies are not known yet, or it may run once.

        Args:
            graph: this space's, or another one's on the same machine.
        """
        known = self._ops.get(op_signature(op, graph))
        return 0.0 if known is None or op.name in graph.conversions else float(known.seconds.min())

    @cached_property
    def made_once(self) -> frozenset[str]:
        """The conversions of parameters that may run once a step, before its microbatches: where nothing is pinned."""
        several, pinned = self.graph.microbatches > 1, self.pins.tensors
        return frozenset(
            name for name, read in self.graph.conversions.items() if several and not pinned.keys() & {read, *self.graph.op[name].outputs}
        )

    def _with_kept(self, op: Op, found: OpChoices) -> OpChoices:
        """The strategies as they are, and again for each spec in which microbatches may read what is made once."""
        tensor, times = self.graph.tensors[op.outputs[0]], self.graph.microbatches
        strategies, kept, seconds = list(found.strategies), list[ShardingSpec | None]([None] * len(found.strategies)), list(found.seconds)
        for strategy, own in zip(found.strategies, found.seconds, strict=True):
            (spec,) = strategy.outputs
            for read in () if spec.partial else (spec, *self._gathered(tensor.name, spec)):
                strategies.append(strategy)
                kept.append(read)
                seconds.append((own + (self._gathering(tensor, spec, read) if read != spec else 0.0)) / times)
        loads = {link: np.concatenate([load, np.zeros(len(kept) - len(load))]) for link, load in found.loads.items()}
        return OpChoices(tuple(strategies), np.array(seconds), loads, found.axes, tuple(kept))

    def _in_each(self, op: Op) -> OpChoices:
        """The strategies of an operator that runs in each microbatch."""
        if self.only_strategies is not None:
            if op.name not in self._ops_by_name:
                key = op_signature(op, self.graph), self.only_strategies[op.name]
                if key not in self._restricted_ops:
                    self._check_budget()
                    self._restricted_ops[key] = self._priced(op, self.only_strategies[op.name])
                self._ops_by_name[op.name] = self._restricted_ops[key]
            return self._ops_by_name[op.name]
        known = op_signature(op, self.graph)
        found = self._ops.get(known)
        if found is None:
            self._check_budget()
            rule = find_rule(op, self.graph.tensors)
            if not rule.known:
                self.unknown[op.target] = op.location or op.name
            tensors = [self.graph.tensors[name] for name in (*op.inputs, *op.outputs)]
            uneven = self.uneven.factors.get(known, frozenset())
            must_split = not self.machine.times_operators
            partial = self._all_orders or op.target != CONTRACTION
            offered = strategies(
                rule, tensors, self.sizes, must_split=must_split, uneven=uneven, orders=self._orders, partial_inputs=partial
            )  # fmt: skip
            if uneven:
                offered = tuple(strategy for strategy in offered if self._is_allowed(op, strategy))
            if self.machine.execution not in (None, "eager"):  # the others have fixed sizes
                offered = tuple(strategy for strategy in offered if not splits_experts(op, strategy))
            if asked := self.pins.on_axes.get(op.name):  # equal operators ask for equal layouts
                offered = tuple(strategy for strategy in offered if lies_so(strategy.inputs[0], asked))
            found = self._ops[known] = self._priced(op, offered)
        return found

    def _check_budget(self) -> None:
        if self.budget is not None and self.budget.over:
            raise BudgetExhausted

    def restricted_to_plans(self, plans: Sequence[Assignment], alike: Mapping[str, str] | None = None) -> Space:
        """The space of the input specs and strategies that any of ``plans`` has. Reshards, keeping and recomputation stay free.

        Pinned inputs lie as pinned, whatever the plans have.

        Args:
            alike: the group of each operator and input, by name. A choice that a plan makes for one member is offered to all.
        """
        alike = alike or {}
        strategies: dict[str, dict[Strategy, None]] = {}
        specs: dict[str, dict[ShardingSpec, None]] = {}
        for plan in plans:
            for op in self.graph.ops:
                strategies.setdefault(alike.get(op.name, op.name), {})[plan.strategies[op.name]] = None
            for item in self.graph.inputs:
                specs.setdefault(alike.get(item.tensor, item.tensor), {})[plan.inputs[item.tensor]] = None
        only = {op.name: tuple(strategies[alike.get(op.name, op.name)]) for op in self.graph.ops}
        placed = {item.tensor: tuple(specs[alike.get(item.tensor, item.tensor)]) for item in self.graph.inputs}
        placed |= {tensor: (spec,) for tensor, spec in self.pins.inputs.items()}
        return self.restricted_to(placed, only)

    def restricted_to(self, inputs: Mapping[str, tuple[ShardingSpec, ...]], strategies: Mapping[str, tuple[Strategy, ...]]) -> Space:
        """The space restricted to these choices."""
        return replace(self, only_strategies=strategies, only_inputs=inputs, _ops_by_name={})

    def offers(self, plan: Assignment) -> bool:
        """Whether a plan is one of this graph and its strategies are in this space."""
        ops = self.graph.ops
        return len(plan.strategies) == len(ops) and all(plan.strategies[op.name] in self.op_choices(op).strategies for op in ops)

    @cached_property
    def repeated(self) -> Mapping[str, Repeated]:
        """The tensors that are expanded where an operator makes them. Of a view of one it is not known: its source may be resharded."""
        return find_expanded(self.graph)

    @cached_property
    def dispatched(self) -> frozenset[str]:
        """The values that are read as they are made."""
        return find_dispatched(self.graph)

    @cached_property
    def uneven(self) -> UnevenSplits:
        """Dims and factors that may be split in unequal parts."""
        return find_uneven_splits(self.graph, self.machine)

    def _priced(self, op: Op, offered: tuple[Strategy, ...]) -> OpChoices:
        """The strategies with their prices.

        Strategies with equal local shapes and equal inner collectives cost the same, and are priced once.
        """
        tensors, machine = self.graph.tensors, self.machine
        shapes = [tensors[name].shape for name in (*op.inputs, *op.outputs)]
        local = [self._local.setdefault(shape, {}) for shape in shapes]
        known: dict[tuple[object, ...], float] = {}
        seconds = []
        for strategy in offered:
            key: list[object] = [strategy.parts, strategy.inner, strategy.turns, strategy.merged]
            for spec, shape, mine in zip((*strategy.inputs, *strategy.outputs), shapes, local, strict=True):
                if spec not in mine:
                    mine[spec] = spec.local_shape(shape, self.sizes)
                key.append(mine[spec])
            if (alike := tuple(key)) not in known:
                known[alike] = pricing.run_seconds(op, tensors, strategy, machine)
            seconds.append(known[alike])
        if self.budget is not None:
            self.budget.charge(STRATEGY_WORK * len(offered))
        return OpChoices(offered, np.array(seconds), self._inner_loads(offered), len(self.sizes))

    def _inner_loads(self, offered: tuple[Strategy, ...]) -> Mapping[str, np.ndarray]:
        """Seconds for which inner collectives hold each link. No bucket joins them, so their whole price counts."""
        loads = {link: np.zeros(len(offered)) for link in self.links}
        for number, strategy in enumerate(offered):
            for inner in strategy.inner:
                axes = pricing.whole_axes(inner.axes, self.machine)
                for link in self.machine.links(axes):
                    loads[link][number] += self.machine.collective_seconds(inner.kind, inner.bytes, axes)
        return loads

    def input_specs(self, item: GraphInput) -> tuple[ShardingSpec, ...]:
        """Specs that a graph input may have: the pinned one, or all that ranks can hold."""
        if self.only_inputs is not None:
            return self.only_inputs[item.tensor]
        pinned = self.pins.inputs.get(item.tensor)
        if pinned:
            return (pinned,)
        return tuple(spec for spec in self.splits(item.tensor) if self.may_hold(item, spec))

    def may_hold(self, item: GraphInput, spec: ShardingSpec) -> bool:
        """Whether ranks can hold a graph input so. A parameter in blocks must be a legal DTensor, on the axes behind a merged axis too."""
        if item.blocks is None:
            return True
        own = item.blocks.own_spec(spec, self.sizes)
        if own is None or not spec.is_even(self.graph.tensors[item.tensor].shape, self.sizes):
            return False
        return not own.blocks or self.pins.merged.isdisjoint(own.dims[item.blocks.dim])

    def output_specs(self, index: int) -> tuple[ShardingSpec, ...]:
        """Specs that an output may leave with: the pinned one, or all without partial sums."""
        pinned = self.pins.outputs.get(f"{OUTPUT}{index}")
        return (pinned,) if pinned else self.splits(self.graph.outputs[index].tensor)

    def splits(self, tensor: str) -> tuple[ShardingSpec, ...]:
        """Specs of a tensor without partial sums."""
        shape = self.graph.tensors[tensor].shape
        found = splits(shape, self.sizes, self.uneven.dims.get(shape, frozenset()), self._orders)
        return tuple(spec for spec in found if self.uneven.allows(spec, shape, self.sizes))

    def _is_allowed(self, op: Op, strategy: Strategy) -> bool:
        specs = zip((*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True)
        return all(self.uneven.allows(spec, self.graph.tensors[name].shape, self.sizes) for name, spec in specs)

    @property
    def _all_orders(self) -> bool:
        return sum(size > 1 for size in self.sizes) <= ALL_ORDERS

    @property
    def _orders(self) -> Orders:
        return itertools.permutations if self._all_orders else innermost_first

    def kept_layouts(self, item: GraphInput, specs: tuple[ShardingSpec, ...]) -> tuple[tuple[ShardingSpec, ShardingSpec], ...]:
        """How a graph input may lie at rest and how all microbatches read it, for each of its specs: as it lies; or, of a trained one,
        gathered over axes that split it, once a step. What is narrowed alone is gathered behind that."""
        found = [(spec, spec) for spec in specs]
        several = self.graph.microbatches > 1 and item.tensor in self.graph.stepped
        if several and item.tensor not in self.pins.tensors and not self.is_narrowed(item.tensor):
            found += [(spec, kept) for spec in specs for kept in self._gathered(item.tensor, spec)]
        return tuple(found)

    def is_narrowed(self, tensor: str) -> bool:
        """Whether all that is done with a parameter is to give it a smaller dtype, and that may run once a step."""
        readers, size = [self.graph.ops[index] for index, _ in self.graph.consumers[tensor]], DTYPE_BYTES[self.graph.tensors[tensor].dtype]
        made = [name for op in readers if op.name in self.made_once for name in op.outputs]
        return len(readers) == len(made) > 0 and all(DTYPE_BYTES[self.graph.tensors[name].dtype] < size for name in made)

    def _gathered(self, tensor: str, spec: ShardingSpec) -> Iterator[ShardingSpec]:
        """The specs in which a tensor may be kept after gathers from ``spec``."""
        offered = set(self.splits(tensor))
        gathered = (_without_axes(spec, axes) for axes in _some_axes(spec.split_axes))
        return (kept for kept in gathered if kept in offered)

    def gather_seconds(self, item: GraphInput, layouts: Sequence[tuple[ShardingSpec, ShardingSpec]]) -> np.ndarray:
        """Least seconds of gathering a graph input once a step, divided by the microbatches; shape [layouts].

        Such calls follow one another, and those in one bucket share a latency, which is left out where calls are joined.
        """
        tensor, times = self.graph.tensors[item.tensor], self.graph.microbatches
        return np.array([0.0 if source == target else self._gathering(tensor, source, target) / times for source, target in layouts])

    def _gathering(self, tensor: Tensor, source: ShardingSpec, target: ShardingSpec) -> float:
        """Seconds of one gather and its copies; without latencies where calls may be joined."""
        key = tensor.shape, tensor.dtype, source, target
        if key not in self._gathers:
            way = find_reshard(tensor.shape, DTYPE_BYTES[tensor.dtype], source, target, self.machine)
            assert way is not None, f"no way to gather {source} to {target}"
            steps = way.steps
            latencies = [self.machine.latency_seconds(step.kind, step.axes) if step.is_collective else 0.0 for step in steps]
            alone = sum(step.seconds for step in steps)
            copies = float(self._reshard_tables(tensor, (source,), (target,))[-1][0, 0])
            shared = sum(latencies) if self.machine.overlaps else 0.0
            self._gathers[key] = max(alone - shared, 0.0) + copies
        return self._gathers[key]

    def input_seconds(self, item: GraphInput, specs: tuple[ShardingSpec, ...]) -> np.ndarray:
        """Seconds of the optimizer step on a trained parameter, divided by the microbatches; 0 for other inputs. Shape [specs]."""
        if item.tensor not in self.graph.stepped:
            return np.zeros(len(specs))
        found = [pricing.optimizer_seconds(self.graph, item.tensor, spec, self.machine, self.optimizer) for spec in specs]
        return np.array(found) / self.graph.microbatches

    def reshard_table(
        self, tensor: Tensor, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], repeated: Repeated = DENSE
    ) -> np.ndarray:  # fmt: skip
        """Seconds from each source spec to each target spec, infinite where impossible; shape [sources, targets].

        Args:
            repeated: the repeated dims of the tensor in its sources.

        Raises:
            BudgetExhausted: the budget is used up.
        """
        return self._reshard_tables(tensor, sources, targets, repeated)[0]

    def load_table(self, tensor: Tensor, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], link: str) -> np.ndarray:
        """Seconds for which each reshard holds ``link``, without latencies; shape [sources, targets].

        A reshard adds that much to the link's work in any bucket.
        """
        return self._reshard_tables(tensor, sources, targets)[1 + self.links.index(link)]

    def copy_table(
        self, tensor: Tensor, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], repeated: Repeated = DENSE
    ) -> np.ndarray:  # fmt: skip
        """Seconds of the copies that each reshard needs beside its collectives (``schedule.Collective``); shape [sources, targets]."""
        return self._reshard_tables(tensor, sources, targets, repeated)[-2]

    def least_copy_table(
        self, tensor: Tensor, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], repeated: Repeated = DENSE
    ) -> np.ndarray:  # fmt: skip
        """Seconds of the copies without launches, which a bucket pays once: what copies add to the compute stream at least."""
        return self._reshard_tables(tensor, sources, targets, repeated)[-1]

    @cached_property
    def _resharding(self) -> ReshardPricing:
        return known_pricing(self.machine, self.links)

    @cached_property
    def links(self) -> tuple[str, ...]:
        """Every link that a collective on this mesh may hold."""
        return tuple(sorted({link for part in prime_cut(self.machine).parts for link in self.machine.links((part,))}))

    def _reshard_tables(
        self, tensor: Tensor, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], repeated: Repeated = DENSE
    ) -> Sequence[np.ndarray]:  # fmt: skip
        """Tables of shape [sources, targets]: seconds with copies, the load of each link, copies, copies without launches."""
        stays = tensor.name in self.dispatched
        key = (tensor.shape, tensor.dtype, sources, targets, tuple(repeated.items()), stays)
        found = self._tables.get(key)
        if found is None:
            self._check_budget()
            distinct_s, distinct_t = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
            small = self._resharding.tables(tensor, distinct_s, distinct_t, repeated)
            if self.budget is not None:
                self.budget.charge(RESHARD_WORK * len(distinct_s) * len(distinct_t))
            row, column = ({spec: place for place, spec in enumerate(distinct)} for distinct in (distinct_s, distinct_t))
            rows = [row[s] for s in sources] if len(distinct_s) < len(sources) else slice(None)
            columns = [column[t] for t in targets] if len(distinct_t) < len(targets) else slice(None)
            whole = small[rows][:, columns]
            if stays:
                whole = whole + self.equality_table(sources, targets)[:, :, None]
            found = self._tables[key] = tuple(np.ascontiguousarray(whole[:, :, index]) for index in range(whole.shape[2]))
            for table in found:
                table.setflags(write=False)
        return found

    def stored_bytes(self, tensor: str, specs: tuple[ShardingSpec, ...]) -> tuple[int, ...]:
        """Bytes that memory has of a tensor on a rank under each spec, at least: a reshard of a view that repeats has more."""
        value, repeated = self.graph.tensors[tensor], self.repeated.get(tensor, DENSE)
        return _stored_bytes(value.shape, DTYPE_BYTES[value.dtype], specs, self.sizes, tuple(repeated.items()))

    def equality_table(self, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...]) -> np.ndarray:
        """0 where the specs are equal, infinite elsewhere; shape [sources, targets]."""
        key = (sources, targets)
        found = self._equal.get(key)
        if found is None:
            number = {spec: index for index, spec in enumerate(dict.fromkeys((*sources, *targets)))}
            same = np.array([number[s] for s in sources])[:, None] == np.array([number[t] for t in targets])[None, :]
            found = self._equal[key] = np.where(same, 0.0, IMPOSSIBLE)
            found.setflags(write=False)
        return found


@lru_cache(maxsize=1 << 10)
def _stored_bytes(
    shape: tuple[int, ...], size: int, specs: tuple[ShardingSpec, ...], sizes: tuple[int, ...], repeated: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:  # fmt: skip
    dims = dict(repeated)
    return tuple([size * stored_elements(spec.local_shape(shape, sizes), dims) for spec in specs])


def _some_axes(axes: Sequence[int]) -> Iterator[frozenset[int]]:
    """Sets of axes to gather over: all sets of up to two axes; of more, each alone and all."""
    for count in range(1, len(axes) + 1):
        if count == 1 or count == len(axes):
            yield from map(frozenset, itertools.combinations(axes, count))


def _without_axes(spec: ShardingSpec, axes: frozenset[int]) -> ShardingSpec:
    """The spec with the dims that the axes split whole over them."""
    return replace(spec, dims=tuple(tuple(axis for axis in split if axis not in axes) for split in spec.dims))
