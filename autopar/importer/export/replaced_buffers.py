"""Buffers in whose place a forward puts other tensors: the module keeps its own, which become what was put there.

Buffers may become one another, and what the forward gives may be one's old value. So all is read before any of them changes.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor, dtype, nn

from autopar import torch_compat
from autopar.errors import CaptureError
from autopar.importer.diagnosis.errors import at_line
from autopar.importer.diagnosis.provenance import user_frame


@dataclass(frozen=True)
class Held:
    """A buffer, or a plain tensor attribute, as a module holds it before the forward.

    Args:
        path: the model's own.
    """

    path: str
    part: nn.Module
    name: str
    value: Tensor

    def replacement(self) -> Tensor | None:
        """What was put in its place."""
        new = self.part._buffers.get(self.name)
        return None if new is self.value else new

    def check(self, new: Tensor, computed: dtype | None) -> None:
        """Raises CaptureError: another size or dtype; the line that makes the new value is named. Floats in the dtype that is computed in
        are converted.

        Args:
            computed: that dtype, where the plan has another one than the model.
        """
        if new.shape != self.value.shape:
            kind, was, becomes = "size", str([*self.value.shape]), str([*new.shape])
            hint = "run the model on these inputs once before planning if the buffer then keeps its size; or register it in its last size"
        elif new.dtype != self.value.dtype and not (new.dtype == computed and self.value.is_floating_point()):
            kind, (was, becomes) = "dtype", [str(tensor.dtype).removeprefix("torch.") for tensor in (self.value, new)]
            hint = f"convert what is put there, value.to(self.{self.name}.dtype); or register the buffer in the dtype that it gets"
        else:
            return
        made = torch_compat.traced_as(new)
        message = f"the forward gives the buffer {self.path} another {kind}: {was} becomes {becomes}"
        raise CaptureError(at_line(message, None if made is None else user_frame(made)), hint)


def held_by(program: nn.Module) -> list[Held]:
    """Args: ``program``: which holds the model as ``model``."""
    return [
        Held(f"{path}.{name}".removeprefix("model."), part, name, value)
        for path, part in program.named_modules() for name, value in part._buffers.items() if value is not None
    ]  # fmt: skip


def change(held: list[Held], attributes: Container[str], result: Any, computed: dtype | None) -> tuple[Any, set[str]]:
    """Changes the buffers that the forward replaced, and puts them back.

    Args:
        attributes: paths of plain tensor attributes. A replacement of one belongs to this call.
        result: of the forward.
        computed: see ``Held.check``.

    Returns:
        The result as it was before the changes, and the attributes that were replaced.

    Raises:
        CaptureError: a buffer that would become one of another size or dtype.
    """
    found = [(item, new) for item in held if (new := item.replacement()) is not None]
    changing = [(item, new) for item, new in found if item.path not in attributes]
    for item, new in changing:
        item.check(new, computed)
    written = [item.value for item, _ in changing]

    def kept(tensor: Tensor) -> Tensor:
        return tensor.clone() if any(torch_compat.shares_memory(tensor, other) for other in written) else tensor

    result = torch_compat.map_tensors(kept, result)
    for item, new in [(item, kept(new)) for item, new in changing]:
        item.value.copy_(new)
    for item, _ in found:
        item.part._buffers[item.name] = item.value
    return result, {item.path for item, _ in found if item.path in attributes}
