"""Pareto: the plans under a ladder of memory limits."""

from __future__ import annotations

import json
from dataclasses import dataclass

from autopar.display import render
from autopar.plan import Plan


@dataclass(frozen=True)
class Pareto:
    """Plans by the memory they were allowed, the least first. A plan that fits in less stands again where nothing better was found."""

    plans: tuple[Plan, ...]

    def to_json(self) -> str:
        """One row a limit, with the plan's figures."""
        rows = [
            {
                "memory_limit_bytes_per_rank": plan.memory_limit_bytes_per_rank, "objective_seconds": plan.objective.seconds,
                "bound_seconds": plan.objective.bound_seconds, "gap": plan.objective.gap, "status": plan.objective.status,
                "peak_memory_bytes_per_rank": plan.predicted.peak_memory_bytes_per_rank, "microbatches": plan.microbatches,
                "recomputed_operators": len(plan.recomputed), "mesh": plan.mesh,
            }
            for plan in self.plans
        ]  # fmt: skip
        target = self.plans[0].model.target
        return json.dumps({"schema": "autopar.pareto/1", "target": target, "rows": rows}, indent=1) + "\n"

    def __str__(self) -> str:
        return render("Pareto.__str__", self)

    def _repr_html_(self) -> str:
        return render("Pareto._repr_html_", self)
