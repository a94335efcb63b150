"""Checked values of a user's words: ``PlanOptions``, and hardware, meshes, memory limits and pins. A wrong word is a UsageError."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, get_args

from autopar.cost_models import COST_MODELS, EXECUTIONS, CostModelError, Execution, Hardware, Mesh, find_optimizer, load_hardware
from autopar.effort import DEFAULT_EFFORT, Effort, check_effort
from autopar.errors import FileError, UsageError
from autopar.pipeline.orders import parse_order
from autopar.rows import Inputs
from autopar.seeds import check_seed

if TYPE_CHECKING:
    from autopar.search import Progress

DEFAULT_HARDWARE = "h100-sxm"
"""The hardware when none is named; the plan and the command line say so."""

RECOMPUTE = ("auto", "off")
"""Whether operators may run a second time in backward."""

OFFLOAD = ("auto", "off")
"""Whether values of forward may lie on the host until backward."""

Mode = Literal["train", "inference"]
"""``train``: forward, backward and optimizer; ``inference``: the forward alone."""

MESH_NAMES = ("x", "y", "z", "w")

AUTO = "auto"
"""Microbatches: powers of two are tried."""

MeshLike = str | Mapping[str, int] | Mesh | Any
"""``"dp=2,tp=4"``, ``"2x4"``, ``{"dp": 2, "tp": 4}``, a Mesh, or torch's DeviceMesh."""


@dataclass(frozen=True)
class PlanOptions:
    """How to plan, whatever the model and the memory limit: checked values, made once from a user's words.

    Args:
        hardware: the machine's.
        mesh: the mesh; or ``devices``, the number of ranks, to try several meshes.
        mode, compute_dtype: of the capture.
        inputs: ``local``: the rows of all inputs are split alike, over the axes that are best.
        pins: name or glob to spec, as the user wrote them.
        microbatches: a number, or ``auto``.
        order: of the actions of a pipeline's stages.
        execute: the way of execution whose host is priced; None for a host that takes no time.
        time_limit: seconds for the whole call.
        began: when the call began, of ``perf_counter``.
        progress: called with (seconds of the best plan, bound, gap, elapsed seconds).
        name: what plans call the model; its class where None.
        candidates: number of distinct plans to find, plans by hand among them, for runs that measure them.

    Raises:
        UsageError: a value that is none of the choices, or no mesh.
    """

    hardware: Hardware
    mesh: Mesh | None = None
    devices: int | None = None
    mode: Mode = "train"
    compute_dtype: str | None = None
    optimizer: str = "adamw"
    pins: Mapping[str, str] = field(default_factory=dict)
    inputs: Inputs = "global"
    cost_model: str = "roofline"
    recompute: str = "auto"
    offload: str = "off"
    microbatches: int | str = 1
    order: str = "auto"
    execute: Execution | None = None
    effort: Effort = DEFAULT_EFFORT
    time_limit: float = 60.0
    began: float = field(default_factory=perf_counter, compare=False)
    seed: int = 0
    progress: Progress | None = None
    name: str | None = None
    candidates: int = 1

    def __post_init__(self) -> None:
        assert self.meshes
        check_one_of("kind of inputs", self.inputs, get_args(Inputs))
        check_one_of("cost model", self.cost_model, tuple(COST_MODELS))
        check_one_of("way to recompute", self.recompute, RECOMPUTE)
        parse_order(self.order)
        check_offload(self.offload, self.hardware, self.cost_model, self.execute)
        check_execution(self.execute, self.hardware, self.cost_model)
        with user_errors():
            find_optimizer(self.optimizer)
        check_effort(self.effort)
        check_seconds(self.time_limit)
        check_seed(self.seed)
        if self.microbatches != AUTO:
            check_number(self.microbatches)

    @property
    def deadline(self) -> float:
        """When the time limit passes, of ``perf_counter``."""
        return self.began + self.time_limit

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The mesh, or every mesh of one and two axes with ``devices`` ranks."""
        return tuple(candidate_meshes(self.mesh, self.devices))

    @cached_property
    def spare_meshes(self) -> tuple[Mesh, ...]:
        """Meshes of three axes, tried in the time that the others leave."""
        if self.mesh is not None or self.devices is None or self.cost_model == "communication":
            return ()
        return tuple(of_three_axes(self.devices, self.hardware.devices_per_node))


def read_execution(execute: str | None) -> Execution | None:
    """The way of execution of an option's text. Raises UsageError."""
    if execute is not None:
        check_one_of("way to execute", execute, EXECUTIONS)
    return next((known for known in EXECUTIONS if known == execute), None)


def check_execution(execute: Execution | None, hardware: Hardware, cost_model: str) -> None:
    """Whether a way of execution can be priced. Raises UsageError."""
    if read_execution(execute) is None:
        return
    if cost_model == "communication":
        raise UsageError("the communication model counts collectives alone, and no host", "drop execute, or use the roofline model")
    if not hardware.launch_overlaps:
        raise UsageError(f"{hardware.name} has no host apart: a launch is a part of each operator's time there", "leave execute out")
    if execute not in dict(hardware.issue_seconds):
        hint = "add it to the hardware file under [host], or measure it with autopar profile"
        raise UsageError(f"{hardware.name} does not say what the host takes to issue a kernel in {execute!r} execution", hint)


def check_offload(offload: str, hardware: Hardware, cost_model: str, execute: Execution | None = None) -> None:
    """Whether values can be moved to the host. Raises UsageError."""
    check_one_of("way to offload", offload, OFFLOAD)
    if offload == "off":
        return
    if cost_model == "communication":
        hint = "drop offload, or use the roofline model"
        raise UsageError("the communication model counts collectives alone, and no copies to the host", hint)
    if execute not in (None, "eager"):
        raise UsageError(f"programs in {execute!r} execution make no copies to the host so far", "drop offload, or execute='eager'")
    if not hardware.offloadable_bytes:
        lacks = "links.host" if hardware.host is None else "host.memory_bytes"
        hint = "add [links.host] with latency_seconds and bandwidth, and memory_bytes under [host], to the hardware file"
        raise UsageError(f"{hardware.name} does not say what offloading to the host costs: it has no {lacks}", hint)


def resolve_hardware(hardware: str | os.PathLike[str] | Hardware | None) -> Hardware:
    """The hardware of a name, a file or a value; the default when None. Raises UsageError or FileError."""
    if not isinstance(hardware, str | os.PathLike | Hardware | None):
        hint = f"give a built-in name such as {DEFAULT_HARDWARE!r}, the path of a TOML file, or a Hardware"
        raise UsageError(f"hardware is {hardware!r}", hint)
    with user_errors():
        named = DEFAULT_HARDWARE if hardware is None else hardware
        return load_hardware(named if isinstance(named, str | Hardware) else os.fspath(named))


def parse_memory(memory: str | float) -> int:
    """Bytes of ``"70GiB"``, ``"80GB"``, ``"1.5e9"`` or a number. Raises UsageError.

    >>> parse_memory("70GiB"), parse_memory("80 GB"), parse_memory(1024)
    (75161927680, 80000000000, 1024)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*(?:([kmgtp]?)(i?)b?)?\s*", str(memory), re.IGNORECASE)
    hint = "write bytes or a number with a unit: 70GiB, 80GB, 512MiB"
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if match is None or not 0 < value < 1e30:
        raise UsageError(f"{memory!r} is not an amount of memory", hint)
    power = " kmgtp".index((match[2] or " ").lower())
    found = int(value * (1024 if match[3] else 1000) ** power)
    if not 1 <= found <= 2**62:
        raise UsageError(f"{memory!r} is {value * (1024 if match[3] else 1000) ** power:g} bytes, counted are 1 to 2^62", hint)
    return found


def read_memory_limit(memory: str | float | None, hardware: Hardware) -> int:
    """The memory limit in bytes per rank: the one given, else what the hardware leaves to plans."""
    return hardware.usable_bytes if memory is None else parse_memory(memory)


def read_mesh(mesh: MeshLike | None) -> Mesh | None:
    """The mesh, if one is given. Raises UsageError."""
    return None if mesh is None else parse_mesh(mesh)


def parse_mesh(mesh: MeshLike) -> Mesh:
    """The mesh of a text, a mapping, a Mesh or a DeviceMesh. Raises UsageError."""
    if not isinstance(mesh, str | Mapping | Mesh) and hasattr(mesh, "mesh_dim_names"):
        names = mesh.mesh_dim_names or MESH_NAMES[: len(mesh.shape)]
        mesh = dict(zip(names, mesh.shape, strict=True))
    with user_errors():
        return Mesh.parse(mesh)


def factorizations(devices: int) -> Iterator[Mesh]:
    """Every mesh of one and two axes of ``devices`` ranks: ``dp`` alone, then each ``dp x tp``. Raises UsageError."""
    if not isinstance(devices, int) or devices < 1:
        raise UsageError(f"the number of devices is {devices!r}", "give a whole number from 1 on")
    with user_errors():
        Mesh((("dp", devices),))  # says where that is too many, before they are divided
    yield Mesh((("dp", devices),))
    for inner in range(2, devices // 2 + 1):
        if devices % inner == 0:
            yield Mesh((("dp", devices // inner), ("tp", inner)))


def of_three_axes(devices: int, per_node: int) -> Iterator[Mesh]:
    """The meshes ``dp x cp x tp`` of ``devices`` ranks that respect nodes of ``per_node`` ranks.

    With several nodes, a node is the last axis or the last two.

    >>> [str(mesh) for mesh in of_three_axes(32, 8)]
    ['dp=4,cp=4,tp=2', 'dp=4,cp=2,tp=4', 'dp=2,cp=2,tp=8']
    """
    for inner in range(2, devices // 4 + 1):
        for middle in range(2, devices // (2 * inner) + 1):
            if devices % (inner * middle) == 0 and (devices <= per_node or per_node in (inner, inner * middle)):
                yield Mesh((("dp", devices // (inner * middle)), ("cp", middle), ("tp", inner)))


def candidate_meshes(mesh: MeshLike | None, devices: int | None) -> Iterator[Mesh]:
    """The mesh, or those of one and two axes with ``devices`` ranks. Raises UsageError: neither is given, or both disagree."""
    if mesh is not None and devices is not None:
        found = parse_mesh(mesh)
        if found.ranks != devices:
            raise UsageError(f"the mesh {found} has {found.ranks} ranks, devices is {devices}", "give one of the two, or make them agree")
        yield found
    elif mesh is not None:
        yield parse_mesh(mesh)
    elif devices is not None:
        yield from factorizations(devices)
    else:
        raise UsageError("neither a mesh nor a number of devices is given", "give a mesh, e.g. dp=2,tp=4, or devices, e.g. 8")


def check_pins(constraints: Mapping[str, str] | None) -> dict[str, str]:
    """The pins as a dictionary. Raises UsageError: names or specs that are not text."""
    hint = "give a mapping of names to specs, e.g. {'lm_head.weight': 'S1 R'}"
    if not isinstance(constraints, Mapping | None):
        raise UsageError(f"constraints are a {type(constraints).__name__}", hint)
    for name, spec in (constraints or {}).items():
        if not isinstance(name, str) or not isinstance(spec, str):
            raise UsageError(f"the pin {name!r}: {spec!r} is not text", hint)
    return dict(constraints or {})


def check_seconds(time_limit: object) -> None:
    """Raises UsageError: a time limit that is not a positive number."""
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise UsageError(f"the time limit is {time_limit!r} s", "give the solver a positive number of seconds")


def check_number(microbatches: int | str) -> int:
    """The number of microbatches. Raises UsageError: it is not a whole number from 1 on."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise UsageError(f"the number of microbatches is {microbatches!r}", "give a whole number from 1 on, or auto where one plans")
    return microbatches


def check_one_of(what: str, given: str, known: tuple[str, ...]) -> None:
    """Raises UsageError: the name is none of those known."""
    if given not in known:
        raise UsageError(f"unknown {what} {given!r}", f"use one of {', '.join(known)}")


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns errors of ``cost_models`` into autopar's own, with the same message, hint and exit status."""
    try:
        yield
    except CostModelError as error:
        kind = UsageError if error.exit_status == UsageError.exit_status else FileError
        raise kind(error.message, error.hint) from error
