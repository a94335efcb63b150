"""Colours of drawings, by what holds a stream: the palette of Okabe and Ito, which colour-blind readers tell apart."""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, tuple[str, str]] = {
    "forward": ("#0072b2", "forward"), "backward": ("#7b5aa6", "backward"), "recompute": ("#56b4e9", "recomputed"),
    "moving": ("#e69f00", "collective"), "stalled": ("#d55e00", "operators wait"), "optimizer": ("#009e73", "optimizer"),
}  # fmt: skip
"""Kind of a bar to its colour and its name. Backward is a violet between blue and their reddish purple, which white text needs."""
