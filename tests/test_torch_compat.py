"""Each private torch name still does what it is used for; a release that changes one fails here, by name."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar import torch_compat
from autopar.errors import UsageError
from autopar.verify.launch import run_ranks

ROOT = Path(torch_compat.__file__).resolve().parents[2]
CHECKOUT = Path(__file__).resolve().parents[1]
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
Pair = namedtuple("Pair", "first second")


def test_fake_mode_makes_shapes_without_memory_and_takes_real_constants():
    with torch_compat.fake_mode():
        huge = torch.empty(2**40, 2**10)
        assert torch_compat.is_fake(huge) and not huge.is_meta
        assert (huge[:2, :3] + torch.ones(3)).shape == (2, 3)
    assert not torch_compat.is_fake(torch.ones(3))


@pytest.mark.parametrize("backward", [False, True])
def test_torch_says_which_kernel_its_attention_runs(backward: bool):
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 5)
    mask = torch.ones(1, 4, 6, 6, dtype=torch.bool)
    assert torch_compat.choose_attention(q, q, q, None, True, backward=backward) == "flash"
    assert torch_compat.choose_attention(q, q, q, mask, False, backward=backward) == "flash"
    assert torch_compat.choose_attention(q, q, k, None, True, backward=backward) == "math", "values of another size"
    assert not q.requires_grad


def test_adaptive_softmaxes_return_what_they_did():
    softmax = torch.nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 4], div_value=1.0)
    result = softmax(torch.randn(3, 4), torch.tensor([0, 3, 7]))
    assert type(torch_compat.adaptive_result(result.output, result.loss)) is type(result)


def test_bare_graphs_have_neither_stacks_nor_code_until_they_are_called():
    def traced() -> torch.fx.GraphModule:
        with torch_compat.recorded_origins():
            return torch_compat.trace_operators(lambda x: x.sin() + 1, [torch.zeros(3)], {})

    with torch_compat.bare_graphs():
        bare = traced()
    full = traced()
    assert [node.target for node in bare.graph.nodes] == [node.target for node in full.graph.nodes]
    assert "_code" in vars(full) and "_code" not in vars(bare)
    assert not any(node.stack_trace for node in bare.graph.nodes)
    assert torch.equal(bare(torch.ones(3)), torch.ones(3).sin() + 1)
    exported = torch.export.export(Sine(), (torch.zeros(3),), strict=False).graph
    assert any(node.stack_trace for node in exported.nodes)
    if hasattr(torch.fx.config, "do_not_emit_stack_traces"):  # torch 2.11 has no such setting
        with torch_compat.bare_graphs():
            assert not any(node.stack_trace for node in torch.export.export(Sine(), (torch.zeros(3),), strict=False).graph.nodes)


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Renaming(nn.Module):
    def __init__(self):
        super().__init__()
        self.called, self.told = [], []
        self._register_load_state_dict_pre_hook(lambda *_: self.called.append(1))
        self._register_load_state_dict_pre_hook(self.rename)
        self.register_load_state_dict_pre_hook(lambda module, *_: module.told.append(module))

    def rename(self, *_):
        self.called.append(2)


def test_hooks_of_states_are_called_for_the_copy():
    one, other = Renaming(), Renaming()
    assert all(isinstance(vars(one)[kind], dict) for kind in torch_compat.STATE_HOOKS)
    hooks = torch_compat.hooks_of_copy(
        one._load_state_dict_pre_hooks,
        lambda item: other if item is one else other.rename if item == one.rename else item,
    )
    for hook in hooks.values():
        hook({}, "")
    assert (one.called, other.called, one.told, other.told) == ([1], [2], [], [other])


def test_trees_have_paths_and_come_back():
    tree = {"a": [1, (2,)], "b": Pair(3, None)}
    leaves, structure = torch_compat.flatten_with_paths(tree)
    assert [path for path, _ in leaves] == [("a", "0"), ("a", "1", "0"), ("b", "first"), ("b", "second")]
    assert torch_compat.unflatten([leaf for _, leaf in leaves], structure) == tree
    assert torch_compat.leaves_of([1, (2, 3)]) == [1, 2, 3]
    assert torch_compat.map_tensors(lambda t: t.shape[0], [torch.ones(3), "x"]) == [3, "x"]


def test_operators_are_told_apart():
    assert torch_compat.is_operator(torch.ops.aten.add.Tensor) and not torch_compat.is_operator(torch.add)
    assert torch_compat.runs_a_graph(torch.ops.higher_order.cond) and not torch_compat.runs_a_graph(torch.ops.aten.add.Tensor)
    schema = torch_compat.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.is_mutable and schema.arguments[0].name == "self"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mark = torch_compat.recorded_origins

    def forward(self, x: torch.Tensor, w: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self.mark() as origin:
            with origin("square"):
                y = (x * x).sum()
            with origin("count"):
                count.add_(1)
            with origin("scale"):
                return (y * w).clone(), (x + 1).clone()


@pytest.fixture
def joint():
    x, w = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
    return torch_compat.trace_joint(Net(), (x, w, torch.zeros(())), {})


def test_joint_trace_describes_inputs_and_outputs(joint):
    inputs = [torch_compat.role(node.meta["desc"]) for node in joint.graph.find_nodes(op="placeholder")]
    assert inputs == [("input", 0), ("input", 1), ("input", 2), ("tangent", 0), ("tangent", 1)]
    outputs = [torch_compat.role(desc) for desc in joint.graph.output_node().meta["desc"]]
    assert set(outputs) >= {("mutation", 2), ("output", 0), ("output", 1), ("gradient", 0), ("gradient", 1)}
    assert torch_compat.role(object()) == ("other", -1)


def test_joint_trace_is_functional_and_marks_forward_and_backward(joint):
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    assert not any(node.target._schema.is_mutable for node in calls)
    marks = {(torch_compat.origin_of(node), torch_compat.traced_in_backward(node)) for node in calls}
    assert {("square", False), ("square", True), ("scale", False), ("scale", True), ("count", False)} <= marks


def test_inference_trace_has_no_tangents():
    with torch.no_grad():
        graph = torch_compat.trace_joint(Net(), (torch.ones(3), torch.ones(()), torch.zeros(())), {}).graph
    assert [torch_compat.role(n.meta["desc"])[0] for n in graph.find_nodes(op="placeholder")] == ["input"] * 3


def test_what_is_decomposed_has_no_effects_in_the_trace_alone():
    class Solved(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (torch.linalg.solve(x, x).clone(),)

    check, kinds = torch.ops.aten._linalg_check_errors.default, []
    for bodies in ({check: lambda *_, **__: None}, {}):
        graph = torch_compat.trace_joint(Solved(), (torch.eye(3).requires_grad_(),), bodies).graph
        kinds.append([torch_compat.role(node.meta["desc"])[0] for node in graph.find_nodes(op="placeholder")])
    token = [] if VERSION < (2, 13) else ["other"]  # of an operator with effects
    assert kinds == [["input", "tangent"], [*token, "input", "tangent"]]


def test_checkpoints_store_a_dtensor_in_the_parts_that_are_told(tmp_path):
    def rank_main(rank):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import DTensor

        mesh, whole, told = init_device_mesh("cpu", (1,)), torch.arange(12.0).view(4, 3), []

        def chunks(tensor):
            told.append(tensor)
            return [((0, 0), tensor.to_local()[:2]), ((2, 0), tensor.to_local()[2:])]

        torch_compat.checkpoint_in_chunks(chunks)
        dcp.save({"w": DTensor.from_local(whole, mesh, [Shard(0)])}, checkpoint_id=tmp_path)
        stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"].chunks
        found = {"w": DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)])}
        dcp.load(found, checkpoint_id=tmp_path)
        return [tuple(chunk.offsets) for chunk in stored], bool(told) and found["w"].to_local().equal(whole)

    assert run_ranks(rank_main, 1) == [([(0, 0), (2, 0)], True)]


def test_strided_shards_tell_their_split_factor():
    from torch.distributed.tensor import Replicate, Shard

    assert torch_compat.split_factor_of(torch_compat.strided_shard(1, 2)) == 2
    assert torch_compat.split_factor_of(Shard(0)) == 1
    assert torch_compat.split_factor_of(Replicate()) is None


def test_functional_collectives_are_registered():
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "wait_tensor")
    assert all(hasattr(torch_compat.functional_collectives(), name) for name in names)


def test_the_modules_of_collectives_have_what_is_rerouted():
    modules = torch_compat.collective_modules()
    assert {"all_reduce", "all_to_all_single", "wait_tensor"} <= set(dir(modules["functional"]))
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"} <= set(dir(modules["differentiable"]))
    assert {"all_reduce", "all_gather", "all_to_all_single", "get_world_size"} <= set(dir(modules["writing"]))


def test_local_map_calls_the_function_that_is_rerouted():
    from torch.distributed.tensor.experimental import local_map

    given = []
    before = local_map(torch.sin, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh="mesh")
    with torch_compat.rerouted({torch_compat.local_map_function(): lambda plain, *args: given.extend(args)}):
        before(1)
    assert given == [torch.sin, [Shard(0)], ([Shard(0)],), None, "mesh", False, 1]


def test_functions_are_rerouted_under_names_that_were_taken_before():
    from torch.distributed import get_world_size
    from torch.nn.functional import glu

    routes = {get_world_size: lambda plain, group=None: ("ours", group), glu: lambda plain, *args, **kwargs: plain(*args, **kwargs) + 1}
    x = torch.randn(2, 4)
    with torch_compat.rerouted(routes):
        assert get_world_size("tp") == ("ours", "tp") and torch.equal(glu(x, dim=1), torch.ops.aten.glu(x, 1) + 1)
        with torch_compat.rerouted({glu: lambda plain, *args: None}):
            assert glu(x) is not None, "within another one nothing changes"
    assert torch.equal(glu(x), torch.ops.aten.glu(x)) and get_world_size.__code__.co_name == "get_world_size"


def test_levels_of_ranks_are_taken_off_in_order():
    x = torch.arange(24.0).view(2, 3, 4)
    with torch_compat.rank_level(2) as outer, torch_compat.rank_level(3) as inner:
        own = torch_compat.with_level(torch_compat.with_level(x, outer), inner)
        assert own.shape == (4,) and torch_compat.beneath_levels(own).data_ptr() == x.data_ptr()
        made = (own + 1).unsqueeze(0).expand(5, 4)
        whole, levels = torch_compat.without_levels(made, (outer, inner))
        assert levels == (outer, inner) and whole.shape == (2, 3, 5, 4) and torch.equal(whole[:, :, 0], x + 1)
        alone, levels = torch_compat.without_levels(torch_compat.with_level(torch.ones(3, 4), inner), (outer, inner))
        assert levels == (inner,) and alone.shape == (3, 4)
        same = torch.ones(4)
        assert torch_compat.without_levels(same, (outer, inner))[0] is same
        drawn, _ = torch_compat.without_levels(torch.rand_like(own), (outer, inner))
        assert not torch.equal(drawn[0, 0], drawn[0, 1]), "ranks draw numbers of their own"


def test_functions_with_gradients_of_their_own_are_met_under_vmap():
    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    met = []
    with torch_compat.met_functions(met.append):
        torch.func.vmap(Twice.apply)(torch.ones(2))
        Twice.apply(torch.ones(2))
    torch.func.vmap(Twice.apply)(torch.ones(2))
    assert met.count(Twice) == 1, "what runs in its place is another class"


def test_process_groups_have_names():
    def rank_main(rank: int) -> bool:
        group = torch.distributed.group.WORLD
        return torch_compat.process_group_named(group.group_name) is group

    assert run_ranks(rank_main, 2) == [True, True]


@pytest.mark.parametrize("keep", [True, False])
def test_the_running_backward_says_whether_it_keeps_the_graph(keep):
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch_compat.keeps_autograd_graph())
            return grad

    Watch.apply(torch.ones(1, requires_grad=True)).backward(retain_graph=keep)
    assert seen == [keep]


@pytest.mark.parametrize(("inputs", "stored"), [(None, True), ("both", False), ("one", False), ("asked", False)])
def test_whether_a_backward_pass_stores_every_gradient_is_known(inputs: str | None, stored: bool) -> None:
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, nobodys, *leaves):
            return leaves[0].clone()

        @staticmethod
        def backward(ctx, grad):
            left = torch_compat.store_gradients(leaves, [grad, grad.clone()])
            seen.append([one is None for one in left])
            return None, *left

    leaves = [torch.ones(1, requires_grad=True) for _ in range(2)]
    result = torch_compat.apply_alone(Watch)(torch_compat.NOBODYS, *leaves)
    if inputs == "asked":
        torch.autograd.grad(result, leaves)
    else:
        result.backward(inputs=None if inputs is None else leaves[: 1 + (inputs == "both")])
    assert seen == [[stored, stored]]
    assert [leaf.grad is not None for leaf in leaves] == [inputs != "asked", inputs in (None, "both")]


def test_changes_in_place_are_counted_whatever_the_class():
    class Counted(torch.Tensor):
        pass

    tensors = [torch.ones(2), torch.ones(2).as_subclass(Counted), nn.Parameter(torch.ones(2))]
    before = torch_compat.versions_of(tensors)
    tensors[1].add_(1)
    assert [now - was for now, was in zip(torch_compat.versions_of(tensors), before, strict=True)] == [0, 1, 0]


def test_many_copies_are_one_call():
    whole = torch.zeros(2, 5)
    torch_compat.copy_each(list(whole.split((2, 3), 1)), [torch.ones(2, 2), torch.arange(6).view(3, 2).t()])
    assert whole.tolist() == [[1, 1, 0, 2, 4], [1, 1, 1, 3, 5]]


def test_a_group_tells_its_timeout():
    def rank_main(rank):
        world, other = torch.distributed.group.WORLD, torch.distributed.new_group([0], timeout=timedelta(seconds=3))
        return torch_compat.timeout_of(world).total_seconds(), torch_compat.timeout_of(other).total_seconds()

    assert run_ranks(rank_main, 1, timeout=7.0) == [(7.0, 3.0)]


def test_a_detached_dtensor_is_a_view_of_the_same_placement():
    """As the dispatcher does it; autograd stores gradients so."""

    def rank_main(rank):
        mesh, found = init_device_mesh("cpu", (2,)), []
        for taught in (False, True):
            if taught:
                torch_compat.detach_local_parts()
            split = nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
            other = split.detach()
            with torch.no_grad():
                other.add_(1)
            split.square().sum().full_tensor().backward()
            found.append((
                other.requires_grad, other.placements, tuple(other.shape), split.full_tensor().tolist(), split._version,
                split.grad.placements, split.grad.full_tensor().tolist(),
            ))  # fmt: skip
        handlers = torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers
        return found[0] == found[1], torch.ops.aten.detach.default in handlers

    assert run_ranks(rank_main, 2) == [(True, True)] * 2


def test_numbers_of_partial_dtensors_are_those_of_the_whole():
    def rank_main(rank):
        torch_compat.reduce_where_asked()
        whole = torch.arange(12.0).view(4, 3)
        split = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        norms = torch.norm(split, dim=0, keepdim=True)
        assert norms.placements[0].is_partial()
        return [
            split.sum().item() == whole.sum().item(), bool(split.sum() > 60), abs(float(split.norm()) - float(whole.norm())) < 1e-5,
            torch.allclose(norms.square_().full_tensor(), whole.square().sum(0, keepdim=True)),
        ]  # fmt: skip

    assert run_ranks(rank_main, 2) == [[True] * 4] * 2


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_steps_split_parameters(foreach):
    def rank_main(rank):
        torch_compat.reduce_where_asked()
        torch_compat.choose_rules()  # before 2.13 DTensor has no rule for the sums of several states at once
        mesh = init_device_mesh("cpu", (2,))
        whole = [torch.arange(12.0).view(4, 3).cos(), torch.arange(8.0).view(2, 4).sin(), torch.arange(4.0)]
        plain = [nn.Parameter(tensor.clone()) for tensor in whole]
        split = [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(place)])) for tensor, place in zip(whole, (0, 1, 0), strict=True)]
        for parameters in (plain, split):
            optimizer = torch.optim.Adafactor(parameters, lr=0.1, foreach=foreach)
            for turn in range(3):
                for tensor, like in zip(parameters, whole, strict=True):
                    slope = (like + turn).sin()
                    tensor.grad = slope if parameters is plain else distribute_tensor(slope, mesh, tensor.placements)
                optimizer.step()
        return [torch.allclose(tensor, other.full_tensor(), atol=1e-6) for tensor, other in zip(plain, split, strict=True)]

    assert run_ranks(rank_main, 2) == [[True] * 3] * 2


def test_a_dtensor_takes_the_data_that_it_is_given():
    def rank_main(rank):
        torch_compat.assign_data()
        mesh = init_device_mesh("cpu", (2,))
        split, other = (nn.Parameter(distribute_tensor(torch.arange(4.0) + add, mesh, [Shard(0)])) for add in (0, 4))
        known = torch_compat.spec_of(split)
        split.data = other.data
        found = [split.full_tensor().tolist(), torch_compat.spec_of(split) == known]
        split.data = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        with pytest.raises(UsageError, match="a plain tensor"):
            split.data = torch.zeros(4)
        return [*found, split.full_tensor().tolist(), split.placements == other.placements, torch_compat.spec_of(torch.ones(1))]

    assert run_ranks(rank_main, 2) == [[[4.0, 5.0, 6.0, 7.0], True, [1.0] * 4, True, None]] * 2


def test_anomalies_are_looked_for_in_whole_gradients():
    def rank_main(rank):
        torch_compat.choose_rules()
        split = nn.Parameter(distribute_tensor(torch.tensor([1.0, 0.0]), init_device_mesh("cpu", (2,)), [Shard(0)]))
        with torch.autograd.set_detect_anomaly(True):
            (split + 1).sum().backward()
            with pytest.raises(RuntimeError, match="returned nan"):
                (split * 0).sqrt().mul(0).sum().backward()
        return split.grad.full_tensor().tolist()

    assert run_ranks(rank_main, 2) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_numbers_beside_sums_over_ranks_are_added_once(dtype):
    """Whatever was added before: torch added 5 on each rank after a tensor without dims, and failed at the tensor after the number."""

    def run(rank):
        torch_compat.teach_dtensors()
        mesh = init_device_mesh("cpu", (2,))
        split = distribute_tensor(torch.ones(6, 4, dtype=dtype), mesh, [Shard(0)])
        kept = distribute_tensor(torch.ones(6, dtype=dtype), mesh, [Replicate()])
        made = [split.sum() + 0, split.sum() + kept.sum(), split.sum() + 5, split.sum() - kept.sum(), split.sum() - 5.0]
        return [one.full_tensor().item() for one in (*made, sum(one.sum() for one in (split, kept, split)))]

    assert run_ranks(run, 2) == [[24, 30, 29, 18, 19, 54]] * 2


def test_products_over_ranks_are_stacked_with_what_is_whole():
    """A number that is not finite lies on the second rank alone."""

    def run(rank):
        torch_compat.choose_rules()
        mesh, whole = init_device_mesh("cpu", (2,)), torch.tensor([1.0, 2.0, float("nan"), 4.0])
        split, kept = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(torch.ones(2), mesh, [Replicate()])
        finite = torch.stack([split.isfinite().all(), kept.isfinite().all()])
        product = torch.stack([kept.prod(), split[:2].prod()])
        return finite.full_tensor().tolist(), finite.all().item(), product.full_tensor().tolist()

    assert run_ranks(run, 2) == [([False, True], False, [1.0, 2.0])] * 2


def test_what_dtensor_has_no_rule_for_is_done_in_whole():
    def rank_main(rank):
        torch_compat.choose_rules()
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(12.0).view(4, 3).cos()
        split, count = distribute_tensor(whole.clone(), mesh, [Shard(0)]), distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        values, places = split.kthvalue(2, dim=0)
        norms = torch.norm(split, dim=0, keepdim=True)
        assert norms.placements[0].is_partial()
        written = norms.clamp_min_(1.5)
        count.scatter_(0, distribute_tensor(torch.tensor([3, 1]), mesh, [Replicate()]), 7.0)
        torch.renorm(split, 2, 0, 1.0, out=split)
        torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers.pop(torch.ops.aten.unfold.default, None)
        with pytest.raises(RuntimeError):
            split.view(2, 6).unfold(1, 2, 1)  # a view: what is written to it has to come back
        return [
            torch.equal(values.full_tensor(), whole.kthvalue(2, dim=0).values), places.full_tensor().tolist(), written is norms,
            torch.allclose(norms.full_tensor(), whole.norm(dim=0, keepdim=True).clamp_min(1.5)), count.full_tensor().tolist(),
            torch.allclose(split.full_tensor(), whole.renorm(2, 0, 1.0)), split.placements == (Shard(0),),
        ]  # fmt: skip

    places = torch.arange(12.0).view(4, 3).cos().kthvalue(2, dim=0).indices.tolist()
    assert run_ranks(rank_main, 2) == [[True, places, True, True, [0.0, 7.0, 0.0, 7.0], True, True]] * 2


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()])
def test_masks_write_to_each_ranks_part(place):
    def rank_main(rank):
        torch_compat.write_where_masked()
        whole = torch.arange(12.0).view(4, 3).cos()
        split = distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [place])
        split[split.lt(0)] = 5.0
        split[split.redistribute(placements=[Replicate()]).gt(0.9)] = 6.0
        wanted = torch.where(whole < 0, 5.0, whole)
        return torch.equal(split.full_tensor(), torch.where(wanted > 0.9, 6.0, wanted)) and split.placements == (place,)

    assert run_ranks(rank_main, 2) == [True] * 2


def test_parameters_are_no_sums_still_to_be_made():
    def rank_main(rank):
        torch_compat.reduce_parameters()
        module, split = nn.Module(), distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        module.norm, module.split = nn.Parameter(split.norm(), requires_grad=False), nn.Parameter(split)
        places = [parameter.placements for parameter in module.parameters()]
        return places == [(Replicate(),), (Shard(0),)], module.norm.item(), module.norm.requires_grad

    assert run_ranks(rank_main, 2) == [(True, torch.arange(8.0).norm().item(), False)] * 2


def test_transforms_are_noticed():
    seen = [torch_compat.transforms_run()]
    torch.func.vmap(lambda x: (seen.append(torch_compat.transforms_run()), x)[1])(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        seen.append(torch_compat.transforms_run())
    assert [*seen, torch_compat.transforms_run()] == [False, True, True, False]


def test_a_collective_is_told_before_it_runs_and_runs_afterwards():
    def rank_main(rank):
        told: list[str] = []
        with torch_compat.refused_collectives(told.append):
            torch.distributed.barrier()
            torch.distributed.broadcast(torch.ones(2), 0)
        torch.distributed.barrier()
        return told

    assert run_ranks(rank_main, 1) == [["barrier", "broadcast"]]


def test_who_asks_for_its_rank_is_told_unless_it_is_torch():
    def rank_main(rank):
        told: list[bool] = []
        mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
        with torch_compat.refused_ranks(lambda: told.append(True)):
            torch._logging._internal.torch.distributed.get_rank()  # asked from here, by whichever name
            mesh.get_local_rank("x")
            asked = len(told)
            torch._logging.trace_structured("nothing", payload_fn=lambda: "of this rank")
            torch.distributed.get_world_size()
        torch.distributed.get_rank()
        return asked, len(told)

    assert run_ranks(rank_main, 1) == [(2, 2)]


def test_modules_that_are_already_what_is_asked_for_are_kept():
    owned, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = owned.weight.data_ptr()

    def refuse(module):
        raise KeyError

    with torch_compat.kept_modules({owned}, refuse):
        assert owned.to("cpu").float() is owned and other.float() is other
        for device_or_dtype in ("meta", torch.float64):
            with pytest.raises(KeyError):
                owned.to(device_or_dtype)
        other.double()
    assert owned.weight.data_ptr() == before and owned.weight.dtype == torch.float32 and other.weight.dtype == torch.float64
    assert owned.double().weight.dtype == torch.float64


def test_an_untested_torch_is_said_once(monkeypatch):
    torch_compat.check_tested()
    torch_compat.check_tested.cache_clear()
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    with pytest.warns(torch_compat.UntestedTorchWarning, match=r"tested with torch .*2\.13.*, this is torch 2\.99\.1\+cpu"):
        torch_compat.check_tested()
    torch_compat.check_tested()


def test_the_pin_is_one_of_the_versions_that_were_tested_and_the_page_names_all():
    ((pin, below),) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', (CHECKOUT / "pyproject.toml").read_text())
    readme = (CHECKOUT / "README.md").read_text()
    assert pin in torch_compat.TESTED and below == f"2.{int(pin.removeprefix('2.')) + 1}"
    assert [version for version in torch_compat.TESTED if version not in readme] == []


def test_a_tensor_class_of_ones_own_is_asked_for_everything():
    asked = []

    class Own(torch.Tensor):
        __torch_function__ = torch_compat.NO_TORCH_FUNCTION

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return torch.zeros(2)

    made = torch_compat.wrapper_of(Own, torch.empty(2, dtype=torch.float16))
    assert type(made) is Own and made.shape == (2,) and made.dtype == torch.float16 and not asked
    assert type(made + 1) is torch.Tensor and asked == [torch.ops.aten.add.Tensor]


def test_no_other_file_touches_private_torch_names():
    private = re.compile(
        r"(?:from|import) torch(?:\.\w+)*\._\w+|from torch[\w.]* import .*\b_\w+"
        r"|\btorch\._(?!_)\w+|\btorch\.(?!ops\b)\w+\._[a-z]\w+"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "autopar").rglob("*.py"))
        if path.parent.name != "torch_compat"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line) and not line.strip().startswith(("#", '"'))
    ]
    assert not found, "\n".join(found)


def test_an_assertion_of_a_device_fails_with_its_words():
    torch_compat.assert_later(torch.tensor(True), "never said")
    with pytest.raises(RuntimeError, match="a row that is not there"):
        torch_compat.assert_later(torch.tensor(False), "a row that is not there")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch's own jvp uses
def test_transforms_are_met_and_come_to_plain_operators() -> None:
    met: list[str] = []
    x, scale = torch.randn(3, 2), torch.randn(2)

    def run(transform: Any, *args: Any, **kwargs: Any) -> Any:
        met.append(transform.__name__)
        return transform(*args, **kwargs)

    with torch_compat.replaced_transforms(run):
        for made in (torch.func.vmap, torch.func.grad, torch.func.grad_and_value, torch.func.jacrev, torch.func.hessian):
            made(lambda row: (row * row).sum())(x)
        torch.func.jvp(torch.sin, (x,), (x,))
        torch.func.vjp(torch.sin, x)
    assert set(met) == {"vmap_impl", "grad_impl", "grad_and_value_impl", "_jvp_with_argnums", "_vjp_with_argnums"}
    with torch_compat.replaced_transforms(run), torch_compat.fake_mode() as mode:
        rows = torch.func.vmap(torch.func.grad(lambda row: (row * mode.from_tensor(scale)).sin().sum()))
        operators = torch_compat.traced_apart(rows, [mode.from_tensor(x)])
    assert not [node for node in operators.module.graph.nodes if "functorch" in str(node.target)]
    held = torch_compat.traced_apart(lambda x: (x * scale).sin(), [x])
    scale.add_(1)
    torch.testing.assert_close(held.run(x), (x * scale).sin())


def test_whether_a_profiler_records_is_known() -> None:
    assert not torch_compat.profiler_records()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert torch_compat.profiler_records()


def test_plain_tensors_beside_dtensors_are_told_by_their_words(one_rank: None) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    weight = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Replicate()])
    mixed = [lambda: torch.ones(2, 2) @ weight, lambda: nn.functional.embedding(torch.arange(2), weight)]
    for call in (*mixed, lambda: torch.ones(2) @ torch.ones(3)):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert torch_compat.mixes_dtensors(caught.value) == (call in mixed)


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda w: w[0].zero_(),
    "the last": lambda w: w[-1].fill_(2.0),
    "assigned": lambda w: w.__setitem__(1, 0.0),
    "of data": lambda w: w.data.__setitem__(4, 3.0),
    "rows": lambda w: w.__setitem__(slice(2, 5), 1.0),
    "a column": lambda w: w.__setitem__((slice(None), 0), 3.0),
    "a number": lambda w: w.__setitem__((5, 3), float("inf")),
    "a view of a view": lambda w: w[1:5].t()[2].mul_(2.0),
    "narrowed": lambda w: w.narrow(0, 1, 3).add_(w[5]),
    "one of several": lambda w: w.split(2)[1].clamp_(0.2, 0.4),
    "a diagonal": lambda w: w.diagonal().zero_(),
    "flat": lambda w: w.view(-1)[3:13].neg_(),
    "in other dims": lambda w: w.reshape(2, 3, 4)[0].zero_(),
    "each second": lambda w: w[::2].copy_(w[1::2]),
    "twice": lambda w: w[3].mul_(2.0).add_(1.0),
    "several at once": lambda w: torch._foreach_add_([w[0], w[4:6]], [w[1], w[2:4]]),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_written_into_views_is_written(ranks: int) -> None:
    """Also where the dim is split that a view is taken along: there torch writes into a copy, or has no view of unequal parts (6 on 4)."""

    def run(rank: int) -> list[str]:
        torch_compat.teach_dtensors()
        mesh, whole, lost = init_device_mesh("cpu", (ranks,)), torch.rand(6, 4, generator=torch.Generator().manual_seed(0)), []
        for name, write in WRITES.items():
            for placement in (Shard(0), Shard(1), Replicate()):
                plain, dtensor = whole.clone(), distribute_tensor(whole.clone(), mesh, [placement])
                write(plain)
                write(dtensor)
                lost += [] if torch.equal(dtensor.full_tensor(), plain) else [f"{name} {placement}"]
        dtensor = distribute_tensor(whole, mesh, [Shard(0)])
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")  # torch 2.11 asks before we refuse
        try:
            dtensor[0].normal_()
        except UsageError as error:
            lost += [] if "each rank would draw its own" in str(error) else [str(error)]
        else:
            lost.append("drawn")
        return lost

    assert run_ranks(run, ranks) == [[]] * ranks


LOOKS: dict[str, Callable[[Any], Any]] = {
    "the largest": lambda w: w.max(),
    "the least": lambda w: w.abs().amin(),
    "of each column": lambda w: w.max(0).values,
    "where": lambda w: w.argmax(),
    "both": lambda w: w.aminmax().max,
    "a norm": lambda w: torch.linalg.vector_norm(w, float("inf")),
    "a total norm": lambda w: nn.utils.get_total_norm([w], float("inf")),
    "of some": lambda w: w.flatten()[3:].topk(2).values,
    "of rows": lambda w: torch.stack([row.max() for row in w.unbind()]),
}


def test_the_largest_is_found_where_a_rank_has_nothing() -> None:
    """6 rows on 4 ranks are 2, 2, 2 and none: torch raised on the last rank, and the others waited for it."""

    def run(rank: int) -> list[str]:
        torch_compat.teach_dtensors()
        whole, mesh = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), init_device_mesh("cpu", (4,))
        split = distribute_tensor(whole, mesh, [Shard(0)])
        return [name for name, look in LOOKS.items() if not torch.equal(torch_compat.whole_of(look(split)), look(whole))]

    assert run_ranks(run, 4, timeout=60) == [[]] * 4


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_step_complex_weights_in_unequal_parts(foreach: bool) -> None:
    """They write into pairs of real numbers: with 5 over 2 ranks torch gathered those, and weights and moments stood still."""

    def run(rank: int) -> list[bool]:
        torch_compat.teach_dtensors()
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.randn(3, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        plain, *split = nn.Parameter(whole.clone()), *(nn.Parameter(distribute_tensor(whole.clone(), mesh, [Shard(dim)])) for dim in (0, 1))
        optimizers = [torch.optim.AdamW([one], lr=0.1, foreach=foreach) for one in (plain, *split)]
        for one, optimizer in zip((plain, *split), optimizers, strict=True):
            for _ in range(3):
                one.grad = one.detach() ** 2
                optimizer.step()
        moments = optimizers[0].state[plain]["exp_avg"]
        return [
            torch.allclose(one.full_tensor(), plain) and torch.allclose(optimizer.state[one]["exp_avg"].full_tensor(), moments)
            for one, optimizer in zip(split, optimizers[1:], strict=True)
        ]

    assert run_ranks(run, 2) == [[True, True]] * 2


def test_views_of_dtensors_are_dtensors() -> None:
    """They are computed with, differentiated, saved and copied."""

    def compute(w: Any) -> Any:
        return (w[:4] ** 2).sum() + w[2].sum() + w.view(-1)[5:9].exp().sum() + (w[1:3] @ w.t()).sum() + torch.stack([w[0], w[5]]).sum()

    def run(rank: int) -> list[bool]:
        torch_compat.teach_dtensors()
        whole = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
        plain = whole.clone().requires_grad_()
        weight = nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)]))
        values = [compute(one) for one in (plain, weight)]
        for value in values:
            value.backward()
        row, file = weight.detach()[0], io.BytesIO()
        torch.save(row, file)
        file.seek(0)
        copies = [copy.deepcopy(row), torch.load(file, weights_only=False), row.clone()]
        for one in copies:
            one.zero_()
        close = torch.allclose(values[0], values[1].full_tensor()) and torch.allclose(plain.grad, weight.grad.full_tensor())  # type: ignore[arg-type]
        return [close, torch.equal(weight.full_tensor(), whole), all(type(one) is DTensor for one in copies)]

    assert run_ranks(run, 2) == [[True] * 3] * 2


def test_an_optimizer_loads_the_states_of_one_device() -> None:
    def trained(weight: Any, state: Any = None) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        (weight**2).sum().backward()
        optimizer.step()
        return weight.detach(), optimizer.state_dict()

    def run(rank: int) -> bool:
        torch_compat.teach_dtensors()
        whole = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
        first, state = trained(whole.clone().requires_grad_())
        wanted, _ = trained(first.clone().requires_grad_(), copy.deepcopy(state))
        split = distribute_tensor(first.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
        found, after = trained(nn.Parameter(split), state)
        return torch.allclose(found.full_tensor(), wanted) and after["state"][0]["exp_avg"].placements == (Shard(0),)

    assert run_ranks(run, 2) == [True, True]


def test_numbers_are_formatted(one_rank: None) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch_compat.teach_dtensors()
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
    (3 * weight).sum().backward()
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert f"{norm:.2f} {norm.norm():5.1f}" == "6.00   6.0" and f"{norm}" == str(norm)
    assert norm.tolist() == 6.0 and weight.detach().tolist() == [[1.0, 1.0]] * 2
    with pytest.raises(TypeError):
        f"{weight:.2f}"


def test_shared_memory_is_seen_while_tracing():
    found = []

    class Model(torch.nn.Module):
        def forward(self, x):
            whole = x * 2
            others = (whole.view(-1), whole.detach()[1:], whole.t().reshape(-1), x)
            found.extend(torch_compat.shares_memory(whole, other) for other in others)
            return (whole.sum(),)

    torch_compat.trace_joint(Model(), (torch.randn(3, 4, requires_grad=True),), {})
    assert found[:4] == [True, True, False, False]


def test_a_tensor_is_found_in_the_graph_while_it_is_traced():
    found = []

    class Model(torch.nn.Module):
        def forward(self, x):
            found.append(torch_compat.traced_as(x.exp()))
            return x + 1

    torch.export.export(Model(), (torch.ones(2),), strict=False)
    assert [str(node.target) for node in found] == ["aten.exp.default"]
    assert torch_compat.traced_as(torch.ones(2)) is None


def test_clipping_asks_for_the_total_norm() -> None:
    """Also of gradients that are counted with those of other stages of a pipeline."""
    module, other, seen = nn.Linear(2, 2), nn.Linear(2, 2), []
    for parameter in (*module.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)

    def join(tensors: Any, norm_of: Any, norm_type: float) -> Any:
        if not any(tensor is module.weight.grad for tensor in tensors):
            return None
        seen.append((norm_of(tensors).item(), norm_type))
        return torch.tensor(12.0)

    torch_compat.join_total_norms(module, lambda: join)
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 6.0).item() == 12.0
    assert torch.nn.utils.get_total_norm([module.weight.grad]).item() == 12.0
    assert seen[0] == (pytest.approx(6**0.5), 2.0)
    assert module.weight.grad[0, 0].item() == pytest.approx(0.5)
    assert torch.nn.utils.clip_grad_norm_(other.parameters(), 6.0).item() == pytest.approx(6**0.5)
