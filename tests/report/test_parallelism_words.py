"""The words for how weights lie: every row of the table, and small plans pinned to what the words mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.graph import CONVERSION
from autopar.plan import Plan
from autopar.recording import record
from autopar.report.parallelism_words import DATA_WORDS, MEANINGS, WEIGHT_WORDS, WHOLE, Context, Use, meanings, ways
from autopar.search import find_plan
from tests.graphs import machine, two_layers

NOTHING = Use("contract", None, None, None, None, False, 2, 3, 3, into_loss=False, gathered_again=False)
KEPT = replace(NOTHING, kept=0)
WEIGHTS = [
    ("vocabulary parallel", replace(KEPT, operator="embedding", read=0, summed=True)),
    ("vocabulary parallel", replace(KEPT, read=0, made=2, into_loss=True)),
    ("expert parallel", replace(KEPT, read=0, made=0, applied=0, rank=3)),
    ("row parallel", replace(KEPT, read=1, applied=2, summed=True)),
    ("column parallel", replace(KEPT, read=0, made=2)),
    ("column parallel", replace(KEPT, operator="embedding", kept=1, read=1, made=2)),
    ("split", replace(KEPT, read=0)),
    ("FSDP (ZeRO-3 gathers)", replace(KEPT, applied=0, gathered_again=True)),
    ("FSDP (one gather)", replace(KEPT, applied=1)),
    ("gathered", KEPT),
    (None, NOTHING),
]
DATA = [
    ("sequence parallel", replace(NOTHING, applied=1)),
    ("sequence parallel", replace(KEPT, applied=1)),
    ("spatial parallel", replace(NOTHING, operator="convolution", applied=2, applied_rank=4, rank=4)),
    ("data parallel", replace(NOTHING, applied=0)),
    (None, replace(KEPT, applied=0)),
    ("data split", replace(NOTHING, applied=2, applied_rank=4)),
    (None, replace(NOTHING, read=0, applied=1)),
]


@pytest.mark.parametrize(("table", "cases"), [(WEIGHT_WORDS, WEIGHTS), (DATA_WORDS, DATA)])
def test_each_row_of_the_table_names_its_case_and_no_other(table: tuple[object, ...], cases: list[tuple[str | None, Use]]) -> None:
    for word, use in cases:
        assert next((row.word for row in table if row.holds(use)), None) == word, use  # type: ignore[attr-defined]
    assert {row.word for row in table} == {word for word, _ in cases} - {None}, "a case for every row"  # type: ignore[attr-defined]


def pinned(mesh: str, pins: dict[str, str]) -> list[tuple[str, str]]:
    """The words for the weights of two layers pinned so."""
    found = find_plan(two_layers(width=64, hidden=256), machine(mesh), constraints=pins, baselines=False)
    return [(way.title, way.words) for way in ways(record(found, target="two", memory_limit=2**34))]


def test_ways_are_named_as_by_those_who_write_them() -> None:
    data = pinned("dp=2", {"input:x": "S0 R", "module:layers.*": "S0 R", "layers.*.weight": "R R"})
    assert data == [("layers.0.weight", WHOLE), ("layers.1.weight", "data parallel over dp")]
    tensor = {"input:x": "R R", "module:layers.0": "R S0", "layers.0.weight": "S0 R", "layers.1.weight": "R S0"}
    assert pinned("tp=2", tensor) == [("layers.0.weight", "column parallel over tp"), ("layers.1.weight", "row parallel over tp")]
    kept = pinned("dp=2", {"input:x": "S0 R", "module:layers.*": "S0 R", "layers.*.weight": "S0 R"})
    assert dict(kept)["layers.1.weight"] == "FSDP (one gather) over dp"


class Words(nn.Module):
    """A vocabulary looked up, a layer, and the scores of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(65536, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 65536, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.tokens(tokens))))


def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def vocabulary(pins: dict[str, str], mesh: str, **options: str) -> Plan:
    tokens = torch.zeros(8, 4, dtype=torch.int64)
    given = {"mesh": mesh, "hardware": "cpu-cluster", "constraints": pins, "effort": "low"}
    return autopar.plan(Words(), (tokens,), loss=loss, loss_args=(tokens,), **given, **options)


def test_rows_of_the_vocabulary_are_vocabulary_parallel() -> None:
    plan = vocabulary({"tokens.weight": "S0 R", "head.weight": "S0 R", "module:head": "R R S0", "input:tokens": "R R"}, "tp=2")
    words = {way.name: way.words for way in ways(plan)}
    assert words["head.weight"] == "vocabulary parallel over tp"
    assert words["tokens.weight"] == "vocabulary parallel over tp"


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "bfloat16"}], ids=["as it is", "converted"])
def test_what_backward_gathers_again_is_told_from_what_it_keeps(options: dict[str, str]) -> None:
    plan = vocabulary({"inner.weight": "S0 R", "input:tokens": "S0 R", "module:*": "S0 R R"}, "dp=2", **options)
    before = {way.name: way.words for way in ways(plan)}["inner.weight"]
    assert before == "FSDP (one gather) over dp"
    conversions = (op for op in plan.ops if op.op == CONVERSION and op.inputs[0].tensor == "inner.weight")
    gathered = {op.outputs[0].tensor for op in conversions} or {"inner.weight"}
    gathers = (row for row in plan.collectives if row.kind == "all_gather")
    call = next(row for row in gathers if any(part.tensor in gathered for part in row.members))
    again = call.model_copy(update={"phase": "backward", "id": "again"})
    twice = plan.model_copy(update={"collectives": (*plan.collectives, again)})
    assert Context.of(twice).gathered_again == {"inner.weight"}
    assert {way.name: way.words for way in ways(twice)}["inner.weight"] == "FSDP (ZeRO-3 gathers) over dp"


def test_every_word_in_use_is_explained_once() -> None:
    texts = ["column parallel over tp, FSDP (one gather) over dp", "head parallel over tp", WHOLE]
    assert [word for word, _ in meanings(texts)] == ["column parallel", "FSDP (one gather)", "head parallel"]
    assert all(MEANINGS.values())
