"""How close the solves of a search for bounds come."""

from __future__ import annotations

import math

import pytest

from autopar.search.driver.phase_table import bound_solve_gap
from autopar.search.settings import CLOSE_GAP


def test_solves_for_a_bound_come_as_close_as_any_weights_still_can() -> None:
    """Else the bound stays below what its weights come to by the whole gap at which solves stop."""
    assert bound_solve_gap(0.04, 100.0, math.inf) == pytest.approx(0.02)
    assert bound_solve_gap(1.0, 99.0, 100.0) == pytest.approx(0.005)
    assert bound_solve_gap(1.0, 99.9, 100.0) == CLOSE_GAP


def test_solves_for_a_bound_come_closer_after_one_that_gained_nothing() -> None:
    assert bound_solve_gap(1.0, 90.0, 100.0, idle=2) == pytest.approx(bound_solve_gap(1.0, 90.0, 100.0) / 4)
    assert bound_solve_gap(1.0, 99.0, 100.0, idle=9) == CLOSE_GAP
