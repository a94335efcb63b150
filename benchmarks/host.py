"""What does issuing a step cost the host, beside plain eager torch?

    python benchmarks/host.py [--only gpt2,moe] [--execute eager,graph] [--pairs 40] [--operators] [--json FILE]

Forward and backward of the zoo's models in training on a mesh of one, at sizes where operators compute next to nothing: what remains is
the process that issues them. One thread, on the CPU.

Host time: the plain model and each form of the compiled one step in turn, in an order that rotates. A step's time is the process's CPU
seconds. Given are medians, and the median over rounds of the ratio within a round, so that a slow moment hits both sides.

Kernels: the ATen calls of one step that are no views and do more than make memory, forward and backward. ``--operators`` lists those
whose number differs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import autopar
from autopar import zoo
from autopar.torch_compat import dispatch_mode

MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"batch": 1, "seq": 8, "layers": 4, "width": 16, "heads": 2, "vocab": 32},
    "llama3": {"batch": 1, "seq": 8, "layers": 4, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 32, "vocab": 32},
    "resnet": {"batch": 2, "image": 16, "width": 4, "blocks": "2-2", "classes": 4},
    "moe": {
        "batch": 1, "seq": 8, "layers": 4, "width": 16, "heads": 2, "hidden": 16, "experts": 4, "dispatch": "grouped", "vocab": 32,
    },
    "mlp": {"batch": 1, "inputs": 16, "width": 16, "layers": 4, "outputs": 16},
}  # fmt: skip
"""Sizes by model of the zoo. Batch norm needs a batch of two."""
FORMS = ("eager", "graph")
"""Ways to execute that are held against the plain model."""
PLAIN = "plain"
WARMUP = 5
"""Rounds that are not counted."""
ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that make memory and run nothing in it."""
NAMED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "unsafe_split", "unsafe_split_with_sizes"})
"""Operators that move nothing, whose schema does not say so."""


@dataclass(frozen=True)
class Row:
    """A model's step in one form.

    Args:
        seconds: median CPU seconds of forward and backward; ratio: to the plain model's, median over rounds.
        kernels: by operator, in one step.
    """

    model: str
    form: str
    seconds: float
    ratio: float
    kernels: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Kernels in one step."""
        return sum(self.kernels.values())


# --- kernels -----------------------------------------------------------------------------------------------------------


@contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    """Counts within it the calls of operators that run a kernel."""
    found: Counter[str] = Counter()

    class Counting(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "aten" and runs_kernel(func):
                found[str(func).removeprefix("aten.")] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield found


def runs_kernel(operator: Any) -> bool:
    """Whether an ATen operator does more than make a view, or memory."""
    name = operator.overloadpacket.__name__
    return not operator.is_view and name not in ALLOCATIONS and name not in NAMED_VIEWS


# --- steps -------------------------------------------------------------------------------------------------------------


def build_step(model: Any, args: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Forward and backward; gradients of the step before are gone."""
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        found = model(*args)
        (found if found.dim() == 0 else found.sum()).backward()

    return step


def build_steps(name: str, sizes: Mapping[str, Any], forms: Sequence[str]) -> dict[str, Callable[[], None]]:
    """The plain model's step, then that of each form, with equal weights."""
    torch.manual_seed(0)
    target = zoo.build(name, **sizes)
    plan = autopar.plan(target.model, target.args, mesh={"dp": 1}, hardware="h100-sxm", loss=target.loss, loss_args=target.loss_args)
    steps = {PLAIN: build_step(copy.deepcopy(target.model), target.args)}
    for form in forms:
        steps[form] = build_step(autopar.compile(copy.deepcopy(target.model), plan, execute=form), target.args)
    return steps


def measure_model(name: str, forms: Sequence[str], rounds: int) -> list[Row]:
    """The plain model's row, then that of each form."""
    steps = build_steps(name, MODELS[name], forms)
    seconds = measure_seconds(steps, rounds)
    return [
        Row(name, form, statistics.median(seconds[form]), compare_rounds(seconds[form], seconds[PLAIN]), count_kernels(step))
        for form, step in steps.items()
    ]


def count_kernels(step: Callable[[], None]) -> dict[str, int]:
    """Kernels of one step, by operator."""
    with counted_kernels() as found:
        step()
    return dict(sorted(found.items()))


def measure_seconds(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each step in each round."""
    names, seconds = list(steps), {name: list[float]() for name in steps}
    gc.collect()
    gc.freeze()
    for turn in range(WARMUP + rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            begin = time.process_time()
            steps[name]()
            end = time.process_time()
            if turn >= WARMUP:
                seconds[name].append(end - begin)
    gc.unfreeze()
    return seconds


def compare_rounds(own: Sequence[float], plain: Sequence[float]) -> float:
    """The median ratio of one form's seconds to another's, round by round."""
    return statistics.median(mine / its for mine, its in zip(own, plain, strict=True))


# --- the table ---------------------------------------------------------------------------------------------------------


def print_rows(rows: Sequence[Row], operators: bool) -> None:
    """One line for each form of each model."""
    print(f"{'model':8} {'form':8} {'host ms':>8} {'ratio':>6} {'kernels':>8} {'ratio':>6}")
    plain = {row.model: row for row in rows if row.form == PLAIN}
    for row in rows:
        base = plain[row.model]
        ratio = row.count / base.count
        print(f"{row.model:8} {row.form:8} {1e3 * row.seconds:8.2f} {row.ratio:6.2f} {row.count:8} {ratio:6.2f}")
        if operators and row is not base:
            for name in sorted({*row.kernels, *base.kernels}):
                own, its = row.kernels.get(name, 0), base.kernels.get(name, 0)
                if own != its:
                    print(f"    {name:48} {own:4} against {its:4}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="models, by comma")
    parser.add_argument("--execute", default=",".join(FORMS), help="ways to execute, by comma")
    parser.add_argument("--pairs", type=int, default=40, help="rounds that are counted")
    parser.add_argument("--operators", action="store_true", help="list the operators whose number differs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    names, forms = ([name.strip() for name in text.split(",")] for text in (given.only, given.execute))
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    rows = [row for name in names for row in measure_model(name, forms, given.pairs)]
    print_rows(rows, given.operators)
    if given.json:
        data = {"pairs": given.pairs, "rows": [{**asdict(row), "count": row.count} for row in rows]}
        given.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
