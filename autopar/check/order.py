"""Whether the schedule can be run: every instruction does what its operator, call or reshard says, and finds what it reads.

Not by running down the list with a set of what is there: for each value the places in the list where it comes to be and where it goes
are looked up first, and every read is then held against them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from autopar.check.differences import Difference
from autopar.check.legs import Call
from autopar.check.walk import Walk, is_forward
from autopar.graph import DIVISOR
from autopar.rows import InstructionPlan
from autopar.rules import why_each

if TYPE_CHECKING:
    import networkx as nx


@dataclass
class Order:
    """The schedule of a plan with the places of everything in it.

    Args:
        rows: the instructions.
        runs, starts, waits: the place of each operator's run, and of each call's start and wait.
        there: where each value is there from; -1 for what comes in.
        going: where each value is freed.
    """

    walk: Walk
    calls: Mapping[str, Call]
    runs: dict[str, int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    coming: dict[str, int] = field(default_factory=dict)
    going: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[InstructionPlan, ...]:
        return self.walk.plan.schedule

    def run(self) -> Iterator[Difference]:
        yield from self._names()
        yield from self._places()
        yield from self._everything()
        for place, row in enumerate(self.rows):
            for value in row.reads:
                yield from self._read(place, row, value)
            if row.kind == "free":
                yield from self._free(place, row)
        yield from self._phases()
        yield from self._microbatches()
        yield from self._before_all()
        yield from self._sums()
        yield from self._in_flight()
        yield from self._late()
        for value, place in {**self.coming, **self.there}.items():
            if value not in self.going and value not in self.kept:
                yield self.say(place, f"makes {value}, which nobody frees, though it does not leave", runs=True)

    @cached_property
    def kept(self) -> set[str]:
        """What came in or leaves, and what is made before the first microbatch and read in each."""
        plan = self.walk.plan
        inputs, outputs = {spec.tensor for _, _, spec in plan.entering}, {row.value or row.tensor for _, _, row in plan.leaving}
        return inputs | outputs | self.common

    @cached_property
    def common(self) -> set[str]:
        """What is made before the first microbatch and read in each."""
        first = {value for row in self.rows if row.microbatch < 0 for value in row.writes}
        return first & {value for row in self.rows if row.microbatch >= 0 and row.kind != "free" for value in row.reads}

    def say(self, place: int, what: str, runs: bool = False) -> Difference:
        """A difference of the instruction at ``place``."""
        row = self.rows[place]
        return Difference(f"schedule[{place}]", f"instruction {row.id}, {row.kind} of {row.of or ', '.join(row.reads)}: {what}", runs)

    def _names(self) -> Iterator[Difference]:
        seen: dict[int, int] = {}
        for place, row in enumerate(self.rows):
            if row.id in seen:
                yield self.say(place, f"schedule[{seen[row.id]}] has this id too")
            seen[row.id] = place
        moved = next((place for place, row in enumerate(self.rows) if row.id != place), None)
        if moved is not None:
            yield self.say(moved, f"its id is not its place, {moved}", runs=True)

    def _places(self) -> Iterator[Difference]:
        """Takes in where what happens, and says what is not as the operators, calls and reshards have it."""
        cuts = {(leg.row.value, leg.target): leg for made in self.walk.legs.values() for leg in made if not leg.is_collective}
        ops = {row.name: row for row in self.walk.plan.ops}
        self.there.update({spec.tensor: -1 for _, _, spec in self.walk.plan.entering})
        added: dict[str, int] = {}
        for place, row in enumerate(self.rows):
            if row.kind == "free":
                for value in row.reads:
                    if value in self.going:
                        yield self.say(place, f"frees {value} a second time, after instruction {self.rows[self.going[value]].id}")
                    self.going.setdefault(value, place)
                if row.of:
                    yield self.say(place, "belongs to nothing")
                yield from self._is(place, row, None, (), row.phase, "")
                continue
            if row.kind == "run":
                op = ops.get(row.of)
                if op is None:
                    yield self.say(place, "the plan has no such operator")
                    continue
                yield from self._once(place, self.runs)
                reads = tuple(entry.value or entry.tensor for entry in op.inputs)
                yield from self._is(place, row, reads, tuple(entry.value or entry.tensor for entry in op.outputs), op.phase, "operator")
            elif row.kind == "slice":
                leg = cuts.pop((row.of, row.writes[0] if row.writes else ""), None)
                if leg is None:
                    yield self.say(place, "the reshard has no such local step, or it was made before")
                    continue
                yield from self._is(place, row, (leg.source,), (leg.target,), leg.row.phase, "reshard")
            elif row.kind == "add":
                if len(row.reads) != 1 or len(row.writes) != 1 or row.of != row.reads[0] or self.walk.plan.microbatches == 1:
                    yield self.say(place, "is no sum of one value over several microbatches")
                yield from self._is(place, row, None, row.writes, "backward", "sum")
            else:
                call = self.calls.get(row.of)
                if call is None:
                    yield self.say(place, "the plan has no such collective")
                    continue
                yield from self._once(place, self.starts if row.kind == "start" else self.waits)
                sources = tuple(leg.source for leg in call.legs) if row.kind == "start" else ()
                yield from self._is(place, row, sources, tuple(leg.target for leg in call.legs), call.row.phase, "collective")
            arrivals = self.coming if row.kind == "start" else self.there
            for value in row.writes:
                arrivals.setdefault(value, place)
                if row.kind == "add" and added.setdefault(value, place) != place:
                    yield self.say(place, f"instruction {self.rows[added[value]].id} adds to {value} already")
        for leg in cuts.values():
            yield Difference("schedule", f"no instruction makes {leg.target}, a local step of the reshard {leg.row.value}")

    def _once(self, place: int, places: dict[str, int]) -> Iterator[Difference]:
        row = self.rows[place]
        if row.of in places:
            yield self.say(place, f"instruction {self.rows[places[row.of]].id} is the same")
        places.setdefault(row.of, place)

    def _is(
        self, place: int, row: InstructionPlan, reads: tuple[str, ...] | None, writes: tuple[str, ...], phase: str, what: str
    ) -> Iterator[Difference]:  # fmt: skip
        if reads is not None and row.reads != reads:
            yield self.say(place, f"reads {_list(row.reads)}, its {what} reads {_list(reads)}")
        if row.writes != writes:
            yield self.say(place, f"writes {_list(row.writes)}, its {what or 'kind'} writes {_list(writes)}")
        if row.phase != phase:
            yield self.say(place, f"is of the {row.phase} phase, its {what} of the {phase} phase")

    def _everything(self) -> Iterator[Difference]:
        for op in self.walk.ops:
            if op.name not in self.runs:
                yield Difference("schedule", f"no instruction runs the operator {op.name}")
        for name in self.calls:
            if name not in self.starts:
                yield Difference("schedule", f"no instruction starts the collective {name}")
            elif name not in self.waits:
                yield self.say(self.starts[name], "nobody waits for it")
            elif self.waits[name] < self.starts[name]:
                yield self.say(self.waits[name], f"waits for what instruction {self.rows[self.starts[name]].id} starts later")
        for kind, name, row in self.walk.plan.leaving:
            value = row.value or row.tensor
            if value not in self.there:
                yield Difference("schedule", f"nothing makes {value}, which leaves as {kind} {name}")

    def _read(self, place: int, row: InstructionPlan, value: str) -> Iterator[Difference]:
        made, started, gone = (table.get(value) for table in (self.there, self.coming, self.going))
        flying = started is not None and started < place
        if made is None and not flying:
            yield self.say(place, f"reads {value}, which nothing makes")
        elif (made is None or made >= place) and not (row.kind == "start" and flying):
            later = "is in flight and is not waited for" if flying else "is not there yet"
            yield self.say(place, f"reads {value}, which {later}")
        if gone is not None and gone < place and row.kind != "free":
            yield self.say(place, f"reads {value}, which instruction {self.rows[gone].id} has freed")

    def _free(self, place: int, row: InstructionPlan) -> Iterator[Difference]:
        for value in row.reads:
            if value in self.kept:
                yield self.say(place, f"frees {value}, which came in or leaves")
            for name in self._readers.get(value, ()):
                begun, ended = self.starts.get(name), self.waits.get(name)
                if begun is not None and ended is not None and begun < place < ended:
                    yield self.say(place, f"frees {value}, which {name} still reads")

    @cached_property
    def _readers(self) -> Mapping[str, list[str]]:
        """The calls that read each value where it lies, and not a copy."""
        found: dict[str, list[str]] = {}
        for name, call in self.calls.items():
            for leg in call.reads_on:
                found.setdefault(leg.source, []).append(name)
        return found

    def _phases(self) -> Iterator[Difference]:
        first = next((place for place, row in enumerate(self.rows) if row.phase != "forward"), len(self.rows))
        for place, row in enumerate(self.rows):
            if place > first and row.phase == "forward":
                yield self.say(place, f"is of the forward phase, after instruction {self.rows[first].id} of another")

    def _microbatches(self) -> Iterator[Difference]:
        plan = self.walk.plan
        for place, row in enumerate(self.rows):
            if row.microbatch >= plan.microbatches:
                yield self.say(place, f"is of microbatch {row.microbatch}, the plan has {plan.microbatches}")
            elif row.microbatch not in (-1, 0, plan.microbatches - 1):
                yield self.say(place, f"first runs in microbatch {row.microbatch}, which is neither the first nor the last")

    def _before_all(self) -> Iterator[Difference]:
        """What runs before the first microbatch stands first, one call after another: reshards that are made once, and operators that make
        the same in all microbatches, of what these have alike."""
        plan, moved = self.walk.plan, {row.value: row for row in self.walk.plan.reshards}
        stored = {spec.tensor for kind, _, spec in plan.entering if kind in ("parameter", "buffer", "constant")}
        once = {value for value, row in moved.items() if row.once and plan.microbatches > 1}
        runs = [place for place, row in enumerate(self.rows) if row.kind == "run" and row.microbatch < 0]
        alike = stored.union(once, *(self.rows[place].writes for place in runs))
        for place in runs:
            yield from self._may_run_once(place, alike)
        begun = sum(row.microbatch < 0 for row in self.rows)
        timed = [place for place, row in enumerate(self.rows[:begun]) if row.kind in ("start", "wait")]
        for place, after in zip(timed[::2], timed[1::2], strict=False):
            if self.rows[place].kind != "start" or self.waits.get(self.rows[place].of) != after:
                yield self.say(place, "runs before the first microbatch, and its wait does not follow at once")
        for value in sorted(once):
            if moved[value].phase != "forward" or moved[value].source not in alike:
                what = f"is made once, of {moved[value].source}, which is of one microbatch, or in backward"
                yield Difference(f"reshards.{value}", what)
        for place, row in enumerate(self.rows):
            moves = row.kind in ("start", "wait") and row.of in self.calls
            parts = [leg.row.value for leg in self.calls[row.of].legs] if moves else [row.of]
            is_once = (moves or row.kind == "slice") and once.issuperset(parts)
            if row.kind not in ("free", "run") and (row.microbatch < 0) is not is_once:
                yield self.say(place, "runs before the first microbatch and is no reshard made once, or is one and runs in microbatches")
            elif (row.microbatch < 0) is not (place < begun):
                yield self.say(place, f"runs in microbatch {row.microbatch}; the first {begun} instructions are what runs before all")

    def _may_run_once(self, place: int, alike: set[str]) -> Iterator[Difference]:
        """Whether an operator makes for all microbatches what it would make in each; ``alike`` is what these have alike."""
        row, op = self.rows[place], next((op for op in self.walk.ops if op.name == self.rows[place].of), None)
        other = tuple(sorted({*row.reads} - alike))
        reason = f"it reads {_list(other)} of one" if other else "it is not of forward" if row.phase != "forward" else ""
        reason = reason or ("" if op is None else why_each(op))
        if reason:
            yield self.say(place, f"runs before the first microbatch for all of them, which it may not: {reason}")

    def _sums(self) -> Iterator[Difference]:
        """Every gradient is summed before anything of it is done once for all microbatches, and nothing else is done so."""
        plan = self.walk.plan
        if plan.microbatches == 1:
            return
        if plan.accumulation is None:
            yield Difference("accumulation", f"is missing, the plan has {plan.microbatches} microbatches")
            return
        for name in plan.accumulation.cut:
            if name not in plan.inputs:
                yield Difference("accumulation.cut", f"the plan has no input {name}")
        divisor = plan.accumulation.divisor
        found = plan.outputs.get(DIVISOR)
        if divisor is not None and (found is None or found.tensor != divisor or found.shape):
            yield Difference("accumulation.divisor", f"the plan has no output {DIVISOR} of {divisor}, one number")
        calls = {name: {leg.source for leg in call.legs} for name, call in self.calls.items()}
        final, short = set(self.walk.sums), set(self.walk.sums)
        for place, row in enumerate(self.rows):
            reads = set(row.reads) | (calls.get(row.of, set()) if row.kind == "wait" else set())
            if row.microbatch < 0:
                continue
            if row.kind == "run" and row.microbatch:
                yield self.say(place, f"runs in {plan.microbatches - row.microbatch} of {plan.microbatches} microbatches")
            elif row.microbatch and not reads <= final:
                yield self.say(place, f"runs once, and {_list(tuple(sorted(reads - final)))} is of one microbatch")
            elif not row.microbatch and reads & final:
                yield self.say(place, f"runs in every microbatch, and {_list(tuple(sorted(reads & final)))} is there after the last")
            if row.kind == "add":
                short.difference_update(row.writes)
            elif reads & short:
                yield self.say(place, f"reads {_list(tuple(sorted(reads & short)))}, which lack the last microbatch there")
            if row.microbatch:
                final.update(row.writes)
        for kind, name, leaves in plan.leaving:
            if kind == "gradient" and (leaves.value or leaves.tensor) not in final:
                yield Difference(f"gradients.{name}", f"{leaves.value or leaves.tensor} leaves, the gradient of one microbatch")
            elif kind == "buffer":
                yield Difference(f"buffers.{name}", "it changes in every microbatch; a plan of several holds no such buffer")

    def _in_flight(self) -> Iterator[Difference]:
        """Bytes of calls in flight ahead of their readers, and behind what they are made from, where nobody in the phase reads them."""
        limit = self.walk.plan.limits.ahead_bytes
        sides: dict[str, list[str]] = {"ahead": [], "behind": []}
        needed = self._reach()
        for name in sorted(self.calls, key=lambda name: self.starts.get(name, 0)):
            if name in self.starts and name in self.waits:
                fed, read = needed[name]
                if not fed:
                    sides["ahead"].append(name)
                elif not read:
                    sides["behind"].append(name)
        for side, names in sides.items():
            flying: list[str] = []
            for name in names:
                flying = [other for other in flying if self.waits[other] > self.starts[name]] + [name]
                held = sum(self.calls[other].in_flight for other in flying)
                if held > limit and len(flying) > self._chain(flying):
                    yield self.say(self.starts[name], f"{held} bytes are in flight {side}, over limits.ahead_bytes, {limit}")

    def _late(self) -> Iterator[Difference]:
        """What is not waited for is for operators of forward that lead to the loss alone."""
        plan, coming = self.walk.plan, dict[str, int]()
        others = {row.value or row.tensor for kind, name, row in plan.leaving if (kind, name) != ("output", "loss")}
        for place, row in enumerate(self.rows):
            after = next((coming[value] for value in row.reads if value in coming), None)
            if row.late and (row.kind != "wait" or row.phase != "forward" or plan.model.mode != "train"):
                yield self.say(place, "is late, which only a wait of a training step's forward may be")
            goes_on = row.kind in ("run", "slice") and row.phase == "forward"
            if after is not None and row.kind != "free" and not goes_on:
                yield self.say(place, f"reads what the late wait {self.rows[after].id} brings, and does not lead to the loss alone")
            if row.late or (after is not None and row.kind != "free"):
                coming.update(dict.fromkeys(row.writes, place if after is None else after))
                for value in sorted(others.intersection(row.writes)):
                    yield self.say(place, f"makes {value}, which leaves and is not the loss, after a late wait")

    def _chain(self, names: list[str]) -> int:
        """How many of the calls follow one another, each reading what another makes: so many may pass the limit."""
        import networkx as nx  # it takes 0.15 s to import: commands that only read plans go without

        follows = nx.DiGraph()
        follows.add_nodes_from(names)
        for name, other in combinations(names, 2):
            if {leg.target for leg in self.calls[name].legs} & {leg.source for leg in self.calls[other].legs}:
                follows.add_edge(name, other)
        return 1 + int(nx.dag_longest_path_length(follows))

    def _reach(self) -> Mapping[str, tuple[bool, bool]]:
        """For each call: whether an operator of its phase feeds it, and whether one needs it, through other moves of the phase or not."""
        import networkx as nx  # as above

        moves = [(is_forward(call.row.phase), name, leg.source, leg.target) for name, call in self.calls.items() for leg in call.legs]
        cuts = (leg for made in self.walk.legs.values() for leg in made if not leg.is_collective)
        moves += [(is_forward(leg.row.phase), f"{leg.target} of {leg.row.value}", leg.source, leg.target) for leg in cuts]
        moves += [(False, total, value, total) for total, value in self.walk.sums.items()]
        flows: dict[bool, nx.DiGraph[tuple[str, str]]] = {True: nx.DiGraph(), False: nx.DiGraph()}
        for phase, name, source, target in moves:
            flows[phase].add_edges_from(((("value", source), ("move", name)), (("move", name), ("value", target))))
        for row in self.walk.plan.ops:
            flow = flows[is_forward(row.phase)]
            flow.add_edges_from((_BEGIN, ("value", entry.value or entry.tensor)) for entry in row.outputs)
            flow.add_edges_from((("value", entry.value or entry.tensor), _END) for entry in row.inputs)
        fed = {phase: nx.descendants(flow, _BEGIN) if _BEGIN in flow else set() for phase, flow in flows.items()}
        read = {phase: nx.ancestors(flow, _END) if _END in flow else set() for phase, flow in flows.items()}
        found = {name: (is_forward(call.row.phase), ("move", name)) for name, call in self.calls.items()}
        return {name: (move in fed[phase], move in read[phase]) for name, (phase, move) in found.items()}


_BEGIN, _END = ("operator", "makes"), ("operator", "reads")
"""Stand for all operators of a phase: what one makes, and what one reads."""


def _list(values: tuple[str, ...]) -> str:
    return ", ".join(values) or "nothing"
