"""Ctrl-C in critical moments: a finished search must still write its answer, and a demo must end as a whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import TypeVar

Made = TypeVar("Made")


def put_together(make: Callable[[], Made]) -> tuple[Made, bool]:
    """The result of ``make``, and whether Ctrl-C came meanwhile; it is then made a second time.

    >>> put_together(lambda: 3)
    (3, False)
    """
    try:
        return make(), False
    except KeyboardInterrupt:
        return make(), True


@contextmanager
def put_off_interrupts() -> Iterator[list[int]]:
    """Within it Ctrl-C only adds its signal to the list, so that the loop inside ends where it chooses. On the main thread."""
    came, usual = list[int](), signal.getsignal(signal.SIGINT)
    if not callable(usual) or current_thread() is not main_thread():
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, usual)


@contextmanager
def all_of_it() -> Iterator[None]:
    """Within it Ctrl-C ends everything: KeyboardInterrupt is raised afterwards even if a search kept its answer. On the main thread."""
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
