"""profile: what is measured becomes a hardware file that loads, explains what was measured, and plans. No test looks at a real time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from autopar.cost_models import Efficiency, Hardware, Link, Machine, Mesh, Operator, load_hardware
from autopar.cost_models.collectives import KINDS
from autopar.cost_models.efficiency import NOTHING
from autopar.cost_models.fitting import CollectiveTime, OperatorTime
from autopar.cost_models.links import Figures
from autopar.measurement import Measured, links, profiling, to_toml
from autopar.measurement.device import Peaks
from autopar.measurement.hardware import Times, fit
from autopar.plan import Plan
from tests.cli.running import autopar
from tests.cost_models.gpu_times import CLASSES, GPU, gpu_times

TRUTH = Hardware(
    "truth", 16e9, 1e10, 1e-5, (("float32", 5e10),), 4,
    Link(1e-4, 1e9, "tree", 1e-4, tuple((kind, Figures(1e-4 * rank, 1e9 / rank, "tree", 5e-5)) for rank, kind in enumerate(KINDS, 1))),
    Link(1e-3, 1e8),
    efficiencies=(
        ("contraction", Efficiency(0.8, 0.5, 5e-5)), ("pointwise", Efficiency(NOTHING, 0.9, 1e-5)),
        ("aten.gelu", Efficiency(NOTHING, 0.2, 3e-5)),
    ),
    launch_overlaps=False,
)  # fmt: skip
"""A machine whose times are given to the fit."""


def times_of(hardware: Hardware) -> Times:
    """What ``hardware`` takes, without error."""
    machine = Machine(Mesh.parse("2x2"), hardware)
    work = [("contraction", "autopar.contract.default", 1e4 * 50**power, 1e3 * 10**power) for power in range(5)]
    work += [("contraction", "autopar.contract.default", 1e4, 1e3 * 10**power) for power in range(1, 6)]
    names = ("aten.add.Tensor", "aten.mul.Tensor", "aten.gelu.default")
    work += [("pointwise", name, 1.0, 1e3 * 8**power) for name in names for power in range(6)]
    operators = []
    for family, name, flops, moved in work:
        seconds = machine.operator_seconds(Operator(name, family, "float32", (), (), flops, moved))
        operators.append(OperatorTime(family, name, "float32", flops, moved, seconds))
    groups = [(machine.mesh.whole(0),), (machine.mesh.whole(0), machine.mesh.whole(1))]
    collectives = [
        ("node", CollectiveTime(kind, machine.group(axes).size, full, machine.collective_seconds(kind, full, axes)))
        for kind in KINDS for axes in groups for full in (4096.0, 2.0**18, 2.0**24)
    ]  # fmt: skip
    return Times(Peaks(dict(hardware.peak_flops), hardware.memory_bandwidth), tuple(operators), tuple(collectives), 0.5, False)


def test_a_machine_is_found_again_from_its_times() -> None:
    found = fit(times_of(TRUTH), "found", 16e9, 4)
    for kind in KINDS:
        given, got = TRUTH.node.figures(kind), found.node.figures(kind)
        assert (got.latency_seconds, got.bandwidth) == pytest.approx((given.latency_seconds, given.bandwidth))
    for name in ("contraction", "pointwise", "aten.gelu"):
        given, got = TRUTH.efficiency(name), found.efficiency(name)
        assert (got.arithmetic, got.memory, got.launch_seconds) == pytest.approx((given.arithmetic, given.memory, given.launch_seconds))
    assert "aten.mul" not in dict(found.efficiencies), "its class describes it"
    assert found.overlap_slowdown == 0.5 and not found.launch_overlaps
    assert max(residual.largest for _, residual in found.residuals) < 1e-6


def test_a_gpu_is_found_again_from_400_noisy_times() -> None:
    """Launch, arithmetic and memory traffic overlap; two kinds of normalisation have figures of their own."""
    given = Times(Peaks(dict(GPU.peak_flops), GPU.memory_bandwidth), tuple(gpu_times(400, noise=0.03)), (), 0.0, True)
    found = fit(given, "found", 80e9, 8)
    assert max(residual.median for _, residual in found.residuals) < 0.06
    for family, operators in CLASSES.items():
        for name, true in operators.items():
            assert found.efficiency(family, f"{name}.default").memory == pytest.approx(true.memory, rel=0.06)


def test_the_file_is_the_hardware(tmp_path: Path) -> None:
    given = times_of(TRUTH)
    operators = tuple(replace(time, host_seconds=1e-5 * count) for count, time in enumerate(given.operators))
    hardware = fit(replace(given, operators=operators), "found", 16e9, 4)
    path = tmp_path / "machine.toml"
    path.write_text(to_toml(Measured(hardware, ("a note",))))
    read = load_hardware(path)
    assert Hardware.from_dict(hardware.to_dict()) == hardware
    assert path.read_text().startswith("# a note\n")
    issued = [time.host_seconds for time in operators if time.host_seconds]
    assert dict(read.issue_seconds) == pytest.approx({"eager": median(issued)}, rel=1e-4)
    assert not fit(given, "found", 16e9, 4).issue_seconds, "where the host is the device"
    assert [name for name, _ in read.efficiencies] == [name for name, _ in hardware.efficiencies]
    assert [name for name, _ in read.residuals] == [name for name, _ in hardware.residuals]
    for (_, one), (_, two) in zip(read.residuals, hardware.residuals, strict=True):
        assert asdict(one) == pytest.approx(asdict(two), rel=1e-4)
    one, two = (Machine(Mesh.parse("2x2"), item) for item in (hardware, read))
    for kind in KINDS:
        args = (kind, 1e6, (one.mesh.whole(0), one.mesh.whole(1)))
        assert two.collective_seconds(*args) == pytest.approx(one.collective_seconds(*args), rel=1e-4)


def test_without_links_the_memory_stands_for_them() -> None:
    times = times_of(TRUTH)
    alone = fit(Times(times.peaks, times.operators, (), 0.0, True), "alone", 16e9, 1)
    assert alone.node == alone.network == Link(0.0, TRUTH.memory_bandwidth)


def test_profile_writes_a_file_to_plan_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.toml"
    ran = autopar(capsys, "profile", "--quick", "--ranks", 2, "-o", path)
    assert ran.status == 0, ran.err
    assert ran.out == path.read_text()
    assert "median error" in ran.err and "90th percentile" in ran.err
    hardware = load_hardware(path)
    measured = dict(hardware.residuals)
    assert {f"links.node.{kind}" for kind in KINDS} | {"efficiency.contraction", "efficiency.pointwise"} <= set(measured)
    assert 0 <= hardware.overlap_slowdown <= 1
    ran = autopar(capsys, "plan", "zoo:mlp,layers=1", "--mesh", "dp=2", "--hardware", path, "--json")
    assert Plan.from_json(ran.out).hardware == hardware.to_dict()


@pytest.mark.slow
def test_profile_under_torchrun(tmp_path: Path) -> None:
    """The ranks that torchrun started measure; one of them writes."""
    path = tmp_path / "machine.toml"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "autopar", "profile", "--quick", "-o", str(path)]
    ran = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert load_hardware(path).devices_per_node == 2


def test_an_interrupted_profile_writes_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while operators are timed; a file that was there stays."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "time_operators", interrupted)
    path = tmp_path / "machine.toml"
    path.write_text("before")
    ran = autopar(capsys, "profile", "--quick", "--ranks", 1, "-o", path)
    assert ran.status == 130 and "no file was written" in ran.err
    assert [file.name for file in tmp_path.iterdir()] == ["machine.toml"] and path.read_text() == "before"


def test_profile_says_at_once_that_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert autopar(capsys, "profile", "-o", tmp_path / "absent" / "machine.toml").status == 3


def test_a_call_takes_what_it_adds_to_the_work_before_it_in_the_lower_quartile_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three windows, that between the least and the one in the middle; the work is taken off as it is stretched."""
    now = {"wall": 0.0, "processor": 0.0}
    windows = iter([0.001, 0.004, 0.002, 0.010])  # one before, then three
    current = [0.0]

    def begin() -> None:
        current[0] = next(windows)

    def work() -> None:
        now["wall"] += 0.008
        now["processor"] += 0.004

    def call() -> None:
        now["wall"] += current[0]

    clock = SimpleNamespace(window=1e-6, device=torch.device("cpu"), now=lambda: now["processor"])
    monkeypatch.setattr(links, "meet", begin)
    monkeypatch.setattr(links, "most_over_ranks", lambda seconds: seconds)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: now["wall"]))
    assert links._seconds_between(call, work, 2.0, clock) == pytest.approx(0.003)  # type: ignore[arg-type]
