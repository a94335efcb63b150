"""A model's parameters and buffers as DTensors in the plan's specs: loaded weights kept, meta weights initialised, state loaded.

Every rank slices its own part of a weight; only weights that ranks do not hold equal are sent. The module tree is copied without its
tensors, so names, nesting and the user's own methods stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.attributes import exchanged, note_copy
from autopar.cost_models import Mesh
from autopar.errors import MismatchError
from autopar.runtime.ranks.agreement import everyones, fetch, find_sources, hash_of
from autopar.runtime.ranks.groups import Team
from autopar.runtime.ranks.placement import from_placements, local_part, part_at, to_dtensor
from autopar.schedule import Schedule
from autopar.sharding import ShardingSpec
from autopar.torch_compat import STATE_HOOKS, hooks_of_copy, is_fake, uncompiled

Initialise = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Place:
    """Where this rank's parts go: the mesh in both forms, its processes, the device."""

    mesh: Mesh
    device_mesh: DeviceMesh
    team: Team
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's rank in the mesh."""
        return self.team.rank

    @cached_property
    def device_type(self) -> str:
        """Which a device writes out anew each time that it is asked."""
        return self.device.type

    def own_shape(self, shape: Sequence[int], spec: ShardingSpec) -> tuple[int, ...]:
        """The shape this rank holds of a tensor of global ``shape``."""
        return spec.own_shape(shape, self.mesh.sizes, self.mesh.coordinates(self.rank))

    def own_part(self, tensor: torch.Tensor, spec: ShardingSpec) -> torch.Tensor:
        """This rank's part of a global tensor (or of a DTensor in any placement), in its own storage on the device."""
        if isinstance(tensor, DTensor):
            if tensor.device_mesh == self.device_mesh:
                held = from_placements(tensor.placements, tensor.dim(), self.mesh.sizes)
                if held == spec:
                    return tensor.to_local().detach()
                missing = [(dim, mine) for dim, (mine, wanted) in enumerate(zip(held.dims, spec.dims, strict=True)) if mine != wanted]
                alike = not (held.partial or held.blocks or spec.blocks)
                if alike and not any(mine for _, mine in missing):  # whole in what is still to be cut
                    cut = ShardingSpec(tuple(() if mine else wanted for mine, wanted in zip(held.dims, spec.dims, strict=True)))
                    part = local_part(tensor.to_local().detach(), cut, self.mesh, self.rank)
                    return torch.empty(part.shape, dtype=part.dtype, device=self.device).copy_(part)
            tensor = tensor.full_tensor()
        part = local_part(tensor.detach(), spec, self.mesh, self.rank)
        return torch.empty(part.shape, dtype=part.dtype, device=self.device).copy_(part)

    def dtensor(self, local: torch.Tensor, spec: ShardingSpec, shape: Sequence[int]) -> DTensor:
        """The DTensor of which this rank holds ``local``."""
        return to_dtensor(local, spec, shape, self.device_mesh)


def has_no_values(tensor: torch.Tensor) -> bool:
    """A meta or fake tensor."""
    return tensor.is_meta or is_fake(tensor)


def own_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Every place a parameter or buffer is kept, tied ones at each of their names: (full name, module, name in it, tensor)."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, module, name, tensor


def own_specs(schedules: Iterable[Schedule]) -> dict[str, ShardingSpec]:
    """How the parameters and buffers of schedules lie, by name, in the model's own shapes."""
    return {
        item.name: item.own_spec(schedule.specs[item.tensor], schedule.machine.mesh.sizes)
        for schedule in schedules for item in schedule.graph.inputs if item.kind in ("parameter", "buffer")
    }  # fmt: skip


def without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that nobody has given values: not a number everywhere, so that using it shows; zero where numbers are whole."""
    marked = dtype.is_floating_point and dtype.itemsize > 1
    return torch.full(tuple(shape), float("nan") if marked else 0, dtype=dtype, device=device)


def own_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``own_tensors`` by full name."""
    return ((name, tensor) for name, _, _, tensor in own_tensors(model))


def copy_tree(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """The module with every parameter and buffer replaced by ``tensors[id(it)]``; shared submodules stay shared, and modules, their methods
    and tensors that attributes hold, in plain lists too, are those of the copy."""
    done: dict[int, nn.Module] = {}
    copied = _copied(module, tensors, done)
    others = {**tensors, **done}
    for part in done.values():
        part.__dict__.update({name: exchanged(value, others) for name, value in part.__dict__.items() if name not in _REGISTERED})
        part.__dict__.update({kind: hooks_of_copy(part.__dict__[kind], lambda one: exchanged(one, others)) for kind in STATE_HOOKS})
    return copied


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _copied(module: nn.Module, tensors: Mapping[int, torch.Tensor], done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    copied = module.__class__.__new__(module.__class__)
    done[id(module)] = copied
    copied.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        held = module.__dict__[kind]
        copied.__dict__[kind] = {name: None if tensor is None else tensors[id(tensor)] for name, tensor in held.items()}
    copied.__dict__["_modules"] = {
        name: None if child is None else _copied(child, tensors, done) for name, child in module._modules.items()
    }  # fmt: skip
    uncompiled(copied)
    note_copy(copied, module)
    return copied


def shard_weights(
    model: nn.Module, specs: Mapping[str, ShardingSpec], place: Place, team: Team | None = None, left_out: Set[int] = frozenset()
) -> tuple[dict[int, torch.Tensor], set[int]]:
    """A DTensor for each parameter and buffer, by the original's identity, and the identities still without values. Collective.

    Attributes that a user has set on a tensor (``no_weight_decay``), by which optimizers' groups are told, are those of its DTensor too.

    Args:
        specs: by any of a tensor's names; a tensor without one is replicated (the graph does not use it).
        team: the processes that hold the model; those of the place when not given.
        left_out: identities of tensors that this rank has no part of; where they have no values, they are among the empty ones.

    Raises:
        MismatchError: ranks hold models of other names, shapes or dtypes.
    """
    found: dict[int, torch.Tensor] = {}
    empty: set[int] = set()
    named: dict[int, str] = {}
    for name, _, _, tensor in own_tensors(model):
        if name in specs or id(tensor) not in named:
            named[id(tensor)] = name
    held = {named[id(tensor)]: tensor for _, _, _, tensor in own_tensors(model)}
    team = team or place.team
    sources = find_sources(held, team)
    for name, tensor in held.items():
        spec = specs.get(name, ShardingSpec.replicated(tensor.dim()))
        whole = fetch(tensor, sources[name], team, place.device) if name in sources else tensor
        if id(tensor) in left_out:
            if has_no_values(whole):
                empty.add(id(tensor))
            continue
        if name in sources:
            local = place.own_part(whole, spec)
        elif has_no_values(tensor):
            empty.add(id(tensor))
            local = without_values(place.own_shape(tensor.shape, spec), tensor.dtype, place.device)
        else:
            local = place.own_part(tensor, spec)
        sharded: torch.Tensor = place.dtensor(local, spec, tensor.shape)
        made = nn.Parameter(sharded, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else sharded
        made.__dict__.update({key: tensor.__dict__[key] for key in tensor.__dict__.keys() - tensor.detach().__dict__.keys()})
        found[id(tensor)] = made
    return found, empty


def initialise(
    model: nn.Module, found: Mapping[int, torch.Tensor], empty: set[int], init: Initialise | None, seed: int, place: Place
) -> None:  # fmt: skip
    """Gives values to the meta weights in ``empty``, in place, and takes them out of the set.

    With ``init``, the whole model is made once on the device and handed to it. Without, each submodule that has
    ``reset_parameters`` is made alone, so that at most one submodule is whole at a time; one with buffers alone by a model's own
    ``_init_weights(submodule)``. What no such method covers stays empty until a state dict is loaded. All ranks draw from one seed, so they
    agree. What an initialiser leaves untouched stays empty too.
    """
    if not empty:
        return
    whole_device = place.device
    with torch.random.fork_rng(devices=[whole_device] if whole_device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if whole_device.type == "cuda":
            with torch.cuda.device(whole_device):
                torch.cuda.manual_seed(seed)  # of this GPU alone, which is restored
        if init is not None:
            names = {name for name, _, _, tensor in own_tensors(model) if id(tensor) in empty}
            _fill(model, model, lambda copied: _agreeing(init, copied, names, place), found, empty, place)
            return
        library_init = getattr(model, "_init_weights", None)  # of transformers: it makes tables of rotary embeddings
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            direct = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
            if not any(id(tensor) in empty for tensor in direct):
                continue
            if reset is not None:
                _fill(module, model, lambda copied: copied.reset_parameters(), found, empty, place)
            elif library_init is not None and not module._parameters:
                _fill(module, model, library_init, found, empty, place)


def _agreeing(init: Initialise, model: nn.Module, names: Set[str], place: Place) -> None:
    """Runs the user's ``init``. Raises MismatchError: it gives one of these tensors other values on other ranks. Collective."""
    init(model)
    made = {name: hash_of(tensor) for name, _, _, tensor in own_tensors(model) if name in names}
    everyone = everyones(made, place.team)
    for name in made:
        rank = next((rank for rank, theirs in enumerate(everyone) if theirs[name] != everyone[0][name]), None)
        if rank is not None:
            hint = "draw from torch's generator alone, which is seeded the same on all ranks, or read one file"
            raise MismatchError(f"init gives {name} other values on rank {rank} than on rank 0", hint)


def _fill(module: nn.Module, model: nn.Module, init: Initialise, found: Mapping[int, torch.Tensor], empty: set[int], place: Place) -> None:
    whole: dict[int, torch.Tensor] = {}
    for _, _, _, tensor in own_tensors(module):
        if id(tensor) not in whole:
            values = without_values(tensor.shape, tensor.dtype, place.device)
            if not has_no_values(tensor):
                values.copy_(tensor.detach())
            whole[id(tensor)] = nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    copied = copy_tree(module, whole)
    init(copied)
    after = {name: tensor for name, _, _, tensor in own_tensors(copied)}
    for name, _, _, tensor in own_tensors(module):
        untouched = after[name].is_floating_point() and bool(after[name].isnan().all())
        if id(tensor) in empty and not untouched:
            empty.discard(id(tensor))
            sharded = found.get(id(tensor))
            if sharded is None:
                continue  # of another stage of a pipeline; drawn here too, so that numbers do not depend on the cut
            assert isinstance(sharded, DTensor)
            spec = from_placements(sharded.placements, sharded.dim(), place.mesh.sizes)
            with torch.no_grad():
                sharded.to_local().copy_(local_part(after[name].detach(), spec, place.mesh, place.rank))


def as_placed(value: torch.Tensor, like: DTensor, name: str, place: Place) -> DTensor:
    """A loaded value, whole or a DTensor in any placement, as a DTensor placed as ``like``.

    Raises:
        MismatchError: another shape.
    """
    if tuple(value.shape) != tuple(like.shape):
        raise MismatchError(
            f"the state dict holds {name} with shape {list(value.shape)}, the model has {list(like.shape)}",
            "load the state of the same model; whole tensors and DTensors are both fine",
        )
    device_mesh = like.device_mesh
    sizes = tuple(device_mesh.shape)
    spec = from_placements(like.placements, like.dim(), sizes)
    if device_mesh == place.device_mesh:
        return place.dtensor(place.own_part(value, spec), spec, like.shape)
    whole, coordinates = value.full_tensor() if isinstance(value, DTensor) else value, device_mesh.get_coordinate()
    assert coordinates is not None, "a rank without a part of the model loads no state"
    part = part_at(whole.detach(), spec, sizes, coordinates)  # another wrapper, as fully_shard, has laid it on a mesh of its own
    return to_dtensor(torch.empty(part.shape, dtype=part.dtype, device=place.device).copy_(part), spec, like.shape, device_mesh)
