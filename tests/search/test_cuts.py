"""The weights of bounds: paths and times that come in one by one leave nothing out that would bound more."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.search.bounds.surrogate import PHASES, Master, Term, bytes_by_time
from autopar.search.ilp.model import Model
from tests.search.test_paths import answers, model_of

PRICE = 1e-12
"""Seconds of a byte at all times together, at most."""


def cuts_of(model: Model, allowed: float = 0.0, times: tuple[int, ...] = ()) -> Master:
    found = Master(model, model.space.machine.hardware.overlap_slowdown, allowed, times)
    for answer in answers(model):
        found.add(answer)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_no_other_path_bounds_more(seed: int) -> None:
    model, rng = model_of(seed, batch=256, width=4096), np.random.default_rng(seed)
    cuts = cuts_of(model)
    without = cuts._solve_program(0.0)[1]
    mixture, most, _ = cuts.best_weights()
    assert most >= without
    came_in = [term for term in cuts.terms if term.path]
    assert came_in and set(mixture.weights) <= set(cuts.terms)
    for answer in cuts.evaluations:
        sums = sum(weight * answer.sum_of(term, cuts.slowdown) for term, weight in mixture.weights.items())
        assert sums + answer.optimizer >= most * (1 - 1e-6)
    for phase in PHASES:
        for _ in range(50):
            shares = rng.dirichlet(np.ones(len(cuts.evaluations)))
            once = [
                sum(share * answer.counted_once[kind] for share, answer in zip(shares, cuts.evaluations, strict=True)) for kind in (0, 1)
            ]
            path = cuts.longest_path(phase, once[0] * rng.random(len(once[0])), once[1] * 10 ** rng.uniform(-1, 1))
            cuts.terms += [Term(phase, link, path=path) for link in ("", *model.space.links)]
    assert cuts._solve_program(0.0)[1] <= most * (1 + len(PHASES) * 1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_time_bounds_more(seed: int) -> None:
    model = model_of(seed)
    times = tuple(sorted(set(model.op_times.values())))
    held = np.array([bytes_by_time(model, answer.choices)[list(times)] for answer in answers(model)])
    allowed = 0.9 * float(held.max(axis=1).min())
    cuts = cuts_of(model, allowed, times)
    free = cuts_of(model).best_weights()[1]
    most, prices = cuts.best_weights(PRICE)[1:]
    assert most > free * (1 + 1e-6) and 0 < len(prices) < len(times)
    assert min(prices.values()) >= 0.0 and 0.0 < sum(prices.values()) <= PRICE * (1 + 1e-9)
    cuts.priced_times = list(range(len(times)))
    assert cuts._solve_program(PRICE)[1] <= most * (1 + 1e-4)


def test_levels_are_what_nodes_hold() -> None:
    model = model_of(0)
    answer = answers(model)[0]
    at = bytes_by_time(model, answer.choices)
    for time in sorted(set(model.op_times.values())):
        held = sum(
            size for node, choice in zip(model.nodes, answer.choices, strict=True) for begin, end, size in node.items[choice]
            if begin <= time < end
        )  # fmt: skip
        assert at[time] == pytest.approx(held)
