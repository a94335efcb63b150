"""Colours of drawings: the palette of Okabe and Ito by what holds a stream, cividis for parts. Colour-blind readers tell each apart."""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, tuple[str, str]] = {
    "forward": ("#0072b2", "forward"), "backward": ("#cc79a7", "backward"), "recompute": ("#56b4e9", "recomputed"),
    "moving": ("#e69f00", "collective or copy"), "stalled": ("#d55e00", "operators wait"), "optimizer": ("#009e73", "optimizer"),
    "weights": ("#f0e442", "weight gradients"),
}  # fmt: skip
"""Kind of a bar to its colour and its name."""
PARTS = ("#00224e", "#233e6c", "#575d6d", "#7c7b78", "#a59c74", "#d3c064", "#fee838")
"""Colours from the first part of a tensor to the last: cividis, whose lightness rises evenly."""
CURVES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours of the curves of one drawing, in turn."""
BLACK, WHITE = "#000000", "#ffffff"


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` as WCAG has it, from 0 to 1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours as WCAG has it, from 1 to 21.

    >>> round(contrast("#ffffff", "#000000"))
    21
    """
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def text_on(colour: str) -> str:
    """Black or white, whichever is read better on ``colour``."""
    return max((BLACK, WHITE), key=lambda ink: contrast(ink, colour))


def lighter(colour: str, share: float) -> str:
    """A colour with a share of white in it.

    >>> lighter("#000080", 0.5)
    '#8080c0'
    """
    return "#" + "".join(f"{round(255 * share + int(colour[place : place + 2], 16) * (1 - share)):02x}" for place in (1, 3, 5))
