"""Memory items: from when to when the choice of a node holds how many bytes. ``model`` says what the nodes are.

Time is the index of an operator, forward first. A tensor and its views are one storage, as long as no reshard lies between them. At each
time exactly one version of a storage counts, by the node that knows its spec. The first of these that exists then counts:

- a graph output, in the spec in which it leaves;
- the version that a running operator reads, even where that is a copy gathered for it;
- the producer's version, until the first reader; a result written over an operand does not count while its operator runs;
- the layout that the readers of a phase share, from the first to the last of them;
- the version that backward keeps;
- the version that all microbatches read, of the result of an operator that runs once a step.

Of a stage with several microbatches in flight, what lives between forward and backward counts once more throughout for each of the others.

Of a view that repeats only what memory has of it counts, in whatever version: a reshard of it has more, which pairs know.

An operator holds its workspace during its first run. Stored tensors (parameters, buffers, arguments) count throughout. While one is read,
the version that is read counts in its place. So a gathered weight adds its size less the part that the rank stores.

The source of a reshard and the buffers of its collective are left out, since pairs of choices alone know them (``pair_memory``). So no plan
holds less than the model says, as long as operators run in captured order, and a schedule holds more. Single moves of
``schedule.local_search`` hold no less than the captured order either, so proofs cover them. Operators that ``schedule.gap_filling`` defers
may hold a little less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autopar import pricing
from autopar.graph import Op
from autopar.rules import is_alias, may_write_over, storage_roots
from autopar.schedule import OUTPUT
from autopar.sharding import ShardingSpec

if TYPE_CHECKING:
    from autopar.search.ilp.model import Model, Reader

Lifetime = tuple[int, int, int, str, tuple[ShardingSpec, ...]]
"""Begin, end, node, tensor, specs. The choice of the node says in which of the specs the tensor is held."""


def add_memory_items(model: Model, times: Mapping[str, int]) -> None:
    """Adds the memory items of every node. Times are indices of operators; ``[0, end)`` covers the optimizer step too."""
    graph = model.space.graph
    end = len(graph.ops) + 1
    members: dict[str, list[str]] = {}
    for tensor, root in storage_roots(graph).items():
        members.setdefault(root, []).append(tensor)
    leaving = _leaving_lifetimes(model, times, end)
    for item in graph.inputs:
        reads = [life for tensor in members[item.tensor] for life in _read_lifetimes(model, tensor, viewed=False)]
        covered = _add_uncovered(model, reads)
        _add_stored(model, item.tensor, covered, end)
        _add_gathered(model, members[item.tensor])
        _add_spans(model, members[item.tensor], covered)
    covered_by: dict[str, list[tuple[int, int]]] = {}
    for root, tensors in members.items():
        if root in graph.producer:
            lives = [life for tensor in tensors for life in leaving.get(tensor, ())]
            lives += [life for tensor in tensors for life in _read_lifetimes(model, tensor, viewed=True)]
            lives += [life for tensor in tensors for life in _other_lifetimes(model, tensor, times)]
            covered_by[root] = _add_uncovered(model, lives)
            _add_spans(model, tensors, covered_by[root])
    _add_others_in_flight(model, times, end)
    for root, covered in covered_by.items():
        _add_kept(model, root, covered, end)
    for op in graph.ops:
        node = model.nodes[model.node_number["op", op.name]]
        for items, strategy in zip(node.items, model.space.op_choices(op).strategies, strict=True):
            if strategy.workspace:
                items.append((times[op.name], times[op.name] + 1, strategy.workspace))


def _add_spans(model: Model, tensors: Sequence[str], covered: Sequence[tuple[int, int]]) -> None:
    """Adds what backward keeps or recomputes, by choice (``rematerialization``), at times when nothing else of the storage counts."""
    for tensor in tensors:
        saved = model.sites[tensor].saved
        if saved is not None and model.nodes[saved].spans:
            node = model.nodes[saved]
            for items, span, local in zip(node.items, node.spans, model.space.stored_bytes(tensor, node.specs), strict=True):
                items.extend((first, last, local) for first, last in _subtract(span, covered))


def _add_others_in_flight(model: Model, times: Mapping[str, int], end: int) -> None:
    """Adds, throughout, what other microbatches in flight hold between forward and backward: of each choice what lives across the border.

    What the last operator of forward makes and the first of backward reads is left out.
    """
    graph = model.space.graph
    others, border = graph.accumulation.in_flight - 1, min((times[op.name] for op in graph.ops if op.phase == "backward"), default=end)
    if not others:
        return
    for node in model.nodes:
        for items in node.items if node.kind not in ("input", "output") else ():
            size = sum(size for begin, last, size in items if begin < border < last)
            if size:
                items.append((0, end, others * size))
    for item in graph.inputs:
        if item.is_received and any(reader.phase == "backward" for reader in model.sites[item.tensor].readers):
            home = model.nodes[model.node_number["input", item.tensor]]
            for items, size in zip(home.items, model.space.stored_bytes(item.tensor, home.specs), strict=True):
                items.append((0, end, others * size))


def _add_kept(model: Model, tensor: str, covered: Sequence[tuple[int, int]], end: int) -> None:
    """Adds the result of an operator that runs once a step, at times when nothing else of it counts: all microbatches read it."""
    op = model.space.graph.producer[tensor]
    choices = model.space.op_choices(op)
    if choices.kept:
        items = model.nodes[model.node_number["op", op.name]].items
        sizes = model.space.stored_bytes(tensor, choices.outputs(op.outputs.index(tensor)))
        for mine, spec, local in zip(items, choices.kept, sizes, strict=True):
            if spec is not None:
                mine.extend((first, last, local) for first, last in _subtract((0, end), covered))


def _add_stored(model: Model, tensor: str, away: Sequence[tuple[int, int]], end: int) -> None:
    """Adds a stored tensor except at the times ``away``, and the optimizer's states throughout."""
    space = model.space
    home = model.nodes[model.node_number["input", tensor]]
    trained = tensor in space.graph.stepped
    sizes = zip(space.stored_bytes(tensor, home.resting), space.stored_bytes(tensor, home.specs), strict=True)
    for items, rest, read, (local, kept) in zip(home.items, home.resting, home.specs, sizes, strict=True):
        begin = 0
        for first, last in (*away, (end, end)):
            if first > begin:
                items.append((begin, first, kept))
            begin = last
        if read != rest:  # the copy that microbatches read is there beside it
            items.append((0, end, local))
        more = space.graph.parts(tensor) - 1
        if more:  # the parts of a cut input that other microbatches read
            items.append((0, end, more * local))
        if trained:
            items.append((0, end, pricing.state_bytes(space.graph, tensor, local, space.optimizer)))


def _add_gathered(model: Model, tensors: Sequence[str]) -> None:
    """Adds the gathered copy of a stored tensor that forward makes and backward keeps."""
    for tensor in tensors:
        site = model.sites[tensor]
        if site.saved is not None and not model.nodes[site.saved].spans:
            kept = model.nodes[site.saved]
            begin, end = _saved_time(model, tensor)
            for choice, local in enumerate(model.space.stored_bytes(tensor, kept.specs)):
                if end > begin and kept.from_layout[choice]:
                    kept.items[choice].append((begin, end, local))
            return


def _saved_time(model: Model, tensor: str) -> tuple[int, int]:
    """The time for which backward's version is kept: after the last reader in forward, until the first in backward."""
    early, late = model.sites[tensor].phases(model.space.graph)
    return max(reader.time for reader in early) + 1, min(reader.time for reader in late)


def _read_lifetimes(model: Model, tensor: str, *, viewed: bool) -> Iterator[Lifetime]:
    """Lives of a tensor while operators read it.

    Args:
        viewed: operators that only view the tensor count as readers.
    """
    graph = model.space.graph
    for reader in model.sites[tensor].readers:
        if not _is_output(reader) and (viewed or not _is_view(graph.op[reader.name])):
            yield reader.time, reader.time + 1, reader.node, tensor, reader.specs


def _other_lifetimes(model: Model, tensor: str, times: Mapping[str, int]) -> Iterator[Lifetime]:
    """Lives of a tensor from its production on, apart from its reads."""
    graph, site = model.space.graph, model.sites[tensor]
    made = times[graph.producer[tensor].name]
    early, late = site.phases(graph)
    by_choice = site.saved is not None and bool(model.nodes[site.saved].spans)
    first = min((reader.time for reader in early or (() if by_choice else late)), default=made)
    begin = made + is_written_over(model, tensor, times)
    yield begin, max(first, made + 1), site.producer, tensor, site.specs
    for node, readers in ((site.forward, early), (site.backward, late)):
        if node is not None and readers:
            reads = [reader.time for reader in readers]
            yield max(min(reads), begin), max(reads), node, tensor, model.nodes[node].specs
    if site.saved is not None and not by_choice:
        yield *_saved_time(model, tensor), site.saved, tensor, model.nodes[site.saved].specs


def is_written_over(model: Model, tensor: str, times: Mapping[str, int]) -> bool:
    """Whether an operator may write a tensor over one that nobody reads later, so that it takes no memory while it runs.

    Where the operand may be recomputed, readers of the same phase alone count as later readers.
    """
    graph = model.space.graph
    op = graph.producer[tensor]
    for place in may_write_over(op):
        read = op.inputs[place]
        alike = graph.tensors[read].shape == graph.tensors[tensor].shape and graph.tensors[read].dtype == graph.tensors[tensor].dtype
        if alike and read in graph.producer:
            site = model.sites[read]
            again = site.saved is not None and bool(model.nodes[site.saved].spans)
            later = (reader for reader in site.readers if reader.time > times[op.name])
            if all(again and reader.phase != op.phase for reader in later):
                return True
    return False


def _leaving_lifetimes(model: Model, times: Mapping[str, int], end: int) -> dict[str, list[Lifetime]]:
    """Lives of the tensors that leave, from after their production to the end.

    They are outputs, gradients (in their parameter's spec) and buffer updates.
    """
    graph = model.space.graph
    found: dict[str, list[Lifetime]] = {}
    for index, output in enumerate(graph.outputs):
        if output.tensor in graph.producer:
            number = model.node_number[("output", f"{OUTPUT}{index}") if output.kind == "output" else ("input", graph.owners[output])]
            born, node = times[graph.producer[output.tensor].name] + 1, model.nodes[number]
            found.setdefault(output.tensor, []).append((born, end, number, output.tensor, node.resting or node.specs))
    return found


def _add_uncovered(model: Model, lives: Sequence[Lifetime]) -> list[tuple[int, int]]:
    """Adds each life as items of its node, except at times that an earlier life covers. Returns the covered times, in order."""
    covered: list[tuple[int, int]] = []
    for begin, end, node, tensor, specs in lives:
        free = _subtract((begin, end), covered)
        if free:
            sizes = model.space.stored_bytes(tensor, specs)
            for items, local in zip(model.nodes[node].items, sizes, strict=True):
                items.extend((first, last, local) for first, last in free)
            covered = sorted((*covered, *free))
    return covered


def _subtract(life: tuple[int, int], covered: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of ``life`` outside the intervals ``covered``, which are in order."""
    begin, end = life
    found = []
    for first, last in covered:
        if first > begin:
            found.append((begin, min(first, end)))
        begin = max(begin, last)
        if begin >= end:
            break
    if begin < end:
        found.append((begin, end))
    return [part for part in found if part[1] > part[0]]


def _is_output(reader: Reader) -> bool:
    return reader.name.startswith(OUTPUT)


def _is_view(op: Op) -> bool:
    return bool(op.inputs) and is_alias(op)
