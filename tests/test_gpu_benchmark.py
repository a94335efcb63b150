"""``benchmarks/gpu.py`` in tiny: every section runs, and writes what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.cost_models import Machine, Mesh
from autopar.verify.launch import run_ranks
from benchmarks import gpu
from tests.graphs import random_schedule
from tests.runtime.recorders import RunAgain


def test_every_section_runs_in_tiny(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    arguments = ["--small", "--models", "gpt2", "--ways", "eager,graph,cuda_graph", "--json", str(path)]
    assert run_ranks(lambda _: gpu.main(arguments), 1, alone=True) == [0]
    found = json.loads(path.read_text())
    sections = found["sections"]
    assert set(sections) >= set(gpu.SECTIONS) and found["left_out"] == ["cuda_graph: no GPU to capture on"]
    programs = {(mesh, way) for mesh in ("dp=8", "2x4") for way in ("eager", "graph")}
    assert {(row["mesh"], row["way"]) for row in sections["ranks"]} == programs
    assert all(row["measured_ms"] > 0 for section in ("ranks", "steps") for row in sections[section])
    assert len({round(row["loss"], 5) for row in sections["steps"]}) == 1, "plain and ours have one loss"
    assert all(row["error"] < max(1e-5, 1.3 * row["plain_error"]) for row in sections["values"])
    assert sections["profile"][0]["hardware"]["memory_bandwidth"] > 0


def test_communication_is_left_out_of_a_rank() -> None:
    """Only copies around calls remain, and the kernels of operators. Local steps of reshards are priced at nothing."""
    machine = Machine(Mesh.parse("2x2"), gpu.load_hardware("h200"), "roofline", "eager")
    schedule = random_schedule(gpu.captured(True, "gpt2"), machine, 0)
    everything, own = gpu.predict(schedule, 0.0, calls=True), gpu.predict(schedule, 0.0, calls=False)
    assert own < everything
    assert gpu.predict(schedule, 1e-3, calls=False) >= gpu.issued(schedule)
    program = gpu.bind_rank(schedule, torch.device("cpu"), "eager")
    counted = gpu.count_kernels(gpu.rank_step(schedule, program, torch.device("cpu")))
    slices = sum(item.kind == "slice" and schedule.cuts[item.writes[0]].part is not None for item in schedule.instructions)
    assert sum(counted.values()) == pytest.approx(gpu.issued(schedule) + slices, rel=0.15)


def test_a_rank_of_cuda_graphs_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the recorder for CPUs here; a step then issues copies alone."""
    monkeypatch.setattr(gpu, "find_recorder", lambda device: RunAgain)
    device = torch.device("cpu")
    schedule = random_schedule(gpu.captured(True, "gpt2"), Machine(Mesh.parse("2x2"), gpu.load_hardware("h200"), "roofline", None), 0)
    program = gpu.bind_rank(schedule, device, "cuda_graph")
    step = gpu.rank_step(schedule, program, device)
    step()
    recording = program.recorded.recording  # type: ignore[union-attr]
    step()
    assert recording is not None and program.recorded.recording is recording  # type: ignore[union-attr]
    assert set(recording.replays) == {"forward", "backward"}


def test_what_does_not_fit_in_time_is_said() -> None:
    run = gpu.Run(torch.device("cpu"), gpu.load_hardware("h200"), False, 0.0, ["gpt2"], ["eager"])
    gpu.measure_steps(run)
    assert not run.rows and "steps of gpt2" in run.left_out[0]


@pytest.mark.parametrize("arguments", [["--only", "speed"], ["--models", "bert"], ["--ways", "fast"]])
def test_unknown_words_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert f" {arguments[1]}; there are " in capsys.readouterr().err
