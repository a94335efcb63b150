"""What a plan's list will be made of, without the list: what it takes in sequence, and whether another plan's would take the same.

A schedule says what a plan takes, and costs milliseconds. Of many changes of a plan those come first that leave less to be done at all: a
change that adds work or calls seldom helps a plan that fits. And of those that come to the same one is enough: on a mesh of equal axes a
tensor split over one or the other, or a strategy of which nobody sees a difference, make lists that take the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from autopar import pricing
from autopar.schedule import AGAIN, Assignment, Collective, Layout
from autopar.schedule.ordering import Prices, parts_of
from autopar.search.space import Space
from autopar.sharding import ShardingSpec, Strategy


class Known(NamedTuple):
    """Of an operator in a strategy, or a reshard between two specs: seconds, and a number that those have together which look alike to a
    list. ``held`` are the strategy or the specs, so that no other takes their identity."""

    held: tuple[object, ...]
    seconds: float
    code: int


class Done(NamedTuple):
    """What there is to be done for a plan.

    Args:
        seconds: of all its operators and reshards. Equal reshards count each, and second runs also where nobody reads them.
        code: equal where lists take the same, instruction by instruction, but for names.
    """

    seconds: float
    code: int


class Work:
    """What there is to be done for plans of one space: see the module. The integer problem has the seconds as ``model.InSequence``."""

    def __init__(self, space: Space) -> None:
        self.space, self.graph, self.machine = space, space.graph, space.machine
        self.prices = Prices(space.graph, space.machine)
        self._run: dict[tuple[str, int], Known] = {}
        """By operator and identity of its strategy."""
        self._moved: dict[tuple[str, int, int], Known] = {}
        """By tensor and identity of the specs it comes from and goes to."""
        self._placed: dict[tuple[str, int], Known] = {}
        """By graph input and identity of its spec."""
        self._codes: dict[Hashable, int] = {}
        self._asked: set[Hashable] = set()
        self._last: tuple[Assignment, Done] | None = None

    def seconds(self, plan: Assignment) -> float:
        """What it takes in sequence: see ``Done``."""
        return self.done(plan).seconds

    def is_new(self, plan: Assignment, under: Hashable) -> bool:
        """Whether no plan that takes the same was asked for under the same before."""
        key = self.done(plan).code, under
        if key in self._asked:
            return False
        self._asked.add(key)
        return True

    def done(self, plan: Assignment) -> Done:
        """All there is to be done."""
        if self._last is None or self._last[0] is not plan:
            self._last = plan, self._done(plan)
        return self._last[1]

    def _done(self, plan: Assignment) -> Done:
        total, specs, codes = 0.0, dict(plan.inputs), list[Hashable]()
        for name, spec in plan.inputs.items():
            codes.append(self._input(name, spec).code)
        for op in self.graph.ops:
            strategy = plan.strategies[op.name]
            known, again = self._operator(op.name, strategy), op.name in plan.again
            total += known.seconds * (1 + again)
            codes.append(known.code)
            for name, spec in zip(op.outputs, strategy.outputs, strict=True):
                specs[name] = spec
                if again:
                    specs[name + AGAIN] = spec
        specs.update((layout.value, layout.spec) for layout in plan.layouts)
        known_as, made = dict[str, int](), dict[Hashable, list[ShardingSpec]]()
        for layout in plan.layouts:
            known = self._reshard(layout, specs[layout.source])
            total += known.seconds
            alike = made.setdefault(looks := (known_as.get(layout.source, layout.source), layout.half, known.code), [])
            if layout.spec not in alike:
                alike.append(layout.spec)
            known_as[layout.value] = self._code((looks, alike.index(layout.spec)))
        reshards = frozenset((known_as[layout.value], layout.before) for layout in plan.layouts)
        reads = frozenset((place, known_as.get(value, value)) for place, value in (plan.reads or {}).items())
        return Done(total, self._code((tuple(codes), reshards, reads, plan.again)))

    def _code(self, looks: Hashable) -> int:
        return self._codes.setdefault(looks, len(self._codes))

    def _operator(self, name: str, strategy: Strategy) -> Known:
        key = name, id(strategy)
        if key not in self._run:
            priced = self.prices.run(self.graph.op[name], strategy)
            self._run[key] = Known((strategy,), priced.seconds, self._code((priced, strategy.workspace)))
        return self._run[key]

    def _input(self, name: str, spec: ShardingSpec) -> Known:
        key = name, id(spec)
        if key not in self._placed:
            size = pricing.local_bytes(self.graph.tensors[name], spec, self.machine)
            self._placed[key] = Known((spec,), 0.0, self._code(size))
        return self._placed[key]

    def _reshard(self, layout: Layout, source: ShardingSpec) -> Known:
        key = layout.tensor, id(source), id(layout.spec)
        if key not in self._moved:
            tensor = self.graph.tensors[layout.tensor]
            route = self.prices.route(tensor, source, layout.spec)
            seconds, looks = float(self.space.reshard_table(tensor, (source,), (layout.spec,))[0, 0]), list[Hashable]()
            for part, leg in zip(parts_of(layout, source, tensor, route), route, strict=True):
                sizes = part.source_bytes, part.target_bytes, part.cuts_inside, part.joins_inside, part.filled
                taken = self.prices.taken(Collective(part.target, (part,)), leg) if part.step.is_collective else None
                looks.append((part.step.kind, part.step.axes, part.step.reduction, sizes, taken))
            self._moved[key] = Known((source, layout.spec), seconds, self._code(tuple(looks)))
        return self._moved[key]
