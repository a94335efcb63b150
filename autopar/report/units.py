"""Seconds, bytes and counts as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Three digits and a unit.

    >>> seconds(0.41), seconds(4.1e-05), seconds(0.0)
    ('410 ms', '41 us', '0 s')
    """
    if value == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size:
            return f"{_digits(value / size)} {unit}"
    return f"{_digits(value / 1e-9)} ns"


def size(value: float) -> str:
    """Bytes with a binary unit.

    >>> size(512), size(70 * 2**30), size(1536)
    ('512 B', '70 GiB', '1.5 KiB')
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{_digits(value)} {unit}"


def binary_unit(value: float) -> int:
    """Bytes of the unit in which ``size`` gives a value.

    >>> binary_unit(70 * 2**30) == 2**30
    True
    """
    return next((1024**power for power in range(4) if value / 1024**power < 1000), 1024**4)


def shape(extents: tuple[int, ...]) -> str:
    """``14336x4096``; ``scalar`` without dims."""
    return "x".join(map(str, extents)) or "scalar"


def percent(value: float) -> str:
    """A share; what is too small to show is said to be.

    >>> percent(0.0), percent(0.00001), percent(0.123)
    ('0 %', '<0.01 %', '12.3 %')
    """
    if 0 < value < 1e-4:
        return "<0.01 %"
    return f"{_digits(100 * value)} %"


def _digits(value: float) -> str:
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return text if "e" not in text else f"{value:.2g}"
