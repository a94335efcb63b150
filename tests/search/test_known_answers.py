"""An answer without the memory limit that respects the limit is not looked for again."""

from __future__ import annotations

from autopar.cli.target import load_target
from autopar.cost_models import UNLIMITED, Machine, Mesh, load_hardware
from autopar.importer import capture_graph
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.search.driver.phase_table import Search
from autopar.search.ilp.build import build_model
from autopar.search.ilp.overlap import LearnedOverlap
from tests.search.requests import asked


def search_within(limit: int) -> Search:
    """A search in a small model with recomputation allowed, not begun."""
    target = load_target("zoo:gpt2,layers=2,width=64,heads=4,batch=8,seq=32,vocab=128", "train", device="meta")
    graph = capture_graph(target.model, target.args, target.kwargs, mode="train", loss=target.loss, loss_args=target.loss_args)
    machine = Machine(Mesh.parse("dp=2,tp=2"), load_hardware("cpu-cluster"), "roofline")
    model = build_model(Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {})))
    return Search(model, asked(limit, work=1e6, gap=0.0), may_recompute=True)


def work_of_second_answer(search: Search) -> float:
    """Work seconds of an answer within the limit, after one without it under the same prices."""
    prices = LearnedOverlap.first(search.slowdown)
    assert search.solve_choices(prices, 1e-6, limit=UNLIMITED) is not None
    before = search.budget.meter.spent
    search.solve_choices(prices, 1e-6)
    return search.budget.meter.spent - before


def test_free_answer_within_the_limit_takes_no_second_solve() -> None:
    search = search_within(2**34)
    assert work_of_second_answer(search) == 0.0
    first, second = search.answers
    assert first == second


def test_free_answer_beyond_the_limit_is_solved_again() -> None:
    peak = search_within(2**34)
    assert peak.solve_choices(LearnedOverlap.first(peak.slowdown), 1e-6, limit=UNLIMITED) is not None
    assert peak.last_solution is not None and peak.last_solution.peak_usage is not None
    assert work_of_second_answer(search_within(peak.last_solution.peak_usage - 1)) > 0.0
