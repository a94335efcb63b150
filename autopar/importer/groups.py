"""Equal layers: runs of repeats that compute the same, found by module path and proved equal by their operators."""

from __future__ import annotations

from autopar.graph import Graph


def find_groups(graph: Graph) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return ()
