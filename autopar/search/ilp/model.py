"""Graph x choices -> Problem.

Nodes and what their choice means:

========  ==========================================================================================================
``input``  a graph input (parameter, buffer, argument, tangent): its spec. A parameter's gradient and optimizer state share it.
``op``     an operator: its strategy.
``output`` an output of the model: the spec it leaves with.
``layout`` a tensor as its readers of one phase share it: resharded once from what the producer made, whoever reads it.
``saved``  what backward keeps of a tensor made in forward: the producer's version or the layout's, or a free slice of either.
           For a gathered weight this is the choice between keeping it and gathering it again. Where operators may run again:
           kept, gone, or made again.
``again``  the second run of a forward operator, in backward: not, or when and in which strategy. See ``again``.
========  ==========================================================================================================

A reader whose strategy needs another spec than the layout it reads pays a reshard of its own. Edges hold seconds: of one microbatch,
with its share of what runs once a step.
Memory: see ``lives``. What is left out there (a value next to its copy, the buffers of collectives, what is gathered ahead) makes the
model ask for less memory than the program, not more: the bound stays true, and the program's own peak decides in ``find_plan``.
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
from autopar.schedule import Assignment
from autopar.schedule.deferred_loss import may_be_deferred, most_deferred_bytes
from autopar.schedule.ordering import phases_in_order
from autopar.schedule.tuning import Sample
from autopar.search.choices.space import IMPOSSIBLE, Space
from autopar.search.ilp.critical_path import Dependencies
from autopar.search.ilp.scaling import Item, integers, largest
from autopar.search.settings import TIES
from autopar.sharding import ShardingSpec
from solvers import Problem

Kind = Literal["input", "op", "output", "layout", "saved", "again"]
Side = Literal["ahead", "between", "behind"]


@dataclass
class Node:
    """One node of the problem: seconds and memory items of each choice, and the spec it gives to a tensor (if it is of one tensor).

    Args:
        from_layout: of ``saved``: made from the layout.
        states: of ``saved`` where operators may run again: ``kept``, ``gone`` or ``again``; else all are kept.
        moments: of ``saved``: which of its times the operator's second run has.
        spans: of ``saved`` where operators may run again: from when to when what is chosen is there for backward.
        picks: of ``again``: the strategy, by number; -1 where it does not run.
        late: of ``layout``: nothing that backward reads is made from it; empty where that is not told apart.
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
    picks: np.ndarray | None = None
    late: tuple[bool, ...] = ()
    items: list[list[Item]] = field(default_factory=list)


@dataclass(frozen=True)
class Reader:
    """Who reads a tensor: node number, the spec each of its choices needs, and its name, position and time in the program.

    ``follows``: a view, which takes a spec as it comes if it can. ``sums``: choices that add several partial sums.
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
    """The nodes of one tensor: its producer, its forward layout, what is saved, its backward layout (None where not needed), and
    which of its readers in forward may run again."""

    tensor: str
    producer: int
    specs: tuple[ShardingSpec, ...]
    readers: list[Reader]
    forward: int | None = None
    saved: int | None = None
    backward: int | None = None
    second: tuple[Reader, ...] = ()

    def phases(self, graph: Graph) -> tuple[list[Reader], list[Reader]]:
        """Readers in forward and in backward, each by time; a tensor made in backward has all of them there."""
        readers = sorted(self.readers, key=lambda reader: reader.time)
        producer = graph.producer.get(self.tensor)
        if producer and producer.phase == "backward":
            return [], readers
        return [r for r in readers if r.phase == "forward"], [r for r in readers if r.phase == "backward"]


@dataclass(frozen=True)
class Edge:
    """Seconds between the choices of two nodes; infinite where they do not go together.

    Args:
        phase: when the reshard it prices runs.
        tensor: what is resharded; None where nothing is: the finite entries are 0.
        sources, targets: the specs behind the rows and columns, where something is.
        readers: among how many readers an equal reshard would be made once.
        side: where the reshard stands beside the operators: ``ahead`` of them, since its source is there when the phase begins, or
            made by what leads it (``Graph.prepared``), ``behind``, since nobody in the phase reads its result, or ``between``.
        share: of its seconds that fall to one microbatch: less than 1 where it runs after the last alone.
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
    number: dict[tuple[str, str], int] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)
    side_of_layout: dict[int, Side] = field(default_factory=dict)
    _made: dict[object, tuple[np.ndarray, ...]] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        self.number[node.kind + (node.phase if node.kind == "layout" else ""), node.name] = len(self.nodes)
        self.nodes.append(node)
        if not node.items:
            node.items = [[] for _ in node.seconds]
        return len(self.nodes) - 1

    def masked(
        self, table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], sums: tuple[bool, ...] = ()
    ) -> np.ndarray:  # fmt: skip
        """``_without_masks``, once for equal tables."""
        return self.once((id(table), sums), lambda: _without_masks(table, sources, targets, sums), table)

    def followed(self, table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...]) -> np.ndarray:
        """The table of a view that takes what it can as it is, once for equal tables."""

        def make() -> np.ndarray:
            same = self.space.equality_table(sources, targets)
            return np.where((same == 0).any(axis=1, keepdims=True), same, table)

        return self.once((id(table), "follows"), make, table)

    def once_free(self, table: np.ndarray) -> np.ndarray:
        """``_free``, once for equal tables."""
        return self.once((id(table), "free"), lambda: _free(table), table)

    def once(self, key: object, make: Callable[[], np.ndarray], *held: np.ndarray) -> np.ndarray:
        if key not in self._made:
            self._made[key] = (make(), *held)  # held, so that no other table takes the identity in the key
        return self._made[key][0]

    def loads(self, edge: Edge, link: str) -> np.ndarray:
        """Seconds for which an edge's reshards hold ``link``, latencies left out; 0 where nothing is resharded."""
        assert edge.tensor is not None
        return self._where_moved(edge, link, self.space.load_table(edge.tensor, edge.sources, edge.targets, link))

    def copies(self, edge: Edge) -> np.ndarray:
        """Seconds of the copies of an edge's reshards; 0 where nothing is resharded."""
        assert edge.tensor is not None
        return self._where_moved(edge, "copies", self.space.copy_table(edge.tensor, edge.sources, edge.targets))

    def least_copies(self, edge: Edge) -> np.ndarray:
        """What the copies of an edge's reshards add to the operators' work at least, in any bucket."""
        assert edge.tensor is not None
        return self._where_moved(edge, "least", self.space.least_copy_table(edge.tensor, edge.sources, edge.targets))

    def _where_moved(self, edge: Edge, what: str, table: np.ndarray) -> np.ndarray:
        """The table where the edge reshards, 0 elsewhere; once for equal tables of seconds."""
        moved = edge.seconds
        return self.once((id(moved), what), lambda: np.where(np.isfinite(moved) & (moved > 0.0), table * edge.share, 0.0), moved)

    def node_loads(self, node: Node) -> Mapping[str, np.ndarray]:
        """Seconds for which an operator's inner collectives hold each link they hold at all, in its first or second run."""
        loads = {link: load for link, load in self.space.op_choices(self.space.graph.op[node.name]).loads.items() if load.any()}
        if node.picks is None:
            return loads
        return {link: np.where(node.picks >= 0, load[node.picks], 0.0) for link, load in loads.items()}

    def not_slowed(self, node: Node) -> Mapping[str, np.ndarray]:
        """For each link the seconds of an operator where it has collectives inside, none of them on that link: beside other calls there
        it keeps its speed."""
        loads = self.node_loads(node)
        anywhere = sum(loads.values(), np.zeros(len(node.seconds))) > 0.0
        if not anywhere.any():
            return {}
        return {link: np.where(anywhere & (loads.get(link, 0.0) == 0.0), node.seconds, 0.0) for link in self.space.links}

    @cached_property
    def incoming(self) -> list[list[int]]:
        """For each node the numbers of the edges that lead to it."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, edge in enumerate(self.edges):
            found[edge.target].append(number)
        return found

    def in_time(self, phase: Phase) -> list[int]:
        """The nodes of a phase that time passes through: operators as captured, each after the layouts it reads, then who reads last."""
        found: dict[int, None] = {}
        for op in self.space.graph.ops:
            if op.phase == phase:
                number = self.number["op", op.name]
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
        """What waits for what in a phase."""
        if phase not in self._dependencies:
            self._dependencies[phase] = Dependencies(self, phase)
        return self._dependencies[phase]

    @cached_property
    def _dependencies(self) -> dict[Phase, Dependencies]:
        return {}

    @cached_property
    def late(self) -> Mapping[int, np.ndarray]:
        """Of the edges whose reshards may be for the loss alone, the target's choices in which no operator waits for them."""
        graph, found, ends = self.space.graph, dict[int, np.ndarray](), self.ends_late
        kept = most_deferred_bytes(graph)
        for number, edge in enumerate(self.edges):
            target = self.nodes[edge.target]
            if edge.tensor is None or edge.phase != "forward" or target.kind not in ("op", "output", "layout"):
                continue
            readers = [target.name] if target.kind != "layout" else [one.name for one in self.sites[target.name].phases(graph)[0]]
            if ends and ends.issuperset(readers):
                small = np.array([pricing.local_bytes(edge.tensor, spec, self.space.machine) <= kept for spec in edge.targets])
                found[number] = small & np.array(target.late) if target.late else small
        return found

    @cached_property
    def ends_late(self) -> frozenset[str]:
        """Those for which nothing but the loss may wait (``deferred_loss``); none where the loss is no output, or nothing overlaps."""
        graph = self.space.graph
        waits = graph.loss is None or not self.space.machine.overlaps
        return frozenset() if waits else may_be_deferred(graph)

    @cached_property
    def spread(self) -> list[np.ndarray]:
        """For each node, bytes times life of each choice, above the least of them."""
        held = [np.array([sum((end - begin) * size for begin, end, size in items) for items in node.items], float) for node in self.nodes]
        return [sizes - sizes.min() for sizes in held]

    def _ties(self, priced: Priced) -> list[np.ndarray]:
        """What each node's choices count beside their price: of choices that cost the same, those that hold less come first."""
        least = sum(times * float(table.min()) for times, table in zip(self.node_times, priced.nodes, strict=True))
        most = sum(times * float(sizes.max()) for times, sizes in zip(self.node_times, self.spread, strict=True))
        share = TIES * max(least, 0.0) / most if most else 0.0
        return [share * sizes for sizes in self.spread]

    def connect(self, source: int, target: int, table: np.ndarray, share: float = 1.0, **more: Any) -> None:
        if share < 1.0:
            table = self.once((id(table), share), lambda: table * share, table)
        self.edges.append(Edge(source, target, table, share=share, **more))

    def problem(self, limit: int | None, weights: Weights | None = None) -> tuple[Problem, float]:
        """The integer problem and its unit in seconds: costs are rounded down to multiples of it, which lowers the bound.

        Args:
            weights: what each node and edge counts; seconds in sequence when not given.

        The unit is chosen so that the sum of the largest finite entries stays under 2**52. To costs come ``TIES`` of them at most.
        """
        priced = (weights or InSequence()).price(self)
        nodes, edges = self.counted([table + tie for table, tie in zip(priced.nodes, self._ties(priced), strict=True)], priced.edges)
        most = {id(table): largest(table) for table in {id(table): table for table in edges}.values()}
        unit = max(sum(map(largest, nodes)) + sum(most[id(table)] for table in edges), 1e-30) / 2**52
        costs = [integers(table, unit) for table in nodes]
        rounded: dict[int, np.ndarray] = {}
        for table in edges:
            if id(table) not in rounded:
                rounded[id(table)] = integers(table, unit).reshape(-1)
        edge_costs = np.concatenate([rounded[id(table)] for table in edges]) if edges else self._frame.edge_costs
        return replace(self._frame, costs=np.concatenate(costs), edge_costs=edge_costs, limit=limit), unit

    @cached_property
    def _frame(self) -> Problem:
        """The problem without prices: they are all that weights change."""
        nothing = {id(edge.seconds): np.zeros(edge.seconds.shape) for edge in self.edges}
        free = [np.zeros(len(node.seconds)) for node in self.nodes]
        nodes, tables = self.counted(free, [nothing[id(edge.seconds)] for edge in self.edges])
        edges = [(source, target, table.astype(np.int64)) for (source, target), table in zip(self.ends, tables, strict=True)]
        return Problem.build([cost.astype(np.int64) for cost in nodes], edges, items=self.held(), limit=0, name="plan")

    # What follows is told apart where equal layers are folded: see ``folded``.

    @property
    def ends(self) -> Sequence[tuple[int, int]]:
        """The nodes of the problem that each of its edges joins."""
        return [(edge.source, edge.target) for edge in self.edges]

    def counted(self, nodes: list[np.ndarray], edges: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What the problem's nodes and edges count, from what the model's do. Equal tables are one object."""
        return nodes, edges

    def held(self) -> Sequence[list[list[Item]]]:
        """Memory items of the choices of the problem's nodes."""
        return [node.items for node in self.nodes]

    @cached_property
    def homes(self) -> Sequence[int | None]:
        """The repeat of equal layers of each node, where such are told apart."""
        return [None] * len(self.nodes)

    @cached_property
    def node_times(self) -> np.ndarray:
        """How often each node stands in the graph that is planned."""
        return np.ones(len(self.nodes))

    @cached_property
    def edge_times(self) -> np.ndarray:
        """How often each edge does."""
        return np.ones(len(self.edges))

    @cached_property
    def times(self) -> Mapping[str, int]:
        """The time of memory items at which each operator of the graph that is planned runs."""
        return {op.name: time for time, op in enumerate(phases_in_order(self.space.graph))}

    def together(self, name: str) -> tuple[str, ...]:
        """The operators that run a second time where ``name`` does."""
        return (name,)

    @property
    def whole_graph(self) -> Graph:
        """The graph that is planned."""
        return self.space.graph

    def whole(self, assignment: Assignment) -> Assignment:
        """The assignment of the graph that is planned."""
        return assignment

    def short(self, assignment: Assignment) -> tuple[Sample, ...]:
        """The assignment in shorter graphs that tell what it costs in the graph that is planned; none where only that itself tells."""
        return ()

    def expand(self, choices: np.ndarray) -> np.ndarray:
        """A choice for each node, from one for each node of the problem."""
        return choices

    def restrict(self, choices: np.ndarray) -> np.ndarray:
        """The inverse of ``expand``."""
        return choices

    def whole_path(self, nodes: Sequence[int], edges: Sequence[int]) -> bool:
        """Whether a chain of dependencies is one in the graph that is planned, with everything on it as often as it stands there."""
        return True

    def rests(self, time: int) -> bool:
        """Whether at a time of memory items nothing runs that a node stands for beside its own."""
        return True

    def proved(self, weights: Weights, bound: float, optimum: float, budget: Budget, choices: np.ndarray) -> float:
        """The bound on all plans, given the bound and the answer of the problem under these weights: what it costs, and its choices."""
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
    """Everything counts: compute, communication and optimizer one after another.

    Args:
        shared: what is left of the price when equal reshards of one source are made once, at least: of n readers that take one source
            each their own way, at most n - 1 go the same way (else all would share a layout). For a bound; exact up to two readers.
    """

    shared: bool = False

    def price(self, model: Model) -> Priced:
        return Priced([node.seconds for node in model.nodes], [self._price(model, edge) for edge in model.edges])

    def _price(self, model: Model, edge: Edge) -> np.ndarray:
        if not self.shared or edge.readers <= 2:
            return edge.seconds
        return model.once((id(edge.seconds), edge.readers, "shared"), lambda: edge.seconds / (edge.readers - 1), edge.seconds)


def _without_masks(
    table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], sums: tuple[bool, ...] = ()
) -> np.ndarray:
    """A whole value becomes a partial sum only where it is added to one (``sums``): elsewhere that serves nothing."""
    has = np.array([set(spec.partial_axes) for spec in sources], dtype=object)
    masked = np.array([[bool(target.partial) and not set(target.partial_axes) <= mine for target in targets] for mine in has]) & ~np.array(
        sums or (False,) * len(targets)
    )
    return np.where(masked, IMPOSSIBLE, table) if masked.any() else table


def _free(table: np.ndarray) -> np.ndarray:
    """Only what costs nothing (slices) stays possible."""
    return np.where(table == 0.0, 0.0, IMPOSSIBLE)
