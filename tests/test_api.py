"""capture, plan, compile: the pipeline through its public face, on one rank and in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import zoo
from autopar.check import check
from autopar.cost_models import Hardware, Link, Machine, load_hardware
from autopar.effort import Effort
from autopar.errors import FileError, InfeasibleError, MismatchError, TimeLimitError, UsageError
from autopar.options import factorizations, of_three_axes, parse_memory, parse_mesh
from autopar.planning.cautions import UnknownOperatorWarning


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def square(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return ((output - wanted) ** 2).mean()


X, Y = torch.ones(8, 16), torch.zeros(8, 16)


@pytest.fixture(scope="module")
def graph() -> autopar.Graph:
    return autopar.capture(Block(), (X,), loss=square, loss_args=(Y,))


def test_plan_of_a_graph_is_the_plan_of_its_model(graph: autopar.Graph) -> None:
    first = autopar.plan(graph, mesh="dp=2,tp=2", target="Block")
    second = autopar.plan(Block(), (X,), loss=square, loss_args=(Y,), mesh={"dp": 2, "tp": 2})
    same = {"objective": second.objective, "search": second.search}
    assert first.model_copy(update=same) == second
    assert first.search is not None and second.search is not None
    done = [[(phase.name, phase.work_seconds) for phase in plan.search.phases] for plan in (first, second)]
    assert done[0] == done[1]
    assert second.model.target == "Block" and second.hardware["name"] == "h100-sxm"
    assert autopar.check(first, graph) == ()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"mode": "inference"}, "the graph is one of training, asked is inference"),
        ({"compute_dtype": "bfloat16"}, "the graph computes in its own dtype, asked is bfloat16"),
        ({"loss": square}, "the graph was captured without a loss"),
    ],
)
def test_what_a_captured_graph_is_not_is_refused(asked: dict[str, Any], said: str) -> None:
    """It was planned as it is."""
    with pytest.raises(UsageError, match=said):
        autopar.plan(autopar.capture(Block(), (X,)), mesh="2", **asked)


def test_arguments_of_a_loss_that_is_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="there are loss_args and no loss"):
        autopar.plan(Block(), (X,), loss_args=(Y,), mesh="2")


def test_each_phase_of_a_search_is_a_line_of_the_log(graph: autopar.Graph, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="autopar"):
        plan = autopar.plan(graph, mesh="dp=2,tp=2")
    assert plan.search is not None
    assert [message.partition(": step")[0] for message in caplog.messages] == [phase.name for phase in plan.search.phases]
    assert f"step {plan.objective.seconds:.4g} s" in caplog.messages[-1] and "CPU seconds" in caplog.messages[-1]


def test_meshes_of_every_form() -> None:
    assert parse_mesh("2x4").axes == (("x", 2), ("y", 4))
    assert parse_mesh({"dp": 2}).axes == (("dp", 2),)
    assert parse_mesh(SimpleNamespace(mesh_dim_names=("a", "b"), shape=(2, 3))).axes == (("a", 2), ("b", 3))
    assert parse_mesh(SimpleNamespace(mesh_dim_names=None, shape=(2, 3))).axes == (("x", 2), ("y", 3))
    assert [mesh.sizes for mesh in factorizations(12)] == [(12,), (6, 2), (4, 3), (3, 4), (2, 6)]
    assert [mesh.sizes for mesh in factorizations(1)] == [(1,)]


def test_meshes_of_three_axes_keep_to_nodes() -> None:
    assert [mesh.sizes for mesh in of_three_axes(12, 12)] == [(3, 2, 2), (2, 3, 2), (2, 2, 3)]
    assert [mesh.sizes for mesh in of_three_axes(16, 8)] == [(2, 4, 2), (2, 2, 4)]
    assert [mesh.sizes for mesh in of_three_axes(64, 8)] == [(8, 4, 2), (8, 2, 4), (4, 2, 8), (2, 4, 8)]
    assert not list(of_three_axes(4, 8)) and not list(of_three_axes(24, 7))


def test_meshes_that_cannot_take_a_pin_are_left_out(graph: autopar.Graph) -> None:
    name = next(item.name for item in graph.inputs if item.kind == "parameter" and len(graph.tensors[item.tensor].shape) == 2)
    found = autopar.plan(graph, devices=4, constraints={name: "S1 R"}, cost_model="communication")
    assert len(found.mesh) == 2 and found.parameters[name].spec == "S1 R"
    with pytest.raises(UsageError, match="axis 4"):
        autopar.plan(graph, devices=4, constraints={name: "S4 R"}, cost_model="communication")
    for wrong in ("", {}, {"dp": 0}, {"dp": 2.0}, 3):
        with pytest.raises(UsageError):
            parse_mesh(wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("70GiB", 70 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 kib", 1536),
        ("1e9", 10**9),
        (512, 512),
        ("3MB", 3 * 10**6),
        ("7B", 7),
        ("2G", 2 * 10**9),
    ],
)
def test_memory(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "70 elephants", "1..2GB", "inf", "1Gi B"])
def test_not_memory(text: str) -> None:
    with pytest.raises(UsageError, match="is not an amount of memory"):
        parse_memory(text)


def test_hardware_of_every_form(graph: autopar.Graph, tmp_path) -> None:
    value = load_hardware("a100-sxm-80g")
    assert isinstance(value, Hardware)
    assert autopar.plan(graph, mesh="dp=2", hardware=value).hardware["name"] == "a100-sxm-80g"
    (tmp_path / "bad.toml").write_text('name = "bad"\n')
    with pytest.raises(FileError, match="memory_bytes"):
        autopar.plan(graph, mesh="dp=2", hardware=tmp_path / "bad.toml")
    with pytest.raises(UsageError, match="unknown hardware"):
        autopar.plan(graph, mesh="dp=2", hardware="abacus")


def test_a_host_that_issues_slowly_is_what_the_step_waits_for(graph: autopar.Graph) -> None:
    plans = {way: autopar.plan(graph, mesh="dp=2,tp=2", execute=way) for way in ("eager", "cuda_graph", None)}
    for plan in plans.values():
        assert check(plan) == () and plan.objective.bound_seconds <= plan.objective.seconds
    steps = {way: plan.objective.seconds for way, plan in plans.items()}
    assert steps["eager"] > steps["cuda_graph"] >= steps[None]
    eager = plans["eager"]
    issued = 35e-6 * sum(row.launches or 0 for row in eager.schedule)
    assert issued <= eager.objective.seconds and "the step waits for it" in str(eager)
    assert eager.objective.gap < 0.5, "the host's own seconds bound the step"
    assert autopar.Plan.from_json(eager.to_json()) == eager and eager.created_by.execution == "eager"
    assert all(row.launches is None for row in plans[None].schedule), "without a host nothing is counted"


def test_the_host_issues_less_of_what_only_later_microbatches_run() -> None:
    """Nothing is said of hiding: a host's time is no part of communication."""
    target = zoo.build("mlp")
    loss = {"loss": target.loss, "loss_args": target.loss_args}
    plan = autopar.plan(target.model, target.args, **loss, mesh="dp=2", microbatches=4, execute="eager")
    issued = sum((row.launches or 0) * row.times(4) for row in plan.schedule)
    assert f"{issued} kernels and calls" in str(plan) and " of it hidden" not in str(plan)
    place = next(index for index, row in enumerate(plan.schedule) if row.launches == 1 and row.times(4) == 4)
    last = plan.schedule[place].model_copy(update={"microbatch": 3})
    rows = (*plan.schedule[:place], last, *plan.schedule[place + 1 :])
    assert f"{issued - 3} kernels and calls" in str(plan.model_copy(update={"schedule": rows}))


def test_a_plan_for_cuda_graphs_is_not_run_in_another_way_unasked() -> None:
    target = zoo.build("mlp")
    plan = autopar.plan(target.model, target.args, mesh="1", execute="cuda_graph")
    try:
        with pytest.raises(UsageError, match="to run as CUDA graphs, and this rank computes on cpu") as raised:
            autopar.compile(target.model, plan)
        assert "execute='compiled'" in str(raised.value.hint)
        assert autopar.compile(target.model, plan, execute="eager")(*target.args) is not None
    finally:
        dist.destroy_process_group()


def test_a_way_of_execution_that_cannot_be_priced_is_refused(graph: autopar.Graph) -> None:
    for options, message in (
        ({"execute": "fast"}, "unknown way to execute 'fast'"),
        ({"execute": "graph"}, "h100-sxm does not say what the host takes to issue a kernel in 'graph' execution"),
        ({"execute": "eager", "hardware": "cpu-cluster"}, "has no host apart"),
        ({"execute": "eager", "cost_model": "communication"}, "counts collectives alone, and no host"),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            autopar.plan(graph, mesh="dp=2,tp=2", **options)  # type: ignore[arg-type]
        assert raised.value.hint


@pytest.mark.parametrize("cost_model", ["roofline", "communication"])
def test_links_without_latency(graph: autopar.Graph, cost_model: str) -> None:
    free = Link(0.0, 1e9)
    hardware = replace(load_hardware("h100-sxm"), node=free, network=free, axes=(("dp", free),), kernel_launch_seconds=0.0)
    plan = autopar.plan(graph, mesh="dp=2,tp=2", hardware=hardware, cost_model=cost_model)
    assert plan.objective.seconds > 0 and autopar.check(plan, graph) == ()


def test_devices_keep_the_best_mesh(graph: autopar.Graph) -> None:
    best = autopar.plan(graph, devices=4, cost_model="communication")
    each = [autopar.plan(graph, mesh=mesh, cost_model="communication").objective.seconds for mesh in factorizations(4)]
    assert best.objective.seconds == min(each)


def test_less_memory_is_never_cheaper_and_says_what_would_do(graph: autopar.Graph) -> None:
    free = autopar.plan(graph, mesh="dp=4")
    tight = autopar.plan(graph, mesh="dp=4", memory=free.predicted.peak_memory_bytes_per_rank * 3 // 4)
    assert tight.objective.seconds >= free.objective.seconds
    assert tight.predicted.peak_memory_bytes_per_rank <= tight.memory_limit_bytes_per_rank < free.predicted.peak_memory_bytes_per_rank
    with pytest.raises(InfeasibleError, match="the least known to do is") as caught:
        autopar.plan(graph, mesh="dp=4", memory=100)
    assert caught.value.exit_status == 1 and "hint:" in str(caught.value)


def test_an_interrupted_solve_keeps_the_best_so_far() -> None:
    seen = []

    def interrupt(best: float, bound: float, gap: float, elapsed: float) -> None:
        seen.append((best, bound))
        if best < float("inf"):
            raise KeyboardInterrupt

    target = zoo.build("gpt2", device="meta")
    plan = autopar.plan(target.model, target.args, mesh="dp=2,tp=4", cost_model="communication", progress=interrupt, time_limit=600.0)
    assert len(seen) >= 1 and plan.objective.seconds <= seen[-1][0] * (1 + 1e-9)
    assert plan.objective.bound_seconds <= plan.objective.seconds
    assert autopar.check(plan) == ()


@pytest.mark.parametrize("place", ["autopar.recording.record", "autopar.search.driver.search_model.check_legal"])
def test_ctrl_c_while_the_plan_is_put_together_keeps_it(monkeypatch: pytest.MonkeyPatch, graph: autopar.Graph, place: str) -> None:
    whole = autopar.plan(graph, mesh="dp=2")
    module, _, name = place.rpartition(".")
    real, calls = getattr(import_module(module), name), []

    def interrupted(*given: object, **options: object) -> object:
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(place, interrupted)
    assert autopar.plan(graph, mesh="dp=2").parameters == whole.parameters and len(calls) >= 2


@dataclass(frozen=True)
class FoundIn:
    """What of a search's answer the meshes are compared by."""

    seconds: object
    interrupted: bool
    cut: bool = False
    used_up: bool = False
    bound_seconds: float = 0.0
    memory: object = field(default_factory=lambda: SimpleNamespace(peak=0))
    schedule: object = field(default_factory=lambda: SimpleNamespace(instructions=(), graph=SimpleNamespace(microbatches=1)))


def _meshes_in_turn(monkeypatch: pytest.MonkeyPatch, graph: autopar.Graph, outcomes: list[object]) -> list[float]:
    """Seconds given to each mesh that is tried, where each ends with its outcome: an error that is raised, or a step."""
    given: list[float] = []

    def find(graph: object, machine: object, *, time_limit: float, **options: object) -> object:
        outcome = outcomes[len(given)]
        given.append(time_limit)
        if isinstance(outcome, BaseException):
            raise outcome
        return FoundIn(outcome, outcome == 3.0)

    monkeypatch.setattr("autopar.search.find_plan", find)
    monkeypatch.setattr("autopar.planning.session.warn_unknown_operators", lambda found: None)
    monkeypatch.setattr("autopar.planning.session.warn_microbatches", lambda found: None)
    kept = SimpleNamespace(remember_loss=lambda loss: None)
    monkeypatch.setattr("autopar.recording.record", lambda found, **options: setattr(kept, "seconds", found.seconds) or kept)
    plan = autopar.plan(graph, devices=8, time_limit=900.0)
    assert plan.seconds == min(outcome for outcome in outcomes[: len(given)] if isinstance(outcome, float))
    return given


@pytest.mark.parametrize("error", [TimeLimitError("late", "wait"), InfeasibleError("large", "allow more"), KeyboardInterrupt()])
def test_a_mesh_that_ends_badly_leaves_the_plans_of_others(monkeypatch, graph: autopar.Graph, error: BaseException) -> None:
    given = _meshes_in_turn(monkeypatch, graph, [2.0, error, 1.0, 4.0])
    assert len(given) == (2 if isinstance(error, KeyboardInterrupt) else 4), "Ctrl-C ends them all"
    assert given[0] > 800, "the most promising has all of the time"
    assert given[-1] > 800 or len(given) < 4, "that of three axes has what the others leave"


def test_a_search_ended_by_ctrl_c_is_the_last(monkeypatch, graph: autopar.Graph) -> None:
    assert len(_meshes_in_turn(monkeypatch, graph, [3.0, 1.0])) == 1


def test_a_time_limit_that_passes_before_the_search_names_the_stage(graph: autopar.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeLimitError, match="captured"):
        autopar.plan(Block(), (X,), loss=square, loss_args=(Y,), mesh="dp=2", time_limit=1e-6)
    with monkeypatch.context() as patch, pytest.raises(TimeLimitError, match="pricing"):
        patch.setattr("autopar.effort.perf_counter", count(0.0, 1e6).__next__)
        autopar.plan(graph, mesh="dp=2", time_limit=900.0)
    monkeypatch.setattr("autopar.effort.GRACE_SECONDS", 900.0)
    assert autopar.plan(graph, mesh="dp=2", time_limit=1e-6).baselines, "a plan written by hand is an answer"


def test_a_capture_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of the model, and as a time limit, not as a fault of the model's."""
    ran: list[int] = []
    late = [False]

    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in range(100):
                late[0] = layer >= 10
                ran.append(layer)
                x = torch.relu(x + layer)
            return x.sum()

    monkeypatch.setattr("autopar.effort.perf_counter", lambda: 1e12 if late[0] else 0.0)
    with pytest.raises(TimeLimitError, match=r"^the time limit of 900 s passed before the model was captured\nhint: allow"):
        autopar.plan(Counting(), (X,), mesh="dp=2", time_limit=900.0)
    assert len(ran) < 20


def test_a_time_limit_that_passes_later_is_named_with_the_time_of_the_capture(monkeypatch) -> None:
    def late(*args: object, **options: object) -> None:
        raise TimeLimitError("no plan was found in 55.9 s", "wait")

    monkeypatch.setattr("autopar.search.find_plan", late)
    with pytest.raises(TimeLimitError, match=r"900 s passed, [\d.]+ s of it until the model was captured: no plan was found in 55.9 s"):
        autopar.plan(Block(), (X,), loss=square, loss_args=(Y,), mesh="dp=2", time_limit=900.0)


def test_pins(graph: autopar.Graph) -> None:
    plan = autopar.plan(graph, mesh="dp=2,tp=2", constraints={"up.weight": "S1 R", "input:*": "R R"})
    assert plan.parameters["up.weight"].spec == "S1 R"
    assert {row.spec for row in plan.inputs.values()} == {"R R"}
    assert autopar.check(plan, graph) == ()


def test_an_operator_without_a_rule_is_warned_of_with_its_price() -> None:
    @torch.library.custom_op("autopar_test_api::odd", mutates_args=())
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    odd.register_fake(torch.empty_like)

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return odd(x).sum()

    with pytest.warns(UnknownOperatorWarning, match=r"no sharding rule for autopar_test_api\.odd\..*: run whole on every rank, .* s of"):
        plan = autopar.plan(Odd(), (torch.eye(8),), mesh="dp=2", mode="inference")
    assert autopar.check(plan) == ()


def test_a_ladder_takes_what_plan_takes_but_the_memory() -> None:
    taken = {name: (item.default, item.annotation) for name, item in inspect.signature(autopar.plan).parameters.items()}
    del taken["memory"]
    ladder = {name: (item.default, item.annotation) for name, item in inspect.signature(autopar.pareto).parameters.items()}
    assert ladder.pop("rungs")[0] == 8
    assert ladder == taken


@pytest.mark.parametrize("effort", ["low", "high"])
def test_effort_reaches_the_search(graph: autopar.Graph, effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def search(graph: autopar.Graph, machine: Machine, **options: object) -> None:
        asked.append(options["effort"])
        raise InfeasibleError("none", "none")

    monkeypatch.setattr("autopar.search.find_plan", search)
    with pytest.raises(InfeasibleError, match="none"):
        autopar.plan(graph, mesh="dp=2", effort=effort)
    assert asked == [effort]


def test_a_sweep_takes_what_plan_takes_but_the_mesh() -> None:
    plan, sweep = (inspect.signature(call).parameters for call in (autopar.plan, autopar.sweep))
    of_the_model = {"model", "args", "kwargs", "loss", "loss_args", "target"}
    assert set(plan) - of_the_model - {"mesh"} <= set(sweep)
    for name in set(plan) & set(sweep) - {"target", "devices", "memory"}:
        assert (plan[name].default, plan[name].annotation) == (sweep[name].default, sweep[name].annotation)


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match="neither a mesh nor a number of devices"):
        autopar.plan(Block(), (X,))
    with pytest.raises(UsageError, match="unknown effort 'most'") as caught:
        autopar.plan(Block(), (X,), mesh="dp=2", effort="most")
    assert caught.value.hint == "use one of low, normal, high"
    with pytest.raises(UsageError, match=r"nn\.Module"):
        autopar.plan(3, (X,), mesh="dp=2")
    with pytest.raises(UsageError, match=r"got ExportedProgram\nhint: .* an ExportedProgram has module\(\)"):
        autopar.plan(torch.export.export(nn.Linear(4, 4), (torch.ones(4),)), (torch.ones(4),), mesh="dp=2")


def test_compile_trains_and_knows_the_loss_of_its_plan(one_rank: None, tmp_path) -> None:
    torch.manual_seed(0)
    model = Block()
    plan = autopar.plan(model, (X,), loss=square, loss_args=(Y,), mesh="dp=1")
    sharded = autopar.compile(model, plan)
    loss = sharded(X, Y)
    loss.backward()
    square(model(X), Y).backward()
    assert dict(sharded.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for (name, mine), theirs in zip(sharded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load(tmp_path / "plan.json")
    assert loaded == plan
    with pytest.raises(MismatchError, match="loss"):
        autopar.compile(model, loaded)
    torch.testing.assert_close(autopar.compile(model, loaded, loss=square)(X, Y), loss)


def test_compile_refuses_what_does_not_fit(one_rank: None) -> None:
    plan = autopar.plan(Block(), (X,), loss=square, loss_args=(Y,), mesh="dp=1")
    with pytest.raises(MismatchError, match=r"parameter up\.weight is float32\[128, 32\] in the model, float32\[64, 16\] in the plan"):
        autopar.compile(Block(32), plan)
    with pytest.raises(MismatchError, match="of 2 ranks, 1 processes are running"):
        autopar.compile(Block(), autopar.plan(Block(), (X,), loss=square, loss_args=(Y,), mesh="dp=2"))
    old = plan.model_copy(update={"created_by": plan.created_by.model_copy(update={"torch": "2.9.0"})})
    with pytest.raises(MismatchError, match=r"made with torch 2\.9\.0"):
        autopar.compile(Block(), old)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: autopar.plan(Block(), (X,), mesh={0: 2}), "0 is not a name for a mesh axis"),
        (lambda: autopar.plan(Block(), (X,), mesh="dp=2", optimizer=None), "unknown optimizer None"),
        (lambda: autopar.plan(Block(), (X,), mesh="dp=2", seed=2**31), "the seed is 2147483648"),
        (lambda: autopar.plan(Block(), (X,), mesh="dp=2", optimizer=["adamw"]), r"unknown optimizer \['adamw'\]"),
        (lambda: autopar.plan(Block(), (X,), kwargs=[1], mesh="dp=2"), "kwargs is a list, not a mapping"),
        (lambda: autopar.compile(Block(), {}), "a dict is not a plan"),
        (lambda: autopar.check("plan.json"), "a str is not a plan"),
    ],
    ids=[
        "axis of a number", "no optimizer", "seed too large", "list of optimizers", "list of kwargs", "compile a dict", "check a path",
    ],
)
def test_values_of_other_types_are_refused_in_words(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert "\nhint: " in str(caught.value)


def test_dtensors_are_pins(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Block()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Shard(1), Shard(0)]))
    x = distribute_tensor(X, mesh, [Shard(0), Shard(1)])
    plan = autopar.plan(model, (x,), mesh=mesh, loss=square, loss_args=(Y,))
    assert plan.mesh == {"dp": 2, "tp": 2}
    assert plan.parameters["up.weight"].spec == "S1 S0" and plan.inputs["x"].spec == "S0 S1"
    assert plan.pins == {"up.weight": "S1 S0", "input:x": "S0 S1"}
    with pytest.raises(UsageError, match="is a DTensor on a mesh of sizes"):
        autopar.plan(model, (x,), mesh="dp=4", loss=square, loss_args=(Y,))
