"""What do the search's short cuts cost: equal layers decided once, meshes of many axes searched from merged ones?

    python benchmarks/shortcuts.py [--cases folded|huggingface|merged|all] [--time-limit S] [--json FILE]

Every model is planned the short way and, as the oracle, the long way: each layer on its own (its graph without groups of equal layers),
each merged mesh on its own. The short way is to give no longer step and no lower bound. One child process a plan.
``huggingface`` needs transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.models import without_vision_operators

MEMORY = "70GiB"
LINE, SQUARE = "dp=4", "dp=2,tp=2"
STEP, BOUND = 1e-6, 1e-3
"""Shares by which the short way's step may be longer, and its bound lower, than the long way's."""

DEEP = (
    "zoo:mlp,layers=12,width=2048,batch=4096",
    "zoo:gpt2,layers=8,width=768,heads=12,vocab=50304,batch=16,seq=512",
    "zoo:llama3,layers=8,width=1024,hidden=2816,vocab=32000,batch=16,seq=1024",
    "zoo:resnet,blocks=8-8,width=64,image=64,batch=64",
    "zoo:moe,layers=8,width=512,hidden=2048,vocab=32000,batch=16,seq=256",
)
ZOO = ("zoo:mlp", "zoo:gpt2", "zoo:llama3", "zoo:resnet", "zoo:moe")
CROWDED = {  # meshes of three and four axes and what they are with some merged
    "x=2,y=2,z=2": ("x=8", "x=4,y=2", "x=2,y=4"),
    "x=2,y=2,z=2,w=2": ("x=16", "x=8,y=2", "x=4,y=4", "x=2,y=8", "x=4,y=2,z=2", "x=2,y=4,z=2", "x=2,y=2,z=4"),
}
_WIDTHS = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "vocab_size": 32000}
_GATED = {**_WIDTHS, "num_key_value_heads": 8, "intermediate_size": 2816, "max_position_embeddings": 1024}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 32000},
    "gpt_neox": {**_WIDTHS, "intermediate_size": 4096},
    "opt": {**_WIDTHS, "ffn_dim": 4096, "word_embed_proj_dim": 1024},
    "bloom": {"hidden_size": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 32000},
    "llama": _GATED,
    "mistral": {**_GATED, "sliding_window": None},
    "qwen2": _GATED,
    "qwen3": {**_GATED, "head_dim": 64},
    "gemma": {**_GATED, "head_dim": 64},
    "phi": {**_WIDTHS, "intermediate_size": 4096},
}
"""Small configurations of ten families, deep enough to be folded."""


@dataclass(frozen=True)
class Pair:
    """A plan found the short way, and by what long way: ``each layer``, or another mesh."""

    target: str
    mesh: str
    long: tuple[str, ...]


EACH_LAYER = "each layer"


def pairs(cases: str, folder: Path) -> Iterator[Pair]:
    """What is compared; configurations are written into ``folder``."""
    if cases in ("folded", "all"):
        yield from (Pair(target, mesh, (EACH_LAYER,)) for target in DEEP for mesh in (SQUARE, LINE))
    if cases in ("huggingface", "all"):
        for kind, settings in CONFIGURATIONS.items():
            path = folder / f"{kind}.json"
            path.write_text(json.dumps({"model_type": kind, **settings}) + "\n")
            yield from (Pair(f"hf:{path},batch=16,seq=512", mesh, (EACH_LAYER,)) for mesh in (SQUARE, LINE))
    if cases in ("merged", "all"):
        yield from (Pair(target, mesh, merged) for mesh, merged in CROWDED.items() for target in ZOO)


def measure(target: str, mesh: str, way: str, time_limit: float) -> dict[str, Any]:
    """One plan in this process."""
    import autopar
    from autopar.cli.target import load_target

    if target.startswith("hf:"):
        without_vision_operators()
    found = load_target(target, "train", device="meta")
    graph = autopar.capture(found.model, found.args, found.kwargs, mode="train", loss=found.loss, loss_args=found.loss_args)
    if way == EACH_LAYER:
        graph = replace(graph, groups=())
    before = sum(os.times()[:4])
    plan = autopar.plan(graph, mesh=mesh, hardware="h100-sxm", memory=MEMORY, time_limit=time_limit)
    return {
        "target": target, "mesh": mesh, "way": way, "seconds": plan.objective.seconds, "bound_seconds": plan.objective.bound_seconds,
        "gap": plan.objective.gap, "repeats": max((len(group) for group in graph.groups), default=0),
        "cpu_seconds": sum(os.times()[:4]) - before,
    }  # fmt: skip


def ask(target: str, mesh: str, way: str, time_limit: float) -> dict[str, Any]:
    """One plan in a process of its own."""
    command = [sys.executable, "-P", __file__, "--time-limit", str(time_limit), "--one", target, mesh, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{target} {mesh} {way}: {(done.stderr.strip().splitlines() or [str(done.returncode)])[-1]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="folded", choices=["folded", "huggingface", "merged", "all"])
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        from autopar.garbage import young_garbage_only

        with young_garbage_only():  # as the command does
            print(json.dumps(measure(*arguments.one, time_limit=arguments.time_limit)))
        return
    rows = []
    print(
        f"{'model':44} {'mesh':16} {'repeats':>7} {'step ms':>10} {'bound ms':>10} {'gap %':>8} {'cpu s':>6}"
        f"  {'long way':16} {'step':>10} {'bound':>10} {'cpu s':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs(arguments.cases, Path(folder)):
            short = ask(pair.target, pair.mesh, "", arguments.time_limit)
            rows.append(short)
            name = pair.target.replace(f"{folder}/", "").split(",width")[0]
            for way in pair.long:
                long = ask(pair.target, pair.mesh if way == EACH_LAYER else way, way if way == EACH_LAYER else "", arguments.time_limit)
                rows.append(long)
                step, bound = short["seconds"] / long["seconds"] - 1, short["bound_seconds"] / long["bound_seconds"] - 1
                worse = " longer" * (step > STEP) + " lower" * (bound < -BOUND and way == EACH_LAYER)
                print(
                    f"{name:44} {pair.mesh:16} {short['repeats']:7} {1e3 * short['seconds']:10.4f} {1e3 * short['bound_seconds']:10.4f} "
                    f"{100 * short['gap']:8.4f} {short['cpu_seconds']:6.1f}  {way:16} {100 * step:+9.4f}% {100 * bound:+9.4f}% "
                    f"{long['cpu_seconds']:6.1f}{worse}",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
