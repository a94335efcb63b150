"""Calls that are nested otherwise than the planned one: optional arguments left out or given, other plain values, other integers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.runtime import export_program, load_program
from autopar.runtime.steps.calls import OtherCallError, leaves
from tests.runtime.test_training import gradients, on_ranks, refused, same, whole

IDS, TARGETS = torch.randint(0, 32, (8, 4)), torch.randint(0, 32, (8, 4))


class Speaker(nn.Module):
    """Takes targets or not, and gives a loss with them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.out = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 32)
        self.double()

    def forward(self, idx: Tensor, targets: Tensor | None = None, scale: float = 1.0, weights: Tensor | None = None) -> Any:
        logits = self.out(torch.relu(self.mid(self.emb(idx)))) * scale
        if targets is None:
            return logits, None
        each = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return logits, (each if weights is None else each * weights.flatten()).mean()


def speaker() -> Speaker:
    torch.manual_seed(0)
    return Speaker()


def plan_of(*given: Tensor, **more: Any) -> Plan:
    return autopar.plan(speaker(), given, mesh="2", hardware="cpu-cluster", **more)


CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((IDS, TARGETS), {}),
    ((IDS,), {}),
    ((IDS[:4], None), {}),
    ((IDS.int(), TARGETS), {}),
    ((IDS, TARGETS), {"scale": 0.5}),
    ((), {"weights": torch.rand(8, 4, dtype=torch.float64), "targets": TARGETS, "idx": IDS}),
)


@pytest.mark.parametrize(("planned", "calls"), [((IDS, TARGETS), CALLS), ((IDS,), CALLS[:2])])
def test_each_has_a_program_of_its_own(planned: tuple[Tensor, ...], calls: tuple[Any, ...]) -> None:
    plan, plain = plan_of(*planned, constraints={"input:idx": "S0 R"}), speaker()
    wanted = [plain(*args, **kwargs) for args, kwargs in calls]
    plain(IDS)[0].square().sum().backward()

    def run(rank: int) -> list[bool]:
        module = autopar.compile(speaker(), plan)
        with torch.no_grad():
            found = [module.eval()(*args, **kwargs) for args, kwargs in calls]
            made = len(module._programs.made)
            module(idx=IDS), module(IDS, None, 1.0), module(IDS, targets=None)  # as the second
        right = [torch.allclose(whole(one[0]), other[0]) for one, other in zip(found, wanted, strict=True)]
        losses = [(one[1], other[1]) for one, other in zip(found, wanted, strict=True)]
        right += [one is None if other is None else torch.allclose(one, other) for one, other in losses]
        logits, none = module.train()(IDS)
        logits.square().sum().backward()
        return [*right, none is None, len(module._programs.made) <= made + 1, same(gradients(module), gradients(plain))]

    for right in on_ranks(run, 2):
        assert all(right), right


class Masked(nn.Module):
    """Computes its outputs alone; the loss is another's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.out = nn.Embedding(32, 16), nn.BatchNorm1d(4), nn.Linear(16, 32)
        self.double()

    def forward(self, idx: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.norm(self.emb(idx))
        out: Tensor = self.out(hidden if mask is None else hidden * mask[..., None])
        return out


def masked() -> Masked:
    torch.manual_seed(0)
    return Masked()


def weighted(outputs: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor:
    return weight * nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


MASK = torch.rand(8, 4, dtype=torch.float64)
ALONE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "as planned": ((IDS, MASK), {}),
    "by name": ((), {"mask": MASK, "idx": IDS}),
    "shorter": ((IDS[:3], MASK[:3]), {}),
    "without a mask": ((IDS,), {}),
    "without a mask, by name": ((), {"idx": IDS}),
}


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_evaluation_without_what_the_loss_takes_gives_the_models_outputs(inputs: Any) -> None:
    """With gradients and without, and with the loss again in turn; in training targets were forgotten."""
    given: dict[str, Any] = {"loss": weighted, "mesh": "2", "hardware": "cpu-cluster", "inputs": inputs}
    plan, plain = autopar.plan(masked(), (IDS, MASK), loss_args=(TARGETS,), **given), masked().eval()
    calls = {name: call for name, call in ALONE.items() if inputs == "global" or name != "shorter"}
    wanted = {name: plain(*args, **kwargs).detach() for name, (args, kwargs) in calls.items()}
    value = weighted(plain(IDS, MASK), TARGETS).item()
    plain(IDS, MASK).square().sum().backward()

    def run(rank: int) -> tuple[list[bool], float, list[str]]:
        module = autopar.compile(masked(), plan, loss=weighted)
        own = slice(4 * rank, 4 * rank + 4) if inputs == "local" else slice(None)

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*(item[own] for item in args), **{name: item[own] for name, item in kwargs.items()})

        words = [refused(partial(call, *args, **kwargs)) for args, kwargs in calls.values()]
        module.eval()
        with torch.no_grad():
            right = [torch.allclose(whole(call(*args, **kwargs)), wanted[name]) for name, (args, kwargs) in calls.items()]
            found = module(IDS[own], MASK[own], TARGETS[own]).item()
        call(IDS, MASK).square().sum().backward()
        right.append(same(gradients(module), gradients(plain)))
        return right, found, words

    for right, found, words in on_ranks(run, 2):
        assert all(right), right
        assert found == pytest.approx(value)
        assert all("the call has what the model takes, and of the loss's arguments lacks targets" in text for text in words)
        assert all(text.endswith("; for the model's outputs alone call eval() first, and pass its arguments by name") for text in words)


def test_numbers_of_the_loss_that_differ_have_programs_of_their_own() -> None:
    given: dict[str, Any] = {"loss": weighted, "mesh": "1", "hardware": "cpu-cluster"}
    plan, plain = autopar.plan(masked(), (IDS, MASK), loss_args=(TARGETS, 1.0), **given), masked().eval()
    wanted = [weighted(plain(IDS, MASK), TARGETS, weight).item() for weight in (1.0, 0.5, 0.25)]

    def run(rank: int) -> list[float]:
        module = autopar.compile(masked(), plan, loss=weighted).eval()
        return [module(IDS, MASK, TARGETS, weight).item() for weight in (1.0, 0.5, 0.25)]

    assert on_ranks(run, 1) == [pytest.approx(wanted)]


def test_where_each_rank_passes_rows_what_comes_beside_them_is_split_too() -> None:
    plan, weights = plan_of(IDS, TARGETS, inputs="local"), torch.rand(8, 4, dtype=torch.float64)
    wanted = [speaker()(IDS, TARGETS, weights=weights)[1].item(), speaker()(IDS)[0].sum().item()]

    def run(rank: int) -> list[float]:
        module, rows = autopar.compile(speaker(), plan), slice(4 * rank, 4 * rank + 4)
        return [module(IDS[rows], TARGETS[rows], weights=weights[rows])[1].item(), whole(module(IDS[rows])[0]).sum().item()]

    for found in on_ranks(run, 2):
        assert found == pytest.approx(wanted)


def test_what_is_no_call_of_the_model_stays_refused(tmp_path: Any) -> None:
    plan = plan_of(IDS, TARGETS)
    export_program(plan, speaker(), tmp_path / "program")

    def run(rank: int) -> list[str]:
        module, program = autopar.compile(speaker(), plan), load_program(tmp_path / "program")
        calls = (module, "text", TARGETS), (module, IDS, TARGETS, object()), (module, IDS.double(), TARGETS), (program, IDS)
        return [refused(partial(*call)) for call in calls]

    for text, kind, floats, exported in on_ranks(run, 2):
        assert "argument 0 is a str, the plan was made for a tensor" in text
        assert "argument scale is a object, which no program can be made for" in kind
        assert "input idx is float64 [8, 4], planned was int64 [8, 4]" in floats
        assert "the call differs from the captured one in 1 arguments by position where it had 2" in exported


class Summed(nn.Module):
    """Adds up whatever tensors it is given, and multiplies by all numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, more: Any, ids: Tensor, *, most: float = 1.0, **factors: Any) -> tuple[Tensor, Tensor]:
        found = self.layer(x).clamp(max=most)
        for part in getattr(more, "parts", more).values():
            found = found + part if isinstance(part, Tensor) else found * (len(part) + 2)
        for factor in (*factors.values(), getattr(more, "factor", 1)):
            found, ids = found * factor, ids * factor
        return found, ids


class Own:
    """A class that export does not know, with a number beside tensors."""

    def __init__(self, factor: float, **parts: Any) -> None:
        self.factor, self.parts = factor, parts


A, B = torch.rand(8, 4, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
FURTHER: dict[str, tuple[tuple[Any, dict[str, Any]], ...]] = {
    "items of a dictionary": (({"a": A}, {}), ({"a": A, "b": B}, {}), ({"b": B}, {}), ({}, {}), ({"b": B, "a": A}, {})),
    "a dictionary that was empty": (({}, {}), ({"a": A}, {})),
    "names beside the signature's": (({"a": A}, {}), ({"a": A}, {"one": 2.0}), ({"a": A}, {"one": 2.0, "two": 3.0})),
    "empty items": (({"a": A}, {}), ({"a": A, "b": []}, {}), ({"a": A, "b": [[]]}, {}), ({"a": A, "b": [[], []]}, {})),
    "numbers of another kind": (({"a": A}, {"one": 2}), ({"a": A}, {"one": 2.0}), ({"a": A}, {"one": 1}), ({"a": A}, {"one": True})),
    "infinite numbers": (({"a": A}, {"most": float("inf")}), ({"a": A}, {"most": 0.1}), ({"a": A}, {"most": -float("inf")})),
    "attributes of own classes": ((Own(2.0, a=A), {}), (Own(3.0, a=A), {}), (Own(3.0, a=A, b=B), {})),
}
"""What comes beside tensors, and by further names: the first as planned."""


@pytest.mark.parametrize("kind", FURTHER)
def test_what_a_call_has_beside_what_was_planned_counts(kind: str, tmp_path: Any) -> None:
    """Further items were left out, and numbers taken for equal ones, without a word."""
    x, ids = torch.rand(8, 4, dtype=torch.float64), torch.arange(8)
    torch.manual_seed(0)
    plain = Summed()
    (first, named), *_ = FURTHER[kind]
    autopar.plan(plain, (x, first, ids), named, mesh="1", hardware="cpu-cluster").save(tmp_path / "plan.json")
    wanted = [plain(x, more, ids, **factors) for more, factors in FURTHER[kind]]

    def run(rank: int) -> list[str]:
        module = autopar.compile(plain, tmp_path / "plan.json", example=((x, first, ids), named, ()))
        found = [module(x, more, ids, **factors) for more, factors in FURTHER[kind]]
        return [
            str(index)
            for index, (mine, other) in enumerate(zip(found, wanted, strict=True))
            if not (torch.allclose(mine[0], other[0]) and torch.equal(mine[1], other[1]) and mine[1].dtype == other[1].dtype)
        ]

    assert on_ranks(run, 1) == [[]]


class Waves(nn.Module):
    """Reads parts of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex128) * (1 + 2j))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return ((z.real + 2 * z.imag) @ (self.weight.real + self.weight.imag)) * x


@pytest.mark.parametrize("spec", ["R R", "S0 R", "R S0"])
def test_conjugates_may_be_given(spec: str) -> None:
    """They are views that are not written out: hashes of them, and operators that look at memory, were errors of torch."""
    z, plain = torch.rand(8, 4, dtype=torch.complex128), Waves()
    calls = (z.conj(), z.conj()[:, :3].imag), (z, z.conj()[:, 1:].imag)
    wanted = [plain(*call) for call in calls]
    plan = autopar.plan(plain, calls[0], mesh="2", hardware="cpu-cluster", constraints={"input:z": spec})

    def run(rank: int) -> list[bool]:
        module = autopar.compile(Waves(), plan)
        return [torch.allclose(whole(module(*call)), other) for call, other in zip(calls, wanted, strict=True)]

    assert on_ranks(run, 2) == [[True, True]] * 2


def test_a_tensor_that_is_not_dense_is_refused() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for value, layout in ((torch.eye(2).to_sparse(), "sparse_coo"), (jagged, "nested")):
        with pytest.raises(UsageError, match=f"the value is a {layout} tensor; plans are made of dense ones\nhint: "):
            list(leaves({"tensor": "x"}, value))


@pytest.mark.parametrize(
    ("tree", "value", "said"),
    [
        (None, torch.zeros(8, 4, dtype=torch.bool), "the value is a tensor, bool [8, 4], the plan was made for None"),
        (None, {"x": [torch.zeros(2), 1]}, "the value is {x: [a tensor, float32 [2], 1]}, the plan was made for None"),
        ([{"tensor": "x"}], (torch.zeros(2), torch.ones(3)), "[a tensor, float32 [2], a tensor, float32 [3]], the captured call had 1"),
        ([{"tensor": "x"}], torch.zeros(2), "the value is a tensor, float32 [2], the captured call had 1 items there"),
        (1, "two", "the value is 'two', the plan was made for 1"),
    ],
)
def test_a_tensor_that_does_not_fit_is_told_by_dtype_and_shape(tree: Any, value: Any, said: str) -> None:
    """Its first rows were printed, on several lines."""
    with pytest.raises(OtherCallError) as caught:
        list(leaves(tree, value))
    assert said in caught.value.message
