"""Words of a rule that a function writes for one call."""

from __future__ import annotations

import string
from collections.abc import Sequence


def letters(count: int) -> list[str]:
    """Names for ``count`` factors: a, b, c ..."""
    found = string.ascii_letters
    return list(found[:count]) if count <= len(found) else [f"d{index}" for index in range(count)]


def term(words: Sequence[str]) -> str:
    """One tensor of a rule from the words of its dims."""
    return " ".join(words) if words else "()"


def write(inputs: Sequence[Sequence[str]], outputs: Sequence[Sequence[str]], clause: str = "") -> str:
    """A rule from the words of its tensors.

    >>> write([["m", "k"], ["k"]], [["m"]], "linear {0} {1}")
    'm k, k -> m | linear {0} {1}'
    """
    return f"{', '.join(map(term, inputs))} -> {', '.join(map(term, outputs))}" + (f" | {clause}" if clause else "")
