"""Programs in a folder: run without the model, filled from files block by block, refused when stale."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopar
from autopar.errors import AutoparError, UsageError
from autopar.plan import Plan
from autopar.runtime import export_program, load_safetensors
from tests.offloading import make, offloaded
from tests.runtime.test_training import X, Y, gradients, mse, net, on_ranks, plan_of, refused, same, whole


class Tied(nn.Module):
    """One weight twice, a buffer, and a layer that no call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(x))) + self.shift).square().mean()


@lru_cache
def tied() -> tuple[Tied, Plan]:
    torch.manual_seed(0)
    model = Tied()
    return model, autopar.plan(model, (X.float(),), mesh="2x2", hardware="cpu-cluster", constraints={"first.weight": "S0 S1"})


def test_a_folder_runs_and_trains_without_the_model(tmp_path: Path) -> None:
    plan = plan_of("2x2", 0.0)
    export_program(plan, net(dropout=0.0), tmp_path / "program", loss=mse)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program"], "nothing is left beside it"
    assert len(list((tmp_path / "program").iterdir())) == 5

    def run(rank: int) -> tuple[float, float, bool, list[str], str]:
        reference = net(dropout=0.0)
        wanted = mse(reference(X), Y)
        wanted.backward()
        module = autopar.load_program(tmp_path / "program")
        value = module(X, Y)
        value.backward()
        names = sorted(module.state_dict()) == sorted(reference.state_dict())
        right = same(gradients(module), gradients(reference)) and names
        return value.item(), wanted.item(), right, [], refused(lambda: module(X[:4], Y[:4]))

    for value, wanted, right, _, words in on_ranks(run, 4):
        assert value == pytest.approx(wanted, rel=1e-12) and right
        assert "an exported program runs the planned call alone: training, x [8, 16], wanted [8, 8]\nhint: " in words


def test_values_lie_on_the_host_in_a_loaded_program_too(tmp_path: Path) -> None:
    (model, args), plan = make(), offloaded()
    export_program(plan, model, tmp_path / "program")

    def run(rank: int) -> tuple[bool, str]:
        modules = [autopar.load_program(tmp_path / "program"), autopar.compile(model, plan)]
        for module in modules:
            module(*args).backward()
        found, wanted = map(gradients, modules)
        words = refused(lambda: autopar.load_program(tmp_path / "program", execute="graph"))
        return all(torch.equal(found[name], wanted[name]) for name in wanted) and found.keys() == wanted.keys(), words

    assert list(plan.copies)
    for alike, words in on_ranks(run, 4):
        assert alike and words.startswith("the plan keeps values on the host, and a traced program makes no copies there")


class Positions(nn.Module):
    """A buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("positions", torch.arange(16.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.positions).square().mean()


def test_a_loaded_program_is_a_module_as_the_compiled_one_is(tmp_path: Path) -> None:
    model = Positions()
    plan = autopar.plan(model, (X.float(),), mesh="2", hardware="cpu-cluster", constraints={"layer.weight": "S0 R", "layer.bias": "S0"})
    export_program(plan, model, tmp_path / "program")

    def run(rank: int) -> tuple[list[str], bool, list[float], list[str]]:
        module = autopar.load_program(tmp_path / "program")
        weight = module.layer.weight
        norm = weight.norm().item()  # of the whole
        with torch.autograd.set_detect_anomaly(True):
            module(X.float()).backward()
        weight.data = 2 * weight.data
        twice = torch.equal(whole(weight), 2 * model.layer.weight)
        words = [refused(lambda: module(x=X.float())), refused(lambda: module(X.float(), 3))]
        return sorted(module.state_dict()), twice, [norm, model.layer.weight.norm().item()], words

    for names, twice, (norm, wanted), words in on_ranks(run, 2):
        assert names == ["layer.bias", "layer.weight"] and twice and norm == pytest.approx(wanted)
        said = "the call differs from the captured one in"
        assert words[0].startswith(f"{said} 0 arguments by position where it had 1, x\nhint: ")
        assert words[1].startswith(f"{said} 2 arguments by position where it had 1\nhint: ")


def test_meta_models_are_filled_from_files_block_by_block(tmp_path: Path) -> None:
    model, plan = tied()
    stored = {name: tensor for name, tensor in model.state_dict().items() if name != "second.weight"}
    save_file(stored, tmp_path / "weights.safetensors")
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(UsageError, match="is on meta and has no values to export"):
        export_program(plan, empty, tmp_path / "program")
    export_program(plan, empty, tmp_path / "program", weights=[tmp_path / "weights.safetensors"])
    wanted = model(X.float()).item()

    def run(rank: int) -> tuple[float, bool, float, list[str]]:
        module = autopar.load_program(tmp_path / "program")
        compiled = autopar.compile(empty, plan)
        missing = load_safetensors(compiled, [tmp_path / "weights.safetensors"])
        equal = all(torch.equal(whole(tensor), stored[name]) for name, tensor in compiled.state_dict().items() if name in stored)
        tie = module.get_submodule("second").weight is module.get_submodule("first").weight
        return module(X.float()).item(), equal and tie, compiled(X.float()).item(), missing

    for value, right, again, missing in on_ranks(run, 4):
        assert value == pytest.approx(wanted, rel=1e-6) == again and right and missing == []


@pytest.mark.parametrize("folder", [5, None, b"program"])
def test_what_is_no_path_is_refused(folder: object) -> None:
    for load in (autopar.load, autopar.load_program):
        with pytest.raises(UsageError, match="which is not a path"):
            load(folder)


def test_a_stale_folder_is_refused(tmp_path: Path) -> None:
    model, plan = tied()
    export_program(plan, model, tmp_path / "program")
    with pytest.raises(UsageError, match="program exists"):
        export_program(plan, model, tmp_path / "program")
    with pytest.raises(AutoparError, match="made for another model"):
        export_program(plan_of("2x2", 0.0), net(dropout=0.5), tmp_path / "other", loss=mse)
    with pytest.raises(AutoparError, match=r"the plan has a parameter first\.weight, the model none of that name"):
        export_program(plan, nn.Linear(3, 3), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    newer = plan.model_copy(update={"created_by": plan.created_by.model_copy(update={"solver": "another"})})
    for name in ("edited", "torn", "swapped"):
        shutil.copytree(tmp_path / "program", tmp_path / name)
    newer.save(tmp_path / "edited" / "plan.json")
    (tmp_path / "torn" / "rank-00001.safetensors").write_bytes((tmp_path / "torn" / "rank-00001.safetensors").read_bytes()[:900])
    shutil.copy(tmp_path / "swapped" / "rank-00001.safetensors", tmp_path / "swapped" / "rank-00000.safetensors")

    def run(rank: int) -> list[str]:
        return [refused(lambda name=name: autopar.load_program(tmp_path / name)) for name in ("edited", "torn", "swapped", "absent")]

    for rank, (edited, torn, swapped, absent) in enumerate(on_ranks(run, 4)):
        assert "were written for another plan than its plan.json" in edited
        assert ("cannot read the weights" if rank == 1 else "rank 1 refuses: cannot read the weights") in torn
        assert ("is not the program of rank 0" if rank == 0 else "rank 0 refuses") in swapped
        assert "there is no program in" in absent and "the folder that autopar export wrote" in absent
