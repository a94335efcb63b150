"""The longest chain of dependencies against schedules of the plan that it is of, in whatever order these run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import Phase
from autopar.schedule import Limits
from autopar.schedule.limit_search import best_schedule
from autopar.search.bounds.surrogate import PHASES, Evaluation, Master, Multipliers, Term
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.critical_path import Dependencies, Path
from autopar.search.ilp.decode import decode_assignment
from autopar.search.ilp.model import Model
from autopar.solvers import solve
from tests.graphs import random_graph
from tests.search.requests import uniform


def model_of(seed: int, batch: int = 64, width: int = 32) -> Model:
    graph = random_graph(seed, layers=8, batch=batch, width=width)
    return build_model(Space(graph, Machine(Mesh.parse("x=2,y=2"), load_hardware("h100-sxm"), "roofline"), "adamw", Pins()))


def answers(model: Model) -> list[Evaluation]:
    """Plans quite different: of what is waited for, more and more counts."""
    found = []
    for share in (0.001, 0.01, 0.1, 1.0):
        choices = solve(model.problem(None, uniform(share, 0.0))[0], time_limit=600.0, gap=1e-2).choices
        assert choices is not None
        found.append(Evaluation(model, choices))
    return found


def seconds(answer: Evaluation, path: Path) -> float:
    return answer.sum_of(Term("forward", path=path), 0.0)


def beside(answer: Evaluation, phase: Phase) -> float:
    """The longest chain of a phase with what is slowed beside the link that slows it most, if that is anything."""
    model, path = answer.model, answer.model.dependencies(phase).longest_path(*answer.counted_once)
    slowdown = model.space.machine.hardware.overlap_slowdown
    return max(answer.sum_of(Term(phase, link, path=path), slowdown) for link in ("", *model.space.links))


def schedules(answer: Evaluation) -> Iterator[float]:
    """Steps of the plan under limits quite different."""
    model = answer.model
    for limits in (None, Limits(0, 0, 0), Limits(2**16, 2**16, 2**30), Limits(2**28, 2**31, 2**31)):
        yield best_schedule(
            model.space.graph, decode_assignment(model, answer.choices), model.space.machine, "adamw", 2**62, start=limits, tries=3
        ).seconds  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_is_shorter_than_its_longest_chains(seed: int) -> None:
    model, gained = model_of(seed), 0
    for answer in answers(model):
        plain, spanned = (
            sum(seconds(answer, model.dependencies(phase).longest_path(*answer.counted_once, spans)) for phase in PHASES)
            for spans in (False, True)
        )
        assert plain <= spanned
        gained += spanned > plain * 1.01
        assert spanned + answer.optimizer <= min(schedules(answer)) * (1 + 1e-9)
    assert gained, "branches are nowhere counted together"


def test_nor_than_its_longest_chains_slowed_beside_calls() -> None:
    """Of layers so wide that latencies are little."""
    slowed = 0
    for seed in range(12, 20):
        for answer in answers(model_of(seed, batch=256, width=4096)):
            alone = sum(seconds(answer, answer.model.dependencies(phase).longest_path(*answer.counted_once)) for phase in PHASES)
            longest = sum(beside(answer, phase) for phase in PHASES)
            slowed += longest > alone * 1.02
            assert longest + answer.optimizer <= min(schedules(answer)) * (1 + 1e-9)
    assert slowed, "what runs beside calls is nowhere slowed"


@pytest.mark.parametrize("seed", range(4))
def test_a_mixture_prices_what_its_terms_come_to(seed: int) -> None:
    model, rng = model_of(seed, batch=256, width=4096), np.random.default_rng(seed)
    slowdown, found = model.space.machine.hardware.overlap_slowdown, answers(model)
    cuts = Master(model, slowdown)
    for answer in found:
        paths = {phase: cuts.longest_path(phase, *answer.counted_once) for phase in PHASES}
        cuts.terms += [Term(phase, link, path=path) for phase, path in paths.items() for link in ("", *model.space.links)]
    weights = {term: float(rng.random()) for term in cuts.terms}
    assert sum(bool(term.link and term.path) for term in weights) >= len(PHASES) * len(model.space.links)
    priced = Multipliers(weights, slowdown).price(model)
    for answer in found:
        nodes = sum(table[choice] for table, choice in zip(priced.nodes, answer.choices, strict=True))
        edges = sum(
            table[answer.choices[edge.source], answer.choices[edge.target]] for edge, table in zip(model.edges, priced.edges, strict=True)
        )
        sums = sum(weight * answer.sum_of(term, slowdown) for term, weight in weights.items())
        assert nodes + edges == pytest.approx(sums + answer.optimizer, rel=1e-9)


def in_some_order(found: Dependencies, model: Model, times: np.ndarray, edges: np.ndarray, rng: np.random.Generator) -> float:
    """When all operators of a phase have run, one at a time in a random order, each after what it waits for; links carry all at once."""
    arrives, now, waiting = dict[int, float](), 0.0, set(range(len(found.order)))
    while waiting:
        ready = [here for here in waiting if all(source is None or source in arrives for _, source in found.incoming[here])]
        here = int(rng.choice(ready))
        waiting.remove(here)
        at = max((edges[index] + (0.0 if source is None else arrives[source]) for index, source in found.incoming[here]), default=0.0)
        if model.nodes[found.order[here]].kind == "op":
            at = now = max(now, at) + times[found.order[here]]
        arrives[here] = at
    return max(arrives.values(), default=0.0)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_ends_before_the_longest_chain(seed: int) -> None:
    model, rng = model_of(seed), np.random.default_rng(seed)
    for phase in PHASES:
        found = model.dependencies(phase)
        for heavy in (0.1, 1.0, 10.0):
            times, edges = rng.random(len(model.nodes)), heavy * rng.random(len(model.edges)) * (rng.random(len(model.edges)) < 0.2)
            plain, spanned = (found.longest_path(times, edges, spans) for spans in (False, True))
            long, longer = (sum(times[list(path.nodes)]) + sum(edges[list(path.edges)]) for path in (plain, spanned))
            assert len(set(spanned.nodes)) == len(spanned.nodes)
            ends = [in_some_order(found, model, times, edges, rng) for _ in range(30)]
            assert long <= longer + 1e-9
            assert longer <= min(ends) + 1e-9
