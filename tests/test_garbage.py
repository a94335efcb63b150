"""What is set for the whole process is set back."""

from __future__ import annotations

import gc

from autopar.garbage import SELDOM, young_garbage_only


def test_thresholds_are_those_of_before_when_all_have_left() -> None:
    before = gc.get_threshold()
    first, second = young_garbage_only(), young_garbage_only()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == SELDOM
    first.__exit__(None, None, None)  # in another order than they came
    assert gc.get_threshold() == SELDOM
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
