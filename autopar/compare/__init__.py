"""explain: why one thing in a plan is as it is. diff: the changes between two plans. Both in words, from the plans alone.

explanation     the lines about one thing
changes         the lines about two plans
pipeline_changes  lines about a pipeline's plan and another plan
raw_rows        the compared fields of rows, without parsing them
axes            meshes that are the same but for the order or the names of their axes
simulated_step  when each instruction happens
words           names of rows in sentences
"""

from __future__ import annotations

from autopar.compare.changes import changes
from autopar.compare.pipeline_changes import pipeline_changes
from autopar.pipeline_plan import PipelinePlan
from autopar.plan import Plan
from autopar.unread import collector_paused

__all__ = ["UNCHANGED", "diff", "explain"]

UNCHANGED = "the plans choose the same"


def explain(plan: Plan, name: str) -> tuple[str, ...]:
    """Lines that say what ``name`` is, where it comes from, who reads it in which spec, and what the collectives around it cost and delay.

    Args:
        name: a parameter, buffer, input (``input:NAME``), output (``output:NAME``), operator, tensor, reshard or collective.

    Raises:
        UsageError: the plan has nothing of that name; names the nearest. FileError: a schedule that cannot be simulated.
    """
    from autopar.compare.explanation import Explanation  # for start-up time: diff needs no simulation

    return tuple(Explanation(plan).tell(name))


def diff(first: Plan | PipelinePlan, second: Plan | PipelinePlan) -> tuple[str, ...]:
    """Lines that say what changed from ``first`` to ``second``; empty when both choose the same at the same cost."""
    with collector_paused():
        if isinstance(first, Plan) and isinstance(second, Plan):
            return tuple(changes(first, second))
        return tuple(pipeline_changes(first, second))
