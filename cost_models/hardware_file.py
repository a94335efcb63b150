"""The schema of a hardware file: which fields there are, and what they may hold. Read by ``hardware``."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from .collectives import KINDS
from .efficiency import Efficiency, Residual
from .execution import Execution
from .links import Figures, Growth, Link

PEAK_DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
"""The names that ``peak_flops`` may hold; float32 must be there."""

# wide of any machine, and near enough that no sum or quotient of a model's sizes overflows
Positive = Annotated[float, Field(ge=1e-9, le=1e30, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Bytes = Annotated[float, Field(ge=1, le=2.0**62, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)  # what only shows plans reads no such file


class KindEntry(_Table):
    """``[links.node.all_reduce]``: what is not given is the link's own."""

    latency_seconds: NotNegative | None = None
    bandwidth: Positive | None = None
    latency_growth: Growth | None = None
    step_seconds: NotNegative | None = None

    def figures(self, link: LinkEntry) -> Figures:
        latency = link.latency_seconds if self.latency_seconds is None else self.latency_seconds
        step = next((item for item in (self.step_seconds, link.step_seconds) if item is not None), latency)
        return Figures(latency, self.bandwidth or link.bandwidth, self.latency_growth or link.latency_growth, step)

    @staticmethod
    def content(figures: Figures) -> dict[str, float | str]:
        return {
            "latency_seconds": figures.latency_seconds,
            "bandwidth": figures.bandwidth,
            "latency_growth": figures.latency_growth,
            "step_seconds": figures.further_step,
        }


class _OwnFigures(_Table):
    latency_seconds: NotNegative
    bandwidth: Positive
    latency_growth: Growth = "constant"
    step_seconds: NotNegative | None = None


_OfKinds = create_model("_OfKinds", __base__=_OwnFigures, **dict.fromkeys(KINDS, (KindEntry | None, None)))  # type: ignore[call-overload]
"""A field for each kind of collective, after the link's own: errors name these first."""


class LinkEntry(_OfKinds):
    """``[links.node]``, ``[links.network]`` and ``[axes.NAME]``."""

    @property
    def link(self) -> Link:
        given = ((kind, getattr(self, kind)) for kind in KINDS)
        kinds = tuple((kind, entry.figures(self)) for kind, entry in given if entry is not None)
        return Link(self.latency_seconds, self.bandwidth, self.latency_growth, self.step_seconds, kinds)

    @staticmethod
    def content(link: Link) -> dict[str, Any]:
        found: dict[str, Any] = {"latency_seconds": link.latency_seconds, "bandwidth": link.bandwidth}
        if link.latency_growth != "constant":
            found["latency_growth"] = link.latency_growth
        if link.step_seconds is not None:
            found["step_seconds"] = link.step_seconds
        return found | {kind: KindEntry.content(figures) for kind, figures in link.kinds}


class HostLinkEntry(_Table):
    """``[links.host]``: between a device and the memory of its host, each way."""

    latency_seconds: NotNegative
    bandwidth: Positive


class LinksEntry(_Table):
    """``[links]``."""

    node: LinkEntry
    network: LinkEntry
    host: HostLinkEntry | None = None


class EfficiencyEntry(_Table):
    """``[efficiency.CLASS]``: what is not given is as in ``[efficiency.default]``."""

    arithmetic: Positive | None = None
    memory: Positive | None = None
    launch_seconds: NotNegative | None = None

    def over(self, default: Efficiency) -> Efficiency:
        return replace(default, **self.model_dump(exclude_none=True))

    @staticmethod
    def content(item: Efficiency) -> dict[str, float]:
        return asdict(item)


class ResidualEntry(_Table):
    """``[residuals]``: of each fit that ``profile`` made, under the name of what it gives."""

    points: Annotated[int, Field(ge=1)]
    median: NotNegative
    largest: NotNegative
    percentile_90: NotNegative | None = None

    @staticmethod
    def content(item: Residual) -> dict[str, float]:
        return {name: value for name, value in asdict(item).items() if value is not None}


class HostEntry(_Table):
    """``[host]``: seconds that the process takes to issue a kernel, by way of execution; bytes of a node's memory for offloaded values."""

    issue_seconds: dict[Execution, NotNegative] = {}
    memory_bytes: Bytes | None = None


class HardwareFile(_Table):
    """A whole file."""

    name: Annotated[str, Field(min_length=1)]
    memory_bytes: Bytes
    reserved_bytes: Annotated[float, Field(ge=0, le=1e18)] = 0.0
    memory_bandwidth: Positive
    kernel_launch_seconds: NotNegative
    peak_flops: dict[str, Positive]
    devices_per_node: Annotated[int, Field(ge=1)]
    overlap_slowdown: Share = 0.0
    launch_overlaps: bool = True
    links: LinksEntry
    axes: dict[str, LinkEntry] = {}
    host: HostEntry = HostEntry()
    efficiency: dict[str, EfficiencyEntry] = {}
    residuals: dict[str, ResidualEntry] = {}

    @property
    def efficiencies(self) -> tuple[tuple[str, Efficiency], ...]:
        """Of each class named in the file, complete."""
        default = self.efficiency.get("default", EfficiencyEntry()).over(Efficiency(launch_seconds=self.kernel_launch_seconds))
        return tuple((name, entry.over(default)) for name, entry in self.efficiency.items())

    @property
    def measured(self) -> tuple[tuple[str, Residual], ...]:
        """The residuals by name."""
        return tuple((name, Residual(**entry.model_dump())) for name, entry in self.residuals.items())
