"""Each pass on assignments drawn at random: what it may change, what it must not, and what it promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from autopar import zoo
from autopar.graph import Graph, GraphInput, GraphOutput, Op, Ref, Tensor
from autopar.importer import capture_graph
from autopar.schedule import Assignment, Layout, Limits, Schedule, make_schedule, simulated, step_seconds
from autopar.schedule.bucketing import JOINED, size
from autopar.schedule.legality import check_legal
from autopar.schedule.windows import windows
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space
from autopar.sharding import InnerCollective, ShardingSpec, Strategy
from tests.graphs import machine
from tests.schedule.cases import CASES, Case
from tests.search.brute_force import schedule_seconds

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def operators(schedule: Schedule) -> Counter[tuple[object, ...]]:
    return Counter((item.of, item.reads, item.writes, item.seconds) for item in schedule.instructions if item.kind == "run")


def slices(schedule: Schedule) -> Counter[tuple[object, ...]]:
    return Counter((item.reads, item.writes) for item in schedule.instructions if item.kind == "slice")


def pieces(schedule: Schedule) -> Counter[tuple[object, ...]]:
    """The collectives value by value, whatever shares a call."""
    started = [schedule.collectives[item.of] for item in schedule.instructions if item.kind == "start"]
    return Counter((part.source, part.target, part.step) for call in started for part in call.parts)


AFTER = ("prefetch", "accumulate", "assign_in_place", "free")
"""Those that run when calls have been moved apart, and it itself."""


@every_case
def test_each_pass_leaves_a_legal_schedule_of_the_same_work(case: Case) -> None:
    first = case.stages()[0][1]
    for name, schedule in case.stages():
        check_legal(schedule, name) if name in AFTER else check_legal_but_for_limits(schedule, name)
        assert operators(schedule) == operators(first), name
        assert pieces(schedule) == pieces(first), name
        assert slices(schedule) == slices(first), name
        assert schedule.outputs == first.outputs
        for item in schedule.instructions:
            if item.kind == "start":
                call = schedule.collectives[item.of]
                assert item.reads == tuple(part.source for part in call.parts)
                assert item.writes == tuple(part.target for part in call.parts)
                assert item.seconds == pytest.approx(call.seconds(schedule.machine))


def check_legal_but_for_limits(schedule: Schedule, name: str) -> None:
    """Before ``prefetch`` everything is waited for at once, so that bytes in flight cannot be over a limit either."""
    check_legal(schedule, name)
    flying = 0
    for item in schedule.instructions:
        flying += (item.kind == "start") - (item.kind == "wait")
        assert flying <= 1, f"{name}: two collectives are in flight before prefetch has run"


@every_case
def test_fill_changes_the_order_of_operators_only_within_its_limit(case: Case) -> None:
    stages = dict(case.stages())
    before, after = ([item.of for item in stages[name].instructions if item.kind == "run"] for name in ("order", "fill_gaps"))
    assert sorted(before) == sorted(after)
    if not case.limits.aside_bytes:
        assert before == after


def test_operators_keep_their_order_where_nothing_is_waited_for() -> None:
    target = zoo.build("resnet", batch=2, image=16, width=4, blocks="1-1", classes=4)
    graph, on = capture_graph(target.model, target.args, target.kwargs, loss=target.loss, loss_args=target.loss_args), machine("1")
    (assignment, *_) = find_baselines(Space(graph, on, "adamw", resolve_pins(graph, on.mesh, {}))).values()
    made = make_schedule(graph, assignment, on)
    assert made.limits.aside_bytes and [item.of for item in made.instructions if item.kind == "run"] == [op.name for op in graph.ops]


@every_case
def test_buckets_hold_what_may_share_a_call(case: Case) -> None:
    stages = dict(case.stages())
    for call in stages["bucket"].collectives.values():
        if len(call.parts) > 1:
            assert size(call) <= case.limits.bucket_bytes
            assert call.kind in JOINED
            alike = {(p.step.kind, p.step.axes, p.step.reduction, p.dtype, p.layout.phase == "forward") for p in call.parts}
            assert len(alike) == 1
    if not case.limits.bucket_bytes:
        assert all(len(call.parts) == 1 for call in stages["bucket"].collectives.values())


def place_among_operators(schedule: Schedule, *, again: bool = True) -> Mapping[tuple[str, str], int]:
    """(kind, collective) -> how many operators stand before, with second runs or without."""
    found, count = {}, 0
    for item in schedule.instructions:
        if item.kind == "run":
            count += again or item.phase != "recompute"
        elif item.kind in ("start", "wait"):
            found[item.kind, item.of] = count
    return found


@every_case
def test_prefetch_never_starts_later_than_needed_and_waits_no_earlier_than_it_must(case: Case) -> None:
    stages = dict(case.stages())
    before, after = stages["bucket"], stages["prefetch"]
    assert [i.of for i in before.instructions if i.kind == "run"] == [i.of for i in after.instructions if i.kind == "run"]
    found, late, early = windows(after), place_among_operators(before), place_among_operators(after)
    captured = [place_among_operators(stage, again=False) for stage in (before, after)]
    for item in after.instructions:
        if item.kind == "start":
            window = found[item.id]
            assert early["start", item.of] <= late["start", item.of], "before, everything stands just before its first reader"
            assert early["start", item.of] >= window.ready + 1
            if window.behind or (not window.ahead and case.limits.ahead_bytes):
                assert early["start", item.of] == window.ready + 1, "what the phase makes is handed over at once"
            elif not case.limits.ahead_bytes:
                assert early["start", item.of] == late["start", item.of], "nothing starts before it is needed"
            if not window.ahead and not window.behind and not reads_in_flight(after, item.of):
                assert captured[1]["wait", item.of] == captured[0]["wait", item.of], "just before its reader"


def reads_in_flight(schedule: Schedule, name: str) -> bool:
    """Whether a slice makes somebody wait for the collective before an operator does."""
    targets = {part.target for part in schedule.collectives[name].parts}
    return any(item.kind != "run" and targets & set(item.reads) for item in schedule.instructions if item.kind in ("slice", "start"))


@every_case
def test_bytes_in_flight_stay_within_the_limit(case: Case) -> None:
    """Counted by position: gathers of one chain may pass the limit together, anything else may not."""
    schedule = dict(case.stages())["prefetch"]
    found = windows(schedule)
    start = {item.of: item for item in schedule.instructions if item.kind == "start"}
    for side in ("ahead", "behind"):
        flying: list[str] = []
        for item in schedule.instructions:
            if item.kind == "start" and getattr(found[item.id], side):
                flying.append(item.of)
                held = sum(schedule.collectives[name].held_bytes for name in flying)
                made = {value for name in flying for value in start[name].writes}
                roots = [name for name in flying if not made & set(start[name].reads)]
                assert held <= case.limits.ahead_bytes or len(roots) == 1, f"{side} at {item.id}"
            elif item.kind == "wait" and item.of in flying:
                flying.remove(item.of)


@every_case
def test_everything_is_freed_once_as_soon_as_nobody_needs_it(case: Case) -> None:
    schedule = dict(case.stages())["free"]
    assert [item.id for item in schedule.instructions] == list(range(len(schedule.instructions)))
    kept = {item.tensor for item in schedule.graph.inputs} | {value for _, value in schedule.outputs}
    freed = Counter(value for item in schedule.instructions if item.kind == "free" for value in item.reads)
    made = {value for item in schedule.instructions for value in item.writes}
    assert freed == Counter(made - kept)
    needed: dict[str, int] = {}
    for item in schedule.instructions:
        if item.kind == "free":
            continue
        uses = [*item.reads, *item.writes]
        if item.kind == "wait" and not schedule.collectives[item.of].packs:
            uses += [part.source for part in schedule.collectives[item.of].parts]
        needed.update(dict.fromkeys(uses, item.id))
    for item in schedule.instructions:
        if item.kind == "free":
            for value in item.reads:
                assert item.id == needed[value] + 1, f"{value} is needed at {needed[value]} for the last time and freed at {item.id}"


@every_case
def test_the_simulation_agrees_with_a_clock_written_from_its_words(case: Case) -> None:
    for name, schedule in case.stages():
        expected = schedule_seconds(schedule) + schedule.optimizer_seconds("adamw")
        assert step_seconds(schedule, "adamw") == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize(("aside", "expected"), [(0, ["product", "other"]), (2**30, ["other", "product"])], ids=["off", "on"])
def test_fill_pulls_an_operator_forward_while_another_waits_for_a_gather(aside: int, expected: list[str]) -> None:
    """product needs a weight that is gathered first, other does not."""
    shapes = {"x": (64, 64), "y": (64, 64), "w": (64, 64), "product": (64, 64), "other": (64, 64)}
    graph = Graph(
        "inference",
        {name: Tensor(name, shape, "float32") for name, shape in shapes.items()},
        (GraphInput("x", "input", "x"), GraphInput("y", "input", "y"), GraphInput("w", "parameter", "w")),
        (
            Op("product", "autopar.contract.default", ("x", "w"), ("product",), (Ref(0), Ref(1), "m k, k n -> m n")),
            Op("other", "aten.relu.default", ("y",), ("other",), (Ref(0),)),
        ),
        (GraphOutput("product", "output", "0"), GraphOutput("other", "output", "1")),
    )
    whole, rows = ShardingSpec.parse("R R"), ShardingSpec.parse("S0 R")
    assignment = Assignment(
        {"x": rows, "y": rows, "w": rows},
        {"product": Strategy((rows, whole), (rows,), 4), "other": Strategy((rows,), (rows,), 4)},
        (Layout("w@whole", "w", "w", whole, "forward", "product"),),
        {("product", 1): "w@whole"},
    )
    schedule = make_schedule(graph, assignment, machine("x=4"), Limits(aside_bytes=aside))
    assert [item.of for item in schedule.instructions if item.kind == "run"] == expected


def test_what_reads_a_part_of_a_prepared_weight_is_not_pulled_before_that_is_made() -> None:
    """The weight is gathered first, and forward begins with what is made of it."""
    whole, rows, columns = ShardingSpec.parse("R R"), ShardingSpec.parse("S0 R"), ShardingSpec.parse("R S0")
    shapes = dict.fromkeys(("x", "w", "prepared", "product"), (64, 64))
    graph = Graph(
        "inference",
        {name: Tensor(name, shape, "float32") for name, shape in shapes.items()},
        (GraphInput("x", "input", "x"), GraphInput("w", "parameter", "w")),
        (
            Op("prepared", "aten.relu.default", ("w",), ("prepared",), (Ref(0),)),
            Op("product", "autopar.contract.default", ("x", "prepared"), ("product",), (Ref(0), Ref(1), "m k, k n -> m n")),
        ),
        (GraphOutput("product", "output", "0"),),
    )
    assignment = Assignment(
        {"x": whole, "w": rows},
        {"prepared": Strategy((whole,), (whole,), 1), "product": Strategy((whole, columns), (columns,), 4)},
        (
            Layout("w@whole", "w", "w", whole, "forward", "prepared"),
            Layout("prepared@part", "prepared", "prepared", columns, "forward", "product"),
        ),
        {("prepared", 0): "w@whole", ("product", 1): "prepared@part"},
    )
    assert graph.prepared == {"prepared"}
    schedule = make_schedule(graph, assignment, machine("x=4"), Limits(aside_bytes=2**30))
    assert [item.of for item in schedule.instructions if item.kind == "run"] == ["prepared", "product"]


def test_what_came_of_converted_parameters_is_gathered_ahead_within_the_limit() -> None:
    """A call of one layer starts while the layer before runs, not with the first operators."""
    made = zoo.build("gpt2", layers=3, width=128, device="meta")
    graph = capture_graph(made.model, made.args, made.kwargs, loss=made.loss, loss_args=made.loss_args, compute_dtype="bfloat16")
    on = machine("x=4")
    fsdp = find_baselines(Space(graph, on, "adamw", resolve_pins(graph, on.mesh, {})))["fsdp"]
    converted = {tensor for name in graph.prepared for tensor in graph.op[name].outputs}
    schedule = make_schedule(graph, fsdp, on, Limits(bucket_bytes=0, ahead_bytes=64 * 2**10, aside_bytes=0))
    found, ran, begun = windows(schedule), 0, list[int]()
    for item in schedule.instructions:
        ran += item.kind == "run" and item.of not in graph.prepared
        if item.kind == "start" and item.half == "forward" and schedule.collectives[item.of].parts[0].layout.tensor in converted:
            assert found[item.id].ahead
            begun.append(ran)
    assert begun[0] == 0 and begun == sorted(begun)
    forward = sum(op.phase == "forward" and op.name not in graph.prepared for op in graph.ops)
    assert begun[-1] > 0.8 * forward, "the last shortly before its reader"


def test_what_was_set_aside_and_would_wait_for_a_collective_lets_others_pass() -> None:
    """Nothing follows after widened, which needs a sum over ranks, nor after other; there is room for one of them to be set aside."""
    size, whole, rows = 512, ShardingSpec.parse("R R"), ShardingSpec.parse("S0 R")
    columns, partial = ShardingSpec.parse("R S0"), ShardingSpec.parse("R R +P0")
    names, product = ("x", "y", "w", "gradient", "widened", "other", "one", "two", "three"), (Ref(0), Ref(1), "m k, k n -> m n")
    follows = {"one": "y", "two": "one", "three": "two"}
    chain = [Op(name, "autopar.contract.default", (before, "y"), (name,), product) for name, before in follows.items()]
    graph = Graph(
        "inference",
        {name: Tensor(name, (size, size), "float32") for name in names},
        (GraphInput("x", "input", "x"), GraphInput("y", "input", "y"), GraphInput("w", "parameter", "w")),
        (
            Op("gradient", "autopar.contract.default", ("x", "w"), ("gradient",), product),
            Op("widened", "aten.relu.default", ("gradient",), ("widened",), (Ref(0),)),
            Op("other", "aten.relu.default", ("y",), ("other",), (Ref(0),)),
            *chain,
        ),
        tuple(GraphOutput(name, "output", str(number)) for number, name in enumerate(("widened", "other", "three"))),
    )
    assignment = Assignment(
        {"x": columns, "y": whole, "w": rows},
        {"gradient": Strategy((columns, rows), (partial,), 4), "widened": Strategy((whole,), (whole,), 1),
         "other": Strategy((whole,), (whole,), 1)} | {op.name: Strategy((whole, whole), (whole,), 1) for op in chain},
        (Layout("gradient@whole", "gradient", "gradient", whole, "forward", "widened"),),
        {("widened", 0): "gradient@whole"},
    )  # fmt: skip
    schedule = make_schedule(graph, assignment, machine("x=4"), Limits(aside_bytes=4 * size * size * 3 // 2))
    ran = [item.of for item in schedule.instructions if item.kind == "run"]
    assert ran[:2] == ["gradient", "other"] and "widened" in ran[2:]


def test_a_gather_lets_an_operator_with_a_collective_inside_pass() -> None:
    """last needs a weight that can be gathered while middle runs, after statistic, which needs the link itself."""
    whole, rows = ShardingSpec.parse("R R"), ShardingSpec.parse("S0 R")
    square, names = (4096, 4096), ("x", "v", "w", "first", "statistic", "middle", "last")
    product = (Ref(0), Ref(1), "m k, k n -> m n")
    graph = Graph(
        "inference",
        {name: Tensor(name, square, "float32") for name in names},
        (GraphInput("x", "input", "x"), GraphInput("v", "parameter", "v"), GraphInput("w", "parameter", "w")),
        (
            Op("first", "aten.relu.default", ("x",), ("first",), (Ref(0),)),
            Op("statistic", "aten.relu.default", ("first",), ("statistic",), (Ref(0),)),
            Op("middle", "autopar.contract.default", ("statistic", "v"), ("middle",), product),
            Op("last", "autopar.contract.default", ("middle", "w"), ("last",), product),
        ),
        (GraphOutput("last", "output", "0"),),
    )
    inside = (InnerCollective("all_reduce", (0,), 2**20),)
    contraction = Strategy((rows, whole), (rows,), 8)
    assignment = Assignment(
        {"x": rows, "v": whole, "w": rows},
        {
            "first": Strategy((rows,), (rows,), 8), "statistic": Strategy((rows,), (rows,), 8, inside),
            "middle": contraction, "last": contraction,
        },
        (Layout("w@whole", "w", "w", whole, "forward", "last"),),
        {("last", 1): "w@whole"},
    )  # fmt: skip
    slots = simulated(make_schedule(graph, assignment, machine("x=8"), Limits()))
    runs = {slot.instruction.of: slot for slot in slots if slot.instruction.kind == "run"}
    first = next(slot for slot in slots if slot.instruction.kind == "start")
    assert runs["statistic"].begin == runs["first"].end
    assert first.begin == runs["statistic"].end
