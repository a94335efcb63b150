"""Prices of collectives by what of them a schedule exposes."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.schedule import simulated
from autopar.schedule.windows import windows
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model
from autopar.search.ilp.overlap import FIRST_BELIEFS, LearnedOverlap, measure_overlap
from tests.graphs import random_graph
from tests.schedule.cases import Case

SLOWDOWN = 0.15


def model_of(seed: int) -> Model:
    machine = Machine(Mesh.parse("x=2,y=2"), load_hardware("h100-sxm"), "roofline")
    return build_model(Space(random_graph(seed, layers=4), machine, "adamw", Pins()), recompute_times=1)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_under_way_on_two_links_slows_half_as_much_each(seed: int) -> None:
    """Against the same schedule looked at many times a call."""
    case = Case("gpt2", "x=2,y=2", seed)
    schedule = dict(case.stages())["free"]
    slots = simulated(schedule)
    flights = [slot for slot in slots if slot.instruction.kind == "start" and slot.end > slot.begin]
    found, moments = windows(schedule), 400
    seen: dict[tuple[str, str], list[float]] = {}
    for slot in flights:
        if schedule.collectives[slot.instruction.of].late:
            continue  # nobody waits for it, which says nothing of others
        window = found[slot.instruction.id]
        side = "ahead" if window.ahead else "behind" if window.behind else "between"
        total, slows = seen.setdefault((slot.instruction.half, side), [0.0, 0.0])
        at = slot.begin + (np.arange(moments) + 0.5) / moments * (slot.end - slot.begin)
        busy = sum(((other.begin <= at) & (at < other.end)).astype(int) for other in flights)
        seen[slot.instruction.half, side] = [total + slot.end - slot.begin, slows + float((1.0 / busy).mean()) * (slot.end - slot.begin)]
    shown = measure_overlap(schedule, slots)
    assert shown.keys() == seen.keys()
    for place, (total, slows) in seen.items():
        assert shown[place].slowing == pytest.approx(slows / total, rel=1e-2)
    assert seed or min(belief.slowing for belief in shown.values()) < 0.99
    assert FIRST_BELIEFS["behind"].slowing == 1.0


def test_what_slows_less_costs_less() -> None:
    model, place = model_of(0), ("backward", "behind")
    first = LearnedOverlap.first(SLOWDOWN)
    half = LearnedOverlap(
        {where: belief._replace(slowing=0.5 if where == place else 1.0) for where, belief in first.beliefs.items()}, SLOWDOWN
    )
    whole, less = first.price(model), half.price(model)
    cheaper = 0
    for number, edge in enumerate(model.edges):
        behind = edge.tensor is not None and (edge.phase, edge.side) == place
        finite = np.isfinite(edge.seconds)
        assert (less.edges[number][finite] <= whole.edges[number][finite]).all()
        cheaper += bool((less.edges[number][finite] < whole.edges[number][finite]).any())
        assert behind or (less.edges[number][finite] == whole.edges[number][finite]).all()
    assert cheaper
    assert first.beliefs[place].blended_with(half.beliefs[place]).slowing == pytest.approx(0.8)


def test_optimistic_prices_hide_all_but_what_stands_between_operators() -> None:
    model = model_of(0)
    first, hidden = LearnedOverlap.first(0.0).price(model), LearnedOverlap.optimistic(0.0).price(model)
    cheaper = 0
    for number, edge in enumerate(model.edges):
        finite = np.isfinite(edge.seconds)
        known, found = first.edges[number][finite], hidden.edges[number][finite]
        if edge.tensor is None or edge.side == "between":
            np.testing.assert_array_equal(found, known)
        else:
            np.testing.assert_allclose(found, np.broadcast_to(model.copies(edge), edge.seconds.shape)[finite], atol=1e-15)
            cheaper += bool((found < known).any())
    assert cheaper
