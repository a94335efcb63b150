"""Warnings that come with a plan: on the hardware file, the microbatches, and operators without a rule."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.cost_models import Hardware, Mesh

if TYPE_CHECKING:
    from autopar.search import SearchResult


class MicrobatchWarning(UserWarning):
    """Microbatches that are not known to make up the whole batch's step."""


class UnknownAxisWarning(UserWarning):
    """A hardware file describes an axis that no mesh has."""


class UnlikelyHardwareWarning(UserWarning):
    """A hardware file has figures of no machine: most often another unit than the file's."""


class UnknownOperatorWarning(UserWarning):
    """Operators without a sharding rule: they run whole on every rank."""


class StageWarning(UserWarning):
    """Pipelines that were asked for and not planned: the model cannot be cut into stages, or time was short."""


CAUTIONS = (MicrobatchWarning, StageWarning, UnknownAxisWarning, UnlikelyHardwareWarning, UnknownOperatorWarning)
"""Every warning that planning gives."""


def warn_hardware(hardware: Hardware, meshes: Sequence[Mesh], cost_model: str) -> None:
    """Names axes that no mesh has: most often misspelt, so that their links are priced as any other. Names figures of no machine: most
    often in another unit. The communication model has no such figures, since the literature's links carry a byte a second."""
    unknown = [name for name, _ in hardware.axes if not any(name in mesh.names for mesh in meshes)]
    if unknown:
        names = ", ".join(dict.fromkeys(name for mesh in meshes for name in mesh.names))
        warnings.warn(f"the hardware describes {', '.join(unknown)}, no axis of the mesh ({names})", UnknownAxisWarning, stacklevel=4)
    if cost_model != "communication" and (figures := hardware.unlikely()):
        warnings.warn(f"no machine is like {hardware.name}: {', '.join(figures)}", UnlikelyHardwareWarning, stacklevel=4)


def warn_microbatches(found: SearchResult) -> None:
    """Says where the step of microbatches is not the whole batch's."""
    made = found.schedule.graph.accumulation
    step = f"the step of {made.microbatches} microbatches is"
    if not made.whole:
        words = f"not proved to be the whole batch's: {made.reason}; each microbatch's loss counts 1/{made.microbatches}, and verify"
        warnings.warn(f"{step} {words} compares with the same on one device", MicrobatchWarning, stacklevel=4)
    elif made.reason:
        warnings.warn(f"{step} the whole batch's {made.reason}", MicrobatchWarning, stacklevel=4)


def warn_unknown_operators(found: SearchResult) -> None:
    """Names the operators without a rule, with what running them whole on every rank costs."""
    if not found.unknown:
        return
    schedule = found.schedule
    whole = sum(schedule.operator_seconds(op.name) for op in schedule.graph.ops if op.target in found.unknown)
    names = ", ".join(f"{name} (at {place})" for name, place in sorted(found.unknown.items()))
    warnings.warn(
        f"no sharding rule for {names}: run whole on every rank, {whole:.3g} s of {found.seconds:.3g} s, beside the gathers "
        "of what they read; autopar rules --missing TARGET lists them",
        UnknownOperatorWarning,
        stacklevel=4,
    )
