"""How good and how fast are the planned reshards?

    python benchmarks/reshard.py [--json FILE]

For each published pair: the bytes each rank receives as a fraction of the tensor, beside the best known and the
information-theoretic bound (the target block minus what is held), under a machine that prices bytes alone; then how long up
to a thousand questions take on larger meshes, when each is asked for the first time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar.cost_models import Machine, Mesh, load_hardware
from autopar.reshard import find_reshard
from autopar.sharding import ShardingSpec
from tests.reshard_cases import CASES, all_specs, machine


def measure_pairs() -> list[dict[str, object]]:
    """One row a published pair."""
    rows: list[dict[str, object]] = []
    for case in CASES:
        source, target = ShardingSpec.parse(case.source), ShardingSpec.parse(case.target)
        shape, on = (256,) * len(source.dims), machine(case.mesh)
        begin = time.perf_counter()
        plan = find_reshard(shape, 4, source, target, on, fine=True)
        seconds = time.perf_counter() - begin
        assert plan is not None
        rows.append(
            {
                "mesh": case.mesh,
                "source": case.source,
                "target": case.target,
                "received": plan.received_bytes_per_rank / (math.prod(shape) * 4),
                "best_known": case.best,
                "lower_bound": case.bound,
                "steps": [step.kind for step in plan.steps],
                "planning_seconds": seconds,
            }
        )
    return rows


def measure_speed(mesh: str, hardware: str, count: int = 1000) -> dict[str, object]:
    """Seconds for up to ``count`` distinct (tensor, pair) questions on one mesh; small meshes have fewer."""
    on = Machine(Mesh.parse(mesh), load_hardware(hardware))
    shapes = [(64, 2048, 4096), (64, 2048, 1024), (16384, 4096), (4096, 4096), (64, 32, 2048, 128)]
    sample = random.Random(0)
    specs = {shape: all_specs(shape, on.mesh.sizes) for shape in shapes}
    asked: dict[tuple[tuple[int, ...], ShardingSpec, ShardingSpec], None] = {}
    for _ in range(count):
        shape = sample.choice(shapes)
        asked[shape, sample.choice(specs[shape]), ShardingSpec(sample.choice(specs[shape]).dims)] = None
    begin = time.perf_counter()
    for shape, source, target in asked:
        assert find_reshard(shape, 2, source, target, on) is not None
    return {"mesh": mesh, "hardware": hardware, "questions": len(asked), "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description="How good and how fast are the planned reshards?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    pairs = measure_pairs()
    print(f"{'mesh':8}{'pair':30}{'received':>9}{'best':>9}{'bound':>9}{'ms':>7}  steps")
    for row in pairs:
        figures = f"{row['received']:9.4f}{row['best_known']:9.4f}{row['lower_bound']:9.4f}{1e3 * float(str(row['planning_seconds'])):7.1f}"
        print(f"{row['mesh']:8}{row['source']!s:>14} -> {row['target']!s:12}{figures}  {', '.join(map(str, row['steps']))}")
    speed = [measure_speed(mesh, "h100-sxm") for mesh in ("8", "2x4", "8x8", "2x8", "4x4", "32x8", "2x2x2", "2x8x8")]
    print(f"\n{'mesh':8}{'questions':>10}{'seconds':>9}")
    for line in speed:
        print(f"{line['mesh']:8}{line['questions']:10}{line['seconds']:9.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"pairs": pairs, "speed": speed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
