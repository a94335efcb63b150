"""How much work the searches of tests do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autopar.effort import WORK_SECONDS

_WHOLE = dict(WORK_SECONDS)


@contextmanager
def part_of_work(part: float) -> Iterator[None]:
    """Searches inside it, and inside what it decorates, have this part of their effort's work, whatever part they had outside.

    A plan that a cache shares between tests is made with all of it (1.0): else it depends on the test that asked first.
    """
    with pytest.MonkeyPatch.context() as patch:
        for level, seconds in _WHOLE.items():
            patch.setitem(WORK_SECONDS, level, part * seconds)  # type: ignore[misc]
        yield
