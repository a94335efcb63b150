"""Two meshes that are one: their axes in another order, or under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.plan import Plan

_AXES = re.compile(r"(?<=[SP])\d+")


@dataclass(frozen=True)
class Axes:
    """How the second plan's axes are called in the first.

    Args:
        digits: of specs.
        names: of the mesh.
        words: what changed.
    """

    digits: Mapping[str, str]
    names: Mapping[str, str]
    words: str

    @property
    def trivial(self) -> bool:
        """Whether nothing changed."""
        return all(one == other for one, other in (*self.digits.items(), *self.names.items()))

    def spec(self, text: str) -> str:
        """A spec of the second plan in the digits of the first."""
        if not self.digits:
            return text
        return _AXES.sub(lambda match: "".join(self.digits[digit] for digit in match[0]), text)

    def name(self, axis: str) -> str:
        """An axis of the second plan, or a part of one (``tp:(2)4``), by its name in the first."""
        whole, colon, part = axis.partition(":")
        return self.names.get(whole, whole) + colon + part


def same_axes(first: Plan, second: Plan) -> Axes | None:
    """The axes of the second mesh as those of the first: equal names and sizes in any order, or other names for equal sizes in order; None
    where it is another mesh."""
    old, new = list(first.mesh.items()), list(second.mesh.items())
    if sorted(old) == sorted(new):
        order = [old.index(axis) for axis in new]
        words = f"{','.join(first.mesh)} stand as {','.join(second.mesh)}"
    elif [size for _, size in old] == [size for _, size in new]:
        order = list(range(len(old)))
        words = ", ".join(f"{one} is now {other}" for (one, _), (other, _) in zip(old, new, strict=True) if one != other)
    else:
        return None
    digits = {str(place): str(there) for place, there in enumerate(order)}
    return Axes(digits, {name: old[there][0] for (name, _), there in zip(new, order, strict=True)}, words)
