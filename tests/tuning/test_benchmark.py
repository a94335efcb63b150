"""``benchmarks/tune.py``: models by hand are the models, and how the tuned plan is held against the fastest."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from autopar.verify.launch import run_ranks
from benchmarks import tune


@pytest.mark.parametrize("name", list(tune.MODELS))
def test_tensor_parallelism_by_hand_computes_the_same(name: str) -> None:
    """A race of models that differ would say nothing."""
    small = {"batch": 2, "seq": 4, "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "hidden": 32, "vocab": 32}
    small |= {"inputs": 16, "outputs": 8}
    known = tune.MODELS[name]
    model = tune.Model(known.name, known.tensor_parallel, {**known.sizes, **{key: small[key] for key in known.sizes if key in small}})

    def rank_main(rank: int) -> tuple[float, float]:
        plain, split = model.build(), model.tensor_parallel(model.build())
        return plain.model(*plain.args).item(), split.model(*split.inputs).item()

    for plain, split in run_ranks(rank_main, 2):
        assert split == pytest.approx(plain, rel=1e-5)


def test_the_tuned_plan_is_held_against_the_fastest_by_hand() -> None:
    def row(name: str, *seconds: float) -> dict[str, Any]:
        return {"name": name, "seconds": list(seconds), "median_seconds": median(seconds), "minimum_seconds": min(seconds)}

    rows = [row("ddp", 2.0, 2.0, 2.0), row("free", 1.0, 1.0, 9.0), row("tuned 1", 1.01, 1.1, 9.09), row("tuned 2", 0.5, 0.5, 0.5)]
    fastest, ratio, of_minima = tune.to_fastest(rows, "tuned 1")
    assert (fastest, ratio, of_minima) == ("free", pytest.approx(1.01), pytest.approx(1.01))
