"""Ranks as processes of this machine: forked, one thread each, joined over loopback by a file store.

Forking from a parent that has imported torch starts eight ranks in under a second; spawning would import torch once a rank.
When a rank dies or fails, the others are stopped and the error says which rank it was and why. No rank outlives the call.
"""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, UsageError, VerificationError

MOST_RANKS = 128
"""Processes on one machine, at most: more than any machine has devices, fewer than would exhaust it."""
STOOD_STILL = "stopped by SIGSTOP and not resumed"
"""Failure of a rank that a signal has stopped."""
STOPPED = "Tt"
"""Process states of a stopped process."""
DID_NOTHING = "it did nothing any more"
"""Failure of a rank that takes no processor time: it waits for a lock or a thread that only its parent has."""
BUSY = "RD"
"""Thread states of one that runs, waits for a processor, or waits for a disk."""
SHARE_OF_WAKING = 0.25
"""Share of looks that find a thread busy which has nothing to do, at most. gloo's wake a hundred times a second for 30 us: they are found
busy in one look of a hundred, on a full machine in more. One that computes is found so in all, however little it gets of a processor."""
GRACE_SECONDS = 1.0
"""After a first failure, how long to wait for the others': the cause often comes a moment after its consequences."""
TERMINATE_SECONDS, KILL_SECONDS = 2.0, 120.0
"""How long to wait for ranks to end by SIGTERM, and then by SIGKILL. A killed process needs a processor to end: one of idle priority on a
full core took 13 s."""
LOOK_SECONDS = 0.5
"""Seconds between two looks at a silent rank."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""


@dataclass(frozen=True)
class Failure:
    """How a rank ended without a result."""

    rank: int
    reason: str
    consequence: bool = False
    error: AutoparError | None = None
    trace: str = ""


@dataclass
class Quiet:
    """How long a rank's main thread has done nothing, and what its other threads did meanwhile."""

    since: float
    spent: str
    looks: int = 0
    busy: int = 0


def run_ranks(
    function: Callable[[int], Any], ranks: int, *, timeout: float = 300.0, alone: bool = False, name: str = "the single-device run"
) -> list[Any]:
    """Runs ``function(rank)`` in ``ranks`` forked processes with a gloo process group, and gives their results.

    Args:
        function: may close over anything, since processes are forked; its result must pickle.
        timeout: seconds that a rank waits in a collective for the others, and that a rank may stand still; twice as many it may do
            nothing: its main thread takes no processor time and waits for none, and its others compute nothing.
        alone: without a process group: work that is to leave no trace in this process.
        name: of such work, in errors.

    Raises:
        VerificationError: a rank died or raised; the others have been stopped. An AutoparError raised in a rank is raised again.
        UsageError: more ranks than one machine is asked to hold.
    """
    if ranks > MOST_RANKS:
        raise UsageError(
            f"{ranks} ranks are {ranks} processes on this machine, where at most {MOST_RANKS} are started",
            "take fewer; verify --backend simulate has all ranks in one process, profile runs under torchrun on a cluster",
        )
    if not alone:
        import torch.distributed.checkpoint  # noqa: F401  once here: each rank that compiles a module would import it for itself
    context = multiprocessing.get_context("fork")
    with _meeting_place() as store:
        processes: list[BaseProcess] = []
        readers: list[Connection] = []
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for rank in range(ranks):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(function, rank, ranks, None if alone else store, writer, timeout, os.getpid()),
                    daemon=True,
                )
                with warnings.catch_warnings():
                    # Newer Pythons warn of any fork while threads run; these children use no lock of the parent's and end by _exit.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                writer.close()
                processes.append(process)
                readers.append(reader)
            return _collect(processes, readers, name if alone else "", timeout)
        finally:
            _stop(processes)
            for reader in readers:
                reader.close()


@contextmanager
def _meeting_place() -> Iterator[Path]:
    """A file that the ranks find one another by. On Linux it has no name, so that nothing is left of it however this process ends."""
    if sys.platform == "linux":
        file = os.memfd_create("autopar-ranks")
        try:
            yield Path(f"/proc/self/fd/{file}")  # the ranks are forked, so that the number means the same file to them
        finally:
            os.close(file)
    else:
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            yield Path(folder) / "store"


def _rank_main(
    function: Callable[[int], Any], rank: int, ranks: int, store: Path | None, writer: Connection, timeout: float, parent: int
) -> None:  # fmt: skip
    _die_with(parent)
    gc.freeze()  # else garbage of the parent's with a process group in it is collected here, and waits for threads that are not
    _keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    if store is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    status = 0
    try:
        if store is not None:
            rendezvous = dist.FileStore(str(store), ranks)
            dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
        message: tuple[str, Any] = ("done", function(rank))
        if store is not None:
            dist.barrier()
    except AutoparError as error:
        message = ("refused", (type(error), error.message, error.hint))
    except BaseException as error:
        # Whatever it is, the parent must hear of it: this is the process's top.
        lines = traceback.format_exception(error)
        message = ("failed", (type(error).__name__, str(error), "".join(lines), is_consequence(error)))
        status = 1
    try:
        writer.send_bytes(_written(message))
        writer.close()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _die_with(parent: int) -> None:
    """On Linux, the kernel ends this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _keep_freed_memory() -> None:
    """On glibc, memory that tensors of up to 32 MiB leave behind stays with the process for the next ones.

    By default each step asks the system for large tensors again and pays for every page's first touch: a third of the processor time of
    a step on CPUs. The same as ``MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=-1`` in the environment of one's own ranks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 2**25)
        mallopt(M_TRIM_THRESHOLD, -1)


def is_consequence(error: BaseException) -> bool:
    """Whether the error says that another rank is gone, rather than that this one failed."""
    text = str(error).lower()
    words = ("gloo", "connection", "peer", "timed out", "another rank is gone")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(word in text for word in words)


def _collect(processes: Sequence[BaseProcess], readers: Sequence[Connection], name: str, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    deadline: float | None = None
    pending = dict(enumerate(readers))
    standing: dict[int, float] = {}
    quiets: dict[int, Quiet] = {}
    while pending:
        now = time.monotonic()
        ready = wait(list(pending.values()), LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, max(0.0, deadline - now)))
        for rank in [rank for rank, reader in pending.items() if reader in ready]:
            outcome = _receive(rank, pending.pop(rank), processes[rank])
            if isinstance(outcome, Failure):
                failures.append(outcome)
                deadline = deadline or time.monotonic() + GRACE_SECONDS
            else:
                results[rank] = outcome[0]
        standing = {rank: standing.get(rank, now) for rank in pending if _look(processes[rank], now, rank, quiets) in STOPPED}
        still = [rank for rank in pending if rank not in standing and _does_nothing(quiets[rank], now - 2 * timeout)]
        over = deadline is not None and time.monotonic() >= deadline
        if over or still or any(now - since > timeout for since in standing.values()):
            failures += [Failure(rank, STOOD_STILL) for rank in standing] + [Failure(rank, DID_NOTHING) for rank in still]
            break
    if failures:
        raise _explain(failures, len(processes), name)
    return [results[rank] for rank in range(len(processes))]


def _look(process: BaseProcess, now: float, rank: int, quiets: dict[int, Quiet]) -> str:
    """The state of a rank's main thread, one letter; counts the look in ``quiets``, from the start where it has done something.

    Doing something is to be busy, or to have had processor time since the last look, itself or in processes that it waited for. What the
    system does not tell counts so too.
    """
    folder, main = Path(f"/proc/{process.pid}/task"), str(process.pid)
    try:
        lines = {thread: (folder / thread / "stat").read_text() for thread in os.listdir(folder)}
    except OSError:  # not Linux; or the process has ended, or one of its threads just now
        quiets[rank] = Quiet(now, "")
        return "?"
    fields = {thread: line.rpartition(")")[2].split() for thread, line in lines.items()}
    state, spent = fields[main][0], " ".join(fields[main][11:15])
    if rank not in quiets or state in BUSY or quiets[rank].spent != spent:
        quiets[rank] = Quiet(now, spent)
    else:
        quiets[rank].looks += 1
        quiets[rank].busy += any(others[0] in BUSY for others in fields.values())
    return state


def _does_nothing(quiet: Quiet, before: float) -> bool:
    return quiet.since < before and quiet.busy <= SHARE_OF_WAKING * quiet.looks


def _written(message: Any) -> bytes:
    """As torch writes files: tensors of some dtypes (``uint16``) do not come through pickle alone."""
    buffer = io.BytesIO()
    torch.save(message, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _receive(rank: int, reader: Connection, process: BaseProcess) -> Failure | tuple[Any]:
    """A result in a tuple, or a failure."""
    try:
        kind, content = torch.load(io.BytesIO(reader.recv_bytes()), weights_only=False)
    except (EOFError, OSError):
        process.join(GRACE_SECONDS)
        return Failure(rank, f"it {describe_exit(process.exitcode)}")
    if kind == "done":
        return (content,)
    if kind == "refused":
        cls, message, hint = content
        return Failure(rank, message, error=cls(message, hint))
    name, text, trace, consequence = content
    return Failure(rank, f"{name}: {text.strip().splitlines()[0] if text.strip() else 'no message'}", consequence, trace=trace)


def describe_exit(code: int | None) -> str:
    """A process's end in words.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with status 3')
    """
    if code is None:
        return "closed its pipe"
    if code < 0:
        names: Mapping[int, str] = {item.value: item.name for item in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"exited with status {code}"


def _explain(failures: Sequence[Failure], ranks: int, name: str) -> AutoparError:
    causes = [item for item in failures if not item.consequence] or list(failures)
    first = min(causes, key=lambda item: (item.error is not None, item.rank))
    if first.error is not None:
        return first.error
    if first.trace and not first.consequence:
        sys.stderr.write(f"{name or f'rank {first.rank}'}:\n{first.trace}")
    others = "" if ranks == 1 else "; the other was stopped" if ranks == 2 else f"; the other {ranks - 1} were stopped"
    hint = "run it again" if first.reason in (STOOD_STILL, DID_NOTHING) else "run it again; if it was killed, the machine may lack memory"
    return VerificationError(f"{name or f'rank {first.rank} of {ranks}'} died: {first.reason}{others}", hint)


def _stop(processes: Sequence[BaseProcess]) -> None:
    for end, seconds in ((BaseProcess.terminate, TERMINATE_SECONDS), (BaseProcess.kill, KILL_SECONDS)):
        for process in processes:
            if process.is_alive():
                end(process)
        limit = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, limit - time.monotonic()))
