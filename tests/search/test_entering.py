"""Inputs that are whole on every rank, split after the search where that costs next to nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.graph import Graph
from autopar.importer import capture_graph
from autopar.search import Found, entering, find_plan, single
from autopar.search.folding import FEWEST
from autopar.search.recompute import recompute
from autopar.search.trials import Trials
from autopar.search.tuning import Timed
from autopar.target import Target
from autopar.verify import verify
from tests.graphs import machine


class Labelled(nn.Module):
    """A language model that shifts its labels, and counts those that count."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(vocabulary, width), nn.Linear(width, 4 * width)
        self.down, self.head = nn.Linear(4 * width, width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        logits = self.head(x + self.down(self.up(x).relu()))
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def large() -> Graph:
    with torch.device("meta"):
        model, ids = Labelled(64_000, 2048), torch.empty(64, 512, dtype=torch.int64)
    return capture_graph(model, (ids, ids), mode="train")


def lie(found: Found) -> dict[str, str]:
    return {item.name: str(found.schedule.specs[item.tensor]) for item in found.schedule.graph.of_kind("input")}


def test_inputs_are_split_where_that_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the answer's list is not moved further: the gathers of what is split cost a part of a percent here."""
    monkeypatch.setattr(entering, "SHARE", 5e-3)
    monkeypatch.setattr(Trials, "finished", lambda self, found: found)
    found, plain = split_and_plain(monkeypatch)
    assert plain.seconds <= found.seconds <= plain.seconds * (1 + entering.SHARE)
    assert found.bound_seconds <= plain.seconds and found.memory.peak <= plain.memory.peak * 1.01


def test_inputs_are_split_where_moves_make_up_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plain = split_and_plain(monkeypatch)
    assert found.seconds <= plain.seconds * (1 + entering.SHARE)
    assert found.bound_seconds <= plain.seconds and found.memory.peak <= plain.memory.peak * 1.01


def split_and_plain(monkeypatch: pytest.MonkeyPatch) -> tuple[Found, Found]:
    """What is found with inputs split in the end, and without."""
    graph, on = large(), machine("dp=8")
    found = find_plan(graph, on, time_limit=600.0)
    monkeypatch.setattr(single, "split_inputs", lambda search: None)
    plain = find_plan(graph, on, time_limit=600.0)
    assert "R R" in lie(plain).values(), "the case is one in which a whole input saves something"
    assert set(lie(found).values()) == {"S0 R"}
    return found, plain


@pytest.mark.parametrize("pins", [{}, {"input:labels": "R R"}], ids=["free", "pinned"])
def test_what_is_split_so_computes_the_same(pins: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "SHARE", 1e9)
    monkeypatch.setattr(entering, "EQUAL", 1e9)
    model = Labelled(64, 16)
    given = torch.randint(64, (8, 6)), torch.randint(64, (8, 6))
    options: dict[str, Any] = {"mesh": "dp=2", "hardware": "h100-sxm", "constraints": pins}
    plan = autopar.plan(model, given, **options)
    assert {name: row.spec for name, row in plan.inputs.items()} == {"tokens": "S0 R", "labels": pins.get("input:labels", "S0 R")}
    assert verify(plan, Target(model, given), backend="simulate", steps=2).passed


def test_nothing_is_split_that_costs_something() -> None:
    graph = capture_graph(Labelled(64, 16), (torch.randint(64, (8, 6)),) * 2, mode="train")
    found = find_plan(graph, machine("dp=2"))
    assert set(lie(found).values()) == {"R R"}, "so small a model does not use the ranks"


def test_of_a_deep_model_the_whole_plan_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are folded, and schedules estimated by shorter ones."""
    monkeypatch.setattr(entering, "SHARE", 1e9)
    monkeypatch.setattr(entering, "EQUAL", 1e9)
    monkeypatch.setattr("autopar.search.folded.SHORT", (5, 6))
    monkeypatch.setattr("autopar.search.folded.DEEP", FEWEST + 1)
    made = zoo.build("gpt2", layers=FEWEST + 1, width=64, heads=4, batch=8, seq=32, vocab=128, device="meta")
    graph = capture_graph(made.model, made.args, made.kwargs, loss=made.loss, loss_args=made.loss_args)
    found = find_plan(graph, machine("dp=2"), baselines=False)
    assert set(lie(found).values()) == {"S0 R"}
    assert found.schedule.graph is graph and len(found.schedule.operations) == len(graph.ops)


def test_second_runs_read_what_the_first_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "SHARE", 1e9)
    monkeypatch.setattr(entering, "EQUAL", 1e9)

    def split(search: Trials) -> Timed | None:
        space, best = search.model.space, search.best
        assert best is not None
        looked_up = next(op.name for op in space.graph.ops if op.target == "autopar.embedding.default")
        again = recompute(space.graph, best.assignment, (looked_up,), space.machine)
        assert again is not None and looked_up in again.again
        search.best, search.rivals = search.exact(replace(best, assignment=again)), ()
        return entering.split_inputs(search) or search.best

    monkeypatch.setattr(single, "split_inputs", split)
    model = Labelled(64, 16)
    given = torch.randint(64, (8, 6)), torch.randint(64, (8, 6))
    plan = autopar.plan(model, given, mesh="dp=2", hardware="h100-sxm", constraints={"tokens.weight": "R S0"})
    assert {name: row.spec for name, row in plan.inputs.items()} == {"tokens": "S0 R", "labels": "S0 R"}
    assert sum(row.phase == "recompute" for row in plan.ops) == 1
    assert verify(plan, Target(model, given), backend="simulate", steps=2).passed
