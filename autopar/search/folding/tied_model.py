"""Tied model of a folded graph: the representative's choice counts once per layer. A bound covers plans whose layers differ.

The *tied* problem has no nodes of the last representative. An edge between the two representatives joins the representative with itself,
and every cost counts as often as it stands in the whole graph. The optimum is that of plans whose layers between are equal: an answer, but
not a bound.

Lagrangian decomposition gives the bound. It cuts the chain of layers: where a layer reads a node s of its neighbour, it reads a *duplicate*
of s that may choose otherwise. For any potentials p over the choices of s, s pays p and its duplicate is paid p. Where both agree, the cost
stays the same. So the least costs of the pieces sum to a bound on all plans, with every layer between once, equal or not. A tensor that all
layers read has a free copy in each piece. Equal layers are equal pieces, so one is solved. Subgradient steps on the potentials bring a
layer and its duplicates to agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from autopar.effort import Budget
from autopar.graph import Graph, Phase
from autopar.schedule import Assignment
from autopar.schedule.scheduled_plan import Sample
from autopar.search.folding.fold import Folding
from autopar.search.folding.layer_groups import REPRESENTATIVE
from autopar.search.ilp.model import Model, Priced, Weights
from autopar.search.ilp.scaling import Item, scale_to_integers
from autopar.search.settings import (
    DECOMPOSITION_ENOUGH,
    DECOMPOSITION_LITTLE,
    DECOMPOSITION_SOLVE_GAP,
    IDLE_ROUNDS,
    LEAST_SOLVE_WORK,
    OUTSIDE_SHARE,
    ROUNDS,
)
from autopar.search.solving import solve
from autopar.search.thresholds import USUAL_THRESHOLDS, Thresholds
from autopar.solvers import Problem

Table = np.ndarray


@dataclass
class TiedModel(Model):
    """The model of a folded graph. Nodes and edges have the numbers of the folded graph, the last representative included."""

    folding: Folding | None = None
    thresholds: Thresholds = USUAL_THRESHOLDS

    @property
    def fold(self) -> Folding:
        assert self.folding is not None
        return self.folding

    @cached_property
    def repeat_of_node(self) -> list[int | None]:
        """The repeat of each node; None outside all repeats."""
        return [self.fold.group.repeat_of(node.name) for node in self.nodes]

    @cached_property
    def representative_node(self) -> dict[int, int]:
        """The node of the representative for each node of the last representative."""
        group = self.fold.group
        found = {}
        for (kind, name), number in self.node_number.items():
            if group.repeat_of(name) == group.last_representative:
                found[number] = self.node_number[kind, group.counterpart(name, REPRESENTATIVE)]
        return found

    @cached_property
    def tied_nodes(self) -> np.ndarray:
        """Numbers of the nodes in the tied problem."""
        return np.array([number for number in range(len(self.nodes)) if number not in self.representative_node], dtype=np.int64)

    @property
    def is_consistent(self) -> bool:
        """Whether both representatives offer the same choices at the same prices."""
        group = self.fold.group
        try:
            pairs = list(self.representative_node.items())
        except KeyError:
            return False
        nodes = [(self.nodes[one], self.nodes[other]) for one, other in pairs]
        alike = all(
            (one.specs, one.resting) == (other.specs, other.resting) and np.array_equal(one.seconds, other.seconds) for one, other in nodes
        )
        return (
            alike
            and len(pairs) == sum(home == REPRESENTATIVE for home in self.repeat_of_node)
            and group.last_representative > REPRESENTATIVE
        )

    @cached_property
    def node_counts(self) -> np.ndarray:
        between = {REPRESENTATIVE: float(self.fold.represented_count), self.fold.group.last_representative: 0.0}
        return np.array([1.0 if home is None else between.get(home, 1.0) for home in self.repeat_of_node])

    @cached_property
    def edge_counts(self) -> np.ndarray:
        last, found = self.fold.group.last_representative, np.ones(len(self.edges))
        for number, edge in enumerate(self.edges):
            ends = self.repeat_of_node[edge.source], self.repeat_of_node[edge.target]
            if set(ends) == {REPRESENTATIVE, last}:
                found[number] = self.fold.represented_count - 1
            elif ends in ((REPRESENTATIVE, REPRESENTATIVE), (None, REPRESENTATIVE), (REPRESENTATIVE, None)):
                found[number] = self.fold.represented_count
            elif ends in ((last, last), (None, last), (last, None)):
                found[number] = 0.0
        return found

    def unfold(self, assignment: Assignment) -> Assignment:
        if len(assignment.strategies) == len(self.planned_graph.ops):
            return assignment  # an assignment of the whole graph
        found = self.fold.unfold(assignment)
        assert found is not None, "a tied answer is alike in all layers between"
        return found

    def short_samples(self, assignment: Assignment) -> tuple[Sample, ...]:
        deep = len(self.fold.group.repeats) >= self.thresholds.deep_layers
        if not deep or len(assignment.strategies) == len(self.planned_graph.ops):
            return ()
        return self.fold.samples(assignment, self.thresholds.short_depths)

    @property
    def planned_graph(self) -> Graph:
        return self.fold.whole

    def expand(self, choices: np.ndarray) -> np.ndarray:
        found = np.zeros(len(self.nodes), dtype=np.int64)
        found[self.tied_nodes] = choices
        for one, other in self.representative_node.items():
            found[one] = found[other]
        return found

    def restrict(self, choices: np.ndarray) -> np.ndarray:
        found: np.ndarray = choices[self.tied_nodes]
        return found

    def is_planned_path(self, nodes: Sequence[int], edges: Sequence[int]) -> bool:
        """Whether a path of the folded graph is one of the whole graph once its part in the representative is repeated.

        Such a path enters and leaves both representatives at the same places.
        """
        last = self.fold.group.last_representative
        places: dict[int, list[int]] = {REPRESENTATIVE: [], last: []}
        crossings = 0
        for number in edges:
            edge = self.edges[number]
            source, target = self.repeat_of_node[edge.source], self.repeat_of_node[edge.target]
            crossings += {source, target} == {REPRESENTATIVE, last}
            if None in (source, target) and {source, target} & places.keys():
                return False  # such an edge counts in every layer, but a path passes it once
            if source != target:
                for home, node in ((source, edge.source), (target, edge.target)):
                    if home in places:
                        places[home].append(self.representative_node.get(node, node))
        if not any(self.repeat_of_node[node] in places for node in nodes) and not crossings:
            return True
        return crossings == 1 and len(places[REPRESENTATIVE]) == 2 and sorted(places[REPRESENTATIVE]) == sorted(places[last])

    @cached_property
    def _problem_edges(self) -> tuple[tuple[int, int, int], ...]:
        """Number of each edge that counts, and the places of its two nodes in the problem."""
        place = {int(number): index for index, number in enumerate(self.tied_nodes)}
        ends = [
            (place[self.representative_node.get(edge.source, edge.source)], place[self.representative_node.get(edge.target, edge.target)])
            for edge in self.edges
        ]
        return tuple((number, one, other) for number, (one, other) in enumerate(ends) if self.edge_counts[number] > 0.0)

    @cached_property
    def edge_ends(self) -> Sequence[tuple[int, int]]:
        return [(one, other) for _, one, other in self._problem_edges if one != other]

    def problem_costs(self, nodes: list[Table], edges: list[Table]) -> tuple[list[Table], list[Table]]:
        """Costs of the problem. An edge of a node with itself becomes a part of the node's cost."""
        costs, tables = [self.node_counts[number] * nodes[number] for number in self.tied_nodes], list[Table]()
        scaled: dict[tuple[int, float], Table] = {}
        for number, one, other in self._problem_edges:
            key = id(edges[number]), float(self.edge_counts[number])
            if key not in scaled:
                scaled[key] = key[1] * edges[number]
            if one == other:
                costs[one] = costs[one] + np.diagonal(scaled[key])
            else:
                tables.append(scaled[key])
        return costs, tables

    def problem_items(self) -> Sequence[list[list[Item]]]:
        return [self._items_of(int(number)) for number in self.tied_nodes]

    def _items_of(self, number: int) -> list[list[tuple[int, int, int]]]:
        """Memory items of a node, with those that it stands for.

        A node of the representative holds for the last representative as well, and for the layers left out while none of these runs. While
        they run, they hold no more than both representatives do.
        """
        if self.repeat_of_node[number] != REPRESENTATIVE:
            return self.nodes[number].items
        items, last_ends = self.nodes[number].items, self.nodes[self._last_nodes[number]].items
        return [[*one, *other, *self._items_left_out(one)] for one, other in zip(items, last_ends, strict=True)]

    @cached_property
    def _last_nodes(self) -> Mapping[int, int]:
        return {other: one for one, other in self.representative_node.items()}

    def _items_left_out(self, items: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Items of all layers left out while none of them runs, given the items of the representative."""
        layers, found = len(self.fold.group.left_out), []
        for begin, end, moment in self._idle_times:
            usage = sum(size for first, last, size in items if first <= moment < last)
            if usage and end > begin:
                found.append((begin, end, layers * usage))
        return found

    @cached_property
    def _idle_times(self) -> tuple[tuple[int, int, int], ...]:
        """(begin, end, moment) of the times before the representative ends in forward, from there until it begins in backward, and after
        that.

        No layer between runs at ``moment``.
        """
        ops = self.space.graph.ops
        phases: tuple[Phase, ...] = ("forward", "backward")
        names = self.fold.group.repeats[REPRESENTATIVE]
        forward, backward = ([self.op_times[name] for name in names if self.space.graph.op[name].phase == phase] for phase in phases)
        middle, end = sum(op.phase == "forward" for op in ops), len(ops) + 1
        first, last = max(forward, default=0) + 1, min(backward, default=middle)
        return (0, first, 0), (first, last, middle), (last, end, end - 1)

    @cached_property
    def op_times(self) -> Mapping[str, int]:
        """Time of each operator of the whole graph. A layer left out runs with the nearer one of the two representatives."""
        group, found = self.fold.group, dict(super().op_times)
        for repeat in group.left_out:
            near = REPRESENTATIVE if repeat - REPRESENTATIVE < group.last_representative - repeat else group.last_representative
            found.update((name, found[one]) for name, one in zip(group.repeats[repeat], group.repeats[near], strict=True))
        return found

    def is_idle(self, time: int) -> bool:
        """Whether a time lies between forward and backward of all layers that the representative stands for."""
        group, graph = self.fold.group, self.space.graph
        names = [name for repeat in (REPRESENTATIVE, group.last_representative) for name in group.repeats[repeat]]
        forward, backward = ([self.op_times[name] for name in names if graph.op[name].phase == phase] for phase in ("forward", "backward"))
        return max(forward, default=-1) < time < min(backward, default=len(graph.ops) + 1)

    def recomputed_together(self, name: str) -> tuple[str, ...]:
        group = self.fold.group
        home = group.repeat_of(name)
        return (
            (name, group.counterpart(name, group.last_representative + REPRESENTATIVE - home))
            if home in (REPRESENTATIVE, group.last_representative)
            else (name,)
        )

    @cached_property
    def potentials(self) -> dict[int, Table]:
        """The best potentials so far: a warm start, since successive weights differ little."""
        return {}

    def prove_bound(self, weights: Weights, bound: float, optimum: float, budget: Budget, choices: np.ndarray) -> float:
        return min(bound, Decomposition(self, weights.price(self)).bound(optimum, budget, choices, bound))


def tie_model(model: Model, folding: Folding, thresholds: Thresholds = USUAL_THRESHOLDS) -> TiedModel | None:
    """The tied model of a folded graph; None where both representatives do not offer the same choices."""
    made = TiedModel(**{item.name: getattr(model, item.name) for item in fields(model)}, folding=folding, thresholds=thresholds)
    return made if made.is_consistent else None


class Subproblem:
    """One subproblem: nodes with costs, edges, and the nodes that pay or are paid the potential of each source."""

    def __init__(self) -> None:
        self.costs: list[Table] = []
        self.edges: list[tuple[int, int, Table]] = []
        self.place: dict[int | tuple[str, int], int] = {}
        self.pays: dict[int, list[int]] = {}
        self.paid: dict[int, list[int]] = {}

    def add_node(self, key: int | tuple[str, int], cost: Table) -> int:
        if key not in self.place:
            self.place[key] = len(self.costs)
            self.costs.append(cost)
        return self.place[key]

    def cost(self, choices: np.ndarray) -> float:
        """The cost of this piece for one choice per node of the model. A duplicate chooses as its original does."""
        mine = [int(choices[key[1] if isinstance(key, tuple) else key]) for key in self.place]
        nodes = sum(float(cost[choice]) for cost, choice in zip(self.costs, mine, strict=True))
        return nodes + sum(float(table[mine[one], mine[other]]) for one, other, table in self.edges)

    def solve(self, potentials: Mapping[int, Table], budget: Budget) -> tuple[float, Table | None]:
        """The bound under these potentials, in seconds, and the choices of the solution."""
        costs = list(self.costs)
        for sign, places in ((1.0, self.pays), (-1.0, self.paid)):
            for source, nodes in places.items():
                for node in nodes:
                    costs[node] = costs[node] + sign * potentials[source]
        least = [float(cost[np.isfinite(cost)].min(initial=0.0)) for cost in costs]
        seconds = [cost - low for cost, low in zip(costs, least, strict=True)]
        integers, tables, unit = scale_to_integers(seconds, [table for _, _, table in self.edges])
        edges = [(source, target, table) for (source, target, _), table in zip(self.edges, tables, strict=True)]
        problem = Problem.build(integers, edges, name="plan")
        found = solve(problem, budget, gap=DECOMPOSITION_SOLVE_GAP, patient=False)
        return found.bound * unit + sum(least), found.choices


class Decomposition:
    """The chain of layers cut in two pieces: one layer between, and the outside.

    The outside holds the first layer, the representative, the last representative and the last layer, and all that is in no layer.
    """

    def __init__(self, model: TiedModel, priced: Priced) -> None:
        self.model, self.priced = model, priced
        self.times = model.fold.represented_count - 2
        self.outside, self.layer = Subproblem(), Subproblem()
        self.sources: list[int] = []
        for number in model.tied_nodes:
            self.outside.add_node(int(number), priced.nodes[number])
            if model.repeat_of_node[number] == REPRESENTATIVE:
                self.outside.add_node(("last", int(number)), priced.nodes[number])
                self.layer.add_node(int(number), priced.nodes[number])
        for number, edge in enumerate(model.edges):
            self._connect(edge.source, edge.target, priced.edges[number])

    def _connect(self, source: int, target: int, table: Table) -> None:
        model, outside, layer = self.model, self.outside, self.layer
        homes, last = (model.repeat_of_node[source], model.repeat_of_node[target]), model.fold.group.last_representative
        one, other = (model.representative_node.get(end, end) for end in (source, target))
        if set(homes) == {REPRESENTATIVE, last}:
            forward = homes[0] == REPRESENTATIVE
            if one not in self.sources:
                self.sources.append(one)
                outside.pays.setdefault(one, []).append(outside.place[one if forward else ("last", one)])
                layer.pays.setdefault(one, []).append(layer.place[one])
                for piece in (outside, layer):
                    duplicate = piece.add_node(("duplicate", one), np.zeros(len(self.priced.nodes[one])))
                    piece.paid.setdefault(one, []).append(duplicate)
            reader = ("last", other) if forward else other
            outside.edges.append((outside.place["duplicate", one], outside.place[reader], table))
            layer.edges.append((layer.place["duplicate", one], layer.place[other], table))
        elif last in homes:
            if homes in ((last, last), (None, last), (last, None)):
                return  # the representative has the same edge
            ends: list[int | tuple[str, int]] = [
                ("last", model.representative_node[end]) if end in model.representative_node else end for end in (source, target)
            ]
            outside.edges.append((outside.place[ends[0]], outside.place[ends[1]], table))
        else:
            outside.edges.append((outside.place[source], outside.place[target], table))
            if REPRESENTATIVE in homes and all(home in (REPRESENTATIVE, None) for home in homes):
                last_ends: list[int | tuple[str, int]] = [
                    ("last", end) if model.repeat_of_node[end] == REPRESENTATIVE else end for end in (source, target)
                ]
                outside.edges.append((outside.place[last_ends[0]], outside.place[last_ends[1]], table))
                ends_here = [layer.add_node(end, np.zeros(len(self.priced.nodes[end]))) for end in (source, target)]
                layer.edges.append((ends_here[0], ends_here[1], table))

    def bound(self, optimum: float, budget: Budget, tied: np.ndarray, wanted: float) -> float:
        """The best bound found within about the budget, in seconds.

        The layer is the smaller piece and most of the bound. So steps follow its solutions alone, until it lacks little; then the outside
        is solved too. The step size is Polyak's: what the bound lacks, over the squared norm of the subgradient.

        Args:
            optimum: cost of the tied problem, in seconds: the target of the steps.
            tied: the choices of that cost, one per node. Potentials do not change their cost.
            wanted: a bound beyond which none is better.
        """
        wanted = min(wanted, optimum * (1 - DECOMPOSITION_ENOUGH))
        inside = budget.share(1 - OUTSIDE_SHARE)
        start = self.model.potentials
        potentials = {source: start.get(source, np.zeros(len(self.priced.nodes[source]))) for source in self.sources}
        best, kept, aim = -np.inf, potentials, self.layer.cost(tied)
        most, idle = -np.inf, 0
        for step in range(ROUNDS):
            inner, chosen = self.layer.solve(potentials, inside.at_least(LEAST_SOLVE_WORK))
            lacks = self.times * (aim - inner)
            idle = 0 if inner > most else idle + 1
            most = max(most, inner)
            last = step + 1 == ROUNDS or idle == IDLE_ROUNDS or inside.over or chosen is None
            found = {id(self.layer): chosen}
            little = lacks <= max(DECOMPOSITION_LITTLE * optimum, (optimum - wanted) / 2)
            agrees = little or not any(table.any() for table in self._slope(potentials, found).values())
            if last or agrees:
                outer, around = self.outside.solve(potentials, budget.at_least(LEAST_SOLVE_WORK))
                found[id(self.outside)] = around
                value = outer + self.times * inner
                if value > best:
                    best, kept = value, potentials
                if last or around is None or best >= wanted or budget.over:
                    break
                lacks = optimum - value
            slope = self._slope(potentials, found)
            size = sum(float((table**2).sum()) for table in slope.values())
            if size == 0.0:
                break
            potentials = {source: table + lacks / size * slope[source] for source, table in potentials.items()}
        self.model.potentials.update(kept)
        return best

    def _slope(self, potentials: Mapping[int, Table], chosen: Mapping[int, Table | None]) -> dict[int, Table]:
        """Subgradient of the bound in each potential, over the pieces that were solved."""
        slope = {source: np.zeros(len(table)) for source, table in potentials.items()}
        for piece, times in ((self.layer, self.times), (self.outside, 1)):
            answer = chosen.get(id(piece))
            if answer is None:
                continue
            for sign, places in ((1.0, piece.pays), (-1.0, piece.paid)):
                for source, nodes in places.items():
                    for node in nodes:
                        slope[source][answer[node]] += sign * times
        return slope
