"""The problem as a value: a chain of layers to be cut into chunks, devices that hold chunks, microbatches that run through them."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import cached_property

from ..errors import ProblemError, TooLargeError
from ..settings import SETTINGS as SOLVERS
from .settings import SETTINGS

PLACEMENTS = ("loop", "v")
"""``loop``: chunk c is on device c mod p. ``v``: two chunks a device; device d has the chunks d and 2 p - 1 - d."""


@dataclass(frozen=True)
class Mode:
    """One way to run a layer, for one microbatch: seconds of its forward, backward and weight gradients; bytes held and resting.

    ``held`` is kept from the begin of F to the end of B, with the backward split to the end of W; ``rest`` all the time.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    held: float = 0.0
    rest: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of one microbatch."""
        return self.forward + self.backward + self.weights

    def __add__(self, other: Mode) -> Mode:
        """The sum of each number.

        >>> Mode(1, 2) + Mode(1, 2, held=3)
        Mode(forward=2, backward=4, weights=0.0, held=3.0, rest=0.0)
        """
        seconds = self.forward + other.forward, self.backward + other.backward, self.weights + other.weights
        return Mode(*seconds, self.held + other.held, self.rest + other.rest)


@dataclass(frozen=True)
class PipelineProblem:
    """L layers, each with one mode or more to choose from, on p devices with v chunks each, for m microbatches.

    Args:
        layers: the modes of each layer, in model order.
        devices: p.
        microbatches: m.
        chunks: v, of each device. The cut gives every chunk at least one layer.
        placement: see ``PLACEMENTS``.
        transfer: seconds between neighbouring chunks on different devices.
        training: F, then B; otherwise F alone.
        split: the gradients of weights are an operation W of their own, after B. Otherwise they are part of B.
        limit: bytes that a device may hold, or None.

    Raises ProblemError for numbers that are out of range or do not fit together.

    >>> PipelineProblem(((Mode(1, 2),),) * 4, devices=2, microbatches=1, chunks=2, placement="v").places
    (0, 1, 1, 0)
    """

    layers: tuple[tuple[Mode, ...], ...]
    devices: int
    microbatches: int
    chunks: int = 1
    placement: str = "loop"
    transfer: float = 0.0
    training: bool = True
    split: bool = False
    limit: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def total_chunks(self) -> int:
        """n = v p."""
        return self.devices * self.chunks

    @property
    def kinds(self) -> str:
        """The kinds of operations that each chunk runs for each microbatch, in order: ``F``, ``FB`` or ``FBW``."""
        return ("FBW" if self.split else "FB") if self.training else "F"

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The device of each chunk, shape [n]."""
        p = self.devices
        return tuple(c % p if self.placement == "loop" or c < p else 2 * p - 1 - c for c in range(self.total_chunks))

    @cached_property
    def hops(self) -> tuple[float, ...]:
        """Seconds from each chunk to the next, shape [n - 1]."""
        return tuple(0.0 if a == b else self.transfer for a, b in zip(self.places, self.places[1:], strict=False))

    @cached_property
    def costs(self) -> tuple[tuple[Mode, ...], ...]:
        """The modes of each layer as this problem counts them: W in B unless split, F alone and nothing held in inference."""
        return tuple(tuple(self._counted(mode) for mode in modes) for modes in self.layers)

    @cached_property
    def most_bytes(self) -> float:
        """Bytes that a device may hold, with what rounding may add to sums; infinite without a limit."""
        return math.inf if self.limit is None else self.limit + SETTINGS.byte_tolerance + SOLVERS.safety * self.limit

    def _counted(self, mode: Mode) -> Mode:
        if not self.training:
            return Mode(mode.forward, rest=mode.rest)
        if self.split:
            return mode
        return Mode(mode.forward, mode.backward + mode.weights, 0.0, mode.held, mode.rest)


def _check(problem: PipelineProblem) -> None:
    """Every statement of PipelineProblem's docstring, or a ProblemError."""
    for name in ("devices", "microbatches", "chunks"):
        value = getattr(problem, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProblemError(f"{name} is {value!r}, no whole number from 1 on", f"give {name} as a count, such as 4")
    if problem.placement not in PLACEMENTS:
        raise ProblemError(f"placement is {problem.placement!r}", f"one of {', '.join(PLACEMENTS)}")
    if problem.placement == "v" and problem.chunks != 2:
        raise ProblemError(f"placement v has two chunks a device, chunks is {problem.chunks}", "write chunks 2, or placement loop")
    if len(problem.layers) < problem.total_chunks:
        made = f"{problem.devices} devices with {problem.chunks} chunks each" if problem.chunks > 1 else f"{problem.devices} devices"
        raise ProblemError(f"{len(problem.layers)} layers are too few for {made}", "each chunk needs a layer: take fewer devices or chunks")
    operations = len(problem.kinds) * problem.total_chunks * problem.microbatches
    if max(operations, len(problem.layers)) > SETTINGS.largest_timetable:
        what = f"{operations} operations on {len(problem.layers)} layers"
        raise TooLargeError(f"{what} are out of range", f"up to {SETTINGS.largest_timetable} of each are handled")
    _check_number(problem.transfer, "transfer")
    if problem.limit is not None:
        _check_number(problem.limit, "limit")
    for number, modes in enumerate(problem.layers):
        if not modes:
            raise ProblemError(f"layer {number} has no mode", "give each layer at least one")
        for mode in modes:
            for key, value in zip(Mode.__dataclass_fields__, astuple(mode), strict=True):
                _check_number(value, f"{key} of layer {number}")


def _check_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ProblemError(f"{what} is {value!r}, no number from 0 on", "give seconds and bytes as numbers that are not negative")
    if value > SETTINGS.largest_number:
        raise TooLargeError(f"{what} is {value!r}, out of range", f"use a coarser unit: up to {SETTINGS.largest_number:g} is handled")
