"""The last moments before an answer is given: Ctrl-C there has nothing left to end, and would lose what took long to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


def put_together(make: Callable[[], Made]) -> tuple[Made, bool]:
    """What is made, a second time where Ctrl-C comes in between; and whether it did.

    >>> put_together(lambda: 3)
    (3, False)
    """
    try:
        return make(), False
    except KeyboardInterrupt:
        return make(), True
