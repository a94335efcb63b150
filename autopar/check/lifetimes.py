"""How much memory a rank holds, from the span of the list in which each storage lives.

A storage begins where its first value comes to be and ends at the free of its last one; views share it, and so do results that are written
over one of its values, and the values that a call leaves in its buffer. What came in or leaves has no end. Buffers of a call that are not
its targets' live from its start to its wait, what an operator holds beside its results while it runs. A sum over microbatches is there
from the beginning of the last of them, which holds most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from autopar.check.order import Order
from autopar.rules import is_alias


@dataclass
class Lifetimes:
    """Storages with their spans.

    Args:
        owner: the storage of each value.
        size: its bytes.
        spans: the first and last place at which it lives.
        staged: the same and the bytes of what is no value, by call or operator.
        taken: at each place, the bytes that the instruction takes; of a free, gives back.
    """

    order: Order
    owner: dict[str, str] = field(default_factory=dict)
    size: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    staged: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own()
        order, end = self.order, len(self.order.rows)
        values: dict[str, list[str]] = {}
        for value, storage in self.owner.items():
            values.setdefault(storage, []).append(value)
        for storage, members in values.items():
            begin = min(order.coming[value] if self._from_its_start(value) else order.there[value] for value in members)
            begin = 0 if storage in order.walk.sums else begin
            last = max(order.going.get(value, end) for value in members)
            self.spans[storage] = max(begin, 0), last
            if last < end:
                self.taken[last] = self.taken.get(last, 0) + self.size[storage]
        for name, call in order.calls.items():
            self.staged[name] = order.starts[name], order.waits[name], call.buffers
            self.taken[order.starts[name]] = call.begins_with
            self.taken[order.waits[name]] = call.taken if call.copies_out else 0

    def peak(self, passing: int) -> Mapping[str, int]:
        """Bytes at the peak by what they are, without the optimizer's states. At equal peaks the first counts.

        Args:
            passing: bytes of states that are on the device for the optimizer's step alone, which stands behind the list.
        """
        plan, order = self.order.walk.plan, self.order
        resting = {spec.tensor for kind, _, spec in plan.entering if kind in ("parameter", "buffer", "constant")}
        gradients = {self.owner[row.value or row.tensor] for kind, _, row in plan.leaving if kind == "gradient"}
        gradients = (gradients | set(self.order.walk.sums)) - resting
        end = len(order.rows)
        changes = [[0, 0, 0] for _ in range(end + 2)]
        for storage, (begin, last) in self.spans.items():
            if storage not in resting:
                kind = 1 if storage in gradients else 0
                changes[begin][kind] += self.size[storage]
                changes[last + 1][kind] -= self.size[storage]
        for begin, last, size in self.staged.values():
            changes[begin][2] += size
            changes[last + 1][2] -= size
        changes[end][2] += passing
        held, best = [0, 0, 0], [-1, 0, 0]
        for place in range(end + 1):
            held = [now + change for now, change in zip(held, changes[place], strict=True)]
            if sum(held) > sum(best):
                best = held
        return {
            "parameters": sum(self.size[storage] for storage in resting), "gradients": best[1], "activations": best[0],
            "temporaries": best[2],
        }  # fmt: skip

    def host_peak(self) -> int:
        """Most bytes on the host at one time: a value is there from the start of its copy to its free."""
        order, changes = self.order, dict[int, int]()
        for value in order.walk.hosted:
            size = order.walk.local_bytes(value)
            begin, end = order.coming[value], order.going.get(value, len(order.rows))
            changes[begin] = changes.get(begin, 0) + size
            changes[end] = changes.get(end, 0) - size
        held = [0, *accumulate(changes[place] for place in sorted(changes))]
        return max(held)

    def _from_its_start(self, value: str) -> bool:
        """Whether a call's target is there from its start on: it lies in the call's own buffer, or is its source, which may be arriving."""
        return value in self.order.coming and (self.owner[value] != value)

    def _own(self) -> None:
        """Whose memory each value lies in, down the list."""
        walk, order = self.order.walk, self.order
        for _, _, spec in walk.plan.entering:
            self.owner[spec.tensor] = spec.tensor
            self.size[spec.tensor] = walk.storage_bytes(spec.tensor)
        for total in walk.sums:
            self._add(total, total, walk.local_bytes(total))
        ops = {op.name: op for op in walk.ops}
        cuts = {leg.target: leg for made in walk.legs.values() for leg in made if not leg.is_collective}
        for place, row in enumerate(order.rows):
            if row.kind == "run":
                shared = row.over or (row.reads[0] if row.reads and is_alias(ops[row.of]) and row.of not in walk.orders.apart else None)
                for value in row.writes:
                    self._add(value, self.owner[shared] if shared else value, walk.local_bytes(value))
                self.taken[place] = 0 if shared else sum(map(walk.local_bytes, row.writes))
                self.staged[f"inside {row.of}"] = place, place, walk.strategies[row.of].workspace + walk.orders.copied[row.of]
            elif row.kind == "slice":
                leg = cuts[row.writes[0]]
                self._add(leg.target, self.owner[leg.source] if leg.step is None else leg.target, leg.taken)
                self.taken[place] = 0 if leg.step is None else leg.taken
            elif row.kind == "start":
                call = order.calls[row.of]
                for leg in call.legs:
                    if call.in_place:
                        self._add(leg.target, self.owner[leg.source], leg.taken)
                    else:
                        buffered = (leg.target, leg.taken) if call.copies_out else (f"call {row.of}", call.taken)
                        self._add(leg.target, *buffered)

    def _add(self, value: str, storage: str, size: int) -> None:
        self.owner[value] = storage
        self.size.setdefault(storage, size)
