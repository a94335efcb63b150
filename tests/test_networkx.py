"""Graphs and plans as graphs of networkx: every read is an edge, and seconds and bytes are those of the plan."""

from __future__ import annotations

import math
import subprocess
import sys

import networkx as nx
import pytest
from hypothesis import given, settings

from autopar.graph import Accumulation, Graph
from autopar.plan import Plan
from autopar.schedule import Limits
from tests.graphs import bucket_plan
from tests.strategies import graphs, machine, plan_of, plans, random_schedule, two_layers


@settings(max_examples=30)
@given(graphs())
def test_graph_has_an_edge_for_each_read(graph: Graph) -> None:
    flow = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(flow)
    assert flow.number_of_edges() == sum(len(op.inputs) for op in graph.ops) + len(graph.outputs)
    for op in graph.ops:
        read = {place: data["tensor"] for _, _, place, data in flow.in_edges(op.name, keys=True, data=True)}
        assert tuple(read[place] for place in range(len(op.inputs))) == op.inputs
        assert flow.nodes[op.name] == {"kind": "op", "name": op.name, "op": op.target, "module": op.module, "phase": op.phase}
    for *_, data in flow.edges(data=True):
        tensor = graph.tensors[data["tensor"]]
        assert (data["shape"], data["dtype"], data["bytes"]) == (tensor.shape, tensor.dtype, tensor.bytes)


@settings(max_examples=30)
@given(plans())
def test_plan_has_an_edge_for_each_read_and_all_seconds(plan: Plan) -> None:
    flow = plan.to_networkx()
    assert nx.is_directed_acyclic_graph(flow)
    assert flow.number_of_edges() == sum(len(row.inputs) for row in plan.ops) + len(plan.reshards) + len(plan.leaving)
    seconds = sum(data["seconds"] for _, data in flow.nodes(data=True))
    assert seconds == pytest.approx(sum(row.seconds for row in (*plan.ops, *plan.collectives)))
    for row in plan.ops:
        found = [(data["value"], data["spec"]) for *_, data in flow.in_edges(row.name, data=True)]
        assert sorted(found) == sorted((item.value or item.tensor, item.spec) for item in row.inputs)


@settings(max_examples=30)
@given(plans())
def test_critical_path_is_no_longer_than_the_step(plan: Plan) -> None:
    assert 0 <= nx.dag_longest_path_length(plan.to_networkx(), "seconds") <= plan.predicted.step_seconds * (1 + 1e-9)


def test_bytes_of_a_rank_are_its_part() -> None:
    plan = bucket_plan(Limits(bucket_bytes=600))
    flow = plan.to_networkx()
    for name, row in plan.parameters.items():
        for *_, data in flow.out_edges(row.tensor, data=True):
            assert (data["spec"], data["bytes"], data["bytes_per_rank"]) == (row.spec, 256, 64), name
    in_bucket = [row for row in plan.collectives if row.parts]
    assert in_bucket
    for call in in_bucket:
        assert sum(flow.nodes[part.value]["seconds"] for part in call.members) == pytest.approx(call.seconds)
        assert all(flow.nodes[part.value]["bytes"] == part.bytes for part in call.members)


@pytest.mark.parametrize("seed", range(4))
def test_sums_over_microbatches_are_nodes(seed: int) -> None:
    graph = two_layers().accumulated(Accumulation(2, ("x",), 0.5))
    plan = plan_of(random_schedule(graph, machine("dp=2,tp=2"), seed, Limits(2000, 4000, 1000), again=0.3))
    flow = plan.to_networkx()
    sums = {node for node, data in flow.nodes(data=True) if data["kind"] == "add"}
    assert sums == {item.writes[0] for item in plan.schedule if item.kind == "add"} and sums
    for total in sums:
        ((_, _, data),) = flow.in_edges(total, data=True)
        assert data["bytes"] == 4 * math.prod(data["shape"]) and flow.out_degree(total) > 0


def test_networkx_is_loaded_by_those_alone_who_ask_for_it() -> None:
    code = "import sys, autopar.check, autopar.recording, autopar.report.page, autopar.search; sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
