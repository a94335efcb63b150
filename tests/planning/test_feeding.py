"""Plans for ranks that pass their own rows: the splits of the batch to choose from, the best of them, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_models import Mesh
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.planning.feeding import row_pins


class Placed(nn.Module):
    """Reads a batch, and positions that are no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x + positions)))


def planned(rows: int = 8, mesh: str = "dp=2,tp=2", **more: object) -> Plan:
    call = {"loss": nn.functional.cross_entropy, "loss_args": (torch.zeros(rows, dtype=torch.int64),)}
    args = torch.empty(rows, 16), torch.empty(16)
    return autopar.plan(Placed(), args, **call, mesh=mesh, hardware="cpu-cluster", inputs="local", **more)  # type: ignore[arg-type]


def test_every_set_of_axes_that_cuts_the_batch_evenly_is_a_candidate() -> None:
    graph = autopar.capture(Placed(), (torch.empty(4, 16), torch.empty(16)))
    found = [tuple(pins.values()) for pins in row_pins(graph, Mesh.parse("2x1x2x4"))]
    assert found == [("S0 R", "R"), ("S2 R", "R"), ("S3 R", "R"), ("S02 R", "R")]


def test_rows_of_all_inputs_are_split_alike_over_the_best_axes() -> None:
    plan, pins = planned(), {"input:x": "S01 R", "input:positions": "R", "input:target": "S01"}
    specs = {name: row.spec for name, row in plan.inputs.items()}
    assert plan.model.inputs == "local" and specs["positions"] == "R"
    assert specs["x"].split()[0] == specs["target"] != "R" and {f"input:{name}": spec for name, spec in specs.items()} == plan.pins
    by_axes = [planned(constraints={"input:x": spec, "input:target": spec.split()[0]}) for spec in ("S0 R", "S1 R", "S01 R")]
    assert plan.objective.seconds == min(other.objective.seconds for other in by_axes)
    assert plan.objective.bound_seconds <= min(other.objective.bound_seconds for other in by_axes) * (1 + 1e-9)
    assert planned(constraints=pins).pins == pins
    assert Plan.from_json(plan.to_json()).model.inputs == "local"
    assert '"inputs": "local"' not in autopar.plan(Placed(), (torch.empty(8, 16), torch.empty(16)), mesh="2").to_json()


def test_a_batch_that_no_axis_divides_is_refused() -> None:
    with pytest.raises(UsageError, match=r"on dp=2,tp=2 there is none for x \[7, 16\], positions \[16\], target \[7\]"):
        planned(7)


def test_a_pin_that_splits_an_input_otherwise_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the pin input:x='R S0' is not 'S0 R': inputs='local' splits the rows of all inputs alike"):
        planned(constraints={"input:x": "R S0"}, mesh="2")
    with pytest.raises(UsageError, match="unknown kind of inputs 'own'"):
        autopar.plan(Placed(), (torch.empty(8, 16), torch.empty(16)), mesh="2", inputs="own")  # type: ignore[arg-type]
