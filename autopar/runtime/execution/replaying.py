"""A program's segments recorded once and replayed after: static memory, what enters and leaves it, random draws.

A recorder (``cuda_graphs``) keeps the kernels of a segment with the addresses they work on. So everything a replay reads lies where it lay
while the segment was recorded. Parameters, buffers and constants are read where they are. Inputs, gradients of outputs and sums over
microbatches are copied into static memory. What leaves is copied out, so that the next replay does not write over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from autopar.dialect.dropout import prepared_draws, reseed
from autopar.errors import UsageError
from autopar.graph import DIVISOR, Op
from autopar.runtime.execution.emission import STORED, gradients
from autopar.runtime.execution.executable import Executable
from autopar.runtime.execution.loss_gradient import LOSS_GRADIENT, loss_gradient
from autopar.runtime.ranks.collectives import Observed, Values
from autopar.runtime.ranks.placement import own_shape
from autopar.torch_compat import copy_each

EAGER = "compile with execute='eager'"
ORDER = ("first", "forward", "repeated", "forward", "backward")
"""The segments in an order in which each finds what it reads."""
Place = tuple[int, tuple[int, ...]]
"""Address and strides of a tensor."""


class Recorder(Protocol):
    """Records functions that launch work on one device; they share the memory that they allocate."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Runs a function, so that all that a first run sets up is there: communicators, workspaces."""
        ...

    def record(self, run: Callable[[], Values], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], Values]:
        """Records what a function launches.

        Args:
            run: called once; what it gives need not be computed.
            generators: those that it draws from.

        Returns:
            The replay, and the values in memory that every replay fills.
        """
        ...


class Draws:
    """The random draws of a segment in order, each with a generator of its own.

    A generator cannot be seeded while it is recorded. So each is seeded for the step before the segment is replayed.
    """

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.generators: list[torch.Generator] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within it, draws are noted."""
        self.seeds, self.generators = [], []

        def note(device: torch.device, seed: int) -> torch.Generator:
            self.seeds.append(seed)
            self.generators.append(reseed(torch.Generator(device), seed))
            return self.generators[-1]

        with prepared_draws(note):
            yield

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Within it, the draws that were noted are made again, from generators as they are."""
        left = iter(zip(self.seeds, self.generators, strict=True))

        def take(device: torch.device, seed: int) -> torch.Generator:
            noted, generator = next(left)
            assert noted == seed, f"a draw of seed {seed} was noted as one of seed {noted}"
            return generator

        with prepared_draws(take):
            yield

    def reseed(self) -> None:
        """Seeds the generators for the step that is under way."""
        for seed, generator in zip(self.seeds, self.generators, strict=True):
            reseed(generator, seed)


class Recording:
    """The segments of a program, recorded on the memory of one call.

    Attributes:
        lying: where each weight lies that is read there.
        found: by segment, the values that leave it.
        call: the mark of the call whose values wait for backward; None where none do.

    Args:
        program: an executable of one rank.
        values: what the call gives forward.
        copied: the weights that are copied in.
        draws: those of each segment; empty before the first recording, which warms up.
        recorder: of this recording alone.

    Raises:
        UsageError: something cannot be recorded; the model's line is named.
    """

    def __init__(
        self, program: Executable, values: Values, copied: frozenset[str], draws: dict[str, Draws], recorder: Recorder
    ) -> None:  # fmt: skip
        self.program, self.schedule, self.copied, self.draws = program, program.schedule, copied, draws
        self.call: Tensor | None = None
        graph = self.schedule.graph
        entering = [item.tensor for item in graph.inputs if item.kind != "tangent"]
        stored = [item.tensor for item in graph.inputs if item.kind in STORED and item.tensor not in copied]
        self.lying: Mapping[str, Place] = {name: place_of(values[name]) for name in stored}
        self.static: Values = {name: torch.empty_like(values[name]) for name in entering if name not in self.lying}
        self.entering: Values = {name: self.static.get(name, values[name]) for name in entering}
        owners = graph.owners
        self.buffers = {value: owners[output] for output, value in self.schedule.outputs if output.kind == "buffer"}
        self.outputs = dict.fromkeys(value for output, value in self.schedule.outputs if output.kind == "output")
        self.given_back = self._make_backwards_memory(next(iter(values.values())).device) if graph.mode == "train" else frozenset[str]()
        self.common: Values = {}
        self.between: Values = {}
        self.seen: list[Observed] | None = None
        self.observed: dict[str, list[Observed]] = {}
        self.replays: dict[str, Callable[[], None]] = {}
        self.found: dict[str, Values] = {}
        self.enter(values)
        self._record_all(recorder)

    def _make_backwards_memory(self, device: torch.device) -> frozenset[str]:
        """Static memory for all that backward takes and forward did not leave; the names of these values."""
        schedule, (rank,) = self.schedule, self.program.backend.ranks
        weights = {value for output, value in schedule.outputs if output.name == DIVISOR} & set(self.program.kept)
        names = (*(item.tensor for item in schedule.graph.of_kind("tangent")), *schedule.sums, *weights)
        for name in names:
            dtype = getattr(torch, schedule.graph.tensors[schedule.values[name].tensor].dtype)
            self.static[name] = torch.zeros(own_shape(schedule, name, rank), dtype=dtype, device=device)
        self.scale = torch.ones((), dtype=torch.float64, device=device)
        self.scaled_by: float | None = 1.0
        return frozenset(names)

    def _record_all(self, recorder: Recorder) -> None:
        runs: dict[str, Callable[[], Values]] = {"forward": self._run_forward}
        if self.program.first_segment is not None:
            runs["first"] = self._run_first
        if self.schedule.graph.mode == "train":
            runs["backward"] = self._run_backward
            if self.schedule.graph.microbatches > 1:
                runs["repeated"] = self._run_repeated
        before = {name: self.entering[name].clone() for name in self.buffers.values()}
        try:
            if not self.draws:
                recorder.warm_up(lambda: self._warm_up(runs, before))
            for name in dict.fromkeys(name for name in ORDER if name in runs):
                self._record(name, runs[name], recorder)
                self._put_back(before)
        finally:
            self._put_back(before)

    def _warm_up(self, runs: Mapping[str, Callable[[], Values]], before: Values) -> None:
        """Runs the segments and notes what they draw; buffers are then as ``before``: a counter may not go on."""
        made = {name: Draws() for name in runs}
        for name in ORDER:
            if name in runs:
                with made[name].noted():
                    runs[name]()
                self._put_back(before)
        self.draws.update(made)

    def _put_back(self, before: Values) -> None:
        _copy([self.entering[name] for name in before], list(before.values()))

    def _record(self, name: str, run: Callable[[], Values], recorder: Recorder) -> None:
        draws = self.draws[name]
        draws.reseed()
        self.seen = self.observed[name] = []
        try:
            with draws.repeated():
                self.replays[name], self.found[name] = recorder.record(run, draws.generators)
        except RuntimeError as error:
            raise self._refusal(error) from error
        finally:
            self.seen = None

    def _refusal(self, error: RuntimeError) -> UsageError:
        """The error of what cannot be recorded, at the model's line."""
        one, of = error, self.program
        while isinstance(one.__context__, RuntimeError):  # the end of a recording fails because of it
            one = one.__context__
        segments = of.first_segment, of.forward_segment, of.late.segment, of.repeated_segment, of.backward_segment
        found = (segment.operator_of(one) for segment in segments if segment is not None)
        op = next((op for op in found if op is not None), None)
        return refuse(op, (str(one).splitlines() or [type(one).__name__])[0])

    # --- what is recorded, and replays on CPUs run again ---------------------------------------------------------------

    def _run_first(self) -> Values:
        values = dict(self.entering)
        self.program.begin([values], self.seen)
        self.common = {name: values[name] for name in self.schedule.kept_values}
        return self.common

    def _run_forward(self) -> Values:
        values, storage = {**self.entering, **self.common}, self.schedule.storage
        self.program.forward([values], self.seen)
        written = {storage[buffer] for buffer in self.buffers.values()}
        kept = ((name, values[name]) for name in self.program.kept if name in values)
        self.between = {name: value.clone() if storage[name] in written else value for name, value in kept}
        return {value: values[value] for value in (*self.outputs, *self.buffers)}

    def _run_repeated(self) -> Values:
        values = self.between | self._given_back()
        with loss_gradient(self.scale):
            self.program.backward([values], self.seen, last=False)
        for name in self.schedule.sums:
            if values[name] is not self.static[name]:
                self.static[name].copy_(values[name])
        return {name: self.static[name] for name in self.schedule.sums}

    def _run_backward(self) -> Values:
        values = self.between | self._given_back()
        self.between = {}  # the memory is used again as backward goes on
        with loss_gradient(self.scale):
            self.program.backward([values], self.seen)
        return {name: values[name] for name in gradients(self.schedule)}

    def _given_back(self) -> Values:
        return {name: self.static[name] for name in self.given_back}

    # --- one replay ----------------------------------------------------------------------------------------------------

    def enter(self, values: Values) -> None:
        """Copies what a segment takes into the memory that it reads."""
        pairs = [(self.static[name], value) for name, value in values.items() if name in self.static and value is not self.static[name]]
        for static, value in pairs:
            assert (static.shape, static.dtype) == (value.shape, value.dtype), "checked when the call came in"
        _copy([static for static, _ in pairs], [value for _, value in pairs])

    def take_loss_gradient(self) -> None:
        """Writes the gradient that backward begins with to where it is read; without it, one."""
        given = LOSS_GRADIENT.get()
        if given is not None and given.device.type != "cpu":
            self.scale.copy_(given)
            self.scaled_by = None
        elif self.scaled_by != (number := 1.0 if given is None else float(given)):
            self.scale.fill_(number)
            self.scaled_by = number

    def replay(self, name: str, observed: list[Observed] | None) -> None:
        """Runs a segment on what was entered."""
        self.draws[name].reseed()
        self.replays[name]()
        if observed is not None:
            observed += self.observed[name]

    def leave_forward(self, given: Values) -> Values:
        """The outputs in memory of their own, and new values of buffers.

        Args:
            given: what entered. A buffer that forward has written where it lies is its own new value.
        """
        found = self.found["forward"]
        new = {value: given[name] if found[value] is self.entering[name] and name in self.lying else found[value]
               for value, name in self.buffers.items()}  # fmt: skip
        return new | _copies(found, self.outputs, torch.preserve_format)

    def leave_backward(self, *, last: bool) -> Values:
        """The gradients in memory of their own; before the last microbatch, the sums."""
        if not last:
            return dict(self.found["repeated"])
        return _copies(self.found["backward"], self.found["backward"], torch.contiguous_format)


def place_of(tensor: Tensor) -> Place:
    """Where a tensor lies."""
    return tensor.data_ptr(), tensor.stride()


def _copies(found: Values, names: Iterable[str], memory_format: torch.memory_format) -> Values:
    made = {name: torch.empty_like(found[name], memory_format=memory_format) for name in names}
    _copy(list(made.values()), [found[name] for name in made])
    return made


@torch.no_grad()
def _copy(into: list[Tensor], given: list[Tensor]) -> None:
    if into:
        copy_each(into, given)


@dataclass
class Recorded:
    """What a program has recorded so far.

    Args:
        draws: of each segment.
        recording: the last one; None before the first call.
    """

    draws: dict[str, Draws] = field(default_factory=dict)
    recording: Recording | None = None


@dataclass(frozen=True)
class ReplayedExecutable(Executable):
    """An executable of one rank whose segments are recorded at its first call, and replayed.

    A replay writes over what the one before it kept for backward. So backward of a call runs before the next call.

    Args:
        program: what is recorded.
        make_recorder: makes the recorder of a recording; the memory goes with it.
        recorded: what was recorded so far.
    """

    program: Executable = field(kw_only=True)
    make_recorder: Callable[[], Recorder] = field(kw_only=True)
    recorded: Recorded = field(default_factory=Recorded, kw_only=True)

    @cached_property
    def marked(self) -> str | None:
        """The kept value in whose place the mark of a call stands: none that leaves, and no buffer, which may be copied in between."""
        entering = {item.tensor: item.kind for item in self.schedule.graph.inputs}
        others = {value for _, value in self.schedule.outputs}
        kept = (name for name in self.kept if name not in others and entering.get(name) != "buffer")
        return min(kept, key=lambda name: name in entering, default=None)

    def begin(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """As ``Executable.begin``."""
        if self.first_segment is not None:
            (values,) = ranks
            recording = self._recording_for(values)
            recording.enter(values)
            recording.replay("first", observed)
            values.update(recording.found["first"])

    def forward_but_late(self, ranks: Sequence[Values], observed: list[Observed] | None = None) -> None:
        """As ``Executable.forward_but_late``; nothing is late."""
        (values,) = ranks
        recording = self._recording_for(values)
        recording.enter(values)
        recording.replay("forward", observed)
        given = dict(values)
        values.clear()
        values.update({name: given[name] for name in self.kept if name in given})
        values.update(recording.leave_forward(given))
        recording.call = torch.empty(0)
        if self.marked is not None:
            values[self.marked] = recording.call

    def backward(
        self, ranks: Sequence[Values], observed: list[Observed] | None = None, *, last: bool = True, send: Callable[[], None] | None = None
    ) -> None:  # fmt: skip
        """As ``Executable.backward``. Raises UsageError: what forward kept for it is not there any more."""
        assert send is None, "pipelines are not replayed"
        (values,), recording = ranks, self.recorded.recording
        if recording is None or recording.call is None or (self.marked is not None and values[self.marked] is not recording.call):
            message = "backward runs a second time, or after another call: calls share the memory of what forward keeps"
            raise UsageError(message, f"run backward once, before the module is called again; or {EAGER}")
        recording.enter({name: value for name, value in values.items() if name in recording.given_back})
        recording.take_loss_gradient()
        recording.call = None
        recording.replay("backward" if last else "repeated", observed)
        values.clear()
        values.update(recording.leave_backward(last=last))

    @torch.no_grad()
    def _recording_for(self, values: Values) -> Recording:
        """The recording that reads the weights where they are now. A weight that has moved is copied in from then on.

        Ranks may differ in what has moved. So a further recording runs no collective.
        """
        recorded = self.recorded
        current = recorded.recording
        moved = frozenset(name for name, place in current.lying.items() if place_of(values[name]) != place) if current else frozenset[str]()
        if current is None or moved:
            copied = moved | (current.copied if current else frozenset())
            recorded.recording = current = None  # its memory is free for the next
            with torch.inference_mode(False):
                current = Recording(self.program, values, copied, recorded.draws, self.make_recorder())
            recorded.recording = current
        return current


def replayed(program: Executable, make_recorder: Callable[[], Recorder]) -> ReplayedExecutable:
    """The executable that records a program at its first call."""
    parts = {item.name: getattr(program, item.name) for item in fields(program)}
    return ReplayedExecutable(**parts, program=program, make_recorder=make_recorder)


def refuse(op: Op | None, reason: str) -> UsageError:
    """The error of an operator, or of a collective, that cannot be recorded."""
    where = "the program" if op is None else f"{op.location or op.module or op.name}: {op.target.removesuffix('.default')}"
    return UsageError(f"{where} cannot be captured in a CUDA graph: {reason}", f"write it so that the host reads no value, or {EAGER}")
