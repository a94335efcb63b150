"""Problems like a transformer's training step, for tests and benchmarks: equal layers forward and backward, near-ties, memory that lives
from a layer's forward to its backward.

A choice stands for how a tensor lies on the mesh. Neighbours that lie differently pay for the change, by the tensor's size. Choices that
replicate are a little cheaper to run and use more memory, so that a limit between the least and the greatest peak makes layers compete.
"""

from __future__ import annotations

import numpy as np

from autopar.solvers.arrays import Ints, offsets
from autopar.solvers.problem import Problem


def layered(layers: int, width: int, choices: int, tightness: float = 0.3, seed: int = 0) -> Problem:
    """``layers`` equal blocks of ``width`` forward and ``width`` backward nodes with about ``choices`` choices each.

    ``tightness`` 1 leaves just the least peak that this generator knows to be reachable, 0 the greatest.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(max(2, choices // 3), choices + 1, width)
    layouts = [random.integers(0, max(2, choices // 2), size) for size in sizes]
    share = [1.0 / 2 ** random.integers(0, 5, size) for size in sizes]
    volume = random.integers(20, 200, width) * 1000
    run = [(volume[k] * (1.0 + 0.5 * (1 - share[k]) + 0.02 * random.random(sizes[k]))).astype(np.int64) for k in range(width)]
    held = [(volume[k] * share[k]).astype(np.int64) + 1 for k in range(width)]
    links = [(k - 1, k) for k in range(1, width)] + [(int(random.integers(0, k - 1)), k) for k in range(2, width) if random.random() < 0.4]
    tables = {pair: _change(random, layouts, volume, *pair) for pair in {*links, (width - 1, 0)}}
    same = [_change(random, layouts, volume, k, k) for k in range(width)]
    count = 2 * layers * width
    slot = np.tile(np.arange(width), 2 * layers)
    edges, cells = _edges(layers, width, links, tables, same)
    begin, end = _lives(layers, width)
    ptr = offsets(sizes[slot])
    usage = np.concatenate([held[k] for k in slot])
    peaks = [_peak(begin, end, np.array([row(held[k]) for k in slot])) for row in (np.min, np.max)]
    node = np.repeat(np.arange(count), sizes[slot])
    return Problem(
        name=f"layered-{layers}x{width}x{choices}",
        node_ptr=ptr,
        costs=np.concatenate([run[k] for k in slot]),
        edges=edges,
        edge_ptr=offsets([len(cell) for cell in cells]),
        edge_costs=np.concatenate(cells) if cells else np.zeros(0, dtype=np.int64),
        item_ptr=np.arange(len(usage) + 1, dtype=np.int64),
        item_begin=begin[node],
        item_end=end[node],
        item_usage=usage,
        limit=int(peaks[0] + (1 - tightness) * (peaks[1] - peaks[0])),
    )


def _change(random: np.random.Generator, layouts: list[Ints], volume: Ints, u: int, v: int) -> Ints:
    """Cost of every pair of choices: nothing for equal layouts, else a part of the volume by the kind of change."""
    kinds = max(int(row.max()) for row in layouts) + 1
    price = random.choice([0.1, 0.25, 0.25, 0.5, 1.0], (kinds, kinds))
    np.fill_diagonal(price, 0.0)
    table: Ints = (price[layouts[u][:, None], layouts[v][None, :]] * volume[u]).astype(np.int64)
    return table


def _edges(
    layers: int, width: int, links: list[tuple[int, int]], tables: dict[tuple[int, int], Ints], same: list[Ints]
) -> tuple[Ints, list[Ints]]:
    """Forward links in each layer, layers in a chain, the mirror of it backward, and each forward node with its backward one."""
    pairs: list[tuple[int, int]] = []
    cells: list[Ints] = []
    for layer in range(layers):
        ahead, back = layer * width, (2 * layers - 1 - layer) * width
        for u, v in links:
            pairs += [(ahead + u, ahead + v), (back + width - 1 - v, back + width - 1 - u)]
            cells += [tables[u, v], _mirror(tables[u, v])]
        for k in range(width):
            pairs.append((ahead + k, back + width - 1 - k))
            cells.append(same[k])
        if layer + 1 < layers:
            pairs += [(ahead + width - 1, ahead + width), (back - 1, back)]
            cells += [tables[width - 1, 0], _mirror(tables[width - 1, 0])]
    # Backward nodes lie in mirrored order, but slots repeat forward: renumber the backward half so that its k-th node is slot k.
    renumber = np.arange(2 * layers * width)
    for block in range(layers, 2 * layers):
        renumber[block * width : (block + 1) * width] = renumber[block * width : (block + 1) * width][::-1].copy()
    return renumber[np.array(pairs, dtype=np.int64).reshape(-1, 2)], [cell.reshape(-1) for cell in cells]


def _mirror(table: Ints) -> Ints:
    return np.ascontiguousarray(table.T)


def _lives(layers: int, width: int) -> tuple[Ints, Ints]:
    """A forward node's memory lives until its backward node has run, a backward node's for a short while."""
    count = 2 * layers * width
    begin = np.arange(count)
    for block in range(layers, 2 * layers):
        begin[block * width : (block + 1) * width] = begin[block * width : (block + 1) * width][::-1].copy()
    end = begin + 3
    half = layers * width
    mirror = np.empty(half, dtype=np.int64)
    for layer in range(layers):
        for k in range(width):
            mirror[layer * width + k] = begin[(2 * layers - 1 - layer) * width + k] + 1
    end[:half] = mirror
    return begin.astype(np.int64), end.astype(np.int64)


def _peak(begin: Ints, end: Ints, usage: Ints) -> int:
    change = np.zeros(int(end.max()) + 1, dtype=np.int64)
    np.add.at(change, begin, usage)
    np.add.at(change, end, -usage)
    return int(np.cumsum(change).max())
