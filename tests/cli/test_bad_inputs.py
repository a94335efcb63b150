"""What a newcomer mistypes and an attacker tries: one line that says what is wrong, a hint, the right exit status, nothing left behind.

Beside the tables in the tests of each command: here are files and words that are wrong in ways that nobody had in mind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.cost_models import load_hardware
from autopar.measurement import Measured, to_toml
from tests.cli.running import Ran, autopar
from tests.graphs import two_layer_plan

GOOD_PLAN = two_layer_plan().to_json()
PLAN = json.loads(GOOD_PLAN)
WEIGHT = next(iter(PLAN["parameters"]))
LONG = "a" * 300


def refused(ran: Ran, status: int, folder: Path, before: set[Path]) -> None:
    lines = ran.err.strip().splitlines()
    said = [line for line in lines if line.startswith("error: ")]
    assert ran.status == status and len(said) == 1 and lines[-1].startswith("hint: "), ran
    assert len(said[0]) < 600 and "Traceback" not in ran.err and "\x1b" not in ran.err, ran
    assert ran.out == "" and set(folder.iterdir()) == before


def edited(*place: Any) -> Callable[[], str]:
    """The plan's text with the last of ``place`` where the others lead."""
    *keys, last, value = place

    def text() -> str:
        data = json.loads(json.dumps(PLAN))
        inner = data
        for key in keys:
            inner = inner[key]
        inner[last] = value
        return json.dumps(data)

    return text


PLANS: dict[str, Callable[[], str | bytes]] = {
    "empty": lambda: "", "blank": lambda: "\n\n", "null": lambda: "null", "number": lambda: "5", "list": lambda: "[1, 2]",
    "html": lambda: "<html>", "no keys": lambda: "{}", "zeros": lambda: "\0" * 50, "binary": lambda: bytes(range(256)),
    "utf-16": lambda: json.dumps(PLAN).encode("utf-16"), "surrogate": lambda: b"\xed\xa0\xbd",
    "cut": lambda: json.dumps(PLAN)[:3000], "deep lists": lambda: "[" * 200_000,
    "deep keys": lambda: '{"a":' * 100_000 + "1" + "}" * 100_000,
    "digits": lambda: '{"schema": "autopar.plan/2", "a": 1' + "0" * 5000 + "}",
    "schema of tomorrow": edited("schema", "autopar.plan/99"), "no schema": edited("schema", None), "a key too many": edited("extra", 5),
    "nan": edited("objective", "seconds", float("nan")), "infinite gap": edited("objective", "gap", float("inf")),
    "gap nan": edited("objective", "gap", float("nan")), "less than no time": edited("objective", "seconds", -1.0),
    "status": edited("objective", "status", "perfect"), "no mesh": edited("mesh", {}), "mesh of none": edited("mesh", "dp", 0),
    "mesh a list": edited("mesh", [2, 2]), "axis of true": edited("mesh", "dp", True), "axis of 1e30": edited("mesh", "dp", 10**30),
    "twelve axes": edited("mesh", {f"a{number}": 2 for number in range(12)}),
    "memory of 1e400": edited("memory_limit_bytes_per_rank", 10**400),
    "memory below 0": edited("memory_limit_bytes_per_rank", -5), "half a byte": edited("memory_limit_bytes_per_rank", 1.5),
    "axis twice": edited("parameters", WEIGHT, "spec", "S0 S0"),
    "shape below 0": edited("parameters", WEIGHT, "shape", [-1, 3]), "shape of 1e30": edited("parameters", WEIGHT, "shape", [10**30]),
    "operators none": edited("ops", None), "an operator a number": edited("ops", 0, 7), "never": edited("ops", 0, "times", 0),
    "no attributes": edited("ops", 0, "attributes", {}), "names in a list": edited("ops", 0, "attributes", {"args": [], "kwargs": []}),
    "instruction -1": edited("schedule", 0, "id", -1), "bucket below 0": edited("limits", "bucket_bytes", -1),
    "stage 1": edited("schedule", 0, "stage", 1),
    "cost model": edited("created_by", "cost_model", "free"), "mode": edited("model", "mode", "dream"),
    "a call of a number": edited("model", "arguments", {"kwargs": 3}), "a call of text": edited("model", "arguments", {"args": "x"}),
    "pin a number": edited("pins", {"a": 5}),
    "a key twice": lambda: json.dumps(PLAN)[:-1] + ', "microbatches": 1}',
    "a mesh twice": lambda: '{"mesh": {"dp": 4}, ' + json.dumps(PLAN)[1:],
    "an axis twice": lambda: json.dumps(PLAN).replace('"mesh": {', '"mesh": {"dp": 2, ', 1),
    "a row's key twice": lambda: json.dumps(PLAN).replace('"phase": "forward"', '"phase": "backward", "phase": "forward"', 1),
    "escape": edited("mode\x1b[31m", 5),
}  # fmt: skip


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_plan_files(text: Callable[[], str | bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, given = tmp_path / "plan.json", text()
    path.write_bytes(given if isinstance(given, bytes) else given.encode())
    for words in (["check", path], ["show", path, "--json"], ["explain", path, "h"], ["verify", path, "zoo:mlp"], ["solve", path]):
        refused(autopar(capsys, *words), 3, tmp_path, {path})


OF_NO_MACHINE = {
    "no hardware": {}, "1e-308": {"memory_bandwidth": 1e-308}, "0": {"memory_bandwidth": 0}, "no links": {"links": None},
    "no flops": {"peak_flops": {}}, "memory of 8e19": {"memory_bytes": 8e19},
}  # fmt: skip


@pytest.mark.parametrize("changed", OF_NO_MACHINE.values(), ids=OF_NO_MACHINE)
def test_hardware_in_plans(changed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read by what computes with it."""
    path = tmp_path / "plan.json"
    path.write_text(edited("hardware", PLAN["hardware"] | changed if changed else {})())
    refused(autopar(capsys, "check", path), 3, tmp_path, {path})
    refused(autopar(capsys, "show", path, "--html", tmp_path / "page.html"), 3, tmp_path, {path})


LEGAL_TO_READ = {
    "an operator that is none": edited("ops", 0, "op", "mm"), "operator unheard of": edited("ops", 0, "op", "aten.nosuch.default"),
    "another's input": edited("ops", 0, "attributes", {"args": [{"ref": 99}], "kwargs": {}}),
    "no such dtype": edited("ops", 0, "attributes", {"args": [{"dtype": "os.system"}], "kwargs": {}}),
    "no such axis": edited("ops", 0, "factors", {"b": ["nosuch"]}), "no inputs": edited("ops", 0, "inputs", []),
    "no operators": edited("ops", []), "no schedule": edited("schedule", []), "of nothing": edited("schedule", 0, "of", "nosuch"),
    "reads nothing": edited("schedule", 0, "reads", ["nosuch"]), "never comes": edited("schedule", 0, "microbatch", 10**15),
    "no collectives": edited("collectives", []), "over nothing": edited("collectives", 0, "axes", []),
    "part of nothing": edited("collectives", 0, "axes", ["dp:(0)0"]), "more bytes than there are": edited("collectives", 0, "bytes", 2**62),
    "axis 9": edited("parameters", WEIGHT, "spec", "S9 R"), "more dims": edited("parameters", WEIGHT, "spec", "S0 R R R"),
    "a dtype of none": edited("parameters", WEIGHT, "dtype", "float7"), "a place of none": edited("parameters", WEIGHT, "index", 10**9),
    "a tensor of none": edited("parameters", WEIGHT, "tensor", "nosuch"), "microbatches": edited("microbatches", 4),
    "microbatches of 1e18": edited("microbatches", 10**18), "axis without a name": edited("mesh", {"": 2, "tp": 2}),
}  # fmt: skip


@pytest.mark.parametrize("text", LEGAL_TO_READ.values(), ids=LEGAL_TO_READ)
def test_plans_that_do_not_hold(text: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check says so; what only reads shows them as they are, or says what cannot be."""
    path, page = tmp_path / "plan.json", tmp_path / "page.html"
    path.write_text(text())
    ran = autopar(capsys, "check", path)
    assert ran.status in (1, 3) and ran.err.strip().splitlines()[-1].startswith("hint: ") and "Traceback" not in ran.err
    reading = (["show", path], ["explain", path, "h"], ["diff", path, path])
    for words in (*reading, ["show", path, "--html", page], ["show", path, "--trace", page]):
        ran = autopar(capsys, *words)
        if ran.status:
            refused(ran, 2 if words[0] == "explain" and "nothing named" in ran.err else 3, tmp_path, {path})
        page.unlink(missing_ok=True)


GOOD = to_toml(Measured(load_hardware("h100-sxm"), ()))


def with_line(key: str, value: str) -> str:
    changed = re.sub(rf"^{key} = .*$", f"{key} = {value}", GOOD, flags=re.MULTILINE)
    assert changed != GOOD
    return changed


HARDWARE = {
    "empty": "", "zeros": "\0", "a name alone": "name = 5\n", "deep": "a = " + "[" * 5000 + "]" * 5000, "twice": GOOD + '\nname = "x"\n',
    "a key too many": "colour = 3\n" + GOOD, "1e-308": with_line("memory_bandwidth", "1e-308"), "nan": with_line("memory_bandwidth", "nan"),
    "below 0": with_line("memory_bandwidth", "-1"), "infinite": with_line("memory_bandwidth", "inf"),
    "text": with_line("memory_bytes", '"80GB"'),
    "digits": with_line("memory_bytes", "9" * 400), "1e308": with_line("kernel_launch_seconds", "1e308"),
    "no node": with_line("devices_per_node", "0"), "float64 alone": with_line("peak_flops", "{ float64 = 1e9 }"),
}  # fmt: skip


@pytest.mark.parametrize("text", HARDWARE.values(), ids=HARDWARE)
def test_hardware_files(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "--hardware", path, "-o", tmp_path / "plan.json")
    refused(ran, 3, tmp_path, {path})


def test_an_axis_that_no_mesh_has_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(GOOD + "\n[axes.tensor]\nlatency_seconds = 1e-6\nbandwidth = 1e9\n")
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "--hardware", path)
    assert ran.status == 0 and "warning: the hardware describes tensor, no axis of the mesh (dp)" in ran.err


UNITS = {
    "memory_bandwidth": "3.35", "kernel_launch_seconds": "4.0", "bandwidth": "450.0", "latency_seconds": "6.0", "memory_bytes": "80e15",
}  # fmt: skip


@pytest.mark.parametrize("field", UNITS)
def test_figures_in_another_unit_are_said(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for them is one of no machine, and nothing else would tell."""
    path = tmp_path / "machine.toml"
    path.write_text(re.sub(rf"(?m)^{field} = .*$", f"{field} = {UNITS[field]}", GOOD))
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=1", "--hardware", path)
    assert ran.status == 0 and re.search(rf"warning: no machine is like .*{field} = {float(UNITS[field]):g} ".replace("+", r"\+"), ran.err)
    bare = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=1", "--hardware", path, "--cost-model", "communication")
    assert bare.status == 0 and "no machine" not in bare.err


def test_a_field_that_is_not_there_is_named_beside_the_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(GOOD.replace("memory_bytes", "memory_gb", 1))
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "--hardware", path)
    refused(ran, 3, tmp_path, {path})
    assert "field memory_bytes: field required; there is no field memory_gb\nhint: figures are plain numbers" in ran.err
    assert "h100-sxm.toml is a complete example" in ran.err


PATHS = {"a folder": ("folder", 3), "a loop of links": ("loop", 3), "none": ("absent.json", 3), "nowhere": ("absent/plan.json", 3),
         "too long": (f"{LONG}.json", 3), "no name": ("nul\0byte.json", 2), "a folder's": ("folder/", 3)}  # fmt: skip


@pytest.mark.parametrize(("name", "status"), PATHS.values(), ids=PATHS)
def test_paths(name: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    Path("good.json").write_text(GOOD_PLAN)
    before = set(tmp_path.iterdir())
    for words in (["show", name], ["check", name], ["diff", "good.json", name], ["solve", name], ["verify", name, "zoo:mlp"]):
        refused(autopar(capsys, *words), status, tmp_path, before)
    ran = autopar(capsys, "plan", "zoo:mlp", "--mesh", "dp=2", "--hardware", name + ".toml")
    refused(ran, 2 if len(name) < 100 else 3, tmp_path, before)
    if name not in ("absent.json", "loop"):  # which can be written
        for words in (["plan", "zoo:mlp", "--mesh", "dp=2", "-o", name], ["sweep", "zoo:mlp", "--devices", "2", "-o", name],
                      ["show", "good.json", "--html", name], ["profile", "-o", name], ["solve", "good.json", "-o", name]):  # fmt: skip
            refused(autopar(capsys, *words), status, tmp_path, before)


WORDS = [
    "show", "show PLAN more", "show PLAN --nosuch", "diff PLAN", "check", "explain PLAN", "explain PLAN h --next -1",
    "explain PLAN h --next x", "verify PLAN", "verify PLAN zoo:mlp --steps 0", "verify PLAN zoo:mlp --backend mpi", "export PLAN zoo:mlp",
    "check PLAN zoo:nosuch", "check PLAN nosuch.py:f", "sweep zoo:mlp", "sweep zoo:mlp --devices 0", "sweep zoo:mlp --devices -4",
    "sweep zoo:mlp --devices 2,,4", "sweep zoo:mlp --devices 99999999999999999999", "sweep zoo:mlp --devices 2 -o table.pdf",
    "sweep zoo:mlp --devices 2 --time-limit 0", "tune", "tune zoo:mlp", "tune zoo:mlp --mesh dp=2", "tune zoo:mlp --mesh dp=2 --rounds 0",
    "tune zoo:mlp --mesh dp=2 --candidates one", "rules extra", "rules --missing nosuch", "rules --missing zoo:nosuch",
    "rules --mode x --missing zoo:mlp", "profile --ranks 0", "profile --ranks two", "solve", "solve PLAN --time-limit -1",
    "solve PLAN --gap nan", "solve PLAN --method magic", "schema", "schema nosuch", "completion", "completion nosuch", "demo --steps 0",
    "demo --ranks 0", "demo --ranks 10000", "plna", "--nosuch", "plan", "MLP --devices nan", "MLP --mesh dp=1e3", "MLP --mesh dp=2.0",
    "MLP --mesh dp=\u0663", "MLP --mesh dp=99999999999999999999", "MLP --mesh dp=2,", "MLP --mesh =2", "MLP --mesh dp=2=3",
    "MLP --mesh dp=2;tp=2", "MLP --mesh 1x", "MLP --mesh 2x2x2x2x2x2", "MLP --mesh a=2,b=2,c=2,d=2,e=2,f=2,g=2", "MLP --devices -1",
    "MLP --devices 1000000007", "MLP --mesh dp=2 --memory -1GiB", "MLP --mesh dp=2 --memory nan", "MLP --mesh dp=2 --memory inf",
    "MLP --mesh dp=2 --memory 1e308GiB", "MLP --mesh dp=2 --time-limit nan", "MLP --mesh dp=2 --time-limit -3",
    "MLP --mesh dp=2 --time-limit abc", "MLP --mesh dp=2 --microbatches 0", "MLP --mesh dp=2 --microbatches x",
    "MLP --mesh dp=2 --optimizer x:y", "MLP --mesh dp=2 --optimizer lion:nan,2", "MLP --mesh dp=2 --optimizer lion:-1,2",
    "MLP --mesh dp=2 --seed 1.5", "MLP --mesh dp=2 --pin =S0", "MLP --mesh dp=2 --pin head.weight=S(no",
    "MLP --mesh dp=2 --pin head.weight=", "MLP --mesh dp=2 --pin a=R --pin a=S0", "MLP --mesh dp=2 --pin [=R",
    "MLP --mesh dp=2 --pin output:9=R", "MLP --mesh dp=2 --rungs 4", "MLP --mesh dp=2 --rungs 0 --pareto",
    "MLP --mesh dp=2 --html x.html -o x.html", "MLP --mesh dp=2 --pareto --memory 1GiB", "MLP --mesh dp=2 extra",
    "MLP --mesh dp=2 --compute-dtype int8", "plan zoo --mesh dp=2", "plan zoo:mlp,, --mesh dp=2", "plan zoo:mlp,layers=-1 --mesh dp=2",
    "plan zoo:mlp,batch=0 --mesh dp=2", "plan zoo:mlp,batch=99999999999999999999 --mesh dp=2", "plan zoo:gpt2,dropout=nan --mesh dp=2",
    "plan zoo:mlp,batch=99999999999999,layers=1 --mesh dp=2,tp=2", "verify PLAN zoo:mlp --seed 99999999999999999999",
    "verify PLAN zoo:mlp --seed -1", "export PLAN zoo:mlp -o out --seed 99999999999999999999",
    "plan zoo:mlp,width=99999999999999 --mesh dp=2", "plan zoo:mlp,layers=1,layers=2 --mesh dp=2",
    "plan zoo:gpt2,heads=7 --mesh dp=2", "plan hf: --mesh dp=2", "plan : --mesh dp=2", "plan a:b:c --mesh dp=2",
    "plan os:nosuch --mesh dp=2", "plan - --mesh dp=2", "plan .py:f --mesh dp=2",
]  # fmt: skip


@pytest.mark.parametrize("line", WORDS)
def test_words(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.json").write_text(GOOD_PLAN)
    text = line.replace("PLAN", "good.json").replace("MLP", "plan zoo:mlp,layers=1 --hardware h100-sxm -o plan.json")
    refused(autopar(capsys, *text.split()), 2, tmp_path, {tmp_path / "good.json"})
