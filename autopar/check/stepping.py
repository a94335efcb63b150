"""The optimizer's step: its seconds, and the states that lie on the device, on the host, and on their way through the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum, prod

from autopar.check.differences import Difference
from autopar.check.parts import largest
from autopar.cost_models import Machine, find_optimizer, optimizer_bytes
from autopar.graph import Op, is_matrix, looked_up
from autopar.plan import Plan
from autopar.rows import ParameterSpec, TensorSpec
from autopar.sharding import ShardingSpec


@dataclass(frozen=True)
class Stepping:
    """The optimizer's step on a rank.

    Args:
        seconds: with the copies of states from the host and back.
        resident: bytes of states on the device throughout.
        hosted: bytes of states on the host throughout.
        passing: bytes of those on the device during the step.
    """

    seconds: float
    resident: int
    hosted: int
    passing: int


def stepping(plan: Plan, machine: Machine, ops: Sequence[Op]) -> Stepping:
    """The step as it follows from the rows of parameters and gradients."""
    chosen, rows = plan.model.optimizer, looked_up(ops)
    resident, hosted = list[tuple[int, float]](), list[tuple[int, str, float]]()
    for spec in _trained(plan).values():
        matrix = spec.shape if is_matrix(spec.shape, spec.dtype) and spec.tensor not in rows else None
        elements = local_elements(spec, plan.sizes)
        size = optimizer_bytes(chosen, elements, spec.dtype, matrix is not None)
        seconds = machine.optimizer_seconds(chosen, elements, spec.dtype, matrix, ShardingSpec.parse(spec.spec).split_axes)
        if spec.states_on_host:
            hosted.append((-size, spec.tensor, seconds))
        else:
            resident.append((size, seconds))
    hosted.sort()
    end = _end(fsum(seconds for _, seconds in resident), [(-size, seconds) for size, _, seconds in hosted], machine)
    sizes = [-size for size, _, _ in hosted]
    return Stepping(end, sum(size for size, _ in resident), sum(sizes), sum(sizes[:2]))


def _end(begin: float, hosted: list[tuple[int, float]], machine: Machine) -> float:
    """When the last states are back: those on the device are stepped from 0 to ``begin``. Two slots hold what passes through."""
    slots, compute, ways = [0.0, 0.0], begin, {"in": 0.0, "out": 0.0}
    for number, (size, seconds) in enumerate(hosted):
        copy = machine.transfer_seconds(size)
        ways["in"] = max(ways["in"], slots[number % 2]) + copy
        compute = max(compute, ways["in"]) + seconds
        ways["out"] = slots[number % 2] = max(compute, ways["out"]) + copy
    return max(compute, ways["out"])


def unhostable(plan: Plan, machine: Machine, ops: Sequence[Op]) -> Iterator[Difference]:
    """States that are said to be on the host, and cannot be."""
    hosted = {name: spec for name, spec in plan.parameters.items() if spec.states_on_host}
    trained, rows = _trained(plan), looked_up(ops)
    for name, spec in hosted.items():
        where = f"parameters.{name}.states_on_host"
        if machine.hardware.host is None:
            yield Difference(where, "the plan's hardware has no links.host, by which states are copied")
        elif name not in trained:
            yield Difference(where, "no optimizer steps it")
        elif find_optimizer(plan.model.optimizer).others and is_matrix(spec.shape, spec.dtype) and spec.tensor not in rows:
            yield Difference(where, f"{plan.model.optimizer} steps matrices together, with states on the device")


def _trained(plan: Plan) -> dict[str, ParameterSpec]:
    """The parameters that the optimizer steps, by name."""
    stepped = {name for kind, name, _ in plan.leaving if kind == "gradient"}
    return {name: spec for name, spec in plan.parameters.items() if spec.trained and name in stepped}


def local_elements(row: TensorSpec, sizes: tuple[int, ...]) -> int:
    """Elements of a tensor on the rank that has most."""
    return prod(largest(row.shape, ShardingSpec.parse(row.spec), sizes))
