"""What the table says of an operator beside its rule, against torch itself: floating point operations and shared storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autopar.dialect.library import BODIES, STILL
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.importer.layers.equal_layers import find_groups
from autopar.rules import STORING, count_entries, find_rule, flops, is_alias, localize, looked_up, seed_of, stores, strategies, why_once
from autopar.rules.lookup import find_row
from autopar.rules.signature import Row, signature
from autopar.rules.table import ROWS
from autopar.runtime.instructions.inner import BODIES as SPLIT_BODIES
from autopar.runtime.instructions.operators import find_operator, registered
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


DRAWING = [row for row in ROWS if row.family == "random" or row.seed is not None]


def drawing_cases(row: Row) -> list[Case]:
    return [case for case in CASES if case.target == f"{row.name}.default"]


@pytest.mark.parametrize("row", DRAWING, ids=lambda row: row.name)
def test_operator_that_draws_has_a_seed_a_constant_twin_and_a_case(row: Row) -> None:
    """What else is known of it follows from the seed in its row and from ``still`` where it is defined."""
    target, cases = f"{row.name}.default", drawing_cases(row)
    assert row.family == "random" and row.seed is not None, "its row is of the family random and has a seed"
    assert cases and all(case.random for case in cases), "tests/rules has a case of it, marked random"
    assert registered(target)._schema.arguments[row.seed].name == "seed"
    assert target in STILL, "it is defined with still="
    assert not why_once(executed_op(row)), "the same seed draws the same, so that it may run twice"
    for case in cases:
        arguments = case.drawn()
        still, drawn = STILL[target](*arguments), registered(target)(*arguments)
        others = STILL[target](*arguments[: row.seed], arguments[row.seed] + 1, *arguments[row.seed + 1 :])
        for one, other, real in zip(results(still), results(others), results(drawn), strict=True):
            assert torch.equal(one, other), "a constant does not depend on the seed"
            assert (one.shape, one.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("row", DRAWING, ids=lambda row: row.name)
def test_layers_that_draw_are_equal_whatever_their_seeds(row: Row) -> None:
    graph = layers_of(executed_op(row), (0, 1, 2))
    ((*repeats,),) = find_groups(graph)
    assert len(repeats) == 3


@pytest.mark.parametrize("row", DRAWING, ids=lambda row: row.name)
def test_parts_draw_of_seeds_of_their_own(row: Row) -> None:
    found = run(drawing_cases(row)[0])
    tensors = [found.tensors[name] for name in (*found.op.inputs, *found.op.outputs)]
    split = [one for one in strategies(find_rule(found.op, found.tensors), tensors, (2,)) if one.outputs[0].split_axes]
    assert split
    for strategy in split:
        seeds = {localize(found.op, found.tensors, strategy, (2,), (rank,))[0][row.seed or 0] for rank in range(2)}
        assert len(seeds) == 2


def test_every_operator_of_the_dialect_that_draws_has_a_row_that_says_so() -> None:
    seeded = {
        f"autopar.{name}.default" for name in BODIES
        if any(item.name == "seed" for item in registered(f"autopar.{name}.default")._schema.arguments)
    }  # fmt: skip
    assert seeded == STILL.keys() == {f"{row.name}.default" for row in DRAWING}


def executed_op(row: Row) -> Op:
    return run(drawing_cases(row)[0]).op


def results(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def layers_of(op: Op, seeds: tuple[int, ...]) -> Graph:
    """Layers of one operator that draws, each with a seed of its own and reading what the one before made."""
    place = seed_of(op)
    assert place is not None
    tensors, ops, last = (
        {name: Tensor(name, (4, 6), "float32") for name in "xy"},
        [Op("y", "aten.neg.default", ("x",), ("y",), (Ref(0),))],
        "y",
    )
    for layer, seed in enumerate(seeds):
        names = [f"y{layer}" if not index else f"y{layer}:{index}" for index in range(len(op.outputs))]
        tensors |= {name: Tensor(name, (4, 6), "float32") for name in names}
        args = (Ref(0), *op.args[1:place], seed, *op.args[place + 1 :])
        ops.append(Op(names[0], op.target, (last,), tuple(names), args, module=f"layers.{layer}"))
        last = names[0]
    return Graph("inference", tensors, (GraphInput("x", "input", "x"),), tuple(ops), (GraphOutput(last, "output", "0"),))


def test_rules_with_collectives_inside_have_bodies() -> None:
    """Statistics of a split factor, halves that are traded, and parts that travel are each exchanged by a body for one rank."""
    needed: set[str] = set()
    for case in CASES:
        executed = run(case)
        rule = find_rule(executed.op, executed.tensors)
        name = case.target.rpartition(".")[0]
        needed |= {name} if rule.inner else set()
        needed |= {f"{name} mirrored"} if rule.mirror else set()
        needed |= {f"{name} ring"} if rule.ring else set()
    assert needed and needed <= SPLIT_BODIES.keys(), needed - SPLIT_BODIES.keys()


def test_operators_that_store_are_twins_of_ones_that_give_a_result() -> None:
    assert len(STORING) == sum(row.stores for row in ROWS) == 2
    for made, stored in STORING.items():
        assert find_row(made) is not None and why_once(Op("", stored, (), ()))
        assert stores(Op("", stored, (), ())) and not stores(Op("", made, (), ()))
        assert registered(stored)._schema.is_mutable and not registered(made)._schema.is_mutable


def test_numbers_that_are_looked_up_are_of_entries_that_are_there() -> None:
    """torch refuses the first number that is not, where it looks."""
    refused: set[str] = set()
    for case in CASES:
        executed = run(case)
        lookup = looked_up(executed.op)
        if lookup is None or executed.inputs[lookup.numbers].dtype != torch.int64:
            continue
        count = count_entries(executed.op, executed.tensors)
        assert executed.inputs[lookup.numbers].max() < count, case
        arguments = case.drawn()
        (place,) = [index for index, item in enumerate(arguments) if item is not None and same(item, executed.inputs[lookup.numbers])] or [
            None
        ]
        if case.target.startswith("aten.") and place is not None:
            with pytest.raises((IndexError, RuntimeError)):
                registered(case.target)(
                    *arguments[:place], torch.full_like(arguments[place], count), *arguments[place + 1 :], **case.kwargs
                )
            refused.add(case.target.rpartition(".")[0])
    assert {"aten.embedding", "aten.gather", "aten.one_hot", "aten.index_select", "aten.index_add", "aten.scatter_add"} <= refused


def same(item: Any, tensor: torch.Tensor) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype == tensor.dtype and torch.equal(item, tensor)


def test_facts_name_arguments_of_their_signature() -> None:
    for row in ROWS:
        names = {parameter.name for parameter in signature(row.operator)}
        lookup = row.looks_up
        asked = {lookup.size, lookup.ignored, lookup.dim if isinstance(lookup.dim, str) else ""} if lookup is not None else set()
        asked |= {"gates", "cell"} if row.kernels else set()
        assert asked - {""} <= names, row.name


def test_operators_that_read_a_shape_alone_give_the_same_whatever_the_values() -> None:
    asked: set[str] = set()
    for case in CASES:
        row = find_row(case.target)
        if row is None or row.reads != "shape" or case.random:
            continue
        arguments, keywords = case.drawn(), {name: with_tensors(value) for name, value in case.kwargs.items()}
        first = find_operator(case.target)(*arguments, **keywords)
        assert torch.equal(first, find_operator(case.target)(-7 * arguments[0] - 3, *arguments[1:], **keywords)), case
        asked.add(row.name)
    assert {"aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.new_zeros"} <= asked
