"""explain on a pipeline's plan: one thing in the stages that hold it; and the cut, with what one layer more on each side would cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from autopar.compare import explain
from autopar.errors import UsageError
from autopar.graph import layer_of
from autopar.pipeline.clock import PipelineTimes, StageCosts, find_stage_needs, recorded_costs, recorded_stages, time_pipeline
from autopar.pipeline.order_search import choose_order
from autopar.pipeline_plan import PipelinePlan

CUT = "cut"
"""The name by which the cut itself is asked for."""


@dataclass(frozen=True)
class Moved:
    """A pipeline with one layer moved to a neighbour.

    Args:
        source, target: the stages that lose and gain it.
        seconds: of the step then, with the best orders found; None where nothing fits in memory.
    """

    source: int
    target: int
    seconds: float | None


def explain_pipeline(plan: PipelinePlan, name: str) -> tuple[str, ...]:
    """Lines about ``name`` in each stage that has it, or about the cut for ``cut``.

    Raises:
        UsageError: no stage has anything of that name. FileError: a schedule that cannot be simulated.
    """
    if name == CUT:
        return tuple(_explain_cut(plan))
    found, missing = list[str](), list[UsageError]()
    for number, stage in enumerate(plan.stages):
        try:
            lines = explain(stage.plan, name)
        except UsageError as error:
            missing.append(error)
            continue
        found += [f"stage {number} of {len(plan.stages)}, from {stage.first_module or 'the beginning'}:", *(f"  {line}" for line in lines)]
    if not found:
        raise UsageError(f"no stage has anything called {name}", f"{missing[0].hint}; {CUT} explains where the stages begin")
    return tuple(found)


def layer_counts(plan: PipelinePlan) -> tuple[int, ...]:
    """Numbers of layers with parameters of each stage."""
    return tuple(len({layer_of(name) for name in stage.plan.parameters} - {""}) for stage in plan.stages)


def move_layers(plan: PipelinePlan) -> tuple[Moved, ...]:
    """What the step would be with one layer moved over each boundary, in both directions.

    A layer is as long and as large as the mean of the stage whose layers are the shortest: embedding and head are in others.
    """
    counts, costs = layer_counts(plan), recorded_costs(plan)
    inner = min((stage for stage, count in enumerate(counts) if count), key=lambda stage: costs[stage].busy / counts[stage], default=None)
    found = []
    for stage in range(len(costs) - 1):
        for source, target in ((stage + 1, stage), (stage, stage + 1)):
            if inner is not None and counts[source] > 1:
                layer, changed = costs[inner].scaled(1 / counts[inner]), list(costs)
                changed[source], changed[target] = _added(costs[source], layer, -1), _added(costs[target], layer, 1)
                times = _time(plan, changed)
                found.append(Moved(source, target, None if times is None else times.step))
    return tuple(found)


def _explain_cut(plan: PipelinePlan) -> Iterator[str]:
    counts, step, m = layer_counts(plan), plan.objective.seconds, plan.microbatches
    yield f"{len(plan.stages)} stages of {', '.join(map(str, counts))} layers, {m} microbatches, {_ms(step)} a step"
    costs = recorded_costs(plan)
    needs = find_stage_needs(costs, m, plan.transfer_seconds, plan.positions)
    for number, (stage, count, cost, need) in enumerate(zip(plan.stages, counts, costs, needs, strict=True)):
        words = f"begins after {_ms(need.before)}, works {m} x {_ms(cost.busy)} = {_ms(m * cost.busy)}"
        words += f", and {_ms(need.after)} follow its last backward"
        memory = f"{stage.peak_memory_bytes_per_rank / 2**30:.3g} of {plan.memory_limit_bytes_per_rank / 2**30:.3g} GiB"
        yield f"stage {number}, {count} layers: {words}: {_ms(need.least)} at least; {stage.in_flight} in flight in {memory}"
    yield "earlier stages wait less at both ends, so they have room for more layers; the head is in the last"
    for moved in move_layers(plan):
        where = f"a layer from stage {moved.source} to stage {moved.target}"
        if moved.seconds is None:
            yield f"{where}: does not fit in memory"
        else:
            yield f"{where}: about {_ms(moved.seconds)} ({100 * (moved.seconds / step - 1):+.1f} %)"


def _added(cost: StageCosts, layer: StageCosts, times: int) -> StageCosts:
    """A stage with a layer more or, for -1, less."""
    return StageCosts(*(max(figure + times * more, 0) for figure, more in zip(astuple(cost), astuple(layer), strict=True)))


def _time(plan: PipelinePlan, costs: Sequence[StageCosts]) -> PipelineTimes | None:
    """The step with the best orders found for stages of these costs; None where nothing fits in memory."""
    stages, limit = recorded_stages(plan), plan.memory_limit_bytes_per_rank
    order = choose_order("zero-bubble" if plan.split else plan.order, stages, costs, plan.microbatches, plan.transfer_seconds, limit)
    return None if order is None else time_pipeline(stages, costs, order, plan.transfer_seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
