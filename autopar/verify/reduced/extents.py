"""Extents: for every dim of a graph the number that it is divided by.

A dim is a product of factors, as its operators' rules say, and one factor is one number in all operators that hand it on: unknowns that are
equal are one unknown, and a dim of several factors gives an equation between the numbers of the dim and of its factors. A number divides
all that is said of it: the dim, each rank's part of it in every spec and on every step of a reshard, the lengths of slices. Two entries are
left of each dim, and of each rank's part where there is memory, so that a wrong order shows inside parts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from autopar.graph import Op, Tensor
from autopar.rules import find_rule, looked_up
from autopar.rules.expansion import plain_factors, way_of
from autopar.schedule import Schedule
from autopar.sharding import ShardingSpec, Strategy
from autopar.verify.reduced.relations import Place, call_with_shapes, places, relation_of

Node = tuple[str, int | str]
"""A tensor and one of its dims, or an operator (``op:NAME``) and one of its factors."""
MOST_BRANCHES = 4096
"""Ways to divide several dims by a prime together that are tried for one dim."""


@dataclass
class Unknown:
    """The number that a dim and all that is equal to it are divided by.

    Args:
        extent: of the largest of its dims.
        divides: what it must divide.
        most: the largest that it may be.
        reason: where it is held fast, for messages.
        shown: a dim of it, for messages.
    """

    extent: int
    divides: int
    most: int
    reason: str
    shown: Node
    value: int = 1

    @property
    def room(self) -> int:
        """How much larger it may get."""
        return min(self.divides, self.most) // self.value


@dataclass(frozen=True)
class Kept:
    """A dim that keeps its size.

    Args:
        where: the tensor and the dim.
        size: its entries.
        reason: what holds it: an operator and the user's line, or unequal parts.
    """

    where: str
    size: int
    reason: str


class Extents:
    """The unknowns of a schedule's graph, solved when made.

    Args:
        schedule: whose specs and steps bound them.
        held: operators whose dims keep their sizes, with the reason: what is known of them did not hold.
        least: entries that are left of each rank's part of a dim, where it has as many.
        apart: whether dims of different sizes stay different, where one can be larger by itself: a dim that is taken for another one then
            shows in shapes too.
    """

    def __init__(self, schedule: Schedule, held: Mapping[str, str], least: int = 2, apart: bool = True) -> None:
        self.schedule, self.graph, self.held, self.least = schedule, schedule.graph, held, least
        self.parent: dict[Node, Node] = {}
        self.known: dict[Node, Unknown] = {}
        self.equations: list[tuple[list[Node], list[Node]]] = []
        for op in self.graph.ops:
            self._of_operator(op)
        self._of_specs()
        self._of_steps()
        self._of_equal_layers()
        self.unknowns = {root: self.known[root] for root in self.known if self._root(root) == root}
        self.sides = self._sides()
        self.in_sides: dict[Node, list[int]] = {}
        for number, sides in enumerate(self.sides):
            for node in {*sides[0], *sides[1]}:
                self.in_sides.setdefault(node, []).append(number)
        self._solve()
        if apart:
            self._spread()

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The reduced shape of a tensor."""
        return tuple([self.size((tensor, dim), extent) for dim, extent in enumerate(self.graph.tensors[tensor].shape)])

    def size(self, node: Node, extent: int) -> int:
        """What is left of an extent."""
        return extent // self.divisor(node)

    def divisor(self, node: Node) -> int:
        """The number that a dim or a factor is divided by."""
        return self.unknowns[self._root(node)].value if node in self.parent else 1

    def kept(self, above: int) -> Iterator[Kept]:
        """The dims that are held, of more than ``above`` entries, the largest first, one of each unknown."""
        found = [item for item in self.unknowns.values() if item.reason and item.extent > above and isinstance(item.shown[1], int)]
        for item in sorted(found, key=lambda item: -item.extent):
            name, dim = item.shown
            yield Kept(f"dim {dim} of {name}", item.extent, item.reason)

    # --- unknowns and what bounds them ---

    def _node(self, node: Node, extent: int) -> Node:
        if node not in self.parent:
            self.parent[node] = node
            self.known[node] = Unknown(extent, extent, max(1, extent // 2), "", node)
        return node

    def _root(self, node: Node) -> Node:
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def _unite(self, one: Node, other: Node) -> None:
        one, other = self._root(one), self._root(other)
        if one != other:
            self.parent[other] = one
            a, b = self.known[one], self.known[other]
            shown = a.shown if isinstance(a.shown[1], int) and a.extent >= b.extent else b.shown
            self.known[one] = Unknown(
                max(a.extent, b.extent), math.gcd(a.divides, b.divides), min(a.most, b.most), a.reason or b.reason, shown
            )  # fmt: skip

    def _bound(self, node: Node, length: int, least: int | None = None) -> None:
        """The number divides ``length``, and at least ``least`` are left of it."""
        known = self.known[self._root(node)]
        divides, most = math.gcd(known.divides, length), min(known.most, max(1, length // (self.least if least is None else least)))
        if (divides, most) != (known.divides, known.most):
            known.divides, known.most = divides, most

    def _hold(self, node: Node, reason: str) -> None:
        self._bound(node, 1)
        known = self.known[self._root(node)]
        known.reason = known.reason or reason

    def _dims(self, tensor: Tensor) -> list[Node | None]:
        return [self._node((tensor.name, dim), extent) if extent > 1 else None for dim, extent in enumerate(tensor.shape)]

    def _of_operator(self, op: Op) -> None:
        rule = find_rule(op, self.graph.tensors)
        names = (*op.inputs, *op.outputs)
        dims = [self._dims(self.graph.tensors[name]) for name in names]
        where = f"{op.target.removesuffix('.default')} at {op.location or op.name}"
        own = f"op:{op.name}"
        whole: dict[Place, Node] = {}
        for number, (term, nodes) in enumerate(zip(rule.inputs + rule.outputs, dims, strict=True)):
            for dim, (factors, node) in enumerate(zip(term, nodes, strict=True)):
                if node is None:
                    continue
                extent = self.graph.tensors[names[number]].shape[dim]
                if not factors:
                    whole[number, dim] = node
                    continue
                parts = [self._node((own, name), rule.extent[name]) for name in factors if name != "_"]
                if "_" in factors:
                    rest = extent // math.prod(rule.extent[name] for name in factors if name != "_")
                    parts.append(self._node((own, f"_{number}.{dim}"), rest))
                if len(parts) == 1:
                    self._unite(node, parts[0])
                else:
                    self.equations.append(([node], parts))
        self._of_whole(op, whole, where)
        for node in {node for nodes in dims for node in nodes if node} if op.name in self.held else ():
            self._hold(node, self.held[op.name])
        if op.target.split(".")[1] in ("view", "_unsafe_view", "reshape", "view_copy"):
            self.equations.append(([node for node in dims[0] if node], [node for node in dims[1] if node]))
        strategy = self.schedule.operations[op.name].strategy
        self._of_factors(own, rule.extent, strategy)

    def _of_whole(self, op: Op, whole: Mapping[Place, Node], where: str) -> None:
        """The dims that no factor stands for."""
        found = call_with_shapes(op, self.graph.tensors)
        if found is None:
            for node in whole.values():
                self._hold(node, where)
            return
        relation = relation_of(*found)
        for number, group in enumerate(relation.tied):
            there = [whole[place] for place in group if place in whole]
            for one, other in pairwise(there):
                self._unite(one, other)
            for which, length in relation.lengths:
                if there and which == number:
                    self._bound(there[0], length, least=1)
        lookup = looked_up(op)
        free = self._is_given(op, lookup.numbers) if lookup is not None else False
        spoken = set(places(relation))
        for place, node in whole.items():
            if place not in spoken and not (free and place[0] == 0):
                self._hold(node, where)

    def _is_given(self, op: Op, position: int) -> bool:
        """Whether an index comes from an input of the model by operators of one operand: its values are then drawn to fit."""
        name = op.inputs[position]
        inputs = {item.tensor for item in self.graph.of_kind("input")}
        while name in self.graph.producer:
            maker = self.graph.producer[name]
            if len(maker.inputs) != 1:
                return False
            (name,) = maker.inputs
        return name in inputs

    def _of_factors(self, own: str, extents: Mapping[str, int], strategy: Strategy) -> None:
        """Each rank's part of a factor; in two where ranks trade halves."""
        halves = bool(way_of(strategy))
        for name, axes in plain_factors(strategy).items():
            if (own, name) in self.parent:
                self._part((own, name), extents[name], math.prod(self.schedule.machine.mesh.sizes[axis] for axis in axes), halves)

    def _part(self, node: Node, extent: int, parts: int, halves: bool = False) -> None:
        if extent % parts:
            self._hold(node, f"it is cut in {parts} unequal parts")
        elif parts > 1:
            part = extent // parts
            self._bound(node, part // 2 if halves else part, least=1 if halves else min(self.least, part))

    def _of_specs(self) -> None:
        seen: set[tuple[str, ShardingSpec]] = set()
        for value in self.schedule.values.values():
            if value.spec is not None and (value.tensor, value.spec) not in seen:
                seen.add((value.tensor, value.spec))
                self._of_spec(value.tensor, value.spec)

    def _of_spec(self, tensor: str, spec: ShardingSpec) -> None:
        blocks = dict(spec.blocks)
        for dim, extent in enumerate(self.graph.tensors[tensor].shape):
            if (tensor, dim) in self.parent:
                parts = spec.parts(dim, self.schedule.machine.mesh.sizes) * blocks.get(dim, 1)
                self._part((tensor, dim), extent, parts)

    def _of_steps(self) -> None:
        """A rank's shapes between the steps of reshards."""
        parts = [part for call in self.schedule.collectives.values() for part in call.parts]
        parts += [cut.part for cut in self.schedule.cuts.values() if cut.part is not None]
        for part in parts:
            shapes = part.shapes
            for dim, extent in enumerate(shapes.whole):
                node = (part.layout.tensor, dim)
                if node not in self.parent:
                    continue
                for shape in (shapes.source, shapes.sent, shapes.came, shapes.target):
                    length = shape[dim]
                    self._bound(node, length, least=min(self.least, length) or 1)
                if shapes.filled and any(end.parts(dim, self.schedule.machine.mesh.sizes) > 1 for end in shapes.ends):
                    even = all(extent % end.parts(dim, self.schedule.machine.mesh.sizes) == 0 for end in shapes.ends)
                    if not even:
                        self._hold(node, "it is cut in unequal parts")

    def _of_equal_layers(self) -> None:
        """Equal layers shrink alike."""
        for group in self.graph.groups:
            for repeat in group[1:]:
                for one, other in zip(group[0], repeat, strict=True):
                    self._alike(self.graph.op[one], self.graph.op[other])

    def _alike(self, one: Op, other: Op) -> None:
        for mine, its in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True):
            for dim in range(len(self.graph.tensors[mine].shape)):
                if (mine, dim) in self.parent and (its, dim) in self.parent:
                    self._unite((mine, dim), (its, dim))
        rule = find_rule(one, self.graph.tensors)
        for name in rule.extent:
            pair = (f"op:{one.name}", name), (f"op:{other.name}", name)
            if pair[0] in self.parent and pair[1] in self.parent:
                self._unite(*pair)

    # --- solving ---

    def _sides(self) -> tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]:
        """The equations in roots, each once, without what stands on both sides."""
        found = dict[tuple[tuple[Node, ...], tuple[Node, ...]], None]()
        for left, right in self.equations:
            one, other = [self._root(node) for node in left], [self._root(node) for node in right]
            for node in list(one):
                if node in other:
                    one.remove(node)
                    other.remove(node)
            if one or other:
                found[tuple(sorted(one, key=str)), tuple(sorted(other, key=str))] = None
        return tuple(found)

    def _solve(self) -> None:
        """Divides the largest dim by a prime, with what must be divided with it, for as long as there is one."""
        again = True
        while again:
            again = False
            for root in sorted(self.unknowns, key=lambda root: (-self.unknowns[root].room, str(root))):
                primes = reversed(_primes(self.unknowns[root].divides // self.unknowns[root].value))
                chosen = next(((prime, nodes) for prime in primes if (nodes := self._together(root, prime))), None)
                if chosen is not None:
                    for node in chosen[1]:
                        self.unknowns[node].value *= chosen[0]
                    again = True
                    break

    def _spread(self) -> None:
        """Makes dims of different sizes different again, the smaller ones first."""
        settled: dict[int, int] = {}
        for root in sorted(self.unknowns, key=lambda root: (self.unknowns[root].extent, str(root))):
            item = self.unknowns[root]
            while settled.get(item.extent // item.value, item.extent) != item.extent and item.value > 1 and root not in self.in_sides:
                item.value //= _primes(item.value)[0]
            settled.setdefault(item.extent // item.value, item.extent)

    def _together(self, root: Node, prime: int) -> frozenset[Node] | None:
        """The unknowns that are divided by the prime together; None where none go together."""
        if not self._may(root, prime):
            return None
        todo, tried = [frozenset((root,))], 0
        while todo and tried < MOST_BRANCHES:
            chosen, tried = todo.pop(), tried + 1
            numbers = sorted({number for node in chosen for number in self.in_sides.get(node, ())})
            broken = next((number for number in numbers if self._apart(number, chosen)), None)
            if broken is None:
                return chosen
            left, right = self.sides[broken]
            more = right if self._apart(broken, chosen) > 0 else left
            options = {node for node in more if node not in chosen and self._may(node, prime)}
            todo += [chosen | {node} for node in sorted(options, key=lambda node: (self.unknowns[node].room, str(node)))]
        return None

    def _may(self, node: Node, prime: int) -> bool:
        known = self.unknowns[node]
        return known.divides % (known.value * prime) == 0 and known.value * prime <= known.most

    def _apart(self, number: int, chosen: frozenset[Node]) -> int:
        """How many more of the left side of an equation are chosen than of the right."""
        left, right = self.sides[number]
        return sum(node in chosen for node in left) - sum(node in chosen for node in right)


def _primes(number: int) -> list[int]:
    """The prime factors of a number, each once, rising."""
    found, prime = list[int](), 2
    while number > 1:
        if number % prime == 0:
            found.append(prime)
            while number % prime == 0:
                number //= prime
        prime = prime + 1 if prime * prime <= number else max(number, prime + 1)
    return found
