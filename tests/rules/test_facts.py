"""What the table says of an operator beside its rule, against torch itself: floating point operations and shared storage."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autopar.dialect.library import BODIES
from autopar.rules import find_rule, flops, is_alias
from autopar.rules.lookup import find_row
from autopar.runtime.operators import find_operator
from tests.rules.cases import CASES
from tests.rules.drawing import Case
from tests.rules.drawing import drawn as with_tensors
from tests.rules.execution import Executed, execute

COUNTED = {"contraction", "grouped", "convolution", "attention", "attention_backward", "recurrence", "recurrence_backward"}
"""The work of the table that is exact."""


def run(case: Case) -> Executed:
    return execute(case.target, case.drawn(), {name: with_tensors(value) for name, value in case.kwargs.items()})


def counted(case: Case) -> float:
    """What torch counts while the operator runs whole, for one of the dialect while its body does."""
    namespace, _, rest = case.target.partition(".")
    if "attention" in rest:
        backward = "backward" in rest
        q, k, v = ((*tensor.shape[:1], case.drawn()[int(backward)].shape[1], *tensor.shape[2:]) for tensor in case.drawn()[backward:][:3])
        return float(sdpa_backward_flop_count((*q[:3], v[3]), q, k, v) if backward else sdpa_flop_count(q, k, v))
    function: Any = BODIES[rest.partition(".")[0]] if namespace == "autopar" else find_operator(case.target)
    arguments, keywords = case.drawn(), {name: with_tensors(value) for name, value in case.kwargs.items()}
    with FlopCounterMode(display=False) as counter:
        function(*arguments, **keywords)
    return float(counter.get_total_flops())


def test_floating_point_operations_are_those_that_torch_counts() -> None:
    compared: set[str] = set()
    for case in CASES:
        row = find_row(case.target)
        assert row is not None
        found = counted(case)
        if row.work not in COUNTED:
            assert not found or row.work == "matrices" or row.family in ("contraction", "reduction", "normalisation"), case
            continue
        executed = run(case)
        work = flops(executed.op, executed.tensors)
        if row.work.startswith("attention") and "True" in str(executed.op.args):
            work *= 2  # a fused kernel leaves out what a causal mask hides
        groups = find_rule(executed.op, executed.tensors).extent.get("g", 1)
        if groups > 1 and ("gradient" in case.target or "backward" in case.target):
            continue  # torch counts the gradient of a weight as if all channels were one group
        if found and row.work != "grouped":
            assert work == found, f"{case}: {work} in the table, {found} counted"
            compared.add(row.work)
    assert compared == COUNTED - {"grouped"}


def test_results_share_storage_where_the_table_says_so_and_nowhere_else() -> None:
    """Output 0 of an alias lies where input 0 does, and so do its others; no other result lies in an input."""
    for case in CASES:
        if case.random:
            continue
        executed = run(case)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in executed.inputs if tensor.numel()}
        results = [tensor.untyped_storage().data_ptr() for tensor in executed.outputs if tensor.numel()]
        if is_alias(executed.op):
            first = executed.inputs[0].untyped_storage().data_ptr()
            assert all(result == first for result in results), f"{case}: said to be a view"
        else:
            assert not inputs.intersection(results), f"{case}: said to have memory of its own"
