"""``benchmarks/host.py``: what counts as a kernel, and what it writes."""

from __future__ import annotations

import cProfile
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autopar.verify.launch import run_ranks
from benchmarks import host


def test_views_and_allocations_are_no_kernels() -> None:
    x = torch.ones(2, 3)
    with host.counted_kernels() as found:
        x.view(6).unsqueeze(0).t()
        torch.empty_like(x)
        x.reshape(3, 2)
        (x + x).mul_(2)
        x.t().contiguous()
    assert dict(found) == {"add.Tensor": 1, "mul_.Tensor": 1, "clone.default": 1}


def test_operators_of_the_backward_pass_are_counted() -> None:
    x = torch.ones(3, requires_grad=True)
    kernels = host.count_kernels(lambda: x.exp().sum().backward())
    assert kernels == {"exp.default": 1, "sum.default": 1, "ones_like.default": 1, "mul.Tensor": 1}


def test_a_table_of_one_model_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    assert run_ranks(lambda _: host.main(["--only", "mlp", "--pairs", "2", "--json", str(path)]), 1) == [0]
    rows = json.loads(path.read_text())["rows"]
    assert [row["form"] for row in rows] == ["plain", "eager", "graph"]
    assert all(row["seconds"] > 0 and row["count"] == sum(row["kernels"].values()) for row in rows)
    assert rows[0]["ratio"] == 1.0


def test_an_unknown_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        host.main(["--only", "mpl"])
    assert "no model mpl; there are gpt2" in capsys.readouterr().err


MOST = {
    "gpt2": (1.02, 1.03), "llama3": (0.94, 0.95), "resnet": (1.0, 1.0), "moe": (1.04, 1.05), "mlp": (1.05, 1.1),
}  # fmt: skip
"""Kernels of the eager form and of the graph form, as multiples of the plain model's."""


@pytest.mark.parametrize("name", MOST)
def test_compiled_models_run_few_kernels_more_than_the_plain_one(name: str) -> None:
    def rank_main(rank: int) -> list[int]:
        steps = host.build_steps(name, host.MODELS[name], host.FORMS)
        return [sum(host.count_kernels(step).values()) for step in steps.values()]

    ((plain, *ours),) = run_ranks(rank_main, 1)
    assert all(count <= most * plain for count, most in zip(ours, MOST[name], strict=True)), ours


@pytest.mark.parametrize(("name", "most"), [("gpt2", 2.9), ("resnet", 2.2), ("mlp", 4.6)])
def test_compiled_models_call_few_functions_more_than_the_plain_one(name: str, most: float) -> None:
    """What the host does in a step, in a number that no other work changes. An MLP's is mostly that of any call."""

    def count_calls(step: Callable[[], None]) -> int:
        step()
        profile = cProfile.Profile()
        profile.runcall(step)
        return sum(entry.callcount for entry in profile.getstats())

    def rank_main(rank: int) -> list[int]:
        return [count_calls(step) for step in host.build_steps(name, host.MODELS[name], host.FORMS).values()]

    ((plain, *ours),) = run_ranks(rank_main, 1)
    assert max(ours) <= most * plain, (plain, ours)
