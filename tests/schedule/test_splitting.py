"""split_backward: what is sent first, and nothing else changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from autopar.errors import ScheduleError
from autopar.pipeline import cut_graph
from autopar.rules import why_once
from autopar.schedule import Instruction, Schedule, make_schedule
from autopar.schedule.splitting import find_weight_part, split_backward
from autopar.search import find_plan
from autopar.search.baselines.checkpointing import recompute
from tests.pipeline.models import capture, machine

CUTS = {"llama": ("layers.2",), "masked": ("layers.1", "layers.3"), "encoder-decoder": ("encoder.1", "decoder.1")}


@cache
def schedule_of(name: str, number: int, *, again: bool = False) -> Schedule:
    """A stage's schedule on a mesh where every split pays; ``again``: all operators run again in backward that may."""
    graph, whole = cut_graph(capture(name, 4)[2], CUTS[name]).graphs[number], machine("dp=2,tp=2", stress=True)
    found = find_plan(graph, whole, baselines=False, effort="low")
    if not again:
        return found.schedule
    assert found.scheduled_plan is not None
    names = [op.name for op in graph.ops if op.phase == "forward" and not why_once(op)]
    made = make_schedule(graph, recompute(graph, found.scheduled_plan.assignment, names, whole), whole)
    assert any(item.phase == "recompute" for item in made.instructions)
    return made


def listed(items: Iterable[Instruction]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What instructions do, in their order."""
    return [(item.kind, item.of, item.writes) for item in items if item.kind != "free"]


@pytest.mark.parametrize(
    ("name", "number", "again"),
    [("llama", 1, False), ("masked", 1, True), *((name, number, False) for name in ("masked", "encoder-decoder") for number in range(3))],
)
def test_what_is_sent_comes_first_and_the_rest_keeps_its_order(name: str, number: int, again: bool) -> None:
    schedule = schedule_of(name, number, again=again)
    split = split_backward(schedule)
    begin = find_weight_part(split)
    before, early, late = listed(schedule.instructions), split.instructions[:begin], split.instructions[begin:]
    assert Counter(before) == Counter(listed(split.instructions))
    assert {item.half for item in late} == {"backward"}
    assert not any(output.is_sent and value in item.writes for output, value in split.outputs for item in late)
    assert not any(item.kind == "add" or item.microbatch > 0 for item in early)
    inputs = listed(item for item in early if item.half == "backward")
    for part in (inputs, listed(late)):
        wanted = set(part)
        assert [what for what in before if what in wanted] == part
    assert bool(inputs) is (number > 0), "the first stage sends nothing in backward"


def test_a_list_in_which_what_is_sent_comes_later_is_refused() -> None:
    split = split_backward(schedule_of("masked", 1))
    begin, items = find_weight_part(split), list(split.instructions)
    sending = max(index for index, item in enumerate(items[:begin]) if item.kind in ("run", "wait"))
    items.insert(sending, items.pop(begin))
    with pytest.raises(ScheduleError, match="leads to what is sent and stands among gradients of weights"):
        find_weight_part(replace(split, instructions=tuple(items)))
