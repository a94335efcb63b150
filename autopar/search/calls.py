"""A bound where something has to be sent: a call pays its latency once at least.

Sums of a link's work leave latencies out, since values may share a call (``bounds``). But a phase in which anything but the loss is
resharded by a collective has one call or more. So every plan is of one of four kinds, by the phases in which it has calls, and costs at
least what its kind does: the least of a problem without calls in the other phases, and the cheapest latency for each phase that has some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from autopar.graph import Phase
from autopar.search.bounds import PHASES, Mixture
from autopar.search.model import Model, Priced, Weights
from cost_models import Machine
from cost_models.links import KINDS


@dataclass(frozen=True)
class Silent:
    """As ``Weights``: those of others, and in some phases nothing is resharded by collectives."""

    weights: Weights
    phases: frozenset[Phase]

    def price(self, model: Model) -> Priced:
        priced = self.weights.price(model)
        made: dict[tuple[int, ...], np.ndarray] = {}
        edges = []
        for number, (edge, table) in enumerate(zip(model.edges, priced.edges, strict=True)):
            if edge.tensor is not None and edge.phase in self.phases:
                late = model.late.get(number)
                key = id(edge.seconds), id(table), id(late)
                if key not in made:
                    sent = np.any([model.loads(edge, link) > 0.0 for link in model.space.links], axis=0)
                    made[key] = np.where(sent if late is None else sent & ~late, np.inf, table)
                table = made[key]
            edges.append(table)
        return Priced(priced.nodes, edges)


def with_calls(mixture: Mixture, model: Model, bound: float, least: Callable[[Weights], float], gain: float) -> float:
    """The bound on every plan, given that of ``mixture``.

    Args:
        least: the bound of the problem under some weights; infinite where it has no answer.
        gain: seconds for which nothing is asked.
    """
    charged = charges(mixture, model)
    if not model.space.links or sum(charged.values()) <= gain:
        return bound
    found = bound + sum(charged.values())
    for count in range(len(PHASES), 0, -1):
        for silent in combinations(PHASES, count):
            if found <= bound + gain:
                return bound
            paid = sum(charge for phase, charge in charged.items() if phase not in silent)
            found = min(found, max(least(Silent(mixture, frozenset(silent))), bound) + paid)
    return found


def charges(mixture: Mixture, model: Model) -> Mapping[Phase, float]:
    """For each phase the seconds that any call adds: the latency of the quickest there is, as often as its link's work counts."""
    machine, times = model.space.machine, model.whole_graph.microbatches

    def counts(phase: Phase, link: str) -> float:
        terms = ((term, weight) for term, weight in mixture.weights.items() if term.phase == phase and term.link == link)
        return sum(weight * (1.0 if term.is_link else mixture.slowdown) for term, weight in terms)

    latencies = {link: _latency(machine, link) / times for link in model.space.links}
    return {phase: min((counts(phase, link) * latencies[link] for link in latencies), default=0.0) for phase in PHASES}


def _latency(machine: Machine, link: str) -> float:
    """The least that a call on a link pays however little it sends."""
    parts = [prime for axis in range(len(machine.mesh.sizes)) for prime in machine.mesh.whole(axis).primes]
    return min(machine.latency_seconds(kind, (part,)) for kind in KINDS for part in parts if link in machine.links((part,)))
