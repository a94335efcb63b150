"""verify --reduced of pipelines: each stage passes by itself, equal ones once, and what is wrong in one is found."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import zoo
from autopar.errors import MismatchError
from autopar.pipeline_plan import PipelinePlan
from autopar.runtime.ranks.backends import LockstepRanks
from autopar.verify import verify_pipeline_reduced
from benchmarks.models import stressed
from tests.cli.running import autopar as command
from tests.pipeline.models import build
from tests.pipeline.test_training import plan_of


@pytest.mark.parametrize(
    ("name", "mesh", "order"),
    [
        ("gpt tied", "pp=2,dp=2", "zero-bubble"), ("gpt untied", "pp=2,dp=1,tp=2", "gpipe"), ("llama", "pp=2,dp=2", "interleaved"),
        ("moe", "pp=2,dp=2", "whole"), ("encoder-decoder", "pp=3,dp=2", "1f1b"), ("masked", "pp=2,dp=2", "whole"),
    ],
)  # fmt: skip
def test_each_stage_is_that_of_one_device(name: str, mesh: str, order: str) -> None:
    plan, (model, args) = plan_of(name, mesh, order=order), build(name)
    found = verify_pipeline_reduced(plan, (model, args))
    assert found.passed and found.ranks == autopar.Mesh.parse(mesh).ranks, found.problems
    assert sorted(number for numbers, _ in found.stages for number in numbers) == list(range(len(plan.stages)))
    for numbers, one in found.stages:
        assert one.operators == one.planned_operators and one.collectives == one.planned_collectives
        trained = {name for name, row in plan.stages[numbers[0]].plan.parameters.items() if row.trained}
        assert one.gradient_errors.keys() == trained, "gradients of this stage's parameters are compared"
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["reduced"] is True


@cache
def deep() -> tuple[Any, PipelinePlan]:
    made = zoo.build("llama3", layers=6, batch=8, device="meta")
    plan = autopar.plan_pipeline(made.model, made.args, mesh="pp=6,dp=2", microbatches=4, hardware=stressed(), effort="low")
    return made, plan


def test_equal_stages_run_once_and_a_wrong_gradient_of_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = deep()
    found = verify_pipeline_reduced(plan, made)
    assert found.passed and max(len(numbers) for numbers, _ in found.stages) > 1, found.problems
    assert ", and " in str(found)

    def unsummed(self: Any, exchange: Any, buffers: Any, rooms: Any = None) -> Any:
        if exchange.kind not in ("all_reduce", "reduce_scatter"):
            return start(self, exchange, buffers, rooms)
        length = buffers[0].numel() // (exchange.size if exchange.kind == "reduce_scatter" else 1)
        return lambda: [buffer.view(-1)[:length].clone() for buffer in buffers]

    start = LockstepRanks.start
    monkeypatch.setattr(LockstepRanks, "start", unsummed)
    wrong = verify_pipeline_reduced(plan, made)
    assert not wrong.passed and all(problem.startswith("stage ") for problem in wrong.problems)


def test_another_model_is_refused() -> None:
    _, plan = deep()
    with pytest.raises(MismatchError, match="another model"):
        verify_pipeline_reduced(plan, zoo.build("llama3", layers=6, batch=8, hidden=192, device="meta"))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "plan.json", "zoo:gpt2,layers=2,batch=8"
    made = zoo.build("gpt2", layers=2, batch=8, device="meta")
    autopar.plan_pipeline(made.model, made.args, mesh="pp=2,dp=2", microbatches=4, hardware=stressed(), effort="low").save(file)
    done = command(capsys, "verify", file, target, "--reduced", "--json")
    assert done.status == 0 and json.loads(done.out)["passed"], done.err
    assert "passed on 4 ranks, each stage by itself" in command(capsys, "verify", file, target, "--reduced").out
    told = command(capsys, "verify", file, target, "--reduced", "--steps", 3)
    assert told.status == 2 and told.err.rstrip().endswith("hint: leave --backend and --steps out")
    told = command(capsys, "verify", file, target, "--backend", "simulate")
    assert told.status == 2 and told.err.rstrip().endswith("hint: leave --backend out")
