"""Shared by ``plan``, ``tune`` and ``sweep``: their options, and a target planned with its words on stderr."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import typer

from autopar.cli.terminal import Line, note, printing_aside
from autopar.errors import UsageError
from autopar.garbage import young_garbage_only
from autopar.options import AUTO, DEFAULT_HARDWARE, PlanOptions, check_one_of
from autopar.pareto import Pareto
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.planning.cautions import CAUTIONS
from autopar.planning.grid import Grid, plan_sweep
from autopar.planning.memory_ladder import plan_ladder
from autopar.planning.pipelines import plan_stages, plan_with_or_without_stages
from autopar.planning.session import PlanSession, open_session
from autopar.report import units
from autopar.rows import Inputs
from autopar.search import Progress
from autopar.sweeping import Point, Sweep
from autopar.target import Target

HardwareOption = Annotated[str | None, typer.Option(help=f"a built-in name or a TOML file [default: {DEFAULT_HARDWARE}]")]
ModeOption = Annotated[str, typer.Option(help="train or inference")]
OptimizerOption = Annotated[
    str, typer.Option(help="adamw, adamw-mixed, sgd, sgd-momentum, muon, none, or one's own: NAME:BYTES,ACCESSES for each element")
]
ComputeDtypeOption = Annotated[
    str | None, typer.Option(help="mixed precision: bfloat16, float16, or autocast-bfloat16, autocast-float16 as torch.autocast computes")
]
CostModelOption = Annotated[str, typer.Option(help="roofline, or communication for collectives alone")]
RecomputeOption = Annotated[str, typer.Option(help="auto: run operators again in backward where memory needs it; off")]
OffloadOption = Annotated[
    str, typer.Option(help="auto: keep values of forward on the host until backward, where memory needs it; off")
]
MicrobatchesOption = Annotated[str, typer.Option(help="equal parts of the batch, gradients summed: a number, or auto")]
ExecuteOption = Annotated[str | None, typer.Option(help="price the host too, as it issues kernels: eager, graph, compiled or cuda_graph")]
InputsOption = Annotated[str, typer.Option(help="global: ranks pass whole batches; local: each its own rows, by a DistributedSampler")]
PinOption = Annotated[list[str] | None, typer.Option(help="NAME=SPEC, e.g. 'lm_head.weight=S1 R'; may be repeated")]
EffortOption = Annotated[str, typer.Option(help="low, normal or high: how much work the search may do, the same on every machine")]
OrderOption = Annotated[
    str,
    typer.Option(
        help="of a pipeline's actions: auto, whole, gpipe, 1f1b, zero-bubble (weights' gradients where stages wait) or interleaved:2"
    ),
]
SeedOption = Annotated[int, typer.Option(help="the same seed gives the same plan, unless the time limit cut the search")]


def read_mode(text: str) -> Literal["train", "inference"]:
    """The mode of an option's text. Raises UsageError."""
    if text == "train":
        return "train"
    if text == "inference":
        return "inference"
    raise UsageError(f"unknown mode {text!r}", "use train or inference")


def read_inputs(text: str) -> Inputs:
    """The kind of inputs of an option's text. Raises UsageError."""
    check_one_of("kind of inputs", text, get_args(Inputs))
    return "local" if text == "local" else "global"


def read_microbatches(text: str) -> int | str:
    """The number of an option's text, or ``auto``. Raises UsageError."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the number of microbatches is {text!r}", "give a whole number from 1 on, or auto") from None


def open_pins(pins: Sequence[str]) -> dict[str, str]:
    """``NAME=SPEC`` texts as a mapping. Raises UsageError."""
    found = {}
    for text in pins:
        name, equals, spec = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"cannot read the pin {text!r}", "write NAME=SPEC, e.g. --pin 'lm_head.weight=S1 R'")
        if name.strip() in found:
            raise UsageError(f"{name.strip()} is pinned twice", "give one spec for each name")
        found[name.strip()] = spec.strip()
    return found


@young_garbage_only()
def plan_target(target: str, options: PlanOptions, memory_limit: int) -> Plan:
    """The plan of a target, captured here."""
    with words_beside() as line:
        session = _open_session(target, options, line)
        return session.plan(memory_limit, session.deadline).plan


@young_garbage_only()
def pipeline_target(target: str, options: PlanOptions, memory_limit: int, stages: str | None) -> PipelinePlan:
    """The pipeline of a target, captured here."""
    from autopar.cli.target import load_target

    with words_beside() as line:
        line.say(f"capturing {target}", now=True)
        loaded = load_target(target, options.mode, device="meta")
        return plan_stages(loaded, replace(options, name=target, progress=progress(line)), memory_limit, stages)


@young_garbage_only()
def staged_target(target: str, options: PlanOptions, memory_limit: int) -> Plan | PipelinePlan:
    """The best plan of a target with or without stages, captured here."""
    from autopar.cli.target import load_target

    with words_beside() as line:
        line.say(f"capturing {target}", now=True)
        loaded = load_target(target, options.mode, device="meta")
        return plan_with_or_without_stages(loaded, replace(options, name=target, progress=progress(line)), memory_limit)


@young_garbage_only()
def pareto_target(target: str, options: PlanOptions, rungs: int) -> Pareto:
    """The plans of a target under a ladder of memory limits."""
    with words_beside() as line:
        session = _open_session(target, options, line)
        return plan_ladder(session.plan, rungs, session.deadline)


@young_garbage_only()
def sweep_target(target: str, options: PlanOptions, grid: Grid, done: Callable[[Point], None]) -> Sweep:
    """The plans of a target over a grid; its settings are those of the target's text."""
    from autopar.cli.target import load_target

    with words_beside() as line:

        def load(**settings: Any) -> Target:
            line.say(f"capturing {target} {' '.join(f'{key}={value}' for key, value in settings.items())}".rstrip(), now=True)
            return load_target(target, options.mode, device="meta", given={key: str(value) for key, value in settings.items()})

        named = replace(options, name=target, progress=progress(line))
        return plan_sweep(load, named, grid, done)


def _open_session(target: str, options: PlanOptions, line: Line) -> PlanSession:
    """Loads and captures a target."""
    from autopar.cli.target import load_target

    line.say(f"capturing {target}", now=True)
    loaded = load_target(target, options.mode, device="meta")
    return open_session(loaded, replace(options, name=target, progress=progress(line)))


@contextmanager
def words_beside() -> Iterator[Line]:
    """Warnings, the user's own printing and a line of progress, all on stderr."""
    say_slow_solver()
    line = Line()
    with words_on_stderr(), printing_aside(), line:
        yield line


def say_cut(plans: Iterable[Plan]) -> None:
    """Says that the time limit cut the search of one of the plans."""
    if any(plan.search is not None and plan.search.cut for plan in plans):
        note("warning: the time limit cut the search: another run may give another plan; allow more with --time-limit")


def say_slow_solver() -> None:
    """Says why the first large plan takes longer, where nothing compiled the solver's loops."""
    from autopar.solvers import solving

    solving.announce = lambda: note("the solver runs as plain Python, some 50 times slower: install autopar anew with a C compiler")


def say_hardware(hardware: str | None) -> None:
    """Says which hardware is planned for where none is named, and that the built-in CPUs are no machine of the user's."""
    if hardware is None:
        note(f"no hardware is named: planning for {DEFAULT_HARDWARE}; autopar hardware lists others")
    elif hardware == "cpu-cluster":
        note("cpu-cluster has round figures of ordinary servers: autopar profile -o hardware.toml measures this machine")


def progress(line: Line, ctrl_c: str = "keeps the best so far") -> Progress:
    """Shows the search's progress on the line, and says what Ctrl-C does."""

    def report(best: float, bound: float, gap: float, elapsed: float) -> None:
        plan = "no plan yet" if math.isinf(best) else f"best {units.seconds(best)}, bound {units.seconds(max(bound, 0.0))}"
        line.say(f"solving, {elapsed:.0f} s: {plan}; Ctrl-C {ctrl_c}")

    return report


@contextmanager
def words_on_stderr() -> Iterator[None]:
    """autopar's warnings as one line each; others are left to Python."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if category.__module__.startswith("autopar."):
            note(f"warning: {message}")
        else:
            usual(message, category, *rest, **more)

    usual = warnings.showwarning
    with warnings.catch_warnings():
        for category in CAUTIONS:
            warnings.simplefilter("always", category)
        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.showwarning = usual
