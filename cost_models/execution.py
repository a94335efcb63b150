"""The ways in which a program runs, by which a host takes more or less time to issue its kernels."""

from __future__ import annotations

from typing import Literal

Execution = Literal["eager", "graph", "compiled", "cuda_graph"]
EXECUTIONS: tuple[Execution, ...] = ("eager", "graph", "compiled", "cuda_graph")
