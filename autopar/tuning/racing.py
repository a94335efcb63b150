"""Interleaved rounds: a round is a step of each contestant, in an order that rotates, so that a slow moment of the machine hits all.

An untimed step of the same contestant comes before each timed one, as in training. After another's step, caches and freed memory are not
what its own would leave: of two equal plans the one that followed a third took 6 % longer than the one that followed its twin.

Contestants whose states fit in memory together are built once. Otherwise each is built for its turn and freed after it, and a turn takes
several steps. Ranks exchange what they saw after each turn, so that all know the same times and end at the same place.

Before a contestant runs, each rank asks for the memory that it is predicted to take. All learn whether one has less: in the midst of a
step the others would wait for it in a collective.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import VerificationError
from autopar.garbage import young_garbage_only
from autopar.plan import Plan
from autopar.runtime.module.compiling import execution_of
from autopar.runtime.ranks.agreement import everyones
from autopar.runtime.ranks.groups import Team
from autopar.torch_compat import store_of_world
from autopar.tuning.contestants import Builder, Contestant
from autopar.verify.trials import Say

WARM_STEPS = 2
"""Steps before the first timed one. The first makes moments and the allocator's blocks, the second finds them."""
FOLLOWED = 2
"""Steps whose memory is followed; the least peak counts, since a backend's thread may hold a buffer for a moment longer."""
STEPS_ALONE = 5
"""Timed steps of a turn for which the contestant is built anew: compiling takes longer than they do."""
BEYOND_PREDICTION = 0.02
"""Share of the memory limit that a run may take beyond it: a plan that fits as predicted takes at most this more (README)."""
NORMAL_95 = 1.645
"""Standard deviations that a normal variable exceeds in 5 of 100 cases."""
ALONE_SECONDS = 120.0
"""How long a rank that ran out of memory waits for the others to be done with the plan, before it ends."""
_RACES = itertools.count()
OUT_OF_MEMORY = "out of memory when it was run"
"""Why a plan was not timed."""


@dataclass
class Run:
    """What was measured of one plan.

    Args:
        seconds: of each step, of the slowest rank.
        peak_bytes: of the fullest rank; None where it cannot be followed.
        reason: why it was not timed; empty where it was.
    """

    plan: Plan
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    reason: str = ""


class Interrupted(Exception):
    """Ctrl-C came on one of the ranks: raised on all of them at once."""


@dataclass
class Race:
    """The race of plans on the ranks of a mesh. Every rank makes it with the same plans and calls the same methods.

    Args:
        memory_limit: bytes of a rank.
        signals: filled by Ctrl-C on this rank (``put_off_interrupts``).
        say: told what is being done.
        device: that this rank computes on.
    """

    plans: Sequence[Plan]
    builder: Builder
    team: Team
    memory_limit: int
    signals: Sequence[int]
    say: Say
    device: torch.device

    def __post_init__(self) -> None:
        self._meetings = (f"autopar/race/{next(_RACES)}/{number}" for number in itertools.count())
        self.runs = [Run(plan) for plan in self.plans]
        self._kept: dict[int, Contestant] = {}
        self._keeps = fit_together(self.plans, self.memory_limit)

    @young_garbage_only()
    def run(self, rounds: int) -> bool:
        """Measures memory, then ``rounds`` steps of each plan that fits. Whether all of it was done. Collective.

        Only whole rounds count.

        Raises:
            KeyboardInterrupt: Ctrl-C came before the first round was whole.
        """
        try:
            for number in range(len(self.runs)):
                self._measure_memory(number)
            racing = [number for number, run in enumerate(self.runs) if not run.reason]
            steps = 1 if self._keeps else min(STEPS_ALONE, rounds)
            gc.collect()
            for turn in range(math.ceil(rounds / steps)):
                for place in range(len(racing)):
                    self.say(f"round {turn * steps + 1} of {rounds}")
                    self._take_turn(racing[(place + turn) % len(racing)], steps)
        except Interrupted:
            whole = min((len(run.seconds) for run in self.runs if not run.reason), default=0)
            if not whole:
                raise KeyboardInterrupt from None
            for run in self.runs:
                del run.seconds[whole:]
            return False
        finally:
            self._kept.clear()
        for run in self.runs:
            del run.seconds[rounds:]
        return True

    def _measure_memory(self, number: int) -> None:
        """Builds a plan's contestant, warms it, and measures its peak. Alone, where it does not fit beside those that are kept."""
        run = self.runs[number]
        self.say(f"plan {number + 1} of {len(self.runs)}: compiling and measuring memory")
        peak = self._try(number)
        if peak is None and self._kept:
            self._keeps = False
            self._kept.clear()
            _give_back_memory()
            peak = self._try(number)
        if peak is None:
            run.reason = OUT_OF_MEMORY
        elif execution_of(run.plan) != "compiled":  # one compiled kernel holds what operators held one by one
            run.peak_bytes = peak
            if peak > self.memory_limit * (1 + BEYOND_PREDICTION):
                run.reason = f"takes more than the memory limit of {self.memory_limit} bytes"
                self._kept.pop(number, None)

    def _try(self, number: int) -> int | None:
        """The peak bytes of the fullest rank; None where one ran out of memory."""
        peak: int | None = None
        if not self._has_room(number):
            return None
        try:
            made = self._warm(number)
            followed = execution_of(self.plans[number]) != "compiled"
            peak = min(made.peak_bytes() for _ in range(FOLLOWED)) if followed else 0
        except torch.OutOfMemoryError:
            self._kept.pop(number, None)
        made = None  # type: ignore[assignment]
        self._meet(waits=peak is None)
        peaks: list[int | None] = self._exchange(peak)
        if None in peaks:
            self._kept.pop(number, None)
            _give_back_memory()
            return None
        return max(peak for peak in peaks if peak is not None)

    def _has_room(self, number: int) -> bool:
        """Whether each rank has the memory that a plan is predicted to take. Collective."""
        try:
            take_memory(self.plans[number].predicted.peak_memory_bytes_per_rank, self.device)
            found = True
        except torch.OutOfMemoryError:
            found = False
        _give_back_memory()
        return all(self._exchange(found))

    def _meet(self, *, waits: bool) -> None:
        """Says that this rank is done with a plan; ``waits`` until all are. An exchange would wait for a rank that waits for this one.

        Raises:
            VerificationError: the others are not done: this rank ran out of memory alone, and they wait for it.
        """
        place, store = next(self._meetings), store_of_world()
        names = [f"{place}/{rank}" for rank in range(len(self.team.members))]
        store.set(names[self.team.rank], "done")
        if not waits:
            return
        try:
            store.wait(names, timedelta(seconds=ALONE_SECONDS))
        except RuntimeError as error:
            message = f"rank {self.team.rank} alone ran out of memory while a plan was measured, and the others wait for it"
            hint = "end what else takes memory of its device, or tune for less memory"
            raise VerificationError(message, hint) from error

    def _warm(self, number: int) -> Contestant:
        made = self.builder.build(self.plans[number])
        if self._keeps:
            self._kept[number] = made
        for _ in range(WARM_STEPS):
            made.step()
        return made

    def _take_turn(self, number: int, steps: int) -> None:
        contestant = self._kept.get(number)
        if contestant is None:
            contestant = self._warm(number)
        else:
            contestant.step()
        seconds = [self._time_step(contestant) for _ in range(steps)]
        if not self._keeps:
            del contestant
            _give_back_memory()
        self.runs[number].seconds += [max(each) for each in zip(*self._exchange(seconds), strict=True)]

    def _time_step(self, contestant: Contestant) -> float:
        device = contestant.module.place.device
        _synchronize(device)
        dist.barrier(self.team.group)
        begin = time.perf_counter()
        contestant.step()
        _synchronize(device)
        return time.perf_counter() - begin

    def _exchange(self, mine: Any) -> list[Any]:
        """What each rank gives, by rank. Raises Interrupted on all ranks, where Ctrl-C came on one. Collective."""
        found = everyones((mine, bool(self.signals)), self.team)
        if any(came for _, came in found):
            raise Interrupted
        return [value for value, _ in found]


def take_memory(size: int, device: torch.device) -> None:
    """Allocates ``size`` bytes on a GPU, and frees them. Raises OutOfMemoryError: the GPU has fewer."""
    if device.type == "cuda":
        torch.empty(size, dtype=torch.uint8, device=device)


def fit_together(plans: Sequence[Plan], memory_limit: int) -> bool:
    """Whether a rank has room for the weights and states of all plans, beside what a step of one adds to them."""
    resting = [plan.predicted.memory.parameters + plan.predicted.memory.optimizer for plan in plans]
    adds = [plan.predicted.peak_memory_bytes_per_rank - rest for plan, rest in zip(plans, resting, strict=True)]
    return sum(resting) + max(adds) <= memory_limit


def rank_runs(runs: Sequence[Run]) -> list[int]:
    """The numbers of the timed runs: the one to keep, then the others by their ratio to it.

    The fastest is the one whose largest paired ratio to another is the least. Of those that its rounds do not tell apart from it, the one
    with the best price is kept: prices are worth more than noise.
    """
    timed = [number for number, run in enumerate(runs) if run.seconds]
    if not timed:
        return []
    worst = {number: max(paired_ratio(runs[number], runs[other]) for other in timed) for number in timed}
    fastest = min(timed, key=lambda number: worst[number])
    alike = [number for number in timed if not is_faster(runs[fastest], runs[number])]
    kept = min(alike, key=lambda number: runs[number].plan.predicted.step_seconds)
    return [kept, *sorted((number for number in timed if number != kept), key=lambda number: paired_ratio(runs[number], runs[kept]))]


def is_faster(run: Run, other: Run) -> bool:
    """Whether the rounds tell that a plan is faster: it was so in more of them than equal plans are in 95 of 100 races (sign test)."""
    count = len(run.seconds)
    wins = sum(mine < its for mine, its in zip(run.seconds, other.seconds, strict=True))
    return wins > count / 2 + NORMAL_95 * math.sqrt(count) / 2


def paired_ratio(run: Run, other: Run) -> float:
    """The median over rounds of the ratio of two steps within a round."""
    return median(mine / its for mine, its in zip(run.seconds, other.seconds, strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
