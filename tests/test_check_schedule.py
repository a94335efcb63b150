"""check against the schedule: random plans hold, and every kind of edit of a row is found, and refused where it cannot be run."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings

from autopar.check import check, illegal
from autopar.check.clock import makespan
from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.recording import replay
from autopar.rows import InstructionPlan
from autopar.rules import find_rule, strategies
from autopar.schedule import Assignment, Instruction, Layout, Limits, Schedule, make_schedule, simulate
from autopar.schedule import makespan as end_of
from autopar.sharding import ShardingSpec, Strategy
from tests.graphs import bucket_graph, bucket_plan, machine, plan_of, random_graph, random_schedule, two_layers
from tests.strategies import SEEDS, schedules

PAIRS = Limits(bucket_bytes=600, ahead_bytes=2000, aside_bytes=0)


@settings(max_examples=40)
@given(schedules())
def test_random_schedules_hold(schedule: Schedule) -> None:
    plan = Plan.from_json(plan_of(schedule).to_json())
    assert [str(item) for item in check(plan)] == []
    assert replay(plan, schedule.graph) == schedule


def test_calls_that_follow_one_another_may_pass_the_limit() -> None:
    """A layout made of a layout: both gathers are in flight at once, and no limit is above nothing."""
    graph, where = two_layers(), machine("dp=2,tp=2")
    split, half, whole = (ShardingSpec.parse(text) for text in ("S01 R", "S0 R", "R R"))

    def replicated(name: str) -> Strategy:
        op = graph.op[name]
        operands = [graph.tensors[tensor] for tensor in (*op.inputs, *op.outputs)]
        offered = strategies(find_rule(op, graph.tensors), operands, where.mesh.sizes)
        return next(item for item in offered if all(spec.is_replicated for spec in (*item.inputs, *item.outputs)))

    layouts = (
        Layout("w0@half", "w0", "w0", half, "forward", "h"), Layout("w0@whole", "w0", "w0@half", whole, "forward", "h"),
        Layout("gw0@split", "gw0", "gw0", split, "backward", "output:1"),
    )  # fmt: skip
    reads = {("h", 1): "w0@whole", ("gh", 1): "w1", ("output:1", 0): "gw0@split"}
    inputs = {"w0": split, "w1": whole, "x": whole}
    assignment = Assignment(inputs, {op.name: replicated(op.name) for op in graph.ops}, layouts, reads)
    plan = plan_of(make_schedule(graph, assignment, where, Limits(0, 0)))
    assert [row.of for row in plan.schedule[:2]] == ["w0@half", "w0@whole"]
    assert check(plan) == ()


def row(kind: str, of: str, seconds: float = 0.0, stream: str = "", reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> Any:
    return InstructionPlan(id=0, kind=kind, phase="forward", of=of, seconds=seconds, stream=stream, reads=reads, writes=writes)  # type: ignore[arg-type]


def test_the_clock_by_hand() -> None:
    gather = row("start", "w", 4.0, "node", writes=("w",))
    assert makespan([gather, row("run", "a", 3.0, "compute"), row("wait", "w"), row("run", "b", 1.0, "compute")], 0.0) == 5.0
    # beside the gather a does half of its work in 4 s... 2 of 3 s are done when the link is free, and 1 s is left
    assert makespan([gather, row("run", "a", 3.0, "compute")], 0.5) == 5.0
    after = row("start", "v", 1.0, "network", reads=("w",))
    assert makespan([gather, after, row("start", "u", 2.0, "network"), row("wait", "u")], 0.0) == 7.0
    inside = row("run", "s", 2.0, "compute+node")
    assert makespan([gather, inside, row("run", "a", 1.0, "compute")], 0.5) == 7.0
    assert makespan([], 0.0) == 0.0


def test_copies_and_chained_starts_by_hand() -> None:
    """The waits' copies are work; on a CPU a start waits for what it reads. The planner's clock and check's agree."""
    first, second = row("start", "w", 4.0, "node", writes=("w",)), row("start", "v", 1.0, "network", reads=("w",), writes=("v",))
    work, copies = row("run", "a", 3.0, "compute"), row("wait", "v", 2.0, "compute", writes=("v",))
    for rows, overlaps, seconds in (
        ([first, work, row("wait", "w", 2.0, "compute")], True, 6.0),  # a ends at 3, w arrives at 4, its copies take 2
        ([first, second, work, copies], True, 7.0),  # v arrives at 5, behind a
        ([first, second, work, copies], False, 9.0),  # a begins when w is there
        ([first, row("wait", "w", 1.0, "compute").model_copy(update={"late": True}), work], True, 4.0),  # a begins after the copies
    ):
        assert makespan(rows, 0.0, overlaps) == seconds
        assert end_of(simulate(map(Instruction.of_row, rows), overlaps=overlaps)) == seconds


def test_the_host_by_hand() -> None:
    """The planner's clock and check's agree on when a list ends that its host issues too late."""
    rows = [
        row("start", "w", 4.0, "node", writes=("w",)), row("run", "a", 3.0, "compute"), row("wait", "w", 1.0, "compute", writes=("w",)),
        row("run", "b", 1.0, "compute"),
    ]  # fmt: skip
    issued = [item.model_copy(update={"launches": count}) for item, count in zip(rows, (1, 1, 1, 4), strict=True)]
    for issue, seconds in ((0.0, 6.0), (1.0, 7.25), (2.0, 14.25), (3.0, 21.25)):
        assert makespan(issued, 0.0, issue=issue) == seconds
        assert end_of(simulate(map(Instruction.of_row, issued), issue=issue)) == seconds


@lru_cache(maxsize=1)
def bucketed() -> str:
    """A plan with several buckets, each of two values."""
    return bucket_plan(limits=PAIRS).to_json()


def place(data: Any, kind: str, phase: str = "backward", of: str | None = None) -> int:
    """The first instruction of a kind."""
    found = (index for index, row in enumerate(data["schedule"]) if row["kind"] == kind and row["phase"] == phase)
    return next(index for index in found if of is None or data["schedule"][index]["of"] == of)


def number(data: Any) -> None:
    for index, item in enumerate(data["schedule"]):
        item["id"] = index


def swap(data: Any, first: int, second: int) -> None:
    rows = data["schedule"]
    rows[first], rows[second] = rows[second], rows[first]
    number(data)


def drop(kind: str) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        del data["schedule"][place(data, kind)]
        number(data)

    return edit


def double(kind: str) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        index = place(data, kind)
        data["schedule"].insert(index + 1, copy.deepcopy(data["schedule"][index]))
        number(data)

    return edit


def start_after_wait(data: Any) -> None:
    start = place(data, "start")
    swap(data, start, place(data, "wait", of=data["schedule"][start]["of"]))


def run_before_its_read(data: Any) -> None:
    """b4 reads g."""
    swap(data, place(data, "run", of="g"), place(data, "run", of="b4"))


def read_of_what_is_in_flight(data: Any) -> None:
    wait = place(data, "wait", "forward")
    reader = place(data, "run", "forward", "f0")
    data["schedule"].insert(reader, data["schedule"].pop(wait))
    number(data)


def read_of_what_is_freed(data: Any) -> None:
    free = place(data, "free")
    value = data["schedule"][free]["reads"][0]
    reader = max(index for index, row in enumerate(data["schedule"][:free]) if value in row["reads"])
    swap(data, free, reader)


def free_of_what_leaves(data: Any) -> None:
    data["schedule"][place(data, "free")]["reads"].append("mean2")


def free_of_what_came_in(data: Any) -> None:
    data["schedule"][place(data, "free")]["reads"].append("w0")


def backward_first(data: Any) -> None:
    """The backward pass begins with a constant, which could run at any time."""
    rows = data["schedule"]
    rows.insert(0, rows.pop(place(data, "run", of="g")))
    number(data)


def another_read(data: Any) -> None:
    data["schedule"][place(data, "run", of="gw4")]["reads"][1] = "f2"


def another_write(data: Any) -> None:
    data["schedule"][place(data, "run", of="b4")]["writes"] = ["elsewhere"]


def another_phase(data: Any) -> None:
    data["schedule"][place(data, "run", of="b4")]["phase"] = "recompute"


def late_for_an_operator(data: Any) -> None:
    data["schedule"][place(data, "wait", "forward")]["late"] = True


def late_for_a_gradient(data: Any) -> None:
    data["schedule"][place(data, "wait", of="gw5@split+1")]["late"] = True


def another_microbatch(data: Any) -> None:
    data["schedule"][place(data, "run", of="b4")]["microbatch"] = 1


def of_nothing(kind: str) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        data["schedule"][place(data, kind)]["of"] = "nothing"

    return edit


def same_id(data: Any) -> None:
    data["schedule"][4]["id"] = 3


def too_much_in_flight(data: Any) -> None:
    data["limits"]["ahead_bytes"] = 10


def too_large_a_bucket(data: Any) -> None:
    data["limits"]["bucket_bytes"] = 500


def buckets(data: Any) -> list[Any]:
    return [row for row in data["collectives"] if row.get("parts") and row["kind"] == "all_gather"]


def part_in_another_bucket(data: Any) -> None:
    first, second = buckets(data)[:2]
    second["parts"].append(first["parts"][0])
    first["parts"][0] = second["parts"].pop(0)


def part_twice(data: Any) -> None:
    first, second = buckets(data)[:2]
    second["parts"][0] = first["parts"][0]


def parts_in_another_order(data: Any) -> None:
    buckets(data)[0]["parts"].reverse()


def part_of_another_reshard(data: Any) -> None:
    buckets(data)[0]["parts"][0]["value"] = "nothing"


def part_of_another_step(data: Any) -> None:
    buckets(data)[0]["parts"][0]["step"] = 1


def another_kind(data: Any) -> None:
    buckets(data)[0]["kind"] = "all_reduce"


def another_collective_phase(data: Any) -> None:
    buckets(data)[0]["phase"] = "backward"


def collective_gone(data: Any) -> None:
    data["collectives"].remove(buckets(data)[0])


def collective_twice(data: Any) -> None:
    data["collectives"].append(buckets(data)[0])


REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (drop("run"), "no instruction runs the operator g"),
    (drop("start"), "no instruction starts the collective gw5@split+1"),
    (drop("wait"), "nobody waits for it"),
    (drop("slice"), "no instruction makes g@split, a local step"),
    (double("run"), "run of g: instruction"),
    (double("start"), "is the same"),
    (double("wait"), "is the same"),
    (double("slice"), "no such local step, or it was made before"),
    (double("free"), "a second time, after instruction"),
    (start_after_wait, "starts later"),
    (run_before_its_read, "reads g, which is not there yet"),
    (read_of_what_is_in_flight, "reads w0@whole, which is in flight and is not waited for"),
    (read_of_what_is_freed, "has freed"),
    (free_of_what_leaves, "frees mean2, which came in or leaves"),
    (free_of_what_came_in, "frees w0, which came in or leaves"),
    (backward_first, "is of the forward phase, after instruction 0 of another"),
    (another_read, "its operator reads"),
    (another_write, "writes elsewhere, its operator writes b4"),
    (another_phase, "is of the recompute phase, its operator of the backward phase"),
    (late_for_an_operator, "brings, and does not lead to the loss alone"),
    (late_for_a_gradient, "is late, which only a wait of a training step's forward may be"),
    (another_microbatch, "is of microbatch 1, the plan has 1"),
    (of_nothing("run"), "the plan has no such operator"),
    (of_nothing("start"), "the plan has no such collective"),
    (of_nothing("slice"), "no such local step"),
    (of_nothing("free"), "belongs to nothing"),
    (same_id, "schedule[3] has this id too"),
    (too_much_in_flight, "bytes are in flight"),
    (too_large_a_bucket, "bytes is over limits.bucket_bytes, 500"),
    (part_in_another_bucket, "its collective"),
    (part_twice, "already"),
    (parts_in_another_order, "its collective reads"),
    (part_of_another_reshard, "step 0 of the reshard nothing is no collective of this plan"),
    (part_of_another_step, "step 1 of the reshard w0@whole is no collective"),
    (another_kind, "all_reduce over dp in the plan; w0@whole needs all_gather over dp"),
    (another_collective_phase, "its reshards are of forward"),
    (collective_gone, "missing: step 0 of the reshard w0@whole, all_gather over dp"),
    (collective_twice, "a second collective with the id w0@whole+1"),
]


@pytest.mark.parametrize(("edit", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_run_is_refused(edit: Callable[[Any], None], said: str) -> None:
    data = json.loads(bucketed())
    edit(data)
    plan = Plan.from_json(json.dumps(data))
    found = "\n".join(map(str, illegal(plan)))
    assert said in found, found
    assert set(illegal(plan)) <= set(check(plan))
    with pytest.raises(AutoparError, match="the plan cannot be run") as caught:
        replay(plan, bucket_graph())
    assert caught.value.exit_status == 3 and str(caught.value).splitlines()[-1].startswith("hint: ")


def test_the_edited_plan_holds_before_it_is_edited() -> None:
    plan = Plan.from_json(bucketed())
    assert check(plan) == () and len([row for row in plan.collectives if row.parts]) == 6


def figures(data: Any) -> Iterator[tuple[Any, str, str]]:
    """Every figure of the schedule and the collectives: (row, key, where it stands)."""
    for section, keys in (
        ("schedule", ("id", "seconds", "bytes")),
        ("collectives", ("bytes", "received_bytes_per_rank", "seconds", "times")),
    ):
        for index, item in enumerate(data[section]):
            for key in keys:
                yield item, key, f"{section}[{index}]" + ("" if key == "id" else f".{key}")
    for index, item in enumerate(data["collectives"]):
        for part in item.get("parts", ()):
            yield part, "bytes", f"collectives[{index}].bytes"
    for key in data["predicted"]:
        if key != "memory":
            yield data["predicted"], key, f"predicted.{key}"
    for key in data["predicted"]["memory"]:
        yield data["predicted"]["memory"], key, f"predicted.memory.{key}"


def test_every_figure_is_recomputed() -> None:
    data = json.loads(bucketed())
    for item, key, where in figures(data):
        kept = item[key]
        item[key] = kept + 1000 if isinstance(kept, int) else kept * (1 + 1e-8) + 1e-15
        found = check(Plan.from_json(json.dumps(data)))
        assert where in [difference.where for difference in found], (where, found)
        assert all(difference.runs for difference in found), found
        item[key] = kept
    assert check(Plan.from_json(json.dumps(data))) == ()


def start_late(data: Any) -> None:
    """The last gather starts just before it is waited for."""
    rows = data["schedule"]
    wait = place(data, "wait", "forward", "w4@whole+1")
    rows.insert(wait - 1, rows.pop(place(data, "start", "forward", "w4@whole+1")))
    number(data)


RUNS: list[tuple[Callable[[Any], None], str]] = [
    (lambda data: data["schedule"][place(data, "run", of="g")].update(stream="node"), "stream: 'node' in the plan, 'compute' recomputed"),
    (lambda data: data["schedule"][place(data, "start")].update(stream="compute"), "stream: 'compute' in the plan, 'node' recomputed"),
    (lambda data: data["collectives"].reverse(), "collectives[0]: it is"),
    (start_late, "predicted.step_seconds"),
    (lambda data: data.update(memory_limit_bytes_per_rank=100), "is over the limit of 100"),
    (lambda data: data["objective"].update(bound_seconds=1.0, gap=-1.0), "objective.bound_seconds: 1 is more than the plan's own"),
    (lambda data: data["objective"].update(bound_seconds=0.0, gap=1.0), "objective.status: 'optimal' with a gap of 1"),
    (lambda data: data["baselines"].update(ddp=baseline(data, 0.5, 10**10)), "baselines.ddp: feasible is True at 10000000000 bytes"),
    (lambda data: data["baselines"].update(ddp=baseline(data, 0.5, 10)), "baselines.ddp: it fits and takes"),
]


def baseline(data: Any, share: float, peak: int) -> Any:
    seconds = share * data["objective"]["seconds"]
    return {"objective_seconds": seconds, "step_seconds": seconds, "peak_memory_bytes_per_rank": peak, "feasible": True}


@pytest.mark.parametrize(("edit", "said"), RUNS)
def test_what_is_not_as_it_says_is_found_and_runs(edit: Callable[[Any], None], said: str) -> None:
    data = json.loads(bucketed())
    edit(data)
    plan = Plan.from_json(json.dumps(data))
    found = "\n".join(map(str, check(plan)))
    assert said in found, found
    assert [item.id for item in replay(plan, bucket_graph()).instructions] == [row["id"] for row in data["schedule"]]


@given(SEEDS)
def test_rows_in_any_disorder_end_in_words(seed: int) -> None:
    """Whatever is dropped, doubled or moved: no traceback, and what check finds legal runs."""
    chance = random.Random(seed)
    graph = random_graph(seed % 20, 4)
    data = json.loads(plan_of(random_schedule(graph, machine("dp=2,tp=2"), seed % 20, Limits(2000, 3000))).to_json())
    for _ in range(chance.randint(1, 3)):
        rows = data[chance.choice(("schedule", "schedule", "collectives", "reshards", "ops"))]
        moved = rows.pop(chance.randrange(len(rows))) if rows else None
        for _ in range(chance.randint(0, 2) if moved is not None else 0):
            rows.insert(chance.randint(0, len(rows)), copy.deepcopy(moved))
    plan = Plan.from_json(json.dumps(data))
    broken = illegal(plan)
    assert set(broken) <= set(check(plan))
    try:
        replay(plan, graph)
    except AutoparError as error:
        assert broken and "hint: " in str(error)
    else:
        assert not broken
