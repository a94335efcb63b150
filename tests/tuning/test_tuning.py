"""``autopar.tune`` and ``autopar tune`` on two gloo ranks: the same plan on all, what was measured in its file, and how it fails."""

from __future__ import annotations

import inspect
import os
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import zoo
from autopar.cli.main import main
from autopar.cli.tune import tune as tune_command
from autopar.errors import AutoparError, CaptureError, InfeasibleError, MismatchError, UsageError, VerificationError
from autopar.plan import Plan
from autopar.report import summary
from autopar.rows import MeasuredCandidate
from autopar.target import Target
from autopar.tuning import ROUNDS, racing
from autopar.tuning.contestants import Builder, Contestant
from autopar.verify.launch import run_ranks
from tests.cli.running import autopar as command
from tests.cli.running import refused


@lru_cache
def mlp() -> Target:
    torch.manual_seed(0)
    return zoo.build("mlp")


def tuned(**options: Any) -> Plan:
    target = mlp()
    asked: dict[str, Any] = {"mesh": "dp=2", "hardware": "cpu-cluster", "candidates": 3, "rounds": 2}
    return autopar.tune(target.model, target.args, target.kwargs, loss=target.loss, loss_args=target.loss_args, **{**asked, **options})


@pytest.fixture(scope="module")
def plans() -> list[tuple[str, bool]]:
    """The plan of each rank, as text, and whether the model was as before."""

    def rank_main(rank: int) -> tuple[str, bool]:
        before = {name: tensor.clone() for name, tensor in mlp().model.state_dict().items()}
        plan = tuned()
        same = all(torch.equal(tensor, before[name]) for name, tensor in mlp().model.state_dict().items())
        return plan.to_json(), same and plan.loss is mlp().loss

    return run_ranks(rank_main, 2)


def test_all_ranks_have_the_same_plan_and_the_model_is_not_changed(plans: list[tuple[str, bool]]) -> None:
    (first, kept), (second, kept_too) = plans
    assert first == second and kept and kept_too


def test_the_plan_says_what_was_measured(plans: list[tuple[str, bool]]) -> None:
    plan = Plan.from_json(plans[0][0])
    measured = plan.measured
    assert measured is not None and measured.rounds == 2 and measured.execution == "eager" and "CPU" in measured.device
    first, *others = measured.candidates
    assert len(others) == 2 and len({row.name for row in measured.candidates}) == 3
    assert first.ratio == 1.0 and first.step_seconds == measured.step_seconds
    assert first.predicted_step_seconds == plan.predicted.step_seconds
    assert first.peak_memory_bytes_per_rank == pytest.approx(plan.predicted.peak_memory_bytes_per_rank, rel=0.05)
    assert all(row.step_seconds is not None and row.step_seconds > 0 for row in measured.candidates)
    assert autopar.check(plan) == ()


def test_show_prints_measured_beside_predicted(plans: list[tuple[str, bool]]) -> None:
    plan = Plan.from_json(plans[0][0])
    said = summary(plan)
    assert "times the prediction" in said and "median of 2 rounds, eager" in said
    header = next(line for line in said.splitlines() if line.startswith("candidate"))
    assert header.split()[:3] == ["candidate", "predicted", "measured"]
    assert plan.measured is not None
    left_out = MeasuredCandidate(
        name="ddp", predicted_step_seconds=1.0, predicted_peak_memory_bytes_per_rank=2**30, reason="out of memory when it was run"
    )
    measured = plan.measured.model_copy(update={"candidates": (*plan.measured.candidates, left_out)})
    edited = Plan.from_json(plan.model_copy(update={"measured": measured}).to_json())
    row = next(line for line in summary(edited).splitlines() if line.startswith("ddp") and "out of memory" in line)
    assert row.split() == ["ddp", "1", "s", "-", "1", "GiB", "-", *left_out.reason.split()]  # type: ignore[union-attr]


def test_the_fastest_measured_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, though one rank alone sees that the others are slow."""
    usual = racing.Race._time_step

    def slow(race: racing.Race, contestant: Any) -> float:
        usual(race, contestant)
        number = next(number for number, plan in enumerate(race.plans) if plan is contestant.module.plan)
        return 3.0 - number if dist.get_rank() == 1 else 1e-3

    monkeypatch.setattr(racing.Race, "_time_step", slow)
    chosen = run_ranks(lambda rank: tuned(rounds=4).measured, 2)
    assert chosen[0] == chosen[1] and chosen[0] is not None
    assert [row.step_seconds for row in chosen[0].candidates] == [1.0, 2.0, 3.0]
    assert [row.ratio for row in chosen[0].candidates] == [1.0, 2.0, 3.0]
    predicted = [row.predicted_step_seconds for row in chosen[0].candidates]
    assert predicted == sorted(predicted, reverse=True), "the last candidate by its price"


@pytest.mark.parametrize("form", ["a plan of inference", "weights and inputs without values", "two microbatches"])
def test_forms_of_targets(form: str) -> None:
    def rank_main(rank: int) -> Any:
        if form == "two microbatches":
            return tuned(microbatches=2).measured
        if form == "a plan of inference":
            return autopar.tune(nn.Linear(8, 8), (torch.ones(4, 8),), mesh="dp=2", mode="inference", rounds=1).measured
        with torch.device("meta"):
            model, x = nn.Linear(8, 8), torch.ones(4, 8)
        return autopar.tune(model, (x,), loss=nn.functional.mse_loss, loss_args=(x,), mesh="dp=2", rounds=1).measured

    first, second = run_ranks(rank_main, 2)
    assert first is not None and first == second


def test_wrong_options_are_refused_before_a_search() -> None:
    for option, value, said in (("candidates", 1, "candidates is 1"), ("rounds", 0, "rounds is 0")):
        with pytest.raises(UsageError, match=said):
            tuned(**{option: value})
    with pytest.raises(UsageError, match="CUDA graphs"):
        tuned(execute="cuda_graph", hardware="h100-sxm")
    with pytest.raises(UsageError, match="neither a mesh nor a number of devices"):
        tuned(mesh=None)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2"):
        tuned()


def test_it_takes_what_plan_takes_but_the_cost_model_and_the_way_of_inputs() -> None:
    """Plans that are run are priced with what they take. Every rank has the whole batch of the target."""
    plan, tune = (inspect.signature(call).parameters for call in (autopar.plan, autopar.tune))
    assert set(tune) - set(plan) == {"candidates", "rounds", "say"} and set(plan) - set(tune) == {"cost_model", "inputs"}
    for name in set(plan) & set(tune) - {"model"}:
        assert (plan[name].default, plan[name].annotation) == (tune[name].default, tune[name].annotation)
    assert (tune["candidates"].default, tune["rounds"].default) == (5, ROUNDS)
    command_line = inspect.signature(tune_command).parameters
    assert (command_line["candidates"].default, command_line["rounds"].default) == (5, ROUNDS)


def refusals(function: Any, ranks: int = 2) -> list[tuple[type, str]]:
    """What each rank raises."""

    def rank_main(rank: int) -> tuple[type, str]:
        try:
            function(rank)
        except AutoparError as error:
            return type(error), error.message
        return type(None), ""

    return run_ranks(rank_main, ranks)


def test_what_the_first_rank_refuses_all_do() -> None:
    found = refusals(lambda rank: tuned(memory="1KiB"))
    assert {kind for kind, _ in found} == {InfeasibleError} and len({words for _, words in found}) == 1
    found = refusals(lambda rank: tuned(mesh="dp=4"))
    assert {kind for kind, _ in found} == {MismatchError}


def test_plans_that_do_not_fit_when_they_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.tuning.contestants.Contestant.peak_bytes", lambda self: 2**60)
    found = refusals(lambda rank: tuned(candidates=2))
    assert {kind for kind, _ in found} == {InfeasibleError}
    assert all("takes more than the memory limit" in words for _, words in found)


def test_one_rank_without_room_for_a_plan_is_heard_of_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """None begins a step of it; the others are measured."""
    asked = list[int]()

    def full(size: int, device: torch.device) -> None:
        asked.append(size)
        if dist.get_rank() == 1 and len(asked) == 1:
            raise torch.OutOfMemoryError("something else is on this device")

    monkeypatch.setattr(racing, "take_memory", full)
    monkeypatch.setattr(racing, "fit_together", lambda plans, limit: True)
    texts = run_ranks(lambda rank: tuned().to_json(), 2, timeout=60)
    rows = Plan.from_json(texts[0]).measured.candidates
    assert texts[0] == texts[1] and [row.reason for row in rows].count(racing.OUT_OF_MEMORY) == 1 and len(rows) == 3


def test_a_rank_that_runs_out_of_memory_alone_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the midst of a step they would wait for it."""
    usual = Contestant.step

    def step(contestant: Contestant) -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("in the midst of a step")
        usual(contestant)

    monkeypatch.setattr(racing, "ALONE_SECONDS", 1.0)
    monkeypatch.setattr(Contestant, "step", step)

    def rank_main(rank: int) -> None:
        try:
            tuned()
        except VerificationError as error:
            (tmp_path / str(rank)).write_text(error.message)
            raise

    with pytest.raises(AutoparError):
        run_ranks(rank_main, 2, timeout=60)
    said = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert said[1] == "rank 1 alone ran out of memory while a plan was measured, and the others wait for it"
    assert said[0] == "another rank ended while plans were measured"


def test_a_target_that_one_rank_cannot_load(tmp_path: Path) -> None:
    """None waits for it."""
    own = tmp_path / "own.py"
    own.write_text(
        "import os, torch\ndef make():\n    if os.environ['RANK'] == '1':\n        raise ValueError('no data here')\n"
        "    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
    )
    words = ["tune", f"{own}:make", "--mesh", "dp=2", "--mode", "inference", "-o", str(tmp_path / "plan.json")]
    statuses = run_ranks(lambda rank: main(words), 2)
    assert statuses == [MismatchError.exit_status, CaptureError.exit_status]
    assert not (tmp_path / "plan.json").exists()


def test_a_rank_that_dies_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They say so; nothing is written."""
    usual = Builder.build

    def dies(builder: Builder, plan: Plan) -> Any:
        if dist.get_rank() == 1:
            os._exit(7)
        return usual(builder, plan)

    monkeypatch.setattr(Builder, "build", dies)
    said = tmp_path / "said"

    def rank_main(rank: int) -> None:
        try:
            tuned()
        except VerificationError as error:
            said.write_text(error.message)
            raise

    with pytest.raises(AutoparError):
        run_ranks(rank_main, 2)
    assert said.read_text() == "another rank ended while plans were measured"


def test_the_command_writes_the_fastest_on_the_first_rank(tmp_path: Path) -> None:
    words = ["tune", "zoo:mlp", "--mesh", "dp=2", "--hardware", "cpu-cluster", "--candidates", "2", "--rounds", "1"]

    def rank_main(rank: int) -> tuple[int, str]:
        with redirect_stdout(StringIO()) as printed:
            status = main([*words, "-o", str(tmp_path / "plan.json")])
        return status, printed.getvalue()

    (first, table), (second, nothing) = run_ranks(rank_main, 2)
    assert first == second == 0 and nothing == ""
    header, *rows = table.splitlines()
    assert header.split()[0] == "candidate" and len(rows) == 2
    plan = autopar.load(tmp_path / "plan.json")
    assert plan.measured is not None and len(plan.measured.candidates) == 2 and plan.model.target == "zoo:mlp"


def test_wrong_words_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    refused(command(capsys, "tune", "zoo:mlp"), 2, "neither a mesh")
    refused(command(capsys, "tune", "zoo:mlp", "--mesh", "dp=2"), 2, "this is a single process")
    refused(command(capsys, "tune", "zoo:mlp", "--mesh", "dp=2", "--candidates", "1"), 2, "candidates is 1")
