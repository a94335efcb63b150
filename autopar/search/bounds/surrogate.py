"""Surrogate bounds: weighted sums of resources and of paths, which no plan beats in any order.

Let T be the time from the first to the last instruction of a phase. Each of these sums is at most T, for every plan in every order:

- Compute beside a link: seconds of all operators and of the copies around collectives, launches left out, on the one compute stream; and
  ``overlap_slowdown`` times the link's work. While a call holds the link, operators lose that share of their speed; while they stall, they
  do not run at all. An operator with collectives inside, on other links, is not slowed, so its seconds are taken off.
- The work of a link: seconds for which the phase's collectives hold it. Latencies are left out, since calls may share a bucket.
- A path of data dependencies: its operators, and the collectives between them with their latencies. Copies are left out, since the copies
  of one step of a reshard may overlap with the next step. A span counts all operators between two places of a path instead
  (``critical_path``). Recomputation counts in compute but not on paths: a plan that does not need it does not wait for it.
- A path beside a link: the path, and ``overlap_slowdown`` times the link's work off the path. Path collectives use the link one at a time,
  so the rest of its work runs beside the path's operators or stalls them.

Reshards that the loss alone needs count in no sum: they may run until the step ends (``Model.deferred``). Phases follow one another, and
the optimizer step follows them.

Each sum is linear in the choices. So a mixture with weights that sum to 1 in each phase is an integer problem. Its bound holds for the step
of every plan. Cutting planes find the weights: the sums of each solution limit the bound of any weights. The best weights for all solutions
so far are tried next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models import Machine
from autopar.graph import Graph, Phase
from autopar.rules import find_fusable_additions, issued_kernels
from autopar.search.choices.space import Space
from autopar.search.folding.fold import Folding
from autopar.search.ilp.critical_path import Path
from autopar.search.ilp.model import Edge, Model, Priced
from autopar.search.settings import PATH_GAIN
from autopar.solvers.linear_program import Range, minimise

PHASES: tuple[Phase, ...] = ("forward", "backward")
RUN_KINDS = ("op", "recompute")
"""Kinds of nodes that run operators: the first run, and the recomputation."""


@dataclass(frozen=True)
class Term:
    """One sum that bounds a phase: of a path, of a link, or of the compute stream.

    Args:
        link: the link whose work counts; of a path or of compute, the link beside which operators are slowed.
        compute: whether the sum is that of the compute stream.
        path: the path, where the sum is of one.
    """

    phase: Phase
    link: str = ""
    compute: bool = False
    path: Path | None = None


@dataclass(frozen=True)
class Multipliers:
    """Weights of terms: at least 0, with sum 1 in each phase. The optimum of the problem under them bounds every step.

    Args:
        slowdown: the hardware's ``overlap_slowdown``.
    """

    weights: Mapping[Term, float]
    slowdown: float

    def without_paths(self) -> Multipliers:
        """The weights without paths, for a model whose nodes have other numbers. The other terms of the phase take over their weight."""
        found: dict[Term, float] = {}
        for phase in PHASES:
            kept = {term: weight for term, weight in self.weights.items() if term.phase == phase and term.path is None}
            total = sum(kept.values())
            found |= {term: weight / total for term, weight in kept.items()} if total else {Term(phase, compute=True): 1.0}
        return Multipliers(found, self.slowdown)

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
            if node.kind in RUN_KINDS:
                once = 0.0 if node.once is None else node.once
                priced = (compute[node.phase] + on_node[number]) * (node.seconds - once) + once
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
            copied, late = compute[edge.phase] / edge.readers, model.deferred.get(number)
            key = id(edge.seconds), on_edge[number], shares, copied, id(late)
            if key not in made:
                table = _mixed_edge_costs(model, edge, on_edge[number], shares, copied)
                made[key] = table if late is None else np.where(late & np.isfinite(table), 0.0, table)
            edges.append(made[key])
        return Priced(nodes, edges)


def _mixed_edge_costs(model: Model, edge: Edge, on_path: float, shares: Sequence[float], copied: float) -> np.ndarray:
    finite, copies = np.isfinite(edge.seconds), model.copies(edge)
    total = on_path * (np.where(finite, edge.seconds, 0.0) - copies) + copied * model.least_copies(edge)
    for link, share in zip(model.space.links, shares, strict=True):
        if share:
            total = total + share * model.loads(edge, link)
    return np.where(finite, total, np.inf)


def blend(one: Multipliers, other: Multipliers, share: float) -> Multipliers:
    """``share`` of ``one`` and the rest of ``other``, term by term."""
    terms = dict.fromkeys((*one.weights, *other.weights))
    return Multipliers(
        {term: share * one.weights.get(term, 0.0) + (1 - share) * other.weights.get(term, 0.0) for term in terms}, one.slowdown
    )


def floor_of_space(space: Space, folding: Folding | None) -> float:
    """The bound of ``floor_of_model`` before there is a model, for the whole graph where equal layers are folded."""
    times = folding.count_of if folding is not None else lambda name: 1
    ops = sum(times(op.name) * float(space.op_choices(op).seconds.min()) for op in space.graph.ops)
    optimizer = sum(times(item.tensor) * float(space.input_seconds(item, space.input_specs(item)).min()) for item in space.graph.inputs)
    return max(ops, issue_floor(space.graph if folding is None else folding.whole, space.machine)) + optimizer


def floor_of_model(model: Model) -> float:
    """Cheapest-choice bound, in seconds: every operator and the optimizer step in the cheapest choice, and no collective.

    The host issues every operator's kernels before the optimizer step.
    """
    least = [(node.kind, float(times * node.seconds.min())) for times, node in zip(model.node_counts, model.nodes, strict=True)]
    optimizer = sum(seconds for kind, seconds in least if kind == "input")
    everything = sum(seconds for _, seconds in least)
    return max(everything, issue_floor(model.planned_graph, model.space.machine) + optimizer)


def issue_floor(graph: Graph, machine: Machine) -> float:
    """Seconds of a microbatch in which the host issues the kernels of every operator, as few as under any strategy. Conversions of
    parameters may be issued once a step."""
    if not machine.issue_seconds:
        return 0.0
    fusable, once = find_fusable_additions(graph), graph.conversions
    counts = ((issued_kernels(op, graph.tensors), op.name in once) for op in graph.ops if op.name not in fusable)
    return machine.issue_seconds * sum(count / graph.microbatches if is_once else count for count, is_once in counts)


class Evaluation:
    """The cost of one choice per node: seconds of nodes, seconds of edges without copies, work of links.

    Args:
        choices: one index per node of the model.
    """

    def __init__(self, model: Model, choices: np.ndarray) -> None:
        self.model, self.choices = model, choices
        once = np.array([0.0 if node.once is None else node.once[choices[number]] for number, node in enumerate(model.nodes)])
        alone = np.array([node.seconds[choices[number]] for number, node in enumerate(model.nodes)]) - once
        self.nodes = model.node_counts * alone
        self.edges = np.array([edge.seconds[choices[edge.source], choices[edge.target]] for edge in model.edges])
        for number, late in model.deferred.items():
            if late[choices[model.edges[number].target]]:
                self.edges[number] = 0.0
        self.optimizer = sum(self.nodes[number] for number, node in enumerate(model.nodes) if node.kind == "input")
        """With all else that runs once a step."""
        self.optimizer += float((model.node_counts * once).sum())
        self.compute: dict[Phase, float] = {
            phase: sum(self.nodes[number] for number, node in enumerate(model.nodes) if node.kind in RUN_KINDS and node.phase == phase)
            for phase in PHASES
        }
        self.between: dict[tuple[Phase, str], float] = defaultdict(float)
        self.inside: dict[tuple[Phase, str], float] = defaultdict(float)
        self.not_slowed: dict[tuple[Phase, str], float] = defaultdict(float)
        self.not_slowed_on: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(model.nodes)))
        for number, node in enumerate(model.nodes):
            if node.kind in RUN_KINDS:
                for link, load in model.node_loads(node).items():
                    self.inside[node.phase, link] += model.node_counts[number] * load[choices[number]]
                for link, seconds in model.not_slowed(node).items():
                    self.not_slowed_on[link][number] = model.node_counts[number] * seconds[choices[number]]
                    self.not_slowed[node.phase, link] += self.not_slowed_on[link][number]
        for number, edge in enumerate(model.edges):
            if edge.tensor is not None and self.edges[number] > 0.0:
                copies = model.copies(edge)[choices[edge.source], choices[edge.target]]
                self.edges[number] -= copies
                least = model.least_copies(edge)[choices[edge.source], choices[edge.target]]
                times = model.edge_counts[number] / edge.readers
                self.compute[edge.phase] += times * least
                for link in model.space.links:
                    load = model.loads(edge, link)[choices[edge.source], choices[edge.target]]
                    self.between[edge.phase, link] += times * load
        self.counted_once = alone, self.edges
        """Seconds of nodes and of edges, counted once: a path passes once through a node that folding counts several times or never."""
        self.edges = self.edges * model.edge_counts

    def sum_of(self, term: Term, slowdown: float) -> float:
        """Seconds of a term for these choices."""
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

    def _seconds(self, path: Path) -> tuple[float, float]:
        """Seconds of the operators on a path, and of its collectives."""
        return float(self.nodes[list(path.nodes)].sum()), float(self.edges[list(path.edges)].sum())


class Master:
    """Master problem of the cutting planes: the terms known so far, and the solutions that limit what their weights can reach.

    Paths are terms, and bytes may have a price at some times. There are too many paths and times to list. Column generation enters the
    longest path and the fullest time, measured in a mix of the solutions. The duals of the linear program are the mix.

    Args:
        allowed, times: bytes that are free of charge, and the times of the model at which bytes may have a price (``memory_dual``).
    """

    def __init__(self, model: Model, slowdown: float, allowed: float = 0.0, times: Sequence[int] = ()) -> None:
        self.model, self.slowdown, self.allowed, self.times = model, slowdown, allowed, list(times)
        links = model.space.links
        self.slowing = links if slowdown else ()
        self.terms: list[Term] = []
        for phase in PHASES:
            self.terms += [Term(phase, link, compute=True) for link in (self.slowing or ("",))]
            self.terms += [Term(phase, link) for link in links]
        self.priced_times: list[int] = []
        """Indices into ``times`` of the times that have entered."""
        self.evaluations: list[Evaluation] = []
        self.term_sums: list[list[float]] = []
        """Seconds of the terms in their order, for each solution."""
        self.excess_bytes: list[np.ndarray] = []
        """Bytes held beyond ``allowed`` at each time, for each solution."""

    def add(self, answer: Evaluation) -> None:
        """Takes a solution in: a cutting plane."""
        self.evaluations.append(answer)
        self.term_sums.append([])
        if self.times:
            self.excess_bytes.append(bytes_by_time(self.model, answer.choices)[self.times] - self.allowed)

    def first_weights(self) -> Multipliers:
        """The first weights: operators alone, which every plan must run."""
        found: dict[Term, float] = {}
        for phase in PHASES:
            terms = [term for term in self.terms if term.phase == phase and term.compute]
            found.update((term, 1 / len(terms)) for term in terms)
        return Multipliers(found, self.slowdown)

    def best_weights(self, highest: float = 0.0) -> tuple[Multipliers, float, Mapping[int, float]]:
        """The weights with the highest bound that the solutions allow, that bound in seconds, and prices in seconds per byte by time.

        Args:
            highest: seconds that a byte may cost at all times together, at most.
        """
        while True:
            mixture, most, prices, mix = self._solve_program(highest)
            if not self._add_columns(mix):
                return mixture, most, prices

    def _solve_program(self, highest: float) -> tuple[Multipliers, float, Mapping[int, float], np.ndarray]:
        """The result of ``best_weights``, and the share of each solution in the mix that limits it; shape [evaluations]."""
        for answer, sums in zip(self.evaluations, self.term_sums, strict=True):
            sums += [answer.sum_of(term, self.slowdown) for term in self.terms[len(sums) :]]
        scale = max(max(sums) for sums in self.term_sums) or 1.0
        terms, phases, later = len(self.terms), len(PHASES), len(self.priced_times)
        # Columns: a weight for each term, a price for each time, the bound. Rows: sums of weights, of prices, a cut for each solution.
        table = np.zeros((phases + 1 + len(self.evaluations), terms + later + 1))
        table[:phases, :terms] = [[term.phase == phase for term in self.terms] for phase in PHASES]
        table[phases, terms:-1] = 1.0
        table[phases + 1 :, :terms] = np.array(self.term_sums) / -scale
        if later:
            table[phases + 1 :, terms:-1] = np.array(self.excess_bytes)[:, self.priced_times] * -(highest / scale)
        table[phases + 1 :, -1] = 1.0
        most = np.array([*[1.0] * (phases + 1), *(answer.optimizer / scale for answer in self.evaluations)])
        least = np.where(np.arange(len(table)) < phases, 1.0, -np.inf)
        free = np.arange(table.shape[1]) == terms + later
        order = np.argsort([*(f"w{number}" for number in range(terms)), *(f"p{one}" for one in self.priced_times), "bound"])
        # By name, as rounds before had them: equal optima have several mixes, and the first that is found decides what is tried next.
        columns = Range(np.where(free, -np.inf, 0.0)[order], np.where(free, np.inf, 1.0)[order])
        values, duals = minimise(np.where(free, -1.0, 0.0)[order], columns, table[:, order], Range(least, most))
        values = values[np.argsort(order)]
        found = {term: max(weight, 0.0) for term, weight in zip(self.terms, values[:terms].tolist(), strict=True)}
        total = {phase: sum(value for term, value in found.items() if term.phase == phase) for phase in PHASES}
        mixture = Multipliers({term: value / total[term.phase] for term, value in found.items() if value}, self.slowdown)
        mix = np.abs(duals[phases + 1 :])
        paid = {self.times[one]: highest * max(price, 0.0) for one, price in zip(self.priced_times, values[terms:-1].tolist(), strict=True)}
        return mixture, float(values[-1]) * scale, paid, mix / mix.sum()

    def _add_columns(self, mix: np.ndarray) -> bool:
        """Enters the paths that are longer than all terms, and the time at which most is held. Whether there were any."""
        reached, entering = mix @ np.array(self.term_sums), list[Term]()
        seconds, edges = (
            sum(share * answer.counted_once[kind] for share, answer in zip(mix, self.evaluations, strict=True)) for kind in (0, 1)
        )
        for phase in PHASES:
            known = max(value for term, value in zip(self.terms, reached, strict=True) if term.phase == phase)
            for link in ("", *self.slowing):
                path = self.longest_path(phase, seconds, edges * (1.0 - (self.slowdown if link else 0.0)))
                term = Term(phase, link, path=path)
                mean = sum(share * answer.sum_of(term, self.slowdown) for share, answer in zip(mix, self.evaluations, strict=True))
                if mean > known * (1 + PATH_GAIN) and term not in self.terms:
                    entering.append(term)
        self.terms += entering
        if self.times:
            held = mix @ np.array(self.excess_bytes)
            fullest = int(np.argmax(held))
            if held[fullest] > 0.0 and fullest not in self.priced_times:
                self.priced_times.append(fullest)
                return True
        return bool(entering)

    def longest_path(self, phase: Phase, seconds: np.ndarray, edges: np.ndarray) -> Path:
        """The longest path that the planned graph has.

        Args:
            seconds, edges: seconds of each node and edge, counted once.
        """
        for spans in (True, False):
            path = self.model.dependencies(phase).longest_path(seconds, edges, spans)
            if self.model.is_planned_path(path.nodes, path.edges):
                return path
        return Path((), ())


def bytes_by_time(model: Model, choices: np.ndarray) -> np.ndarray:
    """Bytes that a solution holds at each time; shape [times]."""
    change = np.zeros(max(model.op_times.values(), default=0) + 2)
    for times, node, choice in zip(model.node_counts, model.nodes, choices, strict=True):
        for begin, end, size in node.items[choice]:
            change[min(begin, len(change) - 1)] += times * size
            change[min(end, len(change) - 1)] -= times * size
    return np.cumsum(change)[:-1]
