"""Recipes of the plans that people write by hand, in autopar's own specs.

A recipe says how inputs and parameters lie; ``propagate`` derives the rest.

===========  =========================================================================================
ddp          tokens over every axis, parameters replicated
zero1        ddp with the optimizer's state split: parameters are gathered once a step, gradients all-reduced
zero2        zero1 with gradients reduce-scattered to the part that a rank keeps
fsdp         zero2 with parameters gathered again in backward (ZeRO-3)
hsdp         fsdp over the last axis, replicated over the others (two axes or more)
megatron     tokens over every axis but the last; contraction weights over the last, by columns then rows
megatron_sp  megatron with the sequence split over the last axis between contractions
torchtitan   megatron_sp with parameters, gradients and optimizer states split over the other axes too: FSDP x TP, training only
expert       ddp with experts split over the last axis, to which tokens travel, and back
expert_fsdp  expert with parameters, gradients and optimizer states split over all axes, training only
===========  =========================================================================================

Parameters, gradients and optimizer state share one spec. So zero1 and zero2 differ in collectives, not in memory kept. A pin replaces a
choice that a baseline leaves open. A tensor that a baseline lays otherwise than its pin is resharded for its readers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.schedule import Assignment
from autopar.search.baselines.experts import is_expert_weight
from autopar.search.baselines.propagate import Recipe, SpecPropagation
from autopar.search.baselines.stored import store_split
from autopar.search.choices.space import Space


def recipes(space: Space) -> Mapping[str, Recipe]:
    """The recipes that apply to this mesh, mode and model, by name."""
    axes = _used_axes(space)
    found = {"ddp": Recipe(axes), "fsdp": Recipe(axes, axes)}
    if space.graph.mode == "train":
        found["zero1"] = Recipe(axes, axes, keeps_gathered=True, reduces_whole=True)
        found["zero2"] = Recipe(axes, axes, keeps_gathered=True)
    if len(axes) > 1:
        found["hsdp"] = Recipe(axes, axes[-1:])
    if axes:
        found["megatron"] = Recipe(axes[:-1], tensor_axis=axes[-1])
        found["megatron_sp"] = Recipe(axes[:-1], tensor_axis=axes[-1], splits_sequence=True)
        if any(is_expert_weight(space.graph, item.tensor) for item in space.graph.of_kind("parameter")):
            found["expert"] = Recipe(axes, expert_axis=axes[-1])
    return found


def _used_axes(space: Space) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(space.sizes) if size > 1)


def find_baselines(space: Space, names: Collection[str] | None = None) -> dict[str, Assignment]:
    """The assignment of each baseline by name, or of those that are named. One whose batch does not divide is left out, and one that pins
    ask to move dispatched rows."""
    found: dict[str, Assignment] = {}
    axes = _used_axes(space)
    for name, recipe in recipes(space).items():
        if names is not None and name not in names:
            continue
        walk = SpecPropagation(space, recipe)
        if walk.is_applicable:
            made = walk.run()
            if walk.gathers_masks:  # the first dim of a mask equals the batch by chance
                made = SpecPropagation(space, recipe, splits_masks=False).run()
            if space.dispatched.isdisjoint(layout.tensor for layout in made.layouts):
                found[name] = made
    if len(axes) > 1 and space.graph.mode == "train" and "megatron_sp" in found:
        found["torchtitan"] = store_split(space.graph, found["megatron_sp"], space, axes[:-1])
    if len(axes) > 1 and space.graph.mode == "train" and "expert" in found:
        found["expert_fsdp"] = store_split(space.graph, found["expert"], space, axes)
    return found
