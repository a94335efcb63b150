"""Machine: a mesh on a piece of hardware, and what work costs there.

Which link a group uses: an axis named in the hardware's ``axes`` uses that link; otherwise the node link when all
of its groups stay inside a node (ranks are placed on nodes in order), and the network link when one does not.
Over several axes the sizes multiply, the latency is the largest and the bandwidth the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from cost_models import collectives, compute, memory
from cost_models.collectives import Group
from cost_models.hardware import Hardware, Link
from cost_models.mesh import Mesh, SubAxis

CostModel = Literal["roofline", "communication"]
COST_MODELS: tuple[CostModel, ...] = ("roofline", "communication")
"""``communication``: collectives alone; operators and the optimizer take no time."""


@dataclass(frozen=True, eq=False)
class Machine:
    """A mesh on hardware. Two machines are equal when mesh, hardware and cost model are.

    Args:
        mesh: the grid of ranks.
        hardware: the device and its links.
        cost_model: ``roofline`` or ``communication``.
    """

    mesh: Mesh
    hardware: Hardware
    cost_model: CostModel = "roofline"
    _groups: dict[tuple[SubAxis, ...], Group] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        assert self.cost_model in COST_MODELS, self.cost_model

    @cached_property
    def _identity(self) -> tuple[Mesh, Hardware, str]:
        return (self.mesh, self.hardware, self.cost_model)

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Machine) and self._identity == other._identity)

    def __hash__(self) -> int:
        return self._hash

    def link(self, part: SubAxis) -> Link:
        """The link that groups along ``part`` use."""
        override = self.hardware.axis_link(self.mesh.names[part.axis])
        if override is not None:
            return override
        return self.hardware.node if self._inside_node(part) else self.hardware.network

    def group(self, axes: Sequence[SubAxis]) -> Group:
        """The group over ``axes`` together."""
        key = tuple(axes)
        found = self._groups.get(key)
        if found is None:
            links = [self.link(part) for part in key]
            found = Group(
                size=math.prod(part.size for part in key),
                latency=max((link.latency_seconds for link in links), default=0.0),
                bandwidth=min((link.bandwidth for link in links), default=math.inf),
            )
            self._groups[key] = found
        return found

    def axes_group(self, axes: Sequence[int]) -> Group:
        """The group over whole mesh axes, given by position."""
        return self.group([self.mesh.whole(axis) for axis in axes])

    def collective_seconds(self, kind: str, full_bytes: float, axes: Sequence[SubAxis]) -> float:
        """Seconds of a collective over ``axes`` on a tensor of ``full_bytes`` on the group; 0 in a group of one rank."""
        group = self.group(axes)
        return collectives.SECONDS[kind](full_bytes, group) if group.size > 1 else 0.0

    def latency_seconds(self, kind: str, axes: Sequence[SubAxis]) -> float:
        """The part of a collective's price that is paid once a call, however many tensors share it."""
        group = self.group(axes)
        return group.latency if group.size > 1 else 0.0

    def links(self, axes: Sequence[SubAxis]) -> tuple[str, ...]:
        """The links that a collective over ``axes`` holds: ``node``, ``network``, or the name of an axis with a link of its own."""
        found = set()
        for part in axes:
            if part.size > 1:
                name = self.mesh.names[part.axis]
                own = self.hardware.axis_link(name) is not None
                found.add(name if own else "node" if self._inside_node(part) else "network")
        return tuple(sorted(found))

    def received_bytes(self, kind: str, full_bytes: float, size: int) -> float:
        """Bytes each rank receives in a collective over ``size`` ranks."""
        return collectives.received_bytes(kind, full_bytes, size) if size > 1 else 0.0

    def compute_seconds(self, flops: float, bytes_moved: float, dtype: str) -> float:
        """Seconds of one operator on a rank; 0 under the communication model."""
        return 0.0 if self.cost_model == "communication" else compute.roofline(flops, bytes_moved, dtype, self.hardware)

    def optimizer_seconds(self, optimizer: str, elements: int, dtype: str) -> float:
        """Seconds of the optimizer's step on a rank's ``elements``; 0 under the communication model."""
        return 0.0 if self.cost_model == "communication" else memory.optimizer_seconds(optimizer, elements, dtype, self.hardware)

    def _inside_node(self, part: SubAxis) -> bool:
        """Whether every group along ``part`` lies on one node."""
        per_node = self.hardware.devices_per_node
        sizes = self.mesh.sizes
        stride = math.prod(sizes[part.axis + 1 :]) * (sizes[part.axis] // (part.outer * part.size))
        span = stride * part.size
        firsts = (start + offset for start in range(0, self.mesh.ranks, span) for offset in range(stride))
        return all(first // per_node == (first + span - stride) // per_node for first in firsts)
