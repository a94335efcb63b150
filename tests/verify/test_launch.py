"""Ranks as processes: results come back in order; a rank that dies or raises is named, the others are stopped, none is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import UsageError, VerificationError
from autopar.verify.launch import run_ranks


def children() -> set[int]:
    """Living child processes of this one."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return {int(word) for word in file.read().split()}


@pytest.fixture(autouse=True)
def no_process_is_left() -> None:
    before = children()
    yield
    assert children() == before


def wait_for_others(rank: int) -> int:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total)


def test_results_come_in_order_of_rank() -> None:
    assert run_ranks(lambda rank: (rank, wait_for_others(rank)), 3) == [(0, 3), (1, 3), (2, 3)]


def test_alone_has_no_process_group() -> None:
    assert run_ranks(lambda rank: dist.is_initialized(), 1, alone=True) == [False]
    with pytest.raises(VerificationError, match="the single-device run died: it exited with status 4"):
        run_ranks(lambda rank: os._exit(4), 1, alone=True)
    with pytest.raises(VerificationError, match="the other run died: it exited with status 4"):
        run_ranks(lambda rank: os._exit(4), 1, alone=True, name="the other run")


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_killed_is_named(late: bool) -> None:
    def rank_main(rank: int) -> int:
        if late:
            wait_for_others(rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return wait_for_others(rank)

    with pytest.raises(VerificationError, match="rank 1 of 3 died: it was killed by SIGKILL; the other 2 were stopped") as caught:
        run_ranks(rank_main, 3)
    assert caught.value.exit_status == 1


def test_a_rank_that_leaves_is_named() -> None:
    with pytest.raises(VerificationError, match="rank 2 of 3 died: it exited with status 5"):
        run_ranks(lambda rank: os._exit(5) if rank == 2 else wait_for_others(rank), 3)


def test_a_rank_that_raises_is_named_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    def rank_main(rank: int) -> int:
        if rank == 0:
            raise ZeroDivisionError("no such thing")
        return wait_for_others(rank)

    with pytest.raises(VerificationError, match="rank 0 of 2 died: ZeroDivisionError: no such thing"):
        run_ranks(rank_main, 2)
    assert "ZeroDivisionError" in capfd.readouterr().err, "the trace is shown"


def test_an_error_of_all_ranks_is_shown_once_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    def rank_main(rank: int) -> int:
        raise ZeroDivisionError("no such thing")

    with pytest.raises(VerificationError, match="rank 0 of 3 died: ZeroDivisionError: no such thing"):
        run_ranks(rank_main, 3)
    shown = capfd.readouterr().err
    assert shown.startswith("rank 0:\nTraceback") and shown.count("ZeroDivisionError: no such thing") == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_is_stopped_ends_the_run_by_name(alone: bool) -> None:
    """The others are done: nobody waits for it in a collective."""
    ranks = 1 if alone else 2

    def rank_main(rank: int) -> None:
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    name = "the single-device run" if alone else "rank 1 of 2"
    with pytest.raises(VerificationError, match=f"{name} died: stopped by SIGSTOP and not resumed"):
        run_ranks(rank_main, ranks, timeout=1.0, alone=alone)


def test_ranks_do_not_clear_away_process_groups_of_their_parent() -> None:
    """The threads that its end waits for are not there, and those that ranks start themselves may come to have their names."""
    assert not dist.is_initialized()
    gc.collect()
    gc.disable()
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        round_and_round: list[Any] = [dist.group.WORLD]
        round_and_round.append(round_and_round)
        del round_and_round
        dist.destroy_process_group()
        assert run_ranks(lambda rank: gc.collect() >= 0, 2, timeout=5.0) == [True, True]
    finally:
        gc.enable()


def test_a_process_that_does_nothing_ends_the_run_by_name() -> None:
    """As one that was forked while a thread of its parent held a lock."""
    held = threading.Lock()
    held.acquire()
    with pytest.raises(VerificationError, match="the single-device run died: it did nothing any more\nhint: run it again"):
        run_ranks(lambda rank: held.acquire(), 1, timeout=0.5, alone=True)


def test_a_rank_that_does_nothing_beside_gloos_threads_ends_the_run_by_name() -> None:
    """They wake a hundred times a second, and for each message of another rank, also when the rank waits for ever."""
    held = threading.Lock()
    held.acquire()

    def rank_main(rank: int) -> None:
        wait_for_others(rank)
        signal.alarm(60)  # ends the rank where it does not count as idle
        if rank == 0:
            held.acquire()
        messages = []
        while True:
            messages.append(dist.isend(torch.zeros(1), 0))
            time.sleep(0.01)  # more often than that, a full machine has the thread wait for a processor at most looks

    with pytest.raises(VerificationError, match="rank 0 of 2 died: it did nothing any more; the other was stopped\nhint: run it again"):
        run_ranks(rank_main, 2, timeout=1.0)


def test_a_rank_whose_thread_computes_is_waited_for() -> None:
    def rank_main(rank: int) -> bool:
        worker = threading.Thread(target=spin, args=(3.0,))
        worker.start()
        worker.join()
        return True

    assert run_ranks(rank_main, 1, timeout=0.5) == [True]


def test_a_rank_that_waits_for_a_processor_is_waited_for() -> None:
    """As on a machine with more ranks than cores: one gets its core only now and then."""
    core = min(os.sched_getaffinity(0))

    def rank_main(rank: int) -> bool:
        os.sched_setaffinity(0, {core})
        if rank == 1:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        spin(4.0)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # else its end takes long on a full core
        return True

    assert run_ranks(rank_main, 2, timeout=0.5, alone=True) == [True, True]


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    """Neither a folder nor a rank, when it is killed while ranks run."""
    script = """
import os, sys, signal
from autopar.verify.launch import run_ranks
def rank_main(rank):
    open(os.path.join(sys.argv[1], f"rank-{os.getpid()}"), "w").close()
    signal.pause()
run_ranks(rank_main, 2)
"""
    marks, temporary = tmp_path / "marks", tmp_path / "temporary"
    marks.mkdir()
    temporary.mkdir()
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(root)}
    parent = subprocess.Popen([sys.executable, "-c", script, str(marks)], env=environment)
    while len(list(marks.iterdir())) < 2 and parent.poll() is None:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    ranks = [int(path.name.removeprefix("rank-")) for path in marks.iterdir()]
    assert len(ranks) == 2 and list(temporary.iterdir()) == []
    while any(_alive(rank) for rank in ranks):
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_error_for_users_stays_one() -> None:
    def rank_main(rank: int) -> None:
        raise UsageError("a wrong thing", "do the right thing")

    with pytest.raises(UsageError, match="a wrong thing\nhint: do the right thing"):
        run_ranks(rank_main, 2)


def test_a_rank_that_never_comes_is_a_timeout_of_the_others() -> None:
    def rank_main(rank: int) -> int:
        if rank == 1:
            signal.pause()
        return wait_for_others(rank)

    with pytest.raises(VerificationError, match=r"rank 0 of 2 died: .*[Tt]imed out"):
        run_ranks(rank_main, 2, timeout=3.0)
