"""Process groups: what a model asks of them while it is captured, and collectives under the names of each version."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import combinations
from threading import get_ident
from typing import Any

_COMMUNICATING = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
    "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


@contextmanager
def refused_collectives(refuse: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``refuse`` is called with the name of each collective that this thread asks a process group for, before it runs.

    The methods of ``ProcessGroup``: what torch.distributed's functions, under whichever name they were imported, come to.
    """
    with _watched_group(_COMMUNICATING, lambda name: refuse(name.strip("_"))):
        yield


@contextmanager
def refused_ranks(refuse: Callable[[], None]) -> Iterator[None]:
    """Within it, ``refuse`` is called where code of this thread that is not torch's asks a process group or a mesh which rank it is.

    torch asks for itself too, in collectives and for its logs.
    """

    def asked(name: str) -> None:
        if _is_asked_by_users(_RANKS_OF):
            refuse()

    with _watched_group(("rank",), asked):
        yield


def _is_asked_by_users(through: Container[str]) -> bool:
    """Whether the function that called the caller was called by code that is not torch's, if by way of these functions of it."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_name in through and frame.f_globals["__name__"].startswith("torch.distributed."):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__", "").partition(".")[0] != "torch"


def process_group_named(name: str) -> Any:
    """The process group of a name that torch gave it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)


@contextmanager
def answered_as_one_device(but: Callable[[], bool]) -> Iterator[None]:
    """Within it, code of this thread that is not torch's finds one rank: no group is initialized, and groups and meshes have size 1.

    Where ``but`` is true, groups and meshes have their own size.

    So is what ``torchrun`` puts into the environment: sizes are 1, and which rank this is, is not there.
    """
    from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d

    thread, world = get_ident(), distributed_c10d._WorldMeta

    def answered(plain: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            found = plain(*args, **kwargs)
            return answer(found) if get_ident() == thread and not but() and _is_asked_by_users(_SIZES_OF) else found

        return method

    def default_group(cls: Any) -> Any:
        asks = sys._getframe(1).f_code is distributed_c10d.is_initialized.__code__ and get_ident() == thread
        return None if asks and _is_asked_by_users(()) else distributed_c10d._world.default_pg

    replaced: list[tuple[Any, str, Any]] = [
        (ProcessGroup, "size", answered(ProcessGroup.size, lambda size: 1)),
        (DeviceMesh, "size", answered(DeviceMesh.size, lambda size: 1)),
        (DeviceMesh, "shape", property(answered(DeviceMesh.shape.fget, lambda shape: (1,) * len(shape)))),
        (world, "WORLD", property(default_group, world.WORLD.fset)),
    ]
    kept = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    variables = {name: os.environ[name] for name in _LAUNCHED if name in os.environ}
    try:
        for owner, name, method in replaced:
            setattr(owner, name, method)
        for name in variables:
            if name.endswith("SIZE"):
                os.environ[name] = "1"
            else:
                del os.environ[name]
        yield
    finally:
        for owner, name, method in kept:
            setattr(owner, name, method)
        os.environ.update(variables)


_SIZES_OF = ("get_world_size", "_get_group_size")
"""The functions of torch.distributed that answer with what ``ProcessGroup.size`` says."""
_LAUNCHED = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
"""Environment variables of torchrun."""


_RANKS_OF = ("get_rank", "get_local_rank", "get_group_rank")
"""The functions and methods of torch.distributed that answer with what ``ProcessGroup.rank`` says."""


@contextmanager
def _watched_group(names: Iterable[str], told: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``told`` hears of each call by this thread of these methods of ``ProcessGroup``, by name, before it is made.

    Versions of torch differ in which of them there are.
    """
    from torch.distributed import ProcessGroup

    thread = get_ident()

    def watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                told(name)
            return plain(*args, **kwargs)

        return method

    own = vars(ProcessGroup)  # as they stand in the class: they bind to their group there
    kept = {name: own[name] for name in names if name in own}
    for name in kept:
        setattr(ProcessGroup, name, watched(name, getattr(ProcessGroup, name)))
    try:
        yield
    finally:
        for name, plain in kept.items():
            setattr(ProcessGroup, name, plain)


def collective_modules() -> dict[str, Any]:
    """The modules of torch's collectives: ``functional``, ``differentiable``, and those that write into tensors, ``writing``."""
    import torch.distributed
    import torch.distributed._functional_collectives
    import torch.distributed.nn.functional

    return {
        "functional": torch.distributed._functional_collectives,
        "differentiable": torch.distributed.nn.functional,
        "writing": torch.distributed,
    }


def local_map_function() -> Callable[..., Any] | None:
    """What ``local_map`` makes a function of: ``(function, out_placements, in_placements, in_grad_placements, device_mesh,
    redistribute_inputs, *args, **kwargs)``. None as long as nobody has imported ``local_map``, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor.experimental._func_map")
    return None if module is None else module._local_map_wrapped


def functional_collectives() -> Any:
    """``torch.ops._c10d_functional``, with its operators registered."""
    import torch.distributed._functional_collectives  # registers them

    return torch.ops._c10d_functional


def timeout_of(group: Any) -> timedelta:
    """How long a process group's collectives wait for other ranks; groups made later do not take it over by themselves."""
    device = group._device_types[0]
    return group._get_backend(device).options._timeout


def store_of_world() -> Any:
    """The store by which all processes met: what one writes the others may wait for, beside all collectives."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def new_group(ranks: list[int], **options: Any) -> Any:
    """``torch.distributed.new_group`` of ranks in the order given. Before torch 2.12 it sorts them: ``sorted`` is another there."""
    import inspect

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(ranks, sort_ranks=False, **options)
    distributed_c10d.sorted = list  # a global of the module comes before the built-in function
    try:
        return dist.new_group(ranks, **options)
    finally:
        del distributed_c10d.sorted


def flatten_axes(mesh: Any) -> None:
    """Registers a flattened mesh for every set of axes of a DeviceMesh. Collective.

    DTensor then reduces over them in one call. Without it reduces over one axis after another, and warns of it on every rank.
    """
    wide = [name for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1]
    for count in range(2, len(wide) + 1):
        for names in combinations(wide, count):
            mesh[names]._flatten()


def all_gather_single() -> Callable[..., Any]:
    """An all-gather of one tensor into one: ``all_gather_into_tensor`` before torch 2.13."""
    import torch.distributed as dist

    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single() -> Callable[..., Any]:
    """A reduce-scatter of one tensor into one: ``reduce_scatter_tensor`` before torch 2.13."""
    import torch.distributed as dist

    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
