"""Fits: exact on what the models themselves give, and close in spite of noise and outliers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import get_args

import numpy as np
import pytest

from autopar.cost_models import Efficiency, Figures, Hardware, Link, Machine, Mesh, Operator, load_hardware
from autopar.cost_models.collectives import KINDS, received_bytes
from autopar.cost_models.efficiency import NOTHING
from autopar.cost_models.fitting import (
    BETTER,
    CollectiveTime,
    OperatorTime,
    fit_collective,
    fit_efficiency,
    fit_maximum,
    relative_least_squares,
)
from autopar.cost_models.links import STEPS, Growth, group_over
from tests.cost_models.gpu_times import CLASSES, GPU, gpu_times

BYTES = tuple(4096 * 8**power for power in range(5))
PEAK, BANDWIDTH = 1e12, 1e11


def collective_times(kind: str, figures: Figures, sizes: tuple[int, ...] = (2, 4, 8)) -> list[CollectiveTime]:
    """What a link of these figures takes."""
    link = Link(figures.latency_seconds, figures.bandwidth, figures.latency_growth, figures.step_seconds)
    found = []
    for size, full in itertools.product(sizes, BYTES):
        group = group_over(kind, [(link, size)])
        found.append(CollectiveTime(kind, size, full, group.latency + received_bytes(kind, full, size) / group.bandwidth))
    return found


@pytest.mark.parametrize("growth", get_args(Growth))
@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_found_again(kind: str, growth: Growth) -> None:
    given = Figures(5e-5, 3e9, growth, None if growth == "constant" else 2e-5)
    found, residual = fit_collective(kind, collective_times(kind, given))
    assert residual.largest < 1e-9 and residual.points == 15
    assert (found.latency_seconds, found.bandwidth) == pytest.approx((5e-5, 3e9))
    if kind != "permute":
        assert found.latency_growth == growth
        assert found.further_step == pytest.approx(given.further_step)


def test_one_size_of_group_is_of_constant_latency() -> None:
    found, _ = fit_collective("all_gather", collective_times("all_gather", Figures(1e-5, 1e9, "ring"), (4,)))
    assert found.latency_growth == "constant" and found.latency_seconds == pytest.approx(3e-5)


@pytest.mark.parametrize("growth", ["tree", "ring"])
def test_a_whole_call_is_never_dearer_than_the_two_that_make_it_up(growth: Growth) -> None:
    points = collective_times("all_reduce", Figures(0.0, 1e9, growth, 1e-3))
    free, _ = fit_collective("all_reduce", points)
    whole, _ = fit_collective("all_reduce", points, whole=True)
    latency = [[_latency(figures, size) for size in (2, 4)] for figures in (free, whole)]
    assert latency[0][1] > 2 * latency[0][0] and latency[1][1] <= 2 * latency[1][0] * (1 + 1e-9)


def _latency(figures: Figures, size: int) -> float:
    step = figures.further_step or 0.0
    return figures.latency_seconds + (STEPS[figures.latency_growth](size, KINDS["all_reduce"].passes) - 1) * step


def test_an_outlier_does_not_move_the_fit() -> None:
    points = collective_times("all_reduce", Figures(1e-5, 1e9))
    points[3] = CollectiveTime("all_reduce", points[3].size, points[3].full_bytes, 40 * points[3].seconds)
    found, residual = fit_collective("all_reduce", points)
    assert (found.latency_seconds, found.bandwidth) == pytest.approx((1e-5, 1e9), rel=0.05)
    assert residual.median < 0.01 and residual.largest > 0.9


def test_coefficients_are_not_negative() -> None:
    terms = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert relative_least_squares(terms, np.array([3.0, 2.0, 1.0]))[1] == 0.0


SIZES = (1e3, 1e6, 1e8, 1e9)


def operator_times(truth: Efficiency, *, overlaps: bool) -> list[OperatorTime]:
    """What operators of small and large work take by the cost model itself."""
    hardware = Hardware("", 1, BANDWIDTH, 1e-6, (("float32", PEAK),), 8, Link(0, 1), Link(0, 1), (), 0.0, (("x", truth),), overlaps)
    machine = Machine(Mesh.parse("2"), hardware)
    found = []
    for flops, moved in itertools.product((1e4, 1e7, 1e10, 1e12), (1e3, 1e6, 1e9)):
        seconds = machine.operator_seconds(Operator("", "x", "float32", (), (), flops, moved))
        found.append(OperatorTime("x", "x", "float32", flops, moved, seconds))
    return found


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("truth", [Efficiency(0.6, 0.3, 2e-5), Efficiency(0.9, 1.7, 0.0), Efficiency(0.01, 0.5, 1e-3)], ids=str)
def test_efficiencies_are_found_again(truth: Efficiency, overlaps: bool) -> None:
    points = operator_times(truth, overlaps=overlaps)
    found, residual = fit_efficiency(points, [PEAK] * len(points), BANDWIDTH, overlaps=overlaps)
    assert residual.largest < 1e-6
    assert (found.arithmetic, found.memory) == pytest.approx((truth.arithmetic, truth.memory))
    assert found.launch_seconds == pytest.approx(truth.launch_seconds, abs=2e-8)  # as long as the fastest point tells


@pytest.mark.parametrize(("overlaps", "share"), [(True, 1.0), (False, NOTHING)])
def test_work_of_which_nothing_was_seen(overlaps: bool, share: float) -> None:
    points = [OperatorTime("x", "x", "float32", 1.0, moved, (1e-5 if moved < 1e5 or not overlaps else 0) + moved / 5e10) for moved in SIZES]
    found, _ = fit_efficiency(points, [PEAK] * len(SIZES), BANDWIDTH, overlaps=overlaps)
    assert found.arithmetic == share and found.memory == pytest.approx(0.5)


@pytest.mark.parametrize("outliers", [0.0, 0.1])
@pytest.mark.parametrize("name", [name for operators in CLASSES.values() for name in operators])
def test_a_gpus_operator_is_found_again_from_many_noisy_times(name: str, outliers: float) -> None:
    points = [point for point in gpu_times(1200, noise=0.03, outliers=outliers) if point.name == f"{name}.default"]
    peaks = [GPU.peak(point.dtype) for point in points]
    found, residual = fit_efficiency(points, peaks, GPU.memory_bandwidth, overlaps=True)
    predicted, true = (
        np.array([item.seconds(point.flops, point.bytes_moved, peak, GPU.memory_bandwidth, overlaps=True)
                  for point, peak in zip(points, peaks, strict=True)])
        for item in (found, GPU.efficiency("", name))
    )  # fmt: skip
    assert len(points) >= 30 and residual.median < 0.04
    assert np.quantile(np.abs(predicted / true - 1), 0.9) < 0.06


@pytest.mark.parametrize("seed", range(20))
def test_a_maximum_is_fitted_nearly_as_well_as_by_trying_all_coefficients(seed: int) -> None:
    """Each coefficient is 0 or meets a point: 9 ** 3 ways for 8 points. A descent drops terms that gain less than 5 % of the error."""
    chance = np.random.default_rng(seed)
    terms = 10 ** chance.uniform(-2, 2, (8, 3))
    seconds = (terms * 10 ** chance.uniform(-1, 1, 3)).max(axis=1) * chance.lognormal(0, 0.2, 8)

    def error(coefficients: Iterable[float]) -> float:
        return float(np.minimum(np.abs((terms * np.array(coefficients)).max(axis=1) / seconds - 1), 1).mean())

    ways = itertools.product(*(np.append(0.0, seconds / terms[:, term]) for term in range(3)))
    assert error(fit_maximum(terms, seconds)) <= min(map(error, ways)) / BETTER**3 + 1e-9


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_published_latencies_of_nccl(kind: str) -> None:
    """H100 NVSwitch, microseconds over 2, 4 and 8 ranks: a ring fits closest, and the built-in file's tree lies within a third."""
    published = {"all_gather": (8, 17, 30), "all_reduce": (10, 15, 31)}[kind]
    points = [CollectiveTime(kind, size, 0.0, latency * 1e-6) for size, latency in zip((2, 4, 8), published, strict=True)]
    figures, residual = fit_collective(kind, points)
    assert figures.latency_growth == "ring" and residual.largest < 0.12
    machines = [Machine(Mesh.parse(str(size)), load_hardware("h100-sxm")) for size in (2, 4, 8)]
    own = [machine.latency_seconds(kind, (machine.mesh.whole(0),)) * 1e6 for machine in machines]
    assert own == pytest.approx(published, rel=0.34)
