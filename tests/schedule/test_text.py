"""The text form of a list: what it looks like, and that it parses back to the same list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedule import Instruction, Segment, parse, simulate
from autopar.schedule.instructions import KINDS
from autopar.schedule.text import format_instructions
from tests.schedule.cases import CASES, Case

GATHERED = """\
forward
  0 start all_gather(dp) w@fwd: w -> w@fwd | node 2.0 s 4096 B
  1 run first: x -> y | compute 3.0 s 128 B
  2 wait w@fwd: -> w@fwd
  3 run mm: y w@fwd -> mm "a b" | compute 1.0 s 128 B 2 launches reading over y
  4 free: y w@fwd | 4096 B
backward, microbatch 3
  5 wait loss: -> loss | late
recompute
  6 slice cut: -> cut"""
ODD = [
    "w@fwd", "mm:1", "a#1+2", "->", "over", "late", "reading", "12", "s", "B", "launches", "all_gather(dp)", "f(x:(2)2)", "a b", '"', "x:",
    "|", "",
]  # fmt: skip
NAMES = st.one_of(st.sampled_from(ODD), st.text(max_size=5))
SECONDS = st.floats(0, 1e6, allow_nan=False).map(lambda seconds: seconds or 0.0)
INSTRUCTIONS = st.builds(
    Instruction, st.integers(0, 10**6), st.sampled_from(KINDS), st.sampled_from(["forward", "recompute", "backward"]),
    st.lists(NAMES, max_size=3).map(tuple), st.lists(NAMES, max_size=3).map(tuple), NAMES, SECONDS, st.integers(0, 2**50), NAMES,
    st.integers(0, 3), st.none() | NAMES, st.sampled_from([None, True]),
    st.none() | st.integers(0, 99), st.sampled_from([None, True]),
)  # fmt: skip


def test_a_list_written_by_hand_is_parsed_and_formatted_as_it_was() -> None:
    items = parse(GATHERED)
    assert format_instructions(items, {"w@fwd": "all_gather(dp)"}) == GATHERED
    assert items[0] == Instruction(0, "start", "forward", ("w",), ("w@fwd",), "node", 2.0, 4096, "w@fwd")
    assert items[3].writes == ("mm", "a b") and items[3].over == "y" and items[3].reads_back
    assert items[5] == Instruction(5, "wait", "backward", writes=("loss",), of="loss", microbatch=3, late=True)
    assert items[6].half == "backward"


def test_lines_without_a_number_are_numbered_in_order() -> None:
    slots = simulate(parse("forward\n  run a: -> a | compute 1.0 s\n  start b: -> b | node 5.0 s\n  wait b: -> b"))
    assert [slot.instruction.id for slot in slots] == [0, 1, 2] and slots[-1].end == 6.0


@given(st.lists(INSTRUCTIONS, max_size=8))
def test_any_list_parses_back(items: list[Instruction]) -> None:
    assert parse(format_instructions(items, {item.of: "all_gather(dp,tp)" for item in items})) == tuple(items)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_schedules_parse_back_after_each_pass(case: Case) -> None:
    for _, schedule in case.stages():
        assert parse(str(schedule)) == schedule.instructions
        assert {segment.phase for segment in schedule.segments} <= {"forward", "backward"}
        assert all(item.segment in schedule.segments for item in schedule.instructions)


def test_segments_stand_in_order_and_hold_recomputation_in_backward() -> None:
    schedule = Case("gpt2", "x=2", 1).stages()[-1][1]
    assert schedule.segments == (Segment("forward"), Segment("backward"))
    assert all(item.segment == Segment("backward") for item in schedule.instructions if item.phase == "recompute")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("sideways\n  run a: -> a", "line 1 .*a heading is one of forward, recompute, backward"),
        ("forward\n  jump a: -> a", "line 2 .*a kind is one of run, start"),
        ("forward\n  run a -> a", "line 2 .*no colon"),
        ("forward\n  run a b: -> a", "line 2 .*more than one name"),
        ("forward\n  run a: -> a | compute 1x s", "line 2 .*could not convert"),
    ],
)
def test_what_is_no_instruction_is_refused_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ScheduleError, match=what):
        parse(text)
