"""Several graphs of one model planned with weights and buffers lying alike: one leads and is planned freely, the others follow it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from autopar.api import plan
from autopar.graph import Graph
from autopar.plan import Plan

Call = TypeVar("Call", bound=Hashable)


def stored_specs(made: Plan) -> dict[str, str]:
    """How the plan lays parameters and buffers, by name."""
    return {name: row.spec for name, row in (*made.parameters.items(), *made.buffers.items())}


def plan_followers(
    graphs: Mapping[Call, Graph], lead: Call, first: Plan, alike: Mapping[str, str], pins: Mapping[str, str], options: Mapping[str, Any]
) -> dict[Call, Plan]:  # fmt: skip
    """Plans of all graphs, in their order, on the mesh of the one that leads.

    Args:
        first: the plan of the graph ``lead``.
        alike: specs of parameters and buffers by name, for those that a graph has.
        pins: further constraints of each graph.
        options: of ``plan``.
    """
    others = {"mesh": first.mesh, **{key: value for key, value in options.items() if key not in ("mesh", "devices")}}
    return {call: first if call == lead else _follow(graph, alike, pins, others) for call, graph in graphs.items()}


def _follow(graph: Graph, alike: Mapping[str, str], pins: Mapping[str, str], options: Mapping[str, Any]) -> Plan:
    held = {item.name for kind in ("parameter", "buffer") for item in graph.of_kind(kind)}
    return plan(graph, constraints={**pins, **{name: spec for name, spec in alike.items() if name in held}}, **options)
