"""Plans of equal layers are proved under the communication model, where the linear relaxation leaves a gap."""

from __future__ import annotations

import pytest

from autopar.cli.target import capture_target
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.search import find_plan


def test_twelve_equal_layers_are_proved_with_little_work() -> None:
    graph = capture_target("zoo:mlp,layers=12,batch=1024,inputs=128,width=128,outputs=128", "train")
    found = find_plan(graph, Machine(Mesh.parse("dp=4,tp=8"), load_hardware("h100-sxm"), "communication"), effort="low")
    assert found.status == "optimal" and not found.used_up


@pytest.mark.parametrize("layers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_transformers_with_gated_layers_are_proved(layers: int) -> None:
    """One layer leaves 10^10 entries to dense tables; an integer program of it took all the work before the plan had a bound."""
    graph = capture_target(f"zoo:llama3,layers={layers},batch=8,seq=64", "train")
    found = find_plan(graph, Machine(Mesh.parse("2x4"), load_hardware("h100-sxm"), "communication"))
    assert found.status == "optimal" and not found.used_up
