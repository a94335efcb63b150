"""Plan -> module: the path users take under torchrun, and plans that do not fit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import zoo
from autopar.errors import MismatchError, UsageError
from autopar.plan import Plan
from autopar.runtime import compile_plan, export_program
from autopar.runtime.module.compiling import example_call, find_device, pick_device
from autopar.runtime.ranks.agreement import check_agreement
from autopar.runtime.ranks.groups import team_of
from autopar.schedule import Schedule
from autopar.target import Target
from autopar.verify.launch import run_ranks
from tests.graphs import machine, random_schedule, two_layers

ROOT = Path(__file__).resolve().parents[2]


@lru_cache
def mlp() -> Target:
    torch.manual_seed(0)
    return zoo.build("mlp")


@lru_cache
def plan_of(mesh: str) -> Plan:
    target = mlp()
    return autopar.plan(target.model, target.args, mesh=mesh, hardware="cpu-cluster", cost_model="communication")


CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("gpu", "backend", "ranks", "weights", "picked"),
    [
        (0, "gloo", 1, SECOND, SECOND),  # a single process: where the weights are
        (0, "gloo", 1, CPU, CPU),
        (0, "gloo", 1, None, FIRST),  # weights on meta: the GPU where there is one
        (None, "gloo", 1, None, CPU),
        (None, "gloo", 1, CPU, CPU),
        (1, "nccl", 1, CPU, SECOND),  # torchrun with one process: NCCL moves tensors of GPUs alone
        (1, "nccl", 4, CPU, SECOND),  # torchrun with several: each its own GPU, wherever the model was built
        (1, "cpu:gloo,cuda:nccl", 4, None, SECOND),
        (1, "gloo", 4, FIRST, CPU),  # gloo among several moves tensors of CPUs
        (None, "gloo", 4, None, CPU),
    ],
)
def test_a_rank_computes_where_its_weights_or_its_backend_want_it(
    gpu: int | None, backend: str, ranks: int, weights: torch.device | None, picked: torch.device
) -> None:
    assert pick_device(gpu, backend, ranks, weights) == picked


def test_a_single_process_asks_torch_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has one, it becomes the current one for a model without values; a model on the CPU stays there."""
    set_to = list[torch.device]()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert find_device(None, nn.Linear(2, 2)) == CPU and not set_to
    assert find_device(None, empty) == FIRST and set_to == [FIRST]
    assert find_device("cpu", empty) == CPU


@pytest.mark.parametrize(
    ("place", "current", "seen", "taken"),
    [("3", 0, 8, 3), ("3", 0, 1, 0), ("3", 5, 8, 5), (None, 0, 8, 0)],
    ids=["its place", "it sees one alone", "one was chosen", "no launcher"],
)
def test_a_process_takes_the_gpu_of_its_place_unless_one_was_chosen(
    monkeypatch: pytest.MonkeyPatch, place: str | None, current: int, seen: int, taken: int
) -> None:
    set_to = list[torch.device]()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if place is not None:
        monkeypatch.setenv("LOCAL_RANK", place)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert find_device(None) == torch.device("cuda", taken) and set_to == [torch.device("cuda", taken)]


def test_compile_gives_the_models_own_loss() -> None:
    target, plan = mlp(), plan_of("dp=2,tp=2")
    wanted = target.model(*target.args).item()

    def rank_main(rank: int) -> tuple[float, bool]:
        module = autopar.compile(target.model, plan)
        return module(*target.args).item(), module.plan is plan

    assert run_ranks(rank_main, 4) == [(pytest.approx(wanted), True)] * 4


def refused(plan: Plan, ranks: int, model: torch.nn.Module | None = None) -> str:
    def rank_main(rank: int) -> str:
        try:
            compile_plan(model or mlp().model, plan)
        except (MismatchError, UsageError) as error:
            return str(error)
        return "no error"

    return run_ranks(rank_main, ranks)[0]


def test_another_number_of_ranks_is_refused() -> None:
    found = refused(plan_of("dp=2"), 3)
    assert "the mesh dp=2 of 2 ranks, 3 processes are running\nhint: start 2 processes" in found


def test_another_torch_is_refused() -> None:
    plan = plan_of("dp=2")
    old = plan.model_copy(update={"created_by": plan.created_by.model_copy(update={"torch": "2.9.1"})})
    with pytest.raises(MismatchError, match=rf"made with torch 2.9.1, this is torch {plan.created_by.torch}"):
        compile_plan(mlp().model, old)
    patched = plan.created_by.torch.rpartition(".")[0] + ".7+cu128"
    same = plan.created_by.model_copy(update={"torch": patched})
    assert refused(plan.model_copy(update={"created_by": same}), 2) == "no error", "a patch release and another build are fine"


def test_another_model_is_refused() -> None:
    other = zoo.build("mlp", layers="3")
    found = refused(plan_of("dp=2"), 2, other.model)
    assert "another model" in found and "hint: " in found


def test_ranks_with_different_schedules_are_refused() -> None:
    """One rank's file has two instructions in another order, a third has another mesh's specs: all ranks are told, none waits."""
    graph, where = two_layers(), machine("2x2")
    first = random_schedule(graph, where, 1)
    runs = [index for index, item in enumerate(first.instructions) if item.kind == "free"]
    index = next(index for index in runs if first.instructions[index + 1].kind != "free")
    items = list(first.instructions)
    items[index], items[index + 1] = items[index + 1], items[index]
    swapped = replace(first, instructions=tuple(items))

    def rank_main(rank: int, others: Schedule) -> str:
        try:
            check_agreement(others if rank == 2 else first, team_of())
        except MismatchError as error:
            return str(error)
        return "no error"

    found = run_ranks(lambda rank: rank_main(rank, swapped), 4)
    assert len(set(found)) == 1
    assert f"ranks 0 and 2 hold different schedules; the first instruction that differs is number {index}: free" in found[0]
    assert "\nhint: give every rank the same plan file" in found[0]
    found = run_ranks(lambda rank: rank_main(rank, random_schedule(graph, where, 2)), 4)
    assert all("they differ before the first instruction" in message for message in found)
    assert run_ranks(lambda rank: rank_main(rank, random_schedule(graph, where, 1)), 4) == ["no error"] * 4


@pytest.mark.skipif("RANK" in os.environ, reason="this test runs without torchrun")
def test_a_single_process_is_told_of_torchrun() -> None:
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="hint: start the script with: torchrun --nproc-per-node 2"):
        compile_plan(mlp().model, plan_of("dp=2"))


def test_forked_ranks_compile_after_their_parent_did() -> None:
    """What the parent keeps of a group that it destroyed is not freed by them: they would wait for threads that only it has."""
    autopar.compile(mlp().model, plan_of("1"))
    dist.destroy_process_group()
    gc.collect()  # the module, which has the group too

    def run(rank: int) -> int:
        autopar.compile(mlp().model, plan_of("2"))
        return rank

    assert run_ranks(run, 2, timeout=30.0) == [0, 1]


def test_an_unknown_kind_of_inputs_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown kind of inputs 'whole'"):
        compile_plan(mlp().model, plan_of("2"), inputs="whole")  # type: ignore[arg-type]


def test_the_example_call_has_the_planned_shapes() -> None:
    args, kwargs, loss_args = example_call(plan_of("dp=2"))
    assert [tuple(tensor.shape) for tensor in args] == [tuple(tensor.shape) for tensor in mlp().args]
    assert all(tensor.is_meta for tensor in args) and kwargs == {} and loss_args == ()


def test_a_call_with_an_input_that_the_plan_has_not_is_refused() -> None:
    plan = plan_of("dp=2")
    (name, row), *others = plan.inputs.items()
    edited = plan.model_copy(update={"inputs": {f"{name}2": row, **dict(others)}})
    with pytest.raises(MismatchError, match=f"the call takes {name}, which is none of the plan's inputs"):
        example_call(edited)



SCRIPT = """
import sys, torch, autopar
import torch.distributed as dist
from autopar import zoo
torch.set_num_threads(1)
torch.manual_seed(0)
target = zoo.build("mlp")
wanted = target.model(*target.args).item()
for _ in range(4):
    program = autopar.load_program("program")
    assert abs(program(*target.args).item() - wanted) < 1e-6
    dist.destroy_process_group()
plan = autopar.load(sys.argv[1])
module = autopar.compile(target.model, plan)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
losses = []
for _ in range(2):
    loss = module(*target.args)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert abs(losses[0] - wanted) < 1e-6 and losses[1] < losses[0], (losses, wanted)
if dist.get_rank() == 0:
    print("trained on", dist.get_world_size())
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    """Each of the two starts the process group, also where an earlier one has ended: its keys in torchrun's store are not read again."""
    plan_of("dp=2").save(tmp_path / "plan.json")
    export_program(plan_of("dp=2"), mlp().model, tmp_path / "program")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "plan.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained on 2" in done.stdout
