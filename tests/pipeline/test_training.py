"""Pipelines on gloo ranks: training as on one device, whatever the order; clipping, scaling, state dicts, checkpoints, refusals."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import autopar
from autopar.errors import AutoparError, UsageError
from autopar.pipeline import cut_graph
from autopar.pipeline.timetable import write_order
from autopar.pipeline_plan import PipelinePlan
from autopar.runtime import export_program
from benchmarks.models import stressed
from tests.pipeline.models import Masked, build, capture
from tests.pipeline.test_steps import random_order
from tests.runtime.test_training import on_ranks

pytestmark = pytest.mark.usefixtures("short_search")

STEPS = 3
TIMETABLES = int(os.environ.get("AUTOPAR_TIMETABLES", "25"))
"""Timetables that are drawn and run, each compiled anew: about a quarter of a CPU second each."""


def plan_of(name: str, mesh: str, microbatches: int = 4, **options: Any) -> PipelinePlan:
    return PipelinePlan.from_json(_plan_text(name, mesh, microbatches, **options))


@cache
def _plan_text(name: str, mesh: str, microbatches: int, **options: Any) -> str:
    model, args = build(name)
    return autopar.plan_pipeline(
        model, args, mesh=mesh, microbatches=microbatches, hardware=stressed(), effort="low", **options
    ).to_json()  # fmt: skip


def train(module: nn.Module, args: tuple[Tensor, ...], scale: float = 1.0) -> tuple[list[float], list[float]]:
    """Losses of some steps, and the norms that gradients were clipped by."""
    optimizer, losses, norms = torch.optim.AdamW(module.parameters(), lr=1e-2), [], []
    for _ in range(STEPS):
        loss = module(*args)
        (loss * scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1 * scale)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(
    ("name", "mesh", "order"),
    [("gpt tied", "pp=2,dp=1,tp=2", "zero-bubble"), ("encoder-decoder", "pp=4", "1f1b"), ("masked", "pp=2,dp=2", "auto"),
     ("drawn", "pp=2,dp=2", "auto"), ("drawn", "pp=4", "1f1b"), ("relative bias", "pp=4", "auto")],
)
def test_training_is_that_of_one_device(name: str, mesh: str, order: str) -> None:
    """Clipped by the norm over all stages, a tied weight counted once; the loss on all ranks."""
    plan, (model, args) = plan_of(name, mesh, order=order), build(name)
    alone = copy.deepcopy(model)
    wanted = train(alone, args)

    def run(rank: int) -> Any:
        module = autopar.compile_pipeline(model, plan)
        found = train(module, args)
        return found, {key: value.full_tensor() for key, value in module.state_dict().items()}

    weights = alone.state_dict()
    seen: set[str] = set()
    for (losses, norms), state in on_ranks(run, 4):
        assert losses == pytest.approx(wanted[0], rel=1e-9)
        assert norms == pytest.approx(wanted[1], rel=1e-9)
        for key, value in state.items():
            torch.testing.assert_close(value, weights[key], rtol=1e-7, atol=1e-9)
        seen.update(state)
    assert seen == set(weights)


def test_one_microbatch_is_a_pipeline_too() -> None:
    plan, (model, args) = plan_of("llama", "pp=2", microbatches=1), build("llama")
    wanted = train(copy.deepcopy(model), args)[0]
    assert [found[0] for found in on_ranks(lambda rank: train(autopar.compile_pipeline(model, plan), args), 2)] == [
        pytest.approx(wanted, rel=1e-9)
    ] * 2


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.layers[1](self.layers[0](x))
        return {"loss": (x**2).mean(), "largest": x.abs().mean()}


def test_outputs_beside_the_loss_are_refused() -> None:
    with pytest.raises(UsageError, match="the output largest stands beside the loss"):
        autopar.plan_pipeline(Beside(), (torch.randn(8, 4),), mesh="pp=2", microbatches=4)


def test_modules_of_one_mesh_share_their_groups() -> None:
    """torch keeps a process group, with threads of its own, to the end of the process."""
    pipeline, (model, args) = plan_of("masked", "pp=2,dp=2"), build("masked")
    plan = autopar.plan(model, args, mesh={"dp": 2, "tp": 2}, hardware=stressed(), effort="low")

    def run(rank: int) -> list[list[int]]:
        found = []
        for one in (pipeline, plan):
            threads = []
            for _ in range(3):
                autopar.compile(model, one)(*args).backward()
                threads.append(len(os.listdir("/proc/self/task")))
            found.append(threads)
        return found

    for found in on_ranks(run, 4):
        assert all(later == first for first, *rest in found for later in rest)


@pytest.mark.parametrize("compiled", [autopar.compile, autopar.compile_pipeline])
def test_one_rank_plans_for_all(compiled: Any) -> None:
    plan, (model, args) = plan_of("masked", "pp=2"), build("masked")

    def run(rank: int) -> float:
        return compiled(model, plan if rank == 1 else None)(*args).item()

    assert on_ranks(run, 2) == [pytest.approx(model(*args).item())] * 2


def test_a_plan_without_stages_is_no_pipelines() -> None:
    model, args = build("masked")
    with pytest.raises(UsageError, match="the plan has no stages"):
        autopar.compile_pipeline(model, autopar.plan(model, args, mesh="1", hardware=stressed(), effort="low"))  # type: ignore[arg-type]


@pytest.mark.slow
def test_any_legal_timetable_runs() -> None:
    """Orders drawn at random, half of them with gradients of weights apart: no rank waits for ever, and losses and gradients are those of
    one device."""
    plan, (model, args, graph) = plan_of("encoder-decoder", "pp=4", order="zero-bubble"), capture("encoder-decoder", 4)
    stages = cut_graph(graph, plan.cut)
    loss = model(*args)
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}

    def run(rank: int) -> list[str]:
        wrong = []
        for seed in range(TIMETABLES):
            order = random_order(stages, 4, seed, split=seed % 2 == 1)
            rows = [row.model_copy(update={"order": write_order(order, stage)}) for stage, row in enumerate(plan.stages)]
            module = autopar.compile_pipeline(model, plan.model_copy(update={"stages": tuple(rows)}))
            found = module(*args)
            found.backward()
            if abs(found.item() - loss.item()) > 1e-12:
                wrong.append(f"loss of order {seed}")
            for name, parameter in module.named_parameters():
                if not torch.allclose(parameter.grad.full_tensor(), wanted[name], rtol=1e-9, atol=1e-12):
                    wrong.append(f"gradient of {name} in order {seed}")
        return wrong

    assert on_ranks(run, 4) == [[]] * 4


def test_an_overflow_in_one_stage_is_one_in_all() -> None:
    plan, (model, args) = plan_of("llama", "pp=2"), build("llama")

    def run(rank: int) -> tuple[bool, bool, bool]:
        module = autopar.compile_pipeline(model, plan)
        (module(*args) * 2.0).backward()
        fine = all(parameter.grad.to_local().isfinite().all() for parameter in module.parameters())
        module.zero_grad()
        if rank == 1:
            with torch.no_grad():
                module.get_parameter("norm.weight").to_local().fill_(1e300)
        (module(*args) * 1e10).backward()
        finite = [bool(parameter.grad.to_local().isfinite().all()) for parameter in module.parameters()]
        return fine, any(finite), all(finite)

    for fine, some, _ in on_ranks(run, 2):
        assert fine and not some


class Steep(nn.Module):
    """The gradient of the first weight is large beyond measure, all others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def test_a_grad_scaler_skips_the_step_in_all_stages_where_one_overflows() -> None:
    torch.manual_seed(0)
    model, x = Steep().double(), 1e290 * torch.randn(8, 4).double()
    with torch.no_grad():
        model.layers[0].weight.mul_(1e-290)
    made = autopar.plan_pipeline(model, (x,), mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="1,1")

    def run(rank: int) -> list[tuple[float, bool]]:
        module, seen = autopar.compile_pipeline(model, made), []
        optimizer, (weight,) = torch.optim.SGD(module.parameters(), lr=1e-3), module.parameters()
        for scale in (2.0**100, 1.0):
            before, scaler = weight.detach().to_local().clone(), torch.amp.GradScaler("cpu", scale)
            scaler.scale(module(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((scaler.get_scale(), torch.equal(before, weight.detach().to_local())))
        return seen

    assert on_ranks(run, 2) == [[(2.0**99, True), (1.0, False)]] * 2


class Faint(Steep):
    """Gradients of the loss vanish in float16 unless they are scaled from the start."""

    def forward(self, x: Tensor) -> Tensor:
        return 1e-8 * super().forward(x)


@pytest.mark.parametrize("order", ["1f1b", "zero-bubble"])
def test_float16_gradients_begin_with_the_scale_of_the_loss(order: Any) -> None:
    """The first call does not know it yet; the second begins with the one before."""
    torch.manual_seed(0)
    model, x = Faint(), torch.randn(8, 4)
    made = autopar.plan_pipeline(
        model, (x,), mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="1,1", compute_dtype="float16", order=order
    )
    reference = copy.deepcopy(model)
    reference(x).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}

    def run(rank: int) -> list[float]:
        module, off = autopar.compile_pipeline(model, made), []
        for scale in (2.0**16, 2.0**16, 2.0**10):
            module.zero_grad()
            (module(x) * scale).backward()
            for name, parameter in module.named_parameters():
                found = parameter.grad.to_local() / scale
                off.append(((found - wanted[name]).abs().max() / wanted[name].abs().max()).item())
        return off

    found = on_ranks(run, 2)
    assert max(off for each in found for off in each[:2]) < 0.02 and all(len(each) == 3 for each in found)


def test_stages_that_scale_the_loss_differently_are_refused() -> None:
    model, x = Faint(), torch.randn(8, 4)
    made = autopar.plan_pipeline(
        model, (x,), mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="1,1", compute_dtype="float16"
    )

    def run(rank: int) -> str:
        module = autopar.compile_pipeline(model, made)
        with pytest.raises(UsageError) as caught:
            (module(x) * 2.0**rank).backward()
        return str(caught.value)

    for rank, words in enumerate(on_ranks(run, 2)):
        assert words.startswith(f"rank {1 - rank} scales the loss by {2.0 ** (1 - rank)}, this rank by {2.0**rank}:")


class Timed(Steep):
    """Forward reads a number from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.times.item()


def test_a_state_dict_with_another_constant_is_refused_on_all_stages() -> None:
    model, x = Timed(), torch.randn(8, 4)
    made = autopar.plan_pipeline(model, (x,), mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="1,1")

    def run(rank: int) -> str:
        module, state = autopar.compile_pipeline(model, made), model.state_dict()
        module.load_state_dict(state)
        with pytest.raises(UsageError) as caught:
            module.load_state_dict({**state, "times": torch.tensor(7)})
        return str(caught.value)

    assert all("the buffer times becomes another one, and forward reads" in words for words in on_ranks(run, 2))


def test_weights_on_meta_are_drawn_as_without_a_pipeline() -> None:
    """Whatever the cut."""
    _, args = build("masked")
    with torch.device("meta"):
        model = Masked().double()
    plan = PipelinePlan.from_json(
        autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="2,2").to_json()
    )

    def alone(rank: int) -> dict[str, Tensor]:
        whole = autopar.compile(model, autopar.plan(model, args, mesh="1", hardware=stressed(), effort="low"), seed=3)
        return {key: value.full_tensor() for key, value in whole.state_dict().items()}

    def run(rank: int) -> dict[str, Tensor]:
        module = autopar.compile_pipeline(model, plan, seed=3)
        return {key: value.full_tensor() for key, value in module.state_dict().items()}

    (wanted,) = on_ranks(alone, 1)
    found = on_ranks(run, 2)
    assert set().union(*found) == set(wanted)
    for state in found:
        assert all(torch.equal(value, wanted[key]) for key, value in state.items())


def test_a_checkpoint_is_by_name(tmp_path: Path) -> None:
    """Saved in one cut, read whole, and in another cut."""
    plan, other = (plan_of("gpt untied", "pp=2", stages=counts) for counts in ("1,3", "3,1"))
    model, args = build("gpt untied")

    def run(rank: int) -> tuple[float, float, set[str]]:
        module = autopar.compile_pipeline(model, plan)
        train(module, args)
        dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path / "saved")
        here = module(*args).item()
        again = autopar.compile_pipeline(build("gpt untied")[0], other)
        state = {"model": again.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        again.load_state_dict(state["model"])
        return here, again(*args).item(), set(again.state_dict()) - set(module.state_dict())

    everyone = on_ranks(run, 2)
    for here, again, _ in everyone:
        assert again == pytest.approx(here, rel=1e-12)
    assert any(moved for _, _, moved in everyone)
    whole = {"model": build("gpt untied")[0].state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is loaded in a single process
        dcp.load(whole, checkpoint_id=tmp_path / "saved", no_dist=True)
    plain = build("gpt untied")[0]
    plain.load_state_dict(whole["model"])
    assert plain(*args).item() == pytest.approx(here, rel=1e-9)


@pytest.mark.parametrize("name", ["gpt tied", "gpt untied"])
def test_an_optimizers_states_are_resumed(name: str, tmp_path: Path) -> None:
    """By torch's flat state dicts, in the same cut bit for bit and in another."""
    plan, other = (plan_of(name, "pp=2", stages=counts) for counts in ("1,3", "3,1"))
    _, args = build(name)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = module(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def start(plan: PipelinePlan) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = autopar.compile_pipeline(build(name)[0], plan)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-2)

    def resume(plan: PipelinePlan) -> list[float]:
        module, optimizer = start(plan)
        state = dict(zip("mo", get_state_dict(module, optimizer, options=flat), strict=True))
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        set_state_dict(module, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"], options=flat)
        return [step(module, optimizer) for _ in range(2)]

    def run(rank: int) -> tuple[list[float], list[float], list[float]]:
        module, optimizer = start(plan)
        for _ in range(2):
            step(module, optimizer)
        dcp.save(dict(zip("mo", get_state_dict(module, optimizer, options=flat), strict=True)), checkpoint_id=tmp_path / "saved")
        return [step(module, optimizer) for _ in range(2)], resume(plan), resume(other)

    for here, again, there in on_ranks(run, 2):
        assert again == here
        assert there == pytest.approx(here, rel=1e-12)


def test_a_whole_state_dict_is_loaded_by_each_stage() -> None:
    plan, (model, args) = plan_of("llama", "pp=2"), build("llama")
    state = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    changed = copy.deepcopy(model)
    changed.load_state_dict(state)

    def run(rank: int) -> float:
        module = autopar.compile_pipeline(model, plan)
        module.load_state_dict(state)
        return float(module(*args).detach())

    assert on_ranks(run, 2) == pytest.approx([changed(*args).item()] * 2, rel=1e-12)


class Spare(nn.Module):
    """Layers, and one that no call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return ((x - y) ** 2).mean()


def test_a_parameter_that_no_stage_reads_is_on_all_ranks(tmp_path: Path) -> None:
    model, args = Spare().double(), (torch.randn(8, 8).double(), torch.randn(8, 8).double())
    plan = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=2, hardware=stressed(), effort="low", stages="layers.1")
    export_program(plan, model, tmp_path / "program")
    state = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}

    def run(rank: int) -> tuple[list[str], list[str], bool]:
        module, loaded = autopar.compile_pipeline(model, plan), autopar.load_program(tmp_path / "program")
        module.load_state_dict(state)
        train(module, args)
        whole = module.state_dict()["spare.weight"].full_tensor()
        there = torch.equal(loaded.state_dict()["spare.bias"].full_tensor(), model.spare.bias)
        return sorted(module.state_dict()), sorted(loaded.state_dict()), torch.equal(whole, state["spare.weight"]) and there

    spare = ["spare.bias", "spare.weight"]
    for rank, (mine, loaded, right) in enumerate(on_ranks(run, 2)):
        assert mine == loaded == [f"layers.{rank}.bias", f"layers.{rank}.weight", *spare] and right


SCRIPT = """
import torch, autopar
import torch.distributed as dist
from tests.pipeline.models import build

model, args = build("masked")
module = autopar.compile_pipeline(model, "plan.json")
loss = module(*args)
loss.backward()
print(f"loss {loss.item()}\\n", end="", flush=True)  # one write, which the other rank's cannot divide
dist.destroy_process_group()
"""


def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    plan_of("masked", "pp=2").save(tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    model, args = build("masked")
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]
    assert done.returncode == 0, done.stderr
    assert found == pytest.approx([model(*args).item()] * 2, rel=1e-12)


def test_a_copy_runs_in_the_pipeline_with_weights_of_its_own() -> None:
    plan, (model, args) = plan_of("llama", "pp=2"), build("llama")

    def run(rank: int) -> tuple[float, float, float]:
        module = autopar.compile_pipeline(model, plan)
        other = copy.deepcopy(module)
        before = module(*args).item()
        train(module, args)
        return before, other(*args).item(), module(*args).item()

    for before, kept, after in on_ranks(run, 2):
        assert before == kept != after


def test_what_a_pipeline_does_not_do_yet_is_refused_on_all_ranks() -> None:
    plan, (model, args) = plan_of("llama", "pp=2"), build("llama")

    def run(rank: int) -> list[str]:
        module, words = autopar.compile_pipeline(model, plan), []

        def refused(call: Any) -> None:
            try:
                call()
                words.append("not refused")
            except AutoparError as error:
                words.append(error.message)

        refused(lambda: module.local_batch([1, 2]))
        refused(lambda: module.replica)
        refused(lambda: module.save_pretrained("nowhere"))
        refused(lambda: module(*(tensor.float() for tensor in args)))
        return words

    for words in on_ranks(run, 2):
        assert all("so far" in one or "its stages alone" in one for one in words[:3])
        assert "float32 [8, 8], planned was int64" in words[3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: re.sub('"order": "F0 ([^"]*?)B0', r'"order": "B0 F0 \1', text, count=1), "waits for ever"),
        (lambda text: text.replace('"order": "F0 ', '"order": "B0 ', 1), "the order of stage 0 has 3 actions F, of 4 microbatches"),
        (lambda text: text.replace("autopar.pipeline-plan/1", "autopar.pipeline-plan/9", 1), "has the schema 'autopar.pipeline-plan/9'"),
        (lambda text: text.replace('"first_module": "layers', '"first_module": "leyers'), "no operator of forward is in it"),
    ],
)
def test_an_edited_plan_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    text = plan_of("llama", "pp=2", stages="2,2").to_json()
    path = tmp_path / "plan.json"
    path.write_text(change(text))
    assert path.read_text() != text
    model, _ = build("llama")

    def run(rank: int) -> str:
        try:
            autopar.compile_pipeline(model, path)
        except AutoparError as error:
            return error.message
        return "not refused"

    assert all(words in found for found in on_ranks(run, 2))


def test_options_that_pipelines_do_not_take() -> None:
    model, args = build("llama")
    with pytest.raises(UsageError, match="pp is the axis of a pipeline's stages"):
        autopar.plan(model, args, mesh="pp=2,dp=2")
    with pytest.raises(UsageError, match="must be the outermost"):
        autopar.plan_pipeline(model, args, mesh="dp=2,pp=2", microbatches=4)
    with pytest.raises(UsageError, match="8 stages are asked for, and the model can be cut into 7 units"):
        autopar.plan_pipeline(model, args, mesh="pp=8", microbatches=4)
    with pytest.raises(UsageError, match=r"the stages 1,1 are 2 with 2 layers"):
        autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, stages="1,1")
