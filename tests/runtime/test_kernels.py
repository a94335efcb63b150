"""Operators written as expressions compute what the operators do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.dialect.experts import Places
from autopar.dialect.library import WHOLE
from autopar.runtime.instructions.code import Code
from autopar.runtime.instructions.kernels import write_expert_product

EXPERTS, COLUMNS, WIDTH, HIDDEN = 3, 4, 8, 12
SIZES = {"e": EXPERTS, "j": COLUMNS, "k": WIDTH, "n": HIDDEN, "a": 2, "b": 4}
EQUATIONS = [
    "e j k, e k n, e j -> e j n", "e j k, e n k, e j -> e j n", "e j n, e k n, e j -> e j k", "e j k, e j n, e j -> e k n",
    "e j k, e j n, e j -> e n k", "e j a b, e a b n, e j -> e j n", "e j a b, e j n, e j -> e n a b",
]  # fmt: skip


class Counting(Places):
    """Counts how often it is asked."""

    asked = 0

    def find_ends(self, numbers: Tensor, first: int, experts: int) -> Tensor:
        self.asked += 1
        return super().find_ends(numbers, first, experts)


def draw_operands(equation: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    a, b, _ = (term.split() for term in equation.partition("->")[0].split(","))
    ids = torch.tensor([0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2]).view(EXPERTS, COLUMNS)
    return [*(torch.randn([SIZES[name] for name in term], dtype=dtype) for term in (a, b)), ids]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_by_expert_written_as_calls(equation: str) -> None:
    given, places, code = draw_operands(equation, torch.float32), Counting(), Code(1)
    written = write_expert_product(code, equation, EXPERTS, torch.float32, [x.shape for x in given], places, [code.read(x) for x in "abc"])
    code.add(f"{code.write('y')} = {written}")
    values = dict(zip("abc", given, strict=True))
    code.segment("product")([values], {}, None)
    wanted = torch.ops.autopar.expert_contract.default(*given, equation, EXPERTS, WHOLE)
    assert values["y"].is_contiguous()
    assert torch.equal(values["y"], wanted)
    assert places.asked == 1


def test_products_that_torch_does_not_group_are_not_written() -> None:
    given = draw_operands(EQUATIONS[0], torch.float64)
    assert write_expert_product(Code(1), EQUATIONS[0], EXPERTS, torch.float64, [x.shape for x in given], Places(), ["a", "b", "c"]) is None
