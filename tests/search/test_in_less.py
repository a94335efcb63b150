"""Answers in less memory than there is, whose schedules have room to gather ahead."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from autopar.cli.target import capture_target
from autopar.graph import Graph
from autopar.schedule import memory
from autopar.search import scarcity
from autopar.search.building import build_model
from autopar.search.exposure import Exposure
from autopar.search.pins import Pins
from autopar.search.scarcity import in_less
from autopar.search.space import Space
from autopar.search.trials import Asked, Trials
from cost_models import Machine, Mesh, load_hardware

SLOWDOWN = 0.15


def graph() -> Graph:
    return capture_target("zoo:mlp", "train")


def trials(limit: int) -> Trials:
    space = Space(graph(), Machine(Mesh.parse("dp=2,tp=2"), load_hardware("h100-sxm"), "roofline"), "adamw", Pins())
    asked = Asked(limit, "adamw", 3600.0, scarcity.perf_counter(), 1e-6, 0, None, False, True)
    return Trials(build_model(space), asked, True)


@pytest.fixture(autouse=True)
def one_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scarcity, "BESIDE", (0.1,))


def test_a_plan_that_fits_is_offered_and_others_begin_from_it() -> None:
    some = trials(76_800)
    in_less(some)
    assert some.best is not None
    assert some.best.memory.peak == memory(some.best.schedule, "adamw").peak <= 76_800
    assert some.best in some.parted
    assert some.best.seconds < 2e-4, "operators alone take 108 us"


def test_each_answer_may_hold_less_until_the_next_does_no_better() -> None:
    some, asked = trials(76_800), list[tuple[float, int]]()
    real = scarcity._answer

    def answer(*given: object) -> object:
        asked.append((given[2].beliefs["forward", "ahead"].waited, given[3]))  # type: ignore[attr-defined,call-overload]
        return real(*given)  # type: ignore[arg-type]

    with patch.object(scarcity, "_answer", answer):
        in_less(some)
    assert {waited for waited, _ in asked} == {0.1}
    limits = [limit for _, limit in asked]
    assert limits[0] == int(0.8 * 76_800)
    assert limits == sorted(limits, reverse=True)
    assert len(limits) > 1


def test_large_problems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    some = trials(76_800)
    monkeypatch.setattr(scarcity, "TOGETHER", 10)
    in_less(some)
    assert some.best is None


def test_what_stands_between_operators_is_waited_for() -> None:
    model = trials(76_800).model
    priced = Exposure.of_streams(0.3, SLOWDOWN).price(model)
    for edge, table in zip(model.edges, priced.edges, strict=True):
        if edge.tensor is not None:
            finite = np.isfinite(edge.seconds)
            assert (table[finite] <= edge.seconds[finite] * (1 + 1e-9)).all()
            if edge.side == "between":
                assert table[finite] == pytest.approx(edge.seconds[finite], rel=1e-9)
