"""The integer problem of a graph, node by node: ``Model``, and how weights price it.

Nodes and the meaning of their choices:

==========  ==========================================================================================================
``input``   A graph input (parameter, buffer, argument, tangent): its spec. A parameter's gradient and optimizer state share it. Of several
            microbatches: also whether they all read a copy that is gathered once a step, and its spec.
``op``      An operator: its strategy. Of a parameter's conversion and several microbatches: also whether it runs once a step, and the spec
            in which its result is kept for all of them.
``output``  An output of the model: the spec in which it leaves.
``layout``  A tensor as its readers of one phase share it: resharded once from the producer's version.
``saved``   What backward keeps of a tensor of forward: the producer's version or the layout's, or a free slice of either. For a gathered
            weight, this chooses between keeping it and gathering it again. With recomputation: kept, gone or recomputed.
``recompute`` The recomputation of a forward operator in backward: none, or its time and strategy. See ``rematerialization``.
==========  ==========================================================================================================

A reader whose strategy needs another spec than the layout's pays a reshard of its own. Edges hold the seconds of one microbatch, with its
share of what runs once a step.

Memory items (``memory_items``) leave out the source of a copy, the buffers of collectives, and prefetched values. So the model asks for
less memory than a schedule: its bound stays true, and the peak of the schedule decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from autopar import pricing
from autopar.effort import Budget
from autopar.graph import Graph, Phase, Tensor
from autopar.rules import DENSE, Repeated
from autopar.schedule import Assignment
from autopar.schedule.deferred_loss import may_be_deferred, most_deferred_bytes
from autopar.schedule.ordering import phases_in_order
from autopar.schedule.scheduled_plan import Sample
from autopar.search.choices.space import IMPOSSIBLE, Space
from autopar.search.ilp.critical_path import Dependencies
from autopar.search.ilp.scaling import Item, scale_to_integers
from autopar.search.settings import TIES
from autopar.sharding import ShardingSpec
from autopar.solvers import Problem

Kind = Literal["input", "op", "output", "layout", "saved", "recompute"]
Side = Literal["ahead", "between", "behind"]


@dataclass
class Node:
    """One node of the problem.

    Args:
        name: the operator or tensor.
        seconds: of each choice; shape [choices].
        specs: the spec that each choice gives to the tensor, if the node is of one.
        from_layout: of ``saved``: whether each choice is made from the layout.
        states: of ``saved`` with recomputation: ``kept``, ``gone`` or ``recompute``; empty: all are kept.
        moments: of ``saved``: the index of the time of the recomputation.
        spans: of ``saved`` with recomputation: begin and end of the time for which each choice is there for backward.
        strategy_numbers: of ``recompute``: the number of the strategy, -1 for no recomputation; shape [choices].
        deferred: of ``layout``: whether backward reads nothing that is made from each choice; empty where that is not told apart.
        resting: of ``input``: the spec in which each choice lies at rest, and its gradient and optimizer states do. Where ``specs`` has
            another, that copy is gathered once a step and kept over its microbatches.
        once: of ``op``: of ``seconds``, those of what runs once a step, beside everything else; None where nothing does. Those of ``input``
            all are.
        items: begin, end and bytes of the memory that each choice holds.
    """

    kind: Kind
    name: str
    seconds: np.ndarray
    specs: tuple[ShardingSpec, ...] = ()
    phase: Phase = "forward"
    from_layout: tuple[bool, ...] = ()
    states: tuple[str, ...] = ()
    moments: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    strategy_numbers: np.ndarray | None = None
    deferred: tuple[bool, ...] = ()
    resting: tuple[ShardingSpec, ...] = ()
    once: np.ndarray | None = None
    items: list[list[Item]] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """A reader of a tensor.

    Args:
        node: number of its node.
        specs: the spec that each choice of the node needs.
        position: of the tensor among its inputs.
        time: its place among the operators.
        follows: whether it is a view that takes a spec as it is if it can.
        sums: whether each choice adds several partial sums.
    """

    node: int
    specs: tuple[ShardingSpec, ...]
    name: str
    position: int
    phase: Phase
    time: int
    follows: bool
    sums: tuple[bool, ...] = ()


@dataclass
class Site:
    """The nodes of one tensor.

    Args:
        producer: number of the node that makes it.
        specs: the spec that each choice of the producer gives it.
        forward, saved, backward: numbers of its layout in forward, what backward keeps, and its layout in backward; None where not needed.
        recompute_readers: its readers that may be recomputed.
    """

    tensor: str
    producer: int
    specs: tuple[ShardingSpec, ...]
    readers: list[Reader]
    forward: int | None = None
    saved: int | None = None
    backward: int | None = None
    recompute_readers: tuple[Reader, ...] = ()

    def phases(self, graph: Graph) -> tuple[list[Reader], list[Reader]]:
        """Readers in forward and in backward, each by time. All readers of a tensor of backward are in backward."""
        readers = sorted(self.readers, key=lambda reader: reader.time)
        producer = graph.producer.get(self.tensor)
        if producer and producer.phase == "backward":
            return [], readers
        return [r for r in readers if r.phase == "forward"], [r for r in readers if r.phase == "backward"]


@dataclass(frozen=True)
class Edge:
    """Seconds between the choices of two nodes, infinite where these exclude one another; shape [source's choices, target's choices].

    Args:
        phase: the phase in which the reshard runs.
        tensor: the tensor that is resharded; None where nothing is, and finite entries are 0.
        sources, targets: the specs of rows and columns, if the edge reshards.
        readers: number of readers that share equal reshards.
        side: the place of the reshard beside the operators of the phase. ``ahead``: its source exists when the phase begins, or is made by
            the phase's first operators (``Graph.prepared``). ``behind``: nobody in the phase reads its result. ``between``: all others.
        share: fraction of its seconds that falls to one microbatch; below 1 where it runs after the last microbatch alone.
    """

    source: int
    target: int
    seconds: np.ndarray
    phase: Phase = "forward"
    tensor: Tensor | None = None
    sources: tuple[ShardingSpec, ...] = ()
    targets: tuple[ShardingSpec, ...] = ()
    readers: int = 1
    side: Side = "between"
    share: float = 1.0


@dataclass
class Model:
    """The problem under construction, and what its nodes stand for."""

    space: Space
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    node_number: dict[tuple[str, str], int] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    side_of_layout: dict[int, Side] = field(default_factory=dict)
    _cache: dict[object, tuple[np.ndarray, ...]] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        self.node_number[node.kind + (node.phase if node.kind == "layout" else ""), node.name] = len(self.nodes)
        self.nodes.append(node)
        if not node.items:
            node.items = [[] for _ in node.seconds]
        return len(self.nodes) - 1

    def masked(
        self, table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], sums: tuple[bool, ...] = ()
    ) -> np.ndarray:  # fmt: skip
        """``_without_masks``, once per table."""
        return self.cached((id(table), sums), lambda: _without_masks(table, sources, targets, sums), table)

    def followed(self, table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...]) -> np.ndarray:
        """The table of a view, which takes a spec as it is where it can; once per table."""

        def make() -> np.ndarray:
            same = self.space.equality_table(sources, targets)
            return np.where((same == 0).any(axis=1, keepdims=True), same, table)

        return self.cached((id(table), "follows"), make, table)

    def repeated(self, source: int, tensor: Tensor) -> Repeated:
        """The repeated dims of a tensor in the specs of a node. Of a layout it is not known whether it is the producer's version."""
        return self.space.repeated.get(tensor.name, DENSE) if self.nodes[source].kind == "op" else DENSE

    def free_only(self, table: np.ndarray) -> np.ndarray:
        """``_free``, once per table."""
        return self.cached((id(table), "free"), lambda: _free(table), table)

    def cached(self, key: object, make: Callable[[], np.ndarray], *held: np.ndarray) -> np.ndarray:
        if key not in self._cache:
            self._cache[key] = (make(), *held)  # held alive, so that no other table gets an ``id`` in the key
        return self._cache[key][0]

    def loads(self, edge: Edge, link: str) -> np.ndarray:
        """Seconds for which an edge's reshards hold ``link``, latencies left out; 0 where nothing is resharded."""
        assert edge.tensor is not None
        return self._where_moved(edge, link, self.space.load_table(edge.tensor, edge.sources, edge.targets, link))

    def copies(self, edge: Edge) -> np.ndarray:
        """Seconds of the copies of an edge's reshards; 0 where nothing is resharded."""
        assert edge.tensor is not None
        repeated = self.repeated(edge.source, edge.tensor)
        return self._where_moved(edge, "copies", self.space.copy_table(edge.tensor, edge.sources, edge.targets, repeated))

    def least_copies(self, edge: Edge) -> np.ndarray:
        """Seconds that the copies of an edge's reshards add to the compute stream in any bucket, at least."""
        assert edge.tensor is not None
        repeated = self.repeated(edge.source, edge.tensor)
        return self._where_moved(edge, "least", self.space.least_copy_table(edge.tensor, edge.sources, edge.targets, repeated))

    def sums(self, edge: Edge) -> np.ndarray:
        """Seconds in which a microbatch's gradient is added to the sum that an edge reduces once a step; shape [sources, 1]. 0 elsewhere.

        A schedule may sum behind the reduction instead, so bounds do not count them.
        """
        if edge.share == 1.0 or edge.tensor is None:
            return np.zeros((1, 1))
        machine, dtype = self.space.machine, edge.tensor.dtype
        sizes = [pricing.local_bytes(edge.tensor, spec, machine) for spec in edge.sources]
        return np.array([[machine.sum_seconds(size, dtype)] for size in sizes])

    def _where_moved(self, edge: Edge, what: str, table: np.ndarray) -> np.ndarray:
        """The table where the edge reshards, 0 elsewhere; once per table of seconds."""
        moved = edge.seconds
        return self.cached((id(moved), what), lambda: np.where(np.isfinite(moved) & (moved > 0.0), table * edge.share, 0.0), moved)

    def node_loads(self, node: Node) -> Mapping[str, np.ndarray]:
        """Seconds for which an operator's inner collectives hold each link, in its first run or its recomputation; shape [choices] each."""
        loads = {link: load for link, load in self.space.op_choices(self.space.graph.op[node.name]).loads.items() if load.any()}
        if node.strategy_numbers is None:
            return loads
        return {link: np.where(node.strategy_numbers >= 0, load[node.strategy_numbers], 0.0) for link, load in loads.items()}

    def not_slowed(self, node: Node) -> Mapping[str, np.ndarray]:
        """For each link, the seconds of an operator's choices whose inner collectives all use other links.

        Calls on that link do not slow such an operator.
        """
        loads = self.node_loads(node)
        anywhere = sum(loads.values(), np.zeros(len(node.seconds))) > 0.0
        if not anywhere.any():
            return {}
        return {link: np.where(anywhere & (loads.get(link, 0.0) == 0.0), node.seconds, 0.0) for link in self.space.links}

    @cached_property
    def incoming(self) -> list[list[int]]:
        """Numbers of the edges that lead to each node."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, edge in enumerate(self.edges):
            found[edge.target].append(number)
        return found

    def nodes_in_order(self, phase: Phase) -> list[int]:
        """Numbers of the phase's nodes in time order: operators as captured, each after its layouts, then inputs and outputs."""
        found: dict[int, None] = {}
        for op in self.space.graph.ops:
            if op.phase == phase:
                number = self.node_number["op", op.name]
                found.update((self.edges[index].source, None) for index in self.incoming[number] if self._is_layout(index, phase))
                found[number] = None
        for number, node in enumerate(self.nodes):
            if node.kind in ("input", "output"):
                found.update((self.edges[index].source, None) for index in self.incoming[number] if self._is_layout(index, phase))
                if any(self.edges[index].phase == phase for index in self.incoming[number]):
                    found[number] = None
        return list(found)

    def _is_layout(self, index: int, phase: Phase) -> bool:
        node = self.nodes[self.edges[index].source]
        return node.kind == "layout" and node.phase == phase

    def dependencies(self, phase: Phase) -> Dependencies:
        """Dependencies of a phase."""
        if phase not in self._dependencies:
            self._dependencies[phase] = Dependencies(self, phase)
        return self._dependencies[phase]

    @cached_property
    def _dependencies(self) -> dict[Phase, Dependencies]:
        return {}

    @cached_property
    def deferred(self) -> Mapping[int, np.ndarray]:
        """For each edge whose reshard the loss alone may need, whether no operator waits for it; shape [target's choices]."""
        graph, found, ends = self.space.graph, dict[int, np.ndarray](), self.deferrable
        kept = most_deferred_bytes(graph)
        for number, edge in enumerate(self.edges):
            target = self.nodes[edge.target]
            if edge.tensor is None or edge.phase != "forward" or target.kind not in ("op", "output", "layout"):
                continue
            readers = [target.name] if target.kind != "layout" else [one.name for one in self.sites[target.name].phases(graph)[0]]
            if ends and ends.issuperset(readers):
                small = np.array([pricing.local_bytes(edge.tensor, spec, self.space.machine) <= kept for spec in edge.targets])
                found[number] = small & np.array(target.deferred) if target.deferred else small
        return found

    @cached_property
    def deferrable(self) -> frozenset[str]:
        """Operators and output that the loss alone waits for (``deferred_loss``). None if the loss is no output, or nothing overlaps."""
        graph = self.space.graph
        waits = graph.loss is None or not self.space.machine.overlaps
        return frozenset() if waits else may_be_deferred(graph)

    @cached_property
    def extra_byte_times(self) -> list[np.ndarray]:
        """Bytes times life of each choice of each node, above the least choice of the node."""
        held = [np.array([sum((end - begin) * size for begin, end, size in items) for items in node.items], float) for node in self.nodes]
        return [sizes - sizes.min() for sizes in held]

    def _tie_breakers(self, priced: Priced) -> list[np.ndarray]:
        """Tie-breakers: a small cost on bytes times life, so that among choices of equal cost those that hold less win."""
        least = sum(times * float(table.min()) for times, table in zip(self.node_counts, priced.nodes, strict=True))
        most = sum(times * float(sizes.max()) for times, sizes in zip(self.node_counts, self.extra_byte_times, strict=True))
        share = TIES * max(least, 0.0) / most if most else 0.0
        return [share * sizes for sizes in self.extra_byte_times]

    def connect(self, source: int, target: int, table: np.ndarray, share: float = 1.0, **more: Any) -> None:
        if share < 1.0:
            table = self.cached((id(table), share), lambda: table * share, table)
        self.edges.append(Edge(source, target, table, share=share, **more))

    def problem(self, limit: int | None, weights: Weights | None = None) -> tuple[Problem, float]:
        """The integer problem and its unit in seconds (``scale_to_integers``). Tie-breakers add at most the share ``TIES`` to costs.

        Args:
            limit: bytes per rank; None: no limit.
            weights: what each node and edge counts; all in sequence if not given.
        """
        priced = (weights or InSequence()).price(self)
        nodes, edges = self.problem_costs(
            [table + tie for table, tie in zip(priced.nodes, self._tie_breakers(priced), strict=True)], priced.edges
        )
        costs, tables, unit = scale_to_integers(nodes, edges)
        edge_costs = np.concatenate(tables) if tables else self._costless.edge_costs
        return replace(self._costless, costs=np.concatenate(costs), edge_costs=edge_costs, limit=limit), unit

    @cached_property
    def _costless(self) -> Problem:
        """The problem without costs, which are all that weights change."""
        nothing = {id(edge.seconds): np.zeros(edge.seconds.shape) for edge in self.edges}
        free = [np.zeros(len(node.seconds)) for node in self.nodes]
        nodes, tables = self.problem_costs(free, [nothing[id(edge.seconds)] for edge in self.edges])
        edges = [(source, target, table.astype(np.int64)) for (source, target), table in zip(self.edge_ends, tables, strict=True)]
        return Problem.build([cost.astype(np.int64) for cost in nodes], edges, items=self.problem_items(), limit=0, name="plan")

    # Methods that ``TiedModel`` overrides for folded layers.

    @property
    def edge_ends(self) -> Sequence[tuple[int, int]]:
        """The two nodes of the problem that each of its edges joins."""
        return [(edge.source, edge.target) for edge in self.edges]

    def problem_costs(self, nodes: list[np.ndarray], edges: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Costs of the problem's nodes and edges, from those of the model's. Equal tables are one object."""
        return nodes, edges

    def problem_items(self) -> Sequence[list[list[Item]]]:
        """Memory items of the choices of the problem's nodes."""
        return [node.items for node in self.nodes]

    @cached_property
    def repeat_of_node(self) -> Sequence[int | None]:
        """The repeat of equal layers of each node, where layers are folded."""
        return [None] * len(self.nodes)

    @cached_property
    def node_counts(self) -> np.ndarray:
        """How often each node stands in the planned graph."""
        return np.ones(len(self.nodes))

    @cached_property
    def edge_counts(self) -> np.ndarray:
        """How often each edge stands in the planned graph."""
        return np.ones(len(self.edges))

    @cached_property
    def op_times(self) -> Mapping[str, int]:
        """The time of memory items at which each operator of the planned graph runs."""
        return {op.name: time for time, op in enumerate(phases_in_order(self.space.graph))}

    def recomputed_together(self, name: str) -> tuple[str, ...]:
        """The operators that are recomputed where ``name`` is."""
        return (name,)

    @property
    def planned_graph(self) -> Graph:
        """The planned graph."""
        return self.space.graph

    def unfold(self, assignment: Assignment) -> Assignment:
        """The assignment of the planned graph."""
        return assignment

    def short_samples(self, assignment: Assignment) -> tuple[Sample, ...]:
        """Samples: the assignment in shorter graphs from which its cost in the planned graph is extrapolated; none where it is not."""
        return ()

    def expand(self, choices: np.ndarray) -> np.ndarray:
        """A choice for each node of the model, from one for each node of the problem."""
        return choices

    def restrict(self, choices: np.ndarray) -> np.ndarray:
        """The inverse of ``expand``."""
        return choices

    def is_planned_path(self, nodes: Sequence[int], edges: Sequence[int]) -> bool:
        """Whether a chain of dependencies exists in the planned graph, with everything on it as often as it stands there."""
        return True

    def is_idle(self, time: int) -> bool:
        """Whether at a time of memory items nothing runs of the layers that are left out."""
        return True

    def prove_bound(self, weights: Weights, bound: float, optimum: float, budget: Budget, choices: np.ndarray) -> float:
        """The bound on all plans, in seconds.

        Args:
            bound, optimum, choices: bound and cost of the problem's solution under these weights, in seconds, and one choice per node.
        """
        return bound


class Priced:
    """Seconds of every node and edge under some weights. Equal tables are one object."""

    def __init__(self, nodes: list[np.ndarray], edges: list[np.ndarray]) -> None:
        self.nodes, self.edges = nodes, edges


class Weights(Protocol):
    """How much of each node's and edge's seconds counts."""

    def price(self, model: Model) -> Priced: ...


@dataclass(frozen=True)
class InSequence:
    """Everything counts: compute, communication and optimizer one after another."""

    def price(self, model: Model) -> Priced:
        return Priced([node.seconds for node in model.nodes], [edge.seconds for edge in model.edges])


def _without_masks(
    table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], sums: tuple[bool, ...] = ()
) -> np.ndarray:
    """The table in which a whole value becomes a partial sum only for readers that add it to one (``sums``): elsewhere that is useless."""
    has = np.array([set(spec.partial_axes) for spec in sources], dtype=object)
    masked = np.array([[bool(target.partial) and not set(target.partial_axes) <= mine for target in targets] for mine in has]) & ~np.array(
        sums or (False,) * len(targets)
    )
    return np.where(masked, IMPOSSIBLE, table) if masked.any() else table


def _free(table: np.ndarray) -> np.ndarray:
    """The table in which only free reshards (slices) stay possible."""
    return np.where(table == 0.0, 0.0, IMPOSSIBLE)
