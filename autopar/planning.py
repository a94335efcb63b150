"""From a model to plans within limits: graphs of as many microbatches as are asked for, on every mesh, what they share kept."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autopar.effort import DEFAULT_EFFORT, Effort, check_effort
from autopar.ending import put_together
from autopar.errors import AutoparError, InfeasibleError, TimeLimitError, UsageError
from autopar.garbage import young_garbage_only
from autopar.graph import Graph
from autopar.options import (
    AUTO,
    RECOMPUTE,
    MeshLike,
    candidate_meshes,
    check_number,
    check_one_of,
    check_pins,
    check_seconds,
    of_three_axes,
    user_errors,
)  # fmt: skip
from autopar.pareto import Made, Within
from autopar.seeds import check_seed
from cost_models import COST_MODELS, Hardware, Machine, Mesh, find_optimizer

if TYPE_CHECKING:
    from torch import nn

    from autopar.importer import Captures
    from autopar.search import Found, Progress, Shared

_capturing = Lock()
"""Torch traces one model at a time: what it patches meanwhile, all threads see."""

Asked = TypeVar("Asked")


class MicrobatchWarning(UserWarning):
    """Microbatches that are not known to make up the whole batch's step."""


class UnknownAxisWarning(UserWarning):
    """A hardware file describes an axis that no mesh has."""


class UnlikelyHardwareWarning(UserWarning):
    """A hardware file has figures of no machine: most often another unit than the file's."""


class UnknownOperatorWarning(UserWarning):
    """Operators without a sharding rule: they run whole on every rank."""


def captures_of(
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


def planner(
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
    effort: Effort = DEFAULT_EFFORT,
    time_limit: float,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
    captures: Captures | None = None,
) -> Within:
    """What plans within so many bytes until a moment, the model captured and everything shared between calls. See ``plan``.

    Args:
        captures: the model's, where planners for several numbers of devices share them; they were made with the same pins.
    """
    began, here = perf_counter(), captures is None and not isinstance(model, Graph)
    meshes = list(candidate_meshes(mesh, devices))
    further = list(of_three_axes(devices, hardware.devices_per_node)) if mesh is None and devices and cost_model != "communication" else []
    meshes += further
    pins = check_pins(constraints)
    check_one_of("cost model", cost_model, tuple(COST_MODELS))
    check_one_of("way to recompute", recompute, RECOMPUTE)
    with user_errors():
        find_optimizer(optimizer)
    level = check_effort(effort)
    check_seconds(time_limit)
    check_seed(seed)
    numbers: tuple[int, ...]
    graph_of: Callable[[int], Graph]
    if isinstance(model, Graph):
        given = graph = model
        numbers, graph_of = (model.microbatches,), lambda number: given
        if microbatches not in (1, model.microbatches):
            message = f"the graph is one of {model.microbatches} microbatches, asked are {microbatches}"
            raise UsageError(message, "capture the model with microbatches=")
    else:
        captures = captures or captures_of(model, args, kwargs, mode, loss, loss_args, compute_dtype, pins)
        numbers = captures.numbers() if microbatches == AUTO else (check_number(microbatches),)
        graph, graph_of = captures.of(numbers[0]), captures.of
    spent = perf_counter() - began
    if here and spent >= time_limit:
        hint = "allow more time (--time-limit), or capture once and plan the graph"
        raise TimeLimitError(f"the time limit of {time_limit:g} s passed while the model was captured, which took {spent:.1f} s", hint)
    from autopar.placements import placed_pins, written_pins

    pins = {**written_pins(graph, meshes), **pins}
    if not isinstance(model, Graph):
        pins = {**placed_pins(model, args, dict(kwargs or {}), loss_args, graph, meshes), **pins}
    machines = [Machine(candidate, hardware, cost_model) for candidate in meshes]
    _warn_axes(hardware, meshes)
    _warn_figures(hardware, cost_model)
    common: dict[tuple[int, Machine], Shared] = {}

    @young_garbage_only()
    def plan_within(limit: int, ends: float) -> Made:
        tried: dict[int, Found] = {}

        def find(number: int, seconds: float) -> Found:
            ends, graph = perf_counter() + seconds, _unchanged(graph_of(number), microbatches)

            def on(machine: Machine, seconds: float) -> Found:
                shared = _shared(common, number, machine)
                return _find(graph, machine, limit, optimizer, pins, recompute == "auto", level, seconds, seed, progress, shared)

            found = _best_of(machines, on, ends, later=len(further))
            tried[number] = min(tried.get(number, found), found, key=lambda item: item.seconds)
            return tried[number]

        try:
            found = _best_of(list(numbers), find, ends, enough=lambda: _enough(tried, limit))
        except TimeLimitError as error:
            if not here:
                raise
            within = f"the time limit of {time_limit:g} s passed, {spent:.1f} s of it while the model was captured"
            raise TimeLimitError(f"{within}: {error.message}", error.hint) from None
        if len(tried) > 1:
            found = _bounded(found, min(item.bound_seconds for item in tried.values()))
        _warn_unknown(found)
        _warn_microbatches(found)
        from autopar.recording import record

        name = target or ("graph" if isinstance(model, Graph) else type(model).__name__)
        numbered = tuple(tried) if microbatches == AUTO else None
        made, interrupted = put_together(lambda: record(found, target=name, memory_bytes=limit, pins=pins, tried=numbered))
        made.remember_loss(loss)
        return Made(made, found.interrupted or interrupted)

    return plan_within


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
    effort: Effort,
    time_limit: float,
    seed: int,
    progress: Progress | None,
    shared: Shared,
) -> Found:
    from autopar.search import find_plan

    with user_errors():
        return find_plan(
            graph, machine, memory_bytes=limit, optimizer=optimizer, constraints=pins, time_limit=time_limit, seed=seed, progress=progress,
            recompute=recompute, effort=effort, shared=shared,
        )  # fmt: skip


def _best_of(
    asked: list[Asked], find: Callable[[Asked, float], Found], ends: float, enough: Callable[[], bool] = lambda: False, later: int = 0
) -> Found:
    """The cheapest of the plans of several meshes, or numbers of microbatches, which share the time left; an error when none has a plan.
    One that fails, cannot take the pins or runs out of time leaves the plans of others; Ctrl-C ends all with what is there. As long as no
    plan is there, one for which its share was too short has twice as much, so that little time makes one plan and not parts of several.

    Args:
        enough: asked after each plan, whether to look no further. The best, if it took all of its share, then has the time that is left.
        later: so many of the last share what time the others leave.
    """
    found: list[tuple[Found, Asked, bool]] = []
    failed: list[AutoparError] = []
    interrupted = False
    for number, item in enumerate(asked):
        left = ends - perf_counter()
        if left <= 0 and (found or failed):
            break
        try:
            share = max(left / (len(asked) - number - (later if number < len(asked) - later else 0)), 0.0)
            one = _in_time(find, item, share, 0.0 if found else ends)
            found.append((one, item, left - (ends - perf_counter()) >= share))
        except (InfeasibleError, TimeLimitError) as error:
            failed.append(error)
        except UsageError as error:  # a pin that a mesh of fewer axes, or of other sizes, cannot take
            if len(asked) == 1:
                raise
            failed.append(error)
        except KeyboardInterrupt:
            if not found:
                raise
            interrupted = True
            break
        except _Changed as reason:
            warnings.warn(f"{item} microbatches and more are not tried: {reason}", MicrobatchWarning, stacklevel=4)
            break
        if found and (found[-1][0].interrupted or (number + 1 < len(asked) and enough())):
            break
    if not found:
        raise next((error for error in failed if isinstance(error, TimeLimitError)), failed[0])
    best, item, short = min(found, key=lambda one: one[0].seconds)
    interrupted, further = interrupted or found[-1][0].interrupted, ends - perf_counter()
    if short and further > 0 and not interrupted:
        try:
            again = find(item, further)
            best, interrupted = min(best, again, key=lambda one: one.seconds), again.interrupted
        except AutoparError:
            pass  # the plan is there
        except KeyboardInterrupt:
            interrupted = True
    return replace(best, interrupted=interrupted)


def _in_time(find: Callable[[Asked, float], Found], item: Asked, seconds: float, ends: float) -> Found:
    """What is found in so many seconds; before ``ends``, in twice as many, and so on. Raises TimeLimitError: nothing in all of them."""
    last = False
    while True:
        try:
            return find(item, seconds)
        except TimeLimitError:
            left = ends - perf_counter()
            if last or left <= 0:
                raise
            last, seconds = 2 * seconds >= left, min(2 * seconds, left)


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
    step = f"the step of {made.microbatches} microbatches is"
    if not made.whole:
        words = f"not proved to be the whole batch's: {made.reason}; each microbatch's loss counts 1/{made.microbatches}, and verify"
        warnings.warn(f"{step} {words} compares with the same on one device", MicrobatchWarning, stacklevel=3)
    elif made.reason:
        warnings.warn(f"{step} the whole batch's {made.reason}", MicrobatchWarning, stacklevel=3)


def _warn_axes(hardware: Hardware, meshes: Sequence[Mesh]) -> None:
    """Names what a hardware file says of axes that are not there: most often a name misspelt, and the links priced as any other."""
    unknown = [name for name, _ in hardware.axes if not any(name in mesh.names for mesh in meshes)]
    if unknown:
        names = ", ".join(dict.fromkeys(name for mesh in meshes for name in mesh.names))
        warnings.warn(f"the hardware describes {', '.join(unknown)}, no axis of the mesh ({names})", UnknownAxisWarning, stacklevel=3)


def _warn_figures(hardware: Hardware, cost_model: str) -> None:
    """Names figures in another unit, by all appearances; the bare model of the literature has links of a byte a second."""
    if cost_model != "communication" and (figures := hardware.unlikely()):
        warnings.warn(f"no machine is like {hardware.name}: {', '.join(figures)}", UnlikelyHardwareWarning, stacklevel=3)


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
