"""What a user may give as a seed: what generators of numbers and solvers take alike."""

from __future__ import annotations

from autopar.errors import UsageError

SEEDS = 2**31
"""So many there are."""


def check_seed(seed: int) -> int:
    """The seed. Raises UsageError: no whole number, or one out of range."""
    if not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise UsageError(f"the seed is {str(seed)[:40]}", f"give a whole number from 0 to {SEEDS - 1}")
    return seed
