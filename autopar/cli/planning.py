"""What ``plan`` and ``sweep`` share: a target planned with its words on stderr."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer

from autopar import api, planning
from autopar.cli.terminal import Line, note, printing_aside
from autopar.effort import DEFAULT_EFFORT, check_effort
from autopar.errors import UsageError
from autopar.garbage import young_garbage_only
from autopar.options import AUTO, DEFAULT_HARDWARE, factorizations, parse_memory, parse_mesh, resolve_hardware
from autopar.pareto import Pareto
from autopar.plan import Plan
from autopar.report import units
from autopar.search import Progress
from autopar.sweeping import Sweep
from autopar.target import Target

HardwareOption = Annotated[str | None, typer.Option(help=f"a built-in name or a TOML file [default: {DEFAULT_HARDWARE}]")]
ModeOption = Annotated[str, typer.Option(help="train or inference")]
OptimizerOption = Annotated[
    str, typer.Option(help="adamw, adamw-mixed, sgd, sgd-momentum, none, or one's own: NAME:BYTES,ACCESSES for each element")
]
ComputeDtypeOption = Annotated[str | None, typer.Option(help="bfloat16 or float16: mixed precision, beside parameters of their own")]
CostModelOption = Annotated[str, typer.Option(help="roofline, or communication for collectives alone")]
RecomputeOption = Annotated[str, typer.Option(help="auto: run operators again in backward where memory needs it; off")]
MicrobatchesOption = Annotated[str, typer.Option(help="equal parts of the batch, gradients summed: a number, or auto")]
PinOption = Annotated[list[str] | None, typer.Option(help="NAME=SPEC, e.g. 'lm_head.weight=S1 R'; may be repeated")]
EffortOption = Annotated[str, typer.Option(help="low, normal or high: how much work the search may do, the same on every machine")]
SeedOption = Annotated[int, typer.Option(help="the same seed gives the same plan, unless the time limit cut the search")]


def read_mode(text: str) -> Literal["train", "inference"]:
    """The mode of an option's text. Raises UsageError."""
    if text == "train":
        return "train"
    if text == "inference":
        return "inference"
    raise UsageError(f"unknown mode {text!r}", "use train or inference")


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
def plan_target(target: str, *, mode: Literal["train", "inference"], **options: Any) -> Plan:
    """Loads, captures and plans a target, checking the options that need no model first; options as for ``api.plan``."""
    from autopar.cli.target import load_target

    check_options(**options)
    if options.get("hardware") is None:
        note(f"no hardware is named: planning for {DEFAULT_HARDWARE}")
    say_first_use()
    line = Line()
    with words_on_stderr(), printing_aside(), line:
        line.say(f"capturing {target}", now=True)
        found = load_target(target, mode, device="meta")
        return api.plan(
            found.model,
            found.args,
            found.kwargs,
            mode=mode,
            loss=found.loss,
            loss_args=found.loss_args,
            progress=progress(line),
            target=target,
            **options,
        )


@young_garbage_only()
def pareto_target(target: str, *, mode: Literal["train", "inference"], memory: str | None = None, **options: Any) -> Pareto:
    """Loads, captures and plans a target under a ladder of memory limits; options as for ``api.pareto``."""
    from autopar.cli.target import load_target

    if memory is not None:
        raise UsageError("a ladder of memory limits has no one limit", "leave --memory out, or plan without --pareto")
    check_options(**options)
    if options.get("hardware") is None:
        note(f"no hardware is named: planning for {DEFAULT_HARDWARE}")
    say_first_use()
    line = Line()
    with words_on_stderr(), printing_aside(), line:
        line.say(f"capturing {target}", now=True)
        found = load_target(target, mode, device="meta")
        return api.pareto(
            found.model, found.args, found.kwargs, mode=mode, loss=found.loss, loss_args=found.loss_args, progress=progress(line),
            target=target, **options,
        )  # fmt: skip


@young_garbage_only()
def sweep_target(target: str, *, mode: Literal["train", "inference"], **options: Any) -> Sweep:
    """Plans a target over a grid of its settings and others; options as for ``api.sweep``."""
    from autopar.cli.target import load_target

    if options.get("hardware") is None:
        note(f"no hardware is named: planning for {DEFAULT_HARDWARE}")
    say_first_use()
    line = Line()

    def load(**settings: Any) -> Target:
        line.say(f"capturing {target} {' '.join(f'{key}={value}' for key, value in settings.items())}".rstrip(), now=True)
        return load_target(target, mode, device="meta", given={key: str(value) for key, value in settings.items()})

    with words_on_stderr(), printing_aside(), line:
        return api.sweep(load, mode=mode, name=target, progress=progress(line), **options)


def say_cut(plans: Iterable[Plan]) -> None:
    """Says that the time limit cut the search of one of the plans."""
    if any(plan.search is not None and plan.search.cut for plan in plans):
        note("warning: the time limit cut the search: another run may give another plan; allow more with --time-limit")


def say_first_use() -> None:
    """Says why the first very large plan on a machine takes longer, if it comes to that."""
    from solvers import compiled

    compiled.announce = lambda: note("first very large problem on this machine: compiling the solver, which takes up to a minute, once")


def check_options(**options: Any) -> None:
    """Raises what is wrong with mesh, hardware, memory and effort before a model is loaded."""
    if options.get("mesh") is not None:
        parse_mesh(options["mesh"])
    if options.get("devices") is not None:
        list(factorizations(options["devices"]))
    resolve_hardware(options.get("hardware"))
    if options.get("memory") is not None:
        parse_memory(options["memory"])
    check_effort(options.get("effort", DEFAULT_EFFORT))


def progress(line: Line, ctrl_c: str = "keeps the best so far") -> Progress:
    """What the solver reports, on the line, and what Ctrl-C does there."""

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
        warnings.simplefilter("always", planning.UnknownAxisWarning)
        warnings.simplefilter("always", planning.UnlikelyHardwareWarning)
        warnings.simplefilter("always", planning.UnknownOperatorWarning)
        warnings.simplefilter("always", planning.MicrobatchWarning)
        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.showwarning = usual
