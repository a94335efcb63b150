"""Colours: text is read on them, and readers who lack one kind of cone tell them apart."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

from autopar.report import pipeline_timetable, plot
from autopar.report.colours import CURVES, KINDS, PARTS, contrast, lighter, luminance, text_on
from autopar.report.pipeline_timetable import LIGHTEST

TEXT = 4.5
"""Contrast that WCAG 2.2 asks for between text and its ground (1.4.3)."""
GRAPHIC = 3.0
"""Contrast that it asks for of what is drawn (1.4.11)."""
APART = 15.0
"""Distance in CIE Lab (1976) from which neighbours are told apart at a glance; 2.3 is just noticeable."""
SIGHT = {
    "three cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red cone": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green cone": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue cone": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""Linear RGB as readers of each kind see it (Machado, Oliveira and Fernandes 2009, severity 1)."""


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """A colour in CIE Lab, as a reader of that sight sees it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0.0), 1.0) for row in SIGHT[sight])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("palette", [[colour for colour, _ in KINDS.values()], list(CURVES)], ids=["kinds", "curves"])
def test_no_two_colours_look_alike(palette: list[str], sight: str) -> None:
    for one, other in itertools.combinations(palette, 2):
        apart = sum((a - b) ** 2 for a, b in zip(seen(one, sight), seen(other, sight), strict=True)) ** 0.5
        assert apart >= APART, (one, other)


def test_text_on_a_bar_is_read() -> None:
    kinds = [colour for colour, _ in KINDS.values()]
    later = [lighter(colour, share / 8 * LIGHTEST) for colour in kinds for share in range(9)]
    assert all(contrast(text_on(colour), colour) >= TEXT for colour in [*kinds, *later, *PARTS])


def test_parts_become_lighter_from_first_to_last() -> None:
    steps = [luminance(colour) for colour in PARTS]
    assert steps == sorted(steps) and contrast(PARTS[0], PARTS[-1]) > 10


@pytest.mark.parametrize("dark", [False, True])
def test_words_are_read_on_the_page_in_light_and_dark(dark: bool) -> None:
    text = (files("autopar.report") / "page.css").read_text(encoding="utf-8")
    rules = re.findall(r"(--ink:[^}]*)\}", text)
    colours = dict(re.findall(r"--(\w+): (#\w+)", rules[dark]))
    full = {name: value if len(value) == 7 else "#" + "".join(2 * one for one in value[1:]) for name, value in colours.items()}
    for ground in ("paper", "soft"):
        for words in ("ink", "note", "limit", "link"):
            assert contrast(full[words], full[ground]) >= TEXT, (words, ground)
    assert min(contrast(full[name], full["paper"]) for name in ("bar", "quiet")) >= GRAPHIC


@pytest.mark.parametrize("style", [plot._STYLE, pipeline_timetable._DARK], ids=["plots", "timetables"])
def test_words_are_read_on_drawings_in_the_dark(style: str) -> None:
    dark = style.partition("prefers-color-scheme:dark")[2]
    paper = re.search(r"\.paper\{fill:(#\w{6})\}", dark)
    inks = re.findall(r"(?:text|timetable|\.note)\{fill:(#\w{6})\}", dark)
    assert paper is not None and len(inks) == 2 and min(contrast(ink, paper[1]) for ink in inks) >= TEXT
