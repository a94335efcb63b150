"""Each predicate of the legality table finds a schedule broken in its way, and no other predicate does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.graph import Accumulation
from autopar.schedule import Limits, Schedule
from autopar.schedule.instructions import BEFORE_ALL, Instruction
from autopar.schedule.legality import PREDICATES, check_legal
from autopar.schedule.passes import run_passes
from autopar.schedule.storages import may_take
from autopar.schedule.windows import windows
from tests.graphs import machine, random_graph, random_schedule, two_layers

Broken = tuple[Schedule, int]
"""A schedule, and the id of the instruction at fault."""


def whole(seed: int = 1, again: float = 0.0) -> Schedule:
    """A legal one, with collectives ahead of, between and behind the operators of both phases."""
    return random_schedule(two_layers(), machine("x=2,y=2"), seed, Limits(0, 2**30, 0), again)


def kind(schedule: Schedule, name: str) -> list[Instruction]:
    return [item for item in schedule.instructions if item.kind == name]


def edited(schedule: Schedule, *items: Instruction) -> Schedule:
    """With these instructions in the place of those of the same id."""
    new = {item.id: item for item in items}
    return replace(schedule, instructions=tuple(new.get(item.id, item) for item in schedule.instructions))


def moved(schedule: Schedule, item: Instruction, behind: Instruction) -> Schedule:
    rest = [other for other in schedule.instructions if other.id != item.id]
    place = next(index for index, other in enumerate(rest) if other.id == behind.id)
    return replace(schedule, instructions=(*rest[: place + 1], item, *rest[place + 1 :]))


def reads_too_early() -> Broken:
    """An operator reads what a later one of its phase makes."""
    schedule = whole()
    first, second = [item for item in kind(schedule, "run") if item.phase == "forward"][:2]
    return edited(schedule, first._replace(reads=(*first.reads, *second.writes))), first.id


def reads_in_flight() -> Broken:
    """A wait stands behind the operator that reads what arrives."""
    schedule = whole()
    for wait in kind(schedule, "wait"):
        reader = next((item for item in kind(schedule, "run") if set(item.reads) & set(wait.writes)), None)
        frees = [item.id for item in kind(schedule, "free")]
        if reader is not None and reader.id + 1 not in frees:
            return moved(schedule, wait, reader), reader.id
        if reader is not None and schedule.collectives[wait.of].packs:
            return moved(schedule, wait, reader), reader.id
    raise AssertionError("no operator reads what a collective brings")


def reads_what_is_freed() -> Broken:
    """A free stands before the last reader."""
    schedule = whole()
    for gone in kind(schedule, "free"):
        before = schedule.instructions[gone.id - 1]
        if before.kind == "run" and before.reads[:1] == gone.reads:
            return moved(schedule, gone, schedule.instructions[gone.id - 2]), before.id
    raise AssertionError("no operator is the last to read one value alone")


def starts_twice() -> Broken:
    schedule = whole()
    start = next(item for item in kind(schedule, "start") if windows(schedule)[item.id].ahead)
    again = start._replace(id=len(schedule.instructions))
    place = schedule.instructions.index(start) + 1
    return replace(schedule, instructions=(*schedule.instructions[:place], again, *schedule.instructions[place:])), again.id


def waits_twice() -> Broken:
    schedule = whole()
    wait = kind(schedule, "wait")[0]
    again = wait._replace(id=len(schedule.instructions))
    place = schedule.instructions.index(wait) + 1
    return replace(schedule, instructions=(*schedule.instructions[:place], again, *schedule.instructions[place:])), again.id


def never_waits() -> Broken:
    """A gradient is on its way when the list ends."""
    schedule = whole()
    leaving = {value for _, value in schedule.outputs}
    wait = next(item for item in kind(schedule, "wait") if leaving & set(item.writes))
    start = next(item for item in kind(schedule, "start") if item.of == wait.of)
    return replace(schedule, instructions=tuple(item for item in schedule.instructions if item.id != wait.id)), start.id


def frees_twice() -> Broken:
    schedule = whole()
    gone = kind(schedule, "free")[0]
    return edited(schedule, gone._replace(reads=(*gone.reads, gone.reads[0]))), gone.id


def frees_what_came_in() -> Broken:
    schedule = whole()
    last = Instruction(len(schedule.instructions), "free", "backward", reads=("w0",))
    return replace(schedule, instructions=(*schedule.instructions, last)), last.id


def frees_what_leaves() -> Broken:
    schedule = whole()
    output = next(value for output, value in schedule.outputs if output.kind == "gradient")
    last = Instruction(len(schedule.instructions), "free", "backward", reads=(output,))
    return replace(schedule, instructions=(*schedule.instructions, last)), last.id


def frees_what_is_on_its_way() -> Broken:
    """A source that is not copied goes before the call is over."""
    for seed in range(50):
        schedule = whole(seed)
        made = {value for item in kind(schedule, "run") for value in item.writes}
        for start in kind(schedule, "start"):
            call = schedule.collectives[start.of]
            source = start.reads[0]
            gone = next((item for item in kind(schedule, "free") if item.reads == (source,)), None)
            wait = next(item for item in kind(schedule, "wait") if item.of == start.of)
            if call.packs or source not in made or gone is None or schedule.instructions[gone.id - 1] != wait:
                continue
            if not any(source in item.reads for item in schedule.instructions[start.id + 1 : wait.id]):
                return moved(schedule, gone, start), gone.id
    raise AssertionError("no call that leaves its source where it is")


def writes_over_what_is_read_later() -> Broken:
    """A sum takes the memory of what another operator still reads."""
    for seed in range(50):
        schedule = random_schedule(random_graph(seed, kinds=("add", "softmax")), machine("x=2"), seed)
        for item in kind(schedule, "run"):
            later = {value for other in schedule.instructions if other.id > item.id and other.kind == "run" for value in other.reads}
            for value in may_take(schedule, item):
                if value in later and value not in {entering.tensor for entering in schedule.graph.inputs}:
                    reader = next(other for other in schedule.instructions if other.id > item.id and value in other.reads)
                    return edited(schedule, item._replace(over=value)), reader.id
    raise AssertionError("never read later")


def forward_behind_backward() -> Broken:
    schedule = whole()
    last = kind(schedule, "free")[-1]
    return edited(schedule, last._replace(phase="forward")), last.id


def runs_again_what_is_of_backward() -> Broken:
    """An operator of backward passes for the second run of itself."""
    schedule = whole()
    run = kind(schedule, "run")[-1]
    return edited(schedule, run._replace(phase="recompute")), run.id


def runs_again_otherwise() -> Broken:
    """A second run is of another operator than the one it is named after."""
    schedule = whole(again=1.0)
    runs = [item for item in kind(schedule, "run") if item.phase == "recompute"]
    other = next(item for item in schedule.operations.values() if item != schedule.operations[runs[0].of])
    return replace(schedule, operations={**schedule.operations, runs[0].of: other}), runs[0].id


def runs_again_what_may_not() -> Broken:
    """What draws without a seed would draw another time."""
    schedule = whole(again=1.0)
    run = next(item for item in kind(schedule, "run") if item.phase == "recompute")
    first = schedule.operations[run.of]
    drawing = first._replace(op=replace(first.op, target="aten.bernoulli.default"))
    return replace(schedule, operations={**schedule.operations, run.of: drawing, first.op.name: drawing}), run.id


def nobody_waits_for_what_backward_reads() -> Broken:
    """A wait of forward for what an operator that does not lead to the loss alone reads is called late."""
    schedule = whole()
    for wait in kind(schedule, "wait"):
        reader = next((item for item in kind(schedule, "run") if set(item.reads) & set(wait.writes)), None)
        if wait.phase == "forward" and reader is not None and reader.of == "h":
            gone = next(item for item in schedule.instructions if item.phase == "backward" and "h" in item.reads)
            return edited(schedule, wait._replace(late=True)), gone.id
    raise AssertionError("nothing is sent for the first operator")


def what_comes_late_leaves_as_a_gradient() -> Broken:
    schedule = whole()
    leaving = {value for output, value in schedule.outputs if output.kind == "gradient"}
    wait = next(item for item in kind(schedule, "wait") if leaving & set(item.writes))
    return edited(schedule, wait._replace(late=True)), wait.id


def an_operator_is_missing() -> Broken:
    schedule = whole()
    operations = {**schedule.operations, "ghost": next(iter(schedule.operations.values()))}
    return replace(schedule, operations=operations), schedule.instructions[-1].id


def an_output_is_missing() -> Broken:
    schedule = whole()
    (output, _), *rest = schedule.outputs
    return replace(schedule, outputs=((output, "ghost"), *rest)), schedule.instructions[-1].id


def too_much_in_flight() -> Broken:
    """Two calls that do not follow one another, under a limit that one of them fills."""
    for seed in range(50):
        schedule = whole(seed)
        found = windows(schedule)
        flying: set[str] = set()
        for item in schedule.instructions:
            if item.kind == "start" and found[item.id].ahead:
                if flying and not any(schedule.collectives[other].parts[0].target in item.reads for other in flying):
                    limit = sum(schedule.collectives[name].held_bytes for name in (*flying, item.of)) - 1
                    broken = replace(schedule, limits=replace(schedule.limits, ahead_bytes=limit))
                    return broken, item.id
                flying.add(item.of)
            elif item.kind == "wait":
                flying.discard(item.of)
    raise AssertionError("never two calls in flight")


SUMS = "gradients of all microbatches are summed before they are reduced and leave"


def in_microbatches() -> Schedule:
    """Of a plan of three microbatches, whose gradients are reduced once."""
    graph = two_layers()
    cut = tuple(item.tensor for item in graph.of_kind("input"))
    return random_schedule(replace(graph, accumulation=Accumulation(3, cut)), machine("x=2,y=2"), 3)


def reduces_what_is_of_one() -> Broken:
    """The reductions run in every microbatch, on sums that are not complete."""
    schedule = in_microbatches()
    late = [item._replace(microbatch=0) for item in schedule.instructions if item.microbatch and item.kind != "free"]
    assert late
    return edited(schedule, *late), late[0].id


def reduces_before_the_last_is_added() -> Broken:
    """A sum is sent while the last microbatch's gradient is still to be added to it."""
    schedule = in_microbatches()
    reader = next(item for item in schedule.instructions if item.microbatch and set(schedule.sums) & set(item.reads))
    added = next(index for index, item in enumerate(schedule.instructions) if item.kind == "add" and item.writes[0] in reader.reads)
    return moved(schedule, reader, schedule.instructions[added - 1]), reader.id


BEFORE = "what runs once before all microbatches stands first, call after call, and all of them find it"


def made_once() -> Schedule:
    """Of a plan of three microbatches, which all read layouts that are made once a step."""
    graph = two_layers()
    cut = tuple(item.tensor for item in graph.of_kind("input"))
    return random_schedule(replace(graph, accumulation=Accumulation(3, cut)), machine("x=2,y=2"), 7, once=1.0)


def before_all(schedule: Schedule, kind: str) -> list[Instruction]:
    found = [item for item in schedule.instructions if item.microbatch == BEFORE_ALL and item.kind == kind]
    assert found
    return found


def gathers_in_every_microbatch() -> Broken:
    """One of the calls before all runs in every microbatch; the next one stands behind it."""
    schedule = made_once()
    first, second = before_all(schedule, "start")[:2]
    return edited(schedule, first._replace(microbatch=0)), second.id


def frees_what_all_read() -> Broken:
    schedule = made_once()
    freed = Instruction(len(schedule.instructions), "free", "backward", reads=(schedule.kept_values[0],))
    return replace(schedule, instructions=(*schedule.instructions, freed)), freed.id


def gathers_two_at_once() -> Broken:
    """The second call starts before the first one's wait."""
    schedule = made_once()
    first, second = before_all(schedule, "start")[:2]
    return moved(schedule, second, first), second.id


def gathers_what_a_microbatch_brings() -> Broken:
    """What is gathered before all is an activation's source: a microbatch has its own."""
    schedule = made_once()
    first = before_all(schedule, "start")[0]
    entering = next(iter(schedule.graph.of_kind("input")))
    return edited(schedule, first._replace(reads=(entering.tensor,))), first.id


LATE = "what comes late leads to the loss alone"
AGAIN = "an operator that runs a second time may, and does the same in backward"
def reads_what_lies_on_the_host() -> Broken:
    """What an operator reads lies on the host of a device that has none."""
    schedule = whole()
    item = next(item for item in schedule.instructions if item.kind == "run" and item.reads)
    values = {**schedule.values, item.reads[0]: schedule.values[item.reads[0]]._replace(host_bytes=4)}
    return replace(schedule, values=values), item.id


BROKEN: dict[str, tuple[str, Callable[[], Broken]]] = {
    "reads what is made later": ("what is read was made before and is not freed", reads_too_early),
    "reads what is in flight": ("what is read was made before and is not freed", reads_in_flight),
    "reads what is freed": ("what is read was made before and is not freed", reads_what_is_freed),
    "starts twice": ("a collective is started once, and waited for once after that", starts_twice),
    "waits twice": ("a collective is started once, and waited for once after that", waits_twice),
    "never waits": ("a collective is started once, and waited for once after that", never_waits),
    "frees twice": ("what is freed is there, once, and neither leaves nor is on its way", frees_twice),
    "frees what came in": ("what is freed is there, once, and neither leaves nor is on its way", frees_what_came_in),
    "frees what leaves": ("what is freed is there, once, and neither leaves nor is on its way", frees_what_leaves),
    "frees what is on its way": ("what is freed is there, once, and neither leaves nor is on its way", frees_what_is_on_its_way),
    "writes over what is read later": ("what is written over is not needed any more", writes_over_what_is_read_later),
    "forward behind backward": ("forward comes before backward", forward_behind_backward),
    "reduces what is of one microbatch": (SUMS, reduces_what_is_of_one),
    "reduces before the last is added": (SUMS, reduces_before_the_last_is_added),
    "gathers in every microbatch": (BEFORE, gathers_in_every_microbatch),
    "frees what all microbatches read": (BEFORE, frees_what_all_read),
    "gathers two at once": (BEFORE, gathers_two_at_once),
    "gathers what a microbatch brings": (BEFORE, gathers_what_a_microbatch_brings),
    "runs again what is of backward": (AGAIN, runs_again_what_is_of_backward),
    "runs again otherwise": (AGAIN, runs_again_otherwise),
    "runs again what may not": (AGAIN, runs_again_what_may_not),
    "nobody waits for what backward reads": (LATE, nobody_waits_for_what_backward_reads),
    "what comes late leaves": (LATE, what_comes_late_leaves_as_a_gradient),
    "an operator is missing": ("every operator runs, and every output is made", an_operator_is_missing),
    "an output is missing": ("every operator runs, and every output is made", an_output_is_missing),
    "too much in flight": ("bytes in flight stay within the limit", too_much_in_flight),
    "reads what lies on the host": ("copies back alone read what lies on the host, and it has room there", reads_what_lies_on_the_host),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_predicate_finds_it(name: str) -> None:
    rule, make = BROKEN[name]
    schedule, number = make()
    violated = {title: [at for at, _ in predicate(schedule)] for title, predicate in PREDICATES}
    assert [title for title, found in violated.items() if found] == [rule]
    assert number in violated[rule]
    with pytest.raises(ScheduleError, match=rf"after some pass is not legal: instruction {violated[rule][0]} ") as caught:
        check_legal(schedule, "some pass")
    assert str(caught.value).endswith(f"hint: the rule is: {rule}")


def test_every_predicate_is_broken_by_something() -> None:
    assert {rule for rule, _ in BROKEN.values()} == {title for title, _ in PREDICATES}


def test_what_is_whole_is_legal() -> None:
    for seed in range(10):
        assert check_legal(whole(seed, 0.5), "the passes") == whole(seed, 0.5)


def test_a_second_run_may_copy_what_the_first_did_not() -> None:
    """What it reads was gathered again, and lies otherwise."""
    schedule = whole(again=1.0)
    name = next(item.of for item in kind(schedule, "run") if item.phase == "recompute")
    copying = schedule.operations[name]._replace(copied=(0,), copied_bytes=4)
    check_legal(replace(schedule, operations={**schedule.operations, name: copying}), "the passes")


def test_a_pass_that_breaks_something_is_named() -> None:
    def forget(schedule: Schedule) -> Schedule:
        return replace(schedule, instructions=schedule.instructions[1:])

    with pytest.raises(ScheduleError, match="after forget is not legal"):
        run_passes(whole(), (("forget", forget),), checked=True)
