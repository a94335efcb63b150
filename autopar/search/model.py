"""Graph x choices -> Problem.

Nodes and what their choice means:

========  ==========================================================================================================
``input``  a graph input (parameter, buffer, argument, tangent): its spec. A parameter's gradient and optimizer state share it.
``op``     an operator: its strategy.
``output`` an output of the model: the spec it leaves with.
``layout`` a tensor as its readers of one phase share it: resharded once from what the producer made, whoever reads it.
``saved``  what backward keeps of a tensor made in forward: the producer's version or the layout's, or a free slice of either.
           For a gathered weight this is the choice between keeping it and gathering it again.
========  ==========================================================================================================

A reader whose strategy needs another spec than the layout it reads pays a reshard of its own. Edges hold seconds.
Memory: see ``lives``. What is left out there (a value next to its copy, the buffers of collectives, what is gathered ahead) makes the
model ask for less memory than the program, not more: the bound stays true, and the program's own peak decides in ``find_plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from autopar.graph import Graph, Phase, Tensor
from autopar.rules import is_alias
from autopar.schedule import OUTPUT, Assignment
from autopar.search.lives import add_lives
from autopar.search.space import IMPOSSIBLE, Space
from autopar.sharding import ShardingSpec
from solvers import INFINITE, Problem

TIES = 1e-7
"""Share of the cost of every plan that bytes times life may add to a problem, so that ties go to less memory."""

Kind = Literal["input", "op", "output", "layout", "saved"]
Side = Literal["ahead", "between", "behind"]
Item = tuple[int, int, int]


@dataclass
class Node:
    """One node of the problem: seconds and memory items of each choice, and the spec it gives to a tensor (if it is of one tensor)."""

    kind: Kind
    name: str
    seconds: np.ndarray
    specs: tuple[ShardingSpec, ...] = ()
    phase: Phase = "forward"
    from_layout: tuple[bool, ...] = ()
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
    """The nodes of one tensor: its producer, its forward layout, what is saved, its backward layout (None where not needed)."""

    tensor: str
    producer: int
    specs: tuple[ShardingSpec, ...]
    readers: list[Reader]
    forward: int | None = None
    saved: int | None = None
    backward: int | None = None

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
        side: where the reshard stands beside the operators: ``ahead`` of them, since its source is there when the phase begins,
            ``behind``, since nobody in the phase reads its result, or ``between``.
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
        loads = self.space.load_table(edge.tensor, edge.sources, edge.targets, link)
        return self.once(
            (id(edge.seconds), link), lambda: np.where(np.isfinite(edge.seconds) & (edge.seconds > 0.0), loads, 0.0), edge.seconds
        )  # fmt: skip

    def copies(self, edge: Edge) -> np.ndarray:
        """Seconds of the copies of an edge's reshards; 0 where nothing is resharded."""
        assert edge.tensor is not None
        copies = self.space.copy_table(edge.tensor, edge.sources, edge.targets)
        return self.once(
            (id(edge.seconds), "copies"), lambda: np.where(np.isfinite(edge.seconds) & (edge.seconds > 0.0), copies, 0.0), edge.seconds
        )  # fmt: skip

    def least_copies(self, edge: Edge) -> np.ndarray:
        """What the copies of an edge's reshards add to the operators' work at least, in any bucket."""
        assert edge.tensor is not None
        least = self.space.least_copy_table(edge.tensor, edge.sources, edge.targets)
        return self.once(
            (id(edge.seconds), "least"), lambda: np.where(np.isfinite(edge.seconds) & (edge.seconds > 0.0), least, 0.0), edge.seconds
        )  # fmt: skip

    def node_loads(self, node: Node) -> Mapping[str, np.ndarray]:
        """Seconds for which an operator's inner collectives hold each link they hold at all."""
        return {link: load for link, load in self.space.op_choices(self.space.graph.op[node.name]).loads.items() if load.any()}

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

    @cached_property
    def spread(self) -> list[np.ndarray]:
        """For each node, bytes times life of each choice, above the least of them."""
        held = [np.array([sum((end - begin) * size for begin, end, size in items) for items in node.items], float) for node in self.nodes]
        return [sizes - sizes.min() for sizes in held]

    def _ties(self, priced: Priced) -> list[np.ndarray]:
        """What each node's choices count beside their price: of choices that cost the same, those that hold less come first."""
        least = sum(float(table.min()) for table in priced.nodes)
        most = sum(float(sizes.max()) for sizes in self.spread)
        share = TIES * max(least, 0.0) / most if most else 0.0
        return [share * sizes for sizes in self.spread]

    def connect(self, source: int, target: int, table: np.ndarray, **more: Any) -> None:
        self.edges.append(Edge(source, target, table, **more))

    def problem(self, limit: int | None, weights: Weights | None = None) -> tuple[Problem, float]:
        """The integer problem and its unit in seconds: costs are rounded down to multiples of it, which lowers the bound.

        Args:
            weights: what each node and edge counts; seconds in sequence when not given.

        The unit is chosen so that the sum of the largest finite entries stays under 2**52. To costs come ``TIES`` of them at most.
        """
        priced = (weights or InSequence()).price(self)
        edges = [(edge.source, edge.target, table) for edge, table in zip(self.edges, priced.edges, strict=True)]
        costs = [table + tie for table, tie in zip(priced.nodes, self._ties(priced), strict=True)]
        return in_units(costs, edges, [node.items for node in self.nodes], limit)

    # What follows is told apart where equal layers are folded: see ``folded``.

    @cached_property
    def node_times(self) -> np.ndarray:
        """How often each node stands in the graph that is planned."""
        return np.ones(len(self.nodes))

    @cached_property
    def edge_times(self) -> np.ndarray:
        """How often each edge does."""
        return np.ones(len(self.edges))

    @property
    def whole_graph(self) -> Graph:
        """The graph that is planned."""
        return self.space.graph

    def whole(self, assignment: Assignment) -> Assignment:
        """The assignment of the graph that is planned."""
        return assignment

    def expand(self, choices: np.ndarray) -> np.ndarray:
        """A choice for each node, from one for each node of the problem."""
        return choices

    def restrict(self, choices: np.ndarray) -> np.ndarray:
        """The inverse of ``expand``."""
        return choices

    def whole_path(self, nodes: Sequence[int], edges: Sequence[int]) -> bool:
        """Whether a chain of dependencies is one in the graph that is planned, with everything on it as often as it stands there."""
        return True

    def proved(self, weights: Weights, bound: float, optimum: float, seconds: float) -> float:
        """The bound on all plans, given the bound and the answer of the problem under these weights."""
        return bound


def in_units(
    costs: Sequence[np.ndarray], edges: Sequence[tuple[int, int, np.ndarray]], items: Sequence[list[list[Item]]] | None, limit: int | None
) -> tuple[Problem, float]:
    """The integer problem of seconds, and its unit: see ``Model.problem``."""
    tables = {id(table): table for _, _, table in edges}
    most = {key: _largest(table) for key, table in tables.items()}
    unit = max(sum(map(_largest, costs)) + sum(most[id(table)] for _, _, table in edges), 1e-30) / 2**52
    rounded = {key: _integers(table, unit) for key, table in tables.items()}
    numbered = [(source, target, rounded[id(table)]) for source, target, table in edges]
    return Problem.build([_integers(cost, unit) for cost in costs], numbered, items=items, limit=limit, name="plan"), unit


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


def _largest(table: np.ndarray) -> float:
    finite = table[np.isfinite(table)]
    return float(finite.max()) if finite.size else 0.0


def _integers(table: np.ndarray, unit: float) -> np.ndarray:
    finite = np.isfinite(table)
    return np.where(finite, np.floor(np.where(finite, table, 0.0) / unit), INFINITE).astype(np.int64)


def build_model(space: Space) -> Model:
    """All nodes and edges of ``space.graph``."""
    model = Model(space)
    times = {op.name: time for time, op in enumerate(sorted(space.graph.ops, key=lambda op: op.phase == "backward"))}
    _add_inputs(model)
    _add_ops(model)
    _add_outputs(model)
    for tensor, readers in _readers(model, times).items():
        _add_site(model, tensor, readers)
    add_lives(model, times)
    return model


def _add_inputs(model: Model) -> None:
    space = model.space
    for item in space.graph.inputs:
        specs = space.input_specs(item)
        model.add(Node("input", item.tensor, space.input_seconds(item, specs), specs))


def _add_ops(model: Model) -> None:
    for op in model.space.graph.ops:
        model.add(Node("op", op.name, model.space.op_choices(op).seconds, phase=op.phase))


def _add_outputs(model: Model) -> None:
    space = model.space
    for index, output in enumerate(space.graph.outputs):
        if output.kind == "output":
            specs = space.output_specs(index)
            node = model.add(Node("output", f"{OUTPUT}{index}", np.zeros(len(specs)), specs))
            for item in space.graph.of_kind("tangent"):
                if item.name == output.name:
                    tangent = model.number["input", item.tensor]
                    model.connect(node, tangent, space.equality_table(specs, model.nodes[tangent].specs))


def _readers(model: Model, times: Mapping[str, int]) -> dict[str, list[Reader]]:
    """Everybody who reads each tensor: operators, outputs, and parameters (their gradient) or buffers (their new value)."""
    graph = model.space.graph
    found: dict[str, list[Reader]] = {name: [] for name in graph.tensors}
    for op in graph.ops:
        choices = model.space.op_choices(op)
        node = model.number["op", op.name]
        for position, tensor in enumerate(op.inputs):
            sums = tuple(sum(bool(spec.partial) for spec in strategy.inputs) > 1 for strategy in choices.strategies)
            reader = Reader(node, choices.inputs(position), op.name, position, op.phase, times[op.name], is_alias(op), sums)
            found[tensor].append(reader)
    named = {item.name: item.tensor for item in graph.inputs}
    for index, output in enumerate(graph.outputs):
        name = f"{OUTPUT}{index}"
        node = model.number["output", name] if output.kind == "output" else model.number["input", named[output.name]]
        producer = graph.producer.get(output.tensor)
        phase: Phase = "backward" if output.kind == "gradient" or (producer and producer.phase == "backward") else "forward"
        time = times[producer.name] if producer else 0
        found[output.tensor].append(Reader(node, model.nodes[node].specs, name, 0, phase, time, False))
    return found


def _add_site(model: Model, tensor: str, readers: list[Reader]) -> None:
    space, graph = model.space, model.space.graph
    producer = graph.producer.get(tensor)
    pinned = space.pins.tensors.get(tensor)
    if producer:
        source = model.number["op", producer.name]
        specs = space.op_choices(producer).outputs(producer.outputs.index(tensor))
    else:
        source = model.number["input", tensor]
        specs = model.nodes[source].specs
    site = model.sites[tensor] = Site(tensor, source, specs, readers)
    early, late = site.phases(graph)
    current, current_specs = source, specs
    if early and (len(early) > 1 or late or pinned):
        site.forward = _add_layout(model, site, "forward", source, specs, early, pinned)
        layout = model.nodes[site.forward]
        _connect_readers(model, tensor, site.forward, layout.specs, early, "forward")
        if late:
            site.saved = _add_saved(model, site, layout)
            current, current_specs = site.saved, model.nodes[site.saved].specs
    elif early:
        _connect_readers(model, tensor, source, specs, early, "forward")
    if len(late) > 1 or (late and pinned and not early):
        site.backward = _add_layout(model, site, "backward", current, current_specs, late, pinned if not early else None)
        current, current_specs = site.backward, model.nodes[site.backward].specs
    _connect_readers(model, tensor, current, current_specs, late, "backward")


def _add_layout(
    model: Model, site: Site, phase: Phase, source: int, specs: tuple[ShardingSpec, ...], readers: list[Reader], pinned: ShardingSpec | None
) -> int:
    wanted = dict.fromkeys(spec for reader in readers for spec in reader.specs)
    if pinned:
        wanted = {pinned: None}
    elif len(readers) > 1:
        wanted.update(dict.fromkeys(specs))
    chosen, whole = tuple(wanted), model.space.graph.tensors[site.tensor]
    table = model.masked(model.space.reshard_table(whole, specs, chosen), specs, chosen)
    reachable = np.isfinite(table).any(axis=0)
    if not reachable.all():
        chosen = tuple(spec for spec, keep in zip(chosen, reachable, strict=True) if keep)
        table = model.masked(model.space.reshard_table(whole, specs, chosen), specs, chosen)
    node = model.add(Node("layout", site.tensor, np.zeros(len(chosen)), chosen, phase))
    side = _side(model, source, phase, all(reader.name.startswith(OUTPUT) for reader in readers))
    model.side_of_layout[node] = side
    model.connect(source, node, table, phase=phase, tensor=whole, sources=specs, targets=chosen, side=side)
    return node


def _side(model: Model, source: int, phase: Phase, leaves: bool) -> Side:
    """Where a reshard of what ``source`` gives stands: see ``Edge``. A layout stands where its own reshard does."""
    node = model.nodes[source]
    if node.kind == "layout" and node.phase == phase:
        return "ahead" if model.side_of_layout[source] == "ahead" else "behind" if leaves else "between"
    if node.kind in ("input", "saved") or node.phase != phase:
        return "ahead"
    return "behind" if leaves else "between"


def _connect_readers(
    model: Model, tensor: str, source: int, specs: tuple[ShardingSpec, ...], readers: list[Reader], phase: Phase
) -> None:  # fmt: skip
    """Edges from what is shared to each reader.

    A layout with one reader is that reader's reshard: equality. A view that can take the spec as it is does so:
    the same reshard after it costs the same.
    """
    alone = len(readers) == 1 and model.nodes[source].kind == "layout"
    for reader in readers:
        if alone and not model.space.pins.tensors.get(tensor):
            model.connect(source, reader.node, model.space.equality_table(specs, reader.specs), phase=phase)
            continue
        whole = model.space.graph.tensors[tensor]
        table = model.masked(model.space.reshard_table(whole, specs, reader.specs), specs, reader.specs, reader.sums)
        if reader.follows:
            table = model.followed(table, specs, reader.specs)
        model.connect(
            source, reader.node, table, phase=phase, tensor=whole, sources=specs, targets=reader.specs, readers=len(readers),
            side=_side(model, source, phase, reader.name.startswith(OUTPUT)),
        )  # fmt: skip


def _without_masks(
    table: np.ndarray, sources: tuple[ShardingSpec, ...], targets: tuple[ShardingSpec, ...], sums: tuple[bool, ...] = ()
) -> np.ndarray:
    """A whole value becomes a partial sum only where it is added to one (``sums``): elsewhere that serves nothing."""
    has = np.array([set(spec.partial_axes) for spec in sources], dtype=object)
    masked = np.array([[bool(target.partial) and not set(target.partial_axes) <= mine for target in targets] for mine in has]) & ~np.array(
        sums or (False,) * len(targets)
    )
    return np.where(masked, IMPOSSIBLE, table) if masked.any() else table


def _add_saved(model: Model, site: Site, layout: Node) -> int:
    """What backward keeps: (spec, made from the layout rather than from the producer's version, which has another spec then)."""
    space = model.space
    tensor = space.graph.tensors[site.tensor]
    stored = site.tensor not in space.graph.producer
    own = tuple(dict.fromkeys(spec for spec in site.specs if not spec.partial)) or tuple(dict.fromkeys(site.specs))
    made = tuple(spec for spec in layout.specs if not spec.partial) or layout.specs
    specs = (*own, *made)
    from_layout = (False,) * len(own) + (True,) * len(made)
    node = model.add(Node("saved", site.tensor, np.zeros(len(specs)), specs, "forward", from_layout))
    choice = np.array(from_layout)
    same = space.equality_table(site.specs, specs)
    table = same if stored else model.once_free(space.reshard_table(tensor, site.specs, specs))
    model.connect(site.producer, node, model.once((id(table), from_layout, "own"), lambda: _own(table, same, choice), table))
    shared = model.once_free(space.reshard_table(tensor, layout.specs, specs))
    assert site.forward is not None
    model.connect(site.forward, node, model.once((id(shared), from_layout, "made"), lambda: np.where(choice, shared, 0.0), shared))
    return node


def _own(table: np.ndarray, same: np.ndarray, from_layout: np.ndarray) -> np.ndarray:
    """From the producer's version where the choice is of it; else another spec than it has."""
    return np.where(from_layout[None, :], np.where(same == 0.0, IMPOSSIBLE, 0.0), table)


def _free(table: np.ndarray) -> np.ndarray:
    """Only what costs nothing (slices) stays possible."""
    return np.where(table == 0.0, 0.0, IMPOSSIBLE)
