"""Prices of collectives that stand alone beside the operators."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.schedule import simulated
from autopar.schedule.windows import windows
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.search.ilp.build import build_model
from autopar.search.ilp.model import Model
from autopar.search.ilp.overlap import FIRST_BELIEFS, IsolatedOverlap, LearnedOverlap, measure_overlap
from tests.graphs import random_graph
from tests.schedule.cases import Case
from tests.search.requests import uniform

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


@pytest.mark.parametrize("seed", range(3))
def test_time_beside_operators_never_costs_more(seed: int) -> None:
    model = model_of(seed)
    dear, alone = (weights.price(model) for weights in (uniform(1.0, SLOWDOWN), IsolatedOverlap(SLOWDOWN)))
    less = 0
    for number, edge in enumerate(model.edges):
        finite = np.isfinite(edge.seconds)
        most, found = (priced.edges[number][finite] for priced in (dear, alone))
        assert (found <= most * (1 + 1e-9) + 1e-15).all()
        if edge.tensor is not None:
            assert (found >= (SLOWDOWN * (edge.seconds - model.copies(edge)))[finite] - 1e-15).all(), "operators beside it are slowed"
            less += bool((found < most * (1 - 1e-9)).any())
    assert less


def test_the_later_a_gather_is_read_the_less_of_it_is_waited_for() -> None:
    model = model_of(1)
    priced = IsolatedOverlap(SLOWDOWN).price(model)
    weights = [item.tensor for item in model.space.graph.inputs if item.trained]
    shares = []
    for weight in weights:
        site = model.sites[weight]
        layout = site.forward
        if layout is None:
            continue
        number, edge = next((index, model.edges[index]) for index in model.incoming[layout] if model.edges[index].tensor is not None)
        moved = np.isfinite(edge.seconds) & (edge.seconds > 0.0)
        early, _ = site.phases(model.space.graph)
        shares.append((min(reader.time for reader in early), float((priced.edges[number][moved] / edge.seconds[moved]).mean())))
        before = sum(float(model.space.op_choices(op).seconds.min()) for op in model.space.graph.ops[: shares[-1][0]])
        alone = (edge.seconds - model.copies(edge))[moved]
        expected = np.maximum(alone - (1.0 - SLOWDOWN) * before, SLOWDOWN * alone) + model.copies(edge)[moved]
        np.testing.assert_allclose(priced.edges[number][moved], expected, rtol=1e-9)
    waited = [share for _, share in sorted(shares)]
    assert waited[0] == 1.0, "nothing runs before the first"
    assert waited[-1] < 0.8
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(waited))


def test_what_others_run_between_maker_and_reader_hides_a_reshard() -> None:
    model = model_of(1)
    whole, priced = (weights.price(model) for weights in (uniform(1.0, SLOWDOWN), IsolatedOverlap(SLOWDOWN)))
    graph, times = model.space.graph, model.op_times
    hidden = set()
    for number, edge in enumerate(model.edges):
        made = graph.producer.get(edge.tensor.name) if edge.tensor is not None else None
        if edge.side == "between" and made is not None and made.phase == edge.phase and model.nodes[edge.target].kind == "op":
            moved = np.isfinite(edge.seconds) & (edge.seconds > model.copies(edge))
            apart = times[model.nodes[edge.target].name] - times[made.name] > 1
            if moved.any():
                assert apart or (priced.edges[number][moved] == whole.edges[number][moved]).all()
                hidden.add(bool((priced.edges[number][moved] < whole.edges[number][moved]).any()))
    assert hidden == {False, True}


def test_what_cannot_be_costs_no_number_that_is_none() -> None:
    """Where nothing slows operators."""
    model = model_of(0)
    assert any(np.isinf(edge.seconds).any() for edge in model.edges if edge.tensor is not None)
    with np.errstate(invalid="raise"):
        assert not any(np.isnan(edge).any() for edge in IsolatedOverlap(0.0).price(model).edges)
