"""Decoding: the choices of a solution become an ``Assignment`` of strategies, layouts, reads and recomputed operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.graph import Phase
from autopar.schedule import AGAIN, Assignment, Layout
from autopar.search.ilp.model import Model, Reader, Site
from autopar.sharding import ShardingSpec, Strategy


def decode_assignment(model: Model, choices: np.ndarray) -> Assignment:
    """The assignment that a solution stands for.

    Args:
        choices: one index per node of the model.
    """
    graph, space = model.space.graph, model.space
    inputs = {}
    for item in graph.inputs:
        node = model.node_number["input", item.tensor]
        inputs[item.tensor] = model.nodes[node].resting[choices[node]]
    strategies: dict[str, Strategy] = {}
    for op in graph.ops:
        strategies[op.name] = space.op_choices(op).strategies[choices[model.node_number["op", op.name]]]
    layouts: list[Layout] = []
    reads: dict[tuple[str, int], str] = {}
    again = recomputed_ops(model, choices)
    for site in model.sites.values():
        decode_site(model, choices, site, layouts, reads, again)
    once = frozenset(name for name in space.made_once if _kept_spec(model, choices, name) is not None)
    return Assignment(inputs, strategies, _made_once(layouts, (reads.get((name, 0)) for name in once)), reads, again, once)


def _kept_spec(model: Model, choices: np.ndarray, name: str) -> ShardingSpec | None:
    """The spec in which the result of an operator that runs once a step is kept; None of one that runs in each microbatch."""
    kept = model.space.op_choices(model.space.graph.op[name]).kept
    return kept[choices[model.node_number["op", name]]] if kept else None


def _made_once(layouts: Sequence[Layout], values: Iterable[str | None]) -> tuple[Layout, ...]:
    """The layouts, those made once that ``values`` are or are made from."""
    source, found = {layout.value: layout.source for layout in layouts}, set[str]()
    for value in values:
        while value in source:
            found.add(value)
            value = source[value]
    return tuple(replace(layout, once=True) if layout.value in found else layout for layout in layouts)


def recomputed_ops(model: Model, choices: np.ndarray) -> frozenset[str]:
    """Operators whose recomputation backward needs, directly or for other recomputations."""
    graph = model.space.graph

    def makers(site: Site) -> list[str]:
        saved = site.saved
        made = saved is not None and bool(model.nodes[saved].states) and model.nodes[saved].states[choices[saved]] == "recompute"
        return [graph.producer[site.tensor].name] if made else []

    waiting = [name for site in model.sites.values() if site.phases(graph)[1] for name in makers(site)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [maker for tensor in graph.op[name].inputs for maker in makers(model.sites[tensor])]
            waiting += model.recomputed_together(name)
    return frozenset(found)


def _lies_as(model: Model, choices: np.ndarray, site: Site) -> ShardingSpec:
    """The spec in which a tensor enters or is made, before it is gathered once a step."""
    home, choice = model.nodes[site.producer], int(choices[site.producer])
    if home.kind == "input":
        return home.resting[choice]
    op = model.space.graph.op[home.name]
    return model.space.op_choices(op).strategies[choice].outputs[op.outputs.index(site.tensor)]


def decode_site(
    model: Model,
    choices: np.ndarray,
    site: Site,
    layouts: list[Layout],
    reads: dict[tuple[str, int], str],
    again: frozenset[str] = frozenset(),
) -> None:
    """Adds the layouts of one tensor, and which of its values each reader reads.

    Args:
        again: the recomputed operators.
    """
    tensor = site.tensor
    own = (tensor, site.specs[choices[site.producer]])
    early, late = site.phases(model.space.graph)
    if _lies_as(model, choices, site) != own[1] and site.readers:
        own = (f"{tensor}@once", own[1])
        layouts.append(Layout(own[0], tensor, tensor, own[1], "forward", (early or late)[0].name, once=True))

    def chosen(node: int) -> ShardingSpec:
        return model.nodes[node].specs[int(choices[node])]

    def make(source: tuple[str, ShardingSpec], spec: ShardingSpec, name: str, phase: Phase, before: str) -> tuple[str, ShardingSpec]:
        if spec == source[1]:
            return source
        layouts.append(Layout(f"{tensor}@{name}", tensor, source[0], spec, phase, before))
        return layouts[-1].value, spec

    def serve(source: tuple[str, ShardingSpec], readers: list[Reader], phase: Phase, suffix: str = "") -> None:
        for reader in readers:
            name = reader.name + suffix
            value, _ = make(source, reader.specs[choices[reader.node]], f"{name}:{reader.position}", phase, name)
            if value != tensor or suffix:
                reads[name, reader.position] = value

    shared = own
    if site.forward is not None:
        shared = make(own, chosen(site.forward), "forward", "forward", early[0].name)
    serve(shared, early, "forward")
    second = [reader for reader in site.recompute_readers if reader.name in again]
    if not late and not second:
        return
    current = own
    if site.saved is not None:
        node, choice = model.nodes[site.saved], choices[site.saved]
        if node.states and node.states[choice] == "recompute":
            current = tensor + AGAIN, node.specs[choice]
        else:
            source = shared if node.from_layout[choice] else own
            current = make(source, node.specs[choice], "saved", "forward", early[0].name if early else "")
    if site.backward is not None:
        before = late[0].name if late else second[0].name + AGAIN
        current = make(current, chosen(site.backward), "backward", "backward", before)
    serve(current, second, "backward", AGAIN)
    serve(current, late, "backward")
