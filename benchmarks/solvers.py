"""How good and how fast are solvers' answers? One row an instance of a folder, or of generated layered problems.

    python benchmarks/solvers.py FOLDER [A B ...] [--share 0.5] [--seeds 1] [--json FILE]
    python benchmarks/solvers.py --layered 8x40x30 32x60x35 [--time-limit 120]

FOLDER holds ``*-X.json`` or ``*-X.json.gz``. Each run is a process of its own, so that the seconds count from its start and the peak
memory is its own. The time limit of a known instance is the contest's times ``--share``; the work is ``--cores`` times as much.
``--set NAME=VALUE`` solves with another number of ``solvers/settings.py``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
"""Without this folder, whose files have the names of packages."""

PUBLISHED = {
    "A": (60, 6548641531), "B": (60, 532843), "G": (120, 217039), "K": (180, 2274276676),
    "M": (180, 49928460991), "P": (240, 651833115436), "S": (240, 1534613444), "U": (300, 2569342178),
}  # fmt: skip
"""Time limit in seconds and best published cost (the compiler's own on P)."""


@dataclass(frozen=True)
class Row:
    """One run. Seconds are wall-clock from process start, ``cpu`` the process's CPU seconds, ``memory`` its peak in MiB; ``work`` and
    ``cut`` are the solution's."""

    instance: str
    seed: int
    cost: int | None
    published: int | None
    bound: float
    gap: float
    status: str
    seconds: float
    cpu: float
    memory: int
    work: float
    cut: bool

    @property
    def ratio(self) -> float | None:
        return None if self.cost is None or self.published is None else self.cost / self.published


def measure(
    source: str, time_limit: float, seed: int, method: str, gap: float, work: float, settings: dict[str, float], began: float
) -> Row:
    """Solve one instance in this process; the file is read here, and judged by the evaluator once more."""
    import solvers
    from solvers.layered import layered
    from solvers.settings import SETTINGS

    for name, value in settings.items():
        object.__setattr__(SETTINGS, name, type(getattr(SETTINGS, name))(value))
    instance = _letter(source)
    problem = solvers.Problem.load(source) if Path(source).is_file() else layered(*map(int, source.split("x")))
    left = time_limit - (time.time() - began)
    found = solvers.solve(problem, work=work, time_limit=left, gap=gap, seed=seed, method=method)
    if found.choices is not None:
        assert solvers.evaluate(problem, found.choices) == (found.objective, found.peak_usage, True)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    published = PUBLISHED.get(instance, (0, None))[1]
    return Row(
        instance,
        seed,
        found.objective,
        published,
        float(found.bound),
        found.gap,
        found.status.value,
        round(time.time() - began, 2),
        round(usage.ru_utime + usage.ru_stime, 2),
        usage.ru_maxrss // 1024,
        round(found.work, 2),
        found.cut,
    )


def _letter(source: str) -> str:
    return Path(source).name.removesuffix(".gz").removesuffix(".json").rpartition("-")[2]


def _in_own_process(*arguments: object) -> Row:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        row: Row = pool.apply(measure, (*arguments, time.time()))
    return row


def _text(row: Row) -> str:
    ratio = "-" if row.ratio is None else f"{row.ratio:.5f}"
    return (
        f"{row.instance:>10} {row.seed:>4} {row.cost or '-':>16} {row.published or '-':>16} {ratio:>8} {row.bound:>18.0f} "
        f"{100 * row.gap:>8.4f} {row.status:>10} {row.seconds:>8.1f} {row.cpu:>8.1f} {row.work:>7.1f} {row.cut!s:>5} {row.memory:>6}"
    )


def main() -> int:
    """Print the table as it grows, and write it as JSON when asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("instances", nargs="*")
    options.add_argument("--layered", nargs="+", default=[], metavar="LAYERSxWIDTHxCHOICES")
    options.add_argument("--time-limit", type=float, help="seconds; default: the contest's limit times --share, 120 where unknown")
    options.add_argument("--share", type=float, default=0.5)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--gap", type=float, default=1e-6)
    options.add_argument("--method", default="auto")
    options.add_argument("--cores", type=float, default=1.0, help="work, as a multiple of the time limit")
    options.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    files = sorted(str(path) for path in chosen.folder.glob("*.json*")) if chosen.folder else []
    settings = {name: float(value) for name, value in (text.split("=") for text in chosen.set)}
    sources = [path for path in files if not chosen.instances or _letter(path) in chosen.instances] + chosen.layered
    if not sources:
        print("error: no instance to solve\nhint: give a folder with problem files, or --layered 8x40x30", file=sys.stderr)
        return 2
    head = ("instance", "seed", "cost", "published", "ratio", "bound", "gap %", "status", "seconds", "cpu", "work", "cut", "MiB")
    print("{:>10} {:>4} {:>16} {:>16} {:>8} {:>18} {:>8} {:>10} {:>8} {:>8} {:>7} {:>5} {:>6}".format(*head))
    rows = []
    for source in sources:
        limit = chosen.time_limit or PUBLISHED.get(_letter(source), (120 / chosen.share, None))[0] * chosen.share
        for seed in range(chosen.seeds):
            rows.append(_in_own_process(source, limit, seed, chosen.method, chosen.gap, chosen.cores * limit, settings))
            print(_text(rows[-1]), flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    medians = [
        statistics.median(row.ratio if row.ratio is not None else float("inf") for row in rows if row.instance == name)
        for name in {row.instance for row in rows if row.published is not None}
    ]
    if medians:
        print(f"mean of {len(medians)} median ratios {statistics.mean(medians):.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
