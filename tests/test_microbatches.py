"""Microbatches: the step is the whole batch's, in value, memory and order; what is no such step is refused, or said to be another."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import zoo
from autopar.check import check
from autopar.compare import explain
from autopar.cost_models import Link, Machine, Mesh, load_hardware
from autopar.errors import MismatchError, UsageError
from autopar.graph import Graph
from autopar.importer import Capture, Captures, capture
from autopar.importer.passes.microbatches import COUNTED
from autopar.plan import Plan
from autopar.planning.cautions import MicrobatchWarning
from autopar.recording import replay
from autopar.schedule import Limits, Schedule, make_schedule, memory
from autopar.schedule.early_reduction import REDUCED
from autopar.schedule.limit_search import LimitSearch
from autopar.schedule.scheduled_plan import Sample
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import Pins
from autopar.search.choices.space import Space
from autopar.verify import verify
from autopar.verify.comparison import planned
from autopar.verify.trials import Case, Trial, run_simulated, run_single
from tests.graphs import machine, plan_of, random_schedule
from tests.runtime.models import SIZES

TOLERANCE = 1e-10
"""Relative, in float64."""


@lru_cache
def example(name: str, count: int) -> tuple[Case, Capture, Trial]:
    """A zoo model captured in microbatches, and what the step gives on one device."""
    torch.manual_seed(0)
    target = zoo.build(name, mode="train", dtype="float64", **SIZES[name])
    constants: dict[str, Tensor] = {}

    def run(args: tuple[Any, ...], kwargs: Any, loss_args: tuple[Any, ...]) -> Graph:
        found = capture(target.model, args, kwargs)
        constants.update(found.constants)
        return found.graph

    graph = Captures(run, (target.args, {}, ())).of(count)
    case = Case(graph, target.model, target.args, {}, None, (), {}, 2)
    return case, Capture(graph, constants), run_single(Case(**{**vars(case), "model": copy.deepcopy(target.model)}))


@pytest.mark.parametrize("limits", [None, Limits(summed_bytes=0), Limits(0, 0, 0, summed_bytes=3000)], ids=["late", "each", "some"])
@pytest.mark.parametrize(
    ("name", "count", "mesh"),
    [("mlp", 4, "2x2"), ("mlp", 16, "1"), ("gpt2", 2, "2x2"), ("gpt2", 4, "2"), ("llama3", 2, "4"), ("moe", 2, "2")],
)
def test_random_plans_make_the_step_of_one_device(name: str, count: int, mesh: str, limits: Limits | None) -> None:
    case, captured, single = example(name, count)
    assert case.graph.accumulation.whole, case.graph.accumulation.reason
    for seed, again, once in ((0, 0.0, 0.0), (1, 0.3, 0.0), (2, 0.2, 0.7)):
        schedule = random_schedule(case.graph, machine(mesh), seed, limits, again, once)
        assert not once or mesh == "1" or schedule.kept_values
        plan = plan_of(schedule)
        assert check(plan) == () and Plan.from_json(plan.to_json()) == plan
        trial = run_simulated(Case(**{**vars(case), "model": copy.deepcopy(case.model)}), schedule, captured.constants)
        largest = max(gradient.abs().max().item() for gradient in single.gradients.values())
        for gradient, wanted in single.gradients.items():
            assert (trial.gradients[gradient] - wanted).abs().max().item() <= TOLERANCE * max(largest, 1e-3), gradient
        assert trial.losses == pytest.approx(single.losses, rel=1e-9)
        rows = list(map(planned, plan.collectives_in_a_step))
        assert [item.row(schedule.machine.mesh) for item in trial.observed] == rows
        if limits is not None and not limits.ahead_bytes:  # in lockstep nothing is in flight
            assert trial.peak_bytes == pytest.approx(memory(schedule, "adamw").peak, rel=0.05)


@pytest.mark.parametrize("limits", [None, Limits(summed_bytes=0)], ids=["late", "each"])
def test_explain_says_where_a_gradient_is_summed(limits: Limits | None) -> None:
    case, *_ = example("mlp", 4)
    plan = plan_of(random_schedule(case.graph, machine("2x2"), 0, limits, 0.3))
    reduced = set()
    for name in plan.parameters:
        lines = explain(plan, name)
        added = lines.index("    summed over 4 microbatches")
        reduced |= {"after" if number > added else "before" for number, line in enumerate(lines) if line.startswith("    reshard of ")}
    assert ("after" if limits is None else "before") in reduced
    for name in (*plan.inputs, *plan.outputs, *(row.name for row in plan.ops), *(row.value for row in plan.reshards)):
        assert explain(plan, name)


def test_gradients_are_reduced_once_or_in_each_and_that_is_priced() -> None:
    case, _, _ = example("gpt2", 4)
    once, each = (random_schedule(case.graph, machine("2x2"), 0, Limits(summed_bytes=size)) for size in (2**62, 0))
    late = [sum(item.microbatch for item in schedule.instructions) for schedule in (once, each)]
    assert late[0] > late[1], "what is as small before it is reduced is summed so in any case"
    assert once.communication_seconds() < each.communication_seconds()
    assert memory(once, "none").peak > memory(each, "none").peak


def nodes_of_two() -> Machine:
    """Two nodes of two ranks: links without latency, the node's a hundred times as fast as the network's."""
    made = replace(load_hardware("h100-sxm"), devices_per_node=2, overlap_slowdown=0.0, kernel_launch_seconds=0.0)
    return Machine(Mesh.parse("2x2"), replace(made, node=Link(0.0, 1e11), network=Link(0.0, 1e9)))


def test_gradients_are_summed_halfway_through_their_reduction() -> None:
    """A weight that all ranks hold whole, on two links: the fast one scatters in each microbatch, the slow one reduces the sum once."""
    case, captured, single = example("mlp", 4)
    where = nodes_of_two()
    whole = find_baselines(Space(case.graph, where, "adamw", Pins()))["ddp"]
    once, halfway = (make_schedule(case.graph, whole, where, Limits(summed_bytes=size)) for size in (2**62, 0))
    assert all(not value.endswith(f"{REDUCED}@sum") for value in once.sums)
    halves = [value for value in halfway.sums if value.endswith(f"{REDUCED}@sum")]
    assert halves and all(halfway.values[value].bytes * 2 == once.values[_whole(halfway, value)].bytes for value in halves)
    for call in halfway.collectives.values():
        start = next(item for item in halfway.instructions if item.kind == "start" and item.of == call.id)
        if {part.target for part in call.parts} <= {value.removesuffix("@sum") for value in halves}:
            assert call.kind == "reduce_scatter" and start.stream == "node" and start.microbatch == 0
        elif any(part.source in halves for part in call.parts):
            assert start.stream == "network" and start.microbatch == 3
    plan = plan_of(halfway)
    assert check(plan) == () and Plan.from_json(plan.to_json()) == plan
    trial = run_simulated(Case(**{**vars(case), "model": copy.deepcopy(case.model)}), halfway, captured.constants)
    for gradient, wanted in single.gradients.items():
        assert torch.allclose(trial.gradients[gradient], wanted, rtol=TOLERANCE, atol=TOLERANCE), gradient


def _whole(schedule: Schedule, value: str) -> str:
    """The sum of the whole gradient."""
    return f"{schedule.values[value].tensor}@sum"


@pytest.mark.parametrize("count", [1, 4])
def test_sums_of_the_least_bytes_are_tried_where_there_are_sums(count: int) -> None:
    case, *_ = example("mlp", count)
    where = nodes_of_two()
    whole = find_baselines(Space(case.graph, where, "adamw", Pins()))["ddp"]
    search = LimitSearch(whole, (Sample(1.0, case.graph, whole),), where, "adamw", 2**40)
    search.run(None, 100)
    assert {limits.summed_bytes for limits in search.tried} == ({2**62} if count == 1 else {0, 2**62})


def adds_too_late(data: Any) -> None:
    """A gradient of the last microbatch is added to its sum when that has been sent."""
    rows = data["schedule"]
    read = {value for row in rows if row["kind"] == "start" for value in row["reads"]}
    row = next(row for row in rows if row["kind"] == "add" and row["writes"][0] in read)
    rows.remove(row)
    rows.append(row)


EDITS: list[tuple[Callable[[Any], None], str]] = [
    (lambda data: data.update(microbatches=2), "times: 4 in the plan, 2 recomputed"),
    (lambda data: data["accumulation"].update(cut=["nothing"]), "the plan has no input nothing"),
    (lambda data: data.pop("accumulation"), "is missing, the plan has 4 microbatches"),
    (lambda data: data["accumulation"].update(divisor="nothing"), "no output microbatch.divisor of nothing"),
    (lambda data: [row.update(microbatch=0) for row in data["schedule"] if row["kind"] == "start"], "is there after the last"),
    (lambda data: [row.update(microbatch=3) for row in data["schedule"] if row["kind"] == "run"], "runs in 1 of 4 microbatches"),
    (lambda data: [row.update(microbatch=2) for row in data["schedule"] if row["kind"] == "wait"], "neither the first nor the last"),
    (lambda data: data["schedule"].remove(next(row for row in data["schedule"] if row["kind"] == "add")), "which has not been made"),
    (adds_too_late, "lack the last microbatch there"),
    (lambda data: data["predicted"].update(step_seconds=data["predicted"]["step_seconds"] / 4), "predicted.step_seconds"),
]


@pytest.mark.parametrize(("edit", "said"), EDITS, ids=[said for _, said in EDITS])
def test_check_sees_another_number_of_microbatches(edit: Callable[[Any], None], said: str) -> None:
    case, _, _ = example("gpt2", 4)
    data = json.loads(plan_of(random_schedule(case.graph, machine("2x2"), 0)).to_json())
    edit(data)
    found = "\n".join(map(str, check(Plan.from_json(json.dumps(data)))))
    assert said in found, found


@pytest.mark.parametrize(("edit", "said"), EDITS[1:4], ids=[said for _, said in EDITS[1:4]])
def test_a_plan_that_makes_a_step_of_what_it_has_not_is_not_run(edit: Callable[[Any], None], said: str) -> None:
    case, _, _ = example("gpt2", 4)
    data = json.loads(plan_of(random_schedule(case.graph, machine("2x2"), 0)).to_json())
    edit(data)
    with pytest.raises(MismatchError, match=f"the plan cannot be run: accumulation.*{said}"):
        replay(Plan.from_json(json.dumps(data)), case.graph)


class Losses(nn.Module):
    """A linear layer under a loss by name."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss, self.linear = loss, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        match self.loss:
            case "mean":
                return y.square().mean()
            case "sum":
                return y.square().sum()
            case "by rows":
                return y.square().sum() / len(y)
            case "by a number":
                return y.square().sum() / 100
            case "regular":
                return y.square().mean() + 0.1 * self.linear.weight.square().sum()
            case "regular sum":
                return y.square().sum() + 0.1 * self.linear.weight.square().sum()
            case "less than one":
                return 3 * (1 - y.square().mean()) + 2
            case "a sum and one":
                return y.square().sum() + 1
            case "in half":
                return y.square().mean().bfloat16().float()
            case "counted":
                return (10 * y.square().mean()).long() + y.square().mean()
            case "root":
                return y.square().mean().sqrt()
            case "centred":
                return (y - y.mean(0)).square().mean()
            case _:
                return {"loss": y.square().mean(), "rows": y}


@pytest.mark.parametrize(
    ("loss", "weight", "whole"),
    [
        ("mean", 0.25, True), ("sum", 1.0, True), ("by rows", 0.25, True), ("by a number", 1.0, True), ("regular", 0.25, True),
        ("regular sum", 0.25, False), ("root", 0.25, False), ("centred", 0.25, False), ("in half", 0.25, True), ("counted", 0.25, False),
        ("less than one", 0.25, True), ("a sum and one", 0.25, False),
    ],
)  # fmt: skip
def test_what_losses_add_up_to(loss: str, weight: float, whole: bool) -> None:
    torch.manual_seed(0)
    model, x = Losses(loss), torch.randn(8, 4)
    found = autopar.capture(model, (x,), microbatches=4).accumulation
    assert (found.weight, found.whole) == (weight, whole), found.reason
    assert whole or "test_microbatches.py" in found.reason
    with torch.no_grad():
        summed = sum(found.weight * model(part) for part in x.chunk(4))
        assert whole == (abs(float(summed - model(x))) < (1e-2 if loss == "in half" else 1e-5))


@pytest.mark.parametrize("kind", ["a sum", "a constant", "weighed", "outputs"])
def test_what_adds_up_differently_is_named_with_its_lines(kind: str) -> None:
    """The line that joined the terms was all that was said."""

    class Joined(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            mean = super().forward(x).square().mean()
            total = super().forward(x).square().sum()
            penalty = self.weight.square().sum()
            match kind:
                case "a sum":
                    return mean + total
                case "a constant":
                    return total + 0.1 * penalty
                case "weighed":
                    return torch.stack([0.5 * mean, total / 100, penalty]).sum()
                case _:
                    return {"loss": mean, "total": total}

    reason = autopar.capture(Joined(4, 4), (torch.randn(8, 4),), microbatches=4).accumulation.reason
    first = Joined.forward.__code__.co_firstlineno
    mean, total, penalty = (f"(at {os.path.relpath(__file__)}:{first + number})" for number in (1, 2, 3))
    said = {
        "a sum": f"a mean over the batch {mean}, a sum over the batch {total}",
        "a constant": f"a sum over the batch {total}, the same in every microbatch {penalty}",
        "weighed": f"a mean over the batch {mean}, a sum over the batch {total}, the same in every microbatch {penalty}",
        "outputs": f"its outputs add up differently: loss is a mean over the batch {mean}, total is a sum over the batch {total}",
    }[kind]
    assert reason.endswith(said), reason


def _over_targets(kind: str) -> Callable[..., Tensor]:
    """A mean over what counts."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        match kind:
            case "smoothed":
                return nn.functional.cross_entropy(y, target, ignore_index=0, label_smoothing=0.1)
            case "weighted":
                return nn.functional.cross_entropy(y, target, torch.linspace(0.5, 2, 4, dtype=y.dtype), ignore_index=0)
            case "masked":
                mask = (target != 0).to(y.dtype)
                return (nn.functional.cross_entropy(y, target, reduction="none") * mask).sum() / mask.sum()
            case "beside a mean":
                return nn.functional.cross_entropy(y, target, ignore_index=0) + y.square().mean()
            case "over the model's":
                return y.square().sum() / y.sigmoid().sum()
            case _:
                return nn.functional.cross_entropy(y, target, ignore_index=0)

    return loss


TARGETS = torch.tensor([1, 2, 0, 0, 3, 0, 0, 1])
"""Of four microbatches two, none, one and one count."""


@pytest.mark.parametrize("execute", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["plain", "smoothed", "weighted", "masked"])
def test_a_mean_over_targets_weighs_microbatches_by_what_they_count(kind: str, execute: Any, one_rank: None) -> None:
    """Each counted 1/N, and a microbatch in which nothing counts made the loss no number."""
    torch.manual_seed(0)
    loss, x = _over_targets(kind), torch.randn(8, 4, dtype=torch.float64)
    model = nn.Linear(4, 4).double()
    plan = autopar.plan(model, (x,), mesh="dp=1", loss=loss, loss_args=(TARGETS,), microbatches=4)
    assert check(plan) == () and "by its share of what the mean divides by" in str(plan)
    module = autopar.compile(model, Plan.from_json(plan.to_json()), loss=loss, execute=execute)
    for target in (TARGETS, TARGETS.roll(2), torch.ones_like(TARGETS)):
        wanted, found = loss(model(x), target), module(x, target)
        wanted.backward()
        (3 * found).backward()
        assert found.item() == pytest.approx(wanted.item(), rel=TOLERANCE)
        for mine, other in zip(module.parameters(), model.parameters(), strict=True):
            grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(grad, 3 * other.grad, rtol=TOLERANCE, atol=TOLERANCE)
        module.zero_grad()
        model.zero_grad()
    with torch.no_grad():
        assert module(x, TARGETS).item() == pytest.approx(loss(model(x), TARGETS).item(), rel=TOLERANCE)
        assert math.isnan(module(x, torch.zeros_like(TARGETS)).item())


@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_ranks_weigh_microbatches_by_what_all_of_them_count(kind: str) -> None:
    torch.manual_seed(0)
    model, args = nn.Linear(4, 4).double(), (torch.randn(8, 4, dtype=torch.float64),)
    target = SimpleNamespace(model=model, args=args, kwargs={}, loss=_over_targets(kind), loss_args=(TARGETS,))
    for mesh in ("dp=2", "2x2"):
        plan = autopar.plan(model, args, mesh=mesh, loss=target.loss, loss_args=(TARGETS,), microbatches=4)
        assert verify(plan, target, backend="simulate", steps=3).passed


def test_a_mean_over_targets_beside_another_says_where_it_adds_up() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    given: Any = {"loss": _over_targets("beside a mean"), "loss_args": (TARGETS,), "microbatches": 4}
    found = autopar.capture(model, (x,), **given).accumulation
    assert found.whole and found.reason == COUNTED and not found.divisor
    with pytest.warns(MicrobatchWarning, match=COUNTED):
        assert COUNTED in str(autopar.plan(model, (x,), mesh="dp=2", **given))
    assert not autopar.capture(Losses("mean"), (x,), microbatches=4).accumulation.reason
    given["loss"] = _over_targets("over the model's")
    assert not autopar.capture(model, (x,), **given).accumulation.whole


def test_rows_that_are_made_and_sums_of_data_alone() -> None:
    """Rows of zeros read nothing, and a sum over inputs that is divided by a number is no mean over what counts."""

    def loss(y: Tensor, x: Tensor) -> Tensor:
        return torch.cat([y.new_zeros(len(y), 1), y, y.new_full((len(y), 1), 2.0)], 1).square().sum() / 8 + x.sum() / 4

    model, x = nn.Linear(4, 4).double(), torch.randn(8, 4, dtype=torch.float64)
    found = autopar.capture(model, (x,), loss=loss, loss_args=(x,), microbatches=4).accumulation
    assert (found.whole, found.weight, found.divisor) == (True, 1.0, ""), found.reason


def test_triangles_are_the_same_in_every_microbatch() -> None:
    """A default that is not written in a call was taken for another number."""

    def loss(y: Tensor) -> Tensor:
        return (y.view(-1, 2, 2) @ torch.ones(2, 2).tril() + y.view(-1, 2, 2).triu()).square().mean()

    assert autopar.capture(nn.Linear(4, 4), (torch.randn(8, 4),), loss=loss, microbatches=4).accumulation.whole


def test_a_step_that_is_not_the_whole_batchs_is_compared_with_the_same_on_one_device() -> None:
    torch.manual_seed(0)
    model, x = Losses("centred").double(), torch.randn(8, 4, dtype=torch.float64)
    with pytest.warns(MicrobatchWarning, match="rows of the batch meet"):
        plan = autopar.plan(model, (x,), mesh="dp=2", microbatches=2)
    assert plan.accumulation is not None and not plan.accumulation.whole and "not proved" in str(plan)
    case = Case(autopar.capture(model, (x,), microbatches=2), model, (x,), {}, None, (), {}, 1)
    single = run_single(Case(**{**vars(case), "model": copy.deepcopy(model)}))
    trial = run_simulated(case, random_schedule(case.graph, machine("2"), 0), {})
    for name, wanted in single.gradients.items():
        torch.testing.assert_close(trial.gradients[name], wanted)
    whole = Case(**{**vars(case), "graph": autopar.capture(model, (x,)), "model": copy.deepcopy(model)})
    assert abs(run_single(whole).losses[0] - single.losses[0]) > 1e-3


@pytest.mark.parametrize(
    ("model", "count", "said"),
    [
        (Losses("mean"), 3, "a batch of 8 cannot be cut into 3 equal microbatches"),
        (Losses("mean"), 0, "the number of microbatches is 0"),
        (Losses("rows"), 2, "the output rows would be kept for the whole batch"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Losses("mean")), 2, "would change the buffer 1.running_mean"),
        (nn.Linear(4, 4), 2, "without a scalar loss"),
    ],
)
def test_what_is_refused(model: nn.Module, count: int, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        autopar.capture(model, (torch.randn(8, 4),), microbatches=count)
    assert str(caught.value).splitlines()[-1].startswith("hint: ")


def test_auto_takes_more_where_memory_is_short_and_one_where_it_is_not() -> None:
    target = zoo.build("mlp", batch="1024", width="64", layers="4")
    options: Any = {"mesh": "dp=2", "hardware": "h100-sxm", "optimizer": "none", "microbatches": "auto", "recompute": "off"}
    ample = autopar.plan(target.model, target.args, **options)
    assert (ample.microbatches, ample.microbatches_tried) == (1, (1,))
    one = autopar.plan(target.model, target.args, mesh="dp=2", optimizer="none", memory=10**9)
    short = autopar.plan(target.model, target.args, memory=int(0.5 * one.predicted.peak_memory_bytes_per_rank), **options)
    assert short.microbatches > 1 and short.microbatches_tried and short.microbatches in short.microbatches_tried and check(short) == ()
    assert short.objective.bound_seconds <= short.objective.seconds
    assert "the bound over these" in str(short)


class Edges(nn.Linear):
    """Sums what lies at the ends of edges, which number the rows of the whole batch."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = super().forward(x)
        return h.index_add(0, edges[:, 0], h[edges[:, 1]]).square().mean()


def test_numbers_of_rows_that_a_microbatch_lacks_are_told(one_rank: None) -> None:
    example = Edges(4, 4), (torch.randn(8, 4), torch.randint(8, (20, 2)) | 4)
    with pytest.warns(MicrobatchWarning, match="rows of the batch meet"):
        plan = autopar.plan(*example, mesh="1", microbatches=2)
    module = autopar.compile(example[0], plan)
    for run in (lambda: module(*example[1]), lambda: verify(plan, example)):
        with pytest.raises(UsageError, match=r"(?s)in one of 2 microbatches index .* out of .*rows .* meet.*\nhint: what numbers"):
            run()


class Aside(nn.Linear):
    """Adds rows of its own, one for each place, of which there happen to be as many as there are rows in the batch."""

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return (super().forward(x) + places).square().mean()


def test_inputs_of_the_batchs_size_that_are_none() -> None:
    """They are cut too, and the model cannot take them: the number is refused, and what looks for one goes on without."""
    example = Aside(8, 8), (torch.randn(4, 4, 8), torch.randn(4, 8))
    with pytest.raises(UsageError, match=r"(?s)cannot be run in 2 microbatches: .*broadcast.*\nhint: every input whose dim 0 .* 4, is cut"):
        autopar.capture(*example, microbatches=2)
    ample = autopar.plan(*example, mesh="dp=2").predicted.peak_memory_bytes_per_rank
    found = autopar.plan(*example, mesh="dp=2", microbatches="auto", memory=ample)
    assert (found.microbatches, found.microbatches_tried) == (1, (1,))


class OneRow(nn.Module):
    """What is captured as other operators where the batch has one row, by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.token, self.linear = kind, nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        match self.kind:
            case "copies":
                x = self.layer(x)
            case "order":
                x = self.layer(x, src_key_padding_mask=mask)
            case "expanded":
                x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
            case "dims":
                return self.linear(x[:, 0]).squeeze().square().mean()
        return self.linear(x).square().mean()


@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("kind", ["copies", "order", "expanded", "dims"])
def test_one_row_is_captured_as_other_operators_and_adds_up(kind: str, rows: int) -> None:
    """It was taken for another step where the batch is odd, or two rows; and what has fewer dims ended in a traceback."""
    torch.manual_seed(0)
    model, args = OneRow(kind).double(), (torch.randn(rows, 3, 8, dtype=torch.float64), torch.zeros(rows, 3, dtype=torch.bool))
    found = autopar.capture(model, args, microbatches=rows).accumulation
    assert (found.whole, found.weight, found.microbatches) == (True, 1 / rows, rows), found.reason
    summed = sum(found.weight * model(*(each[row : row + 1] for each in args)) for row in range(rows))
    torch.testing.assert_close(summed, model(*args))


@pytest.mark.parametrize("rows", [4, 5])
def test_one_row_proves_nothing_where_rows_meet_or_it_is_treated_otherwise(rows: int) -> None:
    """A branch of the model's own for one row was taken for torch's."""

    def loss(y: Tensor) -> Tensor:
        return (y.softmax(1) if len(y) == 1 else y).square().mean()

    assert not autopar.capture(nn.Linear(4, 4), (torch.randn(rows, 4),), loss=loss, microbatches=rows).accumulation.whole
    assert not autopar.capture(Losses("centred"), (torch.randn(rows, 4),), microbatches=rows).accumulation.whole


def test_more_memory_never_costs_more() -> None:
    target = zoo.build("mlp", batch="256", width="16", layers="3")
    found = autopar.pareto(target.model, target.args, mesh="dp=2", rungs=3, time_limit=12, hardware="h100-sxm")
    limits = [plan.memory_limit_bytes_per_rank for plan in found.plans]
    steps = [plan.objective.seconds for plan in found.plans]
    assert len(limits) == 3 and limits == sorted(limits) and steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1] and all(check(plan) == () for plan in found.plans)
    assert found.plans[-1].predicted.peak_memory_bytes_per_rank <= limits[-1]
    rows = json.loads(found.to_json())["rows"]
    assert [row["objective_seconds"] for row in rows] == steps and len(str(found).splitlines()) == 4
    with pytest.raises(UsageError, match="rungs must be at least 2, got 1"):
        autopar.pareto(target.model, target.args, mesh="dp=2", rungs=1)


@pytest.mark.parametrize("execute", ["eager", "graph"])
def test_the_module_trains(execute: Any, one_rank: None) -> None:
    torch.manual_seed(0)
    model, x = Losses("mean"), torch.randn(8, 4)
    plan = autopar.plan(model, (x,), mesh="dp=1", microbatches=4)
    module = autopar.compile(model, Plan.from_json(plan.to_json()), execute=execute)
    for scale in (1.0, 3.0):
        module.zero_grad()
        model.zero_grad()
        wanted, found = model(x), module(x)
        (scale * wanted).backward()
        (scale * found).backward()
        assert found.item() == pytest.approx(wanted.item())
        for mine, other in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad, other.grad)
    with torch.no_grad():
        assert module(x).item() == pytest.approx(model(x).item())
    with pytest.raises(UsageError, match="float64"):
        module(x.double())


@pytest.mark.parametrize("execute", ["eager", "graph"])
@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 128), (torch.float16, 32)])
def test_half_precision_losses_are_added_up_in_float32(dtype: torch.dtype, count: int, execute: Any, one_rank: None) -> None:
    """They leave as the loss's own dtype, rounded once."""
    torch.manual_seed(0)
    model, x = Losses("mean").to(dtype), torch.randn(4 * count, 4).to(dtype)
    plan = autopar.plan(model, (x,), mesh="dp=1", microbatches=count)
    with torch.no_grad():
        wanted = torch.stack([model(rows) for rows in x.chunk(count)]).float().mean().to(dtype)
        found = autopar.compile(model, plan, execute=execute)(x)
    assert found.dtype == dtype and found.item() == wanted.item()


def test_what_half_precision_microbatches_count_is_added_up_in_float32(one_rank: None) -> None:
    """In bfloat16 257 is 256."""
    torch.manual_seed(0)
    model, x, target = nn.Linear(4, 4).bfloat16(), torch.randn(33 * 32, 4).bfloat16(), torch.randint(1, 4, (33 * 32,))
    loss = _over_targets("masked")
    plan = autopar.plan(model, (x,), loss=loss, loss_args=(target,), mesh="dp=1", microbatches=32)
    with torch.no_grad():
        wanted = torch.stack([loss(model(rows), part) for rows, part in zip(x.chunk(32), target.chunk(32), strict=True)]).float().mean()
        found = autopar.compile(model, plan)(x, target)
    assert plan.microbatches == 32 and found.item() == wanted.bfloat16().item()


class Centred(torch.autograd.Function):
    """A gradient less its mean over the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class Scaled(Centred):
    """A gradient times a number."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * -0.5


class Backwards(nn.Module):
    """A mean whose gradient is no derivative of it, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(4, 4)
        self.table = nn.Embedding(5, 4, scale_grad_by_freq=name == "by frequency")

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y = self.linear(x) + self.table(rows)
        y = {"centred": Centred.apply, "scaled": Scaled.apply}.get(self.name, lambda value: value)(y)
        return y.square().mean()


@pytest.mark.parametrize(("name", "whole"), [("by frequency", False), ("centred", False), ("scaled", True), ("plain", True)])
def test_rows_may_meet_in_backward_alone(name: str, whole: bool) -> None:
    """What scales gradients by how often a row is read was taken for the whole batch's step."""
    torch.manual_seed(0)
    model, args = Backwards(name).double(), (torch.randn(8, 4, dtype=torch.float64), torch.randint(5, (8,)))
    found = autopar.capture(model, args, microbatches=2).accumulation
    assert found.whole == whole and ("rows of the batch meet in aten." in found.reason) != whole, found.reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(model, args, mesh="dp=2", microbatches=2, hardware="cpu-cluster")
    assert verify(plan, (model, args), backend="simulate", steps=2).passed


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=batch_first, dtype=torch.float64)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return (self.layers(x) - wanted).square().mean()


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_stay_apart_in_torchs_own_layers(batch_first: bool) -> None:
    """Their attention merges time and batch around a layer; data parallelism sends nothing of activations there either."""
    torch.manual_seed(0)
    model, shape, spec = Encoder(batch_first), *(((8, 3, 8), "S0 R R") if batch_first else ((3, 8, 8), "R S0 R"))
    args = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    if batch_first:
        found = autopar.capture(model, args, microbatches=2).accumulation
        assert found.whole, found.reason
    plan = autopar.plan(model, args, mesh="dp=2", hardware="cpu-cluster", constraints={"input:x": spec, "input:wanted": spec})
    assert not [row for row in plan.collectives if row.kind in ("all_to_all", "permute")]
    assert verify(plan, (model, args), backend="simulate", steps=2).passed
