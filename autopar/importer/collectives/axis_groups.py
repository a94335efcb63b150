"""Groups of ranks along axes of a mesh, as models name them: by axis, by process group, by ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import torch_compat
from autopar.cost_models import Mesh
from autopar.errors import CaptureError, UsageError

IN_REGION: ContextVar[bool] = ContextVar("autopar_in_region", default=False)
"""Whether the code that runs sees each rank's part."""
_CAPTURING: ContextVar[bool] = ContextVar("autopar_capturing", default=False)


@contextmanager
def within_capture() -> Iterator[None]:
    """While a model runs to be captured."""
    token = _CAPTURING.set(True)
    try:
        yield
    finally:
        _CAPTURING.reset(token)


def sees_one_rank() -> bool:
    """Whether whoever asks for the number of ranks is answered as on one device: a model being captured, where its tensors are whole."""
    return _CAPTURING.get() and not IN_REGION.get()


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along an axis of a mesh, in place of a process group."""

    name: str
    ranks: int

    def size(self) -> int:
        """The number of ranks; 1 for a model that is captured and asks outside of a region."""
        return 1 if sees_one_rank() else self.ranks


@dataclass(frozen=True)
class AxisMesh:
    """Axes of a mesh by name and size, in place of a ``DeviceMesh``. It needs no ranks."""

    mesh_dim_names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis; 1 as ``AxisGroup.size``."""
        return (1,) * len(self.sizes) if sees_one_rank() else self.sizes

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.sizes)

    def size(self, mesh_dim: int | None = None) -> int:
        """The number of ranks of all axes, or along one; 1 as ``AxisGroup.size``."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def __getitem__(self, names: str | tuple[str, ...]) -> AxisMesh:
        """The mesh of some of the axes. Raises UsageError: it has no such axis."""
        chosen, held = (names,) if isinstance(names, str) else names, dict(zip(self.mesh_dim_names, self.sizes, strict=True))
        missing = [name for name in chosen if name not in held]
        if missing:
            raise UsageError(f"no axis {missing[0]!r} among {', '.join(held)}", "name an axis that autopar.axis_mesh was given")
        return AxisMesh(chosen, tuple(held[name] for name in chosen))

    def get_group(self, mesh_dim: int | str | None = None) -> AxisGroup:
        """The ranks along an axis, which may be left out where there is one alone.

        Raises:
            UsageError: no such axis, or several to choose from.
        """
        if mesh_dim is None and self.ndim > 1:
            raise UsageError(f"a group of a mesh of {self.ndim} axes", f"name the axis: get_group({self.mesh_dim_names[0]!r})")
        name = mesh_dim if isinstance(mesh_dim, str) else self.mesh_dim_names[mesh_dim or 0]
        return AxisGroup(name, self[name].sizes[0])


def axis_mesh(mesh: Any) -> AxisMesh:
    """The device mesh of a model's own ``local_map`` regions and collectives, which can be made where there are no ranks yet.

    Args:
        mesh: ``"dp=2,tp=4"``, a mapping of sizes by name, or a ``Mesh``: the mesh that is planned for, or some of its axes.

    Raises:
        UsageError: it cannot be read.
    """
    parsed = Mesh.parse(mesh)
    return AxisMesh(tuple(parsed.names), tuple(parsed.sizes))


def names_of(mesh: Any) -> tuple[str, ...]:
    """The names of the axes of a ``DeviceMesh`` or ``AxisMesh``. Raises CaptureError: it has none."""
    if not isinstance(mesh, (DeviceMesh, AxisMesh)):
        raise CaptureError(f"a {type(mesh).__name__} in place of a device mesh", "give a DeviceMesh, or autopar.axis_mesh('tp=4')")
    if not mesh.mesh_dim_names:
        raise CaptureError("the axes of a device mesh have no names", "give init_device_mesh mesh_dim_names, those of the planned mesh")
    return tuple(mesh.mesh_dim_names)


def sizes_of(mesh: Any) -> tuple[int, ...]:
    """The number of ranks along each axis."""
    if isinstance(mesh, AxisMesh):
        return mesh.sizes
    with torch_compat.real_tensors():
        return tuple(mesh.mesh.shape)


def axes_of(group: Any, mesh: Any) -> tuple[int, ...]:
    """The axes of a mesh along which a group's ranks lie, ascending.

    Args:
        group: what functions of torch.distributed take for one: a mesh, a mesh and the number of its axis, a process group or its name,
            ranks, or the ranks of each group; None for all ranks.
        mesh: a ``DeviceMesh`` or ``AxisMesh``.

    Raises:
        CaptureError: the ranks do not lie along axes of the mesh.
    """
    named = _names_in(group)
    if named is not None:
        missing = [name for name in named if name not in names_of(mesh)]
        if missing:
            raise CaptureError(
                f"a collective over the axis {missing[0]!r} in a region over {_shown(mesh)}",
                "give local_map a device_mesh that has the axis, and placements along it",
            )
        return tuple(sorted(map(names_of(mesh).index, named)))
    if group is None and not dist.is_initialized():
        return tuple(range(len(names_of(mesh))))
    groups = _ranks_of(group)
    if isinstance(mesh, AxisMesh):
        raise CaptureError(
            f"a collective over the {_listed(groups)} in a region over {_shown(mesh)}, whose axes have no ranks",
            "name the group by an axis: group=mesh.get_group('tp')",
        )
    with torch_compat.real_tensors():
        numbers: torch.Tensor = mesh.mesh
        axes = [axis for axis, size in enumerate(numbers.shape) if size > 1]
        for some in itertools.chain.from_iterable(itertools.combinations(axes, count) for count in range(len(axes) + 1)):
            rest = [axis for axis in range(numbers.dim()) if axis not in some]
            rows = numbers.permute(*rest, *some).reshape(-1, math.prod(numbers.shape[axis] for axis in some)).tolist()
            if all(one in rows for one in groups) and len(groups) in (1, len(rows)):
                return some
    raise CaptureError(
        f"a collective over the {_listed(groups)}, which do not lie along axes of the region's mesh {_shown(mesh)}",
        "take the group from the mesh, mesh.get_group('tp'), the same line for every rank; a part of an axis is an axis of its own: "
        "a=2,b=2 in place of tp=4",
    )


def _names_in(group: Any) -> tuple[str, ...] | None:
    """The axes that a group names; None where it does not."""
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], (DeviceMesh, AxisMesh)):
        return (names_of(group[0])[group[1]],)
    if isinstance(group, AxisGroup):
        return (group.name,)
    return names_of(group) if isinstance(group, (DeviceMesh, AxisMesh)) else None


def _ranks_of(group: Any) -> list[list[int]]:
    """The ranks of a group, or of each of several."""
    if isinstance(group, (list, tuple)) and group:
        return [list(one) for one in group] if isinstance(group[0], (list, tuple)) else [list(group)]
    if isinstance(group, str):
        group = torch_compat.process_group_named(group)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = "give it a group of torch.distributed, or mesh.get_group('tp') of autopar.axis_mesh"
        raise CaptureError(f"a {type(group).__name__} in place of a process group", hint)
    return [dist.get_process_group_ranks(group)]


def _listed(groups: list[list[int]]) -> str:
    return "ranks " + " and ".join(", ".join(map(str, one)) for one in groups[:3]) + (" and others" if len(groups) > 3 else "")


def _shown(mesh: Any) -> str:
    return ",".join(f"{name}={size}" for name, size in zip(names_of(mesh), sizes_of(mesh), strict=True))
