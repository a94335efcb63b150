"""What does a GPU do with the plans: steps, host, kernels, attention, ranks, values, and prices against measured times.

    python benchmarks/gpu.py [--only steps,ranks] [--models gpt2,llama] [--ways eager,graph] [--seconds 460] [--json FILE]
    python benchmarks/gpu.py --small          # tiny models, also on a CPU: a test of the script
    python benchmarks/gpu.py --predict        # prices of ranks alone, without running anything

One process and one device. Sections, in the order in which they run:

    ranks       one rank of sharded programs, forward and backward, communication left out: predicted and measured
    steps       a mesh of one against the plain model, optimizer included; losses and peak memory
    where       forward and backward: wall, the host's seconds, the device's, and kernels
    attention   torch's choice, flash kernels and ours
    values      all ranks in lockstep on the device against the model in float64
    profile     ``autopar profile`` with its residuals, and predictions with what it measured of the host

What does not fit in ``--seconds`` is left out, and said. Times are medians, with the device idle before and after each step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.cost_models import Hardware, load_hardware
from autopar.cost_models.execution import EXECUTIONS
from autopar.importer import capture
from autopar.pricing import inner_seconds
from autopar.recording.replaying import replay
from autopar.runtime import simulate as run_lockstep
from autopar.runtime.execution.binding import bind
from autopar.runtime.execution.cuda_graphs import find_recorder
from autopar.runtime.execution.emission import Graphs, emit
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.read_back import check_recordable
from autopar.runtime.execution.replaying import replayed
from autopar.runtime.ranks.backends import LoneRank
from autopar.runtime.ranks.placement import own_shape
from autopar.schedule import Schedule, makespan, simulate
from benchmarks.host import count_kernels

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", {"batch": 8, "seq": 1024, "layers": 12, "width": 768, "heads": 12, "vocab": 50304, "dtype": "bfloat16"}),
    "llama": ("llama3-8b", {"layers": 4, "batch": 2, "seq": 4096}),
    "moe": (
        "moe",
        {
            "batch": 8, "seq": 1024, "layers": 4, "width": 1024, "heads": 16, "hidden": 4096, "experts": 8, "vocab": 32000,
            "dispatch": "grouped", "dtype": "bfloat16",
        },
    ),
    "resnet": (
        "resnet",
        {
            "batch": 64, "image": 224, "width": 64, "blocks": "3-4-6-3", "bottleneck": True, "classes": 1000, "dtype": "bfloat16",
        },
    ),
}  # fmt: skip
"""Zoo model and sizes by name. An H200 takes 12 to 140 ms for a step of each."""
SMALL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", {"batch": 8, "seq": 8, "layers": 2, "width": 32, "heads": 4, "vocab": 32}),
    "llama": ("llama3", {"batch": 8, "seq": 8, "layers": 2, "width": 64, "heads": 8, "kv_heads": 8, "hidden": 64, "vocab": 32}),
    "moe": (
        "moe",
        {
            "batch": 8, "seq": 8, "layers": 2, "width": 32, "heads": 4, "hidden": 32, "experts": 8, "vocab": 32, "dispatch": "grouped",
        },
    ),
    "resnet": ("resnet", {"batch": 8, "image": 16, "width": 8, "blocks": "1-1", "classes": 8}),
}  # fmt: skip
"""The same in tiny."""
RANKS: Sequence[tuple[str, str]] = (
    ("gpt2", "dp=8"), ("gpt2", "2x4"), ("llama", "dp=8"), ("llama", "2x4"), ("moe", "dp=8"), ("resnet", "dp=8"),
)  # fmt: skip
"""Sharded programs of which one rank runs."""
SHAPES: Sequence[tuple[int, int, int, int, int]] = (
    (2, 32, 8, 4096, 128), (8, 12, 12, 1024, 64), (1, 32, 8, 16384, 128), (4, 16, 16, 2048, 96),
)  # fmt: skip
"""Batch, heads, key heads, sequence and head dim of attention, causal."""
SMALL_SHAPES: Sequence[tuple[int, int, int, int, int]] = ((1, 4, 2, 16, 8),)
"""The same in tiny."""
VALUES = ("gpt2", "llama3", "moe", "resnet")
"""Models whose values are compared, at the zoo's own sizes."""
FACTS: Mapping[str, float] = {
    "gpt2 dp=8": 28.4, "gpt2 2x4": 41.0, "llama dp=8": 34.0, "llama 2x4": 30.5, "moe dp=8": 32.2, "resnet dp=8": 83.6,
}  # fmt: skip
"""Milliseconds that one H200 took for ``RANKS`` on torch 2.11, with an eager form that issued more kernels than today's."""
COMPILING = 90.0
"""Seconds that must be left to begin with what torch compiles."""
PLANNING = 40.0
"""Seconds that must be left to begin with a model: it is captured, planned and run."""
WARMUP, REPEATS = 3, 8
"""Steps that are not counted, and steps that are."""
SEARCH_SECONDS = 15.0
"""Time limit of each plan."""


@dataclass
class Run:
    """What all sections share.

    Args:
        device: that they run on.
        hardware: whose prices are predicted.
        small: whether sizes are tiny.
        deadline: when the script is to have ended, by ``time.monotonic``.
        rows: what was measured, by section.
        left_out: what was not, and why.
    """

    device: torch.device
    hardware: Hardware
    small: bool
    deadline: float
    models: Sequence[str]
    ways: Sequence[str]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, section: str, **row: Any) -> None:
        """Keeps a row and prints it."""
        self.rows.setdefault(section, []).append(row)
        words = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items() if value is not None)
        print(f"  {'  '.join(words)}", flush=True)

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; else ``what`` is left out."""
        left = self.deadline - time.monotonic()
        if not self.small and left < seconds:
            self.left_out.append(f"{what}: {left:.0f} s were left, it may take {seconds:.0f}")
            return False
        return True

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What fails is said and left out; the others go on."""
        try:
            yield
        except Exception as error:
            self.left_out.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            print(f"  {self.left_out[-1]}", flush=True)
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, step: Callable[[], Any]) -> float:
        """Median milliseconds of a step."""
        found = []
        for _ in range(WARMUP + REPEATS):
            self.wait()
            begin = time.perf_counter()
            step()
            self.wait()
            found.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(found[WARMUP:])

    def target(self, name: str, device: str = "cpu") -> Any:
        """A model with example inputs."""
        zoo_name, sizes = (SMALL if self.small else MODELS)[name]
        return zoo.build(zoo_name, device=device, **sizes)


# --- prices ------------------------------------------------------------------------------------------------------------


@cache
def captured(small: bool, name: str) -> autopar.Graph:
    """A model's graph of a training step."""
    zoo_name, sizes = (SMALL if small else MODELS)[name]
    target = zoo.build(zoo_name, device="meta", **sizes)
    return capture(target.model, target.args, mode="train").graph


@cache
def planned(small: bool, name: str, mesh: str, hardware: str) -> tuple[autopar.Plan, Schedule]:
    """A plan and its schedule. CUDA graphs are priced: their host takes next to nothing, so that work is split, and kernels are counted."""
    graph = captured(small, name)
    plan = autopar.plan(graph, mesh=mesh, hardware=hardware, execute="cuda_graph", time_limit=SEARCH_SECONDS)
    return plan, replay(plan, graph)


def predict(schedule: Schedule, issue: float, *, calls: bool) -> float:
    """Predicted milliseconds of forward and backward, without the optimizer.

    Args:
        issue: seconds that the host takes for a kernel.
        calls: whether collectives take time, and are issued.
    """
    hardware = schedule.machine.hardware
    items = list(schedule.instructions) if calls else list(_without_calls(schedule))
    return 1e3 * makespan(simulate(items, hardware.overlap_slowdown, overlaps=hardware.launch_overlaps, issue=issue))


def _without_calls(schedule: Schedule) -> Iterator[Any]:
    """Instructions whose collectives take no time; copies around them stay."""
    for item in schedule.instructions:
        if item.kind in ("start", "wait"):
            yield item._replace(seconds=item.seconds if item.kind == "wait" else 0.0, launches=(item.launches or 1) - 1)
        elif item.kind == "run" and schedule.operations[item.of].strategy.inner:
            strategy = schedule.operations[item.of].strategy
            seconds = max(item.seconds - inner_seconds(strategy, schedule.machine), 0.0)
            yield item._replace(seconds=seconds, stream="compute", launches=(item.launches or 0) - 2 * len(strategy.inner))
        else:
            yield item


def issued(schedule: Schedule) -> int:
    """Kernels that the host issues in a step, calls left out."""
    return sum(item.launches or 0 for item in _without_calls(schedule))


def issue_seconds(hardware: Hardware, way: str) -> float | None:
    """What a kernel costs the host, by the hardware file; None where it does not say."""
    return dict(hardware.issue_seconds).get(way)


def predict_ranks(run: Run, issue: float) -> None:
    """Predicted milliseconds of one rank of each program, beside those that were measured on an H200."""
    for name, mesh in RANKS:
        if name in run.models:
            _, schedule = planned(run.small, name, mesh, run.hardware.name)
            found, facts = predict(schedule, issue, calls=False), FACTS.get(f"{name} {mesh}")
            ratio = found / facts if facts and not run.small else None
            run.add("predict", model=name, mesh=mesh, kernels=issued(schedule), device_ms=predict(schedule, 0.0, calls=False),
                    predicted_ms=found, measured_h200_ms=None if run.small else facts, ratio=ratio)  # fmt: skip


# --- one rank of a sharded program -------------------------------------------------------------------------------------


def stand_in(schedule: Schedule, value: str, device: torch.device) -> Tensor:
    """A rank's part of what enters: small numbers, and indices that are there."""
    dtype, shape = getattr(torch, schedule.graph.tensors[value].dtype), own_shape(schedule, value, 0)
    made = torch.zeros(shape, dtype=dtype, device=device)
    return made.normal_(0.0, 0.02) if dtype.is_floating_point else made


def bind_rank(schedule: Schedule, device: torch.device, way: str) -> Executable | Graphs:
    """One rank's program in a way of execution. What others would send is memory as it is."""
    if way == "cuda_graph":
        check_recordable(schedule, device)
    if way in ("eager", "cuda_graph"):
        bound = bind(schedule, LoneRank(schedule.machine.mesh), device)
        return bound if way == "eager" else replayed(bound, find_recorder(device))
    traced = bind(schedule, LoneRank(schedule.machine.mesh, traced=True), device, in_place=False)
    graphs = emit(traced, device)
    return graphs.compiled() if way == "compiled" else graphs


def rank_step(schedule: Schedule, program: Executable | Graphs, device: torch.device) -> Callable[[], None]:
    """Forward and backward on one rank."""
    entering = {item.tensor: stand_in(schedule, item.tensor, device) for item in schedule.graph.inputs}
    tangents = {item.tensor for item in schedule.graph.of_kind("tangent")}

    def step() -> None:
        values = {name: value for name, value in entering.items() if name not in tangents}
        program.forward([values])
        values.update((name, entering[name]) for name in tangents)
        program.backward([values])

    return step


def measure_ranks(run: Run) -> None:
    for name, mesh in RANKS:
        if name not in run.models or not run.has_time(f"rank of {name} on {mesh}", PLANNING):
            continue
        with run.guarded(f"rank of {name} on {mesh}"):
            _, schedule = planned(run.small, name, mesh, run.hardware.name)
            for way in run.ways:
                what = f"rank of {name} on {mesh}, {way}"
                if way == "compiled" and not run.has_time(what, COMPILING):
                    continue
                with run.guarded(what):
                    torch._dynamo.reset()
                    step = rank_step(schedule, bind_rank(schedule, run.device, way), run.device)
                    issue = issue_seconds(run.hardware, way)
                    predicted = None if issue is None else predict(schedule, issue, calls=False)
                    found = run.measure(step)
                    run.add("ranks", model=name, mesh=mesh, way=way, kernels=issued(schedule), counted=sum(count_kernels(step).values()),
                            device_ms=predict(schedule, 0.0, calls=False), predicted_ms=predicted, measured_ms=found,
                            ratio=None if predicted is None else found / predicted)  # fmt: skip


# --- a mesh of one against the plain model -----------------------------------------------------------------------------


def training_step(model: nn.Module, args: Sequence[Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Forward, backward and AdamW, fused where torch has it on the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(*args)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def gradient_step(model: nn.Module, args: Sequence[Tensor]) -> Callable[[], None]:
    """Forward and backward."""
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(*args).backward()

    return step


def contestants(run: Run, name: str) -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Sequence[Tensor]]]]]:
    """Ways to run a model, plain and ours, each made when it is asked for, with equal weights."""
    target = run.target(name)
    plan, _ = planned(run.small, name, "1", run.hardware.name)
    args = [value.to(run.device) for value in target.args]

    def plain() -> nn.Module:
        return copy.deepcopy(target.model).to(run.device)

    yield "plain", lambda: (plain(), args)
    if "compiled" in run.ways:
        yield "torch.compile", lambda: (torch.compile(plain()), args)  # type: ignore[return-value]
    for way in run.ways:
        yield way, lambda way=way: (autopar.compile(plain(), plan, execute=way), args)  # type: ignore[misc]


def measure_steps(run: Run) -> None:
    for name in run.models:
        if not run.has_time(f"steps of {name}", PLANNING):
            continue
        with run.guarded(f"steps of {name}"):
            plan, schedule = planned(run.small, name, "1", run.hardware.name)
            plain: dict[str, float] = {}
            for way, make in contestants(run, name):
                compiles = way in ("compiled", "torch.compile")
                if compiles and not run.has_time(f"steps of {name}, {way}", COMPILING):
                    continue
                with run.guarded(f"steps of {name}, {way}"):
                    torch._dynamo.reset()
                    model, args = make()
                    step = training_step(model, args, run.device)
                    losses = [step().item() for _ in range(2)]
                    if run.device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    found = run.measure(step)
                    peak = torch.cuda.max_memory_allocated() if run.device.type == "cuda" else None
                    issue = issue_seconds(run.hardware, way)
                    predicted = None if issue is None else predict(schedule, issue, calls=True) + 1e3 * plan.predicted.optimizer_seconds
                    base = plain.setdefault("ms", found)
                    run.add("steps", model=name, way=way, device_ms=1e3 * plan.predicted.step_seconds, predicted_ms=predicted,
                            measured_ms=found, to_plain=found / base, loss=losses[-1],
                            peak_gib=None if peak is None else peak / 2**30,
                            predicted_gib=plan.predicted.peak_memory_bytes_per_rank / 2**30)  # fmt: skip


# --- where the time goes -----------------------------------------------------------------------------------------------


def measure_where(run: Run) -> None:
    """The host's seconds are those until Python is done, the device idle before."""
    for name in run.models:
        if not run.has_time(f"where of {name}", PLANNING / 2):
            continue
        for way, make in contestants(run, name):
            if way in ("compiled", "torch.compile"):
                continue
            with run.guarded(f"where of {name}, {way}"):
                model, args = make()
                step = gradient_step(model, args)
                wall, host = run.measure(step), []
                for _ in range(REPEATS):
                    run.wait()
                    begin = time.perf_counter()
                    step()
                    host.append(time.perf_counter() - begin)
                run.wait()
                busy, kernels = device_time(run, step)
                calls = sum(count_kernels(step).values())
                host_ms = 1e3 * statistics.median(host)
                run.add("where", model=name, way=way, wall_ms=wall, host_ms=host_ms, device_ms=busy, device_kernels=kernels, calls=calls,
                        host_us_a_call=1e3 * host_ms / calls, wall_to_device=None if busy is None else wall / busy)  # fmt: skip


def device_time(run: Run, step: Callable[[], None]) -> tuple[float | None, int | None]:
    """Milliseconds in which the device is busy in a step, and its kernels, by torch's profiler; None without a GPU."""
    if run.device.type != "cuda":
        return None, None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        run.wait()
    spans = sorted(
        (event.time_range.start, event.time_range.end) for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0.0, 0.0
    for begin, end in spans:
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return busy / 1e3, len(spans)


# --- attention ---------------------------------------------------------------------------------------------------------


def measure_attention(run: Run) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    for batch, heads, key_heads, length, dim in SMALL_SHAPES if run.small else SHAPES:
        q, k, v = (torch.randn(batch, count, length, dim, dtype=dtype, device=run.device) for count in (heads, key_heads, key_heads))
        q, k, v = (value.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for value in (q, k, v))
        shared = heads != key_heads
        kinds: dict[str, Callable[[], Tensor]] = {
            "torch": lambda q=q, k=k, v=v, shared=shared: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared),
            "ours": lambda q=q, k=k, v=v, dim=dim: torch.ops.autopar.attention.default(q, k, v, None, True, dim**-0.5, 0.0, 0)[0],
        }  # fmt: skip
        for kind, attend in (*kinds.items(), *([("flash", kinds["torch"])] if run.device.type == "cuda" else [])):
            with run.guarded(f"attention {kind} {(batch, heads, key_heads, length, dim)}"):
                allowed = [SDPBackend.FLASH_ATTENTION] if kind == "flash" else list(SDPBackend.__members__.values())
                allowed = [backend for backend in allowed if backend.name not in ("ERROR", "OVERRIDEABLE")]
                with sdpa_kernel(allowed):
                    with torch.no_grad():
                        forward = run.measure(attend)
                    both = run.measure(lambda attend=attend: attend().sum().backward())  # type: ignore[misc]
                run.add("attention", shape=[batch, heads, key_heads, length, dim], kind=kind, forward_ms=forward, both_ms=both)


# --- values ------------------------------------------------------------------------------------------------------------


def measure_values(run: Run) -> None:
    """Relative error of all gradients, against the model in float64 on the CPU, of plain eager and of all ranks."""
    names = ("gpt2",) if run.small else VALUES
    for name in names:
        for dtype in ("float32", "bfloat16"):
            for mesh in ("4", "2x2"):
                if run.has_time(f"values of {name}, {dtype}, {mesh}", PLANNING / 2):
                    with run.guarded(f"values of {name}, {dtype}, {mesh}"):
                        torch.manual_seed(0)
                        run.add("values", model=name, dtype=dtype, mesh=mesh, **value_errors(run, name, dtype, mesh))


def value_errors(run: Run, name: str, dtype: str, mesh: str) -> dict[str, float]:
    target = zoo.build(name, dtype=dtype)
    plan = autopar.plan(target.model, target.args, mesh=mesh, hardware=run.hardware, cost_model="communication", time_limit=SEARCH_SECONDS)
    captured = capture(target.model, target.args, mode="train")
    schedule = replay(plan, captured.graph)
    held = {**dict(target.model.named_parameters(remove_duplicate=False)), **dict(target.model.named_buffers(remove_duplicate=False))}
    names = {item.tensor: item for item in schedule.graph.inputs}
    found_names = iter(target.args)
    values: dict[str, Tensor] = {}
    for tensor, item in names.items():
        if item.kind in ("parameter", "buffer"):
            values[tensor] = held[item.name].detach().clone().to(run.device)
        elif item.kind == "constant":
            values[tensor] = captured.constants[item.name].to(run.device)
        elif item.kind == "tangent":
            values[tensor] = torch.ones(schedule.graph.tensors[tensor].shape, dtype=getattr(torch, dtype), device=run.device)
        else:
            values[tensor] = next(found_names).to(run.device)
    exact = reference(copy.deepcopy(target.model).double(), target.args)
    plain = reference(copy.deepcopy(target.model).to(run.device), [value.to(run.device) for value in target.args])
    ours = run_lockstep(schedule, values, dropout=False, device=run.device)
    leaving = zip(schedule.outputs, ours.outputs, strict=True)
    gradients = {output.name: whole.double().cpu() for (output, _), whole in leaving if output.kind == "gradient"}
    return {"plain_error": relative_error(plain, exact), "error": relative_error(gradients, exact)}


def reference(model: nn.Module, args: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of a model by name, in float64 on the CPU."""
    double = next(model.parameters()).dtype == torch.float64
    model(*(value.double() if double and value.is_floating_point() else value for value in args)).backward()
    return {name: value.grad.double().cpu() for name, value in model.named_parameters(remove_duplicate=False) if value.grad is not None}


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The norm of all differences, relative to that of all gradients."""
    common = found.keys() & exact.keys()
    assert common, "no gradient is known under one name in both"
    difference = sum(float((found[name] - exact[name]).square().sum()) for name in common)
    return float((difference / sum(float(exact[name].square().sum()) for name in common)) ** 0.5)


# --- profile -----------------------------------------------------------------------------------------------------------


def profile_apart(quick: bool, seconds: float) -> Hardware:
    """What ``autopar profile`` writes, in a process of its own: it forks ranks, which a process that has used a GPU cannot."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hardware.toml"
        command = [sys.executable, "-m", "autopar", "profile", "--ranks", "1", "--output", str(path), *(["--quick"] if quick else [])]
        here = str(Path(__file__).resolve().parent.parent)
        there = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, check=True, timeout=seconds, env=there, capture_output=True)
        return load_hardware(path)


def measure_profile(run: Run) -> None:
    """Figures and residuals; the ranks' predictions again, with the seconds that the host was measured to take."""
    if not run.has_time("profile", 2 * PLANNING):
        return
    with run.guarded("profile"):
        quick = run.small or not run.has_time("a whole profile", 200.0)
        begin = time.monotonic()
        hardware = profile_apart(quick, run.deadline - begin if not run.small else 300.0)
        run.add("profile", seconds=time.monotonic() - begin, issue_us={way: 1e6 * each for way, each in hardware.issue_seconds})
        run.rows["profile"][0]["hardware"] = hardware.to_dict()
        for fit, residual in hardware.residuals:
            run.add("residuals", fit=fit, points=residual.points, median=residual.median, percentile_90=residual.percentile_90)
        issue = issue_seconds(hardware, "eager")
        for row in [row for row in run.rows.get("ranks", ()) if row["way"] == "eager" and issue]:
            _, schedule = planned(run.small, row["model"], row["mesh"], run.hardware.name)
            found = predict(schedule, float(issue or 0.0), calls=False)
            run.add("ranks by the profile's host", model=row["model"], mesh=row["mesh"], predicted_ms=found,
                    measured_ms=row["measured_ms"], ratio=row["measured_ms"] / found)  # fmt: skip


SECTIONS: Mapping[str, Callable[[Run], None]] = {
    "ranks": measure_ranks, "steps": measure_steps, "where": measure_where, "attention": measure_attention, "values": measure_values,
    "profile": measure_profile,
}  # fmt: skip
"""In the order in which they run."""


def pick_hardware(device: torch.device) -> str:
    """The built-in hardware that is most like a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return "h200" if "H200" in name or not name else "a100-sxm-80g" if "A100" in name else "h100-sxm"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma")
    parser.add_argument("--models", default=",".join(MODELS), help="models, by comma")
    parser.add_argument("--ways", default=",".join(EXECUTIONS), help="ways of execution, by comma")
    parser.add_argument("--hardware", help="whose prices are predicted; by default the built-in ones of the device")
    parser.add_argument("--seconds", type=float, default=460.0, help="of the whole script, at most")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--predict", action="store_true", help="predict ranks, run nothing")
    parser.add_argument("--issue", type=float, help="with --predict: microseconds that the host takes for a kernel, eagerly")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    names, models, ways = ([name.strip() for name in text.split(",")] for text in (given.only, given.models, given.ways))
    for kind, found, known in (("section", names, SECTIONS), ("model", models, MODELS), ("way", ways, EXECUTIONS)):
        if unknown := [name for name in found if name not in known]:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hardware = load_hardware(given.hardware or pick_hardware(device))
    run = Run(device, hardware, given.small, time.monotonic() + given.seconds, models, ways)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, prices of {hardware.name}", flush=True)
    if device.type != "cuda" and "cuda_graph" in ways:
        ways.remove("cuda_graph")
        run.left_out.append("cuda_graph: no GPU to capture on")
    if given.predict:
        predict_ranks(run, 1e-6 * given.issue if given.issue is not None else issue_seconds(hardware, "eager") or 0.0)
    else:
        for name in names:
            print(name, flush=True)
            SECTIONS[name](run)
    print("\n".join(["left out:", *(f"  {item}" for item in run.left_out)]) if run.left_out else "nothing was left out")
    if given.json:
        about = {"device": where, "torch": torch.__version__, "hardware": hardware.name, "small": given.small}
        given.json.write_text(json.dumps({**about, "sections": run.rows, "left_out": run.left_out}, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
