"""A plot as SVG, in light and dark: a title, two axes with their ticks, curves, points and a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from autopar.report.colours import CURVES

LEAST = 1.25
"""An axis of powers goes over such a factor at least."""
LEFT, RIGHT, TOP, FOOT, LINE = 92, 24, 30, 46, 16
"""Pixels: margins of the area that is drawn in, and of a line of text."""
LETTER = 6.6
"""Pixels of a letter, on average."""
DASHES = ("", "7 4", "2 3")
"""Strokes of curves, in turn where the colours are used up."""
_STYLE = (
    "<style>.plot{font-family:system-ui,sans-serif;font-size:12px}.plot .paper{fill:#fff}.plot text{fill:#1c1c1c}"
    ".plot .note{fill:#5a5a5a}.plot .grid{stroke:#ddd}.plot .frame{stroke:#777;fill:none}.plot .quiet{stroke:#5a5a5a;fill:none}"
    ".plot .point{fill:#5a5a5a}@media (prefers-color-scheme:dark){.plot .paper{fill:#16181c}.plot text{fill:#e6e6e6}"
    ".plot .note{fill:#a8adb5}.plot .grid{stroke:#33373d}.plot .frame{stroke:#999}.plot .quiet{stroke:#a8adb5}"
    ".plot .point{fill:#a8adb5}}</style>"
)


@dataclass(frozen=True)
class Axis:
    """One direction of a plot.

    Args:
        name: what it measures.
        figure: a value with its unit.
        least, most: its ends.
        powers: equal factors are equally long; else equal differences.
        unit: the named values are round multiples of it, such as a GiB; more than 1 for bytes.
    """

    name: str
    figure: Callable[[float], str]
    least: float
    most: float
    powers: bool = False
    unit: float = 1.0

    @staticmethod
    def over(
        name: str, figure: Callable[[float], str], values: Iterable[float], *, powers: bool = False, zero: bool = False, unit: float = 1.0
    ) -> Axis:  # fmt: skip
        """An axis that holds all values, and 0 with ``zero``, with a little room beyond."""
        found = [max(value, 1e-30) if powers else value for value in values] or [1.0]
        least, most = min(found), max(found)
        if powers:
            room = max(LEAST / (most / least), 1.0) ** 0.5 * 1.04
            return Axis(name, figure, least / room, most * room, True, unit)
        least = 0.0 if zero else least
        room = 0.04 * (most - least) or 0.04 * abs(most) or 1.0
        return Axis(name, figure, least - (0.0 if zero else room), most + room, unit=unit)

    def share(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        if self.powers:
            return math.log(max(value, 1e-30) / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)

    def ticks(self) -> list[float]:
        """Values to name along it: of an axis of powers 1, 2 and 5 of each power of ten, or powers of two of bytes; else up to 6 in even
        steps."""
        if self.powers:
            base, factors = (2.0, (1,)) if self.unit > 1 else (10.0, (1, 2, 5))
            powers = range(math.floor(math.log(self.least, base)), math.ceil(math.log(self.most, base)) + 1)
            every = [factor * base**power for power in powers for factor in factors]
            found = [value for value in every if self.least <= value <= self.most]
            inner = self.most / self.least
            return found[:: -(-len(found) // 6)] if len(found) > 1 else [self.least * inner**share for share in (0.1, 0.9)]
        span = (self.most - self.least) / self.unit
        power = 10.0 ** math.floor(math.log10(span / 5))
        step = self.unit * next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 5)
        first = math.ceil(self.least / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.most / step + 1e-9) + 1)]


@dataclass
class Plot:
    """What is drawn in one area, in the order in which it is added.

    Args:
        width, height: pixels of the whole, title and axes included.
    """

    title: str
    across: Axis
    up: Axis
    width: float
    height: float
    at: Sequence[float] | None = None
    """Values across that are named; None for round ones."""
    parts: list[str] = field(default_factory=list)
    key: list[tuple[str, str]] = field(default_factory=list)
    """Markup of a sign of 22 x 10 pixels, and its words."""
    named: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Boxes of names of marks: left, top, right, bottom in pixels."""

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        inner = self.width - LEFT - RIGHT, self.height - TOP - FOOT
        return LEFT + self.across.share(x) * inner[0], TOP + (1 - self.up.share(y)) * inner[1]

    def curve(self, points: Sequence[tuple[float, float]], number: int, words: str, *, steps: bool = False) -> None:
        """A line through the points with a dot on each, level between them with ``steps``."""
        colour, dash = CURVES[number % len(CURVES)], DASHES[number // len(CURVES) % len(DASHES)]
        stroke = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        if len(points) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in self._line(points, steps))
            self.parts.append(f'<polyline points="{line}" fill="none" {stroke}/>')
        for x, y in points:
            left, top = self.place(x, y)
            said = escape(f"{words}: {self.across.figure(x)}, {self.up.figure(y)}".removeprefix(": "))
            self.parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4" fill="{colour}"><title>{said}</title></circle>')
        if words:
            self.key.append((f'<path d="M0 5H22" fill="none" {stroke}/>', words))

    def guide(self, points: Sequence[tuple[float, float]], words: str, dash: str, *, steps: bool = False) -> None:
        """A thin dashed line without dots: a bound or an ideal."""
        if not points:
            return
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in self._line(points, steps))
        self.parts.append(f'<path d="{path}" class="quiet" stroke-width="1.5" stroke-dasharray="{dash}"/>')
        if words and words not in [said for _, said in self.key]:
            self.key.append((f'<path d="M0 5H22" class="quiet" stroke-width="1.5" stroke-dasharray="{dash}"/>', words))

    def mark(self, x: float, y: float, name: str, words: str = "", *, named: bool = True) -> None:
        """A square with its name: something to compare with."""
        left, top = self.place(x, y)
        said = escape(f"{name}: {self.across.figure(x)}, {self.up.figure(y)}")
        self.parts.append(f'<rect x="{left - 4:.1f}" y="{top - 4:.1f}" width="8" height="8" class="point"><title>{said}</title></rect>')
        box = self._free_box(left, top, name) if named else None
        if box is not None:
            self.named.append(box)
            self.parts.append(f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}" class="note">{escape(name)}</text>')
        if words and words not in [said for _, said in self.key]:
            self.key.append(('<rect x="7" y="1" width="8" height="8" class="point"/>', words))

    def _free_box(self, x: float, y: float, name: str) -> tuple[float, float, float, float] | None:
        """Where a name beside a mark covers no other; None where there is no room, and the mark's title and the tables have it."""
        wide, tall = LETTER * len(name), LINE - 2
        for left, middle in ((x + 8, y), (x - 8 - wide, y), (x - wide / 2, y - 14), (x - wide / 2, y + 14)):
            box = left, middle - tall / 2, left + wide, middle + tall / 2
            inside = box[0] > LEFT and box[2] < self.width - RIGHT and box[1] > TOP and box[3] < self.height - FOOT
            if inside and all(box[2] < one[0] or one[2] < box[0] or box[3] < one[1] or one[3] < box[1] for one in self.named):
                return box
        return None

    def _line(self, points: Sequence[tuple[float, float]], steps: bool) -> Iterator[tuple[float, float]]:
        before = None
        for x, y in points:
            if steps and before is not None:
                yield self.place(x, before)
            yield self.place(x, y)
            before = y

    @property
    def tall(self) -> float:
        """Pixels of the whole with its key."""
        return self.height + LINE * (len(self.key) + 0.5)

    def markup(self, top: float = 0.0) -> str:
        """The plot as a group, ``top`` pixels down."""
        right, bottom = self.width - RIGHT, self.height - FOOT
        found = [f'<text x="{LEFT}" y="18" font-weight="600">{escape(self.title)}</text>']
        for value in self.up.ticks():
            y = self.place(self.across.least, value)[1]
            found.append(f'<path d="M{LEFT} {y:.1f}H{right}" class="grid"/>')
            found.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="note">{escape(self.up.figure(value))}</text>')
        for value in self.at if self.at is not None else self.across.ticks():
            x = self.place(value, self.up.least)[0]
            said = escape(self.across.figure(value))
            found.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle" class="note">{said}</text>')
        middle = (TOP + bottom) / 2
        found.append(f'<text x="{(LEFT + right) / 2:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">{escape(self.across.name)}</text>')
        found.append(f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(self.up.name)}</text>')
        found.append(f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT:.1f}" height="{bottom - TOP:.1f}" class="frame"/>')
        for number, (sign, words) in enumerate(self.key):
            y = self.height + LINE * (number + 0.5)
            found.append(f'<g transform="translate({LEFT} {y - 9:.1f})">{sign}</g><text x="{LEFT + 30}" y="{y}">{escape(words)}</text>')
        return f'<g transform="translate(0 {top:.1f})">{"".join((*found, *self.parts))}</g>'


def svg(title: str, plots: Sequence[Plot]) -> str:
    """The plots one below another as one SVG; ``title`` is read out for it."""
    width = max(plot.width for plot in plots)
    parts, top = [], 0.0
    for plot in plots:
        parts.append(plot.markup(top))
        top += plot.tall + LINE / 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {width:.0f} {top:.0f}" role="img" aria-label="{escape(title)}">'
        f'{_STYLE}<rect width="100%" height="100%" class="paper"/>{"".join(parts)}</svg>\n'
    )
