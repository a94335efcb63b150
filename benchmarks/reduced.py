"""Does a verification at reduced sizes find what is wrong, and how long does it take?

``mutations``: one plan, and the runtime or the plan changed in one place: a wrong dim, a wrong order, a missing reduction. A change is found
when the verification fails or refuses the plan. Where a plan has nothing that a change applies to, the row says so. ``sizes``: plans of
published models on 64 and 512 ranks, planned first; seconds of the processor and memory of the verification alone.

    python benchmarks/reduced.py [--cases mutations|sizes|all] [--target zoo:llama3,layers=4] [--mesh dp=2,tp=4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from autopar.schedule import Schedule
    from autopar.schedule.collectives import Part

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZES = (("zoo:llama3-8b,batch=16,seq=8192", "dp=8,tp=8"), ("zoo:llama3-405b", "pod=8,dp=8,tp=8"))
"""Targets and meshes of ``sizes``."""


@dataclass(frozen=True)
class Row:
    """One change: ``found`` is how it showed; empty where it did not."""

    name: str
    found: str
    applies: bool = True


class Unchanged(Exception):
    """The plan has nothing that the change applies to."""


# --- the runtime changed ------------------------------------------------------------------------------------------------


def _patched(place: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """A change of the function at ``module:name`` to what ``make`` makes of it."""

    @contextmanager
    def change() -> Iterator[None]:
        from importlib import import_module

        module, _, name = place.partition(":")
        owner: Any = import_module(module)
        *inside, name = name.split(".")
        for word in inside:
            owner = getattr(owner, word)
        if isinstance(owner, dict):
            with patch.dict(owner, {name: make(owner[name])}):
                yield
        else:
            with patch.object(owner, name, make(getattr(owner, name))):
                yield

    return change


def _entry(place: str, key: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """A change of an entry of the table at ``module:name``."""

    @contextmanager
    def change() -> Iterator[None]:
        from importlib import import_module

        module, _, name = place.partition(":")
        table = dict(getattr(import_module(module), name))
        table[key] = make(table[key])
        with patch(f"{module}.{name}", table):
            yield

    return change


BACKENDS, EXECUTION, CALLS = "autopar.runtime.backends", "autopar.runtime.execution", "autopar.runtime.collectives"


def _other_sources(old: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any, exchange: Any, buffers: Any, rooms: Any = None) -> Any:
        return old(self, replace(exchange, sources=tuple(range(len(buffers)))) if exchange.sources else exchange, buffers, rooms)

    return start


def _not_over(kind: str) -> Callable[[Any], Any]:
    """A collective of this kind that gives each rank what it gave."""

    def make(old: Any) -> Any:
        def start(self: Any, exchange: Any, buffers: Any, rooms: Any = None) -> Any:
            if exchange.kind != kind:
                return old(self, exchange, buffers, rooms)
            length = buffers[0].numel() // (exchange.size if kind == "reduce_scatter" else 1)
            return lambda: [buffer.view(-1)[:length].clone() for buffer in buffers]

        return start

    return make


def _reversed_groups(old: Any) -> Any:
    return lambda mesh, axes, rank: tuple(reversed(old(mesh, axes, rank)))


def _turned_groups(old: Any) -> Any:
    def group(mesh: Any, axes: Any, rank: int) -> Any:
        found = old(mesh, axes, rank)
        return (*found[1:], found[0])

    return group


def _other_axes(old: Any) -> Any:
    return lambda mesh, axes, rank: old(mesh, tuple(reversed(axes)), rank)


def _without_offsets(old: Any) -> Any:
    def localized(op: Any, tensors: Any, strategy: Any, sizes: Any, coordinates: Any) -> Any:
        return old(op, tensors, strategy, sizes, tuple(0 for _ in coordinates))

    return localized


def _dims_first(old: Any) -> Any:
    """Cuts dim 0, where its length allows it."""

    def cutting(part: Any, blocks: int) -> Any:
        if blocks == 1 or part.filled or part.shapes.sent[0] % blocks:
            return old(part, blocks)
        return lambda source: source.unflatten(0, (blocks, -1))

    return cutting


def _joined_first(old: Any) -> Any:
    """Joins along dim 0."""

    def joining(part: Any, blocks: int) -> Any:
        return old(part, blocks) if blocks == 1 or part.filled else lambda columns: columns.reshape(part.shapes.came).contiguous()

    return joining


def _parts_reversed(old: Any) -> Any:
    """The parts of a bucket come out in another order, where they are of one size."""

    def unpacking(call: Any, blocks: int) -> Any:
        run = old(call, blocks)
        alike = len({part.shapes.came for part in call.parts}) == 1
        return (lambda buffer: list(reversed(run(buffer)))) if alike and len(call.parts) > 1 else run

    return unpacking


def _cut_at(other: Callable[[int, int], int]) -> Callable[[Any], Any]:
    """A slice of another part."""

    def make(old: Any) -> Any:
        def slicing(part: Any, index: int) -> Any:
            (dim,) = part.step.dims
            size = part.shapes.source[dim] // part.shapes.target[dim]
            return old(part, other(index, size))

        return slicing

    return make


def _own_alone(old: Any) -> Any:
    """Collectives inside operators give each rank what it gave."""
    return lambda backend, exchange, tensors: [tensor.clone() for tensor in tensors]


def _from_nothing(old: Any) -> Any:
    """Each rank holds the first part."""
    return lambda tensor, spec, mesh: [old(tensor, spec, mesh)[0]] * mesh.ranks


RUNTIME: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "all-reduce left out": _patched(f"{BACKENDS}:SharingRanks.start", _not_over("all_reduce")),
    "reduce-scatter without its sum": _patched(f"{BACKENDS}:SharingRanks.start", _not_over("reduce_scatter")),
    "sums of the first rank twice": _entry(f"{BACKENDS}:REDUCE", "sum", lambda old: lambda one, other, out: out.copy_(one + one)),
    "sum taken for the largest": _entry(f"{BACKENDS}:REDUCE", "sum", lambda old: _largest),
    "largest taken for the sum": _entry(f"{BACKENDS}:REDUCE", "max", lambda old: lambda one, other, out: out.copy_(one + other)),
    "all-to-all of the next part": _entry(
        f"{BACKENDS}:_SEMANTICS", "all_to_all",
        lambda old: lambda members, index, exchange: old(members, (index + 1) % exchange.size, exchange),
    ),
    "all-to-all in reverse order": _entry(
        f"{BACKENDS}:_SEMANTICS", "all_to_all", lambda old: lambda members, index, exchange: old(members[::-1], index, exchange),
    ),
    "permute left out": _patched(f"{BACKENDS}:SharingRanks.start", _other_sources),
    "groups in reverse order": _patched(f"{BACKENDS}:group_of", _reversed_groups),
    "groups turned by one": _patched(f"{BACKENDS}:group_of", _turned_groups),
    "groups minor to major": _patched(f"{BACKENDS}:group_of", _other_axes),
    "offsets of the first rank": _patched(f"{EXECUTION}:localize", _without_offsets),
    "blocks cut along dim 0": _patched(f"{CALLS}:_cutting", _dims_first),
    "blocks joined along dim 0": _patched(f"{CALLS}:_joining", _joined_first),
    "parts of a bucket in reverse order": _patched(f"{CALLS}:_unpacking", _parts_reversed),
    "slices of the first part": _entry(f"{EXECUTION}:CUT", "slice", _cut_at(lambda index, size: 0)),
    "slices from the other end": _entry(f"{EXECUTION}:CUT", "slice", _cut_at(lambda index, size: size - 1 - index)),
    "masks that keep all": _entry(f"{EXECUTION}:CUT", "mask", lambda old: lambda part, index: old(part, 0)),
    "statistics inside operators of one rank": _patched(f"{EXECUTION}:exchange_now", _own_alone),
    "inputs of the first rank everywhere": _patched("autopar.runtime.simulation:scatter", _from_nothing),
}  # fmt: skip
"""Changes of what runs."""


def _largest(one: Any, other: Any, out: Any) -> Any:
    import torch

    return torch.maximum(one, other, out=out)


# --- the plan changed ---------------------------------------------------------------------------------------------------


def _of_schedule(change: Callable[[Schedule], Schedule]) -> Callable[[], AbstractContextManager[Any]]:
    """A change of the schedule behind ``check``, which refuses most of them in the file."""

    def make(old: Any) -> Any:
        def rebuilt(*args: Any, **named: Any) -> Any:
            captured, schedule = old(*args, **named)
            return captured, change(schedule)

        return rebuilt

    return _patched("autopar.verify.reduced.verifying:rebuild", make)


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
        result = schedule.graph.tensors[item.writes[0]].shape
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
    "a reduction that takes the largest": _of_first_part(lambda part: part.step.reduction == "sum", _with_step(reduction=lambda step: "max")),
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

MUTATIONS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    **RUNTIME, **{name: _of_schedule(change) for name, change in PLAN.items()},
}  # fmt: skip
"""All changes, by name; each is in force within its context."""


def find_mutation(name: str, plan: Any, target: Any) -> Row:
    """Verifies the plan at reduced sizes with a change in force. ``verify_reduced`` runs in a forked process, which has it too."""
    from autopar.errors import AutoparError
    from autopar.verify import verify_reduced

    sys.stderr.flush()
    with MUTATIONS[name]():
        try:
            found = verify_reduced(plan, target)
        except AutoparError as error:
            return Row(name, f"{type(error).__name__}: {error.message}", "Unchanged" not in error.message)
    return Row(name, found.problems[0] if found.problems else "")


# --- the command --------------------------------------------------------------------------------------------------------


def mutations(target: str, mesh: str) -> Iterator[Row]:
    """Every change on one plan at prices at which every split pays."""
    import autopar
    from autopar.cli.target import load_target
    from benchmarks.models import stressed

    made = load_target(target, device="meta")
    plan = autopar.plan(made.model, made.args, mesh=mesh, hardware=stressed(), effort="low")
    for name in MUTATIONS:
        yield find_mutation(name, plan, made)


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
    parser.add_argument("--target", default="zoo:llama3,layers=4")
    parser.add_argument("--mesh", default="dp=2,tp=4")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if asked.cases != "sizes":
        for row in mutations(asked.target, asked.mesh):
            rows.append(asdict(row))
            print(f"{'found' if row.found and row.applies else 'does not apply' if row.found else 'NOT FOUND':14} {row.name}: {row.found}", flush=True)
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
