"""Choices of a solution -> Assignment: which strategy, which layouts, who reads what."""

from __future__ import annotations

import numpy as np

from autopar.graph import Phase
from autopar.schedule import Assignment, Layout
from autopar.search.model import Model, Reader, Site
from autopar.sharding import ShardingSpec, Strategy


def extract(model: Model, choices: np.ndarray) -> Assignment:
    """The assignment that ``choices`` (one index a node) stands for."""
    graph, space = model.space.graph, model.space
    inputs = {}
    for item in graph.inputs:
        node = model.number["input", item.tensor]
        inputs[item.tensor] = model.nodes[node].specs[choices[node]]
    strategies: dict[str, Strategy] = {}
    for op in graph.ops:
        strategies[op.name] = space.op_choices(op).strategies[choices[model.number["op", op.name]]]
    layouts: list[Layout] = []
    reads: dict[tuple[str, int], str] = {}
    for site in model.sites.values():
        extract_site(model, choices, site, layouts, reads)
    return Assignment(inputs, strategies, tuple(layouts), reads)


def extract_site(model: Model, choices: np.ndarray, site: Site, layouts: list[Layout], reads: dict[tuple[str, int], str]) -> None:
    tensor = site.tensor
    own = (tensor, site.specs[choices[site.producer]])
    early, late = site.phases(model.space.graph)

    def chosen(node: int) -> ShardingSpec:
        return model.nodes[node].specs[int(choices[node])]

    def make(source: tuple[str, ShardingSpec], spec: ShardingSpec, name: str, phase: Phase, before: str) -> tuple[str, ShardingSpec]:
        if spec == source[1]:
            return source
        layouts.append(Layout(f"{tensor}@{name}", tensor, source[0], spec, phase, before))
        return layouts[-1].value, spec

    def serve(source: tuple[str, ShardingSpec], readers: list[Reader], phase: Phase) -> None:
        for reader in readers:
            value, _ = make(source, reader.specs[choices[reader.node]], f"{reader.name}:{reader.position}", phase, reader.name)
            if value != tensor:
                reads[reader.name, reader.position] = value

    shared = own
    if site.forward is not None:
        shared = make(own, chosen(site.forward), "forward", "forward", early[0].name)
    serve(shared, early, "forward")
    current = own
    if site.saved is not None:
        from_layout = model.nodes[site.saved].from_layout[choices[site.saved]]
        current = make(shared if from_layout else own, chosen(site.saved), "saved", "forward", early[0].name)
    if site.backward is not None:
        current = make(current, chosen(site.backward), "backward", "backward", late[0].name)
    serve(current, late, "backward")
