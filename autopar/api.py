"""capture, plan, tune, compile: the pipeline in order, nothing else. Torch is imported where a model is touched, not before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from autopar import recording
from autopar.cost_models import Execution, Hardware
from autopar.effort import DEFAULT_EFFORT, Effort
from autopar.errors import UsageError
from autopar.files import begins_with, read_text
from autopar.graph import Graph
from autopar.options import (
    AUTO,
    MeshLike,
    PlanOptions,
    check_number,
    check_pins,
    read_memory_limit,
    read_mesh,
    resolve_hardware,
    user_errors,
)
from autopar.pareto import Pareto
from autopar.plan import Plan
from autopar.planning.capturing import captures_of
from autopar.planning.grid import Grid, combinations, plan_sweep
from autopar.planning.memory_ladder import plan_ladder
from autopar.planning.pipelines import plan_stages, plan_with_or_without_stages, refuse_stages
from autopar.planning.session import open_session
from autopar.rows import Inputs, Outputs
from autopar.sweeping import Point, Sweep
from autopar.target import Target

if TYPE_CHECKING:
    from torch import nn

    from autopar.pipeline_plan import PipelinePlan
    from autopar.runtime import ShardedModule
    from autopar.runtime.pipelines.module import PipelineModule
    from autopar.search import Progress


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
        args, kwargs: example inputs; their values are not read.
        mode: ``train`` captures forward and backward, ``inference`` the forward in evaluation mode.
        loss: ``loss(outputs, *loss_args) -> scalar``; None when forward returns the loss, or there is none.
        compute_dtype: mixed precision; parameters, gradients and optimizer states keep their dtype. ``bfloat16`` or ``float16``: all that
            the model computes; ``autocast-bfloat16`` or ``autocast-float16``: model and loss as ``torch.autocast`` of CPUs computes them.
        microbatches: number of equal parts, along dim 0, of the example inputs; the graph is that of one part.

    Raises:
        UsageError: wrong arguments, or a step that cannot be made of microbatches. CaptureError: a model that cannot be captured, with the
            user's line.
    """
    check_number(microbatches)
    target = Target(model, args, kwargs or {}, loss, loss_args)
    graph: Graph = captures_of(target, mode=mode, compute_dtype=compute_dtype, pins={}).of(microbatches)
    return graph


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
    inputs: Inputs = "global",
    cost_model: str = "roofline",
    recompute: str = "auto",
    offload: str = "off",
    microbatches: int | str = 1,
    execute: Execution | None = None,
    effort: Effort = DEFAULT_EFFORT,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
) -> Plan:
    """The cheapest way found to split ``model`` over a mesh within a memory limit, with a proved bound.

    Args:
        model: a module, or a Graph from ``capture`` (then ``args`` to ``compute_dtype`` are not used).
        args, kwargs, mode, loss, loss_args, compute_dtype: as for ``capture``. DTensors among arguments and parameters are pins.
        mesh: the mesh; or ``devices``, the number of ranks: every mesh of one and two axes is tried, in the time left also meshes of three
            axes that respect nodes, and the best plan is kept.
        hardware: a built-in name, a TOML path or a Hardware; ``h100-sxm`` when not given.
        optimizer: ``adamw``, ``adamw-mixed`` (float32 weights and moments beside half-precision parameters), ``sgd``, ``sgd-momentum``,
            ``muon`` (of layers' matrices; AdamW of embeddings and of what has one dim or more than two), ``none``, or
            ``NAME:BYTES,ACCESSES`` per element. Its states count in memory and its step in time.
        memory: the limit per rank, bytes or text (``"70GiB"``, ``"80GB"``); the hardware's own when not given.
        constraints: name or glob to spec: ``lm_head.weight``, ``input:tokens``, ``output:0``, ``module:layers.*.attn``.
        inputs: ``global``: ranks pass whole inputs. ``local``: each passes its own rows, as a ``DistributedSampler`` gives them: dim 0 of
            all inputs that have the batch is split alike, over the axes that are best. An input has it where its dim 0 is the first's.
        cost_model: ``roofline``, or ``communication`` for collectives alone.
        recompute: ``auto``: operators may be recomputed in backward where memory is short; ``off``: never.
        offload: ``auto``: values of forward may lie on the host until backward reads them, where memory is short, by ``[links.host]`` of
            the hardware file; ``off``: never.
        microbatches: number of equal parts of the batch, whose gradients are summed; ``auto`` tries powers of two as long as memory is
            short or they help. A Graph has its own number.
        execute: ``eager``, ``graph``, ``compiled`` or ``cuda_graph``: the program is priced with the host that issues its kernels
            (``[host]`` of the hardware file); a host that takes no time when not given.
        effort: ``low``, ``normal`` or ``high``: how much work the search may do. Work is counted, the same on every machine.
        time_limit: seconds for the whole call, shared among the meshes tried. It only cuts off: the answer then has a true bound and gap.
        seed: the same inputs, seed and effort give the same plan unless the time limit cut the search.
        progress: called with (seconds of the best plan, bound, gap, elapsed seconds).
        target: the model's name in the plan.

    Raises:
        UsageError: a wrong mesh, pin, hardware name or option. CaptureError: a model that cannot be captured.
        InfeasibleError: nothing fits in memory; says the least memory that would do. TimeLimitError: no answer in time; names the stage.
        KeyboardInterrupt: Ctrl-C before there was a plan. Later it ends all searches with the best plan so far.
    """
    options = PlanOptions(
        hardware=resolve_hardware(hardware), mesh=read_mesh(mesh), devices=devices, mode=mode, compute_dtype=compute_dtype,
        optimizer=optimizer, pins=check_pins(constraints), inputs=inputs, cost_model=cost_model, recompute=recompute,
        offload=offload, microbatches=microbatches, execute=execute, effort=effort, time_limit=time_limit, seed=seed, progress=progress,
        name=target,
    )  # fmt: skip
    refuse_stages(options.mesh, "call autopar.plan_pipeline, which plans stages, or name the axis otherwise")
    memory_limit = read_memory_limit(memory, options.hardware)
    session = open_session(Target(model, args, kwargs or {}, loss, loss_args), options)
    return session.plan(memory_limit, session.deadline).plan


def plan_pipeline(
    model: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    devices: int | None = None,
    microbatches: int | str = AUTO,
    stages: str | Sequence[str | int] | None = None,
    order: str = "auto",
    hardware: str | os.PathLike[str] | Hardware | None = None,
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    optimizer: str = "adamw",
    memory: str | int | float | None = None,
    constraints: Mapping[str, str] | None = None,
    recompute: str = "auto",
    effort: Effort = DEFAULT_EFFORT,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
) -> PipelinePlan | Plan:
    """The best pipeline found for training ``model``: a cut into stages, a plan of each, and a timetable, with a bound over all of them.

    Args:
        mesh: ``pp`` outermost, then the axes of each stage: ``"pp=4,dp=2,tp=2"``.
        devices: number of ranks, in place of ``mesh``: the better of pipelines and of a plan without stages, which is a ``Plan``.
        microbatches: number of equal parts of the batch, along dim 0 of the inputs; ``auto`` tries powers of two: four for each stage
            first, then more as long as they gain, or fewer where more do not.
        stages: the first module of each stage but the first, or counts of equal layers, ``"8,9,8,7"``; chosen when not given.
        order: of each stage's actions. ``whole`` searches with backward whole; ``zero-bubble`` with gradients of weights in actions of
            their own, which fill the time that stages would wait; ``auto`` is ``whole`` unless that is clearly slower; ``gpipe`` and
            ``1f1b`` are written down. ``interleaved:3`` searches with three stages a rank, ``interleaved`` with two.
        constraints: pins by name, as of ``plan``. One on a weight holds in the stage that has it. Axes are those of a stage, by name
            (``S(tp) R``) or number.
        others: as of ``plan``.

    Raises:
        UsageError: a mesh without ``pp`` outermost, more stages than modules, a cut or a model that cannot be pipelined. Others as of
            ``plan``, and KeyboardInterrupt too.
    """
    options = PlanOptions(
        hardware=resolve_hardware(hardware), mesh=read_mesh(mesh), devices=devices, compute_dtype=compute_dtype, optimizer=optimizer,
        pins=check_pins(constraints), recompute=recompute, microbatches=microbatches, order=order, effort=effort, time_limit=time_limit,
        seed=seed, progress=progress, name=target,
    )  # fmt: skip
    memory_limit = read_memory_limit(memory, options.hardware)
    given = Target(model, args, kwargs or {}, loss, loss_args)
    if devices is None:
        return plan_stages(given, options, memory_limit, stages)
    if stages not in (None, AUTO):
        raise UsageError("with devices the mesh axis pp is chosen, which stages cut", "give mesh='pp=2,...', or leave stages out")
    return plan_with_or_without_stages(given, options, memory_limit)


def pareto(
    model: nn.Module | Graph,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rungs: int = 8,
    mesh: MeshLike | None = None,
    devices: int | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    mode: Literal["train", "inference"] = "train",
    loss: Callable[..., Any] | None = None,
    loss_args: tuple[Any, ...] = (),
    compute_dtype: str | None = None,
    optimizer: str = "adamw",
    constraints: Mapping[str, str] | None = None,
    inputs: Inputs = "global",
    cost_model: str = "roofline",
    recompute: str = "auto",
    offload: str = "off",
    microbatches: int | str = 1,
    execute: Execution | None = None,
    effort: Effort = DEFAULT_EFFORT,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
) -> Pareto:
    """The least step under each of a ladder of memory limits: from the least memory known to do, to the memory of the best plan.

    A plan that fits in less memory also answers for more, so more memory never costs more.

    Args:
        rungs: number of limits, in even steps, both ends included.
        time_limit: seconds for the whole call, shared among the limits.
        others: as of ``plan``.

    Raises:
        UsageError: fewer than 2 rungs; else as ``plan``.
    """
    if not isinstance(rungs, int) or rungs < 2:
        raise UsageError(f"rungs must be at least 2, got {rungs!r}", "pass rungs=8")
    options = PlanOptions(
        hardware=resolve_hardware(hardware), mesh=read_mesh(mesh), devices=devices, mode=mode, compute_dtype=compute_dtype,
        optimizer=optimizer, pins=check_pins(constraints), inputs=inputs, cost_model=cost_model, recompute=recompute, offload=offload,
        microbatches=microbatches, execute=execute, effort=effort, time_limit=time_limit, seed=seed, progress=progress, name=target,
    )  # fmt: skip
    refuse_stages(options.mesh, "ladders are of plans without a pipeline so far: name the axis otherwise")
    session = open_session(Target(model, args, kwargs or {}, loss, loss_args), options)
    return plan_ladder(session.plan, rungs, session.deadline)


def sweep(
    target: Graph | Callable[..., Any],
    *,
    devices: int | Sequence[int],
    memory: str | float | Sequence[str | float] | None = None,
    settings: Mapping[str, Sequence[Any]] | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    mode: Literal["train", "inference"] = "train",
    compute_dtype: str | None = None,
    optimizer: str = "adamw",
    constraints: Mapping[str, str] | None = None,
    inputs: Inputs = "global",
    cost_model: str = "roofline",
    recompute: str = "auto",
    offload: str = "off",
    microbatches: int | str = 1,
    execute: Execution | None = None,
    effort: Effort = DEFAULT_EFFORT,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    name: str | None = None,
    done: Callable[[Point], None] = lambda point: None,
) -> Sweep:
    """Plans for each number of devices, memory limit and combination of settings.

    Args:
        target: a function of the settings, by name, that returns ``(model, args)``, ``(model, args, kwargs)`` or an object with
            ``model, args, kwargs, loss, loss_args``; or a Graph, which has no settings.
        devices: one number of ranks or several; each tries meshes as ``plan`` does.
        memory: one limit per rank or several; the hardware's own when not given.
        settings: values by name, ``{"batch": [8, 16, 32]}``; every combination is captured once for each number of microbatches.
        time_limit: seconds for the whole call, shared among the points.
        done: called with each point as it is found.
        name: the model's name in the plans.
        others: as of ``plan``.

    Raises:
        UsageError: as of ``plan``, before there was a plan. A point without a plan, or without a graph, says why.
    """
    if isinstance(target, Graph) and settings:
        raise UsageError("a captured graph has no settings", "give a function that makes the model from them")
    counts, limits = _several(devices), _several(memory)
    machine = resolve_hardware(hardware)
    memory_limits = [read_memory_limit(limit, machine) for limit in limits]
    grid = Grid(combinations(settings or {}), tuple(dict.fromkeys(counts)), tuple(dict.fromkeys(memory_limits)))
    options = PlanOptions(
        hardware=machine, devices=grid.devices[0], mode=mode, compute_dtype=compute_dtype, optimizer=optimizer,
        pins=check_pins(constraints), inputs=inputs, cost_model=cost_model, recompute=recompute, offload=offload,
        microbatches=microbatches, execute=execute, effort=effort, time_limit=time_limit, seed=seed, progress=progress, name=name,
    )  # fmt: skip
    return plan_sweep(target, options, grid, done)


def _several(given: Any) -> list[Any]:
    """The values of a list, or the one value that was given."""
    return [given] if given is None or isinstance(given, str | int | float) else list(given)


def tune(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    candidates: int = 5,
    rounds: int = 20,
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
    recompute: str = "auto",
    offload: str = "off",
    microbatches: int | str = 1,
    execute: Execution | None = None,
    effort: Effort = DEFAULT_EFFORT,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    target: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The fastest of the best distinct plans as measured on the ranks that call it (under torchrun), the same on all of them.

    The first rank plans. Plans by hand (``plan.baselines``) are among the candidates. All run in turn, a step each round, and the fastest
    by the median over rounds is returned, with ``plan.measured``. The model is not changed. Ctrl-C ends it with the whole rounds so far.

    Args:
        candidates: number of plans to measure, 2 or more.
        rounds: timed steps of each.
        memory: a plan that takes more when it is run is not timed.
        time_limit: seconds for the search; measuring comes on top.
        seed: also of weights and inputs without values.
        say: told on the first rank what is being measured.
        others: as of ``plan``, but for ``inputs``: every rank has the whole batch.

    Raises:
        UsageError: fewer than 2 candidates, no rounds, or a mesh of other ranks than were started. InfeasibleError: no plan fits, as
            predicted or as measured. VerificationError: another rank ended. KeyboardInterrupt: before the first round was whole.
        Others as of ``plan`` and ``compile``. What one rank refuses, all do.
    """
    from autopar.tuning import tune_target  # for start-up time: imports torch

    options = PlanOptions(
        hardware=resolve_hardware(hardware), mesh=read_mesh(mesh), devices=devices, mode=mode, compute_dtype=compute_dtype,
        optimizer=optimizer, pins=check_pins(constraints), recompute=recompute, offload=offload,
        microbatches=microbatches, execute=execute, effort=effort, time_limit=time_limit, seed=seed, progress=progress, name=target,
        candidates=candidates,
    )  # fmt: skip
    given = Target(model, args, kwargs or {}, loss, loss_args)
    with user_errors():
        return tune_target(lambda: given, options, read_memory_limit(memory, options.hardware), rounds, say)[0]


@overload
def compile(
    model: nn.Module, plan: Plan | None, *, loss: Callable[..., Any] | None = ..., mesh: Any = ..., inputs: Inputs | None = ...,
    outputs: Outputs = ..., device: Any = ..., init: Callable[[nn.Module], None] | None = ..., seed: int = ...,
    execute: Execution | None = ...,
    example: tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]] | None = ...,
) -> ShardedModule: ...  # fmt: skip


@overload
def compile(
    model: nn.Module, plan: PipelinePlan, *, loss: Callable[..., Any] | None = ..., device: Any = ...,
    init: Callable[[nn.Module], None] | None = ..., seed: int = ...,
) -> PipelineModule: ...  # fmt: skip


@overload
def compile(
    model: nn.Module, plan: str | os.PathLike[str], *, loss: Callable[..., Any] | None = ..., mesh: Any = ..., inputs: Inputs | None = ...,
    outputs: Outputs = ..., device: Any = ..., init: Callable[[nn.Module], None] | None = ..., seed: int = ...,
    execute: Execution | None = ...,
    example: tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]] | None = ...,
) -> ShardedModule | PipelineModule: ...  # fmt: skip


def compile(
    model: nn.Module,
    plan: Plan | PipelinePlan | str | os.PathLike[str] | None,
    *,
    loss: Callable[..., Any] | None = None,
    mesh: Any = None,
    inputs: Inputs | None = None,
    outputs: Outputs = "placed",
    device: Any = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    execute: Execution | None = None,
    example: tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]] | None = None,
) -> ShardedModule | PipelineModule:
    """The model as the plan splits it, on this rank (under torchrun): a module with the model's own parameter names, as DTensors.

    Args:
        model: the planned model, with real weights (kept) or meta weights (made by ``init`` or a state dict). Where ranks hold different
            weights, those of the first rank that has any count.
        plan: the plan or the path of its file, the same on all ranks; None on ranks that receive another rank's plan. A pipeline's goes to
            ``compile_pipeline``, which takes loss, device, init and seed.
        loss: the loss it was planned with. A plan made in this process remembers it; one from a file or another rank needs it again.
        mesh: the part of a DeviceMesh that the plan is for, with your own data parallelism around it; all processes when not given.
        outputs: ``placed``: results that the plan splits are DTensors, without further communication; ``full``: they are gathered on every
            rank as plain tensors, which the plan has not priced.
        inputs, device, init, seed, execute, example: see ``autopar.runtime.compile_plan``.

    Raises:
        UsageError: an argument that pipelines do not take.
        MismatchError: the plan was made for another model, mesh or torch, or ranks differ; the first difference is named.
    """
    from autopar.pipeline_plan import PipelinePlan
    from autopar.runtime.module.compiling import compile_plan, shared_plan  # for start-up time: imports torch
    from autopar.runtime.pipelines.module import compile_pipeline as compile_stages

    if isinstance(plan, str | os.PathLike):
        plan = load(plan)
    with user_errors():
        plan = shared_plan(plan, mesh, device)
        if isinstance(plan, PipelinePlan):
            given = {"mesh": mesh, "inputs": inputs, "outputs": outputs, "execute": execute, "example": example}
            for name, value in given.items():
                if value is not None and (name, value) != ("outputs", "placed"):
                    raise UsageError(f"a pipeline is compiled without {name}", f"leave {name} out, or compile a plan without stages")
            return compile_stages(model, plan, loss=loss, device=device, init=init, seed=seed)
        return compile_plan(
            model, plan, loss=loss, mesh=mesh, inputs=inputs, outputs=outputs, device=device, init=init, seed=seed, execute=execute,
            example=example,
        )  # fmt: skip


def compile_pipeline(
    model: nn.Module,
    plan: PipelinePlan | str | os.PathLike[str] | None,
    *,
    loss: Callable[..., Any] | None = None,
    device: Any = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
) -> PipelineModule:
    """The model as a pipeline on this rank (under torchrun): the parameters of its stage, and a call that runs the whole step.

    Args:
        model: the whole planned model, with real weights (kept) or meta weights (made by ``init``, or by its modules).
        plan: as for ``compile``, of a pipeline.
        loss: the loss it was planned with. A plan made in this process remembers it.
        device, init, seed: see ``compile``.

    Raises:
        UsageError: a plan without stages.
        MismatchError: the plan was made for another model, mesh or torch, or ranks differ.
    """
    from autopar.pipeline_plan import PipelinePlan
    from autopar.runtime.module.compiling import shared_plan  # for start-up time: imports torch
    from autopar.runtime.pipelines.module import compile_pipeline as compile_stages

    if isinstance(plan, str | os.PathLike):
        plan = load_pipeline(plan)
    with user_errors():
        shared = shared_plan(plan, None, device)
        if not isinstance(shared, PipelinePlan):
            raise UsageError("the plan has no stages", "pass it to autopar.compile, which takes both kinds")
        return compile_stages(model, shared, loss=loss, device=device, init=init, seed=seed)


def load_pipeline(path: str | os.PathLike[str]) -> PipelinePlan:
    """Reads a pipeline's plan file. Raises FileError: names the place and the fault."""
    from autopar.pipeline_plan import PipelinePlan

    return PipelinePlan.from_json(read_text(path, "the plan", "give a file of autopar plan --mesh pp=..."), str(path))


def load(path: str | os.PathLike[str]) -> Plan | PipelinePlan:
    """Reads a plan file, of a pipeline too; one of the older schema is scheduled on load, with a warning.

    Raises:
        FileError: names the place and the fault.
    """
    from autopar.pipeline_plan import PIPELINE_SCHEMA

    if isinstance(path, str | os.PathLike) and begins_with(path, PIPELINE_SCHEMA):
        return load_pipeline(path)
    return recording.load(path)
