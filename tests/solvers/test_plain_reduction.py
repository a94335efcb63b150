"""The kernels of the reduction and their NumPy forms: both do the same to every array, and to whole problems."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from solvers import Problem, dominance, memory, tables
from solvers.compiled import AVAILABLE, EVERYTHING, LOOPS, NOTHING, machine_code
from solvers.items import Items
from solvers.network import CONSTANT, NEVER, POOL, UPPER, Network
from solvers.pairs import FAR, pairs
from solvers.prices import Dual
from solvers.propagation import propagate
from solvers.reduction import network, reduce, unreduced
from solvers.shrinking import shrink, slacks
from tests.solvers.problems import FORBIDDEN, random_problem

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="nothing is compiled here: the two forms are one")


def _larger_problem(seed: int) -> Problem:
    """Of which much is left, though some nodes follow others and some choices are forbidden."""
    rng = np.random.default_rng(seed)
    edges = []
    for _ in range(20):
        u, v = rng.choice(10, 2, replace=False).tolist()
        table = rng.integers(0, 30, (4, 4))
        table[rng.random((4, 4)) < 0.05] = FORBIDDEN
        edges.append((u, v, np.where(np.eye(4) > 0, table, FORBIDDEN) if rng.random() < 0.1 else table))
    items = [[[(begin, begin + 3, int(rng.integers(1, 9))) for begin in (0, 4)] for _ in range(4)] for _ in range(8)]
    items += [[[]] * 4] * 2
    return Problem.build([rng.integers(0, 10, 4) for _ in range(10)], edges, items, 50, name=f"larger-{seed}")


def _networks() -> list[tuple[Network, memory.Memory, np.random.Generator]]:
    """Networks with some choices gone, some with an upper bound."""
    made = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = random_problem(seed, most_nodes=5, most_choices=6)
        items = memory.memory(problem)
        net = network(problem, memory.heavy_nodes(problem.node_ptr, items), NEVER)
        if (net.live_count > 0).all():
            for i in range(problem.num_nodes):
                left = tables.choices(net, i)
                kept = np.asarray(rng.random(len(left)) < 0.8)
                kept[rng.integers(len(left))] = True
                tables.keep(net, i, kept)
            net.scalars[UPPER] = rng.choice([NEVER, 40])
            made.append((net, items, rng))
    return made


NETWORKS = _networks()


def _copy(net: Network) -> Network:
    return Network(*[array.copy() for array in net])


def _agree(function: Callable[..., object], net: Network, *arguments: object) -> Network:
    """Run all forms on copies; returns one."""
    made, told = [], []
    for level in (EVERYTHING, LOOPS, NOTHING):
        made.append(_copy(net))
        with machine_code(level):
            told.append(function(made[-1], *arguments))
    assert told[0] == told[1] == told[2]
    for net in made:
        beyond = [np.arange(count, size) + at for at, count, size in zip(net.ptr, net.live_count, np.diff(net.ptr), strict=False)]
        net.live[np.concatenate(beyond)] = -1
    for other in made[1:]:
        for name, a, b in zip(Network._fields, made[0], other, strict=True):
            assert (a == b).all(), (name, arguments)
    return made[0]


def _ends(net: Network) -> list[tuple[int, int, int]]:
    """Edge, node, other node: each edge both ways."""
    joins = [(e, int(u), int(v)) for e, (u, v) in enumerate(zip(net.eu, net.ev, strict=True))]
    return joins + [(e, v, u) for e, u, v in joins]


def test_tightening_and_what_follows():
    found = set()
    for net, _, _ in NETWORKS:
        for e, (u, v) in enumerate(zip(net.eu.tolist(), net.ev.tolist(), strict=True)):
            after = _agree(tables.tighten, net, e)
            told = tables.tighten(_copy(net), e)
            found |= {bit for bit in range(7) if told & 1 << bit}
            if told & tables.FIRST_FOLLOWS:
                _agree(tables.follow, after, e, u, v, 0)
            if told & tables.SECOND_FOLLOWS:
                _agree(tables.follow, after, e, v, u, 0)
    assert len(found) == 7


def test_adding_to_tables_and_costs():
    added = 0
    for net, _, rng in NETWORKS:
        for e, u, v in _ends(net):
            _agree(tables.add_row, net, e, u, int(tables.choices(net, u)[-1]), v)
            for target, w, x in _ends(net):
                if target != e and x == v:
                    added += 1
                    if w == u:
                        _agree(tables.add_table, net, target, e, u, v)
                    size = net.ptr[w + 1] - net.ptr[w]
                    net.log_data[:size] = rng.choice(tables.choices(net, u), size)
                    _agree(tables.add_followed, net, target, e, u, w, v, 0)
                    _agree(tables.copy_followed, net, e, u, w, v, 0, int(net.scalars[POOL]))
    assert added > 500


def test_least_costs_of_a_node_to_eliminate():
    pairs = 0
    for net, _, _ in NETWORKS:
        for e, i, v in _ends(net):
            _agree(tables.least_by_one, net, e, i, v, 0)
            for f, other, w in _ends(net):
                if other == i and w != v:
                    pairs += 1
                    _agree(tables.least_by_pair, net, e, f, i, v, w, 0, int(net.scalars[POOL]))
    assert pairs > 500


def test_forbidden_choices_dropped():
    gone = paid = 0
    for net, _, rng in NETWORKS:
        for i in range(len(net.present)):
            dear = _copy(net)
            dear.cost[dear.ptr[i] : dear.ptr[i + 1]] += rng.choice([0, 1, 60, NEVER], dear.ptr[i + 1] - dear.ptr[i])
            after = _agree(tables.drop_forbidden, dear, i)
            gone += int(net.live_count[i] - after.live_count[i])
            paid += int(after.scalars[CONSTANT] > net.scalars[CONSTANT])
    assert gone > 100 and paid > 20


def test_slacks_and_what_they_leave():
    ruled_out = 0
    for seed in range(20):
        core = unreduced(_larger_problem(seed))
        graph = pairs(core)
        costs = np.where(core.costs >= NEVER, FAR, core.costs.astype(np.float64))
        dual = Dual(graph, Items(core.item_ptr, core.item_begin, core.item_end, core.item_usage, core.capacity), costs)
        with machine_code(NOTHING):
            dual.warm_up()
        found = []
        for machine in (EVERYTHING, NOTHING):
            with machine_code(machine):
                choice, pair = slacks(graph, costs, dual.best_messages)
                rest = shrink(core, graph, choice, pair, 12.0)
            found.append((choice, pair, rest))
        (choice, pair, rest), (other_choice, other_pair, other) = found
        assert np.allclose(choice, other_choice) and np.allclose(pair, other_pair)
        assert (rest is None) == (other is None)
        if rest is not None and other is not None:
            assert np.array_equal(rest.problem.edge_costs, other.problem.edge_costs) and np.array_equal(rest.kept, other.kept)
            ruled_out += len(core.edge_costs) - len(rest.problem.edge_costs)
    assert ruled_out > 100


def test_dominance():
    gone = 0
    for net, items, _ in NETWORKS:
        for i in range(len(net.present)):
            after = _agree(dominance.thin, net, items, i)
            gone += int(net.live_count[i] - after.live_count[i])
    assert gone > 100


def test_dominance_where_neighbours_have_lost_choices():
    gone = [0, 0]
    for net, items, _ in NETWORKS:
        thinned = net
        for i in range(len(net.present)):  # the least of a row may be more than 0 by now
            after = _agree(dominance.thin, thinned, items, i)
            gone[thinned is not net] += int(thinned.live_count[i] - after.live_count[i])
            thinned = after
    assert gone[1] > 100


def test_items_gathered(monkeypatch):
    gathered, forms = 0, (memory.gather, memory.plain_gather)
    for seed in range(200):
        problem = _larger_problem(seed) if seed % 2 else random_problem(seed)
        items = memory.memory(problem)
        net = propagate(network(problem, memory.heavy_nodes(problem.node_ptr, items), NEVER))
        again = []
        for form in forms:
            monkeypatch.setattr(memory, "gather", form)
            with machine_code(EVERYTHING):
                again.append(memory.rebuild(_copy(net), items, 0))
        assert all(a.tolist() == b.tolist() for a, b in zip(*again, strict=True))
        gathered += len(again[0].usage)
    assert gathered > 1000


FIELDS = ("node_ptr", "costs", "edges", "edge_ptr", "edge_costs", "item_ptr", "item_begin", "item_end", "item_usage", "capacity", "times")
FIELDS += ("constant", "infeasible")


@pytest.mark.parametrize("upper", [NEVER, 200])
def test_whole_reductions(upper):
    left = 0
    for seed in range(200):
        problem = _larger_problem(seed) if seed % 2 else random_problem(seed, most_nodes=9)
        made = []
        for level in (EVERYTHING, LOOPS, NOTHING):
            with machine_code(level):
                made.append(reduce(problem, upper))
        one, choices = made[0], np.diff(made[0].node_ptr) - 1
        for other in made[1:]:
            for field in FIELDS:
                assert np.array_equal(getattr(one, field), getattr(other, field)), (seed, field)
            assert one.expand(choices).tolist() == other.expand(choices).tolist()
        left += one.num_nodes
    assert left > 200
