"""Is a plan any worse where equal layers are decided once? Steps, bounds and CPU seconds of a search with layers folded and without.

Models of eight equal layers: those of the zoo, and Hugging Face models built from configurations where transformers is installed. Each is
captured once and searched twice in this process, first on a small model, so that what is made once in a process counts for neither.
Times are CPU seconds of the search, all threads and children.

    python benchmarks/folding.py [--only NAME] [--mesh dp=2,tp=4] [--time-limit S] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from autopar.graph import Graph
    from autopar.search import SearchResult

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ZOO = (
    "zoo:mlp,layers=8", "zoo:gpt2,layers=8", "zoo:llama3,layers=8", "zoo:moe,layers=8", "zoo:llama3-8b,layers=8,batch=8,seq=4096",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1536, "vocab_size": 8192,
    "max_position_embeddings": 512,
}  # fmt: skip
LESS_HEADS = {"num_key_value_heads": 4, "head_dim": 64}
CONFIGURATIONS: dict[str, dict[str, Any]] = {  # by model type
    "llama": SIZES | {"num_key_value_heads": 4},
    "mistral": SIZES | LESS_HEADS,
    "qwen3": SIZES | LESS_HEADS,
    "gemma2": SIZES | LESS_HEADS,
    "phi": SIZES,
    "gpt_neox": SIZES,
    "bert": SIZES | {"is_decoder": True},
    "roberta": SIZES | {"is_decoder": True},
    "gpt2": {"n_layer": 8, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 512},
    "opt": {
        "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "ffn_dim": 1536, "word_embed_proj_dim": 512,
        "vocab_size": 8192, "max_position_embeddings": 512,
    },
}  # fmt: skip
SENTENCES = "batch=16,seq=512"
WARMING = "zoo:mlp"


@dataclass(frozen=True)
class Row:
    """One model, searched both ways: steps and bounds in seconds."""

    target: str
    step_folded: float
    step_whole: float
    bound_folded: float
    bound_whole: float
    cpu_folded: float
    cpu_whole: float


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def targets(folder: Path) -> Iterator[str]:
    """Those of the zoo, and for each configuration one of a file in ``folder``."""
    yield from ZOO
    if find_spec("transformers") is None:
        print("transformers is not installed: the zoo's models alone")
        return
    for kind, sizes in CONFIGURATIONS.items():
        path = folder / f"{kind}.json"
        path.write_text(json.dumps({"model_type": kind} | sizes))
        yield f"hf:{path},{SENTENCES}"


@contextmanager
def nothing_folded() -> Iterator[None]:
    from autopar.search.driver import find_plan as finding

    with mock.patch.object(finding, "fold_layers", lambda graph: None):
        yield


def search(graph: Graph, mesh: str, time_limit: float) -> tuple[SearchResult, float]:
    """What is found, and CPU seconds."""
    from autopar.cost_models import Machine, load_hardware
    from autopar.options import parse_mesh
    from autopar.search import find_plan

    machine = Machine(parse_mesh(mesh), load_hardware("h100-sxm"), "roofline")
    began = cpu_seconds()
    found = find_plan(graph, machine, time_limit=time_limit)
    return found, cpu_seconds() - began


def row(target: str, mesh: str, time_limit: float) -> Row:
    from autopar.cli.target import capture_target

    graph = capture_target(target, "train")
    folded, cpu_folded = search(graph, mesh, time_limit)
    with nothing_folded():
        whole, cpu_whole = search(graph, mesh, time_limit)
    name = target if target.startswith("zoo:") else f"hf:{Path(target.partition(',')[0]).stem},{SENTENCES}"
    return Row(name, folded.seconds, whole.seconds, folded.bound_seconds, whole.bound_seconds, cpu_folded, cpu_whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose target has this in it")
    parser.add_argument("--mesh", default="dp=2,tp=4")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    head = f"{'model':44} {'step us':>10} {'whole':>10} {'more %':>7} {'bound us':>10} {'whole':>10} {'less %':>7}"
    print(f"{head} {'cpu s':>6} {'whole':>6}")
    with tempfile.TemporaryDirectory() as folder:
        row(WARMING, arguments.mesh, arguments.time_limit)
        for target in targets(Path(folder)):
            if arguments.only not in target:
                continue
            one = row(target, arguments.mesh, arguments.time_limit)
            rows.append(one)
            more, less = 100 * (one.step_folded / one.step_whole - 1), 100 * (1 - one.bound_folded / one.bound_whole)
            print(
                f"{one.target:44} {1e6 * one.step_folded:10.1f} {1e6 * one.step_whole:10.1f} {more:7.3f} {1e6 * one.bound_folded:10.1f} "
                f"{1e6 * one.bound_whole:10.1f} {less:7.3f} {one.cpu_folded:6.1f} {one.cpu_whole:6.1f}",
                flush=True,
            )
    if not rows:
        sys.exit(f"no model has {arguments.only!r} in its name")
    longer = max(one.step_folded / one.step_whole - 1 for one in rows)
    lower = max(1 - one.bound_folded / one.bound_whole for one in rows)
    print(f"at most {100 * longer:.3f} % longer steps and {100 * lower:.3f} % lower bounds folded")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
