"""Which models go through, from capture to a verified plan?

    pip install '.[models]'
    python benchmarks/models.py [--only 'llama,qwen*'] [--library timm] [--mode train] [--price stress]
                                [--rules] [[--limit 600] [--json FILE]

Every family of ``benchmarks/families``, in training and inference, is captured, planned on a mesh of 2 x 2 and verified: forward,
gradients and losses of two steps on simulated ranks against one device. Each is planned at two prices: ``default``, where models this
small are best left almost whole, and ``stress``: links that cost next to nothing and slow arithmetic, so that whatever can be split is.

A family runs in a process of its own under a limit of seconds, so that one that dies or hangs is a row of the table like any other.
``whole`` counts operators without a rule, ``split`` the share of operators that the plan splits; a family that fails has its reason in
one line. ``--rules`` stops after the capture: no prices, operators without a rule alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MESH = "dp=2,tp=2"
PRICES = ("default", "stress")
NO_PRICE = "none"
MODES = ("train", "inference")
EFFORT: Final = "low"
"""Of the search: a plan is verified as it was found, best or not."""


@dataclass
class Row:
    """One family in one mode at one price; seconds of each stage, and what was found. ``failed`` names the stage that failed."""

    family: str
    library: str
    mode: str
    price: str
    operators: int = 0
    whole: list[str] = field(default_factory=list)
    split: float = 0.0
    collectives: int = 0
    gap: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    reason: str = ""


def stressed() -> Any:
    """Hardware on which every split pays: arithmetic a million times slower, links without latency and of any bandwidth."""
    from autopar.cost_models import load_hardware

    real = load_hardware("h100-sxm")
    free = replace(real.node, latency_seconds=1e-12, bandwidth=1e15)
    return replace(
        real, name="stress", node=free, network=free, kernel_launch_seconds=1e-12, memory_bandwidth=1e8, efficiencies=(),
        peak_flops=tuple((dtype, flops * 1e-6) for dtype, flops in real.peak_flops),
    )  # fmt: skip


def measure(family: Any, modes: Sequence[str], prices: Sequence[str]) -> Iterator[Row]:
    """The rows of one family."""
    import torch

    import autopar
    from autopar.cli.rules import missing_rules
    from autopar.verify import verify

    hardware = {"default": None, "stress": stressed()}
    for mode in modes:
        bare = Row(family.name, family.library, mode, "")
        stage, begin = "build", time.perf_counter()

        def done(row: Row, after: str) -> None:
            nonlocal stage, begin
            now = time.perf_counter()
            row.seconds[stage] = round(now - begin, 2)
            stage, begin = after, now

        row = bare
        try:
            torch.manual_seed(0)
            target = family.build(mode)
            done(bare, "capture")
            graph = autopar.capture(target.model, target.args, target.kwargs, mode=mode, loss=target.loss, loss_args=target.loss_args)
            done(bare, "plan")
            bare.operators, bare.whole = len(graph.ops), [item[0] for item in missing_rules(graph)]
        except Exception as error:  # whatever a family raises is its row
            for price in prices:
                yield replace(bare, price=price, failed=stage, reason=_line(error))
            continue
        for price in prices:
            if price == NO_PRICE:
                yield replace(bare, price=price)
                continue
            row = replace(bare, price=price, seconds=dict(bare.seconds))
            stage, begin = "plan", time.perf_counter()
            try:
                plan = autopar.plan(graph, mesh=MESH, hardware=hardware[price], effort=EFFORT)
                plan.remember_loss(target.loss)
                done(row, "verify")
                row.collectives, row.gap = len(plan.collectives), plan.objective.gap
                row.split = sum(any("S" in item.spec for item in (*op.inputs, *op.outputs)) for op in plan.ops) / max(1, len(plan.ops))
                result = verify(plan, target, backend="simulate", steps=2)
                done(row, "done")
                if not result.passed:
                    row.failed, row.reason = "verify", "; ".join(result.problems[:3])
            except Exception as error:
                row.failed, row.reason = stage, _line(error)
            yield row


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("hint:")]
    return f"{type(error).__name__}: {' '.join(lines)}"[:400]


def child(name: str, modes: Sequence[str], prices: Sequence[str]) -> None:
    """Prints the rows of one family, one a line."""
    warnings.simplefilter("ignore")
    without_vision_operators()
    from benchmarks.families import FAMILIES

    family = next(item for item in FAMILIES if item.name == name)
    for row in measure(family, modes, prices):
        print("\n" + json.dumps(asdict(row)), flush=True)


def without_vision_operators() -> None:
    """Where torch is the CPU's and torchvision is not, its operators cannot be loaded: models do without, the import wants names."""
    import torch

    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        names = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(names)


_KEPT: list[Any] = []
"""Libraries end with their last reference."""


def run(family: Any, modes: Sequence[str], prices: Sequence[str], limit: float) -> list[Row]:
    """The rows of a family from a process of its own; where that ends early, rows that say so."""
    command = [sys.executable, __file__, "--child", family.name, "--mode", ",".join(modes), "--price", ",".join(prices)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=limit)
        ended = f"exit status {process.returncode}: {(errors.strip().splitlines() or ['no message'])[-1]}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ended = f"not done after {limit:.0f} s"
    rows = [Row(**json.loads(line)) for line in output.splitlines() if line.startswith('{"family"')]
    there = {(row.mode, row.price) for row in rows}
    missing = [(mode, price) for mode in modes for price in prices if (mode, price) not in there]
    return rows + [Row(family.name, family.library, mode, price, failed="process", reason=ended) for mode, price in missing]


def table(rows: Sequence[Row]) -> str:
    """One line a row, and the count of families."""
    lines = [
        f"{'family':26}{'library':13}{'mode':10}{'price':8}{'ops':>6}{'whole':>6}{'split':>6}{'gap':>7}{'capture':>8}{'plan':>7}{'verify':>7}"
    ]
    for row in rows:
        times = "".join(f"{row.seconds.get(stage, 0):{width}.1f}" for stage, width in (("capture", 8), ("plan", 7), ("verify", 7)))
        lines.append(
            f"{row.family:26}{row.library:13}{row.mode:10}{row.price:8}{row.operators:6}{len(row.whole):6}{row.split:6.0%}{row.gap:7.1%}{times}"
            + (f"  {row.failed}: {row.reason[:150]}" if row.failed else f"  whole: {', '.join(row.whole)}" if row.whole else "")
        )
    families = {row.family for row in rows}
    failed = {row.family for row in rows if row.failed}
    whole = {row.family for row in rows if row.whole}
    lines.append(f"{len(families)} families, {len(families - failed)} pass; {len(whole)} have operators without a rule")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names or globs, separated by commas")
    parser.add_argument("--library", default="*")
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--price", default=",".join(PRICES))
    parser.add_argument("--rules", action="store_true", help="stop after capture: operators without a rule")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a family")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    modes, prices = options.mode.split(","), [NO_PRICE] if options.rules else options.price.split(",")
    if options.child:
        child(options.child, modes, prices)
        return
    from benchmarks.families import FAMILIES

    rows: list[Row] = []
    for family in FAMILIES:
        if fnmatchcase(family.library, options.library) and any(fnmatchcase(family.name, item) for item in options.only.split(",")):
            found = run(family, modes, prices, options.limit)
            rows += found
            print("\n".join(table(found).splitlines()[1:-1]), file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
