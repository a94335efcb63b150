"""Times of operators as a GPU gives them, by the cost model itself and with noise: for the tests of fits and ``benchmarks/fitting.py``."""

from __future__ import annotations

import random
from collections.abc import Mapping

from autopar.cost_models import Efficiency, Hardware, Link, Machine, Mesh, Operator
from autopar.cost_models.fitting import OperatorTime

CLASSES: Mapping[str, Mapping[str, Efficiency]] = {
    "contraction": {"autopar.contract": Efficiency(0.72, 0.8, 6e-6)},
    "attention": {"autopar.attention": Efficiency(0.6, 0.7, 9e-6), "autopar.attention_backward": Efficiency(0.35, 0.7, 2.5e-5)},
    "convolution": {"autopar.convolution": Efficiency(0.45, 0.6, 1e-5)},
    "normalisation": {"autopar.batch_norm": Efficiency(1.0, 0.15, 1.2e-5), "aten.native_layer_norm": Efficiency(1.0, 0.6, 5e-6)},
    "pointwise": {name: Efficiency(1.0, 0.88, 3e-6) for name in ("aten.add", "aten.mul", "aten.gelu", "aten.silu")},
    "sort": {"aten.sort": Efficiency(1.0, 0.05, 4e-5)},
    "copy": {"autopar.copy": Efficiency(1.0, 0.5, 3e-6)},
}
"""Classes of operators, their operators, and what each reaches of the peaks."""
GPU = Hardware(
    "synthetic", 80e9, 3e12, 4e-6, (("bfloat16", 9e14), ("float32", 5e13)), 8, Link(0, 3e12), Link(0, 3e12),
    efficiencies=tuple(item for operators in CLASSES.values() for item in operators.items()),
)  # fmt: skip


def gpu_times(count: int, *, noise: float = 0.0, outliers: float = 0.0, seed: int = 0) -> list[OperatorTime]:
    """``count`` times in all, as many of each class; some bound by launch, some by arithmetic, some by memory traffic.

    Args:
        noise: standard deviation of a time's logarithm.
        outliers: share of the times that other work on the machine makes 2 to 20 times longer.
        seed: of the sizes, the noise and the outliers.
    """
    chance, machine, found = random.Random(seed), Machine(Mesh.parse("1"), GPU), []
    for number in range(count):
        family = list(CLASSES)[number % len(CLASSES)]
        name = chance.choice(list(CLASSES[family]))
        moved = 10 ** chance.uniform(3.5, 9.5)  # 3 KB to 3 GB
        intensity = 10 ** chance.uniform(0, 4) if family in ("contraction", "attention", "convolution") else chance.uniform(0, 2)
        dtype = chance.choice(("bfloat16", "float32"))
        seconds = machine.operator_seconds(Operator(name, family, dtype, (), (), moved * intensity, moved))
        seconds *= chance.lognormvariate(0.0, noise) * (chance.uniform(2, 20) if chance.random() < outliers else 1.0)
        found.append(OperatorTime(family, f"{name}.default", dtype, moved * intensity, moved, seconds))
    return found
