"""Reading and writing problems: the JSON of the contest on intra-operator parallelism, plain or gzipped.

``{"problem": {"name", "nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"}, "usage_limit"}}``. One life a node is
all that format knows; problems with more carry ``nodes.items[node][choice] = [[begin, end, usage], ...]`` in place of intervals
and usages.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import Arrays, Ints, offsets
from .errors import ProblemError


def from_document(document: Any) -> Arrays:
    """The arrays of a problem read as JSON. Raises ProblemError with the place of what is wrong."""
    body = _key(document, "problem", "", dict)
    nodes, edges = _key(body, "nodes", "problem.", dict), _key(body, "edges", "problem.", dict)
    costs, node_ptr = _rows(_key(nodes, "costs", "problem.nodes.", list), "problem.nodes.costs")
    pairs, pair_ptr = _rows(_key(edges, "nodes", "problem.edges.", list), "problem.edges.nodes")
    edge_costs, edge_ptr = _rows(_key(edges, "costs", "problem.edges.", list), "problem.edges.costs")
    if "items" in nodes:
        item_ptr, items = _listed_items(_key(nodes, "items", "problem.nodes.", list), node_ptr)
    else:
        lives, life_ptr = _rows(_key(nodes, "intervals", "problem.nodes.", list), "problem.nodes.intervals")
        usages, usage_ptr = _rows(_key(nodes, "usages", "problem.nodes.", list), "problem.nodes.usages")
        item_ptr, items = _interval_items(node_ptr, lives, life_ptr, usages, usage_ptr)
    name, limit = body.get("name", ""), body.get("usage_limit")
    if not isinstance(name, str):
        raise ProblemError("problem.name is not a string", 'write "name": "..." or leave it out')
    wrong = np.diff(pair_ptr) != 2
    if wrong.any():
        edge = int(np.argmax(wrong))
        text = f"problem.edges.nodes[{edge}] has {int(np.diff(pair_ptr)[edge])} nodes, expected 2"
        raise ProblemError(text, "an edge is a pair of nodes")
    if len(edge_ptr) != len(pair_ptr):
        text = f"problem.edges.costs has {len(edge_ptr) - 1} lists for {len(pair_ptr) - 1} edges"
        raise ProblemError(text, "one list of costs an edge")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not -(2**63) <= limit < 2**63):
        raise ProblemError("problem.usage_limit is not a 64-bit integer", "give an integer, or leave it out for no limit")
    return Arrays(name, node_ptr, costs, pairs.reshape(-1, 2), edge_ptr, edge_costs, item_ptr, *items, limit)


def _interval_items(node_ptr: Ints, lives: Ints, life_ptr: Ints, usages: Ints, usage_ptr: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
    """The items of choices that all live as long as their node: ``item_ptr`` and (begin, end, usage), those that use nothing left out."""
    count = len(node_ptr) - 1
    for field, ptr in (("intervals", life_ptr), ("usages", usage_ptr)):
        if len(ptr) != count + 1:
            raise ProblemError(f"problem.nodes.{field} has {len(ptr) - 1} lists for {count} nodes", "one list a node")
    for field, ptr, wanted in (("intervals", life_ptr, np.full(count, 2)), ("usages", usage_ptr, np.diff(node_ptr))):
        wrong = np.diff(ptr) != wanted
        if wrong.any():
            node = int(np.argmax(wrong))
            text = f"problem.nodes.{field}[{node}] has {int(np.diff(ptr)[node])} entries, expected {int(wanted[node])}"
            raise ProblemError(text, "an interval is [begin, end); a node has as many usages as costs")
    if (usages < 0).any():
        choice = int(np.argmax(usages < 0))
        node = int(np.searchsorted(node_ptr, choice, "right")) - 1
        text = f"problem.nodes.usages[{node}][{choice - int(node_ptr[node])}] is negative: {int(usages[choice])}"
        raise ProblemError(text, "usages are non-negative")
    owner = np.repeat(np.arange(count), np.diff(node_ptr))
    begin, end = lives[0::2][owner], lives[1::2][owner]
    kept = (usages > 0) & (end > begin)
    return offsets(kept.astype(np.int64)), (begin[kept], end[kept], usages[kept])


def _key(owner: Any, key: str, prefix: str, kind: type) -> Any:
    if not isinstance(owner, dict) or key not in owner:
        raise ProblemError(f"not a problem: {prefix}{key} is missing", 'a problem file holds {"problem": {"nodes": ..., "edges": ...}}')
    if not isinstance(owner[key], kind):
        raise ProblemError(f"{prefix}{key} is not {'a list' if kind is list else 'an object'}", "compare with the contest's example")
    return owner[key]


def _rows(rows: list[Any], place: str) -> tuple[Ints, Ints]:
    """A list of lists of integers as flat values and row offsets."""
    for at, row in enumerate(rows):
        if not isinstance(row, list):
            raise ProblemError(f"{place}[{at}] is not a list", "compare with the contest's example")
        if not set(map(type, row)) <= {int}:
            wrong = next(k for k, x in enumerate(row) if type(x) is not int)
            raise ProblemError(f"{place}[{at}][{wrong}] is not an integer: {json.dumps(row[wrong])[:40]}", "numbers are 64-bit integers")
    ptr = offsets([len(row) for row in rows])
    try:
        return np.fromiter((x for row in rows for x in row), dtype=np.int64, count=int(ptr[-1])), ptr
    except OverflowError as error:
        at, k = next((i, j) for i, row in enumerate(rows) for j, x in enumerate(row) if not -(2**63) <= x < 2**63)
        raise ProblemError(f"{place}[{at}][{k}] is out of range: {str(rows[at][k])[:40]}", "numbers are 64-bit integers") from error


def _listed_items(listed: list[Any], node_ptr: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
    counts: list[int] = []
    flat: list[list[int]] = []
    if len(listed) != len(node_ptr) - 1:
        raise ProblemError(f"problem.nodes.items has {len(listed)} lists for {len(node_ptr) - 1} nodes", "one list a node")
    for node, choices in enumerate(listed):
        place = f"problem.nodes.items[{node}]"
        if not isinstance(choices, list) or len(choices) != node_ptr[node + 1] - node_ptr[node]:
            raise ProblemError(f"{place} is not a list of {node_ptr[node + 1] - node_ptr[node]} lists", "one list of items a choice")
        for k, items in enumerate(choices):
            if not isinstance(items, list):
                raise ProblemError(f"{place}[{k}] is not a list", "one list of items a choice")
            values, ptr = _rows(items, f"{place}[{k}]")
            if (np.diff(ptr) != 3).any():
                raise ProblemError(f"{place}[{k}] has an item without 3 numbers", "an item is [begin, end, usage]")
            counts.append(len(items))
            flat.extend(values.reshape(-1, 3).tolist())
    columns = np.array(flat, dtype=np.int64).reshape(-1, 3).T
    return offsets(counts), (columns[0].copy(), columns[1].copy(), columns[2].copy())


def write(problem: Arrays, path: str | PathLike[str]) -> None:
    """Write the problem; ``read`` gives arrays of the same answers back."""
    cost_rows = _lists(problem.costs, problem.node_ptr)
    nodes: dict[str, Any] = {"costs": cost_rows} | _memory(problem)
    body: dict[str, Any] = {
        "name": problem.name,
        "nodes": nodes,
        "edges": {"nodes": problem.edges.tolist(), "costs": _lists(problem.edge_costs, problem.edge_ptr)},
    }
    if problem.limit is not None:
        body["usage_limit"] = problem.limit
    text = json.dumps({"problem": body}, separators=(",", ":")).encode()
    Path(path).write_bytes(gzip.compress(text, 6, mtime=0) if fspath(path).endswith(".gz") else text)


def _lists(values: Ints, ptr: Ints) -> list[list[int]]:
    flat, at = values.tolist(), ptr.tolist()
    return [flat[a:b] for a, b in pairwise(at)]


def _memory(problem: Arrays) -> dict[str, Any]:
    """Intervals and usages where every node has one life, else the key ``items``."""
    items = _lists(np.arange(len(problem.item_usage)), problem.item_ptr)
    begin, end, usage = problem.item_begin.tolist(), problem.item_end.tolist(), problem.item_usage.tolist()
    choices = [items[a:b] for a, b in pairwise(problem.node_ptr.tolist())]
    lives = [{(begin[i], end[i]) for row in node for i in row} for node in choices]
    if all(len(life) <= 1 for life in lives) and all(len(row) <= 1 for row in items):
        intervals = [next(iter(life), (0, 0)) for life in lives]
        return {"intervals": intervals, "usages": [[usage[row[0]] if row else 0 for row in node] for node in choices]}
    return {"items": [[[[begin[i], end[i], usage[i]] for i in row] for row in node] for node in choices]}
