"""Bounds on the step that hold for every plan and every order.

Let T be the time from the first instruction of a phase to its last. For every plan p and every order of its instructions, T is at least

- ``compute``: the seconds of all operators of the phase and of the copies around collectives, launches left out (one compute stream), and
  ``overlap_slowdown`` times a link's work with it, since while the link is busy operators lose that share of their speed, and while they
  stand still they do not run at all (operators with collectives inside, on other links, lose nothing: their seconds are taken off);
- a link's work: the seconds for which the collectives of the phase hold it (one stream a link), latencies left out, since calls may
  share a bucket;
- the seconds along any path of data dependencies, operators and the collectives between them, latencies included (copies are not: those
  of one step of a reshard may be made while the next is under way), or of all operators between two places of it (``paths``). Second
  runs count among the operators, on paths they do not: what leads to one that another plan does not need would not be waited for there;
- those of a path, and ``overlap_slowdown`` times what a link's work is longer than the collectives on the path: while these are under way
  a link has no other calls than another's, so the rest of its work is beside the path's operators or makes them stand still.

Phases follow one another, and the optimizer's step follows them. Each of these sums is linear in the choices, so a mixture of them with
weights that sum to 1 in each phase is an integer problem whose bound is a bound on the step of every plan. The weights are found by
cutting planes: each answer's sums bound what any weights can reach, and the best weights for the answers so far are asked next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from autopar.graph import Phase
from autopar.search.folding import Folding
from autopar.search.model import Edge, Model, Priced
from autopar.search.paths import Path
from autopar.search.space import Space

PHASES: tuple[Phase, ...] = ("forward", "backward")
RUNS = ("op", "again")
"""Kinds of nodes that run operators, for the first or the second time."""


@dataclass(frozen=True)
class Term:
    """One sum that bounds a phase: a path's, a link's, or that of compute (both with ``link``: slowed beside that link)."""

    phase: Phase
    link: str = ""
    compute: bool = False
    path: Path | None = None

    @property
    def is_link(self) -> bool:
        """Whether it is a link's work, which counts whole; beside compute or a path it counts as much as operators are slowed."""
        return not self.compute and self.path is None


PATHS = 3
"""Paths taken from each answer and phase: parallel branches (the queries', keys' and values' projections) are all to count."""

LONGER = 1e-3
"""Relative gain for which a path with spans counts beside those without."""

NOWHERE: Mapping[int, Sequence[float]] = {}


@dataclass(frozen=True)
class Mixture:
    """Weights of terms, at least 0, that sum to 1 in each phase. The optimum of the problem priced so bounds every step.

    Args:
        slowdown: the hardware's ``overlap_slowdown``.
    """

    weights: Mapping[Term, float]
    slowdown: float

    def without_paths(self) -> Mixture:
        """The same for a model with other nodes, whose numbers tell paths: what weight they have goes to the others of the phase."""
        found: dict[Term, float] = {}
        for phase in PHASES:
            kept = {term: weight for term, weight in self.weights.items() if term.phase == phase and term.path is None}
            total = sum(kept.values())
            found |= {term: weight / total for term, weight in kept.items()} if total else {Term(phase, compute=True): 1.0}
        return Mixture(found, self.slowdown)

    def price(self, model: Model) -> Priced:
        compute: dict[Phase, float] = defaultdict(float)
        between: dict[tuple[Phase, str], float] = defaultdict(float)
        inside: dict[tuple[Phase, str], float] = defaultdict(float)
        slowed: dict[tuple[Phase, str], float] = defaultdict(float)
        slowed_on: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(model.nodes)))
        on_node, on_edge = np.zeros(len(model.nodes)), np.zeros(len(model.edges))
        for term, weight in self.weights.items():
            if term.path is not None:
                slowdown = self.slowdown if term.link else 0.0
                on_node[list(term.path.nodes)] += weight
                on_edge[list(term.path.edges)] += weight * (1.0 - slowdown)
                between[term.phase, term.link] += weight * slowdown
                slowed_on[term.link][list(term.path.nodes)] += weight * slowdown
            elif term.compute:
                compute[term.phase] += weight
                between[term.phase, term.link] += weight * self.slowdown
                slowed[term.phase, term.link] += weight * self.slowdown
            else:
                between[term.phase, term.link] += weight
                inside[term.phase, term.link] += weight
        nodes = []
        for number, node in enumerate(model.nodes):
            priced = node.seconds
            if node.kind in RUNS:
                priced = (compute[node.phase] + on_node[number]) * node.seconds
                for link, load in model.node_loads(node).items():
                    priced = priced + inside[node.phase, link] * load
                for link, seconds in model.not_slowed(node).items():
                    priced = priced - (slowed[node.phase, link] + slowed_on[link][number]) * seconds
            nodes.append(priced)
        made: dict[object, np.ndarray] = {}
        edges = []
        for number, edge in enumerate(model.edges):
            if edge.tensor is None:
                edges.append(edge.seconds)
                continue
            shares = tuple(between[edge.phase, link] / edge.readers for link in model.space.links)
            copied = compute[edge.phase] / edge.readers
            key = id(edge.seconds), on_edge[number], shares, copied
            if key not in made:
                made[key] = _mixed(model, edge, on_edge[number], shares, copied)
            edges.append(made[key])
        return Priced(nodes, edges)


def _mixed(model: Model, edge: Edge, on_path: float, shares: Sequence[float], copied: float) -> np.ndarray:
    finite, copies = np.isfinite(edge.seconds), model.copies(edge)
    total = on_path * (np.where(finite, edge.seconds, 0.0) - copies) + copied * model.least_copies(edge)
    for link, share in zip(model.space.links, shares, strict=True):
        if share:
            total = total + share * model.loads(edge, link)
    return np.where(finite, total, np.inf)


def blend(one: Mixture, other: Mixture, share: float) -> Mixture:
    """``share`` of the first and the rest of the second."""
    terms = dict.fromkeys((*one.weights, *other.weights))
    return Mixture({term: share * one.weights.get(term, 0.0) + (1 - share) * other.weights.get(term, 0.0) for term in terms}, one.slowdown)


def floor_of(space: Space, folding: Folding | None) -> float:
    """The same before a model is made, of the whole graph where equal layers are folded."""
    times = folding.times if folding is not None else lambda name: 1
    ops = sum(times(op.name) * float(space.op_choices(op).seconds.min()) for op in space.graph.ops)
    return ops + sum(times(item.tensor) * float(space.input_seconds(item, space.input_specs(item)).min()) for item in space.graph.inputs)


def floor(model: Model) -> float:
    """A bound at once: every operator, and the optimizer's step, in its cheapest choice, and no collective."""
    return float(sum(times * node.seconds.min() for times, node in zip(model.node_times, model.nodes, strict=True)))


class Answer:
    """What one choice for each node costs: seconds of each node, and of each edge without copies, each link's work, and the longest
    paths of each phase."""

    def __init__(self, model: Model, choices: np.ndarray) -> None:
        self.model, self.choices = model, choices
        alone = np.array([node.seconds[choices[number]] for number, node in enumerate(model.nodes)])
        self.nodes = model.node_times * alone
        self.edges = np.array([edge.seconds[choices[edge.source], choices[edge.target]] for edge in model.edges])
        self.optimizer = sum(self.nodes[number] for number, node in enumerate(model.nodes) if node.kind == "input")
        self.compute: dict[Phase, float] = {
            phase: sum(self.nodes[number] for number, node in enumerate(model.nodes) if node.kind in RUNS and node.phase == phase)
            for phase in PHASES
        }
        self.between: dict[tuple[Phase, str], float] = defaultdict(float)
        self.inside: dict[tuple[Phase, str], float] = defaultdict(float)
        self.not_slowed: dict[tuple[Phase, str], float] = defaultdict(float)
        self.not_slowed_on: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(model.nodes)))
        for number, node in enumerate(model.nodes):
            if node.kind in RUNS:
                for link, load in model.node_loads(node).items():
                    self.inside[node.phase, link] += model.node_times[number] * load[choices[number]]
                for link, seconds in model.not_slowed(node).items():
                    self.not_slowed_on[link][number] = model.node_times[number] * seconds[choices[number]]
                    self.not_slowed[node.phase, link] += self.not_slowed_on[link][number]
        for number, edge in enumerate(model.edges):
            if edge.tensor is not None and self.edges[number] > 0.0:
                copies = model.copies(edge)[choices[edge.source], choices[edge.target]]
                self.edges[number] -= copies
                least = model.least_copies(edge)[choices[edge.source], choices[edge.target]]
                times = model.edge_times[number] / edge.readers
                self.compute[edge.phase] += times * least
                for link in model.space.links:
                    load = model.loads(edge, link)[choices[edge.source], choices[edge.target]]
                    self.between[edge.phase, link] += times * load
        self.once = alone, self.edges
        """Seconds of nodes and edges that stand for several counted once: a path passes through those that stand for none as well."""
        self.edges = self.edges * model.edge_times

    def sum_of(self, term: Term, slowdown: float) -> float:
        """The term's sum for these choices."""
        place = term.phase, term.link
        if term.path is not None:
            operators, calls = self._seconds(term.path)
            if not term.link:
                return operators + calls
            beside = self.between[place] - calls - float(self.not_slowed_on[term.link][list(term.path.nodes)].sum())
            return operators + calls + slowdown * beside
        if term.compute:
            return self.compute[term.phase] + slowdown * (self.between[place] - self.not_slowed[place])
        return self.between[place] + self.inside[place]

    def longest_paths(self, phase: Phase) -> list[Path]:
        """The chain of operators and reshards of ``phase`` that takes longest, and others beside it: each the longest when operators
        of those before count half. Where it takes longer with spans, that one too."""
        share, (seconds, edges) = np.ones(len(self.nodes)), self.once
        waits, found = self.model.dependencies(phase), list[Path]()
        for _ in range(PATHS):
            path = waits.longest(share * seconds, edges, spans=False)
            if not path.nodes or path in found:
                break
            if self.model.whole_path(path.nodes, path.edges):
                found.append(path)
            share[list(path.nodes)] /= 2
        spanned = waits.longest(seconds, edges)
        longer = sum(self._seconds(spanned)) > max((sum(self._seconds(path)) for path in found), default=0.0) * (1 + LONGER)
        return [*found, spanned] if longer and self.model.whole_path(spanned.nodes, spanned.edges) else found

    def _seconds(self, path: Path) -> tuple[float, float]:
        """Of the operators on a path, and of its collectives."""
        return float(self.nodes[list(path.nodes)].sum()), float(self.edges[list(path.edges)].sum())


class Cuts:
    """The terms known so far and the answers that bound what any weights of them can reach."""

    def __init__(self, model: Model, slowdown: float) -> None:
        self.model, self.slowdown = model, slowdown
        links = model.space.links
        self.terms: list[Term] = []
        for phase in PHASES:
            self.terms += [Term(phase, link, compute=True) for link in (links if slowdown and links else ("",))]
            self.terms += [Term(phase, link) for link in links]
        self.answers: list[Answer] = []

    def add(self, answer: Answer) -> None:
        """Takes an answer in, and its longest paths as terms."""
        self.answers.append(answer)
        for phase in PHASES:
            for path in answer.longest_paths(phase):
                if Term(phase, path=path) not in self.terms:
                    self.terms += [Term(phase, link, path=path) for link in ("", *(self.model.space.links if self.slowdown else ()))]

    def first(self) -> Mixture:
        """What is asked first: operators alone, which every plan must run."""
        found: dict[Term, float] = {}
        for phase in PHASES:
            terms = [term for term in self.terms if term.phase == phase and term.compute]
            found.update((term, 1 / len(terms)) for term in terms)
        return Mixture(found, self.slowdown)

    def best(self, beyond: Mapping[int, Sequence[float]] = NOWHERE, dearest: float = 0.0) -> tuple[Mixture, float, Mapping[int, float]]:
        """The weights with the highest bound that the answers allow, and that bound: a linear program of a few rows.

        Args:
            beyond: where bytes have a price too (``renting``): times, and what each answer holds there beyond what is allowed.
            dearest: the highest price at any of these; the third value are those that go with the weights.
        """
        problem = pulp.LpProblem("weights", pulp.LpMaximize)
        weight = {term: problem.add_variable(f"w{number}", 0, 1) for number, term in enumerate(self.terms)}
        price = {time: problem.add_variable(f"p{time}", 0, 1) for time in beyond}
        top = problem.add_variable("bound")
        scale = max(max(answer.sum_of(term, self.slowdown) for term in self.terms) for answer in self.answers) or 1.0
        problem += top
        for phase in PHASES:
            problem += pulp.lpSum(weight[term] for term in self.terms if term.phase == phase) == 1
        for number, answer in enumerate(self.answers):
            sums = pulp.lpSum(weight[term] * (answer.sum_of(term, self.slowdown) / scale) for term in self.terms)
            rents = pulp.lpSum(price[time] * (dearest * over[number] / scale) for time, over in beyond.items())
            problem += top <= sums + rents + answer.optimizer / scale
        problem.solve(pulp.HiGHS(msg=False))
        found = {term: max(weight[term].value(), 0.0) for term in self.terms}
        total = {phase: sum(value for term, value in found.items() if term.phase == phase) for phase in PHASES}
        mixture = Mixture({term: value / total[term.phase] for term, value in found.items() if value}, self.slowdown)
        return mixture, top.value() * scale, {time: dearest * max(price[time].value() or 0.0, 0.0) for time in beyond}
