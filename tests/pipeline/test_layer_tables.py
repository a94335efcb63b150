"""The chain of units that is cut: what each holds between the halves, as planned and with its forward run a second time."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar import zoo
from autopar.pipeline.clock import StageCosts
from autopar.pipeline.layer_tables import LayerTables, measure_layers
from autopar.pipeline.planning import _factors, _scaled
from autopar.schedule import make_schedule
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.solvers.pipeline import Mode
from tests.pipeline.models import machine

BATCH, SEQ, WIDTH = 8, 16, 32


def tables_of(*baselines: str) -> Iterable[LayerTables]:
    """Llama-3 in float32, by hand on two ranks."""
    target = zoo.build("llama3", layers=3, batch=BATCH, seq=SEQ, width=WIDTH, heads=4, kv_heads=2, vocab=64)
    graph, where = autopar.capture(target.model, target.args, loss_args=target.loss_args), machine("dp=2")
    assignments = find_baselines(Space(graph, where, "adamw", Pins()))
    for name in baselines:
        yield measure_layers(make_schedule(graph, assignments[name], where), "adamw")


@pytest.mark.parametrize("layer", ["layers.1", "layers.2"])
def test_a_layer_that_runs_again_holds_what_enters_it_and_no_gathered_weights(layer: str) -> None:
    """Its hidden rows, and the tables of its rotary embedding, smaller than these."""
    entering = BATCH // 2 * SEQ * WIDTH * 4
    for tables in tables_of("ddp", "fsdp"):
        plain, again = tables.modes[tables.units.index(layer)]
        assert entering <= again.held <= 1.5 * entering < plain.held
        assert again.backward == plain.backward + plain.forward


def test_a_stage_that_recomputes_as_expected_is_scaled_by_nothing() -> None:
    """The first stage runs again what it was expected to; the second runs once, and takes twice as long as that."""
    plain, again = Mode(1.0, 2.0, held=8.0), Mode(1.0, 3.0, held=1.0)
    tables = LayerTables(("a", "b", "c"), ((plain, again),) * 3)
    costs = [StageCosts(forward, backward, backward, 0.0, 0, 0, backward) for forward, backward in ((2.0, 6.0), (2.0, 4.0))]
    made: Any = SimpleNamespace(cut=("c",), costs=costs)
    factors = _factors(tables, (1, 1, 0), made)
    assert factors == [(1.0, 1.0), (2.0, 2.0)]
    longer = (Mode(2.0, 4.0, held=8.0), Mode(2.0, 6.0, held=1.0))
    assert _scaled(tables, made, factors) == LayerTables(tables.units, (*tables.modes[:2], longer))
