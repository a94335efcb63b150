"""Small lists whose time can be reckoned by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopar.schedule import makespan, simulate
from autopar.schedule.instructions import COMPUTE, Instruction


class Listing:
    """A list in the writing: ids as they come."""

    def __init__(self) -> None:
        self.items: list[Instruction] = []

    def _add(self, kind: str, **more: object) -> Listing:
        self.items.append(Instruction(len(self.items), kind, "forward", **more))  # type: ignore[arg-type]
        return self

    def run(self, name: str, seconds: float, reads: Sequence[str] = (), links: str = "", launches: int | None = None) -> Listing:
        stream = COMPUTE + (f"+{links}" if links else "")
        return self._add("run", of=name, seconds=seconds, reads=tuple(reads), writes=(name,), stream=stream, launches=launches)

    def start(self, name: str, seconds: float, reads: Sequence[str] = (), link: str = "node") -> Listing:
        return self._add("start", of=name, seconds=seconds, reads=tuple(reads), writes=(name,), stream=link)

    def wait(self, name: str, copies: float = 0.0, late: bool | None = None) -> Listing:
        return self._add("wait", of=name, writes=(name,), seconds=copies, stream=COMPUTE if copies else "", late=late)


def spans(
    listing: Listing, slowdown: float = 0.0, overlaps: bool = True, issue: float = 0.0
) -> dict[tuple[str, str], tuple[float, float]]:  # fmt: skip
    slots = simulate(listing.items, slowdown, overlaps=overlaps, issue=issue)
    return {(slot.instruction.kind, slot.instruction.of): (slot.begin, slot.end) for slot in slots}


def test_operators_follow_one_another() -> None:
    found = spans(Listing().run("a", 2.0).run("b", 3.0))
    assert found == {("run", "a"): (0.0, 2.0), ("run", "b"): (2.0, 5.0)}


def test_a_collective_runs_beside_operators_until_it_is_waited_for() -> None:
    found = spans(Listing().start("w", 4.0).run("a", 3.0).wait("w").run("b", 1.0, ["w"]))
    assert found["start", "w"] == (0.0, 4.0)
    assert found["run", "a"] == (0.0, 3.0)
    assert found["wait", "w"] == (3.0, 4.0)
    assert found["run", "b"] == (4.0, 5.0)


def test_the_stall_is_how_long_operators_stood_still() -> None:
    slots = simulate(Listing().start("w", 4.0).run("a", 3.0).wait("w", copies=2.0).items)
    assert [(slot.begin, slot.end, slot.stalled) for slot in slots][-1] == (3.0, 6.0, 1.0)


def test_nothing_begins_before_the_host_has_issued_it() -> None:
    listing = Listing().run("a", 5.0, launches=1).run("view", 0.0).run("b", 1.0, launches=2).run("c", 1.0, launches=4)
    found = spans(listing, issue=2.0)
    assert found["run", "a"] == (2.0, 7.0), "one kernel is issued in 2 s"
    assert found["run", "view"] == (7.0, 7.0)
    assert found["run", "b"] == (7.0, 8.0), "the second of its kernels is issued at 6 s"
    assert found["run", "c"] == (8.0, 14.25), "the last of its kernels is issued at 14 s, and takes a quarter of a second"
    assert spans(listing)["run", "c"] == (6.0, 7.0), "a host without a price takes no time"


def test_the_host_issues_calls_too() -> None:
    listing = Listing().start("w", 4.0).run("a", 1.0, launches=1).wait("w")
    listing.items = [item._replace(launches=1) for item in listing.items]
    assert spans(listing, issue=3.0) == {("start", "w"): (3.0, 7.0), ("run", "a"): (6.0, 7.0), ("wait", "w"): (7.0, 9.0)}


def test_the_host_waits_for_the_device_before_it_issues_what_it_reads_values_of() -> None:
    """``b`` is issued when ``a`` has ended. What stands behind it is issued that much later too."""
    listing = Listing().run("a", 5.0, launches=1).run("b", 1.0, launches=2).run("c", 1.0, launches=1)
    listing.items[1] = listing.items[1]._replace(reads_back=True)
    found = spans(listing, issue=2.0)
    assert found["run", "a"] == (2.0, 7.0)
    assert found["run", "b"] == (9.0, 11.5), "its two kernels are issued at 9 s and 11 s"
    assert found["run", "c"] == (13.0, 14.0)
    assert spans(listing)["run", "b"] == (5.0, 6.0), "a host without a price waits for nothing"


def test_a_call_begins_after_its_copies_are_issued() -> None:
    listing = Listing().start("w", 4.0).wait("w", copies=1.0)
    listing.items = [item._replace(launches=3 - item.id) for item in listing.items]
    assert spans(listing, issue=2.0) == {("start", "w"): (6.0, 10.0), ("wait", "w"): (0.0, 11.0)}


def test_operators_do_not_wait_for_what_is_late() -> None:
    """The step ends no earlier than what is under way, and operators are as slow beside it as beside any other."""
    listing = Listing().run("a", 1.0).start("loss", 4.0, ["a"]).wait("loss", late=True).run("b", 2.0)
    assert spans(listing)["run", "b"] == (1.0, 3.0) and makespan(simulate(listing.items)) == 5.0
    assert spans(listing, 0.25)["run", "b"] == pytest.approx((1.0, 1.0 + 2.0 / 0.75))
    assert not any(slot.stalled for slot in simulate(listing.items))


@pytest.mark.parametrize(("slowdown", "end"), [(0.0, 3.0), (0.25, 4.0), (0.5, 5.0), (1.0, 7.0)])
def test_operators_beside_a_busy_link_are_slower(slowdown: float, end: float) -> None:
    """3 seconds of work beside a collective of 4: at half speed 2 are done when it ends, and 1 is left; at no speed all 3."""
    assert spans(Listing().start("w", 4.0).run("a", 3.0).wait("w"), slowdown)["run", "a"] == (0.0, end)


def test_the_slowdown_ends_with_the_last_link() -> None:
    listing = Listing().start("w", 1.0).start("v", 2.0, link="network").run("a", 3.0).wait("w").wait("v")
    assert spans(listing, 0.5)["run", "a"] == (0.0, 4.0), "one second done in the first two, two more after them"


def test_nothing_to_do_takes_no_time_beside_a_link_that_stops_everything() -> None:
    assert spans(Listing().start("w", 4.0).run("view", 0.0).wait("w"), 1.0)["run", "view"] == (0.0, 0.0)


def test_one_stream_for_each_link() -> None:
    found = spans(Listing().start("a", 3.0).start("b", 2.0).start("c", 4.0, link="network").wait("a").wait("b").wait("c"))
    assert found["start", "a"] == (0.0, 3.0)
    assert found["start", "b"] == (3.0, 5.0), "the same link: one after the other, in the order of the list"
    assert found["start", "c"] == (0.0, 4.0), "another link: beside them"


def test_a_collective_over_two_links_holds_both() -> None:
    found = spans(Listing().start("a", 3.0).start("b", 2.0, link="network+node").start("c", 1.0, link="network").wait("c"))
    assert found["start", "b"] == (3.0, 5.0)
    assert found["start", "c"] == (5.0, 6.0)


def test_a_start_that_reads_what_is_in_flight_begins_when_it_arrives() -> None:
    listing = Listing().start("a", 3.0).start("b", 2.0, ["a"], link="network").run("r", 1.0).wait("a").wait("b")
    found = spans(listing)
    assert found["start", "b"] == (3.0, 5.0)
    assert found["run", "r"] == (0.0, 1.0), "the link waits, not the operators"


def test_where_launches_do_not_overlap_the_rank_itself_waits_for_what_a_start_reads() -> None:
    listing = Listing().start("a", 3.0).start("b", 2.0, ["a"], link="network").run("r", 1.0).wait("a").wait("b")
    found = spans(listing, overlaps=False)
    assert found["start", "b"] == (3.0, 5.0)
    assert found["run", "r"] == (3.0, 4.0)


def test_an_operator_with_collectives_inside_holds_its_links() -> None:
    found = spans(Listing().start("a", 3.0).run("softmax", 2.0, links="node").start("b", 1.0).wait("a").wait("b"), 0.5)
    assert found["run", "softmax"] == (3.0, 5.0), "after the collective on its link, and not slowed by its own"
    assert found["start", "b"] == (5.0, 6.0)


def test_copies_are_operators_work() -> None:
    """The copies of a wait begin when the call has ended, and are slowed by other calls."""
    listing = Listing().start("a", 2.0).start("b", 4.0, link="network").wait("a", copies=1.0).run("r", 1.0, ["a"]).wait("b")
    assert spans(listing, 0.5)["wait", "a"] == (0.0, 4.0)
    assert spans(listing, 0.5)["run", "r"] == (4.0, 5.0)


def test_a_start_is_reached_when_the_operators_before_it_have_run() -> None:
    found = spans(Listing().run("a", 2.0).start("w", 1.0).run("b", 5.0).wait("w"))
    assert found["start", "w"] == (2.0, 3.0)


def test_the_step_lasts_until_the_last_collective_ends() -> None:
    assert makespan(simulate(Listing().run("a", 1.0).start("w", 4.0).items)) == 5.0
    assert makespan(()) == 0.0
