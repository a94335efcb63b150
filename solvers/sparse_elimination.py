"""Exact elimination in sparse tables: messages say what each row costs beyond the bound, and rows beyond a target are left out.

Messages move costs between nodes and tables until nearly every table has entries of zero and none below. The constant beside them is the
bound. Then answers with a row of joined tables cost at least the sum of its entries and of the cheapest rows of other tables that agree
with it. Where that exceeds the room between bound and target the row is in no answer below the target. Dense elimination needs tables of
all combinations, 10^10 entries for one layer of ``zoo:llama3`` on 2x4 under the communication model; 0.7 million rows are left of them.

The method is bucket elimination (Dechter, 1999) with the pruning of branch and bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import Floats, Ints
from .incumbent import Incumbent
from .kernels import add_least, join_rows, least_rows
from .kernels.constants import FAR
from .message_search import MessageSearch
from .pairwise import Pairs
from .settings import SETTINGS

KEY_BITS = 62
"""Bits of a number that stands for choices of several nodes: it is an int64."""


class Table(NamedTuple):
    """Rows of choices of some nodes, and what each costs; other rows are in no answer below the target."""

    nodes: tuple[int, ...]
    rows: NDArray[np.int16]  # [nodes, rows]
    costs: Floats  # [rows]


class Eliminated(NamedTuple):
    """A node that is eliminated, and its best choice for each row of choices of its neighbours."""

    node: int
    neighbours: tuple[int, ...]
    rows: NDArray[np.int16]  # [neighbours, rows]
    choices: NDArray[np.int16]  # [rows]


class TooMuchWorkError(Exception):
    """The work is spent."""


def eliminate(incumbent: Incumbent, search: MessageSearch, most_rows: int) -> bool:
    """Improve answer and bound by one elimination of a core without memory limits. False where it was too much work.

    Args:
        most_rows: rows that a table may have.
    """
    core, target = search.core, float(incumbent.objective or 0)
    constant, tables = tables_of(search.graph, search.costs, search.dual.best_messages, target - core.constant - search.dual.bound)
    constant += core.constant
    elimination = SparseElimination(np.diff(core.node_ptr), tables, target - constant, most_rows)
    choices, ends = None, True
    try:
        choices = elimination.run(SETTINGS.exact_share * incumbent.work_left)
    except TooMuchWorkError:
        ends = False
    incumbent.spend(elimination.work)
    if choices is not None:
        incumbent.offer(core.expand(choices))
    bound = constant + elimination.bound
    incumbent.prove(bound - SETTINGS.safety * abs(bound) * core.num_nodes)
    return ends


def tables_of(graph: Pairs, theta: Floats, messages: Floats, room: float) -> tuple[float, list[Table]]:
    """The bound that the messages prove, and tables of what pairs and choices cost beyond it, below ``room``.

    As ``certify`` counts: a node's belief pays in equal shares for its edges to higher nodes.
    """
    nodes, bound, tables = len(graph.split), 0.0, list[Table]()
    beliefs = np.split(theta.copy(), graph.ptr[1:-1])
    for edge, (low, high) in enumerate(zip(graph.low.tolist(), graph.high.tolist(), strict=True)):
        beliefs[low] += messages[graph.to_low[edge] :][: len(beliefs[low])]
        beliefs[high] += messages[graph.to_high[edge] :][: len(beliefs[high])]
    ahead = np.bincount(graph.low, minlength=nodes)
    for node, belief in enumerate(beliefs):
        bound += float(belief.min())
        belief -= belief.min()
        if ahead[node] == 0:
            open_ = np.flatnonzero(belief < room)
            tables.append(Table((node,), open_[None].astype(np.int16), belief[open_]))
    for edge, (low, high) in enumerate(zip(graph.low.tolist(), graph.high.tolist(), strict=True)):
        shape = len(beliefs[low]), len(beliefs[high])
        whole = graph.table[graph.at[edge] : graph.at[edge + 1]].reshape(shape)
        to_low, to_high = messages[graph.to_low[edge] :][: shape[0]], messages[graph.to_high[edge] :][: shape[1]]
        costs = whole - to_high + (beliefs[low] / ahead[low] - to_low)[:, None]
        costs[(whole >= FAR / 2) | (beliefs[low] >= FAR / 2)[:, None] | (beliefs[high] >= FAR / 2)] = FAR
        least = float(costs.min())
        bound += least
        costs -= least
        rows = np.nonzero(costs < room)
        tables.append(Table((low, high), np.stack(rows).astype(np.int16), costs[rows]))
    return bound, tables


class SparseElimination:
    """One elimination of all nodes.

    Args:
        sizes: number of choices of each node.
        tables: their costs are at least zero.
        room: answers whose tables sum up to this or more are not looked for.
        most_rows: rows of a table. Of larger ones the cheapest are kept, and ``bound`` is at most what an answer with others costs.
    """

    def __init__(self, sizes: Ints, tables: Sequence[Table], room: float, most_rows: int) -> None:
        self.sizes, self.room, self.least, self.work = sizes.tolist(), room, 0.0, 0.0
        self.logs = np.log2(sizes).tolist()
        self.dropped = room
        """What answers with rows that were dropped cost at least."""
        self.tables: list[set[int]] = [set() for _ in self.sizes]
        """Numbers of the tables of each node."""
        self.all = dict[int, Table]()
        self.count = 0
        for table in tables:
            self._add(table)
        self.given = self.count
        """Tables with a lower number were given: messages leave a row of zero for nearly every choice of one of their nodes."""
        self.pairs = np.empty(most_rows, dtype=np.int64), np.empty(most_rows, dtype=np.int64)
        most_keys = max([most_rows, *(len(table.costs) for table in tables)])
        self.slots, self.kept = np.empty(1 << (2 * most_keys - 1).bit_length(), dtype=np.int64), np.empty(most_keys, dtype=np.int64)

    @property
    def bound(self) -> float:
        """What every answer costs at least."""
        return min(self.least, self.dropped)

    def run(self, most: float) -> Ints | None:
        """The choices of least cost among the rows kept, None where these have none below ``room``.

        Args:
            most: work that may be spent.

        Raises:
            TooMuchWorkError: the work is spent.
        """
        done, weights = list[Eliminated](), {node: self._weight(node) for node in range(len(self.sizes))}
        while weights:
            node = min(weights, key=lambda one: weights[one])
            del weights[node]
            scope = self._scope(node)
            numbers = sorted(number for number in self._numbers(scope) if scope.issuperset(self.all[number].nodes))
            joined = self._joined(node, numbers)
            if len(joined.costs) == 0:
                self.least = self.room
                return None
            for number in numbers:
                self._remove(number)
            nodes, kept = self._cheapest(node, joined)
            least = float(joined.costs[kept].min())
            self.least += least
            rows = joined.rows[[joined.nodes.index(other) for other in nodes]][:, kept]
            rest = Table(nodes, rows, joined.costs[kept] - least)
            wanted = self._with_others(rest, self._numbers(nodes)) < self.room - self.least
            done.append(Eliminated(node, nodes, rows[:, wanted], joined.rows[joined.nodes.index(node)][kept[wanted]]))
            self._add(Table(nodes, rows[:, wanted], rest.costs[wanted]))
            for other in scope - {node}:
                weights[other] = self._weight(other)
            if self.work > most:
                raise TooMuchWorkError
        choices = np.zeros(len(self.sizes), dtype=np.int64)
        for one in reversed(done):
            here = np.ones(len(one.choices), dtype=bool)
            for row, node in zip(one.rows, one.neighbours, strict=True):
                here &= row == choices[node]
            choices[one.node] = one.choices[np.flatnonzero(here)[0]]
        return choices

    def _add(self, table: Table) -> None:
        if table.nodes:
            for node in table.nodes:
                self.tables[node].add(self.count)
            self.all[self.count] = table
            self.count += 1

    def _remove(self, number: int) -> None:
        for node in self.all.pop(number).nodes:
            self.tables[node].discard(number)

    def _weight(self, node: int) -> float:
        """Combinations of the node and its neighbours, as a logarithm."""
        return math.fsum(self.logs[other] for other in self._scope(node))

    def _scope(self, node: int) -> set[int]:
        """The node and its neighbours."""
        return {node}.union(*(self.all[number].nodes for number in self.tables[node]))

    def _numbers(self, nodes: Iterable[int]) -> set[int]:
        """Numbers of the tables of nodes."""
        return set[int]().union(*(self.tables[node] for node in nodes))

    def _joined(self, node: int, numbers: Sequence[int]) -> Table:
        """The numbered tables as one, joined in an order in which each has as many nodes as possible in common with those before."""
        if not numbers:
            return Table((node,), np.arange(self.sizes[node], dtype=np.int16)[None], np.zeros(self.sizes[node]))
        left = sorted(numbers, key=lambda number: len(self.all[number].costs))
        used = {left[0]}
        joined = self.all[left.pop(0)]
        while left:
            known = set(joined.nodes)
            shares = [len(known & set(self.all[number].nodes)) / len(self.all[number].nodes) for number in left]
            number = left.pop(max(range(len(left)), key=lambda place: (shares[place], -place)))
            used.add(number)
            other = self.all[number]
            near = self._numbers(joined.nodes) - used
            far = self._numbers(other.nodes) - near - used
            joined = self._join(joined, self._with_others(joined, near), other, self._with_others(other, far))
        return joined

    def _with_others(self, table: Table, numbers: Iterable[int]) -> Floats:
        """What answers with each row of a table cost at least: the row, and the cheapest that agrees with it of each table made since."""
        total = table.costs.copy()
        for number in sorted(number for number in numbers if number >= self.given):
            other = self.all[number]
            common = [node for node in table.nodes if node in other.nodes]
            mine, keys = self._keys(common, table, other)
            slots = self.slots[: 1 << (2 * len(keys) - 1).bit_length()]
            add_least(total, mine, keys, other.costs, slots, self.kept)
            self.work += SETTINGS.lookup_work * (len(total) + len(keys))
        return total

    def _join(self, one: Table, one_least: Floats, other: Table, other_least: Floats) -> Table:
        """The rows of both that agree in common nodes, where answers with them may cost less than the room.

        Args:
            one_least, other_least: what answers with a row cost at least, each table's share. The sum of both holds for a pair.
        """
        common = [node for node in one.nodes if node in other.nodes]
        mine, its = self._keys(common, one, other)
        order = np.lexsort((other_least, its))
        starts = np.flatnonzero(np.diff(its[order], prepend=-1))
        keys = its[order][starts]
        place = np.minimum(np.searchsorted(keys, mine), len(keys) - 1) if len(keys) else np.zeros(len(mine), dtype=np.int64)
        group = np.where(keys[place] == mine, place, -1) if len(keys) else np.full(len(mine), -1)
        ptr = np.append(starts, len(order))
        count = self._pair(group, one_least, ptr, other_least[order])
        self.work += SETTINGS.row_work * (len(mine) + len(its) + count)
        left, right = self.pairs[0][:count], order[self.pairs[1][:count]]
        new = [place for place, node in enumerate(other.nodes) if node not in one.nodes]
        rows = np.concatenate([one.rows[:, left], other.rows[new][:, right]])
        return Table((*one.nodes, *(other.nodes[place] for place in new)), rows, one.costs[left] + other.costs[right])

    def _pair(self, group: Ints, one: Floats, ptr: Ints, other: Floats) -> int:
        """Writes to ``pairs`` what may be joined, or the cheapest of it, and returns how many these are."""
        spare, most = self.room - self.least, len(self.pairs[0])
        count, least = join_rows(group, one, ptr, other, spare, *self.pairs), SETTINGS.least_spare * spare
        while count < 0 and spare > least:
            spare *= SETTINGS.spare_cut
            count = join_rows(group, one, ptr, other, spare, *self.pairs)
            self.dropped = min(self.dropped, self.least + spare)
            self.work += SETTINGS.entry_work * most
        if count < 0:
            self.dropped = min(self.dropped, self.least)
        return count if count >= 0 else most

    def _keys(self, nodes: Sequence[int], *tables: Table) -> list[Ints]:
        """A number for each row of each table that is the same where the choices of ``nodes`` are."""
        keys, bits = [np.zeros(len(table.costs), dtype=np.int64) for table in tables], 0.0
        for node in nodes:
            if bits + self.logs[node] >= KEY_BITS:
                numbers = np.unique(np.concatenate(keys), return_inverse=True)[1]
                keys = np.split(numbers, np.cumsum([len(key) for key in keys])[:-1])
                bits = math.log2(len(numbers) + 1)
            keys = [key * self.sizes[node] + table.rows[table.nodes.index(node)] for key, table in zip(keys, tables, strict=True)]
            bits += self.logs[node]
        return keys

    def _cheapest(self, node: int, joined: Table) -> tuple[tuple[int, ...], Ints]:
        """The other nodes of a table, and the number of the cheapest row for each combination of their choices."""
        nodes = tuple(other for other in joined.nodes if other != node)
        kept = np.empty(len(joined.costs), dtype=np.int64)
        slots = self.slots[: 1 << (2 * len(kept) - 1).bit_length()]
        return nodes, kept[: least_rows(self._keys(nodes, joined)[0], joined.costs, slots, kept)]
