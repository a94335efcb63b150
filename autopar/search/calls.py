"""What calls take beside what they send: latencies, and the launches of copies into buckets and out of them.

Sums of a link's work leave them out, since values may share a call (``bounds``). Here they are counted, by phase and by what calls do
there (``resharding.ROLES``): a *group* of calls. Any of these is a part of what the calls of a group take, the first three where some of
its values share a call, the last where none do:

==========  ==========================================================================================================
``once``    a latency and a launch of copies.
``chain``   a launch; and the latencies along one chain of dependencies, no two of which are of one call.
``stored``  a launch; and the latencies of any parameter, whose calls are a chain too: their mean, by size.
``filled``  of each value as much of a latency and a launch as it fills of the memory there is: values that share a call are held at one
            moment, in buffers and results (``resharding.SHARING``). But a latency at most, which is what a call of one value pays.
``beside``  the latencies along the chain; and of each other value as much of a launch as it fills.
``alone``   a latency of each value.
==========  ==========================================================================================================

What never shares a call counts ``alone``. What is for the loss alone counts nothing (``Model.late``). See ``counting`` for the bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.graph import DTYPE_BYTES, Phase
from autopar.schedule.bucketing import JOINED
from autopar.search.bounds import PHASES, Mixture
from autopar.search.model import Edge, Model, Priced, Weights
from autopar.search.resharding import BUFFERS, COPIES, LATENCIES, NUMBER, ROLES
from autopar.search.space import spec_bytes
from cost_models import optimizer_bytes

Group = tuple[Phase, int]
"""Calls of a phase of one of ``ROLES``, by its number."""
GROUPS: tuple[Group, ...] = tuple((phase, role) for phase in PHASES for role, kinds in enumerate(ROLES) if JOINED.issuperset(kinds))
"""Those that may share calls."""
GATHERS, REDUCES = 0, 1
"""Places in ``ROLES``."""
WAYS = ("once", "chain", "stored", "filled", "beside", "alone")
"""How a group may count."""
READERS = ("all", "sure")
"""What is resharded alike for several readers counts once at least: in equal parts for all of them, or for those that run in any plan."""
ONCE = np.array([[float(way == "once") for way in WAYS], [0.0] * len(WAYS)])
ALONE = np.array([[0.5 * (way == "alone") for way in WAYS]] * 2)
"""Shares of ``WAYS`` by each of ``READERS``."""
Ways = Mapping[Group, np.ndarray]
"""Of each group such shares, which sum to 1."""


class Charges:
    """What the calls of a model count, under weights of the sums that bound a phase.

    Args:
        limit: bytes on a rank.
    """

    def __init__(self, mixture: Mixture, model: Model, limit: float) -> None:
        self.mixture, self.model, self.limit = mixture, model, limit
        self.compute, self.links = _paying(mixture, model)
        dtypes = {tensor.dtype for tensor in model.space.graph.tensors.values()}
        self.launch = min((model.space.machine.copy_seconds(1, dtype) for dtype in dtypes), default=0.0)

    @cached_property
    def room(self) -> float:
        """Bytes that calls may fill, at most."""
        return max(self.limit - resting(self.model), 1.0)

    @cached_property
    def chains(self) -> frozenset[int]:
        """The edges on the chain of each phase."""
        return frozenset(number for phase in PHASES for number in chain(self.model, phase))

    @cached_property
    def quickest(self) -> Mapping[tuple[Phase, int], float]:
        """What the latency of the quickest call counts, by phase and role."""
        machine, links = self.model.space.machine, self.model.space.links
        parts = [prime for axis in range(len(machine.mesh.sizes)) for prime in machine.mesh.whole(axis).primes]

        def least(role: int, link: str) -> float:
            on_link = [(part,) for part in parts if link in machine.links((part,))]
            return min(machine.latency_seconds(kind, part) for kind in ROLES[role] for part in on_link)

        return {
            (phase, role): min((counts * least(role, link) for link, counts in zip(links, self.links[phase], strict=True)), default=0.0)
            for phase in PHASES for role in range(len(ROLES))
        }  # fmt: skip

    @cached_property
    def constant(self) -> Mapping[Group, np.ndarray]:
        """What each group counts by each way whatever is chosen."""
        found = {}
        for phase, role in GROUPS:
            launch = self.compute[phase] * self.launch
            found[phase, role] = np.array([self.quickest[phase, role] + launch, launch, launch, 0.0, 0.0, 0.0])
        return {group: seconds / self.model.whole_graph.microbatches for group, seconds in found.items()}

    @property
    def most(self) -> float:
        """Seconds that all groups count once."""
        return sum(float(seconds.max()) for seconds in self.constant.values())

    @cached_property
    def tables(self) -> list[np.ndarray | None]:
        """For each edge what its reshards count, [sources, targets, roles, readers, ways]; None where nothing is resharded. What the
        mixture counts of copies is taken off: launches, or copies alone, stand for them."""
        made: dict[object, np.ndarray] = {}
        found: list[np.ndarray | None] = []
        for number, edge in enumerate(self.model.edges):
            if edge.tensor is None:
                found.append(None)
                continue
            late = self.model.late.get(number)
            counts = self._shares[number], self._along[number], number in self.chains, self._stored[number]
            key = id(edge.seconds), id(late), edge.phase, edge.readers, counts
            if key not in made:
                table = self._table(edge, *counts)
                made[key] = table if late is None else np.where(late[:, None, None, None], 0.0, table)
            found.append(made[key])
        return found

    def _table(self, edge: Edge, shares: Sequence[float], along: Sequence[float], chained: bool, stored: tuple[int, float]) -> np.ndarray:
        """See ``tables``; of these shares of the edge's calls, by readers, and where the chain counts whole."""
        calls, roles = self.model.calls(edge), range(len(ROLES))
        latencies, launch = calls[..., LATENCIES] @ self.links[edge.phase], self.compute[edge.phase] * self.launch * edge.share
        copies, least = self.compute[edge.phase] * np.moveaxis(calls[..., COPIES], -1, 0)
        quickest = edge.share * np.array([self.quickest[edge.phase, role] for role in roles])
        one = np.where(calls[..., NUMBER] > 1.0, quickest, latencies)  # of several calls one after another each pays that at least
        filled = calls[..., BUFFERS] / self.room
        of_stored = np.array([stored[1] * (role == stored[0]) for role in roles])
        by_readers = [
            (np.zeros_like(one), chained * latencies, share * of_stored * latencies, share * np.minimum(one, (one + launch) * filled),
             latencies if chained else beside * np.minimum(one, launch * filled), share * copies + beside * latencies)
            for share, beside in zip(shares, along, strict=True)
        ]  # fmt: skip
        return np.asarray(np.moveaxis(np.array(by_readers), (0, 1), (-2, -1)) - (least / edge.readers)[..., None, None])

    @cached_property
    def _shares(self) -> list[tuple[float, float]]:
        """How much of its reshard each edge counts, by ``READERS``."""
        model = self.model
        again = [model.nodes[edge.target].kind == "again" for edge in model.edges]
        sure = Counter((edge.source, edge.phase) for edge, second in zip(model.edges, again, strict=True) if not second)
        found = []
        for edge, second in zip(model.edges, again, strict=True):
            count = sure[edge.source, edge.phase]
            found.append((1.0 / edge.readers, (0.0 if second else 1.0 / count) if count else 1.0 / edge.readers))
        return found

    @cached_property
    def _along(self) -> list[tuple[float, float]]:
        """The same where edges on the chain count whole: those that may share a reshard with one of them count nothing."""
        on = {(self.model.edges[number].source, self.model.edges[number].phase) for number in self.chains}
        return [
            (1.0, 1.0) if number in self.chains else (0.0, 0.0) if (edge.source, edge.phase) in on else shares
            for number, (edge, shares) in enumerate(zip(self.model.edges, self._shares, strict=True))
        ]

    @cached_property
    def _stored(self) -> list[tuple[int, float]]:
        """The role in which each edge counts for a parameter that it gathers or whose gradient it reduces, and that one's share of all."""
        shares, nodes, found = stored_shares(self.model), self.model.nodes, []
        for edge in self.model.edges:
            reduces = nodes[edge.target].kind == "input"
            owner = nodes[edge.target] if reduces else nodes[edge.source]
            found.append((REDUCES if reduces else GATHERS, shares.get(owner.name, 0.0) if owner.kind != "op" else 0.0))
        return found

    def counted(self, ways: Ways) -> Weights:
        """As ``Weights``: the mixture's, and of each group these shares of what it may count."""
        return _Counted(self, ways)

    def of(self, priced: Priced, choices: np.ndarray) -> tuple[float, np.ndarray]:
        """What an answer counts without the groups, given what the mixture prices; and what each group does, [groups, readers, ways]."""
        model, groups = self.model, np.zeros((len(GROUPS), len(READERS), len(WAYS)))
        total = sum(times * float(table[one]) for times, table, one in zip(model.node_times, priced.nodes, choices, strict=True))
        for number, (edge, seconds, table) in enumerate(zip(model.edges, priced.edges, self.tables, strict=True)):
            pair, times = (choices[edge.source], choices[edge.target]), model.edge_times[number]
            total += times * float(seconds[pair])
            if table is not None:
                for role, counted in enumerate(table[pair]):
                    if (edge.phase, role) in GROUPS:
                        groups[GROUPS.index((edge.phase, role))] += times * counted
                    else:
                        total += times * float((counted * ALONE).sum())
        return total, groups + np.array([self.constant[group] for group in GROUPS])[:, None]


@dataclass(frozen=True)
class _Counted:
    """See ``Charges.counted``."""

    charges: Charges
    ways: Ways

    def price(self, model: Model) -> Priced:
        assert model is self.charges.model
        priced = self.charges.mixture.price(model)
        shares = {phase: np.array([self.ways.get((phase, role), ALONE) for role in range(len(ROLES))]) for phase in PHASES}
        made: dict[object, np.ndarray] = {}
        edges = []
        for edge, table, counted in zip(model.edges, priced.edges, self.charges.tables, strict=True):
            if counted is not None:
                key = id(table), id(counted), edge.phase
                if key not in made:
                    made[key] = np.maximum(table + np.einsum("strew,rew->st", counted, shares[edge.phase]), 0.0)  # less by rounding
                table = made[key]
            edges.append(table)
        return Priced(priced.nodes, edges)


def _paying(mixture: Mixture, model: Model) -> tuple[dict[Phase, float], dict[Phase, np.ndarray]]:
    """How much seconds count in each phase: those of operators, and those of each link."""
    compute, links = dict[Phase, float](), dict[Phase, np.ndarray]()
    for phase in PHASES:
        terms = [(term, weight) for term, weight in mixture.weights.items() if term.phase == phase]
        compute[phase] = sum(weight for term, weight in terms if term.compute)
        links[phase] = np.array([
            sum(weight * (1.0 if term.is_link else mixture.slowdown) for term, weight in terms if term.link == link)
            for link in model.space.links
        ])  # fmt: skip
    return compute, links


def chain(model: Model, phase: Phase) -> tuple[int, ...]:
    """The edges along the dependencies of a phase that pass through most operators: no two of their calls are one."""
    ones = np.array([float(node.kind == "op") for node in model.nodes])
    path = model.dependencies(phase).longest(ones, np.zeros(len(model.edges)), spans=False)
    return path.edges if model.whole_path(path.nodes, path.edges) else ()


def stored_shares(model: Model) -> Mapping[str, float]:
    """Of each parameter its share of the elements of all in the graph that is planned: they sum to 1, each as often as it stands there."""
    graph = model.space.graph
    sizes = {item.tensor: float(math.prod(graph.tensors[item.tensor].shape)) for item in graph.of_kind("parameter")}
    total = sum(float(model.node_times[model.number["input", name]]) * size for name, size in sizes.items())
    return {name: size / total for name, size in sizes.items()} if total else {}


def resting(model: Model) -> float:
    """Bytes that a rank holds throughout at least: parameters and their optimizer's states, buffers, constants."""
    space, total = model.space, 0.0
    for item in space.graph.inputs:
        if item.kind in ("parameter", "buffer", "constant"):
            tensor = space.graph.tensors[item.tensor]
            local = min(spec_bytes(tensor, space.input_specs(item), space.machine), default=0)
            if item.tensor in space.graph.stepped:
                local += optimizer_bytes(space.optimizer, local // DTYPE_BYTES[tensor.dtype], tensor.dtype)
            total += float(model.node_times[model.number["input", item.tensor]]) * local
    return total
