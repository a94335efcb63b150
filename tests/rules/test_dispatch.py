"""Rows that are dispatched, multiplied by their experts' matrices and combined are the whole's, under every strategy of the three."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from autopar.dialect.experts import KeptPlaces
from autopar.dialect.library import WHOLE
from autopar.rules import bytes_moved, find_rule, issued_kernels, localize, reads_back, splits_experts, strategies
from autopar.rules.launches import CALLS_INSIDE
from autopar.runtime.instructions.expert_exchange import KeptWays
from autopar.runtime.instructions.inner import BODIES
from autopar.runtime.instructions.operators import find_function, with_tensors, with_torch_values
from autopar.runtime.ranks.backends import Unequal
from autopar.sharding import Strategy
from benchmarks.host import counted_kernels
from tests.rules.execution import Executed, cut, execute, joined, run_ranks_of, split_run

MESHES = ((2,), (2, 2), (3, 2), (4,))
EXPERTS, WIDTH, HIDDEN, CHOICES = 12, 4, 6, 2
DISPATCH, DISPATCH_IDS, COMBINE = (f"autopar.{name}.default" for name in ("dispatch", "dispatch_ids", "combine"))
ALL_OF_ONE, ALL_OF_FEW, DRAWN = "all choose one expert", "a few experts are chosen", "drawn"


def ids_of(kind: str, tokens: int) -> Tensor:
    """Each token's choices, one after the other."""
    torch.manual_seed(0)
    most = {ALL_OF_ONE: 1, ALL_OF_FEW: 3, DRAWN: EXPERTS}[kind]
    return torch.randint(0, most, (tokens * CHOICES,))


class Chain:
    """Dispatch, product and combine of some tokens, whole."""

    def __init__(self, kind: str, tokens: int, columns: int, weighted: bool) -> None:
        ids = ids_of(kind, tokens)
        x, matrices = torch.randn(tokens, WIDTH, dtype=torch.float64), torch.randn(EXPERTS, WIDTH, HIDDEN, dtype=torch.float64)
        weights = torch.rand(tokens * CHOICES, dtype=torch.float64) if weighted else None
        self.rows = execute(DISPATCH, (x, ids, EXPERTS, 0, columns))
        self.ids = execute(DISPATCH_IDS, (ids, EXPERTS, 0, columns))
        equation = "e j k, e k n, e j -> e j n"
        self.product = execute("autopar.expert_contract.default", (*self.rows.outputs, matrices, *self.ids.outputs, equation, EXPERTS, 0))
        self.result = execute(COMBINE, (*self.product.outputs, ids, weights, EXPERTS, 0, CHOICES, torch.float64))
        made = torch.stack([x[place // CHOICES] @ matrices[expert] for place, expert in enumerate(ids.tolist())])
        made = made if weights is None else made * weights.unsqueeze(-1)
        self.expected = made.view(tokens, CHOICES, HIDDEN).sum(1)


def found(run: Executed, sizes: tuple[int, ...]) -> list[Strategy]:
    return [item for item in strategies(find_rule(run.op, run.tensors), run.own, sizes) if not any(spec.partial for spec in item.inputs)]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("kind", [ALL_OF_ONE, ALL_OF_FEW, DRAWN])
def test_split_chain_equals_whole(kind: str, sizes: tuple[int, ...]) -> None:
    chain, tried = Chain(kind, 24, 12, weighted=kind == DRAWN), set()
    torch.testing.assert_close(chain.result.outputs[0], chain.expected)
    for sent in found(chain.rows, sizes):
        rows = split_run(chain.rows, sent, sizes)
        for told, used in itertools.product(found(chain.ids, sizes), found(chain.product, sizes)):
            if used.inputs[::2] != (sent.outputs[0], told.outputs[0]) or any(spec.partial for spec in used.outputs):
                continue
            numbers = split_run(chain.ids, told, sizes)
            matrices = cut(chain.product.inputs[1], used.inputs[1], sizes)
            made = run_ranks_of(chain.product, used, sizes, [[item for item, in rows], matrices, [item for item, in numbers]])
            for back in found(chain.result, sizes):
                if back.inputs[0] != used.outputs[0]:
                    continue
                given = [cut(value, spec, sizes) for value, spec in zip(chain.result.inputs[1:], back.inputs[1:], strict=True)]
                parts = run_ranks_of(chain.result, back, sizes, [[item for item, in made], *given])
                value = joined([part for part, in parts], back.outputs[0], chain.expected.shape, sizes)
                torch.testing.assert_close(value, chain.expected, msg=lambda text, at=(sent, told, used, back): f"{at}: {text}")
                tried |= {(name, bool(item.inner), splits_experts(op, item)) for name, op, item in
                          (("dispatch", chain.rows.op, sent), ("combine", chain.result.op, back))}  # fmt: skip
    assert tried == {(name, *ways) for name in ("dispatch", "combine") for ways in ((False, False), (False, True), (True, True))}


def test_a_rank_has_room_for_even_load_and_more_where_more_come() -> None:
    x, few, many = torch.randn(8, 4), torch.tensor([0, 1, 2, 3] * 2), torch.zeros(8, dtype=torch.int64)
    dispatch = torch.ops.autopar.dispatch.default
    assert dispatch(x, few, 2, 0, 2).shape == (2, 2, 4)
    assert dispatch(x, many, 2, 0, 2).shape == (2, 4, 4)
    assert dispatch(x, many, 2, 2, 2).shape == (2, 2, 4), "none come"
    assert torch.ops.autopar.dispatch_ids.default(many, 2, 2, 2).tolist() == [[3, 3], [3, 3]], "and rows without a token are the last's"


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_counted(dtype: torch.dtype, choices: int, weighted: bool) -> None:
    ids, weights = torch.arange(24).remainder(4), torch.rand(24) if weighted else None
    x = torch.randn(24 // choices, 4, dtype=dtype)
    runs = [execute(DISPATCH, (x, ids, 4, WHOLE, 6)), execute(DISPATCH_IDS, (ids, 4, WHOLE, 6))]
    runs.append(execute(COMBINE, (*runs[0].outputs, ids, weights, 4, WHOLE, choices, dtype)))
    for run in runs:
        with counted_kernels() as counts:
            find_function(run.op.target)(*with_tensors(with_torch_values(run.op.args), run.inputs))
        assert issued_kernels(run.op, run.tensors) == sum(counts.values()) - counts["promote_types.default"], run.op.target
        assert not any(reads_back(run.op, run.tensors, item) for item in found(run, (2,)) if not splits_experts(run.op, item))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_rank_with_some_experts_are_counted(dtype: torch.dtype, choices: int, weighted: bool) -> None:
    """Rows of those do not fill their places."""
    ids, weights = torch.full((24,), 2), torch.rand(24).to(dtype) if weighted else None
    ids[0] = 0
    x = torch.randn(24 // choices, 4, dtype=dtype)
    runs = [execute(DISPATCH, (x, ids, 4, 0, 6)), execute(DISPATCH_IDS, (ids, 4, 0, 6))]
    runs.append(execute(COMBINE, (*runs[0].outputs, ids, weights, 4, 0, choices, dtype)))
    for run in runs:
        (some,) = [item for item in found(run, (2,)) if splits_experts(run.op, item) and not item.inner]
        args, _ = localize(run.op, run.tensors, some, (2,), (0,))
        given = [cut(value, spec, (2,))[0] for value, spec in zip(run.inputs, some.inputs, strict=True)]
        places = KeptPlaces()
        for asks in (True, False):
            with counted_kernels() as counts:
                find_function(run.op.target)(*with_tensors(with_torch_values(args), given), places=places)
            wanted = sum(counts.values()) - counts["promote_types.default"] + (not asks)  # the sort is kept too, and priced each time
            assert issued_kernels(run.op, run.tensors, some, (2,), asks=asks) == wanted, run.op.target
            assert reads_back(run.op, run.tensors, some, asks=asks) == asks == bool(counts["_local_scalar_dense.default"])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_around_an_exchange_are_counted(dtype: torch.dtype, choices: int, weighted: bool) -> None:
    """A rank that sends itself all rows runs as many as one that has others."""
    ids, weights = torch.arange(24, dtype=torch.int64).remainder(4), torch.rand(24).to(dtype) if weighted else None
    x = torch.randn(24 // choices, 4, dtype=dtype)
    runs = [execute(DISPATCH, (x, ids, 4, 0, 8)), execute(DISPATCH_IDS, (ids, 4, 0, 8))]
    runs.append(execute(COMBINE, (*runs[0].outputs, ids, weights, 4, 0, choices, dtype)))
    for run in runs:
        (sent,) = [item for item in found(run, (2,)) if item.inner]
        args, ways = with_tensors(with_torch_values(run.op.args), run.inputs), KeptWays()
        for asks in (True, False):
            exchanges = 0
            with counted_kernels() as counts:
                running, answer = BODIES[run.op.target.rpartition(".")[0]](1, *args, find=partial(ways.find, (0,))), None
                with contextlib.suppress(StopIteration):
                    while True:
                        given, _ = running.send(answer)
                        answer = given.rows if isinstance(given, Unequal) else given
                        exchanges += given is not None
            wanted = sum(counts.values()) - counts["promote_types.default"] + CALLS_INSIDE * exchanges
            assert issued_kernels(run.op, run.tensors, sent, (2,), asks=asks) == wanted, run.op.target
            assert reads_back(run.op, run.tensors, sent, asks=asks) == asks == (exchanges == len(sent.inner))


def test_bytes_of_weighed_and_plain_sums() -> None:
    rows, ids, weights = torch.randn(4, 6, 8), torch.arange(24).remainder(4), torch.rand(24)
    for given, passes in ((weights, 7), (None, 3)):
        run = execute(COMBINE, (rows, ids, given, 4, 0, 2, torch.float32))
        sizes = [value.nbytes for value in run.inputs], [value.nbytes for value in run.outputs]
        assert bytes_moved(run.op, *sizes) == passes * rows.nbytes + 3 * run.outputs[0].nbytes
