"""The problem as a value on flat int64 arrays: nodes with choices, costs on nodes and edges, memory items with lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import contest_format
from .arrays import Arrays, Ints, offsets
from .documents import read_document
from .errors import ProblemError, TooLargeError

INFINITE = 10**17
"""A cost of this or more forbids the choice or the pair."""
LARGEST_SUM = 2**62
"""Costs, and usages, stay below this in sum, so that int64 never overflows."""


@dataclass(frozen=True, eq=False)
class Problem(Arrays):
    """N nodes, C choices in all, E edges, I memory items. Costs and usages are integers of any one unit, times are integers.

    Node ``i`` has the choices ``node_ptr[i]:node_ptr[i + 1]``; edge ``e`` has the row-major table
    ``edge_costs[edge_ptr[e]:edge_ptr[e + 1]]`` over (choices of ``edges[e, 0]``, choices of ``edges[e, 1]``);
    choice ``c`` (counted over all nodes) has the memory items ``item_ptr[c]:item_ptr[c + 1]``, each of which uses
    ``item_usage`` at the times ``item_begin <= t < item_end``. At every time the chosen items may use at most ``limit``.
    Raises ProblemError when the arrays do not fit together or a number is out of range.
    """

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_nodes(self) -> int:
        return len(self.node_ptr) - 1

    @property
    def sizes(self) -> Ints:
        """Number of choices of each node, shape [N]."""
        return np.diff(self.node_ptr)

    @staticmethod
    def build(
        costs: Sequence[ArrayLike],
        edges: Sequence[tuple[int, int, ArrayLike]] = (),
        items: Sequence[Sequence[Sequence[tuple[int, int, int]]]] | None = None,
        limit: int | None = None,
        name: str = "",
    ) -> Problem:
        """A problem from Python values.

        ``costs[i][k]`` is the cost of choice k of node i; ``edges`` holds (u, v, table) with ``table[k][l]``;
        ``items[i][k]`` lists the (begin, end, usage) of choice k of node i.
        """
        none, pairs, ptr = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64), np.zeros(1, dtype=np.int64)
        return _extended(Arrays(name, ptr, none, pairs, ptr, none, ptr, none, none, none, limit), costs, edges, items)

    def extended(
        self,
        costs: Sequence[ArrayLike],
        edges: Sequence[tuple[int, int, ArrayLike]] = (),
        items: Sequence[Sequence[Sequence[tuple[int, int, int]]]] | None = None,
    ) -> Problem:
        """This problem with further nodes, numbered from N on, and further edges, in its units and times.

        ``costs[i][k]`` and ``items[i][k]`` are of choice k of further node i, as in ``build``; an edge (u, v, table) joins any two nodes,
        with ``table`` of shape [choices of u, choices of v].
        """
        return _extended(self, costs, edges, items)

    @staticmethod
    def load(path: str | PathLike[str]) -> Problem:
        """Read the contest's format, plain or gzipped. Raises ProblemError for contents that do not fit, OSError for the file."""
        try:
            return Problem.from_document(read_document(path))
        except ProblemError as error:
            raise ProblemError(f"{fspath(path)}: {error.what}", error.hint) from error

    @staticmethod
    def from_document(document: Any) -> Problem:
        """A problem of the contest's format, read as JSON. Raises ProblemError for contents that do not fit."""
        return Problem(**vars(contest_format.from_document(document)))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the contest's format (gzipped when the name ends in .gz), with a key ``items`` where one life a node is not enough."""
        contest_format.write(self, path)


def _extended(
    base: Arrays,
    costs: Sequence[ArrayLike],
    edges: Sequence[tuple[int, int, ArrayLike]],
    items: Sequence[Sequence[Sequence[tuple[int, int, int]]]] | None,
) -> Problem:
    first = len(base.node_ptr) - 1
    rows = [_integers(row, f"the costs of node {node}").reshape(-1) for node, row in enumerate(costs, first)]
    sizes = [*np.diff(base.node_ptr).tolist(), *map(len, rows)]
    tables = []
    for place, (u, v, table) in enumerate(edges, len(base.edges)):
        cells = _integers(table, f"the costs of edge {place}")
        if not (0 <= u < len(sizes) and 0 <= v < len(sizes)):
            raise ProblemError(f"edge {place} joins nodes {u} and {v}, but there are {len(sizes)} nodes", "count nodes from 0")
        if cells.shape not in {(sizes[u], sizes[v]), (sizes[u] * sizes[v],)}:
            raise ProblemError(
                f"edge {place} ({u}, {v}) has a table of shape {cells.shape}, expected {(sizes[u], sizes[v])}",
                "one row for each choice of the first node, one column for each choice of the second",
            )
        tables.append(cells.reshape(-1))
    counts, flat = _flatten_items(items, rows, first)
    return Problem(
        name=base.name,
        node_ptr=_continued(base.node_ptr, [len(row) for row in rows]),
        costs=np.concatenate([base.costs, *rows]),
        edges=np.concatenate([base.edges, np.array([(u, v) for u, v, _ in edges], dtype=np.int64).reshape(-1, 2)]),
        edge_ptr=_continued(base.edge_ptr, [len(table) for table in tables]),
        edge_costs=np.concatenate([base.edge_costs, *tables]),
        item_ptr=_continued(base.item_ptr, counts),
        item_begin=np.concatenate([base.item_begin, flat[:, 0]]),
        item_end=np.concatenate([base.item_end, flat[:, 1]]),
        item_usage=np.concatenate([base.item_usage, flat[:, 2]]),
        limit=base.limit,
    )


def _continued(ptr: Ints, counts: list[int]) -> Ints:
    return np.concatenate([ptr, ptr[-1] + offsets(counts)[1:]])


def _integers(values: ArrayLike, what: str) -> Ints:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ProblemError(f"{what} are not 64-bit integers", f"round costs to integers; {INFINITE} or more forbids")
    return array.astype(np.int64)


def _flatten_items(
    items: Sequence[Sequence[Sequence[tuple[int, int, int]]]] | None, rows: list[Ints], first: int
) -> tuple[list[int], Ints]:  # fmt: skip
    if items is None:
        return [0] * sum(len(row) for row in rows), np.zeros((0, 3), dtype=np.int64)
    if len(items) != len(rows):
        raise ProblemError(f"memory items are given for {len(items)} of {len(rows)} nodes", "give one list a node, empty or not")
    for node, (given, row) in enumerate(zip(items, rows, strict=True), first):
        if len(given) != len(row):
            raise ProblemError(f"node {node} has memory items for {len(given)} of {len(row)} choices", "give one list a choice")
    flat = [item for node in items for choice in node for item in choice]
    return [len(choice) for node in items for choice in node], np.array(flat, dtype=np.int64).reshape(-1, 3)


def _check(problem: Problem) -> None:
    """Every statement of Problem's docstring, or a ProblemError."""
    for field in ("node_ptr", "costs", "edges", "edge_ptr", "edge_costs", "item_ptr", "item_begin", "item_end", "item_usage"):
        array: Any = getattr(problem, field)
        if not isinstance(array, np.ndarray) or array.dtype != np.int64:
            raise ProblemError(f"{field} is not an int64 array", "build problems by Problem.build or Problem.load")
        dims = 2 if field == "edges" else 1
        if array.ndim != dims:
            raise ProblemError(f"{field} has {array.ndim} dims, expected {dims}", "build problems by Problem.build or Problem.load")
    if problem.limit is not None and not isinstance(problem.limit, (int, float, np.number)):
        raise ProblemError(f"the limit is {problem.limit!r}, no number", "give a whole number, in the unit of the usages, or None")
    for ptr, rows, values in (
        ("node_ptr", None, len(problem.costs)),
        ("edge_ptr", len(problem.edges), len(problem.edge_costs)),
        ("item_ptr", len(problem.costs), len(problem.item_usage)),
    ):
        at = getattr(problem, ptr)
        if len(at) == 0 or at[0] != 0 or at[-1] != values or (rows is not None and len(at) != rows + 1) or (np.diff(at) < 0).any():
            raise ProblemError(f"{ptr} does not divide its {values} values into rows", "build problems by Problem.build or Problem.load")
    if not len(problem.item_begin) == len(problem.item_end) == len(problem.item_usage) or problem.edges.shape != (len(problem.edges), 2):
        raise ProblemError("the arrays of a problem have lengths that disagree", "build problems by Problem.build or Problem.load")
    sizes = problem.sizes
    if len(sizes) == 0:
        raise ProblemError("the problem has no node", "give at least one node with one choice")
    _demand(sizes > 0, lambda i: f"node {i} has no choice", "every node needs at least one choice")
    _demand(problem.costs >= 0, lambda c: f"{_place(problem, c)} has the negative cost {problem.costs[c]}", "costs are non-negative")
    pairs = problem.edges
    inside = (pairs.min(axis=1, initial=0) >= 0) & (pairs.max(axis=1, initial=0) < len(sizes))
    _demand(
        inside, lambda e: f"edge {e} joins nodes {pairs[e, 0]} and {pairs[e, 1]}, but there are {len(sizes)} nodes", "count nodes from 0"
    )
    _demand(pairs[:, 0] != pairs[:, 1], lambda e: f"edge {e} joins node {pairs[e, 0]} to itself", "add its diagonal to the node's costs")
    wanted, found = sizes[pairs[:, 0]] * sizes[pairs[:, 1]], np.diff(problem.edge_ptr)
    _demand(
        wanted == found,
        lambda e: f"edge {e} ({pairs[e, 0]}, {pairs[e, 1]}) has {found[e]} costs, expected {wanted[e]}",
        "one cost for each pair of choices",
    )
    _demand(
        problem.edge_costs >= 0,
        lambda c: f"edge {np.searchsorted(problem.edge_ptr, c, 'right') - 1} has the negative cost {problem.edge_costs[c]}",
        "costs are non-negative",
    )
    usage, begin = problem.item_usage, problem.item_begin
    _demand(usage >= 0, lambda i: f"{_owner(problem, i)} has the negative usage {usage[i]}", "usages are non-negative")
    _demand(begin >= 0, lambda i: f"{_owner(problem, i)} has a life that begins at {begin[i]}", "times are non-negative")
    _check_sums(problem)


def _check_sums(problem: Problem) -> None:
    largest_usage = int(problem.item_usage.max(initial=0))
    if largest_usage * len(problem.item_usage) >= LARGEST_SUM and float(problem.item_usage.astype(float).sum()) >= LARGEST_SUM:
        raise TooLargeError("the memory usages are out of range: their sum reaches 2^62", "use a coarser unit of memory")
    total = 0
    for ptr, costs in ((problem.node_ptr, problem.costs), (problem.edge_ptr, problem.edge_costs)):
        if len(costs) == 0:
            continue
        if int(np.max(costs, where=costs < INFINITE, initial=0)) * (len(ptr) - 1) < LARGEST_SUM // 2:
            continue
        finite = np.where(costs >= INFINITE, 0, costs)
        total += sum(int(x) for x in np.maximum.reduceat(finite, ptr[:-1]))
    if total >= LARGEST_SUM:
        raise TooLargeError("the costs are out of range: their sum reaches 2^62", "use a coarser unit of cost")


def _demand(holds: Any, what: Callable[[int], str], hint: str) -> None:
    if not holds.all():
        raise ProblemError(what(int(np.argmin(holds))), hint)


def _place(problem: Problem, choice: int) -> str:
    node = int(np.searchsorted(problem.node_ptr, choice, "right")) - 1
    return f"choice {choice - int(problem.node_ptr[node])} of node {node}"


def _owner(problem: Problem, item: int) -> str:
    return _place(problem, int(np.searchsorted(problem.item_ptr, item, "right")) - 1)
