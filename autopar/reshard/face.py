"""``autopar.reshard``: the planner for people. Reads texts, checks them, and says what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.cost_models import CostModelError, Hardware, Machine, Mesh, load_hardware
from autopar.errors import AutoparError, FileError, SpecError, UsageError
from autopar.graph import DTYPE_BYTES
from autopar.reshard.planning import find_reshard
from autopar.reshard.steps import Reshard
from autopar.sharding import ShardingSpec


def reshard(
    shape: Sequence[int],
    dtype: object,
    mesh: str | Mapping[str, int] | Mesh,
    source: str | ShardingSpec,
    target: str | ShardingSpec,
    hardware: str | Path | Hardware,
) -> Reshard:
    """The cheapest collectives that turn a tensor from one sharding spec into another.

    Args:
        shape: of the whole tensor.
        dtype: its name (``bfloat16``) or the torch dtype.
        mesh: ``dp=2,tp=4``, ``2x4``, a mapping of axis names to sizes, or a Mesh.
        source: the spec it has, e.g. ``S0 R`` or ``S0 R +P1``.
        target: the spec it is to have.
        hardware: a built-in name, the path of a TOML file, or a Hardware.

    Returns:
        The steps in order, with their price; ``print`` shows them as a table.

    Raises:
        SpecError: a spec that cannot be read, does not fit the tensor or mesh, or cannot be reached from the other.
        UsageError: an unknown dtype, mesh or hardware, or a negative extent.
        FileError: a hardware file that cannot be used.

    >>> print([step.kind for step in reshard((64, 64), "float32", "2x2", "S0 S1", "S1 S0", "h100-sxm").steps])
    ['permute']
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UsageError(f"unknown dtype {name!r}", f"use one of {', '.join(DTYPE_BYTES)}")
    extents = tuple(shape)
    if not all(isinstance(extent, int) and extent >= 0 for extent in extents):
        raise UsageError(f"{list(extents)} is not a tensor shape", "give the whole tensor's extents as whole numbers")
    try:
        machine = Machine(Mesh.parse(mesh), load_hardware(hardware))
    except CostModelError as error:
        raise (UsageError if error.exit_status == UsageError.exit_status else FileError)(error.message, error.hint) from error
    specs = [_legal(spec, extents, machine.mesh) for spec in (source, target)]
    found = find_reshard(extents, DTYPE_BYTES[name], specs[0], specs[1], machine, fine=True)
    if found is None:
        raise _unreachable(specs[0], specs[1])
    return found


def _legal(spec: str | ShardingSpec, shape: tuple[int, ...], mesh: Mesh) -> ShardingSpec:
    parsed = ShardingSpec.parse(spec) if isinstance(spec, str) else spec
    problem = parsed.problem(shape, mesh.sizes)
    if problem is None and parsed.blocks:
        hint = "give the dim as two, the block and the place in it: S0/3 of [768] is R S0 of [3, 256]"
        raise SpecError(f"reshards of blocks are not planned ({parsed!s})", hint)
    if problem is not None:
        axes = ", ".join(f"{index} is {name} of size {size}" for index, (name, size) in enumerate(mesh.axes))
        raise SpecError(problem, f"the mesh's axes: {axes}; write R or S with axis digits for each of the {len(shape)} dims")
    return parsed.normalized(mesh.sizes)


def _unreachable(source: ShardingSpec, target: ShardingSpec) -> AutoparError:
    if set(target.partial) <= set(source.partial):
        return SpecError(f"the order of the reductions pending in {source} is not known", "reduce over the axes of one reduction first")
    hint = "leave out the +P of the target"
    what = "a whole value can be made a partial sum, not a partial maximum or minimum"
    return SpecError(f"nothing turns {source} into {target}: {what}", hint)
