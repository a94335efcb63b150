"""Numbers of rows are told once for all operators that send rows of the same choices, and anew for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.instructions.expert_exchange import COUNTS, KeptWays, Put, combine, dispatch, dispatch_ids, find_way
from autopar.runtime.ranks.backends import Unequal

RANKS, EXPERTS, TOKENS, CHOICES = 2, 4, 6, 2


def run(bodies: Sequence[Any]) -> tuple[list[Tensor], list[str]]:
    """What the ranks' bodies return, and what they exchanged."""
    answers, exchanged = [None] * len(bodies), list[str]()
    while True:
        puts: list[Put] = []
        results = []
        for one, answer in zip(bodies, answers, strict=True):
            try:
                puts.append(one.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not puts
            return results, exchanged
        answers = [None] * len(bodies)
        if puts[0][0] is None:
            assert all(given is None for given, _ in puts), "all ranks know the numbers, or none"
            continue
        exchanged.append(puts[0][1])
        parts = [given.rows.split(list(given.sent)) if isinstance(given, Unequal) else given.chunk(RANKS) for given, _ in puts]
        answers = [torch.cat([part[rank] for part in parts]) for rank in range(RANKS)]


def draw_ids(rank: int) -> Tensor:
    torch.manual_seed(rank)
    return torch.randint(0, EXPERTS, (TOKENS * CHOICES,))


def tell(kept: Sequence[KeptWays], ids: Sequence[Tensor], axes: tuple[int, ...] = (0,), first: int = 0, experts: int = EXPERTS) -> bool:
    """Whether numbers are told; the way is the right one."""
    found, exchanged = run([one.find(axes, RANKS, mine, first, experts) for one, mine in zip(kept, ids, strict=True)])
    wanted, _ = run([find_way(axes, RANKS, mine, first, experts) for mine in ids])
    for mine, own in zip(found, wanted, strict=True):
        assert (mine.sent, mine.received, mine.first) == (own.sent, own.received, own.first)
        assert torch.equal(mine.order, own.order)
        assert torch.equal(mine.sorts, own.sorts)
    return exchanged == [COUNTS]


def test_numbers_are_told_once_for_a_dispatch_its_numbers_and_a_combine() -> None:
    kept, ids, x = [KeptWays() for _ in range(RANKS)], [draw_ids(rank) for rank in range(RANKS)], torch.randn(RANKS, TOKENS, 3)

    def run_all(find: Callable[[int], Any]) -> tuple[list[Tensor], list[str]]:
        rows, one = run([dispatch(RANKS, x[rank], ids[rank], EXPERTS, 0, 3, find=find(rank)) for rank in range(RANKS)])
        told, two = run([dispatch_ids(RANKS, ids[rank], EXPERTS, 0, 3, find=find(rank)) for rank in range(RANKS)])
        back, three = run([
            combine(RANKS, rows[rank], ids[rank], None, EXPERTS, 0, CHOICES, torch.float32, find=find(rank)) for rank in range(RANKS)
        ])  # fmt: skip
        return [*rows, *told, *back], [*one, *two, *three]

    found, once = run_all(lambda rank: partial(kept[rank].find, (0,)))
    wanted, each = run_all(lambda rank: partial(find_way, (0,)))
    assert all(map(torch.equal, found, wanted))
    torch.testing.assert_close(torch.stack(found[-RANKS:]), CHOICES * x)
    assert (once.count(COUNTS), each.count(COUNTS), once.count("rows"), each.count("rows")) == (1, 3, 2, 2)


def test_other_choices_groups_or_experts_are_told_anew() -> None:
    kept, ids = [KeptWays() for _ in range(RANKS)], [draw_ids(rank) for rank in range(RANKS)]
    assert tell(kept, ids)
    assert not tell(kept, ids)
    assert tell(kept, ids, axes=(1,)), "other ranks"
    assert tell(kept, ids, first=2, experts=2), "experts of another group"
    assert tell(kept, ids, experts=2), "fewer experts"
    assert tell(kept, [mine.clone() for mine in ids]), "choices that are equal by chance"
    assert not tell(kept, ids)
    for mine in ids:
        mine.neg_().add_(EXPERTS - 1)
    assert tell(kept, ids), "written over"
    for one in kept:
        one.let_go()
    assert tell(kept, ids), "another segment"


def test_choices_that_count_no_writes_are_told_each_time() -> None:
    kept = [KeptWays() for _ in range(RANKS)]
    with torch.inference_mode():
        ids = [draw_ids(rank) for rank in range(RANKS)]
        assert tell(kept, ids)
        for mine in ids:
            mine.neg_().add_(EXPERTS - 1)
        assert tell(kept, ids)


@pytest.mark.parametrize("kept", [True, False])
def test_the_host_waits_once_for_numbers(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[int]()
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: (reads.append(tensor.numel()), tolist(tensor))[1])
    monkeypatch.setattr(Tensor, "__int__", lambda tensor: pytest.fail("one more wait"))
    ids = [draw_ids(rank) for rank in range(RANKS)]
    ways = [KeptWays() for _ in range(RANKS)]
    for _ in range(2):
        run([(ways[rank].find if kept else find_way)((0,), RANKS, ids[rank], 0, EXPERTS) for rank in range(RANKS)])
    assert reads == [2 * RANKS + 1] * (RANKS if kept else 2 * RANKS)
