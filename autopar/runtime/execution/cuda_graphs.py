"""CUDA graphs: the host issues a whole segment in one call.

The recorder of ``replaying`` on a GPU, by torch's public interface. Everything that a recording allocates lies in one pool of memory, which
goes with the recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.errors import UsageError
from autopar.runtime.execution.replaying import Recorder
from autopar.runtime.ranks.collectives import Values

WARM_UPS = 3
"""Runs before the first recording, as many as ``torch.cuda.make_graphed_callables`` makes: NCCL's communicators and cuBLAS's workspaces
cannot be set up while a graph is captured."""


class GraphRecorder:
    """Captures CUDA graphs that share a pool of memory. They are replayed in the order in which they were captured.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool, self.stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], None]) -> None:
        """As ``Recorder.warm_up``, on the stream that is captured."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self.stream)

    def record(self, run: Callable[[], Values], generators: Sequence[torch.Generator]) -> tuple[Callable[[], None], Values]:
        """As ``Recorder.record``. Raises RuntimeError: the function waits for the device, or does what a graph cannot hold."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        # Only this thread is held to what a capture allows: NCCL's watchdog asks for events in a thread of its own.
        capture = torch.cuda.graph(graph, self.pool, self.stream, "thread_local")
        # A capture that fails would leave its own stream behind as the current one.
        with torch.cuda.stream(torch.cuda.current_stream(self.device)), capture:
            found = run()
        return graph.replay, found


def find_recorder(device: torch.device) -> Callable[[], Recorder]:
    """What makes recorders for a device. Raises UsageError: it is no GPU of CUDA."""
    if device.type != "cuda":
        hint = "compile it on a GPU, or pass execute='compiled', 'graph' or 'eager'"
        raise UsageError(f"the program is to run as CUDA graphs, and this rank computes on {device}", hint)
    return lambda: GraphRecorder(device)
