"""One thread a process, so that tests beside each other do not fight for two cores; and where the acceptance scripts are."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings

from tests.work import part_of_work

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank that compiles starts processes, which import torch

settings.register_profile("autopar", deadline=None)  # the first example pays for compiling and caches
settings.load_profile("autopar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what tests compare with anew instead of comparing")


SMOKE = (
    "cost_models/test_cost_models.py", "rules/test_facts.py", "runtime/test_code.py", "schedule/test_legality.py",
    "search/test_known_answers.py", "test_demo.py", "test_plan.py", "verify/test_launch.py",
)  # fmt: skip
"""Files that ``-m smoke`` runs, but for their slow tests: a plan, its search, its file, and ranks that train by it."""


COLLECTED = (10_000, 10, 10)
"""Thresholds of garbage collections while tests run. Python's own, 700 new objects, took 7 % of the time of simulated ranks."""


def pytest_configure() -> None:
    gc.disable()  # what is imported stays: looking through it again and again takes a fifth of the time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix() in SMOKE and item.get_closest_marker("slow") is None:
            item.add_marker("smoke")


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A test that leaves its process group fails itself, not those that run after it in the same process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test leaves a process group behind")


PART_OF_WORK = 0.05
"""Part of a search's work for a test that needs a plan, but not how good it is: plans are found early, proofs take most of the work."""
SHORT_SEARCHES = {
    **dict.fromkeys((
        "cli", "importer", "integrations", "padded", "report", "serving", "test_api.py", "test_context_parallel.py", "test_losses.py",
        "test_microbatches.py", "test_old_plans.py", "test_placements.py", "test_plan.py", "test_recurrence.py", "test_similarities.py",
        "tuning",
    ), PART_OF_WORK),
    "pipeline": 0.25, "runtime": 0.02, "verify": 0.02,
}  # fmt: skip
"""Folders and files of such tests, and the part. Stages of a pipeline share the work of one search; other searches have all of it."""


@pytest.fixture(autouse=True, scope="module")
def _short_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    place = request.path.relative_to(Path(__file__).parent).parts[0]
    with part_of_work(SHORT_SEARCHES[place]) if place in SHORT_SEARCHES else nullcontext():
        yield


@pytest.fixture
def short_search() -> Iterator[None]:
    """For a test elsewhere that needs plans, but not how good they are."""
    with part_of_work(PART_OF_WORK):
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """For a test that compiles in this process, which starts a group of it alone."""
    import torch.distributed as distributed

    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of acceptance scripts: ``AUTOPAR_SHARED``, or ``../shared`` beside the checkout. It may be absent."""
    place = Path(os.environ.get("AUTOPAR_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not (place / "acceptance").is_dir():
        pytest.skip(f"no acceptance scripts at {place}: they are kept outside this repository (set AUTOPAR_SHARED)")
    return place


@pytest.fixture(scope="session")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file of two layers on dp=2,tp=2 with collectives in it; do not change it in place."""
    from tests.graphs import two_layer_plan

    path = tmp_path_factory.mktemp("plan") / "plan.json"
    two_layer_plan().save(path)
    return path
