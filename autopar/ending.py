"""What Ctrl-C ends. In the last moments before an answer there is nothing left to end, and it would lose what took long to find."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
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


@contextmanager
def all_of_it() -> Iterator[None]:
    """Within it Ctrl-C ends all, not only a search that has an answer by then: raises KeyboardInterrupt afterwards. On the main thread."""
    came, usual = list[int](), signal.getsignal(signal.SIGINT)
    if not callable(usual):  # ignored, as in the background
        yield
        return
    handler = usual

    def noted(number: int, frame: FrameType | None) -> None:
        came.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, noted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        raise KeyboardInterrupt
