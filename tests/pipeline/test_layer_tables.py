"""The chain of units that is cut: what each holds between the halves, as planned and with its forward run a second time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import autopar
from autopar import zoo
from autopar.pipeline.layer_tables import LayerTables, measure_layers
from autopar.schedule import make_schedule
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
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
