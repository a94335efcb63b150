"""What people call on tensors that a plan hands out, against the same on whole tensors: values and gradients.

A call is right, or it is refused on all ranks alike. A refusal that is not listed fails the test too.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.cost_models import Mesh
from autopar.runtime.ranks.placement import local_part, to_dtensor
from autopar.runtime.weights.checkpoints import part_of
from autopar.sharding import ShardingSpec
from autopar.torch_compat import dtensor_rules, lay_by_parts, leaves_of, teach_dtensors
from tests.dtensors.functions import ARGUMENTS, FUNCTIONS
from tests.runtime.test_training import on_ranks

ROOT = Path(__file__).resolve().parents[2]

EQUAL, UNEQUAL, EMPTY = (12, 12), (7, 10), (5, 10)
"""Rows and columns of the first argument."""
LAYOUTS = {
    4: [
        ("S0 R", EQUAL), ("R S1", EQUAL), ("S01 R", EQUAL), ("S10 R", EQUAL), ("S0 S1", EQUAL), ("S1/3 R", EQUAL), ("R S1/3", EQUAL),
        ("R R +P0", EQUAL), ("S1 R +P0", EQUAL), ("S01 R", UNEQUAL), ("R S01", UNEQUAL), ("S0 S1", UNEQUAL), ("S01 R", EMPTY),
    ],
    2: [
        ("S0 R", EQUAL), ("R S0", EQUAL), ("S0/3 R", EQUAL), ("R S0/3", EQUAL), ("R R +P0", EQUAL), ("S0 R", UNEQUAL), ("R S0", (6, 9)),
        ("S0 R", (1, 6)),
    ],
}  # fmt: skip
"""By the number of ranks: how the first argument lies; 2x2 or 2."""
REFUSED = {"combinations", "vander", "x[rows, ids]"}
"""Functions that some layout refuses, on all ranks alike: they make plain tensors, which torch does not mix with DTensors."""
DAILY = sorted(FUNCTIONS)[::12]
"""Tried in every run of the tests."""
EVERY = 1 if os.environ.get("AUTOPAR_SWEEP") == "all" else 8
"""Of so many functions one is tried on 4 ranks, unless all are asked for: they take ten minutes."""


class Case(NamedTuple):
    name: str
    spec: str
    shape: tuple[int, int]
    alike: bool

    def __str__(self) -> str:
        return f"{self.name} of {list(self.shape)} as {self.spec}, others {'alike' if self.alike else 'whole'}"


def cases(ranks: int, names: list[str]) -> Iterator[Case]:
    for (spec, shape), name in itertools.product(LAYOUTS[ranks], names):
        parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
        shapes = [ARGUMENTS[one](*shape).shape for one in parameters]
        for alike in (False, True) if shapes[0] in shapes[1:] else (False,):
            yield Case(name, spec, shape, alike)


def spec_of(case: Case, tensor: Tensor) -> ShardingSpec:
    """The case's layout for a tensor of any number of dims."""
    spec, rank = ShardingSpec.parse(case.spec), tensor.dim()
    dims = (*spec.dims, *[()] * rank)[:rank]
    partial = spec.partial if tensor.is_floating_point() else ()
    blocks = tuple((dim, count) for dim, count in spec.blocks if dim < rank and tensor.shape[dim] % count == 0)
    return ShardingSpec(dims, partial, blocks)


def differences(case: Case, device_mesh: Any, mesh: Mesh) -> str:
    """What is wrong, or nothing. Raises: what torch, or autopar, refuses."""

    def placed(tensor: Tensor, spec: ShardingSpec) -> DTensor:
        return to_dtensor(local_part(tensor, spec, mesh, dist.get_rank()).clone(), spec, tensor.shape, device_mesh)

    function = FUNCTIONS[case.name]
    torch.manual_seed(0)
    given = [ARGUMENTS[name](*case.shape) for name in inspect.signature(function).parameters]
    wholes = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in given]
    try:
        wanted = _tensors(function(*wholes))
    except (RuntimeError, IndexError, ValueError):
        return ""  # such a shape is not for it
    splits = [tensor is given[0] or (case.alike and tensor.shape == given[0].shape) for tensor in given]
    pairs = zip(splits, given, strict=True)
    specs = [spec_of(case, tensor) if is_split else ShardingSpec.replicated(tensor.dim()) for is_split, tensor in pairs]
    parts = [placed(tensor, spec).requires_grad_(tensor.is_floating_point()) for tensor, spec in zip(given, specs, strict=True)]
    found = _tensors(function(*parts))
    if len(found) != len(wanted):
        return f"{len(found)} results, {len(wanted)} of whole tensors"
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape or not _is_close(one.detach(), other.detach()):
            return f"value of {getattr(one, 'placements', 'a plain tensor')}"
    differentiable = [
        index for index, tensor in enumerate(wanted)
        if tensor.requires_grad and "NotImplemented" not in str(tensor.grad_fn)  # torch 2.11 has no derivative of aminmax
    ]  # fmt: skip
    if not differentiable:
        return ""
    if not all(found[index].requires_grad for index in differentiable):
        return "no gradient"
    seeds = [torch.randn(wanted[index].shape, dtype=torch.float64).to(wanted[index].dtype) for index in differentiable]
    laid = [placed(seed, ShardingSpec.replicated(seed.dim())) for seed in seeds]
    trained = [index for index, tensor in enumerate(wholes) if tensor.requires_grad]
    gradients = [
        torch.autograd.grad([of[index] for index in differentiable], [by[index] for index in trained], seed, allow_unused=True)
        for of, by, seed in ((wanted, wholes, seeds), (found, parts, laid))
    ]
    for index, one, other in zip(trained, *gradients, strict=True):
        one, other = (torch.zeros_like(wholes[index]) if gradient is None else gradient for gradient in (one, other))
        if not _is_close(other, one):
            return f"gradient of argument {index}, {getattr(other, 'placements', 'a plain tensor')}"
    return ""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return found.shape == wanted.shape and torch.allclose(found.double(), wanted.double(), rtol=1e-6, atol=1e-8, equal_nan=True)


def sweep(ranks: int, names: list[str], *, flattens: bool) -> tuple[int, dict[str, str], dict[str, str]]:
    """How many cases there are, those that are wrong, and those that are refused."""

    def run(rank: int) -> dict[str, str]:
        teach_dtensors()
        lay_by_parts(part_of)
        sizes = (2, 2) if ranks == 4 else (2,)
        device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
        if flattens:
            device_mesh["dp", "tp"]._flatten("dp_tp")
        mesh, results = Mesh.parse("dp=2,tp=2" if ranks == 4 else "dp=2"), {}
        for case in cases(ranks, names):
            try:
                wrong = differences(case, device_mesh, mesh)
                results[str(case)] = f"wrong {wrong}" if wrong else ""
            except Exception as error:
                results[str(case)] = f"refused {case.name}: {type(error).__name__}: {error}".partition("\n")[0]
            dist.barrier()  # one that a single rank refuses is found here
        return results

    everyone = on_ranks(run, ranks)
    wrong, refused = dict[str, str](), dict[str, str]()
    for case in everyone[0]:
        words = [results[case] for results in everyone]
        if all(one.startswith("refused") for one in words):
            refused[case] = words[0]
        elif any(words):
            wrong[case] = next(filter(None, words))
    return len(everyone[0]), wrong, refused


def check(ranks: int, names: list[str], *, flattens: bool = False) -> None:
    count, wrong, refused = sweep(ranks, names, flattens=flattens)
    print(f"{count} cases on {ranks} ranks: {len(wrong)} wrong, {len(refused)} refused")
    assert not wrong
    assert {case: words for case, words in refused.items() if case.partition(" of [")[0] not in REFUSED} == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_functions_of_split_tensors_are_those_of_whole_ones(ranks: int) -> None:
    check(ranks, DAILY)


@pytest.mark.slow
def test_all_functions_of_split_tensors_are_those_of_whole_ones() -> None:
    """Beside the daily ones, which the test above tries on as many ranks."""
    check(2, [name for name in sorted(FUNCTIONS) if name not in DAILY])


@pytest.mark.slow
@pytest.mark.parametrize("flattens", [False, True])
def test_functions_of_tensors_split_over_two_axes_are_those_of_whole_ones(flattens: bool) -> None:
    """On a mesh with a flattened submesh other functions than on one without, and there beside the daily ones too."""
    names = sorted(FUNCTIONS)[flattens if EVERY > 1 else 0 :: EVERY]
    check(4, [name for name in names if flattens or name not in DAILY], flattens=flattens)


OTHERWISE_IN_211 = [
    "F.pad(1)", "argmax()", "chunk", "cov", "index_put", "index_select(0)", "kthvalue", "logsumexp(1)", "mm", "mm(y.T)", "softmax(0)",
    "sums of means", "unbind", "var(0)", "x[1:4]", "zeros_like",
]  # fmt: skip
"""Functions that torch 2.11 has wrong, or fails at, of some layout."""


@pytest.mark.parametrize("known", [True, False])
def test_blocks_are_gathered_where_torchs_rules_do_not_know_them(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of torch 2.11, with every torch."""
    if not known:
        monkeypatch.setattr(dtensor_rules, "knows_blocks", lambda: False)
    check(2, OTHERWISE_IN_211)


def untaught_and_taught(rank: int) -> list[float]:
    """The sum of a gradient by torch's own rules, and by those of ``teach_dtensors``."""
    device_mesh, spec = init_device_mesh("cpu", (2,)), ShardingSpec.parse("S0 R")
    part = to_dtensor(torch.ones(2, 6), spec, (4, 6), device_mesh).requires_grad_()
    found = []
    for _ in range(2):
        (gradient,) = torch.autograd.grad(F.mse_loss(part, torch.zeros_like(part)), [part])
        found.append(gradient.full_tensor().sum().item())
        teach_dtensors()
    return found


def test_rules_that_were_used_before_are_not_kept() -> None:
    """A script may compute with DTensors before it compiles. It is a process of its own: in this one a test may have compiled."""
    code = "from tests.dtensors.test_sweep import on_ranks, untaught_and_taught; print(on_ranks(untaught_and_taught, 2))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for before, after in ast.literal_eval(done.stdout):
        assert after == pytest.approx(2.0) != before  # torch's own is twice as large


def test_a_hooks_plain_tensors_are_refused_in_backward() -> None:
    """Each rank may have another; those of a derivative's formula are the same on all."""

    def run(rank: int) -> tuple[bool, str]:
        teach_dtensors()
        device_mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(4, 6)
        spec = ShardingSpec.parse("S0 R")
        part = to_dtensor(local_part(whole, spec, Mesh.parse("2"), rank).clone(), spec, whole.shape, device_mesh).requires_grad_()
        part.chunk(2)[0].sum().backward()
        assert isinstance(part.grad, DTensor)
        right = torch.equal(part.grad.full_tensor(), torch.cat([torch.ones(2, 6), torch.zeros(2, 6)]))
        part.register_hook(lambda gradient: torch.where(gradient > 0, gradient, torch.zeros(4, 6)))
        try:
            part.sum().backward()
            return right, "not refused"
        except RuntimeError as error:
            return right, str(error)

    for right, words in on_ranks(run, 2):
        assert right and "got mixed torch.Tensor and DTensor" in words


DRAWING: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "rand_like": lambda x: torch.rand_like(x),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: nn.init.uniform_(x.clone()),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "multinomial": lambda x: x.softmax(1).multinomial(2),
    "poisson": lambda x: torch.poisson(x.exp()),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("text", ["R R", "S0 R", "S0 S1", "S10 R", "R S1/3"])
def test_numbers_are_drawn_for_the_whole(text: str) -> None:
    """All ranks hold what the first rank's generator gives on one device, whatever their own seeds."""
    whole = torch.randn(12, 12)

    def first(function: Callable[[Tensor], Any], tensor: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return function(tensor)

    def run(rank: int) -> list[str]:
        teach_dtensors()
        lay_by_parts(part_of)
        device_mesh, spec = init_device_mesh("cpu", (2, 2)), ShardingSpec.parse(text)
        part = to_dtensor(local_part(whole, spec, Mesh.parse("2x2"), rank).clone(), spec, whole.shape, device_mesh)
        found = {name: first(function, part, rank) for name, function in DRAWING.items()}
        wanted = {name: first(function, whole, 0) for name, function in DRAWING.items()}
        return [name for name, one in found.items() if not isinstance(one, DTensor) or not torch.equal(one.full_tensor(), wanted[name])]

    assert on_ranks(run, 4) == [[]] * 4
