"""Problem files: what is written is read back, both roads read the same, and a broken file gives one line that names the place."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from autopar.solvers import Problem, ProblemError, evaluate, solve
from tests.solvers.problems import brute_force, random_problem, shared_folder

ARRAYS = ("node_ptr", "costs", "edges", "edge_ptr", "edge_costs", "item_ptr", "item_begin", "item_end", "item_usage")
EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {"intervals": [[0, 4], [2, 6]], "costs": [[15], [55, 65]], "usages": [[10], [25, 0]]},
        "edges": {"nodes": [[0, 1]], "costs": [[30, 1000000000000000000]]},
        "usage_limit": 50,
    }
}


def _same(a: Problem, b: Problem) -> bool:
    return (a.name, a.limit) == (b.name, b.limit) and all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ARRAYS)


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_round_trip(tmp_path, name):
    for seed in range(60):
        problem = random_problem(seed)
        problem.save(tmp_path / name)
        again = Problem.load(tmp_path / name)
        assert brute_force(again) == brute_force(problem), seed
        again.save(tmp_path / name)
        assert _same(Problem.load(tmp_path / name), again), seed


def test_file_text_gives_its_arrays(tmp_path):
    for text in (json.dumps(EXAMPLE), json.dumps(EXAMPLE, indent=3), json.dumps(EXAMPLE, sort_keys=True)):
        (tmp_path / "p.json").write_text(text)
        problem = Problem.load(tmp_path / "p.json")
        assert problem.edge_costs.tolist() == [30, 10**18]
        assert problem.item_usage.tolist() == [10, 25]  # a usage of 0 is no item


@pytest.mark.parametrize(
    "text",
    [
        '{"problem":{"nodes":{"intervals":[[0,1]],"costs":[[1]],"usages":[[1]]},"edges":{"nodes":[],"costs":[]}}}',
        '{"problem":{"nodes":{"intervals":[[0,1]],"costs":[[1]],"usages":[[1]],"more":{"a":[1,"b"]}},"edges":{"nodes":[],"costs":[]},"x":null}}',
        '{"problem":{"edges":{"costs":[ ],"nodes":[]},"usage_limit":null,'
        '"nodes":{"usages":[[1]],"intervals":[[0 , 1]],"costs":[ [ 1 ] ]}}}',
    ],
    ids=["no name, no limit", "keys unknown", "other order, null limit, blanks"],
)
def test_unusual_but_right(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    problem = Problem.load(tmp_path / "p.json")
    assert (problem.num_nodes, len(problem.edges), problem.limit) == (1, 0, None)
    assert solve(problem).objective == 1


def _changed(change) -> str:
    body = json.loads(json.dumps(EXAMPLE))
    change(body["problem"])
    return json.dumps(body)


HUGE = {"intervals": [[0, 1]] * 99, "costs": [[10**17 - 1]] * 99, "usages": [[1]] * 99}
BROKEN = {
    "empty file": ("", "not valid JSON"),
    "a key twice": (json.dumps(EXAMPLE).replace('"nodes": {', '"nodes": {"costs": [[1]], ', 1), "the key 'costs' stands twice"),
    "cut short": (json.dumps(EXAMPLE)[:100], "not valid JSON"),
    "not JSON": ("hello", "not valid JSON"),
    "not text": (b"\xff\xfe\x00", "UTF-8"),
    "broken gzip": (gzip.compress(json.dumps(EXAMPLE).encode())[:40], "gzip"),
    "a list": ("[1, 2]", "problem is missing"),
    "no nodes": ('{"problem": {}}', "problem.nodes is missing"),
    "nodes a list": ('{"problem": {"nodes": [], "edges": {}}}', "problem.nodes is not an object"),
    "no edges": (_changed(lambda p: p.pop("edges")), "problem.edges is missing"),
    "no costs": (_changed(lambda p: p["nodes"].pop("costs")), "problem.nodes.costs is missing"),
    "usages of a node missing": (_changed(lambda p: p["nodes"]["usages"].pop()), "problem.nodes.usages has 1 lists for 2 nodes"),
    "a usage missing": (_changed(lambda p: p["nodes"]["usages"][1].pop()), "problem.nodes.usages[1] has 1 entries, expected 2"),
    "half an interval": (_changed(lambda p: p["nodes"]["intervals"][1].pop()), "problem.nodes.intervals[1] has 1 entries"),
    "edge to no node": (_changed(lambda p: p["edges"].update(nodes=[[0, 2]])), "edge 0 joins nodes 0 and 2"),
    "edge to node -1": (_changed(lambda p: p["edges"].update(nodes=[[-1, 1]])), "edge 0 joins nodes -1 and 1"),
    "edge to itself": (_changed(lambda p: p["edges"].update(nodes=[[1, 1]], costs=[[1, 2, 3, 4]])), "edge 0 joins node 1 to itself"),
    "edge of three nodes": (_changed(lambda p: p["edges"].update(nodes=[[0, 1, 1]])), "problem.edges.nodes[0] has 3 nodes"),
    "edge without costs": (_changed(lambda p: p["edges"].update(costs=[])), "problem.edges.costs has 0 lists for 1 edges"),
    "edge costs too few": (_changed(lambda p: p["edges"].update(costs=[[1]])), "edge 0 (0, 1) has 1 costs, expected 2"),
    "negative usage": (_changed(lambda p: p["nodes"].update(usages=[[10], [25, -3]])), "problem.nodes.usages[1][1] is negative: -3"),
    "negative cost": (_changed(lambda p: p["nodes"].update(costs=[[15], [-5, 65]])), "choice 0 of node 1 has the negative cost -5"),
    "negative edge cost": (_changed(lambda p: p["edges"].update(costs=[[30, -1]])), "edge 0 has the negative cost -1"),
    "cost beyond 64 bits": (_changed(lambda p: p["nodes"].update(costs=[[15], [10**25, 65]])), "problem.nodes.costs[1][0] is out of range"),
    "cost a fraction": (_changed(lambda p: p["nodes"].update(costs=[[1.5], [5, 65]])), "problem.nodes.costs[0][0] is not an integer: 1.5"),
    "cost a word": (_changed(lambda p: p["edges"].update(costs=[[30, "x"]])), 'problem.edges.costs[0][1] is not an integer: "x"'),
    "cost null": (_changed(lambda p: p["edges"].update(costs=[[30, None]])), "problem.edges.costs[0][1] is not an integer"),
    "costs not lists": (_changed(lambda p: p["nodes"].update(costs=[15, 16])), "problem.nodes.costs[0] is not a list"),
    "usages beyond the range": (_changed(lambda p: p["nodes"].update(usages=[[2**62], [2**62, 2**62]])), "usages are out of range"),
    "costs beyond the range": (
        json.dumps({"problem": {"nodes": HUGE, "edges": {"nodes": [], "costs": []}}}),
        "costs are out of range",
    ),
    "an empty problem": (
        '{"problem":{"nodes":{"intervals":[],"costs":[],"usages":[]},"edges":{"nodes":[],"costs":[]}}}',
        "the problem has no node",
    ),
    "a node without choices": (_changed(lambda p: p["nodes"].update(costs=[[], [5, 6]], usages=[[], [1, 2]])), "node 0 has no choice"),
    "a limit in words": (_changed(lambda p: p.update(usage_limit="50")), "usage_limit is not a 64-bit integer"),
    "a time before 0": (_changed(lambda p: p["nodes"].update(intervals=[[-2, 4], [2, 6]])), "begins at -2"),
    "nested too deep": ("[" * 200_000, "nested too deep"),
    "items that do not fit": (_changed(lambda p: p["nodes"].update(items=[[[]], [[[1, 2]], []]])), "problem.nodes.items[1][0] has an item"),
}


@pytest.mark.parametrize(("data", "words"), BROKEN.values(), ids=list(BROKEN))
def test_broken_files_name_the_place(tmp_path, data, words):
    path = tmp_path / "broken.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ProblemError) as caught:
        Problem.load(path)
    what, hint = str(caught.value).split("\n")
    assert what.startswith(str(path)) and words in what
    assert hint.startswith("hint: ") and len(hint) > 10


def test_build_says_what_is_wrong():
    for build, words in (
        (lambda: Problem.build([[1], [2]], [(0, 5, [[1]])]), "edge 0 joins nodes 0 and 5"),
        (lambda: Problem.build([[1], [2, 3]], [(0, 1, [[1], [2], [3]])]), "edge 0 (0, 1) has a table of shape (3, 1)"),
        (lambda: Problem.build([[1.5]]), "the costs of node 0 are not 64-bit integers"),
        (lambda: Problem.build([[1]], items=[]), "memory items are given for 0 of 1 nodes"),
        (lambda: Problem.build([[1]], items=[[]]), "node 0 has memory items for 0 of 1 choices"),
        (lambda: Problem.build([[1]], items=[[[(0, 1, -2)]]]), "choice 0 of node 0 has the negative usage -2"),
        (lambda: Problem.build([]), "the problem has no node"),
    ):
        with pytest.raises(ProblemError, match="hint: ") as caught:
            build()
        assert words in str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_a_problem_with_further_nodes_is_as_if_built_with_them(seed):
    rng = np.random.default_rng(seed)
    own, sizes = 3, rng.integers(1, 4, 6).tolist()
    costs = [rng.integers(0, 9, size) for size in sizes]
    items = [[[(n, n + 1 + k, 5 * n + k)] * int(rng.integers(0, 3)) for k in range(size)] for n, size in enumerate(sizes)]
    edges = [(u, v, rng.integers(0, 9, (sizes[u], sizes[v]))) for u, v in ((0, 1), (2, 1), (3, 0), (2, 5), (4, 3))]
    for more, some in ((edges[2:], items[own:]), ([], None)):
        base = Problem.build(costs[:own], edges[:2], items[:own], 17, "some")
        whole = Problem.build(costs, edges[:2] + more, items[:own] + (some or [[[]] * size for size in sizes[own:]]), 17, "some")
        assert _same(base.extended(costs[own:], more, some), whole)
    with pytest.raises(ProblemError, match=r"edge 2 \(3, 0\) has a table of shape"):
        base.extended(costs[own:], [(3, 0, np.zeros((1, 9), dtype=np.int64))])


def test_a_real_instance_survives_saving(tmp_path):
    source = shared_folder() / "iopddl" / "asplos-2025-iopddl-G.json.gz"
    problem = Problem.load(source)
    problem.save(tmp_path / "g.json.gz")
    assert _same(Problem.load(tmp_path / "g.json.gz"), problem)


EXTREME = (-1, 0, 1, 2, 7, 10**17 - 1, 10**17, 2**62 - 1, 2**62, 2**63 - 1, -(2**63))


def _numbers(value, path=()):
    if isinstance(value, int):
        yield path
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, (*path, key))


def test_a_hostile_file_is_refused_or_solved_as_it_says(tmp_path):
    """Numbers at the edges of what int64 holds, lists that grow and shrink: nothing is looked up outside of an array."""
    solved = 0
    for seed in range(150):
        chance = random.Random(seed)
        random_problem(seed).save(tmp_path / "p.json")
        document = json.loads((tmp_path / "p.json").read_text())
        for _ in range(chance.randint(1, 3)):
            *path, last = chance.choice(list(_numbers(document)))
            owner = reduce(lambda value, key: value[key], path, document)
            change = chance.random()
            if change < 0.7 or not isinstance(owner, list):
                owner[last] = chance.choice(EXTREME)
            elif change < 0.85:
                owner.append(chance.choice(EXTREME))
            else:
                owner.pop()
        (tmp_path / "p.json").write_text(json.dumps(document))
        try:
            problem = Problem.load(tmp_path / "p.json")
        except ProblemError:
            continue
        found = solve(problem, method=chance.choice(["auto", "messages"]), time_limit=1.0)
        if found.choices is not None:
            cost, _, feasible = evaluate(problem, found.choices)
            assert (cost, feasible) == (found.objective, True), seed
            assert found.bound <= found.objective, seed
            solved += 1
    assert solved > 20


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_other_dims_are_refused(name):
    """The numbers are right, and what runs on them counts on one row of them."""
    problem = random_problem(0)
    array = getattr(problem, name)
    with pytest.raises(ProblemError, match=f"{name} has {array.ndim + 1} dims, expected {array.ndim}\nhint: "):
        replace(problem, **{name: array[..., None]})


@pytest.mark.parametrize("limit", ["7", (7,), object()])
def test_a_limit_is_a_number(limit):
    with pytest.raises(ProblemError, match=r"the limit is .*, no number"):
        replace(random_problem(0), limit=limit)
