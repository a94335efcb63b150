"""Machine: a mesh on a piece of hardware, and what work costs there.

Which link a group uses: an axis named in the hardware's ``axes`` uses that link; otherwise the node link when all
of its groups stay inside a node (ranks are placed on nodes in order), and the network link when one does not. An axis that is
longer than a node is two: its inner part uses the node link, its outer part the network link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from . import collectives, orthogonal
from .collectives import Group
from .execution import Execution
from .hardware import Hardware
from .links import Link, group_over
from .memory import find_optimizer
from .mesh import Mesh, SubAxis
from .model import CostModel
from .operator import Operator, Shape
from .registry import COST_MODELS

MERGE_LAUNCHES = 8
"""Kernels that weigh two results by how much of a softmax each has seen, and add them."""


@dataclass(frozen=True, eq=False)
class Machine:
    """A mesh on hardware. Two machines are equal when mesh, hardware and cost model are.

    Args:
        mesh: the grid of ranks.
        hardware: the device and its links.
        cost_model: a name of ``COST_MODELS``.
        execution: the way of execution whose host is priced (``Hardware.issue_seconds``); None for a host that takes no time.
    """

    mesh: Mesh
    hardware: Hardware
    cost_model: str = "roofline"
    execution: Execution | None = None
    _groups: dict[tuple[str, tuple[SubAxis, ...]], Group] = field(init=False, default_factory=dict, repr=False)
    _links: dict[tuple[SubAxis, ...], tuple[str, ...]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        assert self.cost_model in COST_MODELS, self.cost_model

    @cached_property
    def _identity(self) -> tuple[Mesh, Hardware, str, Execution | None]:
        return (self.mesh, self.hardware, self.cost_model, self.execution)

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Machine) and self._identity == other._identity)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _model(self) -> CostModel:
        return COST_MODELS[self.cost_model]

    @cached_property
    def issue_seconds(self) -> float:
        """Seconds that the host takes to issue a kernel; 0 where its price is not asked for."""
        return self.hardware.seconds_to_issue(self.execution)

    @property
    def clock(self) -> tuple[float, bool, float]:
        """What a simulation asks: the slowdown beside busy links, whether launches overlap with work, seconds to issue a kernel."""
        return self.hardware.overlap_slowdown, self.hardware.launch_overlaps, self.issue_seconds

    @property
    def overlaps(self) -> bool:
        """See ``CostModel``."""
        return self._model.overlaps

    @property
    def times_operators(self) -> bool:
        """See ``CostModel``."""
        return self._model.times_operators

    def link_name(self, part: SubAxis) -> str:
        """The link that groups along ``part`` use: the axis' name where the hardware file has it, else ``node`` or ``network``."""
        name = self.mesh.names[part.axis]
        if self.hardware.axis_link(name) is not None:
            return name
        return "node" if self._inside_node(part) else "network"

    def link(self, part: SubAxis) -> Link:
        """The link that groups along ``part`` use."""
        override = self.hardware.axis_link(self.mesh.names[part.axis])
        if override is not None:
            return override
        return self.hardware.node if self._inside_node(part) else self.hardware.network

    def links(self, axes: Sequence[SubAxis]) -> tuple[str, ...]:
        """The names of the links that a collective over ``axes`` occupies, sorted; none for a group of one rank."""
        key = tuple(axes)
        if key not in self._links:
            self._links[key] = tuple(sorted({name for part in key for name in self._links_along(part)}))
        return self._links[key]

    def _links_along(self, part: SubAxis) -> tuple[str, ...]:
        """Of a part that leaves its node that node's link too, where neighbours along it are on one node."""
        if part.size == 1:
            return ()
        name, near = self.link_name(part), _stride(self.mesh.sizes, part) < self.hardware.devices_per_node
        own = self.hardware.axis_link(self.mesh.names[part.axis]) is not None
        return (name,) if own or name == "node" or not near else (name, "node")

    def group(self, axes: Sequence[SubAxis], kind: str = "") -> Group:
        """The group over ``axes`` together, as a collective of ``kind`` sees it; by the links' own figures without a kind."""
        key = (kind, tuple(axes))
        found = self._groups.get(key)
        if found is None:
            primes = [prime for part in key[1] for prime in part.primes]
            found = self._groups[key] = group_over(kind, [(self.link(prime), prime.size) for prime in primes])
        return found

    def axes_group(self, axes: Sequence[int], kind: str = "") -> Group:
        """The group over whole mesh axes, given by position."""
        return self.group([self.mesh.whole(axis) for axis in axes], kind)

    def collective_seconds(self, kind: str, full_bytes: float, axes: Sequence[SubAxis]) -> float:
        """Seconds of a collective over ``axes`` on a tensor of ``full_bytes`` on the group; 0 in a group of one rank."""
        group = self.group(axes, kind)
        return collectives.seconds(kind, full_bytes, group) if group.size > 1 else 0.0

    def transfer_seconds(self, transferred: float) -> float:
        """Seconds of copying so many bytes between a device and its host, either way. The hardware has a host link."""
        host = self.hardware.host
        assert host is not None
        return host.latency_seconds + transferred / host.bandwidth

    def call_streams(self, kind: str, axes: Sequence[SubAxis]) -> tuple[str, ...]:
        """The streams that a call of ``kind`` holds: the links of its group, or that of a transfer."""
        return (kind,) if kind in collectives.TRANSFERS else self.links(axes)

    def latency_seconds(self, kind: str, axes: Sequence[SubAxis]) -> float:
        """The part of a call's price that is paid once, however many tensors share it; 0 in a group of one rank."""
        if kind in collectives.TRANSFERS and self.hardware.host is not None:
            return self.hardware.host.latency_seconds
        return self.group(axes, kind).latency if kind in collectives.KINDS else 0.0

    def received_bytes(self, kind: str, full_bytes: float, size: int) -> float:
        """Bytes each rank receives in a collective over ``size`` ranks."""
        return collectives.received_bytes(kind, full_bytes, size) if size > 1 else 0.0

    def operator_seconds(self, operator: Operator) -> float:
        """Seconds of one operator on a rank, without the collectives inside it."""
        return self._model.operator_seconds(operator, self.hardware)

    def compute_seconds(self, flops: float, bytes_moved: float, dtype: str) -> float:
        """Seconds of an operator of which only this much is known."""
        return self.operator_seconds(Operator("", "unknown", dtype, (), (), flops, bytes_moved))

    def copy_seconds(self, copied: float, dtype: str) -> float:
        """Seconds of copying so many bytes from blocks to one buffer, or back, as collectives need it; 0 for none."""
        return self.operator_seconds(Operator("autopar.copy", "copy", dtype, (), (), 0.0, 2 * copied)) if copied else 0.0

    def sum_seconds(self, added: float, dtype: str) -> float:
        """Seconds of adding a tensor of so many bytes to another of its size; 0 for none."""
        return self.operator_seconds(Operator("aten.add.Tensor", "pointwise", dtype, (), (), 0.0, 3 * added)) if added else 0.0

    def merge_seconds(self, moved: float, times: int, dtype: str) -> float:
        """Seconds of adding up, in passes that read and write so many bytes in all, what is made in ``times`` turns; 0 for nothing."""
        merging = Operator("autopar.merge", "pointwise", dtype, (), (), 0.0, moved, MERGE_LAUNCHES * times)
        return self.operator_seconds(merging) if moved else 0.0

    def optimizer_seconds(
        self, optimizer: str, elements: int, dtype: str, matrix: Shape | None = None, axes: Sequence[int] = ()
    ) -> float:  # fmt: skip
        """Seconds of the optimizer's step on one parameter of which the rank holds ``elements``.

        Args:
            matrix: the whole shape of a layer's matrix, which is all that some optimizers step; None of other parameters.
            axes: that split the parameter.
        """
        others = find_optimizer(optimizer).others
        if others is None or matrix is None:
            return self._model.optimizer_seconds(others or optimizer, elements, dtype, self.hardware)
        return self._model.optimizer_seconds(optimizer, elements, dtype, self.hardware) + self._orthogonal_seconds(matrix, axes)

    def _orthogonal_seconds(self, matrix: Shape, axes: Sequence[int]) -> float:
        """A rank's share of making a matrix orthogonal as a whole.

        The ranks that split matrices share them out: each has whole ones by an all-to-all, and sends what it made of them back. A call
        carries a matrix for each rank, so that each bears its part of the latency. As many ranks repeat the work as hold the same part.
        """
        if not self.times_operators:
            return 0.0
        group = [self.mesh.whole(axis) for axis in axes if self.mesh.sizes[axis] > 1]
        ranks = math.prod(part.size for part in group)
        work = orthogonal.STEPS * sum(map(self.operator_seconds, orthogonal.products(matrix)))
        sent = self.collective_seconds("all_to_all", orthogonal.matrix_bytes(matrix), group)
        spared = self.latency_seconds("all_to_all", group) * (1 - 1 / ranks) if ranks > 1 else 0.0
        return work / ranks + 2 * (sent - spared)

    def _inside_node(self, part: SubAxis) -> bool:
        """Whether every group along ``part`` lies on one node."""
        return _groups_inside(self.mesh.sizes, part, self.hardware.devices_per_node)


@cache
def _groups_inside(sizes: tuple[int, ...], part: SubAxis, per_node: int) -> bool:
    """See ``Machine._inside_node``; kept, since it looks at every group of what may be thousands of ranks."""
    stride = _stride(sizes, part)
    span = stride * part.size
    firsts = (start + offset for start in range(0, math.prod(sizes), span) for offset in range(stride))
    return all(first // per_node == (first + span - stride) // per_node for first in firsts)


def _stride(sizes: tuple[int, ...], part: SubAxis) -> int:
    """How many ranks lie between neighbours along ``part``."""
    return math.prod(sizes[part.axis + 1 :]) * (sizes[part.axis] // (part.outer * part.size))
