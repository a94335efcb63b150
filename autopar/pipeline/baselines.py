"""Pipelines as people write them, in the planner's own prices: equal counts of layers, one plan by hand in every stage, 1F1B.

===========  =========================================================================================
ddp          in each stage tokens over every axis, whole parameters (Megatron-LM without TP)
fsdp         the same with parameters, gradients and optimizer states split, gathered once a step (torchtitan without TP)
megatron     Megatron-LM: tokens over every axis but the last, contraction weights over the last (DP x TP)
megatron_sp  the same with the sequence split over the last axis between contractions
torchtitan   megatron_sp with parameters, gradients and optimizer states split over the other axes too (FSDP x TP), gathered once a step
===========  =========================================================================================

The embedding and the head count as a layer each; where counts do not divide, the first stages have one more. Where 1F1B's microbatches in
flight do not fit, all stages recompute: selectively, else in full (``search.baselines.checkpointing``). Recomputation takes longer, so it
is not tried where the plain form is slower than the fastest that fits. Where a split form does not fit at all, its parameters are gathered
in each half of each microbatch: ``NAME_always``, after torchtitan's ``reshard_after_forward``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import TypeVar

from autopar.cost_models import Machine
from autopar.effort import unlimited
from autopar.errors import UsageError
from autopar.graph import Graph, layer_of
from autopar.pipeline.clock import PipelineTimes, StageCosts, measure_stage, time_pipeline
from autopar.pipeline.crossing import crossing_specs, join_pins, transfer_seconds
from autopar.pipeline.cutting import Stages, cut_graph, find_units
from autopar.pipeline.equal_stages import schedule_for, structure_of
from autopar.pipeline.orders import interleave, write_lines
from autopar.pipeline.request import PipelineRequest
from autopar.pipeline.timetable import Action, merge_queues, read_order
from autopar.schedule import Assignment, Schedule
from autopar.schedule.limit_search import LimitSearch, improve_plan
from autopar.schedule.passes import ENDING, run_passes
from autopar.schedule.scheduled_plan import Sample, ScheduledPlan
from autopar.schedule.splitting import defer_once
from autopar.search.baselines.checkpointing import POLICIES, apply_policies
from autopar.search.baselines.propagate import Recipe, SpecPropagation
from autopar.search.baselines.stored import store_split
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.sharding import ShardingSpec

Item = TypeVar("Item")
Made = TypeVar("Made")

TRIES = 6
"""Limits of a stage's schedule that are tried."""


@dataclass(frozen=True)
class PipelineBaseline:
    """A pipeline by hand.

    Args:
        plans: of each stage; equal stages share one, in the names of the first of them.
        lists: what each runs, in the plan's names: what is done once a step stands behind what is sent.
        fits: whether each is within the memory limit.
    """

    stages: Stages
    cut: tuple[str, ...]
    plans: tuple[ScheduledPlan, ...]
    lists: tuple[Schedule, ...]
    costs: tuple[StageCosts, ...]
    order: tuple[Action, ...]
    times: PipelineTimes
    transfer_seconds: float
    fits: bool

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes at the peak of a rank of each stage."""
        return self.times.peaks

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Of each stage, in its own names."""
        pairs = zip(self.stages.graphs, self.lists, strict=True)
        return tuple(made if made.graph.sha256 == graph.sha256 else schedule_for(graph, made) for graph, made in pairs)


@dataclass(frozen=True)
class _Style:
    """How a stage is planned by hand.

    Args:
        stored_axes: axes that split parameters further at rest.
        once: whether these are gathered once a step, or in each half of each microbatch.
    """

    recipe: Recipe
    stored_axes: tuple[int, ...] = ()
    once: bool = True


@dataclass(frozen=True)
class _WrittenStage:
    """A stage by hand; equal stages share it.

    Args:
        graph: of the first of them, which the assignments are for.
        assignments: by policy of recomputation, ``""`` for none.
        specs: of what enters, in the graph's order, before parameters are split further.
    """

    graph: Graph
    assignments: Mapping[str, Assignment]
    specs: tuple[ShardingSpec, ...]


def count_evenly(graph: Graph, count: int) -> tuple[str, ...] | None:
    """The first module of each stage but the first, by counts of equal layers; None where these are too few.

    The embedding, in the first stage, and the head, in the last, count as a layer each.
    """
    layers = [unit for unit in find_units(graph) if layer_of(unit) == unit]
    each, more = divmod(len(layers) + 2, count)
    counts = [each + (stage < more) for stage in range(count)]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 1:
        return None
    return tuple(layers[sum(counts[:stage])] for stage in range(1, count))


def _styles(machine: Machine) -> dict[str, _Style]:
    axes = tuple(axis for axis, size in enumerate(machine.mesh.sizes) if size > 1)
    found = {"ddp": _Style(Recipe(axes))}
    if axes:
        found["fsdp"] = _Style(Recipe(axes, axes))
        found["megatron"] = _Style(Recipe(axes[:-1], tensor_axis=axes[-1]))
        sequence = Recipe(axes[:-1], tensor_axis=axes[-1], splits_sequence=True)
        found["megatron_sp"] = _Style(sequence)
        if len(axes) > 1:
            found["torchtitan"] = _Style(sequence, axes[:-1])
    return found


def _once_each(function: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
    """What a function makes of each item. It is called once for those that are one object."""
    known = {number: function(item) for number, item in {id(item): item for item in items}.items()}
    return [known[id(item)] for item in items]


class PipelineBaselines:
    """The pipelines by hand of one graph.

    Args:
        asked: with several stages of each rank, these are in Megatron-LM's interleaved order. None is written after the deadline.
    """

    def __init__(self, graph: Graph, asked: PipelineRequest) -> None:
        self.graph, self.asked, self.stage_machine = graph, asked, asked.stage_machine
        self.sizes = self.stage_machine.mesh.sizes

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """The timetable."""
        count = self.graph.microbatches
        if self.asked.chunks == 1:
            return read_order(write_lines("1f1b", self.asked.positions, count))
        return merge_queues(interleave(self.asked.positions, self.asked.chunks, count))

    def find(self) -> dict[str, PipelineBaseline]:
        """By name, with the policy (``NAME+POLICY``) where stages recompute. What cannot be written by hand is left out.

        The fastest that fits gets local search over its order as well.
        """
        cut, found = count_evenly(self.graph, self.asked.count), dict[str, PipelineBaseline]()
        if cut is None:
            return found
        try:
            stages = cut_graph(self.graph, cut, self.asked.positions)
        except UsageError:  # a tied weight whose gradients this cut does not take apart
            return found
        space = self._space(self.graph, self.asked.pins)
        for name, style in _styles(self.stage_machine).items():
            walk = SpecPropagation(space, style.recipe)
            if self._is_late or not walk.is_applicable:
                continue
            specs = crossing_specs(stages, self.graph, self.sizes, walk.run().strategies)
            self._write(name, style, stages, cut, specs, found)
            if style.stored_axes and not any(one.fits for other, one in found.items() if other.partition("+")[0] == name):
                self._write(f"{name}_always", replace(style, once=False), stages, cut, specs, found)
        best = min((name for name, one in found.items() if one.fits), key=lambda name: found[name].times.step, default=None)
        if best is not None and not self._is_late:
            found[best] = self._improve(found[best])
        return found

    def _write(
        self, name: str, style: _Style, stages: Stages, cut: tuple[str, ...], specs: Mapping[str, ShardingSpec],
        found: dict[str, PipelineBaseline],
    ) -> None:  # fmt: skip
        """Adds a style, and its recomputing forms as far as they are needed and may be faster than what fits."""
        written = self._write_stages(stages, specs, style)
        transfer = transfer_seconds(self.asked.machine, stages, self.graph, specs)
        for policy in ("", *(POLICIES if self.asked.recompute else ())) if written else ():
            plans = self._schedule(written, policy)
            made = found[f"{name}+{policy}" if policy else name] = self._price(stages, cut, plans, transfer)
            least = min((one.times.step for one in found.values() if one.fits), default=math.inf)
            if made.fits or made.times.step >= least or self._is_late:
                break

    @property
    def _is_late(self) -> bool:
        return perf_counter() > self.asked.deadline

    def _space(self, graph: Graph, pins: Mapping[str, str]) -> Space:
        return Space(graph, self.stage_machine, self.asked.optimizer, resolve_pins(graph, self.stage_machine.mesh, pins))

    def _write_stages(self, stages: Stages, specs: Mapping[str, ShardingSpec], style: _Style) -> list[_WrittenStage]:
        """Each stage by the recipe; none where it does not apply to one of them."""
        found, known, before = list[_WrittenStage](), dict[str, _WrittenStage](), list[Mapping[str, ShardingSpec]]()
        for graph in stages.graphs:
            pins = join_pins(graph, self.graph, self.stage_machine.mesh, self.asked.pins, specs, stages, before)
            key = structure_of(graph, pins)
            if key not in known:
                space = self._space(graph, pins)
                walk = SpecPropagation(space, style.recipe)
                if not walk.is_applicable:
                    return []
                walked = walk.run()
                made = store_split(graph, walked, space, style.stored_axes, once=style.once) if style.stored_axes else walked
                policies = dict(apply_policies(graph, made, self.stage_machine)) if self.asked.recompute else {}
                assignments = {policy: policies.get(policy, made) for policy in ("", *POLICIES)}
                known[key] = _WrittenStage(graph, assignments, tuple(walked.inputs[item.tensor] for item in graph.inputs))
            found.append(known[key])
            before.append({item.tensor: spec for item, spec in zip(graph.inputs, known[key].specs, strict=True)})
        return found

    def _schedule(self, written: Sequence[_WrittenStage], policy: str) -> list[ScheduledPlan]:
        """The plan of each stage."""

        def schedule(stage: _WrittenStage) -> ScheduledPlan:
            made = stage.assignments[policy]
            sample = Sample(1.0, stage.graph, made)
            search = LimitSearch(made, (sample,), self.stage_machine, self.asked.optimizer, self.asked.memory_limit)
            return search.run(None, TRIES, improve=False)

        return _once_each(schedule, written)

    def _price(self, stages: Stages, cut: tuple[str, ...], plans: Sequence[ScheduledPlan], transfer: float) -> PipelineBaseline:
        lists = _once_each(lambda plan: defer_once(run_passes(plan.schedule, ENDING)), plans)
        costs = _once_each(lambda schedule: measure_stage(schedule, self.asked.optimizer), lists)
        times = time_pipeline(stages, costs, self.order, transfer)
        fits = max(times.peaks) <= self.asked.memory_limit
        return PipelineBaseline(stages, cut, tuple(plans), tuple(lists), tuple(costs), self.order, times, transfer, fits)

    def _improve(self, made: PipelineBaseline) -> PipelineBaseline:
        """The pipeline after local search over the order of each stage, within the memory that it holds."""
        plans = _once_each(lambda plan: improve_plan(plan, self.asked.optimizer, plan.memory.peak, unlimited()), made.plans)
        found = self._price(made.stages, made.cut, plans, made.transfer_seconds)
        return found if found.fits and found.times.step < made.times.step else made
