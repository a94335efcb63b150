"""How well, and how fast, does ``autopar profile`` fit the operators of a GPU?

    python benchmarks/fitting.py [--points 400] [--noise 0.03] [--outliers 0] [--json FILE]

The points come from a synthetic GPU whose launch, arithmetic and memory traffic overlap. They have noise, and are spread over seven classes
with one to four operators each. For each fit: its points, and how far its prediction lies from their times. Then the processor's seconds of
all fits together, the choice of operators with figures of their own included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar.measurement.device import Peaks
from autopar.measurement.hardware import Times, fit
from tests.cost_models.gpu_times import GPU, gpu_times


def main() -> None:
    parser = argparse.ArgumentParser(description="How well, and how fast, does autopar profile fit the operators of a GPU?")
    parser.add_argument("--points", type=int, default=400, help="operators timed, over all classes")
    parser.add_argument("--noise", type=float, default=0.03, help="standard deviation of a time's logarithm")
    parser.add_argument("--outliers", type=float, default=0.0, help="share of times made 2 to 20 times longer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    operators = tuple(gpu_times(arguments.points, noise=arguments.noise, outliers=arguments.outliers))
    times = Times(Peaks(dict(GPU.peak_flops), GPU.memory_bandwidth), operators, (), 0.0, True)
    begin = time.process_time()
    hardware = fit(times, "fitted", GPU.memory_bytes, GPU.devices_per_node)
    seconds = time.process_time() - begin
    print(f"{'fit':38}{'points':>8}{'median':>9}{'90 %':>9}{'largest':>9}")
    for name, item in hardware.residuals:
        print(f"{name:38}{item.points:8}{item.median:9.1%}{item.percentile_90:9.1%}{item.largest:9.1%}")
    print(f"\n{len(operators)} points fitted in {seconds:.2f} CPU s")
    if arguments.json:
        rows = {name: asdict(item) for name, item in hardware.residuals}
        arguments.json.write_text(json.dumps({"cpu_seconds": seconds, "fits": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
