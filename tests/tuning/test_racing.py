"""The race on one rank: rounds, Ctrl-C, memory that runs out. Contestants are fakes that count their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.cost_models import Mesh
from autopar.plan import Plan
from autopar.runtime.module.compiling import start_process_group
from autopar.runtime.ranks.groups import team_of
from autopar.tuning.racing import (
    FOLLOWED,
    OUT_OF_MEMORY,
    STEPS_ALONE,
    WARM_STEPS,
    Race,
    Run,
    fit_together,
    is_faster,
    paired_ratio,
    rank_runs,
)
from autopar.verify.trials import silent
from tests.graphs import two_layer_plan


def plan_of(name: str, *, peak: int = 100, resting: int = 60) -> Plan:
    """A plan of that name and predicted memory, in bytes."""
    plan = two_layer_plan()
    memory = plan.predicted.memory.model_copy(update={"parameters": resting, "optimizer": 0})
    predicted = plan.predicted.model_copy(update={"peak_memory_bytes_per_rank": peak, "memory": memory})
    return plan.model_copy(update={"predicted": predicted, "model": plan.model.model_copy(update={"target": name})})


@dataclass
class Log:
    """What a race asked of its contestants, in order, as ``build NAME``, ``step NAME`` and ``peak NAME``."""

    said: list[str] = field(default_factory=list)
    told: Callable[[str], None] = lambda word: None
    peaks: dict[str, int] = field(default_factory=dict)

    def note(self, word: str) -> None:
        self.said.append(word)
        self.told(word)

    def build(self, plan: Plan) -> Any:
        name = plan.model.target
        self.note(f"build {name}")

        def peak() -> int:
            self.note(f"peak {name}")
            return self.peaks.get(name, 100)

        place = SimpleNamespace(device=torch.device("cpu"))
        return SimpleNamespace(step=lambda: self.note(f"step {name}"), peak_bytes=peak, module=SimpleNamespace(place=place))

    def steps(self) -> list[str]:
        return [word.removeprefix("step ") for word in self.said if word.startswith("step ")]


@pytest.fixture
def log(one_rank: None) -> Log:
    start_process_group(Mesh.parse("dp=1"))
    return Log()


def race_of(log: Log, names: str, *, limit: int = 1000, signals: list[int] | None = None, **memory: int) -> Race:
    plans = [plan_of(name, **memory) for name in names]
    return Race(plans, log, team_of(), limit, [] if signals is None else signals, silent, torch.device("cpu"))  # type: ignore[arg-type]


def test_rounds_are_interleaved_and_their_order_rotates(log: Log) -> None:
    """A step of one's own comes before each that is timed."""
    race = race_of(log, "abc")
    assert race.run(3)
    assert "".join(log.steps())[3 * WARM_STEPS :] == "aabbccbbccaaccaabb"
    assert [len(run.seconds) for run in race.runs] == [3, 3, 3]
    assert [run.peak_bytes for run in race.runs] == [100, 100, 100]


def test_plans_that_do_not_fit_together_are_built_for_each_turn(log: Log) -> None:
    assert fit_together([plan_of("a"), plan_of("b")], 160) and not fit_together([plan_of("a"), plan_of("b")], 159)
    race = race_of(log, "ab", limit=150)
    assert race.run(STEPS_ALONE + 1)
    assert [len(run.seconds) for run in race.runs] == [STEPS_ALONE + 1] * 2
    assert log.said.count("build a") == log.said.count("build b") == 3, "once for its memory, then for each of two turns"


def test_ctrl_c_keeps_the_whole_rounds(log: Log) -> None:
    signals: list[int] = []
    log.told = lambda word: signals.append(2) if word == "step b" and log.said.count("step b") == WARM_STEPS + 6 else None
    race = race_of(log, "ab", signals=signals)
    assert not race.run(9)
    assert [len(run.seconds) for run in race.runs] == [2, 2]


@pytest.mark.parametrize("moment", ["build b", "peak a"])
def test_ctrl_c_before_a_whole_round_is_an_interrupt(log: Log, moment: str) -> None:
    signals: list[int] = []
    log.told = lambda word: signals.append(2) if word == moment else None
    with pytest.raises(KeyboardInterrupt):
        race_of(log, "ab", signals=signals).run(9)


def test_a_plan_that_takes_more_than_the_limit_is_not_timed(log: Log) -> None:
    log.peaks["b"] = 1021
    race = race_of(log, "abc")
    assert race.run(2)
    assert [len(run.seconds) for run in race.runs] == [2, 0, 2]
    assert race.runs[1].reason == "takes more than the memory limit of 1000 bytes" and race.runs[1].peak_bytes == 1021
    assert set(log.steps()[3 * WARM_STEPS :]) == {"a", "c"}


def test_memory_that_runs_out_beside_others_is_tried_alone(log: Log) -> None:
    """And a plan that runs out of it alone is not timed; the others are."""

    def full(word: str) -> None:
        beside = log.said.count("build c") == 1 and word == "step c"
        if beside or word == "step b":
            raise torch.OutOfMemoryError("no memory")

    log.told = full
    race = race_of(log, "acb")
    assert race.run(2)
    assert [run.reason for run in race.runs] == ["", "", OUT_OF_MEMORY]
    assert [len(run.seconds) for run in race.runs] == [2, 2, 0]


def test_other_errors_are_raised(log: Log) -> None:
    def broken(word: str) -> None:
        if word == "step b":
            raise ValueError("in the user's forward")

    log.told = broken
    with pytest.raises(ValueError, match="in the user's forward"):
        race_of(log, "ab").run(1)


def test_memory_is_followed_a_few_times_and_the_least_counts(log: Log) -> None:
    """A backend's thread may still hold a buffer."""
    peaks = iter([300, 120])
    log.told = lambda word: log.peaks.update(a=next(peaks)) if word == "peak a" else None
    race = race_of(log, "a")
    race.run(1)
    assert race.runs[0].peak_bytes == 120 and log.said.count("peak a") == FOLLOWED


def test_the_fastest_is_told_by_medians_of_paired_rounds() -> None:
    """A slow moment hits all of a round."""
    plan = plan_of("a")
    one, other = Run(plan, [1.0, 10.0, 10.0, 1.0, 10.0] * 4), Run(plan, [0.9, 9.0, 15.0, 0.9, 9.0] * 4)
    assert sum(one.seconds) < sum(other.seconds), "means would choose the other"
    assert rank_runs([one, Run(plan, reason="did not fit"), other]) == [2, 0]
    assert paired_ratio(one, other) == pytest.approx(1 / 0.9)


def test_where_rounds_do_not_tell_plans_apart_the_price_does() -> None:
    """A plan of a worse price is kept only if it is faster in most rounds."""
    better, worse = plan_of("a"), plan_of("b")
    dear = worse.predicted.model_copy(update={"step_seconds": 2 * better.predicted.step_seconds})
    worse = worse.model_copy(update={"predicted": dear})
    noisy = [Run(worse, [0.9, 1.2] * 5 + [0.9, 0.9]), Run(better, [1.0] * 12)]
    assert paired_ratio(noisy[0], noisy[1]) < 1.0 and not is_faster(*noisy)
    assert rank_runs(noisy) == [1, 0]
    clear = [Run(worse, [0.99] * 12), Run(better, [1.0] * 12)]
    assert is_faster(*clear) and rank_runs(clear) == [0, 1]
