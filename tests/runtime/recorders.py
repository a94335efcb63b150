"""A recorder for CPUs: it keeps the function, and a replay runs it again into the memory of the first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from autopar.dialect.dropout import prepared_draws
from autopar.runtime.execution.cuda_graphs import find_recorder
from autopar.runtime.ranks.collectives import Values


class RunAgain:
    """As ``cuda_graphs.GraphRecorder``: a replay takes no tensor and gives none."""

    made = 0
    """Recorders made since the last ``on_cpus``."""

    def __init__(self) -> None:
        RunAgain.made += 1

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], Values], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], Values]:
        found = run()

        @torch.no_grad()
        def replay() -> None:
            left = iter(generators)
            with prepared_draws(lambda device, seed: next(left)):
                made = run()
            for name, value in made.items():
                if value is not found[name]:
                    found[name].copy_(value)

        return replay, found


@contextmanager
def on_cpus() -> Iterator[None]:
    """Within it ``execute="cuda_graph"`` compiles and runs on CPUs too."""
    RunAgain.made = 0
    where = "autopar.runtime.module.compiling.find_recorder"
    with patch(where, lambda device: RunAgain if device.type == "cpu" else find_recorder(device)):
        yield
