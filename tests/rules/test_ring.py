"""Ring attention against the whole operator: values, gradients, what travels, and on whom it is offered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autopar.rules import find_rule, localize, strategies, way_of
from autopar.runtime.instructions.inner import body
from autopar.runtime.instructions.operators import with_tensors, with_torch_values
from autopar.sharding import InnerCollective, Strategy
from autopar.verify.live_memory import LiveMemory
from tests.rules.execution import Executed, cut, execute, joined, split_run

Shape = tuple[int, ...]


def attention(causal: bool, dtype: torch.dtype, queries: int = 48, keys: int = 48, mask: Any = None) -> tuple[Any, ...]:
    """Four query heads on two key heads."""
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    return q.to(dtype), k.to(dtype), v.to(dtype), mask, causal, 0.5, 0.0, 0


def whole(gradient: bool, *arguments: Any) -> Executed:
    if not gradient:
        return execute("autopar.attention.default", arguments)
    out, lse = torch.ops.autopar.attention.default(*arguments)
    q, k, v, *settings = arguments
    return execute("autopar.attention_backward.default", (torch.randn_like(out), q, k, v, out, lse, *settings))


def rings(run: Executed, sizes: Shape) -> list[Strategy]:
    return [item for item in strategies(find_rule(run.op, run.tensors), run.own, sizes) if way_of(item) == "ring"]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "close"),
    [
        ((2,), torch.float64, 1e-12), ((3,), torch.float64, 1e-12), ((4,), torch.float64, 1e-12), ((6,), torch.float64, 1e-12),
        ((2, 4), torch.float64, 1e-12), ((4,), torch.float32, 1e-5), ((4,), torch.bfloat16, 3e-2), ((4,), torch.float16, 4e-3),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_that_travel_give_the_whole_result(sizes: Shape, dtype: torch.dtype, close: float, causal: bool, gradient: bool) -> None:
    torch.manual_seed(0)
    run = whole(gradient, *attention(causal, dtype))
    found = rings(run, sizes)
    assert found
    for strategy in found:
        results = split_run(run, strategy, sizes)
        for index, (spec, wanted) in enumerate(zip(strategy.outputs, run.outputs, strict=True)):
            value = joined([result[index] for result in results], spec, wanted.shape, sizes)
            assert value.dtype == wanted.dtype
            torch.testing.assert_close(value, wanted, rtol=close, atol=close)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_queries_and_keys_of_other_lengths(gradient: bool) -> None:
    run = whole(gradient, *attention(False, torch.float64, queries=12, keys=20))
    (strategy,) = [item for item in rings(run, (4,)) if not item.inputs[0].partial]
    results = split_run(run, strategy, (4,))
    for index, (spec, wanted) in enumerate(zip(strategy.outputs, run.outputs, strict=True)):
        torch.testing.assert_close(joined([result[index] for result in results], spec, wanted.shape, (4,)), wanted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_what_travels_and_beside_what(causal: bool) -> None:
    """Of n ranks each sends its keys and values n - 1 times, all but the last beside work; their gradients n times, the last
    one home. Under a causal mask halves of all are traded first, and of the results last."""
    ranks, rows = 4, 2 * 4 * 48 * 8 * 2  # bytes of all queries in bfloat16, as many as of keys and values together

    def permute(size: int, reduction: str, beside: int | None = None) -> InnerCollective:
        return InnerCollective("permute", (0,), size, reduction, beside)

    (forward,) = rings(whole(False, *attention(causal, torch.bfloat16)), (ranks,))
    hops = [permute(rows, "next", turn) for turn in range(3)]
    before, after = [permute(rows // 2, "mirror")] * 2, [permute(rows // 2, "mirror"), permute(2 * 4 * 48 * 4 // 2, "mirror")]
    assert forward.inner == (*before * causal, *hops, *after * causal)
    assert forward.turns == ranks and forward.parts == ranks and list(map(str, forward.inputs)) == ["R R S0 R"] * 3
    backward = next(item for item in rings(whole(True, *attention(causal, torch.bfloat16)), (ranks,)) if not item.inputs[0].partial)
    hops = [item for turn in range(3) for item in (permute(rows, "next", turn), permute(rows, "next", turn + 1))]
    before = [permute(3 * rows // 2, "mirror"), permute(2 * 4 * 48 * 4 // 2, "mirror"), permute(rows // 2, "mirror")]
    assert backward.inner == (*before * causal, *hops, permute(rows, "next"), *[permute(rows // 2, "mirror")] * 2 * causal)
    assert list(map(str, backward.outputs)) == ["R R S0 R"] * 3, "gradients of keys and values are whole sums"


def test_each_turn_has_as_much_to_do_on_every_rank() -> None:
    """The scores that a causal mask leaves, counted turn by turn with the places that each rank's queries and keys have."""
    from autopar.runtime.instructions.sequences import _Place

    for ranks in (2, 3, 4, 7):
        half = 4
        pairs = [sorted((2 * rank, 2 * ranks - 1 - 2 * rank)) for rank in range(ranks)]
        rows = [torch.cat([torch.arange(block * half, (block + 1) * half) for block in pair]) for pair in pairs]
        for rank in range(ranks):
            place, seen = _Place(ranks, rank, True), torch.zeros(2 * half * ranks, dtype=torch.int64)
            for turn in range(ranks):
                of_queries, of_keys = (pick(rows[owner][None, None])[0, 0]
                                       for pick, owner in zip(place.seen(turn), (rank, (rank - turn) % ranks), strict=True))  # fmt: skip
                visible = of_queries[:, None] >= of_keys[None]
                assert visible.all() or turn == 0
                assert visible.sum() == (half * (2 * half + 1) if turn == 0 else 2 * half * half)
                seen[of_queries] += visible.sum(1)
            assert torch.equal(seen[rows[rank]], rows[rank] + 1), "every key up to each query's own place, once"


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (attention(True, torch.float32, 48, 24), (2,)),
        (attention(True, torch.float32, 6, 6), (6,)),
        (attention(False, torch.float32, 48, 50), (4,)),
        (attention(False, torch.float32, mask=torch.zeros(48, 48)), (2,)),
        (attention(True, torch.float32, mask=torch.ones(48, 48, dtype=torch.bool)), (2,)),
    ],
    ids=["keys at no query's place", "odd halves", "keys that do not divide", "mask", "mask, causal"],
)
def test_it_is_not_offered(arguments: tuple[Any, ...], sizes: Shape) -> None:
    assert not rings(whole(False, *arguments), sizes)
    assert math.prod(sizes) > 1


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_workspace_is_what_a_rank_holds(ranks: int, dtype: torch.dtype, causal: bool, gradient: bool) -> None:
    """Beside its results, by the live tensors of one rank whose neighbours hold as much. Of two, the last turn is the second, where no
    further block comes: with few queries that was a fifth of all."""
    q, k, v = torch.randn(1, 4, 384 if causal else 12, 64), torch.randn(1, 2, 384, 64), torch.randn(1, 2, 384, 64)
    run = whole(gradient, q.to(dtype), k.to(dtype), v.to(dtype), None, causal, 0.5, 0.0, 0)
    strategy = next(item for item in rings(run, (ranks,)) if not item.inputs[0].partial)
    local = [cut(value, spec, (ranks,))[1] for value, spec in zip(run.inputs, strategy.inputs, strict=True)]
    args, _ = localize(run.op, run.tensors, strategy, (ranks,), (1,))
    held = sum(tensor.nbytes for tensor in local)
    with LiveMemory(local) as memory:
        running = body(run.op, strategy, (ranks,), with_tensors(with_torch_values(args), local), {})
        answers: list[Any] = [None]
        while True:
            try:
                item, tensor = running.send(answers.pop())
            except StopIteration as stop:
                made = sum(tensor.nbytes for tensor in stop.value)
                break
            sent = tensor.contiguous() if item.beside is not None else tensor.clone(memory_format=torch.contiguous_format)
            answers.append(_arriving(sent, sent.clone()) if item.beside is not None else sent.clone())
            del tensor, sent
    assert memory.peak - held - made == pytest.approx(strategy.workspace, rel=0.05)


def _arriving(sent: torch.Tensor, came: torch.Tensor) -> Any:
    """Waits for what came; what was sent stays until nobody can wait any more."""
    return lambda: (came, sent)[0]
