"""Processes that end while a backend's threads have tensors of theirs, and the tensors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.cost_models import Mesh
from autopar.runtime.module.compiling import start_process_group
from autopar.runtime.ranks import lent_buffers
from autopar.runtime.ranks.lent_buffers import Sent, lend, pause_at_end

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time, torch
import torch.distributed as dist
from pathlib import Path
from autopar.runtime.ranks.backends import Exchange, ProcessRanks
from autopar.cost_models import Mesh

class Last:
    def __del__(self, ends=Path("ends"), sleep=time.sleep):  # while Python ends, after what it does at its exit
        ends.touch()
        sleep(1.0)

torch.set_num_threads(1)
rank, mesh = int(sys.argv[1]), Mesh((("dp", 2),))
dist.init_process_group("gloo", init_method=f"file://{Path('store').resolve()}", rank=rank, world_size=2)
backend, exchange = ProcessRanks(mesh, [(mesh.whole(0),)]), Exchange("all_reduce", (mesh.whole(0),))
dist.barrier()
if rank == 0:  # is late
    until = time.monotonic() + 2.0
    while not Path("ends").exists() and time.monotonic() < until:
        time.sleep(0.01)
    backend.start(exchange, [torch.ones(8)])()
else:  # does not look at what comes
    last, sent = Last(), backend.start(exchange, [torch.ones(8)])
"""


def test_python_ends_only_when_no_thread_has_tensors_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank)], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told


def test_a_process_that_compiles_pauses_at_its_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[object, ...]]()
    monkeypatch.setattr(lent_buffers.atexit, "register", lambda *call: asked.append(call))
    pause_at_end.cache_clear()
    for _ in range(2):
        start_process_group(Mesh((("dp", 1),)))
    dist.destroy_process_group()
    assert asked == [(time.sleep, lent_buffers.PAUSE_SECONDS)]


class Done:
    """A work that is over; ``held`` is what its thread has."""

    def __init__(self, held: object) -> None:
        self.held = held

    def wait(self) -> None:
        pass


def test_what_is_lent_is_kept_without_its_memory_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_buffers, "_LENT", kept := lent_buffers.deque())
    found, works = torch.ones(4), []
    for _ in range(3):
        lent = lend(found)
        works.append(Done(lent))
        sent = Sent(works[-1], found, (lent,))
        del lent
        assert sent()[0] is found and sent()[0] is found
    assert [tensor.numel() for tensor in kept] == [0, 0, 0] and torch.equal(found, torch.ones(4))
    assert not lent_buffers._is_back(0)
    works[0].held = works[2].held = None
    assert [lent_buffers._is_back(place) for place in range(3)] == [True, False, True]
    Sent(Done(None), found, ())
    assert len(kept) == 2, "one behind another that is not back stays"
    works[1].held = None
    Sent(Done(None), found, ())
    assert not kept
