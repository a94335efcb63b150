"""Both gradients of a convolution in one call.

A plan has them as two operators, since each splits differently. Torch has one operator for both, which costs the host half as much.
They run together where one stands behind the other, a rank's parts fit, and the peak of memory does not rise: what only the first reads
is held until the second is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.graph import Ref
from autopar.runtime.instructions.code import Code
from autopar.runtime.instructions.kernels import write_call
from autopar.schedule import Instruction, Schedule
from autopar.schedule.liveness import held
from autopar.schedule.storages import storage_bytes

TO_INPUT, TO_WEIGHT = "autopar.convolution_input_gradient.default", "autopar.convolution_weight_gradient.default"


def find_gradient_pairs(schedule: Schedule, parts: Collection[int] = ()) -> Mapping[int, int]:
    """The index of the gradient for the weight by that of the gradient for the input.

    Args:
        parts: indices at which a part of the step begins that is run by itself.
    """
    items, found = schedule.instructions, dict[int, int]()
    places = [index for index, item in enumerate(items) if item.kind != "free"]
    for index, second in pairwise(places):
        apart = any(index < part <= second for part in parts)
        if not apart and _go_together(schedule, items[index], items[second]) and _fits(schedule, index, second):
            found[index] = second
    return found


def _fits(schedule: Schedule, first: int, second: int) -> bool:
    """Whether the peak stays as it is, if what is freed between two instructions is held until the second."""
    freed = {schedule.storage[value] for item in schedule.instructions[first + 1 : second] for value in item.reads}
    if not freed:
        return True
    bytes_held = schedule.once(_bytes_held)
    return bytes_held[second] + sum(storage_bytes(schedule, value) for value in freed) <= max(bytes_held)


def _bytes_held(schedule: Schedule) -> list[int]:
    return held(schedule, "none")


def _go_together(schedule: Schedule, first: Instruction, second: Instruction) -> bool:
    """Whether one is the gradient for the input, the next that for the weight, of one convolution and of parts that fit."""
    if first.kind != "run" or second.kind != "run" or (first.half, first.microbatch) != (second.half, second.microbatch):
        return False
    to_input, to_weight = schedule.operations[first.of], schedule.operations[second.of]
    if (to_input.op.target, to_weight.op.target) != (TO_INPUT, TO_WEIGHT) or to_input.copied or to_weight.copied:
        return False
    (gradient, weight), (other, x) = first.reads, second.reads
    is_one = gradient == other and to_input.op.args[3:] == to_weight.op.args[3:]
    made, its = (first.writes[0], second.writes[0]), (x, weight)
    return is_one and all(_lengths(schedule, one) == _lengths(schedule, two) for one, two in zip(made, its, strict=True))


def _lengths(schedule: Schedule, value: str) -> tuple[object, ...]:
    """What the lengths of a value's dims follow from, on every rank."""
    shape = schedule.graph.tensors[schedule.values[value].tensor].shape
    return schedule.specs[value].lengths(shape, schedule.machine.mesh.sizes)


def write_gradient_pair(code: Code, args: Sequence[Any], reads: Sequence[str], others: Sequence[str]) -> str:
    """The expression of both results.

    Args:
        args: of the gradient for the input, on this rank.
        reads, others: the variables that it and the gradient for the weight read.
    """
    return write_call(code, _gradients, (Ref(0), Ref(1), Ref(2), *args[3:]), {}, (reads[0], others[1], reads[1]))


def _gradients(gradient: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    stride, padding, dilation, groups = settings
    zeros, wanted = [0] * len(stride), [True, True, False]
    to_input, to_weight, _ = torch.ops.aten.convolution_backward.default(
        gradient, x, weight, None, stride, padding, dilation, False, zeros, groups, wanted
    )  # fmt: skip
    return to_input.contiguous(), to_weight.contiguous()
