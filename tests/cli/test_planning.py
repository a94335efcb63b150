"""plan, sweep and their bad inputs: exit status, a hint, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopar.cost_models import load_hardware
from autopar.plan import Plan
from autopar.recording import load
from tests.cli.running import autopar, refused

MODEL = """
import torch
from torch import nn

class Target:
    def __init__(self):
        self.model = nn.Linear(8, 8)
        self.args = (torch.ones(4, 8),)
        self.loss = lambda output, wanted: ((output - wanted) ** 2).mean()
        self.loss_args = (torch.zeros(4, 8),)

def pair(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), (torch.ones(4, 8),)
def triple(): return nn.Linear(8, 8), (), {"input": torch.ones(4, 8)}
def whole(): return Target()
def nothing(): return None
def model_alone(): return nn.Linear(8, 8)
def no_model(): return 3, (torch.ones(4, 8),)
def not_args(): return nn.Linear(8, 8), torch.ones(4, 8)
def fails(): return 1 // 0
def stops(): raise SystemExit(3)

class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x.sum()
        return -x.sum()

def lazy(): return nn.LazyLinear(8), (torch.ones(4, 8),)
def mixed(): return nn.Linear(8, 8).half(), (torch.ones(4, 8),)
def talks():
    print("made here")
    return pair()
def branching(): return Branching(), (torch.ones(4, 8),)
value = 3
def sparse(): return nn.Linear(8, 8), (torch.ones(4, 8).to_sparse(),)
def sparse_buffer():
    model = nn.Linear(8, 8)
    model.register_buffer("adjacency", torch.eye(4).to_sparse())
    return model, (torch.ones(4, 8),)
def nested(): return nn.Linear(8, 8), (torch.nested.nested_tensor([torch.ones(4, 8), torch.ones(2, 8)], layout=torch.jagged),)
async def later(): return pair()
def long(): raise ValueError("first line\\n" + "x" * 100_000)
def longer(): raise ValueError("x" * 100_000)
class Secretive:
    @property
    def model(self): return 1 / 0
def hides(): return Secretive()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_plan_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2,tp=2", "-o", tmp_path / "plan.json")
    assert ran.status == 0, ran.err
    assert "planning for h100-sxm" in ran.err and "wrote" in ran.err
    plan = load(tmp_path / "plan.json")
    assert ran.out == f"{plan}\n"
    assert plan.model.target == "zoo:mlp" and plan.hardware["name"] == "h100-sxm" and plan.mesh == {"dp": 2, "tp": 2}
    assert plan.objective.gap < 0.01 and (plan.objective.status == "optimal") == (plan.objective.gap <= 1e-6)
    assert all(
        row.objective_seconds is None or not row.feasible or row.objective_seconds >= plan.objective.seconds * (1 - 1e-9)
        for row in plan.baselines.values()
    )
    assert autopar(capsys, "check", tmp_path / "plan.json", "zoo:mlp").status == 0
    ran = autopar(capsys, "check", tmp_path / "plan.json", "zoo:mlp,width=128")
    assert ran.status == 1 and "model.graph_sha256" in ran.out


def test_plan_json_pins_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(
        capsys, "plan", "zoo:mlp,layers=1", "--mesh", "2x2", "--hardware", "a100-sxm-80g", "--mode", "inference", "--memory", "1GiB",
        "--optimizer", "sgd", "--cost-model", "communication", "--pin", "head.weight=S(y) R", "--pin", "input:x=S0 R", "--json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    plan = Plan.from_json(ran.out)
    assert plan.parameters["head.weight"].spec == "S1 R" and plan.inputs["x"].spec == "S0 R"
    assert list(plan.mesh) == ["x", "y"] and plan.memory_limit_bytes_per_rank == 2**30 and plan.model.mode == "inference"
    assert plan.pins == {"head.weight": "S(y) R", "input:x": "S0 R"}


def test_devices_tries_every_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--devices", "4", "--hardware", "h200", "--json")
    assert ran.status == 0, ran.err
    assert Plan.from_json(ran.out).mesh in ({"dp": 4}, {"dp": 2, "tp": 2})


def test_zoo_listing(capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "plan", "zoo:")
    assert ran.status == 0
    for name in ("mlp", "gpt2", "llama3-8b", "llama3-70b", "llama3-405b", "resnet", "moe"):
        assert any(line.startswith(f"zoo:{name},") and "batch=" in line for line in ran.out.splitlines())


@pytest.mark.parametrize("function", ["pair", "triple", "whole"])
def test_targets_of_every_form(function: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mode = "train" if function == "whole" else "inference"
    ran = autopar(capsys, "plan", f"{model}:{function}", "--mesh", "dp=2", "--mode", mode, "--json")
    assert ran.status == 0, ran.err
    assert Plan.from_json(ran.out).model.mode == mode


@pytest.mark.parametrize(
    ("target", "status", "said"),
    [
        ("nosuch.py:f", 2, "there is no file nosuch.py"),
        ("nosuch_package.module:f", 2, "there is no module 'nosuch_package'"),
        ("{model}:absent", 2, "has no function 'absent'"),
        ("{model}:value", 2, "has no function 'value'"),
        ("{model}", 2, "cannot read the target"),
        ("no_colon", 2, "cannot read the target"),
        ("{model}:nothing", 2, "returned a NoneType"),
        ("{model}:model_alone", 2, "returned a Linear"),
        ("{model}:no_model", 2, "returned a int as the model"),
        ("{model}:not_args", 2, "returned a Tensor as args"),
        ("{model}:fails", 3, "ZeroDivisionError: integer division or modulo by zero at {model}:19"),
        ("{model}:stops", 3, "SystemExit: 3 at {model}:20"),
        ("{model}:branching", 3, "my_model.py"),
        ("{model}:lazy", 2, "weight, bias of the model have no shape yet"),
        ("{model}:mixed", 3, "float32[4, 8] and float16[8, 8]"),
        ("{model}:sparse", 2, "an example input is a sparse_coo tensor"),
        ("{model}:sparse_buffer", 2, "adjacency is a sparse_coo tensor"),
        ("{model}:nested", 2, "an example input is a nested tensor"),
        ("{model}:later", 2, "{model}:later is an async function"),
        ("{model}:long", 3, "ValueError: first line at {model}:"),
        ("{model}:longer", 3, "ValueError: xxx"),
        ("{model}:hides", 3, "ZeroDivisionError: division by zero at {model}:"),
        ("zoo:nosuch", 2, "no built-in model 'nosuch'"),
        ("zoo:mlp,colour=3", 2, "no key 'colour'"),
        ("zoo:mlp,width=wide", 2, "width='wide'"),
        ("zoo:mlp,width", 2, "cannot read 'width'"),
        ("hf:absent.json", 2, "there is no file absent.json"),
        ("hf:gpt2,batch=1", 2, "AutoConfig.from_pretrained(NAME).to_json_file"),
        ("hf:", 2, "no configuration file is named"),
        ("gpt2,layers=2", 2, "hint: zoo:gpt2,layers=2 is the built-in model"),
        ("hf:{model}", 3, "not a whole JSON file"),
    ],
)
def test_bad_targets(target: str, status: int, said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    ran = autopar(capsys, "plan", target.format(model=model), "--mesh", "dp=2", "--hardware", "h100-sxm", "-o", output)
    refused(ran, status, said.format(model=model))
    assert len(ran.err) < 1000
    assert not output.exists() and list(tmp_path.glob(".plan.json*")) == []


def test_what_a_target_prints_is_no_part_of_the_answer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "plan", f"{model}:talks", "--mesh", "dp=2", "--json")
    assert Plan.from_json(ran.out).mesh == {"dp": 2} and "made here" in ran.err


def test_a_module_that_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import nosuch_dependency\n")
    refused(autopar(capsys, "plan", f"{tmp_path / 'broken.py'}:f", "--mesh", "dp=2"), 3, "No module named 'nosuch_dependency'")
    (tmp_path / "broken.py").write_text("def f(:\n")
    refused(autopar(capsys, "plan", f"{tmp_path / 'broken.py'}:f", "--mesh", "dp=2"), 3, "broken.py:1")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--mesh", "dp=0"], 2, "size 0"),
        (["--mesh", ""], 2, "mesh"),
        (["--mesh", "dp=-2"], 2, "dp=-2"),
        (["--mesh", "dp=2,dp=2"], 2, "twice"),
        (["--mesh", "two"], 2, "cannot read 'two'"),
        ([], 2, "neither a mesh nor a number of devices"),
        (["--devices", "0"], 2, "number of devices is 0"),
        (["--mesh", "dp=2", "--devices", "4"], 2, "has 2 ranks, devices is 4"),
        (["--mesh", "dp=2", "--hardware", "nosuch"], 2, "unknown hardware 'nosuch'"),
        (["--mesh", "dp=2", "--hardware", "nosuch.toml"], 2, "nosuch.toml"),
        (["--mesh", "dp=2", "--memory", "lots"], 2, "'lots' is not an amount of memory"),
        (["--mesh", "dp=2", "--memory", "1e400"], 2, "'1e400' is not an amount of memory"),
        (["--mesh", "dp=2", "--memory", "80000000TiB"], 2, "is 8.79609e+19 bytes, counted are 1 to 2^62"),
        (["--mesh", "dp=2", "--memory", "0.5"], 2, "'0.5' is 0.5 bytes"),
        (["--mesh", "dp=2", "--seed", "-1"], 2, "the seed is -1"),
        (["--mesh", "dp=2", "--pin", "head.weight=S(tp) R"], 2, "no mesh axis 'tp'"),
        (["--mesh", "dp=2", "--memory", "0"], 2, "'0' is not an amount of memory"),
        (["--mesh", "dp=2", "--mode", "learn"], 2, "unknown mode 'learn'"),
        (["--mesh", "dp=2", "--optimizer", "lion"], 2, "unknown optimizer 'lion'"),
        (["--mesh", "dp=2", "--cost-model", "free"], 2, "unknown cost model 'free'"),
        (["--mesh", "dp=2", "--recompute", "some"], 2, "unknown way to recompute 'some'"),
        (["--mesh", "dp=2", "--offload", "some"], 2, "unknown way to offload 'some'"),
        (["--mesh", "dp=2", "--offload", "auto", "--hardware", "cpu-cluster"], 2, "offloading to the host costs: it has no links.host"),
        (["--mesh", "dp=2", "--offload", "auto", "--cost-model", "communication"], 2, "no copies to the host"),
        (["--mesh", "dp=2", "--offload", "auto", "--execute", "cuda_graph"], 2, "make no copies to the host"),
        (["--mesh", "pp=2,dp=2", "--offload", "auto"], 2, "stages of a pipeline keep their values on the device"),
        (["--mesh", "dp=2", "--effort", "some"], 2, "unknown effort 'some'"),
        (["--mesh", "dp=2", "--time-limit", "0"], 2, "time limit is 0"),
        (["--mesh", "dp=2", "--pin", "head.weight"], 2, "cannot read the pin"),
        (["--mesh", "dp=2", "--pin", "nosuch=S0 R"], 2, "nosuch"),
        (["--mesh", "dp=2", "--pin", "head.weight=S0 Q"], 2, "cannot read 'Q'"),
        (["--mesh", "dp=2", "--pin", "head.weight=S0"], 2, "head.weight"),
        (["--mesh", "dp=2", "--pin", "head.weight=S1 R"], 2, "head.weight"),
        (["--mesh", "dp=3,tp=5", "--pin", "head.weight=S10 R"], 2, "these are cut in mesh order, S01"),
        (["--mesh", "dp=2", "--memory", "1KiB"], 1, "the least known to do is"),
    ],
)
def test_bad_options(words: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    more = [] if "--hardware" in words else ["--hardware", "h100-sxm"]
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", *words, *more, "-o", output)
    refused(ran, status, said)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_hardware_field_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.measurement import Measured, to_toml

    text = to_toml(Measured(load_hardware("h100-sxm"), ("a note",)))
    (tmp_path / "machine.toml").write_text(text)
    assert load_hardware(tmp_path / "machine.toml").devices_per_node == 8
    (tmp_path / "machine.toml").write_text(text.replace("latency_seconds", "latency"))
    refused(autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "--hardware", tmp_path / "machine.toml"), 3, "links.node.latency")


def test_a_missing_folder_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.cli.plan.plan_target", None)
    refused(autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "-o", tmp_path / "absent" / "plan.json"), 3, "there is no folder")


def test_planning_twice_gives_equal_files_but_for_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another process has other hashes: nothing follows the order of a set."""
    command = ["plan", "zoo:mlp,layers=2", "--mesh", "dp=2,tp=2", "--time-limit", "1000", "-o"]
    assert autopar(capsys, *command, tmp_path / "one.json").status == 0
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = [sys.executable, "-m", "autopar", *command, str(tmp_path / "two.json")]
    subprocess.run(done, check=True, capture_output=True, env=environment)
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    for file in (one, other):
        del file["objective"]["solve_seconds"]
        assert file["search"]["phases"]
        for phase in file["search"]["phases"]:
            del phase["cpu_seconds"]
    assert one == other


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "sweep", "zoo:mlp,layers=1", "--devices", "1,2", "--hardware", "h100-sxm", "-o", tmp_path / "sweep.json")
    assert ran.status == 0, ran.err
    assert [line.split()[0] for line in ran.out.splitlines()] == ["devices", "1", "2"]
    rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
    assert [row["devices"] for row in rows] == [1, 2] and all(row["feasible"] for row in rows)
    ran = autopar(capsys, "sweep", "zoo:mlp,layers=1", "--devices", "1", "--memory", "1KiB", "--json")
    assert ran.status == 1 and not json.loads(ran.out)["rows"][0]["feasible"] and "1 devices: no plan fits" in ran.err
    for name in ("sweep.csv", "sweep.svg"):
        assert autopar(capsys, "sweep", "zoo:mlp,layers=1", "--devices", "1,2", "-o", tmp_path / name).status == 0
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert lines[0].startswith("devices,feasible,mesh,step_seconds") and [line.split(",")[0] for line in lines[1:]] == ["1", "2"]
    assert float(lines[2].split(",")[3]) == rows[1]["step_seconds"]
    assert drawn(tmp_path / "sweep.svg") == [2, 4]
    refused(autopar(capsys, "sweep", "zoo:mlp", "--devices", "2,zwei"), 2, "'2,zwei'")
    refused(autopar(capsys, "sweep", "zoo:mlp", "--devices", "2", "--effort", "some"), 2, "unknown effort 'some'")


def drawn(path: Path) -> list[int]:
    """How many curves and how many points an SVG has."""
    page = ElementTree.fromstring(path.read_text())
    return [len(list(page.iter(f"{{http://www.w3.org/2000/svg}}{kind}"))) for kind in ("polyline", "circle")]


def test_sweep_over_settings_and_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--hardware", "h100-sxm", "--devices"]
    asked = ["sweep", "zoo:mlp,layers=1", *on, "2", "--vary", "batch=64,256", "--memory", "1KiB,1GiB,2GiB"]
    ran = autopar(capsys, *asked, "-o", tmp_path / "sweep.csv")
    assert ran.status == 0 and ran.err.count("batch=64, 2 devices: no plan fits") == 1, ran.err
    rows = [line.split() for line in ran.out.splitlines()]
    assert [row[:2] for row in rows[::3]] == [["batch", "limit"], ["64", "2"], ["256", "2"]]
    assert [line.split(",")[:3] for line in (tmp_path / "sweep.csv").read_text().splitlines()][::3] == [
        ["batch", "devices", "feasible"], ["64", "2", "True"], ["256", "2", "True"],
    ]  # fmt: skip
    assert autopar(capsys, *asked, "-o", tmp_path / "sweep.svg").status == 0
    assert drawn(tmp_path / "sweep.svg") == [4, 8], "step and memory against the batch, a curve for each limit that anything fits in"
    (tmp_path / "own.py").write_text(OWN)
    ran = autopar(capsys, "sweep", f"{tmp_path / 'own.py'}:make", "--devices", "1", "--vary", "width=8,16", "--json")
    assert [row["settings"] for row in json.loads(ran.out)["rows"]] == [{"width": 8}, {"width": 16}]
    refused(autopar(capsys, "sweep", f"{tmp_path / 'own.py'}:make", *on, "1", "--vary", "depth=8"), 2, "'depth'")
    refused(autopar(capsys, "sweep", "zoo:mlp,batch=8", *on, "1", "--vary", "batch=8"), 2, "batch is given")
    refused(autopar(capsys, "sweep", "zoo:mlp", "--devices", "1", "--vary", "batch"), 2, "cannot read --vary")
    refused(autopar(capsys, "sweep", "zoo:mlp", "--devices", "1", "--vary", "batch=8", "--vary", "batch=9"), 2, "varied twice")


def test_sweep_in_microbatches_and_mixed_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--hardware", "h100-sxm", "--compute-dtype", "bfloat16", "--microbatches"]
    asked = ["sweep", "zoo:mlp,layers=1", "--devices", "2", "--vary", "batch=8,6,16"]
    ran = autopar(capsys, *asked, *more, "4", "-o", tmp_path / "sweep.csv")
    assert ran.status == 0 and "batch=6, 2 devices: a batch of 6 cannot be cut into 4 equal microbatches" in ran.err, ran
    header, *rows = [line.split() for line in ran.out.splitlines()]
    assert header[-2:] == ["microbatches", "status"] and [row[0] for row in rows] == ["8", "6", "16"]
    lines = [line.split(",") for line in (tmp_path / "sweep.csv").read_text().splitlines()]
    assert [line[-1] for line in lines] == ["microbatches", "4", "", "4"]
    assert autopar(capsys, "plan", "zoo:mlp,layers=1,batch=8", "--mesh", "dp=2", *more, "4", "-o", tmp_path / "plan.json").status == 0
    assert load(tmp_path / "plan.json").predicted.step_seconds == float(lines[1][4])
    refused(autopar(capsys, "sweep", "zoo:mlp,batch=6", "--devices", "2", *more, "4"), 2, "a batch of 6 cannot be cut into 4")
    refused(autopar(capsys, "sweep", "zoo:mlp,batch=6", "--devices", "2", *more, "four"), 2, "microbatches is 'four'")


def test_two_results_have_two_places(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, same = tmp_path / "one", tmp_path / "." / "one"
    for words in (["show", plan_file, "--html", one, "--trace", same], ["show", plan_file, "--html", "-", "--trace", "-"],
                  ["plan", "zoo:mlp", "--mesh", "dp=2", "--pareto", "--html", one, "-o", same]):  # fmt: skip
        refused(autopar(capsys, *words), 2, "two results would be written to")
    assert not one.exists()


def test_a_ladder_or_a_sweep_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, command in (('{"schema": "autopar.pareto/1", "rows": []}', "check"), ('{"target": "zoo:mlp", "rows": []}', "show")):
        (tmp_path / "other.json").write_text(text)
        ran = autopar(capsys, command, tmp_path / "other.json")
        refused(ran, 3, "this autopar reads")
        assert "give a file written by autopar plan -o, without --pareto" in ran.err


def test_a_page_comes_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, page = tmp_path / "plan.json", tmp_path / "plan.html"
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "-o", made, "--html", page)
    assert ran.status == 0 and str(load(made)).split() == ran.out.split(), "the table is printed too"
    shown = autopar(capsys, "show", made, "--html", tmp_path / "shown.html")
    assert shown.status == 0 and undated(page) == undated(tmp_path / "shown.html")
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "--html", "-")
    assert ran.out.startswith("<!doctype html>") and ran.out.rstrip().endswith("</html>")
    refused(autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "--html", tmp_path / "nowhere" / "x.html"), 3, "nowhere")


def undated(path: Path) -> str:
    """A page without its date."""
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", path.read_text())


def test_a_saved_ladder_is_shown_as_it_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "ladder.json"
    asked = ["plan", "zoo:mlp,layers=3,batch=256,width=16", "--mesh", "dp=2", "--hardware", "h100-sxm", "--pareto", "--rungs", "3"]
    ran = autopar(capsys, *asked, "--time-limit", "20", "-o", saved, "--html", tmp_path / "made.html")
    assert ran.status == 0, ran.err
    shown = autopar(capsys, "show", saved, "--html", tmp_path / "shown.html", "--svg", tmp_path / "ladder.svg")
    assert shown.out == ran.out and undated(tmp_path / "made.html") == undated(tmp_path / "shown.html")
    assert json.loads(autopar(capsys, "show", saved, "--json").out) == json.loads(saved.read_text())
    words = " ".join(ElementTree.parse(tmp_path / "ladder.svg").getroot().itertext())
    assert all(said in words for said in ("zoo:mlp", "dp=2", "h100-sxm", "train", "memory per rank", "takes less", "KiB", "us"))
    refused(autopar(capsys, "show", saved, "--trace", tmp_path / "x"), 2, "has no single step to trace")
    refused(autopar(capsys, "show", saved, "--search"), 2, "has no phases of a search")
    old = {key: value for key, value in json.loads(saved.read_text()).items() if key in ("schema", "target", "rows")}
    saved.write_text(json.dumps(old))
    assert autopar(capsys, "show", saved, "--html", tmp_path / "x").out == ran.out, "older files have neither hardware nor baselines"
    for broken in ({**old, "rows": []}, {**old, "rows": [{**old["rows"][0], "gap": "none"}]}, {**old, "more": 1}):
        saved.write_text(json.dumps(broken))
        refused(autopar(capsys, "show", saved), 3, "is not a ladder of memory limits")


def test_a_module_named_as_a_path_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    ran = autopar(capsys, "plan", "./own:make", "--mesh", "dp=2")
    refused(ran, 2, "'./own' is not the name of a module")
    assert "did you mean own.py:function?" in ran.err
    refused(autopar(capsys, "plan", "./absent:make", "--mesh", "dp=2"), 2, "'./absent' is not the name of a module")


OWN = """
import torch

def make(width=4):
    return torch.nn.Linear(width, width), (torch.empty(2, width),)
"""


def test_memory_and_pareto_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    ran = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "--pareto", "--memory", "1GiB")
    refused(ran, 2, "--memory and --pareto exclude each other")
    assert "hint: drop one of them" in ran.err


def test_rows_that_each_rank_passes_are_split_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = "plan", f"{tmp_path / 'model.py'}:whole", "--mesh", "dp=2", "--hardware", "cpu-cluster", "--inputs"
    ran = autopar(capsys, *words, "local", "-o", tmp_path / "plan.json")
    assert ran.status == 0, ran
    assert load(tmp_path / "plan.json").pins == {"input:input": "S0 R", "input:wanted": "S0 R"}
    refused(autopar(capsys, *words, "mine"), 2, "unknown kind of inputs 'mine'")


def test_the_next_best_of_a_tied_weight_is_told_by_each_of_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    words = "plan", "zoo:gpt2,layers=1,batch=4,seq=8,width=16,heads=4,vocab=32", "--mesh", "dp=2", "--hardware", "cpu-cluster", "-o", path
    assert autopar(capsys, *words).status == 0
    found = [autopar(capsys, "explain", path, name, "--next", "1") for name in ("tokens.weight", "head.weight", "parameter:head.weight")]
    assert [one.status for one in found] == [0, 0, 0] and len({one.out for one in found}) == 1 and "next best" in found[0].out
