"""Graph x choices -> ``Model``: the nodes of every operator and tensor, and the edges between them. ``model`` says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autopar.graph import Phase
from autopar.rules import is_alias, is_expansion
from autopar.schedule import OUTPUT
from autopar.search.choices.space import IMPOSSIBLE, Space
from autopar.search.ilp.memory_items import add_memory_items
from autopar.search.ilp.model import Model, Node, Reader, Side, Site
from autopar.search.ilp.rematerialization import (
    RecomputeTimes,
    add_recomputations,
    add_saved,
    copied_from_layout,
    find_recompute_times,
    free_if_gone,
    from_producer,
    keepable_specs,
    recompute_read_table,
)
from autopar.search.settings import SMALL_TENSOR_SHARE
from autopar.sharding import ShardingSpec


def build_model(
    space: Space, *, recompute_times: int = 0, alike: Mapping[str, str] | None = None, small_share: float = SMALL_TENSOR_SHARE
) -> Model:
    """The model of ``space.graph``.

    Args:
        recompute_times: number of times told apart at which one operator may be recomputed; 0: nothing is recomputed.
        alike, small_share: see ``find_recompute_times``.
    """
    model = Model(space)
    times = model.op_times
    _add_inputs(model)
    _add_ops(model)
    _add_outputs(model)
    runs = find_recompute_times(space.graph, times, recompute_times, alike, small_share) if recompute_times else None
    if runs is not None:
        add_recomputations(model, runs)
    for tensor, readers in _readers(model, times).items():
        _add_site(model, tensor, readers, runs, times)
    add_memory_items(model, times)
    return model


def _add_inputs(model: Model) -> None:
    space = model.space
    for item in space.graph.inputs:
        layouts = space.kept_layouts(item, space.input_specs(item))
        resting, specs = tuple(rest for rest, _ in layouts), tuple(spec for _, spec in layouts)
        seconds = space.input_seconds(item, resting) + space.gather_seconds(item, layouts)
        model.add(Node("input", item.tensor, seconds, specs, resting=resting))


def _add_ops(model: Model) -> None:
    for op in model.space.graph.ops:
        choices = model.space.op_choices(op)
        model.add(Node("op", op.name, choices.seconds, phase=op.phase, once=choices.once))


def _add_outputs(model: Model) -> None:
    space = model.space
    for index, output in enumerate(space.graph.outputs):
        if output.kind == "output":
            specs = space.output_specs(index)
            node = model.add(Node("output", f"{OUTPUT}{index}", np.zeros(len(specs)), specs))
            for item in space.graph.of_kind("tangent"):
                if item.name == output.name:
                    tangent = model.node_number["input", item.tensor]
                    model.connect(node, tangent, space.equality_table(specs, model.nodes[tangent].specs))


def _readers(model: Model, times: Mapping[str, int]) -> dict[str, list[Reader]]:
    """Readers of each tensor: operators, outputs, and the parameter (of a gradient) or buffer (of its update)."""
    graph = model.space.graph
    found: dict[str, list[Reader]] = {name: [] for name in graph.tensors}
    for op in graph.ops:
        choices = model.space.op_choices(op)
        node, follows = model.node_number["op", op.name], is_alias(op) and not is_expansion(op, graph.tensors)
        for position, tensor in enumerate(op.inputs):
            sums = tuple(sum(bool(spec.partial) for spec in strategy.inputs) > 1 for strategy in choices.strategies)
            reader = Reader(node, choices.inputs(position), op.name, position, op.phase, times[op.name], follows, sums)
            found[tensor].append(reader)
    for index, output in enumerate(graph.outputs):
        name = f"{OUTPUT}{index}"
        node = model.node_number["output", name] if output.kind == "output" else model.node_number["input", graph.owners[output]]
        producer = graph.producer.get(output.tensor)
        phase: Phase = "backward" if output.kind == "gradient" or (producer and producer.phase == "backward") else "forward"
        time = times[producer.name] if producer else 0
        specs = model.nodes[node].specs if output.kind == "output" else model.nodes[node].resting
        found[output.tensor].append(Reader(node, specs, name, 0, phase, time, False))
    return found


def _add_site(model: Model, tensor: str, readers: list[Reader], runs: RecomputeTimes | None, times: Mapping[str, int]) -> None:
    space, graph = model.space, model.space.graph
    producer = graph.producer.get(tensor)
    pinned = space.pins.tensors.get(tensor)
    if producer:
        source = model.node_number["op", producer.name]
        specs = space.op_choices(producer).outputs(producer.outputs.index(tensor))
    else:
        source = model.node_number["input", tensor]
        specs = model.nodes[source].specs
    site = model.sites[tensor] = Site(tensor, source, specs, readers)
    early, late = site.phases(graph)
    second = [reader for reader in early if runs is not None and reader.name in runs.times]
    needed = [*late, *second]
    current, current_specs, layout = source, specs, None
    if early and (len(early) > 1 or needed or pinned):
        twice = bool(needed) and model.deferrable.issuperset(reader.name for reader in early)
        site.forward = _add_layout(model, site, "forward", source, specs, early, pinned, twice)
        layout = model.nodes[site.forward]
        _connect_readers(model, tensor, site.forward, layout.specs, early, "forward")
    elif early:
        _connect_readers(model, tensor, source, specs, early, "forward")
    if runs is not None and needed and (early or runs.may_recompute(producer)):
        site.saved = add_saved(model, runs, site, layout, second, times)
    elif layout is not None and late:
        site.saved = _add_saved(model, site, layout)
    if site.saved is not None:
        current, current_specs = site.saved, model.nodes[site.saved].specs
    if len(needed) > 1 or (late and pinned and not early):
        site.backward = _add_layout(model, site, "backward", current, current_specs, needed, pinned if not early else None)
        current, current_specs = site.backward, model.nodes[site.backward].specs
    _connect_readers(model, tensor, current, current_specs, late, "backward", len(needed))
    if runs is not None:
        site.recompute_readers = tuple(second)
        _connect_recomputations(model, tensor, current, current_specs, second, runs, len(needed))


def _add_layout(
    model: Model, site: Site, phase: Phase, source: int, specs: tuple[ShardingSpec, ...], readers: list[Reader],
    pinned: ShardingSpec | None, twice: bool = False,
) -> int:  # fmt: skip
    """The number of the node of a shared version, which this adds with the edge from its source.

    Args:
        twice: each spec is offered twice: for backward as well, and for the deferred loss alone.
    """
    wanted = dict.fromkeys(spec for reader in readers for spec in reader.specs)
    if pinned:
        wanted = {pinned: None}
    elif len(readers) > 1:
        wanted.update(dict.fromkeys(specs))
    else:
        wanted.update(_unmasked_specs(readers[0], specs))
    chosen, whole = tuple(wanted), model.space.graph.tensors[site.tensor]
    repeated = model.repeated(source, whole)
    table = model.masked(model.space.reshard_table(whole, specs, chosen, repeated), specs, chosen)
    reachable = np.isfinite(table).any(axis=0)
    if reachable.any() and not reachable.all():
        chosen = tuple(spec for spec, keep in zip(chosen, reachable, strict=True) if keep)
        table = model.masked(model.space.reshard_table(whole, specs, chosen, repeated), specs, chosen)
    late = (False,) * len(chosen) + (True,) * len(chosen) if twice else ()
    if twice:
        chosen, table = chosen * 2, np.hstack([table, table])
    table = free_if_gone(model, source, table)
    node = model.add(Node("layout", site.tensor, np.zeros(len(chosen)), chosen, phase, deferred=late))
    side = _edge_side(model, source, phase, all(reader.name.startswith(OUTPUT) for reader in readers))
    model.side_of_layout[node] = side
    share = _microbatch_share(model, *readers)
    model.connect(source, node, table, share, phase=phase, tensor=whole, sources=specs, targets=chosen, side=side)
    return node


def _edge_side(model: Model, source: int, phase: Phase, leaves: bool) -> Side:
    """Where a reshard of the source's tensor stands beside the operators (``Edge.side``). A layout stands where its own reshard does."""
    node = model.nodes[source]
    if node.kind == "layout" and node.phase == phase:
        return "ahead" if model.side_of_layout[source] == "ahead" else "behind" if leaves else "between"
    if node.kind in ("input", "saved") or node.phase != phase or node.name in model.space.graph.prepared:
        return "ahead"
    return "behind" if leaves else "between"


def _microbatch_share(model: Model, *readers: Reader) -> float:
    """Fraction of a reshard's seconds that falls to one microbatch. A reshard that only leads to gradients may run once a step."""
    outputs = model.space.graph.outputs
    leaves = all(reader.name.startswith(OUTPUT) and outputs[int(reader.name[len(OUTPUT) :])].kind == "gradient" for reader in readers)
    return 1.0 / model.space.graph.microbatches if leaves else 1.0


def _connect_readers(
    model: Model, tensor: str, source: int, specs: tuple[ShardingSpec, ...], readers: list[Reader], phase: Phase, count: int | None = None
) -> None:  # fmt: skip
    """Edges from a shared version to each of its readers; ``count`` of them share it.

    A layout with one reader is that reader's reshard. The edge between them is equality, or a free mask where the reader adds partial sums.
    A view that can take the spec as it is does so, since a reshard after the view costs the same.
    """
    count = count or len(readers)
    alone = count == 1 and model.nodes[source].kind == "layout" and not model.space.pins.tensors.get(tensor)
    for reader in readers:
        same = model.space.equality_table(specs, reader.specs)
        if alone and not any(reader.sums):
            model.connect(source, reader.node, same, phase=phase)
            continue
        table = _reader_table(model, tensor, source, specs, reader)
        table = np.where((table == 0) | (same == 0), table, IMPOSSIBLE) if alone else table
        model.connect(
            source, reader.node, table, _microbatch_share(model, reader), phase=phase,
            tensor=model.space.graph.tensors[tensor], sources=specs, targets=reader.specs, readers=count,
            side=_edge_side(model, source, phase, reader.name.startswith(OUTPUT)),
        )  # fmt: skip


def _unmasked_specs(reader: Reader, specs: tuple[ShardingSpec, ...]) -> dict[ShardingSpec, None]:
    """Specs that the source can reach of operands that a reader adds to a partial sum.

    Each is partial over the axes alone over which the source is partial; the mask for the other axes is free.
    """
    came = dict.fromkeys(frozenset(spec.partial_axes) for spec in specs)
    summed = [spec for spec, sums in zip(reader.specs, reader.sums, strict=False) if sums]
    return {replace(spec, partial=tuple(item for item in spec.partial if item[0] in axes)): None for spec in summed for axes in came}


def _reader_table(model: Model, tensor: str, source: int, specs: tuple[ShardingSpec, ...], reader: Reader) -> np.ndarray:
    """Seconds of the reshard that a reader needs; shape [specs, reader's choices]."""
    whole = model.space.graph.tensors[tensor]
    table = model.space.reshard_table(whole, specs, reader.specs, model.repeated(source, whole))
    table = model.masked(table, specs, reader.specs, reader.sums)
    return model.followed(table, specs, reader.specs) if reader.follows else table


def _connect_recomputations(
    model: Model, tensor: str, source: int, specs: tuple[ShardingSpec, ...], readers: list[Reader], runs: RecomputeTimes, count: int
) -> None:  # fmt: skip
    """Edges to the recomputations that may read a tensor."""
    for reader in readers:
        moments, again = len(runs.times[reader.name]), model.space.op_choices(model.space.graph.op[reader.name]).in_each
        reader = replace(reader, specs=reader.specs[:again], sums=reader.sums[:again])
        table = recompute_read_table(model, free_if_gone(model, source, _reader_table(model, tensor, source, specs, reader)), moments)
        model.connect(
            source, model.node_number["recompute", reader.name], table, phase="backward", tensor=model.space.graph.tensors[tensor],
            sources=specs, targets=(reader.specs[0], *reader.specs * moments), readers=count,
            side=_edge_side(model, source, "backward", False),
        )  # fmt: skip


def _add_saved(model: Model, site: Site, layout: Node) -> int:
    """The number of the node of what backward keeps of a tensor.

    A choice is a spec, made from the producer's version or from the layout. The layout counts only where the producer has another spec.
    """
    space = model.space
    tensor = space.graph.tensors[site.tensor]
    stored = site.tensor not in space.graph.producer
    own, made = keepable_specs(site.specs), keepable_specs(layout.specs)
    specs = (*own, *made)
    from_layout = (False,) * len(own) + (True,) * len(made)
    node = model.add(Node("saved", site.tensor, np.zeros(len(specs)), specs, "forward", from_layout))
    choice = np.array(from_layout)
    same = space.equality_table(site.specs, specs)
    table = same if stored else model.free_only(space.reshard_table(tensor, site.specs, specs))
    model.connect(site.producer, node, model.cached((id(table), from_layout, "own"), lambda: from_producer(table, same, choice), table))
    shared = model.free_only(space.reshard_table(tensor, layout.specs, specs))
    assert site.forward is not None
    key = id(shared), from_layout, layout.deferred, "made"
    model.connect(site.forward, node, model.cached(key, lambda: copied_from_layout(layout, shared, choice), shared))
    return node
