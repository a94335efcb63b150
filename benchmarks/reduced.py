"""Does a verification at reduced sizes find what is wrong, and how long does it take?

``mutations``: a plan drawn at random, so that it has collectives and strategies of all kinds, with the runtime or the schedule changed in
one place: a wrong dim, a wrong order, a missing reduction. A change is found when the verification fails. Plans are drawn until one has
what the change applies to; that one decides.
``sizes``: plans of published models on 64 and 512 ranks, planned first; processor time and memory of the verification alone.

    python benchmarks/reduced.py [--cases mutations|sizes|all] [--only NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from autopar.schedule import Schedule
    from autopar.schedule.collectives import Part

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZES = (("zoo:llama3-8b,batch=16,seq=8192", "dp=8,tp=8"), ("zoo:llama3-405b", "pod=8,dp=8,tp=8"))
"""Targets and meshes of ``sizes``."""
PLANS = 12
"""Plans that are drawn, at most, for one that a change applies to."""


@dataclass(frozen=True)
class Row:
    """One change: ``found`` is how it showed, empty where it did not; ``plans`` were drawn until it applied to one, 0 if to none."""

    name: str
    found: str
    plans: int


class Unchanged(Exception):
    """The schedule has nothing that the change applies to."""


TOUCHED: set[str] = set()
"""Holds an entry when a change has changed something."""


def touch() -> None:
    """Tells that a change has changed something."""
    TOUCHED.add("it")


# --- the runtime changed ------------------------------------------------------------------------------------------------

Change = Callable[[Any], Any]
"""From what runs to what runs in its place."""
Within = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a change is in force."""
BACKENDS, CALLS = "autopar.runtime.ranks.backends", "autopar.runtime.ranks.collectives"
BINDING, INNER_CALLS = "autopar.runtime.execution.binding", "autopar.runtime.instructions.inner_calls"


def _patched(place: str, make: Change) -> Within:
    """A change of the function or method at ``module:name``."""

    @contextmanager
    def change() -> Iterator[None]:
        module, _, path = place.partition(":")
        owner: Any = import_module(module)
        *inside, name = path.split(".")
        for word in inside:
            owner = getattr(owner, word)
        with patch.object(owner, name, make(getattr(owner, name))):
            yield

    return change


def _entry(place: str, key: str, make: Change) -> Within:
    """A change of an entry of the table at ``module:name``."""

    @contextmanager
    def change() -> Iterator[None]:
        module, _, name = place.partition(":")
        table = dict(getattr(import_module(module), name))
        table[key] = make(table[key])
        with patch(f"{module}.{name}", table):
            yield

    return change


def _not_over(kind: str) -> Change:
    """A collective of this kind that gives each rank what it gave."""

    def make(old: Any) -> Any:
        def start(self: Any, exchange: Any, buffers: Any, rooms: Any = None) -> Any:
            if exchange.kind != kind:
                return old(self, exchange, buffers, rooms)
            touch()
            length = buffers[0].numel() // (exchange.size if kind == "reduce_scatter" else 1)
            return lambda: [buffer.view(-1)[:length].clone() for buffer in buffers]

        return start

    return make


def _reduction(instead: Callable[[Any, Any], Any]) -> Change:
    def make(old: Any) -> Any:
        def reduce(one: Any, other: Any, out: Any) -> Any:
            touch()
            return out.copy_(instead(one, other))

        return reduce

    return make


def _all_to_all(turn: Callable[[Any, int, int], tuple[Any, int]]) -> Change:
    """An all-to-all of other members, or of another part."""

    def make(old: Any) -> Any:
        def run(members: Any, index: int, exchange: Any) -> Any:
            touch()
            return old(*turn(members, index, exchange.size), exchange)

        return run

    return make


def _sources(other: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Change:
    """Permutes from other ranks."""

    def make(old: Any) -> Any:
        def start(self: Any, exchange: Any, buffers: Any, rooms: Any = None) -> Any:
            sources = other(exchange.sources)
            if exchange.kind != "permute" or sources == exchange.sources:
                return old(self, exchange, buffers, rooms)
            touch()
            return old(self, replace(exchange, sources=sources), buffers, rooms)

        return start

    return make


def _groups(other: Callable[[Any, Any, Any, int], tuple[int, ...]]) -> Change:
    def make(old: Any) -> Any:
        def group(mesh: Any, axes: Any, rank: int) -> Any:
            found, wanted = other(old, mesh, axes, rank), old(mesh, axes, rank)
            if found != wanted:
                touch()
            return found

        return group

    return make


def _without_offsets(old: Any) -> Any:
    """Arguments of the first rank."""

    def localized(op: Any, tensors: Any, strategy: Any, sizes: Any, coordinates: Any) -> Any:
        found = old(op, tensors, strategy, sizes, tuple(0 for _ in coordinates))
        if found != old(op, tensors, strategy, sizes, coordinates):
            touch()
        return found

    return localized


def _dims_first(old: Any) -> Any:
    """Cuts dim 0, where its length allows it."""

    def cutting(part: Any, blocks: int) -> Any:
        sent = part.shapes.sent
        if blocks == 1 or part.filled or part.step.dims[-1] == 0 or sent[0] % blocks or math.prod(sent[: part.step.dims[-1]]) == 1:
            return old(part, blocks)
        touch()
        return lambda source: source.unflatten(0, (blocks, -1))

    return cutting


def _joined_first(old: Any) -> Any:
    """Joins along dim 0."""

    def joining(part: Any, blocks: int) -> Any:
        if blocks == 1 or part.filled or math.prod(part.shapes.came[: part.step.dims[0]]) == 1:
            return old(part, blocks)
        touch()
        return lambda columns: columns.reshape(part.shapes.came).contiguous()

    return joining


def _parts_reversed(old: Any) -> Any:
    """The parts of a bucket come out in another order, where they are of one size."""

    def unpacking(call: Any, blocks: int) -> Any:
        run = old(call, blocks)
        if len(call.parts) == 1 or len({part.shapes.came for part in call.parts}) > 1:
            return run
        touch()
        return lambda buffer: list(reversed(run(buffer)))

    return unpacking


def _cut_at(other: Callable[[int, int], int]) -> Change:
    """A slice of another part."""

    def make(old: Any) -> Any:
        def slicing(part: Any, index: int) -> Any:
            size = math.prod(axis.size for axis in part.step.axes)
            touch()
            return old(part, other(index, size))

        return slicing

    return make


def _own_alone(old: Any) -> Any:
    """Collectives inside operators give each rank what it gave."""

    def exchanged(backend: Any, exchange: Any, tensors: Any) -> Any:
        touch()
        return [tensor.clone() for tensor in tensors]

    return exchanged


def _from_nothing(old: Any) -> Any:
    """Each rank holds the first part."""

    def scattered(tensor: Any, spec: Any, mesh: Any) -> Any:
        touch()
        return [old(tensor, spec, mesh)[0]] * mesh.ranks

    return scattered


def _turned(found: tuple[int, ...]) -> tuple[int, ...]:
    return (*found[1:], *found[:1])


START = f"{BACKENDS}:SharingRanks.start"
RUNTIME: Mapping[str, Within] = {
    "all-reduce left out": _patched(START, _not_over("all_reduce")),
    "reduce-scatter without its sum": _patched(START, _not_over("reduce_scatter")),
    "sums of the first rank twice": _entry(f"{BACKENDS}:REDUCE", "sum", _reduction(lambda one, other: one + one)),
    "the largest in place of the sum": _entry(f"{BACKENDS}:REDUCE", "sum", _reduction(lambda one, other: one.maximum(other))),
    "the difference in place of the sum": _entry(f"{BACKENDS}:REDUCE", "sum", _reduction(lambda one, other: one - other)),
    "all-to-all of the next part": _entry(
        f"{BACKENDS}:_SEMANTICS", "all_to_all", _all_to_all(lambda members, index, size: (members, (index + 1) % size))
    ),
    "all-to-all in reverse order": _entry(
        f"{BACKENDS}:_SEMANTICS", "all_to_all", _all_to_all(lambda members, index, size: (members[::-1], index))
    ),
    "permute left out": _patched(START, _sources(lambda sources: tuple(range(len(sources))))),
    "permute from the neighbour": _patched(START, _sources(_turned)),
    "groups in reverse order": _patched(f"{BACKENDS}:group_of", _groups(lambda old, mesh, axes, rank: old(mesh, axes, rank)[::-1])),
    "groups turned by one": _patched(f"{BACKENDS}:group_of", _groups(lambda old, mesh, axes, rank: _turned(old(mesh, axes, rank)))),
    "groups minor to major": _patched(f"{BACKENDS}:group_of", _groups(lambda old, mesh, axes, rank: old(mesh, axes[::-1], rank))),
    "offsets of the first rank": _patched(f"{BINDING}:localize", _without_offsets),
    "blocks cut along dim 0": _patched(f"{CALLS}:_cutting", _dims_first),
    "blocks joined along dim 0": _patched(f"{CALLS}:_joining", _joined_first),
    "parts of a bucket in reverse order": _patched(f"{CALLS}:_unpacking", _parts_reversed),
    "slices of the first part": _entry(f"{BINDING}:CUT", "slice", _cut_at(lambda index, size: 0)),
    "slices from the other end": _entry(f"{BINDING}:CUT", "slice", _cut_at(lambda index, size: size - 1 - index)),
    "masks that keep all": _entry(f"{BINDING}:CUT", "mask", _cut_at(lambda index, size: 0)),
    "statistics inside operators of one rank": _patched(f"{INNER_CALLS}:exchange_now", _own_alone),
    "inputs of the first rank everywhere": _patched("autopar.runtime.steps.simulation:scatter", _from_nothing),
}  # fmt: skip
"""Changes of what runs."""


# --- the plan changed ---------------------------------------------------------------------------------------------------


def _of_first_part(fits: Callable[[Part], bool], change: Callable[[Part], Part]) -> Callable[[Schedule], Schedule]:
    """A change of the first step of a reshard that it fits."""

    def changed(schedule: Schedule) -> Schedule:
        for name, call in schedule.collectives.items():
            for number, part in enumerate(call.parts):
                if fits(part):
                    parts = (*call.parts[:number], change(part), *call.parts[number + 1 :])
                    return replace(schedule, collectives={**schedule.collectives, name: replace(call, parts=parts)})
        raise Unchanged

    return changed


def _with_step(**changes: Callable[[Any], Any]) -> Callable[[Part], Part]:
    return lambda part: part._replace(step=replace(part.step, **{name: change(part.step) for name, change in changes.items()}))


def _two_dims(part: Part) -> bool:
    return part.step.kind in ("all_gather", "reduce_scatter") and len(part.shapes.source) > 1


def _other_group(schedule: Schedule) -> Schedule:
    """The first call over an axis of a mesh of equal axes runs over the next axis."""
    sizes = schedule.machine.mesh.sizes
    for name, call in schedule.collectives.items():
        (axis, *more) = call.axes
        others = [index for index, size in enumerate(sizes) if size == sizes[axis.axis] and index != axis.axis]
        if others and not more and axis.size == sizes[axis.axis]:
            step = replace(call.parts[0].step, axes=(schedule.machine.mesh.whole(others[0]),))
            parts = tuple(part._replace(step=step) for part in call.parts)
            return replace(schedule, collectives={**schedule.collectives, name: replace(call, parts=parts)})
    raise Unchanged


def _reads_elsewhere(schedule: Schedule) -> Schedule:
    """An operator reads, in place of a value, another of the same tensor or of an equal shape that is there."""
    held: dict[tuple[Any, Any], str] = {}
    for index, item in enumerate(schedule.instructions):
        if item.kind == "run" and len(item.reads) == 2 and index > len(schedule.instructions) // 4:
            first, second = item.reads
            one, other = (schedule.graph.tensors[schedule.values[value].tensor].shape for value in (first, second))
            operation = schedule.operations[item.of]
            if one == other and first != second and operation.op.target == "aten.mul.Tensor":
                swapped = item._replace(reads=(first, first))
                return replace(schedule, instructions=(*schedule.instructions[:index], swapped, *schedule.instructions[index + 1 :]))
        held.update(((value, ""), value) for value in item.writes)
    raise Unchanged


def _without(kind: str) -> Callable[[Schedule], Schedule]:
    """The list without the first instruction of a kind that there is in the backward half."""

    def changed(schedule: Schedule) -> Schedule:
        for index, item in enumerate(schedule.instructions):
            if item.kind == kind and item.half == "backward":
                return replace(schedule, instructions=schedule.instructions[:index] + schedule.instructions[index + 1 :])
        raise Unchanged

    return changed


def _early(schedule: Schedule) -> Schedule:
    """An operator before the one that makes what it reads."""
    made = {value: index for index, item in enumerate(schedule.instructions) for value in item.writes if item.kind == "run"}
    for index, item in enumerate(schedule.instructions):
        before = max((made.get(value, -1) for value in item.reads), default=-1)
        if item.kind == "run" and before >= 0 and index > len(schedule.instructions) // 2:
            rest = list(schedule.instructions)
            rest.insert(before, rest.pop(index))
            return replace(schedule, instructions=tuple(rest))
    raise Unchanged


def _freed_early(schedule: Schedule) -> Schedule:
    """A value is freed before its last reader."""
    for index, item in enumerate(schedule.instructions):
        if item.kind == "free" and index > len(schedule.instructions) // 2:
            readers = [at for at, other in enumerate(schedule.instructions[:index]) if set(other.reads) & set(item.reads)]
            rest = list(schedule.instructions)
            rest.insert(readers[-1], rest.pop(index))
            return replace(schedule, instructions=tuple(rest))
    raise Unchanged


def _over_what_is_read(schedule: Schedule) -> Schedule:
    """An operator writes over what another one still reads."""
    last = {value: index for index, item in enumerate(schedule.instructions) if item.kind == "run" for value in item.reads}
    written = {value for item in schedule.instructions if item.kind == "run" for value in item.writes}
    for index, item in enumerate(schedule.instructions):
        if item.kind != "run" or item.over is not None or schedule.operations[item.of].op.target != "aten.mul.Tensor":
            continue
        there = [value for value in item.reads if value in written and last[value] > index]
        result = schedule.graph.tensors[schedule.values[item.writes[0]].tensor].shape
        there = [value for value in there if schedule.graph.tensors[schedule.values[value].tensor].shape == result]
        if there and schedule.storage[there[0]] == there[0]:
            changed = item._replace(over=there[0])
            return replace(schedule, instructions=(*schedule.instructions[:index], changed, *schedule.instructions[index + 1 :]))
    raise Unchanged


def _stays_split(schedule: Schedule) -> Schedule:
    """A gradient leaves before its last step."""
    for place, (output, value) in enumerate(schedule.outputs):
        layout = schedule.layouts.get(value)
        if output.kind == "gradient" and layout is not None and schedule.values[layout.source].spec is not None:
            return replace(schedule, outputs=(*schedule.outputs[:place], (output, layout.source), *schedule.outputs[place + 1 :]))
    raise Unchanged


PLAN: Mapping[str, Callable[[Schedule], Schedule]] = {
    "a gather along another dim": _of_first_part(_two_dims, _with_step(dims=lambda step: (1 - step.dims[0] % 2,))),
    "an all-to-all with its dims exchanged": _of_first_part(
        lambda part: part.step.kind == "all_to_all", _with_step(dims=lambda step: step.dims[::-1])
    ),
    "a reduction that takes the largest": _of_first_part(
        lambda part: part.step.reduction == "sum", _with_step(reduction=lambda step: "max")
    ),
    "a permute from the neighbour": _of_first_part(
        lambda part: part.step.kind == "permute", _with_step(sources=lambda step: (*step.sources[1:], step.sources[0]))
    ),
    "a call over another axis": _other_group,
    "an operand taken for another": _reads_elsewhere,
    "a wait left out": _without("wait"),
    "an operator left out": _without("run"),
    "an operator too early": _early,
    "a value freed too early": _freed_early,
    "a result over what is still read": _over_what_is_read,
    "a gradient before its last step": _stays_split,
}  # fmt: skip
"""Changes of a schedule."""

MUTATIONS = (*RUNTIME, *PLAN)
"""All changes, by name."""


# --- the command --------------------------------------------------------------------------------------------------------


@lru_cache
def schedules(seed: int) -> tuple[Any, Schedule]:
    """A plan of a small Llama on 4 x 4 ranks, drawn at random, and its schedule."""
    import autopar
    from autopar import zoo
    from tests.graphs import machine, plan_of, random_schedule

    made = zoo.build("llama3", layers=1, batch=32, seq=32, device="meta")
    graph = autopar.capture(made.model, made.args, mode="train")
    schedule = random_schedule(graph, machine("a=4,b=4"), seed, again=0.2)
    return plan_of(schedule), schedule


def find_mutation(name: str, plans: int = PLANS) -> Row:
    """Verifies plans at reduced sizes with a change in force, up to the first that it applies to."""
    from autopar.verify.reduced.verifying import verify_schedule

    for seed in range(plans):
        plan, schedule = schedules(seed)
        TOUCHED.clear()
        if name in PLAN:
            try:
                schedule = PLAN[name](schedule)
            except Unchanged:
                continue
            touch()
        try:
            with RUNTIME[name]() if name in RUNTIME else nullcontext():
                found = verify_schedule(plan, schedule, {})
        except Exception as error:  # a change may break anything: that it does not pass unseen is what is asked
            return Row(name, f"{type(error).__name__}: {error}".splitlines()[0], seed + 1)
        if TOUCHED:
            return Row(name, found.problems[0] if found.problems else "", seed + 1)
    return Row(name, "", 0)


def sizes() -> Iterator[dict[str, Any]]:
    """The plans of ``SIZES``, verified by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        for target, mesh in SIZES:
            file, before = str(Path(folder) / "plan.json"), 0.0
            command = [sys.executable, "-m", "autopar"]
            subprocess.run([*command, "plan", target, "--mesh", mesh, "--effort", "low", "-o", file], check=True, capture_output=True)
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            before, begin = usage.ru_utime + usage.ru_stime, time.perf_counter()
            done = subprocess.run([*command, "verify", file, target, "--reduced", "--json"], capture_output=True, text=True)
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            yield {
                "target": target, "mesh": mesh, "passed": done.returncode == 0, "cpu_seconds": usage.ru_utime + usage.ru_stime - before,
                "seconds": time.perf_counter() - begin, "most_resident_bytes": usage.ru_maxrss * 1024,
                "found": json.loads(done.stdout) if done.stdout else done.stderr,
            }  # fmt: skip


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", choices=("mutations", "sizes", "all"), default="mutations")
    parser.add_argument("--only", default="", help="changes whose names have this in them")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if asked.cases != "sizes":
        for name in MUTATIONS:
            if asked.only in name:
                row = find_mutation(name)
                rows.append(asdict(row))
                word = "found" if row.found else "NOT FOUND" if row.plans else "no plan"
                print(f"{word:9} {row.plans:2} {name}: {row.found}", flush=True)
    if asked.cases != "mutations":
        for item in sizes():
            rows.append(item)
            print(
                f"{item['target']} on {item['mesh']}: {'passed' if item['passed'] else 'FAILED'}, {item['cpu_seconds']:.0f} CPU s, "
                f"{item['most_resident_bytes'] / 2**30:.1f} GiB", flush=True,
            )  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
