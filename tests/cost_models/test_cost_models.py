"""The textbook costs, the machine's links, and the hardware files."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from autopar import cost_models
from autopar.cost_models import (
    Efficiency,
    Figures,
    Hardware,
    HardwareFileError,
    Machine,
    Mesh,
    MeshError,
    Operator,
    SubAxis,
    UnknownHardwareError,
    UnknownOptimizerError,
    collectives,
    hardware_names,
    load_hardware,
    memory,
)
from autopar.cost_models.collectives import KINDS, Group

H100 = load_hardware("h100-sxm")


def hardware_with(node: dict[str, object], network: dict[str, object] | None = None) -> Hardware:
    """H100s with these links, all on one node."""
    links = {"node": node, "network": network or {"latency_seconds": 1.0, "bandwidth": 1.0}}
    return Hardware.from_dict(H100.to_dict() | {"links": links, "devices_per_node": 1 << 20})


def test_formulas_of_the_literature() -> None:
    """a + b * f(n) * B, with a = 3 s and b = 1/2 s/byte, on 8 ranks and 1024 bytes."""
    group = Group(8, 3.0, 2.0)
    assert collectives.all_reduce(1024, group) == 3 + 2 * 7 / 8 * 1024 / 2
    assert collectives.all_gather(1024, group) == collectives.reduce_scatter(1024, group) == 3 + 7 / 8 * 1024 / 2
    assert collectives.all_to_all(1024, group) == 3 + 7 / 8 * (1024 / 8) / 2
    assert collectives.permute(1024, group) == 3 + 1024 / 8 / 2
    assert collectives.seconds("slice", 1024, group) == 0.0


# --- meshes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["dp=2,tp=4", {"dp": 2, "tp": 4}, Mesh((("dp", 2), ("tp", 4)))])
def test_meshes_are_read(written: object) -> None:
    read = Mesh.parse(written)  # type: ignore[arg-type]
    assert (read.names, read.sizes, read.ranks, str(read)) == (("dp", "tp"), (2, 4), 8, "dp=2,tp=4")
    assert [read.rank(read.coordinates(rank)) for rank in range(8)] == list(range(8))
    assert read.coordinates(1) == (0, 1)  # the last axis is the innermost


def test_short_meshes_are_named_x_y_z_w() -> None:
    assert Mesh.parse("2x3x4x5").axes == (("x", 2), ("y", 3), ("z", 4), ("w", 5))
    assert Mesh.parse("8").axes == (("x", 8),)


WRONG_MESHES = ("", "dp", "dp=", "dp=0", "dp=-1", "dp=2,dp=4", "2x", "1x2x3x4x5", "2=dp", {"a b": 2}, {"dp": 2.0}, {}, 8)


@pytest.mark.parametrize("wrong", WRONG_MESHES)
def test_wrong_meshes(wrong: object) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.parse(wrong)  # type: ignore[arg-type]
    assert caught.value.hint and caught.value.exit_status == 2


def test_sub_axes_have_names_and_coordinates() -> None:
    read = Mesh.parse("dp=2,tp=8")
    assert read.sub_axis_name(read.whole(1)) == "tp"
    assert read.sub_axis_name(SubAxis(1, 2, 4)) == "tp:(2)4"
    parts = (SubAxis(1, 4, 2), SubAxis(1, 1, 4))
    assert [read.index(rank, parts) for rank in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]


# --- machines ---------------------------------------------------------------------------------------------------


def test_axes_inside_a_node_use_the_node_link() -> None:
    machine = Machine(Mesh.parse("dp=4,tp=4"), H100)  # 16 ranks, 8 to a node
    assert machine.axes_group((1,)) == Group(4, H100.node.latency_seconds, H100.node.bandwidth)
    assert machine.axes_group((0,)) == Group(4, H100.network.latency_seconds, H100.network.bandwidth)
    assert machine.group((SubAxis(0, 2, 2),)) == Group(2, H100.node.latency_seconds, H100.node.bandwidth)  # neighbours on dp share a node
    assert machine.axes_group((0, 1)) == Group(16, H100.network.latency_seconds, H100.network.bandwidth)


def test_a_group_across_the_border_of_two_nodes_is_a_network_group() -> None:
    hardware = Hardware.from_dict(H100.to_dict() | {"devices_per_node": 3})
    assert Machine(Mesh.parse("2x2"), hardware).axes_group((1,)).bandwidth == hardware.network.bandwidth  # ranks 2 and 3


def test_axes_of_the_file_override_the_links() -> None:
    hardware = Hardware.from_dict(H100.to_dict() | {"axes": {"dp": {"latency_seconds": 1.0, "bandwidth": 2.0}}})
    machine = Machine(Mesh.parse("dp=2,tp=8"), hardware, "communication")
    assert machine.axes_group((0,)) == Group(2, 1.0, 2.0)
    assert machine.axes_group((1,)).bandwidth == H100.node.bandwidth
    assert machine.axes_group((0, 1)) == Group(16, 1.0, 2.0)
    assert machine.collective_seconds("all_gather", 64, (machine.mesh.whole(0),)) == 1 + 32 / 2


def test_equal_machines_are_one_key() -> None:
    one, two = (Machine(Mesh.parse("2x2"), load_hardware("h200")) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != Machine(Mesh.parse("2x2"), load_hardware("h200"), "communication")


def test_a_group_of_one_rank_is_free() -> None:
    machine = Machine(Mesh.parse("dp=1,tp=2"), H100)
    assert machine.collective_seconds("all_reduce", 1e9, (machine.mesh.whole(0),)) == 0.0


def test_roofline() -> None:
    machine = Machine(Mesh.parse("8"), H100)
    large = 1e15
    assert machine.compute_seconds(large, 0, "bfloat16") == large / (0.7 * 989e12)
    assert machine.compute_seconds(large, 0, "float32") == large / (0.7 * 67e12)
    assert machine.compute_seconds(large, 0, "tf32") == large / (0.7 * 494e12)
    assert machine.compute_seconds(0, large, "int64") == large / (0.7 * 3.35e12)
    assert machine.compute_seconds(1, 1, "float32") == H100.kernel_launch_seconds
    assert machine.compute_seconds(0, 0, "float32") == 0.0


def test_communication_model_has_free_compute() -> None:
    machine = Machine(Mesh.parse("8"), H100, "communication")
    assert machine.compute_seconds(1e15, 1e12, "float32") == machine.optimizer_seconds("adamw", 10**9, "float32") == 0.0


def test_a_matrix_is_made_orthogonal_by_the_ranks_that_split_it() -> None:
    """15 products of bfloat16, shared by the ranks; two all-to-alls, whose latency four matrices share."""
    machine = Machine(Mesh.parse("dp=4,tp=2"), load_hardware("h100-sxm"))
    long, short, elements = 8192, 4096, 8192 * 4096
    beside = machine.optimizer_seconds("muon", elements, "float32")  # no matrix of a layer: AdamW
    assert beside == machine.optimizer_seconds("adamw", elements, "float32")
    own = 14 * 4 * elements / (0.7 * 3.35e12)
    products = 5 * (4 * short * short * long + 2 * short**3) / (0.7 * 989e12)
    assert machine.optimizer_seconds("muon", elements, "float32", (long, short)) == pytest.approx(own + products)
    assert machine.optimizer_seconds("muon", elements, "float32", (short, long)) == pytest.approx(own + products)
    split = machine.optimizer_seconds("muon", elements // 4, "float32", (long, short), (0,))
    group = machine.axes_group((0,), "all_to_all")
    sent = group.latency / 4 + 3 / 4 * 2 * elements / 4 / group.bandwidth
    assert split == pytest.approx(own / 4 + products / 4 + 2 * sent)
    assert [memory.optimizer_bytes("muon", 10, "float32", is_matrix) for is_matrix in (True, False)] == [40, 80]


def test_optimizers() -> None:
    machine = Machine(Mesh.parse("8"), H100)
    assert [memory.optimizer_bytes(name, 10, "float32") for name in ("adamw", "sgd", "none")] == [80, 0, 0]
    assert machine.optimizer_seconds("adamw", 10**9, "bfloat16") == 7 * 2e9 / (0.7 * 3.35e12)
    assert machine.optimizer_seconds("none", 10**9, "bfloat16") == 0.0
    names = ("adamw", "adamw-mixed", "sgd-momentum", "lion:6,5")
    assert [memory.optimizer_bytes(name, 10, "bfloat16") for name in names] == [40, 120, 20, 60]
    assert [memory.optimizer_bytes(name, 10, "float32") for name in names] == [80, 80, 40, 60], "float32 needs no copy of itself"
    # reads bf16 gradient, float32 weight and moments; writes these three and the bf16 weight
    assert machine.optimizer_seconds("adamw-mixed", 10**9, "bfloat16") == (2 * 2 + 6 * 4) * 1e9 / (0.7 * 3.35e12)
    assert machine.optimizer_seconds("lion:6,5", 10**9, "bfloat16") == 5 * 2e9 / (0.7 * 3.35e12)
    with pytest.raises(UnknownOptimizerError, match=r"hint: .* NAME:BYTES,ACCESSES"):
        memory.find_optimizer("lion:6")


# --- links ------------------------------------------------------------------------------------------------------


def test_growth_of_the_latency() -> None:
    """Ring: n - 1 steps, an all-reduce twice as many; tree: log2 n; the first step has a price of its own."""
    machine = Machine(
        Mesh.parse("8"), hardware_with({"latency_seconds": 3.0, "bandwidth": 1.0, "step_seconds": 1.0, "latency_growth": "ring"})
    )
    axes = (machine.mesh.whole(0),)
    assert machine.latency_seconds("all_gather", axes) == 3 + 6
    assert machine.latency_seconds("all_reduce", axes) == 3 + 13
    assert machine.latency_seconds("permute", axes) == 3
    assert machine.latency_seconds("slice", axes) == 0
    tree = Machine(Mesh.parse("8"), hardware_with({"latency_seconds": 3.0, "bandwidth": 1.0, "latency_growth": "tree"}))
    assert tree.latency_seconds("all_to_all", axes) == 9 and tree.latency_seconds("all_reduce", axes) == 18


@pytest.mark.parametrize("growth", ["constant", "ring", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_prices_are_affine(kind: str, growth: str) -> None:
    node = {"latency_seconds": 3.0, "bandwidth": 2.0, "latency_growth": growth, kind: {"latency_seconds": 5.0, "bandwidth": 4.0}}
    machine = Machine(Mesh.parse("2x4"), hardware_with(node))
    for axes in ((machine.mesh.whole(0),), (machine.mesh.whole(0), machine.mesh.whole(1))):
        group = machine.group(axes, kind)
        assert group.bandwidth == 4.0 and machine.latency_seconds(kind, axes) >= 5.0
        expected = machine.latency_seconds(kind, axes) + machine.received_bytes(kind, 80.0, group.size) / 4.0
        assert machine.collective_seconds(kind, 80.0, axes) == pytest.approx(expected)


def test_what_a_kind_does_not_give_is_the_links() -> None:
    node = {"latency_seconds": 3.0, "bandwidth": 2.0, "latency_growth": "ring", "step_seconds": 1.0, "all_gather": {"bandwidth": 8.0}}
    link = hardware_with(node).node
    assert link.figures("all_gather") == Figures(3.0, 8.0, "ring", 1.0)
    assert link.figures("all_reduce") is link


def test_a_ring_crosses_the_network_once_a_node() -> None:
    node = {"latency_seconds": 1.0, "bandwidth": 2.0, "latency_growth": "ring"}
    hardware = hardware_with(node, {"latency_seconds": 10.0, "bandwidth": 1.0, "latency_growth": "ring"})
    machine = Machine(Mesh.parse("32"), Hardware.from_dict(hardware.to_dict() | {"devices_per_node": 8}))
    assert machine.latency_seconds("all_gather", (machine.mesh.whole(0),)) == 3 * 10 + 28 * 1
    assert machine.group((machine.mesh.whole(0),), "all_gather").bandwidth == 1.0


def test_streams_that_a_collective_occupies() -> None:
    machine = Machine(Mesh.parse("pp=1,dp=4,tp=4"), H100)  # 16 ranks, 8 to a node
    whole = machine.mesh.whole
    assert machine.links((whole(0),)) == machine.links(()) == ()
    assert machine.links((whole(2),)) == ("node",)
    assert machine.links((whole(1),)) == machine.links((whole(1), whole(2))) == ("network", "node")
    assert machine.links((SubAxis(1, 1, 2),)) == ("network",)
    named = Hardware.from_dict(H100.to_dict() | {"axes": {"dp": {"latency_seconds": 1.0, "bandwidth": 2.0}}})
    assert Machine(machine.mesh, named).links((whole(1), whole(2))) == ("dp", "node")


@pytest.mark.parametrize("mesh", ["2x24", "8x10", "3x40", "12x2", "5x4x6"])
def test_an_axis_holds_the_links_of_its_pieces_however_it_is_cut(mesh: str) -> None:
    """Nodes of 8 ranks begin within groups of these axes."""
    machine = Machine(Mesh.parse(mesh), load_hardware("h100-sxm"))
    for axis, size in enumerate(machine.mesh.sizes):
        for first in (number for number in range(1, size + 1) if size % number == 0):
            pieces = SubAxis(axis, 1, first), SubAxis(axis, first, size // first)
            assert machine.links(pieces) == machine.links((machine.mesh.whole(axis),)), pieces


def test_a_device_keeps_memory_that_no_plan_fills() -> None:
    """The file's, read back as written; none where the file says nothing; never all there is."""
    assert H100.usable_bytes == int(80e9 - 5.2e9) and Hardware.from_dict(H100.to_dict()) == H100
    silent = {key: value for key, value in H100.to_dict().items() if key != "reserved_bytes"}
    assert Hardware.from_dict(silent).usable_bytes == int(80e9) and "reserved_bytes" not in Hardware.from_dict(silent).to_dict()
    with pytest.raises(HardwareFileError, match=r"reserved_bytes: 8e\+10 of 8e\+10 bytes leave nothing"):
        Hardware.from_dict(silent | {"reserved_bytes": 80e9})


# --- operators --------------------------------------------------------------------------------------------------


def test_efficiency_by_class() -> None:
    hardware = Hardware.from_dict(H100.to_dict() | {"efficiency": {"contraction": {"arithmetic": 0.9, "launch_seconds": 1e-5}}})
    machine = Machine(Mesh.parse("8"), hardware)
    product = Operator("aten.mm.default", "contraction", "bfloat16", ((8, 8), (8, 8)), ((8, 8),), 1e15, 0.0)
    assert machine.operator_seconds(product) == 1e15 / (0.9 * 989e12)
    assert machine.operator_seconds(product._replace(flops=1.0)) == 1e-5
    assert machine.operator_seconds(product._replace(family="pointwise")) == 1e15 / (0.7 * 989e12)
    assert hardware.efficiency("contraction").memory == 0.7


def test_figures_of_an_operator_come_before_those_of_its_class() -> None:
    table = {"default": {"memory": 0.5}, "pointwise": {"memory": 0.6}, "aten.gelu": {"memory": 0.3}}
    hardware = Hardware.from_dict(H100.to_dict() | {"efficiency": table})
    assert hardware.efficiency("pointwise", "aten.gelu.default").memory == 0.3
    assert hardware.efficiency("pointwise", "aten.add.Tensor").memory == 0.6
    assert hardware.efficiency("softmax", "aten._softmax.default").memory == 0.5


def test_launches_that_do_not_overlap_are_added() -> None:
    """On a CPU every call takes its time, views too."""
    table = {"view": {"launch_seconds": 1e-5}, "pointwise": {"launch_seconds": 2e-5}, "optimizer": {"launch_seconds": 3e-5}}
    data = H100.to_dict() | {"efficiency": table}
    view = Operator("aten.view.default", "view", "float32", ((4,),), ((2, 2),), 0.0, 0)
    copy = Operator("aten.clone.default", "pointwise", "float32", ((4,),), ((4,),), 0.0, 1e9)
    hidden, added = (Machine(Mesh.parse("8"), Hardware.from_dict(data | {"launch_overlaps": hidden})) for hidden in (True, False))
    moving = 1e9 / (0.7 * 3.35e12)
    assert (hidden.operator_seconds(view), hidden.operator_seconds(copy)) == (0.0, moving)
    assert (added.operator_seconds(view), added.operator_seconds(copy)) == (1e-5, moving + 2e-5)
    stepped = added.optimizer_seconds("sgd", 10**9, "float32") - hidden.optimizer_seconds("sgd", 10**9, "float32")
    assert stepped == pytest.approx(3e-5) and added.optimizer_seconds("none", 10, "float32") == 0.0


# --- hardware files ---------------------------------------------------------------------------------------------


def test_built_in_names() -> None:
    assert {"v100", "a100-sxm-80g", "h100-sxm", "h200", "b200", "cpu-cluster"} <= set(hardware_names())


@pytest.mark.parametrize("name", hardware_names())
def test_built_in_files(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.node.bandwidth > hardware.network.bandwidth
    assert Hardware.from_dict(hardware.to_dict()) == hardware
    for line in (resources.files(cost_models) / "hardware" / f"{name}.toml").read_text().splitlines():
        figure = "=" in line and not line.startswith(("name", "devices_per_node", "peak_flops", "#"))
        assert not figure or "#" in line, f"without a source: {line}"


CUDNN = {  # (batch, heads, seq, head dim): milliseconds of forward, and of forward and backward; causal, bfloat16, on one H200
    (2, 32, 4096, 128): (0.49, 2.10),
    (1, 32, 16384, 128): (3.35, 14.6),
}


@pytest.mark.parametrize("shape", CUDNN)
def test_attention_of_an_h200_takes_what_was_measured(shape: tuple[int, int, int, int]) -> None:
    batch, heads, seq, dim = shape
    machine, flops = Machine(Mesh.parse("1"), load_hardware("h200")), 0.5 * 4 * batch * heads * seq**2 * dim
    forward, backward = (
        1e3 * machine.operator_seconds(Operator(f"autopar.{name}.default", "attention", "bfloat16", (), (), work, 0.0))
        for name, work in (("attention", flops), ("attention_backward", 2.5 * flops))
    )
    assert (forward, forward + backward) == (pytest.approx(CUDNN[shape][0], rel=0.1), pytest.approx(CUDNN[shape][1], rel=0.1))


@pytest.mark.parametrize("name", ["h100-sxm", "h200"])
def test_batch_norm_has_a_sixth_of_the_bandwidth_and_nothing_else_has_changed(name: str) -> None:
    """What was measured is priced so; products and the other operators keep the shares that plans rest on."""
    hardware = load_hardware(name)
    for operator in ("autopar.batch_norm.default", "autopar.batch_norm_backward.default"):
        assert hardware.efficiency("normalisation", operator) == Efficiency(0.7, 0.17, 4e-6)
    for family in ("contraction", "pointwise", "normalisation", "optimizer"):
        assert hardware.efficiency(family, "aten.any.default") == Efficiency(0.7, 0.7, 4e-6)
    assert H100.efficiency("attention", "autopar.attention.default") == Efficiency(0.7, 0.7, 4e-6)


def test_every_optional_field_survives_the_file() -> None:
    data = H100.to_dict() | {
        "overlap_slowdown": 0.1,
        "launch_overlaps": False,
        "residuals": {
            "links.node.all_reduce": {"points": 12, "median": 0.04, "largest": 0.2},
            "efficiency.pointwise": {"points": 12, "median": 0.04, "largest": 0.2, "percentile_90": 0.1},
        },
        "host": {"issue_seconds": {"eager": 4e-5, "cuda_graph": 0.0}},
        "efficiency": {"default": {"arithmetic": 0.6}, "contraction": {"memory": 0.5, "launch_seconds": 1e-6}},
        "axes": {"dp": {"latency_seconds": 1.0, "bandwidth": 2.0, "all_to_all": {"latency_growth": "tree"}}},
        "links": {
            "node": {
                "latency_seconds": 1.0,
                "bandwidth": 2.0,
                "latency_growth": "ring",
                "step_seconds": 0.5,
                "permute": {"bandwidth": 1.0},
            },
            "network": {"latency_seconds": 3.0, "bandwidth": 1.0},
        },
    }
    hardware = Hardware.from_dict(data)
    assert Hardware.from_dict(hardware.to_dict()) == hardware
    assert hardware.efficiency("view").arithmetic == hardware.efficiency("contraction").arithmetic == 0.6
    assert hardware.issue_seconds == (("eager", 4e-5), ("cuda_graph", 0.0)), "the host's"
    assert [item.percentile_90 for _, item in hardware.residuals] == [None, 0.1], "of an older file, and of a newer one"
    assert "overlap_slowdown" not in H100.to_dict() or H100.overlap_slowdown


def test_files_are_read_by_path(tmp_path: Path) -> None:
    text = (resources.files(cost_models) / "hardware" / "h100-sxm.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"h100-sxm"', '"mine"'))
    assert load_hardware(tmp_path / "mine.toml").name == load_hardware(str(tmp_path / "mine.toml")).name == "mine"
    assert load_hardware(H100) is H100


BROKEN = {
    "memory_bytes": lambda data: data.pop("memory_bytes"),
    "memory_bandwidth": lambda data: data.update(memory_bandwidth=0.0),
    "kernel_launch_seconds": lambda data: data.update(kernel_launch_seconds=-1e-6),
    "peak_flops.float32": lambda data: data["peak_flops"].pop("float32"),
    "peak_flops.bfloat16": lambda data: data["peak_flops"].update(bfloat16="fast"),
    "peak_flops.float17": lambda data: data["peak_flops"].update(float17=1e12),
    "devices_per_node": lambda data: data.update(devices_per_node=0),
    "links.network": lambda data: data["links"].pop("network"),
    "links.node.bandwidth": lambda data: data["links"]["node"].update(bandwidth=math.inf),
    "axes.dp.latency_seconds": lambda data: data.update(axes={"dp": {"bandwidth": 1.0}}),
    "residuals.links.points": lambda data: data.update(residuals={"links": {"points": 0, "median": 0.1, "largest": 0.1}}),
    "overlap_slowdown": lambda data: data.update(overlap_slowdown=1.5),
    "host.issue_seconds.eager": lambda data: data.update(host={"issue_seconds": {"eager": -1e-6}}),
    "host.issue_seconds.lazy": lambda data: data.update(host={"issue_seconds": {"lazy": 1e-6}}),
    "links.node.latency_growth": lambda data: data["links"]["node"].update(latency_growth="square"),
    "links.node.all_reduce.bandwidth": lambda data: data["links"]["node"].update(all_reduce={"bandwidth": 0.0}),
    "efficiency.contraction.memory": lambda data: data.update(efficiency={"contraction": {"memory": -1.0}}),
    "colour": lambda data: data.update(colour="green"),
    "name": lambda data: data.update(name=""),
}


@pytest.mark.parametrize("field", BROKEN)
def test_a_broken_file_names_the_field(field: str) -> None:
    data = tomllib.loads((resources.files(cost_models) / "hardware" / "h100-sxm.toml").read_text())
    BROKEN[field](data)
    with pytest.raises(HardwareFileError, match=rf"field {field}:") as caught:
        Hardware.from_dict(data)
    assert caught.value.exit_status == 3 and "\nhint: " in str(caught.value)


OWN = {
    "field memory_bandwidth:": {"memory_bandwidth": -1.0},
    "field memory_bytes:": {"memory_bytes": math.nan},
    "field peak_flops.float32:": {"peak_flops": (("bfloat16", 1e12),)},
    "field devices_per_node:": {"devices_per_node": 0},
    "is not made as its class says": {"node": None},
}


@pytest.mark.parametrize("said", OWN)
def test_a_hardware_of_ones_own_is_held_to_the_same(said: str) -> None:
    own = dataclasses.replace(load_hardware("h100-sxm"), **OWN[said])
    with pytest.raises(HardwareFileError, match=f"the Hardware 'h100-sxm'.*{said}|{said}.*\nhint: "):
        load_hardware(own)


@pytest.mark.parametrize("name", hardware_names())
def test_a_hardware_of_ones_own_stays_what_it_is(name: str) -> None:
    own = dataclasses.replace(load_hardware(name), overlap_slowdown=0.25)
    assert load_hardware(own) == own


def test_what_is_not_toml_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "noise.toml").write_text("name = = 1")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("noise.toml", "binary.toml"):
        with pytest.raises(HardwareFileError, match=name):
            load_hardware(tmp_path / name)
    for missing in ("h1000", str(tmp_path / "absent.toml")):
        with pytest.raises(UnknownHardwareError, match=Path(missing).name) as caught:
            load_hardware(missing)
        assert caught.value.exit_status == 2


def test_a_host_link_and_its_memory_are_read_back_and_shared_by_a_node() -> None:
    assert H100.host is not None and H100.offloadable_bytes == int(1e12 / 8) and Hardware.from_dict(H100.to_dict()) == H100
    machine = Machine(Mesh.parse("8"), H100)
    assert machine.transfer_seconds(55e9) == pytest.approx(1.0 + 10e-6)
    assert machine.call_streams("to_host", ()) == ("to_host",) and machine.call_streams("all_gather", ()) == ()
    assert machine.latency_seconds("from_host", ()) == 10e-6


@pytest.mark.parametrize(("table", "field"), [("links", "host"), ("host", "memory_bytes")])
def test_without_host_figures_nothing_is_offloaded(table: str, field: str) -> None:
    data = H100.to_dict()
    hardware = Hardware.from_dict(data | {table: {name: value for name, value in data[table].items() if name != field}})
    assert hardware.offloadable_bytes == 0 and field not in hardware.to_dict().get(table, {})


def test_host_figures_in_other_units_are_named() -> None:
    data = H100.to_dict()
    data["links"]["host"] = {"latency_seconds": 10.0, "bandwidth": 55.0}
    data["host"]["memory_bytes"] = 1000.0
    said = Hardware.from_dict(data).unlikely()
    assert said == (
        "links.host.latency_seconds = 10 seconds", "links.host.bandwidth = 55 bytes/s", "host.memory_bytes = 1000 bytes",
    )  # fmt: skip
