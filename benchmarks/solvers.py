"""How good and how fast are solvers' answers, and what does each part of a solver buy? One row for each instance.

    python benchmarks/solvers.py FOLDER [A B ...] [--share 0.5] [--seeds 1] [--json FILE]
    python benchmarks/solvers.py --layered 8x40x30 32x60x35 [--time-limit 120]
    python benchmarks/solvers.py --planned zoo:gpt2@dp=2,tp=4 --keep FOLDER
    python benchmarks/solvers.py FOLDER K U --work 15 --without dominance momentum=0 dominance+momentum=0

FOLDER holds ``*-X.json`` or ``*-X.json.gz``. ``--planned`` writes the three largest integer programs of a search there.
Each run is a process of its own: seconds count from its start, and the peak memory is its own.
The time limit of a known instance is the contest's times ``--share``; the work is ``--cores`` times as much, or ``--work``.
``--without`` solves each instance again without a part (``autopar.solvers.settings.PARTS``) or with another number, and prints the change.
What changes cost and bound by less than 0.3 % on every instance is to go.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

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
    without: str
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


def measure(source: str, time_limit: float, seed: int, method: str, gap: float, work: float, without: str, began: float) -> Row:
    """Solve one instance in this process; the file is read here, and judged by the evaluator once more."""
    from autopar import solvers
    from autopar.solvers.settings import SETTINGS
    from tests.solvers.layered import layered

    for part in without.split("+") if without else ():
        name, changed, value = part.partition("=")
        new = type(getattr(SETTINGS, name))(float(value)) if changed else SETTINGS.skip | {name}
        object.__setattr__(SETTINGS, name if changed else "skip", new)
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
        without,
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


def save_planned(target: str, folder: Path, count: int = 3) -> None:
    """Write the largest integer programs of a search, ``zoo:gpt2@dp=2,tp=4@40GiB``, as problem files."""
    import autopar
    from autopar import solvers

    name, mesh, *memory = target.split("@")
    seen: dict[tuple[object, ...], solvers.Problem] = {}
    solve = solvers.solve

    def noted(problem: solvers.Problem, **options: object) -> solvers.Solution:
        seen.setdefault((problem.num_nodes, len(problem.edge_costs), problem.limit is None), problem)
        return solve(problem, **options)

    solvers.solve = noted
    from autopar.cli.target import load_target

    found = load_target(name, "train", device="meta", given={})
    autopar.plan(
        found.model, found.args, found.kwargs, loss=found.loss, loss_args=found.loss_args, mesh=mesh, hardware="h100-sxm",
        memory=memory[0] if memory else None, effort="low",
    )  # fmt: skip
    largest = sorted(seen.values(), key=lambda problem: -len(problem.edge_costs))[:count]
    for place, problem in enumerate(largest):
        safe = "".join(c if c.isalnum() else "_" for c in target)
        problem.save(folder / f"{safe}_{place}.json.gz")


def _text(row: Row, whole: Row) -> str:
    if row is not whole:
        cost = row.cost / whole.cost - 1 if row.cost and whole.cost else float("nan")
        bound = row.bound / whole.bound - 1 if whole.bound else 0.0
        return (
            f"{row.instance:>10} {row.seed:>4} without {row.without:40} cost {100 * cost:+8.3f} %  bound {100 * bound:+8.3f} %  "
            f"CPU {row.cpu - whole.cpu:+6.1f} s {row.status}"
        )
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
    options.add_argument("--planned", nargs="+", default=[], metavar="TARGET@MESH[@MEMORY]")
    options.add_argument("--keep", type=Path, default=Path("."), help="where --planned writes")
    options.add_argument("--time-limit", type=float, help="seconds; default: the contest's limit times --share, 120 where unknown")
    options.add_argument("--share", type=float, default=0.5)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--gap", type=float, default=1e-6)
    options.add_argument("--method", default="auto")
    options.add_argument("--cores", type=float, default=1.0, help="work, as a multiple of the time limit")
    options.add_argument("--work", type=float, help="units of work; default: by --cores")
    options.add_argument("--without", nargs="+", default=[], metavar="PART|NAME=VALUE", help="joined by + where both are meant")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    from autopar.solvers.settings import PARTS, SETTINGS

    known = {field.name for field in fields(SETTINGS)}
    for part in [part for without in chosen.without for part in without.split("+")]:
        name, changed, _ = part.partition("=")
        if name not in (known if changed else PARTS):
            options.error(f"--without {part}: use one of {', '.join(PARTS)}, or NAME=VALUE of solvers/settings.py")
    for target in chosen.planned:
        save_planned(target, chosen.keep)
    files = sorted(str(path) for path in chosen.folder.glob("*.json*")) if chosen.folder else []
    sources = [path for path in files if not chosen.instances or _letter(path) in chosen.instances] + chosen.layered
    if not sources and not chosen.planned:
        print("error: no instance to solve\nhint: give a folder with problem files, or --layered 8x40x30", file=sys.stderr)
        return 2
    head = ("instance", "seed", "cost", "published", "ratio", "bound", "gap %", "status", "seconds", "cpu", "work", "cut", "MiB")
    print("{:>10} {:>4} {:>16} {:>16} {:>8} {:>18} {:>8} {:>10} {:>8} {:>8} {:>7} {:>5} {:>6}".format(*head))
    rows = []
    for source in sources:
        limit = chosen.time_limit or PUBLISHED.get(_letter(source), (120 / chosen.share, None))[0] * chosen.share
        work = chosen.cores * limit if chosen.work is None else chosen.work
        for seed in range(chosen.seeds):
            whole = len(rows)
            for without in ("", *chosen.without):
                rows.append(_in_own_process(source, limit, seed, chosen.method, chosen.gap, work, without))
                print(_text(rows[-1], rows[whole]), flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    medians = [
        statistics.median(row.ratio or float("inf") for row in rows if row.instance == name and not row.without)
        for name in {row.instance for row in rows if row.published is not None}
    ]
    if medians:
        print(f"mean of {len(medians)} median ratios {statistics.mean(medians):.5f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
