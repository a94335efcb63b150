"""Hardware: what one device and its links can do. Read from the TOML files beside this one, or from the user's.

A built-in file states the source of each figure. Figures are the vendor's peaks; what a kernel reaches of them
is the business of ``compute``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .efficiency import Efficiency, Residual
from .errors import HardwareFileError, UnknownHardwareError
from .hardware_file import PEAK_DTYPES, EfficiencyEntry, HardwareFile, LinkEntry, ResidualEntry
from .links import Figures, Link

LIKELY: Mapping[str, tuple[float, float, str]] = {
    "memory_bytes": (1e6, 1e14, "bytes"), "memory_bandwidth": (1e8, 1e15, "bytes/s"), "kernel_launch_seconds": (0.0, 0.1, "seconds"),
    "peak_flops": (1e8, 1e18, "operations a second"), "latency_seconds": (0.0, 0.1, "seconds"), "bandwidth": (1e5, 1e15, "bytes/s"),
    "host_memory_bytes": (1e6, 1e15, "bytes"),
}  # fmt: skip
"""Least and largest plausible value, and the unit. A figure far outside was given in GB, TFLOPS or microseconds."""

_RUNS_AS: Mapping[str, str] = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Hardware:
    """A kind of device, how many share a node, and how they are connected.

    Args:
        name: of the machine.
        memory_bytes: of one device.
        memory_bandwidth: bytes/s of one device's memory.
        kernel_launch_seconds: the least time of an operator.
        peak_flops: ``(dtype, floating-point operations a second)`` pairs, dense.
        devices_per_node: how many consecutive ranks share a node.
        node: between devices of a node.
        network: between nodes.
        axes: ``(mesh axis name, link)`` pairs that override the two links.
        overlap_slowdown: share of the compute speed that is lost while any collective is in flight: 0 loses nothing, at 1 nothing is
            hidden (gloo where ranks outnumber cores).
        efficiencies: ``(class of operators or operator, efficiency)`` pairs; ``default`` holds for the others.
        launch_overlaps: the next operator is launched while this one runs, as on a GPU's stream; else launch, arithmetic and memory
            traffic are each time of their own.
        residuals: ``(fit, residual)`` pairs of what ``profile`` measured; no price depends on them.
        issue_seconds: ``(way of execution, seconds)`` pairs: what a kernel costs the process that issues it.
        reserved_bytes: of a device's memory, for what no plan counts: the CUDA context, NCCL's buffers, gaps between blocks.
        host: between a device and the memory of its host, each way; None where nothing is offloaded.
        host_memory_bytes: of a node's memory, for what its ranks offload; they share it equally. 0 where nothing is offloaded.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    kernel_launch_seconds: float
    peak_flops: tuple[tuple[str, float], ...]
    devices_per_node: int
    node: Link
    network: Link
    axes: tuple[tuple[str, Link], ...] = ()
    overlap_slowdown: float = 0.0
    efficiencies: tuple[tuple[str, Efficiency], ...] = ()
    launch_overlaps: bool = True
    residuals: tuple[tuple[str, Residual], ...] = ()
    issue_seconds: tuple[tuple[str, float], ...] = ()
    reserved_bytes: float = 0.0
    host: Figures | None = None
    host_memory_bytes: float = 0.0

    @property
    def offloadable_bytes(self) -> int:
        """Bytes of its host's memory that a rank may fill; 0 where the file does not say what a copy there costs."""
        return int(self.host_memory_bytes / self.devices_per_node) if self.host is not None else 0

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that a plan may fill where no limit is given."""
        return int(self.memory_bytes - self.reserved_bytes)

    @cached_property
    def _peaks(self) -> Mapping[str, float]:
        return dict(self.peak_flops)

    def seconds_to_issue(self, execution: str | None) -> float:
        """Seconds that the host takes to issue a kernel; 0 where the file does not say, and where a launch is a part of the operator."""
        return dict(self.issue_seconds).get(execution or "", 0.0) if self.launch_overlaps else 0.0

    def peak(self, dtype: str) -> float:
        """Peak operations a second on ``dtype``; a dtype the file does not name runs at the float32 peak."""
        peaks = self._peaks
        return peaks.get(_RUNS_AS.get(dtype, dtype), peaks["float32"])

    @cached_property
    def _efficiencies(self) -> dict[tuple[str, str], Efficiency]:
        return {}

    def efficiency(self, family: str, name: str = "") -> Efficiency:
        """Of an operator: that of its own name (``aten.gelu``, without the overload), else of its class, else the file's default."""
        found = self._efficiencies.get((family, name))
        if found is None:
            known = {"default": Efficiency(launch_seconds=self.kernel_launch_seconds), **dict(self.efficiencies)}
            given = (name, name.rpartition(".")[0], family, "default")
            found = self._efficiencies[family, name] = next(known[item] for item in given if item in known)
        return found

    def unlikely(self) -> tuple[str, ...]:
        """The figures that no machine has, each with its unit.

        >>> from dataclasses import replace
        >>> replace(load_hardware("h100-sxm"), memory_bandwidth=3.35).unlikely()
        ('memory_bandwidth = 3.35 bytes/s',)
        """
        links: dict[str, Figures] = {"links.node": self.node, "links.network": self.network}
        links |= {f"axes.{name}": link for name, link in self.axes} | ({} if self.host is None else {"links.host": self.host})
        figures = [
            *((name, name, getattr(self, name)) for name in ("memory_bytes", "memory_bandwidth", "kernel_launch_seconds")),
            *((f"peak_flops.{dtype}", "peak_flops", peak) for dtype, peak in self.peak_flops),
            *((f"{place}.{name}", name, getattr(link, name)) for place, link in links.items() for name in ("latency_seconds", "bandwidth")),
            *([("host.memory_bytes", "host_memory_bytes", self.host_memory_bytes)] if self.host_memory_bytes else []),
        ]
        return tuple(
            f"{name} = {value:g} {LIKELY[kind][2]}" for name, kind, value in figures if not LIKELY[kind][0] <= value <= LIKELY[kind][1]
        )

    def axis_link(self, name: str) -> Link | None:
        """The link that the file gives to the mesh axis ``name``, if any."""
        return next((link for axis, link in self.axes if axis == name), None)

    def to_dict(self) -> dict[str, Any]:
        """The hardware as the content of a hardware file; ``from_dict`` reads it back."""
        data: dict[str, Any] = {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth": self.memory_bandwidth,
            "kernel_launch_seconds": self.kernel_launch_seconds,
            "peak_flops": dict(self.peak_flops),
            "devices_per_node": self.devices_per_node,
            "links": {"node": LinkEntry.content(self.node), "network": LinkEntry.content(self.network)},
        }
        if self.reserved_bytes:
            data["reserved_bytes"] = self.reserved_bytes
        if self.axes:
            data["axes"] = {name: LinkEntry.content(link) for name, link in self.axes}
        if self.overlap_slowdown:
            data["overlap_slowdown"] = self.overlap_slowdown
        if not self.launch_overlaps:
            data["launch_overlaps"] = False
        if self.host is not None:
            data["links"]["host"] = {"latency_seconds": self.host.latency_seconds, "bandwidth": self.host.bandwidth}
        if self.issue_seconds:
            data["host"] = {"issue_seconds": dict(self.issue_seconds)}
        if self.host_memory_bytes:
            data["host"] = {**data.get("host", {}), "memory_bytes": self.host_memory_bytes}
        if self.efficiencies:
            data["efficiency"] = {name: EfficiencyEntry.content(item) for name, item in self.efficiencies}
        if self.residuals:
            data["residuals"] = {name: ResidualEntry.content(item) for name, item in self.residuals}
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any], source: str = "the hardware description") -> Hardware:
        """Reads the content of a hardware file.

        Raises:
            HardwareFileError: naming ``source`` and the first field that is missing, unknown or out of range.
        """
        try:
            file = HardwareFile.model_validate(dict(data))
        except ValidationError as error:
            first, *others = error.errors()
            problem = first["msg"][0].lower() + first["msg"][1:]
            unknown = [_place(item) for item in others if item["type"] == "extra_forbidden"] if first["type"] == "missing" else []
            there = f"; there is no field {', '.join(unknown)}" if unknown else ""
            raise HardwareFileError(f"{source}: field {_place(first)}: {problem}{there}", _example()) from error
        if file.reserved_bytes >= file.memory_bytes:
            message = f"{source}: field reserved_bytes: {file.reserved_bytes:g} of {file.memory_bytes:g} bytes leave nothing to plans"
            raise HardwareFileError(message, "give what the driver and the communication library take, in bytes")
        if "float32" not in file.peak_flops:
            hint = "every dtype that is not given falls back on the float32 peak"
            raise HardwareFileError(f"{source}: field peak_flops.float32: field required", hint)
        for dtype in file.peak_flops:
            if dtype not in PEAK_DTYPES:
                raise HardwareFileError(f"{source}: field peak_flops.{dtype}: unknown dtype", f"use {', '.join(PEAK_DTYPES)}")
        return Hardware(
            file.name,
            file.memory_bytes,
            file.memory_bandwidth,
            file.kernel_launch_seconds,
            tuple(file.peak_flops.items()),
            file.devices_per_node,
            file.links.node.link,
            file.links.network.link,
            tuple((name, link.link) for name, link in file.axes.items()),
            file.overlap_slowdown,
            file.efficiencies,
            file.launch_overlaps,
            file.measured,
            tuple(file.host.issue_seconds.items()),
            file.reserved_bytes,
            None if file.links.host is None else Figures(file.links.host.latency_seconds, file.links.host.bandwidth),
            file.host.memory_bytes or 0.0,
        )


def hardware_names() -> tuple[str, ...]:
    """The built-in names, sorted."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")))


def hardware_text(name: str) -> str:
    """The text of a built-in file, with the source of each figure. Raises UnknownHardwareError."""
    if name not in hardware_names():
        raise UnknownHardwareError(f"unknown hardware {name!r}", f"use one of {', '.join(hardware_names())}")
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def load_hardware(hardware: str | Path | Hardware) -> Hardware:
    """The hardware of a built-in name or a TOML file (a text that ends in ``.toml`` or holds a slash is a path); one's own, checked.

    Raises:
        UnknownHardwareError: neither a built-in name nor a file.
        HardwareFileError: a file that cannot be read, or a Hardware that no file could hold, with the field at fault.
    """
    if isinstance(hardware, Hardware):
        return _checked(hardware)
    if isinstance(hardware, str) and hardware in hardware_names():
        return _built_in(hardware)
    path = Path(hardware)
    if not path.is_file():
        if isinstance(hardware, str) and not hardware.endswith(".toml") and "/" not in hardware:
            hint = f"use one of {', '.join(hardware_names())}, or the path of a .toml file"
            raise UnknownHardwareError(f"unknown hardware {hardware!r}", hint)
        raise UnknownHardwareError(f"no hardware file at {str(hardware)!r}", f"check the path, or use one of {', '.join(hardware_names())}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareFileError(f"cannot read the hardware file {path}: {error}", "it must be a readable TOML file") from error
    return _parse(text, str(path))


def _checked(hardware: Hardware) -> Hardware:
    """The same, or what a file of it would be. Raises HardwareFileError: figures that a file may not hold."""
    source = f"the Hardware {hardware.name!r}"
    try:
        content = hardware.to_dict()
    except (AttributeError, TypeError, ValueError) as error:
        hint = "change one of load_hardware by dataclasses.replace, or write a file"
        raise HardwareFileError(f"{source} is not made as its class says: {error}", hint) from error
    made = Hardware.from_dict(content, source)
    return hardware if made == hardware else made


@lru_cache
def _built_in(name: str) -> Hardware:
    return _parse(hardware_text(name), f"{name}.toml")


def _parse(text: str, source: str) -> Hardware:
    import tomllib  # for start-up time: what reads a plan reads no such file

    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "its lists are nested too deep" if isinstance(error, RecursionError) else error
        raise HardwareFileError(f"{source} is not TOML: {reason}", _example()) from error
    return Hardware.from_dict(data, source)


def _place(problem: Any) -> str:
    """Where a field is that pydantic finds fault with."""
    return ".".join(str(part) for part in problem["loc"] if part != "[key]")


def _example() -> str:
    return f"figures are plain numbers, in bytes, bytes/s and seconds: {_folder() / 'h100-sxm.toml'} is a complete example"


def _folder() -> Traversable:
    return resources.files(__package__) / "hardware"
