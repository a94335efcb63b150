"""From times to a Hardware: one fit for each kind of collective on each link, and for each class of operators.

An operator that its class does not describe well has figures of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from autopar.cost_models import Efficiency, Hardware, Link, Residual
from autopar.cost_models.collectives import KINDS
from autopar.cost_models.fitting import CollectiveTime, OperatorTime, fit_collective, fit_efficiency
from autopar.measurement.device import Peaks

CLOSER = 0.75
"""An operator has figures of its own if they miss it by less than this share of what its class' figures miss."""
ENOUGH = 3
"""Points that an operator's own figures need."""


@dataclass(frozen=True)
class Times:
    """Everything that was measured, as means over the ranks.

    Args:
        peaks: of one rank.
        operators: of one rank.
        collectives: ``(link, time)``; empty where there is one rank.
        overlap_slowdown: see ``Hardware``.
        overlaps: launches overlap with work.
    """

    peaks: Peaks
    operators: tuple[OperatorTime, ...]
    collectives: tuple[tuple[str, CollectiveTime], ...]
    overlap_slowdown: float
    overlaps: bool


@dataclass(frozen=True)
class Measured:
    """What was measured, and what was not: ``notes`` are sentences for the file's comments."""

    hardware: Hardware
    notes: tuple[str, ...]


def fit(times: Times, name: str, memory_bytes: float, per_node: int) -> Hardware:
    """The hardware that explains the times best."""
    residuals: dict[str, Residual] = {}
    efficiencies = _efficiencies(times, residuals)
    links = {link: _link(link, [time for where, time in times.collectives if where == link], residuals) for link in ("node", "network")}
    alone = Link(0.0, times.peaks.bandwidth)
    return Hardware(
        name=name,
        memory_bytes=memory_bytes,
        memory_bandwidth=times.peaks.bandwidth,
        kernel_launch_seconds=efficiencies["default"].launch_seconds,
        peak_flops=tuple(times.peaks.flops.items()),
        devices_per_node=per_node,
        node=links["node"] or links["network"] or alone,
        network=links["network"] or links["node"] or alone,
        overlap_slowdown=times.overlap_slowdown,
        efficiencies=tuple(efficiencies.items()),
        launch_overlaps=times.overlaps,
        residuals=tuple(residuals.items()),
        issue_seconds=_issue_seconds(times.operators),
    )


def _issue_seconds(operators: Sequence[OperatorTime]) -> tuple[tuple[str, float], ...]:
    """Of an operator on its own, the median: operators take the host about as long whatever their size. Nothing where no host was seen."""
    hosts = [operator.host_seconds for operator in operators if operator.host_seconds]
    return (("eager", median(hosts)),) if hosts else ()


def _link(name: str, times: Sequence[CollectiveTime], residuals: dict[str, Residual]) -> Link | None:
    """The link's figures by kind; its own, for what is not measured, are the all-gather's."""
    if not times:
        return None
    kinds = {}
    for kind in KINDS:
        figures, residual = fit_collective(kind, [time for time in times if time.kind == kind], whole=True)
        kinds[kind] = replace(figures, step_seconds=figures.further_step)
        residuals[f"links.{name}.{kind}"] = residual
    own = kinds["all_gather"]
    return Link(own.latency_seconds, own.bandwidth, own.latency_growth, own.step_seconds, tuple(kinds.items()))


def _efficiencies(times: Times, residuals: dict[str, Residual]) -> dict[str, Efficiency]:
    """By class, by operator where one stands apart from its class, and ``default``: launch and memory of the pointwise ones, explained by
    their memory traffic alone, and arithmetic of the products."""
    found: dict[str, Efficiency] = {}
    by_family: dict[str, list[OperatorTime]] = {}
    for time in times.operators:
        by_family.setdefault(time.family, []).append(time)
    for family, points in sorted(by_family.items()):
        apart, rest = _parted(points, times)
        found[family], residuals[f"efficiency.{family}"] = _fit(rest, times)
        for name, own in sorted(apart.items()):
            found[name], residuals[f"efficiency.{name}"] = _fit(own, times)
    arithmetic = found["contraction"].arithmetic if "contraction" in found else 1.0
    moving = [replace(time, flops=0.0) for time in by_family.get("pointwise", ())]
    default = replace(_fit(moving, times)[0], arithmetic=arithmetic) if moving else Efficiency(arithmetic=arithmetic)
    return {"default": default, **found}


def _fit(points: Sequence[OperatorTime], times: Times) -> tuple[Efficiency, Residual]:
    return fit_efficiency(points, _peaks_of(points, times), times.peaks.bandwidth, overlaps=times.overlaps)


def _peaks_of(points: Sequence[OperatorTime], times: Times) -> list[float]:
    return [times.peaks.flops.get(point.dtype, times.peaks.flops["float32"]) for point in points]


def _short(name: str) -> str:
    """An operator without its overload."""
    return name.rpartition(".")[0] or name


def _by_name(points: Sequence[OperatorTime]) -> dict[str, list[OperatorTime]]:
    found: dict[str, list[OperatorTime]] = {}
    for point in points:
        found.setdefault(_short(point.name), []).append(point)
    return found


def _parted(points: Sequence[OperatorTime], times: Times) -> tuple[dict[str, list[OperatorTime]], list[OperatorTime]]:
    """The operators of a class that get figures of their own, one after another, the worst described first; and the others' points."""
    names, apart = _by_name(points), dict[str, list[OperatorTime]]()
    able = {name: _error(own, _fit(own, times)[0], times) for name, own in names.items() if len(own) >= ENOUGH}
    while True:
        rest = [point for name, own in names.items() if name not in apart for point in own]
        whole = _fit(rest, times)[0]
        errors = {name: _error(names[name], whole, times) for name in able if name not in apart}
        worst = max((name for name in errors if able[name] < errors[name] * CLOSER), key=lambda name: errors[name], default=None)
        if worst is None or len(names[worst]) == len(rest):
            return apart, rest
        apart[worst] = names[worst]


def _error(points: Sequence[OperatorTime], efficiency: Efficiency, times: Times) -> float:
    """The share of some points' seconds by which the figures miss them."""
    missed = 0.0
    for point, peak in zip(points, _peaks_of(points, times), strict=True):
        predicted = efficiency.seconds(point.flops, point.bytes_moved, peak, times.peaks.bandwidth, overlaps=times.overlaps)
        missed += abs(predicted - point.seconds)
    return missed / sum(point.seconds for point in points)
