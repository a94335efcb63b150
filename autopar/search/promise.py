"""What a plan takes in sequence: its operators, second runs too, and its reshards, one after another.

A schedule says what a plan takes, and costs milliseconds. Of many changes of a plan those come first that leave less to be done at all: a
change that adds work or calls seldom helps a plan that fits.
"""

from __future__ import annotations

from autopar.schedule import AGAIN, Assignment
from autopar.search.space import Space
from autopar.sharding import ShardingSpec, Strategy


class Work:
    """What there is to be done for plans of one space: see the module. The integer problem has it as ``model.InSequence``."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._run: dict[tuple[str, int], tuple[Strategy, float]] = {}
        """By operator and identity of its strategy, which is held so that no other takes it."""
        self._moved: dict[tuple[str, int, int], tuple[ShardingSpec, ShardingSpec, float]] = {}
        """By tensor and identity of the specs it comes from and goes to."""

    def seconds(self, plan: Assignment) -> float:
        """Of all its operators and reshards. Equal reshards count each, and second runs also where nobody reads them."""
        total, specs = 0.0, dict(plan.inputs)
        for op in self.space.graph.ops:
            strategy = plan.strategies[op.name]
            key = op.name, id(strategy)
            if key not in self._run:
                self._run[key] = strategy, self._priced(op.name, strategy)
            again = op.name in plan.again
            total += self._run[key][1] * (1 + again)
            for name, spec in zip(op.outputs, strategy.outputs, strict=True):
                specs[name] = spec
                if again:
                    specs[name + AGAIN] = spec
        specs.update((layout.value, layout.spec) for layout in plan.layouts)
        return total + sum(self._reshard(layout.tensor, specs[layout.source], layout.spec) for layout in plan.layouts)

    def _priced(self, name: str, strategy: Strategy) -> float:
        choices = self.space.op_choices(self.space.graph.op[name])
        return float(choices.seconds[choices.strategies.index(strategy)])

    def _reshard(self, tensor: str, source: ShardingSpec, target: ShardingSpec) -> float:
        key = tensor, id(source), id(target)
        if key not in self._moved:
            table = self.space.reshard_table(self.space.graph.tensors[tensor], (source,), (target,))
            self._moved[key] = source, target, float(table[0, 0])
        return self._moved[key][2]
