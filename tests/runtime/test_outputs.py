"""Results of a compiled module: as the plan places them, or whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime import export_program, load_program
from tests.runtime.test_training import gradients, on_ranks, refused, same

X, Y = torch.randn(8, 16, dtype=torch.float64), torch.randint(0, 4, (8,))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def test_they_are_placed_or_whole_as_asked(tmp_path: Path) -> None:
    """Whole ones are compared with labels and trained with a loss of one's own; placed ones say how."""
    pins = {"input:input": "S0 R", "output:0": "S0 R"}
    plan, plain = autopar.plan(classifier(), (X,), mesh="2", hardware="cpu-cluster", constraints=pins), classifier()
    export_program(plan, classifier(), tmp_path / "program")
    hits = (plain(X).argmax(-1) == Y).sum().item()
    nn.functional.cross_entropy(plain(X), Y).backward()

    def run(rank: int) -> tuple[list[bool], str]:
        module, placed = autopar.compile(classifier(), plan, outputs="full"), autopar.compile(classifier(), plan)
        logits, program = module(X), load_program(tmp_path / "program", outputs="full")
        nn.functional.cross_entropy(logits, Y).backward()
        right = [isinstance(placed(X), DTensor), type(logits) is torch.Tensor]
        right += [torch.equal(program(X), logits), same(gradients(module), gradients(plain))]
        right += [(module.eval()(X).argmax(-1) == Y).sum().item() == hits, torch.equal(module(X[:4]), logits[:4])]
        return right, refused(lambda: placed(X).argmax(-1) == Y)

    for right, words in on_ranks(run, 2):
        assert all(right), right
        assert "in a comparison: one is split over ranks" in words and "hint: compile(..., outputs='full') for whole results" in words


def test_another_word_is_refused() -> None:
    plan = autopar.plan(classifier(), (X,), mesh="2", hardware="cpu-cluster")
    assert "unknown kind of outputs 'whole'\nhint: use one of placed, full" in refused(
        lambda: autopar.compile(classifier(), plan, outputs="whole")  # type: ignore[arg-type]
    )


class Exchanging(nn.Module):
    """Its outputs bear the names of what it was given and holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("low", torch.zeros(4))
        self.register_buffer("high", torch.full((4,), 9.0))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        made = {"x": x * self.scale, "given": x, "mask": mask * 2, "old": mask}
        return {**made, "high": self.low, "low": self.high, "loss": (x * self.scale).sum()}


def test_an_output_may_be_named_as_another_ones_tensor(one_rank: None) -> None:
    args = torch.randn(3, 4), torch.ones(3, 4)
    found = autopar.compile(Exchanging(), autopar.plan(Exchanging(), args, mesh="1", hardware="cpu-cluster"))(*args)
    for name, wanted in Exchanging()(*args).items():
        torch.testing.assert_close(found[name], wanted)
