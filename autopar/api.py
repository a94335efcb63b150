"""capture, plan, compile: the pipeline in order, nothing else. Torch is imported where a model is touched, not before."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autopar.errors import AutoparError, InfeasibleError, TimeLimitError, UsageError
from autopar.graph import Graph
from autopar.options import (
    AUTO,
    RECOMPUTE,
    MeshLike,
    candidate_meshes,
    check_number,
    check_one_of,
    check_pins,
    parse_memory,
    resolve_hardware,
    user_errors,
)  # fmt: skip
from autopar.pareto import Pareto, climb
from autopar.plan import Plan
from cost_models import COST_MODELS, Hardware, Machine, Mesh, find_optimizer

if TYPE_CHECKING:
    from torch import nn

    from autopar.importer import Captures
    from autopar.runtime import ShardedModule
    from autopar.search import Found, Progress, Shared

_capturing = Lock()
"""Torch traces one model at a time: what it patches meanwhile, all threads see."""

Asked = TypeVar("Asked")


class MicrobatchWarning(UserWarning):
    """Microbatches that are not known to make up the whole batch's step."""


class UnknownAxisWarning(UserWarning):
    """A hardware file describes an axis that no mesh has."""


class UnknownOperatorWarning(UserWarning):
    """Operators without a sharding rule: they run whole on every rank."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    microbatches: int = 1,
) -> Graph:
    """The model's graph for example inputs of global shapes; ``plan`` takes it in place of the model, many times.

    Args:
        model: weights real, fake, meta or DTensors; only shapes and dtypes are read.
        args, kwargs: example inputs; values are not read.
        mode: ``train`` captures forward and backward, ``inference`` the forward in evaluation mode.
        loss: ``loss(outputs, *loss_args) -> scalar``; None when forward returns the loss, or there is none.
        compute_dtype: ``bfloat16`` or ``float16``: mixed precision; parameters, gradients and optimizer states keep their dtype.
        microbatches: equal parts, along dim 0, that the example inputs are run in; the graph is that of one of them.

    Raises:
        UsageError: wrong arguments, or a step that microbatches cannot make up. CaptureError: a model that cannot be captured, with the
            user's line.
    """
    check_number(microbatches)
    graph: Graph = _captures(model, args, kwargs, mode, loss, loss_args, compute_dtype, {}).of(microbatches)
    return graph


def _captures(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, mode: Literal["train", "inference"],
    loss: Callable[..., Any] | None, loss_args: tuple[Any, ...], compute_dtype: str | None, pins: Mapping[str, str],
) -> Captures:  # fmt: skip
    """The model's graphs, captured when they are asked for."""
    from autopar.importer import Captures, capture_graph
    from autopar.placements import plain_dims, without_placement

    named: Any = dict(kwargs or {}) if kwargs is None or isinstance(kwargs, Mapping) else kwargs  # what else it is, capture refuses
    args, kwargs, loss_args = without_placement((args, named, loss_args))

    def run(args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_args: tuple[Any, ...]) -> Graph:
        with _capturing:
            graph: Graph = capture_graph(
                model, args, kwargs, mode=mode, loss=loss, loss_args=loss_args, compute_dtype=compute_dtype, plain=plain_dims(model, pins),
            )  # fmt: skip
        return graph

    return Captures(run, (args, kwargs, loss_args))


def plan(
    model: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    devices: int | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    optimizer: str = "adamw",
    memory: str | int | float | None = None,
    constraints: Mapping[str, str] | None = None,
    cost_model: str = "roofline",
    recompute: str = "auto",
    microbatches: int | str = 1,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
) -> Plan:
    """The cheapest way found to split ``model`` over a mesh within a memory limit, with a proved bound.

    Args:
        model: a module, or a Graph from ``capture`` (then ``args`` to ``compute_dtype`` are not used).
        args, kwargs, mode, loss, loss_args, compute_dtype: as for ``capture``. DTensors among arguments and parameters are pins.
        mesh: the mesh; or ``devices``, the number of ranks, to try every mesh of one and two axes and keep the best plan.
        hardware: a built-in name, a TOML path or a Hardware; ``h100-sxm`` when not given.
        optimizer: ``adamw``, ``adamw-mixed`` (float32 weights and moments beside half-precision parameters), ``sgd``, ``sgd-momentum``,
            ``none``, or one's own as ``NAME:BYTES,ACCESSES`` for each element: its states count in memory and its step in time.
        memory: the limit per rank, bytes or text (``"70GiB"``, ``"80GB"``); the hardware's own when not given.
        constraints: name or glob to spec: ``lm_head.weight``, ``input:tokens``, ``output:0``, ``module:layers.*.attn``.
        cost_model: ``roofline``, or ``communication`` for collectives alone.
        recompute: ``auto``: operators may run a second time in backward where that saves memory that is needed; ``off``: never.
        microbatches: equal parts of the batch whose gradients are summed for a step; ``auto``: powers of two are tried as long as memory
            is short or they help. A Graph has its own number.
        time_limit: seconds for the whole call, shared among the meshes tried; the answer then has a true bound and gap.
        seed: the same seed gives the same plan where the time limit does not bind.
        progress: called with (seconds of the best plan, bound, gap, elapsed seconds).
        target: what the plan calls the model.

    Raises:
        UsageError: a wrong mesh, pin, hardware name or option. CaptureError: a model that cannot be captured.
        InfeasibleError: nothing fits in memory; says the least that would. TimeLimitError: no answer in time; names the stage.
        KeyboardInterrupt: Ctrl-C before there was a plan; later it ends all searches with the best plan so far.
    """
    ends = perf_counter() + time_limit if isinstance(time_limit, int | float) else 0.0
    resolved = resolve_hardware(hardware)
    limit = parse_memory(memory) if memory is not None else int(resolved.memory_bytes)
    within = _planner(
        model, args, kwargs, mesh=mesh, devices=devices, hardware=resolved, mode=mode, loss=loss, loss_args=loss_args,
        compute_dtype=compute_dtype, optimizer=optimizer, constraints=constraints, cost_model=cost_model, recompute=recompute,
        microbatches=microbatches, time_limit=time_limit, seed=seed, progress=progress, target=target,
    )  # fmt: skip
    return within(limit, ends)


def pareto(
    model: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rungs: int = 8,
    time_limit: float = 60.0,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    **options: Any,
) -> Pareto:
    """The least step under each limit of a ladder, from the least memory known to do to what the best plan takes when it may take all.

    Model and prices are shared, and what fits in less is an answer for more: more memory never costs more.

    Args:
        rungs: how many limits, the ends included; in even steps.
        time_limit: seconds for the whole call, shared among the limits.
        hardware, options: as of ``plan``, but for ``memory``.

    Raises:
        UsageError: fewer than 2 rungs, or ``memory``; else as ``plan``.
    """
    if not isinstance(rungs, int) or rungs < 2:
        raise UsageError(f"the ladder has {rungs!r} rungs", "give a whole number from 2 on: the least memory and the most are two")
    if "memory" in options:
        raise UsageError("a ladder of memory limits has no one limit", "leave memory out, or plan without pareto")
    ends = perf_counter() + time_limit
    within = _planner(model, args, kwargs, hardware=resolve_hardware(hardware), time_limit=time_limit, **options)
    return climb(within, rungs, ends)


def _planner(
    model: nn.Module | Graph,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    mesh: MeshLike | None = None,
    devices: int | None = None,
    hardware: Hardware,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    optimizer: str = "adamw",
    constraints: Mapping[str, str] | None = None,
    cost_model: str = "roofline",
    recompute: str = "auto",
    microbatches: int | str = 1,
    time_limit: float,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
) -> Callable[[int, float], Plan]:
    """What plans within so many bytes until a moment, the model captured and everything shared between calls. See ``plan``."""
    began = perf_counter()
    meshes = list(candidate_meshes(mesh, devices))
    pins = check_pins(constraints)
    check_one_of("cost model", cost_model, tuple(COST_MODELS))
    check_one_of("way to recompute", recompute, RECOMPUTE)
    with user_errors():
        find_optimizer(optimizer)
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise UsageError(f"the time limit is {time_limit!r} s", "give the solver a positive number of seconds")
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"the seed is {seed!r}", "give a whole number from 0 on")
    numbers: tuple[int, ...]
    graph_of: Callable[[int], Graph]
    if isinstance(model, Graph):
        given = graph = model
        numbers, graph_of = (model.microbatches,), lambda number: given
        if microbatches not in (1, model.microbatches):
            message = f"the graph is one of {model.microbatches} microbatches, asked are {microbatches}"
            raise UsageError(message, "capture the model with microbatches=")
    else:
        captures = _captures(model, args, kwargs, mode, loss, loss_args, compute_dtype, pins)
        numbers = captures.numbers() if microbatches == AUTO else (check_number(microbatches),)
        graph, graph_of = captures.of(numbers[0]), captures.of
    spent = perf_counter() - began
    if not isinstance(model, Graph) and spent >= time_limit:
        hint = "allow more time (--time-limit), or capture once and plan the graph"
        raise TimeLimitError(f"the time limit of {time_limit:g} s passed while the model was captured, which took {spent:.1f} s", hint)
    from autopar.placements import placed_pins, written_pins

    pins = {**written_pins(graph, meshes), **pins}
    if not isinstance(model, Graph):
        pins = {**placed_pins(model, args, dict(kwargs or {}), loss_args, graph, meshes), **pins}
    machines = [Machine(candidate, hardware, cost_model) for candidate in meshes]
    _warn_axes(hardware, meshes)
    common: dict[tuple[int, Machine], Shared] = {}

    def plan_within(limit: int, ends: float) -> Plan:
        tried: dict[int, Found] = {}

        def find(number: int, seconds: float) -> Found:
            ends, graph = perf_counter() + seconds, _unchanged(graph_of(number), microbatches)

            def on(machine: Machine, seconds: float) -> Found:
                shared = _shared(common, number, machine)
                return _find(graph, machine, limit, optimizer, pins, recompute == "auto", seconds, seed, progress, shared)

            return tried.setdefault(number, _best_of(machines, on, ends))

        try:
            found = _best_of(list(numbers), find, ends, enough=lambda: _enough(tried, limit))
        except TimeLimitError as error:
            if isinstance(model, Graph):
                raise
            within = f"the time limit of {time_limit:g} s passed, {spent:.1f} s of it while the model was captured"
            raise TimeLimitError(f"{within}: {error.message}", error.hint) from None
        if len(tried) > 1:
            found = _bounded(found, min(item.bound_seconds for item in tried.values()))
        _warn_unknown(found)
        _warn_microbatches(found)
        from autopar.recording import record

        name = target or ("graph" if isinstance(model, Graph) else type(model).__name__)
        made = record(found, target=name, memory_bytes=limit, pins=pins, tried=tuple(tried) if microbatches == AUTO else None)
        made.remember_loss(loss)
        return made

    return plan_within


def compile(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str] | None,
    *,
    loss: Callable[..., Any] | None = None,
    mesh: Any = None,
    inputs: Literal["global", "local"] = "global",
    device: Any = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    execute: Literal["eager", "graph", "compiled"] = "eager",
    example: tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]] | None = None,
) -> ShardedModule:
    """The model as the plan splits it, on this rank (under torchrun): a module with the model's own parameter names, as DTensors.

    Args:
        model: the model that was planned, with real weights (kept) or meta weights (made by ``init`` or a state dict). Where ranks hold
            different weights, those of the first rank that has any count.
        plan: the plan or the path of its file, the same on all ranks; None where another rank's is to be received, so that one
            rank plans for all.
        loss: the loss it was planned with. That of a plan made in this process is known; one from a file or another rank needs it again.
        mesh: the part of a DeviceMesh that the plan is for, with data parallelism of your own around it; all processes when not given.
        inputs, device, init, seed, execute, example: see ``autopar.runtime.compile_plan``.

    Raises:
        MismatchError: the plan was made for another model, mesh or torch, or ranks differ; the first difference is named.
    """
    from autopar.runtime import compile_plan

    if isinstance(plan, str | os.PathLike):
        plan = load(plan)
    with user_errors():
        return compile_plan(
            model, plan, loss=loss, mesh=mesh, inputs=inputs, device=device, init=init, seed=seed, execute=execute, example=example
        )  # fmt: skip


def load(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file; one of the schema before is scheduled on load, and says so. Raises FileError, naming what is wrong where."""
    from autopar.recording import load

    return load(path)


def _shared(common: dict[tuple[int, Machine], Shared], number: int, machine: Machine) -> Shared:
    """What searches with so many microbatches on one machine share."""
    from autopar.search import Shared

    return common.setdefault((number, machine), Shared())


def _find(
    graph: Graph,
    machine: Machine,
    limit: int,
    optimizer: str,
    pins: Mapping[str, str],
    recompute: bool,
    time_limit: float,
    seed: int,
    progress: Progress | None,
    shared: Shared,
) -> Found:
    from autopar.search import find_plan

    with user_errors():
        return find_plan(
            graph, machine, memory_bytes=limit, optimizer=optimizer, constraints=pins, time_limit=time_limit, seed=seed, progress=progress,
            recompute=recompute, shared=shared,
        )  # fmt: skip


def _best_of(asked: list[Asked], find: Callable[[Asked, float], Found], ends: float, enough: Callable[[], bool] = lambda: False) -> Found:
    """The cheapest of the plans of several meshes, or numbers of microbatches, which share the time left; an error when none has a plan.
    One that fails or runs out of time leaves the plans of others; Ctrl-C ends all with what is there.

    Args:
        enough: asked after each plan, whether to look no further.
    """
    found: list[Found] = []
    failed: list[AutoparError] = []
    for number, item in enumerate(asked):
        left = ends - perf_counter()
        if left <= 0 and found:
            break
        try:
            found.append(find(item, max(left / (len(asked) - number), 0.0)))
        except (InfeasibleError, TimeLimitError) as error:
            failed.append(error)
        except KeyboardInterrupt:
            if not found:
                raise
            break
        except _Changed as reason:
            warnings.warn(f"{item} microbatches and more are not tried: {reason}", MicrobatchWarning, stacklevel=4)
            break
        if found and (found[-1].interrupted or (number + 1 < len(asked) and enough())):
            break
    if not found:
        raise next((error for error in failed if isinstance(error, TimeLimitError)), failed[0])
    return min(found, key=lambda item: item.seconds)


AMPLE = 0.8
"""Share of the memory limit below which a plan would not get faster by more microbatches: these only launch and gather more."""
WORSE = 2
"""So many numbers of microbatches in a row that are no gain end the search."""


class _Changed(Exception):
    """Microbatches that are not known to make up the whole batch's step."""


def _unchanged(graph: Graph, microbatches: int | str) -> Graph:
    """The graph; where the number is the search's to choose, it has to leave the step as it is."""
    if microbatches == AUTO and not graph.accumulation.whole:
        raise _Changed(graph.accumulation.reason)
    return graph


def _enough(tried: Mapping[int, Found], limit: int) -> bool:
    best = min(tried.values(), key=lambda found: found.seconds)
    again = any(item.phase == "recompute" for item in best.schedule.instructions)
    return (best.memory.peak <= AMPLE * limit and not again) or (len(tried) > WORSE and best in list(tried.values())[:-WORSE])


def _bounded(found: Found, bound: float) -> Found:
    """With a bound over all numbers of microbatches that were tried."""
    gap = (found.seconds - bound) / found.seconds if found.seconds > 0 else 0.0
    return replace(found, bound_seconds=bound, gap=gap)


def _warn_microbatches(found: Found) -> None:
    """Says where the step is not the whole batch's."""
    made = found.schedule.graph.accumulation
    if not made.whole:
        warnings.warn(
            f"the step of {made.microbatches} microbatches is not proved to be the whole batch's: {made.reason}; each microbatch's loss "
            f"counts 1/{made.microbatches}, and verify compares with the same on one device",
            MicrobatchWarning,
            stacklevel=3,
        )


def _warn_axes(hardware: Hardware, meshes: Sequence[Mesh]) -> None:
    """Names what a hardware file says of axes that are not there: most often a name misspelt, and the links priced as any other."""
    unknown = [name for name, _ in hardware.axes if not any(name in mesh.names for mesh in meshes)]
    if unknown:
        names = ", ".join(dict.fromkeys(name for mesh in meshes for name in mesh.names))
        warnings.warn(f"the hardware describes {', '.join(unknown)}, no axis of the mesh ({names})", UnknownAxisWarning, stacklevel=3)


def _warn_unknown(found: Found) -> None:
    """Names the operators without a rule, with what running them whole on every rank costs."""
    if not found.unknown:
        return
    schedule = found.schedule
    whole = sum(schedule.operator_seconds(op.name) for op in schedule.graph.ops if op.target in found.unknown)
    names = ", ".join(f"{name} (at {place})" for name, place in sorted(found.unknown.items()))
    warnings.warn(
        f"no sharding rule for {names}: run whole on every rank, {whole:.3g} s of {found.seconds:.3g} s, beside the gathers "
        "of what they read; autopar rules --missing TARGET lists them",
        UnknownOperatorWarning,
        stacklevel=3,
    )
