"""Tensors lent to gloo's threads, and given back before Python ends.

A thread of gloo holds the tensors of a call until a moment after its wait. It needs the interpreter's lock to release a tensor. At
interpreter exit that aborts the process ("terminate called without an active exception"). So each call gets tensors of its own over the
same memory. They are kept, without the memory, until gloo has released them; a process that ends waits for the rest.

Calls that torch makes itself, for a DTensor or a state dict, lend tensors that nobody keeps. For those the process pauses at its end.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Sequence
from functools import cache
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

GRACE_SECONDS = 5.0
"""Seconds that the end of this process waits for calls which other ranks have not reached."""
LOOK_SECONDS = 0.001
"""Seconds between two looks: nothing signals that a thread has released a tensor."""
PAUSE_SECONDS = 0.1
"""Seconds that the end of this process leaves to gloo's threads. Of 40 runs of a script that only gathers DTensors, on four ranks of a
busy machine, 4 end in an abort without it, and none with it (torch 2.13)."""


class Sent:
    """A call under way: waits for it, any number of times, and gives what it fills.

    Args:
        work: torch's own.
        found: what it fills.
        lent: what it reads and fills, as it was given that.
        held: what it reads, which stays as long as this does: of unequal parts, until what arrived is cut.
    """

    def __init__(self, work: Any, found: Tensor, lent: Sequence[Tensor], held: Tensor | None = None) -> None:
        self.work, self.found, self.lent, self.held = work, found, lent, held
        if not found.is_cuda:
            while _LENT and _is_back(0):
                _LENT.popleft()
            _LENT.extend(lent)
            _UNDER_WAY.add(self)

    def __call__(self) -> list[Tensor]:
        if self.found.is_cuda:  # the current stream waits, and another one may have to
            self.work.wait()
            self.found.record_stream(torch.cuda.current_stream())
        elif self.work is not None:
            try:
                self.work.wait()
                for tensor in self.lent:
                    tensor.data = _NOTHING
            finally:
                self.forget()
        return [self.found]

    def forget(self) -> None:
        """The backend's threads are the only ones to have the call."""
        self.work, self.lent = None, ()


def lend(tensor: Tensor) -> Tensor:
    """A tensor of the same memory for a call to have; on a GPU, where none of these threads is, the tensor itself."""
    return tensor if tensor.is_cuda else tensor.detach()


_LENT: deque[Tensor] = deque()
"""Tensors lent and not known to be back, in order."""
_UNDER_WAY: WeakSet[Sent] = WeakSet()
_NOTHING = torch.empty(0)


def _is_back(place: int) -> bool:
    """Whether nobody else has a tensor: what torch has of it counts as one Python reference."""
    return sys.getrefcount(_LENT[place]) == _KEPT_HERE


_LENT.append(torch.empty(0))
_KEPT_HERE = sys.getrefcount(_LENT[0])
_LENT.clear()


@atexit.register
def _await_loans() -> None:
    for call in tuple(_UNDER_WAY):
        call.forget()
    end = monotonic() + GRACE_SECONDS
    while not all(map(_is_back, range(len(_LENT)))) and monotonic() < end:
        sleep(LOOK_SECONDS)


@cache
def pause_at_end() -> None:
    """Makes the end of this process wait for what other calls than ``Sent`` have lent."""
    atexit.register(sleep, PAUSE_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LENT.clear)  # the threads are the parent's
