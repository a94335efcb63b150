"""The search is at least as good as what a person would write, and what a person would write is what it says it is."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from autopar import zoo
from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.graph import COMBINE, DISPATCHES, Graph
from autopar.importer import capture_graph
from autopar.schedule import Schedule, make_schedule
from autopar.schedule.legality import check_legal
from autopar.search import SearchResult, find_plan
from autopar.search.baselines.recipes import find_baselines
from autopar.search.choices.pins import resolve_pins
from autopar.search.choices.space import Space

MODELS = ("mlp", "gpt2", "llama3", "resnet", "moe")
FEWER_LAYERS = {"gpt2": 2, "llama3": 2, "moe": 2}
MESHES = ("x=4", "x=2,y=4", "x=8,y=8")
CASES = [(name, mesh, mode) for name in MODELS for mesh in MESHES for mode in ("train", "inference")]
QUICK = {("mlp", "x=4", "train"), ("mlp", "x=2,y=4", "inference"), ("moe", "x=4", "train"), ("resnet", "x=4", "inference")}


@cache
def graph_of(name: str, mode: str) -> Graph:
    keys = {"layers": FEWER_LAYERS[name]} if name in FEWER_LAYERS else {}
    target = zoo.build(name, mode=mode, **keys)
    return capture_graph(target.model, target.args, target.kwargs, mode=mode, loss=target.loss, loss_args=target.loss_args)


def machine_of(mesh: str) -> Machine:
    return Machine(Mesh.parse(mesh), load_hardware("h100-sxm"), "roofline")


@cache
def found_for(name: str, mesh: str, mode: str) -> SearchResult:
    return find_plan(graph_of(name, mode), machine_of(mesh), optimizer="adamw" if mode == "train" else "none", time_limit=600.0)


def parameters(schedule: Schedule) -> list[str]:
    return [item.tensor for item in schedule.graph.inputs if item.kind == "parameter" and item.trained]


def moves(schedule: Schedule, tensors: set[str], *, least: int = 0) -> Counter[tuple[str, str]]:
    """(kind, phase) of the collectives on these tensors, value by value."""
    parts = [part for call in schedule.calls for part in call.parts]
    return Counter((part.step.kind, part.layout.phase) for part in parts if part.layout.tensor in tensors and part.step.full_bytes > least)


@pytest.mark.parametrize(
    ("name", "mesh", "mode"),
    [pytest.param(*case, id="-".join(case), marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_no_baseline_is_better(name: str, mesh: str, mode: str) -> None:
    found = found_for(name, mesh, mode)
    check_legal(found.schedule, "the search")
    assert {"ddp", "fsdp", "megatron"} & set(found.baselines), "some plan written by hand applies"
    assert ({"zero1", "zero2"} <= set(found.baselines)) == (mode == "train" and "ddp" in found.baselines)
    for title, rival in found.baselines.items():
        check_legal(rival.schedule, title)
        assert found.bound_seconds <= rival.seconds * (1 + 1e-9) or not rival.feasible, title
        assert found.seconds <= rival.seconds * (1 + 1e-9) or not rival.feasible, title


def test_zero1_reduces_gradients_whole_and_gathers_parameters_once() -> None:
    found = found_for("mlp", "x=4", "train")
    schedule = found.baselines["zero1"].schedule
    weights = parameters(schedule)
    split = {tensor for tensor in weights if schedule.specs[tensor].split_axes}
    assert split, "parameters and the optimizer's states are kept split"
    assert moves(schedule, set(weights)) == Counter({("all_gather", "forward"): len(split)}), "gathered once a step, and kept"
    named = {item.name: item.tensor for item in schedule.graph.inputs}
    gradients = {output.tensor: named[output.name] for output in schedule.graph.outputs if output.kind == "gradient"}
    assert moves(schedule, set(gradients)) == Counter({("all_reduce", "backward"): len(gradients)})
    cut = {cut.layout.tensor for cut in schedule.cuts.values() if cut.step is not None}
    assert {tensor for tensor, weight in gradients.items() if weight in split} <= cut, "only then is this rank's part cut"
    for output, value in schedule.outputs:
        if output.kind == "gradient":
            assert schedule.specs[value] == schedule.specs[named[output.name]]


def test_zero2_scatters_gradients_instead() -> None:
    found = found_for("mlp", "x=4", "train")
    schedule = found.baselines["zero2"].schedule
    split = [tensor for tensor in parameters(schedule) if schedule.specs[tensor].split_axes]
    assert moves(schedule, set(split)) == Counter({("all_gather", "forward"): len(split)})
    named = {item.name: item.tensor for item in schedule.graph.inputs}
    gradients = {output.tensor for output in schedule.graph.outputs if output.kind == "gradient" and named[output.name] in split}
    assert moves(schedule, gradients) == Counter({("reduce_scatter", "backward"): len(gradients)})


def test_torchtitan_splits_over_the_other_axes_what_megatron_splits_over_the_last() -> None:
    """FSDP x TP: each rank holds as little as with FSDP alone, and gathers over the first axis, in forward and again in backward."""
    found = found_for("gpt2", "x=2,y=4", "train")
    schedule, whole = found.baselines["torchtitan"].schedule, found.baselines["megatron_sp"].schedule
    weights = [tensor for tensor in parameters(schedule) if len(schedule.graph.tensors[tensor].shape) == 2]
    assert all(set(schedule.specs[tensor].split_axes) == {0, *whole.specs[tensor].split_axes} for tensor in weights)
    assert sum({1} <= set(whole.specs[tensor].split_axes) for tensor in weights) > len(weights) / 2
    made = moves(schedule, set(weights))
    assert made["all_gather", "forward"] and made["all_gather", "backward"]
    gathers = [call for call in schedule.calls if call.kind == "all_gather" and any(part.layout.tensor in weights for part in call.parts)]
    assert {axis.axis for call in gathers for axis in call.axes} == {0}, "over the axis of FSDP alone"
    assert "torchtitan" not in found_for("gpt2", "x=2,y=4", "inference").baselines


def test_expert_fsdp_splits_over_all_axes_what_expert_leaves_whole() -> None:
    """Experts stay split as they were, and over the other axes too; all else lies in as many parts as there are ranks."""
    found = found_for("moe", "x=2,y=4", "train")
    schedule, whole = found.baselines["expert_fsdp"].schedule, found.baselines["expert"].schedule
    graph = schedule.graph
    experts = [tensor for tensor in parameters(schedule) if len(graph.tensors[tensor].shape) == 3]
    assert all(set(whole.specs[tensor].split_axes) == {1} for tensor in experts)
    weights = [tensor for tensor in parameters(schedule) if len(graph.tensors[tensor].shape) >= 2]
    assert experts and all(set(schedule.specs[tensor].split_axes) == {0, 1} for tensor in weights)
    gathers = [call for call in schedule.calls if call.kind == "all_gather" and any(part.layout.tensor in experts for part in call.parts)]
    assert gathers and {axis.axis for call in gathers for axis in call.axes} == {0}, "experts are gathered over the other axis alone"
    assert found.baselines["expert_fsdp"].memory.resting < found.baselines["expert"].memory.resting
    assert "expert_fsdp" not in found_for("moe", "x=2,y=4", "inference").baselines
    assert "expert_fsdp" not in found_for("gpt2", "x=2,y=4", "train").baselines


def test_fsdp_gathers_again_in_backward() -> None:
    found = found_for("mlp", "x=4", "train")
    schedule = found.baselines["fsdp"].schedule
    graph = schedule.graph
    split = {tensor for tensor in parameters(schedule) if schedule.specs[tensor].split_axes}
    late = {tensor for tensor in split if any(graph.ops[index].phase == "backward" for index, _ in graph.consumers[tensor])}
    assert moves(schedule, split) == Counter({("all_gather", "forward"): len(split), ("all_gather", "backward"): len(late)})


class Converting(nn.Module):
    """Weights that compute in half of their precision, and one that is kept in half and computes in single."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = nn.functional.linear(x.bfloat16(), self.one.weight.bfloat16()).relu()
        return (nn.functional.linear(found, self.other.weight.bfloat16()) * self.scale.float()).sum()


@pytest.mark.parametrize(("name", "reduced"), [("zero1", "all_reduce"), ("zero2", "reduce_scatter"), ("fsdp", "reduce_scatter")])
def test_what_is_stored_split_travels_in_the_smaller_dtype(name: str, reduced: str) -> None:
    graph = capture_graph(Converting(), (torch.randn(16, 64),), mode="train")
    machine = machine_of("x=4")
    made = find_baselines(Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {})))
    schedule = make_schedule(graph, made[name], machine)
    check_legal(schedule, name)
    parts = [part for call in schedule.calls for part in call.parts]
    found = Counter((part.step.kind, part.layout.phase, part.dtype) for part in parts if part.step.full_bytes > 1024)
    again = Counter({("all_gather", "backward", "bfloat16"): name == "fsdp"})  # the first weight is of no use there
    assert found == Counter({("all_gather", "forward", "bfloat16"): 2, (reduced, "backward", "bfloat16"): 2}) + again
    (scale,) = [
        part for part in parts if part.step.kind == "all_gather" and part.layout.phase == "forward" and part.step.full_bytes <= 1024
    ]
    assert scale.dtype == "bfloat16", "kept in half, it is gathered so"


@pytest.mark.parametrize("mesh", ["x=4", "x=2,y=4"])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_experts_stay_where_they_are(mode: str, mesh: str) -> None:
    """Tokens go to the experts and back, once a layer and phase; all else is data parallel."""
    schedule = found_for("moe", mesh, mode).baselines["expert"].schedule
    graph, axis = schedule.graph, len(schedule.machine.mesh.sizes) - 1
    experts = {item.tensor for item in graph.of_kind("parameter") if len(graph.tensors[item.tensor].shape) == 3}
    assert len(experts) == 2 * FEWER_LAYERS["moe"]
    assert all(str(schedule.specs[tensor]) == f"S{axis} R R" for tensor in experts), "an expert's matrices lie on one rank of the axis"
    named = {item.name: item.tensor for item in graph.inputs}
    gradient = {output.tensor: named[output.name] for output in graph.outputs if output.kind == "gradient"}
    moved = [(part.layout.tensor, part.layout.phase) for call in schedule.calls for part in call.parts]
    assert not {tensor for tensor, _ in moved} & set(graph_inputs(schedule)), "no weight is ever gathered"
    for phase in ("forward", "backward") if mode == "train" else ("forward",):
        sent = [tensor for tensor, when in moved if when == phase and len(graph.tensors[tensor].shape) == 4]
        assert len(sent) == 2 * FEWER_LAYERS["moe"], "to the experts and back, in one collective each"
    rest = {tensor for tensor, _ in moved if len(graph.tensors[tensor].shape) != 4 and graph.tensors[tensor].shape}
    assert {gradient[tensor] for tensor in rest} == set(gradient.values()) - (experts if mesh == "x=4" else set())
    for call in schedule.calls:
        for part in call.parts:
            if gradient.get(part.layout.tensor) in experts:
                assert axis not in {sub.axis for sub in part.step.axes}, "every token that an expert saw was on its ranks"


@pytest.mark.parametrize("mesh", ["x=4", "x=2,y=4"])
def test_rows_travel_to_their_experts_and_back(mesh: str) -> None:
    """By the exchanges inside of dispatches and combines over the last axis; no weight of an expert is gathered, and no row resharded."""
    target = zoo.build("moe", layers=2, dispatch="grouped", device="meta")
    graph = capture_graph(target.model, target.args, target.kwargs, mode="train", loss=target.loss, loss_args=target.loss_args)
    machine = machine_of(mesh)
    space = Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {}))
    made = find_baselines(space)["expert"]
    axis = len(machine.mesh.sizes) - 1
    held = {item.name: str(made.inputs[item.tensor]) for item in graph.of_kind("parameter") if len(graph.tensors[item.tensor].shape) == 3}
    assert held == {f"layers.{layer}.experts.{name}": f"S{axis} R R" for layer in range(2) for name in ("up", "down")}
    weights = {item.tensor for item in graph.inputs}
    assert not {layout.tensor for layout in made.layouts} & (weights | space.dispatched)
    sent = [op for op in graph.ops if op.target in (*DISPATCHES, COMBINE)]
    assert len(sent) == 14, "of two layers: rows, their experts and sums forward, three dispatches and combines backward"
    assert all({inner.axes for inner in made.strategies[op.name].inner} == {(axis,)} for op in sent)


def graph_inputs(schedule: Schedule) -> list[str]:
    return [item.tensor for item in schedule.graph.inputs]


def test_models_without_experts_have_no_such_baseline() -> None:
    assert "expert" not in found_for("mlp", "x=4", "train").baselines


PINS = (
    "input:x=S0 R", "input:x=R S0", "*.weight=R R", "*.weight=S0 R", "layers.1.weight=R S0", "op:contract_1=R S0", "op:add=R R",
    "module:layers.1=S0 R",
)  # fmt: skip


@pytest.mark.parametrize("pin", PINS)
def test_a_baseline_reshards_what_a_pin_lays_otherwise(pin: str) -> None:
    graph, machine = graph_of("mlp", "train"), machine_of("x=4")
    name, spec = pin.split("=")
    found = find_plan(graph, machine, optimizer="adamw", constraints={name: spec}, time_limit=600.0)
    assert {"ddp", "zero1", "zero2", "fsdp", "megatron", "megatron_sp"} <= set(found.baselines)
    pins = resolve_pins(graph, machine.mesh, {name: spec})
    for title, schedule in (("search", found.schedule), *((title, rival.schedule) for title, rival in found.baselines.items())):
        check_legal(schedule, title)
        assert {tensor: schedule.specs[tensor] for tensor in pins.inputs} == pins.inputs, title
        for tensor, wanted in pins.tensors.items():
            of_tensor = {tensor, *(value for value, layout in schedule.layouts.items() if layout.tensor == tensor)}
            read = {schedule.specs[value] for value in of_tensor}
            assert wanted in read, title


def test_plans_by_hand_gather_keys_where_the_batch_is_too_small() -> None:
    """So that what they take is what people take, who have no keys travel around ranks."""
    target = zoo.build("llama3", layers=1, batch=2)
    graph = capture_graph(target.model, target.args, target.kwargs, mode="train", loss=target.loss, loss_args=target.loss_args)
    on = machine_of("x=4")
    found = find_baselines(Space(graph, on, "adamw", resolve_pins(graph, on.mesh, {})))
    split = [dict(strategy.factors) for op, strategy in found["fsdp"].strategies.items() if "attention" in graph.op[op].target]
    assert split and all("s" in factors or "s mirrored" in factors for factors in split)


class Read(nn.Module):
    """Rows of a table, by index; the gradient puts them into zeros. And zeros made like a tensor, beside its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        read = self.table[rows]
        return torch.cat([read, read.new_zeros(*rows.shape, 2)], -1).square().mean()


def test_what_is_made_of_nothing_lies_as_its_reader_likes() -> None:
    """In DistributedDataParallel nothing but the gradient is sent, and the loss."""
    graph = capture_graph(Read(), (torch.randint(64, (16, 4)),), {})
    assert {op.target for op in graph.ops if not op.inputs} >= {"aten.zeros.default"}
    assert not [op for op in graph.ops if "new_" in op.target]
    machine = machine_of("dp=4")
    made = find_baselines(Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {})))
    schedule = make_schedule(graph, made["ddp"], machine)
    sent = [(call.kind, part.target_bytes) for call in schedule.calls for part in call.parts]
    assert sorted(sent) == [("all_reduce", 4), ("all_reduce", 64 * 8 * 4)]
    zeros = [op.name for op in graph.ops if op.target == "aten.zeros.default"]
    assert len(zeros) == 2 and {str(made["ddp"].strategies[name].outputs[0]) for name in zeros} == {"S0 R R", "R R +P0"}


def test_what_is_made_of_such_alone_is_whole() -> None:
    """A mask made of zeros: split as is quickest to make, it would have to be gathered."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + torch.zeros(16, 16).add(1.0).tril()).square().mean()

    graph = capture_graph(Masked(), (torch.randn(8, 16, 16),), {}, mode="inference")
    machine = machine_of("dp=4")
    made = find_baselines(Space(graph, machine, "none", resolve_pins(graph, machine.mesh, {})))
    (triangle,) = [op for op in graph.ops if op.target == "aten.tril.default"]
    assert made["ddp"].strategies[triangle.name].outputs[0].is_replicated
    assert not [call for call in make_schedule(graph, made["ddp"], machine).calls if call.kind != "all_reduce"]


class Told(nn.Module):
    """Scores with a causal mask for each row of the batch; ``heads``: and a bias for each head, which may be as many as there are rows."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight, self.heads = nn.Parameter(torch.randn(16, 16)), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[2])
        mask = (places[:, None] >= places)[None, None].expand(x.shape[0], 1, -1, -1) & torch.ones(x.shape[0], 1, 1, 1, dtype=torch.bool)
        scores = torch.where(mask, x @ self.weight, torch.zeros(()))
        if self.heads:
            scores = scores + torch.arange(self.heads).view(-1, 1, 1).mul(0.5).expand(-1, x.shape[2], x.shape[3]).neg()
        return scores.square().mean()


@pytest.mark.parametrize(("heads", "own"), [(0, True), (4, True), (8, False)], ids=["mask", "other bias", "bias like rows"])
def test_ranks_make_masks_for_their_own_rows(heads: int, own: bool) -> None:
    graph = capture_graph(Told(heads), (torch.randn(8, heads or 1, 16, 16),), {})
    machine = machine_of("dp=4")
    made = find_baselines(Space(graph, machine, "adamw", resolve_pins(graph, machine.mesh, {})))
    (joined,) = [op for op in graph.ops if "_and." in op.target and op.phase == "forward"]
    assert graph.tensors[joined.outputs[0]].shape[0] == 8
    assert str(made["ddp"].strategies[joined.name].outputs[0]) == ("S0 R R R" if own else "R R R R")
    sent = [call.kind for call in make_schedule(graph, made["ddp"], machine).calls]
    assert set(sent) == {"all_reduce"}, "nothing is gathered"
