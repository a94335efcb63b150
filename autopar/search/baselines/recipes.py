"""The plans people write by hand, in our own specs, made by walking the graph once.

Each baseline says how inputs and parameters lie; the rest follows (``walking``).

===========  =========================================================================================
ddp          tokens over every axis, parameters replicated
zero1        ddp with the optimizer's state split: parameters gathered once a step, gradients reduced whole
zero2        the same, gradients reduced to the part that is kept
fsdp         the same, parameters gathered again in backward (ZeRO-3)
hsdp         fsdp over the last axis, replicated over the others (two axes or more)
megatron     tokens over every axis but the last, contraction weights by columns then rows over the last
megatron_sp  the same, with the sequence split over the last axis between contractions
expert       ddp with the weights of experts split over the last axis: by expert where each has places for tokens, which are sent there;
             where rows are told their experts, by columns then rows, between tokens gathered and sums scattered over that axis
===========  =========================================================================================

Parameters, gradients and optimizer state share one spec, so that zero1 differs from zero2 in its collectives and not in what is kept. A pin
takes the place of what a baseline would choose; one that says otherwise than the baseline does leaves it out, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.schedule import Assignment
from autopar.search.baselines.experts import weight_of_experts
from autopar.search.baselines.propagate import Recipe, Walk
from autopar.search.choices.space import Space


def recipes(space: Space) -> Mapping[str, Recipe]:
    """The baselines that apply to this mesh, mode and model."""
    axes = tuple(axis for axis, size in enumerate(space.sizes) if size > 1)
    found = {"ddp": Recipe(axes), "fsdp": Recipe(axes, axes)}
    if space.graph.mode == "train":
        found["zero1"] = Recipe(axes, axes, kept=True, whole=True)
        found["zero2"] = Recipe(axes, axes, kept=True)
    if len(axes) > 1:
        found["hsdp"] = Recipe(axes, axes[-1:])
    if axes:
        found["megatron"] = Recipe(axes[:-1], tensor=axes[-1])
        found["megatron_sp"] = Recipe(axes[:-1], tensor=axes[-1], sequence=True)
        if any(weight_of_experts(space.graph, item.tensor) for item in space.graph.of_kind("parameter")):
            found["expert"] = Recipe(axes, experts=axes[-1])
    return found


def find_baselines(space: Space) -> tuple[dict[str, Assignment], dict[str, str]]:
    """The assignment of each baseline, and for those that contradict a pin the reason. Those whose batch does not split are left out."""
    found: dict[str, Assignment] = {}
    contradicted: dict[str, str] = {}
    for name, recipe in recipes(space).items():
        walk = Walk(space, recipe)
        if walk.applies:
            made = walk.run()
            if walk.gathers_masks:  # a first dim that is as long as the batch by chance
                walk = Walk(space, recipe, masks=False)
                made = walk.run()
            reason = walk.against_pins(made)
            if reason:
                contradicted[name] = reason
            else:
                found[name] = made
    return found, contradicted
