"""``issued_kernels`` of every row, against the calls of torch that its body makes on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_models.collectives import KINDS
from autopar.dialect import attention_kernels
from autopar.dialect.experts import FIRST_EXPERT
from autopar.dialect.library import BODIES as DIALECT
from autopar.dialect.library import WHOLE
from autopar.dialect.lookup import OFFSETS
from autopar.graph import Graph, Op, Ref, Tensor
from autopar.rules import find_fusable_additions, find_rule, issued_kernels, localize, reads_back, strategies, way_of
from autopar.rules.expansion import plain_factors
from autopar.rules.launches import CALLS_INSIDE, FORMULAS, IGNORED_CHECK, INDEX_CHECK, INSIDE, READING, sends_copy
from autopar.rules.table import ROWS
from autopar.runtime.instructions.inner import BODIES, body
from autopar.runtime.instructions.kernels import bind_kernel
from autopar.runtime.instructions.operators import find_function, with_tensors, with_torch_values
from autopar.sharding import Strategy
from benchmarks.host import counted_kernels
from tests.rules.cases import CASES
from tests.rules.drawing import Case, drawn
from tests.rules.execution import Executed, cut, execute

SIZES = (2,)
ELSEWHERE = ("attention", "aten.one_hot", "aten._fused_rms_norm")
"""Operators whose kernels on a CPU are others than on a GPU."""
CHECKED = {"autopar.embedding.default": INDEX_CHECK, "autopar.nll_loss.default": INDEX_CHECK + IGNORED_CHECK}
"""Kernels of the check of indices, a statement of its own before the operator."""
FACTOR = {"autopar.embedding": "v", "autopar.nll_loss": "c", "autopar.expert_contract": "e"}
"""The factor of whose parts a rank has to know which is its own."""
LAYOUTS = 3
"""Copies of attention that depend on how operands lie in memory: of the result, or of three gradients."""
UNCOUNTED = frozenset({"promote_types.default"})
"""Questions about dtypes, which run nothing."""


def count_on_rank(run: Executed, strategy: Strategy, rank: int, device: str = "cpu", dtype: torch.dtype | None = None) -> int:
    """Calls of torch that the body makes on a rank, without collectives inside it."""
    args, kwargs = localize(run.op, run.tensors, strategy, SIZES, (rank,))
    args = list(args)
    if not splits(run.op, strategy):
        for place in {OFFSETS.get(run.op.target), FIRST_EXPERT if "expert_contract" in run.op.target else None} - {None}:
            args[place] = WHOLE
    local = [moved(cut(value, spec, SIZES)[rank], device, dtype) for value, spec in zip(run.inputs, strategy.inputs, strict=True)]
    given, named = with_torch_values(args), with_torch_values(dict(kwargs))
    kernel = bind_kernel(run.op, find_function(run.op.target), given, named, [value.shape for value in local])
    with torch.no_grad(), counted_kernels() as found:
        if strategy.inner:
            run_alone(body(run.op, strategy, SIZES, with_tensors(given, local), with_tensors(named, local)))
        else:
            kernel(local)
    return sum(count for name, count in found.items() if name not in UNCOUNTED)


def splits(op: Op, strategy: Strategy) -> bool:
    """Whether a rank has a part of what an operator looks up."""
    factor = next((factor for name, factor in FACTOR.items() if op.target.startswith(name)), "")
    return bool(plain_factors(strategy).get(factor))


def moved(tensor: torch.Tensor, device: str, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)


def run_alone(running: Any) -> None:
    """Runs a body that receives its own tensors."""
    answer = None
    while True:
        try:
            item, tensor = running.send(answer)
        except StopIteration:
            return
        kind = KINDS[item.kind]
        if kind.leaves_full != kind.takes_full:
            tensor = tensor.new_empty(tensor.numel() * SIZES[0] if kind.leaves_full else tensor.numel() // SIZES[0])
        answer = tensor if item.beside is None else lambda tensor=tensor: tensor


def split_ways(run: Executed) -> Iterator[Strategy]:
    yield from strategies(find_rule(run.op, run.tensors), run.own, SIZES)


def drawn_run(case: Case) -> Executed:
    torch.manual_seed(0)
    return execute(case.target, case.drawn(), {name: drawn(value) for name, value in case.kwargs.items()})


@pytest.mark.parametrize("case", [case for case in CASES if not any(name in case.target for name in ELSEWHERE)], ids=str)
def test_rows_count_the_calls_of_their_bodies(case: Case) -> None:
    """Where an expert has no rows, a rank runs fewer."""
    run = drawn_run(case)
    for strategy in split_ways(run):
        wanted = own_kernels(run.op, run.tensors, strategy)
        wanted -= CHECKED.get(run.op.target, 0) if splits(run.op, strategy) else 0
        found = max(count_on_rank(run, strategy, rank) for rank in range(2))
        spared = 8 if run.op.target.startswith(("autopar.expert_contract", "autopar.grouped")) else 0
        assert wanted - spared <= found <= wanted + (spared > 0), (strategy, found, wanted)


def own_kernels(op: Op, tensors: dict[str, Tensor], strategy: Strategy) -> int:
    """Kernels without the collectives inside, and the copies that these send."""
    return issued_kernels(op, tensors, strategy, SIZES) - sum(CALLS_INSIDE + sends_copy(item) for item in strategy.inner)


NARROW = (
    "_softmax", "aten.var", "aten.std", "aten.logsumexp", "linalg_vector_norm", "aten.norm", "autopar.batch_norm.", "embedding", "nll_loss",
)  # fmt: skip
"""Operators whose bodies convert what is narrow, beside RMS norms, whose statistics stay wide."""


@pytest.mark.parametrize("case", [case for case in CASES if any(name in case.target for name in NARROW)], ids=str)
def test_bodies_of_narrow_dtypes_convert(case: Case) -> None:
    run = drawn_run(case)
    if "half_to_float" in str(case) or any(value is torch.float64 for value in case.drawn()):
        pytest.skip("the case names a dtype")
    tensors = {name: replace(value, dtype="bfloat16") if value.dtype.startswith("float") else value for name, value in run.tensors.items()}
    for strategy in split_ways(run):
        wanted = own_kernels(run.op, tensors, strategy)
        wanted -= CHECKED.get(run.op.target, 0) if splits(run.op, strategy) else 0
        assert count_on_rank(run, strategy, 0, "meta", torch.bfloat16) == wanted, strategy


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norms_of_narrow_dtypes_convert(weighted: bool) -> None:
    x, weight, rstd = (torch.randn(shape, dtype=dtype) for shape, dtype in (
        ((2, 3, 8), torch.bfloat16), ((8,), torch.bfloat16), ((2, 3, 1), torch.float32)
    ))  # fmt: skip
    given = weight if weighted else None
    for target, args in (("rms_norm", (x, [8], given, 1e-5)), ("rms_norm_backward", (x, x, [8], rstd, given))):
        run = execute(f"autopar.{target}.default", args)
        whole = next(iter(split_ways(run)))
        assert count_on_rank(run, whole, 0) == issued_kernels(run.op, run.tensors, whole, SIZES)


def test_batch_norm_in_half_precision_converts_what_is_not_wide() -> None:
    narrow, wide = (torch.rand(4, dtype=dtype) + 1 for dtype in (torch.bfloat16, torch.float32))
    x = torch.randn(2, 4, 3, 3, dtype=torch.bfloat16)
    for weight, running in ((narrow, narrow), (narrow, wide), (wide, wide)):
        run = execute("autopar.batch_norm.default", (x, weight, weight, running, running, 0.1, 1e-5))
        back = execute("autopar.batch_norm_backward.default", (x, x, weight, wide, wide))
        for one in (run, back):
            for strategy in split_ways(one):
                assert count_on_rank(one, strategy, 0) == own_kernels(one.op, one.tensors, strategy), strategy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [case for case in CASES if "attention" in case.target], ids=str)
def test_attention_counts_the_calls_of_a_gpu(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    run = drawn_run(case)
    name = str(dtype).removeprefix("torch.")
    tensors = {key: replace(value, dtype=name) if value.dtype.startswith("float") else value for key, value in run.tensors.items()}
    monkeypatch.setattr(attention_kernels, "choose_kernel", fused_kernel)
    for strategy in split_ways(run):
        if not way_of(strategy):
            found = max(count_on_rank(run, strategy, rank, "meta", dtype) for rank in range(2))
            wanted = issued_kernels(run.op, tensors, strategy, SIZES)
            assert wanted <= found <= wanted + LAYOUTS, (strategy, found, wanted)


def fused_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, *, backward: bool
) -> str:  # fmt: skip
    """What ``choose_kernel`` says on a GPU, of heads that its kernels take."""
    return "flash" if mask is None and q.dtype in (torch.bfloat16, torch.float16) else "efficient"


@pytest.mark.parametrize("case", [case for case in CASES if "attention" in case.target], ids=str)
def test_ways_of_attention_count_what_they_add_to_its_calls(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls themselves are operators of the dialect, counted one by one."""
    run, calls = drawn_run(case), list[int]()
    for strategy in split_ways(run):
        if way_of(strategy):
            calls.clear()
            found = count_on_rank(run, strategy, 1)
            turns = strategy.turns if way_of(strategy) == "ring" else 2
            plain = replace(strategy, inner=(), factors=tuple((name.partition(" ")[0], axes) for name, axes in strategy.factors))
            each = issued_kernels(run.op, run.tensors, plain, SIZES)
            wanted = own_kernels(run.op, run.tensors, strategy)
            if way_of(strategy) == "mirrored":
                assert wanted == found + turns * each
            else:
                assert wanted > found and (wanted - found) % turns == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_strategy_issues_fewer_than_the_fewest(case: Case) -> None:
    run = drawn_run(case)
    least = issued_kernels(run.op, run.tensors)
    for strategy in split_ways(run):
        assert least <= issued_kernels(run.op, run.tensors, strategy, SIZES), strategy


GROUPED = "e j k, e k n, e j -> e j n", "e j k, e j n, e j -> e k n"


@pytest.mark.parametrize("equation", GROUPED)
@pytest.mark.parametrize("first", [WHOLE, 0])
def test_grouped_products_count_the_calls_of_a_gpu(equation: str, first: int) -> None:
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 8, 16), (4, 16, 16)))
    ids = torch.empty(4, 8, dtype=torch.int64, device="meta")
    second = w if "e k n" in equation.split("->")[0] else x
    operands = {"a": x, "b": second, "ids": ids}
    tensors = {name: Tensor(name, tuple(value.shape), str(value.dtype)[6:]) for name, value in operands.items()}
    result = Tensor("y", (4, 16, 16) if second is x else (4, 8, 16), "bfloat16")
    op = Op("y", "autopar.expert_contract.default", ("a", "b", "ids"), ("y",), (Ref(0), Ref(1), Ref(2), equation, 4, 0))
    tensors |= {"y": result}
    own = [tensors[name] for name in ("a", "b", "ids", "y")]
    some = [item for item in strategies(find_rule(op, tensors), own, SIZES) if bool(plain_factors(item).get("e")) == (first != WHOLE)]
    assert some and not reads_back(op, tensors)
    with counted_kernels() as found:
        DIALECT["expert_contract"](x, second, ids, equation, 4, first)
    assert {issued_kernels(op, tensors, item, SIZES) for item in some} == {sum(found.values())}


def test_words_and_bodies_are_those_of_the_tables() -> None:
    words = {row.issues for row in ROWS if isinstance(row.issues, str)}
    assert words == set(FORMULAS)
    named = {name.partition(" ")[0] for name in BODIES}
    assert {name for name in INSIDE if name.partition(" ")[0] not in named and name.rpartition(".")[0] not in named} == set()
    assert set(READING) <= {row.name for row in ROWS} and not set(READING) & set(INSIDE)


def test_operators_that_read_values_are_those_that_fake_tensors_stop_at() -> None:
    """A tensor without memory has no values: reading one fails."""
    for case in CASES:
        if any(name in case.target for name in ("expert_contract", "grouped_", "aten.index.", "_unsafe_index.")):
            run = drawn_run(case)
            whole = next(iter(split_ways(run)))
            try:
                count_on_rank(run, whole, 0, "meta")
                reads = False
            except (NotImplementedError, RuntimeError):
                reads = True
            assert reads == reads_back(run.op, run.tensors), case.target


def test_additions_that_a_contraction_does() -> None:
    """A bias of one row, and a tensor as large as the product; not a product that others read too, nor one that leaves."""
    shapes = {"x": (4, 8), "w": (6, 8), "b": (6,), "y": (4, 6), "z": (4, 6), "c": (4, 1)}
    tensors = {name: Tensor(name, shape, "float32") for name, shape in shapes.items()}
    product = Op("y", "autopar.contract.default", ("x", "w"), ("y",), (Ref(0), Ref(1), "m k, n k -> m n"))

    def fused(addend: str, *others: Op, kwargs: Any = ()) -> bool:
        addition = Op("z", "aten.add.Tensor", ("y", addend), ("z",), (Ref(0), Ref(1)), kwargs)
        return dict(find_fusable_additions(Graph("inference", tensors, (), (product, addition, *others), ()))) == {"z": 0}

    assert fused("b") and not fused("c")
    assert not fused("b", Op("q", "aten.exp.default", ("y",), ("q",), (Ref(0),)))
    assert not fused("b", kwargs=(("alpha", 2),))
