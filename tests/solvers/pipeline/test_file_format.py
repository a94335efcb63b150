"""Pipeline files: what is read, and that every malformed file is refused in one line with a hint."""

from __future__ import annotations

import gzip
import json

import pytest

from autopar.solvers import ProblemError, TooLargeError
from autopar.solvers.pipeline import Mode, PipelineProblem, load, solve_pipeline
from autopar.solvers.pipeline.file_format import SOLUTION_SCHEMA, from_document, is_pipeline, to_document

EXAMPLE = {
    "schema": "autopar.pipeline-problem/1",
    "layers": [
        {"forward": 1, "backward": 2, "held": 1},
        {"modes": [{"forward": 1, "backward": 2, "held": 4}, {"forward": 1, "backward": 3}]},
    ],
    "devices": 2,
    "microbatches": 3,
}


def changed(**keys):
    return {**EXAMPLE, **keys}


def test_keys_that_are_left_out_have_their_defaults():
    layers = ((Mode(1, 2, held=1),), (Mode(1, 2, held=4), Mode(1, 3)))
    assert from_document(EXAMPLE) == PipelineProblem(layers, 2, 3)
    more = changed(chunks=1, placement="loop", transfer=0, mode="train", split=False, limit=None)
    assert from_document(more) == PipelineProblem(layers, 2, 3)
    assert not from_document(changed(mode="inference")).training


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress])
def test_a_file_is_read_plain_or_gzipped(tmp_path, pack):
    path = tmp_path / "pipeline.json"
    path.write_bytes(pack(json.dumps(EXAMPLE).encode()))
    assert load(path) == from_document(EXAMPLE)


BROKEN = {
    "a list": ([1], "no object"),
    "no schema": ({key: value for key, value in EXAMPLE.items() if key != "schema"}, "schema is missing"),
    "a later schema": (changed(schema="autopar.pipeline-problem/2"), "schema is 'autopar.pipeline-problem/2'"),
    "no layers": ({key: value for key, value in EXAMPLE.items() if key != "layers"}, "layers is missing"),
    "no devices": ({key: value for key, value in EXAMPLE.items() if key != "devices"}, "devices is missing"),
    "layers no list": (changed(layers={}), "layers is not a list"),
    "no layer at all": (changed(layers=[]), "0 layers are too few"),
    "a layer no object": (changed(layers=[1, 2]), "layer 0 is 1, no object"),
    "an unknown key": (changed(micro_batches=3), "unknown key 'micro_batches'"),
    "an unknown key of a layer": (changed(layers=[{"foward": 1}] * 2), "layer 0 has an unknown key 'foward'"),
    "modes and seconds": (changed(layers=[{"modes": [{}], "forward": 1}] * 2), "layer 0 has an unknown key 'forward'"),
    "modes no list": (changed(layers=[{"modes": {}}] * 2), "modes of layer 0 is {}"),
    "no mode": (changed(layers=[{"modes": []}] * 2), "layer 0 has no mode"),
    "a mode no object": (changed(layers=[{"modes": [3]}] * 2), "mode 0 of layer 0 is 3"),
    "seconds in words": (changed(layers=[{"forward": "1"}] * 2), "forward of layer 0 is '1'"),
    "seconds true": (changed(layers=[{"forward": True}] * 2), "forward of layer 0 is True"),
    "seconds below 0": (changed(layers=[{}, {"backward": -1}]), "backward of layer 1 is -1"),
    "seconds no number": (changed(layers=[{}, {"held": float("nan")}]), "held of layer 1 is nan"),
    "seconds without end": (changed(layers=[{}, {"rest": float("inf")}]), "rest of layer 1 is inf"),
    "seconds out of range": (changed(layers=[{}, {"rest": 10**400}]), "out of range"),
    "half a device": (changed(devices=1.5), "devices is 1.5"),
    "no device": (changed(devices=0), "devices is 0"),
    "devices true": (changed(devices=True), "devices is True"),
    "no microbatch": (changed(microbatches=0), "microbatches is 0"),
    "more devices than layers": (changed(devices=3), "2 layers are too few for 3 devices"),
    "more chunks than layers": (changed(chunks=2), "2 layers are too few for 2 devices with 2 chunks each"),
    "an unknown placement": (changed(placement="w"), "placement is 'w'"),
    "a v of one chunk": (changed(placement="v"), "placement v has two chunks a device"),
    "transfers in words": (changed(transfer="fast"), "transfer is 'fast'"),
    "an unknown mode": (changed(mode="eval"), "mode is 'eval'"),
    "mode a list": (changed(mode=[]), "mode is []"),
    "split in words": (changed(split="yes"), "split is 'yes'"),
    "a limit below 0": (changed(limit=-1), "limit is -1"),
    "a limit in words": (changed(limit="8 GiB"), "limit is '8 GiB'"),
    "a name that is none": (changed(name=3), "name is 3"),
    "microbatches without end": (changed(microbatches=10**12), "out of range"),
}


@pytest.mark.parametrize(("document", "words"), BROKEN.values(), ids=list(BROKEN))
def test_malformed_files_are_refused_in_one_line_with_a_hint(tmp_path, document, words):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ProblemError) as caught:
        load(path)
    what, hint = str(caught.value).split("\n")
    assert what.startswith(str(path)) and words in what, what
    assert hint.startswith("hint: ") and len(hint) > 10


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "twice.json").write_text(json.dumps(EXAMPLE).replace('"devices": 2', '"devices": 2, "devices": 1'))
    with pytest.raises(ProblemError, match="'devices' stands twice"):
        load(tmp_path / "twice.json")


def test_numbers_out_of_range_have_an_error_of_their_own():
    with pytest.raises(TooLargeError):
        from_document(changed(microbatches=10**9))


def test_files_of_the_contest_are_none():
    assert is_pipeline(EXAMPLE) and is_pipeline({"layers": []})
    assert not is_pipeline({"problem": {}}) and not is_pipeline([])


def test_an_answer_has_the_keys_of_its_schema():
    answer = to_document(solve_pipeline(from_document(EXAMPLE)))
    assert list(answer) == ["schema", "cut", "modes", "orders", "step", "bound", "gap", "status"]
    assert answer["schema"] == SOLUTION_SCHEMA and answer["cut"] == [1, 1] and len(answer["modes"]) == 2
    assert answer["orders"][1][:2] == ["F1", "B1"] and answer["step"] == answer["bound"] == 12
    with pytest.raises(ValueError, match="no answer"):
        to_document(solve_pipeline(from_document(changed(limit=0))))
