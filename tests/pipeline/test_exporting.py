"""Exported pipelines: a folder runs without the model as the compiled pipeline does, and one that is not whole is refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.pipeline_plan import PipelinePlan
from autopar.recording.pipelines import recorded_pipeline, replay_pipeline
from autopar.runtime import export_program, load_safetensors
from autopar.runtime.pipelines.step import simulate_pipeline
from autopar.runtime.ranks.placement import gather
from autopar.sharding import ShardingSpec
from benchmarks.models import stressed
from tests.pipeline.models import MODELS, build, capture, values_of
from tests.pipeline.test_evaluation import dropping
from tests.pipeline.test_interleaved import Shared
from tests.pipeline.test_training import plan_of
from tests.runtime.test_training import on_ranks, refused

pytestmark = pytest.mark.usefixtures("short_search")


class Mixed(Shared):
    """A weight that two stages of one rank have, a frozen layer, buffers, and a tensor that all stages read."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.register_buffer("scale", self.scale, persistent=False)
        self.register_buffer("count", torch.zeros(2))
        self.shift = torch.linspace(-1.0, 1.0, width, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) * self.scale + self.shift).tanh()
        return ((x - y) ** 2).mean()


def mixed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Mixed().double(), (torch.randn(8, 8).double(), torch.randn(8, 8).double())


def read_folder(folder: Path) -> tuple[PipelinePlan, dict[str, Tensor]]:
    """The plan in a folder, and its weights put together of all ranks' parts, by name."""
    plan, found = PipelinePlan.from_json((folder / "plan.json").read_text()), dict[str, Tensor]()
    mesh = recorded_pipeline(plan).schedules[0].machine.mesh
    for position in range(plan.positions):
        files = [folder / f"rank-{position * mesh.ranks + rank:05d}.safetensors" for rank in range(mesh.ranks)]
        opened = [safe_open(file, framework="pt") for file in files]
        for name, row in json.loads(opened[0].metadata()["tensors"]).items():
            whole = gather([one.get_tensor(name) for one in opened], ShardingSpec.parse(row["spec"]), mesh)
            assert torch.equal(found.setdefault(name, whole), whole), "stages that read one weight hold the same"
    return plan, found


SIMULATED = [
    ("gpt tied", "pp=2,dp=2", "zero-bubble"), ("gpt untied", "pp=2,dp=2", "whole"), ("gpt tied", "pp=2", "interleaved:2"),
    ("gpt untied", "pp=2", "interleaved:2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh", "order"), SIMULATED)
def test_a_folder_holds_the_step_that_was_planned(name: str, mesh: str, order: str, tmp_path: Path) -> None:
    """All its ranks simulated in one process, bit for bit."""
    plan, (model, args, graph) = plan_of(name, mesh, order=order), capture(name, 4)
    export_program(plan, model, tmp_path / "program")
    read, weights = read_folder(tmp_path / "program")
    folder, planned, values = recorded_pipeline(read), replay_pipeline(plan, graph), values_of(graph, model, args)
    named = {item.name: item.tensor for item in graph.inputs if item.kind == "parameter"}
    held = {named[key]: tensor for key, tensor in weights.items() if key in named}
    assert all(torch.equal(values[key], tensor) for key, tensor in held.items()) and len(held) == len(named)
    wanted = simulate_pipeline(planned.stages, planned.schedules, planned.order, values).outputs
    found = simulate_pipeline(folder.stages, folder.schedules, folder.order, values | held).outputs
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert folder.order == planned.order and folder.stages.tied == planned.stages.tied


def train(module: nn.Module, args: tuple[Tensor, ...]) -> list[Any]:
    """Losses, this rank's parts of gradients, and norms that these were clipped by, of two steps, and the loss after them."""
    torch.manual_seed(3)
    optimizer, found = torch.optim.AdamW(module.parameters(), lr=1e-2), list[Any]()
    for _ in range(2):
        loss = module(*args)
        loss.backward()
        gradients = {name: parameter.grad.to_local().clone() for name, parameter in module.named_parameters() if parameter.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), gradients, norm]
    with torch.no_grad():
        found.append(module(*args))
    return found


def absent(module: nn.Module, plan: PipelinePlan) -> list[str]:
    """The names of the whole model's that are None on this rank."""
    parts = [(name, *name.rpartition(".")[::2]) for name in sorted(plan.model_names())]
    return [name for name, path, last in parts if getattr(module.get_submodule(path), last) is None]


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, with the same names."""
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(*(value.to_local() if hasattr(value, "to_local") else value for value in (one, other)))


GLOO: list[tuple[str, str, dict[str, str]]] = [
    ("gpt tied", "pp=2,dp=2", {"order": "zero-bubble"}),
    ("mixed", "pp=2", {"order": "interleaved:2", "stages": "layers.1,layers.2,layers.3"}),
    ("dropping", "pp=2", {"order": "whole", "stages": "layers.2"}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), GLOO)
def test_a_loaded_pipeline_is_the_compiled_one(
    name: str, mesh: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """On gloo ranks: names, gradients, clipped steps and the loss after them, bit for bit."""
    monkeypatch.setitem(MODELS, "mixed", mixed)
    monkeypatch.setitem(MODELS, "dropping", dropping)
    plan, (model, args) = plan_of(name, mesh, **options), build(name)
    export_program(plan, model, tmp_path / "program")
    changed = {key: 2 * tensor for key, tensor in model.state_dict().items()}
    save_file({key: tensor.clone() for key, tensor in changed.items()}, tmp_path / "weights.safetensors")

    def run(rank: int) -> tuple[bool, bool, list[str], bool]:
        module, compiled = autopar.load_program(tmp_path / "program"), autopar.compile_pipeline(model, plan)
        names = [list(dict(one.named_parameters())) + sorted(one.state_dict()) + absent(one, plan) for one in (module, compiled)]
        copied = copy.deepcopy(module)
        alike = equal(train(module, args), train(compiled, args)) and equal(module.state_dict(), compiled.state_dict())
        with torch.no_grad():
            words = [refused(lambda: module(*(tensor[:4] for tensor in args))), refused(lambda: module.eval()(*args))]
        module.train().load_state_dict(copied.state_dict())
        restored = equal(module.state_dict(), copied.state_dict())
        filled = not load_safetensors(module, [tmp_path / "weights.safetensors"]) and all(
            torch.equal(tensor.full_tensor(), changed[key]) for key, tensor in module.state_dict().items()
        )
        module.load_state_dict(changed)  # of the whole model: names of other stages are passed over
        return names[0] == names[1], alike, words, restored and filled and module.extra_repr() == compiled.extra_repr()

    for same_names, alike, words, restored in on_ranks(run, 4 if "dp" in mesh else 2):
        assert same_names and alike and restored
        shapes = ", ".join(f"{item} {list(tensor.shape)}" for item, tensor in zip(plan.inputs, args, strict=True))
        assert all(f"an exported program runs the planned call alone: training, {shapes}\nhint: " in one for one in words)


def test_a_loaded_pipeline_knows_that_it_draws(tmp_path: Path) -> None:
    """Calls without gradients drop something else each time, as the compiled pipeline's do; a later seed is warned of."""
    model, args = dropping()
    plan = autopar.plan_pipeline(model, args, mesh="pp=2", microbatches=4, hardware=stressed(), effort="low", stages="layers.2")
    export_program(plan, model, tmp_path / "program")

    def losses(module: nn.Module) -> list[float]:
        with torch.no_grad():
            return [module(*args).item() for _ in range(3)]

    def run(rank: int) -> tuple[list[float], list[float], list[str]]:
        torch.manual_seed(3)
        module = autopar.load_program(tmp_path / "program")
        found = losses(module), losses(autopar.compile_pipeline(model, plan))
        torch.manual_seed(4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses(module)
        return *found, [one.category.__name__ for one in caught]

    for loaded, compiled, warned in on_ranks(run, 2):
        assert loaded == compiled and len(set(loaded)) == 3
        assert "LaterSeedWarning" in warned


SCRIPT = """
import sys
import torch

class Barred:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("tests", "benchmarks") or name.startswith("autopar.zoo"):
            raise ImportError(f"{name} holds models")

sys.meta_path.insert(0, Barred())
import torch.distributed as dist
import autopar

module = autopar.load_program("program")
args = torch.load("args.pt")
loss = module(*args)
loss.backward()
norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
print(f"loss {loss.item()} {norm.item()}\\n", end="", flush=True)  # one write, which the other rank's cannot divide
dist.destroy_process_group()
"""


def test_it_runs_where_the_model_cannot_be_imported(tmp_path: Path) -> None:
    """Exported from a model on meta and a file of its weights; under torchrun."""
    plan, (model, args) = plan_of("gpt tied", "pp=2", order="interleaved:2"), build("gpt tied")
    empty = copy.deepcopy(model).to("meta")
    empty.head.weight = empty.tokens.weight  # torch unties them on the way
    with pytest.raises(UsageError, match="is on meta and has no values to export"):
        export_program(plan, empty, tmp_path / "program")
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, tmp_path / "weights.safetensors")
    export_program(plan, empty, tmp_path / "program", weights=[tmp_path / "weights.safetensors"])
    torch.save(args, tmp_path / "args.pt")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loss = model(*args)
    loss.backward()
    wanted = [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()]
    found = [[float(word) for word in line.split()[1:]] for line in done.stdout.splitlines() if line.startswith("loss")]
    assert found == [pytest.approx(wanted, rel=1e-12)] * 2


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[str], Path]:
    """Copies of one program, by name."""
    model, _ = build("masked")
    export_program(plan_of("masked", "pp=2"), model, tmp_path / "program")
    return lambda name: Path(shutil.copytree(tmp_path / "program", tmp_path / name))


def test_what_is_not_one_export_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    model, args = build("masked")
    swapped, lacking, torn, edited = map(folders, ("swapped", "lacking", "torn", "edited"))
    shutil.copy(swapped / "rank-00000.safetensors", swapped / "rank-00001.safetensors")
    (lacking / "rank-00001.safetensors").unlink()
    (torn / "rank-00001.safetensors").write_bytes((torn / "rank-00001.safetensors").read_bytes()[:900])
    (edited / "plan.json").write_text((edited / "plan.json").read_text().replace('"solver": "', '"solver": "another ', 1))
    export_program(plan_of("masked", "pp=2"), model, tmp_path / "again")
    with torch.no_grad():
        model.head.weight[0, 0] += 1.0
    export_program(plan_of("masked", "pp=2"), model, tmp_path / "other")
    export_program(autopar.plan(model, args, mesh={"dp": 2}, hardware=stressed(), effort="low"), model, tmp_path / "unstaged")

    def run(rank: int) -> dict[str, str]:
        given = {name: tmp_path / name for name in ("swapped", "lacking", "torn", "edited")}
        mixed = {name: tmp_path / (name if rank else "program") for name in ("other", "unstaged")} | {"absent": tmp_path / "absent"}
        found = {name: refused(lambda folder=folder: autopar.load_program(folder)) for name, folder in {**given, **mixed}.items()}
        found["options"] = refused(lambda: autopar.load_program(tmp_path / "program", execute="graph"))
        return found | {"again": refused(lambda: autopar.load_program(tmp_path / ("again" if rank else "program")))}

    for rank, found in enumerate(on_ranks(run, 2)):
        assert "is not the program of rank 1" in found["swapped"]
        assert "has no file of rank 1: rank-00001.safetensors\nhint: give each rank the folder with its own file" in found["lacking"]
        assert "cannot read the weights" in found["torn"]
        assert all(found[name].startswith("rank 1 refuses: ") is (rank == 0) for name in ("swapped", "lacking", "torn"))
        assert "were written for another plan than its plan.json" in found["edited"]
        words = "ranks 0 and 1 have programs of different exports\nhint: give every rank the files of one export"
        assert found["other"] == found["unstaged"] == words
        assert found["again"] == "no error", "the same weights written again are the same program"
        assert "there is no program in" in found["absent"]
        assert found["options"].startswith("a pipeline's program is loaded without execute\nhint: leave execute out")


def test_another_number_of_processes_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("given")
    (words,) = on_ranks(lambda rank: refused(lambda: autopar.load_program(folder)), 1)
    assert "of 2 ranks, 1 processes are running\nhint: start 2 processes" in words
